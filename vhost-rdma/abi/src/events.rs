//! Completion events and asynchronous events (section 7.5).

use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::U32;

abi_struct! {
    /// A completion event.
    pub struct CompEvent = "comp_event", 8 {
        /// The CQ that fired.
        pub cqn: U32,
        /// The `seq` of the arm that it answers.
        pub arm_seq: U32,
    }
}

abi_struct! {
    /// An asynchronous event.
    pub struct AsyncEvent = "async_event", 16 {
        /// One of [`event`].
        pub r#type: U32,
        /// CQN, QPN, SRQN or port number, as the type tells; 0 for the device.
        pub object: U32,
        /// Context that owns the object; 0 for port and device.
        pub ctx: U32,
        /// Zero.
        pub reserved: U32,
    }
}

abi_consts! {
    /// `async_event.type` (as `enum ib_event_type`).
    pub mod event = "VIRTIO_RDMA_EVENT_" {
        /// CQ: it has overrun, or its memory is gone.
        CQ_ERR: u32 = 0;
        /// QP: error that no completion tells.
        QP_FATAL: u32 = 1;
        /// QP: an inbound request was invalid.
        QP_REQ_ERR: u32 = 2;
        /// QP: an inbound request was refused access.
        QP_ACCESS_ERR: u32 = 3;
        /// QP: the first inbound request came in state RTR.
        COMM_EST: u32 = 4;
        /// QP: the send queue is drained after RTS→SQD.
        SQ_DRAINED: u32 = 5;
        /// Device: the NIC failed; reset it.
        DEVICE_FATAL: u32 = 8;
        /// Port: it became active.
        PORT_ACTIVE: u32 = 9;
        /// Port: it went down.
        PORT_ERR: u32 = 10;
        /// SRQ: it can not go on.
        SRQ_ERR: u32 = 14;
        /// SRQ: fewer receives than the limit are left; the limit is now 0.
        SRQ_LIMIT_REACHED: u32 = 15;
        /// QP: no further receive of the SRQ will be taken.
        QP_LAST_WQE_REACHED: u32 = 16;
        /// Port: the GID table changed.
        GID_CHANGE: u32 = 18;
    }
}
