//! How the command line fails: a message, a stable code, an exit status.

use std::io;

use tonic::{Code, Status};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The daemon refused.
    #[error("{}", .0.message())]
    Refused(Box<Status>),
    /// No daemon answers.
    #[error("{0}")]
    Unreachable(String),
    /// The daemon's socket may not be opened.
    #[error("{0}")]
    Forbidden(String),
    /// An argument makes no sense.
    #[error("{0}")]
    Usage(String),
    /// A change of the host was refused, or failed.
    #[error("{}", host_fault(.0))]
    Host(Box<rdma_netlink::Error>),
    /// Part of it was done, and this was not.
    #[error("{0}")]
    Partly(String),
    /// Anything else.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: String,
        /// What the system said.
        source: io::Error,
    },
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        // A status that carries a source was made by the transport here; the daemon's own has a
        // code and a message only.
        let local = std::error::Error::source(&status).is_some();
        if local || matches!(status.code(), Code::Unavailable | Code::Cancelled | Code::Unknown) {
            return Self::silent(status.message());
        }
        Self::Refused(Box::new(status))
    }
}

impl From<vhost_rdma_vmm::BadOption> for Failure {
    fn from(bad: vhost_rdma_vmm::BadOption) -> Self {
        Self::Usage(bad.to_string())
    }
}

impl From<rdma_netlink::Error> for Failure {
    fn from(error: rdma_netlink::Error) -> Self {
        Self::Host(Box::new(error))
    }
}

fn host_fault(error: &rdma_netlink::Error) -> String {
    if error.is_permission() { format!("{error}; this needs root") } else { error.to_string() }
}

impl Failure {
    /// A connection was made, but what came over it was no answer.
    pub(super) fn silent(why: &str) -> Self {
        Self::Unreachable(format!(
            "the daemon did not answer ({why}); its log may say why, and `vhost-rdma status` \
             whether it runs"
        ))
    }

    /// The stable name of the kind of failure.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused(status) => match status.code() {
                Code::InvalidArgument => "invalid_argument",
                Code::NotFound => "not_found",
                Code::AlreadyExists => "already_exists",
                Code::FailedPrecondition => "failed_precondition",
                Code::PermissionDenied => "permission_denied",
                Code::ResourceExhausted => "resource_exhausted",
                Code::Unimplemented => "unimplemented",
                _ => "internal",
            },
            Self::Unreachable(_) => "unavailable",
            Self::Forbidden(_) => "permission_denied",
            Self::Usage(_) => "invalid_argument",
            Self::Host(error) => match &**error {
                _ if error.is_permission() => "permission_denied",
                rdma_netlink::Error::Invalid(_) => "invalid_argument",
                rdma_netlink::Error::Conflict(_) => "failed_precondition",
                _ if error.is_not_found() => "not_found",
                _ => "internal",
            },
            Self::Partly(_) | Self::Io { .. } => "internal",
        }
    }
}

/// The exit status of a kind of failure; 0 is success.
#[must_use]
pub fn exit_code(code: &str) -> u8 {
    match code {
        "invalid_argument" => 2,
        "unavailable" => 3,
        "not_found" => 4,
        "already_exists" | "failed_precondition" => 5,
        "permission_denied" => 6,
        _ => 1,
    }
}
