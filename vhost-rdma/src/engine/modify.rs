//! Changes of QPs: the state machine's commands, and the end of a QP.

use virtio_rdma_abi::{self as abi, attr_mask, event};

use super::nic::{KERNEL, Nic};
use super::qp::Waiter;
use super::{DeferredDrop, Shard};
use crate::nic::budget::cost;
use crate::nic::qp::{Kind, State, state};
use crate::nic::timer::Waiting;
use crate::nic::{Reply, Status};
use crate::transport::NicId;

/// Events whose object is a QP.
const QP_EVENTS: [u32; 6] = [
    event::QP_FATAL,
    event::QP_REQ_ERR,
    event::QP_ACCESS_ERR,
    event::COMM_EST,
    event::SQ_DRAINED,
    event::QP_LAST_WQE_REACHED,
];

impl Shard {
    pub(super) fn destroy_qp(&mut self, id: NicId, ctx: u32, qpn: u32) -> Result<Reply, Status> {
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        nic.owned_qp(ctx, qpn)?;
        nic.remove_qp(qpn);
        self.leave_empty_groups(id);
        self.qp_gone(qpn);
        Ok(Reply::Done)
    }

    /// What the shard keeps for a QP ends with it.
    pub(super) fn qp_gone(&mut self, qpn: u32) {
        if qpn != abi::GSI_QPN {
            self.qpns.free(qpn);
        }
    }

    pub(super) fn modify_qp(
        &mut self,
        id: NicId,
        ctx: u32,
        qpn: u32,
        attr: &abi::QpAttr,
    ) -> Result<Reply, Status> {
        let (nic, networks, _) = self.parts(id).ok_or(Status::FATAL)?;
        let reached = nic.modify_qp(ctx, qpn, attr)?;
        if reached && let Some(qp) = nic.qps.get(&qpn).filter(|qp| qp.kind.is_connected()) {
            // The peer may have been waiting for this QP to appear.
            let peer = networks.holder(nic.settings.vni, &qp.attrs.av().dgid);
            let dest_qpn = qp.attrs.dest_qpn();
            nic.wakes.extend(peer.map(|peer| Waiter { nic: peer, qpn: dest_qpn }));
        }
        Ok(Reply::Done)
    }
}

impl Nic {
    pub(super) fn remove_qp(&mut self, qpn: u32) {
        let Some(qp) = self.qps.remove(&qpn) else { return };
        self.meter.charge(cost::OBJECT);
        self.qp_numbers.remove(qpn);
        self.timers.remove(Waiting::Send(qpn));
        self.leave_pd(qp.pdn);
        if qp.groups > 0 {
            self.leave_all(|member| member == qpn);
        }
        // Its place in the run queue stays: it stands for nothing, and whoever searched for it could be made to search all day.
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
        self.forget_events(&QP_EVENTS, qpn);
        self.deferred_drops.push(DeferredDrop::new(qp));
    }

    /// Modifies a QP; true if inbound requests are executed from now on that were not before.
    fn modify_qp(&mut self, ctx: u32, qpn: u32, attr: &abi::QpAttr) -> Result<bool, Status> {
        self.owned_qp(ctx, qpn)?;
        let gids = std::mem::take(&mut self.gids);
        let held = |index: u16| gids.get(usize::from(index)).copied().flatten().is_some();
        let changed = self.change_attributes(qpn, attr, held);
        self.gids = gids;
        let (from, to) = changed?;
        let Some(qp) = self.qps.get_mut(&qpn) else { return Ok(false) };
        qp.state = to;
        match (from, to) {
            (_, State::Reset) => self.reset_qp(qpn),
            (_, State::Err) => self.enter_error(qpn),
            (State::Rts, State::Sqd) => {
                qp.draining = true;
                if qp.send.as_ref().is_none_or(|send| send.current.is_none()) {
                    self.drained(qpn);
                }
            }
            (_, State::Rts) => self.schedule(qpn),
            _ => {}
        }
        Ok(!from.receives() && to.receives())
    }

    fn change_attributes(
        &mut self,
        qpn: u32,
        attr: &abi::QpAttr,
        held: impl Fn(u16) -> bool,
    ) -> Result<(State, State), Status> {
        let qp = self.qps.get_mut(&qpn).ok_or(Status::NOENT)?;
        let mask = attr.mask.get();
        let from = qp.state;
        let to = if mask & attr_mask::STATE != 0 {
            State::from_abi(attr.qp_state).ok_or(Status::INVAL)?
        } else {
            from
        };
        let wrong_current =
            mask & attr_mask::CUR_STATE != 0 && State::from_abi(attr.cur_qp_state) != Some(from);
        // IBTA 10.3.1.4: not before the send queue is drained.
        let still_draining = from == State::Sqd && to == State::Rts && qp.draining;
        if !state::allows(qp.kind, from, to, mask) || wrong_current || still_draining {
            return Err(Status::INVAL);
        }
        qp.attrs.set(attr, held)?;
        Ok((from, to))
    }

    fn reset_qp(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.reset();
        let (ctx, doorbells) = (qp.ctx, qp.doorbells);
        for doorbell in doorbells.into_iter().filter(|&doorbell| doorbell != abi::db::NONE) {
            self.contexts.reset_doorbell(ctx, doorbell);
        }
        self.forget_events(&QP_EVENTS, qpn);
    }
}

impl Kind {
    /// Only the kernel owns the GSI QP.
    pub(super) fn is_allowed_to(self, ctx: u32) -> bool {
        self != Self::Gsi || ctx == KERNEL
    }
}
