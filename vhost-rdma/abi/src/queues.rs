//! Commands for completion queues and shared receive queues (section 7).

use crate::PageList;
use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U16, U32};

abi_struct! {
    /// CQ_CREATE.
    pub struct CqCreateReq = "cq_create_req", 32 {
        /// A power of two.
        pub entries: U32,
        /// Completion vector.
        pub vector: U32,
        /// Entries, then the control block.
        pub ring: PageList,
    }
}

abi_struct! {
    /// CQ_RESIZE; the answer has no body.
    pub struct CqResizeReq = "cq_resize_req", 40 {
        /// The CQ.
        pub cqn: U32,
        /// A power of two.
        pub entries: U32,
        /// What the application asked for, before rounding.
        pub requested: U32,
        /// Zero.
        pub reserved: U32,
        /// The new ring: entries, then the control block.
        pub ring: PageList,
    }
}

abi_struct! {
    /// CQ_MODERATE; the answer has no body.
    pub struct CqModerateReq = "cq_moderate_req", 8 {
        /// The CQ.
        pub cqn: U32,
        /// Completions after which an event is raised.
        pub count: U16,
        /// Microseconds after which an event is raised.
        pub period_us: U16,
    }
}

abi_struct! {
    /// SRQ_CREATE.
    pub struct SrqCreateReq = "srq_create_req", 48 {
        /// Protection domain.
        pub pdn: U32,
        /// Size of the ring, a power of two.
        pub entries: U32,
        /// What was asked for, at most `entries`.
        pub max_wr: U32,
        /// Elements in one receive.
        pub max_sge: U32,
        /// SRQ_LIMIT_REACHED is raised when fewer receives are left; 0: never.
        pub limit: U32,
        /// Log2 of the stride.
        pub log2_stride: u8,
        /// Zero.
        pub reserved: [u8; 3],
        /// Entries, then the control block.
        pub ring: PageList,
    }
}

abi_struct! {
    /// Answer to SRQ_CREATE.
    pub struct SrqCreateResp = "srq_create_resp", 8 {
        /// The new SRQ.
        pub srqn: U32,
        /// Its doorbell number.
        pub db: U32,
    }
}

abi_consts! {
    /// Bits of `srq_modify_req.mask` (as `enum ib_srq_attr_mask`).
    pub mod srq_mask = "VIRTIO_RDMA_SRQ_" {
        /// `entries`, `max_wr` and `ring` are new.
        MAX_WR: u32 = 1;
        /// `limit` is new.
        LIMIT: u32 = 2;
    }
}

abi_struct! {
    /// SRQ_MODIFY; the answer has no body.
    pub struct SrqModifyReq = "srq_modify_req", 48 {
        /// The SRQ.
        pub srqn: U32,
        /// Bits of [`srq_mask`].
        pub mask: U32,
        /// Size of the new ring, a power of two.
        pub entries: U32,
        /// What was asked for, at most `entries`.
        pub max_wr: U32,
        /// The new limit.
        pub limit: U32,
        /// Zero.
        pub reserved: U32,
        /// The new ring: entries, then the control block.
        pub ring: PageList,
    }
}

abi_struct! {
    /// Answer to SRQ_QUERY.
    pub struct SrqQueryResp = "srq_query_resp", 16 {
        /// What was asked for.
        pub max_wr: U32,
        /// Elements in one receive.
        pub max_sge: U32,
        /// The limit; 0 when it has fired or was never set.
        pub limit: U32,
        /// Zero.
        pub reserved: U32,
    }
}
