//! The engine's time: nanoseconds of the host's monotonic clock, counted from its boot. So it is
//! the same for all processes, and what one says of a time means the same to the next.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::memory;
use crate::nic::{Nanos, budget};

/// The time that the calling thread has run: not what it waited for, nor what the scheduler or a
/// hypervisor gave to others.
pub(crate) fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// A monotonic clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct Clock;

impl Clock {
    /// The host's.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }

    /// The time now. Zero is never a time, so that the engine may use it as "none".
    #[inline]
    #[must_use]
    pub fn now(&self) -> Nanos {
        let now = clock_gettime(ClockId::Monotonic);
        // 64 bits of nanoseconds last for 584 years, and none of these is negative.
        now.tv_sec
            .cast_unsigned()
            .saturating_mul(1_000_000_000)
            .saturating_add(now.tv_nsec.cast_unsigned())
            .saturating_add(1)
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
