//! What a backing must be able to do: the seam below everything that a guest sees.
//!
//! A [`Nic`] does whatever is the same on every backing, and asks its provider for the rest. A
//! provider keeps its own part of each object beside the guest's (a host's handle, who waits), and
//! its own part of the NIC. Nothing is called through a table: each backing has a NIC of its own,
//! made by the compiler.

use std::fmt;

use virtio_rdma_abi as abi;

use super::budget::Budget;
use super::doorbell::Owner;
use super::nic::{Nic, NicState};
use super::objects::{Qp, Srq};
use super::qp::SendQueue;
use super::quota::Places;
use super::receive::ReceiveRing;
use super::roster::Roster;
use super::shape::Bounds;
use super::{Nanos, Objects, Status};
use crate::link::Gid;
use crate::memory::AddressSpace;

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

/// A backing. The types are its parts of the guest's objects.
pub trait Provider: fmt::Debug + Sized + Send + 'static {
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

    /// What places in tables take.
    const PLACES: &'static Places;
    /// Whether a NIC that failed still lets go of memory that is gone.
    const LETS_GO: bool;
    /// What the end of an object counts beside what it counts on every backing.
    const END: Nanos;

    /// What QUERY_DEVICE answers.
    fn device(nic: &mut Nic<Self>) -> abi::QueryDeviceResp;
    /// What QUERY_PORT answers.
    fn port(nic: &mut Nic<Self>) -> abi::QueryPortResp;
    /// What the numbers of new queues may be.
    fn bounds(&self) -> Bounds;

    /// Begins a protection domain.
    fn begin_pd(nic: &mut Nic<Self>) -> Result<Self::Pd, Status>;
    /// Ends one.
    fn end_pd(nic: &mut Nic<Self>, pd: Self::Pd);
    /// Begins a shared receive queue of that number, for which there is room.
    fn begin_srq(
        nic: &mut Nic<Self>,
        srqn: u32,
        req: &abi::SrqCreateReq,
    ) -> Result<Self::Srq, Status>;
    /// Ends one, which is out of the table.
    fn end_srq(nic: &mut Nic<Self>, srq: &Self::Srq);
    /// Bytes that one of so many work requests takes beside its place.
    fn srq_bytes(max_wr: u32) -> usize;
    /// Receives of one that were posted and that nothing has used up.
    fn srq_posted(srq: &Srq<Self>) -> u32;
    /// Receives of one that were used up, free-running.
    fn srq_used(srq: &Srq<Self>) -> u32;
    /// Sets the limit of one, `again` also if it is the present.
    fn set_limit(nic: &mut Nic<Self>, srqn: u32, limit: u32, again: bool) -> Result<(), Status>;
    /// One went over to another ring.
    fn srq_moved(nic: &mut Nic<Self>, srqn: u32);
    /// Bytes that a QP of this request takes beside its place.
    fn qp_bytes(req: &abi::QpCreateReq) -> usize;
    /// Takes a QP that goes away out of what it is in.
    fn leave_groups(nic: &mut Nic<Self>, qpn: u32);
    /// Ends one, which is out of the table.
    fn end_qp(nic: &mut Nic<Self>, qp: &Qp<Self>);
    /// Ends an address handle.
    fn end_ah(nic: &mut Nic<Self>, ah: Self::Ah);
    /// Takes in what has happened and nobody has looked at yet.
    fn catch_up(nic: &mut Nic<Self>);

    /// A command of its own ends without an answer.
    fn abandoned(nic: &mut Nic<Self>, work: Self::Work);
    /// A context begins to end.
    fn begin_end(nic: &Nic<Self>) -> Self::Ending;
    /// Ends what goes before QPs; true: that was all.
    fn end_before_qps(
        nic: &mut Nic<Self>,
        ctx: u32,
        end: &mut Self::Ending,
        budget: &mut Budget,
    ) -> bool;
    /// Ends what goes before this QP of the context; true: that was all.
    fn end_before_qp(
        nic: &mut Nic<Self>,
        qpn: u32,
        end: &mut Self::Ending,
        budget: &mut Budget,
    ) -> bool;
    /// Its QPs are gone; true: nothing is left of them.
    fn end_after_qps(nic: &mut Nic<Self>, end: &mut Self::Ending, budget: &mut Budget) -> bool;
    /// The numbers of its keys.
    fn keys(&self) -> &Roster;
    /// Ends what a key names, if that is the context's.
    fn end_key(nic: &mut Nic<Self>, number: u32, ctx: u32);
    /// A context is gone.
    fn context_gone(&mut self, ctx: u32);

    /// Whether something of the provider's own is in a protection domain.
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
    /// The NIC is to stand still, and `begins` to; true: it does not yet.
    fn stand_still(nic: &mut Nic<Self>, begins: bool) -> bool;
    /// The NIC goes on after a pause.
    fn go_on(nic: &mut Nic<Self>);
    /// The same: one of its QPs.
    fn resumed(nic: &mut Nic<Self>, qpn: u32);
    /// Whether a driver is about to begin, whose memory it follows already.
    fn is_beginning(&self) -> bool;
    /// The backing of a NIC that is empty, in this one's place.
    fn succeed(&mut self, life: NicState) -> Self;
    /// Whether there is something to do, as far as is known without a look at the guest's memory.
    fn has_work(nic: &mut Nic<Self>, now: Nanos) -> bool;
    /// Whether there is something to tell the guest that only the provider knows.
    fn has_news(&self) -> bool;
    /// Tells it.
    fn tell(nic: &mut Nic<Self>);
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
