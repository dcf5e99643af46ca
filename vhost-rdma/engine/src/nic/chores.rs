//! What a NIC has still to do to many of its queue pairs: tell those of a dead CQ, and set those of
//! a paused NIC going again.
//!
//! Peers and guests choose when a CQ overruns and how many queue pairs complete to it, so none of
//! this is done where it begins: it is noted, and done in the NIC's own turns, some queue pairs at
//! a time.

use super::budget::{Budget, cost};
use super::nic::Nic;
use super::provider::Provider;
use super::roster::Walk;

/// See the module.
#[derive(Debug, Default)]
pub struct Chores {
    /// CQs that died since the walk began, or before there was one.
    dead: Vec<u32>,
    /// The CQs whose users are being told, and how far that is.
    telling: Vec<u32>,
    tell: Walk,
    /// Queue pairs that are to be looked at after a pause.
    resume: Walk,
}

impl Chores {
    /// Whether there is none.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.dead.is_empty() && self.tell.is_over() && self.resume.is_over()
    }

    pub(crate) fn cq_died(&mut self, cqn: u32) {
        self.dead.push(cqn);
    }

    /// CQs whose users have still to be told.
    pub(crate) fn dead_cqs(&self) -> Vec<u32> {
        let telling = if self.tell.is_over() { &[] } else { &self.telling[..] };
        telling.iter().chain(&self.dead).copied().collect()
    }

    /// Whether some queue pairs still wait as they did before a pause.
    pub(crate) const fn are_resuming(&self) -> bool {
        !self.resume.is_over()
    }

    pub(crate) const fn resume(&mut self, all: Walk) {
        self.resume = all;
    }
}

impl<P: Provider> Nic<P> {
    /// Does some of the chores.
    pub fn do_chores(&mut self, budget: &mut Budget) {
        while let Some(qpn) = self.chores.resume.next(&self.qp_numbers) {
            self.meter.charge(cost::WAKE);
            P::resumed(self, qpn);
            if budget.is_over(&self.meter) {
                return;
            }
        }
        if self.chores.tell.is_over() && !self.chores.dead.is_empty() {
            self.chores.telling = std::mem::take(&mut self.chores.dead);
            self.chores.telling.sort_unstable();
            self.chores.tell = self.qp_numbers.walk();
        }
        while let Some(qpn) = self.chores.tell.next(&self.qp_numbers) {
            self.meter.charge(cost::VISIT);
            let among = |cqn| self.chores.telling.binary_search(&cqn).is_ok();
            let told =
                self.qps.get(&qpn).is_some_and(|qp| among(qp.send_cqn) || among(qp.recv_cqn));
            if told {
                self.qp_fatal(qpn);
            }
            if budget.is_over(&self.meter) {
                return;
            }
        }
    }
}
