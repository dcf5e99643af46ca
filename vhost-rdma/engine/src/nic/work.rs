//! What a command comes to, and how far one is that goes in steps (`dispatch`).

use virtio_rdma_abi as abi;

use super::cq::Succession;
use super::parts::Parts;
use super::receive::Moving;
use super::{BlockingJob, Reply};

/// A command that has begun, and goes in steps.
#[derive(Debug)]
pub enum Work<P: Parts> {
    /// The same on every backing.
    Common(CommonWork<P>),
    /// The provider's own.
    Own(P::Work),
}

/// What goes in steps on every backing.
#[derive(Debug)]
pub enum CommonWork<P: Parts> {
    /// Everything of one context ends.
    EndContext(Box<End<P>>),
    /// A CQ moves to its new ring.
    ResizeCq(u32, Succession),
    /// An SRQ moves to its new ring.
    ResizeSrq(Box<abi::SrqModifyReq>, Moving),
}

/// What a command came to when it began.
#[derive(Debug)]
pub enum Begun<P: Parts> {
    /// It is over.
    Done(Reply),
    /// It goes on in steps.
    Steps(Work<P>),
    /// Somebody who may block has to do this first.
    Blocking(BlockingJob),
}

impl<P: Parts> From<Reply> for Begun<P> {
    fn from(reply: Reply) -> Self {
        Self::Done(reply)
    }
}

/// How far the end of a context is.
#[derive(Debug)]
pub struct End<P: Parts> {
    pub(super) ctx: u32,
    pub(super) own: P::Ending,
    /// A QP that something has still to be taken from.
    pub(super) closing: Option<u32>,
}
