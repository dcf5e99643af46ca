//! The node that this process runs on: netlink and sysfs.
//!
//! Functions with SR-IOV come from the inventory of crate rdma-netlink; RDMA devices that are none
//! of theirs (software devices, NICs without SR-IOV) are added from the list of RDMA devices.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rdma_netlink::link::{LinkKind, Links};
use rdma_netlink::rdma::{CharDevice, Device, PortState, Rdma};
use rdma_netlink::sriov::{self, Host as _};
use vhost_rdma_agent_api::NetnsMode;

use super::{Function, Host, Inventory, Parent};

/// Where sysfs is.
const SYSFS: &str = "/sys";
/// Where the device nodes of verbs are.
const NODES: &str = "/dev/infiniband";

/// This node.
#[derive(Debug, Default)]
pub struct NodeHost(());

impl Host for NodeHost {
    fn inventory(&self) -> Result<Inventory, String> {
        let seen = sriov::System::default().inventory().map_err(|error| error.to_string())?;
        let mut verbs = Verbs::open()?;
        let mut functions = Vec::new();
        for pf in &seen.functions {
            functions.push(Function { fault: port_fault(pf), ..verbs.function(pf, None) });
            for vf in &pf.vfs {
                let parent = Parent {
                    pci: pf.address.to_string(),
                    netdev: pf.netdevs.first().map(|netdev| netdev.name.clone()),
                    vf: vf.index,
                };
                let mut function = verbs.function(vf, Some(parent));
                // A VF whose netdev is in a pod shows no link layer of its own.
                function.link = function.link.or_else(|| link(pf));
                function.fault = function.fault.or_else(|| port_fault(pf));
                functions.push(function);
            }
        }
        let known: BTreeSet<String> =
            functions.iter().filter_map(|function| function.rdma.clone()).collect();
        functions.extend(verbs.others(&known));
        add_addresses(&mut functions);
        Ok(Inventory { functions, netns_mode: verbs.netns_mode })
    }
}

/// The IP addresses of each function's netdevs. In a network namespace that has none of them, none.
fn add_addresses(functions: &mut [Function]) {
    let Ok(mut links) = Links::open() else { return };
    let (Ok(all), Ok(addresses)) = (links.list(), links.addresses(None)) else { return };
    for function in functions {
        let its = all.iter().filter(|link| function.netdevs.contains(&link.name));
        let its: BTreeSet<u32> = its.map(|link| link.index).collect();
        let of = addresses.iter().filter(|address| its.contains(&address.index));
        function.addresses = of.map(|address| address.prefix.address).collect();
    }
}

/// The verbs side; absent where the kernel has no RDMA.
struct Verbs {
    rdma: Option<Rdma>,
    devices: Vec<Device>,
    netns_mode: Option<NetnsMode>,
}

impl Verbs {
    fn open() -> Result<Self, String> {
        let nothing = Self { rdma: None, devices: Vec::new(), netns_mode: None };
        let mut rdma = match Rdma::open() {
            Ok(rdma) => rdma,
            Err(error) if error.is_unsupported() => return Ok(nothing),
            Err(error) => return Err(error.to_string()),
        };
        let devices = match rdma.devices() {
            Ok(devices) => devices,
            Err(error) if error.is_unsupported() => return Ok(nothing),
            Err(error) => return Err(error.to_string()),
        };
        let netns_mode = rdma.system().ok().and_then(|system| system.netns_mode).map(|mode| {
            if mode == rdma_netlink::rdma::NetnsMode::Exclusive {
                NetnsMode::Exclusive
            } else {
                NetnsMode::Shared
            }
        });
        Ok(Self { rdma: Some(rdma), devices, netns_mode })
    }

    fn function(&mut self, seen: &sriov::Function, parent: Option<Parent>) -> Function {
        let rdma =
            seen.rdma_devices.iter().find(|device| !device.software).or(seen.rdma_devices.first());
        let index = rdma.and_then(|device| device.index);
        Function {
            pci: Some(seen.address.to_string()),
            parent,
            vendor: format!("{:04x}", seen.vendor),
            device: format!("{:04x}", seen.device),
            driver: seen.driver.clone(),
            netdevs: seen.netdevs.iter().map(|netdev| netdev.name.clone()).collect(),
            addresses: Vec::new(),
            rdma: rdma.map(|device| device.name.clone()),
            link: link(seen),
            numa: seen.numa_node,
            iommu_group: seen.iommu_group,
            char_devices: self.char_devices(index),
            umad: self.umad(index),
            // The port of a VF is down until its pod takes it up; what counts is its PF's.
            fault: None,
        }
    }

    /// RDMA devices that belong to no function with SR-IOV.
    fn others(&mut self, known: &BTreeSet<String>) -> Vec<Function> {
        let devices: Vec<Device> =
            self.devices.iter().filter(|device| !known.contains(&device.name)).cloned().collect();
        let mut functions = Vec::new();
        for device in devices {
            let ports = self
                .rdma
                .as_mut()
                .and_then(|rdma| rdma.ports(device.index).ok())
                .unwrap_or_default();
            let states: Vec<PortState> = ports.iter().filter_map(|port| port.state).collect();
            let pci = pci_of(&device.name);
            let attribute = |name: &str| {
                let pci = pci.as_ref()?;
                let path = Path::new(SYSFS).join("bus/pci/devices").join(pci).join(name);
                Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
            };
            let id = |name: &str| {
                attribute(name).map(|id| id.trim_start_matches("0x").to_owned()).unwrap_or_default()
            };
            functions.push(Function {
                parent: None,
                vendor: id("vendor"),
                device: id("device"),
                driver: pci.as_ref().and_then(|pci| driver_of(pci)),
                netdevs: ports.iter().filter_map(|port| port.netdev.clone()).collect(),
                addresses: Vec::new(),
                rdma: Some(device.name.clone()),
                link: Some(link_layer(&device)),
                numa: attribute("numa_node").and_then(|node| node.parse().ok()),
                iommu_group: pci.as_ref().and_then(|pci| target(pci, "iommu_group")?.parse().ok()),
                char_devices: self.char_devices(Some(device.index)),
                umad: self.umad(Some(device.index)),
                fault: all_down(&states, &device.name),
                pci: pci.clone(),
            });
        }
        functions
    }

    fn char_devices(&mut self, index: Option<u32>) -> Vec<PathBuf> {
        let (Some(rdma), Some(index)) = (self.rdma.as_mut(), index) else { return Vec::new() };
        // rdma_ucm may not be loaded: what there is is given.
        nodes([
            rdma.char_device("uverbs", Some(index), None),
            rdma.char_device("rdma_cm", None, None),
        ])
    }

    /// A device without MADs has none.
    fn umad(&mut self, index: Option<u32>) -> Vec<PathBuf> {
        let (Some(rdma), Some(index)) = (self.rdma.as_mut(), index) else { return Vec::new() };
        nodes([rdma.char_device("umad", Some(index), Some(1))])
    }
}

/// The nodes that there are.
fn nodes<const COUNT: usize>(found: [rdma_netlink::Result<CharDevice>; COUNT]) -> Vec<PathBuf> {
    let paths = found.into_iter().flatten().map(|device| Path::new(NODES).join(device.name));
    paths.filter(|path| path.exists()).collect()
}

fn link(function: &sriov::Function) -> Option<String> {
    function.netdevs.iter().find_map(|netdev| match netdev.kind {
        Some(LinkKind::Ethernet) => Some("ethernet".to_owned()),
        Some(LinkKind::InfiniBand) => Some("infiniband".to_owned()),
        _ => None,
    })
}

fn link_layer(device: &Device) -> String {
    if device.protocol.as_deref() == Some("ib") { "infiniband" } else { "ethernet" }.to_owned()
}

fn port_fault(pf: &sriov::Function) -> Option<String> {
    let device = pf.rdma_devices.iter().find(|device| !device.software)?;
    all_down(&device.ports, &device.name)
}

/// A device none of whose ports has a link carries nothing.
fn all_down(states: &[PortState], name: &str) -> Option<String> {
    let down = !states.is_empty() && states.iter().all(|state| *state == PortState::Down);
    down.then(|| format!("the port of {name} is down"))
}

/// The PCI function behind an RDMA device.
fn pci_of(rdma: &str) -> Option<String> {
    let link =
        std::fs::read_link(Path::new(SYSFS).join("class/infiniband").join(rdma).join("device"))
            .ok()?;
    let name = link.file_name()?.to_str()?.to_owned();
    Path::new(SYSFS).join("bus/pci/devices").join(&name).exists().then_some(name)
}

fn driver_of(pci: &str) -> Option<String> {
    target(pci, "driver")
}

/// The last part of what a link of a function points to.
fn target(pci: &str, link: &str) -> Option<String> {
    let path = Path::new(SYSFS).join("bus/pci/devices").join(pci).join(link);
    Some(std::fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}
