//! Shared receive queues.

use virtio_rdma_abi::ctrl;

use super::qp::Waiter;
use crate::memory::{Charge, Ring};
use crate::nic::Status;
use crate::nic::cq::control_offset;
use crate::nic::receive::{Moving, Receive, ReceiveRing};

/// Requesters that are woken early, at most: peers choose how many there are.
pub(super) const MAX_WAITERS: usize = 256;

/// A shared receive queue. Its receives are checked against its own protection domain (IBTA 10.2.9.1).
#[derive(Debug)]
pub(super) struct Srq {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) max_wr: u32,
    /// Fires once when fewer receives wait; 0 when not armed.
    pub(super) limit: u32,
    pub(super) ring: ReceiveRing,
    pub(super) doorbell: u32,
    /// QPs that receive from here.
    pub(super) users: u32,
    pub(super) waiters: Vec<Waiter>,
    control: u64,
    pub(super) dead: bool,
    _kept: Charge,
}

/// What a new SRQ is made of.
#[derive(Debug)]
pub(super) struct SrqShape {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) entries: u32,
    pub(super) log2_stride: u8,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) limit: u32,
}

impl Srq {
    pub(super) fn new(shape: &SrqShape, ring: Ring, (doorbell, kept): (u32, Charge)) -> Self {
        Self {
            ctx: shape.ctx,
            pdn: shape.pdn,
            max_wr: shape.max_wr,
            limit: shape.limit,
            ring: ReceiveRing::new(ring, shape.entries, shape.log2_stride, shape.max_sge),
            doorbell,
            users: 0,
            waiters: Vec::new(),
            control: control_offset(u64::from(shape.entries) << shape.log2_stride),
            dead: false,
            _kept: kept,
        }
    }

    /// Copies the oldest receive, which stays where it is.
    pub(super) fn peek(&self, into: &mut Receive) -> bool {
        !self.dead && self.ring.peek(into)
    }

    /// Takes the receive that [`Self::peek`] copied and tells the guest that its slot is free;
    /// true: the limit was crossed just now.
    pub(super) fn advance(&mut self) -> bool {
        self.ring.advance();
        self.ring.ring().store_u32(self.control + ctrl::TAKEN as u64, self.ring.taken());
        let crossed = self.ring.waiting() < self.limit;
        if crossed {
            self.limit = 0;
        }
        crossed
    }

    /// Moves to another ring, which has all that waits; indices go on (IBTA 11.2.9.3). The ring
    /// that was left.
    pub(super) fn take_over(&mut self, max_wr: u32, to: Moving) -> Result<Ring, Status> {
        let (control, old) = self.ring.take_over(to)?;
        self.control = control;
        self.max_wr = max_wr;
        self.limit = self.limit.min(max_wr);
        self.ring.ring().store_u32(self.control + ctrl::TAKEN as u64, self.ring.taken());
        Ok(old)
    }

    /// Remembers a requester that found nothing, once.
    pub(super) fn remember(&mut self, waiter: Waiter) {
        // Beyond the bound a requester is woken by its own timer.
        if self.waiters.len() < MAX_WAITERS && !self.waiters.contains(&waiter) {
            self.waiters.push(waiter);
        }
    }
}
