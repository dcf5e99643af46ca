//! What QUERY_DEVICE, QUERY_PORT and QUERY_COUNTERS answer.

use virtio_rdma_abi as abi;
use zerocopy::little_endian::{U32, U64};

use super::nic::SoftNic;
use crate::nic::{limits, table};

impl SoftNic {
    pub(super) fn device_attributes(&self) -> abi::QueryDeviceResp {
        let limits = &self.settings.limits;
        let n = U32::new;
        let [a, b, c, d, e, f] = self.settings.mac;
        abi::QueryDeviceResp {
            // EUI-64 of the MAC (IBTA A16.3).
            guid: U64::new(u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])),
            caps: U64::new(limits::CAPS),
            max_mr_size: U64::new(limits.mr_bytes(&self.space)),
            max_mr_bytes: U64::new(limits.mr_bytes(&self.space)),
            page_size_cap: U64::new(0x7fff_f000),
            fw_ver: U64::new(u64::from(abi::ABI_VERSION)),
            clock_khz: U64::new(1_000_000),
            vendor_id: n(limits::VENDOR_ID),
            vendor_part_id: n(abi::DEVICE_ID),
            hw_ver: n(abi::ABI_VERSION),
            max_contexts: n(limits.max_contexts),
            max_pd: n(limits.max_pds),
            max_mr: n(limits.max_mrs),
            max_mw: n(limits.max_mrs.saturating_mul(limits::WINDOWS_PER_MR)),
            max_fast_reg_pages: n(limits::MAX_FAST_REG_PAGES),
            max_mcast_groups: n(limits::MAX_MCAST_GROUPS),
            max_mcast_qp_attach: n(limits::MAX_MCAST_QPS),
            max_ah: n(limits.max_ahs),
            max_cq: n(limits.max_cqs.min(table::MOST)),
            max_cqe: n(limits::MAX_CQE),
            max_qp: n(limits.max_qps),
            max_qp_wr: n(limits::MAX_WR),
            max_send_sge: n(limits::MAX_SGE),
            max_recv_sge: n(limits::MAX_SGE),
            max_rd_sge: n(limits::MAX_SGE),
            max_inline: n(limits::MAX_INLINE),
            max_srq: n(limits.max_srqs.min(table::MOST)),
            max_srq_wr: n(limits::MAX_WR),
            max_srq_sge: n(limits::MAX_SGE),
            max_rd_atom: n(u32::from(limits::MAX_RD_ATOM)),
            max_init_rd_atom: n(u32::from(limits::MAX_RD_ATOM)),
            local_ca_ack_delay: n(15),
            keepalive_ms: n(limits::KEEPALIVE_MS),
            max_pkeys: n(1),
            ..abi::QueryDeviceResp::default()
        }
    }
}

/// The port: one, up, as fast as a 100 Gb/s one says it is.
pub(super) fn port() -> abi::QueryPortResp {
    abi::QueryPortResp {
        max_msg_sz: U32::new(limits::MAX_MSG),
        gid_tbl_len: U32::new(u32::from(limits::GID_TABLE_LEN)),
        pkey_tbl_len: U32::new(1),
        // IB_PORT_ACTIVE, IB_PORT_PHYS_STATE_LINK_UP, IB_SPEED_EDR, IB_WIDTH_4X: what a 100 Gb/s
        // port reports.
        state: 4,
        phys_state: 5,
        max_mtu: limits::MTU_ENUM,
        active_mtu: limits::MTU_ENUM,
        active_speed: 32,
        active_width: 2,
        ..abi::QueryPortResp::default()
    }
}
