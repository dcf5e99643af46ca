//! Physical and virtual functions with what is known of them. Nothing here changes anything.

use serde::Serialize;

use super::PciAddress;
use super::sysfs::{self, Sysfs};
use crate::link::{Link, LinkKind, VfSettings};
use crate::rdma::{Device, Port, PortState};
use crate::{Error, Guid, HardwareAddress, Result};

/// The driver that gives a function to user space.
pub const VFIO_PCI: &str = "vfio-pci";

/// All functions with SR-IOV.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Inventory {
    /// In order of their addresses.
    pub functions: Vec<PhysicalFunction>,
}

/// What physical and virtual functions have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Function {
    /// Where it is.
    pub address: PciAddress,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI device.
    pub device: u16,
    /// The driver that it is bound to.
    pub driver: Option<String>,
    /// The only driver that may bind to it, if one was demanded.
    pub driver_override: Option<String>,
    /// Nearest memory; `None` on a machine with one node, or if the firmware does not say.
    pub numa_node: Option<u32>,
    /// Functions that an IOMMU cannot tell apart.
    pub iommu_group: Option<u32>,
    /// Its network interfaces in this namespace.
    pub netdevs: Vec<Netdev>,
    /// Its RDMA devices in this namespace, with software ones on its interfaces.
    pub rdma_devices: Vec<RdmaDevice>,
}

/// A network interface of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: Option<u32>,
    /// What frames look like.
    pub kind: Option<LinkKind>,
    /// Its address.
    pub address: Option<HardwareAddress>,
    /// Largest packet.
    pub mtu: Option<u32>,
    /// Operational state.
    pub state: Option<String>,
    /// There is a signal.
    pub carrier: bool,
    /// Mbit/s.
    pub speed: Option<u32>,
}

/// An RDMA device of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: Option<u32>,
    /// `roce`, `ib`, `iw`.
    pub protocol: Option<String>,
    /// GUID of the node.
    pub node_guid: Option<Guid>,
    /// State of each port.
    pub ports: Vec<PortState>,
    /// Made of software (rxe, siw) on the function's interface.
    pub software: bool,
}

/// A function that can have virtual ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PhysicalFunction {
    /// What it is.
    #[serde(flatten)]
    pub function: Function,
    /// Virtual functions that it can have.
    pub total_vfs: u32,
    /// Virtual functions that it has.
    pub vf_count: u32,
    /// Those.
    pub vfs: Vec<VirtualFunction>,
}

/// A virtual function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VirtualFunction {
    /// What it is.
    #[serde(flatten)]
    pub function: Function,
    /// Its physical function.
    pub pf: PciAddress,
    /// Its number there.
    pub index: u32,
    /// What its physical function holds for it; `None` if that has no interface in this namespace.
    pub settings: Option<VfSettings>,
    /// Device node for VFIO: `/dev/vfio/…`, if it is bound to vfio-pci.
    pub vfio_group: Option<String>,
}

impl std::ops::Deref for PhysicalFunction {
    type Target = Function;

    fn deref(&self) -> &Function {
        &self.function
    }
}

impl std::ops::Deref for VirtualFunction {
    type Target = Function;

    fn deref(&self) -> &Function {
        &self.function
    }
}

/// The netlink side of an inventory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Network {
    pub(crate) links: Vec<Link>,
    pub(crate) devices: Vec<(Device, Vec<Port>)>,
}

impl Inventory {
    pub(crate) fn assemble(sysfs: &Sysfs, network: &Network) -> Result<Self> {
        let reader = Reader { sysfs, network };
        let functions =
            sysfs.functions()?.into_iter().filter_map(|address| reader.physical(address)).collect();
        Ok(Self { functions })
    }

    /// The physical function that is called so: by address, interface or RDMA device.
    ///
    /// # Errors
    /// [`Error::NotFound`], with what there is.
    pub fn pf(&self, name: &str) -> Result<&PhysicalFunction> {
        self.functions.iter().find(|pf| pf.is_called(name)).ok_or_else(|| {
            let known: Vec<&str> = self
                .functions
                .iter()
                .filter_map(|pf| pf.netdevs.first())
                .map(|netdev| netdev.name.as_str())
                .collect();
            let known = if known.is_empty() {
                "this host has none".to_owned()
            } else {
                format!("there are {}", known.join(", "))
            };
            Error::NotFound(format!(
                "{name:?} is no physical function with SR-IOV ({known}); `vf list` shows all"
            ))
        })
    }

    /// The virtual function that is called so: by address, interface, RDMA device, or as
    /// `PF/NUMBER`.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn vf(&self, name: &str) -> Result<&VirtualFunction> {
        let missing =
            || Error::NotFound(format!("{name:?} is no virtual function; `vf list` shows all"));
        if let Some((pf, number)) = name.rsplit_once('/') {
            let number: u32 = number.parse().map_err(|_| missing())?;
            return self.pf(pf)?.vfs.iter().find(|vf| vf.index == number).ok_or_else(missing);
        }
        self.vfs().find(|vf| vf.is_called(name)).ok_or_else(missing)
    }

    /// All virtual functions.
    pub fn vfs(&self) -> impl Iterator<Item = &VirtualFunction> {
        self.functions.iter().flat_map(|pf| &pf.vfs)
    }

    /// By address.
    pub(crate) fn pf_at(&self, address: PciAddress) -> Option<&PhysicalFunction> {
        self.functions.iter().find(|pf| pf.address == address)
    }

    /// By address.
    pub(crate) fn vf_at(&self, address: PciAddress) -> Option<&VirtualFunction> {
        self.vfs().find(|vf| vf.address == address)
    }
}

impl Function {
    fn is_called(&self, name: &str) -> bool {
        name.parse().is_ok_and(|address: PciAddress| address == self.address)
            || self.netdevs.iter().any(|netdev| netdev.name == name)
            || self.rdma_devices.iter().any(|device| device.name == name)
    }
}

struct Reader<'a> {
    sysfs: &'a Sysfs,
    network: &'a Network,
}

impl Reader<'_> {
    fn physical(&self, address: PciAddress) -> Option<PhysicalFunction> {
        let total_vfs = self.count(address, "sriov_totalvfs")?;
        let function = self.function(address);
        let settings = function
            .netdevs
            .first()
            .and_then(|netdev| self.link(&netdev.name))
            .map(|link| &link.vfs);
        let vfs: Vec<VirtualFunction> = self
            .sysfs
            .virtual_functions(address)
            .into_iter()
            .map(|(index, vf)| {
                let settings =
                    settings.and_then(|list| list.iter().find(|one| one.index == index)).cloned();
                self.virtual_function(address, index, vf, settings)
            })
            .collect();
        let vf_count = self.count(address, "sriov_numvfs").unwrap_or(0);
        Some(PhysicalFunction { function, total_vfs, vf_count, vfs })
    }

    fn virtual_function(
        &self,
        pf: PciAddress,
        index: u32,
        address: PciAddress,
        settings: Option<VfSettings>,
    ) -> VirtualFunction {
        let function = self.function(address);
        let vfio_group = (function.driver.as_deref() == Some(VFIO_PCI))
            .then(|| {
                let group = self.sysfs.target(address, "iommu_group")?;
                // In the mode without an IOMMU the node has another name.
                let name = self.sysfs.text(address, "iommu_group/name").unwrap_or_default();
                Some(if name.contains("noiommu") {
                    format!("/dev/vfio/noiommu-{group}")
                } else {
                    format!("/dev/vfio/{group}")
                })
            })
            .flatten();
        VirtualFunction { function, pf, index, settings, vfio_group }
    }

    fn function(&self, address: PciAddress) -> Function {
        let id = |name| {
            self.sysfs.number(address, name).and_then(|id| u16::try_from(id).ok()).unwrap_or(0)
        };
        let netdevs: Vec<Netdev> =
            self.sysfs.entries(address, "net").iter().map(|name| self.netdev(name)).collect();
        let none = |text: &String| !text.is_empty() && text != "(null)";
        Function {
            address,
            vendor: id("vendor"),
            device: id("device"),
            driver: self.sysfs.target(address, "driver"),
            driver_override: self.sysfs.text(address, "driver_override").filter(none),
            numa_node: self.count(address, "numa_node"),
            iommu_group: self
                .sysfs
                .target(address, "iommu_group")
                .and_then(|group| group.parse().ok()),
            rdma_devices: self.rdma_devices(address, &netdevs),
            netdevs,
        }
    }

    fn count(&self, address: PciAddress, attribute: &str) -> Option<u32> {
        self.sysfs.number(address, attribute).and_then(|number| u32::try_from(number).ok())
    }

    fn link(&self, name: &str) -> Option<&Link> {
        self.network.links.iter().find(|link| link.name == name)
    }

    fn netdev(&self, name: &str) -> Netdev {
        let link = self.link(name);
        let speed = sysfs::text(&self.sysfs.root().join("class/net").join(name).join("speed"));
        Netdev {
            name: name.to_owned(),
            index: link.map(|link| link.index),
            kind: link.map(|link| link.kind),
            address: link.and_then(|link| link.address.clone()),
            mtu: link.map(|link| link.mtu),
            state: link.map(|link| link.state.clone()),
            carrier: link.is_some_and(|link| link.carrier),
            // -1 without a link.
            speed: speed.and_then(|speed| speed.parse().ok()),
        }
    }

    fn rdma_devices(&self, address: PciAddress, netdevs: &[Netdev]) -> Vec<RdmaDevice> {
        let hardware = self.sysfs.entries(address, "infiniband");
        let on_netdev = |ports: &[Port]| {
            ports
                .iter()
                .filter_map(|port| port.netdev.as_ref())
                .any(|name| netdevs.iter().any(|netdev| netdev.name == *name))
        };
        let mut list: Vec<RdmaDevice> = self
            .network
            .devices
            .iter()
            .filter(|(device, ports)| hardware.contains(&device.name) || on_netdev(ports))
            .map(|(device, ports)| RdmaDevice {
                name: device.name.clone(),
                index: Some(device.index),
                protocol: device.protocol.clone(),
                node_guid: device.node_guid,
                ports: ports.iter().filter_map(|port| port.state).collect(),
                software: !hardware.contains(&device.name),
            })
            .collect();
        for name in hardware {
            if !list.iter().any(|device| device.name == name) {
                list.push(RdmaDevice {
                    name,
                    index: None,
                    protocol: None,
                    node_guid: None,
                    ports: Vec::new(),
                    software: false,
                });
            }
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::{Inventory, Network, Sysfs};
    use crate::link::{Link, LinkKind, VfSettings};

    fn put(dir: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
    }

    fn tree(root: &Path) {
        let devices = root.join("bus/pci/devices");
        let pf = devices.join("0000:01:00.0");
        put(
            &pf,
            &[
                ("vendor", "0x8086\n"),
                ("device", "0x10c9\n"),
                ("numa_node", "1\n"),
                ("sriov_totalvfs", "7\n"),
                ("sriov_numvfs", "2\n"),
                ("driver_override", "(null)\n"),
            ],
        );
        symlink("../../../bus/pci/drivers/igb", pf.join("driver")).unwrap();
        fs::create_dir_all(pf.join("net/ens1")).unwrap();
        put(&root.join("class/net/ens1"), &[("speed", "1000\n")]);
        for (number, name, driver) in
            [(0, "0000:01:10.0", "igbvf"), (1, "0000:01:10.2", "vfio-pci")]
        {
            let vf = devices.join(name);
            put(
                &vf,
                &[
                    ("vendor", "0x8086\n"),
                    ("device", "0x10ca\n"),
                    ("numa_node", "-1\n"),
                    ("driver_override", "\n"),
                ],
            );
            symlink(format!("../../../bus/pci/drivers/{driver}"), vf.join("driver")).unwrap();
            symlink(
                format!("../../../kernel/iommu_groups/{}", 11 + number),
                vf.join("iommu_group"),
            )
            .unwrap();
            symlink("../0000:01:00.0", vf.join("physfn")).unwrap();
            symlink(format!("../{name}"), pf.join(format!("virtfn{number}"))).unwrap();
        }
        fs::create_dir_all(devices.join("0000:01:10.0/net/ens1v0")).unwrap();
        fs::create_dir_all(devices.join("0000:01:10.0/infiniband/hw0")).unwrap();
        put(&devices.join("0000:00:00.0"), &[("vendor", "0x8086\n")]);
    }

    #[test]
    fn a_tree_is_read() {
        let root = tempfile::tempdir().unwrap();
        tree(root.path());
        let link = Link {
            index: 3,
            name: "ens1".to_owned(),
            altnames: Vec::new(),
            kind: LinkKind::Ethernet,
            driver_kind: None,
            address: None,
            permanent_address: None,
            mtu: 1500,
            up: true,
            carrier: true,
            state: "up".to_owned(),
            master: None,
            lower: None,
            alias: None,
            parent: None,
            parent_bus: None,
            owner: None,
            group: None,
            vf_count: 2,
            vfs: vec![VfSettings { index: 1, max_tx_rate: Some(100), ..VfSettings::default() }],
        };
        let network = Network { links: vec![link], devices: Vec::new() };
        let inventory = Inventory::assemble(&Sysfs::new(root.path()), &network).unwrap();
        assert_eq!(inventory.functions.len(), 1, "functions without SR-IOV are left out");
        let pf = inventory.pf("ens1").unwrap();
        assert_eq!(
            (pf.vendor, pf.device, pf.numa_node, pf.total_vfs, pf.vf_count),
            (0x8086, 0x10c9, Some(1), 7, 2)
        );
        assert_eq!(
            (pf.driver.as_deref(), pf.driver_override.as_deref(), pf.netdevs[0].speed),
            (Some("igb"), None, Some(1000))
        );
        let first = inventory.vf("ens1/0").unwrap();
        assert_eq!(
            (first.numa_node, first.iommu_group, first.vfio_group.as_deref()),
            (None, Some(11), None)
        );
        assert_eq!(inventory.vf("ens1v0").unwrap(), first);
        assert_eq!(inventory.vf("hw0").unwrap(), first);
        assert_eq!(inventory.vf("01:10.0").unwrap(), first);
        let second = inventory.vf("0000:01:00.0/1").unwrap();
        assert_eq!(second.settings.as_ref().unwrap().max_tx_rate, Some(100));
        assert_eq!(second.vfio_group.as_deref(), Some("/dev/vfio/12"));
        for name in ["ens1/2", "ens1/x", "ens2/0", "nothing", "0000:01:00.0"] {
            assert!(inventory.vf(name).unwrap_err().is_not_found(), "{name}");
        }
        let message = inventory.pf("ens7").unwrap_err().to_string();
        assert!(message.contains("there are ens1"), "{message}");
    }

    #[test]
    fn a_host_without_pci_has_no_functions() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(
            Inventory::assemble(&Sysfs::new(root.path()), &Network::default()).unwrap(),
            Inventory::default()
        );
    }
}
