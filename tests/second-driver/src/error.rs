//! What can go wrong, in words for whoever runs the program. Nobody handles the cases apart.

use std::io;

use crate::layout::{COMPLETION_STATUSES, STATUSES};

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}: {1}")]
    Host(&'static str, io::Error),
    #[error("no {0} within the timeout")]
    Timeout(&'static str),
    #[error("the device is lost: it does not answer")]
    Lost,
    #[error("command {0:#04x} is refused: {name}", name = name(STATUSES, *.1))]
    Refused(u16, u32),
    #[error("work request {0:#x} failed: {name}", name = name(COMPLETION_STATUSES, *.1))]
    Failed(u64, u32),
    #[error("the device breaks its specification: {0}")]
    Device(String),
    #[error("the peer: {0}")]
    Peer(String),
    #[error("{0}")]
    Argument(String),
}

impl Error {
    /// For `map_err` on a call of the host.
    pub(crate) fn host<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Host(what, source.into())
    }
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

fn name(names: &str, status: u32) -> String {
    let name = names.split(' ').nth(status as usize).filter(|name| *name != "-");
    name.map_or_else(|| format!("status {status}"), str::to_owned)
}
