//! The engine's time: nanoseconds of a monotonic clock, counted from the start of the clock.

use std::time::Instant;

use crate::memory;
use crate::nic::{Nanos, budget};

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
