//! Changes of QPs, and their end.
//!
//! A change is checked by the engine's own rules first, which are those of every verbs provider
//! (IBTA 10.3), then made by the hardware; the guest's view of it is kept beside, because addresses
//! and GID indices differ between guest and host.

use easy_ext::ext;
use vhost_rdma_engine::nic::qp::{Kind, State, state};
use vhost_rdma_engine::nic::work::{self, Begun};
use vhost_rdma_engine::nic::{Reply, Status};
use virtio_rdma_abi::{self as abi, attr_mask, qps};
use zerocopy::little_endian::U32;

use super::addresses::Addresses as _;
use super::drain::Drains as _;
use super::findings::Purpose;
use super::gsi::GsiVerbs as _;
use super::nic::{Nic, Rnic};
use super::reach::Reach as _;
use super::refusal::Control as _;
use super::work::Work;

/// A change to a state and nothing else.
fn to_state(state: u8) -> abi::QpAttr {
    abi::QpAttr { mask: U32::new(attr_mask::STATE), qp_state: state, ..abi::QpAttr::default() }
}

/// The least that takes a QP from RESET to INIT.
fn to_init(kind: Kind) -> abi::QpAttr {
    let rights = if kind.is_connected() { attr_mask::ACCESS_FLAGS } else { attr_mask::QKEY };
    let mask = attr_mask::STATE | attr_mask::PKEY_INDEX | attr_mask::PORT | rights;
    abi::QpAttr { mask: U32::new(mask), port_num: 1, ..to_state(qps::INIT) }
}

#[ext(Modify)]
pub(super) impl Nic {
    fn modify_qp(&mut self, ctx: u32, qpn: u32, attr: &abi::QpAttr) -> Result<Begun<Rnic>, Status> {
        if qpn == abi::GSI_QPN {
            return self.modify_gsi(ctx, attr).map(Begun::Done);
        }
        self.owned_qp(ctx, qpn)?;
        self.check_change(qpn, attr)?;
        if attr.mask.get() & attr_mask::AV == 0 {
            return self.change_qp(ctx, qpn, attr);
        }
        let peer = self.resolve(&attr.ah)?;
        let here = self.check_peer_qp(&peer.dgid, attr.dest_qpn.get(), attr.mask.get())?;
        let pdn = self.qps.get(&qpn).ok_or(Status::NOENT)?.pdn;
        let pd = self.host_pd(ctx, pdn)?;
        self.look_for(ctx, Purpose::Connection { qpn, attr: Box::new(*attr), here }, (pd, peer))
    }

    /// Changes a QP whose new peer, if it has one, is known to the host.
    fn change_qp(&mut self, ctx: u32, qpn: u32, attr: &abi::QpAttr) -> Result<Begun<Rnic>, Status> {
        self.owned_qp(ctx, qpn)?;
        let (from, to) = self.check_change(qpn, attr)?;
        let mut asked = *attr;
        if attr.mask.get() & attr_mask::AV != 0 {
            asked.ah = self.resolve(&attr.ah)?;
            self.check_peer_qp(&asked.ah.dgid, attr.dest_qpn.get(), attr.mask.get())?;
            // A third-party host was told another PSN and MTU than the guest's, if it came by
            // rdma_cm (`cm`).
            let place = &self.backing.place;
            let end = (asked.ah.dgid, attr.dest_qpn.get());
            if let Some(agreed) = place.directory.take_agreed(&place.device, end) {
                asked.rq_psn = U32::new(agreed.psn);
                asked.path_mtu = agreed.mtu;
            }
        }
        let qp = self.qps.get(&qpn).ok_or(Status::NOENT)?;
        let (host, kind) = (qp.own.host, qp.kind);
        if from == State::Reset && to == State::Err {
            // Linux knows no way from RESET to ERR (drivers/infiniband/core/verbs.c,
            // qp_state_table).
            let step = to_init(kind);
            self.backing.host.modify_qp(host, &step).map_err(|error| self.refused(error))?;
        }
        // The hardware of a QP that failed in software only never left RTS.
        if from == State::Sqe && to == State::Rts {
            asked.mask = U32::new(asked.mask.get() & !attr_mask::CUR_STATE);
        }
        self.backing.host.modify_qp(host, &asked).map_err(|error| {
            tracing::debug!(qpn, ?asked, %error, "the RNIC refuses a change of a QP");
            self.refused(error)
        })?;
        let gids = std::mem::take(&mut self.gids);
        let held = |index: u16| gids.get(usize::from(index)).is_some_and(Option::is_some);
        let kept = self.qps.get_mut(&qpn).map(|qp| qp.attrs.set(attr, held));
        self.gids = gids;
        kept.transpose()?;
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return Ok(Begun::Done(Reply::Done));
        };
        qp.state = to;
        if to == State::Reset {
            let work = Work::BeginAnew(qpn, self.drain());
            return Ok(Begun::Steps(work::Work::Own(work)));
        }
        self.schedule(qpn);
        Ok(Begun::Done(Reply::Done))
    }

    fn check_change(&self, qpn: u32, attr: &abi::QpAttr) -> Result<(State, State), Status> {
        let qp = self.qps.get(&qpn).ok_or(Status::NOENT)?;
        let (from, to) = state::change(qp.kind, qp.state, attr)?;
        // On a copy: the hardware may still refuse.
        qp.attrs.clone().set(attr, |index| self.holds(index))?;
        Ok((from, to))
    }

    fn query_qp(&mut self, ctx: u32, qpn: u32) -> Result<Reply, Status> {
        if qpn == abi::GSI_QPN {
            return self.query_gsi(ctx);
        }
        self.owned_qp(ctx, qpn)?;
        let qp = self.qps.get(&qpn).ok_or(Status::NOENT)?;
        let known = qp.state;
        let (state, draining) =
            self.backing.host.query_qp(qp.own.host).map_err(|error| self.refused(error))?;
        let state = State::from_abi(state).unwrap_or(known);
        // The hardware may have found an error that its completion has not told yet.
        if state == State::Err && known != State::Err {
            self.enter_error(qpn);
        }
        // The hardware of a QP that failed in software may not know it yet, or ever.
        let behind = matches!((known, state), (State::Err, _) | (State::Sqe, State::Rts));
        let shown = if behind { known } else { state };
        let qp = self.qps.get(&qpn).ok_or(Status::NOENT)?;
        let attr = qp.attrs.report(shown, draining);
        Ok(Reply::QpAttr(Box::new(abi::QpQueryResp { attr })))
    }

    fn destroy_qp(&mut self, ctx: u32, qpn: u32) -> Result<Begun<Rnic>, Status> {
        if qpn == abi::GSI_QPN {
            return self.destroy_gsi(ctx).map(Begun::Done);
        }
        self.owned_qp(ctx, qpn)?;
        Ok(Begun::Steps(work::Work::Own(Work::EndQp(qpn))))
    }
}
