//! The tables of a NIC's objects: what is in them, whose it is, and what uses what.
//!
//! Each object belongs to a context, and no other may name it. An object that others use does not
//! end.

use virtio_rdma_abi::{self as abi, event};
use zerocopy::little_endian::U32;

use super::budget::cost;
use super::cq::Cq;
use super::holdings::Links;
use super::nic::{Nic, Provider};
use super::objects::{Ah, Pd, QP_EVENTS, Qp, Srq, number};
use super::parts::{ReceiveSide, SendSide};
use super::qp::{Attrs, State};
use super::quota::Kind as Place;
use super::{Reply, Status, shape, table};
use crate::memory::Ring;

/// The numbers of a table's objects. No number is larger, or the table would not have it.
fn numbers<T>(all: impl Iterator<Item = (usize, T)>) -> Vec<u32> {
    all.filter_map(|(number, _)| u32::try_from(number).ok()).collect()
}

impl<P: Provider> Nic<P> {
    /// Has contexts own what was loaded into the tables, but for queue pairs.
    pub(crate) fn own_loaded(&mut self) {
        let Self { contexts, pds, ahs, cqs, srqs, .. } = self;
        numbers(pds.iter()).into_iter().for_each(|pdn| contexts.join(pds, pdn));
        numbers(ahs.iter()).into_iter().for_each(|ah| contexts.join(ahs, ah));
        numbers(cqs.iter()).into_iter().for_each(|cqn| contexts.join(cqs, cqn));
        numbers(srqs.iter()).into_iter().for_each(|srqn| contexts.join(srqs, srqn));
    }

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
        let pdn = number(self.pds.insert(Pd { ctx, users: 0, links: Links::default(), own }))?;
        self.contexts.join(&mut self.pds, pdn);
        Ok(Reply::Object(pdn))
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
        let cqn = number(self.cqs.insert(Cq::new(ctx, vector, entries, ring)))?;
        self.contexts.join(&mut self.cqs, cqn);
        Ok(Reply::Object(cqn))
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
        self.contexts.leave(&mut self.srqs, srqn);
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
        self.contexts.join(&mut self.qps, qpn);
        let [sq_db, rq_db] = doorbells.map(U32::new);
        abi::QpCreateResp { qpn: U32::new(qpn), sq_db, rq_db, reserved: U32::new(0) }
    }

    /// Takes a QP out of the tables. Its place in the run queue stays: it stands for nothing, and
    /// whoever searched for it could be made to search all day.
    pub(crate) fn unlink_qp(&mut self, qpn: u32) -> Option<Box<Qp<P>>> {
        self.contexts.leave(&mut self.qps, qpn);
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
