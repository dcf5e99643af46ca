//! Numbers that must not be guessable or come back soon: QPNs and keys.
//!
//! 24 bits from the shard's random source, unique while in use, and kept out of use for a while after they are freed, so that a
//! late request with an old number finds nothing (ReDMArk, USENIX Security 2021, shows what predictable numbers allow).

use std::collections::VecDeque;
use std::fmt;

use rustc_hash::FxHashSet;

/// Freed numbers that are held back.
const QUARANTINE: usize = 4096;

/// The source of randomness, given by whoever drives the shard. Must be a CSPRNG in production.
pub trait Random: Send {
    /// The next 32 random bits.
    fn next_u32(&mut self) -> u32;
}

/// Numbers in use and in quarantine.
#[derive(Default)]
pub(super) struct Numbers {
    taken: FxHashSet<u32>,
    freed: VecDeque<u32>,
}

impl fmt::Debug for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Numbers({} taken)", self.taken.len())
    }
}

impl Numbers {
    /// A fresh 24-bit number ≥ 2, or `None` if chance finds none (the space is nearly full).
    pub(super) fn take(&mut self, random: &mut dyn Random) -> Option<u32> {
        (0..64)
            .map(|_| random.next_u32() >> 8)
            .find(|&number| number >= 2 && self.taken.insert(number))
    }

    /// Gives a number back; it stays unused for the next few thousand frees.
    pub(super) fn free(&mut self, number: u32) {
        self.freed.push_back(number);
        if self.freed.len() > QUARANTINE
            && let Some(old) = self.freed.pop_front()
        {
            self.taken.remove(&old);
        }
    }
}
