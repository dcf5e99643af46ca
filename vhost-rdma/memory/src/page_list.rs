//! Page lists (docs/virtio-rdma.md §6.1): how a guest describes rings and memory regions.
//!
//! The walk is bounded by the number of pages that the list claims, which the caller has bounded by
//! what the object needs; list pages are copied out entry by entry and each is read once.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::fault::Fault;
use super::ring::Ring;
use super::space::{AddressSpace, Region};
use super::translation::{Pages, Translation};
use super::{HostPtr, PAGE_SIZE};

const ENTRIES: u64 = PAGE_SIZE / 8;
const MAX_LEVELS: u8 = 4;

/// A page list as a command carries it.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageList {
    /// First data page (levels 0) or root list page.
    pub addr: u64,
    /// Number of data pages.
    pub npages: u32,
    /// Offset of the first byte in the first page.
    pub offset: u32,
    /// log2 of the data page size, 12 to 30.
    pub page_shift: u8,
    /// Levels of list pages, 0 to 4.
    pub levels: u8,
}

impl PageList {
    /// Resolves the first `len` bytes that the list describes.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn resolve(&self, space: &AddressSpace, len: u64) -> Result<Translation, Fault> {
        self.check_shape(len)?;
        let page = 1u64 << self.page_shift;
        let first = u64::from(self.offset);
        let needed = (first + len).div_ceil(page);
        if self.levels == 0 {
            // The usual case of memory in one piece, without a table.
            if let Some(flat) = self.one_piece(space, len, needed) {
                return flat.counted(space);
            }
            let addr = |n: u64| n.checked_mul(page).and_then(|off| self.addr.checked_add(off));
            return Builder::of_pages(self, space, len, (0..needed).map(addr));
        }
        let share = space.share(needed.saturating_mul(8)).ok_or(Fault::Room)?;
        let mut builder = Builder::new(space, page);
        builder.tables.reserve(usize::try_from(needed.min(ENTRIES)).map_err(|_| Fault::Shape)?);
        builder.walk(self.addr, self.levels, needed)?;
        let Builder { tables, regions, .. } = builder;
        let pages = Pages::from_table(tables, page);
        let map = Translation::new(first, len, self.page_shift, pages, regions);
        map.shared(share).ok_or(Fault::Room)?.counted(space)
    }

    fn one_piece(&self, space: &AddressSpace, len: u64, needed: u64) -> Option<Translation> {
        let bytes = needed.checked_mul(1 << self.page_shift)?;
        let (region, _) = space.find(self.addr)?;
        let (host, run) = space.run(self.addr, bytes)?;
        let fits = run == bytes && self.addr.is_multiple_of(1 << self.page_shift);
        let first = u64::from(self.offset);
        fits.then(|| {
            Translation::new(first, len, self.page_shift, Pages::Flat(host), vec![region.clone()])
        })
    }

    /// The bytes that the list describes, if its shape makes sense at all.
    #[must_use]
    pub fn described_len(&self) -> Option<u64> {
        let shape_ok = (12..=30).contains(&self.page_shift) && self.levels <= MAX_LEVELS;
        let pages = shape_ok.then(|| u64::from(self.npages) << self.page_shift)?;
        pages.checked_sub(u64::from(self.offset)).filter(|&len| len > 0)
    }

    fn check_shape(&self, len: u64) -> Result<(), Fault> {
        let available = self.described_len().ok_or(Fault::Shape)?;
        // docs/virtio-rdma.md §6.1: what a tree holds.
        if self.levels > 0 && u64::from(self.npages) > ENTRIES.pow(u32::from(self.levels)) {
            return Err(Fault::Shape);
        }
        let offset_ok = u64::from(self.offset) < 1 << self.page_shift;
        if offset_ok && len > 0 && len <= available { Ok(()) } else { Err(Fault::Shape) }
    }
}

/// A plain array of page addresses in guest memory, as a fast registration names it
/// (docs/virtio-rdma.md §7.1, REG_MR).
#[derive(Clone, Copy, Debug)]
pub struct PageArray {
    /// Address of the first entry, a multiple of 8.
    pub addr: u64,
    /// Number of entries; the caller has bounded it.
    pub npages: u32,
    /// log2 of the page size, 12 to 30.
    pub page_shift: u8,
}

impl PageArray {
    /// Resolves `len` bytes whose first is at `iova` modulo the page size in the first page.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn resolve(&self, space: &AddressSpace, iova: u64, len: u64) -> Result<Translation, Fault> {
        if !(12..=30).contains(&self.page_shift) || !self.addr.is_multiple_of(8) {
            return Err(Fault::Shape);
        }
        let page = 1u64 << self.page_shift;
        let first = iova & (page - 1);
        let needed = first.checked_add(len).ok_or(Fault::Shape)?.div_ceil(page);
        if len == 0 || needed > u64::from(self.npages) {
            return Err(Fault::Shape);
        }
        let share = space.share(needed.saturating_mul(8)).ok_or(Fault::Room)?;
        let mut builder = Builder::new(space, page);
        for index in 0..needed {
            let entry = self.addr.checked_add(index * 8).ok_or(Fault::Address)?;
            builder.push(space.load_u64(entry)?)?;
        }
        let Builder { tables, regions, .. } = builder;
        let pages = Pages::from_table(tables, page);
        let map = Translation::new(first, len, self.page_shift, pages, regions);
        map.shared(share).ok_or(Fault::Room)?.counted(space)
    }
}

/// Regions that are looked through one by one.
const FEW: usize = 8;

pub(super) struct Builder<'a> {
    space: &'a AddressSpace,
    page: u64,
    tables: Vec<HostPtr>,
    regions: Vec<Region>,
    /// The same, where there are many.
    held: BTreeSet<usize>,
}

impl<'a> Builder<'a> {
    fn new(space: &'a AddressSpace, page: u64) -> Self {
        Self { space, page, tables: Vec::new(), regions: Vec::new(), held: BTreeSet::new() }
    }

    /// The first `len` bytes of these pages, which `shape` counts and tells the size of. An address
    /// that is none is `None`.
    pub(super) fn of_pages(
        shape: &PageList,
        space: &'a AddressSpace,
        len: u64,
        pages: impl Iterator<Item = Option<u64>>,
    ) -> Result<Translation, Fault> {
        shape.check_shape(len)?;
        let page = 1u64 << shape.page_shift;
        let first = u64::from(shape.offset);
        let needed = (first + len).div_ceil(page);
        let share = space.share(needed.saturating_mul(8)).ok_or(Fault::Room)?;
        let mut builder = Self::new(space, page);
        for addr in pages.take(usize::try_from(needed).map_err(|_| Fault::Shape)?) {
            builder.push(addr.ok_or(Fault::Address)?)?;
        }
        let Self { tables, regions, .. } = builder;
        let pages = Pages::from_table(tables, page);
        let map = Translation::new(first, len, shape.page_shift, pages, regions);
        map.shared(share).ok_or(Fault::Room)?.counted(space)
    }

    fn push(&mut self, addr: u64) -> Result<(), Fault> {
        if !addr.is_multiple_of(self.page) {
            return Err(Fault::Address);
        }
        let (region, offset) = self.space.find(addr).ok_or(Fault::Address)?;
        let (host, run) = self.space.run(addr, self.page).ok_or(Fault::Address)?;
        if run < self.page {
            return Err(Fault::Address);
        }
        debug_assert!(region.host(offset).is_some());
        if !self.holds(region) {
            self.regions.push(region.clone());
        }
        self.tables.push(host);
        Ok(())
    }

    /// Whether a region is among those that are held; it will be.
    fn holds(&mut self, region: &Region) -> bool {
        if self.regions.len() < FEW {
            return self.regions.iter().rev().any(|held| held.same_mapping(region));
        }
        // A guest may have hundreds, and name a page of another each time.
        if self.held.is_empty() {
            self.held = self.regions.iter().map(Region::mapping_id).collect();
        }
        !self.held.insert(region.mapping_id())
    }

    /// Reads the list page at `addr`, `level` levels above the data pages, until `needed` data
    /// pages are known.
    fn walk(&mut self, addr: u64, level: u8, needed: u64) -> Result<(), Fault> {
        let list = list_page(self.space, addr)?;
        let per_entry = ENTRIES.pow(u32::from(level) - 1);
        let here = (needed - self.tables.len() as u64).div_ceil(per_entry).min(ENTRIES);
        for index in 0..here {
            let entry = list.load_u64(index * 8);
            if level == 1 {
                self.push(entry)?;
            } else {
                self.walk(entry, level - 1, needed)?;
            }
        }
        Ok(())
    }
}

/// A page of a list as a ring of words, for as long as the list is walked.
fn list_page(space: &AddressSpace, addr: u64) -> Result<Ring, Fault> {
    Translation::of_page(space, addr).map(|page| Ring::new(Arc::new(page)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few and many: each region once, whatever the order of the pages.
    #[test]
    fn what_a_list_holds_is_held_once() {
        const PAGE: u64 = 4096;
        for count in [1, FEW as u64, FEW as u64 + 1, 200] {
            let pieces: Vec<(u64, usize)> = (0..=count).map(|n| (n << 20, 8192)).collect();
            let space = AddressSpace::anonymous(&pieces).unwrap();
            let list = Ring::page(&space, 0).unwrap();
            let named: Vec<u64> =
                (0..2 * count).map(|n| ((n % count + 1) << 20) + n / count * PAGE).collect();
            for (at, page) in (0u64..).zip(&named) {
                list.store_u32(at * 8, u32::try_from(*page).unwrap());
            }
            let npages = u32::try_from(named.len()).unwrap();
            let array = PageArray { addr: 0, npages, page_shift: 12 };
            let map = array.resolve(&space, 0, u64::from(npages) * PAGE).unwrap();
            assert_eq!(map.regions().len() as u64, count);
        }
    }
}
