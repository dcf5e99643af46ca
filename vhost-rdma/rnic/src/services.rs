//! What the daemon plays of a NIC on an RNIC: QP 1, and keys for all of guest memory.

use slab::Slab;
use vhost_rdma_engine::cm::Inbox;
use vhost_rdma_engine::nic::qp::{Attrs, SendQueue, State};
use vhost_rdma_engine::nic::receive::ReceiveRing;
use vhost_rdma_memory::AddressSpace;

/// Where the numbers of keys for all of memory begin: far beyond those that an RNIC has.
pub(super) const DMA_KEYS: u32 = 0xff00_0000;

/// A key for all of guest memory.
#[derive(Debug)]
pub(super) struct DmaKey {
    pub(super) pdn: u32,
    pub(super) access: u32,
}

/// The queue pair.
#[derive(Debug)]
pub(super) struct Gsi {
    pub(super) pdn: u32,
    pub(super) state: State,
    pub(super) attrs: Attrs,
    pub(super) signal_all: bool,
    pub(super) send_cqn: u32,
    pub(super) recv_cqn: u32,
    pub(super) send: Option<SendQueue>,
    pub(super) receive: Option<ReceiveRing>,
    pub(super) doorbells: [u32; 2],
}

/// What the daemon plays of a NIC on an RNIC.
#[derive(Debug, Default)]
pub(super) struct Services {
    pub(super) gsi: Option<Box<Gsi>>,
    pub(super) dma_keys: Slab<DmaKey>,
    /// The guest rang, or something is left to do.
    pub(super) pending: bool,
}

impl Services {
    pub(super) const fn exists(&self) -> bool {
        self.gsi.is_some()
    }

    pub(super) fn keys(&self) -> usize {
        self.dma_keys.len()
    }

    /// Whether there is something to do, `inbox` being the NIC's.
    pub(super) fn has_work(&self, inbox: &Inbox) -> bool {
        self.exists() && (self.pending || !inbox.is_empty())
    }

    pub(super) fn uses_pd(&self, pdn: u32) -> bool {
        self.gsi.as_ref().is_some_and(|gsi| gsi.pdn == pdn)
            || self.dma_keys.iter().any(|(_, key)| key.pdn == pdn)
    }

    pub(super) fn uses_cq(&self, cqn: u32) -> bool {
        self.gsi.as_ref().is_some_and(|gsi| gsi.send_cqn == cqn || gsi.recv_cqn == cqn)
    }

    /// Whether the hardware may not have handed out this key: it is the daemon's.
    pub(super) fn has_key(&self, key: u32) -> bool {
        self.dma_key(key).is_some()
    }

    pub(super) fn dma_key(&self, key: u32) -> Option<&DmaKey> {
        self.dma_keys.get(key.checked_sub(DMA_KEYS)? as usize)
    }

    /// Whether a ring of the queue pair lies in memory that is gone.
    pub(super) fn lost_rings(&self, space: &AddressSpace) -> bool {
        self.gsi.as_ref().is_some_and(|gsi| {
            gsi.send.as_ref().is_some_and(|send| !send.ring().lives_in(space))
                || gsi.receive.as_ref().is_some_and(|receive| !receive.ring().lives_in(space))
        })
    }

    /// The rings cannot even be flushed.
    pub(super) fn drop_rings(&mut self) {
        if let Some(gsi) = &mut self.gsi {
            gsi.send = None;
            gsi.receive = None;
        }
    }

    pub(super) fn state(&self) -> State {
        self.gsi.as_ref().map_or(State::Reset, |gsi| gsi.state)
    }
}
