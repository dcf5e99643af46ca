//! Memory regions and memory windows (section 6.2).

use crate::PageList;
use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U32, U64};

abi_consts! {
    /// What may be done through a key (as `enum ib_access_flags`).
    pub mod access = "VIRTIO_RDMA_ACCESS_" {
        /// Local writes: receives, results of reads and atomics.
        LOCAL_WRITE: u32 = 0x01;
        /// RDMA writes; needs LOCAL_WRITE.
        REMOTE_WRITE: u32 = 0x02;
        /// RDMA reads.
        REMOTE_READ: u32 = 0x04;
        /// Atomics; needs LOCAL_WRITE.
        REMOTE_ATOMIC: u32 = 0x08;
        /// Windows may be bound to the region.
        MW_BIND: u32 = 0x10;
        /// Addresses count from 0.
        ZERO_BASED: u32 = 0x20;
        /// FLUSH to global visibility.
        FLUSH_GLOBAL: u32 = 0x100;
        /// FLUSH to persistence; no device has it yet.
        FLUSH_PERSISTENT: u32 = 0x200;
        /// The memory is its owner's to copy; only in the profile for processes.
        MIRRORED: u32 = 0x4000_0000;
        /// Flags in this mask are accepted and ignored.
        OPTIONAL_MASK: u32 = 0x3ff0_0000;
    }
}

abi_struct! {
    /// MR_REG.
    pub struct MrRegReq = "mr_reg_req", 48 {
        /// Protection domain.
        pub pdn: U32,
        /// Bits of [`access`](crate::access).
        pub access: U32,
        /// Address by which keys name the first byte.
        pub iova: U64,
        /// Bytes.
        pub length: U64,
        /// The memory.
        pub pages: PageList,
    }
}

abi_struct! {
    /// Answer to MR_REG, MR_DMA, MR_REREG.
    pub struct MrResp = "mr_resp", 8 {
        /// Key for elements.
        pub lkey: U32,
        /// Key for remote access; equal to `lkey`.
        pub rkey: U32,
    }
}

abi_struct! {
    /// MR_DMA.
    pub struct MrDmaReq = "mr_dma_req", 8 {
        /// Protection domain.
        pub pdn: U32,
        /// Bits of [`access`](crate::access).
        pub access: U32,
    }
}

abi_struct! {
    /// MR_ALLOC.
    pub struct MrAllocReq = "mr_alloc_req", 8 {
        /// Protection domain.
        pub pdn: U32,
        /// Pages that a REG_MR may map, at most `max_fast_reg_pages`.
        pub max_pages: U32,
    }
}

abi_consts! {
    /// Bits of `mr_rereg_req.flags` (as `enum ib_mr_rereg_flags`).
    pub mod rereg = "VIRTIO_RDMA_REREG_" {
        /// `iova`, `length` and `pages` are new.
        TRANSLATION: u32 = 1;
        /// `pdn` is new.
        PD: u32 = 2;
        /// `access` is new.
        ACCESS: u32 = 4;
    }
}

abi_struct! {
    /// MR_REREG.
    pub struct MrReregReq = "mr_rereg_req", 56 {
        /// The region.
        pub lkey: U32,
        /// Bits of [`rereg`], at least one.
        pub flags: U32,
        /// Protection domain.
        pub pdn: U32,
        /// Bits of [`access`](crate::access).
        pub access: U32,
        /// Address by which keys name the first byte.
        pub iova: U64,
        /// Bytes.
        pub length: U64,
        /// The memory.
        pub pages: PageList,
    }
}

abi_consts! {
    /// `mw_alloc_req.type`.
    pub mod mw_type = "VIRTIO_RDMA_MW_" {
        /// Bound by a verb, low 8 bits of the key chosen by the driver.
        TYPE1: u32 = 1;
        /// Bound by a work request, low 8 bits of the key chosen by the consumer.
        TYPE2: u32 = 2;
    }
}

abi_struct! {
    /// MW_ALLOC.
    pub struct MwAllocReq = "mw_alloc_req", 8 {
        /// Protection domain.
        pub pdn: U32,
        /// One of [`mw_type`].
        pub r#type: U32,
    }
}
