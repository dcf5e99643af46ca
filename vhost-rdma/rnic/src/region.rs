//! A memory region, and the registration that makes one: on any thread but a worker.

use std::sync::Arc;

use vhost_rdma_memory::{AddressSpace, ContiguousError, ContiguousMapping, Segment, Translation};
use virtio_rdma_abi::access;

use super::verbs::{HostDomain, HostError, HostMr, Registered};

/// Rights that a window may give.
const WINDOW_RIGHTS: u32 = access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::ZERO_BASED
    | access::OPTIONAL_MASK;

/// A memory region.
#[derive(Debug)]
pub(super) struct Mr {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    /// `None` once its memory is gone and the hardware has let go of it.
    pub(super) host: Option<HostMr>,
    /// Its memory is gone.
    pub(super) lost: bool,
    pub(super) bytes: u64,
    pub(super) runs: usize,
    pub(super) iova: u64,
    pub(super) access: u32,
    pub(super) map: Arc<Translation>,
}

impl Mr {
    /// The memory of a range, for the daemon's own accesses, if this region opens it to `pdn` with
    /// `rights`.
    pub(super) fn segment(&self, pdn: u32, rights: u32, range: (u64, u32)) -> Option<Segment> {
        let (addr, len) = range;
        let granted =
            self.host.is_some() && !self.lost && self.pdn == pdn && rights & !self.access == 0;
        let offset = addr.checked_sub(self.iova).filter(|_| granted)?;
        let inside = self.map.covers(offset, len.into());
        inside.then(|| Segment { map: Arc::clone(&self.map), offset, len })
    }

    /// Follows a new memory map; how many mappings were looked at.
    pub(super) fn follow(&mut self, space: &AddressSpace) -> usize {
        self.lost |= !self.map.lives_in(space);
        self.map.mappings()
    }

    pub(super) const fn is_lost(&self) -> bool {
        self.lost
    }

    /// The host's region, if its memory is gone.
    pub(super) fn take_lost(&mut self) -> Option<HostMr> {
        if self.lost { self.host.take() } else { None }
    }

    /// The host's region, if a window may show `range` of it with these rights (IBTA C10-73,
    /// C10-74, C10-75).
    pub(super) fn bindable(&self, (addr, len): (u64, u64), rights: u32) -> Option<HostMr> {
        let writes = rights & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        let rights_ok = rights & !WINDOW_RIGHTS == 0
            && self.access & access::MW_BIND != 0
            && (!writes || self.access & access::LOCAL_WRITE != 0);
        let offset = addr.checked_sub(self.iova)?;
        let inside = offset <= self.bytes && len <= self.bytes - offset;
        self.host.filter(|_| rights_ok && inside && !self.lost)
    }
}

/// A registration that is under way.
#[derive(Debug)]
pub(super) struct Registration {
    pub(super) mr: Mr,
    pub(super) budget: usize,
    /// The region in whose place it comes.
    pub(super) replaces: Option<u32>,
}

/// Why one came to nothing.
#[derive(Debug)]
pub(super) enum Refusal {
    Mapping(ContiguousError),
    Host(HostError),
}

/// What became of one.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) request: Registration,
    pub(super) outcome: Result<Registered, Refusal>,
}

impl Registration {
    /// Maps and pins: on any thread but a worker.
    pub(super) fn carry_out(mut self, domain: &dyn HostDomain) -> Made {
        let mapping =
            ContiguousMapping::new(self.mr.map.clone(), self.budget).map_err(Refusal::Mapping);
        let outcome = mapping.and_then(|mapping| {
            self.mr.runs = mapping.runs();
            let made = domain.register(Arc::new(mapping), self.mr.iova, self.mr.access);
            made.map_err(Refusal::Host)
        });
        Made { request: self, outcome }
    }
}
