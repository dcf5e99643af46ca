//! What blocking jobs of a NIC find, and where they leave it.

use std::sync::mpsc::{self, Receiver, Sender};

use vhost_rdma_engine::link::Gid;
use vhost_rdma_memory::Ring;
use virtio_rdma_abi::{Av, QpAttr};

use super::region::Made;
use super::verbs::{HostError, HostVerbs, MadeAh, Result as HostResult};

/// A device that was opened for an INIT.
pub(super) struct Opened {
    pub(super) status_page: Ring,
    pub(super) host: Result<Box<dyn HostVerbs>, HostError>,
}

/// What a peer is looked for.
#[derive(Debug)]
pub(super) enum Purpose {
    /// An address handle in a domain.
    Handle(u32, Av),
    /// The connection of a QP, to one of this host or not.
    Connection { qpn: u32, attr: Box<QpAttr>, here: bool },
}

/// What became of a search.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) ctx: u32,
    pub(super) purpose: Purpose,
    /// As far as others know.
    pub(super) may: bool,
    pub(super) outcome: HostResult<MadeAh>,
}

/// What a blocking job found.
pub(super) enum Finding {
    Opened(Opened),
    Registered(Made),
    Peer(Found),
    /// What was said to a NIC that wants an address.
    Address {
        index: u16,
        gid: Gid,
        granted: Option<bool>,
    },
}

/// Where the blocking jobs of one life of a NIC leave what they find. A job of an earlier life
/// finds that nobody listens, and what it made ends with it.
pub(super) struct Findings {
    pub(super) sender: Sender<Finding>,
    pub(super) receiver: Receiver<Finding>,
}

impl Default for Findings {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel();
        Self { sender, receiver }
    }
}
