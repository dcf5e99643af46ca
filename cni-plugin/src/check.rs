//! CHECK: what the agent wrote down and `prevResult` say, against what the host, the pod and the
//! daemon are.
//!
//! What is wrong may be on its way to being right (a link that comes up, a device that registers
//! again), so it is looked for again for a while before it is told. All differences are told at
//! once.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use cni_skel::{AddResult, Attachment, Error, Network};
use rdma_netlink::link::{Link, Links};
use vhost_rdma_agent_api::{Checked, Companion, NetnsMode, Nic, Personality, State, Step};

use crate::agent::{Agent, id};
use crate::companion::Parts;
use crate::host::Host;
use crate::pod::{self, Namespaces, netlink};
use crate::settings::{self, Settings};
use crate::{DIFFERS, ipam, rdma};

/// How long things may take to converge.
const PATIENCE: Duration = Duration::from_secs(3);

/// Serves CHECK.
pub(crate) fn check(network: &Network, attachment: &Attachment, host: &Host) -> Result<(), Error> {
    let settings = Settings::of(network, host)?;
    settings::device_info(network, attachment, host)?;
    let prev = network.config.prev_result(network.version)?.unwrap_or_default();
    let mut namespaces = Namespaces::open(attachment.netns()?)?;
    let agent = Agent::new(&settings);
    let until = Instant::now() + PATIENCE;
    loop {
        let checked = agent.check(id(attachment))?;
        let mut problems = Vec::new();
        if let (true, Some(device)) = (checked.is_empty(), &settings.device_id) {
            problems.push(format!("the node agent knows of no attachment of NIC {device}"));
        }
        for one in &checked {
            let found = differences(one, &prev, &mut namespaces)?;
            let nic = &one.record.nic.id;
            problems.extend(found.into_iter().map(|problem| format!("NIC {nic}: {problem}")));
        }
        if problems.is_empty() {
            return addresses_given(network, &checked);
        }
        if Instant::now() >= until {
            return Err(Error::new(DIFFERS, problems.join("; ")));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Has the IPAM plugin check what it gave.
fn addresses_given(network: &Network, checked: &[Checked]) -> Result<(), Error> {
    let steps = checked.iter().flat_map(|one| &one.record.steps);
    steps
        .filter_map(|step| match step {
            Step::Ipam { if_name, .. } => Some(if_name),
            _ => None,
        })
        .try_for_each(|if_name| ipam::check(network, if_name))
}

fn differences(
    checked: &Checked,
    prev: &AddResult,
    namespaces: &mut Namespaces,
) -> Result<Vec<String>, Error> {
    let Checked { record, live } = checked;
    let nic = &record.nic;
    let mut problems = live.differs.clone();
    if record.state != State::Attached {
        problems.push("its attachment was begun and not finished".to_owned());
    }
    if !live.healthy {
        let why = live.reason.as_deref().unwrap_or("the node agent does not say why");
        problems.push(format!("it is not healthy: {why}"));
    }
    if live.session.as_deref() == Some("failed") {
        problems.push("its vhost-user session failed; the VM must be started anew".to_owned());
    }
    let listed = prev.interfaces.iter().position(|interface| {
        interface.name == nic.if_name && interface.sandbox.as_deref() == Some(&namespaces.path)
    });
    let Some(listed) = listed else {
        problems.push(format!("prevResult does not have its interface {}", nic.if_name));
        return Ok(problems);
    };
    match &nic.personality {
        Personality::VhostUser { companion, .. } => {
            if let Some(bridge) = &companion.bridge {
                let parts = Parts::of(nic, companion, &record.attachment.container_id);
                problems.extend(companion_problems(&parts, companion, bridge, namespaces)?);
            }
        }
        // It has nothing in the pod's namespace.
        Personality::Process { .. } => {}
        Personality::Vf { rdma_device, netns_mode, .. } => {
            problems.extend(vf_problems(nic, listed, prev, namespaces)?);
            problems.extend(rdma_problems(rdma_device, *netns_mode, namespaces)?);
        }
        Personality::Shared { rdma_device, netns_mode, .. } => {
            problems.extend(rdma_problems(rdma_device, *netns_mode, namespaces)?);
        }
        Personality::VfVfio { pci } => {
            let driver = format!("/sys/bus/pci/devices/{pci}/driver");
            let driver = std::fs::read_link(driver).unwrap_or_default();
            if driver.file_name().is_none_or(|name| name != "vfio-pci") {
                problems.push(format!("{pci} is not bound to vfio-pci"));
            }
        }
    }
    Ok(problems)
}

fn companion_problems(
    parts: &Parts,
    companion: &Companion,
    bridge: &str,
    namespaces: &mut Namespaces,
) -> Result<Vec<String>, Error> {
    let mut problems = Vec::new();
    let inner_bridge = expect_up(&mut namespaces.pod, &parts.bridge, "in the pod", &mut problems)?;
    for name in [&parts.tap, &parts.inner] {
        let port = expect_up(&mut namespaces.pod, name, "in the pod", &mut problems)?;
        let Some(port) = port else { continue };
        if inner_bridge.as_ref().is_some_and(|bridge| port.master != Some(bridge.index)) {
            problems.push(format!("{name} is no port of {} in the pod", parts.bridge));
        }
        if *name == parts.tap && [port.owner, port.group] != [companion.uid, companion.gid] {
            problems.push(format!("the tap {name} belongs to another user or group"));
        }
    }
    let outer = expect_up(&mut namespaces.host, &parts.outer, "on the host", &mut problems)?;
    match (outer, pod::find(&mut namespaces.host, bridge)?) {
        (_, None) => problems.push(format!("the host has no bridge {bridge}")),
        (Some(outer), Some(bridge)) if outer.master != Some(bridge.index) => {
            problems.push(format!("{} is no port of {}", outer.name, bridge.name));
        }
        (_, Some(bridge)) if !bridge.up => {
            problems.push(format!("the host's bridge {} is down", bridge.name));
        }
        _ => {}
    }
    Ok(problems)
}

fn vf_problems(
    nic: &Nic,
    listed: usize,
    prev: &AddResult,
    namespaces: &mut Namespaces,
) -> Result<Vec<String>, Error> {
    let mut problems = Vec::new();
    let pod = &mut namespaces.pod;
    let Some(link) = expect_up(pod, &nic.if_name, "in the pod", &mut problems)? else {
        return Ok(problems);
    };
    let mac = link.address.as_ref().map(ToString::to_string);
    let wanted = prev.interfaces.get(listed).and_then(|interface| interface.mac.as_ref());
    if let (Some(wanted), Some(mac)) = (wanted, &mac)
        && !wanted.eq_ignore_ascii_case(mac)
    {
        problems.push(format!("{} has the MAC {mac}, not {wanted}", link.name));
    }
    if let Some(mtu) = nic.mtu.filter(|mtu| *mtu != link.mtu) {
        problems.push(format!("{} has the MTU {}, not {mtu}", link.name, link.mtu));
    }
    let has = pod.addresses(Some(link.index)).map_err(netlink)?;
    let ours: Vec<_> = prev.ips.iter().filter(|ip| ip.interface == Some(listed)).collect();
    for ip in &ours {
        if !has.iter().any(|has| has.prefix.address == ip.address.address) {
            problems.push(format!("{} does not have the address {}", link.name, ip.address));
        }
    }
    // Routes are not listed by interface; ours are those whose next hop is a gateway of ours. A
    // later plugin may have added others.
    let gateways: Vec<IpAddr> = ours.iter().filter_map(|ip| ip.gateway).collect();
    let routes = pod.routes().map_err(netlink)?;
    for route in &prev.routes {
        let (Some(gateway), dst) = (route.gw, route.dst) else { continue };
        let there = routes.iter().any(|there| {
            there.destination.address == dst.address && there.destination.length == dst.prefix
        });
        if gateways.contains(&gateway) && !there {
            problems.push(format!("there is no route to {dst}"));
        }
    }
    Ok(problems)
}

fn rdma_problems(
    device: &str,
    mode: NetnsMode,
    namespaces: &Namespaces,
) -> Result<Vec<String>, Error> {
    let seen = device.is_empty() || rdma::present(&namespaces.pod_netns, device)?;
    let how = match mode {
        NetnsMode::Exclusive => "is not in the pod's namespace",
        NetnsMode::Shared => "is not to be seen in the pod's namespace",
    };
    Ok(if seen { Vec::new() } else { vec![format!("the RDMA device {device} {how}")] })
}

fn expect_up(
    links: &mut Links,
    name: &str,
    place: &str,
    problems: &mut Vec<String>,
) -> Result<Option<Link>, Error> {
    let link = pod::find(links, name)?;
    match &link {
        None => problems.push(format!("there is no interface {name} {place}")),
        Some(link) if !link.up => problems.push(format!("{name} {place} is down")),
        Some(_) => {}
    }
    Ok(link)
}
