//! What waits until the guest has a buffer for it: in order, each thing once, and gone at once when its object goes.
//!
//! Guests choose how many things wait and how often their objects come and go, so nothing here may search: taking one out leaves its
//! place in the queue behind, and places that stand for nothing are swept when they are most of it.

use std::collections::VecDeque;
use std::hash::Hash;

use rustc_hash::FxHashMap;

/// Places that may stand for nothing before they are counted.
const SLACK: usize = 64;

#[derive(Debug)]
pub(super) struct Pending<K, V> {
    /// The place of each thing that waits.
    places: FxHashMap<K, u64>,
    queue: VecDeque<(u64, K, V)>,
    next: u64,
}

impl<K, V> Default for Pending<K, V> {
    fn default() -> Self {
        Self { places: FxHashMap::default(), queue: VecDeque::new(), next: 0 }
    }
}

impl<K: Copy + Eq + Hash, V> Pending<K, V> {
    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Adds at the end; false if it waits already.
    pub(super) fn insert(&mut self, key: K, value: V) -> bool {
        let place = self.next;
        if *self.places.entry(key).or_insert(place) != place {
            return false;
        }
        self.next += 1;
        self.queue.push_back((place, key, value));
        true
    }

    /// Takes one out, wherever it is.
    pub(super) fn remove(&mut self, key: K) {
        if self.places.remove(&key).is_some() && self.queue.len() > 2 * self.places.len() + SLACK {
            let Self { places, queue, .. } = self;
            queue.retain(|(place, key, _)| places.get(key) == Some(place));
        }
    }

    /// Takes the first out.
    pub(super) fn pop(&mut self) -> Option<(K, V)> {
        while let Some((place, key, value)) = self.queue.pop_front() {
            if self.places.get(&key) == Some(&place) {
                self.places.remove(&key);
                return Some((key, value));
            }
        }
        None
    }

    /// Puts the one that was taken out last back to the front.
    pub(super) fn put_back(&mut self, key: K, value: V) {
        // Places only have to differ.
        let place = self.next;
        self.next += 1;
        self.places.insert(key, place);
        self.queue.push_front((place, key, value));
    }
}

#[cfg(test)]
mod tests {
    use super::Pending;

    #[test]
    fn in_order_once_and_gone_when_removed() {
        let mut pending = Pending::default();
        assert!(pending.insert(1, ()) && pending.insert(2, ()) && pending.insert(3, ()));
        assert!(!pending.insert(2, ()));
        pending.remove(1);
        assert!(pending.insert(1, ()), "it may wait again, behind the others");
        assert_eq!(pending.len(), 3);
        let first = pending.pop();
        assert_eq!(first, Some((2, ())));
        pending.put_back(2, ());
        let order: Vec<u32> = std::iter::from_fn(|| pending.pop()).map(|(key, ())| key).collect();
        assert_eq!(order, [2, 3, 1]);
        assert_eq!(pending.len(), 0);
    }

    #[test]
    fn coming_and_going_takes_no_memory() {
        let mut pending = Pending::default();
        assert!(pending.insert(0, ()));
        for n in 1..100_000u32 {
            assert!(pending.insert(n, ()));
            pending.remove(n);
        }
        assert!(pending.queue.len() < 200, "{}", pending.queue.len());
        assert_eq!(pending.pop(), Some((0, ())));
        assert_eq!(pending.pop(), None);
    }
}
