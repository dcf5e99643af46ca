//! What a guest sees of a NIC, whatever carries it.
//!
//! A guest's side of a NIC is the same on every backing: contexts and their doorbell pages, rings,
//! CQs, events and who waits for them, numbers that rest, limits and what is kept, the state table
//! of QPs and the shapes of commands. It is written here once. What a backing does with a work
//! request, a key or an address is its own (`soft`, `rnic`), and nothing here knows of it.
//!
//! ```text
//!  soft ──┐
//!         ├──> nic ──> memory, ordering
//!  rnic ──┘
//! ```
//!
//! Nothing here has a thread, a clock or a socket. Time and randomness are arguments, events leave
//! through a [`Port`], and guest memory is reached through `crate::memory`, already resolved.

#![forbid(unsafe_code)]

pub mod budget;
mod change;
pub(crate) mod chores;
pub mod chunks;
mod command;
pub mod contexts;
pub mod cq;
mod create;
pub mod dispatch;
pub mod doorbell;
pub(crate) mod ending;
pub(crate) mod follow;
pub mod grh;
pub(crate) mod holdings;
pub mod limits;
#[cfg(test)]
mod models;
mod moderation;
#[allow(clippy::module_inception, reason = "one concern per file: this one is the NIC")]
mod nic;
pub mod objects;
pub mod on_shard;
pub(crate) mod outbox;
mod owned;
pub mod owned_numbers;
pub mod parts;
mod pending;
mod port;
mod posts;
pub mod qp;
pub mod quota;
pub mod receive;
pub(crate) mod recent;
mod resize;
pub mod roster;
pub mod saved;
pub mod shape;
pub mod shards;
pub mod standalone;
pub mod table;
pub mod timer;
pub mod verb;
pub mod work;

use std::fmt;

pub use command::{BlockingJob, Command, HeldBack, Reply, Status, Step};
pub use cq::control_offset;
pub use limits::{Counters, Limits, Objects};
pub(crate) use nic::KERNEL;
pub use nic::{Nic, NicState, Provider, STEP};
pub use parts::Parts;
pub(crate) use port::Nowhere;
pub use port::{Job, JobKind, MEMORY_LOST, Port};

use crate::link::Gid;

pub use crate::Nanos;

/// What an operator gives a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicSettings {
    /// By which the host knows it; no other NIC has it, in whatever process.
    pub number: u32,
    /// The network. NICs of different networks never find each other.
    pub vni: u32,
    /// The MAC address of the NIC and of its companion network interface.
    pub mac: [u8; 6],
    /// Addresses that the guest may use; none: any that no other NIC of the network holds.
    pub gids: Vec<Gid>,
    /// Completion vectors of the device.
    pub comp_vectors: u32,
    /// Kick queues of the device.
    pub kick_queues: u32,
    /// Limits.
    pub limits: Limits,
}

/// What is seen of a NIC from outside.
#[derive(Clone, Debug)]
pub struct NicSnapshot {
    /// A driver has sent INIT, and its control queue runs.
    pub ready: bool,
    /// The NIC failed and waits for a reset.
    pub failed: bool,
    /// What happened.
    pub counters: Counters,
    /// What exists; nothing while the control queue is stopped. Whether that is a pause or a reset
    /// is known when it runs again.
    pub objects: Objects,
    /// Addresses in the port's table.
    pub gids: Vec<Gid>,
}

/// What nobody uses any more, and what takes its time to end.
#[derive(Debug)]
pub struct DeferredDrop {
    _parts: Box<dyn fmt::Debug + Send>,
}

impl DeferredDrop {
    /// What is dropped with this.
    pub fn new(parts: impl fmt::Debug + Send + 'static) -> Self {
        Self { _parts: Box::new(parts) }
    }
}
