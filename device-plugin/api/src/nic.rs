//! A NIC as the CNI binary needs to know it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a pool gives to pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A vhost-user socket, for a pod that runs a VM.
    VhostUser,
    /// A NIC for the processes of the pod itself: a socket and libraries, no VM.
    Process,
    /// A VF with its netdev and RDMA device.
    Vf,
    /// A VF bound to vfio-pci.
    VfVfio,
    /// A share of the host's RDMA device.
    Shared,
}

impl Kind {
    /// Whether the daemon serves its NICs.
    #[must_use]
    pub const fn is_served(self) -> bool {
        matches!(self, Self::VhostUser | Self::Process)
    }

    /// The word that users write.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::VhostUser => "vhost-user",
            Self::Process => "process",
            Self::Vf => "vf",
            Self::VfVfio => "vf-vfio",
            Self::Shared => "shared",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How RDMA devices and network namespaces go together on this host (`rdma system`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetnsMode {
    /// A device belongs to one namespace and is moved into the pod's.
    Exclusive,
    /// Every namespace sees every device.
    Shared,
}

/// The netdev beside a VM's NIC: it carries ARP and everything that is not RDMA, and the guest
/// driver finds it by its MAC.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Companion {
    /// The bridge of the host that is the network's L2; absent: no companion is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// The tap's name in the pod, as the VMM options in the NIC's JSON file have it.
    pub tap: String,
    /// The user that may open the tap (`TUNSETOWNER`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The group that may open the tap (`TUNSETGROUP`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// What there is of the NIC on the host, by kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Personality {
    /// See [`Kind::VhostUser`].
    VhostUser {
        /// The NIC's directory on the host.
        dir: String,
        /// The socket on the host.
        socket: String,
        /// The same in the container.
        container_socket: String,
        /// The netdev to make beside it.
        companion: Companion,
    },
    /// See [`Kind::Process`].
    Process {
        /// The NIC's directory on the host.
        dir: String,
        /// The socket on the host.
        socket: String,
        /// The same in the container.
        container_socket: String,
    },
    /// See [`Kind::Vf`].
    Vf {
        /// Its PCI address.
        pci: String,
        /// The netdev's name on the host; absent if it has none, or is in a namespace now.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        netdev: Option<String>,
        /// The RDMA device's name.
        rdma_device: String,
        /// Moved, or visible anyhow.
        netns_mode: NetnsMode,
    },
    /// See [`Kind::VfVfio`].
    VfVfio {
        /// Its PCI address.
        pci: String,
    },
    /// See [`Kind::Shared`].
    Shared {
        /// The PCI address of the function behind it, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pci: Option<String>,
        /// The netdev of the RDMA device on the host.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        netdev: Option<String>,
        /// The RDMA device's name.
        rdma_device: String,
        /// Always shared if it is to be seen in a pod.
        netns_mode: NetnsMode,
    },
}

impl Personality {
    /// The kind alone.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::VhostUser { .. } => Kind::VhostUser,
            Self::Process { .. } => Kind::Process,
            Self::Vf { .. } => Kind::Vf,
            Self::VfVfio { .. } => Kind::VfVfio,
            Self::Shared { .. } => Kind::Shared,
        }
    }
}

/// One NIC of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    /// The ID that the kubelet knows.
    pub id: String,
    /// The pool that it comes from.
    pub pool: String,
    /// The pool's network in the daemon; empty for kinds that have none.
    #[serde(default)]
    pub network: String,
    /// What the interface in the pod is to be called: `CNI_IFNAME` if Multus asked for this one
    /// NIC, else a name from the pool.
    pub if_name: String,
    /// The MAC address that the interface must have; absent: the one that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Addresses (CIDR) that the pool fixes for this NIC; usually none, IPAM gives them.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// The interface's MTU; absent: as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// What there is on the host.
    #[serde(flatten)]
    pub personality: Personality,
}
