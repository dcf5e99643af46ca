//! What a NIC has still to do to many of its queue pairs: tell those of a dead CQ, and set those of
//! a paused NIC going again.
//!
//! Peers and guests choose when a CQ overruns and how many queue pairs complete to it, so none of
//! this is done where it begins: it is noted, and done in the NIC's own turns, some queue pairs at
//! a time.

use super::roster::{Roster, Walk};

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

    /// The next queue pair to be looked at after a pause.
    pub(crate) fn next_to_resume(&mut self, qps: &Roster) -> Option<u32> {
        self.resume.next(qps)
    }

    /// Begins to tell the users of CQs that died meanwhile, once all others are told.
    pub(crate) fn begin_telling(&mut self, qps: &Roster) {
        if self.tell.is_over() && !self.dead.is_empty() {
            self.telling = std::mem::take(&mut self.dead);
            self.telling.sort_unstable();
            self.tell = qps.walk();
        }
    }

    /// The next queue pair that may use one of them.
    pub(crate) fn next_to_tell(&mut self, qps: &Roster) -> Option<u32> {
        self.tell.next(qps)
    }

    /// Whether the users of this CQ are being told.
    pub(crate) fn tells_of(&self, cqn: u32) -> bool {
        self.telling.binary_search(&cqn).is_ok()
    }
}
