//! How much each network's process may say: all are heard by one thread.
//!
//! Sans-I/O: the time is told. A process of ours says two hundred things in a tenth of a second at
//! most (`network_process::uplink`). One that says more is not heard until the next tenth.

use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_millis(100);
/// Twice what a process of ours says.
const MESSAGES: u32 = 400;

/// What one has said.
#[derive(Debug)]
pub(super) struct MessageQuota {
    since: Instant,
    count: u32,
}

impl MessageQuota {
    pub(super) const fn new(now: Instant) -> Self {
        Self { since: now, count: 0 }
    }

    /// One message more; until when no other is to be heard.
    pub(super) fn take(&mut self, now: Instant) -> Option<Instant> {
        if now.saturating_duration_since(self.since) >= WINDOW {
            *self = Self::new(now);
        }
        self.count += 1;
        (self.count >= MESSAGES).then(|| self.since + WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_says_too_much_waits_for_the_next_window() {
        let now = Instant::now();
        let mut quota = MessageQuota::new(now);
        for _ in 1..MESSAGES {
            assert_eq!(quota.take(now), None);
        }
        assert_eq!(quota.take(now), Some(now + WINDOW));
        assert_eq!(quota.take(now + WINDOW), None, "it begins anew");
    }
}
