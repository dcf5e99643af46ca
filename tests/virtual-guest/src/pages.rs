//! Page lists (6.1) and buffers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ram::{Pages, Ram, View};
use crate::spec::{LIST_ENTRIES, PAGE, Put};

/// A page list as a command carries it, with the list pages that it points to. The device reads
/// them while it executes the command, so this must live until the answer and no longer.
#[derive(Debug)]
pub struct PageList {
    /// The first data page, or the root list page.
    pub addr: u64,
    /// Data pages.
    pub npages: u32,
    /// Of the first byte in the first page.
    pub offset: u32,
    /// Log2 of the bytes of a data page.
    pub page_shift: u8,
    /// Levels of list pages.
    pub levels: u8,
    lists: Vec<Pages>,
}

impl PageList {
    /// A list of one contiguous range.
    pub fn contiguous(addr: u64, npages: u32, offset: u32, page_shift: u8) -> Self {
        Self { addr, npages, offset, page_shift, levels: 0, lists: Vec::new() }
    }

    /// A tree with `levels` ≥ 1 levels over `pages`.
    pub fn tree(ram: &Arc<Ram>, pages: &[u64], offset: u32, page_shift: u8, levels: u8) -> Self {
        let mut lists = Vec::new();
        let mut entries = pages.to_vec();
        for _ in 0..levels {
            let mut above = Vec::new();
            for chunk in entries.chunks(LIST_ENTRIES) {
                let list = ram.alloc_scattered(1);
                let view = list.view(0, PAGE);
                for (i, entry) in chunk.iter().enumerate() {
                    view.store64(8 * i as u64, *entry, Ordering::Relaxed);
                }
                above.push(list.gpa(0));
                lists.push(list);
            }
            entries = above;
        }
        assert!(entries.len() == 1, "{levels} levels can not hold {} pages", pages.len());
        Self { addr: entries[0], npages: pages.len() as u32, offset, page_shift, levels, lists }
    }

    /// The shallowest list of 4 KiB pages over `pages`.
    pub fn of(ram: &Arc<Ram>, pages: &Pages, offset: u32) -> Self {
        let gpas = pages.gpas();
        match gpas.len() {
            _ if pages.contiguous() => Self::contiguous(gpas[0], gpas.len() as u32, offset, 12),
            n => Self::tree(ram, gpas, offset, 12, 1 + u8::from(n > LIST_ENTRIES)),
        }
    }

    /// No ring.
    pub fn none() -> Self {
        Self { addr: 0, npages: 0, offset: 0, page_shift: 0, levels: 0, lists: Vec::new() }
    }

    /// The list pages, for tests that spoil them.
    pub fn lists(&self) -> &[Pages] {
        &self.lists
    }

    /// The 24 bytes of `struct virtio_rdma_page_list`.
    pub fn bytes(&self) -> Vec<u8> {
        Put::new()
            .u64(self.addr)
            .u32(self.npages)
            .u32(self.offset)
            .u8(self.page_shift)
            .u8(self.levels)
            .zero(6)
            .done(24)
    }
}

/// A range of guest memory, contiguous for its user, in scattered pages.
#[derive(Debug)]
pub struct Buf {
    pages: Pages,
    offset: u64,
    view: View,
}

impl Buf {
    /// `len` bytes beginning `offset` into the first of scattered pages.
    pub fn scattered(ram: &Arc<Ram>, offset: u64, len: u64) -> Self {
        assert!(offset < PAGE, "the first byte lies in the first page");
        let pages = ram.alloc_scattered((offset + len.max(1)).div_ceil(PAGE) as usize);
        Self { view: pages.view(offset, len), pages, offset }
    }

    /// `len` bytes in contiguous pages.
    pub fn contiguous(ram: &Arc<Ram>, len: u64) -> Self {
        let pages = ram.alloc(len.max(1).div_ceil(PAGE) as usize);
        Self { view: pages.view(0, len), pages, offset: 0 }
    }

    /// `len` bytes in contiguous pages of the region at `gpa`.
    pub fn contiguous_in(ram: &Arc<Ram>, gpa: u64, len: u64) -> Self {
        let pages = ram.alloc_in(Some(gpa), len.max(1).div_ceil(PAGE) as usize, PAGE);
        Self { view: pages.view(0, len), pages, offset: 0 }
    }

    /// The bytes.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The pages.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Where in the first page the buffer begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.view.len()
    }

    /// Has it no bytes?
    pub fn is_empty(&self) -> bool {
        self.view.is_empty()
    }
}
