//! Event moderation of a completion queue (docs/virtio-rdma.md §7.4): an event waits for company,
//! but not for long.
//!
//! A guest that is woken for every completion spends its time in interrupts. With moderation the
//! event that an arm asked for waits until `count` entries are there, or until `period` has gone by
//! since the first of them; an error ends the wait, because who waits for a reply that has failed
//! should not wait more. Nothing here touches the ring: the arm stays in force while the event
//! waits, so a wait that is forgotten costs an event too many and never one too few.

use serde::{Deserialize, Serialize};

use super::Nanos;

/// What a guest asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Setting {
    count: u32,
    period: Nanos,
}

/// An event that is due and waits.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Wait {
    /// Entries that are still to come.
    missing: u32,
    until: Nanos,
}

/// Moderation of one queue, off until it is set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Moderation {
    setting: Option<Setting>,
    wait: Option<Wait>,
}

/// When the event may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Now,
    /// It waits; `Some`: from now on, and no longer than this.
    Later(Option<Nanos>),
}

impl Moderation {
    /// Sets count and period; either 0 ends moderation. An event that waits under the old setting
    /// goes at the next look.
    pub(crate) fn set(&mut self, count: u16, period_us: u16) {
        let (count, period) = (u32::from(count), u64::from(period_us) * 1000);
        self.setting = (count != 0 && period != 0).then_some(Setting { count, period });
        if let Some(wait) = &mut self.wait {
            wait.missing = 0;
        }
    }

    /// Nobody waits for an event.
    pub(crate) const fn forget(&mut self) {
        self.wait = None;
    }

    /// Until when an event waits, if one does.
    pub(crate) fn waits_until(&self) -> Option<Nanos> {
        self.wait.map(|wait| wait.until)
    }

    pub(crate) const fn is_waiting(&self) -> bool {
        self.wait.is_some()
    }

    /// Whether an event waits that may go at this time.
    pub(crate) fn is_over(&self, now: Nanos) -> bool {
        self.wait.is_some_and(|wait| now >= wait.until)
    }

    /// An event is due, after `fresh` entries since the last question; `hurry` if one of them was
    /// an error.
    pub(crate) fn ask(&mut self, fresh: u32, hurry: bool, now: Nanos) -> Verdict {
        let begins = self.wait.is_none();
        let wait = match (self.wait, self.setting) {
            (Some(wait), _) => Wait { missing: wait.missing.saturating_sub(fresh), ..wait },
            (None, Some(setting)) => Wait {
                missing: setting.count.saturating_sub(fresh),
                until: now.saturating_add(setting.period),
            },
            (None, None) => return Verdict::Now,
        };
        if hurry || wait.missing == 0 || now >= wait.until {
            self.wait = None;
            return Verdict::Now;
        }
        self.wait = Some(wait);
        Verdict::Later(begins.then_some(wait.until))
    }
}

#[cfg(test)]
mod tests {
    use super::{Moderation, Verdict};

    const US: u64 = 1000;

    fn moderated(count: u16, period_us: u16) -> Moderation {
        let mut moderation = Moderation::default();
        moderation.set(count, period_us);
        moderation
    }

    #[test]
    fn either_zero_is_no_moderation() {
        for (count, period) in [(0, 0), (0, 9), (9, 0)] {
            assert_eq!(moderated(count, period).ask(1, false, 0), Verdict::Now);
        }
    }

    #[test]
    fn the_count_ends_the_wait_and_the_next_one_begins_anew() {
        let mut m = moderated(3, 100);
        assert_eq!(m.ask(1, false, 10), Verdict::Later(Some(10 + 100 * US)));
        assert_eq!(m.ask(1, false, 20), Verdict::Later(None));
        assert_eq!(m.ask(1, false, 30), Verdict::Now);
        assert_eq!(m.ask(2, false, 40), Verdict::Later(Some(40 + 100 * US)));
        assert!(!m.is_over(10 + 100 * US), "the time of the first wait");
        assert!(m.is_over(40 + 100 * US));
        assert_eq!(m.ask(0, false, 40 + 100 * US), Verdict::Now);
        assert!(!m.is_over(u64::MAX), "nothing waits");
        assert_eq!(m.ask(5, false, 50), Verdict::Now, "enough at once");
    }

    #[test]
    fn a_change_ends_the_wait() {
        let mut m = moderated(9, 1000);
        assert_eq!(m.ask(1, false, 0), Verdict::Later(Some(1000 * US)));
        m.set(9, 10);
        assert_eq!(m.ask(0, false, 5), Verdict::Now);
        assert_eq!(m.ask(1, false, 6), Verdict::Later(Some(6 + 10 * US)));
    }

    #[test]
    fn an_error_does_not_wait() {
        assert_eq!(moderated(9, 1000).ask(1, true, 0), Verdict::Now);
    }
}
