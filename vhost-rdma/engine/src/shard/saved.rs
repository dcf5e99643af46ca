//! NICs that go on in another process: the shard's part, which is to lend them to `soft`.

use super::{NicId, SavedNic, Shard};
use crate::memory::AddressSpace;
use crate::nic::saved::BadState;

/// Whether any word that a wait is over is on its way between shards whose NICs are all halted.
///
/// Shards are asked one after the other, so what they say is of different times: a wake that one
/// had not sent yet may have come to the next. But a shard that is halted sends no wake but for one
/// that it hears. If as many were heard as sent, and all shards say the same once more, none was on
/// its way between (F. Mattern, Algorithms for distributed termination detection, 1987: the four
/// counters).
#[derive(Debug, Default)]
pub struct Wakes {
    /// What all of them said last, if as many were heard as sent.
    last: Option<Vec<[u64; 2]>>,
}

impl Wakes {
    /// What all shards say now ([`Shard::wakes_heard`]); true: all wakes have come.
    pub fn are_heard(&mut self, all: impl IntoIterator<Item = Option<[u64; 2]>>) -> bool {
        let all: Option<Vec<[u64; 2]>> = all.into_iter().collect();
        let sum = |all: &[[u64; 2]], which: usize| -> u64 { all.iter().map(|n| n[which]).sum() };
        let now = all.filter(|all| sum(all, 0) == sum(all, 1));
        let over = now.is_some() && now == self.last;
        self.last = now;
        over
    }
}

impl Shard {
    /// Pauses a NIC that is to be saved. All of a network are, before the first is saved: one that
    /// still ran would find that nobody answers.
    pub fn halt(&mut self, id: NicId) {
        self.soft().halt(id);
    }

    /// How many wakes this shard has sent to others, and heard of others; `None` while it has not
    /// dealt with all that it heard. See [`Wakes`].
    #[must_use]
    pub fn wakes_heard(&self) -> Option<[u64; 2]> {
        self.engine.wakes_heard()
    }

    /// Pauses a NIC and says what is left of it; `None` if no driver could go on with that.
    #[must_use]
    pub fn save(&mut self, id: NicId) -> Option<SavedNic> {
        self.soft().save(id)
    }

    /// QPNs that rest, the longest first.
    #[must_use]
    pub fn resting(&self) -> Vec<u32> {
        self.engine.resting()
    }

    /// Has QPNs rest that rested in an earlier process.
    pub fn rest(&mut self, numbers: &[u32]) {
        self.engine.rest(numbers);
    }

    /// Makes a NIC what it was, with this memory. It stands still until [`Self::go_on_with`].
    ///
    /// # Errors
    /// The NIC is as it is after a reset.
    pub fn load(
        &mut self,
        id: NicId,
        saved: SavedNic,
        space: AddressSpace,
    ) -> Result<(), BadState> {
        self.soft().load(id, saved, space)
    }

    /// Has NICs run that were loaded, if they ran before: all of a network at once.
    pub fn go_on_with(&mut self, ids: &[NicId]) {
        self.soft().go_on_with(ids);
    }
}
