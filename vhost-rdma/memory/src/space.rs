//! The memory of one guest: a sorted set of regions, each a host mapping at a guest address.
//!
//! A space is a snapshot. When memory is plugged or unplugged the front end makes a new one;
//! translations made from the old one keep the mappings that they use alive until the engine has
//! let go of them.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestUsize, MemoryRegionAddress, VolatileSlice,
};

use super::account::Account;
use super::mapping::{Mapping, MappingError};
use super::tables::{TableCharge, Tables};
use super::{HostPtr, host};

/// Why regions make no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpaceError {
    /// A region ends beyond the last address.
    #[error("a region at {0:#x} wraps around the end of addresses")]
    Wraps(u64),
    /// Two regions share an address.
    #[error("the region at {0:#x} overlaps another")]
    Overlap(u64),
    /// There is no such region.
    #[error("there is no region of that length at {0:#x}")]
    NotThere(u64),
}

/// One mapping of guest memory at its guest address.
#[derive(Clone)]
pub struct Region {
    start: u64,
    /// The mapping's own: a look at thousands of regions is a look at each one's mark.
    mark: Option<&'static AtomicBool>,
    mapping: Arc<Mapping>,
}

/// What is gone of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Nothing.
    Nothing,
    /// What might go ([`Mapping::loose`]).
    Loose,
    /// Something else.
    Vital,
}

impl Region {
    /// A mapping at `start`.
    ///
    /// # Errors
    /// [`SpaceError::Wraps`] if it ends beyond the last address.
    pub fn new(start: u64, mapping: Arc<Mapping>) -> Result<Self, SpaceError> {
        start.checked_add(mapping.len()).ok_or(SpaceError::Wraps(start))?;
        Ok(Self { start, mark: mapping.mark(), mapping })
    }

    /// The first guest address.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.mapping.len()
    }

    /// Whether both are the same host mapping (a region that was unplugged and plugged again is
    /// another).
    #[must_use]
    pub fn same_mapping(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    /// What tells its mapping from all others that there are.
    pub(super) fn mapping_id(&self) -> usize {
        Arc::as_ptr(&self.mapping).addr()
    }

    /// The file behind it, and the offset of its first byte there.
    #[must_use]
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.mapping.file()
    }

    /// The file behind a host address of this mapping, and the offset in it.
    pub(super) fn file_of(&self, at: HostPtr) -> Option<(BorrowedFd<'_>, u64)> {
        let within = at.addr().checked_sub(self.mapping.start().addr())? as u64;
        let (file, offset) = self.mapping.file().filter(|_| within < self.bytes())?;
        Some((file, offset + within))
    }

    /// The host addresses that it takes.
    pub(super) fn host_range(&self) -> std::ops::Range<usize> {
        let start = self.mapping.start().addr();
        start..start + host(self.bytes())
    }

    /// The guest address of a host address of this mapping, and the bytes from there to its end.
    pub(super) fn guest_of(&self, at: HostPtr) -> Option<(u64, u64)> {
        let within = at.addr().checked_sub(self.mapping.start().addr())? as u64;
        (within < self.bytes()).then(|| (self.start + within, self.bytes() - within))
    }

    fn gone(&self) -> bool {
        self.mark.is_some_and(|mark| mark.load(Ordering::Acquire))
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(super) fn host(&self, offset: u64) -> Option<HostPtr> {
        (offset < self.bytes()).then(|| self.mapping.start().add(host(offset)))
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}+{:#x})", self.start, self.bytes())
    }
}

/// So the queue library walks the same memory, and holds the same mappings, as everyone else.
impl GuestMemoryRegion for Region {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.bytes()
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.start)
    }

    fn bitmap(&self) {}

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> vm_memory::GuestMemoryResult<VolatileSlice<'_, ()>> {
        let inside = offset.0.checked_add(count as u64).is_some_and(|end| end <= self.bytes());
        let start = self.mapping.start().add(host(offset.0));
        if !inside {
            return Err(GuestMemoryError::InvalidBackendAddress);
        }
        // SAFETY: `count` mapped bytes, kept alive by the mapping, to which the borrow is tied. A
        // slice is accessed as memory that others change.
        Ok(unsafe { VolatileSlice::new(start.0, count) })
    }
}

impl GuestMemoryRegionBytes for Region {}

/// Why there is no anonymous memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnonymousError {
    /// The host.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The ranges.
    #[error(transparent)]
    Space(#[from] SpaceError),
}

/// A snapshot of a guest's memory map. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct AddressSpace {
    regions: Arc<[Region]>,
    /// All of them together.
    bytes: u64,
    tables: Arc<Tables>,
}

impl GuestMemoryBackend for AddressSpace {
    type R = Region;

    fn num_regions(&self) -> usize {
        self.regions.len()
    }

    fn find_region(&self, addr: GuestAddress) -> Option<&Region> {
        self.find(addr.0).map(|(region, _)| region)
    }

    fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter()
    }
}

impl AddressSpace {
    /// A space without memory, which `account` pays for, and for those that follow it.
    #[must_use]
    pub fn of(account: Account) -> Self {
        Self { tables: Arc::new(Tables::of(account)), ..Self::default() }
    }

    /// The space that follows this one, of these regions; the tables of both count together.
    ///
    /// # Errors
    /// [`SpaceError::Overlap`].
    pub fn with(&self, mut regions: Vec<Region>) -> Result<Self, SpaceError> {
        regions.sort_by_key(|region| region.start);
        let overlap = |pair: &&[Region]| pair[0].start + pair[0].bytes() > pair[1].start;
        if let Some(pair) = regions.windows(2).find(overlap) {
            return Err(SpaceError::Overlap(pair[1].start));
        }
        let bytes = regions.iter().map(Region::bytes).sum();
        let space = Self { regions: regions.into(), bytes, tables: Arc::clone(&self.tables) };
        space.tables.allow(bytes);
        Ok(space)
    }

    /// The space that follows when a region is plugged in.
    ///
    /// # Errors
    /// [`SpaceError::Overlap`].
    pub fn plug(&self, region: Region) -> Result<Self, SpaceError> {
        self.with(self.regions.iter().cloned().chain([region]).collect())
    }

    /// The space that follows when the region of `len` bytes at `start` is unplugged.
    ///
    /// # Errors
    /// [`SpaceError::NotThere`].
    pub fn unplug(&self, start: u64, len: u64) -> Result<Self, SpaceError> {
        let is_it = |region: &Region| region.start == start && region.bytes() == len;
        if !self.region_at(start).is_some_and(is_it) {
            return Err(SpaceError::NotThere(start));
        }
        self.with(self.regions.iter().filter(|region| !is_it(region)).cloned().collect())
    }

    /// The region that begins at `start`.
    #[must_use]
    pub fn region_at(&self, start: u64) -> Option<&Region> {
        self.find(start).filter(|&(_, offset)| offset == 0).map(|(region, _)| region)
    }

    /// A place for a translation's table of so many bytes.
    pub(super) fn share(&self, bytes: u64) -> Option<TableCharge> {
        TableCharge::take(&self.tables, bytes)
    }

    /// What pays for all that is kept for this guest.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.tables.account()
    }

    /// A space of anonymous memory, for tests and tools: `(guest address, length)` each.
    ///
    /// # Errors
    /// The host could not map that much memory, or the ranges overlap.
    pub fn anonymous(ranges: &[(u64, usize)]) -> Result<Self, AnonymousError> {
        let regions = ranges.iter().map(|&(start, len)| {
            Ok(Region::new(start, Arc::new(Mapping::anonymous(len as u64)?))?)
        });
        let regions = regions.collect::<Result<_, AnonymousError>>()?;
        Ok(Self::default().with(regions)?)
    }

    /// The regions, by ascending guest address.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// What is gone for good, such as by truncation of its file (see [`super::vanished`]).
    #[must_use]
    pub fn missing(&self) -> Missing {
        let mut missing = Missing::Nothing;
        for region in self.regions.iter().filter(|region| region.gone()) {
            if !region.mapping.loose() {
                return Missing::Vital;
            }
            missing = Missing::Loose;
        }
        missing
    }

    /// Whether memory is gone that was not to go.
    #[must_use]
    pub fn vanished(&self) -> bool {
        self.missing() == Missing::Vital
    }

    /// The regions that are gone and might go.
    pub fn lost(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(|region| region.gone() && region.mapping.loose())
    }

    /// The same space without what may go.
    #[must_use]
    pub fn steady(&self) -> Self {
        let stays = |region: &&Region| !region.mapping.loose();
        let regions: Arc<[Region]> = self.regions.iter().filter(stays).cloned().collect();
        let bytes = regions.iter().map(Region::bytes).sum();
        Self { regions, bytes, tables: Arc::clone(&self.tables) }
    }

    /// How much memory the guest has.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether `region`'s mapping is part of this space.
    #[must_use]
    pub fn contains(&self, region: &Region) -> bool {
        self.find(region.start).is_some_and(|(mine, _)| mine.same_mapping(region))
    }

    /// Whether both are the same snapshot.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.regions, &other.regions)
    }

    /// The region that holds `addr`, and the offset in it.
    pub(super) fn find(&self, addr: u64) -> Option<(&Region, u64)> {
        let index = self.regions.partition_point(|region| region.start <= addr).checked_sub(1)?;
        let region = self.regions.get(index)?;
        let offset = addr - region.start;
        (offset < region.bytes()).then_some((region, offset))
    }

    /// Whether `len` bytes from `addr` on are all guest memory.
    #[must_use]
    pub fn covers(&self, mut addr: u64, mut len: u64) -> bool {
        while len > 0 {
            let Some((region, offset)) = self.find(addr) else { return false };
            let here = (region.bytes() - offset).min(len);
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
        Some((region.host(offset)?, (region.bytes() - offset).min(max)))
    }
}
