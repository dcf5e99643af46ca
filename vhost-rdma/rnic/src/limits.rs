//! What a NIC on an RNIC reports of itself: the hardware's numbers, where the NIC's own limits are
//! not lower.
//!
//! Keys for all of memory are the daemon's and good for QP 1 only, which the daemon plays (`gsi`):
//! with them the guest's kernel has a connection manager. Not offered, because libibverbs passes
//! none of it on: fast registration (so no kernel consumers), FLUSH and ATOMIC_WRITE (only through
//! the extended post of a few providers); and zero-based regions, because the kernel wants an
//! address of a region to lie in its page as the memory does (uverbs_cmd.c, ib_uverbs_reg_mr).

use easy_ext::ext;
use vhost_rdma_engine::nic::limits::{
    GID_TABLE_LEN, KEEPALIVE_MS, MAX_CQE, MAX_INLINE, MAX_MSG, MAX_SGE, MAX_WR, VENDOR_ID,
};
use vhost_rdma_engine::nic::shape::Bounds;
use vhost_rdma_engine::nic::table;
use virtio_rdma_abi::{self as abi, cap};
use zerocopy::little_endian::{U32, U64};

use super::mcast::Mcast as _;
use super::mw::WindowVerbs as _;
use super::nic::{Nic, Rnic};
use super::verbs::HostPort;

/// What every such NIC offers.
const CAPS: u64 = cap::SRQ
    | cap::UC
    | cap::UD
    | cap::CQ_RESIZE
    | cap::CQ_MODERATE
    | cap::MR_REREG
    | cap::SRQ_RESIZE
    | cap::SQD
    | cap::DMA_MR;

impl Rnic {
    fn max_wr(&self) -> u32 {
        // Rings are powers of two, and so is what is reported: what fits the report fits the
        // hardware.
        let host = self.host.limits().max_qp_wr.min(self.host.cq_entries()).max(1);
        MAX_WR.min(1 << host.ilog2())
    }

    fn max_sge(&self) -> u32 {
        MAX_SGE.min(self.host.limits().max_sge)
    }

    fn max_inline(&self) -> u32 {
        MAX_INLINE.min(self.host.limits().max_inline)
    }

    pub(super) fn bounds(&self) -> Bounds {
        Bounds { max_wr: self.max_wr(), max_sge: self.max_sge(), max_inline: self.max_inline() }
    }
}

#[ext(Limits)]
pub(super) impl Nic {
    fn device_attributes(&self) -> abi::QueryDeviceResp {
        let limits = &self.settings.limits;
        let host = self.backing.host.limits();
        let bounds = self.backing.bounds();
        let n = U32::new;
        let [a, b, c, d, e, f] = self.settings.mac;
        let caps = [
            (host.atomics, cap::ATOMIC),
            (host.windows_1, cap::MW_TYPE1),
            (host.windows_2, cap::MW_TYPE2),
            (self.has_multicast(), cap::MCAST),
        ];
        let caps = caps.iter().filter(|(has, _)| *has).fold(CAPS, |caps, (_, cap)| caps | cap);
        abi::QueryDeviceResp {
            // EUI-64 of the MAC (IBTA A16.3).
            guid: U64::new(u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])),
            caps: U64::new(caps),
            max_mr_size: U64::new(limits.mr_bytes(&self.space).min(host.max_mr_size)),
            max_mr_bytes: U64::new(limits.mr_bytes(&self.space)),
            page_size_cap: U64::new(host.page_size_cap),
            fw_ver: U64::new(u64::from(abi::ABI_VERSION)),
            clock_khz: U64::new(1_000_000),
            vendor_id: n(VENDOR_ID),
            vendor_part_id: n(abi::DEVICE_ID),
            hw_ver: n(abi::ABI_VERSION),
            max_contexts: n(limits.max_contexts),
            max_pd: n(limits.max_pds.min(host.max_pd)),
            max_mr: n(limits.max_mrs.min(host.max_mr)),
            max_mw: n(self.max_windows()),
            max_ah: n(limits.max_ahs.min(host.max_ah)),
            max_cq: n(limits.max_cqs.min(table::MOST)),
            max_cqe: n(MAX_CQE),
            max_qp: n(limits.max_qps.min(host.max_qp)),
            max_qp_wr: n(bounds.max_wr),
            max_send_sge: n(bounds.max_sge),
            max_recv_sge: n(bounds.max_sge),
            max_rd_sge: n(bounds.max_sge.min(host.max_sge_rd)),
            max_inline: n(bounds.max_inline),
            max_srq: n(limits.max_srqs.min(host.max_srq).min(table::MOST)),
            max_srq_wr: n(bounds.max_wr.min(host.max_srq_wr)),
            max_srq_sge: n(MAX_SGE.min(host.max_srq_sge)),
            max_rd_atom: n(host.max_qp_rd_atom),
            max_init_rd_atom: n(host.max_qp_init_rd_atom),
            local_ca_ack_delay: n(host.local_ca_ack_delay),
            keepalive_ms: n(KEEPALIVE_MS),
            max_mcast_groups: n(self.max_mcast_groups()),
            max_mcast_qp_attach: n(self.max_mcast_qps()),
            max_pkeys: n(1),
            ..abi::QueryDeviceResp::default()
        }
    }

    fn port_attributes(&mut self) -> abi::QueryPortResp {
        // A port that cannot be asked is down.
        let port = self.backing.host.port().unwrap_or(HostPort {
            state: 1,
            phys_state: 3,
            ..HostPort::default()
        });
        abi::QueryPortResp {
            max_msg_sz: U32::new(MAX_MSG.min(port.max_msg_sz)),
            gid_tbl_len: U32::new(u32::from(GID_TABLE_LEN)),
            pkey_tbl_len: U32::new(1),
            state: port.state,
            phys_state: port.phys_state,
            max_mtu: port.max_mtu,
            active_mtu: port.active_mtu,
            active_speed: port.active_speed,
            active_width: port.active_width,
            ..abi::QueryPortResp::default()
        }
    }
}
