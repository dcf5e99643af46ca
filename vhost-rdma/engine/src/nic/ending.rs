//! The end of objects: one by one, with their context, or all at once.
//!
//! Users go before what they use. A context has as many objects as its guest likes, so its end goes
//! in steps (`dispatch`); a NIC that is reset gives everything away in one piece, for a thread that
//! has the time.

use virtio_rdma_abi as abi;

use super::budget::{Budget, cost};
use super::contexts::KERNEL;
use super::holdings::Holding;
use super::nic::{Nic, Provider};
use super::timer::Waiting;
use super::work::{Begun, CommonWork, End, Work};
use super::{DeferredDrop, Nowhere, Reply, Status};

impl<P: Provider> Nic<P> {
    /// Forgets every object and every guest address; what is returned holds the objects. Who is
    /// told of events, and what was counted, stays.
    pub fn clear(&mut self) -> Self {
        let backing = self.backing.succeed(self.life);
        let (settings, meter) = (self.settings.clone(), self.meter.clone());
        let fresh = Self::idle(backing, settings, Box::new(Nowhere), meter);
        let mut old = std::mem::replace(self, fresh);
        self.outbox = old.outbox.succeed();
        self.counters = old.counters;
        self.now = old.now;
        old
    }

    /// CONTEXT_DESTROY begins.
    pub(crate) fn begin_end(&mut self, ctx: u32) -> Result<Begun<P>, Status> {
        if ctx == KERNEL {
            return Err(Status::INVAL);
        }
        if !self.contexts.contains(ctx) {
            return Err(Status::NOENT);
        }
        let end = End { ctx, own: P::begin_end(self), closing: None };
        Ok(Begun::Steps(Work::Common(CommonWork::EndContext(Box::new(end)))))
    }

    /// Ends some of what a context has; true: that was all.
    pub(crate) fn end_some(&mut self, end: &mut End<P>, budget: &mut Budget) -> bool {
        let done = P::end_before_qps(self, end.ctx, &mut end.own, budget)
            && self.end_qps(end, budget)
            && P::end_after_qps(self, &mut end.own, budget)
            && self.end_others(end, budget);
        if done {
            self.backing.context_gone(end.ctx);
            self.contexts.remove(end.ctx);
        }
        done
    }

    /// What is left is found by its context alone ([`super::holdings`]): no other's is looked at.
    fn end_qps(&mut self, end: &mut End<P>, budget: &mut Budget) -> bool {
        let ctx = end.ctx;
        while let Some(qpn) =
            end.closing.take().or_else(|| self.contexts.first_of(ctx, Holding::Qp))
        {
            self.meter.charge(cost::VISIT);
            if !P::end_before_qp(self, qpn, &mut end.own, budget) {
                end.closing = Some(qpn);
                return false;
            }
            self.remove_qp(qpn);
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        true
    }

    fn end_others(&mut self, end: &mut End<P>, budget: &mut Budget) -> bool {
        let ctx = end.ctx;
        while let Some(srqn) = self.next_to_end(ctx, Holding::Srq, budget) {
            self.remove_srq(srqn);
        }
        while let Some(ah) = self.next_to_end(ctx, Holding::Ah, budget) {
            self.remove_ah(ah);
        }
        while !budget.is_over(&self.meter)
            && let Some(number) = self.backing.keys().first_of(ctx)
        {
            self.meter.charge(cost::VISIT);
            P::end_key(self, number, ctx);
            if self.backing.keys().first_of(ctx) == Some(number) {
                break;
            }
        }
        while let Some(pdn) = self.next_to_end(ctx, Holding::Pd, budget) {
            self.remove_pd(pdn);
        }
        while let Some(cqn) = self.next_to_end(ctx, Holding::Cq, budget) {
            self.remove_cq(cqn);
        }
        !budget.is_over(&self.meter)
    }

    /// One of a context's objects; `None` also when the budget is over.
    fn next_to_end(&self, ctx: u32, kind: Holding, budget: &mut Budget) -> Option<u32> {
        if budget.is_over(&self.meter) {
            return None;
        }
        let number = self.contexts.first_of(ctx, kind)?;
        self.meter.charge(cost::VISIT);
        Some(number)
    }

    /// Removes a QP. Nothing of the provider's own hangs on it any more.
    pub fn remove_qp(&mut self, qpn: u32) {
        P::leave_groups(self, qpn);
        let Some(qp) = self.unlink_qp(qpn) else { return };
        self.meter.charge(P::END);
        self.timers.remove(Waiting::Send(qpn));
        P::end_qp(self, &qp);
        self.deferred_drops.push(DeferredDrop::new(qp));
    }

    pub(crate) fn destroy_srq(&mut self, ctx: u32, srqn: u32) -> Result<Reply, Status> {
        if self.owned_srq(ctx, srqn)?.users > 0 {
            return Err(Status::BUSY);
        }
        self.remove_srq(srqn);
        Ok(Reply::Done)
    }

    fn remove_srq(&mut self, srqn: u32) {
        let Some(srq) = self.unlink_srq(srqn) else { return };
        self.meter.charge(P::END);
        P::end_srq(self, &srq.own);
        self.deferred_drops.push(DeferredDrop::new(srq));
    }

    pub(crate) fn destroy_ah(&mut self, ctx: u32, number: u32) -> Result<Reply, Status> {
        self.owned_ah(ctx, number)?;
        self.remove_ah(number);
        Ok(Reply::Done)
    }

    fn remove_ah(&mut self, number: u32) {
        self.contexts.leave(&mut self.ahs, number);
        let Some(ah) = self.ahs.try_remove(number as usize) else { return };
        self.meter.charge(P::END);
        self.leave_pd(ah.pdn);
        P::end_ah(self, ah.own);
    }

    pub(crate) fn destroy_pd(&mut self, ctx: u32, pdn: u32) -> Result<Reply, Status> {
        if self.owned_pd(ctx, pdn)?.users > 0 || P::uses_pd(self, pdn) {
            return Err(Status::BUSY);
        }
        self.remove_pd(pdn);
        Ok(Reply::Done)
    }

    fn remove_pd(&mut self, pdn: u32) {
        self.contexts.leave(&mut self.pds, pdn);
        let Some(pd) = self.pds.try_remove(pdn as usize) else { return };
        self.meter.charge(P::END);
        P::end_pd(self, pd.own);
    }

    pub(crate) fn destroy_cq(&mut self, ctx: u32, cqn: u32) -> Result<Reply, Status> {
        if self.owned_cq(ctx, cqn)?.users > 0 {
            return Err(Status::BUSY);
        }
        self.remove_cq(cqn);
        Ok(Reply::Done)
    }

    fn remove_cq(&mut self, cqn: u32) {
        self.meter.charge(cost::OBJECT);
        self.contexts.leave(&mut self.cqs, cqn);
        self.deferred_drops.extend(self.cqs.try_remove(cqn as usize).map(DeferredDrop::new));
        self.timers.remove(Waiting::Event(cqn));
        self.outbox.forget(&[abi::event::CQ_ERR], cqn);
        self.outbox.forget_completion(cqn);
    }
}
