//! Page lists describe rings and memory regions in guest memory (section 6.1).

use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U32, U64};

abi_consts! {
    /// Shape of a page list. Re-exported at the root of the crate.
    pub mod list = "VIRTIO_RDMA_" {
        /// Addresses in a list page.
        LIST_PAGE_ENTRIES: usize = 512;
        /// Greatest value of `page_list.levels`.
        MAX_LIST_LEVELS: u8 = 4;
    }
}

abi_struct! {
    /// Where an object lies in guest memory.
    pub struct PageList = "page_list", 24 {
        /// With `levels` 0 the address of the first data page, else of the root list page.
        pub addr: U64,
        /// Number of data pages.
        pub npages: U32,
        /// Of the object's first byte in the first data page; less than the page size.
        pub offset: U32,
        /// Log2 of the data page size, 12 to 30.
        pub page_shift: u8,
        /// Levels of list pages, 0 to 4; 0: the data pages are contiguous.
        pub levels: u8,
        /// Zero.
        pub reserved: [u8; 6],
    }
}
