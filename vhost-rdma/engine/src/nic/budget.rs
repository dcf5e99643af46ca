//! Budgets are time: what work costs, and how long it may go on.
//!
//! A worker serves many guests, so whatever one of them can make it do is bounded by time and never
//! by counts alone: a count that is harmless for small requests is a stall for large ones. Every
//! piece of work is *charged* to the shard's [`Meter`] by the small cost model below, and a
//! `Budget` is over when the charge **or** the clock has passed it. The charge makes it the same
//! on every machine and under a clock that a test turns; the clock makes it true where a piece took
//! longer than the model thinks: a page that was touched for the first time, a table that fell out
//! of the cache.
//!
//! Looking at the clock takes as long as a fifth of a small request, so it is looked at after about
//! a microsecond of charge: after each large piece, and after a few small ones. A clock that stands
//! still ([`Still`]) leaves the charge alone, for tests and fuzzing.
//!
//! Costs are nanoseconds on a present-day server with warm caches. They need not be exact: what
//! matters is that nothing a guest can multiply is free.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Nanos;
use crate::memory::Usage;

/// The cost model.
pub mod cost {
    use crate::nic::Nanos;

    /// A work request that is taken, checked and completed.
    pub const REQUEST: Nanos = 80;
    /// A scatter-gather element: the look-up of its key and the checks of its range.
    pub const ELEMENT: Nanos = 25;
    /// Another key that is looked up: a peer's, a window's region, an invalidation.
    pub(crate) const KEY: Nanos = 25;
    /// Bytes that are copied in a nanosecond.
    pub(crate) const BYTES_PER_NANO: Nanos = 8;
    /// A datagram given to one queue pair: a receive taken, a header built, a completion.
    pub(crate) const DELIVERY: Nanos = 120;
    /// A page of a fast registration, looked up in the guest's memory map.
    pub(crate) const PAGE: Nanos = 15;
    /// A work request that is completed with a flush.
    pub(crate) const FLUSH: Nanos = 50;
    /// An object that is looked at in a walk over many.
    pub const VISIT: Nanos = 10;
    /// An object that is made, ended or told of a failure.
    pub const OBJECT: Nanos = 150;
    /// A slot of a ring that moves to another ring, beside its bytes.
    pub(crate) const ENTRY: Nanos = 20;
    /// An event offered to the guest, or one that finds no buffer.
    pub(crate) const EVENT: Nanos = 200;
    /// A doorbell page that is looked at.
    pub(crate) const DOORBELL_PAGE: Nanos = 8;
    /// A producer index that moved.
    pub(crate) const POST: Nanos = 30;
    /// A deadline that comes.
    pub const TIMER: Nanos = 120;
    /// A requester that is woken.
    pub(crate) const WAKE: Nanos = 40;
    /// A control command, without what it walks over.
    pub(crate) const COMMAND: Nanos = 500;

    /// Copying so many bytes.
    pub(crate) const fn bytes(len: u64) -> Nanos {
        len / BYTES_PER_NANO
    }
}

/// A monotonic clock, given by whoever drives the shard.
pub trait Clock: Send + Sync {
    /// The time now.
    fn now(&self) -> Nanos;

    /// What the calling thread has had of the host so far.
    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// A clock that stands still: budgets are what is charged.
#[derive(Debug, Clone, Copy, Default)]
pub struct Still;

impl Clock for Still {
    fn now(&self) -> Nanos {
        0
    }
}

/// Charge after which the clock is looked at.
const LOOK_AFTER: Nanos = 1_000;

/// What the work of a shard has cost since it began; its NICs share it.
#[derive(Clone)]
pub struct Meter(Arc<Inner>);

struct Inner {
    charged: AtomicU64,
    clock: Box<dyn Clock>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Meter").field(&self.charged()).finish()
    }
}

impl Default for Meter {
    fn default() -> Self {
        Self::new(Box::new(Still))
    }
}

impl Meter {
    /// Nothing was charged yet.
    #[must_use]
    pub fn new(clock: Box<dyn Clock>) -> Self {
        Self(Arc::new(Inner { charged: AtomicU64::new(0), clock }))
    }

    /// Charges work. Only the thread of the shard does, so that a load and a store do.
    #[inline]
    pub fn charge(&self, cost: Nanos) {
        let charged = &self.0.charged;
        charged.store(charged.load(Ordering::Relaxed).wrapping_add(cost), Ordering::Relaxed);
    }

    /// As [`Self::charge`], `count` times.
    #[inline]
    pub fn charge_each(&self, cost: Nanos, count: usize) {
        self.charge(cost.saturating_mul(count as u64));
    }

    /// All that was charged.
    #[inline]
    #[must_use]
    pub fn charged(&self) -> Nanos {
        self.0.charged.load(Ordering::Relaxed)
    }

    /// The clock's time.
    #[inline]
    pub(crate) fn now(&self) -> Nanos {
        self.0.clock.now()
    }

    /// What the thread has had of the host; a system call.
    pub(crate) fn usage(&self) -> Usage {
        self.0.clock.usage()
    }

    /// A budget that begins now.
    #[inline]
    pub fn budget(&self, length: Nanos) -> Budget {
        self.budget_at(self.now(), length)
    }

    /// A budget that began at `now`, which is the clock's time or was just now.
    #[inline]
    pub fn budget_at(&self, now: Nanos, length: Nanos) -> Budget {
        let charged = self.charged();
        Budget {
            end: charged.saturating_add(length),
            until: now.saturating_add(length),
            look_at: charged.saturating_add(LOOK_AFTER),
            seen: now,
            looked: None,
            over: false,
        }
    }
}

/// A share of a worker's time.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Charge at which it is over.
    end: Nanos,
    /// Time at which it is over.
    until: Nanos,
    /// Charge at which the clock is looked at.
    look_at: Nanos,
    /// The clock when it was last looked at.
    seen: Nanos,
    /// What the last look found, until somebody takes it.
    looked: Option<Looked>,
    over: bool,
}

/// What went on between two looks at the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Looked {
    /// What was charged, at least.
    pub(crate) charged: Nanos,
    /// How long it took.
    pub(crate) lasted: Nanos,
}

impl Budget {
    /// The clock when it was last looked at.
    #[inline]
    pub(crate) const fn seen(&self) -> Nanos {
        self.seen
    }

    /// The time at which it is over, if no charge ends it before.
    #[inline]
    pub(crate) const fn until(&self) -> Nanos {
        self.until
    }

    /// What went by since the last look is nobody's who asks from now on.
    pub(crate) fn skip(&mut self, meter: &Meter) {
        self.seen = self.seen.max(meter.now());
        self.look_at = meter.charged().saturating_add(LOOK_AFTER);
        self.over |= self.seen >= self.until;
    }

    /// What was found since this was asked last, if the clock was looked at.
    #[inline]
    pub(crate) const fn looked(&mut self) -> Option<Looked> {
        self.looked.take()
    }

    /// Whether nothing more may be begun. To be asked after each piece of work, which is never so
    /// long that neighbours feel it.
    #[inline]
    pub fn is_over(&mut self, meter: &Meter) -> bool {
        self.is_due(meter) && self.look(meter)
    }

    /// Whether there is anything to find out: after most pieces of work there is not.
    #[inline]
    pub(crate) fn is_due(&self, meter: &Meter) -> bool {
        self.over || meter.charged() >= self.look_at.min(self.end)
    }

    fn look(&mut self, meter: &Meter) -> bool {
        let charged = meter.charged();
        if self.over || charged >= self.end {
            self.over = true;
        } else if charged >= self.look_at {
            let before = self.seen;
            self.seen = before.max(meter.now());
            let charged_since = charged.saturating_sub(self.look_at).saturating_add(LOOK_AFTER);
            self.looked = Some(Looked { charged: charged_since, lasted: self.seen - before });
            self.look_at = charged.saturating_add(LOOK_AFTER);
            self.over = self.seen >= self.until;
        }
        self.over
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A clock that a test turns.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct Turned(Arc<AtomicU64>);

    impl Turned {
        pub(crate) fn turn(&self, by: Nanos) {
            self.0.fetch_add(by, Ordering::Relaxed);
        }
    }

    impl Clock for Turned {
        fn now(&self) -> Nanos {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_budget_ends_by_what_is_charged() {
        let meter = Meter::default();
        meter.charge(700);
        let mut budget = meter.budget(5_000);
        meter.charge(4_999);
        assert!(!budget.is_over(&meter));
        meter.charge(1);
        assert!(budget.is_over(&meter));
    }

    #[test]
    fn a_budget_ends_by_the_clock_though_little_is_charged() {
        let clock = Turned::default();
        let meter = Meter::new(Box::new(clock.clone()));
        let mut budget = meter.budget(50_000);
        clock.turn(60_000);
        meter.charge(LOOK_AFTER - 1);
        assert!(!budget.is_over(&meter), "the clock is not looked at after each trifle");
        meter.charge(1);
        assert!(budget.is_over(&meter), "one slow piece is seen as soon as the clock is looked at");
        let mut next = meter.budget(50_000);
        meter.charge(LOOK_AFTER);
        assert!(!next.is_over(&meter));
    }

    #[test]
    fn what_is_over_stays_over() {
        let clock = Turned::default();
        let meter = Meter::new(Box::new(clock.clone()));
        let mut budget = meter.budget(10);
        clock.turn(20);
        meter.charge(LOOK_AFTER);
        assert!(budget.is_over(&meter) && budget.is_over(&meter));
    }
}
