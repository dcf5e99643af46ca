//! Creation of SRQs and QPs: the host's part.
//!
//! A guest's CQ is a ring of the guest only; SRQs and QPs have a host object each. All of them
//! complete to one host CQ, which must never overrun: each QP and SRQ takes as many of its entries
//! as it may have work requests, and one that finds too few left is refused.

use easy_ext::ext;
use vhost_rdma_engine::nic::qp::Kind;
use vhost_rdma_engine::nic::verb::NewQp;
use vhost_rdma_engine::nic::{Reply, Status};
use virtio_rdma_abi as abi;

use super::gsi::GsiVerbs as _;
use super::held::Held;
use super::nic::{HostSide, Nic};
use super::refusal::Control as _;
use super::refusal::status;
use super::verbs::QpInit;
use super::wr_id::SERIAL_MASK;

#[ext(Create)]
pub(super) impl Nic {
    /// A number for `wr_id`s that no living queue has.
    fn take_serial(&mut self, number: u32) -> u32 {
        loop {
            self.backing.next_serial = (self.backing.next_serial + 1) & SERIAL_MASK;
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

    /// The host's part of an SRQ.
    fn begin_srq(&mut self, srqn: u32, req: &abi::SrqCreateReq) -> Result<Held, Status> {
        let pd = self.pds.get(req.pdn.get() as usize).ok_or(Status::NOENT)?.own;
        let (max_wr, max_sge) = (req.max_wr.get(), req.max_sge.get());
        self.admit(max_wr)?;
        let host = self
            .backing
            .host
            .create_srq(pd, max_wr, max_sge)
            .map_err(|error| self.refused(error))?;
        if req.limit.get() != 0
            && let Err(error) = self.backing.host.arm_srq(host, req.limit.get())
        {
            self.forgo(|nic| nic.backing.host.destroy_srq(host));
            return Err(status(error));
        }
        let serial = self.take_serial(srqn);
        self.backing.admitted += max_wr;
        Ok(Held::new(host, serial, max_wr))
    }

    fn create_qp(&mut self, ctx: u32, new: NewQp) -> Result<Reply, Status> {
        if new.kind == Kind::Gsi {
            return self.create_gsi(ctx, new);
        }
        let req = &new.req;
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
        let serial = self.take_serial(qpn);
        let own = HostSide { host, serial, stopping: false, cost };
        match self.insert_qp((ctx, qpn), new, (kept, own)) {
            Ok(made) => {
                self.backing.admitted += cost;
                let place = &self.backing.place;
                place.directory.add_qp(&place.device, qpn, self.settings.vni);
                Ok(Reply::Qp(made))
            }
            Err(own) => {
                self.backing.serials.remove(&own.serial);
                self.forgo(|nic| nic.backing.host.destroy_qp(own.host));
                Err(Status::NOMEM)
            }
        }
    }
}
