//! The jobs that owners of mirrored memory are asked for (`mirror`).

use std::collections::{BTreeMap, VecDeque};

use super::waiter::Waiter;
use crate::link::NicId;
use crate::nic::Job;

/// Jobs of one context that are under way.
pub(super) const JOBS: usize = 256;
/// Bits of a number that are counted; those above are the NIC's.
const NUMBERS: u32 = 40;

/// The jobs of one NIC's owners. Whatever ends with a context is found by it, so that the end of
/// one costs nothing on account of others.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    last: u64,
    /// Contexts that take jobs, and who waits for each that is under way.
    pub(super) owners: BTreeMap<u32, BTreeMap<u64, Waiter>>,
    /// On their way to the port, with the context; some may be nobody's any more.
    pub(super) unsent: VecDeque<(u32, Job)>,
}

impl Jobs {
    /// Those of a NIC: no other on this shard has a job of the same number, or an owner that a
    /// requester has left could answer in the place of the one that it asks now.
    pub(super) fn of(id: NicId) -> Self {
        Self { last: u64::from(id.0) << NUMBERS, ..Self::default() }
    }

    /// Whether nobody here takes jobs.
    pub(super) fn is_idle(&self) -> bool {
        self.owners.is_empty()
    }

    /// Jobs that are under way, of whoever asked.
    pub(super) fn open(&self) -> impl Iterator<Item = &Waiter> {
        self.owners.values().flat_map(BTreeMap::values)
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub(super) fn serves(&self, ctx: u32) -> bool {
        self.owners.contains_key(&ctx)
    }

    /// A context is gone, and nobody answers its jobs.
    pub(super) fn end(&mut self, ctx: u32) {
        self.owners.remove(&ctx);
    }

    /// Who waits for a job of a context.
    pub(super) fn waiter(&self, ctx: u32, number: u64) -> Option<Waiter> {
        self.owners.get(&ctx)?.get(&number).copied()
    }

    /// Whether the context takes a job whose turn has not come: half of the room is for those whose
    /// turn it is.
    pub(super) fn has_room_ahead(&self, ctx: u32) -> bool {
        self.owners.get(&ctx).is_some_and(|open| open.len() < JOBS / 2)
    }

    /// `None`: the context takes no more.
    pub(super) fn begin(&mut self, ctx: u32, requester: Waiter, job: Job) -> Option<u64> {
        let open = self.owners.get_mut(&ctx).filter(|open| open.len() < JOBS)?;
        self.last += 1;
        open.insert(self.last, requester);
        self.unsent.push_back((ctx, Job { number: self.last, ..job }));
        Some(self.last)
    }

    /// Who waited for a job of the context, if anybody did.
    pub(super) fn answered(&mut self, ctx: u32, number: u64) -> Option<Waiter> {
        self.owners.get_mut(&ctx)?.remove(&number)
    }
}
