//! What of a command the engine has still to do.

use virtio_rdma_abi as abi;

use crate::nic::roster::Walk;
use crate::nic::verb::CqResize;

/// A command that goes in steps.
#[derive(Debug)]
pub(crate) enum SoftWork {
    /// See `settle`.
    Settle(SettleCq),
    /// See `modify`.
    Recover(Recover),
}

/// CQ_RESIZE, as far as it goes before the CQ moves.
#[derive(Debug)]
pub(crate) struct SettleCq {
    /// Queue pairs whose posted sends are still to be executed.
    pub(super) qps: Walk,
    pub(super) turns: u32,
    pub(super) resize: CqResize,
}

/// QP_MODIFY from SQE to RTS, as far as it goes before the state changes.
#[derive(Debug)]
pub(crate) struct Recover {
    pub(super) ctx: u32,
    pub(super) qpn: u32,
    pub(super) attr: Box<abi::QpAttr>,
    /// Sends that are still to be flushed, at most.
    pub(super) sends: u32,
}
