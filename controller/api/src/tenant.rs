//! A tenant: some namespaces, what they may use, and how much.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, LabelSelector, Quantity};

/// Who belongs together, what they may use, and how much of it.
///
/// A namespace belongs to at most one tenant: of several whose selectors match it, to the one that
/// was made first; the others say so in their condition `Conflicted`.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, PartialEq, Default)]
#[kube(
    group = "vhost-rdma.io",
    version = "v1alpha1",
    kind = "RdmaTenant",
    plural = "rdmatenants",
    shortname = "rten",
    category = "vhost-rdma",
    status = "RdmaTenantStatus",
    derive = "PartialEq",
    doc = "Some namespaces, the networks and classes that they may use, and how much of them.",
    printcolumn(name = "Namespaces", type_ = "integer", json_path = ".status.namespaces"),
    printcolumn(name = "NICs", type_ = "integer", json_path = ".status.used.nics"),
    printcolumn(name = "Quota", type_ = "integer", json_path = ".spec.quota.nics"),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Accepted\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct RdmaTenantSpec {
    /// The tenant's namespaces. An empty selector is every namespace.
    pub namespace_selector: LabelSelector,
    /// The networks that they may use, by name.
    #[serde(default)]
    #[schemars(length(max = 256))]
    pub networks: Vec<String>,
    /// The classes that they may name in a NIC of their own.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub classes: Vec<String>,
    /// What all of them together may hold; absent: any amount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<Quota>,
}

/// The most that a tenant may hold. What is absent is not bounded.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct Quota {
    /// NICs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub nics: Option<u32>,
    /// Queue pairs: the sum of the NICs' limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qps: Option<Quantity>,
    /// Registered memory: the sum of the NICs' limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mr_bytes: Option<Quantity>,
    /// Bits per second: the sum of the NICs' rates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Quantity>,
}

/// What a tenant holds.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    /// NICs.
    pub nics: u32,
    /// Queue pairs.
    pub qps: Quantity,
    /// Registered memory.
    pub mr_bytes: Quantity,
    /// Bits per second.
    pub bandwidth: Quantity,
}

impl Usage {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let sum = |a: Quantity, b: Quantity| Quantity(a.0.saturating_add(b.0).min(i64::MAX as u64));
        Self {
            nics: self.nics.saturating_add(other.nics),
            qps: sum(self.qps, other.qps),
            mr_bytes: sum(self.mr_bytes, other.mr_bytes),
            bandwidth: sum(self.bandwidth, other.bandwidth),
        }
    }

    /// What of it is more than the quota: name, held, allowed.
    #[must_use]
    pub fn over(&self, quota: &Quota) -> Vec<(&'static str, u64, u64)> {
        [
            ("nics", u64::from(self.nics), quota.nics.map(u64::from)),
            ("qps", self.qps.0, quota.qps.map(|q| q.0)),
            ("mrBytes", self.mr_bytes.0, quota.mr_bytes.map(|q| q.0)),
            ("bandwidth", self.bandwidth.0, quota.bandwidth.map(|q| q.0)),
        ]
        .into_iter()
        .filter_map(|(name, held, allowed)| {
            allowed.filter(|allowed| held > *allowed).map(|allowed| (name, held, allowed))
        })
        .collect()
    }
}

/// A place in a quota, of a pod that was let in and whose NICs no node has reported yet.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase")]
pub struct Reservation {
    /// The pod's UID.
    pub pod_uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// What it asked for.
    pub usage: Usage,
}

/// What a tenant's namespaces hold, as agents reported it.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, PartialEq, Eq, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct RdmaTenantStatus {
    /// The generation that this was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// How many namespaces belong to it.
    pub namespaces: u32,
    /// What they hold.
    pub used: Usage,
    /// What pods were let in for that start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reserved: Vec<Reservation>,
    /// `Accepted`, `Conflicted`, `OverQuota`.
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_is_named() {
        let used = Usage { nics: 3, qps: Quantity(8), ..Usage::default() };
        let quota = Quota { nics: Some(2), qps: Some(Quantity(8)), ..Quota::default() };
        assert_eq!(used.over(&quota), [("nics", 3, 2)]);
        assert_eq!(used.plus(used).over(&quota), [("nics", 6, 2), ("qps", 16, 8)]);
        assert!(used.over(&Quota::default()).is_empty());
    }
}
