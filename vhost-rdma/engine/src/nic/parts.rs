//! What a backing keeps beside the guest's part of each object: the types, and the two sides of a
//! queue pair.

use std::fmt;

use super::qp::SendQueue;
use super::receive::ReceiveRing;

/// The sending side of a QP: the guest's ring, and what a backing keeps of it.
pub trait SendSide: fmt::Debug + Send + 'static {
    /// The guest's ring.
    fn queue(&self) -> &SendQueue;
    /// The same.
    fn queue_mut(&mut self) -> &mut SendQueue;
    /// Forgets all that was posted.
    fn reset(&mut self);
    /// Of a new QP that may have so many work requests.
    fn new(queue: SendQueue, max_wr: u32) -> Self;
}

/// The receiving side of a QP.
pub trait ReceiveSide: fmt::Debug + Send + 'static {
    /// The guest's ring.
    fn ring(&self) -> &ReceiveRing;
    /// The same.
    fn ring_mut(&mut self) -> &mut ReceiveRing;
    /// Forgets all that was posted.
    fn reset(&mut self);
    /// Of a new QP that may have so many work requests.
    fn new(ring: ReceiveRing, max_wr: u32) -> Self;
}

impl SendSide for Box<SendQueue> {
    fn queue(&self) -> &SendQueue {
        self
    }

    fn queue_mut(&mut self) -> &mut SendQueue {
        self
    }

    fn reset(&mut self) {
        SendQueue::reset(self);
    }

    fn new(queue: SendQueue, _max_wr: u32) -> Self {
        Self::new(queue)
    }
}

impl ReceiveSide for ReceiveRing {
    fn ring(&self) -> &ReceiveRing {
        self
    }

    fn ring_mut(&mut self) -> &mut ReceiveRing {
        self
    }

    fn reset(&mut self) {
        Self::reset(self);
    }

    fn new(ring: Self, _max_wr: u32) -> Self {
        ring
    }
}

/// The parts of a backing.
pub trait Parts: fmt::Debug + Sized + Send + 'static {
    /// Of a protection domain.
    type Pd: fmt::Debug + Send;
    /// Of an address handle.
    type Ah: fmt::Debug + Send;
    /// Of a shared receive queue.
    type Srq: fmt::Debug + Send;
    /// Of a queue pair.
    type Qp: fmt::Debug + Send;
    /// A send queue.
    type Send: SendSide;
    /// A receive queue.
    type Receive: ReceiveSide;
    /// An entry of the port's address table.
    type Address: fmt::Debug + Clone + Copy + Send;
    /// A command of its own that has begun.
    type Work: fmt::Debug + Send;
    /// How far the end of a context is, as far as the provider has a part in it.
    type Ending: fmt::Debug + Send;
    /// How far a walk over keys is that follows a change of memory.
    type Keys: fmt::Debug + Default + Send;
}
