//! Translations without host addresses: what outlives the process that maps a guest's memory.
//!
//! A translation was resolved once, from lists that the guest may have given to other uses since.
//! So what is saved is not where the lists are but what they said: the guest addresses of the
//! pages, in runs. Whoever loads it resolves them in a map of the same guest's memory, with the
//! checks and the charges of a page list that a command brings.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::page_list::{Builder, PageList};
use super::space::{AddressSpace, Region};
use super::translation::{Pages, Translation};
use super::{Fault, HostPtr, Ring, host};

/// Pages that follow each other: the first one's guest address, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Run {
    addr: u64,
    pages: u32,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMap {
    /// Offset of the first byte in the first page.
    first: u64,
    len: u64,
    shift: u8,
    /// `None`: all of the guest's memory, by guest physical addresses.
    runs: Option<Vec<Run>>,
}

/// Where the pages of a translation are in the guest.
struct Finder<'a> {
    regions: &'a [Region],
    /// The region that the last page was in.
    last: usize,
    page: u64,
    runs: Vec<Run>,
}

impl Finder<'_> {
    /// Takes in the pages of `bytes` bytes from `at` on that lie in one region: how many bytes.
    fn take(&mut self, at: HostPtr, bytes: u64) -> Option<u64> {
        let tried = std::iter::once(self.last).chain(0..self.regions.len());
        let (index, (addr, left)) =
            tried.into_iter().find_map(|n| Some((n, self.regions.get(n)?.guest_of(at)?)))?;
        self.last = index;
        let pages = left.min(bytes) / self.page;
        if pages == 0 {
            return None;
        }
        self.push(addr, u32::try_from(pages).ok()?);
        Some(pages * self.page)
    }

    fn push(&mut self, addr: u64, pages: u32) {
        if let Some(last) = self.runs.last_mut()
            && last.addr.checked_add(u64::from(last.pages) * self.page) == Some(addr)
            && let Some(sum) = last.pages.checked_add(pages)
        {
            last.pages = sum;
        } else {
            self.runs.push(Run { addr, pages });
        }
    }
}

impl SavedMap {
    /// Whether it is that of all of the guest's memory.
    #[must_use]
    pub const fn is_identity(&self) -> bool {
        self.runs.is_none()
    }

    /// The translation of the same pages in `space`.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn load(&self, space: &AddressSpace) -> Result<Arc<Translation>, Fault> {
        let Some(runs) = &self.runs else {
            return Ok(Arc::new(Translation::identity(space.clone())));
        };
        if self.len == 0 {
            return Ok(Translation::empty());
        }
        let pages = runs.iter().map(|run| u64::from(run.pages)).sum::<u64>();
        let shape = PageList {
            addr: runs.first().map_or(0, |run| run.addr),
            npages: u32::try_from(pages).map_err(|_| Fault::Shape)?,
            offset: u32::try_from(self.first).map_err(|_| Fault::Shape)?,
            page_shift: self.shift,
            levels: 0,
        };
        if runs.len() == 1 {
            return shape.resolve(space, self.len).map(Arc::new);
        }
        let pages = runs.iter().flat_map(|run| {
            (0..u64::from(run.pages))
                .map(move |n| n.checked_mul(1 << self.shift)?.checked_add(run.addr))
        });
        Builder::of_pages(&shape, space, self.len, pages).map(Arc::new)
    }
}

impl Translation {
    /// What is left of it without host addresses; `None` if it holds memory that is no guest's.
    #[must_use]
    pub fn save(&self) -> Option<SavedMap> {
        let (first, len, shift) = self.shape();
        let saved = |runs| SavedMap { first, len, shift, runs };
        let page = 1u64 << shift;
        let mut finder = Finder { regions: self.regions(), last: 0, page, runs: Vec::new() };
        match self.pages() {
            Pages::Identity(_) => return Some(saved(None)),
            Pages::Flat(base) => {
                let bytes = first.checked_add(len)?.checked_next_multiple_of(page)?;
                let mut done = 0;
                while done < bytes {
                    done += finder.take(base.add(host(done)), bytes - done)?;
                }
            }
            Pages::Table(table) => {
                for at in table {
                    finder.take(*at, page)?;
                }
            }
        }
        Some(saved(Some(finder.runs)))
    }
}

impl Ring {
    /// See [`Translation::save`].
    #[must_use]
    pub fn save(&self) -> Option<SavedMap> {
        self.map().save()
    }

    /// The ring in the same pages.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn load(saved: &SavedMap, space: &AddressSpace) -> Result<Self, Fault> {
        saved.load(space).map(Self::new)
    }

    /// One without memory: it reads zeroes, and what is written is dropped.
    #[must_use]
    pub fn nowhere() -> Self {
        Self::new(Translation::empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> AddressSpace {
        AddressSpace::anonymous(&[(0, 1 << 20), (16 << 20, 1 << 20)]).unwrap()
    }

    /// Bytes that tell where they are.
    fn mark(space: &AddressSpace, addr: u64) {
        Ring::page(space, addr).unwrap().store_u32(8, u32::try_from(addr >> 12).unwrap());
    }

    fn marks(map: Arc<Translation>) -> Vec<u32> {
        let ring = Ring::new(map);
        (0..ring.len() >> 12).map(|page| ring.load_u32((page << 12) + 8)).collect()
    }

    #[test]
    fn pages_are_those_that_the_lists_named_wherever_they_lie() {
        let (old, new) = (space(), space());
        let pages = [5u64, 6, 7, 4096, 4097, 3, 3, 255];
        for &page in &pages {
            mark(&old, page << 12);
            mark(&new, page << 12);
        }
        let list = 0x10_000u64;
        let ring = Ring::page(&old, list).unwrap();
        for (n, page) in pages.iter().enumerate() {
            ring.write(n as u64 * 8, &(page << 12).to_le_bytes());
        }
        let shape = PageList { addr: list, npages: 8, page_shift: 12, levels: 1, offset: 0 };
        let map = Arc::new(shape.resolve(&old, 8 << 12).unwrap());
        let expected: Vec<u32> = pages.map(|page| u32::try_from(page).unwrap()).into();
        assert_eq!(marks(map.clone()), expected);
        let saved = map.save().unwrap();
        assert_eq!(saved.runs.as_ref().unwrap().len(), 5, "runs of 3, 2, 1, 1, 1");
        assert_eq!(marks(saved.load(&new).unwrap()), expected);
        assert_eq!(saved.load(&new).unwrap().save().unwrap(), saved);
    }

    #[test]
    fn one_piece_stays_one_and_all_memory_is_all_memory() {
        let (old, new) = (space(), space());
        let shape = PageList { addr: 0x3000, npages: 9, offset: 100, page_shift: 12, levels: 0 };
        let saved = shape.resolve(&old, 30_000).unwrap().save().unwrap();
        assert_eq!(saved.runs.as_ref().unwrap().len(), 1);
        let map = saved.load(&new).unwrap();
        assert_eq!((map.len(), map.mappings()), (30_000, 1));
        let all = Translation::identity(old).save().unwrap();
        assert!(all.is_identity() && all.load(&new).unwrap().is_identity());
        assert_eq!(Translation::empty().save().unwrap().load(&new).unwrap().len(), 0);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let space = space();
        let run = |addr, pages| Run { addr, pages };
        let saved = |first, len, shift, runs| SavedMap { first, len, shift, runs: Some(runs) };
        for (saved, why) in [
            (saved(0, 4096, 12, vec![]), "no page"),
            (saved(0, 8192, 12, vec![run(0, 1)]), "too few pages"),
            (saved(4096, 1, 12, vec![run(0, 2)]), "an offset beyond a page"),
            (saved(0, 1, 64, vec![run(0, 1)]), "such pages"),
            (saved(0, 1, 12, vec![run(1, 1)]), "an odd address"),
            (saved(0, 1, 12, vec![run(2 << 20, 1)]), "no memory"),
            (saved(0, 8192, 12, vec![run(0, 1), run(!4095, 1)]), "the last address"),
            (saved(0, 8192, 12, vec![run(0, u32::MAX), run(0, u32::MAX)]), "too many pages"),
            (saved(u64::MAX, u64::MAX, 12, vec![run(0, 1), run(0, 1)]), "all addresses"),
        ] {
            assert!(saved.load(&space).is_err(), "{why}");
        }
    }
}
