//! What waits until the guest has a buffer for it: in order, each thing once, and gone at once when
//! its object goes.
//!
//! Guests choose how many things wait and how often their objects come and go, so nothing here
//! searches, sweeps or moves all there is: what waits is a linked list, and each thing in it is
//! found by its key.

use std::collections::BTreeMap;

use super::chunks::Chunks;

/// No neighbour.
const NONE: usize = usize::MAX;

#[derive(Debug)]
struct Node<K, V> {
    key: K,
    value: V,
    before: usize,
    behind: usize,
}

#[derive(Debug)]
pub(crate) struct Pending<K, V> {
    /// The node of each thing that waits.
    places: BTreeMap<K, usize>,
    nodes: Chunks<Node<K, V>>,
    first: usize,
    last: usize,
}

impl<K, V> Default for Pending<K, V> {
    fn default() -> Self {
        Self { places: BTreeMap::new(), nodes: Chunks::default(), first: NONE, last: NONE }
    }
}

impl<K: Copy + Ord, V> Pending<K, V> {
    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Adds at the end; false if it waits already.
    pub(crate) fn insert(&mut self, key: K, value: V) -> bool {
        if self.places.contains_key(&key) {
            return false;
        }
        self.link(key, value, (self.last, NONE));
        true
    }

    /// Puts the one that was taken out last back to the front.
    pub(crate) fn put_back(&mut self, key: K, value: V) {
        if !self.places.contains_key(&key) {
            self.link(key, value, (NONE, self.first));
        }
    }

    /// What waits, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        let mut place = self.first;
        std::iter::from_fn(move || {
            let node = self.nodes.get(place)?;
            place = node.behind;
            Some((node.key, &node.value))
        })
    }

    fn link(&mut self, key: K, value: V, (before, behind): (usize, usize)) {
        let place = self.nodes.insert(Node { key, value, before, behind });
        self.places.insert(key, place);
        match self.nodes.get_mut(before) {
            Some(node) => node.behind = place,
            None => self.first = place,
        }
        match self.nodes.get_mut(behind) {
            Some(node) => node.before = place,
            None => self.last = place,
        }
    }

    /// Takes one out, wherever it is.
    pub(crate) fn remove(&mut self, key: K) -> Option<V> {
        let place = self.places.remove(&key)?;
        let node = self.nodes.try_remove(place)?;
        match self.nodes.get_mut(node.before) {
            Some(before) => before.behind = node.behind,
            None => self.first = node.behind,
        }
        match self.nodes.get_mut(node.behind) {
            Some(behind) => behind.before = node.before,
            None => self.last = node.before,
        }
        Some(node.value)
    }

    /// Takes the first out.
    pub(crate) fn pop(&mut self) -> Option<(K, V)> {
        let key = self.nodes.get(self.first)?.key;
        self.remove(key).map(|value| (key, value))
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
        assert!(pending.nodes.places() < 16, "{}", pending.nodes.places());
        assert_eq!(pending.pop(), Some((0, ())));
        assert_eq!(pending.pop(), None);
    }
}
