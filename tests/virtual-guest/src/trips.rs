//! How long the requests of a bystander took, and what of that was the scheduler's doing.

use std::time::{Duration, Instant};

use crate::daemon::Daemon;

/// From the beginning of one request to that of the next, of whoever has as many as can be: one
/// that takes longer stands for those that would have begun meanwhile. A worker that stands still
/// for 50 ms is as bad for two hundred of them, not for one.
pub const PACE: Duration = Duration::from_micros(250);

/// What the 99th percentile may be beside an attack, more than twice of what it was without one.
///
/// The isolation benchmark has 200 us for it: of an optimised daemon, whose worker and whose victim
/// have a core each whenever they want it. In a test the daemon is not optimised, and everybody has
/// the cores as the scheduler gives them; what it tells of that is taken off ([`Queues::time`]),
/// what others leave of caches, of memory and of a hypervisor's time it does not tell: a virtual
/// machine that is itself kept from its processor for 30 ms was seen.
pub const SLACK: Duration = Duration::from_millis(100);

/// What the 99th percentile may be under attack where it was that long without one.
pub fn most(alone: Duration) -> Duration {
    (2 * alone + SLACK) * crate::daemon::patience()
}

/// What requests took.
#[derive(Debug, Clone, Default)]
pub struct Trips(Vec<Duration>);

impl Trips {
    /// One more.
    pub fn record(&mut self, took: Duration) {
        self.0.push(took);
        let mut rest = took;
        while rest > PACE {
            rest -= PACE;
            self.0.push(rest);
        }
    }

    /// The 99th percentile and the longest; nothing for none.
    pub fn p99(&mut self) -> (Duration, Duration) {
        self.0.sort_unstable();
        let at = self.0.len() * 99 / 100;
        let of = |at: usize| self.0.get(at).copied().unwrap_or_default();
        (of(at), of(self.0.len().saturating_sub(1)))
    }
}

/// Threads, as the scheduler keeps account of them (`/proc/PID/task/TID/schedstat`).
#[derive(Debug)]
pub struct Queues(Vec<std::path::PathBuf>);

impl Queues {
    /// The workers of these processes.
    ///
    /// # Panics
    /// They have none.
    pub fn of_workers(pids: &[u32]) -> Self {
        let tasks =
            pids.iter().filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).ok());
        let is_worker = |task: &std::fs::DirEntry| {
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            name.starts_with("vrdma-shard")
        };
        let workers = tasks.flatten().flatten().filter(is_worker);
        let all: Vec<_> = workers.map(|task| task.path().join("schedstat")).collect();
        assert!(!all.is_empty(), "a daemon has a worker");
        Self(all)
    }

    /// The workers of a network, in a process of its own or in that of all.
    pub fn of_network(daemon: &Daemon, network: &str) -> Self {
        let own = daemon.pid_of(network);
        Self::of_workers(&own.map_or_else(|| daemon.pids(), |pid| vec![pid]))
    }

    /// And the thread that asks.
    #[must_use]
    pub fn and_mine(mut self) -> Self {
        let own = rustix::thread::gettid();
        self.0.push(format!("/proc/self/task/{}/schedstat", own.as_raw_nonzero()).into());
        self
    }

    /// For how long each has been ready to run and did not.
    fn each(&self) -> impl Iterator<Item = Duration> {
        let of = |path: &std::path::PathBuf| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let nanos = text.split_whitespace().nth(1).and_then(|nanos| nanos.parse().ok());
            Duration::from_nanos(nanos.unwrap_or(0))
        };
        self.0.iter().map(of)
    }

    /// The same of all together.
    pub fn waited(&self) -> Duration {
        self.each().sum()
    }

    /// How long something takes, without what the scheduler keeps one of them from its processor:
    /// the one that waited for longest, since they may have waited at the same time.
    pub fn time(&self, act: impl FnOnce()) -> Duration {
        let (before, begin): (Vec<_>, _) = (self.each().collect(), Instant::now());
        act();
        let took = begin.elapsed();
        if took <= PACE {
            return took;
        }
        let kept = self.each().zip(before).map(|(now, before)| now.saturating_sub(before));
        took.saturating_sub(kept.max().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_lasts_stands_for_those_that_it_kept_waiting() {
        let mut trips = Trips::default();
        (0..1000).for_each(|_| trips.record(Duration::from_micros(10)));
        assert_eq!(trips.p99().0, Duration::from_micros(10));
        trips.record(Duration::from_millis(50));
        let (p99, longest) = trips.p99();
        assert!(p99 > Duration::from_millis(45), "{p99:?}");
        assert_eq!(longest, Duration::from_millis(50));
        assert_eq!(Trips::default().p99(), (Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn time_without_a_processor_is_no_trips() {
        let mine = Queues(Vec::new()).and_mine();
        let slept = mine.time(|| std::thread::sleep(Duration::from_millis(30)));
        assert!(slept > Duration::from_millis(25), "sleep is its own doing: {slept:?}");
        assert!(mine.waited() < Duration::from_secs(600), "of this thread alone");
    }
}
