//! When a process that died is started again, and when that is called failing.
//!
//! Sans-I/O: the time is told. The first death costs a tenth of a second, each further one twice as
//! much, up to half a minute; a process that lived for a minute begins anew. So a fault that comes
//! back at every start, which a guest may know how to bring about, costs the host next to nothing.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(30);
const WINDOW: Duration = Duration::from_mins(1);
/// Deaths within the window that make a process a failing one.
const MANY: usize = 5;

/// The deaths of one network's processes.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    /// Since the first start.
    deaths: u64,
    /// The latest, the last of them at the end; never more than [`MANY`].
    recent: VecDeque<Instant>,
    /// How many came without a minute of life between.
    in_a_row: u32,
}

impl Restarts {
    /// A process that lived for `lived` has died; how long to wait before the next.
    pub(super) fn died(&mut self, now: Instant, lived: Duration) -> Duration {
        self.deaths += 1;
        self.in_a_row = if lived >= WINDOW { 1 } else { self.in_a_row.saturating_add(1) };
        if self.recent.len() == MANY {
            self.recent.pop_front();
        }
        self.recent.push_back(now);
        let doublings = (self.in_a_row - 1).min(16);
        (FIRST * (1 << doublings)).min(MOST)
    }

    pub(super) const fn deaths(&self) -> u64 {
        self.deaths
    }

    /// Whether the network's processes die again and again.
    pub(super) fn failing(&self, now: Instant) -> bool {
        let within = |death: &Instant| now.saturating_duration_since(*death) < WINDOW;
        self.recent.len() == MANY && self.recent.iter().all(within)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_death_costs_twice_as_much_up_to_half_a_minute() {
        let mut restarts = Restarts::default();
        let now = Instant::now();
        let waits: Vec<_> =
            (0..20).map(|_| restarts.died(now, Duration::ZERO).as_millis()).collect();
        assert_eq!(&waits[..5], [100, 200, 400, 800, 1600]);
        assert!(waits[9..].iter().all(|wait| *wait == 30_000));
        assert_eq!(restarts.died(now, WINDOW), FIRST, "it had lived");
        assert_eq!(restarts.deaths(), 21);
    }

    #[test]
    fn five_deaths_in_a_minute_are_failing() {
        let mut restarts = Restarts::default();
        let begin = Instant::now();
        for second in 0..4 {
            restarts.died(begin + Duration::from_secs(second), Duration::ZERO);
        }
        assert!(!restarts.failing(begin + Duration::from_secs(4)));
        restarts.died(begin + Duration::from_secs(4), Duration::ZERO);
        assert!(restarts.failing(begin + Duration::from_secs(59)));
        assert!(!restarts.failing(begin + Duration::from_secs(60)), "the first is forgotten");
    }
}
