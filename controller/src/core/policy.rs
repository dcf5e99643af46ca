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

pub(super) fn plan(world: &World, name: &str) -> Plan {
    let Some(policy) = world.policies.get(name) else { return Plan::default() };
    let generation = policy.metadata.generation;
    let matched: Vec<&str> = world.index.matched(name).collect();
    let outdated: BTreeSet<&str> = world.index.outdated(name).collect();
    let mut status = policy.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    status.matched = count(matched.len());
    status.ready = count(matched.iter().filter(|node| world.index.serves(node)).count());
    status.outdated = count(outdated.len());
    status.conflicts = conflicts(world, name, &matched);
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

fn conflicts(world: &World, name: &str, matched: &[&str]) -> Vec<String> {
    let mut all = BTreeSet::new();
    for pool in &world.policies[name].spec.pools {
        all.extend(obstacle(world, pool));
    }
    // Another policy can only come first where it selects the same node.
    for node in matched {
        if world.policies_of(node).nth(1).is_none() {
            continue;
        }
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
    accepted(&mut status.conditions, &[], class.metadata.generation);
    if class.status.as_ref() == Some(&status) {
        return Plan::default();
    }
    vec![Write::ClassStatus(RdmaNicClass { status: Some(status), ..class.clone() })].into()
}
