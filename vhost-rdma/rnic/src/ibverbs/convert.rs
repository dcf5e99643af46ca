//! Between our structures and those of `infiniband/verbs.h`: plain data, no call.
//!
//! The ABI took its numbers of states, masks, access flags, MTUs, opcodes and statuses from verbs;
//! the tests at the end hold it to that.

use std::ffi::{c_int, c_uint};

use ibverbs_sys as ffi;
use virtio_rdma_abi::{self as abi, qpt};

use crate::verbs::{HostError, HostGid, HostLimits, HostPort, QpInit, Result};

const INVALID: HostError = HostError(libc::EINVAL);

/// rdma_rxe (rxe_param.h). It says that it has windows of type 2, but a peer that invalidates one
/// twice has the host's kernel follow a null pointer (rxe_mw.c, rxe_do_invalidate_mw: a free window
/// is not refused).
const RXE_VENDOR: u32 = 0xff_ffff;

fn count(value: c_int) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

pub(super) fn limits(attr: &ffi::ibv_device_attr) -> HostLimits {
    let has = |flag| attr.device_cap_flags & flag != 0;
    HostLimits {
        guid: u64::from_be(attr.node_guid),
        vendor_id: attr.vendor_id,
        vendor_part_id: attr.vendor_part_id,
        hw_ver: attr.hw_ver,
        page_size_cap: attr.page_size_cap,
        max_mr_size: attr.max_mr_size,
        max_qp: count(attr.max_qp),
        max_qp_wr: count(attr.max_qp_wr),
        max_sge: count(attr.max_sge),
        // Some devices leave it at 0 and mean the same.
        max_sge_rd: if attr.max_sge_rd > 0 { count(attr.max_sge_rd) } else { count(attr.max_sge) },
        max_inline: 0,
        max_cq: count(attr.max_cq),
        max_cqe: count(attr.max_cqe),
        max_mr: count(attr.max_mr),
        max_mw: count(attr.max_mw),
        max_pd: count(attr.max_pd),
        max_ah: count(attr.max_ah),
        max_srq: count(attr.max_srq),
        max_srq_wr: count(attr.max_srq_wr),
        max_srq_sge: count(attr.max_srq_sge),
        max_qp_rd_atom: count(attr.max_qp_rd_atom),
        max_qp_init_rd_atom: count(attr.max_qp_init_rd_atom),
        local_ca_ack_delay: attr.local_ca_ack_delay.into(),
        atomics: attr.atomic_cap != ffi::IBV_ATOMIC_NONE,
        invalidate: has(ffi::IBV_DEVICE_MEM_MGT_EXTENSIONS),
        max_mcast_groups: count(attr.max_mcast_grp),
        max_mcast_qps: count(attr.max_mcast_qp_attach),
        windows_1: has(ffi::IBV_DEVICE_MEM_WINDOW),
        // What frees them comes with the other extension.
        windows_2: has(ffi::IBV_DEVICE_MEM_WINDOW_TYPE_2B)
            && has(ffi::IBV_DEVICE_MEM_MGT_EXTENSIONS)
            && attr.vendor_id != RXE_VENDOR,
    }
}

fn small(value: c_uint) -> u8 {
    u8::try_from(value).unwrap_or(0)
}

pub(super) fn port(attr: &ffi::ibv_port_attr) -> HostPort {
    HostPort {
        state: small(attr.state),
        phys_state: attr.phys_state,
        max_mtu: small(attr.max_mtu),
        active_mtu: small(attr.active_mtu),
        active_speed: attr.active_speed,
        active_width: attr.active_width,
        max_msg_sz: attr.max_msg_sz,
    }
}

pub(super) fn gid(entry: &ffi::ibv_gid_entry) -> Option<HostGid> {
    // SAFETY: both members of the union are 16 bytes of any value.
    let gid = unsafe { entry.gid.raw };
    Some(HostGid { index: u16::try_from(entry.gid_index).ok()?, gid })
}

pub(super) fn address(av: &abi::Av) -> Result<ffi::ibv_ah_attr> {
    Ok(ffi::ibv_ah_attr {
        grh: ffi::ibv_global_route {
            dgid: ffi::ibv_gid { raw: av.dgid },
            flow_label: av.flow_label.get() & 0xf_ffff,
            sgid_index: u8::try_from(av.sgid_index.get()).map_err(|_| INVALID)?,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
        },
        sl: av.sl,
        static_rate: av.static_rate,
        is_global: 1,
        port_num: super::PORT,
        ..ffi::ibv_ah_attr::default()
    })
}

pub(super) fn qp_init(init: &QpInit) -> Result<ffi::ibv_qp_init_attr> {
    let kind = match init.kind {
        qpt::RC => ffi::ibv_qp_type::IBV_QPT_RC,
        qpt::UC => ffi::ibv_qp_type::IBV_QPT_UC,
        qpt::UD => ffi::ibv_qp_type::IBV_QPT_UD,
        _ => return Err(HostError(libc::EOPNOTSUPP)),
    };
    Ok(ffi::ibv_qp_init_attr {
        cap: ffi::ibv_qp_cap {
            max_send_wr: init.max_send_wr.max(1),
            // A QP with an SRQ has no receive queue of its own.
            max_recv_wr: if init.srq.is_some() { 0 } else { init.max_recv_wr.max(1) },
            max_send_sge: init.max_send_sge.max(1),
            max_recv_sge: if init.srq.is_some() { 0 } else { init.max_recv_sge.max(1) },
            max_inline_data: init.max_inline,
        },
        qp_type: kind,
        sq_sig_all: 0,
        ..ffi::ibv_qp_init_attr::default()
    })
}

pub(super) fn qp_attr(attr: &abi::QpAttr) -> Result<(ffi::ibv_qp_attr, c_int)> {
    let mask = attr.mask.get();
    let mut out = ffi::ibv_qp_attr {
        qp_state: attr.qp_state.into(),
        cur_qp_state: attr.cur_qp_state.into(),
        path_mtu: attr.path_mtu.into(),
        path_mig_state: attr.path_mig_state.into(),
        qkey: attr.qkey.get(),
        rq_psn: attr.rq_psn.get(),
        sq_psn: attr.sq_psn.get(),
        dest_qp_num: attr.dest_qpn.get(),
        qp_access_flags: attr.qp_access_flags.get() & !abi::access::OPTIONAL_MASK,
        pkey_index: attr.pkey_index.get(),
        en_sqd_async_notify: attr.en_sqd_async_notify,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: super::PORT,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        ..ffi::ibv_qp_attr::default()
    };
    if mask & abi::attr_mask::AV != 0 {
        out.ah_attr = address(&attr.ah)?;
    }
    Ok((out, c_int::try_from(mask).map_err(|_| INVALID)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio_rdma_abi::{access, attr_mask, event, mw_type, opcode, qps, wc_opcode, wc_status};

    #[test]
    fn the_abi_has_the_numbers_of_verbs() {
        let same = |ours: u32, theirs: c_uint, what: &str| assert_eq!(ours, theirs, "{what}");
        use ffi::ibv_access_flags as a;
        same(access::LOCAL_WRITE, a::IBV_ACCESS_LOCAL_WRITE.0, "LOCAL_WRITE");
        same(access::REMOTE_WRITE, a::IBV_ACCESS_REMOTE_WRITE.0, "REMOTE_WRITE");
        same(access::REMOTE_READ, a::IBV_ACCESS_REMOTE_READ.0, "REMOTE_READ");
        same(access::REMOTE_ATOMIC, a::IBV_ACCESS_REMOTE_ATOMIC.0, "REMOTE_ATOMIC");
        same(access::MW_BIND, a::IBV_ACCESS_MW_BIND.0, "MW_BIND");
        same(access::ZERO_BASED, a::IBV_ACCESS_ZERO_BASED.0, "ZERO_BASED");
        same(mw_type::TYPE1, ffi::IBV_MW_TYPE_1, "type 1");
        same(mw_type::TYPE2, ffi::IBV_MW_TYPE_2, "type 2");
        use ffi::ibv_qp_attr_mask as m;
        for (ours, theirs) in [
            (attr_mask::STATE, m::IBV_QP_STATE),
            (attr_mask::CUR_STATE, m::IBV_QP_CUR_STATE),
            (attr_mask::EN_SQD_ASYNC_NOTIFY, m::IBV_QP_EN_SQD_ASYNC_NOTIFY),
            (attr_mask::ACCESS_FLAGS, m::IBV_QP_ACCESS_FLAGS),
            (attr_mask::PKEY_INDEX, m::IBV_QP_PKEY_INDEX),
            (attr_mask::PORT, m::IBV_QP_PORT),
            (attr_mask::QKEY, m::IBV_QP_QKEY),
            (attr_mask::AV, m::IBV_QP_AV),
            (attr_mask::PATH_MTU, m::IBV_QP_PATH_MTU),
            (attr_mask::TIMEOUT, m::IBV_QP_TIMEOUT),
            (attr_mask::RETRY_CNT, m::IBV_QP_RETRY_CNT),
            (attr_mask::RNR_RETRY, m::IBV_QP_RNR_RETRY),
            (attr_mask::RQ_PSN, m::IBV_QP_RQ_PSN),
            (attr_mask::MAX_QP_RD_ATOMIC, m::IBV_QP_MAX_QP_RD_ATOMIC),
            (attr_mask::MIN_RNR_TIMER, m::IBV_QP_MIN_RNR_TIMER),
            (attr_mask::SQ_PSN, m::IBV_QP_SQ_PSN),
            (attr_mask::MAX_DEST_RD_ATOMIC, m::IBV_QP_MAX_DEST_RD_ATOMIC),
            (attr_mask::DEST_QPN, m::IBV_QP_DEST_QPN),
        ] {
            same(ours, theirs.0, "attribute mask");
        }
        use ffi::ibv_qp_state as s;
        for (ours, theirs) in [
            (qps::RESET, s::IBV_QPS_RESET),
            (qps::INIT, s::IBV_QPS_INIT),
            (qps::RTR, s::IBV_QPS_RTR),
            (qps::RTS, s::IBV_QPS_RTS),
            (qps::SQD, s::IBV_QPS_SQD),
            (qps::SQE, s::IBV_QPS_SQE),
            (qps::ERR, s::IBV_QPS_ERR),
        ] {
            same(ours.into(), theirs, "state");
        }
        use ffi::ibv_wr_opcode as w;
        for (ours, theirs) in [
            (opcode::RDMA_WRITE, w::IBV_WR_RDMA_WRITE),
            (opcode::RDMA_WRITE_WITH_IMM, w::IBV_WR_RDMA_WRITE_WITH_IMM),
            (opcode::SEND, w::IBV_WR_SEND),
            (opcode::SEND_WITH_IMM, w::IBV_WR_SEND_WITH_IMM),
            (opcode::RDMA_READ, w::IBV_WR_RDMA_READ),
            (opcode::ATOMIC_CMP_AND_SWP, w::IBV_WR_ATOMIC_CMP_AND_SWP),
            (opcode::ATOMIC_FETCH_AND_ADD, w::IBV_WR_ATOMIC_FETCH_AND_ADD),
            (opcode::SEND_WITH_INV, w::IBV_WR_SEND_WITH_INV),
            (opcode::LOCAL_INV, w::IBV_WR_LOCAL_INV),
            (opcode::BIND_MW, w::IBV_WR_BIND_MW),
        ] {
            same(ours.into(), theirs, "opcode");
        }
        use ffi::ibv_wc_status as c;
        for (ours, theirs) in [
            (wc_status::SUCCESS, c::IBV_WC_SUCCESS),
            (wc_status::LOC_LEN_ERR, c::IBV_WC_LOC_LEN_ERR),
            (wc_status::LOC_QP_OP_ERR, c::IBV_WC_LOC_QP_OP_ERR),
            (wc_status::LOC_PROT_ERR, c::IBV_WC_LOC_PROT_ERR),
            (wc_status::MW_BIND_ERR, c::IBV_WC_MW_BIND_ERR),
            (wc_status::WR_FLUSH_ERR, c::IBV_WC_WR_FLUSH_ERR),
            (wc_status::REM_INV_REQ_ERR, c::IBV_WC_REM_INV_REQ_ERR),
            (wc_status::REM_ACCESS_ERR, c::IBV_WC_REM_ACCESS_ERR),
            (wc_status::REM_OP_ERR, c::IBV_WC_REM_OP_ERR),
            (wc_status::RETRY_EXC_ERR, c::IBV_WC_RETRY_EXC_ERR),
            (wc_status::RNR_RETRY_EXC_ERR, c::IBV_WC_RNR_RETRY_EXC_ERR),
            (wc_status::FATAL_ERR, c::IBV_WC_FATAL_ERR),
            (wc_status::GENERAL_ERR, c::IBV_WC_GENERAL_ERR),
        ] {
            same(ours.into(), theirs, "status");
        }
        use ffi::ibv_wc_opcode as o;
        same(wc_opcode::RECV.into(), o::IBV_WC_RECV, "RECV");
        same(wc_opcode::RECV_RDMA_WITH_IMM.into(), o::IBV_WC_RECV_RDMA_WITH_IMM, "RECV_IMM");
        same(event::QP_FATAL, ffi::IBV_EVENT_QP_FATAL, "QP_FATAL");
        same(event::QP_REQ_ERR, ffi::IBV_EVENT_QP_REQ_ERR, "QP_REQ_ERR");
        same(event::QP_ACCESS_ERR, ffi::IBV_EVENT_QP_ACCESS_ERR, "QP_ACCESS_ERR");
        same(event::COMM_EST, ffi::IBV_EVENT_COMM_EST, "COMM_EST");
        same(event::SQ_DRAINED, ffi::IBV_EVENT_SQ_DRAINED, "SQ_DRAINED");
        same(event::SRQ_ERR, ffi::IBV_EVENT_SRQ_ERR, "SRQ_ERR");
        same(event::SRQ_LIMIT_REACHED, ffi::IBV_EVENT_SRQ_LIMIT_REACHED, "SRQ_LIMIT");
        same(event::QP_LAST_WQE_REACHED, ffi::IBV_EVENT_QP_LAST_WQE_REACHED, "LAST_WQE");
    }
}
