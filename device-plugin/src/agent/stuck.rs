//! What cannot be undone. A tenant writes the configuration that its `DEL` is made with, so it can
//! have every attempt fail: such an ID is given to nobody, and an attempt costs others nothing.
//!
//! How an attempt ended is known in memory only: an agent that starts tries again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{Agent, Settings};
use crate::daemon::Daemon;
use crate::holders::Kubelet;

/// The longest that an ID rests between two attempts.
const REST_MAX: Duration = Duration::from_secs(300);

#[derive(Debug)]
struct Failed {
    why: String,
    times: u32,
    at: Instant,
}

impl Failed {
    /// Not tried again yet: it rests twice as long after each attempt.
    fn is_resting(&self, first: Duration) -> bool {
        let double = 1_u32.checked_shl(self.times.saturating_sub(1)).unwrap_or(u32::MAX);
        self.at.elapsed() < first.saturating_mul(double).min(REST_MAX)
    }
}

/// IDs that no pod has and whose last undoing failed.
#[derive(Debug, Default)]
pub(super) struct Stuck(BTreeMap<String, Failed>);

impl Stuck {
    pub(super) fn has(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    /// How often an ID has failed.
    pub(super) fn times(&self, id: &str) -> u32 {
        self.0.get(id).map_or(0, |failed| failed.times)
    }

    fn failed(&mut self, id: &str, why: &str) {
        let times = self.times(id);
        let failed = Failed { why: why.to_owned(), times: times + 1, at: Instant::now() };
        self.0.insert(id.to_owned(), failed);
    }

    /// Forgets all but these: a pod has the others, or they are free.
    pub(super) fn keep(&mut self, these: impl Fn(&str) -> bool) {
        self.0.retain(|id, _| these(id));
    }

    /// Why an ID is not tried now.
    pub(super) fn resting(&self, id: &str, settings: &Settings) -> Option<&str> {
        let failed = self.0.get(id).filter(|failed| failed.is_resting(settings.rest))?;
        Some(&failed.why)
    }

    /// Of these, those that are tried now: the ones that never failed first, so that a few that
    /// always fail keep no others.
    pub(super) fn due(&self, mut ids: Vec<String>, settings: &Settings) -> Vec<String> {
        ids.retain(|id| self.resting(id, settings).is_none());
        ids.sort_by_key(|id| self.0.get(id).map(|failed| failed.at));
        ids
    }
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Has everything undone that is left of an ID which no pod has, and remembers how that went.
    pub(super) async fn undo_leftovers(&self, id: &str) -> Result<(), String> {
        let undone = self.undo(id).await;
        let mut state = self.state.lock().await;
        match &undone {
            Ok(()) => state.stuck.keep(|other| other != id),
            Err(why) => {
                state.stuck.failed(id, why);
                self.publish(&mut state);
            }
        }
        undone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_and_have_an_end() {
        let failed = |times, ago| Failed {
            why: String::new(),
            times,
            at: Instant::now().checked_sub(Duration::from_secs(ago)).unwrap(),
        };
        let first = Duration::from_secs(10);
        for (times, ago, rests) in [
            (1, 9, true),
            (1, 11, false),
            (2, 19, true),
            (2, 21, false),
            (6, 299, true),
            (99, 299, true),
            (99, 301, false),
        ] {
            assert_eq!(failed(times, ago).is_resting(first), rests, "{times} {ago}");
        }
    }
}
