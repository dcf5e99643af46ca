//! Control commands: headers, opcodes and statuses, and the commands for the NIC, its port and its
//! contexts (sections 5 and 9).

use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U16, U32, U64};

abi_struct! {
    /// Header of a request; the request of the opcode follows.
    pub struct CmdHdr = "cmd_hdr", 16 {
        /// One of [`cmd`](crate::cmd).
        pub opcode: U16,
        /// Zero.
        pub reserved0: U16,
        /// Context that owns the object; 0 is the kernel's.
        pub ctx: U32,
        /// Zero.
        pub reserved1: U64,
    }
}

abi_struct! {
    /// Header of a response; the response of the opcode follows.
    pub struct RespHdr = "resp_hdr", 8 {
        /// One of [`cmd_status`](crate::cmd_status).
        pub status: U32,
        /// Zero.
        pub reserved: U32,
    }
}

abi_consts! {
    /// `cmd_hdr.opcode`.
    pub mod cmd = "VIRTIO_RDMA_CMD_" {
        /// Begin a new life (5.2).
        INIT: u16 = 0x01;
        /// Destroy everything (5.3).
        SHUTDOWN: u16 = 0x02;
        /// Is the device there? (5.5)
        KEEPALIVE: u16 = 0x03;
        /// Capabilities and limits of the NIC.
        QUERY_DEVICE: u16 = 0x04;
        /// State of the port.
        QUERY_PORT: u16 = 0x05;
        /// Set or remove a GID (section 9).
        GID_SET: u16 = 0x06;
        /// Counters of the NIC.
        QUERY_COUNTERS: u16 = 0x07;
        /// Make a context (5.4).
        CONTEXT_CREATE: u16 = 0x10;
        /// Destroy a context and all its objects.
        CONTEXT_DESTROY: u16 = 0x11;
        /// Give a context one more doorbell page.
        DB_PAGE_ADD: u16 = 0x12;
        /// Make a protection domain.
        PD_CREATE: u16 = 0x18;
        /// Destroy a protection domain.
        PD_DESTROY: u16 = 0x19;
        /// Register memory.
        MR_REG: u16 = 0x20;
        /// Make a key for all guest memory (context 0).
        MR_DMA: u16 = 0x21;
        /// Make a fast-register region.
        MR_ALLOC: u16 = 0x22;
        /// Change a registered region.
        MR_REREG: u16 = 0x23;
        /// Destroy a region of any kind.
        MR_DEREG: u16 = 0x24;
        /// Make a memory window.
        MW_ALLOC: u16 = 0x25;
        /// Destroy a memory window.
        MW_DEALLOC: u16 = 0x26;
        /// Make a completion queue.
        CQ_CREATE: u16 = 0x28;
        /// Destroy a completion queue.
        CQ_DESTROY: u16 = 0x29;
        /// Move a completion queue to another ring.
        CQ_RESIZE: u16 = 0x2a;
        /// Set event moderation.
        CQ_MODERATE: u16 = 0x2b;
        /// Make a shared receive queue.
        SRQ_CREATE: u16 = 0x30;
        /// Destroy a shared receive queue.
        SRQ_DESTROY: u16 = 0x31;
        /// Resize a shared receive queue or set its limit.
        SRQ_MODIFY: u16 = 0x32;
        /// Read a shared receive queue's attributes.
        SRQ_QUERY: u16 = 0x33;
        /// Make a queue pair.
        QP_CREATE: u16 = 0x38;
        /// Destroy a queue pair.
        QP_DESTROY: u16 = 0x39;
        /// Change state and attributes of a queue pair.
        QP_MODIFY: u16 = 0x3a;
        /// Read a queue pair's attributes.
        QP_QUERY: u16 = 0x3b;
        /// Make an address handle.
        AH_CREATE: u16 = 0x40;
        /// Destroy an address handle.
        AH_DESTROY: u16 = 0x41;
        /// Attach a QP to a multicast group.
        MCAST_ATTACH: u16 = 0x44;
        /// Detach a QP from a multicast group.
        MCAST_DETACH: u16 = 0x45;
    }
}

abi_consts! {
    /// `resp_hdr.status`, with the errno that a driver answers with.
    pub mod cmd_status = "VIRTIO_RDMA_ERR_" {
        /// The command was carried out.
        OK: u32 = 0 => "VIRTIO_RDMA_OK";
        /// EINVAL: an invalid field, shape or attribute.
        INVAL: u32 = 1;
        /// ENOMEM: a limit or the device's memory is exhausted.
        NOMEM: u32 = 2;
        /// EOPNOTSUPP: the device does not do this.
        NOTSUPP: u32 = 3;
        /// EINVAL: no such object in this context.
        NOENT: u32 = 4;
        /// EBUSY: other objects still use it.
        BUSY: u32 = 5;
        /// EPERM: address or peer not allowed.
        PERM: u32 = 6;
        /// EFAULT: an address is outside guest memory or misaligned.
        FAULT: u32 = 7;
        /// EEXIST: the address is held by another NIC.
        EXIST: u32 = 8;
        /// EIO: INIT has not been accepted.
        STATE: u32 = 9;
        /// EIO: the NIC failed; reset it.
        FATAL: u32 = 10;
        /// EHOSTUNREACH: the host has no way to the address.
        UNREACH: u32 = 11;
    }
}

abi_struct! {
    /// INIT.
    pub struct InitReq = "init_req", 32 {
        /// The highest version that the driver speaks.
        pub abi_version: U32,
        /// Zero.
        pub reserved: U32,
        /// Random; its low 32 bits are not zero.
        pub nonce: U64,
        /// Address of the status page.
        pub status_page: U64,
        /// Capabilities beyond [`cap::BASE`] that the driver accepts (5.9).
        pub caps: U64,
    }
}

abi_struct! {
    /// Answer to INIT.
    pub struct InitResp = "init_resp", 16 {
        /// The version to be used.
        pub abi_version: U32,
        /// Zero.
        pub reserved: U32,
        /// Capabilities beyond [`cap::BASE`] that are in effect (5.9).
        pub caps: U64,
    }
}

abi_struct! {
    /// KEEPALIVE; the answer has no body.
    pub struct KeepaliveReq = "keepalive_req", 8 {
        /// As in INIT, else `ERR_STATE`.
        pub nonce: U64,
    }
}

abi_consts! {
    /// Bits of `query_device_resp.caps`.
    pub mod cap = "VIRTIO_RDMA_CAP_" {
        /// Atomic operations, atomic against others of this device.
        ATOMIC: u64 = 1 << 0;
        /// Atomic also against the guests' CPUs.
        ATOMIC_GLOB: u64 = 1 << 1;
        /// Shared receive queues.
        SRQ: u64 = 1 << 2;
        /// QPs of type UC.
        UC: u64 = 1 << 3;
        /// QPs of type UD.
        UD: u64 = 1 << 4;
        /// REG_MR, LOCAL_INV and SEND_WITH_INV.
        MEM_MGT: u64 = 1 << 5;
        /// Memory windows of type 1.
        MW_TYPE1: u64 = 1 << 6;
        /// Memory windows of type 2, LOCAL_INV and SEND_WITH_INV for them.
        MW_TYPE2: u64 = 1 << 7;
        /// CQ_RESIZE.
        CQ_RESIZE: u64 = 1 << 8;
        /// CQ_MODERATE.
        CQ_MODERATE: u64 = 1 << 9;
        /// SRQ_MODIFY with `SRQ_MAX_WR`.
        SRQ_RESIZE: u64 = 1 << 10;
        /// MCAST_ATTACH and MCAST_DETACH.
        MCAST: u64 = 1 << 11;
        /// MR_REREG.
        MR_REREG: u64 = 1 << 12;
        /// Regions with `ACCESS_ZERO_BASED`.
        ZERO_BASED: u64 = 1 << 13;
        /// MR_DMA.
        DMA_MR: u64 = 1 << 14;
        /// State SQD.
        SQD: u64 = 1 << 15;
        /// FLUSH to global visibility, and `ACCESS_FLUSH_GLOBAL`.
        FLUSH: u64 = 1 << 16;
        /// ATOMIC_WRITE.
        ATOMIC_WRITE: u64 = 1 << 17;
        /// The bits that every driver knows: in effect without being accepted in INIT (5.9).
        BASE: u64 = 0x0003_ffff;
    }
}

abi_struct! {
    /// Answer to QUERY_DEVICE, which has no body.
    pub struct QueryDeviceResp = "query_device_resp", 168 {
        /// Node GUID.
        pub guid: U64,
        /// Bits of [`cap`].
        pub caps: U64,
        /// Bytes in one region.
        pub max_mr_size: U64,
        /// Registered bytes of the NIC together.
        pub max_mr_bytes: U64,
        /// Bit n: data pages of 1 << n bytes can be used in page lists.
        pub page_size_cap: U64,
        /// Version of the device, for display.
        pub fw_ver: U64,
        /// Frequency of `cqe.timestamp`, in kHz: 1 000 000, or 0 without one.
        pub clock_khz: U64,
        /// Vendor, for display.
        pub vendor_id: U32,
        /// Part, for display.
        pub vendor_part_id: U32,
        /// Hardware version, for display.
        pub hw_ver: U32,
        /// Contexts, the kernel's not counted.
        pub max_contexts: U32,
        /// Protection domains.
        pub max_pd: U32,
        /// Regions of every kind.
        pub max_mr: U32,
        /// Memory windows.
        pub max_mw: U32,
        /// Address handles.
        pub max_ah: U32,
        /// Completion queues.
        pub max_cq: U32,
        /// Entries in one CQ.
        pub max_cqe: U32,
        /// Queue pairs, GSI included.
        pub max_qp: U32,
        /// Work requests in one send or receive queue.
        pub max_qp_wr: U32,
        /// Elements in one send.
        pub max_send_sge: U32,
        /// Elements in one receive.
        pub max_recv_sge: U32,
        /// Elements in one RDMA_READ.
        pub max_rd_sge: U32,
        /// Inline bytes in one send.
        pub max_inline: U32,
        /// Shared receive queues.
        pub max_srq: U32,
        /// Receives in one SRQ.
        pub max_srq_wr: U32,
        /// Elements in one receive of an SRQ.
        pub max_srq_sge: U32,
        /// Inbound reads and atomics outstanding per QP.
        pub max_rd_atom: U32,
        /// Outbound reads and atomics outstanding per QP.
        pub max_init_rd_atom: U32,
        /// Pages in one fast-register region.
        pub max_fast_reg_pages: U32,
        /// Multicast groups.
        pub max_mcast_groups: U32,
        /// QPs attached to one multicast group.
        pub max_mcast_qp_attach: U32,
        /// As IBTA 11.2.1.2: 4.096 µs · 2^n.
        pub local_ca_ack_delay: U32,
        /// Interval of KEEPALIVE; 0: never.
        pub keepalive_ms: U32,
        /// Entries in the P_Key table: 1.
        pub max_pkeys: U32,
        /// Zero.
        pub reserved: U32,
    }
}

abi_struct! {
    /// Answer to QUERY_PORT, which has no body.
    pub struct QueryPortResp = "query_port_resp", 32 {
        /// Bytes in the longest message.
        pub max_msg_sz: U32,
        /// Entries in the GID table.
        pub gid_tbl_len: U32,
        /// Entries in the P_Key table.
        pub pkey_tbl_len: U32,
        /// Packets with a bad P_Key.
        pub bad_pkey_cntr: U32,
        /// Packets with a bad Q_Key.
        pub qkey_viol_cntr: U32,
        /// 1 down, 2 initialising, 3 armed, 4 active.
        pub state: u8,
        /// 2 polling, 3 disabled, 5 link up.
        pub phys_state: u8,
        /// 1: 256 bytes, 2: 512, 3: 1024, 4: 2048, 5: 4096.
        pub max_mtu: u8,
        /// As `enum ib_mtu`.
        pub active_mtu: u8,
        /// Of one lane, in Gb/s: 1: 2.5, 2: 5, 4 and 8: 10, 16: 14, 32: 25, 64: 50, 128: 100.
        pub active_speed: u8,
        /// Lanes: 1: 1, 2: 4, 4: 8, 8: 12, 16: 2.
        pub active_width: u8,
        /// Zero.
        pub reserved: [u8; 6],
    }
}

abi_consts! {
    /// `gid_set_req.type`.
    pub mod gid_type = "VIRTIO_RDMA_GID_" {
        /// Remove the entry.
        NONE: u8 = 0;
        /// An IPv6 address or an IPv4 address mapped to IPv6, for RoCE v2.
        ROCE_V2: u8 = 2;
    }
}

abi_struct! {
    /// GID_SET; the answer has no body.
    pub struct GidSetReq = "gid_set_req", 24 {
        /// Entry of the GID table.
        pub index: U16,
        /// One of [`gid_type`].
        pub r#type: u8,
        /// Zero.
        pub reserved: [u8; 5],
        /// The address; ignored when the entry is removed.
        pub gid: [u8; 16],
    }
}

abi_struct! {
    /// Answer to QUERY_COUNTERS, which has no body. Counters begin at 0 with INIT and never go
    /// back.
    pub struct QueryCountersResp = "query_counters_resp", 128 {
        /// Payload bytes sent.
        pub tx_bytes: U64,
        /// Payload bytes received.
        pub rx_bytes: U64,
        /// Messages sent.
        pub tx_messages: U64,
        /// Messages received.
        pub rx_messages: U64,
        /// Times a peer found no receive here.
        pub rnr_naks_sent: U64,
        /// Times no receive was found at a peer.
        pub rnr_naks_received: U64,
        /// Times an answer did not come in time.
        pub ack_timeouts: U64,
        /// Inbound requests refused access.
        pub access_errors: U64,
        /// Inbound requests that were invalid.
        pub request_errors: U64,
        /// Completions written with an error other than WR_FLUSH_ERR.
        pub completion_errors: U64,
        /// UC and UD messages dropped here.
        pub receive_drops: U64,
        /// Events merged with one that was pending already.
        pub events_coalesced: U64,
        /// Completions written.
        pub completions: U64,
        /// Events put into the driver's buffers.
        pub events: U64,
        /// Control commands answered, this one not counted.
        pub commands: U64,
        /// Zero.
        pub reserved: [U64; 1],
    }
}

abi_struct! {
    /// CONTEXT_CREATE.
    pub struct ContextCreateReq = "context_create_req", 8 {
        /// Address of the first doorbell page.
        pub db_page: U64,
    }
}

abi_struct! {
    /// Answer to CONTEXT_CREATE.
    pub struct ContextCreateResp = "context_create_resp", 8 {
        /// The new context, never 0.
        pub ctx: U32,
        /// Index of the virtqueue that this context notifies.
        pub kick_queue: U32,
    }
}

abi_struct! {
    /// DB_PAGE_ADD.
    pub struct DbPageAddReq = "db_page_add_req", 8 {
        /// Address of the page.
        pub db_page: U64,
    }
}

abi_struct! {
    /// Answer to DB_PAGE_ADD.
    pub struct DbPageAddResp = "db_page_add_resp", 8 {
        /// Number of the page in its context.
        pub page: U32,
        /// Zero.
        pub reserved: U32,
    }
}

abi_struct! {
    /// PD_DESTROY, MR_DEREG, MW_DEALLOC, CQ_DESTROY, SRQ_DESTROY, SRQ_QUERY, QP_DESTROY, QP_QUERY,
    /// AH_DESTROY. (CONTEXT_DESTROY names the context in the header and has no body.)
    pub struct ObjectReq = "object_req", 8 {
        /// PDN, lkey (MR), rkey (MW), CQN, SRQN, QPN or AH number.
        pub object: U32,
        /// Zero.
        pub reserved: U32,
    }
}

abi_struct! {
    /// Answer to PD_CREATE, MR_ALLOC, MW_ALLOC, CQ_CREATE, AH_CREATE.
    pub struct ObjectResp = "object_resp", 8 {
        /// Number or key of the new object.
        pub object: U32,
        /// Zero.
        pub reserved: U32,
    }
}
