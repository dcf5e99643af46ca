//! Changes of QPs: the state machine's commands.

use virtio_rdma_abi as abi;

use super::engine::{Engine, Execution};
use super::nic::Soft;
use super::nic::{NicState, SoftNic};
use super::nics::Nics;
use super::waiter::Waiter;
use super::work::{Recover, SoftWork};
use crate::link::NicId;
use crate::nic::budget::Budget;
use crate::nic::qp::{State, state};
use crate::nic::work::{Begun, Work};
use crate::nic::{Reply, Status};

impl<N: Nics> Execution<'_, N> {
    /// What was posted to a queue pair in SQE is flushed (IBTA 10.3.1.5), also where its owner goes
    /// on at once: or some of what stands behind a send that failed would be sent, and some not.
    pub(super) fn begin_modify_qp(
        &mut self,
        id: NicId,
        (ctx, qpn): (u32, u32),
        attr: Box<abi::QpAttr>,
    ) -> Result<Begun<Soft>, Status> {
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        let sends = nic.sends_to_flush((ctx, qpn), &attr)?;
        if sends == 0 {
            return self.modify_qp(id, (ctx, qpn), &attr).map(Begun::Done);
        }
        let recover = Recover { ctx, qpn, attr, sends };
        Ok(Begun::Steps(Work::Own(SoftWork::Recover(recover))))
    }

    /// Flushes some of what is posted; what is left of the command.
    pub(super) fn recover_qp(
        &mut self,
        id: NicId,
        mut recover: Recover,
        budget: &mut Budget,
    ) -> Result<Option<Work<Soft>>, Status> {
        let Recover { ctx, qpn, ref attr, ref mut sends } = recover;
        let nic = self.nic_mut(id).ok_or(Status::FATAL)?;
        if nic.flush_sends(qpn, sends, budget) && *sends > 0 {
            return Ok(Some(Work::Own(SoftWork::Recover(recover))));
        }
        self.modify_qp(id, (ctx, qpn), attr).map(|_| None)
    }

    fn modify_qp(
        &mut self,
        id: NicId,
        (ctx, qpn): (u32, u32),
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
    /// How many sends are to be flushed before a QP may change as a command says.
    fn sends_to_flush(
        &mut self,
        (ctx, qpn): (u32, u32),
        attr: &abi::QpAttr,
    ) -> Result<u32, Status> {
        let qp = self.owned_qp(ctx, qpn)?;
        let (from, to) = state::change(qp.kind, qp.state, attr)?;
        // The CQ of a NIC that stands still is not written to.
        if (from, to) != (State::Sqe, State::Rts) || self.life != NicState::Ready {
            return Ok(0);
        }
        // Also those that no round has seen yet.
        let doorbell = qp.doorbells[0];
        if let Some(post) = self.contexts.look_at(ctx, doorbell) {
            self.posted(post);
        }
        let send = self.qps.get(&qpn).and_then(|qp| qp.send.as_ref());
        Ok(send.map_or(0, |send| send.left()))
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
                qp.attrs.begin_drain(attr);
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
