//! Creation of CQs, SRQs and QPs.
//!
//! A guest's CQ is a ring of the guest only; SRQs and QPs have a host object each. All of them
//! complete to one host CQ, which must never overrun: each QP and SRQ takes as many of its entries
//! as it may have work requests, and one that finds too few left is refused.

use virtio_rdma_abi::{self as abi, qp_flags};
use zerocopy::little_endian::U32;

use super::control::status;
use super::nic::{HostSide, Nic, Qp};
use super::quota;
use super::receiver::Receives;
use super::requester::Sends;
use super::srq::{Held, Srq};
use super::verbs::QpInit;
use crate::memory::{Charge, Ring};
use crate::nic::doorbell::Owner;
use crate::nic::qp::{Attrs, Kind, SendQueue, State};
use crate::nic::quota::Kind as Place;
use crate::nic::receive::ReceiveRing;
use crate::nic::{Reply, Status, shape, table};

/// What QP_CREATE brings: the request and the resolved rings.
pub(super) type QpRequest = (Box<abi::QpCreateReq>, Option<Ring>, Option<Ring>);

impl Nic {
    /// A number for `wr_id`s that no living queue has.
    pub(super) fn take_serial(&mut self, number: u32) -> u32 {
        loop {
            self.backing.next_serial = (self.backing.next_serial + 1) & super::cq::SERIAL_MASK;
            if !self.backing.serials.contains_key(&self.backing.next_serial) {
                self.backing.serials.insert(self.backing.next_serial, number);
                return self.backing.next_serial;
            }
        }
    }

    /// Takes entries of the host CQ.
    fn admit(&self, cost: u32) -> Result<(), Status> {
        let left = self.backing.host.cq_entries().saturating_sub(self.backing.admitted);
        if cost > left { Err(Status::NOMEM) } else { Ok(()) }
    }

    pub(super) fn create_srq(
        &mut self,
        ctx: u32,
        req: &abi::SrqCreateReq,
        ring: Ring,
    ) -> Result<Reply, Status> {
        let pd = self.host_pd(ctx, req.pdn.get())?;
        let (max_wr, max_sge) = (req.max_wr.get(), req.max_sge.get());
        self.bounds().check_srq(req)?;
        if self.srqs.len() >= self.settings.limits.max_srqs.min(table::MOST) as usize {
            return Err(Status::NOMEM);
        }
        self.admit(max_wr)?;
        self.kept.place(Place::Srq, self.srqs.len())?;
        let kept = self.kept.beside(quota::shared(max_wr))?;
        let host = self
            .backing
            .host
            .create_srq(pd, max_wr, max_sge)
            .map_err(|error| self.refused(error))?;
        let srqn = u32::try_from(self.srqs.vacant_key()).map_err(|_| Status::NOMEM)?;
        let Some(doorbell) = self.contexts.take_doorbell(ctx, Owner::Shared(srqn)) else {
            self.forgo(|nic| nic.backing.host.destroy_srq(host));
            return Err(Status::NOMEM);
        };
        if req.limit.get() != 0
            && let Err(error) = self.backing.host.arm_srq(host, req.limit.get())
        {
            self.contexts.free_doorbell(ctx, doorbell);
            self.forgo(|nic| nic.backing.host.destroy_srq(host));
            return Err(status(error));
        }
        let serial = self.take_serial(srqn);
        self.backing.admitted += max_wr;
        self.join_pd(req.pdn.get());
        let own = Held::new(host, serial, max_wr);
        self.srqs.insert(Srq::new((ctx, req), ring, (doorbell, kept), own));
        Ok(Reply::Srq(abi::SrqCreateResp { srqn: U32::new(srqn), db: U32::new(doorbell) }))
    }

    pub(super) fn create_qp(&mut self, ctx: u32, request: QpRequest) -> Result<Reply, Status> {
        let kind = Kind::from_abi(request.0.r#type.get()).ok_or(Status::NOTSUPP)?;
        self.check_qp(ctx, kind, &request)?;
        if kind == Kind::Gsi {
            return self.create_gsi(ctx, request);
        }
        let (req, ..) = &request;
        let cost = req.max_send_wr.get() + req.max_recv_wr.get();
        self.admit(cost)?;
        let kept = self.room_for_qp(req)?;
        let srqn = Some(req.srqn.get()).filter(|&srqn| srqn != abi::NO_SRQ);
        let init = QpInit {
            pd: self.host_pd(ctx, req.pdn.get())?,
            kind: req.r#type.get(),
            srq: srqn.and_then(|srqn| self.srqs.get(srqn as usize)).map(|srq| srq.own.host),
            max_send_wr: req.max_send_wr.get(),
            max_recv_wr: req.max_recv_wr.get(),
            max_send_sge: req.max_send_sge.get().into(),
            max_recv_sge: req.max_recv_sge.get().into(),
            max_inline: req.max_inline.get().into(),
        };
        let (host, qpn) =
            self.backing.host.create_qp(&init).map_err(|error| self.refused(error))?;
        let rings = (request.1.is_some(), request.2.is_some());
        let Some(doorbells) = self.contexts.take_doorbells(ctx, qpn, rings) else {
            self.forgo(|nic| nic.backing.host.destroy_qp(host));
            return Err(Status::NOMEM);
        };
        let (req, sq, rq) = request;
        let shape = shape::sends(&req);
        let recv_sge = u32::from(req.max_recv_sge.get());
        let serial = self.take_serial(qpn);
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
            send: sq.map(|ring| Sends::new(SendQueue::new(ring, shape), req.max_send_wr.get())),
            receive: rq.map(|ring| {
                let entries = req.rq_entries.get();
                let ring = ReceiveRing::new(ring, entries, req.rq_log2_stride, recv_sge);
                Receives::new(ring, req.max_recv_wr.get())
            }),
            doorbells,
            scheduled: false,
            own: HostSide { host, serial, stopping: false, cost },
            _kept: kept,
        };
        self.backing.admitted += cost;
        let place = &self.backing.place;
        place.directory.add_qp(&place.device, qpn, self.settings.vni);
        Ok(Reply::Qp(self.link_qp(qp)))
    }

    fn room_for_qp(&mut self, req: &abi::QpCreateReq) -> Result<Charge, Status> {
        self.kept.place(Place::Qp, self.qps.len())?;
        let depth = (req.max_send_wr.get(), req.max_recv_wr.get());
        self.kept.beside(quota::queue_pair(depth, shape::sends(req).max_inline))
    }

    fn check_qp(&self, ctx: u32, kind: Kind, request: &QpRequest) -> Result<(), Status> {
        let (req, sq, rq) = request;
        if kind == Kind::Gsi {
            self.check_gsi(ctx, req)?;
        }
        self.check_qp_parts(ctx, req)?;
        self.bounds().check_qp(req, (sq.is_some(), rq.is_some()))?;
        self.check_qp_room()
    }
}
