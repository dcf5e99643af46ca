//! The memory of one guest: a sorted set of regions, each a host mapping at a guest address.
//!
//! A space is a snapshot. When memory is plugged or unplugged the front end makes a new one; translations made from the old
//! one keep the mappings that they use alive until the engine has let go of them.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use vm_memory::mmap::MmapRegion;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

use super::HostPtr;
use super::tables::{Charge, Tables};
use super::vanish::Watch;

/// One mapping of guest memory.
#[derive(Clone)]
pub struct Region {
    start: u64,
    len: u64,
    /// Ends before the mapping does.
    watch: Option<Arc<Watch>>,
    mapping: Arc<MmapRegion<()>>,
}

impl Region {
    fn new(region: &GuestRegionMmap<()>) -> Self {
        let mapping = region.get_mmap();
        // No reference to the mapping is made here, only its address and size are taken.
        let watch = Watch::new(HostPtr(mapping.as_ptr()), mapping.size()).map(Arc::new);
        Self { start: region.start_addr().0, len: region.len(), watch, mapping }
    }

    /// Whether both are the same host mapping (a region that was unplugged and plugged again is another).
    #[must_use]
    pub fn same_mapping(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    /// The file behind a host address of this mapping, and the offset in it.
    pub(super) fn file_of(&self, at: HostPtr) -> Option<(BorrowedFd<'_>, u64)> {
        let within = at.addr().checked_sub(self.mapping.as_ptr().addr())?;
        let file = self.mapping.file_offset().filter(|_| within < self.mapping.size())?;
        Some((file.file().as_fd(), file.start() + within as u64))
    }

    pub(super) fn host(&self, offset: u64) -> Option<HostPtr> {
        let offset = usize::try_from(offset).ok().filter(|_| offset < self.len)?;
        Some(HostPtr(self.mapping.as_ptr()).add(offset))
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}+{:#x})", self.start, self.len)
    }
}

/// A snapshot of a guest's memory map. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct AddressSpace {
    regions: Arc<[Region]>,
    tables: Arc<Tables>,
}

impl AddressSpace {
    /// The space of a vhost-user memory table, or of test memory (`GuestMemoryMmap::from_ranges`).
    #[must_use]
    pub fn new(map: &GuestMemoryMmap<()>) -> Self {
        Self::default().successor(map)
    }

    /// The space that follows this one: mappings that stay are the same regions, and the tables of both count together.
    #[must_use]
    pub fn successor(&self, map: &GuestMemoryMmap<()>) -> Self {
        let same = |region: &GuestRegionMmap<()>| {
            let (mine, _) = self.find(region.start_addr().0)?;
            let stays = Arc::ptr_eq(&mine.mapping, &region.get_mmap())
                && mine.start == region.start_addr().0;
            stays.then(|| mine.clone())
        };
        let mut regions: Vec<Region> =
            map.iter().map(|region| same(region).unwrap_or_else(|| Region::new(region))).collect();
        regions.sort_by_key(|region| region.start);
        let space = Self { regions: regions.into(), tables: Arc::clone(&self.tables) };
        space.tables.allow(space.bytes());
        space
    }

    /// Whether all of the memory may vanish without harm (see [`super::vanished`]).
    #[must_use]
    pub fn guarded(&self) -> bool {
        self.regions.iter().all(|region| region.watch.is_some())
    }

    /// Memory for a translation's table of so many bytes.
    pub(super) fn charge(&self, bytes: u64) -> Option<Charge> {
        Charge::take(&self.tables, bytes)
    }

    /// A space of anonymous memory, for tests and tools: `(guest address, length)` each.
    ///
    /// # Errors
    /// The host could not map that much memory, or the ranges overlap.
    pub fn anonymous(ranges: &[(u64, usize)]) -> Result<Self, vm_memory::mmap::FromRangesError> {
        let ranges: Vec<_> =
            ranges.iter().map(|&(start, len)| (GuestAddress(start), len)).collect();
        Ok(Self::new(&GuestMemoryMmap::from_ranges(&ranges)?))
    }

    /// The regions, by ascending guest address.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Whether some of the memory is gone for good, such as by truncation of its file (see [`super::vanished`]).
    #[must_use]
    pub fn vanished(&self) -> bool {
        self.regions.iter().filter_map(|region| region.watch.as_deref()).any(Watch::gone)
    }

    /// How much memory the guest has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.len).sum()
    }

    /// Whether `region`'s mapping is part of this space.
    #[must_use]
    pub fn contains(&self, region: &Region) -> bool {
        self.find(region.start).is_some_and(|(mine, _)| mine.same_mapping(region))
    }

    /// The region that holds `addr`, and the offset in it.
    pub(super) fn find(&self, addr: u64) -> Option<(&Region, u64)> {
        let index = self.regions.partition_point(|region| region.start <= addr).checked_sub(1)?;
        let region = self.regions.get(index)?;
        let offset = addr - region.start;
        (offset < region.len).then_some((region, offset))
    }

    /// Whether `len` bytes from `addr` on are all guest memory.
    #[must_use]
    pub fn covers(&self, mut addr: u64, mut len: u64) -> bool {
        while len > 0 {
            let Some((region, offset)) = self.find(addr) else { return false };
            let here = (region.len - offset).min(len);
            len -= here;
            if len == 0 {
                return true;
            }
            match addr.checked_add(here) {
                Some(next) => addr = next,
                None => return false,
            }
        }
        true
    }

    /// The host address of `addr` and how many bytes follow it contiguously, at most `max`.
    pub(super) fn run(&self, addr: u64, max: u64) -> Option<(HostPtr, u64)> {
        let (region, offset) = self.find(addr)?;
        Some((region.host(offset)?, (region.len - offset).min(max)))
    }
}
