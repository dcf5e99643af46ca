//! Queue pair numbers: each one on the host once, whatever network, process or shard it is on.
//!
//! There are 24 bits of them, so no network can have a fixed part. They are lent in *blocks*: the
//! supervisor says which blocks are whose (`supervisor::lender`), and a network's process has a
//! [`Pool`] of what it was lent, which its shards share. Who runs short asks for more.
//!
//! A block is no range of numbers: that would tell a guest where its neighbours' are. Blocks are
//! ranges of *places*, and a [`Key`], which is the host's, says what number a place has: a Feistel
//! network over two halves of 12 bits. So numbers look random over all 24 bits, and none is two
//! places'. The round function is no cipher, and need not be one: a number is of use only inside
//! one network, and to a queue pair that is connected back or knows the Q_Key.
//!
//! There is no lock: a shard takes a number in the midst of its round.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};

use crate::link::MULTICAST_QPN;

/// Numbers of a block.
pub const BLOCK: u32 = 4096;
/// Blocks of the host.
pub const BLOCKS: u32 = (1 << 24) / BLOCK;

const HALF: u32 = 12;
const LOW: u32 = (1 << HALF) - 1;
/// Places that are tried for one number. Of a pool that is nine tenths full, one try in 10¹¹ fails.
const TRIES: u32 = 256;
/// A pool with fewer numbers left asks for more.
const FEW: usize = BLOCK as usize;
/// Whoever lends may have had none left when it was asked, and have some now. It is asked again
/// each time that so many numbers were wanted.
const AGAIN: u32 = 64;

/// Which number a place has: the host's secret.
#[derive(Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key(pub [u64; 4]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// Half a number, from the other half and a part of the key.
fn round(half: u32, key: u64) -> u32 {
    let mut x = (u64::from(half) ^ key).wrapping_mul(key | 1);
    x ^= x >> 29;
    x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ key.rotate_left(32) | 1);
    x ^= x >> 32;
    // Twelve bits fit.
    u32::try_from(x >> 20 & u64::from(LOW)).unwrap_or_default()
}

impl Key {
    /// The key of so many bytes, which nobody else may know.
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let mut key = Self::default();
        key.0.iter_mut().zip(words).for_each(|(key, word)| *key = u64::from_le_bytes(*word));
        key
    }

    fn number(&self, place: u32) -> u32 {
        let halves = (place >> HALF & LOW, place & LOW);
        let (high, low) = self.0.iter().fold(halves, |(a, b), key| (b, a ^ round(b, *key)));
        high << HALF | low
    }

    fn place(&self, number: u32) -> u32 {
        let halves = (number >> HALF & LOW, number & LOW);
        let (high, low) = self.0.iter().rev().fold(halves, |(a, b), key| (b ^ round(a, *key), a));
        high << HALF | low
    }
}

/// 0 and 1 are the standard's (IBTA 3.5.10: SMI and GSI), and the last means every member of a
/// group.
const fn is_usable(number: u32) -> bool {
    number >= 2 && number < MULTICAST_QPN
}

/// The numbers of a block that are in use.
type Used = [AtomicU64; BLOCK as usize / 64];

/// The numbers of one process.
pub struct Pool {
    key: Key,
    /// Blocks that were lent, in that order: as many as `count` says.
    lent: Box<[AtomicU32]>,
    count: AtomicUsize,
    /// By block, if it was lent.
    used: Box<[OnceLock<Box<Used>>]>,
    in_use: AtomicUsize,
    /// How often more was wanted since some came.
    wanted: AtomicU32,
    /// Asks; none where everything is here.
    ask: Option<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lent, used) = (&self.count, &self.in_use);
        f.debug_struct("Pool").field("lent", lent).field("in_use", used).finish_non_exhaustive()
    }
}

impl Pool {
    /// One that has nothing yet; `ask` is called when it runs short, on any thread, and must not
    /// wait.
    #[must_use]
    pub fn lent(key: Key, ask: Box<dyn Fn() + Send + Sync>) -> Self {
        Self { ask: Some(ask), ..Self::new(key) }
    }

    /// All numbers there are: of a process that has the host to itself.
    #[must_use]
    pub fn whole(key: Key) -> Self {
        let pool = Self::new(key);
        pool.lent.iter().zip(0..).for_each(|(place, block)| place.store(block, Ordering::Relaxed));
        pool.count.store(BLOCKS as usize, Ordering::Release);
        pool
    }

    fn new(key: Key) -> Self {
        Self {
            key,
            lent: (0..BLOCKS).map(|_| AtomicU32::new(0)).collect(),
            count: AtomicUsize::new(0),
            used: (0..BLOCKS).map(|_| OnceLock::new()).collect(),
            in_use: AtomicUsize::new(0),
            wanted: AtomicU32::new(0),
            ask: None,
        }
    }

    /// It has this block from now on. One thread lends.
    pub fn lend(&self, block: u32) {
        let Some(used) = self.used.get(block as usize) else { return };
        if used.set(Box::new([const { AtomicU64::new(0) }; _])).is_err() {
            return;
        }
        let count = self.count.load(Ordering::Relaxed);
        if let Some(place) = self.lent.get(count) {
            place.store(block, Ordering::Relaxed);
            self.count.store(count + 1, Ordering::Release);
        }
        self.wanted.store(0, Ordering::Relaxed);
    }

    /// A number that nobody on the host has, or `None`: there is hardly one left here.
    pub fn take(&self, mut random: impl FnMut() -> u32) -> Option<u32> {
        let count = self.count.load(Ordering::Acquire);
        let taken = (0..TRIES).find_map(|_| {
            let block = self.lent.get((random() as usize).checked_rem(count)?)?;
            let place = block.load(Ordering::Relaxed) * BLOCK + (random() >> 8) % BLOCK;
            let number = self.key.number(place);
            (is_usable(number) && self.mark(place)).then_some(number)
        });
        let left = (count * BLOCK as usize).saturating_sub(self.in_use.load(Ordering::Relaxed));
        if left < FEW.max(count * BLOCK as usize / 4)
            && let Some(ask) = &self.ask
            && self.wanted.fetch_add(1, Ordering::Relaxed).is_multiple_of(AGAIN)
        {
            ask();
        }
        taken
    }

    /// The word of a place that is ours, and the bit in it.
    fn bit(&self, place: u32) -> Option<(&AtomicU64, u64)> {
        let block = self.used.get((place / BLOCK) as usize)?;
        if block.get().is_none() && self.ask.is_none() {
            // Everything is ours; another thread may be as far.
            let _ = block.set(Box::new([const { AtomicU64::new(0) }; _]));
        }
        let word = block.get()?.get((place % BLOCK) as usize / 64)?;
        Some((word, 1 << (place % 64)))
    }

    /// Marks a place as used; false if it is, or is not ours.
    fn mark(&self, place: u32) -> bool {
        let Some((word, bit)) = self.bit(place) else { return false };
        let free = word.fetch_or(bit, Ordering::Relaxed) & bit == 0;
        self.in_use.fetch_add(usize::from(free), Ordering::Relaxed);
        free
    }

    /// Takes this number; false if somebody has it, or if it is not this process's to take.
    pub fn claim(&self, number: u32) -> bool {
        is_usable(number) && self.mark(self.key.place(number))
    }

    /// Gives back a number that was taken here.
    pub fn give_back(&self, number: u32) {
        let Some((word, bit)) = self.bit(self.key.place(number)) else { return };
        if word.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            self.in_use.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use rand::rngs::StdRng;
    use rand::{RngCore as _, SeedableRng as _};

    use super::*;

    const KEY: Key = Key([0x1234_5678_9abc_def1, 77, u64::MAX / 3, 0xfeed << 40 | 5]);

    fn dice(seed: u64) -> impl FnMut() -> u32 {
        let mut dice = StdRng::seed_from_u64(seed);
        move || dice.next_u32()
    }

    #[test]
    fn every_place_has_a_number_of_its_own() {
        for key in [KEY, Key::default()] {
            let mut seen = vec![false; 1 << 24];
            for place in (0..1 << 24).step_by(13) {
                let number = key.number(place);
                assert_eq!(key.place(number), place);
                assert!(!std::mem::replace(&mut seen[number as usize], true));
            }
        }
    }

    /// Who sees its own numbers is not to see where the next is: they are spread over everything.
    #[test]
    fn a_block_is_no_range() {
        let numbers: BTreeSet<u32> = (0..BLOCK).map(|place| KEY.number(place)).collect();
        let steps: Vec<u32> =
            numbers.iter().zip(numbers.iter().skip(1)).map(|(a, b)| b - a).collect();
        let sixteenths: BTreeSet<u32> = numbers.iter().map(|number| number >> 20).collect();
        assert_eq!(sixteenths.len(), 16, "all over");
        // Steps are four thousand in the middle.
        let different: BTreeSet<&u32> = steps.iter().collect();
        assert!(different.len() > 2500, "{} different steps", different.len());
    }

    #[test]
    fn threads_and_processes_never_share_a_number() {
        let pools: Vec<_> = (0..3u32)
            .map(|process| {
                let pool = Pool::lent(KEY, Box::new(|| ()));
                pool.lend(process);
                Arc::new(pool)
            })
            .collect();
        let threads =
            [(0usize, 7), (0, 8), (1, 7), (1, 8), (2, 7), (2, 8)].map(|(process, seed)| {
                let pool = pools[process].clone();
                std::thread::spawn(move || {
                    let mut dice = dice(seed);
                    (0..1500).filter_map(|_| pool.take(&mut dice)).collect::<Vec<_>>()
                })
            });
        let all: Vec<u32> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(all.len(), 9000);
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 9000);
        assert!(all.iter().all(|&number| is_usable(number)));
    }

    #[test]
    fn who_runs_short_asks_once_and_who_has_nothing_gets_nothing() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = asked.clone();
        let pool = Pool::lent(
            KEY,
            Box::new(move || {
                counter.fetch_add(1, Ordering::Relaxed);
            }),
        );
        let mut dice = dice(3);
        let again = AGAIN as usize;
        assert!((0..again).all(|_| pool.take(&mut dice).is_none()));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        assert_eq!(pool.take(&mut dice), None);
        assert_eq!(asked.load(Ordering::Relaxed), 2, "there may be some now");
        (0..8).for_each(|block| pool.lend(block));
        let many = 6 * BLOCK as usize;
        let taken: Vec<_> = (0..many).map(|_| pool.take(&mut dice).unwrap()).collect();
        assert_eq!(asked.load(Ordering::Relaxed), 2, "there are enough");
        assert!(pool.take(&mut dice).is_some() && pool.take(&mut dice).is_some());
        assert_eq!(asked.load(Ordering::Relaxed), 3, "once");
        pool.lend(8);
        let mut rest = 2;
        while asked.load(Ordering::Relaxed) == 3 {
            assert!(pool.take(&mut dice).is_some(), "it asks before it is empty");
            rest += 1;
        }
        assert!(rest < FEW, "and again, as there are more");
        while pool.take(&mut dice).is_some() {
            rest += 1;
        }
        assert!(rest + many > 8 * BLOCK as usize, "hardly one is left");
        taken.iter().for_each(|&number| pool.give_back(number));
        assert!(pool.take(&mut dice).is_some());
    }

    #[test]
    fn a_number_is_claimed_by_whose_it_may_be_and_once() {
        let pool = Pool::lent(KEY, Box::new(|| ()));
        pool.lend(5);
        let number = KEY.number(5 * BLOCK + 3);
        assert!(pool.claim(number) && !pool.claim(number));
        pool.give_back(number);
        assert!(pool.claim(number));
        assert!(!pool.claim(KEY.number(6 * BLOCK)), "another process's");
        let whole = Pool::whole(KEY);
        assert!(![0, 1, MULTICAST_QPN].into_iter().any(|number| whole.claim(number)));
        assert!(whole.claim(2) && whole.claim(MULTICAST_QPN - 1));
    }
}
