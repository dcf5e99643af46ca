//! Waits of send queues (receiver-not-ready delays, acknowledgement timeouts) and of completion events under moderation.
//!
//! One deadline for each QP and CQ, in order. A wait that ends early leaves its deadline behind, so that waking costs nothing: when it comes, its owner
//! does not wait for it any more and nothing happens. The next wait of the owner replaces it and the end of a QP removes it; a guest that
//! begins and cuts short waits of hours as fast as it can therefore holds no more of this memory than it has QPs and CQs.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::Nanos;
use crate::transport::NicId;

/// RNR timer codes in units of 10 µs (IBTA table 45). Code 0 is the longest.
const RNR_UNITS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How long a requester waits after an RNR NAK with this timer code.
pub(super) fn rnr_delay(code: u8) -> Nanos {
    u64::from(RNR_UNITS[usize::from(code & 31)]) * 10_000
}

/// The local ACK timeout 4.096 µs · 2^`exponent` (IBTA 9.7.6.1.3); `None`: for ever.
pub(super) fn ack_timeout(exponent: u8) -> Option<Nanos> {
    let exponent = exponent & 31;
    (exponent != 0).then(|| 4096u64 << exponent)
}

/// Who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Waiting {
    /// The send queue of a QP, by QPN.
    Send(u32),
    /// The event of a CQ, by CQN.
    Event(u32),
}

/// The deadlines of one shard, or of one hosted NIC.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    order: BTreeSet<(Nanos, NicId, Waiting)>,
    of: FxHashMap<(NicId, Waiting), Nanos>,
}

impl Timers {
    /// Sets an owner's deadline, in place of the one that it had. `Nanos::MAX` never comes.
    pub(crate) fn set(&mut self, deadline: Nanos, nic: NicId, waiting: Waiting) {
        self.remove(nic, waiting);
        if deadline != Nanos::MAX {
            self.order.insert((deadline, nic, waiting));
            self.of.insert((nic, waiting), deadline);
        }
    }

    /// Forgets an owner.
    pub(crate) fn remove(&mut self, nic: NicId, waiting: Waiting) {
        if let Some(old) = self.of.remove(&(nic, waiting)) {
            self.order.remove(&(old, nic, waiting));
        }
    }

    /// Forgets a NIC.
    pub(super) fn remove_nic(&mut self, nic: NicId) {
        self.order.retain(|&(_, of, _)| of != nic);
        self.of.retain(|&(of, _), _| of != nic);
    }

    pub(crate) fn next(&self) -> Option<Nanos> {
        self.order.first().map(|&(deadline, ..)| deadline)
    }

    /// The first deadline that has passed.
    pub(crate) fn pop(&mut self, now: Nanos) -> Option<(Nanos, NicId, Waiting)> {
        if self.next()? > now {
            return None;
        }
        let (deadline, nic, waiting) = self.order.pop_first()?;
        self.of.remove(&(nic, waiting));
        Some((deadline, nic, waiting))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.order.len(), self.of.len(), "the two views differ");
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Waiting::{Event, Send};
    use super::{NicId, Timers, ack_timeout, rnr_delay};

    #[test]
    fn an_owner_has_one_deadline() {
        let mut timers = Timers::default();
        timers.set(50, NicId(0), Send(7));
        timers.set(30, NicId(1), Send(7));
        timers.set(90, NicId(0), Send(7));
        timers.set(u64::MAX, NicId(0), Send(8));
        assert_eq!((timers.len(), timers.next()), (2, Some(30)));
        assert_eq!(timers.pop(29), None);
        assert_eq!(timers.pop(60), Some((30, NicId(1), Send(7))));
        assert_eq!(timers.pop(60), None, "90 is in place of 50");
        timers.remove(NicId(0), Send(7));
        assert_eq!((timers.len(), timers.next()), (0, None));
        timers.set(1, NicId(0), Send(7));
        timers.set(2, NicId(2), Send(7));
        timers.remove_nic(NicId(0));
        assert_eq!((timers.len(), timers.next()), (1, Some(2)));
        timers.set(3, NicId(2), Event(7));
        assert_eq!(timers.pop(9), Some((2, NicId(2), Send(7))), "a QP and a CQ of one number");
        assert_eq!(timers.pop(9), Some((3, NicId(2), Event(7))));
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
