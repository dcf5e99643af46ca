//! A node's object: everything that concerns the node, brought together.

use std::collections::{BTreeMap, BTreeSet};

use vhost_rdma_cluster_api::{
    NetworkBacking, NicStatus, NodeBlock, NodeNetwork, NodePool, NodeTenant, PolicyPool,
    RdmaNetwork, RdmaNicClassSpec, RdmaNode, RdmaNodeSpec, check,
};

use super::index::is_outdated;
use super::write::{Guard, Plan, Write};
use super::{Mono, Settings, World, blocks, digest};

/// How long to wait before a pod that did not go is evicted again.
const EVICT_AGAIN: std::time::Duration = std::time::Duration::from_secs(10);

/// A pool that counts on a node, and the policy that says so.
#[derive(Debug, Clone, Copy)]
pub struct Effective<'a> {
    /// The policy's name.
    pub policy: &'a str,
    /// The pool.
    pub pool: &'a PolicyPool,
}

/// The pools of a node, each from the policy that comes first; and what does not count: the policy
/// and why.
#[must_use]
pub fn effective_pools<'a>(
    world: &'a World,
    node: &str,
) -> (Vec<Effective<'a>>, Vec<(&'a str, String)>) {
    let mut taken: BTreeMap<&str, Effective<'a>> = BTreeMap::new();
    let mut conflicts = Vec::new();
    for policy in world.policies_of(node) {
        for pool in &world.policies[policy].spec.pools {
            if let Some(first) = taken.get(pool.name.as_str()) {
                let why =
                    format!("pool {:?}: the policy {:?} comes first", pool.name, first.policy);
                conflicts.push((policy, why));
            } else {
                taken.insert(&pool.name, Effective { policy, pool });
            }
        }
    }
    (taken.into_values().collect(), conflicts)
}

/// Why a pool cannot be offered, if it cannot.
pub(super) fn obstacle(world: &World, pool: &PolicyPool) -> Option<String> {
    let of = |what: String| Some(format!("pool {:?}: {what}", pool.name));
    match world.networks.get(&pool.network) {
        None => return of(format!("there is no network {:?}", pool.network)),
        Some(network) if !usable(network) => {
            return of(format!("the network {:?} is not ready", pool.network));
        }
        Some(_) => {}
    }
    match &pool.class {
        Some(class) if !world.classes.contains_key(class) => {
            of(format!("there is no class {class:?}"))
        }
        Some(class) if !wrong_with_class(world, class).is_empty() => {
            of(format!("the class {class:?}: {}", wrong_with_class(world, class).join("; ")))
        }
        Some(class) if is_for_processes(world, class) && is_on_rnics(world, &pool.network) => {
            of(format!(
                "the class {class:?} is for processes, which have no NICs on RNICs; {:?} is on \
                 some",
                pool.network
            ))
        }
        _ => None,
    }
}

fn wrong_with_class(world: &World, class: &str) -> Vec<String> {
    world.classes.get(class).map(|class| check::class(&class.spec)).unwrap_or_default()
}

fn is_for_processes(world: &World, class: &str) -> bool {
    world.classes.get(class).is_some_and(|class| !class.spec.consumer.is_vm())
}

fn is_on_rnics(world: &World, network: &str) -> bool {
    world.networks.get(network).is_some_and(|network| network.spec.rnic.is_some())
}

/// Whether nodes may offer NICs of the network.
pub(super) fn usable(network: &RdmaNetwork) -> bool {
    network.metadata.deletion_timestamp.is_none()
        && network.spec.backing().is_some()
        && network.status.as_ref().is_some_and(|status| status.vni.is_some())
}

/// What the node's object should say; nothing if no policy selects the node.
#[must_use]
pub fn render(world: &World, name: &str) -> Option<RdmaNodeSpec> {
    world.nodes.get(name)?;
    world.policies_of(name).next()?;
    let mut spec = RdmaNodeSpec::default();
    let mut networks = BTreeSet::new();
    for Effective { policy, pool } in effective_pools(world, name).0 {
        if obstacle(world, pool).is_some() {
            continue;
        }
        let class = pool.class.as_ref().and_then(|class| world.classes.get(class));
        let nic = class.map(|class| class.spec.clone()).unwrap_or_default();
        networks.insert(pool.network.as_str());
        spec.pools.push(NodePool {
            name: pool.name.clone(),
            network: pool.network.clone(),
            count: pool.count,
            policy: policy.to_owned(),
            class: pool.class.clone(),
            revision: revision(&world.networks[&pool.network], &nic),
            nic,
            numa: pool.numa.clone(),
        });
    }
    spec.networks = networks.iter().filter_map(|network| rendered(world, network)).collect();
    spec.rnics = world
        .policies_of(name)
        .flat_map(|policy| world.policies[policy].spec.rnics.iter().cloned())
        .collect();
    spec.blocks = world
        .index
        .blocks_of(name)
        .filter_map(|block| world.blocks.get(block))
        .filter(|block| !block.spec.releasing && block.metadata.deletion_timestamp.is_none())
        .filter(|block| networks.contains(block.spec.network.as_str()))
        .map(|block| NodeBlock {
            network: block.spec.network.clone(),
            cidr: block.spec.cidr,
            uid: block.metadata.uid.clone().unwrap_or_default(),
        })
        .collect();
    spec.blocks.sort();
    spec.nics = world.news_of_nics(name);
    spec.cordon = cordon(world, name, &spec);
    Some(spec)
}

fn rendered(world: &World, name: &str) -> Option<NodeNetwork> {
    let network = world.networks.get(name)?;
    let rnic = match network.spec.backing()? {
        NetworkBacking::Soft => None,
        NetworkBacking::Rnic(rnic) => Some(rnic),
    };
    Some(NodeNetwork {
        name: name.to_owned(),
        uid: network.metadata.uid.clone().unwrap_or_default(),
        vni: network.status.as_ref()?.vni?,
        fabric: rnic.map(|rnic| rnic.fabric.clone()),
        addressing: rnic.map(|rnic| rnic.addressing),
        mtu: network.spec.mtu,
        companion: network.spec.companion.clone(),
        allow: network.spec.allow.clone(),
        ipam: network.spec.ipam.is_some(),
        tenants: world
            .tenants_of_network(name)
            .map(|tenant| NodeTenant {
                name: tenant.to_owned(),
                namespace_selector: world.tenants[tenant].spec.namespace_selector.clone(),
                except: world.lost_namespaces(tenant),
                full: world.is_full(tenant),
            })
            .collect(),
    })
}

/// A digest of what is fixed when a NIC is made.
fn revision(network: &RdmaNetwork, nic: &RdmaNicClassSpec) -> String {
    let rnic = network.spec.rnic.as_ref();
    let mut fixed = serde_json::json!([
        network.metadata.uid,
        rnic.map(|rnic| (&rnic.fabric, rnic.addressing)),
        network.spec.companion,
        nic.vectors,
        nic.addresses,
        nic.socket,
    ]);
    // Only where it says more than its forerunners knew: their NICs are not outdated by it.
    if let (false, Some(fixed)) = (nic.consumer.is_vm(), fixed.as_array_mut()) {
        fixed.push("processes".into());
        if nic.shared_heap {
            fixed.push("heap".into());
        }
    }
    format!("{:016x}", digest(&fixed.to_string()))
}

/// IDs whose pods are to move: only while the rollout of their pool's policy has come to this node.
/// Another policy may evict nobody, or have no more nodes at a time. A pool that is gone is that of
/// every policy of the node.
fn cordon(world: &World, name: &str, spec: &RdmaNodeSpec) -> Vec<String> {
    if !world.is_rolling(name) {
        return Vec::new();
    }
    let may_move = |nic: &NicStatus| {
        let pool = spec.pools.iter().find(|pool| pool.name == nic.pool);
        pool.is_none_or(|pool| world.index.rolls(&pool.policy, name))
    };
    let mut ids: Vec<String> = world
        .nics(name)
        .iter()
        .filter(|nic| is_outdated(spec, nic) && may_move(nic))
        .map(|nic| nic.id.clone())
        .collect();
    ids.sort();
    ids
}

pub(super) fn plan(world: &World, name: &str, now: Mono, settings: &Settings) -> Plan {
    let object = world.rdma_nodes.get(name);
    let wanted = render(world, name);
    match (object, wanted) {
        (None, None) => Plan::default(),
        (None, Some(spec)) => vec![Write::CreateNode(RdmaNode::new(name, spec))].into(),
        (Some(object), _) if object.metadata.deletion_timestamp.is_some() => Plan::default(),
        (Some(object), None) => leaving(world, name, object, now, settings),
        (Some(object), Some(spec)) => {
            let mut plan = Plan::default();
            for network in &spec.networks {
                if let Some(found) = world.networks.get(&network.name) {
                    plan.writes.extend(blocks::lacking(world, name, &network.name, found));
                }
            }
            if object.spec == spec {
                evict(object, &mut plan);
            } else {
                plan.writes.push(Write::ReplaceNode(RdmaNode { spec, ..object.clone() }));
            }
            plan
        }
    }
}

/// Evicts the pods of cordoned IDs, once the agent grants them to nobody else.
fn evict(object: &RdmaNode, plan: &mut Plan) {
    let Some(status) = &object.status else { return };
    if object.spec.cordon.is_empty() || !status.serves(object.metadata.generation) {
        return;
    }
    let moving = status.nics.iter().filter(|nic| object.spec.cordon.contains(&nic.id));
    let pods: BTreeSet<_> = moving.map(|nic| (&nic.namespace, &nic.pod, &nic.pod_uid)).collect();
    for (namespace, pod, uid) in pods {
        plan.writes.push(Write::Evict {
            namespace: namespace.clone(),
            pod: pod.clone(),
            uid: uid.clone(),
            node: object.metadata.name.clone().unwrap_or_default(),
        });
        plan.again = Some(EVICT_AGAIN);
    }
}

/// The object of a node that no policy selects, or that is no node of the cluster any more.
fn leaving(world: &World, name: &str, object: &RdmaNode, now: Mono, settings: &Settings) -> Plan {
    if world.nodes.contains_key(name) {
        if object.spec != RdmaNodeSpec::default() {
            let emptied = RdmaNode { spec: RdmaNodeSpec::default(), ..object.clone() };
            return vec![Write::ReplaceNode(emptied)].into();
        }
        // Only an agent that has seen the empty specification grants no NIC any more. A network is
        // there without a NIC, too, as long as the daemon has one that no pod was admitted to, and
        // nobody else says that its number is taken.
        let idle = object.status.as_ref().is_none_or(|status| {
            status.observed_generation >= object.metadata.generation
                && status.nics.is_empty()
                && status.blocks.is_empty()
                && status.networks.is_empty()
        });
        // The version goes with it: a status that the agent writes meanwhile keeps the object.
        let writes = idle.then(|| Write::DeleteNode(object.clone(), None));
        return writes.into_iter().collect::<Vec<_>>().into();
    }
    let since = world.gone_since(name).unwrap_or(now);
    let left = settings.node_grace.saturating_sub(now.saturating_sub(since));
    if !left.is_zero() {
        return Plan { writes: Vec::new(), again: Some(left) };
    }
    let guard = Guard::NodeIsGone { node: name.to_owned() };
    vec![Write::DeleteNode(object.clone(), Some(guard))].into()
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
