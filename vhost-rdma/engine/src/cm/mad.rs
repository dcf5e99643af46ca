//! Management datagrams on their way between QPs 1: what is carried, and where each NIC takes in
//! its own.
//!
//! libibverbs gives QP 1 to nobody, so the daemon carries these datagrams itself: to a NIC of its
//! own by putting them into that NIC's [`Inbox`], from wherever they come. An inbox is bounded and
//! what finds it full is dropped, as on a wire: the connection manager sends again (IBTA 12.9.8).

use std::fmt;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use crate::link::{self, Gid};

/// Length of every datagram of QP 1 (IBTA 13.4.2).
pub const MAD_LEN: usize = link::MAD_LEN as usize;
/// Datagrams that wait for one NIC.
pub const ROOM: usize = 128;
/// Numbers that sources are counted by; those of one number share.
const SHARES: usize = 256;

/// A datagram from one QP 1 to another, with addresses as the guests name them.
#[derive(Clone, PartialEq, Eq)]
pub struct Mad {
    /// Who sent it.
    pub source: Gid,
    /// To whom.
    pub dest: Gid,
    /// Traffic class of the packet that it stands for.
    pub traffic_class: u8,
    /// Service level.
    pub sl: u8,
    /// What it says.
    pub bytes: [u8; MAD_LEN],
}

impl fmt::Debug for Mad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mad")
            .field("source", &std::net::IpAddr::from(self.source).to_canonical())
            .field("dest", &std::net::IpAddr::from(self.dest).to_canonical())
            .finish_non_exhaustive()
    }
}

/// Lets a worker look at its NICs again.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// A datagram, and whose it is ([`Inbox::put_of`]).
type Owned = (Option<u64>, Mad);
/// A place for one datagram.
type Slot = Mutex<Option<Owned>>;

/// A place's content, unless somebody is at it just now.
fn try_slot(slot: &Slot) -> Option<MutexGuard<'_, Option<Owned>>> {
    match slot.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Datagrams that wait for one NIC; any thread puts them in, the NIC's worker takes them out.
///
/// Nobody waits for anybody here: who puts one in may be another tenant's worker, or a thread that
/// loses its processor in the middle of it. So each place has a lock of its own, which is only
/// tried; a place that somebody is at is passed over. The order is that of arrival, but for those
/// that are put in at one moment.
pub struct Inbox {
    slots: Box<[Slot]>,
    /// Where the next goes in, and where the oldest is: counters that wrap, modulo [`ROOM`].
    tail: AtomicUsize,
    head: AtomicUsize,
    /// How many wait: looked at in every round of a worker.
    len: AtomicUsize,
    /// How many of a source wait, by a number that it cannot foresee.
    shares: Box<[AtomicUsize]>,
    seed: u64,
    wake: Wake,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").finish_non_exhaustive()
    }
}

impl Inbox {
    /// An empty one, whose reader `wake` wakes.
    #[must_use]
    pub fn new(wake: Wake) -> Self {
        let slots = (0..ROOM).map(|_| Slot::default()).collect();
        let [tail, head, len] = [const { AtomicUsize::new(0) }; 3];
        let shares = (0..SHARES).map(|_| AtomicUsize::new(0)).collect();
        let seed = std::hash::RandomState::new().hash_one(0);
        Self { slots, tail, head, len, shares, seed, wake }
    }

    /// Puts a datagram in; false if it found no room.
    pub fn put(&self, mad: Mad) -> bool {
        self.put_in((None, mad))
    }

    /// As [`Self::put`], of a source with this number, which gets no more places than are left: who
    /// floods has half of them, and who else comes finds one.
    pub fn put_of(&self, whose: u64, mad: Mad) -> bool {
        let share = self.share(whose);
        let left = ROOM.saturating_sub(self.len.load(Ordering::Acquire));
        if share.load(Ordering::Relaxed) >= left {
            return false;
        }
        share.fetch_add(1, Ordering::Relaxed);
        let taken = self.put_in((Some(whose), mad));
        if !taken {
            share.fetch_sub(1, Ordering::Relaxed);
        }
        taken
    }

    fn share(&self, whose: u64) -> &AtomicUsize {
        let mixed = (whose ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shares[(mixed >> 56) as usize % SHARES]
    }

    fn put_in(&self, owned: Owned) -> bool {
        for _ in 0..ROOM {
            let at = self.tail.fetch_add(1, Ordering::Relaxed) % ROOM;
            let Some(mut slot) = try_slot(&self.slots[at]) else { continue };
            if slot.is_none() {
                *slot = Some(owned);
                // Before anybody can take it, so that the number never falls below none.
                self.len.fetch_add(1, Ordering::Release);
                drop(slot);
                (self.wake)();
                return true;
            }
        }
        false
    }

    /// The oldest. What is just being put in comes with the next look.
    #[must_use]
    pub fn take(&self) -> Option<Mad> {
        self.take_of().map(|(_, mad)| mad)
    }

    /// As [`Self::take`], with the source's number.
    #[must_use]
    pub fn take_of(&self) -> Option<(u64, Mad)> {
        if self.is_empty() {
            return None;
        }
        let head = self.head.load(Ordering::Relaxed);
        (head..head + ROOM).find_map(|at| {
            let (whose, mad) = try_slot(&self.slots[at % ROOM])?.take()?;
            if let Some(whose) = whose {
                self.share(whose).fetch_sub(1, Ordering::Relaxed);
            }
            self.len.fetch_sub(1, Ordering::Release);
            self.head.store((at + 1) % ROOM, Ordering::Relaxed);
            Some((whose.unwrap_or(0), mad))
        })
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Forgets all that is there.
    pub fn clear(&self) {
        while self.take().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mad(first: u8) -> Mad {
        let mut bytes = [0; MAD_LEN];
        bytes[0] = first;
        Mad { source: [1; 16], dest: [2; 16], traffic_class: 0, sl: 0, bytes }
    }

    #[test]
    fn an_inbox_is_bounded_and_wakes_its_reader_for_what_it_took() {
        let woken = Arc::new(AtomicUsize::new(0));
        let count = woken.clone();
        let inbox = Inbox::new(Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let taken = (0..=255).filter(|&n| inbox.put(mad(n))).count();
        assert_eq!((taken, woken.load(Ordering::Relaxed)), (ROOM, ROOM));
        assert_eq!(inbox.take().map(|mad| mad.bytes[0]), Some(0), "the oldest first");
        assert!(inbox.put(mad(9)));
        inbox.clear();
        assert!(inbox.is_empty() && inbox.take().is_none());
    }

    #[test]
    fn who_floods_leaves_places_to_others() {
        let inbox = Inbox::new(Arc::new(|| {}));
        let flood = (0..=255).filter(|&n| inbox.put_of(1, mad(n))).count();
        assert_eq!(flood, ROOM / 2);
        let other = (2..).find(|n| !std::ptr::eq(inbox.share(*n), inbox.share(1))).unwrap();
        let second = (0..=255).filter(|&n| inbox.put_of(other, mad(n))).count();
        assert_eq!(second, ROOM / 4);
        assert_eq!(std::iter::from_fn(|| inbox.take_of()).count(), ROOM / 2 + ROOM / 4);
        assert!(inbox.shares.iter().all(|share| share.load(Ordering::Relaxed) == 0));
        assert!(inbox.put_of(1, mad(0)), "it has places again");
    }

    #[test]
    fn nobody_waits_for_who_lost_its_processor_at_an_inbox() {
        let inbox = Inbox::new(Arc::new(|| {}));
        let stuck = inbox.slots[0].lock().unwrap();
        assert!(inbox.put(mad(1)) && inbox.put(mad(2)), "the next places are taken");
        let taken: Vec<u8> = std::iter::from_fn(|| inbox.take()).map(|mad| mad.bytes[0]).collect();
        assert_eq!(taken, [1, 2], "in order");
        drop(stuck);
        assert!(inbox.put(mad(3)));
        let stuck: Vec<_> = inbox.slots.iter().map(|slot| slot.lock().unwrap()).collect();
        assert!(!inbox.put(mad(4)), "as if it were full");
        assert!(inbox.take().is_none() && !inbox.is_empty(), "the reader comes again");
        drop(stuck);
        assert_eq!(inbox.take().map(|mad| mad.bytes[0]), Some(3));
    }
}
