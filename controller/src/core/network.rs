//! A network: its VNI, its finalizer, its status.

use vhost_rdma_cluster_api::{
    Condition, NETWORK_FINALIZER, RdmaNetwork, RdmaNetworkStatus, check, set_condition,
};

use super::condition::{accepted, some};
use super::vni::{self, NoVni};
use super::write::{Plan, Write};
use super::{Mono, Settings, World};

pub(super) fn plan(world: &World, name: &str, now: Mono, settings: &Settings) -> Plan {
    let Some(network) = world.networks.get(name) else { return Plan::default() };
    if network.metadata.deletion_timestamp.is_some() {
        return deleting(world, name, network, now, settings);
    }
    if !has_finalizer(network) {
        let mut wanted = network.clone();
        let finalizers = wanted.metadata.finalizers.get_or_insert_default();
        finalizers.push(NETWORK_FINALIZER.to_owned());
        return vec![Write::NetworkFinalizers(wanted)].into();
    }
    let committed = network.status.as_ref().and_then(|status| status.vni);
    let wrong = check::network(name, &network.spec, committed);
    let mut writes = Vec::new();
    // A network that is not valid keeps what it has and gets nothing.
    let choice = if wrong.is_empty() { vni::choose(world, network) } else { Err(NoVni::Pending) };
    let vni = match &choice {
        Ok((_, Some(claim))) => {
            writes.push(claim.clone());
            committed
        }
        Ok((vni, None)) => Some(*vni),
        Err(_) => committed,
    };
    let mut status = sums(world, name, network, settings);
    status.vni = vni;
    status.observed_generation = network.metadata.generation;
    accepted(&mut status.conditions, &wrong, network.metadata.generation);
    set_condition(&mut status.conditions, ready(&wrong, &choice).of(network.metadata.generation));
    writes.extend(changed(network, status));
    writes.into()
}

fn ready(wrong: &[String], choice: &Result<(u32, Option<Write>), NoVni>) -> Condition {
    match choice {
        _ if !wrong.is_empty() => {
            Condition::new("Ready", false, "Invalid", "see the condition Accepted")
        }
        Ok((vni, None)) => Condition::new("Ready", true, "Allocated", format!("VNI {vni}")),
        Ok((_, Some(_))) => Condition::new("Ready", false, "Pending", NoVni::Pending.to_string()),
        Err(why @ NoVni::Taken { .. }) => {
            Condition::new("Ready", false, "VniTaken", why.to_string())
        }
        Err(why) => Condition::new("Ready", false, "NoVni", why.to_string()),
    }
}

fn has_finalizer(network: &RdmaNetwork) -> bool {
    let finalizers = network.metadata.finalizers.as_deref().unwrap_or_default();
    finalizers.iter().any(|finalizer| finalizer == NETWORK_FINALIZER)
}

/// The status with everything that is counted.
fn sums(
    world: &World,
    name: &str,
    network: &RdmaNetwork,
    settings: &Settings,
) -> RdmaNetworkStatus {
    let mut status = network.status.clone().unwrap_or_default();
    status.nodes = count(world.index.hosts_count(name));
    status.nics = world.index.nics_of(name);
    status.users = some(world.users(name));
    status.attachment_definitions = some(
        world
            .index
            .pools_of(name)
            .filter(|pool| world.attachments.get(*pool).is_some_and(|a| a.managed))
            .map(|pool| format!("{}/{pool}", settings.namespace)),
    );
    status
}

pub(super) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn changed(network: &RdmaNetwork, status: RdmaNetworkStatus) -> Option<Write> {
    (network.status.as_ref() != Some(&status))
        .then(|| Write::NetworkStatus(RdmaNetwork { status: Some(status), ..network.clone() }))
}

/// A network goes when no living node has NICs of it, or its deadline is over: what runs then goes
/// on, and the VNI stays claimed until it ends.
fn deleting(
    world: &World,
    name: &str,
    network: &RdmaNetwork,
    now: Mono,
    settings: &Settings,
) -> Plan {
    if !has_finalizer(network) {
        return Plan::default();
    }
    let living: Vec<String> = world
        .index
        .nodes_with_nics(name)
        .filter(|node| world.nodes.get(*node).is_some_and(|info| info.ready))
        .map(str::to_owned)
        .collect();
    let since = world.deleting_since(name).unwrap_or(now);
    let left = settings.network_deadline.saturating_sub(now.saturating_sub(since));
    if living.is_empty() || left.is_zero() {
        let mut wanted = network.clone();
        if let Some(finalizers) = &mut wanted.metadata.finalizers {
            finalizers.retain(|finalizer| finalizer != NETWORK_FINALIZER);
        }
        return vec![Write::NetworkFinalizers(wanted)].into();
    }
    let mut status = sums(world, name, network, settings);
    let who = format!("used by {} on {}", status.users.join(", "), some(living).join(", "));
    let condition = Condition::new("Deletable", false, "InUse", who);
    set_condition(&mut status.conditions, condition.of(network.metadata.generation));
    let ready = Condition::new("Ready", false, "Deleting", "the network is being deleted");
    set_condition(&mut status.conditions, ready.of(network.metadata.generation));
    Plan { writes: changed(network, status).into_iter().collect(), again: Some(left) }
}
