//! Why an RNIC cannot be opened, with what to do next.

/// Why a device cannot be opened, with what to do next.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The daemon was built without libibverbs.
    #[error(
        "this vhost-rdma was built without RNIC support; install the packaged one, \
         or build it with `cargo build --features host-rnic`"
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
        "none (`rdma link` lists them; \
         `rdma link add rxe0 type rxe netdev IF` makes a software one)"
            .to_owned()
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
