//! The status page (one per NIC) and the doorbell pages (per context): what the two sides tell each
//! other without a message (sections 6.3 and 6.4).

use crate::table::abi_consts;

abi_consts! {
    /// Byte offsets in the status page.
    pub mod status_page = "VIRTIO_RDMA_STATUS_" {
        /// le32, written by the device: nonzero when a post must be followed by a kick.
        NEED_KICK: usize = 0;
        /// le32, written by the driver: the low 32 bits of the INIT nonce; 0 once the device is
        /// lost.
        ALIVE: usize = 64;
    }
}

abi_consts! {
    /// Byte offsets and counts in a doorbell page, and the form of a doorbell number
    /// (`page << PAGE_SHIFT | slot`).
    pub mod db = "VIRTIO_RDMA_DB_" {
        /// Offset of the summary bytes, one per group of slots.
        SUMMARY: usize = 0;
        /// Offset of the producer indices, le32 per slot.
        INDEX: usize = 256;
        /// Slots in a group.
        GROUP_SLOTS: u32 = 64;
        /// Groups in a page.
        GROUPS: u32 = 15;
        /// Slots in a page.
        SLOTS: u32 = 960;
        /// Position of the page number in a doorbell number.
        PAGE_SHIFT: u32 = 16;
        /// Doorbell number of a queue that does not exist.
        NONE: u32 = 0xffff_ffff;
    }
}
