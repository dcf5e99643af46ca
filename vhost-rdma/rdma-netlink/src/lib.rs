//! RDMA devices, network interfaces and virtual functions, as the kernel shows them by netlink and
//! sysfs.
//!
//! Three parts, each usable alone:
//!
//! - [`rdma`]: the `NETLINK_RDMA` protocol (NLDEV), what iproute2's `rdma` tool speaks: devices,
//!   ports, namespaces, resources, counters, events.
//! - [`link`]: the part of rtnetlink that goes with it: interfaces with their virtual functions,
//!   addresses, routes, namespaces.
//! - [`sriov`]: an inventory of SR-IOV functions built on both and on sysfs, and journaled changes
//!   of it.
//!
//! Everything is synchronous: a netlink request is answered within the system call that sends it,
//! so a future would never wait. There is one request in flight on a socket, hence `&mut self`.
//! Namespaces are handles ([`Netns`]): a socket belongs to the namespace in which it was *opened*,
//! so each client has an `open_in`, and nothing here ever moves the calling thread.
//!
//! Layers: codecs that do no I/O (`transport::frame`, `transport::attr`, the messages of [`rdma`]),
//! one socket type under both protocols, typed clients on top. Input from the kernel is decoded
//! totally: what is unknown is skipped, what is malformed is an [`Error`], nothing panics.

pub mod link;
pub mod rdma;
pub mod sriov;

mod addr;
mod error;
mod netns;
mod transport;

pub use addr::{Guid, HardwareAddress, IpPrefix};
pub use error::{Error, Result};
pub use netns::Netns;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
