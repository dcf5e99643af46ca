//! How a request is refused, for whoever asked through the socket.
//!
//! At the bottom of the folder: it touches neither the agent nor its tables. Why something is
//! refused is said by who refuses it.

use vhost_rdma_agent_api::{self as api, FaultKind};

/// A refusal, in words.
pub(super) fn fault(kind: FaultKind, message: impl Into<String>) -> api::Fault {
    api::Fault { kind, message: message.into() }
}

/// What should not have happened.
pub(super) fn internal(error: impl std::fmt::Display) -> api::Fault {
    fault(FaultKind::Internal, error.to_string())
}

/// The daemon is being started again, most likely.
pub(super) fn later(error: impl std::fmt::Display) -> api::Fault {
    fault(FaultKind::TryAgain, error.to_string())
}
