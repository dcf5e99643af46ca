//! What a backing must be able to do: the seam below everything that a guest sees.
//!
//! A [`Nic`] does whatever is the same on every backing, and asks its provider for the rest. A
//! provider keeps its own part of each object beside the guest's (a host's handle, who waits), and
//! its own part of the NIC. Nothing is called through a table: each backing has a NIC of its own,
//! made by the compiler.

use std::fmt;

use super::budget::Budget;
use super::doorbell::Owner;
use super::nic::{Nic, NicState};
use super::objects::{Qp, Srq};
use super::qp::SendQueue;
use super::quota::Places;
use super::receive::ReceiveRing;
use super::{Objects, Status};
use crate::link::Gid;
use crate::memory::AddressSpace;

/// The sending side of a QP: the guest's ring, and what a backing keeps of it.
pub(crate) trait SendSide: fmt::Debug + Send + 'static {
    /// The guest's ring.
    fn queue(&self) -> &SendQueue;
    /// The same.
    fn queue_mut(&mut self) -> &mut SendQueue;
    /// Forgets all that was posted.
    fn reset(&mut self);
}

/// The receiving side of a QP.
pub(crate) trait ReceiveSide: fmt::Debug + Send + 'static {
    /// The guest's ring.
    fn ring(&self) -> &ReceiveRing;
    /// The same.
    fn ring_mut(&mut self) -> &mut ReceiveRing;
    /// Forgets all that was posted.
    fn reset(&mut self);
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
}

/// A backing. The types are its parts of the guest's objects.
pub(crate) trait Provider: fmt::Debug + Sized + Send + 'static {
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
    /// A command that has begun.
    type Work: fmt::Debug + Send;
    /// How far a walk over keys is that follows a change of memory.
    type Keys: fmt::Debug + Default + Send;

    /// What places in tables take.
    const PLACES: &'static Places;
    /// Whether a NIC that failed still lets go of memory that is gone.
    const LETS_GO: bool;

    /// Begins a protection domain.
    fn begin_pd(nic: &mut Nic<Self>) -> Result<Self::Pd, Status>;
    /// Ends one.
    fn end_pd(nic: &mut Nic<Self>, pd: Self::Pd);
    /// Whether something of the provider's own is in one.
    fn uses_pd(nic: &Nic<Self>, pdn: u32) -> bool;
    /// Whether a NIC has the one queue pair that is not in its table.
    fn has_other_qp(&self) -> bool;
    /// Adds what only the provider counts.
    fn count(&self, objects: &mut Objects);
    /// The guest's name of an address.
    fn gid(address: &Self::Address) -> Gid;

    /// The guest rang for receives of a QP; true: [`Self::run_receives`] has to see to them.
    fn receive_posted(&mut self, qp: &mut Qp<Self>) -> bool;
    /// Goes on with the receives of a QP.
    fn run_receives(nic: &mut Nic<Self>, qpn: u32);
    /// The guest rang for an SRQ; true: [`Self::run_shared`] has to see to it.
    fn shared_posted(&mut self, srq: &mut Srq<Self>) -> bool;
    /// Goes on with an SRQ.
    fn run_shared(nic: &mut Nic<Self>, srqn: u32);
    /// The guest rang for a queue pair that is not in the table.
    fn posted_elsewhere(nic: &mut Nic<Self>, owner: Owner, producer: u32);

    /// A QP moved to ERR.
    fn stopped(nic: &mut Nic<Self>, qpn: u32);
    /// A CQ died; QPs of the table are told by the NIC.
    fn cq_died(nic: &mut Nic<Self>, cqn: u32);
    /// The NIC goes on after a pause: one of its QPs.
    fn resumed(nic: &mut Nic<Self>, qpn: u32);
    /// The NIC cannot go on.
    fn fail(nic: &mut Nic<Self>);
    /// The NIC goes away.
    fn dropped(nic: &mut Nic<Self>);

    /// Begins to look at keys after a change of memory.
    fn walk_keys(nic: &Nic<Self>) -> Self::Keys;
    /// Looks at some of them; true: that was all.
    fn follow_keys(
        nic: &mut Nic<Self>,
        keys: &mut Self::Keys,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool;

    /// Whether objects follow a change of memory in this state.
    fn follows(state: NicState) -> bool {
        match state {
            NicState::Ready | NicState::Paused => true,
            NicState::Failed => Self::LETS_GO,
            NicState::Idle => false,
        }
    }
}
