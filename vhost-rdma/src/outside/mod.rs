//! The process of what all NICs on RNICs of a host share: who has which address, the channel to
//! other daemons, and the host's connection manager.
//!
//! Here is read what guests, other daemons and third-party hosts say to set up connections. So it
//! is no part of the supervisor, which reads nothing of a guest's. It is this same program,
//! executed anew with one socket pair as its standard input, and shut in: it opens RDMA devices and
//! speaks TCP, and has no file of the host's but those that name resolution takes.
//!
//! ```text
//!  supervisor ── Order: NICs, peers, certificates ──> serve ── Outside: Directory, channel, bridge
//!                                                       │
//!  network process <── Told, Host: a socket each ──> Branch
//! ```
//!
//! A network's process speaks to it directly. When this process dies the supervisor starts another,
//! tells it what the operator has decided, and gives each network's process a new socket, by which
//! that one tells again what it has. Connections that are up need none of this and go on.
//!
//! `protocol` is what the supervisor says, `serve` the process, `branch` what one network's process
//! may do. The supervisor's end is in [`crate::supervisor`].

#![forbid(unsafe_code)]

mod branch;
mod message_quota;
mod protocol;
mod serve;

pub use protocol::{Order, Said, Start, VERSION};
pub use serve::serve;
