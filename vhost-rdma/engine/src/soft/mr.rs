//! Memory regions, memory windows, and the keys that name both.
//!
//! Every access of every work request passes [`MrTable::segment`]: key, state, protection domain,
//! rights and range, in that order, the range by subtraction so that nothing wraps
//! (docs/virtio-rdma.md §6.2). Fast registration and windows, which change keys from work requests,
//! are in `fastreg` and `binding`.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{Sge, access};

use super::numbers::{Numbers, Random};
use super::window::{SavedWindow, Window};
use crate::memory::{AddressSpace, Borrowed, SavedMap, Translation};
use crate::nic::Status;
use crate::nic::owned_numbers::OwnedNumbers;
use crate::nic::saved::BadState;
use crate::nic::shards::Shards;
use crate::nic::verb::Rereg;

/// Rights that a registration may ask for.
const KNOWN: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::MW_BIND
    | access::ZERO_BASED
    | access::FLUSH_GLOBAL
    | access::MIRRORED;

/// Why a key does not open what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Denied;

/// A memory region.
#[derive(Debug)]
pub(super) struct Mr {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) key: u32,
    pub(super) access: u32,
    pub(super) iova: u64,
    pub(super) len: u64,
    /// `None`: a fast-register region in state invalid, or one whose guest memory is gone.
    pub(super) map: Option<Arc<Translation>>,
    /// Pages of a fast-register region; 0 for others.
    pub(super) fast_pages: u32,
    /// Windows bound to it.
    pub(super) windows: u32,
    /// When its key came to mean what it means ([`MrTable::stamp`]).
    pub(super) since: u64,
}

impl Mr {
    fn save(&self) -> Option<SavedRegion> {
        let Self { ctx, pdn, key, access, iova, len, fast_pages, since, .. } = *self;
        let map = match &self.map {
            Some(map) => Some(map.save()?),
            None => None,
        };
        Some(SavedRegion { ctx, pdn, key, access, iova, len, map, fast_pages, since })
    }

    fn load(saved: &SavedRegion, map: Option<Arc<Translation>>) -> Result<Self, BadState> {
        let SavedRegion { ctx, pdn, key, access, iova, len, fast_pages, since, .. } = *saved;
        let inside = map.as_ref().is_none_or(|map| len <= map.len());
        if !inside || iova.checked_add(len.saturating_sub(1)).is_none() {
            return Err(BadState::Content("a region of such a length"));
        }
        Ok(Self { ctx, pdn, key, access, iova, len, map, fast_pages, windows: 0, since })
    }

    /// Bytes that count against the NIC's limit: what the guest chose to register, not the whole
    /// guest of a DMA key.
    pub(super) fn charged(&self) -> u64 {
        let free = self.fast_pages > 0 || self.map.as_ref().is_some_and(|map| map.is_identity());
        if free { 0 } else { self.len }
    }

    /// Whether its owner keeps the memory ([`super::mirror`]).
    pub(super) const fn is_mirrored(&self) -> bool {
        self.access & access::MIRRORED != 0
    }

    /// Offset of an access in the region, if it lies inside.
    #[inline]
    pub(super) fn offset(&self, addr: u64, len: u64) -> Option<u64> {
        let offset = addr.checked_sub(self.iova)?;
        (offset <= self.len && len <= self.len - offset).then_some(offset)
    }
}

/// What a key names.
#[derive(Debug)]
pub(super) enum Keyed {
    Region(Mr),
    Window(Window),
}

/// What is saved of a region.
#[derive(Debug, Serialize, Deserialize)]
struct SavedRegion {
    ctx: u32,
    pdn: u32,
    key: u32,
    access: u32,
    iova: u64,
    len: u64,
    map: Option<SavedMap>,
    fast_pages: u32,
    since: u64,
}

/// What is saved of all keys. Windows come behind the regions that they show.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedKeys {
    changes: u64,
    regions: Vec<SavedRegion>,
    windows: Vec<SavedWindow>,
    resting: Vec<u32>,
}

impl SavedKeys {
    /// How many keys there are.
    pub(super) const fn len(&self) -> usize {
        self.regions.len() + self.windows.len()
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
    /// The QP on which a peer's request arrived; 0 for the NIC's own work requests, which no window
    /// admits.
    pub(super) qpn: u32,
    pub(super) key: u32,
    pub(super) addr: u64,
    pub(super) len: u32,
    /// Rights that the region must give; 0 for a local read, which is always allowed.
    pub(super) rights: u32,
}

impl Access {
    /// What an element of a queue pair's own request or receive names.
    #[inline]
    pub(super) const fn own(pdn: u32, sge: &Sge, rights: u32) -> Self {
        let (key, addr, len) = (sge.lkey.get(), sge.addr.get(), sge.length.get());
        Self { pdn, qpn: 0, key, addr, len, rights }
    }
}

/// The keys of one NIC.
#[derive(Debug, Default)]
pub(super) struct MrTable {
    pub(super) by_number: Shards<Keyed>,
    /// The same, in an order that can be walked.
    pub(super) numbers: OwnedNumbers,
    /// Regions and windows in each domain.
    users: FxHashMap<u32, u32>,
    random: Numbers,
    regions: usize,
    bytes: u64,
    /// Regions whose owners keep the memory.
    pub(super) mirrors: usize,
    /// How often a key changed its meaning.
    changes: u64,
    /// What keys for all of memory open.
    pub(super) all: WholeGuest,
}

/// All of a guest's memory, as every key for it opens it: one map however many keys there are,
/// since it holds on to each of the guest's regions.
#[derive(Debug, Default)]
pub(super) struct WholeGuest(Option<(AddressSpace, Arc<Translation>)>);

impl WholeGuest {
    /// The map of this space.
    pub(super) fn of(&mut self, space: &AddressSpace) -> Arc<Translation> {
        if let Some((_, map)) = self.0.as_ref().filter(|(of, _)| of.is_same(space)) {
            return Arc::clone(map);
        }
        let map = Arc::new(Translation::identity(space.clone()));
        self.0 = Some((space.clone(), Arc::clone(&map)));
        map
    }
}

impl MrTable {
    /// Number of regions.
    pub(super) const fn len(&self) -> usize {
        self.regions
    }

    /// Number of windows.
    pub(super) fn windows(&self) -> usize {
        self.by_number.len() - self.regions
    }

    /// Registered bytes of all regions.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A new random key.
    pub(super) fn new_key(&mut self, random: &mut dyn Random) -> Result<u32, Status> {
        let number = self.random.take(random).ok_or(Status::NOMEM)?;
        Ok(number << 8 | (random.next_u32() & 0xff))
    }

    /// Registers; the key is new and random.
    pub(super) fn register(
        &mut self,
        request: Registration,
        random: &mut dyn Random,
    ) -> Result<u32, Status> {
        check_access(request.access, request.iova)?;
        check_range(request.iova, &request.map)?;
        let Registration { ctx, pdn, access, iova, map } = request;
        // Two halves.
        if access & access::MIRRORED != 0 && !map.len().is_multiple_of(2) {
            return Err(Status::INVAL);
        }
        // Behind all checks: the number is in use from here on.
        let key = self.new_key(random)?;
        let mr = Mr {
            ctx,
            pdn,
            key,
            access,
            iova,
            len: map.len(),
            map: Some(map),
            fast_pages: 0,
            windows: 0,
            since: self.change(),
        };
        self.insert(mr);
        Ok(key)
    }

    /// See [`crate::nic::saved`]; `None` if a region's memory is no guest's.
    pub(super) fn save(&self) -> Option<SavedKeys> {
        let (mut regions, mut windows) = (Vec::new(), Vec::new());
        let mut walk = self.numbers.all().walk();
        while let Some(number) = walk.next(self.numbers.all()) {
            match self.by_number.get(&number)? {
                Keyed::Region(mr) => regions.push(mr.save()?),
                Keyed::Window(window) => windows.push(window.save()),
            }
        }
        let resting = self.random.resting().collect();
        Some(SavedKeys { changes: self.changes, regions, windows, resting })
    }

    /// What was saved, in this memory.
    pub(super) fn load(saved: SavedKeys, space: &AddressSpace) -> Result<Self, BadState> {
        let twice = BadState::Content("the same key twice");
        let mut table = Self { changes: saved.changes, ..Self::default() };
        for region in &saved.regions {
            let map = table.load_map(region.map.as_ref(), space)?;
            let mr = Mr::load(region, map)?;
            if !table.random.claim(mr.key >> 8) {
                return Err(twice);
            }
            table.insert(mr);
        }
        for window in &saved.windows {
            let window = Window::load(window);
            if !table.random.claim(window.key >> 8) {
                return Err(twice);
            }
            if let Some(region) = window.region() {
                let shown = table.get_mut(region);
                shown.ok_or(BadState::Content("a window without its region"))?.windows += 1;
            }
            table.join(window.key >> 8, (window.ctx, window.pdn));
            table.by_number.insert(window.key >> 8, Keyed::Window(window));
        }
        saved.resting.into_iter().for_each(|number| table.random.rest(number));
        Ok(table)
    }

    fn load_map(
        &mut self,
        saved: Option<&SavedMap>,
        space: &AddressSpace,
    ) -> Result<Option<Arc<Translation>>, BadState> {
        match saved {
            Some(map) if map.is_identity() => Ok(Some(self.all.of(space))),
            Some(map) => Ok(Some(map.load(space)?)),
            None => Ok(None),
        }
    }

    pub(super) fn insert(&mut self, mr: Mr) {
        self.bytes += mr.charged();
        self.regions += 1;
        self.mirrors += usize::from(mr.is_mirrored());
        self.join(mr.key >> 8, (mr.ctx, mr.pdn));
        self.by_number.insert(mr.key >> 8, Keyed::Region(mr));
    }

    /// A number is in use, in a domain of a context.
    pub(super) fn join(&mut self, number: u32, (ctx, pdn): (u32, u32)) {
        self.numbers.insert(number, ctx);
        *self.users.entry(pdn).or_default() += 1;
    }

    fn leave(&mut self, pdn: u32) {
        if let Some(users) = self.users.get_mut(&pdn) {
            *users -= 1;
            if *users == 0 {
                self.users.remove(&pdn);
            }
        }
    }

    /// The context of a number, and its present key.
    pub(super) fn owner(&self, number: u32) -> Option<(u32, u32)> {
        self.by_number.get(&number).map(|keyed| match keyed {
            Keyed::Region(mr) => (mr.ctx, mr.key),
            Keyed::Window(window) => (window.ctx, window.key),
        })
    }

    /// Changes rights, domain or memory of a region; the key stays. The translation that it had.
    pub(super) fn reregister(
        &mut self,
        key: u32,
        change: Rereg,
    ) -> Result<Option<Arc<Translation>>, Status> {
        let since = self.change();
        let mr = self.get_mut(key).ok_or(Status::NOENT)?;
        if mr.fast_pages > 0 || mr.map.as_ref().is_some_and(|map| map.is_identity()) {
            return Err(Status::INVAL);
        }
        if mr.windows > 0 {
            return Err(Status::BUSY);
        }
        // A shadow is that of one memory.
        let turns = change.access.is_some_and(|to| (to ^ mr.access) & access::MIRRORED != 0);
        if turns || (mr.is_mirrored() && change.memory.is_some()) {
            return Err(Status::INVAL);
        }
        let iova = change.memory.as_ref().map_or(mr.iova, |(iova, _)| *iova);
        check_access(change.access.unwrap_or(mr.access), iova)?;
        if let Some((iova, map)) = &change.memory {
            check_range(*iova, map)?;
        }
        let before = mr.charged();
        mr.access = change.access.unwrap_or(mr.access);
        let (from, to) = (mr.pdn, change.pdn.unwrap_or(mr.pdn));
        mr.pdn = to;
        let mut old = None;
        if let Some((iova, map)) = change.memory {
            mr.iova = iova;
            mr.len = map.len();
            old = mr.map.replace(map);
            mr.since = since;
        }
        let after = mr.charged();
        self.bytes = self.bytes - before + after;
        *self.users.entry(to).or_default() += 1;
        self.leave(from);
        Ok(old)
    }

    /// The region of a key.
    #[inline]
    pub(super) fn get(&self, key: u32) -> Option<&Mr> {
        match self.by_number.get(&(key >> 8)) {
            Some(Keyed::Region(mr)) if mr.key == key => Some(mr),
            _ => None,
        }
    }

    pub(super) fn get_mut(&mut self, key: u32) -> Option<&mut Mr> {
        match self.by_number.get_mut(&(key >> 8)) {
            Some(Keyed::Region(mr)) if mr.key == key => Some(mr),
            _ => None,
        }
    }

    /// The present key of the region or window whose key once was `key`. Binds and fast
    /// registrations change the low 8 bits as they execute; who frees the object knows at most what
    /// it asked for, not what was flushed.
    pub(super) fn present_key(&self, key: u32) -> Option<u32> {
        self.by_number.get(&(key >> 8)).map(|keyed| match keyed {
            Keyed::Region(mr) => mr.key,
            Keyed::Window(window) => window.key,
        })
    }

    /// The time of a change, in changes.
    pub(super) const fn change(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }

    /// Grows when what the key opens becomes another piece of memory, and so does the sum over
    /// several keys: a message that takes several turns compares it, and ends rather than mix the
    /// old memory with the new (docs/virtio-rdma.md §6.2).
    pub(super) fn stamp(&self, key: u32) -> u64 {
        match self.by_number.get(&(key >> 8)) {
            Some(Keyed::Region(mr)) => mr.since,
            // As long as it is bound its region stays what it is.
            Some(Keyed::Window(window)) => window.since,
            None => 0,
        }
    }

    /// [`Self::stamp`] of all elements that name memory.
    pub(super) fn stamp_of(&self, sges: &[Sge]) -> u64 {
        let named = sges.iter().filter(|sge| sge.length.get() != 0);
        named.fold(0, |sum, sge| sum.wrapping_add(self.stamp(sge.lkey.get())))
    }

    /// Removes a region or a window.
    pub(super) fn remove(&mut self, key: u32) -> Option<Keyed> {
        let keyed = self.by_number.remove(&(key >> 8))?;
        let pdn = match &keyed {
            Keyed::Region(mr) => {
                self.bytes -= mr.charged();
                self.regions -= 1;
                self.mirrors -= usize::from(mr.is_mirrored());
                mr.pdn
            }
            Keyed::Window(window) => {
                self.unbound(window);
                window.pdn
            }
        };
        self.leave(pdn);
        self.numbers.remove(key >> 8);
        self.random.free(key >> 8);
        Some(keyed)
    }

    /// Whether a region or window lies in the domain.
    pub(super) fn uses_pd(&self, pdn: u32) -> bool {
        self.users.contains_key(&pdn)
    }

    /// Follows a change of the guest's memory: a region whose memory is gone opens nothing any
    /// more. How many mappings were looked at, and the translation that is left.
    pub(super) fn follow(
        &mut self,
        number: u32,
        space: &AddressSpace,
    ) -> (usize, Option<Arc<Translation>>) {
        let Some(Keyed::Region(mr)) = self.by_number.get_mut(&number) else { return (0, None) };
        let Some(map) = &mr.map else { return (0, None) };
        let mappings = map.mappings();
        if map.is_identity() {
            return (1, mr.map.replace(self.all.of(space)));
        }
        if map.lives_in(space) {
            return (mappings, None);
        }
        self.bytes -= mr.charged();
        mr.len = 0;
        (mappings, mr.map.take())
    }

    /// Has the processor fetch a key's entry; see `requester/fetch.rs`.
    #[inline]
    pub(super) fn touch(&self, key: u32) {
        std::hint::black_box(self.get(key).is_some());
    }

    /// The memory that an access names, if every check passes. `len` must not be 0: empty accesses
    /// are never checked.
    #[inline]
    pub(super) fn segment(&self, access: &Access) -> Result<Borrowed<'_>, Denied> {
        match self.by_number.get(&(access.key >> 8)) {
            Some(Keyed::Region(mr)) if mr.key == access.key && mr.pdn == access.pdn => {
                if access.rights & !mr.access != 0 {
                    return Err(Denied);
                }
                mr.segment(access.addr, access.len)
            }
            Some(Keyed::Window(window)) => self.window_segment(window, access),
            _ => Err(Denied),
        }
    }
}

impl Mr {
    /// The memory of a range whose rights have been checked.
    #[inline]
    pub(super) fn segment(&self, addr: u64, len: u32) -> Result<Borrowed<'_>, Denied> {
        let map = self.map.as_ref().ok_or(Denied)?;
        let offset = self.offset(addr, u64::from(len)).ok_or(Denied)?;
        if map.is_identity() && !map.covers(offset, u64::from(len)) {
            return Err(Denied);
        }
        Ok(Borrowed { map, offset, len })
    }
}

/// Whether rights make sense together.
pub(super) fn check_access(rights: u32, iova: u64) -> Result<(), Status> {
    let unknown = rights & !(KNOWN | access::OPTIONAL_MASK) != 0;
    // IBTA 10.6.3.1: who may write from afar may write locally.
    let remote_only = rights & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0
        && rights & access::LOCAL_WRITE == 0;
    let zero_based = rights & access::ZERO_BASED != 0 && iova != 0;
    if unknown || remote_only || zero_based { Err(Status::INVAL) } else { Ok(()) }
}

/// Whether the last address of a region is an address.
pub(super) fn check_range(iova: u64, map: &Translation) -> Result<(), Status> {
    if map.is_identity() || iova.checked_add(map.len().saturating_sub(1)).is_some() {
        Ok(())
    } else {
        Err(Status::INVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::PageList;
    use crate::shard::testing::driver::Lcg;

    /// A process may ask for what is refused as often as it likes, and nothing is kept of it.
    #[test]
    fn a_region_that_is_refused_takes_no_number() {
        let (mut table, mut random) = (MrTable::default(), Lcg(1));
        let space = AddressSpace::anonymous(&[(0, 4096)]).unwrap();
        let list = PageList { npages: 1, page_shift: 12, ..PageList::default() };
        let map = Arc::new(list.resolve(&space, 4095).unwrap());
        let rights = [access::LOCAL_WRITE | access::MIRRORED, access::REMOTE_WRITE, 1 << 30];
        for access in rights {
            let request = Registration { ctx: 1, pdn: 1, access, iova: 0, map: Arc::clone(&map) };
            assert_eq!(table.register(request, &mut random), Err(Status::INVAL), "{access:#x}");
            assert_eq!(table.random.known(), 0, "{access:#x}");
        }
    }
}
