//! The netdev beside a VM's RDMA NIC.
//!
//! The vhost-user device carries RDMA and nothing else. ARP, and with it rdma_cm, needs an Ethernet
//! interface with the NIC's MAC in the guest, on the network's L2. The VMM runs in the pod without
//! any privilege, so what it can open is a tap that belongs to its user; and a tap can only be a
//! port of a bridge in its own namespace:
//!
//! ```text
//!   pod   VM ── tap ── bridge ── veth ═══ veth ── the network's bridge   host
//! ```
//!
//! The interface that the *guest* sees has the NIC's MAC. The tap itself must not: a bridge takes
//! frames for the address of one of its ports for itself, and the guest would never get one.
//! Nothing in the pod has an IP address, not even a link-local one; the guest owns what IPAM gave.

use std::io;

use cni_skel::{Code, Error};
use rdma_netlink::Netns;
use rdma_netlink::link::{Links, Tap, Veth};
use vhost_rdma_agent_api::{Companion, Nic, Step};

use crate::pod::{self, Namespaces, alias, netlink};

/// What a companion is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parts {
    /// The tap that the VMM opens.
    pub(crate) tap: String,
    /// The bridge in the pod.
    pub(crate) bridge: String,
    /// The veth's end in the pod. It has the interface name that the runtime asked for, unless the
    /// tap has it.
    pub(crate) inner: String,
    /// The veth's end on the host.
    pub(crate) outer: String,
}

impl Parts {
    /// The names for a NIC in a container.
    pub(crate) fn of(nic: &Nic, companion: &Companion, container: &str) -> Self {
        let tap = if companion.tap.is_empty() { &nic.if_name } else { &companion.tap };
        let inner = if *tap == nic.if_name {
            pod::name("vi", &nic.id, container)
        } else {
            nic.if_name.clone()
        };
        Self {
            tap: tap.clone(),
            bridge: pod::name("vb", &nic.id, container),
            inner,
            outer: outer(&nic.id, container),
        }
    }

    /// What is to be written down before they are made.
    pub(crate) fn steps(&self, netns: &str) -> Vec<Step> {
        let inside =
            |name: &String| Step::MakeLink { name: name.clone(), netns: Some(netns.to_owned()) };
        vec![
            Step::MakeLink { name: self.outer.clone(), netns: None },
            inside(&self.bridge),
            inside(&self.tap),
        ]
    }

    /// Finds out what can be found out before anything is written down or made.
    ///
    /// # Errors
    /// Code 7 if the host lacks the network's bridge, 100 if a name is taken.
    pub(crate) fn possible(&self, bridge: &str, namespaces: &mut Namespaces) -> Result<u32, Error> {
        for name in [&self.tap, &self.bridge, &self.inner] {
            namespaces.free_in_pod(name)?;
        }
        let found = pod::find(&mut namespaces.host, bridge)?;
        match found {
            Some(link) if link.driver_kind.as_deref() == Some("bridge") => Ok(link.index),
            Some(_) => Err(no_bridge(format!("the host's interface {bridge} is no bridge"))),
            None => Err(no_bridge(format!("the host has no bridge {bridge}"))),
        }
    }
}

/// The host's end of the veth: the one link of the host that is made for a NIC in a container.
pub(crate) fn outer(nic: &str, container: &str) -> String {
    pod::name("vo", nic, container)
}

fn no_bridge(msg: String) -> Error {
    let next = "the pool's companion bridge is set in the node agent's configuration; make it, or \
                name another";
    Error::new(Code::INVALID_CONFIG, msg).details(next)
}

/// Makes the companion; the host's end is brought up last, when all behind it is ready.
pub(crate) fn make(
    parts: &Parts,
    nic: &Nic,
    companion: &Companion,
    container: &str,
    host_bridge: u32,
    namespaces: &mut Namespaces,
) -> Result<(), Error> {
    let Namespaces { host, pod, pod_netns, .. } = namespaces;
    let veth = Veth {
        name: &parts.outer,
        peer: &parts.inner,
        peer_netns: Some(pod_netns),
        mtu: nic.mtu,
        ..Veth::default()
    };
    host.add_veth(&veth).map_err(netlink)?;
    pod.add_bridge(&parts.bridge).map_err(netlink)?;
    let tap = Tap {
        name: &parts.tap,
        netns: Some(pod_netns),
        owner: companion.uid,
        group: companion.gid,
        ..Tap::default()
    };
    tap.create().map_err(netlink)?;
    let bridge = pod.by_name(&parts.bridge).map_err(netlink)?.index;
    let text = alias(&nic.id, container);
    silence(pod_netns, [&parts.tap, &parts.bridge, &parts.inner])?;
    for name in [&parts.tap, &parts.inner] {
        let index = pod.by_name(name).map_err(netlink)?.index;
        join(pod, index, bridge, nic.mtu, &text)?;
    }
    pod.set_alias(bridge, &text).map_err(netlink)?;
    pod.set_up(bridge, true).map_err(netlink)?;
    let outer = host.by_name(&parts.outer).map_err(netlink)?.index;
    silence(&namespaces.host_netns, [&parts.outer])?;
    join(&mut namespaces.host, outer, host_bridge, None, &text)
}

/// Makes an interface a port of a bridge, and brings it up.
fn join(
    links: &mut Links,
    index: u32,
    bridge: u32,
    mtu: Option<u32>,
    text: &str,
) -> Result<(), Error> {
    links.set_alias(index, text).map_err(netlink)?;
    if let Some(mtu) = mtu {
        links.set_mtu(index, mtu).map_err(netlink)?;
    }
    links.set_master(index, Some(bridge)).map_err(netlink)?;
    links.set_up(index, true).map_err(netlink)
}

/// Keeps the kernel from giving bridge and ports IPv6 addresses: they would answer for the guest's
/// network. A kernel without IPv6 has nothing to silence.
fn silence<const COUNT: usize>(netns: &Netns, names: [&String; COUNT]) -> Result<(), Error> {
    let written = netns.run(|| {
        Ok(names.map(|name| {
            let path = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
            std::fs::write(path, "1").or_else(|error| match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ReadOnlyFilesystem => Ok(()),
                _ => Err(error),
            })
        }))
    });
    written.map_err(netlink)?.into_iter().collect::<io::Result<()>>().map_err(|error| {
        Error::new(
            Code::INTERNAL,
            format!(
                "IPv6 of {} cannot be turned off: {error}",
                names.map(String::as_str).join(", ")
            ),
        )
    })
}
