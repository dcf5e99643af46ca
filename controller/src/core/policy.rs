//! Policies and classes: where they count, and how far a rollout has come.
//!
//! A rollout moves pods whose NICs are not what the policy says now, on at most so many nodes at a
//! time. Which nodes these are is in the policy's status: it is replaced by its version, so that
//! two controllers together do not begin with more nodes than one.

use std::collections::BTreeSet;

use vhost_rdma_cluster_api::{Condition, RdmaNicClass, RdmaNodePolicy, check, set_condition};

use super::World;
use super::condition::{accepted, some};
use super::network::count;
use super::node::{effective_pools, obstacle};
use super::write::{Plan, Write};

/// Whether what a class says of rates holds; only of a class that says something.
const RATES: &str = "RatesEnforced";

pub(super) fn plan(world: &World, name: &str) -> Plan {
    let Some(policy) = world.policies.get(name) else { return Plan::default() };
    let generation = policy.metadata.generation;
    let outdated: BTreeSet<&str> = world.index.outdated(name).collect();
    let mut status = policy.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    status.matched = count(world.index.matched_count(name));
    status.ready = count(world.index.ready_count(name));
    status.outdated = count(outdated.len());
    status.conflicts = conflicts(world, name);
    status.rolling = rolling(policy, &outdated);
    accepted(&mut status.conditions, &check::policy(&policy.spec), generation);
    let conflicted = if status.conflicts.is_empty() {
        Condition::new("Conflicted", false, "Whole", "")
    } else {
        Condition::new("Conflicted", true, "PoolsIgnored", status.conflicts.join("; "))
    };
    set_condition(&mut status.conditions, conflicted.of(generation));
    if policy.status.as_ref() == Some(&status) {
        return Plan::default();
    }
    vec![Write::PolicyStatus(RdmaNodePolicy { status: Some(status), ..policy.clone() })].into()
}

fn rolling(policy: &RdmaNodePolicy, outdated: &BTreeSet<&str>) -> Vec<String> {
    if !policy.spec.rollout.evict {
        return Vec::new();
    }
    let old = policy.status.as_ref().map(|status| status.rolling.as_slice()).unwrap_or_default();
    let most = policy.spec.rollout.max_unavailable.unwrap_or(1).clamp(1, 1000) as usize;
    let mut now: Vec<String> =
        old.iter().filter(|node| outdated.contains(node.as_str())).cloned().collect();
    for node in outdated {
        if now.len() >= most {
            break;
        }
        if !now.iter().any(|begun| begun == node) {
            now.push((*node).to_owned());
        }
    }
    now
}

/// What of a policy does not count, and why. Each node's report asks for it, so no more nodes are
/// looked at than another policy with a pool of the same name has in common with this one.
fn conflicts(world: &World, name: &str) -> Vec<String> {
    let mut all = BTreeSet::new();
    let mut others: BTreeSet<&str> = BTreeSet::new();
    for pool in &world.policies[name].spec.pools {
        all.extend(obstacle(world, pool));
        others.extend(world.policies_with_pool(&pool.name).take_while(|other| *other != name));
    }
    let mut looked: BTreeSet<&str> = BTreeSet::new();
    for other in others {
        let (few, many) = if world.index.matched_count(other) < world.index.matched_count(name) {
            (other, name)
        } else {
            (name, other)
        };
        looked.extend(world.index.matched(few).filter(|node| world.index.is_match(many, node)));
    }
    for node in looked {
        for (policy, why) in effective_pools(world, node).1 {
            if policy == name {
                all.insert(why);
            }
        }
    }
    some(all)
}

pub(super) fn plan_class(world: &World, name: &str) -> Plan {
    let Some(class) = world.classes.get(name) else { return Plan::default() };
    let users: Vec<&str> = world.index.policies_with_class(name).collect();
    let pools = users
        .iter()
        .filter_map(|policy| world.policies.get(*policy))
        .flat_map(|policy| &policy.spec.pools)
        .filter(|pool| pool.class.as_deref() == Some(name))
        .count();
    let mut status = class.status.clone().unwrap_or_default();
    status.observed_generation = class.metadata.generation;
    status.pools = count(pools);
    status.users = some(users.into_iter().map(str::to_owned));
    accepted(&mut status.conditions, &check::class(&class.spec), class.metadata.generation);
    status.conditions.retain(|condition| condition.type_ != RATES || class.spec.rates.is_some());
    if class.spec.rates.is_some() {
        let why = "no daemon bounds what a NIC sends: rates have no effect on NICs; bandwidth \
                   counts towards quotas of tenants, and nothing else does";
        let condition = Condition::new(RATES, false, "NotSupported", why);
        set_condition(&mut status.conditions, condition.of(class.metadata.generation));
    }
    if class.status.as_ref() == Some(&status) {
        return Plan::default();
    }
    vec![Write::ClassStatus(RdmaNicClass { status: Some(status), ..class.clone() })].into()
}

#[cfg(test)]
mod tests {
    use vhost_rdma_cluster_api::{
        Consumer, PolicyPool, RdmaNetwork, RdmaNetworkSpec, RdmaNetworkStatus, RdmaNicClass,
        RdmaNicClassSpec, RdmaNodePolicy, RdmaNodePolicySpec, Soft,
    };

    use super::{World, plan_class};
    use crate::core::node::render;
    use crate::core::{Mono, NodeInfo, Object, Write};

    /// A node with a pool of the class.
    fn world(class: RdmaNicClassSpec) -> World {
        let mut world = World::new(false);
        let spec = RdmaNetworkSpec { soft: Some(Soft {}), ..RdmaNetworkSpec::default() };
        let mut network = RdmaNetwork::new("blue", spec);
        network.status = Some(RdmaNetworkStatus { vni: Some(7), ..RdmaNetworkStatus::default() });
        let pool = PolicyPool {
            name: "blue".to_owned(),
            network: "blue".to_owned(),
            class: Some("small".to_owned()),
            count: 1,
            numa: Vec::new(),
        };
        let policy = RdmaNodePolicySpec { pools: vec![pool], ..RdmaNodePolicySpec::default() };
        let node = NodeInfo { name: "one".to_owned(), ready: true, ..NodeInfo::default() };
        for object in [
            Object::Network(network),
            Object::Class(RdmaNicClass::new("small", class)),
            Object::Policy(RdmaNodePolicy::new("p", policy)),
            Object::Node(node),
        ] {
            world.apply(object, Mono::ZERO);
        }
        world
    }

    #[test]
    fn a_shared_heap_reaches_nodes_and_outdates_what_was_made_without() {
        let class = |consumer, shared_heap| RdmaNicClassSpec {
            consumer,
            shared_heap,
            ..RdmaNicClassSpec::default()
        };
        let pool = |heap| {
            let spec = render(&world(class(Consumer::Process, heap)), "one").unwrap();
            assert_eq!(spec.pools[0].nic.shared_heap, heap);
            spec.pools[0].revision.clone()
        };
        assert_ne!(pool(true), pool(false));
        // A VM's memory is its own, so such a class is offered nowhere, and says why.
        let world = world(class(Consumer::Vm, true));
        assert!(render(&world, "one").unwrap().pools.is_empty());
        let plan = plan_class(&world, "small");
        let [Write::ClassStatus(class)] = &plan.writes[..] else { panic!("{plan:?}") };
        let accepted = &class.status.as_ref().unwrap().conditions[0];
        assert!(!accepted.holds() && accepted.message.contains("sharedHeap"), "{accepted:?}");
    }
}
