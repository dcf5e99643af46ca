//! Objects by number, in a table that remembers the one that it found last.
//!
//! A work request names its queue pairs again and again: to begin a turn, to be checked at its
//! peer, to be completed. QPNs are random, and a look into a hash table costs about as much as
//! copying a small message; the same one again costs a comparison.

use std::cell::Cell;

use super::chunks::Chunks;
use super::shards::Shards;

/// Small tables of numbers: a guest may have thousands of queue pairs, and most have none.
const SHARDS: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct Recent<V> {
    slots: Chunks<V>,
    by_number: Shards<usize, SHARDS>,
    /// The number that was found last, and its slot.
    last: Cell<Option<(u32, usize)>>,
}

impl<V> Default for Recent<V> {
    fn default() -> Self {
        Self { slots: Chunks::default(), by_number: Shards::default(), last: Cell::new(None) }
    }
}

impl<V> Recent<V> {
    pub(crate) fn len(&self) -> usize {
        self.by_number.len()
    }

    #[inline]
    fn slot(&self, number: u32) -> Option<usize> {
        match self.last.get() {
            Some((last, slot)) if last == number => Some(slot),
            _ => self.find(number),
        }
    }

    #[inline(never)]
    fn find(&self, number: u32) -> Option<usize> {
        let slot = *self.by_number.get(&number)?;
        self.last.set(Some((number, slot)));
        Some(slot)
    }

    #[inline]
    pub fn get(&self, number: &u32) -> Option<&V> {
        self.slots.get(self.slot(*number)?)
    }

    #[inline]
    pub fn get_mut(&mut self, number: &u32) -> Option<&mut V> {
        let slot = self.slot(*number)?;
        self.slots.get_mut(slot)
    }

    pub(crate) fn contains_key(&self, number: &u32) -> bool {
        self.by_number.contains_key(number)
    }

    /// Adds an object; the one that had its number.
    pub(crate) fn insert(&mut self, number: u32, value: V) -> Option<V> {
        let old = self.remove(&number);
        let slot = self.slots.insert(value);
        self.by_number.insert(number, slot);
        old
    }

    pub(crate) fn remove(&mut self, number: &u32) -> Option<V> {
        let slot = self.by_number.remove(number)?;
        self.last.set(None);
        self.slots.try_remove(slot)
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.slots.iter().map(|(_, value)| value)
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.slots.iter_mut().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::Recent;

    #[test]
    fn what_is_gone_is_not_remembered() {
        let mut table = Recent::default();
        assert_eq!((table.insert(7, 'a'), table.insert(9, 'b')), (None, None));
        assert_eq!((table.get(&7), table.get(&7), table.get(&8)), (Some(&'a'), Some(&'a'), None));
        assert_eq!(table.remove(&7), Some('a'));
        assert_eq!((table.get(&7), table.contains_key(&7)), (None, false));
        assert_eq!(table.get_mut(&7), None);
        // Another in the same slot, under another number and then under the same.
        assert_eq!(table.insert(8, 'c'), None);
        assert_eq!((table.get(&7), table.get(&8), table.get(&9)), (None, Some(&'c'), Some(&'b')));
        assert_eq!(table.insert(8, 'd'), Some('c'));
        assert_eq!((table.get(&8), table.len()), (Some(&'d'), 2));
        table.values_mut().for_each(|value| value.make_ascii_uppercase());
        assert_eq!((table.get(&8), table.values().count()), (Some(&'D'), 2));
    }
}
