//! The engine: what a guest sees of a NIC, and the work that it asks for.
//!
//! ```text
//!  shard ──> soft ──> nic ──> memory
//!              └────> link
//! ```
//!
//! [`nic`] is the same on every backing: contexts, rings, CQs, events, limits, the states of a QP.
//! [`soft`] carries verbs out in software. [`link`] brings a request to its peer, [`shard`] says
//! whose turn it is, [`cm`] reads and writes what connection managers say, and [`qpn`] lends
//! numbers that nobody else on the host has. Backings of another kind, the RNIC's, are crates of
//! their own over [`nic`].
//!
//! Nothing here has a thread, a socket, a file or a clock. Time and randomness are arguments, what
//! happens leaves through a port, and guest memory is reached through the crate `memory`, which
//! alone may be unsafe. So one test drives all of it in a loop, and gets the same answer each time.

#![forbid(unsafe_code)]

pub mod cm;
pub mod link;
pub mod nic;
pub mod qpn;
pub mod shard;
pub mod soft;

use vhost_rdma_memory::{self as memory, ordering};

/// Nanoseconds of a monotonic clock.
pub type Nanos = u64;
