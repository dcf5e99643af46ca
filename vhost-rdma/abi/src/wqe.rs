//! Work requests as they stand in send, receive and shared receive queues (sections 7.1 and 7.2).

use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U16, U32, U64};

abi_struct! {
    /// A scatter-gather element.
    pub struct Sge = "sge", 16 {
        /// First address, in the address space of the region (`iova`).
        pub addr: U64,
        /// Bytes; 0 is an empty element and not 2^31.
        pub length: U32,
        /// Key of the region.
        pub lkey: U32,
    }
}

abi_consts! {
    /// `sq_wqe.opcode` (as `enum ib_wr_opcode`).
    pub mod opcode = "VIRTIO_RDMA_WR_" {
        /// Write to remote memory.
        RDMA_WRITE: u8 = 0;
        /// Write, then consume a receive with an immediate.
        RDMA_WRITE_WITH_IMM: u8 = 1;
        /// Send a message.
        SEND: u8 = 2;
        /// Send a message with an immediate.
        SEND_WITH_IMM: u8 = 3;
        /// Read remote memory.
        RDMA_READ: u8 = 4;
        /// Compare and swap 8 remote bytes.
        ATOMIC_CMP_AND_SWP: u8 = 5;
        /// Add to 8 remote bytes.
        ATOMIC_FETCH_AND_ADD: u8 = 6;
        /// Invalidate a fast-register region or a window of type 2.
        LOCAL_INV: u8 = 7;
        /// Bind a memory window.
        BIND_MW: u8 = 8;
        /// Send a message and invalidate a key of the receiver.
        SEND_WITH_INV: u8 = 9;
        /// Make what earlier writes stored visible to everyone.
        FLUSH: u8 = 14;
        /// Write 8 remote bytes, all at once.
        ATOMIC_WRITE: u8 = 15;
        /// Map a fast-register region (context 0).
        REG_MR: u8 = 0x20;
    }
}

abi_consts! {
    /// Bits of `sq_wqe.aux` of FLUSH (IBTA A19.4.1).
    pub mod flush = "VIRTIO_RDMA_FLUSH_" {
        /// Visible to everyone who reads the memory.
        GLOBAL: u32 = 0x001;
        /// Safe from a loss of power; no device has it yet.
        PERSISTENT: u32 = 0x002;
        /// The whole region of the key, not the range.
        MR: u32 = 0x100;
    }
}

abi_consts! {
    /// Bits of `sq_wqe.flags` (as `enum ib_send_flags`).
    pub mod send_flags = "VIRTIO_RDMA_SEND_" {
        /// Begin only when all earlier reads and atomics of the queue have completed.
        FENCE: u8 = 0x01;
        /// Write a completion also on success.
        SIGNALED: u8 = 0x02;
        /// The receiver's completion is solicited.
        SOLICITED: u8 = 0x04;
        /// The data stand in the work request itself.
        INLINE: u8 = 0x08;
    }
}

abi_consts! {
    /// Strides of work queues and where the data of an entry start. Re-exported at the root of the
    /// crate.
    pub mod wqe_shape = "VIRTIO_RDMA_" {
        /// Least log2 stride of a send queue.
        SQ_WQE_MIN_LOG2_STRIDE: u8 = 6;
        /// Least log2 stride of a receive queue or an SRQ.
        RQ_WQE_MIN_LOG2_STRIDE: u8 = 5;
        /// Greatest log2 stride of any work queue.
        WQE_MAX_LOG2_STRIDE: u8 = 12;
        /// Offset of the elements or inline bytes in a send queue entry.
        SQ_WQE_DATA: usize = 48;
        /// Offset of the elements in a receive queue entry.
        RQ_WQE_DATA: usize = 16;
    }
}

abi_struct! {
    /// A send work request; elements or inline bytes follow at `SQ_WQE_DATA`.
    pub struct SqWqe = "sq_wqe", 48 {
        /// Returned in the completion.
        pub wr_id: U64,
        /// One of [`opcode`].
        pub opcode: u8,
        /// Bits of [`send_flags`].
        pub flags: u8,
        /// Number of elements; with `SEND_INLINE` the number of inline bytes.
        pub num_sge: U16,
        /// Immediate as opaque bytes; SEND_WITH_INV, LOCAL_INV: the key; BIND_MW: the window's
        /// present rkey; REG_MR: access flags.
        pub imm: U32,
        /// RDMA and atomics: remote address; BIND_MW: first address; REG_MR: iova.
        pub remote_addr: U64,
        /// RDMA and atomics: remote key; UD, GSI: remote QPN; BIND_MW, REG_MR: the new key.
        pub rkey: U32,
        /// UD, GSI: remote Q_Key; BIND_MW: access flags; REG_MR: page count.
        pub aux: U32,
        /// Atomics: compare or add; UD, GSI: AH number; BIND_MW, REG_MR: length.
        pub arg0: U64,
        /// Atomics: swap; BIND_MW: lkey of the region; REG_MR: address of the page array |
        /// page_shift << 56.
        pub arg1: U64,
    }
}

abi_struct! {
    /// A receive work request; elements follow at `RQ_WQE_DATA`.
    pub struct RqWqe = "rq_wqe", 16 {
        /// Returned in the completion.
        pub wr_id: U64,
        /// Number of elements.
        pub num_sge: U16,
        /// Zero.
        pub reserved: [u8; 6],
    }
}
