//! Queue pairs that have ended as far as the guest is concerned, and not yet in the hardware.

use std::collections::VecDeque;

use vhost_rdma_engine::nic::roster::Walk;

/// QPs that are in ERR as far as the guest is concerned, and that the hardware has still to be told
/// about.
#[derive(Debug, Default)]
pub(super) struct Stopping {
    /// QPNs and serials.
    pub(super) waiting: VecDeque<(u32, u32)>,
    /// QPs that have not been looked at since the NIC stands still.
    pub(super) all: Walk,
    /// QPs that were stopped by a pause: their guest is told when it goes on.
    pub(super) paused: Vec<(u32, u32)>,
    /// Of these the guest is being told.
    pub(super) tell: Vec<(u32, u32)>,
    /// The guest of a NIC that failed is told when its hardware stands still.
    pub(super) fatal: bool,
}

impl Stopping {
    /// Whether the hardware may still be at work for a QP that is in ERR.
    pub(super) fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.all.is_over()
    }

    /// Whether a guest that goes on has been told of all QPs that ended.
    pub(super) fn has_told_all(&self) -> bool {
        self.tell.is_empty()
    }
}
