//! A node: what it shall offer and what is there.
//!
//! The spec is the controller's alone: policies, networks, classes, tenants and blocks, brought
//! together for this node. The status is the agent's alone. An address block moves between nodes by
//! a protocol of both, so that no address is ever given out twice:
//!
//! 1. The controller binds a block by creating the [`RdmaIPBlock`](crate::RdmaIPBlock) and lists it
//!    in `spec.blocks`.
//! 2. The agent adds the block's UID to `status.blocks`, and *then* reads the block itself. Only if
//!    that is still bound to the node, with this UID and not `releasing`, may addresses be given
//!    out.
//! 3. To take it back the controller sets the block's `releasing`, and *then* reads the node
//!    itself. Only if `status.blocks` does not have the UID is the block deleted. The agent that
//!    sees `releasing` gives out nothing more and removes the UID when the last address has come
//!    back.
//!
//! An agent that starts begins by writing its status, whatever it says, so that what its forerunner
//! left there counts no more.
//!
//! Each side writes before it reads, and both read what the API server has and no copy: so at least
//! one of them sees the other.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Addressing, Cidr, Companion, Condition, LabelSelector, Limits, Quantity, Rates,
    RdmaNicClassSpec,
};

/// What a node shall offer.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "vhost-rdma.io",
    version = "v1alpha1",
    kind = "RdmaNode",
    plural = "rdmanodes",
    shortname = "rnode",
    category = "vhost-rdma",
    status = "RdmaNodeStatus",
    derive = "PartialEq",
    doc = "What a node shall offer, written by the controller, and what is there, by its agent.",
    printcolumn(name = "NICs", type_ = "integer", json_path = ".status.granted"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Daemon", type_ = "string", json_path = ".status.daemon.version"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        priority = 1,
        json_path = ".status.conditions[?(@.type==\"Ready\")].message"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNodeSpec {
    /// Pools that the node offers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<NodePool>,
    /// Networks of these pools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NodeNetwork>,
    /// Which RNICs belong to which fabric.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rnics: Vec<crate::PolicyRnic>,
    /// Addresses that the node may give out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<NodeBlock>,
    /// IDs that must not be granted again: their pods are being moved.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cordon: Vec<String>,
    /// Named NICs that pods of the node have and that have changed since they were made.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NodeNic>,
}

/// A pool of a node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Default)]
#[serde(rename_all = "camelCase")]
pub struct NodePool {
    /// Its name.
    pub name: String,
    /// The network of its NICs.
    pub network: String,
    /// How many NICs.
    pub count: u32,
    /// The policy that says so.
    pub policy: String,
    /// The name of its class, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// What the class says.
    #[serde(default)]
    pub nic: RdmaNicClassSpec,
    /// The NUMA nodes that the kubelet is told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numa: Vec<u32>,
    /// A digest of all that is fixed when a NIC is made. NICs report that of their making.
    pub revision: String,
}

/// A network that a node hosts.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetwork {
    /// Its name.
    pub name: String,
    /// Its UID: a network that was deleted and made again is another.
    pub uid: String,
    /// Its virtual network identifier.
    pub vni: u32,
    /// The fabric that carries it; absent: the daemon's own engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<String>,
    /// Whose addresses its guests have, with a fabric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addressing: Option<Addressing>,
    /// The MTU of the interfaces in pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The network interface beside each NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub companion: Option<Companion>,
    /// Ranges beyond the network that its NICs may reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<Cidr>,
    /// NICs have addresses of the node's blocks, and no others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ipam: bool,
    /// Who may use it. Nobody else may, whatever admission said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<NodeTenant>,
}

/// A tenant that may use a network.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct NodeTenant {
    /// Its name.
    pub name: String,
    /// Its namespaces.
    pub namespace_selector: LabelSelector,
    /// Namespaces that the selector means too and that belong to a tenant that was made before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<String>,
    /// Whether it holds more than its quota: it keeps what it has and gets no more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
}

/// Addresses that a node may give out.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct NodeBlock {
    /// The network.
    pub network: String,
    /// The addresses.
    pub cidr: Cidr,
    /// The UID of the block.
    pub uid: String,
}

/// What a named NIC says that a pod of the node has (`RdmaNic`). Its identity cannot be changed.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct NodeNic {
    /// The object's UID.
    pub uid: String,
    /// The object's generation that says so.
    pub generation: i64,
    /// Limits of its own.
    #[serde(default)]
    pub limits: Limits,
}

/// What is there.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNodeStatus {
    /// The generation of the spec that the agent serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// How many NICs pods have.
    pub granted: u32,
    /// RDMA devices of the node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rnics: Vec<RnicStatus>,
    /// The daemon that serves now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<DaemonStatus>,
    /// Where other daemons reach this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<Channel>,
    /// Networks that the node hosts still, whatever the spec says now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NodeNetworkStatus>,
    /// UIDs of blocks that the node holds still.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<String>,
    /// NICs that pods have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicStatus>,
    /// `Ready`.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

impl RdmaNodeStatus {
    /// Whether the agent says that it serves this generation.
    #[must_use]
    pub fn serves(&self, generation: Option<i64>) -> bool {
        self.observed_generation >= generation
            && self.conditions.iter().any(|c| c.type_ == "Ready" && c.holds())
    }
}

/// An RDMA device.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct RnicStatus {
    /// Its name.
    pub device: String,
    /// Where it is on the PCI bus.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// The NUMA node it is near.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// The fabric that a selector of the spec put it on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<String>,
    /// The node's address on that fabric.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_address: Option<String>,
    /// The state of its port.
    pub port: PortStatus,
}

/// The state of a port.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PortStatus {
    /// It carries traffic.
    Active,
    /// It does not.
    #[default]
    Down,
}

/// A run of the daemon.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct DaemonStatus {
    /// Which run: another one has lost every session.
    pub instance: String,
    /// Its version.
    pub version: String,
}

/// Where other daemons reach this one.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct Channel {
    /// Address and port.
    pub endpoint: String,
    /// The certificate that it shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<ChannelCertificate>,
}

/// A certificate that the controller signed.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct ChannelCertificate {
    /// When it ends.
    pub not_after: String,
    /// The root that signed it: SHA-256 of its DER, in hexadecimal digits.
    pub issuer: String,
}

/// What a node has of a network.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkStatus {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Addresses that are given out, or were asked for in vain.
    #[serde(default)]
    pub addresses: u32,
}

/// A NIC that a pod has.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct NicStatus {
    /// The ID that the kubelet knows.
    pub id: String,
    /// Its pool.
    pub pool: String,
    /// Its network.
    pub network: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The pod's UID.
    pub pod_uid: String,
    /// Its class, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// The pool's revision when it was made.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
    /// Limits that hold now.
    #[serde(default)]
    pub limits: Limits,
    /// Rates that hold now.
    #[serde(default)]
    pub rates: Rates,
    /// Its MAC address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

impl NicStatus {
    /// What it counts against its tenant's quota.
    #[must_use]
    pub fn usage(&self) -> crate::Usage {
        crate::Usage {
            nics: 1,
            qps: Quantity(self.limits.max_qps.unwrap_or(0).into()),
            mr_bytes: self.limits.max_mr_bytes.unwrap_or_default(),
            bandwidth: self.rates.bandwidth.unwrap_or_default(),
        }
    }
}
