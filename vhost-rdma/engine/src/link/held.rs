//! Requests from elsewhere that cannot be executed at once: some wait for an owner of memory, who
//! has a part to do first ([`super::Awaited::Owner`]), and of datagrams to a group the rest goes on
//! in steps. It does not matter which link brought them.
//!
//! A process chooses how many there are and when it answers, so no answer looks through all of
//! them, and each has a time at which it has waited long enough.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Ask, Owner};
use crate::Nanos;

/// See the module.
#[derive(Debug, Default)]
pub struct Waiting {
    /// By the number of the job.
    asks: BTreeMap<u64, (Nanos, Ask)>,
    /// When each has waited long enough.
    due: BTreeSet<(Nanos, u64)>,
    /// Those whose owner has answered.
    ready: VecDeque<Ask>,
    /// Those of which a part is done.
    begun: VecDeque<Ask>,
}

impl Waiting {
    /// When the next has waited long enough for its owner.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.due.first().map(|(until, _)| *until)
    }

    /// Whether one can be gone on with.
    pub(super) fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.begun.is_empty()
    }

    /// One waits for an owner of memory to do this job, until then at the latest.
    pub fn hold(&mut self, until: Nanos, job: u64, ask: Ask) {
        self.due.insert((until, job));
        self.asks.insert(job, (until, ask));
    }

    /// One is to be gone on with, before all others.
    pub fn put_back(&mut self, ask: Ask) {
        self.begun.push_front(ask);
    }

    /// An owner has done a job that a request may wait for, or could not.
    pub fn owner_answered(&mut self, job: u64, owner: Owner) {
        if let Some(mut ask) = self.take(job) {
            ask.owner = owner;
            self.ready.push_back(ask);
        }
    }

    /// The oldest whose owner has answered.
    pub(super) fn next_ready(&mut self) -> Option<Ask> {
        self.ready.pop_front()
    }

    /// One of which a part is done.
    pub(super) fn next_begun(&mut self) -> Option<Ask> {
        self.begun.pop_front()
    }

    /// One that has waited long enough, and the job that it waits for.
    pub(super) fn take_due(&mut self, now: Nanos) -> Option<(u64, Ask)> {
        let (_, job) = self.due.first().copied().filter(|(until, _)| *until <= now)?;
        self.take(job).map(|ask| (job, ask))
    }

    fn take(&mut self, job: u64) -> Option<Ask> {
        let (until, ask) = self.asks.remove(&job)?;
        self.due.remove(&(until, job));
        Some(ask)
    }
}
