//! What is kept of the host's part of a shared receive queue.

use slab::Slab;

use super::verbs::HostSrq;

/// See the module.
#[derive(Debug)]
pub struct Held {
    pub(super) host: HostSrq,
    pub(super) serial: u32,
    /// Entries of the host CQ that it may fill: receives that the hardware takes.
    pub(super) cost: u32,
    /// Its limit is watched here.
    pub(super) watched: bool,
    /// Receives with the hardware: the guest's `wr_id` and index each.
    pub(super) held: Slab<(u64, u32)>,
    /// Receives used up, free-running.
    pub(super) used: u32,
    /// It waits for its turn.
    pub(super) scheduled: bool,
}

impl Held {
    pub(super) fn new(host: HostSrq, serial: u32, cost: u32) -> Self {
        Self { host, serial, cost, watched: false, held: Slab::new(), used: 0, scheduled: false }
    }
}
