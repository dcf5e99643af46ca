//! Who uses a virtual function: what would be torn from under somebody if it went away.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use serde::Serialize;

use super::inventory::{VFIO_PCI, VirtualFunction};
use super::sysfs::{self, Sysfs};
use crate::IpPrefix;
use crate::link::{Address, Link};

/// A use of a virtual function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum User {
    /// A process has its device node open: a VMM, or a program that does verbs.
    Process {
        /// Its number.
        pid: u32,
        /// Its name.
        name: String,
        /// The device node.
        file: String,
    },
    /// Its network interface is in another namespace.
    OtherNamespace,
    /// Its network interface has an address.
    Address {
        /// The interface.
        netdev: String,
        /// The address.
        prefix: IpPrefix,
    },
    /// Its network interface is a port of a bridge or bond.
    Port {
        /// The interface.
        netdev: String,
    },
    /// A software RDMA device is on its network interface.
    SoftwareDevice {
        /// The device.
        rdma_device: String,
    },
    /// Somebody has reserved it.
    Claim {
        /// Who.
        owner: String,
    },
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, name, file } => {
                write!(f, "process {pid} ({name}) has {file} open")
            }
            Self::OtherNamespace => f.write_str("its network interface is in another namespace"),
            Self::Address { netdev, prefix } => {
                write!(f, "its network interface {netdev} has the address {prefix}")
            }
            Self::Port { netdev } => {
                write!(f, "its network interface {netdev} is a port of a bridge or bond")
            }
            Self::SoftwareDevice { rdma_device } => {
                write!(f, "the RDMA device {rdma_device} is on its network interface")
            }
            Self::Claim { owner } => write!(f, "it is reserved by {owner}"),
        }
    }
}

/// What the answer is made of, besides the function itself.
pub(super) struct Sources<'a> {
    pub(super) sysfs: &'a Sysfs,
    pub(super) proc_root: &'a Path,
    pub(super) links: &'a [Link],
    pub(super) addresses: &'a [Address],
}

/// PCI base class "network controller".
const NETWORK: i64 = 0x02;

impl Sources<'_> {
    pub(super) fn users(&self, vf: &VirtualFunction) -> Vec<User> {
        let mut users = self.processes(&self.device_nodes(vf));
        let class = self.sysfs.number(vf.address, "class").unwrap_or(0) >> 16;
        let driver = vf.driver.as_deref();
        // `net` is there as soon as the driver has registered an interface; the names in it are
        // those of our namespace.
        let has_netdev = self.sysfs.path(vf.address).join("net").is_dir();
        if class == NETWORK
            && driver.is_some()
            && driver != Some(VFIO_PCI)
            && has_netdev
            && vf.netdevs.is_empty()
        {
            users.push(User::OtherNamespace);
        }
        for netdev in &vf.netdevs {
            let Some(link) = self.links.iter().find(|link| link.name == netdev.name) else {
                continue;
            };
            users.extend(
                self.addresses
                    .iter()
                    // Link-local addresses appear by themselves.
                    .filter(|address| address.index == link.index && !address.link_local)
                    .map(|address| User::Address {
                        netdev: netdev.name.clone(),
                        prefix: address.prefix,
                    }),
            );
            if link.master.is_some() {
                users.push(User::Port { netdev: netdev.name.clone() });
            }
        }
        let software = vf.rdma_devices.iter().filter(|device| device.software);
        users.extend(
            software.map(|device| User::SoftwareDevice { rdma_device: device.name.clone() }),
        );
        users
    }

    fn device_nodes(&self, vf: &VirtualFunction) -> Vec<String> {
        let mut nodes: Vec<String> = vf.vfio_group.iter().cloned().collect();
        nodes.extend(
            self.sysfs
                .entries(vf.address, "vfio-dev")
                .iter()
                .map(|name| format!("/dev/vfio/devices/{name}")),
        );
        let class = self.sysfs.root().join("class/infiniband_verbs");
        for uverbs in sysfs::names(&class) {
            let device = sysfs::text(&class.join(&uverbs).join("ibdev"));
            if device.is_some_and(|device| vf.rdma_devices.iter().any(|one| one.name == device)) {
                nodes.push(format!("/dev/infiniband/{uverbs}"));
            }
        }
        nodes
    }

    fn processes(&self, nodes: &[String]) -> Vec<User> {
        if nodes.is_empty() {
            return Vec::new();
        }
        let mut found = BTreeMap::new();
        for pid in sysfs::names(self.proc_root).iter().filter_map(|name| name.parse::<u32>().ok()) {
            let dir = self.proc_root.join(pid.to_string());
            for fd in sysfs::names(&dir.join("fd")) {
                let Ok(target) = fs::read_link(dir.join("fd").join(fd)) else { continue };
                if let Some(file) = nodes.iter().find(|node| target == Path::new(node.as_str())) {
                    let name = sysfs::text(&dir.join("comm")).unwrap_or_default();
                    found.insert((pid, file.clone()), name);
                }
            }
        }
        found.into_iter().map(|((pid, file), name)| User::Process { pid, name, file }).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::{Sources, User};
    use crate::sriov::inventory::{Function, VirtualFunction};
    use crate::sriov::sysfs::Sysfs;

    #[test]
    fn a_vmm_and_an_interface_that_is_away_are_seen() {
        let (sys, proc_root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let address = "0000:01:10.0".parse().unwrap();
        let dir = sys.path().join("bus/pci/devices/0000:01:10.0");
        fs::create_dir_all(dir.join("net")).unwrap();
        fs::write(dir.join("class"), "0x020000\n").unwrap();
        let function = Function {
            address,
            vendor: 0,
            device: 0,
            driver: Some("vfio-pci".to_owned()),
            driver_override: None,
            numa_node: None,
            iommu_group: Some(12),
            netdevs: Vec::new(),
            rdma_devices: Vec::new(),
        };
        let mut vf = VirtualFunction {
            function,
            pf: address,
            index: 0,
            settings: None,
            vfio_group: Some("/dev/vfio/12".to_owned()),
        };
        fs::create_dir_all(proc_root.path().join("77/fd")).unwrap();
        fs::write(proc_root.path().join("77/comm"), "qemu-system-x86\n").unwrap();
        let sysfs = Sysfs::new(sys.path());
        let sources =
            Sources { sysfs: &sysfs, proc_root: proc_root.path(), links: &[], addresses: &[] };
        assert_eq!(sources.users(&vf), []);
        symlink("/dev/vfio/12", proc_root.path().join("77/fd/9")).unwrap();
        let users = sources.users(&vf);
        assert_eq!(users.len(), 1);
        assert_eq!(users[0].to_string(), "process 77 (qemu-system-x86) has /dev/vfio/12 open");
        vf.function.driver = Some("igbvf".to_owned());
        vf.vfio_group = None;
        assert_eq!(sources.users(&vf), [User::OtherNamespace]);
    }
}
