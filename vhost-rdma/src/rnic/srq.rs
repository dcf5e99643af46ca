//! Shared receive queues: a host SRQ each, fed from the guest's ring.
//!
//! The hardware takes receives for any of its QPs, so they complete in any order. The guest is told by count how many are
//! used up (docs/virtio-rdma.md §7.2); the slots of its ring are free earlier than that, since each was copied when it was posted.

use slab::Slab;
use virtio_rdma_abi::{ctrl, event};

use super::cq::{Queue, Tag};
use super::nic::Nic;
use super::receiver::{BURST, push};
use super::verbs::HostSrq;
use crate::engine::control_offset;
use crate::engine::receive::{Receive, ReceiveRing};

/// A shared receive queue.
#[derive(Debug)]
pub(super) struct Srq {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) max_wr: u32,
    pub(super) limit: u32,
    pub(super) ring: ReceiveRing,
    pub(super) doorbell: u32,
    /// QPs that receive from here.
    pub(super) users: u32,
    pub(super) host: HostSrq,
    pub(super) serial: u32,
    /// Entries of the host CQ that it may fill.
    pub(super) cost: u32,
    /// Receives with the hardware: the guest's `wr_id` and index each.
    held: Slab<(u64, u32)>,
    /// Receives used up, free-running.
    used: u32,
    control: u64,
    pub(super) dead: bool,
}

/// What a new one is made of.
pub(super) struct SrqParts {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) max_wr: u32,
    pub(super) limit: u32,
    pub(super) ring: ReceiveRing,
    pub(super) ring_bytes: u64,
    pub(super) host: HostSrq,
}

impl Srq {
    pub(super) fn new(parts: SrqParts, doorbell: u32, serial: u32) -> Self {
        Self {
            ctx: parts.ctx,
            pdn: parts.pdn,
            max_wr: parts.max_wr,
            limit: parts.limit,
            ring: parts.ring,
            doorbell,
            users: 0,
            host: parts.host,
            serial,
            cost: parts.max_wr,
            held: Slab::new(),
            used: 0,
            control: control_offset(parts.ring_bytes),
            dead: false,
        }
    }

    /// A receive was used up: the guest's `wr_id` and index of it. `None` if the hardware does not have it.
    pub(super) fn complete(&mut self, slot: u32) -> Option<(u64, u32)> {
        let held = self.held.try_remove(slot as usize)?;
        self.used = self.used.wrapping_add(1);
        self.ring.ring().store_u32(self.control + ctrl::TAKEN as u64, self.used);
        Some(held)
    }
}

impl Nic {
    /// Posts the receives that the guest has posted, as many as the host SRQ takes.
    pub(super) fn post_shared(&mut self, srqn: u32) {
        // Bounded by the depth of the queue.
        while self.post_shared_burst(srqn) {}
    }

    /// Posts one burst; true if there are more, and room for them.
    fn post_shared_burst(&mut self, srqn: u32) -> bool {
        let Some(srq) = self.srqs.get_mut(srqn as usize).filter(|srq| !srq.dead) else {
            return false;
        };
        self.receives.clear();
        let mut taken = Receive::default();
        let room = srq.max_wr.saturating_sub(u32::try_from(srq.held.len()).unwrap_or(u32::MAX));
        for _ in 0..room.min(BURST) {
            if !srq.ring.take(&mut taken) {
                break;
            }
            let slot =
                u32::try_from(srq.held.insert((taken.wr_id, taken.index))).unwrap_or(u32::MAX);
            let tag = Tag { queue: Queue::Shared, serial: srq.serial, index: slot };
            push(&mut self.receives, &taken, tag.to_wr_id());
        }
        let more = srq.ring.waiting() > 0 && room > BURST;
        if !self.receives.wrs.is_empty()
            && let Err(refused) = self.host.post_srq(srq.host, &self.receives)
        {
            tracing::debug!(srqn, %refused.error, refused.posted, "the RNIC refuses a receive");
            self.srq_failed(srqn);
            return false;
        }
        more
    }

    /// An SRQ cannot go on.
    pub(super) fn srq_failed(&mut self, srqn: u32) {
        let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
        if !std::mem::replace(&mut srq.dead, true) {
            let ctx = srq.ctx;
            self.raise(event::SRQ_ERR, srqn, ctx);
        }
    }
}
