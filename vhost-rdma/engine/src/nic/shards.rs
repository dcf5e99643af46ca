//! Objects by number, in a table that never grows in one go.
//!
//! A hash table that is full moves everything it has to a larger one: milliseconds for the hundred
//! thousand keys that a guest may have, in the middle of a turn. So this is many small ones.
//! Numbers are the device's own random choice, or an RNIC's, whose lowest bits may all be the same.

use rustc_hash::FxHashMap;

/// Small tables that a table of a hundred thousand is made of. A power of two, as for all.
const MANY: usize = 256;

/// See the module.
#[derive(Debug)]
pub struct Shards<V, const SHARDS: usize = MANY> {
    shards: Box<[FxHashMap<u32, V>]>,
    len: usize,
}

impl<V, const SHARDS: usize> Default for Shards<V, SHARDS> {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| FxHashMap::default()).collect(), len: 0 }
    }
}

const fn shard<const SHARDS: usize>(number: u32) -> usize {
    (number ^ (number >> 8) ^ (number >> 16)) as usize & (SHARDS - 1)
}

impl<V, const SHARDS: usize> Shards<V, SHARDS> {
    /// Entries.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The entry of a number.
    #[inline]
    pub fn get(&self, number: &u32) -> Option<&V> {
        self.shards.get(shard::<SHARDS>(*number))?.get(number)
    }

    /// The same.
    #[inline]
    pub fn get_mut(&mut self, number: &u32) -> Option<&mut V> {
        self.shards.get_mut(shard::<SHARDS>(*number))?.get_mut(number)
    }

    /// Whether a number has an entry.
    pub fn contains_key(&self, number: &u32) -> bool {
        self.get(number).is_some()
    }

    /// Makes an entry; the one before.
    pub fn insert(&mut self, number: u32, value: V) -> Option<V> {
        let old = self.shards.get_mut(shard::<SHARDS>(number))?.insert(number, value);
        self.len += usize::from(old.is_none());
        old
    }

    /// Takes an entry out.
    pub fn remove(&mut self, number: &u32) -> Option<V> {
        let old = self.shards.get_mut(shard::<SHARDS>(*number))?.remove(number)?;
        self.len -= 1;
        Some(old)
    }

    /// The most that one of the small tables has room for.
    #[cfg(test)]
    pub(crate) fn largest(&self) -> usize {
        self.shards.iter().map(FxHashMap::capacity).max().unwrap_or_default()
    }

    #[cfg(test)]
    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.shards.iter().flat_map(FxHashMap::values)
    }
}

#[cfg(test)]
mod tests {
    use super::Shards;

    #[test]
    fn what_is_put_in_is_there_until_it_is_taken_out() {
        let mut table = Shards::<_>::default();
        for n in 0..5000u32 {
            assert_eq!(table.insert(n * 7, n), None);
        }
        assert_eq!(table.insert(7, 77), Some(1));
        assert_eq!((table.len(), table.values().count()), (5000, 5000));
        assert_eq!((table.get(&7), table.get(&8)), (Some(&77), None));
        *table.get_mut(&14).unwrap() += 1;
        assert_eq!((table.remove(&14), table.remove(&14)), (Some(3), None));
        assert_eq!(table.len(), 4999);
    }

    /// So none of the small tables moves much, whatever all of them have.
    #[test]
    fn numbers_of_any_kind_spread_evenly() {
        for shift in [0, 8, 16] {
            let mut table = Shards::<_>::default();
            (0..1 << 16).for_each(|n: u32| assert!(table.insert(n << shift, ()).is_none()));
            assert!(table.largest() < 1024, "{} in one, shifted by {shift}", table.largest());
        }
    }
}
