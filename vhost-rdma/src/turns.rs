//! Whose turn it is: changes of one network come one after the other, those of two networks do not
//! wait for each other.
//!
//! A change asks the network's process, which may be slow, or in the hands of a guest that took it
//! over. With one lock for all, every other tenant would wait as long. So each network has a lock
//! of its own, which is there while somebody wants it. What concerns all of them (an upgrade, the
//! end) takes the whole: it waits for every change under way, and those to come wait for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// See the module.
#[derive(Debug)]
pub(crate) struct Turns<K> {
    whole: RwLock<()>,
    each: Mutex<BTreeMap<K, Arc<Mutex<()>>>>,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self { whole: RwLock::default(), each: Mutex::default() }
    }
}

// Nothing is guarded but the order: who panicked in its turn leaves nothing half done behind these
// locks.
impl<K: Ord + Clone> Turns<K> {
    /// Does it when it is the turn of `key`.
    pub(crate) fn of<R>(&self, key: &K, change: impl FnOnce() -> R) -> R {
        let _part: RwLockReadGuard<'_, ()> =
            self.whole.read().unwrap_or_else(PoisonError::into_inner);
        let turn =
            Turn { turns: self, key, own: self.each().entry(key.clone()).or_default().clone() };
        let _alone = turn.own.lock().unwrap_or_else(PoisonError::into_inner);
        change()
    }

    /// Nobody else has a turn until it is dropped.
    pub(crate) fn whole(&self) -> RwLockWriteGuard<'_, ()> {
        self.whole.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn each(&self) -> MutexGuard<'_, BTreeMap<K, Arc<Mutex<()>>>> {
        self.each.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who waits, or whose turn it is. The last one takes the lock away.
struct Turn<'a, K: Ord + Clone> {
    turns: &'a Turns<K>,
    key: &'a K,
    own: Arc<Mutex<()>>,
}

impl<K: Ord + Clone> Drop for Turn<'_, K> {
    fn drop(&mut self) {
        let mut each = self.turns.each();
        // The map's and ours.
        if Arc::strong_count(&self.own) == 2 {
            each.remove(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn one_network_waits_for_no_other_and_nothing_is_left() {
        let turns = Turns::<u32>::default();
        let (go, gone) = channel::<()>();
        let (begun, is_begun) = channel();
        std::thread::scope(|scope| {
            let turns = &turns;
            scope.spawn(move || {
                turns.of(&1, || {
                    begun.send(()).unwrap();
                    gone.recv().unwrap();
                });
            });
            is_begun.recv().unwrap();
            assert_eq!(turns.of(&2, || 7), 7);
            assert_eq!(turns.each().len(), 1);
            go.send(()).unwrap();
        });
        assert_eq!(turns.each().len(), 0);
    }

    #[test]
    fn those_of_one_network_come_one_after_the_other() {
        let turns = Turns::<u32>::default();
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    turns.of(&1, || {
                        most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(5));
                        inside.fetch_sub(1, Ordering::SeqCst);
                    });
                });
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 1);
        assert_eq!(turns.each().len(), 0);
    }

    #[test]
    fn the_whole_waits_for_each_and_each_for_the_whole() {
        let turns = Turns::<u32>::default();
        let (begun, is_begun) = channel();
        let long = Duration::from_millis(100);
        std::thread::scope(|scope| {
            let turns = &turns;
            scope.spawn(move || {
                turns.of(&1, || {
                    begun.send(()).unwrap();
                    std::thread::sleep(long);
                });
            });
            is_begun.recv().unwrap();
            let begin = Instant::now();
            let whole = turns.whole();
            assert!(begin.elapsed() > long / 2, "{:?}", begin.elapsed());
            let later = scope.spawn(|| {
                let begin = Instant::now();
                turns.of(&2, || begin.elapsed())
            });
            std::thread::sleep(long);
            drop(whole);
            assert!(later.join().unwrap() > long / 2);
        });
    }
}
