//! A virtual function's netdev and RDMA device, into the pod.
//!
//! The netdev goes first, as its events are what gives the RDMA device its GIDs in the new
//! namespace, and comes back last ([`crate::back`]). How it was is written down before it is
//! touched: names, MAC, MTU, whether it was up, its addresses and description.

use std::net::IpAddr;

use cni_skel::{AddResult, Code, Error};
use rdma_netlink::link::{Link, Links, NewAddress, NewRoute};
use rdma_netlink::rdma::Device;
use rdma_netlink::{HardwareAddress, IpPrefix};
use serde_json::json;
use vhost_rdma_agent_api::{NetnsMode, Nic, Step};

use crate::function::Functions;
use crate::pod::{self, ALIAS, Namespaces, alias, netlink};
use crate::{CONFLICT, names, rdma};

/// [`Step::Other`]: what else of the netdev is to be put back.
pub(crate) const HOST_INTERFACE: &str = "host-interface";

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
    /// The RDMA device.
    rdma_device: Option<Device>,
    /// It goes along.
    exclusive: bool,
    /// The function has all of it, so that it can be made as new. One of software would end with
    /// the interface that it is on.
    whole: bool,
}

/// Finds the devices and sees that they can go.
///
/// # Errors
/// Code 7 if the host is not as the pool says, 100 if something is in the way.
pub(crate) fn plan(
    nic: &Nic,
    wanted: &Wanted<'_>,
    namespaces: &mut Namespaces,
    functions: &Functions,
) -> Result<Plan, Error> {
    let host = &mut namespaces.host;
    let named = wanted.netdev.map_or(Ok(None), |name| pod::find(host, name))?;
    let is_its = |link: &Link| functions.has_netdev(link, wanted.pci);
    let found = match named {
        Some(link) => Some(link),
        None => host.list().map_err(netlink)?.into_iter().find(is_its),
    };
    let link = found.ok_or_else(|| {
        let msg = format!("the host has no network interface of {}", wanted.pci);
        Error::new(CONFLICT, msg)
            .details("another namespace has it, or its driver does not drive it")
    })?;
    if !wanted.pci.is_empty() && !is_its(&link) {
        let msg = format!("{} is not an interface of {}", link.name, wanted.pci);
        return Err(Error::new(CONFLICT, msg)
            .details("the agent took another for it; it looks again at its next round"));
    }
    if let Some(msg) = used_by_host(host, &link)? {
        return Err(
            Error::new(CONFLICT, msg).details("a function that the host uses belongs into no pool")
        );
    }
    namespaces.free_in_pod(&nic.if_name)?;
    let rdma_device = rdma::expect(wanted.rdma_device, wanted.pci, &link, wanted.mode, functions)?;
    let is_whole = |device: &Device| functions.has_rdma(&device.name, wanted.pci);
    let listed = namespaces.host.addresses(Some(link.index)).map_err(netlink)?;
    let addresses =
        listed.into_iter().filter(|address| !address.link_local).map(|address| address.prefix);
    Ok(Plan {
        pci: wanted.pci.to_owned(),
        addresses: addresses.collect(),
        link,
        exclusive: wanted.mode == NetnsMode::Exclusive,
        whole: rdma_device.as_ref().is_none_or(is_whole),
        rdma_device,
    })
}

/// What the host uses an interface for that is no pod's.
pub(crate) fn used_by_host(host: &mut Links, link: &Link) -> Result<Option<String>, Error> {
    let routes = host.routes().map_err(netlink)?;
    if routes.iter().any(|route| route.index == Some(link.index) && route.destination.length == 0) {
        return Ok(Some(format!("the host's default route leaves by {}", link.name)));
    }
    let port = |master| format!("{} is a port of the host's interface {master}", link.name);
    Ok(link.master.map(port))
}

impl Plan {
    /// What is to be written down first.
    pub(crate) fn steps(&self, nic: &Nic) -> Vec<Step> {
        let Link { name, mtu, up, .. } = &self.link;
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        let alias = self.link.alias.as_deref().filter(|alias| !alias.starts_with(ALIAS));
        let rdma = self.rdma_device.as_ref().map(|device| {
            json!({
                "name": device.name, "index": device.index, "node_guid": guid(device)
            })
        });
        let mut steps = vec![
            Step::Other {
                name: HOST_INTERFACE.to_owned(),
                data: json!({
                    "name": name, "pci": self.pci, "addresses": addresses, "alias": alias,
                    "rdma": rdma, "renew": self.whole
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
        let moved = self.rdma_device.as_ref().filter(|_| self.exclusive);
        steps.extend(moved.map(|device| Step::MoveRdma {
            host_name: device.name.clone(),
            pod_name: device.name.clone(),
            pci: Some(self.pci.clone()),
            index: Some(device.index),
            node_guid: guid(device),
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
        let moved = self.rdma_device.as_ref().filter(|_| self.exclusive);
        moved.map_or(Ok(()), |device| rdma::send(device, pod_netns))
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

fn guid(device: &Device) -> Option<String> {
    device.node_guid.as_ref().map(ToString::to_string)
}

fn prefix(cidr: cni_skel::Cidr) -> Result<IpPrefix, Error> {
    IpPrefix::new(cidr.address, cidr.prefix)
        .ok_or_else(|| Error::new(Code::DECODING, format!("{cidr} is no network")))
}

/// Sets MAC and MTU where they differ; the interface is down.
pub(crate) fn adjust(
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
