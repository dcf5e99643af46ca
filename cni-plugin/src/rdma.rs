//! RDMA devices in namespaces.
//!
//! In exclusive mode a device is in one namespace, and moving it disconnects its users; in shared
//! mode all see it and nothing moves. Names are unique on the whole host, so a device keeps its own
//! wherever it goes, unless somebody with NET_ADMIN there renames it. What stays is its index, for
//! as long as the device is there.

use cni_skel::{Code, Error};
use rdma_netlink::Netns;
use rdma_netlink::link::Link;
use rdma_netlink::rdma::{Device, NetnsMode as KernelMode, Rdma};
use vhost_rdma_agent_api::NetnsMode;

use crate::function::Functions;
use crate::pod::netlink;
use crate::{CONFLICT, NOT_UNDONE};

/// What names a device that went into a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone<'a> {
    /// Its names, on the host and in the pod.
    pub(crate) names: [&'a str; 2],
    /// Its index; absent in a record from before that was written down.
    pub(crate) index: Option<u32>,
    /// The GUID of its node, for an index that another device has by now.
    pub(crate) node_guid: Option<&'a str>,
}

impl Gone<'_> {
    /// It, of those that a namespace sees. A name counts only if nothing better is known.
    fn among<'d>(&self, devices: &'d [Device]) -> Option<&'d Device> {
        let same_node = |device: &Device| match (self.node_guid, device.node_guid) {
            (Some(was), Some(is)) => is.to_string() == was,
            _ => true,
        };
        devices.iter().find(|device| match self.index {
            Some(index) => device.index == index && same_node(device),
            None => self.names.contains(&device.name.as_str()),
        })
    }
}

/// Sees that a device is on the host and the function's, and that the host's mode is the one that
/// the agent counts on. A function without an RDMA device (an empty name) has nothing to see.
///
/// # Errors
/// Code 100 if the device is elsewhere or of another function, 7 if the mode is another.
pub(crate) fn expect(
    name: &str,
    pci: &str,
    link: &Link,
    mode: NetnsMode,
    functions: &Functions,
) -> Result<Option<Device>, Error> {
    if name.is_empty() {
        return Ok(None);
    }
    let mut rdma = Rdma::open().map_err(netlink)?;
    let device = match rdma.by_name(name) {
        Ok(device) => device,
        Err(error) if error.is_not_found() => {
            let msg = format!("the host has no RDMA device {name}");
            return Err(Error::new(CONFLICT, msg)
                .details("another namespace has it, or its driver does not drive it"));
        }
        Err(error) => return Err(netlink(error)),
    };
    // One of software is nobody's but its interface's (rxe, siw), and a paravirtual one has a
    // function of its own.
    let mut carried = || {
        let ports = rdma.ports(device.index).map_err(netlink)?;
        Ok::<_, Error>(ports.iter().any(|port| port.netdev_index == Some(link.index)))
    };
    if !pci.is_empty() && !functions.has_rdma(name, pci) && !carried()? {
        let msg = format!("{name} is not an RDMA device of {pci} nor on {}", link.name);
        return Err(Error::new(CONFLICT, msg)
            .details("it was renamed since the agent looked; it looks again at its next round"));
    }
    // Kernels before 5.1 do not say, and are exclusive in what they can do: nothing.
    let system = rdma.system().map_err(netlink)?.netns_mode;
    let (now, wanted, set) = match (system, mode) {
        (Some(KernelMode::Exclusive), NetnsMode::Shared) => ("exclusive", "shared", "shared"),
        (Some(KernelMode::Shared), NetnsMode::Exclusive) => ("shared", "exclusive", "exclusive"),
        _ => return Ok(Some(device)),
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
pub(crate) fn send(device: &Device, pod: &Netns) -> Result<(), Error> {
    let mut rdma = Rdma::open().map_err(netlink)?;
    rdma.move_to(device.index, pod, None).map_err(netlink)
}

/// Takes a device back from a pod, if it is there.
///
/// The kernel looks at the namespace of the calling *thread* and not only at the socket's when a
/// device is moved (`rdma_dev_change_netns` is told `current`'s), so all of it happens on a thread
/// inside.
pub(crate) fn fetch(gone: Gone<'_>, pod: &Netns, host: &Netns) -> Result<(), Error> {
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
        let devices = rdma.devices()?;
        gone.among(&devices).map_or(Ok(()), |device| rdma.move_to(device.index, host, None))
    });
    match fetched {
        Err(error) if !error.is_not_found() => Err(Error::new(NOT_UNDONE, error.to_string())),
        _ => Ok(()),
    }
}

/// The device on the host: the function's, or what is known of it otherwise.
pub(crate) fn at_home(
    gone: Gone<'_>,
    pci: Option<&str>,
    functions: &Functions,
) -> Result<Option<Device>, Error> {
    let Some(mut rdma) = opened(Rdma::open())? else { return Ok(None) };
    let devices = rdma.devices().map_err(netlink)?;
    let of_function =
        |device: &&Device| pci.is_some_and(|pci| functions.has_rdma(&device.name, pci));
    Ok(devices.iter().find(of_function).or_else(|| gone.among(&devices)).cloned())
}

/// Gives a device of the host its name again. If another has it, in whatever namespace, it keeps
/// the one that it has: a function must not stay away for the sake of a name, which whoever has
/// NET_ADMIN anywhere can take.
pub(crate) fn name_again(device: &Device, name: &str) -> Result<(), Error> {
    if device.name == name || name.is_empty() {
        return Ok(());
    }
    let mut rdma = Rdma::open().map_err(netlink)?;
    match rdma.rename(device.index, name) {
        Err(error) if error.is_exists() => {
            eprintln!("vhost-rdma: the RDMA device {} was {name}, which is taken", device.name);
            Ok(())
        }
        renamed => renamed.map_err(|error| Error::new(NOT_UNDONE, error.to_string())),
    }
}

/// The RDMA devices of a function that the host sees, or the one that went, each with the number of
/// its user contexts: of everybody, also in other PID namespaces, whose contexts are not listed one
/// by one (`rdma_restrack_count`, `rdma_is_visible_in_pid_ns`).
pub(crate) fn contexts(
    pci: &str,
    gone: Option<Gone<'_>>,
    functions: &Functions,
) -> Result<Vec<(String, u64)>, Error> {
    let Some(mut rdma) = opened(Rdma::open())? else { return Ok(Vec::new()) };
    let mut list = Vec::new();
    for device in rdma.devices().map_err(netlink)? {
        let gone = gone.is_some_and(|gone| gone.among(std::slice::from_ref(&device)).is_some());
        if !gone && !functions.has_rdma(&device.name, pci) {
            continue;
        }
        match rdma.resource_counts(device.index) {
            Ok(counts) => {
                let contexts = counts.iter().find(|count| count.name == "ctx");
                list.push((device.name, contexts.map_or(0, |count| count.current)));
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(netlink(error)),
        }
    }
    Ok(list)
}

/// Whether a namespace sees a device.
pub(crate) fn present(netns: &Netns, device: &str) -> Result<bool, Error> {
    let Some(mut rdma) = opened(Rdma::open_in(netns))? else { return Ok(false) };
    match rdma.by_name(device) {
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(netlink(error)),
    }
}

/// `None` on a kernel that has no RDMA (any more): then there is no device either.
fn opened(rdma: rdma_netlink::Result<Rdma>) -> Result<Option<Rdma>, Error> {
    match rdma {
        Ok(rdma) => Ok(Some(rdma)),
        Err(error) if error.is_unsupported() => Ok(None),
        Err(error) => Err(netlink(error)),
    }
}

#[cfg(test)]
mod tests {
    use rdma_netlink::Guid;
    use rdma_netlink::rdma::{Device, Message as _};

    use super::Gone;

    fn device(index: u32, name: &str, guid: u64) -> Device {
        // The least that the kernel says, in its own encoding.
        let mut bytes = Vec::new();
        for (kind, value) in
            [(1_u16, index.to_ne_bytes().to_vec()), (2, format!("{name}\0").into_bytes())]
        {
            let length = u16::try_from(4 + value.len()).unwrap();
            bytes.extend(length.to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(&value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        Device { node_guid: Some(Guid(guid)), ..Device::decode(&bytes).unwrap() }
    }

    #[test]
    fn a_device_is_known_by_its_index_whatever_the_pod_calls_it() {
        let guid = Guid(7).to_string();
        let gone = Gone { names: ["mlx5_3"; 2], index: Some(5), node_guid: Some(&guid) };
        let found =
            |gone: Gone<'_>, devices: &[Device]| gone.among(devices).map(|device| device.index);
        // Another of the pod's devices has its name.
        let renamed = [device(4, "mlx5_3", 6), device(5, "mine", 7)];
        assert_eq!(found(gone, &renamed), Some(5));
        assert_eq!(found(gone, &renamed[..1]), None);
        // The index is another device's by now.
        assert_eq!(found(gone, &[device(5, "mlx5_3", 8)]), None);
        assert_eq!(found(Gone { node_guid: None, ..gone }, &[device(5, "x", 8)]), Some(5));
        // A record from before the index was written down.
        assert_eq!(found(Gone { index: None, ..gone }, &renamed), Some(4));
    }
}
