//! A turn of a queue pair: what it knows, and what it has done.

use virtio_rdma_abi::send_flags;

use crate::link::{Flow, NicId};
use crate::nic::Nanos;
use crate::nic::qp::{Kind, SendQueue};

/// What a turn knows of its QP; the send queue is borrowed out of the QP meanwhile.
pub(super) struct Turn {
    pub(super) nic: NicId,
    pub(super) qpn: u32,
    pub(super) pdn: u32,
    pub(super) kind: Kind,
    pub(super) signal_all: bool,
    pub(super) cqn: u32,
    /// What a request may take of RNR NAKs, and of silence.
    pub(super) retries: (u8, u8),
    pub(super) flow: Flow,
    /// The NIC that a connection leads to, if it is another one of this shard. Addresses change
    /// hands by commands only, none of which is executed during a turn.
    pub(super) peer: Option<NicId>,
    pub(super) now: Nanos,
    /// Nobody else is known to have work: how long it may go on.
    pub(super) lone_until: Option<Nanos>,
}

impl Turn {
    pub(super) const fn rearm_retries(&self, send: &mut SendQueue) {
        (send.rnr_left, send.retries_left) = self.retries;
    }

    /// Whether a work request with these flags says that it succeeded. One that failed always
    /// completes.
    pub(super) const fn tells(&self, flags: u8) -> bool {
        self.signal_all || flags & send_flags::SIGNALED != 0
    }
}

/// What a turn has done.
#[derive(Default)]
pub(super) struct Done {
    /// Work requests, or pieces of one.
    pub(super) requests: u32,
    pub(super) bytes: u32,
}

impl Done {
    pub(super) const fn add(&mut self, requests: u32, bytes: u32) {
        self.requests += requests;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}
