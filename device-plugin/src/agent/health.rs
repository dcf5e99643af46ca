//! What the kubelet is told of each ID, and when.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use vhost_rdma_agent_api::Kind;
use vhost_rdma_proto::v1;

use super::{Agent, List, State};
use crate::daemon::Daemon;
use crate::grant::nic_name;
use crate::holders::Kubelet;
use crate::pool::{Device, Pool};
use crate::v1beta1;

/// What is wrong with an ID that is in the configuration; `None` is good.
pub(super) fn defect(state: &State, pool: &Pool, device: &Device) -> Option<String> {
    let slot = state.ledger.get(&device.id);
    // What was moved into a pod cannot be seen from here: that is no defect.
    let moved = pool.config.kind == Kind::Vf && slot.is_some_and(|slot| !slot.records.is_empty());
    let view = state.daemon.view.as_ref();
    let nic = view.and_then(|view| view.nics.get(&nic_name(&device.id)));
    // Another backing than the pool has now carries the NIC of a pod that was there before.
    let other =
        nic.is_some_and(|nic| !nic.backing.is_empty() && nic.backing != pool.config.backing());
    if let Some(defect) = device.defect.as_ref().filter(|_| !moved && !other) {
        return Some(defect.clone());
    }
    if slot.is_some_and(|slot| slot.cordoned) {
        return Some("it is cordoned".to_owned());
    }
    if state.standing.spec.cordon.contains(&device.id) {
        return Some("the controller moves its pod (rollout)".to_owned());
    }
    if slot.is_some_and(|slot| slot.grant.is_none() && !slot.records.is_empty()) {
        return Some("what its last pod left is not undone yet".to_owned());
    }
    // Whatever the kubelet gave it to would be refused.
    if state.stuck.has(&device.id) && slot.is_some_and(|slot| !slot.records.is_empty()) {
        return Some("what its last pod left cannot be undone; it is tried again".to_owned());
    }
    let granted = slot.and_then(|slot| slot.grant.as_ref());
    if granted.is_some_and(|grant| grant.is_of_another(&pool.resource)) {
        return Some("a pod has it from before the resource got another name".to_owned());
    }
    let ipam = pool.config.cluster.as_ref().is_some_and(|of| of.ipam);
    if ipam && granted.is_none() && state.standing.givable(pool.config.network()).next().is_none() {
        return Some("the node has no addresses of its network yet".to_owned());
    }
    if !pool.config.kind.is_served() {
        return None;
    }
    if let Some((why, since)) = state.refused.get(pool.name())
        && granted.is_none()
        && since.elapsed() < REFUSED
    {
        return Some(format!("the daemon refused another of its pool: {why}"));
    }
    let Some(view) = &state.daemon.view else {
        // A kubelet from 1.22 on rejects a pod whose ID is unhealthy at the moment when it comes
        // back, and never asks again.
        if granted.is_some() && state.is_starting() {
            return None;
        }
        return Some(format!("the daemon does not answer: {}", state.daemon.error));
    };
    if let Some(nic) = view.nics.get(&nic_name(&device.id))
        && nic.session() == v1::Session::Failed
    {
        return Some(format!("the NIC failed: {}", nic.error));
    }
    let lost =
        state.daemon.lost.get(&device.id).is_some_and(|back| back.elapsed() >= state.reconnect);
    lost.then(|| {
        "the daemon was started again and the VMM of its pod has not come back; recreate the pod"
            .to_owned()
    })
}

/// How long a pool's free IDs count as useless after the daemon refused to make one: nobody else
/// would try them.
const REFUSED: Duration = Duration::from_secs(60);

fn told(id: &str, numa: &[u32], healthy: bool) -> v1beta1::Device {
    let nodes: Vec<v1beta1::NumaNode> =
        numa.iter().map(|node| v1beta1::NumaNode { id: i64::from(*node) }).collect();
    v1beta1::Device {
        id: id.to_owned(),
        health: if healthy { v1beta1::HEALTHY } else { v1beta1::UNHEALTHY }.to_owned(),
        topology: (!nodes.is_empty()).then_some(v1beta1::TopologyInfo { nodes }),
    }
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Tells the kubelet what changed, and says so where people look.
    pub(super) fn publish(&self, state: &mut State) {
        let pools = Arc::clone(&state.pools);
        let mut lists: BTreeMap<String, List> = BTreeMap::new();
        let mut defects = BTreeMap::new();
        for pool in &pools.pools {
            let mut list = Vec::new();
            for device in pool.devices.values() {
                let defect = defect(state, pool, device);
                list.push(told(&device.id, &device.numa, defect.is_none()));
                defects.extend(defect.map(|defect| (device.id.clone(), defect)));
            }
            // An ID that the configuration no longer has, but a pod: the kubelet must go on knowing
            // it.
            for (id, slot) in state.ledger.iter() {
                if slot.pool == pool.name()
                    && slot.grant.is_some()
                    && !pool.devices.contains_key(id)
                {
                    list.push(told(id, &[], false));
                    defects.insert(
                        id.clone(),
                        "it is no longer in the configuration, or its hardware is gone".to_owned(),
                    );
                }
            }
            lists.insert(pool.name().to_owned(), Arc::new(list));
        }
        self.tell_people(state, &defects);
        state.defects = defects;
        let names: Vec<String> = pools.pools.iter().map(|pool| pool.name().to_owned()).collect();
        {
            let mut known = self.lists();
            known.retain(|name, _| lists.contains_key(name));
            for (name, list) in lists {
                match known.get(&name) {
                    Some(sender) => {
                        sender.send_if_modified(|old| {
                            let changed = **old != *list;
                            if changed {
                                *old = Arc::clone(&list);
                            }
                            changed
                        });
                    }
                    None => {
                        known.insert(name, watch::Sender::new(list));
                    }
                }
            }
        }
        self.names.send_if_modified(|old| {
            let changed = *old != names;
            *old = names;
            changed
        });
        self.note(state);
    }

    /// One event for each ID of a pod that became unusable or usable again; the log has all.
    fn tell_people(&self, state: &State, defects: &BTreeMap<String, String>) {
        let granted = |id: &String| state.ledger.get(id).and_then(|slot| slot.grant.as_ref());
        for (id, defect) in defects {
            if state.defects.get(id) == Some(defect) {
                continue;
            }
            tracing::warn!(id, defect, "unhealthy");
            if let Some(grant) = granted(id) {
                self.events.nic(
                    id,
                    grant.owner.as_ref(),
                    "NicUnhealthy",
                    &format!("NIC {id}: {defect}"),
                    true,
                );
            }
        }
        for id in state.defects.keys().filter(|id| !defects.contains_key(*id)) {
            tracing::info!(id, "healthy");
            if let Some(grant) = granted(id) {
                self.events.nic(
                    id,
                    grant.owner.as_ref(),
                    "NicHealthy",
                    &format!("NIC {id} is usable again"),
                    false,
                );
            }
        }
    }
}
