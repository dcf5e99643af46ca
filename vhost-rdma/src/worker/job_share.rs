//! How much of a worker's time its jobs have.
//!
//! Jobs are what commands and changes of memory ask for. A guest chooses how many it asks for and
//! how long they go on; most is done in steps, one or a few a turn. While rounds find work as well,
//! jobs have a quarter of the time: behind jobs that took a while come rounds for three times as
//! long. So a guest that does nothing but register memory, or have its memory map changed, leaves
//! the data path of others most of the worker. A worker whose rounds find nothing owes them
//! nothing.

use crate::shard::Nanos;

/// Rounds have this many times as long as the jobs before them.
const ROUNDS: Nanos = 3;
/// The most that is owed: one job that took long by chance does not hold up all that follow.
const MOST: Nanos = 1_000_000;

/// What jobs owe to rounds.
#[derive(Debug, Default)]
pub(super) struct JobShare {
    owed: Nanos,
    since: Nanos,
}

impl JobShare {
    /// Jobs have taken `time`, and are done for this turn at `now`.
    pub(super) fn spent(&mut self, time: Nanos, now: Nanos) {
        self.owed = time.saturating_mul(ROUNDS).min(MOST);
        self.since = now;
    }

    /// A round had nothing to do.
    pub(super) const fn round_was_idle(&mut self) {
        self.owed = 0;
    }

    /// Whether rounds still have time to get. `now` is asked only if jobs have been done lately.
    #[inline]
    pub(super) fn is_spent(&mut self, now: impl FnOnce() -> Nanos) -> bool {
        if self.owed != 0 && now().saturating_sub(self.since) >= self.owed {
            self.owed = 0;
        }
        self.owed != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_rounds_have_three_quarters_of_the_time() {
        let (mut share, mut now, mut jobs) = (JobShare::default(), 1, 0);
        for _ in 0..10_000 {
            if !share.is_spent(|| now) {
                jobs += 40_000;
                now += 40_000;
                share.spent(40_000, now);
            }
            now += 10_000;
        }
        let part = f64::from(jobs) / f64::from(u32::try_from(now).expect("some seconds"));
        assert!((0.24..0.26).contains(&part), "{part}");
    }

    #[test]
    fn nothing_is_owed_to_rounds_that_find_nothing() {
        let mut share = JobShare::default();
        assert!(!share.is_spent(|| unreachable!("no job was done")));
        share.spent(40_000, 100);
        assert!(share.is_spent(|| 100));
        share.round_was_idle();
        assert!(!share.is_spent(|| unreachable!("nothing is owed")));
    }

    #[test]
    fn a_long_job_holds_up_others_for_a_millisecond_at_most() {
        let mut share = JobShare::default();
        share.spent(Nanos::MAX, 5);
        assert!(share.is_spent(|| 4 + MOST));
        assert!(!share.is_spent(|| 5 + MOST));
    }
}
