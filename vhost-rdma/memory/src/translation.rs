//! An immutable map from offsets of an object to host memory.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

use super::account::Charge;
use super::space::{AddressSpace, Region};
use super::tables::TableCharge;
use super::{Fault, HostPtr, PAGE_SIZE, host};

/// How the pages of a translation lie in host memory.
#[derive(Debug)]
pub(super) enum Pages {
    /// All in one piece, beginning here.
    Flat(HostPtr),
    /// One host address per page.
    Table(Box<[HostPtr]>),
    /// The whole guest: offsets are guest physical addresses, looked up at each use (MR_DMA).
    Identity(AddressSpace),
}

impl Pages {
    /// The cheapest form for these pages of `page` bytes.
    pub(super) fn from_table(table: Vec<HostPtr>, page: u64) -> Self {
        let contiguous =
            table.windows(2).all(|pair| pair[0].addr().wrapping_add(host(page)) == pair[1].addr());
        match table.first() {
            Some(&first) if contiguous => Self::Flat(first),
            _ => Self::Table(table.into()),
        }
    }
}

/// Bytes of a translation in one piece behind its counter, with its one region, as they are
/// allocated.
const KEPT: u64 = (size_of::<Translation>() + 16 + size_of::<Region>() + 2 * 16) as u64;

/// Where the bytes of a memory region or ring are. Offset 0 is its first byte.
#[derive(Debug)]
pub struct Translation {
    /// Offset of the first byte in the first page.
    first: u64,
    len: u64,
    shift: u8,
    pages: Pages,
    /// Keeps the mappings behind `pages` alive.
    regions: Vec<Region>,
    /// What its table counts for, and it itself.
    _share: Option<TableCharge>,
    _charge: Option<Charge>,
}

impl Translation {
    pub(super) const fn new(
        first: u64,
        len: u64,
        shift: u8,
        pages: Pages,
        regions: Vec<Region>,
    ) -> Self {
        Self { first, len, shift, pages, regions, _share: None, _charge: None }
    }

    /// With what was taken for its table, which becomes what it keeps: a table only if its pages
    /// are scattered, and a place for each region that they lie in, of which a guest may have
    /// hundreds. `None` if the guest has too much already.
    pub(super) fn shared(self, mut share: TableCharge) -> Option<Self> {
        let table = match &self.pages {
            Pages::Table(table) => size_of_val::<[HostPtr]>(table),
            Pages::Flat(_) | Pages::Identity(_) => 0,
        };
        // The first region is part of what every translation is counted for.
        let more = self.regions.get(1..).map_or(0, size_of_val::<[Region]>);
        share.settle((table + more) as u64).then(|| Self { _share: Some(share), ..self })
    }

    /// With what it takes without its table, which the guest's account pays for.
    pub(super) fn counted(self, space: &AddressSpace) -> Result<Self, Fault> {
        let charge = space.account().charge(KEPT).ok_or(Fault::Room)?;
        Ok(Self { _charge: Some(charge), ..self })
    }

    /// A single page of guest memory.
    pub(super) fn of_page(space: &AddressSpace, addr: u64) -> Result<Self, Fault> {
        if !addr.is_multiple_of(PAGE_SIZE) {
            return Err(Fault::Address);
        }
        let (region, offset) = space.find(addr).ok_or(Fault::Address)?;
        let (host, run) = space.run(addr, PAGE_SIZE).ok_or(Fault::Address)?;
        if run < PAGE_SIZE {
            return Err(Fault::Address);
        }
        debug_assert!(region.host(offset).is_some());
        let regions = vec![region.clone()];
        Ok(Self::new(0, PAGE_SIZE, 12, Pages::Flat(host), regions))
    }

    /// A translation in which offsets are guest physical addresses, for kernel DMA keys.
    #[must_use]
    pub fn identity(space: AddressSpace) -> Self {
        let regions = space.regions().to_vec();
        let pages = Pages::Identity(space);
        Self { first: 0, len: u64::MAX, shift: 12, pages, regions, _share: None, _charge: None }
    }

    /// The translation of no bytes: a region of length zero. There is one, whoever has it.
    #[must_use]
    pub fn empty() -> Arc<Self> {
        static EMPTY: OnceLock<Arc<Translation>> = OnceLock::new();
        let empty = || Arc::new(Self::new(0, 0, 12, Pages::Table(Box::default()), Vec::new()));
        Arc::clone(EMPTY.get_or_init(empty))
    }

    /// Offset of the first byte in the first page, bytes, and log2 of a page's.
    pub(super) const fn shape(&self) -> (u64, u64, u8) {
        (self.first, self.len, self.shift)
    }

    pub(super) const fn pages(&self) -> &Pages {
        &self.pages
    }

    pub(super) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether it holds no byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this is a map of the whole guest.
    #[must_use]
    pub const fn is_identity(&self) -> bool {
        matches!(self.pages, Pages::Identity(_))
    }

    /// How many mappings it uses.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.regions.len()
    }

    /// Whether every mapping it uses is still part of `space`.
    #[must_use]
    pub fn lives_in(&self, space: &AddressSpace) -> bool {
        self.regions.iter().all(|region| space.contains(region))
    }

    /// The file behind a host address, and the offset in it.
    pub(super) fn file_of(&self, at: HostPtr) -> Option<(BorrowedFd<'_>, u64)> {
        self.regions.iter().find_map(|region| region.file_of(at))
    }

    /// Whether `len` bytes at `offset` can be accessed.
    #[must_use]
    #[inline]
    pub fn covers(&self, offset: u64, len: u64) -> bool {
        match &self.pages {
            Pages::Identity(space) => space.covers(offset, len),
            _ => offset <= self.len && len <= self.len - offset,
        }
    }

    /// Has the pages come that lie in memory of huge pages, for as long as `go_on` says so.
    ///
    /// The first touch of a page of 2 MiB takes a hundred times as long as that of a small one: as
    /// long as it takes to clear it. A worker that touched many of them would make all its guests
    /// wait. So they come here, on a thread that serves this guest only, when a command names them.
    /// Small pages come when they are touched.
    ///
    /// # Errors
    /// [`Fault::Room`] if the host has no page.
    pub fn populate(&self, mut go_on: impl FnMut() -> bool) -> Result<(), Fault> {
        let coarse = |region: &&Region| region.mapping().grain() > PAGE_SIZE;
        if self.is_identity() || !self.regions.iter().any(|region| coarse(&region)) {
            return Ok(());
        }
        // What came last: a list may name the same page any number of times.
        let (mut from, mut to) = (0, 0);
        let mut offset = 0;
        while offset < self.len && go_on() {
            let Some((at, run)) = self.run(offset, self.len - offset) else { break };
            let mut at = at.addr();
            let end = at + run;
            while at < end && go_on() {
                if (from..to).contains(&at) {
                    at = to;
                    continue;
                }
                let holds = |region: &&Region| region.host_range().contains(&at);
                let Some(region) = self.regions.iter().find(holds).filter(coarse) else { break };
                from = at;
                to = region.mapping().populate(at).map_err(|_| Fault::Room)?;
                at = to;
            }
            offset += run as u64;
        }
        Ok(())
    }

    /// The host address of `offset` and the number of bytes that follow contiguously, at most `max`
    /// (≥ 1).
    #[inline]
    pub(super) fn run(&self, offset: u64, max: u64) -> Option<(HostPtr, usize)> {
        let (start, run) = match &self.pages {
            Pages::Identity(space) => space.run(offset, max)?,
            _ if offset >= self.len => return None,
            Pages::Flat(base) => {
                (base.add(host(self.first + offset)), (self.len - offset).min(max))
            }
            Pages::Table(table) => self.table_run(table, offset, max)?,
        };
        Some((start, host(run)))
    }

    /// Has the processor fetch the bytes at an offset into the cache, without waiting for them. A
    /// hint: nothing is read, and an address that is not mapped is no fault.
    #[inline]
    pub(super) fn fetch(&self, offset: u64) {
        #[cfg(target_arch = "x86_64")]
        if let Some((host, _)) = self.run(offset, 1) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: the instruction has no effect but on caches, whatever the address (Intel
            // SDM, PREFETCHh).
            unsafe { _mm_prefetch::<_MM_HINT_T0>(host.0.cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }

    #[inline]
    fn table_run(&self, table: &[HostPtr], offset: u64, max: u64) -> Option<(HostPtr, u64)> {
        let at = self.first + offset;
        let page = 1u64 << self.shift;
        let mut index = host(at >> self.shift);
        let within = at & (page - 1);
        let start = table.get(index)?.add(host(within));
        let want = (self.len - offset).min(max);
        let mut run = page - within;
        while run < want {
            index += 1;
            match table.get(index) {
                Some(next) if next.addr() == start.addr().wrapping_add(host(run)) => run += page,
                _ => break,
            }
        }
        Some((start, run.min(want)))
    }
}
