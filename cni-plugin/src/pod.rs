//! The pod's network namespace, and names of what is made for a NIC.

use std::path::Path;

use cni_skel::{Code, Error};
use rdma_netlink::Netns;
use rdma_netlink::link::{Link, Links};

use crate::CONFLICT;

/// Both ends of the work: the host's namespace, in which this program runs, and the pod's.
#[derive(Debug)]
pub(crate) struct Namespaces {
    /// The host's interfaces.
    pub(crate) host: Links,
    /// The pod's interfaces.
    pub(crate) pod: Links,
    /// The host's namespace.
    pub(crate) host_netns: Netns,
    /// The pod's namespace.
    pub(crate) pod_netns: Netns,
    /// The pod's namespace as the runtime named it.
    pub(crate) path: String,
}

impl Namespaces {
    /// Opens both.
    ///
    /// # Errors
    /// Code 3 if the pod's is gone, 4 if the path is something else or not UTF-8.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let pod_netns = Netns::from_path(path).map_err(|error| {
            let code = if error.is_not_found() {
                Code::UNKNOWN_CONTAINER
            } else {
                Code::INVALID_ENVIRONMENT
            };
            Error::new(code, format!("CNI_NETNS: {error}"))
        })?;
        let text = path.to_str().ok_or_else(|| {
            Error::new(Code::INVALID_ENVIRONMENT, format!("CNI_NETNS={path:?} is not UTF-8"))
        })?;
        Ok(Self {
            host: Links::open().map_err(netlink)?,
            pod: Links::open_in(&pod_netns).map_err(netlink)?,
            host_netns: Netns::current().map_err(netlink)?,
            pod_netns,
            path: text.to_owned(),
        })
    }

    /// Refuses a name that is taken in the pod.
    pub(crate) fn free_in_pod(&mut self, name: &str) -> Result<(), Error> {
        match self.pod.by_name(name) {
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(netlink(error)),
            Ok(_) => Err(Error::new(CONFLICT, format!("the pod already has an interface {name}"))),
        }
    }
}

/// An interface by its own name, if it is there: others that it has anybody may have given it.
pub(crate) fn find(links: &mut Links, name: &str) -> Result<Option<Link>, Error> {
    match links.by_name(name) {
        Ok(link) => Ok(Some(link).filter(|link| link.name == name)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(netlink(error)),
    }
}

/// A failed request to the kernel.
#[allow(clippy::needless_pass_by_value, reason = "it is used with map_err")]
pub(crate) fn netlink(error: rdma_netlink::Error) -> Error {
    let code = if error.is_exists() { CONFLICT } else { Code::INTERNAL };
    Error::new(code, error.to_string())
}

/// What an interface of ours is described with (`ip link` shows it): whose it is, and how DEL knows
/// its own without the agent.
pub(crate) fn alias(nic: &str, container: &str) -> String {
    format!("{ALIAS}{nic} {container}")
}

/// How [`alias`] begins.
pub(crate) const ALIAS: &str = "vhost-rdma ";

/// A name for something of a NIC in a container: the same whenever it is asked for, another for
/// every other pair (FNV-1a; 48 bits are as much as a name holds, and a name that is taken is an
/// error, not an accident).
pub(crate) fn name(prefix: &str, nic: &str, container: &str) -> String {
    let bytes = nic.bytes().chain([0]).chain(container.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{prefix}{:012x}", hash >> 16)
}
