//! Queue pairs, address vectors, address handles and multicast (section 8).

use crate::PageList;
use crate::table::{abi_consts, abi_struct};
use zerocopy::little_endian::{U16, U32};

abi_consts! {
    /// `qp_create_req.type` (as `enum ib_qp_type`).
    pub mod qpt = "VIRTIO_RDMA_QPT_" {
        /// General services, QP 1.
        GSI: u32 = 1;
        /// Reliable connection.
        RC: u32 = 2;
        /// Unreliable connection.
        UC: u32 = 3;
        /// Unreliable datagram.
        UD: u32 = 4;
    }
}

abi_consts! {
    /// Numbers with a fixed meaning. Re-exported at the root of the crate.
    pub mod qp_numbers = "VIRTIO_RDMA_" {
        /// QPN of the GSI queue pair.
        GSI_QPN: u32 = 1;
        /// `qp_create_req.srqn` of a QP without SRQ.
        NO_SRQ: u32 = 0xffff_ffff;
    }
}

abi_consts! {
    /// Bits of `qp_create_req.flags`.
    pub mod qp_flags = "VIRTIO_RDMA_QP_" {
        /// Every send is signaled.
        SIG_ALL: u32 = 1;
    }
}

abi_struct! {
    /// QP_CREATE.
    pub struct QpCreateReq = "qp_create_req", 96 {
        /// Protection domain.
        pub pdn: U32,
        /// One of [`qpt`].
        pub r#type: U32,
        /// Bits of [`qp_flags`].
        pub flags: U32,
        /// CQ of the send queue.
        pub send_cqn: U32,
        /// CQ of the receive queue.
        pub recv_cqn: U32,
        /// SRQ, or `NO_SRQ`.
        pub srqn: U32,
        /// Size of the send ring: a power of two, or 0.
        pub sq_entries: U32,
        /// Size of the receive ring: a power of two, or 0; with an SRQ 0.
        pub rq_entries: U32,
        /// What was asked for, at most `sq_entries`.
        pub max_send_wr: U32,
        /// What was asked for, at most `rq_entries`.
        pub max_recv_wr: U32,
        /// Elements in one send.
        pub max_send_sge: U16,
        /// Elements in one receive.
        pub max_recv_sge: U16,
        /// Inline bytes in one send.
        pub max_inline: U16,
        /// Log2 of the send ring's stride.
        pub sq_log2_stride: u8,
        /// Log2 of the receive ring's stride.
        pub rq_log2_stride: u8,
        /// The send ring.
        pub sq: PageList,
        /// The receive ring.
        pub rq: PageList,
    }
}

abi_struct! {
    /// Answer to QP_CREATE.
    pub struct QpCreateResp = "qp_create_resp", 16 {
        /// The new QP.
        pub qpn: U32,
        /// Doorbell number of the send queue, or `DB_NONE`.
        pub sq_db: U32,
        /// Doorbell number of the receive queue, or `DB_NONE`.
        pub rq_db: U32,
        /// Zero.
        pub reserved: U32,
    }
}

abi_consts! {
    /// States of a QP (as `enum ib_qp_state`).
    pub mod qps = "VIRTIO_RDMA_QPS_" {
        /// Reset.
        RESET: u8 = 0;
        /// Initialised.
        INIT: u8 = 1;
        /// Ready to receive.
        RTR: u8 = 2;
        /// Ready to send.
        RTS: u8 = 3;
        /// Send queue drained.
        SQD: u8 = 4;
        /// Send queue error.
        SQE: u8 = 5;
        /// Error.
        ERR: u8 = 6;
    }
}

abi_consts! {
    /// Bits of `qp_attr.mask` (as `enum ib_qp_attr_mask`).
    pub mod attr_mask = "VIRTIO_RDMA_QP_" {
        /// `qp_state`.
        STATE: u32 = 1 << 0;
        /// `cur_qp_state`.
        CUR_STATE: u32 = 1 << 1;
        /// `en_sqd_async_notify`.
        EN_SQD_ASYNC_NOTIFY: u32 = 1 << 2;
        /// `qp_access_flags`.
        ACCESS_FLAGS: u32 = 1 << 3;
        /// `pkey_index`.
        PKEY_INDEX: u32 = 1 << 4;
        /// `port_num`.
        PORT: u32 = 1 << 5;
        /// `qkey`.
        QKEY: u32 = 1 << 6;
        /// `ah`.
        AV: u32 = 1 << 7;
        /// `path_mtu`.
        PATH_MTU: u32 = 1 << 8;
        /// `timeout`.
        TIMEOUT: u32 = 1 << 9;
        /// `retry_cnt`.
        RETRY_CNT: u32 = 1 << 10;
        /// `rnr_retry`.
        RNR_RETRY: u32 = 1 << 11;
        /// `rq_psn`.
        RQ_PSN: u32 = 1 << 12;
        /// `max_rd_atomic`.
        MAX_QP_RD_ATOMIC: u32 = 1 << 13;
        /// `alt_ah`, `alt_pkey_index`, `alt_port_num` and `alt_timeout`.
        ALT_PATH: u32 = 1 << 14;
        /// `min_rnr_timer`.
        MIN_RNR_TIMER: u32 = 1 << 15;
        /// `sq_psn`.
        SQ_PSN: u32 = 1 << 16;
        /// `max_dest_rd_atomic`.
        MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
        /// `path_mig_state`.
        PATH_MIG_STATE: u32 = 1 << 18;
        /// Capacities; never accepted: queues do not change size.
        CAP: u32 = 1 << 19;
        /// `dest_qpn`.
        DEST_QPN: u32 = 1 << 20;
        /// `rate_limit`.
        RATE_LIMIT: u32 = 1 << 25;
    }
}

abi_consts! {
    /// Bits of `av.flags`.
    pub mod av_flags = "VIRTIO_RDMA_AV_" {
        /// There is a GRH; required, since RoCE always has one.
        GRH: u8 = 1;
    }
}

abi_struct! {
    /// An address vector.
    pub struct Av = "av", 40 {
        /// GID of the peer.
        pub dgid: [u8; 16],
        /// MAC address of the peer; a device MAY ignore it.
        pub dmac: [u8; 6],
        /// Entry of the own GID table.
        pub sgid_index: U16,
        /// Flow label, 20 bits.
        pub flow_label: U32,
        /// Hop limit.
        pub hop_limit: u8,
        /// Traffic class.
        pub traffic_class: u8,
        /// Service level.
        pub sl: u8,
        /// Port, 1.
        pub port_num: u8,
        /// Bits of [`av_flags`].
        pub flags: u8,
        /// 0: as fast as the port; a device MAY ignore it.
        pub static_rate: u8,
        /// Zero.
        pub reserved: [u8; 6],
    }
}

abi_struct! {
    /// Attributes of a queue pair, in QP_MODIFY and QP_QUERY.
    pub struct QpAttr = "qp_attr", 136 {
        /// Bits of [`attr_mask`]: the attributes that are meant.
        pub mask: U32,
        /// One of [`qps`].
        pub qp_state: u8,
        /// One of [`qps`].
        pub cur_qp_state: u8,
        /// As `enum ib_mtu`.
        pub path_mtu: u8,
        /// 0: migrated, the only one that there is.
        pub path_mig_state: u8,
        /// Q_Key.
        pub qkey: U32,
        /// First PSN expected, 24 bits.
        pub rq_psn: U32,
        /// First PSN sent, 24 bits.
        pub sq_psn: U32,
        /// QPN of the peer, 24 bits.
        pub dest_qpn: U32,
        /// Bits of [`access`](crate::access): remote operations that are enabled.
        pub qp_access_flags: U32,
        /// P_Key index, 0.
        pub pkey_index: U16,
        /// Of the alternate path.
        pub alt_pkey_index: U16,
        /// Nonzero: raise SQ_DRAINED.
        pub en_sqd_async_notify: u8,
        /// QP_QUERY: 1 while state SQD is not yet drained.
        pub sq_draining: u8,
        /// Outbound reads and atomics outstanding.
        pub max_rd_atomic: u8,
        /// Inbound reads and atomics outstanding.
        pub max_dest_rd_atomic: u8,
        /// RNR timer code, 0 to 31 (8.2).
        pub min_rnr_timer: u8,
        /// Port, 1.
        pub port_num: u8,
        /// ACK timeout code n, 0 to 31: 4.096 µs · 2^n; 0: for ever.
        pub timeout: u8,
        /// Retries, 0 to 7.
        pub retry_cnt: u8,
        /// RNR retries, 0 to 7; 7: for ever.
        pub rnr_retry: u8,
        /// Of the alternate path.
        pub alt_port_num: u8,
        /// Of the alternate path.
        pub alt_timeout: u8,
        /// Zero.
        pub reserved0: u8,
        /// Packet pacing rate in kbit/s; 0: none.
        pub rate_limit: U32,
        /// Address vector of the peer.
        pub ah: Av,
        /// Of the alternate path.
        pub alt_ah: Av,
        /// Zero.
        pub reserved1: [U32; 2],
    }
}

abi_struct! {
    /// QP_MODIFY; the answer has no body.
    pub struct QpModifyReq = "qp_modify_req", 144 {
        /// The QP.
        pub qpn: U32,
        /// Zero.
        pub reserved: U32,
        /// The attributes.
        pub attr: QpAttr,
    }
}

abi_struct! {
    /// Answer to QP_QUERY.
    pub struct QpQueryResp = "qp_query_resp", 136 {
        /// The attributes; `mask` is 0.
        pub attr: QpAttr,
    }
}

abi_struct! {
    /// AH_CREATE.
    pub struct AhCreateReq = "ah_create_req", 48 {
        /// Protection domain.
        pub pdn: U32,
        /// Zero.
        pub reserved: U32,
        /// The address vector.
        pub av: Av,
    }
}

abi_struct! {
    /// MCAST_ATTACH, MCAST_DETACH; the answer has no body.
    pub struct McastReq = "mcast_req", 24 {
        /// The QP, of type UD.
        pub qpn: U32,
        /// Zero.
        pub reserved: U32,
        /// The group.
        pub mgid: [u8; 16],
    }
}
