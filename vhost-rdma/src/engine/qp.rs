//! Queue pairs: what the engine keeps of each beside the guest's part, above all of the message
//! that comes in.

use super::nic::Soft;
use crate::nic::receive::Receive;
use crate::transport::NicId;

/// A queue pair whose work requests the daemon executes.
pub(super) type Qp = crate::nic::objects::Qp<Soft>;

/// A requester that found no receive and wants to know of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiter {
    pub(super) nic: NicId,
    pub(super) qpn: u32,
}

/// What the engine keeps of a queue pair.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    /// The receive that the inbound message in progress fills, or that a dropped message left for
    /// the next one.
    pub(super) open: Receive,
    pub(super) open_taken: bool,
    /// Bytes of the inbound message in progress that have arrived.
    pub(super) arrived: u32,
    /// What the keys that the inbound message in progress needs opened when it began; `None`: no
    /// message has begun.
    pub(super) stamp: Option<u64>,
    pub(super) waiter: Option<Waiter>,
    /// COMM_EST was raised since RTR.
    pub(super) established: bool,
    /// SQD was asked for and sends are still under way.
    pub(super) draining: bool,
    /// LAST_WQE_REACHED was raised since ERR.
    pub(super) last_wqe_raised: bool,
    /// Multicast groups that it is in.
    pub(super) groups: u32,
    /// Requests of an unreliable peer that were dropped since RESET for a key, range or right.
    pub(super) refused: u32,
}

impl Inbound {
    /// The QP is in RESET: a message in progress is forgotten. Groups keep it.
    pub(super) fn reset(&mut self) {
        self.open_taken = false;
        self.arrived = 0;
        self.stamp = None;
        self.waiter = None;
        self.established = false;
        self.draining = false;
        self.last_wqe_raised = false;
        self.refused = 0;
    }
}
