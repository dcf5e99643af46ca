//! What the node's object says of the node: the agent's word, made from its tables.

use std::collections::BTreeSet;

use vhost_rdma_cluster_api::{
    Condition, DaemonStatus, Limits, NicStatus, NodeNetworkStatus, PortStatus, Quantity,
    RdmaNodeStatus, RnicStatus,
};
use vhost_rdma_proto::v1;

use super::{Agent, State};
use crate::cluster::addresses::withheld;
use crate::cluster::render::{host_address, selects};
use crate::daemon::Daemon;
use crate::grant::nic_name;
use crate::holders::Kubelet;
use crate::host::Function;
use crate::ledger::Slot;

/// What a condition's message may have; the API server takes 32 KiB, people less.
const MESSAGE_MAX: usize = 1000;

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// The UID of the node's object and what its status should be; nothing if there never was one.
    pub async fn report(&self) -> Option<(String, RdmaNodeStatus)> {
        let mut state = self.state.lock().await;
        if state.standing.uid.is_empty() {
            return None;
        }
        self.learn_uids(&mut state).await;
        let mut status = status(&state);
        if let Some(channel) = &self.channel {
            status.channel = Some(channel.reported());
            let generation = Some(state.standing.generation);
            let more = channel.conditions().map(|condition| condition.of(generation));
            status.conditions.extend(more);
        }
        Some((state.standing.uid.clone(), status))
    }

    /// Comes back when there may be something new to report.
    pub async fn noted(&self) {
        self.noted.notified().await;
    }

    /// A pod is evicted by its UID, which pod-resources does not tell: the checkpoint does.
    async fn learn_uids(&self, state: &mut State) {
        let unknown: Vec<String> = state
            .ledger
            .iter()
            .filter(|(_, slot)| {
                let grant = slot.grant.as_ref().filter(|grant| grant.cluster.is_some());
                grant.is_some_and(|g| g.owner.as_ref().is_some_and(|owner| owner.uid.is_none()))
            })
            .map(|(id, _)| id.clone())
            .collect();
        let mut changes = Vec::new();
        for id in unknown {
            let uid = self.uid_of(state, std::slice::from_ref(&id));
            let Some(mut slot) = state.ledger.get(&id).cloned() else { continue };
            let owner = slot.grant.as_mut().and_then(|grant| grant.owner.as_mut());
            if let (Some(owner), Some(uid)) = (owner, uid) {
                owner.uid = Some(uid);
                changes.push((id, slot));
            }
        }
        if let Err(error) = self.commit(state, changes, false).await {
            tracing::debug!(%error, "whose NICs these are is asked again");
        }
    }
}

fn status(state: &State) -> RdmaNodeStatus {
    let standing = &state.standing;
    let mut nics: Vec<NicStatus> =
        state.ledger.iter().filter_map(|(id, slot)| nic(state, id, slot)).collect();
    nics.sort_by(|a, b| a.id.cmp(&b.id));
    let blocks: BTreeSet<String> =
        standing.held.iter().chain(&standing.spec.blocks).map(|block| block.uid.clone()).collect();
    RdmaNodeStatus {
        observed_generation: Some(standing.generation),
        granted: u32::try_from(nics.len()).unwrap_or(u32::MAX),
        rnics: state.inventory.functions.iter().filter_map(|f| rnic(state, f)).collect(),
        daemon: state.daemon.view.as_ref().map(|view| DaemonStatus {
            instance: view.instance.clone(),
            version: view.version.clone(),
        }),
        channel: None,
        networks: standing
            .hosted
            .iter()
            .map(|(uid, network)| NodeNetworkStatus {
                name: network.name.clone(),
                uid: uid.clone(),
                addresses: addresses(state, uid, &network.name),
            })
            .collect(),
        // Before one of them is the node's own the API server must know that it may be.
        blocks: blocks.into_iter().collect(),
        nics,
        conditions: vec![ready(state).of(Some(standing.generation))],
    }
}

/// How many addresses of a network cannot be given any more: those that NICs have, and those that
/// nobody gets. When it is all of the blocks the controller adds one.
fn addresses(state: &State, uid: &str, network: &str) -> u32 {
    let grants = state.ledger.iter().filter_map(|(_, slot)| slot.grant.as_ref());
    let of = grants.filter(|grant| grant.cluster.as_ref().is_some_and(|c| c.network_uid == uid));
    let given = of.filter(|grant| !grant.addresses.is_empty()).count();
    let withheld = [true, false].map(|v4| {
        let blocks = state.standing.givable(network).filter(|b| b.first().is_ipv4() == v4);
        blocks.map(withheld).fold(0, u32::saturating_add)
    });
    let most = withheld.into_iter().max().unwrap_or(0);
    u32::try_from(given).unwrap_or(u32::MAX).saturating_add(most)
}

/// A NIC that a pod has and was admitted to; one that waits for that counts against no quota.
fn nic(state: &State, id: &str, slot: &Slot) -> Option<NicStatus> {
    let grant = slot.grant.as_ref()?;
    let of = grant.cluster.as_ref()?;
    let owner = grant.owner.as_ref()?;
    if of.admitted.as_ref() != Some(&owner.namespace) {
        return None;
    }
    let seen = state.daemon.view.as_ref().and_then(|view| view.nics.get(&nic_name(id)));
    let pool = state.pools.get(&slot.pool).and_then(|pool| pool.config.cluster.as_ref());
    Some(NicStatus {
        id: id.to_owned(),
        pool: slot.pool.clone(),
        network: grant.network.clone(),
        namespace: owner.namespace.clone(),
        pod: owner.pod.clone(),
        pod_uid: owner.uid.clone().unwrap_or_default(),
        class: pool.and_then(|pool| pool.class.clone()),
        revision: of.revision.clone(),
        limits: seen.and_then(|nic| nic.limits.as_ref()).map(limits).unwrap_or_default(),
        rates: vhost_rdma_cluster_api::Rates::default(),
        mac: grant.mac.clone(),
    })
}

fn limits(limits: &v1::Limits) -> Limits {
    let quantity = |bytes: u64| Some(Quantity(bytes.min(i64::MAX as u64)));
    Limits {
        max_contexts: Some(limits.max_contexts),
        max_pds: Some(limits.max_pds),
        max_mrs: Some(limits.max_mrs),
        max_mr_bytes: quantity(limits.max_mr_bytes),
        max_kept_bytes: quantity(limits.max_kept_bytes),
        max_guest_bytes: quantity(limits.max_guest_bytes),
        max_cqs: Some(limits.max_cqs),
        max_srqs: Some(limits.max_srqs),
        max_qps: Some(limits.max_qps),
        max_ahs: Some(limits.max_ahs),
    }
}

fn rnic(state: &State, function: &Function) -> Option<RnicStatus> {
    let device = function.rdma.clone().filter(|_| function.parent.is_none())?;
    let rule = state.standing.spec.rnics.iter().find(|rule| selects(&rule.selector, function));
    let address = rule.and_then(|rule| host_address(rule, function));
    Some(RnicStatus {
        device,
        pci: function.pci.clone(),
        numa: function.numa,
        fabric: rule.map(|rule| rule.fabric.clone()),
        host_address: address.map(|address| address.to_string()),
        port: if function.fault.is_none() { PortStatus::Active } else { PortStatus::Down },
    })
}

/// Whether the node serves what it was told. What cannot be offered of it is told and no fault of
/// the node.
fn ready(state: &State) -> Condition {
    let status = super::status::status(state);
    let message: String = status.problems.join("; ").chars().take(MESSAGE_MAX).collect();
    let reason = match (status.ready, status.problems.is_empty()) {
        (false, _) => "NotServing",
        (true, false) => "ServingInPart",
        (true, true) => "Serving",
    };
    Condition::new("Ready", status.ready, reason, message)
}
