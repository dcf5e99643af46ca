//! A class of NICs: what each may hold and how fast it may be.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Number;

use crate::{Condition, Quantity};

/// What a NIC may hold and how fast it may be. A change reaches NICs that run.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "vhost-rdma.io",
    version = "v1alpha1",
    kind = "RdmaNicClass",
    plural = "rdmanicclasses",
    shortname = "rclass",
    category = "vhost-rdma",
    status = "RdmaNicClassStatus",
    derive = "PartialEq",
    doc = "What a NIC may hold and how fast it may be. A change reaches NICs that run.",
    printcolumn(name = "Consumer", type_ = "string", json_path = ".spec.consumer"),
    printcolumn(name = "QPs", type_ = "integer", json_path = ".spec.limits.maxQps"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".spec.limits.maxMrBytes"),
    printcolumn(name = "Bandwidth", type_ = "string", json_path = ".spec.rates.bandwidth"),
    printcolumn(name = "Pools", type_ = "integer", json_path = ".status.pools"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNicClassSpec {
    /// Who uses the NICs; fixed when a NIC is made.
    #[serde(skip_serializing_if = "Consumer::is_vm")]
    pub consumer: Consumer,
    /// Objects and memory that a guest may hold.
    pub limits: Limits,
    /// How fast a NIC may be. Without effect on NICs so far, which `RatesEnforced` says.
    pub rates: Rates,
    /// Completion vectors; fixed when a NIC is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 32))]
    pub vectors: Option<u32>,
    /// Which addresses a NIC may use; fixed when a NIC is made.
    pub addresses: AddressPolicy,
    /// Who may open the NIC's socket.
    pub socket: SocketAccess,
    /// Programs of containers allocate memory that the device copies once (the shared heap): only
    /// with the consumer Process; fixed when a container is made.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shared_heap: bool,
}

/// Who uses a NIC.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Consumer {
    /// A VM in the pod, by a vhost-user socket.
    #[default]
    Vm,
    /// The pod's own processes. Such a NIC is carried by the daemon itself, never by an RNIC.
    Process,
}

impl Consumer {
    /// What a class without a word of it means, so that nodes' objects stay as they were.
    #[must_use]
    pub fn is_vm(&self) -> bool {
        *self == Self::Vm
    }
}

/// Limits over the daemon's defaults. What is absent has the default. Tenants write some of them
/// (`RdmaNic`), and one that could not be read would keep the whole kind from being watched: a
/// number that is too large is the largest.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Limits {
    /// Processes with a device context.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "count")]
    pub max_contexts: Option<u32>,
    /// Protection domains.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "count")]
    pub max_pds: Option<u32>,
    /// Memory regions.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "count")]
    pub max_mrs: Option<u32>,
    /// Bytes of all memory regions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_mr_bytes: Option<Quantity>,
    /// Bytes that the daemon may keep for a guest in its own memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_kept_bytes: Option<Quantity>,
    /// Memory that a VMM may share with the daemon; one with more is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_guest_bytes: Option<Quantity>,
    /// Completion queues.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "count")]
    pub max_cqs: Option<u32>,
    /// Shared receive queues.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "count")]
    pub max_srqs: Option<u32>,
    /// Queue pairs.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "count")]
    pub max_qps: Option<u32>,
    /// Address handles.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "count")]
    pub max_ahs: Option<u32>,
}

/// A number of objects, whatever integer it was stored as.
fn count<'de, D: Deserializer<'de>>(input: D) -> Result<Option<u32>, D::Error> {
    let number = Option::<Number>::deserialize(input)?;
    let end = |n: &Number| if n.as_i64().is_some_and(i64::is_negative) { 0 } else { u32::MAX };
    let fits = |n: &Number| n.as_u64().and_then(|n| u32::try_from(n).ok());
    Ok(number.map(|number| fits(&number).unwrap_or_else(|| end(&number))))
}

/// Rates. What is absent is not bounded. No daemon enforces them yet: a class that has some has the
/// condition `RatesEnforced` False, and its bandwidth only counts towards quotas of tenants.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Rates {
    /// Bits per second that a NIC may send.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Quantity>,
    /// Messages per second that it may send.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<Quantity>,
    /// Control commands per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commands: Option<Quantity>,
}

impl Rates {
    /// Whether there are any.
    #[must_use]
    pub fn is_some(&self) -> bool {
        *self != Self::default()
    }
}

/// Which addresses a NIC may use as GIDs.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddressPolicy {
    /// Any that no other NIC of the network holds.
    #[default]
    Any,
    /// None but those that IPAM gave the companion interface.
    Ipam,
}

/// Who may open a NIC's socket, by numbers of the node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct SocketAccess {
    /// The user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<u32>,
    /// The group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// Permission bits in octal, such as `"0660"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^0?[0-7]{3}$"))]
    pub mode: Option<String>,
    /// Others, as `u:NUMBER:rw` and `g:NUMBER:rw`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(regex(pattern = "^[ug]:[0-9]{1,10}:rw$")))]
    pub acl: Vec<String>,
    /// The SELinux context of socket and directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub selinux: Option<String>,
}

/// Who uses a class.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaNicClassStatus {
    /// The generation that this was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// How many pools of node policies name it.
    pub pools: u32,
    /// Some of the node policies that name it: at most 16.
    pub users: Vec<String>,
    /// `Accepted`; `RatesEnforced` if it has rates.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}
