//! Places for connections: so many, and nobody's for long where others come too.
//!
//! Who comes always finds a place. When there are more connections than places, one is closed: the
//! oldest of whoever has the most. So whoever opens many loses their own, and what somebody with
//! fewer connections has, a flood from elsewhere cannot take. Nobody needs more than a few: who has
//! its share loses its own oldest, also where there is room.
//!
//! What a place costs does not depend on how many there are, but for the depth of a tree: floods
//! come when all are taken.
//!
//! The daemon, the node agent and the controller have ports that strangers reach; all of them use
//! this. [`http`] answers one question on a connection.

#![forbid(unsafe_code)]

pub mod http;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::oneshot;

/// Raises the soft limit of open files to the hard one: 1024, which a shell or a container's
/// runtime may give, are fewer than there are places.
pub fn raise_descriptors() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(from = ?current, to = ?maximum, "more open files"),
        Err(error) => {
            tracing::warn!(%error, limit = ?current, "the limit of open files stays as it is");
        }
    }
}

/// What tells strangers apart: a host has one IPv4 address, or as many of an IPv6 network as it
/// likes.
#[must_use]
pub fn origin(from: SocketAddr) -> IpAddr {
    match from.ip().to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (!0 << 64)).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

struct Taken<K> {
    next: u64,
    /// By number. The sender is dropped when the place is taken away.
    holders: BTreeMap<u64, (K, oneshot::Sender<()>)>,
    /// The numbers of each, so the oldest is the first.
    of: BTreeMap<K, BTreeSet<u64>>,
    /// How many each has, and the number of its oldest: the first is the one to go.
    ranks: BTreeSet<(Reverse<usize>, u64)>,
}

impl<K: Ord + Clone> Taken<K> {
    fn rank(numbers: &BTreeSet<u64>) -> Option<(Reverse<usize>, u64)> {
        Some((Reverse(numbers.len()), *numbers.first()?))
    }

    /// Changes the numbers of somebody, and its rank with them.
    fn change(&mut self, who: &K, change: impl FnOnce(&mut BTreeSet<u64>)) {
        let numbers = self.of.entry(who.clone()).or_default();
        if let Some(rank) = Self::rank(numbers) {
            self.ranks.remove(&rank);
        }
        change(numbers);
        match Self::rank(numbers) {
            Some(rank) => drop(self.ranks.insert(rank)),
            None => drop(self.of.remove(who)),
        }
    }

    fn insert(&mut self, who: K, hold: oneshot::Sender<()>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.change(&who, |numbers| _ = numbers.insert(number));
        self.holders.insert(number, (who, hold));
        number
    }

    fn remove(&mut self, number: u64) {
        if let Some((who, _)) = self.holders.remove(&number) {
            self.change(&who, |numbers| _ = numbers.remove(&number));
        }
    }
}

/// Places, whose holders are told apart by `K`.
#[allow(missing_debug_implementations, reason = "who holds them is under a lock")]
pub struct Places<K> {
    room: usize,
    share: usize,
    taken: Mutex<Taken<K>>,
}

/// A place, given back when this is dropped.
pub struct Place<K: Ord + Clone> {
    places: Arc<Places<K>>,
    number: u64,
    lost: oneshot::Receiver<()>,
}

impl<K: Ord + Clone> Places<K> {
    /// So many places, of which one holder has a share at most.
    #[must_use]
    pub fn new(room: usize, share: usize) -> Arc<Self> {
        let taken = Taken {
            next: 0,
            holders: BTreeMap::new(),
            of: BTreeMap::new(),
            ranks: BTreeSet::new(),
        };
        Arc::new(Self { room, share, taken: Mutex::new(taken) })
    }

    fn taken(&self) -> MutexGuard<'_, Taken<K>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for `who`; another one is lost for it if there are too many.
    pub fn take(self: &Arc<Self>, who: &K) -> Place<K> {
        let (hold, lost) = oneshot::channel();
        let mut taken = self.taken();
        let number = taken.insert(who.clone(), hold);
        let own = taken.of.get(who).filter(|numbers| numbers.len() > self.share);
        let gone = match own.and_then(BTreeSet::first) {
            Some(oldest) => Some(*oldest),
            None if taken.holders.len() > self.room => {
                taken.ranks.first().map(|(_, oldest)| *oldest)
            }
            None => None,
        };
        if let Some(gone) = gone {
            taken.remove(gone);
        }
        Place { places: self.clone(), number, lost }
    }
}

impl<K: Ord + Clone> Place<K> {
    /// Returns when the place is another's.
    pub async fn lost(&mut self) {
        // Nothing is ever sent: it ends when the other end goes.
        let _ = (&mut self.lost).await;
    }

    /// Ready when the place is another's, also if that was said before.
    pub fn poll_lost(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.lost.is_terminated() {
            return Poll::Ready(());
        }
        Pin::new(&mut self.lost).poll(context).map(drop)
    }
}

impl<K: Ord + Clone> fmt::Debug for Place<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<K: Ord + Clone> Drop for Place<K> {
    fn drop(&mut self) {
        self.places.taken().remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_lost<K: Ord + Clone>(place: &mut Place<K>) -> bool {
        place.lost.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn a_flood_takes_its_own_places_only() {
        let places = Places::new(8, 8);
        let mut first = places.take(&1);
        let mut second = places.take(&2);
        let mut flood: Vec<_> = (0..100).map(|_| places.take(&3)).collect();
        let mut third = places.take(&4);
        flood.extend((0..100).map(|_| places.take(&3)));
        assert!(![&mut first, &mut second, &mut third].into_iter().any(is_lost));
        let lost: Vec<bool> = flood.iter_mut().map(is_lost).collect();
        let held: Vec<usize> = (0..200).filter(|&n| !lost[n]).collect();
        assert_eq!(held, [195, 196, 197, 198, 199], "the newest");
    }

    #[test]
    fn nobody_has_more_than_a_share_though_there_is_room() {
        let places = Places::new(100, 2);
        let mut other = places.take(&9);
        let mut mine: Vec<_> = (0..5).map(|_| places.take(&1)).collect();
        let lost: Vec<bool> = mine.iter_mut().map(is_lost).collect();
        assert_eq!(lost, [true, true, true, false, false]);
        assert!(!is_lost(&mut other));
    }

    #[test]
    fn of_many_with_one_each_the_oldest_goes_and_what_is_given_back_is_free() {
        let places = Places::new(3, 3);
        let mut all: Vec<_> = (0..4).map(|who| places.take(&who)).collect();
        assert!(is_lost(&mut all[0]) && !is_lost(&mut all[1]));
        // That one was lost already; this one was held.
        all.drain(..2);
        let _more = places.take(&9);
        assert!(!all.iter_mut().any(is_lost));
        assert_eq!(places.taken().holders.len(), 3);
    }

    /// What is to go, said in the plain way.
    fn oldest_of_most(held: &BTreeMap<u64, u8>) -> Option<u64> {
        let count = |who: &u8| held.values().filter(|other| *other == who).count();
        let most = held.values().map(count).max()?;
        held.iter().find(|(_, who)| count(who) == most).map(|(number, _)| *number)
    }

    proptest::proptest! {
        #[test]
        fn the_oldest_of_whoever_has_the_most_goes(
            steps in proptest::collection::vec((0..5u8, proptest::bool::weighted(0.2)), 0..60),
        ) {
            let places = Places::new(6, 6);
            let mut held = BTreeMap::new();
            let mut alive = BTreeMap::new();
            for (number, (who, gives_back)) in (0..).zip(steps) {
                alive.insert(number, places.take(&who));
                held.insert(number, who);
                if held.len() > 6 && let Some(gone) = oldest_of_most(&held) {
                    held.remove(&gone);
                }
                if gives_back && let Some((first, _)) = held.pop_first() {
                    alive.remove(&first);
                }
                let taken = places.taken();
                let there: Vec<u64> = taken.holders.keys().copied().collect();
                proptest::prop_assert_eq!(there, held.keys().copied().collect::<Vec<_>>());
                proptest::prop_assert!(taken.of.len() == taken.ranks.len());
            }
        }
    }
}
