//! Rings that move: CQ_RESIZE and SRQ_MODIFY with another ring.
//!
//! A guest chooses how much waits in a ring, so it moves in steps (`dispatch`).

use virtio_rdma_abi::{self as abi, srq_mask};

use super::budget::{Budget, cost};
use super::cq::Succession;
use super::nic::{Nic, Provider};
use super::receive::Moving;
use super::verb::CqResize;
use super::work::{Begun, CommonWork, Work};
use super::{DeferredDrop, Reply, Status};
use crate::memory::Ring;

impl<P: Provider> Nic<P> {
    /// Begins to move a CQ, of which everything is known that counts.
    pub fn begin_resize_cq(&mut self, resize: CqResize) -> Result<Work<P>, Status> {
        let CqResize { cqn, entries, requested, ring } = resize;
        let cq = self.cqs.get_mut(cqn as usize).ok_or(Status::NOENT)?;
        let to = cq.succeed(entries, requested, ring)?;
        Ok(Work::Common(CommonWork::ResizeCq(cqn, to)))
    }

    /// SRQ_MODIFY: another limit, or another ring first.
    pub(crate) fn modify_srq(
        &mut self,
        ctx: u32,
        req: &abi::SrqModifyReq,
        ring: Option<Ring>,
    ) -> Result<Begun<P>, Status> {
        let mask = req.mask.get();
        let present = self.owned_srq(ctx, req.srqn.get())?.max_wr;
        let resize = mask & srq_mask::MAX_WR != 0;
        let max_wr = if resize { req.max_wr.get() } else { present };
        let known = mask != 0 && mask & !(srq_mask::MAX_WR | srq_mask::LIMIT) == 0;
        if !known || (mask & srq_mask::LIMIT != 0 && req.limit.get() > max_wr) {
            return Err(Status::INVAL);
        }
        if resize {
            let to = self.begin_resize_srq(req, ring.ok_or(Status::INVAL)?)?;
            let work = CommonWork::ResizeSrq(Box::new(*req), to);
            return Ok(Begun::Steps(Work::Common(work)));
        }
        self.change_limit(req)?;
        Ok(Begun::Done(Reply::Done))
    }

    fn begin_resize_srq(&mut self, req: &abi::SrqModifyReq, ring: Ring) -> Result<Moving, Status> {
        let (srqn, entries, max_wr) = (req.srqn.get(), req.entries.get(), req.max_wr.get());
        let fits = entries.is_power_of_two()
            && entries <= self.backing.bounds().max_wr
            && (1..=entries).contains(&max_wr);
        if !fits {
            return Err(Status::INVAL);
        }
        // What was posted moves with the ring, also what no round has seen yet; what is used up
        // does not count.
        self.look_at_srq(srqn)?;
        P::catch_up(self);
        let srq = self.srqs.get(srqn as usize).ok_or(Status::NOENT)?;
        if P::srq_posted(srq) > max_wr {
            return Err(Status::INVAL);
        }
        srq.ring.succeed(entries, max_wr, ring)
    }

    /// Takes in what the guest has posted to an SRQ.
    fn look_at_srq(&mut self, srqn: u32) -> Result<(), Status> {
        let srq = self.srqs.get(srqn as usize).ok_or(Status::NOENT)?;
        if let Some(post) = self.contexts.look_at(srq.ctx, srq.doorbell) {
            self.posted(post);
        }
        Ok(())
    }

    /// Sets the limit that a request asks for, or what the present one is in a smaller queue.
    fn change_limit(&mut self, req: &abi::SrqModifyReq) -> Result<(), Status> {
        let srq = self.srqs.get(req.srqn.get() as usize).ok_or(Status::NOENT)?;
        let asked = req.mask.get() & srq_mask::LIMIT != 0;
        let limit = if asked { req.limit.get() } else { srq.limit.min(srq.max_wr) };
        P::set_limit(self, req.srqn.get(), limit, asked)
    }

    /// An SRQ goes over to the other ring, which has everything.
    pub(crate) fn take_over_srq(
        &mut self,
        req: &abi::SrqModifyReq,
        to: Moving,
    ) -> Result<(), Status> {
        let (srqn, max_wr) = (req.srqn.get(), req.max_wr.get());
        let srq = self.srqs.get_mut(srqn as usize).ok_or(Status::NOENT)?;
        if P::srq_posted(srq) > max_wr {
            return Err(Status::INVAL);
        }
        let used = P::srq_used(srq);
        let old = srq.take_over(max_wr, to, used)?;
        self.deferred_drops.push(DeferredDrop::new(old));
        P::srq_moved(self, srqn);
        self.change_limit(req)
    }

    /// Copies entries to the other ring; true: it has everything.
    pub(crate) fn carry_cq(
        &self,
        cqn: u32,
        to: &mut Succession,
        budget: &mut Budget,
    ) -> Result<bool, Status> {
        let cq = self.cqs.get(cqn as usize).ok_or(Status::NOENT)?;
        while cq.carry(to) {
            self.meter.charge(cost::ENTRY);
            if budget.is_over(&self.meter) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Goes over to the other ring.
    pub(crate) fn take_over_cq(&mut self, cqn: u32, to: Succession) -> Result<(), Status> {
        let cq = self.cqs.get_mut(cqn as usize).ok_or(Status::NOENT)?;
        let old = cq.take_over(to)?;
        self.deferred_drops.push(DeferredDrop::new(old));
        self.look_at(cqn);
        Ok(())
    }

    /// Copies receives to the other ring; true: it has everything.
    pub(crate) fn carry_srq(
        &mut self,
        srqn: u32,
        to: &mut Moving,
        budget: &mut Budget,
    ) -> Result<bool, Status> {
        self.look_at_srq(srqn)?;
        let srq = self.srqs.get(srqn as usize).ok_or(Status::NOENT)?;
        while let Some(len) = srq.ring.carry(to) {
            self.meter.charge(cost::ENTRY + cost::bytes(2 * len));
            if budget.is_over(&self.meter) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
