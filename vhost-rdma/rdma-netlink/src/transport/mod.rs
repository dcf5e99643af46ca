//! Netlink below the two protocols: framing, attributes, one exchange on a socket.

pub(crate) mod attr;
pub(crate) mod frame;
pub(crate) mod socket;
