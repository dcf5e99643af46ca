//! Memory regions: a window over the guest's pages, registered with the host at the guest's own address.
//!
//! Pages are pinned by the registration, region by region and never the whole guest; the registered bytes are bounded by the NIC's limit and
//! by the daemon's RLIMIT_MEMLOCK, and windows by a budget of mappings. Each of these ends in NOMEM.

use std::sync::Arc;

use virtio_rdma_abi::{self as abi, access};
use zerocopy::little_endian::U32;

use super::nic::Nic;
use super::verbs::HostMr;
use crate::engine::{Reply, Status};
use crate::memory::{AddressSpace, Ring, Segment, Translation, Window, WindowError};

/// Mappings that the windows of one NIC may take.
const MAPPINGS: usize = 16 << 10;

/// Flags of a region that an RNIC is asked for. Optional ones are hints that may be ignored (IBTA has none; verbs.h, IBV_ACCESS_OPTIONAL_RANGE).
const KNOWN: u32 =
    access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;

/// A memory region.
#[derive(Debug)]
pub(super) struct Mr {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    /// `None` once its memory is gone.
    host: Option<HostMr>,
    bytes: u64,
    runs: usize,
    iova: u64,
    access: u32,
    map: Arc<Translation>,
}

impl Mr {
    /// The memory of a range, for the daemon's own accesses, if this region opens it to `pdn` with `rights`.
    pub(super) fn segment(&self, pdn: u32, rights: u32, range: (u64, u32)) -> Option<Segment> {
        let (addr, len) = range;
        let granted = self.host.is_some() && self.pdn == pdn && rights & !self.access == 0;
        let offset = addr.checked_sub(self.iova).filter(|_| granted)?;
        let inside = self.map.covers(offset, len.into());
        inside.then(|| Segment { map: Arc::clone(&self.map), offset, len })
    }
}

impl Nic {
    pub(super) fn register(
        &mut self,
        (ctx, pdn): (u32, u32),
        access: u32,
        iova: u64,
        map: Arc<Translation>,
    ) -> Result<Reply, Status> {
        let pd = self.host_pd(ctx, pdn)?;
        let wanted = access & !access::OPTIONAL_MASK;
        let writes = wanted & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        if wanted & !KNOWN != 0 || (writes && wanted & access::LOCAL_WRITE == 0) {
            return Err(Status::INVAL);
        }
        let limits = &self.settings.limits;
        let bytes = map.len();
        if iova.checked_add(bytes).is_none() {
            return Err(Status::INVAL);
        }
        if self.mrs.len() >= limits.max_mrs as usize
            || self.mr_bytes.saturating_add(bytes) > limits.max_mr_bytes
        {
            return Err(Status::NOMEM);
        }
        let mapped: usize = self.mrs.values().map(|mr| mr.runs).sum();
        let window =
            Window::new(map.clone(), MAPPINGS.saturating_sub(mapped)).map_err(no_window)?;
        let runs = window.runs();
        let made = self.host.register(pd, Arc::new(window), iova, wanted);
        let made = made.map_err(|error| {
            tracing::debug!(device = self.place.device, bytes, %error, "the RNIC refuses a registration");
            self.refused(error)
        })?;
        if self.services.has_key(made.lkey) {
            // It would be mistaken for a key of QP 1.
            self.forgo(|nic| nic.host.deregister(made.mr));
            return Err(Status::NOMEM);
        }
        self.mr_bytes += bytes;
        self.mrs.insert(
            made.lkey,
            Mr { ctx, pdn, host: Some(made.mr), bytes, runs, iova, access: wanted, map },
        );
        Ok(Reply::Mr(abi::MrResp { lkey: U32::new(made.lkey), rkey: U32::new(made.rkey) }))
    }

    pub(super) fn deregister(&mut self, ctx: u32, key: u32) -> Result<Reply, Status> {
        if self.services.has_key(key) {
            return self.deregister_all(ctx, key);
        }
        self.mrs.get(&key).filter(|mr| mr.ctx == ctx).ok_or(Status::NOENT)?;
        self.remove_mr(key);
        Ok(Reply::Done)
    }

    pub(super) fn remove_mr(&mut self, key: u32) {
        if let Some(mr) = self.mrs.remove(&key) {
            self.mr_bytes -= mr.bytes;
            if let Some(host) = mr.host {
                self.forgo(|nic| nic.host.deregister(host));
            }
        }
    }

    /// Follows a new memory map: whatever lies in memory that is gone fails. The hardware lets go of such regions at once; their keys
    /// open nothing from then on.
    pub(super) fn follow_memory(&mut self, space: AddressSpace) {
        let gone = |ring: &Ring| !ring.lives_in(&space);
        let base_gone =
            self.status_page.as_ref().is_some_and(gone) || self.contexts.pages().any(gone);
        let dead: Vec<HostMr> = self
            .mrs
            .values_mut()
            .filter(|mr| !mr.map.lives_in(&space))
            .filter_map(|mr| mr.host.take())
            .collect();
        dead.into_iter().for_each(|mr| self.forgo(|nic| nic.host.deregister(mr)));
        let number = |index: usize| u32::try_from(index).unwrap_or(u32::MAX);
        let cqs: Vec<u32> =
            self.cqs.iter().filter(|(_, cq)| gone(cq.ring())).map(|(n, _)| number(n)).collect();
        let srqs: Vec<u32> = self
            .srqs
            .iter()
            .filter(|(_, srq)| gone(srq.ring.ring()))
            .map(|(n, _)| number(n))
            .collect();
        let qps: Vec<u32> = self
            .qps
            .values()
            .filter(|qp| {
                qp.send.as_ref().is_some_and(|send| gone(send.queue.ring()))
                    || qp.receive.as_ref().is_some_and(|receive| gone(receive.ring.ring()))
            })
            .map(|qp| qp.qpn)
            .collect();
        let gsi_gone = self.services.lost_rings(&space);
        self.space = space;
        if base_gone {
            return self.fail_now();
        }
        if gsi_gone {
            self.gsi_fatal();
            self.services.drop_rings();
        }
        cqs.into_iter().for_each(|cqn| self.cq_failed(cqn));
        srqs.into_iter().for_each(|srqn| self.srq_failed(srqn));
        for qpn in qps {
            self.qp_fatal(qpn);
            // Its rings cannot even be flushed.
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.send = None;
                qp.receive = None;
            }
        }
    }
}

fn no_window(error: WindowError) -> Status {
    tracing::debug!(%error, "a region cannot be registered with the RNIC");
    match error {
        WindowError::Pieces(_) | WindowError::Host(_) | WindowError::HugePages => Status::NOMEM,
        WindowError::NoFile => Status::INVAL,
    }
}
