//! A block of addresses that one node gives out.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Cidr;

/// Addresses of a network that one node gives out.
///
/// Its name is made of network and range, so the API server itself refuses a second one. How a
/// block is given back: [`RdmaNode`](crate::RdmaNode).
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[kube(
    group = "vhost-rdma.io",
    version = "v1alpha1",
    kind = "RdmaIPBlock",
    plural = "rdmaipblocks",
    shortname = "rblock",
    category = "vhost-rdma",
    status = "RdmaIPBlockStatus",
    derive = "PartialEq",
    doc = "Addresses of a network that one node gives out. Made by the controller.",
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Range", type_ = "string", json_path = ".spec.cidr"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.node"),
    printcolumn(name = "Releasing", type_ = "boolean", json_path = ".spec.releasing"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new(
        "self.network == oldSelf.network && self.networkUid == oldSelf.networkUid && \
         self.cidr == oldSelf.cidr && self.node == oldSelf.node"
    )
    .message("a block is bound once"),
    validation = Rule::new(
        "!has(oldSelf.releasing) || !oldSelf.releasing || (has(self.releasing) && self.releasing)"
    )
    .message("a block that is being given back is not bound again")
)]
#[serde(rename_all = "camelCase")]
pub struct RdmaIPBlockSpec {
    /// The network.
    #[schemars(length(min = 1, max = 40))]
    pub network: String,
    /// The network's UID.
    #[schemars(length(max = 64))]
    pub network_uid: String,
    /// The addresses.
    pub cidr: Cidr,
    /// The node that gives them out.
    #[schemars(length(min = 1, max = 253))]
    pub node: String,
    /// The node shall give out none of them any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub releasing: bool,
}

/// What became of a block.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaIPBlockStatus {
    /// Whether the node has said that it holds it.
    pub bound: bool,
}

/// The name of the block of `network` with these addresses: no two have the same.
///
/// A range's name ends in five numbers (IPv4) or nine (IPv6) and has no letter but hexadecimal
/// digits in between, and a network's name has no dot, so the first dot ends it.
#[must_use]
pub fn block_name(network: &str, cidr: &Cidr) -> String {
    format!("{network}.{}", cidr.name())
}
