//! The hardware of the node: functions with RDMA devices, as pools select them.
//!
//! Looking is an edge behind [`Host`]; what is found is plain data. The look is taken at start, at
//! each reload and from time to time, since VFs come and go and a driver that is loaded late brings
//! its RDMA device with it.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vhost_rdma_agent_api::NetnsMode;

/// One function: a PF, a VF, or an RDMA device without PCI (rxe, siw).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Function {
    /// PCI address; absent for software devices.
    pub pci: Option<String>,
    /// Of a VF: its PF's PCI address, the PF's netdev and its own number.
    pub parent: Option<Parent>,
    /// PCI vendor, four hexadecimal digits.
    pub vendor: String,
    /// PCI device, four hexadecimal digits.
    pub device: String,
    /// The kernel driver that has it.
    pub driver: Option<String>,
    /// Its netdevs, in this network namespace.
    pub netdevs: Vec<String>,
    /// Their IP addresses.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// Its RDMA device.
    pub rdma: Option<String>,
    /// `ethernet` or `infiniband`.
    pub link: Option<String>,
    /// Its NUMA node.
    pub numa: Option<u32>,
    /// Its VFIO group.
    pub iommu_group: Option<u32>,
    /// Device nodes that verbs need: `uverbsN`, `rdma_cm`.
    pub char_devices: Vec<PathBuf>,
    /// Device nodes for management datagrams (`umadN`): whoever has one can speak for the port, to
    /// the fabric's manager too.
    #[serde(default)]
    pub umad: Vec<PathBuf>,
    /// Why it cannot be used now although all is there, such as a port without a link.
    pub fault: Option<String>,
}

/// A VF's PF.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Parent {
    /// Its PCI address.
    pub pci: String,
    /// Its netdev.
    pub netdev: Option<String>,
    /// The VF's number.
    pub vf: u32,
}

impl Function {
    /// Functions that share a PF are near each other.
    #[must_use]
    pub fn group(&self) -> String {
        match (&self.parent, &self.pci) {
            (Some(parent), _) => parent.pci.clone(),
            (None, Some(pci)) => pci.clone(),
            (None, None) => self.rdma.clone().unwrap_or_default(),
        }
    }
}

/// What there is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    /// Every function.
    pub functions: Vec<Function>,
    /// How RDMA devices and network namespaces go together; absent: no RDMA subsystem.
    pub netns_mode: Option<NetnsMode>,
}

/// Looks at the host.
pub trait Host: Send + Sync + 'static {
    /// What there is now. It may take some milliseconds: it is called on a blocking thread.
    ///
    /// # Errors
    /// What could not be read, in words.
    fn inventory(&self) -> Result<Inventory, String>;
}

mod node;

pub use node::NodeHost;
