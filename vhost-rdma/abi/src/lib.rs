//! The virtio RDMA device ABI, version 1, as `docs/virtio-rdma.md` specifies it.
//!
//! The Rust half of one definition that stands three times: here, in `include/virtio_rdma_abi.h`
//! and in section 12 of the document. The test `tests/agreement.rs` proves that every name, size,
//! offset and number is the same in all three.
//!
//! All structs are plain old data in little-endian byte order with alignment 1, so they can be read
//! from and written to any byte slice with [`zerocopy`]. `Default` is all zeroes, which is also
//! what reserved fields must hold. Names are those of the C header without `VIRTIO_RDMA_` and the
//! prefix of their group: `VIRTIO_RDMA_CMD_QP_CREATE` is [`cmd::QP_CREATE`],
//! `struct virtio_rdma_sq_wqe` is [`SqWqe`]. A field named `type` in C is `r#type`.
//!
//! This crate holds layouts and numbers only: no behaviour, no dependence on the device or on a
//! driver.

#![no_std]
#![forbid(unsafe_code)]
// Every ABI struct derives Debug; what the lint sees are helper types that zerocopy's derives make
// for its own use.
#![allow(missing_debug_implementations)]

mod commands;
mod config;
mod cqe;
mod doorbell;
mod events;
mod memory;
mod page_list;
mod qp;
mod queues;
mod rings;
mod table;
mod wqe;

pub use commands::{
    CmdHdr, ContextCreateReq, ContextCreateResp, DbPageAddReq, DbPageAddResp, GidSetReq, InitReq,
    InitResp, KeepaliveReq, ObjectReq, ObjectResp, QueryCountersResp, QueryDeviceResp,
    QueryPortResp, RespHdr, cap, cmd, cmd_status, gid_type,
};
pub use config::{
    Config, identity,
    identity::{ABI_VERSION, DEVICE_ID, LAB_DEVICE_ID, MAGIC, PAGE_SIZE},
    vq,
};
pub use cqe::{Cqe, cqe_flags, cqe_shape, cqe_shape::CQE_LOG2_STRIDE, wc_opcode, wc_status};
pub use doorbell::{db, status_page};
pub use events::{AsyncEvent, CompEvent, event};
pub use memory::{
    MrAllocReq, MrDmaReq, MrRegReq, MrReregReq, MrResp, MwAllocReq, access, mw_type, rereg,
};
pub use page_list::{
    PageList, list,
    list::{LIST_PAGE_ENTRIES, MAX_LIST_LEVELS},
};
pub use qp::{
    AhCreateReq, Av, McastReq, QpAttr, QpCreateReq, QpCreateResp, QpModifyReq, QpQueryResp,
    attr_mask, av_flags, qp_flags, qp_numbers,
    qp_numbers::{GSI_QPN, NO_SRQ},
    qps, qpt,
};
pub use queues::{
    CqCreateReq, CqModerateReq, CqResizeReq, SrqCreateReq, SrqCreateResp, SrqModifyReq,
    SrqQueryResp, srq_mask,
};
pub use rings::{arm, ctrl};
pub use table::{FieldLayout, StructLayout};
pub use wqe::{
    RqWqe, Sge, SqWqe, flush, opcode, send_flags, wqe_shape,
    wqe_shape::{
        RQ_WQE_DATA, RQ_WQE_MIN_LOG2_STRIDE, SQ_WQE_DATA, SQ_WQE_MIN_LOG2_STRIDE,
        WQE_MAX_LOG2_STRIDE,
    },
};

/// Every constant of the ABI by group: name in the C header and value.
pub const CONSTANTS: &[&[(&str, u64)]] = &[
    identity::TABLE,
    vq::TABLE,
    list::TABLE,
    status_page::TABLE,
    db::TABLE,
    ctrl::TABLE,
    arm::TABLE,
    opcode::TABLE,
    flush::TABLE,
    send_flags::TABLE,
    wqe_shape::TABLE,
    cqe_shape::TABLE,
    cqe_flags::TABLE,
    wc_opcode::TABLE,
    wc_status::TABLE,
    event::TABLE,
    cmd::TABLE,
    cmd_status::TABLE,
    cap::TABLE,
    gid_type::TABLE,
    access::TABLE,
    rereg::TABLE,
    mw_type::TABLE,
    srq_mask::TABLE,
    qpt::TABLE,
    qp_numbers::TABLE,
    qp_flags::TABLE,
    qps::TABLE,
    attr_mask::TABLE,
    av_flags::TABLE,
];

/// Every struct of the ABI.
pub const STRUCTS: &[StructLayout] = &[
    Config::LAYOUT,
    PageList::LAYOUT,
    Sge::LAYOUT,
    SqWqe::LAYOUT,
    RqWqe::LAYOUT,
    Cqe::LAYOUT,
    CompEvent::LAYOUT,
    AsyncEvent::LAYOUT,
    CmdHdr::LAYOUT,
    RespHdr::LAYOUT,
    InitReq::LAYOUT,
    InitResp::LAYOUT,
    KeepaliveReq::LAYOUT,
    QueryDeviceResp::LAYOUT,
    QueryPortResp::LAYOUT,
    GidSetReq::LAYOUT,
    QueryCountersResp::LAYOUT,
    ContextCreateReq::LAYOUT,
    ContextCreateResp::LAYOUT,
    DbPageAddReq::LAYOUT,
    DbPageAddResp::LAYOUT,
    ObjectReq::LAYOUT,
    ObjectResp::LAYOUT,
    MrRegReq::LAYOUT,
    MrResp::LAYOUT,
    MrDmaReq::LAYOUT,
    MrAllocReq::LAYOUT,
    MrReregReq::LAYOUT,
    MwAllocReq::LAYOUT,
    CqCreateReq::LAYOUT,
    CqResizeReq::LAYOUT,
    CqModerateReq::LAYOUT,
    SrqCreateReq::LAYOUT,
    SrqCreateResp::LAYOUT,
    SrqModifyReq::LAYOUT,
    SrqQueryResp::LAYOUT,
    QpCreateReq::LAYOUT,
    QpCreateResp::LAYOUT,
    Av::LAYOUT,
    QpAttr::LAYOUT,
    QpModifyReq::LAYOUT,
    QpQueryResp::LAYOUT,
    AhCreateReq::LAYOUT,
    McastReq::LAYOUT,
];
