//! A virtual function's netdev and RDMA device, out of the pod again.
//!
//! The device is looked for where it can be, in the pod or (if the kernel gave it back) on the
//! host, by its PCI function, description or MAC, since a crash may have left it under either name.
//! Description and MAC are what the pod says: they count only if nothing better does. Before, the
//! function is made as new ([`Functions::renew`]), so that nothing of what the pod did to it comes
//! along. Where that cannot be done (a container that may not write to sysfs; an RDMA device that
//! is not the function's own), the devices are taken back as they are, and what was written down
//! stays until nobody has a context of the RDMA device.

use std::time::{Duration, Instant};

use cni_skel::{Code, Error};
use rdma_netlink::link::{Link, Links, NewAddress};
use rdma_netlink::{IpPrefix, Netns};
use serde_json::Value;
use vhost_rdma_agent_api::{Nic, Step};

use crate::function::{Functions, Renewal, SETTLE};
use crate::pod::{ALIAS, netlink};
use crate::vf::{HOST_INTERFACE, adjust, used_by_host};
use crate::{NOT_UNDONE, names, rdma};

/// How long a namespace takes to let go of its devices: the kernel dismantles it in the background.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

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

/// Drivers that end their users' contexts when they let a function go (`disassociate_ucontext`).
/// Another one would wait for whoever holds a descriptor (`ib_uverbs_remove_one`).
const ENDS_CONTEXTS: [&str; 2] = ["mlx4_core", "mlx5_core"];

/// What was written down of the function as a whole.
struct Function<'a> {
    pci: &'a str,
    rdma: Option<rdma::Gone<'a>>,
    renew: bool,
}

impl<'a> Function<'a> {
    fn of(steps: &'a [Step]) -> Option<Self> {
        let data = steps.iter().find_map(|step| match step {
            Step::Other { name, data } if name == HOST_INTERFACE => Some(data),
            _ => None,
        })?;
        let rdma = data.get("rdma").and_then(|rdma| {
            let name = rdma.get("name").and_then(Value::as_str)?;
            let index = rdma.get("index").and_then(Value::as_u64);
            let node_guid = rdma.get("node_guid").and_then(Value::as_str);
            let index = index.and_then(|index| u32::try_from(index).ok());
            Some(rdma::Gone { names: [name; 2], index, node_guid })
        });
        Some(Self {
            pci: data.get("pci").and_then(Value::as_str).filter(|pci| !pci.is_empty())?,
            rdma,
            renew: data.get("renew").and_then(Value::as_bool).unwrap_or_default(),
        })
    }

    /// Who has a context of its RDMA device.
    fn holders(&self, functions: &Functions) -> Result<Option<(String, u64)>, Error> {
        let listed = rdma::contexts(self.pci, self.rdma, functions)?;
        Ok(listed.into_iter().find(|(_, count)| *count > 0))
    }
}

/// Makes the function as new that these steps took into a pod.
///
/// # Errors
/// Code 11 if its driver does not take it again.
pub(crate) fn renew(steps: &[Step], functions: &Functions) -> Result<Renewal, Error> {
    let Some(function) = Function::of(steps) else { return Ok(Renewal::Nothing) };
    if !function.renew {
        let why = "its RDMA device is not its own, or an earlier version attached it";
        return Ok(Renewal::Impossible(why.to_owned()));
    }
    let mut host = Links::open().map_err(netlink)?;
    for link in host.list().map_err(netlink)? {
        if functions.has_netdev(&link, function.pci)
            && let Some(why) = used_by_host(&mut host, &link)?
        {
            return Ok(Renewal::Impossible(why));
        }
    }
    let driver = functions.driver(function.pci).unwrap_or_default();
    // What was moved has a driver that can: the kernel moves no other (`ib_device_set_netns_put`).
    let moved = steps.iter().any(|step| matches!(step, Step::MoveRdma { .. }));
    let ends = moved || ENDS_CONTEXTS.contains(&driver.as_str());
    // Not only contexts count: a descriptor is waited for as well, and nobody says who has one.
    if !ends && !rdma::contexts(function.pci, function.rdma, functions)?.is_empty() {
        let why = format!("{driver} may wait for whoever has its RDMA device open");
        return Ok(Renewal::Impossible(why));
    }
    functions.renew(function.pci)
}

/// Sees that nobody has a context of an RDMA device that could not be made as new: in shared mode a
/// descriptor works for whoever it was passed on to.
///
/// # Errors
/// Code 11 while somebody has.
pub(crate) fn unused(
    steps: &[Step],
    renewal: &Renewal,
    functions: &Functions,
) -> Result<(), Error> {
    let (Some(function), Renewal::Impossible(why)) = (Function::of(steps), renewal) else {
        return Ok(());
    };
    let pci = function.pci;
    let until = Instant::now() + PATIENCE;
    // Contexts of processes that were just killed end by and by.
    while let Some((device, count)) = function.holders(functions)? {
        if Instant::now() >= until {
            let msg = format!(
                "{count} context(s) of {device} are still in use, and {pci} cannot \
                               be made as new ({why})"
            );
            return Err(Error::new(Code::TRY_AGAIN, msg)
                .details("a process has a descriptor of the pod; it comes back when that ends"));
        }
        std::thread::sleep(LOOK);
    }
    eprintln!("vhost-rdma: {pci} comes back without being made as new: {why}");
    Ok(())
}

/// What the way back is gone with.
pub(crate) struct Back<'a> {
    pub(crate) nic: &'a Nic,
    pub(crate) pods: Vec<Netns>,
    pub(crate) functions: &'a Functions,
    /// The function was made as new, so its devices are on their way to the host.
    pub(crate) renewed: bool,
}

impl Back<'_> {
    fn deadline(&self) -> Instant {
        Instant::now() + if self.renewed { SETTLE } else { PATIENCE }
    }

    /// Undoes [`Step::MoveNetdev`].
    ///
    /// # Errors
    /// Code 11 if the device is out of reach, 102 if it cannot be put back.
    pub(crate) fn netdev(&self, step: &Step) -> Result<(), Error> {
        let Step::MoveNetdev { host_name, pci, mac, mtu, up, kind, altnames, .. } = step else {
            return Ok(());
        };
        let pci = pci.as_deref().filter(|pci| !pci.is_empty());
        let wanted = Gone {
            pci,
            mark: &format!("{ALIAS}{} ", self.nic.id),
            macs: [mac.as_deref(), self.nic.mac.as_deref()],
            kind: kind.as_deref(),
        };
        let host_netns = Netns::current().map_err(netlink)?;
        for pod in &self.pods {
            let mut links = Links::open_in(pod).map_err(netlink)?;
            let listed = links.list().map_err(netlink)?;
            if let Some(link) = wanted.among(&listed, |_, _| false) {
                links.set_up(link.index, false).map_err(netlink)?;
                names::bring(&mut links, link, &host_netns, host_name)?;
            }
        }
        let mut host = Links::open().map_err(netlink)?;
        let until = self.deadline();
        let link = loop {
            let listed = host.list().map_err(netlink)?;
            let by_mark = wanted.among(&listed, |link, pci| self.functions.has_netdev(link, pci));
            // A name alone is enough only where nothing better is known: another device may have it
            // by now.
            let by_name = |link: &&Link| pci.is_none() && link.name == *host_name;
            if let Some(link) = by_mark.or_else(|| listed.iter().find(by_name)) {
                break link.clone();
            }
            if !pci.is_some_and(|pci| self.functions.is_driven(pci)) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(out_of_reach(&format!("the network interface {host_name}")));
            }
            std::thread::sleep(LOOK);
        };
        // If it is back because its namespace ended, all that the pod gave it is there.
        names::clear(&mut host, &link, altnames)?;
        if link.name != *host_name {
            names::make_way(&mut host, host_name)?;
            host.set_up(link.index, false).map_err(netlink)?;
            host.rename(link.index, host_name)
                .map_err(|error| taken(&link.name, host_name, &error))?;
        }
        let mac = mac.as_deref().map(str::parse).transpose().map_err(netlink)?;
        if mac.as_ref() != link.address.as_ref() {
            host.set_up(link.index, false).map_err(netlink)?;
        }
        adjust(&mut host, &link, mac.as_ref(), *mtu)?;
        names::restore(&mut host, &link, altnames)?;
        host.set_up(link.index, *up).map_err(netlink)
    }

    /// Undoes [`Step::MoveRdma`].
    ///
    /// # Errors
    /// As [`Self::netdev`].
    pub(crate) fn rdma(&self, step: &Step) -> Result<(), Error> {
        let Step::MoveRdma { host_name, pod_name, pci, index, node_guid } = step else {
            return Ok(());
        };
        // A record of a function that has none.
        if host_name.is_empty() {
            return Ok(());
        }
        let gone = rdma::Gone {
            names: [host_name, pod_name],
            index: *index,
            node_guid: node_guid.as_deref(),
        };
        let host = Netns::current().map_err(netlink)?;
        for pod in &self.pods {
            rdma::fetch(gone, pod, &host)?;
        }
        let pci = pci.as_deref().filter(|pci| !pci.is_empty());
        let until = self.deadline();
        loop {
            if let Some(device) = rdma::at_home(gone, pci, self.functions)? {
                return rdma::name_again(&device, host_name);
            }
            if !pci.is_some_and(|pci| self.functions.is_driven(pci)) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(out_of_reach(&format!("the RDMA device {host_name}")));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Undoes [`Step::Other`].
    ///
    /// # Errors
    /// Code 102 if it cannot be put back.
    pub(crate) fn other(&self, name: &str, data: &Value) -> Result<(), Error> {
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
        let its = |link: &Link| {
            link.name == interface && pci.is_none_or(|pci| self.functions.has_netdev(link, pci))
        };
        let listed = host.list().map_err(netlink)?;
        if let Some(link) = listed.iter().find(|link| its(link)) {
            for address in data.get("addresses").and_then(Value::as_array).into_iter().flatten() {
                let Some(address) = address.as_str() else { continue };
                let prefix: IpPrefix = address.parse().map_err(netlink)?;
                match host.add_address(link.index, &NewAddress { prefix, no_dad: true }) {
                    Err(error) if !error.is_exists() => return Err(netlink(error)),
                    _ => {}
                }
            }
            // Ours goes last: until then it says whose the interface was.
            host.set_alias(link.index, text("alias").unwrap_or_default()).map_err(netlink)?;
        }
        let rdma = data.get("rdma").and_then(|rdma| rdma.get("name")).and_then(Value::as_str);
        let (true, Some(pci), Some(rdma)) = (self.renewed, pci, rdma) else { return Ok(()) };
        self.name_again(pci, rdma)
    }

    /// Gives a new RDMA device the name that the old one had. One that does not come is a fault of
    /// the function, which the agent sees.
    fn name_again(&self, pci: &str, name: &str) -> Result<(), Error> {
        let until = self.deadline();
        let none = rdma::Gone { names: [""; 2], index: None, node_guid: None };
        loop {
            if let Some(device) = rdma::at_home(none, Some(pci), self.functions)? {
                return rdma::name_again(&device, name);
            }
            if Instant::now() >= until {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }
}

fn taken(now: &str, host_name: &str, error: &rdma_netlink::Error) -> Error {
    let msg = format!("{now} is back on the host, but cannot be named {host_name} again: {error}");
    Error::new(NOT_UNDONE, msg)
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
    use serde_json::json;

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

    #[test]
    fn only_a_function_with_all_that_is_its_own_is_made_as_new() {
        let of = |data| {
            let steps = [Step::Other { name: HOST_INTERFACE.to_owned(), data }];
            Function::of(&steps).map(|function| {
                (function.renew, function.rdma.is_some_and(|rdma| rdma.index == Some(5)))
            })
        };
        let rdma = json!({"name": "mlx5_3", "index": 5, "node_guid": null});
        let data = json!({"name": "vf0", "pci": PCI, "rdma": rdma, "renew": true});
        assert_eq!(of(data.clone()), Some((true, true)));
        // An earlier version wrote less; no function is known by no address.
        assert_eq!(of(json!({"name": "vf0", "pci": PCI})), Some((false, false)));
        assert_eq!(of(json!({"name": "vf0", "pci": "", "renew": true})), None);
        assert_eq!(of(json!({"name": "vf0", "addresses": [], "alias": null})), None);
        let other = Step::Other { name: "something".to_owned(), data };
        assert!(Function::of(&[other]).is_none());
    }
}
