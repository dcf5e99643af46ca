//! A network: NICs that can reach each other.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Cidr, Condition};

/// NICs that can reach each other; NICs of other networks do not exist for them.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "vhost-rdma.io",
    version = "v1alpha1",
    kind = "RdmaNetwork",
    plural = "rdmanetworks",
    shortname = "rnet",
    category = "vhost-rdma",
    status = "RdmaNetworkStatus",
    derive = "PartialEq",
    doc = "NICs that can reach each other. NICs of other networks do not exist for them.",
    printcolumn(name = "VNI", type_ = "integer", json_path = ".status.vni"),
    printcolumn(name = "Fabric", type_ = "string", json_path = ".spec.rnic.fabric"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes"),
    printcolumn(name = "NICs", type_ = "integer", json_path = ".status.nics"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.matches('^[-a-z0-9]{1,40}$')")
        .message("a network's name has at most 40 characters and no dot")
)]
#[x_kube(
    validation = Rule::new("has(self.soft) != has(self.rnic)")
        .message("exactly one of soft and rnic says what carries the network"),
    validation = Rule::new("has(self.soft) == has(oldSelf.soft)")
        .message("what carries a network cannot be changed: make a new one"),
    validation = Rule::new(
        "!has(self.rnic) || !has(oldSelf.rnic) || (self.rnic.fabric == oldSelf.rnic.fabric && \
         self.rnic.addressing == oldSelf.rnic.addressing)"
    )
    .message("fabric and addressing of a network cannot be changed: make a new one"),
    validation = Rule::new(
        "has(self.vni) == has(oldSelf.vni) && (!has(self.vni) || self.vni == oldSelf.vni)"
    )
    .message("the vni of a network cannot be changed: make a new one"),
    validation = Rule::new(
        "!has(self.ipam) || !has(oldSelf.ipam) || self.ipam.blockSize == oldSelf.ipam.blockSize"
    )
    .message("the blockSize of a network cannot be changed: make a new one")
)]
#[serde(rename_all = "camelCase")]
pub struct RdmaNetworkSpec {
    /// The virtual network identifier; absent: the controller chooses one. Cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 16_777_215))]
    pub vni: Option<u32>,
    /// Carried by the daemon's own engine: VMs of one node reach each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soft: Option<Soft>,
    /// Carried by RNICs: VMs of all nodes reach each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rnic: Option<Rnic>,
    /// Addresses that the nodes give out; absent: the pod network's IPAM has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipam: Option<Ipam>,
    /// The MTU of the interfaces in pods; absent: the companion bridge's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 576, max = 65535))]
    pub mtu: Option<u32>,
    /// The network interface beside each NIC; absent: none, and rdma_cm finds nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub companion: Option<Companion>,
    /// Ranges beyond the network that its NICs may reach; only with `rnic`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub allow: Vec<Cidr>,
}

/// What carries a network, once it is known to be exactly one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkBacking<'a> {
    /// The daemon's own engine.
    Soft,
    /// RNICs.
    Rnic(&'a Rnic),
}

impl RdmaNetworkSpec {
    /// What carries it; nothing if it says both or neither.
    #[must_use]
    pub fn backing(&self) -> Option<NetworkBacking<'_>> {
        match (&self.soft, &self.rnic) {
            (Some(_), None) => Some(NetworkBacking::Soft),
            (None, Some(rnic)) => Some(NetworkBacking::Rnic(rnic)),
            _ => None,
        }
    }
}

/// The daemon's own engine has no options.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Soft {}

/// A network on RNICs.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct Rnic {
    /// The fabric, as node policies name it for their RNICs.
    #[schemars(regex(pattern = "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"))]
    pub fabric: String,
    /// Whose addresses the guests have.
    #[serde(default)]
    pub addressing: Addressing,
}

/// Whose addresses guests on RNICs have.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Addressing {
    /// Addresses of the fabric, lent to the guests.
    Flat,
    /// The network's own, behind one of the node's.
    #[default]
    Translated,
}

/// Which addresses a network has, and how many a node takes at a time.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Ipam {
    /// Ranges that do not overlap, at most one block's worth of each per step of a node's need.
    #[schemars(length(min = 1, max = 16))]
    pub cidrs: Vec<Cidr>,
    /// Ranges of the addresses of RdmaNics: nodes give nothing out of them by themselves. They
    /// overlap with nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub named: Vec<Cidr>,
    /// Addresses of a block, a power of two. Cannot be changed.
    #[serde(default = "default_block_size")]
    #[schemars(schema_with = "block_sizes")]
    pub block_size: u32,
}

fn default_block_size() -> u32 {
    64
}

/// The largest block: 2¹⁶ addresses.
pub(crate) const BLOCK_BITS_MAX: u32 = 16;

fn block_sizes(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let sizes: Vec<u32> = (0..=BLOCK_BITS_MAX).map(|bits| 1 << bits).collect();
    schemars::json_schema!({ "type": "integer", "enum": sizes })
}

/// The network interface beside a NIC.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct Companion {
    /// The bridge of the node that is the network's L2.
    #[schemars(regex(pattern = "^[^/:,= \\t\\n]{1,15}$"))]
    pub bridge: String,
}

/// What became of a network.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNetworkStatus {
    /// The generation that this was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Its virtual network identifier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vni: Option<u32>,
    /// How many nodes host it.
    pub nodes: u32,
    /// How many NICs it has.
    pub nics: u32,
    /// Some of the pods that use it, `namespace/name`: at most 16.
    pub users: Vec<String>,
    /// Network attachment definitions that lead to it, `namespace/name`.
    pub attachment_definitions: Vec<String>,
    /// `Accepted`, `Ready`, while it is deleted `Deletable`.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
