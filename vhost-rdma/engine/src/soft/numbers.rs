//! Numbers that must not be guessable or come back soon: QPNs and keys.
//!
//! 24 bits from the shard's random source, unique while in use, and kept out of use for a while
//! after they are freed, so that a late request with an old number finds nothing (ReDMArk, USENIX
//! Security 2021, shows what predictable numbers allow). Keys are unique in their NIC, and so a set
//! of its own; QPNs are unique on the host, and come out of a [`Pool`] that shards share.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use crate::nic::shards::Shards;
use crate::qpn::{Key, Pool};

/// Freed numbers that are held back.
const QUARANTINE: usize = 4096;

/// The source of randomness, given by whoever drives the shard. Must be a CSPRNG in production.
pub trait Random: Send {
    /// The next 32 random bits.
    fn next_u32(&mut self) -> u32;
}

/// Where numbers are noted that are in use, or rest.
pub(super) trait Taken {
    /// Notes one; false if it is.
    fn claim(&mut self, number: u32) -> bool;
    /// It may be given again.
    fn give_back(&mut self, number: u32);
}

/// Many small sets: there may be a hundred thousand.
impl Taken for Shards<()> {
    fn claim(&mut self, number: u32) -> bool {
        self.insert(number, ()).is_none()
    }

    fn give_back(&mut self, number: u32) {
        self.remove(&number);
    }
}

impl Taken for Arc<Pool> {
    fn claim(&mut self, number: u32) -> bool {
        Pool::claim(self, number)
    }

    fn give_back(&mut self, number: u32) {
        Pool::give_back(self, number);
    }
}

/// Numbers in use and in quarantine.
pub(super) struct Numbers<T: Taken = Shards<()>> {
    taken: T,
    freed: VecDeque<u32>,
}

/// QPNs.
pub(super) type Qpns = Numbers<Arc<Pool>>;

impl<T: Taken + fmt::Debug> fmt::Debug for Numbers<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Numbers({} rest)", self.freed.len())
    }
}

impl Default for Numbers {
    fn default() -> Self {
        Self { taken: Shards::default(), freed: VecDeque::new() }
    }
}

impl Numbers {
    /// A fresh 24-bit number ≥ 2, or `None` if chance finds none (the space is nearly full).
    pub(super) fn take(&mut self, random: &mut dyn Random) -> Option<u32> {
        (0..64)
            .map(|_| random.next_u32() >> 8)
            .find(|&number| number >= 2 && self.taken.claim(number))
    }

    /// Numbers that are in use or rest.
    #[cfg(test)]
    pub(super) fn known(&self) -> usize {
        self.taken.len()
    }
}

impl Default for Qpns {
    /// As of a shard that is alone on its host.
    fn default() -> Self {
        Self::of(Arc::new(Pool::whole(Key::default())))
    }
}

impl Qpns {
    pub(super) const fn of(pool: Arc<Pool>) -> Self {
        Self { taken: pool, freed: VecDeque::new() }
    }

    /// A fresh one, or `None` if there is hardly one left.
    pub(super) fn take(&self, random: &mut dyn Random) -> Option<u32> {
        self.taken.take(|| random.next_u32())
    }
}

impl<T: Taken> Numbers<T> {
    /// Takes this number, which somebody has; false if it is in use, or not ours.
    pub(super) fn claim(&mut self, number: u32) -> bool {
        self.taken.claim(number)
    }

    /// Numbers that rest, the longest first.
    pub(super) fn resting(&self) -> impl Iterator<Item = u32> {
        self.freed.iter().copied()
    }

    /// Has a number rest that is not in use.
    pub(super) fn rest(&mut self, number: u32) {
        if self.claim(number) {
            self.free(number);
        }
    }

    /// Gives a number back; it stays unused for the next few thousand frees.
    pub(super) fn free(&mut self, number: u32) {
        self.freed.push_back(number);
        if self.freed.len() > QUARANTINE
            && let Some(old) = self.freed.pop_front()
        {
            self.taken.give_back(old);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Walk(u32);

    impl Random for Walk {
        fn next_u32(&mut self) -> u32 {
            self.0 = self.0.wrapping_add(0x9e37_7900);
            self.0
        }
    }

    /// A set that is full moves all that it has to a larger one, in the middle of a command.
    #[test]
    fn no_set_of_numbers_grows_in_one_go() {
        let (mut numbers, mut random) = (Numbers::<Shards<()>>::default(), Walk(1));
        let mut taken = Vec::new();
        while taken.len() < 100_000 {
            taken.extend(numbers.take(&mut random));
        }
        assert!(numbers.taken.largest() <= 1024, "{} in one set", numbers.taken.largest());
        let first = taken[0];
        numbers.free(first);
        assert!(numbers.taken.contains_key(&first), "it rests");
        taken[1..=QUARANTINE].iter().for_each(|&number| numbers.free(number));
        assert!(!numbers.taken.contains_key(&first), "and comes back");
    }
}
