//! A NIC that must have a name.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Limits};

/// A NIC with an identity of its own, for a pod that names it (`claim`). All other NICs have no
/// object.
#[derive(
    CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default,
)]
#[kube(
    group = "vhost-rdma.io",
    version = "v1alpha1",
    kind = "RdmaNic",
    plural = "rdmanics",
    shortname = "rnic",
    category = "vhost-rdma",
    namespaced,
    status = "RdmaNicStatus",
    derive = "PartialEq",
    doc = "A NIC that keeps its MAC address and its IP address from pod to pod.",
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "MAC", type_ = "string", json_path = ".spec.mac"),
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Pod", type_ = "string", json_path = ".status.pod"),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Accepted\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new("self.network == oldSelf.network")
        .message("the network of a NIC cannot be changed: make a new one"),
    validation = Rule::new(
        "has(self.mac) == has(oldSelf.mac) && (!has(self.mac) || self.mac == oldSelf.mac) && \
         has(self.address) == has(oldSelf.address) && \
         (!has(self.address) || self.address == oldSelf.address)"
    )
    .message("the identity of a NIC cannot be changed: make a new one")
)]
#[serde(rename_all = "camelCase")]
pub struct RdmaNicSpec {
    /// Its network.
    #[schemars(length(min = 1, max = 40))]
    pub network: String,
    /// Its class, which must be that of the pool that the pod asks for; absent: any pool's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub class: Option<String>,
    /// Its MAC address; absent: one that is made of the object's UID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-f][02468ace](:[0-9a-f]{2}){5}$"))]
    pub mac: Option<String>,
    /// Its IP address; of a network with `ipam` one of the ranges `ipam.named`. Absent: any of the
    /// node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-fA-F:.]{2,45}$"))]
    pub address: Option<String>,
    /// Limits of its own; where the class has one too, the smaller holds. A change
    /// reaches a NIC that runs, as one of the class does.
    #[serde(default)]
    pub limits: Limits,
}

/// Where it is.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNicStatus {
    /// The generation that this was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The pod that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// That pod's UID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The VMM's session, in the daemon's words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// `Accepted`.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
