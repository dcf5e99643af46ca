//! Attributes of queue pairs, and work requests.

use virtio_rdma_abi::{self as abi, attr_mask as m, qps, qpt};
use zerocopy::little_endian::{U16, U32, U64};

pub fn init_attr(kind: u32) -> abi::QpAttr {
    let mask = if kind == qpt::UD { m::QKEY } else { m::ACCESS_FLAGS };
    abi::QpAttr {
        mask: U32::new(m::STATE | m::PKEY_INDEX | m::PORT | mask),
        qp_state: qps::INIT,
        port_num: 1,
        qkey: U32::new(0x1111),
        qp_access_flags: U32::new(0xf),
        ..abi::QpAttr::default()
    }
}

pub fn rtr_attr(kind: u32, peer: (u32, [u8; 16])) -> abi::QpAttr {
    let mut mask = m::STATE;
    if kind != qpt::UD {
        mask |= m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN;
    }
    if kind == qpt::RC {
        mask |= m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER;
    }
    abi::QpAttr {
        mask: U32::new(mask),
        qp_state: qps::RTR,
        path_mtu: 5,
        dest_qpn: U32::new(peer.0),
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        ah: av(peer.1),
        ..abi::QpAttr::default()
    }
}

pub fn rts_attr(kind: u32) -> abi::QpAttr {
    let mut mask = m::STATE | m::SQ_PSN;
    if kind == qpt::RC {
        mask |= m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::MAX_QP_RD_ATOMIC;
    }
    abi::QpAttr {
        mask: U32::new(mask),
        qp_state: qps::RTS,
        timeout: 14,
        retry_cnt: 2,
        rnr_retry: 3,
        max_rd_atomic: 1,
        ..abi::QpAttr::default()
    }
}

pub fn state_attr(state: u8) -> abi::QpAttr {
    abi::QpAttr { mask: U32::new(m::STATE), qp_state: state, ..abi::QpAttr::default() }
}

pub fn av(dgid: [u8; 16]) -> abi::Av {
    abi::Av {
        dgid,
        sgid_index: U16::new(1),
        port_num: 1,
        flags: abi::av_flags::GRH,
        hop_limit: 64,
        ..abi::Av::default()
    }
}

/// A send work request with elements; `opcode` and flags are the ABI's.
pub fn wqe(opcode: u8, flags: u8, wr_id: u64) -> abi::SqWqe {
    abi::SqWqe { wr_id: U64::new(wr_id), opcode, flags, ..abi::SqWqe::default() }
}
