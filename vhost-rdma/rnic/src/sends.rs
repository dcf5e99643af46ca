//! A send queue on an RNIC: the guest's ring, and what of it is under way.

use vhost_rdma_engine::nic::parts::SendSide;
use vhost_rdma_engine::nic::qp::SendQueue;

use super::windows::CHANGE;

/// A work request that is under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub(super) wr_id: u64,
    /// Of its completion.
    pub(super) opcode: u8,
    /// The guest wants its completion.
    pub(super) signaled: bool,
    /// It carries data to the peer; else from it.
    pub(super) tells_peer: bool,
    pub(super) len: u32,
    /// It changes this memory window, and is no message.
    pub(super) window: Option<u32>,
}

/// What work requests did.
#[derive(Clone, Debug, Default)]
pub(super) struct Moved {
    pub(super) messages: u64,
    pub(super) out: u64,
    pub(super) back: u64,
    /// Memory windows that were changed, and by which.
    pub(super) windows: Vec<(u32, u32)>,
}

impl Moved {
    pub(super) fn add(&mut self, sent: &Sent, index: u32) {
        if let Some(window) = sent.window {
            return self.windows.push((window, index));
        }
        self.messages += 1;
        let bytes = if sent.tells_peer { &mut self.out } else { &mut self.back };
        *bytes += u64::from(sent.len);
    }
}

/// Bytes that a work request takes that is under way.
pub(super) const SENT: usize = size_of::<Sent>() + CHANGE;

/// A send queue: the guest's ring, and what of it is under way.
#[derive(Debug)]
pub struct Sends {
    pub(super) queue: SendQueue,
    /// Work requests that the host QP takes.
    pub(super) depth: u32,
    /// By index, modulo their number. As many as may be under way, and one that cannot be posted: a
    /// guest's ring may be any number of times as long, in pages that all its rings share.
    pub(super) sent: Box<[Sent]>,
    /// Index behind the last posted.
    pub(super) posted: u32,
    /// Index behind the last known to be done.
    pub(super) done: u32,
    /// The work request at this index cannot be posted: it fails with this status when all before
    /// it are done. Those behind it that were taken from the ring together with it are flushed.
    pub(super) fault: Option<(u8, u32)>,
}

impl Sends {
    pub(super) const fn in_flight(&self) -> u32 {
        self.posted.wrapping_sub(self.done)
    }

    /// The work request that could not be posted, first, and all that were taken with it; they are
    /// over.
    pub(super) fn take_fault(&mut self) -> Option<(u8, Vec<(Sent, u32)>)> {
        let (status, first) = self.fault.take()?;
        let end = self.queue.current_index().wrapping_add(1);
        let indices = (0..end.wrapping_sub(first)).map(|n| first.wrapping_add(n));
        let requests =
            indices.filter_map(|index| self.slot(index).map(|sent| (*sent, index))).collect();
        self.posted = end;
        self.done = end;
        Some((status, requests))
    }

    pub(super) fn slot(&mut self, index: u32) -> Option<&mut Sent> {
        let slot = index as usize & (self.sent.len() - 1);
        self.sent.get_mut(slot)
    }

    /// The work request at `index` is over, and all before it are done; what those moved. `None` if
    /// it is not under way.
    pub(super) fn complete(&mut self, index: u32) -> Option<(Sent, Moved)> {
        if index.wrapping_sub(self.done) >= self.in_flight() {
            return None;
        }
        let mut moved = Moved::default();
        while self.done != index {
            let at = self.done;
            if let Some(before) = self.slot(at) {
                moved.add(&*before, at);
            }
            self.done = at.wrapping_add(1);
        }
        self.done = index.wrapping_add(1);
        self.slot(index).map(|sent| (*sent, moved))
    }
}

impl SendSide for Sends {
    fn new(queue: SendQueue, max_wr: u32) -> Self {
        let sent = vec![Sent::default(); (max_wr as usize + 1).next_power_of_two()].into();
        Self { queue, depth: max_wr, sent, posted: 0, done: 0, fault: None }
    }

    fn queue(&self) -> &SendQueue {
        &self.queue
    }

    fn queue_mut(&mut self) -> &mut SendQueue {
        &mut self.queue
    }

    fn reset(&mut self) {
        self.queue.reset();
        self.posted = 0;
        self.done = 0;
        self.fault = None;
    }
}
