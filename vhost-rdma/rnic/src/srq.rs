//! Shared receive queues: a host SRQ each, fed from the guest's ring.
//!
//! The hardware takes receives for any of its QPs, so they complete in any order. The guest is told
//! by count how many are used up (docs/virtio-rdma.md §7.2); the slots of its ring are free earlier
//! than that, since each was copied when it was posted.
//!
//! A resize is the guest's ring's alone, since many RNICs cannot resize an SRQ (mlx5: srq.c,
//! mlx5_ib_modify_srq). The hardware goes on getting as many receives at a time as the SRQ was made
//! for; in a larger queue the rest waits in guest memory. The limit of such a queue is watched
//! here, because the hardware sees only its own part.

use easy_ext::ext;
use vhost_rdma_engine::nic::Status;
use vhost_rdma_engine::nic::budget::cost;
use vhost_rdma_engine::nic::receive::Receive;
use virtio_rdma_abi::event;

use super::nic::{Nic, Srq};
use super::receiver::Receiver as _;
use super::receives::{BURST, push};
use super::refusal::Control as _;
use super::work::HOST_CALL;
use super::wr_id::{Queue, Tag};

#[ext(SharedReceives)]
pub(super) impl Srq {
    /// Receives that the guest has posted, and nothing has used up.
    fn posted_in_all(&self) -> u32 {
        let held = u32::try_from(self.own.held.len()).unwrap_or(u32::MAX);
        self.ring.waiting().saturating_add(held)
    }

    /// A receive was used up: the guest's `wr_id` and index of it. `None` if the hardware does not
    /// have it.
    fn complete(&mut self, slot: u32) -> Option<(u64, u32)> {
        let held = self.own.held.try_remove(slot as usize)?;
        self.own.used = self.own.used.wrapping_add(1);
        self.tell_used(self.own.used);
        Some(held)
    }
}

#[ext(SrqVerbs)]
pub(super) impl Nic {
    /// An SRQ has receives for the hardware.
    fn schedule_shared(&mut self, srqn: u32) {
        if let Some(srq) = self.srqs.get_mut(srqn as usize)
            && !std::mem::replace(&mut srq.own.scheduled, true)
        {
            self.backing.run_srqs.push_back(srqn);
        }
    }

    /// Its turn: posts some of the receives that the guest has posted, as many as the host SRQ
    /// takes.
    fn post_shared(&mut self, srqn: u32) {
        if let Some(srq) = self.srqs.get_mut(srqn as usize) {
            srq.own.scheduled = false;
        }
        // A burst in each turn: what is left comes in the next.
        if self.post_shared_burst(srqn) {
            self.schedule_shared(srqn);
        }
    }

    /// The guest has rung: the first of them go at once, if there is time for it.
    fn post_shared_at_once(&mut self, srqn: u32) {
        if !self.at_once(|nic| nic.post_shared_burst(srqn)) {
            self.schedule_shared(srqn);
        }
    }

    /// Posts one burst; true if there are more, and room for them.
    fn post_shared_burst(&mut self, srqn: u32) -> bool {
        let Some(srq) = self.srqs.get_mut(srqn as usize).filter(|srq| !srq.dead) else {
            return false;
        };
        self.backing.receives.clear();
        let mut taken = Receive::default();
        let most = srq.max_wr.min(srq.own.cost);
        let room = most.saturating_sub(u32::try_from(srq.own.held.len()).unwrap_or(u32::MAX));
        for _ in 0..room.min(BURST) {
            if !srq.ring.take(&mut taken) {
                break;
            }
            let slot =
                u32::try_from(srq.own.held.insert((taken.wr_id, taken.index))).unwrap_or(u32::MAX);
            let tag = Tag { queue: Queue::Shared, serial: srq.own.serial, index: slot };
            push(&mut self.backing.receives, &taken, tag.to_wr_id());
        }
        if !self.backing.receives.wrs.is_empty() {
            self.meter.charge_each(cost::REQUEST, self.backing.receives.wrs.len());
            self.meter.charge(HOST_CALL);
        }
        let more = srq.ring.waiting() > 0 && room > BURST;
        if !self.backing.receives.wrs.is_empty()
            && let Err(refused) = self.backing.host.post_srq(srq.own.host, &self.backing.receives)
        {
            tracing::debug!(srqn, %refused.error, refused.posted, "the RNIC refuses a receive");
            self.srq_failed(srqn);
            return false;
        }
        more
    }

    /// Arms the limit: in the hardware, as long as that has all the receives.
    fn set_limit(&mut self, srqn: u32, limit: u32, again: bool) -> Result<(), Status> {
        let srq = self.srqs.get(srqn as usize).ok_or(Status::NOENT)?;
        let (host, watched) = (srq.own.host, srq.own.watched);
        let watch = watched || srq.max_wr > srq.own.cost;
        let told = if watch { 0 } else { limit };
        if watch != watched || (!watch && (again || limit != srq.limit)) {
            self.backing.host.arm_srq(host, told).map_err(|error| self.refused(error))?;
        }
        if let Some(srq) = self.srqs.get_mut(srqn as usize) {
            (srq.own.watched, srq.limit) = (watch, limit);
        }
        Ok(())
    }

    /// A receive of an SRQ was used up: whether that crossed a limit which the hardware does not
    /// watch.
    fn look_at_limit(&mut self, srqn: u32) {
        let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
        if srq.own.watched && srq.posted_in_all() < srq.limit {
            srq.limit = 0;
            let ctx = srq.ctx;
            self.raise(event::SRQ_LIMIT_REACHED, srqn, ctx);
        }
    }
}
