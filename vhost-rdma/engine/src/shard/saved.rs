//! NICs that go on in another process: the shard's part, which is to lend them to `soft`.

use super::{NicId, SavedNic, Shard};
use crate::memory::AddressSpace;
use crate::nic::saved::BadState;

impl Shard {
    /// Pauses a NIC that is to be saved. All of a network are, before the first is saved: one that
    /// still ran would find that nobody answers.
    pub fn halt(&mut self, id: NicId) {
        self.soft().halt(id);
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
