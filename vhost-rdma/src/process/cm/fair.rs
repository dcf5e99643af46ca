//! Things that wait, in turn by whose they are.
//!
//! One of each source goes out in turn, and where there is no room for another, the last of whoever
//! has the most is lost: a flood loses its own, and who has little waits behind one of each other's
//! (fair queueing: Nagle, RFC 970; longest queue drop: Suter, Lakshman, Stiliadis and Choudhury,
//! "Design considerations for supporting TCP with per-flow queueing", 1998).

use std::collections::{BTreeMap, VecDeque};

/// See the module.
#[derive(Debug)]
pub(super) struct Fair<K, T> {
    /// None is empty.
    queues: BTreeMap<K, VecDeque<T>>,
    /// Whose turn it is, then whose: each source that has something, once.
    turns: VecDeque<K>,
    len: usize,
    room: usize,
}

impl<K: Copy + Ord, T> Fair<K, T> {
    /// An empty one that holds so many.
    pub(super) const fn new(room: usize) -> Self {
        Self { queues: BTreeMap::new(), turns: VecDeque::new(), len: 0, room }
    }

    /// Puts one in.
    pub(super) fn push(&mut self, whose: K, item: T) {
        if self.len >= self.room {
            let own = self.queues.get(&whose).map_or(0, VecDeque::len);
            let most = self.queues.iter().max_by_key(|(_, queue)| queue.len());
            let Some((&heaviest, queue)) = most else { return };
            if own >= queue.len() {
                return;
            }
            self.pop_last(heaviest, |_| true);
        }
        let queue = self.queues.entry(whose).or_default();
        if queue.is_empty() {
            self.turns.push_back(whose);
        }
        queue.push_back(item);
        self.len += 1;
    }

    /// Takes the next one out.
    pub(super) fn pop(&mut self) -> Option<T> {
        let whose = self.turns.pop_front()?;
        let queue = self.queues.get_mut(&whose)?;
        let item = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&whose);
        } else {
            self.turns.push_back(whose);
        }
        self.len -= usize::from(item.is_some());
        item
    }

    /// Takes the last such one of a source out.
    pub(super) fn pop_last(&mut self, whose: K, such: impl Fn(&T) -> bool) -> Option<T> {
        let queue = self.queues.get_mut(&whose)?;
        let item = queue.iter().rposition(such).and_then(|at| queue.remove(at))?;
        self.len -= 1;
        self.forget_if_empty(whose);
        Some(item)
    }

    /// Takes all such out.
    pub(super) fn take(&mut self, such: impl Fn(&T) -> bool) -> Vec<T> {
        let mut taken = Vec::new();
        for queue in self.queues.values_mut() {
            let (out, rest) = std::mem::take(queue).into_iter().partition(&such);
            *queue = rest;
            let out: VecDeque<T> = out;
            taken.extend(out);
        }
        self.len -= taken.len();
        self.queues.retain(|_, queue| !queue.is_empty());
        let queues = &self.queues;
        self.turns.retain(|whose| queues.contains_key(whose));
        taken
    }

    /// How many such a source has, and who has the most, with how many.
    pub(super) fn shares(
        &self,
        whose: K,
        such: impl Fn(&T) -> bool,
    ) -> (usize, Option<(K, usize)>) {
        let count = |queue: &VecDeque<T>| queue.iter().filter(|item| such(item)).count();
        let counts = self.queues.iter().map(|(whose, queue)| (*whose, count(queue)));
        let most = counts.max_by_key(|(_, count)| *count);
        (self.queues.get(&whose).map_or(0, count), most)
    }

    /// All that wait.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.queues.values().flatten()
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn forget_if_empty(&mut self, whose: K) {
        if self.queues.get(&whose).is_some_and(VecDeque::is_empty) {
            self.queues.remove(&whose);
            self.turns.retain(|other| *other != whose);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_waits_for_itself() {
        let mut fair = Fair::new(8);
        (0..100).for_each(|n| fair.push('f', n));
        fair.push('a', 200);
        fair.push('b', 300);
        fair.push('b', 301);
        let out: Vec<_> = std::iter::from_fn(|| fair.pop()).collect();
        assert_eq!(out, [0, 200, 300, 1, 301, 2, 3, 4], "eight, the flood's last ones are lost");
        assert!(fair.is_empty() && fair.queues.is_empty() && fair.turns.is_empty());
    }

    #[test]
    fn who_comes_late_has_a_share_of_what_is_full() {
        let mut fair = Fair::new(8);
        (0..100usize).for_each(|n| fair.push(n % 2, n));
        (200..300).for_each(|n| fair.push(2, n));
        let counts = [0, 1, 2].map(|whose| fair.shares(whose, |_| true).0);
        assert_eq!(counts.iter().sum::<usize>(), 8);
        assert!(counts.iter().all(|count| *count >= 2), "{counts:?}");
        assert_eq!(fair.take(|n| *n >= 200).len(), counts[2]);
        assert_eq!(fair.pop_last(0, |_| true), Some(2 * (counts[0] - 1)));
        let left: Vec<_> = std::iter::from_fn(|| fair.pop()).collect();
        assert_eq!(left.len(), counts[0] + counts[1] - 1);
    }
}
