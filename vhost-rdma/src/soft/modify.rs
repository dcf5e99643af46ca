//! Changes of QPs: the state machine's commands, and the end of a QP.

use virtio_rdma_abi as abi;

use super::DeferredDrop;
use super::engine::{Engine, Execution, Nics};
use super::nic::{KERNEL, Nic};
use super::qp::Waiter;
use crate::link::NicId;
use crate::nic::qp::{Kind, State, state};
use crate::nic::timer::Waiting;
use crate::nic::{Reply, Status};

impl<N: Nics> Execution<'_, N> {
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
            self.engine.qpns.free(qpn);
        }
    }

    pub(super) fn modify_qp(
        &mut self,
        id: NicId,
        ctx: u32,
        qpn: u32,
        attr: &abi::QpAttr,
    ) -> Result<Reply, Status> {
        let Self { nics, engine: Engine { networks, ways, .. }, .. } = self;
        let nic = nics.nic(id).ok_or(Status::FATAL)?;
        let reached = nic.modify_qp(ctx, qpn, attr)?;
        if reached && let Some(qp) = nic.qps.get(&qpn).filter(|qp| qp.kind.is_connected()) {
            // The peer may have been waiting for this QP to appear.
            let peer = networks.holder(nic.settings.vni, &qp.attrs.av().dgid);
            let dest_qpn = qp.attrs.dest_qpn();
            if let (None, Some(bus)) = (peer, ways.bus()) {
                bus.wake(nic.settings.vni, qp.attrs.av().dgid, dest_qpn);
            }
            nic.backing.wakes.extend(peer.map(|peer| Waiter::here(peer, dest_qpn)));
        }
        Ok(Reply::Done)
    }
}

impl Nic {
    pub(super) fn remove_qp(&mut self, qpn: u32) {
        let Some(qp) = self.unlink_qp(qpn) else { return };
        self.timers.remove(Waiting::Send(qpn));
        if qp.own.groups > 0 {
            self.leave_all(|member| member == qpn);
        }
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
            (_, State::Reset) => {
                qp.own.reset();
                self.reset_qp(qpn);
            }
            (_, State::Err) => self.enter_error(qpn),
            (State::Rts, State::Sqd) => {
                qp.own.draining = true;
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
        let (from, to) = state::change(qp.kind, qp.state, attr)?;
        // IBTA 10.3.1.4: not before the send queue is drained.
        if from == State::Sqd && to == State::Rts && qp.own.draining {
            return Err(Status::INVAL);
        }
        qp.attrs.set(attr, held)?;
        Ok((from, to))
    }
}

impl Kind {
    /// Only the kernel owns the GSI QP.
    pub(super) fn is_allowed_to(self, ctx: u32) -> bool {
        self != Self::Gsi || ctx == KERNEL
    }
}
