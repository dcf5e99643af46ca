//! Whose an ID is: the kubelet's word and nobody else's.
//!
//! A CNI call names a pod and may name an ID. The pod's names come from the runtime, which is
//! trusted; the ID (`deviceID`) comes from a network configuration, which a tenant writes. So an ID
//! is attached only if the kubelet gave it to that pod. It says so twice: pod-resources by
//! namespace and name, for all containers but ordinary init containers; its checkpoint, written
//! before `Allocate` is over, by UID and for all. Where both UIDs are known they decide, since a
//! name can be used again.

use std::collections::BTreeSet;

use vhost_rdma_agent_api as api;
use vhost_rdma_agent_api::{Attach, Checkpoint, FaultKind, State as Progress};

use super::allocate::granted_as;
use super::refusal::fault;
use super::{Allocated, State};
use crate::holders::Holding;
use crate::ledger::Owner;
use crate::pool::{Pool, Pools};

/// What the kubelet says.
pub(super) struct Witness {
    pub(super) holdings: Vec<Holding>,
    pub(super) checkpoint: Option<Checkpoint>,
}

/// Sees that nobody was allocated any of these since: a pod that was deleted while its attachment
/// was under way may have lost them to another, of whom the kubelet said nothing then.
pub(super) fn unchanged<'a>(
    state: &State,
    ids: impl IntoIterator<Item = &'a String>,
    before: &Allocated,
) -> Result<(), api::Fault> {
    let mut ids = ids.into_iter();
    match ids.find(|id| state.allocated.get(*id) != before.get(*id)) {
        None => Ok(()),
        Some(id) => {
            let message = format!("{id} was allocated again meanwhile");
            Err(fault(FaultKind::TryAgain, message))
        }
    }
}

enum Verdict {
    /// It is the pod's that asks.
    Theirs,
    /// It is another's, in words.
    Others(String),
    /// The kubelet gave it to nobody.
    Nobodys,
}

impl Witness {
    /// IDs that may be the pod's: far fewer than there are.
    fn candidates<'a>(&'a self, asked: &'a Attach) -> impl Iterator<Item = &'a str> {
        let pod = &asked.pod;
        let named = |owner: &Owner| owner.namespace == pod.namespace && owner.pod == pod.name;
        let listed = self.holdings.iter().filter(move |holding| named(&holding.owner));
        let noted = self.checkpoint.iter().flatten();
        let noted = noted.filter(move |(_, uid)| Some(*uid) == pod.uid.as_ref());
        listed.map(|holding| holding.id.as_str()).chain(noted.map(|((_, id), _)| id.as_str()))
    }

    fn verdict(&self, asked: &Attach, resource: &str, id: &str) -> Verdict {
        let key = (resource.to_owned(), id.to_owned());
        let noted = self.checkpoint.as_ref().and_then(|checkpoint| checkpoint.get(&key));
        match (noted, &asked.pod.uid) {
            (Some(noted), Some(uid)) if noted == uid => return Verdict::Theirs,
            (Some(noted), Some(_)) => return Verdict::Others(format!("the pod with UID {noted}")),
            _ => {}
        }
        let mut other = None;
        for holding in &self.holdings {
            let owner = &holding.owner;
            if holding.id != id || holding.resource != resource {
                continue;
            }
            if owner.namespace == asked.pod.namespace && owner.pod == asked.pod.name {
                return Verdict::Theirs;
            }
            other = Some(format!("pod {}/{}", owner.namespace, owner.pod));
        }
        other.map_or(Verdict::Nobodys, Verdict::Others)
    }
}

/// The IDs that an attach means, in the pools' order.
pub(super) fn wanted(
    state: &State,
    pools: &Pools,
    asked: &Attach,
    witness: &Witness,
) -> Result<Vec<String>, api::Fault> {
    if asked.pod.name.is_empty() || asked.pod.namespace.is_empty() {
        let message = "the runtime did not say for which pod (K8S_POD_NAMESPACE, K8S_POD_NAME)";
        return Err(fault(FaultKind::BadRequest, message));
    }
    if let Some(id) = &asked.device_id {
        return named(state, pools, asked, witness, id).map(|()| vec![id.clone()]);
    }
    let mut ids = Vec::new();
    for pool in &pools.pools {
        ids.extend(all_of(state, pool, asked, witness));
    }
    Ok(ids)
}

/// Sees that the one ID that is named may be attached.
fn named(
    state: &State,
    pools: &Pools,
    asked: &Attach,
    witness: &Witness,
    id: &str,
) -> Result<(), api::Fault> {
    let Some((pool, _)) = pools.device(id) else {
        let message = format!(
            "there is no NIC {id:?} on this node: deviceID comes from another resource than this \
             plugin's"
        );
        return Err(fault(FaultKind::NotFound, message));
    };
    match witness.verdict(asked, &granted_as(state, pool, id), id) {
        Verdict::Theirs => {}
        Verdict::Others(who) => {
            return Err(fault(FaultKind::Conflict, format!("{id} belongs to {who}")));
        }
        Verdict::Nobodys => {
            let message = format!("the kubelet did not grant {id} to this pod");
            return Err(fault(FaultKind::NotFound, message));
        }
    }
    // A pod may name a network any number of times; the NIC is one.
    if elsewhere(state, asked, id) {
        let message = format!("{id} is attached to this pod already, under another interface");
        return Err(fault(FaultKind::Conflict, message));
    }
    Ok(())
}

/// The IDs of a pool that are the pod's and in no other attachment of it.
fn all_of(state: &State, pool: &Pool, asked: &Attach, witness: &Witness) -> Vec<String> {
    let theirs = |id: &&str| {
        pool.devices.contains_key(*id)
            && matches!(witness.verdict(asked, &granted_as(state, pool, id), id), Verdict::Theirs)
    };
    // In the order of their names, each once, whoever named it.
    let candidates: BTreeSet<&str> = witness.candidates(asked).collect();
    let free = |id: &&str| !elsewhere(state, asked, id);
    candidates.into_iter().filter(theirs).filter(free).map(str::to_owned).collect()
}

/// Does another interface of the same sandbox have it?
fn elsewhere(state: &State, asked: &Attach, id: &str) -> bool {
    state.ledger.get(id).is_some_and(|slot| {
        slot.records.iter().any(|record| {
            record.attachment.container_id == asked.attachment.container_id
                && record.attachment.if_name != asked.attachment.if_name
                && record.state != Progress::Detaching
        })
    })
}
