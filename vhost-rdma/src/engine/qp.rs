//! Queue pairs: what the engine knows of each, and the receive that an inbound message fills.

use crate::memory::Charge;
use crate::nic::qp::{Attrs, Kind, SendQueue, State};
use crate::nic::receive::{Receive, ReceiveRing};
use crate::transport::NicId;

/// A requester that found no receive and wants to know of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiter {
    pub(super) nic: NicId,
    pub(super) qpn: u32,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) qpn: u32,
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) kind: Kind,
    pub(super) state: State,
    pub(super) attrs: Attrs,
    pub(super) signal_all: bool,
    pub(super) send_cqn: u32,
    pub(super) recv_cqn: u32,
    pub(super) srqn: Option<u32>,
    /// Beside the rest: a turn takes it out and puts it back.
    pub(super) send: Option<Box<SendQueue>>,
    pub(super) receive: Option<ReceiveRing>,
    /// Doorbell numbers of the two queues.
    pub(super) doorbells: [u32; 2],
    /// The receive that the inbound message in progress fills, or that a dropped message left for the next one.
    pub(super) open: Receive,
    pub(super) open_taken: bool,
    /// Bytes of the inbound message in progress that have arrived.
    pub(super) arrived: u32,
    /// What the keys that the inbound message in progress needs opened when it began; `None`: no
    /// message has begun.
    pub(super) stamp: Option<u64>,
    pub(super) waiter: Option<Waiter>,
    /// In the NIC's run queue.
    pub(super) scheduled: bool,
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
    pub(super) _kept: Charge,
}

impl Qp {
    /// Forgets everything posted, without completions (IBTA 10.3.1, RESET).
    pub(super) fn reset(&mut self) {
        self.state = State::Reset;
        self.attrs = Attrs::default();
        if let Some(send) = &mut self.send {
            send.reset();
        }
        if let Some(receive) = &mut self.receive {
            receive.reset();
        }
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
