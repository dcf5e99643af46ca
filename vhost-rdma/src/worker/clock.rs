//! The engine's time: nanoseconds of a monotonic clock, counted from the start of the clock.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::memory;
use crate::nic::{Nanos, budget};

/// The time that the calling thread has run: not what it waited for, nor what the scheduler or a
/// hypervisor gave to others.
pub(crate) fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// A monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock that begins at one: zero is never a time, so that the engine may use it as "none".
    #[must_use]
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }

    /// The time now.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Nanos {
        // 64 bits of nanoseconds last for 584 years.
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX - 1) + 1
    }
}

impl budget::Clock for Clock {
    #[inline]
    fn now(&self) -> Nanos {
        Self::now(self)
    }

    fn usage(&self) -> memory::Usage {
        memory::usage()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}
