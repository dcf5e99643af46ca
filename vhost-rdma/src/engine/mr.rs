//! Memory regions and the keys that name them.
//!
//! Every access of every work request passes [`MrTable::segment`]: key, state, protection domain, rights and range, in that
//! order, the range by subtraction so that nothing wraps (docs/virtio-rdma.md §6.2).

use std::sync::Arc;

use rustc_hash::FxHashMap;
use virtio_rdma_abi::access;

use super::command::Status;
use super::numbers::{Numbers, Random};
use crate::memory::{AddressSpace, Segment, Translation};

/// Rights that a registration may ask for.
const KNOWN: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::MW_BIND
    | access::ZERO_BASED;

/// Why a key does not open what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Denied;

/// A memory region.
#[derive(Debug)]
pub(super) struct Mr {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    key: u32,
    access: u32,
    iova: u64,
    len: u64,
    /// `None` once the guest memory behind it is gone.
    map: Option<Arc<Translation>>,
}

impl Mr {
    /// Bytes that count against the NIC's limit: what the guest chose to register, not the whole guest of a DMA key.
    fn charged(&self) -> u64 {
        if self.map.as_ref().is_some_and(|map| map.is_identity()) { 0 } else { self.len }
    }
}

/// What a registration names.
#[derive(Debug)]
pub(super) struct Registration {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) access: u32,
    pub(super) iova: u64,
    pub(super) map: Arc<Translation>,
}

/// An access that a work request wants.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) pdn: u32,
    pub(super) key: u32,
    pub(super) addr: u64,
    pub(super) len: u32,
    /// Rights that the region must give; 0 for a local read, which is always allowed.
    pub(super) rights: u32,
}

/// The regions of one NIC.
#[derive(Debug, Default)]
pub(super) struct MrTable {
    by_number: FxHashMap<u32, Mr>,
    numbers: Numbers,
    bytes: u64,
}

impl MrTable {
    pub(super) fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Registered bytes of all regions.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Registers; the key is new and random.
    pub(super) fn register(
        &mut self,
        request: Registration,
        random: &mut dyn Random,
    ) -> Result<u32, Status> {
        check_access(request.access, request.iova)?;
        check_range(request.iova, &request.map)?;
        let number = self.numbers.take(random).ok_or(Status::NOMEM)?;
        let key = number << 8 | (random.next_u32() & 0xff);
        let Registration { ctx, pdn, access, iova, map } = request;
        let mr = Mr { ctx, pdn, key, access, iova, len: map.len(), map: Some(map) };
        self.bytes += mr.charged();
        self.by_number.insert(number, mr);
        Ok(key)
    }

    /// Changes rights, domain or memory of a region; the key stays.
    pub(super) fn reregister(&mut self, key: u32, change: Rereg) -> Result<(), Status> {
        let mr =
            self.by_number.get_mut(&(key >> 8)).filter(|mr| mr.key == key).ok_or(Status::NOENT)?;
        if mr.map.as_ref().is_some_and(|map| map.is_identity()) {
            return Err(Status::INVAL);
        }
        let iova = change.memory.as_ref().map_or(mr.iova, |(iova, _)| *iova);
        check_access(change.access.unwrap_or(mr.access), iova)?;
        if let Some((iova, map)) = &change.memory {
            check_range(*iova, map)?;
        }
        let before = mr.charged();
        mr.access = change.access.unwrap_or(mr.access);
        mr.pdn = change.pdn.unwrap_or(mr.pdn);
        if let Some((iova, map)) = change.memory {
            mr.iova = iova;
            mr.len = map.len();
            mr.map = Some(map);
        }
        self.bytes = self.bytes - before + mr.charged();
        Ok(())
    }

    /// The region of a key, for control commands.
    pub(super) fn get(&self, key: u32) -> Option<&Mr> {
        self.by_number.get(&(key >> 8)).filter(|mr| mr.key == key)
    }

    /// Removes a region. Nothing holds its translation afterwards but the keys of other regions.
    pub(super) fn remove(&mut self, key: u32) {
        if let Some(mr) = self.by_number.remove(&(key >> 8)) {
            self.bytes -= mr.charged();
            self.numbers.free(key >> 8);
        }
    }

    /// Removes every region of a context.
    pub(super) fn remove_context(&mut self, ctx: u32) {
        let keys: Vec<u32> =
            self.by_number.values().filter(|mr| mr.ctx == ctx).map(|mr| mr.key).collect();
        keys.into_iter().for_each(|key| self.remove(key));
    }

    /// Whether a region lies in the domain.
    pub(super) fn uses_pd(&self, pdn: u32) -> bool {
        self.by_number.values().any(|mr| mr.pdn == pdn)
    }

    /// Follows a change of the guest's memory: regions whose memory is gone open nothing any more.
    pub(super) fn follow(&mut self, space: &AddressSpace) {
        for mr in self.by_number.values_mut() {
            let Some(map) = &mr.map else { continue };
            if map.is_identity() {
                mr.map = Some(Arc::new(Translation::identity(space.clone())));
            } else if !map.lives_in(space) {
                self.bytes -= mr.len;
                mr.len = 0;
                mr.map = None;
            }
        }
    }

    /// The memory that an access names, if every check passes. `len` must not be 0: empty accesses are never checked.
    #[inline]
    pub(super) fn segment(&self, access: &Access) -> Result<Segment, Denied> {
        let mr = self.get(access.key).ok_or(Denied)?;
        let map = mr.map.as_ref().ok_or(Denied)?;
        if mr.pdn != access.pdn || access.rights & !mr.access != 0 {
            return Err(Denied);
        }
        let offset = access.addr.checked_sub(mr.iova).ok_or(Denied)?;
        let len = u64::from(access.len);
        if offset > mr.len
            || len > mr.len - offset
            || (map.is_identity() && !map.covers(offset, len))
        {
            return Err(Denied);
        }
        Ok(Segment { map: Arc::clone(map), offset, len: access.len })
    }
}

/// What a re-registration changes.
#[derive(Debug, Default)]
pub(super) struct Rereg {
    pub(super) access: Option<u32>,
    pub(super) pdn: Option<u32>,
    pub(super) memory: Option<(u64, Arc<Translation>)>,
}

fn check_access(rights: u32, iova: u64) -> Result<(), Status> {
    let unknown = rights & !(KNOWN | access::OPTIONAL_MASK) != 0;
    // IBTA 10.6.3.1: who may write from afar may write locally.
    let remote_only = rights & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0
        && rights & access::LOCAL_WRITE == 0;
    let zero_based = rights & access::ZERO_BASED != 0 && iova != 0;
    if unknown || remote_only || zero_based { Err(Status::INVAL) } else { Ok(()) }
}

fn check_range(iova: u64, map: &Translation) -> Result<(), Status> {
    if map.is_identity() || iova.checked_add(map.len() - 1).is_some() {
        Ok(())
    } else {
        Err(Status::INVAL)
    }
}
