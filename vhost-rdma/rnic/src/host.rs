//! Opening an RNIC of this host by the name of its RDMA device.

use super::faults::Faults;
use super::null::Null;
use super::verbs::{HostGid, HostVerbs};

/// The device that needs no hardware: see `null`.
const NULL: &str = "null";

/// Its address: 192.0.2.1, which is nobody's (RFC 5737).
const NULL_GID: HostGid =
    HostGid { index: 0, gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1] };

/// Why a device cannot be opened, with what to do next.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The daemon was built without libibverbs.
    #[error(
        "this vhost-rdma was built without RNIC support; install the packaged one, or build it with `cargo build --features host-rnic`"
    )]
    NotBuilt,
    /// There is no such device.
    #[error(
        "there is no RDMA device {device:?}; this host has {}", list(.present)
    )]
    NoDevice {
        /// As given.
        device: String,
        /// What there is.
        present: Vec<String>,
    },
    /// Its port does not speak RoCE v2.
    #[error(
        "RDMA device {device:?} has no RoCE v2 address; give its network interface an IP address"
    )]
    NoAddress {
        /// As given.
        device: String,
    },
    /// The host refuses.
    #[error("cannot open RDMA device {device:?}: cannot {action}: {source}{}", hint(.source))]
    Host {
        /// As given.
        device: String,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

fn list(present: &[String]) -> String {
    if present.is_empty() {
        "none (`rdma link` lists them; `rdma link add rxe0 type rxe netdev IF` makes a software one)".to_owned()
    } else {
        present.join(", ")
    }
}

fn hint(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            "; the daemon's user needs access to /dev/infiniband/uverbs*"
        }
        Some(libc::ENOMEM) => "; raise the daemon's RLIMIT_MEMLOCK (LimitMEMLOCK=infinity)",
        _ => "",
    }
}

/// Loads what opening a device takes from the disk, for the last time: the drivers of the devices
/// that there are. Who may load no code afterwards calls this before.
pub fn prepare() {
    #[cfg(feature = "host-rnic")]
    super::ibverbs::prepare();
}

/// Opens a device.
///
/// # Errors
/// See [`OpenError`].
pub fn open(device: &str) -> Result<Box<dyn HostVerbs>, OpenError> {
    if device == NULL {
        let faults = Faults::default();
        faults.set_gids(vec![NULL_GID]);
        let opened = Null::new(faults);
        return opened.map(|null| Box::new(null) as Box<dyn HostVerbs>).map_err(|source| {
            OpenError::Host { device: device.to_owned(), action: "make an eventfd", source }
        });
    }
    #[cfg(feature = "host-rnic")]
    return super::ibverbs::open(device);
    #[cfg(not(feature = "host-rnic"))]
    Err(OpenError::NotBuilt)
}
