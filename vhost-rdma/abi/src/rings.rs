//! Control blocks of completion queues and shared receive queues, and how a CQ is armed (sections
//! 7, 7.2, 7.3 and 7.4).

use crate::table::abi_consts;

abi_consts! {
    /// The control block of a CQ or an SRQ, `SIZE` bytes at
    /// `align_up(entries << log2_stride, ALIGN)` in the ring: its alignment, byte offsets and size.
    pub mod ctrl = "VIRTIO_RDMA_CTRL_" {
        /// Alignment of the control block in the ring.
        ALIGN: usize = 128 => "VIRTIO_RDMA_RING_CTRL_ALIGN";
        /// CQ: le32, written by the driver: free-running consumer index.
        CONSUMER: usize = 0;
        /// CQ: le32, written by the driver: `seq << ARM_SEQ_SHIFT | what`.
        ARM: usize = 4;
        /// CQ: le32, written by the device: the `seq` of the last arm that fired.
        FIRED: usize = 64;
        /// SRQ: le32, written by the device: free-running number of receives taken.
        TAKEN: usize = 68;
        /// Bytes in a control block.
        SIZE: usize = 128;
    }
}

abi_consts! {
    /// The parts of the word at `CTRL_ARM`.
    pub mod arm = "VIRTIO_RDMA_ARM_" {
        /// `what`: the next solicited completion or error raises an event.
        SOLICITED: u32 = 1;
        /// `what`: the next completion raises an event.
        ANY: u32 = 2;
        /// Mask of `what`.
        WHAT_MASK: u32 = 3;
        /// Position of `seq`, which has 30 bits.
        SEQ_SHIFT: u32 = 2;
    }
}
