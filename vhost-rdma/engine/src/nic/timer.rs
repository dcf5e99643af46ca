//! Waits of send queues (receiver-not-ready delays, acknowledgement timeouts) and of completion
//! events under moderation.
//!
//! One deadline for each QP and CQ, in order. A wait that ends early leaves its deadline behind, so
//! that waking costs nothing: when it comes, its owner does not wait for it any more and nothing
//! happens. The next wait of the owner replaces it and the end of a QP removes it; a guest that
//! begins and cuts short waits of hours as fast as it can therefore holds no more of this memory
//! than it has QPs and CQs.

use std::collections::{BTreeMap, BTreeSet};

use super::Nanos;

/// RNR timer codes in units of 10 µs (IBTA table 45). Code 0 is the longest.
const RNR_UNITS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How long a requester waits after an RNR NAK with this timer code.
pub(crate) fn rnr_delay(code: u8) -> Nanos {
    u64::from(RNR_UNITS[usize::from(code & 31)]) * 10_000
}

/// The local ACK timeout 4.096 µs · 2^`exponent` (IBTA 9.7.6.1.3); `None`: for ever.
pub(crate) fn ack_timeout(exponent: u8) -> Option<Nanos> {
    let exponent = exponent & 31;
    (exponent != 0).then(|| 4096u64 << exponent)
}

/// Who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Waiting {
    /// The send queue of a QP, by QPN.
    Send(u32),
    /// The event of a CQ, by CQN.
    Event(u32),
}

/// The deadlines of one NIC. They go with it, whole.
#[derive(Debug, Default)]
pub struct Timers {
    order: BTreeSet<(Nanos, Waiting)>,
    of: BTreeMap<Waiting, Nanos>,
}

impl Timers {
    /// Sets an owner's deadline, in place of the one that it had. `Nanos::MAX` never comes.
    pub(crate) fn set(&mut self, deadline: Nanos, waiting: Waiting) {
        self.remove(waiting);
        if deadline != Nanos::MAX {
            self.order.insert((deadline, waiting));
            self.of.insert(waiting, deadline);
        }
    }

    /// Forgets an owner.
    pub(crate) fn remove(&mut self, waiting: Waiting) {
        if let Some(old) = self.of.remove(&waiting) {
            self.order.remove(&(old, waiting));
        }
    }

    #[inline]
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.order.first().map(|&(deadline, _)| deadline)
    }

    /// Whether a deadline has passed.
    #[inline]
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        self.next().is_some_and(|deadline| deadline <= now)
    }

    /// The first deadline that has passed.
    pub fn pop(&mut self, now: Nanos) -> Option<(Nanos, Waiting)> {
        if !self.is_due(now) {
            return None;
        }
        let (deadline, waiting) = self.order.pop_first()?;
        self.of.remove(&waiting);
        Some((deadline, waiting))
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        assert_eq!(self.order.len(), self.of.len(), "the two views differ");
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Waiting::{Event, Send};
    use super::{Timers, ack_timeout, rnr_delay};

    #[test]
    fn an_owner_has_one_deadline() {
        let mut timers = Timers::default();
        timers.set(50, Send(7));
        timers.set(30, Send(6));
        timers.set(90, Send(7));
        timers.set(u64::MAX, Send(8));
        assert_eq!((timers.len(), timers.next()), (2, Some(30)));
        assert_eq!(timers.pop(29), None);
        assert_eq!(timers.pop(60), Some((30, Send(6))));
        assert_eq!(timers.pop(60), None, "90 is in place of 50");
        timers.remove(Send(7));
        assert_eq!((timers.len(), timers.next()), (0, None));
        timers.set(2, Send(7));
        timers.set(3, Event(7));
        assert_eq!(timers.pop(9), Some((2, Send(7))), "a QP and a CQ of one number");
        assert_eq!(timers.pop(9), Some((3, Event(7))));
    }

    #[test]
    fn delays_are_those_of_the_standard() {
        assert_eq!(rnr_delay(0), 655_360_000);
        assert_eq!(rnr_delay(1), 10_000);
        assert_eq!(rnr_delay(12), 640_000);
        assert_eq!(rnr_delay(25), 61_440_000);
        assert_eq!(rnr_delay(31), 491_520_000);
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(14), Some(67_108_864));
    }
}
