//! Commands that are too much for one go.
//!
//! A guest chooses how many objects a context has and how much waits in a ring, and its neighbours
//! wait while a command is carried out. So what is many goes in steps of [`STEP`] each: a step
//! answers [`Reply::More`], and the command goes on when [`Command::Continue`] comes, with a round
//! for the neighbours between. What a command has still to do is kept with its NIC, and its
//! commands come one after the other; another command in its place means that nobody waits for it
//! any more.
//!
//! [`Command::Continue`]: super::Command::Continue

use virtio_rdma_abi::{self as abi, srq_mask};

use super::engine::{Execution, Nics};
use super::nic::Nic;
use super::{DeferredDrop, Nanos};
use crate::link::NicId;
use crate::nic::budget::{Budget, cost};
use crate::nic::cq;
use crate::nic::nic::STEP;
use crate::nic::receive::Moving;
use crate::nic::roster::{Slots, Walk};
use crate::nic::{Reply, Status};

/// Turns of send queues before a CQ is resized.
const SETTLE_TURNS: u32 = 64;

/// A command that has begun.
#[derive(Debug)]
pub(crate) enum Work {
    EndContext(EndContext),
    ResizeCq(Box<ResizeCq>),
    ResizeSrq(Box<ResizeSrq>),
}

/// CONTEXT_DESTROY: users go before what they use.
#[derive(Debug)]
pub(crate) struct EndContext {
    ctx: u32,
    qps: Walk,
    keys: Walk,
    srqs: Slots,
    cqs: Slots,
    ahs: Slots,
    pds: Slots,
}

/// CQ_RESIZE.
#[derive(Debug)]
pub(crate) struct ResizeCq {
    cqn: u32,
    /// Queue pairs whose posted sends are still to be executed.
    settle: Walk,
    turns: u32,
    shape: (u32, u32),
    ring: Option<crate::memory::Ring>,
    to: Option<cq::Succession>,
}

/// SRQ_MODIFY with another ring.
#[derive(Debug)]
pub(crate) struct ResizeSrq {
    req: abi::SrqModifyReq,
    to: Moving,
}

impl<N: Nics> Execution<'_, N> {
    /// Goes on with the command that has begun.
    pub(super) fn go_on(&mut self, id: NicId, now: Nanos) -> Result<Reply, Status> {
        let work = self.nic_mut(id).and_then(|nic| nic.work.take()).ok_or(Status::STATE)?;
        self.work_on(id, work, now)
    }

    fn work_on(&mut self, id: NicId, mut work: Work, now: Nanos) -> Result<Reply, Status> {
        let mut budget = self.meter.budget(STEP);
        let done = match &mut work {
            Work::EndContext(end) => Ok(self.end_context(id, end, &mut budget)),
            Work::ResizeCq(resize) => self.resize_cq(id, resize, (&mut budget, now)),
            Work::ResizeSrq(resize) => {
                let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
                nic.carry_srq(resize.req.srqn.get(), &mut resize.to, &mut budget)
            }
        };
        if done? {
            if let Work::ResizeSrq(resize) = work {
                self.nic_mut(id).ok_or(Status::FATAL)?.resize_srq(*resize)?;
            }
            return Ok(Reply::Done);
        }
        self.nic_mut(id).ok_or(Status::FATAL)?.work = Some(work);
        Ok(Reply::More)
    }

    pub(super) fn begin_end(&mut self, id: NicId, ctx: u32, now: Nanos) -> Result<Reply, Status> {
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        let (qps, keys) = (nic.qp_numbers.walk(), nic.backing.mrs.numbers.walk());
        let end = EndContext {
            ctx,
            qps,
            keys,
            srqs: Slots::of(&nic.srqs),
            cqs: Slots::of(&nic.cqs),
            ahs: Slots::of(&nic.ahs),
            pds: Slots::of(&nic.pds),
        };
        self.work_on(id, Work::EndContext(end), now)
    }

    /// True: that was all.
    fn end_context(&mut self, id: NicId, end: &mut EndContext, budget: &mut Budget) -> bool {
        let mut done = false;
        while !done && !budget.is_over(self.meter) {
            let Some(nic) = self.nic_mut(id) else { return true };
            match end.next_qp(nic) {
                Found::None => done = nic.end_others(end, budget),
                Found::Another => {}
                Found::Own(qpn) => {
                    nic.remove_qp(qpn);
                    self.qp_gone(qpn);
                }
            }
        }
        self.leave_empty_groups(id);
        done
    }

    pub(super) fn begin_resize_cq(
        &mut self,
        id: NicId,
        cqn: u32,
        (shape, ring): ((u32, u32), crate::memory::Ring),
        now: Nanos,
    ) -> Result<Reply, Status> {
        // Also a peer's receives count that no round has seen yet.
        let mut budget = self.meter.budget(STEP);
        self.nics.scan(&mut budget, self.serving);
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        let settle = nic.qp_numbers.walk();
        let resize =
            ResizeCq { cqn, settle, turns: SETTLE_TURNS, shape, ring: Some(ring), to: None };
        self.work_on(id, Work::ResizeCq(Box::new(resize)), now)
    }

    fn resize_cq(
        &mut self,
        id: NicId,
        resize: &mut ResizeCq,
        (budget, now): (&mut Budget, Nanos),
    ) -> Result<bool, Status> {
        // Whoever shrinks a CQ means the completions of what is already posted to count (IBTA
        // 11.2.8.3).
        while resize.turns > 0
            && let Some(qpn) = self.nic_mut(id).and_then(|nic| resize.settle.next(&nic.qp_numbers))
        {
            self.meter.charge(cost::VISIT);
            let due = self.nic_mut(id).is_some_and(|nic| nic.is_due(qpn, resize.cqn));
            if due && self.settle_turn(id, qpn, budget, now) {
                resize.turns -= 1;
            }
            if budget.is_over(self.meter) {
                return Ok(false);
            }
        }
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        if let Some(ring) = resize.ring.take() {
            let cq = nic.cqs.get_mut(resize.cqn as usize).ok_or(Status::NOENT)?;
            resize.to = Some(cq.succeed(resize.shape.0, resize.shape.1, ring)?);
        }
        nic.move_cq(resize, budget)
    }
}

/// What the next step of a walk met.
enum Found {
    /// Nothing is left.
    None,
    /// An object of another context.
    Another,
    Own(u32),
}

impl EndContext {
    fn next_qp(&mut self, nic: &Nic) -> Found {
        let Some(qpn) = self.qps.next(&nic.qp_numbers) else { return Found::None };
        nic.meter.charge(cost::VISIT);
        match nic.qps.get(&qpn) {
            Some(qp) if qp.ctx == self.ctx => Found::Own(qpn),
            _ => Found::Another,
        }
    }

    fn next_key(&mut self, nic: &Nic) -> Found {
        let Some(number) = self.keys.next(&nic.backing.mrs.numbers) else { return Found::None };
        nic.meter.charge(cost::VISIT);
        match nic.backing.mrs.owner(number) {
            Some((ctx, key)) if ctx == self.ctx => Found::Own(key),
            _ => Found::Another,
        }
    }
}

impl Nic {
    /// Ends what a context has beside queue pairs; true: that was all.
    fn end_others(&mut self, end: &mut EndContext, budget: &mut Budget) -> bool {
        let ctx = end.ctx;
        while let Some(srqn) =
            end.srqs.sweep(&self.srqs, (&self.meter, budget), |srq| srq.ctx == ctx)
        {
            self.remove_srq(srqn);
        }
        while let Some(cqn) = end.cqs.sweep(&self.cqs, (&self.meter, budget), |cq| cq.ctx == ctx) {
            self.remove_cq(cqn);
        }
        while !budget.is_over(&self.meter) {
            match end.next_key(self) {
                Found::None => break,
                Found::Another => {}
                Found::Own(key) => self.remove_key(key),
            }
        }
        while let Some(ah) = end.ahs.sweep(&self.ahs, (&self.meter, budget), |ah| ah.ctx == ctx) {
            self.ahs.remove(ah as usize);
        }
        while let Some(pdn) = end.pds.sweep(&self.pds, (&self.meter, budget), |pd| pd.ctx == ctx) {
            self.pds.remove(pdn as usize);
        }
        if budget.is_over(&self.meter) {
            return false;
        }
        self.backing.mirror.end(ctx);
        self.contexts.remove(ctx);
        true
    }

    /// Whether a queue pair completes its sends to that CQ and has some. Also what no round has
    /// seen yet is taken in.
    fn is_due(&mut self, qpn: u32, cqn: u32) -> bool {
        let Some(qp) = self.qps.get(&qpn).filter(|qp| qp.send_cqn == cqn) else { return false };
        let (ctx, [doorbell, _]) = (qp.ctx, qp.doorbells);
        if let Some(post) = self.contexts.look_at(ctx, doorbell) {
            self.posted(post);
        }
        self.qps.get(&qpn).is_some_and(|qp| qp.scheduled)
    }

    /// True: it has moved.
    fn move_cq(&mut self, resize: &mut ResizeCq, budget: &mut Budget) -> Result<bool, Status> {
        let Some(to) = &mut resize.to else { return Err(Status::FATAL) };
        if !self.carry_cq(resize.cqn, to, budget)? {
            return Ok(false);
        }
        let to = resize.to.take().ok_or(Status::FATAL)?;
        self.take_over_cq(resize.cqn, to)?;
        Ok(true)
    }

    pub(super) fn begin_resize_srq(
        &mut self,
        req: abi::SrqModifyReq,
        to: Moving,
    ) -> Result<Reply, Status> {
        self.work = Some(Work::ResizeSrq(Box::new(ResizeSrq { req, to })));
        Ok(Reply::More)
    }

    fn resize_srq(&mut self, resize: ResizeSrq) -> Result<(), Status> {
        let ResizeSrq { req, to } = resize;
        let srq = self.srqs.get_mut(req.srqn.get() as usize).ok_or(Status::NOENT)?;
        let used = srq.ring.taken();
        let old = srq.take_over(req.max_wr.get(), to, used)?;
        srq.limit = srq.limit.min(req.max_wr.get());
        if req.mask.get() & srq_mask::LIMIT != 0 {
            srq.limit = req.limit.get();
        }
        self.deferred_drops.push(DeferredDrop::new(old));
        Ok(())
    }
}
