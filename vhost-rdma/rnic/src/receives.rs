//! A receive queue on an RNIC: the guest's ring, and what of it the hardware holds.

use vhost_rdma_engine::nic::parts::ReceiveSide;
use vhost_rdma_engine::nic::receive::{Receive, ReceiveRing};

use super::verbs::{HostSge, RecvBurst, RecvWr};

/// Work requests of one burst.
pub(super) const BURST: u32 = 32;

/// A receive queue: the guest's ring, and what of it the hardware holds.
#[derive(Debug)]
pub struct Receives {
    pub(super) ring: ReceiveRing,
    pub(super) depth: u32,
    /// By index, modulo their number: as many as the hardware may have, whatever the guest's ring
    /// has room for.
    pub(super) wr_ids: Box<[u64]>,
    pub(super) posted: u32,
    pub(super) done: u32,
}

impl Receives {
    pub(super) const fn in_flight(&self) -> u32 {
        self.posted.wrapping_sub(self.done)
    }

    /// The next receive that the hardware never saw: refused by it, or still in the ring.
    pub(super) fn take_unseen(&mut self, into: &mut Receive) -> Option<(u64, u32)> {
        let index = self.posted;
        let wr_id = if index == self.ring.taken() {
            self.ring.take(into).then_some(into.wr_id)?
        } else {
            *self.wr_ids.get(index as usize & (self.wr_ids.len() - 1))?
        };
        self.posted = index.wrapping_add(1);
        self.done = self.posted;
        Some((wr_id, index))
    }

    pub(super) const fn has_unseen(&self) -> bool {
        self.posted != self.ring.taken() || self.ring.waiting() > 0
    }

    /// The receive at `index` is done; a receive queue completes in order. `None` if it is not with
    /// the hardware.
    pub(super) fn complete(&mut self, index: u32) -> Option<u64> {
        if index.wrapping_sub(self.done) >= self.in_flight() {
            return None;
        }
        self.done = index.wrapping_add(1);
        self.wr_ids.get(index as usize & (self.wr_ids.len() - 1)).copied()
    }
}

impl ReceiveSide for Receives {
    fn new(ring: ReceiveRing, max_wr: u32) -> Self {
        let wr_ids = vec![0; (max_wr as usize).next_power_of_two()].into();
        Self { ring, depth: max_wr, wr_ids, posted: 0, done: 0 }
    }

    fn ring(&self) -> &ReceiveRing {
        &self.ring
    }

    fn ring_mut(&mut self) -> &mut ReceiveRing {
        &mut self.ring
    }

    fn reset(&mut self) {
        self.ring.reset();
        self.posted = 0;
        self.done = 0;
    }
}

/// Appends a receive to a burst; one that names too many elements goes with one that no key opens,
/// and fails as the hardware fails that.
pub(super) fn push(burst: &mut RecvBurst, receive: &Receive, wr_id: u64) {
    let first = u32::try_from(burst.sges.len()).unwrap_or(u32::MAX);
    if receive.malformed {
        burst.sges.push(HostSge { addr: !0xfff, length: 0x1000, lkey: 0 });
    } else {
        burst.sges.extend(receive.sges.iter().map(|sge| HostSge {
            addr: sge.addr.get(),
            length: sge.length.get(),
            lkey: sge.lkey.get(),
        }));
    }
    let count = u32::try_from(burst.sges.len()).unwrap_or(u32::MAX) - first;
    burst.wrs.push(RecvWr { wr_id, first, count });
}
