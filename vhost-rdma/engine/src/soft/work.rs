//! What of a command the engine has still to do (`settle`).

use crate::nic::roster::Walk;
use crate::nic::verb::CqResize;

/// CQ_RESIZE, as far as it goes before the CQ moves.
#[derive(Debug)]
pub(crate) struct SettleCq {
    /// Queue pairs whose posted sends are still to be executed.
    pub(super) qps: Walk,
    pub(super) turns: u32,
    pub(super) resize: CqResize,
}
