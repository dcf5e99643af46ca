//! The creation of objects that a backing has a part in: contexts, SRQs, QPs, address handles.

use virtio_rdma_abi::{self as abi, qp_flags};
use zerocopy::little_endian::U32;

use super::contexts::KERNEL;
use super::doorbell::Owner;
use super::holdings::Links;
use super::nic::{Nic, Provider};
use super::objects::{Ah, Qp, Srq, number};
use super::parts::{ReceiveSide, SendSide};
use super::qp::attrs::check_av;
use super::qp::{Attrs, Kind, SendQueue, State};
use super::quota::Kind as Place;
use super::receive::ReceiveRing;
use super::verb::NewQp;
use super::{Reply, Status, shape, table};
use crate::memory::{Charge, Ring};

impl<P: Provider> Nic<P> {
    pub(crate) fn create_context(&mut self, db_page: Ring) -> Result<Reply, Status> {
        let shape = (self.settings.limits.max_contexts, self.settings.kick_queues);
        self.contexts.create(db_page, shape, &mut self.kept)
    }

    pub(crate) fn add_page(&mut self, ctx: u32, db_page: Ring) -> Result<Reply, Status> {
        self.contexts.add_page(ctx, db_page, &mut self.kept)
    }

    pub(crate) fn create_srq(
        &mut self,
        ctx: u32,
        req: &abi::SrqCreateReq,
        ring: Ring,
    ) -> Result<Reply, Status> {
        self.owned_pd(ctx, req.pdn.get())?;
        self.backing.bounds().check_srq(req)?;
        if self.srqs.len() >= self.settings.limits.max_srqs.min(table::MOST) as usize {
            return Err(Status::NOMEM);
        }
        self.kept.place(Place::Srq, self.srqs.len())?;
        let kept = self.kept.beside(P::srq_bytes(req.max_wr.get()))?;
        let srqn = u32::try_from(self.srqs.vacant_key()).map_err(|_| Status::NOMEM)?;
        let doorbell =
            self.contexts.take_doorbell(ctx, Owner::Shared(srqn)).ok_or(Status::NOMEM)?;
        let own = P::begin_srq(self, srqn, req)
            .inspect_err(|_| self.contexts.free_doorbell(ctx, doorbell))?;
        self.join_pd(req.pdn.get());
        self.srqs.insert(Srq::new((ctx, req), ring, (doorbell, kept), own));
        self.contexts.join(&mut self.srqs, srqn);
        Ok(Reply::Srq(abi::SrqCreateResp { srqn: U32::new(srqn), db: U32::new(doorbell) }))
    }

    /// Whether there may be such a QP.
    pub(crate) fn check_qp(
        &self,
        ctx: u32,
        req: &abi::QpCreateReq,
        rings: (bool, bool),
    ) -> Result<Kind, Status> {
        let kind = Kind::from_abi(req.r#type.get()).ok_or(Status::NOTSUPP)?;
        self.owned_pd(ctx, req.pdn.get())?;
        self.owned_cq(ctx, req.send_cqn.get())?;
        self.owned_cq(ctx, req.recv_cqn.get())?;
        if req.srqn.get() != abi::NO_SRQ {
            self.owned_srq(ctx, req.srqn.get())?;
        }
        self.backing.bounds().check_qp(req, rings)?;
        if kind == Kind::Gsi {
            // Only the kernel owns the GSI QP.
            if ctx != KERNEL {
                return Err(Status::PERM);
            }
            if self.qps.contains_key(&abi::GSI_QPN) || self.backing.has_other_qp() {
                return Err(Status::EXIST);
            }
        }
        let qps = self.qps.len() + usize::from(self.backing.has_other_qp());
        if qps >= self.settings.limits.max_qps as usize {
            return Err(Status::NOMEM);
        }
        Ok(kind)
    }

    /// Room for a QP that may be.
    pub fn room_for_qp(&mut self, req: &abi::QpCreateReq) -> Result<Charge, Status> {
        self.kept.place(Place::Qp, self.qps.len())?;
        self.kept.beside(P::qp_bytes(req))
    }

    /// Takes a new QP in; the provider's part comes back if there is no doorbell for it.
    pub fn insert_qp(
        &mut self,
        (ctx, qpn): (u32, u32),
        new: NewQp,
        (kept, own): (Charge, P::Qp),
    ) -> Result<abi::QpCreateResp, P::Qp> {
        let NewQp { kind, req, sq, rq } = new;
        let rings = (sq.is_some(), rq.is_some());
        let Some(doorbells) = self.contexts.take_doorbells(ctx, qpn, rings) else {
            return Err(own);
        };
        let receive_sge = u32::from(req.max_recv_sge.get());
        Ok(self.link_qp(Qp {
            qpn,
            ctx,
            pdn: req.pdn.get(),
            kind,
            state: State::Reset,
            attrs: Attrs::default(),
            signal_all: req.flags.get() & qp_flags::SIG_ALL != 0,
            send_cqn: req.send_cqn.get(),
            recv_cqn: req.recv_cqn.get(),
            srqn: Some(req.srqn.get()).filter(|&srqn| srqn != abi::NO_SRQ),
            send: sq.map(|ring| {
                P::Send::new(SendQueue::new(ring, shape::sends(&req)), req.max_send_wr.get())
            }),
            receive: rq.map(|ring| {
                let (entries, stride) = (req.rq_entries.get(), req.rq_log2_stride);
                let ring = ReceiveRing::new(ring, entries, stride, receive_sge);
                P::Receive::new(ring, req.max_recv_wr.get())
            }),
            doorbells,
            scheduled: false,
            links: Links::default(),
            own,
            _kept: kept,
        }))
    }

    /// Whether there may be an address handle for this address, by what is known of it here.
    pub(crate) fn check_ah(&mut self, ctx: u32, pdn: u32, av: &abi::Av) -> Result<(), Status> {
        self.owned_pd(ctx, pdn)?;
        if self.ahs.len() >= self.settings.limits.max_ahs as usize {
            return Err(Status::NOMEM);
        }
        check_av(av, |index| self.gids.get(usize::from(index)).is_some_and(Option::is_some))?;
        self.kept.place(Place::Ah, self.ahs.len())
    }

    /// Takes a new address handle in.
    pub fn insert_ah(
        &mut self,
        (ctx, pdn): (u32, u32),
        av: abi::Av,
        own: P::Ah,
    ) -> Result<Reply, Status> {
        self.join_pd(pdn);
        let number = number(self.ahs.insert(Ah { ctx, pdn, av, links: Links::default(), own }))?;
        self.contexts.join(&mut self.ahs, number);
        Ok(Reply::Object(number))
    }
}
