//! Requests from elsewhere that wait for an owner of memory: somebody beside the responder has a
//! part to do first ([`super::Awaited::Owner`]).
//!
//! A process chooses how many there are and when it answers, so no answer looks through all of
//! them, and each has a time at which it has waited long enough.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Ask, Owner};
use crate::Nanos;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// By the number of the job.
    asks: BTreeMap<u64, (Nanos, Ask)>,
    /// When each has waited long enough.
    due: BTreeSet<(Nanos, u64)>,
    /// Those whose owner has answered.
    ready: VecDeque<Ask>,
}

impl Held {
    /// When the next has waited long enough.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.due.first().map(|(until, _)| *until)
    }

    /// Whether an owner has answered.
    pub(super) fn has_work(&self) -> bool {
        !self.ready.is_empty()
    }

    /// One waits for a job, until then at the latest.
    pub(super) fn put(&mut self, until: Nanos, job: u64, ask: Ask) {
        self.due.insert((until, job));
        self.asks.insert(job, (until, ask));
    }

    /// An owner has done a job, or could not.
    pub(super) fn answered(&mut self, job: u64, owner: Owner) {
        if let Some(mut ask) = self.take(job) {
            ask.owner = owner;
            self.ready.push_back(ask);
        }
    }

    /// The oldest whose owner has answered.
    pub(super) fn next_ready(&mut self) -> Option<Ask> {
        self.ready.pop_front()
    }

    /// One that has waited long enough.
    pub(super) fn take_due(&mut self, now: Nanos) -> Option<Ask> {
        let (_, job) = self.due.first().copied().filter(|(until, _)| *until <= now)?;
        self.take(job)
    }

    fn take(&mut self, job: u64) -> Option<Ask> {
        let (until, ask) = self.asks.remove(&job)?;
        self.due.remove(&(until, job));
        Some(ask)
    }
}
