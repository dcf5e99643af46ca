//! Who waits for something at a NIC.

use serde::{Deserialize, Serialize};

use crate::link::{Flow, Gid, NicId};

/// A requester that waits for something here: the next receive, or what an owner does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waiter {
    pub(super) who: Requester,
    pub(super) qpn: u32,
}

/// Whose queue pair that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Requester {
    /// A NIC of this shard.
    Here(NicId),
    /// The NIC of another shard, in the same network, that holds this address.
    Elsewhere(Gid),
}

impl Waiter {
    pub(super) const fn here(nic: NicId, qpn: u32) -> Self {
        Self { who: Requester::Here(nic), qpn }
    }

    /// Who sent a request.
    pub(super) fn of(flow: &Flow) -> Self {
        let who = match flow.source {
            NicId::ELSEWHERE => Requester::Elsewhere(flow.source_gid),
            nic => Requester::Here(nic),
        };
        Self { who, qpn: flow.source_qpn }
    }
}
