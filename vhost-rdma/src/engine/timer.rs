//! Waits of send queues: receiver-not-ready delays and acknowledgement timeouts.
//!
//! A heap of deadlines; an entry whose QP no longer waits for exactly that deadline is stale and ignored, so cancelling costs nothing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

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

/// The deadlines of one shard.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Nanos, NicId, u32)>>,
}

impl Timers {
    pub(super) fn set(&mut self, deadline: Nanos, nic: NicId, qpn: u32) {
        if deadline != Nanos::MAX {
            self.heap.push(Reverse((deadline, nic, qpn)));
        }
    }

    pub(super) fn next(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse((deadline, ..))| *deadline)
    }

    /// The first deadline that has passed.
    pub(super) fn pop(&mut self, now: Nanos) -> Option<(Nanos, NicId, u32)> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }
}

#[cfg(test)]
mod tests {
    use super::{ack_timeout, rnr_delay};

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
