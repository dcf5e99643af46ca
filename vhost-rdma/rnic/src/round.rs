//! How a shard drives a NIC on an RNIC: one bounded round after the other.

use easy_ext::ext;
use vhost_rdma_engine::nic::budget::Budget;
use vhost_rdma_engine::nic::qp::State;
use vhost_rdma_engine::nic::{Nanos, NicSettings, NicState};

use super::addresses::Addresses as _;
use super::cq::CqVerbs as _;
use super::ending::Endings as _;
use super::events::Events as _;
use super::gsi::GsiVerbs as _;
use super::nic::Nic;
use super::peer_check::PeerChecks as _;
use super::receiver::Receiver as _;
use super::requester::Requester as _;
use super::srq::SrqVerbs as _;

/// QPs that run in one round.
const ROUND_QPS: usize = 16;

/// Time for one round, beside what a burst takes.
const RUN: Nanos = 50_000;

#[ext(Upkeep)]
pub(super) impl Nic {
    /// The operator changed the NIC.
    fn change(&mut self, settings: NicSettings) {
        let vni = self.settings.vni;
        self.settings = NicSettings { vni, ..settings };
        self.withdraw_addresses();
        self.check_peers();
    }

    /// One bounded round.
    fn run_round(&mut self, now: Nanos) -> bool {
        self.now = now;
        self.backing.at_once = 0;
        if std::mem::take(&mut self.backing.armed) {
            self.backing.ask_host = true;
        }
        let mut budget = self.meter.budget_at(now, RUN);
        let mut busy = self.take_events(now) | self.end_waits(now) | self.stop_some();
        if self.life != NicState::Ready {
            return busy;
        }
        if !self.backing.stopping.has_told_all() {
            self.tell_some(&mut budget);
            busy = true;
        }
        if !self.backing.peer_check.is_over() {
            self.check_peers_on(&mut budget);
            busy = true;
        }
        if !self.chores.is_empty() {
            self.do_chores(&mut budget);
            busy = true;
        }
        busy |= self.poll_host() > 0;
        busy |= self.run_queues(&mut budget);
        busy |= self.run_gsi();
        busy
    }

    fn run_queues(&mut self, budget: &mut Budget) -> bool {
        let mut busy = false;
        // As with QPs below.
        for _ in 0..self.backing.run_srqs.len() {
            let Some(srqn) = self.backing.run_srqs.pop_front() else { break };
            self.post_shared(srqn);
            busy = true;
            if budget.is_over(&self.meter) {
                return true;
            }
        }
        // What is on the queue now; QPs that go back to its end wait for the next round.
        for _ in 0..self.run.len().min(ROUND_QPS) {
            let Some(qpn) = self.run.pop_front() else { break };
            self.run_qp(qpn);
            busy = true;
            if budget.is_over(&self.meter) {
                break;
            }
        }
        busy
    }

    /// Whether there is something to do. If not, the host has been told to wake the worker.
    fn has_own_work(&mut self) -> bool {
        if !self.backing.stopping.is_over() {
            return true;
        }
        if self.backing.host_gone {
            return false;
        }
        self.backing.armed = true;
        if self.backing.host.arm().is_err() {
            return false;
        }
        // A completion between the last poll and the arm raises no event.
        let waiting =
            self.life == NicState::Ready && self.backing.services.has_work(&self.backing.inbox);
        let rests = self.run.is_empty()
            && self.backing.run_srqs.is_empty()
            && self.chores.is_empty()
            && self.backing.stopping.has_told_all()
            && self.backing.peer_check.is_over();
        waiting || !rests || self.peek_host()
    }

    fn run_qp(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.scheduled = false;
        match qp.state {
            State::Reset => {}
            State::Err => self.flush(qpn),
            State::Sqe => {
                self.post_receives(qpn);
                self.flush(qpn);
            }
            State::Rts => {
                self.post_receives(qpn);
                self.post_sends(qpn);
            }
            State::Init | State::Rtr | State::Sqd => self.post_receives(qpn),
        }
    }
}
