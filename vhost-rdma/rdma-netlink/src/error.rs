//! What can go wrong, said in words that an operator can act on.

use std::io;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a request failed.
///
/// `what` completes the sentence "cannot …".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused a request.
    #[error("cannot {what}: {}", refusal(*errno, message.as_deref()))]
    Kernel {
        /// What was asked for.
        what: String,
        /// The error number, positive.
        errno: i32,
        /// The kernel's own explanation (extended acknowledgement), where it gave one.
        message: Option<String>,
    },
    /// A system call or a file operation failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel said something that this crate does not understand.
    #[error("cannot {what}: unexpected answer of the kernel: {reason}")]
    Decode {
        /// What was asked for.
        what: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// There is no such thing.
    #[error("{0}")]
    NotFound(String),
    /// An argument makes no sense; nothing was done.
    #[error("{0}")]
    Invalid(String),
    /// Something stands in the way that can be removed: a user, a reservation, a driver that is not
    /// loaded. Nothing was done.
    #[error("{0}")]
    Conflict(String),
}

fn refusal(errno: i32, message: Option<&str>) -> String {
    let number = io::Error::from_raw_os_error(errno);
    match message {
        Some(message) => format!("{message} ({number})"),
        None => number.to_string(),
    }
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }

    pub(crate) fn decode(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Decode { what: what.into(), reason: reason.into() }
    }

    /// The system's error number, if that is what it is about.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel { errno, .. } => Some(*errno),
            Self::Io { source, .. } => source.raw_os_error(),
            Self::Decode { .. } | Self::NotFound(_) | Self::Invalid(_) | Self::Conflict(_) => None,
        }
    }

    fn is(&self, errno: rustix::io::Errno) -> bool {
        self.errno() == Some(errno.raw_os_error())
    }

    /// The thing that was named is not there (any more).
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        use rustix::io::Errno;
        matches!(self, Self::NotFound(_))
            || self.is(Errno::NODEV)
            || self.is(Errno::NOENT)
            || self.is(Errno::SRCH)
            || self.is(Errno::NXIO)
            || self.is(Errno::ADDRNOTAVAIL)
    }

    /// What was to be made is there already, or the name is taken.
    #[must_use]
    pub fn is_exists(&self) -> bool {
        self.is(rustix::io::Errno::EXIST)
    }

    /// The caller lacks a capability (usually `CAP_NET_ADMIN`).
    #[must_use]
    pub fn is_permission(&self) -> bool {
        self.is(rustix::io::Errno::PERM) || self.is(rustix::io::Errno::ACCESS)
    }

    /// The kernel or the driver cannot do this at all.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        use rustix::io::Errno;
        self.is(Errno::OPNOTSUPP) || self.is(Errno::NOSYS) || self.is(Errno::PROTONOSUPPORT)
    }
}
