//! The turns of software NICs in a round: deadlines, chores, queue pairs, and requesters whose wait
//! an event ended.

use super::engine::Execution;
use super::nic::{NicState, SoftNic};
use super::nics::Nics;
use super::waiter::{Requester, Waiter};
use super::{Nanos, engine::Engine};
use crate::link::NicId;
use crate::nic::budget::{Budget, cost};
use crate::nic::timer::Waiting;

impl Engine {
    /// Takes over whom a NIC wakes.
    #[inline]
    pub(crate) fn take_wakes(&mut self, nic: &mut SoftNic) {
        if nic.backing.wakes.is_empty() {
            return;
        }
        let vni = nic.settings.vni;
        for Waiter { who, qpn } in nic.backing.wakes.drain(..) {
            match (who, self.ways.bus()) {
                (Requester::Here(nic), _) => self.wakes.push_back((nic, qpn)),
                (Requester::Elsewhere(gid), Some(bus)) => match self.networks.holder(vni, &gid) {
                    // It has come here meanwhile.
                    Some(nic) => self.wakes.push_back((nic, qpn)),
                    None => bus.wake(vni, gid, qpn),
                },
                (Requester::Elsewhere(_), None) => {}
            }
        }
    }
}

impl<N: Nics> Execution<'_, N> {
    /// Wakes those whom [`Engine::take_wakes`] found; true if there were any.
    pub(crate) fn wake_waiters(&mut self, budget: &mut Budget) -> bool {
        let found = !self.engine.wakes.is_empty();
        while let Some((id, qpn)) = self.engine.wakes.pop_front() {
            self.meter.charge(cost::WAKE);
            match self.nic_mut(id) {
                Some(nic) => nic.woken(qpn),
                None => self.engine.wake_elsewhere(id, qpn),
            }
            if budget.is_over(self.meter) {
                break;
            }
        }
        found
    }

    /// Serves one NIC for a turn: whether it had any work, and whether it has more for this round.
    pub(crate) fn serve(&mut self, id: NicId, now: Nanos, budget: &mut Budget) -> (bool, bool) {
        let Some(nic) = self.nic_mut(id) else { return (false, false) };
        if nic.has_other_work(now) {
            // Before the timers: what was waited for when the NIC stood still is waited for anew.
            nic.do_chores(budget);
            if !nic.chores.are_resuming() {
                self.fire_timers(id, now, budget);
            }
            let Some(nic) = self.nic_mut(id) else { return (true, false) };
            nic.begin_round(now);
        }
        let Some(nic) = self.nic_mut(id).filter(|nic| nic.backing.turns > 0) else {
            return (true, false);
        };
        nic.backing.turns -= 1;
        if let Some(qpn) = nic.run.pop_front() {
            self.run_qp(id, qpn, budget, now);
        }
        let more = self.nic_mut(id).is_some_and(|nic| {
            nic.life == NicState::Ready && (nic.backing.turns > 0 || nic.has_other_work(now))
        });
        (true, more)
    }

    /// A turn for each queue pair that has work, as long as there is time: a round would come too
    /// late for it.
    pub(crate) fn catch_up(
        &mut self,
        id: NicId,
        first: Option<u32>,
        now: Nanos,
        budget: &mut Budget,
    ) {
        let Some(nic) = self.nic_mut(id) else { return };
        nic.now = now;
        let waiting = nic.run.len();
        // One that waits for a timer or an answer goes on waiting.
        let first = first.filter(|qpn| nic.qps.get(qpn).is_some_and(|qp| qp.scheduled));
        if let Some(qpn) = first {
            self.settle_turn(id, qpn, budget, now);
        }
        for _ in 0..waiting {
            let Some(qpn) = self.nic_mut(id).and_then(|nic| nic.run.pop_front()) else { return };
            self.run_qp(id, qpn, budget, now);
            if budget.is_over(self.meter) {
                return;
            }
        }
    }

    fn fire_timers(&mut self, id: NicId, now: Nanos, budget: &mut Budget) {
        while let Some(nic) = self.nic_mut(id)
            && let Some((deadline, waiting)) = nic.timers.pop(now)
        {
            match waiting {
                Waiting::Send(qpn) => self.timer_fired(id, qpn, deadline),
                Waiting::Event(cqn) => nic.event_timer_fired(cqn, now),
            }
            self.meter.charge(cost::TIMER);
            if budget.is_over(self.meter) {
                return;
            }
        }
    }
}
