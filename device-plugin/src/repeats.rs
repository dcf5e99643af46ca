//! A fault that lasts is told once, again when it is another one, and meanwhile ever more seldom.
//!
//! What the agent tries every second or two, for as long as the kubelet or the API server is away,
//! would otherwise fill a node's log with one sentence.

use std::time::{Duration, Instant};

/// How long the same fault is not told again, at first; then twice as long each time.
const QUIET: Duration = Duration::from_secs(60);
const QUIET_MAX: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct Told {
    fault: String,
    again: Instant,
    quiet: Duration,
}

/// What was told of a thing that is tried again and again.
#[derive(Debug, Default)]
pub(crate) struct Repeats(Option<Told>);

impl Repeats {
    /// Whether this fault is to be told now.
    pub(crate) fn tells(&mut self, fault: &str, now: Instant) -> bool {
        let quiet = match &self.0 {
            Some(told) if told.fault == fault && now < told.again => return false,
            Some(told) if told.fault == fault => (told.quiet * 2).min(QUIET_MAX),
            _ => QUIET,
        };
        self.0 = Some(Told { fault: fault.to_owned(), again: now + quiet, quiet });
        true
    }

    /// Logs a fault of something that is tried again, if it is to be told.
    pub(crate) fn log(&mut self, error: &str, what: &str) {
        if self.tells(error, Instant::now()) {
            tracing::info!(error, "{what}; trying again");
        }
    }

    /// Logs that it works again, if it was told that it did not.
    pub(crate) fn log_end(&mut self, what: &str) {
        if self.ends() {
            tracing::info!("{what}");
        }
    }

    /// There is no fault any more; whether one was told.
    pub(crate) fn ends(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_lasts_is_told_ever_more_seldom_and_another_one_at_once() {
        let begin = Instant::now();
        let mut repeats = Repeats::default();
        assert!(!repeats.ends());
        // Once a second for a day.
        let told: Vec<u64> = (0..86_400)
            .filter(|second| repeats.tells("refused", begin + Duration::from_secs(*second)))
            .collect();
        assert_eq!(told[..5], [0, 60, 180, 420, 900]);
        assert!(told.windows(2).all(|pair| pair[1] - pair[0] <= 3600) && told.len() < 32);
        let end = begin + Duration::from_secs(86_400);
        assert!(repeats.tells("no route", end) && !repeats.tells("no route", end));
        assert!(repeats.tells("refused", end), "it is another one again");
        assert!(repeats.ends() && !repeats.ends());
        assert!(repeats.tells("refused", end), "it is a new one");
    }
}
