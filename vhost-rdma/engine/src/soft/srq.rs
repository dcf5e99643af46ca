//! Shared receive queues: what the engine does with one.

use super::nic::Srq;
use super::waiter::Waiter;
use crate::nic::receive::Receive;

/// Requesters that are woken early, at most: peers choose how many there are.
pub(super) const MAX_WAITERS: usize = 128;

impl Srq {
    /// Copies the oldest receive, which stays where it is.
    pub(super) fn peek(&self, into: &mut Receive) -> bool {
        !self.dead && self.ring.peek(into)
    }

    /// Takes the receive that [`Self::peek`] copied and tells the guest that its slot is free;
    /// true: the limit was crossed just now.
    pub(super) fn advance(&mut self) -> bool {
        self.advance_by(1)
    }

    /// The same for so many that were peeked at.
    pub(super) fn advance_by(&mut self, receives: u32) -> bool {
        self.ring.pass(receives);
        self.tell_used(self.ring.taken());
        let crossed = self.ring.waiting() < self.limit;
        if crossed {
            self.limit = 0;
        }
        crossed
    }

    /// Remembers a requester that found nothing, once.
    pub(super) fn remember(&mut self, waiter: Waiter) {
        // Beyond the bound a requester is woken by its own timer.
        if self.own.len() < MAX_WAITERS && !self.own.contains(&waiter) {
            self.own.push(waiter);
        }
    }
}
