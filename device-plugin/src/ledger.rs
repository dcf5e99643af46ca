//! The allocation ledger: for each ID, who has it and what was done for them.
//!
//! ```text
//!            Allocate                 attach                     attached
//!   free ───────────────> granted ─────────────> attaching ───────────────> attached
//!    ^                       │ ^                                                │
//!    │      pod is gone      │ └──────────────── detached ────── detaching <────┘  detach, gc
//!    └───────────────────────┘
//! ```
//!
//! A slot is what is known of one ID. An ID without a slot is free and was never used. Changes are
//! made on a copy ([`Ledger::slot`]), journaled, and then put in place ([`Ledger::put`]): the
//! caller decides when a change must be on the disk first. Nothing here does I/O or reads a clock.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use vhost_rdma_agent_api::{Attachment, Kind, Pod, Record, State};

use crate::config::PoolConfig;

/// Who has an ID, as the kubelet says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Owner {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// Its container.
    pub container: String,
    /// The pod's UID, once the CNI plugin told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl Owner {
    /// The pod alone.
    #[must_use]
    pub fn pod(&self) -> Pod {
        Pod { namespace: self.namespace.clone(), name: self.pod.clone(), uid: self.uid.clone() }
    }

    /// Is it this pod? UIDs differ when a pod of the same name was made again, but only if both are
    /// known.
    #[must_use]
    pub fn is_pod(&self, pod: &Pod) -> bool {
        self.namespace == pod.namespace
            && self.pod == pod.name
            && (self.uid.is_none() || pod.uid.is_none() || self.uid == pod.uid)
    }
}

/// A promise of one ID to one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// When, in seconds since 1970.
    pub since: u64,
    /// What was granted: a pool may change its kind while the pod lives.
    pub kind: Kind,
    /// What the pod asked for: the file may get another prefix while it lives. Absent in a ledger
    /// from before this was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,
    /// The daemon's network.
    #[serde(default)]
    pub network: String,
    /// The NIC's MAC address: it outlives the daemon and its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Addresses that the NIC was bound to.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Did a VMM ever connect?
    #[serde(default)]
    pub used: bool,
    /// As far as the kubelet told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// Of a pool that the controller says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterGrant>,
}

/// What a grant of the controller's pool has beside.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClusterGrant {
    /// The UID of its network.
    pub network_uid: String,
    /// The pool's revision when the NIC was made; empty if nobody remembers.
    #[serde(default)]
    pub revision: String,
    /// The namespace whose pods may have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admitted: Option<String>,
    /// The UID of the pod that was asked which NICs it names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// The named NIC that it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<Named>,
}

/// A named NIC that a pod has (`RdmaNic`).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Named {
    /// The object's namespace, which is the pod's.
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// The object's UID.
    pub uid: String,
    /// The pod.
    pub pod: String,
    /// Its UID, as the claim has it.
    pub pod_uid: String,
    /// The object's generation that said its limits; 0 if nobody remembers.
    #[serde(default)]
    pub generation: i64,
    /// Limits of its own, beside those of the pool, as they were said last.
    #[serde(default)]
    pub limits: vhost_rdma_cluster_api::Limits,
}

impl ClusterGrant {
    /// Of this pool, made nobody knows when.
    #[must_use]
    pub fn of(pool: &PoolConfig) -> Self {
        let network_uid = pool.cluster.as_ref().map(|of| of.network_uid.clone());
        Self { network_uid: network_uid.unwrap_or_default(), ..Self::default() }
    }
}

impl Grant {
    /// The addresses that the NIC was bound to.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().filter_map(|address| address.parse().ok())
    }

    /// The named NIC that it is.
    #[must_use]
    pub fn named(&self) -> Option<&Named> {
        self.cluster.as_ref()?.named.as_ref()
    }

    /// Was it granted as another resource than this?
    #[must_use]
    pub fn is_of_another(&self, resource: &str) -> bool {
        self.resource.as_deref().is_some_and(|granted| granted != resource)
    }
}

/// What is known of one ID.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Slot {
    /// Its pool.
    pub pool: String,
    /// Absent: free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<Grant>,
    /// Taken out of service by the operator.
    #[serde(default)]
    pub cordoned: bool,
    /// Attachments; they may outlive the grant's pod until they are undone.
    #[serde(default)]
    pub records: Vec<Record>,
}

impl Slot {
    /// Nothing worth remembering.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        self.grant.is_none() && !self.cordoned && self.records.is_empty()
    }

    /// The word for its state.
    #[must_use]
    pub fn state(&self) -> &'static str {
        let any = |state| self.records.iter().any(|record| record.state == state);
        match () {
            () if any(State::Attached) => "attached",
            () if any(State::Attaching) => "attaching",
            () if any(State::Detaching) => "detaching",
            () if self.grant.is_some() => "granted",
            () => "free",
        }
    }

    /// Has the pod had any use of it? One that was only granted can be granted again as it is, but
    /// not one that has a name by now.
    #[must_use]
    pub fn is_touched(&self) -> bool {
        let used = |grant: &Grant| grant.used || grant.named().is_some();
        !self.records.is_empty() || self.grant.as_ref().is_some_and(used)
    }

    /// The record of an attachment.
    #[must_use]
    pub fn record(&self, attachment: &Attachment) -> Option<&Record> {
        self.records.iter().find(|record| record.attachment == *attachment)
    }

    /// The record of an attachment, to change.
    pub fn record_mut(&mut self, attachment: &Attachment) -> Option<&mut Record> {
        self.records.iter_mut().find(|record| record.attachment == *attachment)
    }
}

/// What `Allocate` is to do with an ID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// It is free.
    Grant,
    /// This container, or one that never used it, was promised it already: the same answer again.
    Reuse,
    /// Its pod is gone: undo everything, then grant.
    TearDown,
    /// Its pod lives.
    Refuse(String),
}

/// What else is known when a granted ID is asked for again.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Evidence {
    /// Who has it as the resource that it was granted as, as the kubelet says now.
    pub holder: Option<Owner>,
    /// The kubelet answered.
    pub kubelet_answered: bool,
    /// A VMM is connected to the NIC.
    pub connected: bool,
}

/// All slots.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ledger {
    slots: BTreeMap<String, Slot>,
}

impl Ledger {
    /// A ledger of these slots.
    #[must_use]
    pub fn new(slots: BTreeMap<String, Slot>) -> Self {
        Self { slots }
    }

    /// Every slot with its ID.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Slot)> {
        self.slots.iter()
    }

    /// What is known of an ID.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&Slot> {
        self.slots.get(id)
    }

    /// A copy to change; a blank one for an ID that was never used.
    #[must_use]
    pub fn slot(&self, id: &str, pool: &str) -> Slot {
        self.slots
            .get(id)
            .cloned()
            .unwrap_or_else(|| Slot { pool: pool.to_owned(), ..Slot::default() })
    }

    /// Puts a changed slot in place and gives back the old one.
    pub fn put(&mut self, id: &str, slot: Slot) -> Option<Slot> {
        if slot.is_blank() { self.slots.remove(id) } else { self.slots.insert(id.to_owned(), slot) }
    }

    /// IDs of an attachment.
    #[must_use]
    pub fn attached_to(&self, attachment: &Attachment) -> Vec<String> {
        self.iter()
            .filter(|(_, slot)| slot.record(attachment).is_some())
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// What `Allocate` is to do with this ID of `resource`. It must be asked again if `evidence`
    /// was not gathered and the answer would need it: see [`Self::needs_evidence`].
    #[must_use]
    pub fn decide(&self, id: &str, resource: &str, evidence: &Evidence) -> Decision {
        let Some(slot) = self.get(id) else { return Decision::Grant };
        if slot.cordoned {
            return Decision::Refuse(format!(
                "{id} is cordoned; `vhost-rdma-agent uncordon {id}` puts it back into service"
            ));
        }
        let Some(grant) = &slot.grant else {
            return if slot.records.is_empty() { Decision::Grant } else { Decision::TearDown };
        };
        // Whoever has it has it under another name, so who asks now is somebody else.
        let renamed = grant.is_of_another(resource);
        if !slot.is_touched() && !renamed {
            return Decision::Reuse;
        }
        if !evidence.kubelet_answered {
            return Decision::Refuse(format!(
                "{id} was granted before and the kubelet's pod-resources API does not say whether \
                 its pod lives; try again"
            ));
        }
        if let Some(holder) = &evidence.holder {
            // The kubelet lists a holder before the container that asks now has its answer. So it
            // is this pod (an init container's device is reused, or its Allocate is repeated),
            // unless we know of another.
            return match &grant.owner {
                _ if renamed => {
                    Decision::Refuse(in_use(id, holder, "the resource had another name then"))
                }
                Some(owner) if !owner.is_pod(&holder.pod()) => {
                    Decision::Refuse(in_use(id, owner, "the kubelet lists another holder"))
                }
                _ => Decision::Reuse,
            };
        }
        if evidence.connected {
            let why = "a VMM is still connected to it";
            return Decision::Refuse(match &grant.owner {
                Some(owner) => in_use(id, owner, why),
                None => format!("{id} is in use: {why}"),
            });
        }
        Decision::TearDown
    }

    /// Must the kubelet be asked before this ID can be decided about?
    #[must_use]
    pub fn needs_evidence(&self, id: &str, resource: &str) -> bool {
        let renamed =
            |slot: &Slot| slot.grant.as_ref().is_some_and(|grant| grant.is_of_another(resource));
        self.get(id).is_some_and(|slot| {
            !slot.cordoned && slot.grant.is_some() && (slot.is_touched() || renamed(slot))
        })
    }
}

fn in_use(id: &str, owner: &Owner, why: &str) -> String {
    format!("{id} is in use by pod {}/{}: {why}", owner.namespace, owner.pod)
}

#[cfg(test)]
mod tests {
    use vhost_rdma_agent_api::{Kind, Pod};

    use super::{Decision, Evidence, Grant, Ledger, Owner, Slot};

    const A: &str = "x.y/a";

    fn owner(pod: &str) -> Owner {
        Owner {
            namespace: "ns".to_owned(),
            pod: pod.to_owned(),
            container: "c".to_owned(),
            uid: None,
        }
    }

    fn granted(used: bool, by: Option<Owner>) -> Ledger {
        let grant = Grant {
            since: 0,
            kind: Kind::VhostUser,
            resource: Some(A.to_owned()),
            network: String::new(),
            mac: None,
            addresses: Vec::new(),
            used,
            owner: by,
            cluster: None,
        };
        let mut ledger = Ledger::default();
        ledger.put("a-0", Slot { pool: "a".to_owned(), grant: Some(grant), ..Slot::default() });
        ledger
    }

    fn listed(pod: Option<&str>) -> Evidence {
        Evidence { holder: pod.map(owner), kubelet_answered: true, ..Evidence::default() }
    }

    #[test]
    fn a_free_id_is_granted_without_a_question() {
        let ledger = Ledger::default();
        assert!(!ledger.needs_evidence("a-0", A));
        assert_eq!(ledger.decide("a-0", A, &Evidence::default()), Decision::Grant);
    }

    #[test]
    fn a_promise_that_nobody_used_holds_for_whoever_asks_next() {
        let ledger = granted(false, None);
        assert!(!ledger.needs_evidence("a-0", A));
        assert_eq!(ledger.decide("a-0", A, &Evidence::default()), Decision::Reuse);
    }

    #[test]
    fn a_used_id_goes_to_another_pod_only_when_its_own_is_gone() {
        let ledger = granted(true, Some(owner("p")));
        assert!(ledger.needs_evidence("a-0", A));
        assert!(matches!(ledger.decide("a-0", A, &Evidence::default()), Decision::Refuse(_)));
        assert_eq!(ledger.decide("a-0", A, &listed(Some("p"))), Decision::Reuse);
        assert!(matches!(ledger.decide("a-0", A, &listed(Some("q"))), Decision::Refuse(_)));
        assert_eq!(ledger.decide("a-0", A, &listed(None)), Decision::TearDown);
        let connected = Evidence { connected: true, ..listed(None) };
        assert!(matches!(ledger.decide("a-0", A, &connected), Decision::Refuse(_)));
    }

    #[test]
    fn an_id_that_was_granted_under_another_name_is_its_pods_also_before_it_used_it() {
        let ledger = granted(false, Some(owner("p")));
        let other = "other.y/a";
        assert!(ledger.needs_evidence("a-0", other));
        let refused = |evidence: &Evidence| {
            matches!(ledger.decide("a-0", other, evidence), Decision::Refuse(_))
        };
        assert!(refused(&Evidence::default()) && refused(&listed(Some("p"))));
        assert_eq!(ledger.decide("a-0", other, &listed(None)), Decision::TearDown);
    }

    #[test]
    fn a_cordoned_id_is_refused_and_a_blank_slot_forgotten() {
        let mut ledger = Ledger::default();
        ledger.put("a-0", Slot { pool: "a".to_owned(), cordoned: true, ..Slot::default() });
        assert!(matches!(ledger.decide("a-0", A, &listed(None)), Decision::Refuse(_)));
        ledger.put("a-0", Slot { pool: "a".to_owned(), ..Slot::default() });
        assert!(ledger.get("a-0").is_none());
    }

    #[test]
    fn a_pod_made_again_under_its_name_is_another() {
        let old = Owner { uid: Some("1".to_owned()), ..owner("p") };
        let pod = |uid: Option<&str>| Pod {
            namespace: "ns".to_owned(),
            name: "p".to_owned(),
            uid: uid.map(str::to_owned),
        };
        assert!(old.is_pod(&pod(Some("1"))) && old.is_pod(&pod(None)));
        assert!(!old.is_pod(&pod(Some("2"))));
    }
}
