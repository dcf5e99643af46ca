//! Whether a pod may have the NIC that the kubelet gave it, where the controller says who may.
//!
//! The kubelet gives a NIC to whoever asks for the resource, and tells the agent only its ID. Whose
//! pod it is becomes known when the CNI plugin attaches it, or just before the container starts
//! (`PreStartContainer`); whichever comes first asks here. Once a grant was admitted it stays so
//! for pods of that namespace: a tenant that lost a network, or is full, keeps what runs.
//!
//! Labels of namespaces are the API server's to tell. While it does not answer no *new* NIC is
//! admitted: a new pod comes from it anyway.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use vhost_rdma_agent_api::{self as api, FaultKind, Pod};

use super::allocate::granted_as;
use super::refusal::fault;
use super::{Agent, State};
use crate::cluster::tenancy::judge;
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::ledger::{ClusterGrant, Owner};

/// How long the API server may take for one answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How long the kubelet may take to list a pod whose container it is about to start.
const LISTED: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(200);

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// A container is about to start with these IDs.
    ///
    /// # Errors
    /// Its pod may not have them, in words for the pod's events.
    pub async fn before_start(&self, ids: &[String]) -> Result<(), String> {
        if !self.are_judged(ids).await {
            return Ok(());
        }
        let before = self.state.lock().await.allocated.clone();
        let pod = self.pod_of(ids).await?;
        let admitted = async {
            self.admit(&pod, ids).await?;
            self.name(&pod, ids, &before).await
        };
        admitted.await.map_err(|fault| fault.message)
    }

    /// Does the controller say who may have them?
    async fn are_judged(&self, ids: &[String]) -> bool {
        let state = self.state.lock().await;
        ids.iter().any(|id| is_judged(&state, id))
    }

    /// Whose the IDs are, as the kubelet says.
    async fn pod_of(&self, ids: &[String]) -> Result<Pod, String> {
        let end = tokio::time::Instant::now() + LISTED;
        loop {
            if let Ok(listing) = self.kubelet.list().await {
                let state = self.state.lock().await;
                let pools = &state.pools;
                let found = listing.holdings.iter().find(|holding| {
                    ids.contains(&holding.id)
                        && pools.device(&holding.id).is_some_and(|(pool, _)| {
                            granted_as(&state, pool, &holding.id) == holding.resource
                        })
                });
                if let Some(holding) = found {
                    return Ok(holding.owner.pod());
                }
                // An ordinary init container is in no list, but the CNI plugin has told of its pod.
                let slots = ids.iter().filter_map(|id| state.ledger.get(id));
                if let Some(record) = slots.flat_map(|slot| &slot.records).next() {
                    return Ok(record.pod.clone());
                }
            }
            if tokio::time::Instant::now() >= end {
                return Err(format!(
                    "the kubelet does not say whose {} is, so nobody can tell whether it may have \
                     it; ask for it in an ordinary container, or use the CNI plugin",
                    ids.join(", ")
                ));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Sees that the pod may have these IDs, and writes that down.
    pub(super) async fn admit(&self, pod: &Pod, ids: &[String]) -> Result<(), api::Fault> {
        let (asked, uid) = {
            let state = self.state.lock().await;
            let asked: BTreeSet<String> = ids
                .iter()
                .filter(|id| is_judged(&state, id) && !is_admitted(&state, id, &pod.namespace))
                .cloned()
                .collect();
            (asked, pod.uid.clone().or_else(|| self.uid_of(&state, ids)))
        };
        if asked.is_empty() {
            return Ok(());
        }
        let labels = self.labels(&pod.namespace).await?;
        let mut state = self.state.lock().await;
        let pools = std::sync::Arc::clone(&state.pools);
        let mut changes = Vec::new();
        for id in &asked {
            let Some((pool, _)) = pools.device(id) else { continue };
            let network = pool.config.network();
            if let Err(why) = judge(&state.standing.spec, network, &pod.namespace, &labels) {
                state.counters.refusals += 1;
                let owner = Owner {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: String::new(),
                    uid,
                };
                let note = format!("NIC {id}: {why}");
                self.events.nic(id, Some(&owner), "NicRefused", &note, true);
                tracing::warn!(id, namespace = pod.namespace, pod = pod.name, why, "refused");
                self.note(&state);
                return Err(fault(FaultKind::Conflict, note));
            }
            let mut slot = state.ledger.slot(id, pool.name());
            if let Some(grant) = &mut slot.grant {
                let of = grant.cluster.get_or_insert_with(|| ClusterGrant::of(&pool.config));
                of.admitted = Some(pod.namespace.clone());
            }
            changes.push((id.clone(), slot));
        }
        let written = self.commit(&mut state, changes, true).await;
        self.note(&state);
        written.map_err(|error| fault(FaultKind::Internal, error.to_string()))
    }

    /// The UID that the kubelet's checkpoint has for one of the IDs.
    pub(super) fn uid_of(&self, state: &State, ids: &[String]) -> Option<String> {
        let checkpoint = self.kubelet.checkpoint()?;
        ids.iter().find_map(|id| {
            let (pool, _) = state.pools.device(id)?;
            checkpoint.get(&(granted_as(state, pool, id), id.clone())).cloned()
        })
    }

    async fn labels(&self, namespace: &str) -> Result<BTreeMap<String, String>, api::Fault> {
        let unknown = |why: String| {
            let message = format!(
                "nobody can tell whether the namespace {namespace:?} may have this NIC: {why}"
            );
            fault(FaultKind::TryAgain, message)
        };
        let Some(server) = self.server.get() else {
            return Err(unknown("there is no API server".to_owned()));
        };
        let namespaces = Api::<Namespace>::all(server.client.clone());
        match tokio::time::timeout(PATIENCE, namespaces.get_metadata(namespace)).await {
            Ok(Ok(found)) => Ok(found.metadata.labels.unwrap_or_default()),
            Ok(Err(error)) => Err(unknown(error.to_string())),
            Err(_) => Err(unknown("the API server does not answer".to_owned())),
        }
    }
}

pub(super) fn is_judged(state: &State, id: &str) -> bool {
    state.pools.device(id).is_some_and(|(pool, _)| pool.config.cluster.is_some())
}

fn is_admitted(state: &State, id: &str, namespace: &str) -> bool {
    let grant = state.ledger.get(id).and_then(|slot| slot.grant.as_ref());
    let admitted = grant.and_then(|grant| grant.cluster.as_ref()?.admitted.as_deref());
    admitted == Some(namespace)
}
