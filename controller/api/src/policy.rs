//! A node policy: which nodes offer which pools.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Cidr, Condition, LabelSelector};

/// What some nodes offer.
///
/// Where several policies match a node and name the same pool, the one with the highest priority
/// counts, and of those the first by name; the others list it under `conflicts`.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "vhost-rdma.io",
    version = "v1alpha1",
    kind = "RdmaNodePolicy",
    plural = "rdmanodepolicies",
    shortname = "rpol",
    category = "vhost-rdma",
    status = "RdmaNodePolicyStatus",
    derive = "PartialEq",
    doc = "Which nodes offer which pools of NICs, on which RNICs.",
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority"),
    printcolumn(name = "Matched", type_ = "integer", json_path = ".status.matched"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.ready"),
    printcolumn(name = "Outdated", type_ = "integer", json_path = ".status.outdated"),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Accepted\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNodePolicySpec {
    /// The nodes. An empty selector is every node.
    pub node_selector: LabelSelector,
    /// Higher counts first.
    #[schemars(range(min = -1000, max = 1000))]
    pub priority: i32,
    /// Which RNICs of a node belong to which fabric.
    #[schemars(length(max = 16))]
    pub rnics: Vec<PolicyRnic>,
    /// The pools that the nodes offer.
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub pools: Vec<PolicyPool>,
    /// What happens to pods whose NICs are not what the policy says now.
    pub rollout: Rollout,
}

/// RNICs of a fabric.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PolicyRnic {
    /// Which devices.
    pub selector: RnicSelector,
    /// The fabric that their ports are on.
    #[schemars(regex(pattern = "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"))]
    pub fabric: String,
    /// The node's address on the fabric is the one in this range.
    pub host_address: Cidr,
}

/// Devices of a node. Each field that is there must match.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RnicSelector {
    /// Names of RDMA devices, such as `mlx5_0`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub devices: Vec<String>,
    /// PCI vendors, four hexadecimal digits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(regex(pattern = "^[0-9a-f]{4}$")))]
    pub vendors: Vec<String>,
    /// Kernel drivers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub drivers: Vec<String>,
}

/// A pool of NICs. Pods ask for `vhost-rdma.io/<name>`.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct PolicyPool {
    /// Its name.
    #[schemars(regex(pattern = "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"))]
    pub name: String,
    /// The network of its NICs.
    #[schemars(length(min = 1, max = 40))]
    pub network: String,
    /// The class of its NICs; absent: the daemon's defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// How many NICs a node offers.
    #[schemars(range(min = 1, max = 8192))]
    pub count: u32,
    /// The NUMA nodes that the kubelet is told; absent: those of no device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub numa: Vec<u32>,
}

/// How a policy's change reaches pods that run.
///
/// Limits always do so at once. What is fixed when a NIC is made (network, backing,
/// vectors, socket access) never changes under a pod: its NIC is outdated until the pod goes.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Rollout {
    /// Evict pods with outdated NICs; otherwise they keep them as long as they live.
    pub evict: bool,
    /// On how many nodes at a time, with `evict`; absent: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_unavailable: Option<u32>,
}

/// Where a policy counts.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNodePolicyStatus {
    /// The generation that this was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// How many nodes it selects.
    pub matched: u32,
    /// How many of them serve what they were told.
    pub ready: u32,
    /// On how many of them a pod has a NIC that is not what the policy says now.
    pub outdated: u32,
    /// Nodes whose outdated NICs are being moved now.
    pub rolling: Vec<String>,
    /// Pools that do not count, and why: at most 16.
    pub conflicts: Vec<String>,
    /// `Accepted`, `Conflicted`.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
