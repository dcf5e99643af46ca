//! Requests of other shards that wait for an owner of mirrored memory (`crossing`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Nanos;
use crate::link::Ask;

/// Requests that wait for an owner. A process chooses how many there are and when it answers, so
/// that no answer looks through all of them.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// By the number of the job.
    pub(super) asks: BTreeMap<u64, (Nanos, Ask)>,
    /// When each has waited long enough.
    pub(super) due: BTreeSet<(Nanos, u64)>,
    /// Those whose owner has answered.
    pub(super) ready: VecDeque<Ask>,
}

impl Waiting {
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.due.first().map(|(until, _)| *until)
    }

    pub(super) fn has_work(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(super) fn put(&mut self, until: Nanos, job: u64, ask: Ask) {
        self.due.insert((until, job));
        self.asks.insert(job, (until, ask));
    }

    pub(super) fn take(&mut self, job: u64) -> Option<Ask> {
        let (until, ask) = self.asks.remove(&job)?;
        self.due.remove(&(until, job));
        Some(ask)
    }

    /// One that has waited long enough.
    pub(super) fn take_due(&mut self, now: Nanos) -> Option<Ask> {
        let (_, job) = self.due.first().copied().filter(|(until, _)| *until <= now)?;
        self.take(job)
    }
}
