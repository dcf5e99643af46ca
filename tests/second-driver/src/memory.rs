//! The guest's memory: one shared region, from which pages are given out and never taken back.
//!
//! Its address in the guest is neither 0 nor the address in this process, so that a mix-up is found
//! by the first command. Words that the device shares are accessed whole and aligned (DRV-WORD-1).
//! All access goes through `vm-memory`, which makes no references into memory that others write.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{
    AtomicAccess, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap,
};

use crate::error::{Error, Result};
use crate::layout::{LIST_PAGE_ENTRIES, PAGE, PAGE_SIZE, page_list};

/// Where the region lies in the guest.
pub(crate) const BASE: u64 = 0x1_0000_0000;

pub(crate) struct Memory {
    map: GuestMemoryMmap,
    file: OwnedFd,
    pub(crate) size: u64,
    free: Cell<u64>,
}

impl Memory {
    pub(crate) fn new(size: u64) -> Result<Self> {
        let size = size.next_multiple_of(PAGE_SIZE);
        let host = "guest memory";
        let file = memfd_create("second-driver", MemfdFlags::CLOEXEC).map_err(Error::host(host))?;
        ftruncate(&file, size).map_err(Error::host(host))?;
        let copy = FileOffset::new(File::from(file.try_clone().map_err(Error::host(host))?), 0);
        let length = usize::try_from(size).unwrap_or(usize::MAX);
        let range = (GuestAddress(BASE), length, Some(copy));
        let map = GuestMemoryMmap::from_ranges_with_files([range]).map_err(outside)?;
        Ok(Self { map, file, size, free: Cell::new(BASE) })
    }

    /// Whole pages of zeroes for `bytes` bytes.
    pub(crate) fn alloc(&self, bytes: u64) -> Result<u64> {
        let start = self.free.get();
        let end = start + bytes.next_multiple_of(PAGE_SIZE);
        if end > BASE + self.size {
            return Err(Error::Argument("the guest's memory is used up".to_owned()));
        }
        self.free.set(end);
        Ok(start)
    }

    pub(crate) fn load<T: AtomicAccess>(&self, addr: u64, order: Ordering) -> Result<T> {
        self.map.load(GuestAddress(addr), order).map_err(outside)
    }

    pub(crate) fn store<T: AtomicAccess>(&self, value: T, addr: u64) -> Result<()> {
        self.map.store(value, GuestAddress(addr), Ordering::Release).map_err(outside)
    }

    pub(crate) fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<()> {
        self.map.read_slice(bytes, GuestAddress(addr)).map_err(outside)
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) -> Result<()> {
        self.map.write_slice(bytes, GuestAddress(addr)).map_err(outside)
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The address in this process, in which vhost-user counts.
    pub(crate) fn host_address(&self, addr: u64) -> Result<u64> {
        let pointer = self.map.get_host_address(GuestAddress(addr)).map_err(outside)?;
        Ok(pointer.addr() as u64)
    }
}

fn outside(error: impl std::fmt::Display) -> Error {
    Error::Argument(format!("guest memory: {error}"))
}

/// Memory of pages in no order, as that of a program is, with their tree of list pages (6.1).
pub(crate) struct Scattered {
    pages: Vec<u64>,
    pub(crate) list: [u8; 24],
}

impl Scattered {
    pub(crate) fn new(memory: &Memory, bytes: u64) -> Result<Self> {
        let count = bytes.div_ceil(PAGE_SIZE);
        let first = memory.alloc(bytes)?;
        // Backwards, so that who takes them for one piece finds other bytes.
        let pages: Vec<u64> = (0..count).rev().map(|page| first + page * PAGE_SIZE).collect();
        let (mut level, mut levels) = (pages.clone(), 0);
        while levels == 0 || level.len() > 1 {
            let lists = level.chunks(LIST_PAGE_ENTRIES).map(|entries| list_page(memory, entries));
            level = lists.collect::<Result<_>>()?;
            levels += 1;
        }
        let list = page_list(level.first().copied().unwrap_or_default(), count, levels);
        Ok(Self { pages, list })
    }

    /// Copies bytes out, from the start of page `first` on.
    pub(crate) fn read(&self, memory: &Memory, first: usize, bytes: &mut [u8]) -> Result<()> {
        let mut pieces = self.pages[first..].iter().zip(bytes.chunks_mut(PAGE));
        pieces.try_for_each(|(page, piece)| memory.read(*page, piece))
    }

    /// Copies bytes in, from the start of page `first` on.
    pub(crate) fn write(&self, memory: &Memory, first: usize, bytes: &[u8]) -> Result<()> {
        let mut pieces = self.pages[first..].iter().zip(bytes.chunks(PAGE));
        pieces.try_for_each(|(page, piece)| memory.write(*page, piece))
    }
}

fn list_page(memory: &Memory, entries: &[u64]) -> Result<u64> {
    let addr = memory.alloc(PAGE_SIZE)?;
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    memory.write(addr, &bytes)?;
    Ok(addr)
}
