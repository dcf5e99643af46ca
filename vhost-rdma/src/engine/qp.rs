//! Queue pairs: what the engine keeps of each beside the guest's part, above all of the message
//! that comes in.

use serde::{Deserialize, Serialize};

use super::nic::Soft;
use crate::nic::receive::{Receive, SavedReceive};
use crate::nic::saved::BadState;
use crate::transport::NicId;

/// A queue pair whose work requests the daemon executes.
pub(super) type Qp = crate::nic::objects::Qp<Soft>;

/// A requester that found no receive and wants to know of the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// What is saved of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedInbound {
    open: Option<SavedReceive>,
    arrived: u32,
    stamp: Option<u64>,
    waiter: Option<Waiter>,
    established: bool,
    draining: bool,
    last_wqe_raised: bool,
    groups: u32,
    refused: u32,
}

impl Inbound {
    pub(super) fn save(&self) -> SavedInbound {
        let Self { arrived, stamp, waiter, established, draining, .. } = *self;
        let Self { last_wqe_raised, groups, refused, .. } = *self;
        let open = self.open_taken.then(|| self.open.save());
        SavedInbound {
            open,
            arrived,
            stamp,
            waiter,
            established,
            draining,
            last_wqe_raised,
            groups,
            refused,
        }
    }

    pub(super) fn load(saved: &SavedInbound) -> Result<Self, BadState> {
        let open = saved.open.as_ref().map(Receive::load).transpose()?;
        Ok(Self {
            open_taken: open.is_some(),
            open: open.unwrap_or_default(),
            arrived: saved.arrived,
            stamp: saved.stamp,
            waiter: saved.waiter,
            established: saved.established,
            draining: saved.draining,
            last_wqe_raised: saved.last_wqe_raised,
            groups: saved.groups,
            refused: saved.refused,
        })
    }
}
