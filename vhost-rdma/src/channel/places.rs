//! Places for connections: few, and nobody's for long where others come too.
//!
//! Who comes always finds a place. When there are more connections than places, one is closed: the
//! oldest of whoever has the most. So whoever opens many loses their own, and what somebody with
//! fewer connections has, a flood from elsewhere cannot take.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

struct Holder<K> {
    who: K,
    /// Dropped when the place is taken away.
    _hold: oneshot::Sender<()>,
}

struct Taken<K> {
    next: u64,
    /// By number, so the oldest is the first.
    holders: BTreeMap<u64, Holder<K>>,
}

/// Places, whose holders are told apart by `K`.
pub(super) struct Places<K> {
    room: usize,
    taken: Mutex<Taken<K>>,
}

/// A place, given back when this is dropped.
pub(super) struct Place<K: Ord> {
    places: Arc<Places<K>>,
    number: u64,
    lost: oneshot::Receiver<()>,
}

impl<K: Ord> Places<K> {
    pub(super) fn new(room: usize) -> Arc<Self> {
        let taken = Mutex::new(Taken { next: 0, holders: BTreeMap::new() });
        Arc::new(Self { room, taken })
    }

    fn taken(&self) -> MutexGuard<'_, Taken<K>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for `who`; another one is lost for it if there are too many.
    pub(super) fn take(self: &Arc<Self>, who: K) -> Place<K> {
        let (hold, lost) = oneshot::channel();
        let mut taken = self.taken();
        let number = taken.next;
        taken.next += 1;
        taken.holders.insert(number, Holder { who, _hold: hold });
        if taken.holders.len() > self.room
            && let Some(oldest) = oldest_of_most(&taken.holders)
        {
            taken.holders.remove(&oldest);
        }
        Place { places: self.clone(), number, lost }
    }
}

fn oldest_of_most<K: Ord>(holders: &BTreeMap<u64, Holder<K>>) -> Option<u64> {
    let mut count: BTreeMap<&K, usize> = BTreeMap::new();
    for holder in holders.values() {
        *count.entry(&holder.who).or_default() += 1;
    }
    let most = count.values().max()?;
    holders.iter().find(|(_, holder)| count.get(&holder.who) == Some(most)).map(|(n, _)| *n)
}

impl<K: Ord> Place<K> {
    /// Returns when the place is another's.
    pub(super) async fn lost(&mut self) {
        // Nothing is ever sent: it ends when the other end goes.
        let _ = (&mut self.lost).await;
    }
}

impl<K: Ord> Drop for Place<K> {
    fn drop(&mut self) {
        self.places.taken().holders.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_lost<K: Ord>(place: &mut Place<K>) -> bool {
        place.lost.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn a_flood_takes_its_own_places_only() {
        let places = Places::new(8);
        let mut first = places.take(1);
        let mut second = places.take(2);
        let mut flood: Vec<_> = (0..100).map(|_| places.take(3)).collect();
        let mut third = places.take(4);
        flood.extend((0..100).map(|_| places.take(3)));
        assert!(![&mut first, &mut second, &mut third].into_iter().any(is_lost));
        let lost: Vec<bool> = flood.iter_mut().map(is_lost).collect();
        let held: Vec<usize> = (0..200).filter(|&n| !lost[n]).collect();
        assert_eq!(held, [195, 196, 197, 198, 199], "the newest");
    }

    #[test]
    fn of_many_with_one_each_the_oldest_goes_and_what_is_given_back_is_free() {
        let places = Places::new(3);
        let mut all: Vec<_> = (0..4).map(|who| places.take(who)).collect();
        assert!(is_lost(&mut all[0]) && !is_lost(&mut all[1]));
        // That one was lost already; this one was held.
        all.drain(..2);
        let _more = places.take(9);
        assert!(!all.iter_mut().any(is_lost));
        assert_eq!(places.taken().holders.len(), 3);
    }
}
