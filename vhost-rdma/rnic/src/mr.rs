//! Memory regions: a contiguous mapping of the guest's pages, registered with the host at the
//! guest's own address.
//!
//! Pages are pinned by the registration, region by region and never the whole guest; the registered
//! bytes are bounded by the NIC's limit and by the daemon's RLIMIT_MEMLOCK, and these by a budget
//! of mappings. Each of these ends in NOMEM.
//!
//! Mapping and pinning take milliseconds for large regions, and so does the end of it; the worker,
//! which serves other guests, does neither. A registration is checked here, made on the thread that
//! carries the NIC's commands out, and taken in here
//! ([`BlockingJob`](vhost_rdma_engine::nic::BlockingJob)). What ends goes to the NIC's
//! remains, which that thread drops before the guest gets its answer. A guest's commands come one
//! after the other, so their order is kept; what was under way while the NIC was reset finds
//! another life, and ends as well.

use std::sync::Arc;

use easy_ext::ext;
use vhost_rdma_engine::nic::NicState;
use vhost_rdma_engine::nic::quota::Kind;
use vhost_rdma_engine::nic::verb::Rereg;
use vhost_rdma_engine::nic::work::Begun;
use vhost_rdma_engine::nic::{DeferredDrop, Reply, Status};
use vhost_rdma_memory::{ContiguousError, Translation};
use virtio_rdma_abi::{self as abi, access};
use zerocopy::little_endian::U32;

use super::cq::CqVerbs as _;
use super::findings::Finding;
use super::gsi::GsiVerbs as _;
use super::nic::{Nic, Rnic};
use super::refusal::Control as _;
use super::region::{Made, Mr, Refusal, Registration};
use super::verbs::HostMr;

/// Mappings that the regions of one NIC may take.
const MAPPINGS: usize = 16 << 10;

/// Rights of capabilities that this backing does not offer (docs/virtio-rdma.md §5.5).
const NOT_OFFERED: u32 = access::ZERO_BASED | access::FLUSH_GLOBAL;
/// Flags of a region that an RNIC is asked for. Optional ones are hints that may be ignored (IBTA
/// has none; verbs.h, IBV_ACCESS_OPTIONAL_RANGE).
const KNOWN: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::MW_BIND;

#[ext(RegionVerbs)]
pub(super) impl Nic {
    /// Changes a region: another is registered in its place, and it ends when that is there. So a
    /// refusal leaves it as it was, and the keys are new ones; libibverbs could change rights and
    /// domain of one, but gives memory no address of the guest's (ibv_rereg_mr(3)).
    fn reregister(&mut self, ctx: u32, key: u32, change: Rereg) -> Result<Begun<Rnic>, Status> {
        let mr = self.backing.mrs.get(&key).filter(|mr| mr.ctx == ctx).ok_or(Status::NOENT)?;
        let pdn = change.pdn.unwrap_or(mr.pdn);
        let access = change.access.unwrap_or(mr.access);
        let memory = change.memory.unwrap_or_else(|| (mr.iova, mr.map.clone()));
        self.unshown(key)?;
        self.register((ctx, pdn), access, memory, Some(key))
    }

    /// Whether no window shows a region.
    fn unshown(&mut self, key: u32) -> Result<(), Status> {
        if self.backing.windows.show(key) {
            // What freed it may have been done meanwhile.
            self.poll_host();
        }
        if self.backing.windows.show(key) { Err(Status::BUSY) } else { Ok(()) }
    }

    /// Begins a registration.
    fn register(
        &mut self,
        (ctx, pdn): (u32, u32),
        access: u32,
        (iova, map): (u64, Arc<Translation>),
        replaces: Option<u32>,
    ) -> Result<Begun<Rnic>, Status> {
        let pd = self.host_pd(ctx, pdn)?;
        let wanted = access & !access::OPTIONAL_MASK;
        let writes = wanted & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        if wanted & NOT_OFFERED != 0 {
            return Err(Status::NOTSUPP);
        }
        if wanted & !KNOWN != 0 || (writes && wanted & access::LOCAL_WRITE == 0) {
            return Err(Status::INVAL);
        }
        let bytes = map.len();
        // A registration of the hardware has pages (linux: umem.c, ib_umem_get).
        if map.is_empty() || iova.checked_add(bytes).is_none() {
            return Err(Status::INVAL);
        }
        self.room_for(bytes, replaces)?;
        self.kept.place(Kind::Region, self.backing.mrs.len())?;
        let request = Registration {
            mr: Mr { ctx, pdn, host: None, lost: false, bytes, runs: 0, iova, access: wanted, map },
            budget: MAPPINGS.saturating_sub(self.backing.mr_runs),
            replaces,
        };
        let domain = self.backing.host.domain(pd).map_err(|error| self.refused(error))?;
        Ok(self.aside(move || Finding::Registered(request.carry_out(domain.as_ref()))))
    }

    /// Whether there may be another region. One that is replaced gives its number, but its memory
    /// is pinned until the other's is.
    fn room_for(&self, bytes: u64, replaces: Option<u32>) -> Result<(), Status> {
        let limits = &self.settings.limits;
        let others = self.backing.mrs.len() - usize::from(replaces.is_some());
        let full = others >= limits.max_mrs as usize
            || self.backing.mr_bytes.saturating_add(bytes) > limits.mr_bytes(&self.space);
        if full { Err(Status::NOMEM) } else { Ok(()) }
    }

    /// Takes in what a registration came to, if what it is of is still there.
    fn registered(&mut self, made: Made) -> Result<Begun<Rnic>, Status> {
        let Made { request: Registration { mut mr, replaces, .. }, outcome } = made;
        let made = match outcome {
            Ok(made) => made,
            Err(Refusal::Mapping(error)) => return Err(no_mapping(error)),
            Err(Refusal::Host(error)) => {
                let bytes = mr.bytes;
                tracing::debug!(
                    device = self.backing.place.device,
                    bytes,
                    %error,
                    "the RNIC refuses a registration"
                );
                return Err(self.refused(error));
            }
        };
        let wanted = match self.still_wanted(&mr, replaces) {
            // It would be mistaken for a key of QP 1.
            Ok(()) if self.backing.services.has_key(made.lkey) => Err(Status::NOMEM),
            wanted => wanted,
        };
        if let Err(status) = wanted {
            self.deferred_drops.push(DeferredDrop::new(made));
            return Err(status);
        }
        let (lkey, rkey) = (made.lkey, made.rkey);
        if let Some(old) = replaces {
            self.remove_mr(old);
        }
        mr.host = Some(self.backing.host.adopt(made));
        self.backing.mr_bytes += mr.bytes;
        self.backing.mr_runs += mr.runs;
        self.join_pd(mr.pdn);
        self.backing.mr_keys.insert(lkey, mr.ctx);
        self.backing.mrs.insert(lkey, mr);
        let keys = abi::MrResp { lkey: U32::new(lkey), rkey: U32::new(rkey) };
        Ok(Begun::Done(Reply::Mr(keys)))
    }

    fn still_wanted(&mut self, mr: &Mr, replaces: Option<u32>) -> Result<(), Status> {
        match self.life {
            NicState::Failed => return Err(Status::FATAL),
            NicState::Idle => return Err(Status::STATE),
            NicState::Ready | NicState::Paused => {}
        }
        self.host_pd(mr.ctx, mr.pdn)?;
        if let Some(old) = replaces {
            self.backing.mrs.get(&old).filter(|old| old.ctx == mr.ctx).ok_or(Status::NOENT)?;
            self.unshown(old)?;
        }
        self.room_for(mr.bytes, replaces)?;
        // Unplugged meanwhile.
        if mr.map.lives_in(&self.space) { Ok(()) } else { Err(Status::FAULT) }
    }

    /// Ends a registration of the host, where it may take its time.
    fn let_go(&mut self, host: HostMr) {
        match self.backing.host.release(host) {
            Ok(region) => self.deferred_drops.push(DeferredDrop::new(region)),
            Err(_) if self.backing.host_gone => {}
            Err(error) => {
                tracing::warn!(
                    device = self.backing.place.device,
                    %error,
                    "a registration is not there"
                );
            }
        }
    }

    fn deregister(&mut self, ctx: u32, key: u32) -> Result<Reply, Status> {
        if self.backing.services.has_key(key) {
            return self.deregister_all(ctx, key);
        }
        self.backing.mrs.get(&key).filter(|mr| mr.ctx == ctx).ok_or(Status::NOENT)?;
        self.unshown(key)?;
        self.remove_mr(key);
        Ok(Reply::Done)
    }

    fn remove_mr(&mut self, key: u32) {
        if let Some(mr) = self.backing.mrs.remove(&key) {
            self.backing.mr_keys.remove(key);
            self.leave_pd(mr.pdn);
            self.backing.mr_bytes -= mr.bytes;
            self.backing.mr_runs -= mr.runs;
            if let Some(host) = mr.host {
                self.let_go(host);
            }
        }
    }
}

fn no_mapping(error: ContiguousError) -> Status {
    tracing::debug!(%error, "a region cannot be registered with the RNIC");
    match error {
        ContiguousError::Pieces(_) | ContiguousError::Host(_) | ContiguousError::HugePages => {
            Status::NOMEM
        }
        ContiguousError::NoFile => Status::INVAL,
    }
}
