//! Who has a NIC, and what of it is in the pod.

use serde::{Deserialize, Serialize};

/// A pod as the runtime names it (`K8S_POD_*` in `CNI_ARGS`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; not every runtime tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// One attachment as CNI identifies it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// `CNI_CONTAINERID`: the pod's sandbox.
    pub container_id: String,
    /// `CNI_IFNAME`.
    pub if_name: String,
}

/// What became of one NIC.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AttachedNic {
    /// Its ID.
    pub nic: String,
    /// The interface in the pod: the companion tap, the VF's netdev. Absent: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_name: Option<String>,
    /// The interface's MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Addresses from IPAM in CIDR form. A pool with `addresses: ipam` lets the NIC use these and
    /// no others.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// The RDMA device in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_device: Option<String>,
}
