//! Creation of CQs, SRQs and QPs: the objects that come with rings in guest memory.

use virtio_rdma_abi::{self as abi, qp_flags};
use zerocopy::little_endian::U32;

use super::engine::{Execution, Nics};
use super::nic::Nic;
use super::qp::{Inbound, Qp};
use super::quota;
use super::srq::Srq;
use crate::link::NicId;
use crate::memory::Ring;
use crate::nic::doorbell::Owner;
use crate::nic::qp::{Attrs, Kind, SendQueue, State};
use crate::nic::quota::Kind as Place;
use crate::nic::receive::ReceiveRing;
use crate::nic::shape;
use crate::nic::table;
use crate::nic::{Reply, Status};

/// What QP_CREATE brings: the request and the resolved rings.
type QpRequest<'a> = (&'a abi::QpCreateReq, Option<Ring>, Option<Ring>);

impl<N: Nics> Execution<'_, N> {
    pub(super) fn create_qp(
        &mut self,
        id: NicId,
        ctx: u32,
        request: QpRequest<'_>,
    ) -> Result<Reply, Status> {
        let (req, ..) = &request;
        let kind = Kind::from_abi(req.r#type.get()).ok_or(Status::NOTSUPP)?;
        self.nic_mut(id).ok_or(Status::FATAL)?.check_qp(ctx, kind, &request)?;
        let qpn = if kind == Kind::Gsi {
            abi::GSI_QPN
        } else {
            self.engine.qpns.take(self.engine.random.as_mut()).ok_or(Status::NOMEM)?
        };
        let created = self.nic_mut(id).ok_or(Status::FATAL)?.insert_qp(ctx, kind, qpn, request);
        if created.is_err() && kind != Kind::Gsi {
            self.engine.qpns.free(qpn);
        }
        created.map(Reply::Qp)
    }
}

impl Nic {
    pub(super) fn create_srq(
        &mut self,
        ctx: u32,
        req: &abi::SrqCreateReq,
        ring: Ring,
    ) -> Result<Reply, Status> {
        self.owned_pd(ctx, req.pdn.get())?;
        shape::ENGINE.check_srq(req)?;
        if self.srqs.len() >= self.settings.limits.max_srqs.min(table::MOST) as usize {
            return Err(Status::NOMEM);
        }
        self.kept.place(Place::Srq, self.srqs.len())?;
        let kept = self.kept.beside(quota::SHARED)?;
        let srqn = u32::try_from(self.srqs.vacant_key()).map_err(|_| Status::NOMEM)?;
        let doorbell =
            self.contexts.take_doorbell(ctx, Owner::Shared(srqn)).ok_or(Status::NOMEM)?;
        self.join_pd(req.pdn.get());
        self.srqs.insert(Srq::new((ctx, req), ring, (doorbell, kept), Vec::new()));
        Ok(Reply::Srq(abi::SrqCreateResp { srqn: U32::new(srqn), db: U32::new(doorbell) }))
    }

    fn check_qp(&self, ctx: u32, kind: Kind, request: &QpRequest<'_>) -> Result<(), Status> {
        let (req, sq, rq) = request;
        self.check_qp_parts(ctx, req)?;
        shape::ENGINE.check_qp(req, (sq.is_some(), rq.is_some()))?;
        if !kind.is_allowed_to(ctx) {
            return Err(Status::PERM);
        }
        if kind == Kind::Gsi && self.qps.contains_key(&abi::GSI_QPN) {
            return Err(Status::EXIST);
        }
        self.check_qp_room()
    }

    fn insert_qp(
        &mut self,
        ctx: u32,
        kind: Kind,
        qpn: u32,
        request: QpRequest<'_>,
    ) -> Result<abi::QpCreateResp, Status> {
        let (req, sq, rq) = request;
        let rings = (sq.is_some(), rq.is_some());
        self.kept.place(Place::Qp, self.qps.len())?;
        let kept = self.kept.beside(quota::queue_pair(shape::sends(req).max_inline))?;
        let doorbells = self.contexts.take_doorbells(ctx, qpn, rings).ok_or(Status::NOMEM)?;
        let receive_sge = u32::from(req.max_recv_sge.get());
        let srqn = Some(req.srqn.get()).filter(|&srqn| srqn != abi::NO_SRQ);
        let qp = Qp {
            qpn,
            ctx,
            pdn: req.pdn.get(),
            kind,
            state: State::Reset,
            attrs: Attrs::default(),
            signal_all: req.flags.get() & qp_flags::SIG_ALL != 0,
            send_cqn: req.send_cqn.get(),
            recv_cqn: req.recv_cqn.get(),
            srqn,
            send: sq.map(|ring| Box::new(SendQueue::new(ring, shape::sends(req)))),
            receive: rq.map(|ring| {
                ReceiveRing::new(ring, req.rq_entries.get(), req.rq_log2_stride, receive_sge)
            }),
            doorbells,
            scheduled: false,
            own: Inbound::default(),
            _kept: kept,
        };
        Ok(self.link_qp(qp))
    }
}
