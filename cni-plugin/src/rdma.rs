//! RDMA devices in namespaces.
//!
//! In exclusive mode a device is in one namespace, and moving it disconnects its users; in shared
//! mode all see it and nothing moves. Names are unique on the whole host, so a device keeps its own
//! wherever it goes.

use cni_skel::{Code, Error};
use rdma_netlink::Netns;
use rdma_netlink::rdma::{Device, NetnsMode as KernelMode, Rdma};
use vhost_rdma_agent_api::NetnsMode;

use crate::pod::netlink;
use crate::{CONFLICT, NOT_UNDONE};

/// Sees that a device is on the host, and that the host's mode is the one that the agent counts on.
/// A function without an RDMA device (an empty name) has nothing to see.
///
/// # Errors
/// Code 100 if the device is elsewhere, 7 if the mode is another.
pub(crate) fn expect(device: &str, mode: NetnsMode) -> Result<(), Error> {
    if device.is_empty() {
        return Ok(());
    }
    let mut rdma = Rdma::open().map_err(netlink)?;
    if find(&mut rdma, device)?.is_none() {
        let msg = format!("the host has no RDMA device {device}");
        return Err(Error::new(CONFLICT, msg)
            .details("another namespace has it, or its driver does not drive it"));
    }
    // Kernels before 5.1 do not say, and are exclusive in what they can do: nothing.
    let system = rdma.system().map_err(netlink)?.netns_mode;
    let (now, wanted, set) = match (system, mode) {
        (Some(KernelMode::Exclusive), NetnsMode::Shared) => ("exclusive", "shared", "shared"),
        (Some(KernelMode::Shared), NetnsMode::Exclusive) => ("shared", "exclusive", "exclusive"),
        _ => return Ok(()),
    };
    let msg =
        format!("RDMA devices are in {now} mode on this host, and the pool counts on {wanted}");
    Err(Error::new(Code::INVALID_CONFIG, msg).details(format!(
        "boot with ib_core netns_mode={} (or `rdma system set netns {set}` while there is no pod), \
         then restart the node agent",
        u8::from(mode == NetnsMode::Shared)
    )))
}

/// Moves a device from the host into a pod.
pub(crate) fn send(device: &str, pod: &Netns) -> Result<(), Error> {
    if device.is_empty() {
        return Ok(());
    }
    let mut rdma = Rdma::open().map_err(netlink)?;
    let index = rdma.by_name(device).map_err(netlink)?.index;
    rdma.move_to(index, pod, None).map_err(netlink)
}

/// Takes a device back from a pod, if it is there.
///
/// The kernel looks at the namespace of the calling *thread* and not only at the socket's when a
/// device is moved (`rdma_dev_change_netns` is told `current`'s), so all of it happens on a thread
/// inside.
pub(crate) fn fetch(device: &str, pod: &Netns, host: &Netns) -> Result<(), Error> {
    let fetched = pod.run(|| {
        let mut rdma = match Rdma::open() {
            Ok(rdma) => rdma,
            // A kernel without RDMA (any more) has no device either.
            Err(error) if error.is_unsupported() => return Ok(()),
            Err(error) => return Err(error),
        };
        // In shared mode the pod sees the host's own: there is nothing to fetch, and moving is
        // refused.
        if rdma.system()?.netns_mode == Some(KernelMode::Shared) {
            return Ok(());
        }
        let index = rdma.by_name(device)?.index;
        rdma.move_to(index, host, None)
    });
    match fetched {
        Err(error) if !error.is_not_found() => Err(Error::new(NOT_UNDONE, error.to_string())),
        _ => Ok(()),
    }
}

/// Whether a namespace sees a device.
pub(crate) fn present(netns: &Netns, device: &str) -> Result<bool, Error> {
    open_in(netns)?.map_or(Ok(false), |mut rdma| Ok(find(&mut rdma, device)?.is_some()))
}

/// Renames a device of the host.
pub(crate) fn rename(from: &str, to: &str) -> Result<(), Error> {
    let mut rdma = Rdma::open().map_err(netlink)?;
    let index = rdma.by_name(from).map_err(netlink)?.index;
    rdma.rename(index, to).map_err(|error| Error::new(NOT_UNDONE, error.to_string()))
}

fn find(rdma: &mut Rdma, name: &str) -> Result<Option<Device>, Error> {
    match rdma.by_name(name) {
        Ok(device) => Ok(Some(device)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(netlink(error)),
    }
}

/// `None` on a kernel that has no RDMA (any more): then there is no device either.
fn open_in(netns: &Netns) -> Result<Option<Rdma>, Error> {
    match Rdma::open_in(netns) {
        Ok(rdma) => Ok(Some(rdma)),
        Err(error) if error.is_unsupported() => Ok(None),
        Err(error) => Err(netlink(error)),
    }
}
