//! Changes of QPs: the state machine's commands.

use virtio_rdma_abi as abi;

use super::engine::{Engine, Execution};
use super::nic::SoftNic;
use super::nics::Nics;
use super::waiter::Waiter;
use crate::link::NicId;
use crate::nic::qp::{State, state};
use crate::nic::{Reply, Status};

impl<N: Nics> Execution<'_, N> {
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

impl SoftNic {
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
                if qp.send.as_ref().is_none_or(|send| !send.has_begun()) {
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
