//! Completion queue entries (section 7.3).

use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U16, U32, U64};

abi_consts! {
    /// The stride of completion queues. Re-exported at the root of the crate.
    pub mod cqe_shape = "VIRTIO_RDMA_" {
        /// Log2 stride of a completion queue.
        CQE_LOG2_STRIDE: u8 = 6;
    }
}

abi_struct! {
    /// A completion.
    pub struct Cqe = "cqe", 64 {
        /// Of the work request that completed.
        pub wr_id: U64,
        /// Local QP.
        pub qpn: U32,
        /// One of [`wc_opcode`].
        pub opcode: u8,
        /// One of [`wc_status`].
        pub status: u8,
        /// Bits of [`cqe_flags`].
        pub flags: U16,
        /// Receives: bytes received (UD, GSI: with the 40 bytes of the GRH area); reads and
        /// atomics: bytes read.
        pub byte_len: U32,
        /// With `CQE_IMM` the immediate, with `CQE_INV` the key that was invalidated.
        pub imm: U32,
        /// UD, GSI receives: the sender's QPN.
        pub src_qp: U32,
        /// Free-running index of the work request in its queue.
        pub wqe_index: U32,
        /// Zero, or a number that helps to find the cause of an error.
        pub vendor_err: U32,
        /// GSI: P_Key index, 0.
        pub pkey_index: U16,
        /// GSI receives: service level; UD receives: what the network header is.
        pub sl: u8,
        /// Zero.
        pub reserved0: u8,
        /// Nanoseconds of the device's clock (`query_device_resp.clock_khz`).
        pub timestamp: U64,
        /// With `CQE_SMAC` the sender's MAC address.
        pub smac: [u8; 6],
        /// Zero.
        pub reserved1: [u8; 2],
        /// Zero.
        pub reserved2: U32,
        /// Free-running index of this entry + 1; written last.
        pub seq: U32,
    }
}

abi_consts! {
    /// Bits of `cqe.flags`.
    pub mod cqe_flags = "VIRTIO_RDMA_CQE_" {
        /// Of a receive queue or an SRQ; else of a send queue.
        RECV: u16 = 0x0001;
        /// The receive was taken from an SRQ.
        SRQ: u16 = 0x0002;
        /// The 40 bytes of the GRH area are valid.
        GRH: u16 = 0x0004;
        /// `imm` is an immediate.
        IMM: u16 = 0x0008;
        /// `imm` is the key that was invalidated.
        INV: u16 = 0x0010;
        /// `smac` is valid.
        SMAC: u16 = 0x0020;
        /// The network header in the GRH area is IPv4, else IPv6.
        IPV4: u16 = 0x0040;
        /// A solicited completion or an error.
        SOLICITED: u16 = 0x0080;
    }
}

abi_consts! {
    /// `cqe.opcode` (as `enum ib_wc_opcode`).
    pub mod wc_opcode = "VIRTIO_RDMA_WC_" {
        /// SEND, SEND_WITH_IMM, SEND_WITH_INV.
        SEND: u8 = 0;
        /// RDMA_WRITE, RDMA_WRITE_WITH_IMM.
        RDMA_WRITE: u8 = 1;
        /// RDMA_READ.
        RDMA_READ: u8 = 2;
        /// ATOMIC_CMP_AND_SWP.
        COMP_SWAP: u8 = 3;
        /// ATOMIC_FETCH_AND_ADD.
        FETCH_ADD: u8 = 4;
        /// BIND_MW.
        BIND_MW: u8 = 5;
        /// LOCAL_INV.
        LOCAL_INV: u8 = 6;
        /// FLUSH.
        FLUSH: u8 = 8;
        /// ATOMIC_WRITE.
        ATOMIC_WRITE: u8 = 9;
        /// REG_MR.
        REG_MR: u8 = 10;
        /// A message was received.
        RECV: u8 = 128;
        /// A receive was consumed by a write with immediate.
        RECV_RDMA_WITH_IMM: u8 = 129;
    }
}

abi_consts! {
    /// `cqe.status` (as `enum ib_wc_status`).
    pub mod wc_status = "VIRTIO_RDMA_WC_STATUS_" {
        /// The work request succeeded.
        SUCCESS: u8 = 0;
        /// Message too long for the port, or for the receive.
        LOC_LEN_ERR: u8 = 1;
        /// Malformed or forbidden work request.
        LOC_QP_OP_ERR: u8 = 2;
        /// Bad element: key, range, PD or access.
        LOC_PROT_ERR: u8 = 4;
        /// Flushed: the queue was in error.
        WR_FLUSH_ERR: u8 = 5;
        /// A window could not be bound.
        MW_BIND_ERR: u8 = 6;
        /// The responder's answer made no sense.
        BAD_RESP_ERR: u8 = 7;
        /// Local access error on a remote operation.
        LOC_ACCESS_ERR: u8 = 8;
        /// The responder found the request invalid.
        REM_INV_REQ_ERR: u8 = 9;
        /// The responder refused the access.
        REM_ACCESS_ERR: u8 = 10;
        /// The responder could not carry out the request.
        REM_OP_ERR: u8 = 11;
        /// No answer after all retries.
        RETRY_EXC_ERR: u8 = 12;
        /// No receive was posted after all retries.
        RNR_RETRY_EXC_ERR: u8 = 13;
        /// The NIC failed.
        FATAL_ERR: u8 = 19;
        /// Any other error.
        GENERAL_ERR: u8 = 21;
        /// Written by the driver over a stale entry, never by the device.
        DISCARDED: u8 = 255;
    }
}
