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

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Roster(IndexSet<u32, FxBuildHasher>);

impl Roster {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn insert(&mut self, number: u32) {
        self.0.insert(number);
    }

    pub(crate) fn remove(&mut self, number: u32) {
        self.0.swap_remove(&number);
    }

    pub(crate) fn get(&self, index: usize) -> Option<u32> {
        self.0.get_index(index).copied()
    }

    /// Takes one out.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.0.pop()
    }

    /// A walk over all.
    pub(crate) fn walk(&self) -> Walk {
        Walk(self.len())
    }
}

/// How far a walk is: what lies behind this index has been met.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Walk(usize);

impl Walk {
    /// The next one; `None` at the end.
    pub(crate) fn next(&mut self, roster: &Roster) -> Option<u32> {
        self.0 = self.0.min(roster.len()).checked_sub(1)?;
        roster.get(self.0)
    }

    /// Whether nothing is left.
    pub(crate) const fn is_over(&self) -> bool {
        self.0 == 0
    }
}

/// A walk over the slots of a table that numbers its objects itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slots {
    next: usize,
    end: usize,
}

impl Slots {
    /// A walk over all.
    pub(crate) fn of<T>(table: &impl InSlots<T>) -> Self {
        Self { next: 0, end: table.slots() }
    }

    /// The next slot, whether or not there is anything in it.
    pub(crate) fn next(&mut self) -> Option<usize> {
        let index = (self.next < self.end).then_some(self.next)?;
        self.next += 1;
        Some(index)
    }

    /// The number of the next object that is meant; `None` also when the budget is over.
    pub(crate) fn sweep<T>(
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
        let mut roster = Roster::default();
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
