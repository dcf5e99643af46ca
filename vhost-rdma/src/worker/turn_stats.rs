//! The turn_stats of a worker: that it goes on, and how long its turns are.
//!
//! A worker serves many guests, so the length of one turn (jobs and one round of polling) is what
//! one guest can make another wait. What counts is the time that is *ours*: a turn during which the
//! host ran somebody else is long on the wall clock, and no guest's doing. Three things make a turn
//! long: it ran on the processor; it was blocked in a system call, a page fault or a lock; or it
//! was ready to run, and did not. The first two are ours. Of the third the scheduler tells what a
//! thread stood in a run queue (`/proc/thread-self/schedstat`), but not what a hypervisor took from
//! this whole machine: such time is in no account at all. A thread that never gave up its processor
//! by itself was not blocked, so its turn is what it ran (`CLOCK_THREAD_CPUTIME_ID`, which leaves
//! out stolen time: kernel/sched/core.c, update_rq_clock_task).
//!
//! Reading these costs two microseconds, so they are read only for turns that are long at all, and
//! once a millisecond as the values to compare with: time of others before the turn but after that
//! reading is taken off too, a millisecond at most, and a turn is never made longer by it. A worker
//! that is stuck inside a turn is seen from outside by [`TurnStats::stalled`].

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::clock::{Clock, thread_time};
use crate::memory;
use crate::shard::Nanos;

/// Upper bounds of the buckets of turns, in nanoseconds.
pub const BOUNDS: [Nanos; 5] = [100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];
/// Turns that are shorter than this on the wall clock are taken as they are.
const SHORT: Nanos = 1_000_000;
/// How old the reading that is compared with may be.
const FRESH: Nanos = 1_000_000;

/// What others see of a worker.
#[derive(Debug)]
pub struct TurnStats {
    clock: Clock,
    /// When the present turn began; 0 between turns and asleep.
    since: AtomicU64,
    longest: AtomicU64,
    total: AtomicU64,
    /// The most that a turn was charged.
    charged: AtomicU64,
    turns: [AtomicU64; BOUNDS.len() + 1],
}

/// A worker at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Beat {
    /// Turns by length: as [`BOUNDS`], and one more for longer ones. Not cumulative.
    pub turns: [u64; BOUNDS.len() + 1],
    /// The longest turn, and the sum of all: the worker's own time, in nanoseconds.
    pub longest: Nanos,
    /// See `longest`.
    pub total: Nanos,
    /// The most that the engine charged a turn, by its cost model ([`crate::nic::budget`]): the
    /// same on a machine of any speed.
    pub charged: Nanos,
    /// For how long the present turn has lasted, on the wall clock; 0 between turns.
    pub stalled: Nanos,
}

impl TurnStats {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            clock,
            since: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            total: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            turns: Default::default(),
        }
    }

    /// The present turn, by the time at which it began; 0 between turns and asleep.
    pub(super) fn turn(&self) -> Nanos {
        self.since.load(Ordering::Relaxed)
    }

    /// For how long the worker has been in its present turn.
    fn stalled(&self) -> Nanos {
        match self.since.load(Ordering::Relaxed) {
            0 => 0,
            since => self.clock.now().saturating_sub(since),
        }
    }

    /// The worker now.
    #[must_use]
    pub fn beat(&self) -> Beat {
        let mut turns = [0; BOUNDS.len() + 1];
        for (count, turn) in turns.iter_mut().zip(&self.turns) {
            *count = turn.load(Ordering::Relaxed);
        }
        Beat {
            turns,
            longest: self.longest.load(Ordering::Relaxed),
            total: self.total.load(Ordering::Relaxed),
            charged: self.charged.load(Ordering::Relaxed),
            stalled: self.stalled(),
        }
    }

    /// Only the worker itself counts, so that a load and a store do.
    fn count(&self, own: Nanos) {
        let bucket = BOUNDS.iter().position(|&bound| own <= bound).unwrap_or(BOUNDS.len());
        if let Some(turns) = self.turns.get(bucket) {
            turns.store(turns.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        self.total.store(self.total.load(Ordering::Relaxed) + own, Ordering::Relaxed);
        if own > self.longest.load(Ordering::Relaxed) {
            self.longest.store(own, Ordering::Relaxed);
        }
    }
}

/// What the host says of a thread at one moment; what it does not tell stays at 0.
#[derive(Debug, Clone, Copy, Default)]
struct Reading {
    /// When it was read.
    at: Nanos,
    /// Time that the thread has stood in run queues.
    queued: Nanos,
    /// Time that it has run.
    ran: Nanos,
    /// How often it had to wait for something.
    blocked: u64,
}

impl Reading {
    /// How much of the time since `earlier` was others'.
    fn others_since(&self, earlier: &Self) -> Nanos {
        let queued = self.queued.saturating_sub(earlier.queued);
        let ran = self.ran.saturating_sub(earlier.ran);
        let passed = self.at.saturating_sub(earlier.at);
        if self.blocked == earlier.blocked {
            return queued.max(passed.saturating_sub(ran));
        }
        queued
    }
}

/// The worker's end.
#[derive(Debug)]
pub(super) struct Counter {
    turn_stats: Arc<TurnStats>,
    /// `None` where the host does not tell, and in a process that serves RNICs, which has shut
    /// itself in by now.
    schedstat: Option<File>,
    began: Nanos,
    last: Reading,
    /// All that had been charged at the end of the last turn.
    charged: Nanos,
}

impl Counter {
    /// To be called on the worker's thread: the file is the thread's own.
    pub(super) fn new(turn_stats: Arc<TurnStats>) -> Self {
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        let now = turn_stats.clock.now();
        let mut counter =
            Self { turn_stats, schedstat, began: 0, last: Reading::default(), charged: 0 };
        counter.last = counter.read(now);
        counter
    }

    /// A turn begins.
    #[inline]
    pub(super) fn begin(&mut self, now: Nanos) {
        if now.saturating_sub(self.last.at) > FRESH {
            self.last = self.read(now);
        }
        self.began = now;
        self.turn_stats.since.store(now, Ordering::Relaxed);
    }

    /// It is over; `charged` is all that the engine has charged since the start.
    #[inline]
    pub(super) fn end(&mut self, now: Nanos, charged: Nanos) {
        let turn = charged.saturating_sub(self.charged);
        self.charged = charged;
        if turn > self.turn_stats.charged.load(Ordering::Relaxed) {
            self.turn_stats.charged.store(turn, Ordering::Relaxed);
        }
        let mut own = now.saturating_sub(self.began);
        if own >= SHORT {
            let read = self.read(now);
            own = own.saturating_sub(read.others_since(&self.last));
            self.last = read;
        }
        self.turn_stats.since.store(0, Ordering::Relaxed);
        self.turn_stats.count(own);
    }

    /// What the host says now.
    fn read(&self, now: Nanos) -> Reading {
        Reading {
            at: now,
            queued: self.queued().unwrap_or(0),
            ran: u64::try_from(thread_time().as_nanos()).unwrap_or(u64::MAX),
            blocked: memory::usage().blocked,
        }
    }

    /// Nanoseconds that the thread has stood in run queues: the second number
    /// (Documentation/scheduler/sched-stats.rst).
    fn queued(&self) -> Option<Nanos> {
        let mut bytes = [0; 96];
        let len = self.schedstat.as_ref()?.read_at(&mut bytes, 0).ok()?;
        let text = std::str::from_utf8(bytes.get(..len)?).ok()?;
        text.split_ascii_whitespace().nth(1)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_turn_that_blocks_is_long_and_one_in_progress_is_seen() {
        let clock = Clock::new();
        let turn_stats = Arc::new(TurnStats::new(clock));
        let mut counter = Counter::new(turn_stats.clone());
        counter.begin(clock.now());
        counter.end(clock.now(), 0);
        assert_eq!(turn_stats.beat().turns.iter().sum::<u64>(), 1);
        assert_eq!(turn_stats.beat().stalled, 0);
        counter.begin(clock.now());
        std::thread::sleep(Duration::from_millis(20));
        assert!(turn_stats.beat().stalled >= 20_000_000, "seen from outside while it lasts");
        counter.end(clock.now(), 700);
        let beat = turn_stats.beat();
        assert!(beat.longest >= 15_000_000, "blocked is not waiting for a processor: {beat:?}");
        assert_eq!((beat.stalled, beat.charged), (0, 700));
        counter.begin(clock.now());
        counter.end(clock.now(), 900);
        assert_eq!(counter.turn_stats.beat().charged, 700, "the most of one turn");
        assert_eq!(beat.turns[BOUNDS.len() - 2] + beat.turns[BOUNDS.len() - 1], 1, "{beat:?}");
    }

    /// A turn of 60 ms by the clock, of which the thread ran none and was `queued` as long as said;
    /// it is told what of it was the worker's.
    fn turn_of_60_ms(queued: Nanos, blocks: bool) -> Nanos {
        let clock = Clock::new();
        let mut counter = Counter::new(Arc::new(TurnStats::new(clock)));
        let now = clock.now();
        counter.begin(now);
        counter.last = counter.read(now);
        let queued_before = counter.last.queued;
        counter.last.queued = queued_before.saturating_sub(queued);
        if blocks {
            std::thread::sleep(Duration::from_micros(10));
        }
        counter.end(now + 60_000_000, 0);
        assert!(queued_before >= queued || queued == 0, "this host tells");
        counter.turn_stats.beat().longest
    }

    #[test]
    fn the_wait_for_a_processor_is_not_ours() {
        // Something that the thread has waited for already.
        let queued = Counter::new(Arc::new(TurnStats::new(Clock::new()))).queued();
        let queued = queued.expect("this host tells").min(50_000_000);
        assert!(turn_of_60_ms(queued, true) <= 60_000_000 - queued);
    }

    #[test]
    fn what_a_hypervisor_takes_is_not_ours_and_what_a_thread_waits_for_is() {
        assert!(turn_of_60_ms(0, false) < 10_000_000, "no account has it");
        assert!(turn_of_60_ms(0, true) > 50_000_000, "it was blocked, who knows how long");
    }

    #[test]
    fn a_turn_that_runs_is_ours() {
        let clock = Clock::new();
        let turn_stats = Arc::new(TurnStats::new(clock));
        let mut counter = Counter::new(turn_stats.clone());
        counter.begin(clock.now());
        let ran = thread_time();
        // The host's two clocks differ by a tenth of a millisecond, however long the turn.
        while thread_time() - ran < Duration::from_millis(50) {}
        counter.end(clock.now(), 0);
        assert!(turn_stats.beat().longest >= 49_500_000, "{:?}", turn_stats.beat());
    }
}
