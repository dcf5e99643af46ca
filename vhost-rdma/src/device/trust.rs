//! Whether a worker may make a system call on a descriptor of a VMM's, whose length the VMM
//! decides.
//!
//! Signalling an eventfd takes a microsecond, unless its VMM has a million epoll sets wait for it:
//! then it takes a quarter of a second. Nothing tells beforehand. A thread of the connection's own
//! can make the call in a worker's place (`notifier`), but on cores that guests and workers share
//! an event then waits for one more thread to be scheduled: a round trip of two sleeping guests, 30
//! µs, became 130 µs to milliseconds on two busy cores.
//!
//! So a new connection is not trusted, and its thread makes the calls. Where all of them were short
//! for a second, the worker makes them. One that takes long ends that at once, for a second, then
//! two, four, up to an hour: a VMM that behaves well in between takes a worker's time once in each
//! such period, and one that does not never takes any. What counts is processor time of the calling
//! thread: that it was made to wait for a processor is no fault of the VMM's.
//!
//! The connection's own thread is not free either: the kernel wakes all waiters in one go, with
//! interrupts off (`eventfd_signal_mask` in fs/eventfd.c takes the queue's lock so), and whoever
//! else runs on that processor stands still. So a VMM whose calls are long again and again is told
//! seldom: behind each comes a rest, at first as long as the call, in the end 128 times as long.
//! One whose last such call was longer ago than that takes less than a hundredth of a processor as
//! it is, and gets none: on a busy host a call looks long once in a while.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::worker::thread_time;

/// A call that takes longer has been made to: a hundred times what one takes.
const LONG: Duration = Duration::from_micros(200);
/// The first time without trust; each is twice the last.
const PROBATION: Duration = Duration::from_secs(1);
/// Doublings: an hour and eight minutes.
const DOUBLINGS: u32 = 12;
/// After as many times the last probation, without another fault, it is forgotten: on a machine
/// whose hypervisor takes its processors away a call looks long once in a while.
const FORGET: u32 = 100;
/// Doublings of the rest behind a long call: less than a hundredth of a processor goes to such
/// calls.
const REST_DOUBLINGS: u32 = 7;
/// The longest rest.
const REST: Duration = Duration::from_secs(30);

/// What is known of one NIC's VMMs.
#[derive(Debug)]
pub(super) struct Trust {
    origin: Instant,
    /// Trusted from then on, in nanoseconds after `origin`.
    from: AtomicU64,
    /// Faults that are not forgotten, and when the last one was. A worker and the connection's
    /// thread both count here, and neither may wait for the other, so there is no lock; of two
    /// faults at one moment one may be lost, which costs the VMM less than it deserves.
    faults: AtomicU32,
    last: AtomicU64,
    /// The VMM is not told anything before, in nanoseconds after `origin`.
    rests_until: AtomicU64,
}

/// How long the probation after that many faults is.
fn probation(faults: u32) -> Duration {
    PROBATION * (1 << faults.saturating_sub(1).min(DOUBLINGS))
}

impl Trust {
    pub(super) fn new() -> Self {
        Self {
            origin: Instant::now(),
            from: AtomicU64::new(u64::MAX),
            faults: AtomicU32::new(0),
            last: AtomicU64::new(0),
            rests_until: AtomicU64::new(0),
        }
    }

    /// Whether a worker may make a call now.
    pub(super) fn is_given(&self) -> bool {
        self.is_given_at(self.origin.elapsed())
    }

    fn is_given_at(&self, now: Duration) -> bool {
        nanos(now) >= self.from.load(Ordering::Relaxed)
    }

    /// A new connection has to earn it.
    pub(super) fn begin(&self) {
        self.not_before(self.origin.elapsed() + PROBATION);
    }

    fn not_before(&self, time: Duration) {
        let until = match self.from.load(Ordering::Relaxed) {
            u64::MAX => 0,
            until => until,
        };
        self.from.store(until.max(nanos(time)), Ordering::Relaxed);
    }

    /// Makes a call and sees how long it takes. True if the VMM has just lost the trust.
    pub(super) fn watch<R>(&self, call: impl FnOnce() -> R) -> (R, bool) {
        let before = thread_time();
        let result = call();
        let took = thread_time().saturating_sub(before);
        let lost = took > LONG && self.fault_at(self.origin.elapsed(), took);
        (result, lost)
    }

    /// For how long the VMM is not to be told anything, by nobody.
    pub(super) fn rest(&self) -> Option<Duration> {
        self.rest_at(self.origin.elapsed())
    }

    fn rest_at(&self, now: Duration) -> Option<Duration> {
        let until = Duration::from_nanos(self.rests_until.load(Ordering::Relaxed));
        until.checked_sub(now).filter(|left| !left.is_zero())
    }

    /// As if a call had taken so long.
    #[cfg(test)]
    pub(super) fn took(&self, long: Duration) {
        self.fault_at(self.origin.elapsed(), long);
    }

    /// A call took so long. True if the VMM was trusted.
    fn fault_at(&self, now: Duration, took: Duration) -> bool {
        let trusted = self.is_given_at(now);
        let last = Duration::from_nanos(self.last.swap(nanos(now), Ordering::Relaxed));
        let known = self.faults.load(Ordering::Relaxed);
        let kept = if now > last + FORGET * probation(known) { 0 } else { known };
        let count = kept.saturating_add(1);
        self.faults.store(count, Ordering::Relaxed);
        self.not_before(now + probation(count));
        let seldom = now.saturating_sub(last) > took * (1 << REST_DOUBLINGS);
        if !seldom {
            let rest = took * (1 << (count - 1).min(REST_DOUBLINGS));
            self.rests_until.fetch_max(nanos(now + rest.min(REST)), Ordering::Relaxed);
        }
        trusted
    }
}

/// 64 bits of nanoseconds last for 584 years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn trust_is_earned_and_each_fault_costs_twice_as_much() {
        let trust = Trust::new();
        assert!(!trust.is_given_at(secs(1000)), "nobody is connected");
        trust.not_before(secs(1));
        assert!(!trust.is_given_at(Duration::from_millis(999)) && trust.is_given_at(secs(1)));
        let mut now = secs(1);
        for n in 0..20 {
            assert!(trust.fault_at(now, LONG), "it was trusted");
            let lasts = secs(1 << n.min(12));
            assert!(!trust.is_given_at(now + lasts - Duration::from_millis(1)), "{n}");
            now += lasts;
            assert!(trust.is_given_at(now), "{n}");
        }
        // One that goes on being slow is not trusted for an hour after the last time.
        now += secs(1);
        trust.fault_at(now, LONG);
        for n in 1..100 {
            assert!(!trust.fault_at(now + secs(n), LONG), "by its own thread");
        }
        assert!(!trust.is_given_at(now + secs(99 + 4095)));
    }

    #[test]
    fn a_fault_of_long_ago_is_forgotten() {
        let trust = Trust::new();
        trust.not_before(secs(1));
        for n in 1..50 {
            let now = secs(1000 * n);
            assert!(trust.fault_at(now, LONG));
            assert!(trust.is_given_at(now + secs(1)));
        }
    }

    #[test]
    fn long_calls_that_are_seldom_cost_no_rest() {
        let trust = Trust::new();
        for n in 1..200 {
            let now = Duration::from_millis(100 * n);
            trust.fault_at(now, 2 * LONG);
            assert_eq!(trust.rest_at(now), None, "{n}");
        }
        let soon = Duration::from_millis(19_901);
        trust.fault_at(soon, 2 * LONG);
        assert!(trust.rest_at(soon).is_some(), "one behind the other");
    }

    #[test]
    fn behind_long_calls_comes_a_rest_that_grows() {
        let trust = Trust::new();
        trust.not_before(secs(1));
        let (mut now, took) = (secs(1), Duration::from_millis(10));
        assert_eq!(trust.rest_at(now), None);
        for n in 0..12 {
            trust.fault_at(now, took);
            let rest = took * (1 << n.min(7));
            assert_eq!(trust.rest_at(now), Some(rest), "{n}");
            now += rest;
            assert_eq!(trust.rest_at(now), None);
        }
        trust.fault_at(now, secs(1));
        assert_eq!(trust.rest_at(now), Some(REST), "no longer");
    }

    #[test]
    fn only_time_on_a_processor_counts() {
        let trust = Trust::new();
        let ((), _) = trust.watch(|| std::thread::sleep(50 * LONG));
        assert_eq!(trust.faults.load(Ordering::Relaxed), 0);
        let ((), _) = trust.watch(|| {
            let begin = thread_time();
            while thread_time().saturating_sub(begin) < 2 * LONG {
                std::hint::spin_loop();
            }
        });
        assert_eq!(trust.faults.load(Ordering::Relaxed), 1);
    }
}
