//! Queue pairs: what the engine keeps of each beside the guest's part, above all of the message
//! that comes in.

use serde::{Deserialize, Serialize};

use super::stream::Stream;
use super::waiter::Waiter;
use crate::nic::receive::{Receive, SavedReceive};
use crate::nic::saved::BadState;

/// A message of an unreliable connection: the life of its queue pair, 0 where nothing can overtake
/// it, and its number in that.
pub(super) type Message = (u64, u32);

/// What the engine keeps of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    /// The receive that the inbound message in progress fills, or that a dropped message left for
    /// the next one.
    pub(super) open: Receive,
    pub(super) open_taken: bool,
    /// Bytes of the inbound message in progress that have arrived.
    pub(super) arrived: u32,
    /// On an unreliable connection (`unreliable`), the newest message of which something came;
    /// `None`: it is not known. It is not saved, since a message goes on in another process where
    /// it stood.
    pub(super) message: Option<Message>,
    /// The last of which a piece was lost that had come.
    pub(super) lost: Option<Message>,
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
    /// What came from another shard.
    pub(super) stream: Stream,
}

impl Inbound {
    /// The QP is in RESET: a message in progress is forgotten. Groups keep it.
    pub(super) fn reset(&mut self) {
        self.open_taken = false;
        self.arrived = 0;
        self.message = None;
        self.lost = None;
        self.stamp = None;
        self.waiter = None;
        self.established = false;
        self.draining = false;
        self.last_wqe_raised = false;
        self.refused = 0;
        self.stream = Stream::default();
    }
}

/// What is saved of it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedInbound {
    open: Option<SavedReceive>,
    arrived: u32,
    stamp: Option<u64>,
    waiter: Option<Waiter>,
    established: bool,
    draining: bool,
    last_wqe_raised: bool,
    groups: u32,
    refused: u32,
    stream: Stream,
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
            stream: self.stream,
        }
    }

    pub(super) fn load(saved: &SavedInbound) -> Result<Self, BadState> {
        let open = saved.open.as_ref().map(Receive::load).transpose()?;
        Ok(Self {
            open_taken: open.is_some(),
            open: open.unwrap_or_default(),
            arrived: saved.arrived,
            message: None,
            lost: None,
            stamp: saved.stamp,
            waiter: saved.waiter,
            established: saved.established,
            draining: saved.draining,
            last_wqe_raised: saved.last_wqe_raised,
            groups: saved.groups,
            refused: saved.refused,
            stream: saved.stream.resumed(),
        })
    }
}
