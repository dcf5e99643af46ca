//! Tables of objects whose numbers rest before they come back: CQs and SRQs.
//!
//! An event names its object by number and may be under way, in the guest's memory or in its
//! driver, when the object goes. If the number were given again at once, a late CQ_ERR or
//! completion event would reach another process's new object. So a number is a slot and how often
//! that was used before: slots stay few and dense, and a number returns after 4095 others of its
//! slot. (QPNs and keys are random as well, `numbers`: peers name those. Nobody but its owner names
//! a CQ.)

use std::fmt;

use super::chunks::Chunks;

/// Bits of the slot.
const SLOT_BITS: u32 = 20;
/// Uses of a slot before its numbers come back. One less than fit, so that no number is `NO_SRQ`.
const USES: u16 = (1 << (32 - SLOT_BITS)) - 1;
/// Objects that a table can hold.
pub const MOST: u32 = 1 << SLOT_BITS;

/// Objects by number.
pub struct Table<T> {
    slots: Chunks<(usize, T)>,
    /// How often each slot was used before, as far as any ever was.
    uses: Vec<u16>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { slots: Chunks::default(), uses: Vec::new() }
    }
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Table({} objects)", self.slots.len())
    }
}

/// The slot of a number. Numbers are `usize` here, as in the tables of objects that are nobody's to
/// remember.
const fn slot(number: usize) -> usize {
    number & (MOST as usize - 1)
}

impl<T> Table<T> {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The number that the next object gets. The caller keeps the table below [`MOST`].
    pub(crate) fn vacant_key(&self) -> usize {
        let slot = self.slots.vacant_key();
        let used = self.uses.get(slot).copied().unwrap_or_default();
        usize::from(used) << SLOT_BITS | slot
    }

    /// Adds an object; its number.
    pub(crate) fn insert(&mut self, object: T) -> usize {
        let number = self.vacant_key();
        let slot = self.slots.insert((number, object));
        if self.uses.len() <= slot {
            self.uses.resize(slot + 1, 0);
        }
        number
    }

    /// The object of a number.
    #[inline]
    pub fn get(&self, number: usize) -> Option<&T> {
        let (own, object) = self.slots.get(slot(number))?;
        (*own == number).then_some(object)
    }

    /// The same.
    #[inline]
    pub fn get_mut(&mut self, number: usize) -> Option<&mut T> {
        let (own, object) = self.slots.get_mut(slot(number))?;
        (*own == number).then_some(object)
    }

    /// Takes an object out; its number rests.
    pub(crate) fn try_remove(&mut self, number: usize) -> Option<T> {
        self.get(number)?;
        let (_, object) = self.slots.try_remove(slot(number))?;
        if let Some(uses) = self.uses.get_mut(slot(number)) {
            *uses = (*uses + 1) % USES;
        }
        Some(object)
    }

    /// What is in it, by number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.slots.iter().map(|(_, (number, object))| (*number, object))
    }

    /// How often each slot was used.
    pub(crate) fn uses(&self) -> &[u16] {
        &self.uses
    }

    /// A table that has these, and whose slots were used so often; `None` if that cannot be.
    pub(crate) fn load(objects: Vec<(usize, T)>, uses: Vec<u16>) -> Option<Self> {
        let fits = |number: usize| {
            let used = uses
                .get(slot(number))
                .is_some_and(|used| usize::from(*used) == number >> SLOT_BITS);
            used && u32::try_from(number).is_ok()
        };
        let all = objects.len();
        let of_slots = objects.into_iter().filter(|(number, _)| fits(*number));
        let slots: Chunks<_> =
            of_slots.map(|(number, object)| (slot(number), (number, object))).collect();
        (slots.len() == all && uses.len() <= MOST as usize).then_some(Self { slots, uses })
    }

    /// All objects with their numbers.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut T)> {
        self.slots.iter_mut().map(|(_, (number, object))| (*number, object))
    }
}

/// A table that can be walked in steps, slot by slot.
pub trait InSlots<T> {
    /// Slots that there are, used or not.
    fn slots(&self) -> usize;
    /// What is in a slot, and its number.
    fn at(&self, slot: usize) -> Option<(u32, &T)>;
}

impl<T> InSlots<T> for Table<T> {
    fn slots(&self) -> usize {
        self.uses.len()
    }

    fn at(&self, slot: usize) -> Option<(u32, &T)> {
        let (number, object) = self.slots.get(slot)?;
        Some((u32::try_from(*number).ok()?, object))
    }
}

impl<T> InSlots<T> for Chunks<T> {
    fn slots(&self) -> usize {
        self.places()
    }

    fn at(&self, slot: usize) -> Option<(u32, &T)> {
        Some((u32::try_from(slot).ok()?, self.get(slot)?))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use virtio_rdma_abi::NO_SRQ;

    use super::{InSlots, Table};

    #[test]
    fn a_number_rests_and_slots_stay_dense() {
        let mut table = Table::default();
        let kept = table.insert(0u32);
        let mut seen = HashSet::from([kept]);
        for n in 1..=4095u32 {
            let number = table.insert(n);
            assert!(number < NO_SRQ as usize);
            assert!(seen.insert(number), "given again after {n} others");
            assert_eq!(table.get(number), Some(&n));
            assert_eq!(table.try_remove(number), Some(n));
            assert!(table.get(number).is_none() && table.try_remove(number).is_none());
        }
        assert_eq!(table.uses.len(), 2, "one slot for the one that stays, one for all others");
        assert_eq!((table.get(kept), table.len()), (Some(&0), 1));
        assert_eq!((table.at(0), table.at(1)), (Some((u32::try_from(kept).unwrap(), &0)), None));
        assert!(seen.contains(&table.vacant_key()), "at last it comes back");
    }

    #[test]
    fn a_stale_number_names_nothing() {
        let mut table = Table::default();
        let old = table.insert('a');
        table.try_remove(old);
        let new = table.insert('b');
        assert_ne!(old, new);
        assert!(table.get(old).is_none() && table.get_mut(old).is_none());
        assert!(table.try_remove(old).is_none());
        assert_eq!(table.get(new), Some(&'b'));
        assert_eq!(table.iter_mut().count(), 1);
    }
}
