//! Numbers of objects, in an order that can be walked in steps.
//!
//! A guest chooses how many objects it has, so nobody may go through all of them in one go; and a
//! hash table cannot be left in the middle. A [`Roster`] lists the numbers beside the table, and a
//! [`Walk`] goes through it from its end: what is taken out is replaced by the last, which the walk
//! has seen already, and what is added comes behind it. So a walk meets everything that was there
//! when it began and is still there, whatever comes and goes between its steps.

use indexmap::IndexSet;
use rustc_hash::FxBuildHasher;

use super::budget::{Budget, Meter, cost};
use super::table::InSlots;

/// Small sets that a roster of many is made of: one that is full moves all that it has in one go.
pub(crate) const MANY: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct Roster<const SHARDS: usize = MANY> {
    shards: [IndexSet<u32, FxBuildHasher>; SHARDS],
    len: usize,
}

impl<const SHARDS: usize> Default for Roster<SHARDS> {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| IndexSet::default()), len: 0 }
    }
}

impl<const SHARDS: usize> Roster<SHARDS> {
    /// Numbers in it.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a number.
    pub fn insert(&mut self, number: u32) {
        if let Some(shard) = self.shards.get_mut(number as usize % SHARDS) {
            self.len += usize::from(shard.insert(number));
        }
    }

    /// Takes a number out.
    pub fn remove(&mut self, number: u32) {
        if let Some(shard) = self.shards.get_mut(number as usize % SHARDS) {
            self.len -= usize::from(shard.swap_remove(&number));
        }
    }

    /// A walk over all.
    pub fn walk(&self) -> Walk {
        if self.len == 0 { Walk::default() } else { Walk { shard: SHARDS - 1, index: usize::MAX } }
    }
}

/// How far a walk is: what lies behind this index of this shard, and behind this shard, was met.
#[derive(Debug, Clone, Copy, Default)]
pub struct Walk {
    shard: usize,
    index: usize,
}

impl Walk {
    /// The next one; `None` at the end.
    #[inline]
    pub fn next<const SHARDS: usize>(&mut self, roster: &Roster<SHARDS>) -> Option<u32> {
        loop {
            let shard = roster.shards.get(self.shard)?;
            if let Some(index) = self.index.min(shard.len()).checked_sub(1) {
                self.index = index;
                return shard.get_index(index).copied();
            }
            let Some(before) = self.shard.checked_sub(1) else {
                self.index = 0;
                return None;
            };
            *self = Self { shard: before, index: usize::MAX };
        }
    }

    /// Whether nothing is left.
    pub const fn is_over(&self) -> bool {
        self.shard == 0 && self.index == 0
    }
}

/// A walk over the slots of a table that numbers its objects itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Slots {
    next: usize,
    end: usize,
}

impl Slots {
    /// A walk over all.
    pub fn of<T>(table: &impl InSlots<T>) -> Self {
        Self { next: 0, end: table.slots() }
    }

    /// The next slot, whether or not there is anything in it.
    pub(crate) fn next(&mut self) -> Option<usize> {
        let index = (self.next < self.end).then_some(self.next)?;
        self.next += 1;
        Some(index)
    }

    /// The number of the next object that is meant; `None` also when the budget is over.
    pub fn sweep<T>(
        &mut self,
        table: &impl InSlots<T>,
        (meter, budget): (&Meter, &mut Budget),
        meant: impl Fn(&T) -> bool,
    ) -> Option<u32> {
        while !budget.is_over(meter) {
            let slot = self.next()?;
            meter.charge(cost::VISIT);
            if let Some((number, _)) = table.at(slot).filter(|(_, object)| meant(object)) {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::Roster;

    #[test]
    fn a_walk_meets_all_that_stay_whatever_comes_and_goes() {
        meets_all(Roster::<1>::default());
        meets_all(Roster::<4>::default());
    }

    fn meets_all<const SHARDS: usize>(mut roster: Roster<SHARDS>) {
        (0..100).for_each(|n| roster.insert(n));
        let mut walk = roster.walk();
        let mut met = Vec::new();
        while let Some(n) = walk.next(&roster) {
            met.push(n);
            // Behind, here, and ahead of it; and a newcomer.
            if n % 3 == 0 {
                roster.remove(n);
            }
            if n == 50 {
                (0..10).for_each(|n| roster.remove(n));
                roster.insert(1000);
            }
        }
        for n in 10..100 {
            assert!(met.contains(&n), "{n} was there all the while");
        }
        assert!(walk.is_over());
    }
}
