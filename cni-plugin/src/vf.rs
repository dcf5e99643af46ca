//! A virtual function's netdev and RDMA device, into the pod and back.
//!
//! The netdev goes first, as its events are what gives the RDMA device its GIDs in the new
//! namespace, and comes back last. How it was is written down before it is touched: name, MAC, MTU,
//! whether it was up, its addresses and description. On the way back the device is looked for where
//! it can be, in the pod or (if the kernel gave it back) on the host, by its PCI function,
//! description or MAC, since a crash may have left it under either name. Description and MAC are
//! what the pod says: they count only if nothing better does.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use cni_skel::{AddResult, Code, Error};
use rdma_netlink::link::{Link, Links, NewAddress, NewRoute};
use rdma_netlink::{HardwareAddress, IpPrefix, Netns};
use serde_json::{Value, json};
use vhost_rdma_agent_api::{NetnsMode, Nic, Step};

use crate::pod::{self, ALIAS, Namespaces, alias, netlink};
use crate::{CONFLICT, NOT_UNDONE, names, rdma};

/// How long a namespace takes to let go of its devices: the kernel dismantles it in the background.
const PATIENCE: Duration = Duration::from_secs(5);

/// [`Step::Other`]: what else of the netdev is to be put back.
const HOST_INTERFACE: &str = "host-interface";

/// What the agent says of the function.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) pci: &'a str,
    pub(crate) netdev: Option<&'a str>,
    pub(crate) rdma_device: &'a str,
    pub(crate) mode: NetnsMode,
}

/// What will be done.
#[derive(Debug)]
pub(crate) struct Plan {
    pci: String,
    link: Link,
    addresses: Vec<IpPrefix>,
    /// The RDMA device that goes along; none in shared mode.
    rdma_device: Option<String>,
}

/// Finds the devices and sees that they can go.
///
/// # Errors
/// Code 7 if the host is not as the pool says, 100 if something is in the way.
pub(crate) fn plan(
    nic: &Nic,
    wanted: &Wanted<'_>,
    namespaces: &mut Namespaces,
) -> Result<Plan, Error> {
    let host = &mut namespaces.host;
    let named = wanted.netdev.map_or(Ok(None), |name| pod::find(host, name))?;
    let found = match named {
        Some(link) => Some(link),
        None => host.list().map_err(netlink)?.into_iter().find(|link| is_of(link, wanted.pci)),
    };
    let link = found.ok_or_else(|| {
        let msg = format!("the host has no network interface of {}", wanted.pci);
        Error::new(CONFLICT, msg)
            .details("another namespace has it, or its driver does not drive it")
    })?;
    if !wanted.pci.is_empty() && !is_of(&link, wanted.pci) {
        let msg = format!("{} is not an interface of {}", link.name, wanted.pci);
        return Err(Error::new(CONFLICT, msg)
            .details("the agent took another for it; it looks again at its next round"));
    }
    let routes = host.routes().map_err(netlink)?;
    if routes.iter().any(|route| route.index == Some(link.index) && route.destination.length == 0) {
        let msg = format!("the host's default route leaves by {}", link.name);
        return Err(
            Error::new(CONFLICT, msg).details("a function that the host uses belongs into no pool")
        );
    }
    if let Some(master) = link.master {
        let msg = format!("{} is a port of the host's interface {master}", link.name);
        return Err(
            Error::new(CONFLICT, msg).details("a function that the host uses belongs into no pool")
        );
    }
    namespaces.free_in_pod(&nic.if_name)?;
    rdma::expect(wanted.rdma_device, wanted.mode)?;
    let listed = namespaces.host.addresses(Some(link.index)).map_err(netlink)?;
    let addresses =
        listed.into_iter().filter(|address| !address.link_local).map(|address| address.prefix);
    Ok(Plan {
        pci: wanted.pci.to_owned(),
        addresses: addresses.collect(),
        link,
        rdma_device: (wanted.mode == NetnsMode::Exclusive).then(|| wanted.rdma_device.to_owned()),
    })
}

impl Plan {
    /// What is to be written down first.
    pub(crate) fn steps(&self, nic: &Nic) -> Vec<Step> {
        let Link { name, mtu, up, .. } = &self.link;
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        let alias = self.link.alias.as_deref().filter(|alias| !alias.starts_with(ALIAS));
        let mut steps = vec![
            Step::Other {
                name: HOST_INTERFACE.to_owned(),
                data: json!({
                    "name": name, "pci": self.pci, "addresses": addresses, "alias": alias
                }),
            },
            Step::MoveNetdev {
                host_name: name.clone(),
                pod_name: nic.if_name.clone(),
                pci: Some(self.pci.clone()),
                mac: self.link.address.as_ref().map(ToString::to_string),
                mtu: Some(*mtu),
                up: *up,
                kind: self.link.driver_kind.clone(),
                altnames: names::of(&self.link),
            },
        ];
        steps.extend(self.rdma_device.as_ref().map(|device| Step::MoveRdma {
            host_name: device.clone(),
            pod_name: device.clone(),
            pci: Some(self.pci.clone()),
        }));
        steps
    }

    /// Does it; the interface is up in the pod then, without addresses.
    pub(crate) fn carry_out(
        &self,
        nic: &Nic,
        container: &str,
        namespaces: &mut Namespaces,
    ) -> Result<(), Error> {
        let Namespaces { host, pod, pod_netns, .. } = namespaces;
        let index = self.link.index;
        host.set_alias(index, &alias(&nic.id, container)).map_err(netlink)?;
        host.set_up(index, false).map_err(netlink)?;
        names::clear(host, &self.link, &[])?;
        host.move_to(index, pod_netns, Some(&nic.if_name)).map_err(netlink)?;
        let inside = pod.by_name(&nic.if_name).map_err(netlink)?;
        let mac = nic.mac.as_deref().map(str::parse).transpose().map_err(netlink)?;
        adjust(pod, &inside, mac.as_ref(), nic.mtu)?;
        pod.set_up(inside.index, true).map_err(netlink)?;
        self.rdma_device.as_ref().map_or(Ok(()), |device| rdma::send(device, pod_netns))
    }

    /// Gives the interface its addresses and routes. A route that is there already stays as it is:
    /// another network of the pod has the default route.
    pub(crate) fn configure(
        &self,
        nic: &Nic,
        addresses: &AddResult,
        namespaces: &mut Namespaces,
    ) -> Result<(), Error> {
        let pod = &mut namespaces.pod;
        let index = pod.by_name(&nic.if_name).map_err(netlink)?.index;
        for ip in &addresses.ips {
            let prefix = prefix(ip.address)?;
            pod.add_address(index, &NewAddress { prefix, no_dad: true }).map_err(netlink)?;
        }
        for route in &addresses.routes {
            let of_family = |gateway: &IpAddr| gateway.is_ipv4() == route.dst.address.is_ipv4();
            let gateways = addresses.ips.iter().filter_map(|ip| ip.gateway);
            let gateway = route.gw.or_else(|| gateways.into_iter().find(of_family));
            let new = NewRoute {
                destination: prefix(route.dst)?,
                gateway,
                index,
                metric: route.priority,
                table: route.table,
            };
            match pod.add_route(&new) {
                Err(error) if !error.is_exists() => return Err(netlink(error)),
                _ => {}
            }
        }
        Ok(())
    }
}

fn prefix(cidr: cni_skel::Cidr) -> Result<IpPrefix, Error> {
    IpPrefix::new(cidr.address, cidr.prefix)
        .ok_or_else(|| Error::new(Code::DECODING, format!("{cidr} is no network")))
}

/// Sets MAC and MTU where they differ; the interface is down.
fn adjust(
    links: &mut Links,
    link: &Link,
    mac: Option<&HardwareAddress>,
    mtu: Option<u32>,
) -> Result<(), Error> {
    if let Some(mac) = mac.filter(|mac| link.address.as_ref() != Some(mac)) {
        links.set_address(link.index, mac).map_err(netlink)?;
    }
    if let Some(mtu) = mtu.filter(|mtu| *mtu != link.mtu) {
        links.set_mtu(link.index, mtu).map_err(netlink)?;
    }
    Ok(())
}

/// What is known of a netdev that went into a pod.
struct Gone<'a> {
    pci: Option<&'a str>,
    /// How the description begins that we gave it.
    mark: &'a str,
    macs: [Option<&'a str>; 2],
    /// The software behind it.
    kind: Option<&'a str>,
}

impl Gone<'_> {
    /// It, of these: what is surest comes first. `is_of` finds out whose an interface is that does
    /// not say so by itself.
    fn among<'l>(
        &self,
        listed: &'l [Link],
        is_of: impl Fn(&Link, &str) -> bool,
    ) -> Option<&'l Link> {
        let ranked = listed.iter().filter_map(|link| Some((self.rank(link, &is_of)?, link)));
        ranked.min_by_key(|(rank, _)| *rank).map(|(_, link)| link)
    }

    /// How sure it is, the least being the surest; nothing if it is another.
    fn rank(&self, link: &Link, is_of: impl Fn(&Link, &str) -> bool) -> Option<(u8, bool)> {
        let alike = link.driver_kind.as_deref() == self.kind;
        // What is made on top of it may be its function's too (IPoIB).
        let on_top = !alike || link.lower.is_some();
        match (self.pci, link.parent.as_deref()) {
            (Some(pci), Some(parent)) if parent == pci => return Some((0, on_top)),
            (Some(_), Some(_)) if link.parent_bus.as_deref() == Some("pci") => return None,
            _ if !alike => return None,
            (Some(pci), _) if is_of(link, pci) => return Some((1, on_top)),
            _ => {}
        }
        if link.alias.as_deref().is_some_and(|alias| alias.starts_with(self.mark)) {
            return Some((2, on_top));
        }
        let address = link.address.as_ref().filter(|address| !address.is_zero());
        let address = address.map(ToString::to_string);
        (address.is_some() && self.macs.contains(&address.as_deref())).then_some((3, on_top))
    }
}

/// Undoes [`Step::MoveNetdev`].
///
/// # Errors
/// Code 11 if the device is out of reach, 102 if it cannot be put back.
pub(crate) fn netdev_back(nic: &Nic, step: &Step, pods: &[Netns]) -> Result<(), Error> {
    let Step::MoveNetdev { host_name, pci, mac, mtu, up, kind, altnames, .. } = step else {
        return Ok(());
    };
    let pci = pci.as_deref().filter(|pci| !pci.is_empty());
    let wanted = Gone {
        pci,
        mark: &format!("{ALIAS}{} ", nic.id),
        macs: [mac.as_deref(), nic.mac.as_deref()],
        kind: kind.as_deref(),
    };
    let host_netns = Netns::current().map_err(netlink)?;
    for pod in pods {
        let mut links = Links::open_in(pod).map_err(netlink)?;
        let listed = links.list().map_err(netlink)?;
        if let Some(link) = wanted.among(&listed, |_, _| false) {
            links.set_up(link.index, false).map_err(netlink)?;
            names::bring(&mut links, link, &host_netns, host_name)?;
        }
    }
    let mut host = Links::open().map_err(netlink)?;
    let until = Instant::now() + PATIENCE;
    let link = loop {
        let listed = host.list().map_err(netlink)?;
        let by_mark = wanted.among(&listed, is_of);
        // A name alone is enough only where nothing better is known: another device may have it by
        // now.
        let by_name = |link: &&Link| pci.is_none() && link.name == *host_name;
        if let Some(link) = by_mark.or_else(|| listed.iter().find(by_name)) {
            break link.clone();
        }
        if !pci.is_some_and(is_driven) {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(out_of_reach(&format!("the network interface {host_name}")));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // If it is back because its namespace ended, all that the pod gave it is there.
    names::clear(&mut host, &link, altnames)?;
    if link.name != *host_name {
        names::make_way(&mut host, host_name)?;
        host.set_up(link.index, false).map_err(netlink)?;
        host.rename(link.index, host_name).map_err(|error| taken(&link.name, host_name, &error))?;
    }
    let mac = mac.as_deref().map(str::parse).transpose().map_err(netlink)?;
    if mac.as_ref() != link.address.as_ref() {
        host.set_up(link.index, false).map_err(netlink)?;
    }
    adjust(&mut host, &link, mac.as_ref(), *mtu)?;
    names::restore(&mut host, &link, altnames)?;
    host.set_up(link.index, *up).map_err(netlink)
}

fn taken(now: &str, host_name: &str, error: &rdma_netlink::Error) -> Error {
    let msg = format!("{now} is back on the host, but cannot be named {host_name} again: {error}");
    Error::new(NOT_UNDONE, msg)
}

/// Undoes [`Step::MoveRdma`].
///
/// # Errors
/// As [`netdev_back`].
pub(crate) fn rdma_back(step: &Step, pods: &[Netns]) -> Result<(), Error> {
    let Step::MoveRdma { host_name, pod_name, pci } = step else { return Ok(()) };
    let host = Netns::current().map_err(netlink)?;
    for pod in pods {
        rdma::fetch(pod_name, pod, &host)?;
    }
    let until = Instant::now() + PATIENCE;
    loop {
        if rdma::present(&host, host_name)? {
            return Ok(());
        }
        if rdma::present(&host, pod_name)? {
            return rdma::rename(pod_name, host_name);
        }
        if !pci.as_deref().is_some_and(is_driven) {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(out_of_reach(&format!("the RDMA device {host_name}")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Undoes [`Step::Other`].
///
/// # Errors
/// Code 102 if it cannot be put back.
pub(crate) fn other_back(name: &str, data: &Value) -> Result<(), Error> {
    let text = |key| data.get(key).and_then(Value::as_str);
    let (HOST_INTERFACE, Some(interface)) = (name, text("name")) else {
        let msg = format!("step {name:?} is not known to this version of the plugin");
        return Err(
            Error::new(NOT_UNDONE, msg).details("install plugin and agent of the same release")
        );
    };
    let mut host = Links::open().map_err(netlink)?;
    let pci = text("pci").filter(|pci| !pci.is_empty());
    // It has its name back by now, or another has it.
    let its = |link: &Link| link.name == interface && pci.is_none_or(|pci| is_of(link, pci));
    let listed = host.list().map_err(netlink)?;
    let Some(link) = listed.iter().find(|link| its(link)) else { return Ok(()) };
    if let Some(addresses) = data.get("addresses").and_then(Value::as_array) {
        for address in addresses.iter().filter_map(Value::as_str) {
            let prefix: IpPrefix = address.parse().map_err(netlink)?;
            match host.add_address(link.index, &NewAddress { prefix, no_dad: true }) {
                Err(error) if !error.is_exists() => return Err(netlink(error)),
                _ => {}
            }
        }
    }
    // Ours goes last: until then it says whose the interface was.
    host.set_alias(link.index, text("alias").unwrap_or_default()).map_err(netlink)
}

/// Whether an interface of the host belongs to a PCI function, directly or by a virtio device on
/// it.
fn is_of(link: &Link, pci: &str) -> bool {
    link.parent.as_deref() == Some(pci)
        || Path::new("/sys/class/net")
            .join(&link.name)
            .join("device")
            .canonicalize()
            .is_ok_and(|path| path.components().any(|part| part.as_os_str() == pci))
}

/// Whether there is such a function with a driver: without, it has no device that could be
/// anywhere.
fn is_driven(pci: &str) -> bool {
    !pci.contains('/') && Path::new("/sys/bus/pci/devices").join(pci).join("driver").exists()
}

/// A device that is held where nobody can reach it: it comes back when its holder ends.
fn out_of_reach(what: &str) -> Error {
    let msg = format!("{what} is neither on the host nor in the pod's namespace");
    Error::new(Code::TRY_AGAIN, msg)
        .details("a process still holds the namespace; the device comes back when it ends")
}

#[cfg(test)]
mod tests {
    use rdma_netlink::link::LinkKind;

    use super::*;

    const PCI: &str = "0000:3b:00.2";

    fn link(name: &str, pci: Option<&str>, alias: &str) -> Link {
        Link {
            index: 2,
            name: name.to_owned(),
            altnames: Vec::new(),
            kind: LinkKind::Ethernet,
            driver_kind: None,
            address: Some("02:00:00:00:00:07".parse().unwrap()),
            permanent_address: None,
            mtu: 1500,
            up: true,
            carrier: true,
            state: "up".to_owned(),
            master: None,
            lower: None,
            owner: None,
            group: None,
            alias: Some(alias.to_owned()),
            parent: pci.map(str::to_owned),
            parent_bus: pci.map(|_| "pci".to_owned()),
            vf_count: 0,
            vfs: Vec::new(),
        }
    }

    /// Which of these it is for a function that is known by its place, or not.
    fn found(pci: Option<&str>, listed: &[Link]) -> Option<String> {
        let mac = Some("02:00:00:00:00:07");
        let gone = Gone { pci, mark: "vhost-rdma vf-0 ", macs: [mac, None], kind: None };
        let behind = |link: &Link, _: &str| link.name == "virtio";
        gone.among(listed, behind).map(|link| link.name.clone())
    }

    #[test]
    fn a_function_is_known_by_its_place_whatever_the_pod_says() {
        let forged = || link("other", Some("0000:3b:00.3"), "vhost-rdma vf-0 c0ffee");
        let own = link("own", Some(PCI), "");
        let made = Link {
            driver_kind: Some("dummy".to_owned()),
            ..link("made", None, "vhost-rdma vf-0 c0ffee")
        };
        assert_eq!(found(Some(PCI), &[forged(), made.clone(), own]).as_deref(), Some("own"));
        assert_eq!(found(Some(PCI), &[forged(), made.clone()]), None);
        assert_eq!(found(None, std::slice::from_ref(&made)), None);
        // Behind another device on the function; where nothing says so, by what we called it.
        let virtio = |name: &str, alias: &str| Link {
            parent: Some("virtio3".to_owned()),
            parent_bus: Some("virtio".to_owned()),
            ..link(name, None, alias)
        };
        let marked = virtio("marked", "vhost-rdma vf-0 c0ffee");
        let listed = [made, virtio("like", ""), marked, virtio("virtio", "")];
        assert_eq!(found(Some(PCI), &listed).as_deref(), Some("virtio"));
        assert_eq!(found(Some(PCI), &listed[..3]).as_deref(), Some("marked"));
        assert_eq!(found(Some(PCI), &listed[..2]).as_deref(), Some("like"));
    }

    #[test]
    fn what_is_made_on_top_of_a_function_is_not_the_function() {
        let ipoib = |name: &str, lower| Link {
            driver_kind: Some("ipoib".to_owned()),
            lower,
            ..link(name, Some(PCI), "")
        };
        let listed = [ipoib("child", Some(4)), ipoib("ib0", None)];
        let mut gone =
            Gone { pci: Some(PCI), mark: "vhost-rdma ", macs: [None; 2], kind: Some("ipoib") };
        assert_eq!(gone.among(&listed, |_, _| false), Some(&listed[1]));
        // A record from before the kind was written down.
        gone.kind = None;
        assert!(gone.among(&listed[1..], |_, _| false).is_some());
    }
}
