//! A clock that stands still: what a model does is not to depend on the machine.

use crate::memory;
use crate::nic::{Nanos, budget};

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Any.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }

    /// The time.
    #[must_use]
    pub const fn now(&self) -> Nanos {
        1
    }
}

impl budget::Clock for Clock {
    fn now(&self) -> Nanos {
        Self::now(self)
    }

    fn usage(&self) -> memory::Usage {
        memory::Usage::default()
    }
}
