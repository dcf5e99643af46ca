//! What a `wr_id` says that the RNIC is given: whose queue, which life of it, and which request.

/// Serials have 30 bits.
pub(super) const SERIAL_MASK: u32 = (1 << 30) - 1;

/// The queue that a `wr_id` belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    Send,
    Receive,
    Shared,
}

/// What a `wr_id` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) queue: Queue,
    pub(super) serial: u32,
    pub(super) index: u32,
}

impl Tag {
    pub(super) const fn to_wr_id(self) -> u64 {
        let queue = match self.queue {
            Queue::Send => 0,
            Queue::Receive => 1,
            Queue::Shared => 2,
        };
        queue << 62 | (self.serial as u64) << 32 | self.index as u64
    }

    pub(super) fn from_wr_id(wr_id: u64) -> Option<Self> {
        let queue = match wr_id >> 62 {
            0 => Queue::Send,
            1 => Queue::Receive,
            2 => Queue::Shared,
            _ => return None,
        };
        let half = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0);
        Some(Self { queue, serial: half(wr_id >> 32) & SERIAL_MASK, index: half(wr_id) })
    }
}
