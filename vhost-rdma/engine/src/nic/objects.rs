//! Objects of a guest: domains, completion queues, queue pairs and what they use of each other.
//!
//! Each object belongs to a context, and no other may name it. An object that others use does not
//! end. What a backing keeps of each is beside the guest's part (`own`).

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{self as abi, event};
use zerocopy::little_endian::U32;

use super::budget::cost;
use super::cq::{Cq, control_offset};
use super::nic::Nic;
use super::provider::{Provider, ReceiveSide, SendSide};
use super::qp::{Attrs, Kind, State};
use super::quota::Kind as Place;
use super::receive::{Moving, ReceiveRing, SavedReceives};
use super::saved::BadState;
use super::{Reply, Status, shape, table};
use crate::memory::{AddressSpace, Charge, Ring};

/// Events whose object is a QP.
const QP_EVENTS: [u32; 6] = [
    event::QP_FATAL,
    event::QP_REQ_ERR,
    event::QP_ACCESS_ERR,
    event::COMM_EST,
    event::SQ_DRAINED,
    event::QP_LAST_WQE_REACHED,
];

/// A protection domain.
#[derive(Debug)]
pub struct Pd<T> {
    pub(crate) ctx: u32,
    /// Objects in it; those that only the provider knows are not counted.
    pub(crate) users: u32,
    /// The provider's part.
    pub own: T,
}

/// An address handle.
#[derive(Debug)]
pub struct Ah<T> {
    pub(crate) ctx: u32,
    /// Its protection domain.
    pub pdn: u32,
    /// The address as the guest named it.
    pub av: abi::Av,
    /// The provider's part.
    pub own: T,
}

/// A shared receive queue. Its receives are checked against its own protection domain (IBTA
/// 10.2.9.1).
#[derive(Debug)]
pub struct Srq<P: Provider> {
    /// The context that it belongs to.
    pub ctx: u32,
    pub(crate) pdn: u32,
    /// Receives that it may hold.
    pub max_wr: u32,
    /// Fires once when fewer receives wait; 0 when not armed.
    pub limit: u32,
    /// The guest's ring.
    pub ring: ReceiveRing,
    pub(crate) doorbell: u32,
    /// QPs that receive from here.
    pub(crate) users: u32,
    control: u64,
    /// It failed: nothing is taken from it any more.
    pub dead: bool,
    /// The provider's part.
    pub own: P::Srq,
    _kept: Charge,
}

/// What is saved of a shared receive queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedSrq {
    ctx: u32,
    pub(crate) pdn: u32,
    max_wr: u32,
    limit: u32,
    doorbell: u32,
    dead: bool,
    receives: SavedReceives,
}

impl<P: Provider> Srq<P> {
    /// A new one, as `req` asks for.
    pub(crate) fn new(
        (ctx, req): (u32, &abi::SrqCreateReq),
        ring: Ring,
        (doorbell, kept): (u32, Charge),
        own: P::Srq,
    ) -> Self {
        let entries = req.entries.get();
        Self {
            ctx,
            pdn: req.pdn.get(),
            max_wr: req.max_wr.get(),
            limit: req.limit.get(),
            ring: ReceiveRing::new(ring, entries, req.log2_stride, req.max_sge.get()),
            doorbell,
            users: 0,
            control: control_offset(u64::from(entries) << req.log2_stride),
            dead: false,
            own,
            _kept: kept,
        }
    }

    /// See [`super::saved`].
    pub(crate) fn save(&self, space: &AddressSpace) -> SavedSrq {
        let Self { ctx, pdn, max_wr, limit, doorbell, dead, .. } = *self;
        SavedSrq { ctx, pdn, max_wr, limit, doorbell, dead, receives: self.ring.save(space) }
    }

    /// What was saved, in this memory. Its users come afterwards.
    pub(crate) fn load(
        saved: &SavedSrq,
        space: &AddressSpace,
        (kept, own): (Charge, P::Srq),
    ) -> Result<Self, BadState> {
        let SavedSrq { ctx, pdn, max_wr, limit, doorbell, dead, ref receives } = *saved;
        let ring = ReceiveRing::load(receives, space)?;
        let control = control_offset(ring.bytes());
        let (users, _kept) = (0, kept);
        Ok(Self { ctx, pdn, max_wr, limit, ring, doorbell, users, control, dead, own, _kept })
    }

    /// Tells the guest how many receives are used up.
    pub fn tell_used(&self, used: u32) {
        self.ring.ring().store_u32(self.control + abi::ctrl::TAKEN as u64, used);
    }

    /// Moves to another ring, which has all that waits; indices go on (IBTA 11.2.9.3). The ring
    /// that was left.
    pub(crate) fn take_over(&mut self, max_wr: u32, to: Moving, used: u32) -> Result<Ring, Status> {
        let (control, old) = self.ring.take_over(to)?;
        self.control = control;
        self.max_wr = max_wr;
        self.tell_used(used);
        Ok(old)
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp<P: Provider> {
    /// Its number on the network.
    pub qpn: u32,
    /// The context that it belongs to.
    pub ctx: u32,
    /// Its protection domain.
    pub pdn: u32,
    /// Its type.
    pub kind: Kind,
    /// Where it stands (IBTA 10.3.1).
    pub state: State,
    /// What the guest has set.
    pub attrs: Attrs,
    /// Every work request completes, whatever its flags.
    pub signal_all: bool,
    /// The CQ of work requests.
    pub send_cqn: u32,
    /// The CQ of receives.
    pub recv_cqn: u32,
    pub(crate) srqn: Option<u32>,
    /// Beside the rest: a turn may take it out and put it back.
    pub send: Option<P::Send>,
    /// Where receives are taken from, unless it has an SRQ.
    pub receive: Option<P::Receive>,
    /// Doorbell numbers of the two queues.
    pub(crate) doorbells: [u32; 2],
    /// In the NIC's run queue.
    pub scheduled: bool,
    /// The provider's part.
    pub own: P::Qp,
    pub(crate) _kept: Charge,
}

/// The answer that names a new object.
pub(crate) fn object(index: usize) -> Result<Reply, Status> {
    u32::try_from(index).map(Reply::Object).map_err(|_| Status::NOMEM)
}

impl<P: Provider> Nic<P> {
    /// The protection domain `pdn` of a context.
    ///
    /// # Errors
    /// The context has none of that number.
    pub fn owned_pd(&self, ctx: u32, pdn: u32) -> Result<&Pd<P::Pd>, Status> {
        self.pds.get(pdn as usize).filter(|pd| pd.ctx == ctx).ok_or(Status::NOENT)
    }

    pub(crate) fn owned_cq(&self, ctx: u32, cqn: u32) -> Result<&Cq, Status> {
        self.cqs.get(cqn as usize).filter(|cq| cq.ctx == ctx).ok_or(Status::NOENT)
    }

    /// The QP `qpn` of a context.
    ///
    /// # Errors
    /// The context has none of that number.
    pub fn owned_qp(&self, ctx: u32, qpn: u32) -> Result<&Qp<P>, Status> {
        self.qps.get(&qpn).map(|qp| &**qp).filter(|qp| qp.ctx == ctx).ok_or(Status::NOENT)
    }

    pub(crate) fn owned_srq(&self, ctx: u32, srqn: u32) -> Result<&Srq<P>, Status> {
        self.srqs.get(srqn as usize).filter(|srq| srq.ctx == ctx).ok_or(Status::NOENT)
    }

    pub(crate) fn owned_ah(&self, ctx: u32, number: u32) -> Result<&Ah<P::Ah>, Status> {
        self.ahs.get(number as usize).filter(|ah| ah.ctx == ctx).ok_or(Status::NOENT)
    }

    pub(crate) fn create_pd(&mut self, ctx: u32) -> Result<Reply, Status> {
        if !self.contexts.contains(ctx) {
            return Err(Status::NOENT);
        }
        if self.pds.len() >= self.settings.limits.max_pds as usize {
            return Err(Status::NOMEM);
        }
        self.kept.place(Place::Pd, self.pds.len())?;
        let own = P::begin_pd(self)?;
        object(self.pds.insert(Pd { ctx, users: 0, own }))
    }

    /// An object of a domain begins.
    pub fn join_pd(&mut self, pdn: u32) {
        if let Some(pd) = self.pds.get_mut(pdn as usize) {
            pd.users += 1;
        }
    }

    /// It ends.
    pub fn leave_pd(&mut self, pdn: u32) {
        if let Some(pd) = self.pds.get_mut(pdn as usize) {
            pd.users = pd.users.saturating_sub(1);
        }
    }

    pub(crate) fn create_cq(
        &mut self,
        ctx: u32,
        entries: u32,
        vector: u32,
        ring: Ring,
    ) -> Result<Reply, Status> {
        if !self.contexts.contains(ctx) {
            return Err(Status::NOENT);
        }
        shape::check_cq(entries, vector, self.settings.comp_vectors)?;
        if self.cqs.len() >= self.settings.limits.max_cqs.min(table::MOST) as usize {
            return Err(Status::NOMEM);
        }
        self.kept.place(Place::Cq, self.cqs.len())?;
        object(self.cqs.insert(Cq::new(ctx, vector, entries, ring)))
    }

    /// Sets the moderation of a CQ's events.
    pub(crate) fn moderate(
        &mut self,
        ctx: u32,
        cqn: u32,
        (count, period_us): (u16, u16),
    ) -> Result<Reply, Status> {
        self.owned_cq(ctx, cqn)?;
        let cq = self.cqs.get_mut(cqn as usize).ok_or(Status::NOENT)?;
        cq.moderation.set(count, period_us);
        // A wait under the old setting is over.
        if cq.moderation.is_waiting() {
            self.look_at(cqn);
        }
        Ok(Reply::Done)
    }

    pub(crate) fn query_srq(&self, ctx: u32, srqn: u32) -> Result<Reply, Status> {
        let srq = self.owned_srq(ctx, srqn)?;
        Ok(Reply::SrqAttr(abi::SrqQueryResp {
            max_wr: U32::new(srq.max_wr),
            max_sge: U32::new(srq.ring.max_sge()),
            limit: U32::new(srq.limit),
            reserved: U32::new(0),
        }))
    }

    /// Takes an SRQ out of the tables.
    pub(crate) fn unlink_srq(&mut self, srqn: u32) -> Option<Srq<P>> {
        self.meter.charge(cost::OBJECT);
        let srq = self.srqs.try_remove(srqn as usize)?;
        self.leave_pd(srq.pdn);
        self.contexts.free_doorbell(srq.ctx, srq.doorbell);
        self.outbox.forget(&[event::SRQ_ERR, event::SRQ_LIMIT_REACHED], srqn);
        Some(srq)
    }

    /// Takes a QP into the tables.
    pub(crate) fn link_qp(&mut self, qp: Qp<P>) -> abi::QpCreateResp {
        for cqn in [qp.send_cqn, qp.recv_cqn] {
            if let Some(cq) = self.cqs.get_mut(cqn as usize) {
                cq.users += 1;
            }
        }
        if let Some(srq) = qp.srqn.and_then(|srqn| self.srqs.get_mut(srqn as usize)) {
            srq.users += 1;
        }
        let (qpn, doorbells) = (qp.qpn, qp.doorbells);
        self.join_pd(qp.pdn);
        self.qp_numbers.insert(qpn);
        self.qps.insert(qpn, Box::new(qp));
        let [sq_db, rq_db] = doorbells.map(U32::new);
        abi::QpCreateResp { qpn: U32::new(qpn), sq_db, rq_db, reserved: U32::new(0) }
    }

    /// Takes a QP out of the tables. Its place in the run queue stays: it stands for nothing, and
    /// whoever searched for it could be made to search all day.
    pub(crate) fn unlink_qp(&mut self, qpn: u32) -> Option<Box<Qp<P>>> {
        let qp = self.qps.remove(&qpn)?;
        self.meter.charge(cost::OBJECT);
        self.qp_numbers.remove(qpn);
        self.leave_pd(qp.pdn);
        for cqn in [qp.send_cqn, qp.recv_cqn] {
            if let Some(cq) = self.cqs.get_mut(cqn as usize) {
                cq.users -= 1;
            }
        }
        if let Some(srq) = qp.srqn.and_then(|srqn| self.srqs.get_mut(srqn as usize)) {
            srq.users -= 1;
        }
        for doorbell in qp.doorbells.into_iter().filter(|&doorbell| doorbell != abi::db::NONE) {
            self.contexts.free_doorbell(qp.ctx, doorbell);
        }
        self.outbox.forget(&QP_EVENTS, qpn);
        Some(qp)
    }

    /// A QP is in RESET: everything posted is forgotten, without completions (IBTA 10.3.1), and so
    /// is what was to be told of it.
    pub fn reset_qp(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.state = State::Reset;
        qp.attrs = Attrs::default();
        if let Some(send) = &mut qp.send {
            send.reset();
        }
        if let Some(receive) = &mut qp.receive {
            receive.reset();
        }
        let (ctx, doorbells) = (qp.ctx, qp.doorbells);
        for doorbell in doorbells.into_iter().filter(|&doorbell| doorbell != abi::db::NONE) {
            self.contexts.reset_doorbell(ctx, doorbell);
        }
        self.outbox.forget(&QP_EVENTS, qpn);
    }
}
