//! A tenant's sums.

use vhost_rdma_cluster_api::{Condition, RdmaTenant, set_condition};

use super::World;
use super::condition::{accepted, some};
use super::network::count;
use super::write::{Plan, Write};

pub(super) fn plan(world: &World, name: &str) -> Plan {
    let Some(tenant) = world.tenants.get(name) else { return Plan::default() };
    let generation = tenant.metadata.generation;
    let mut wrong: Vec<String> = Vec::new();
    let networks = tenant.spec.networks.iter().filter(|n| !world.networks.contains_key(*n));
    wrong.extend(networks.map(|network| format!("there is no network {network:?}")));
    let classes = tenant.spec.classes.iter().filter(|c| !world.classes.contains_key(*c));
    wrong.extend(classes.map(|class| format!("there is no class {class:?}")));
    let mut status = tenant.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    status.namespaces = count(world.index.namespaces_of(name).count());
    status.used = world.used(name);
    accepted(&mut status.conditions, &some(wrong), generation);
    let lost = some(world.index.contested(name).map(|(namespace, by)| {
        format!("the namespace {namespace:?} belongs to the tenant {by:?}, which was made before")
    }));
    let conflicted = if lost.is_empty() {
        Condition::new("Conflicted", false, "Alone", "")
    } else {
        Condition::new("Conflicted", true, "NamespaceTaken", lost.join("; "))
    };
    set_condition(&mut status.conditions, conflicted.of(generation));
    let over: Vec<String> = status
        .used
        .over(&tenant.spec.quota.unwrap_or_default())
        .into_iter()
        .map(|(what, held, allowed)| format!("{what}: {held} of {allowed}"))
        .collect();
    let quota = if over.is_empty() {
        Condition::new("OverQuota", false, "Within", "")
    } else {
        let message = format!("{}; running NICs stay, new ones are refused", over.join(", "));
        Condition::new("OverQuota", true, "Exceeded", message)
    };
    set_condition(&mut status.conditions, quota.of(generation));
    if tenant.status.as_ref() == Some(&status) {
        return Plan::default();
    }
    vec![Write::TenantStatus(RdmaTenant { status: Some(status), ..tenant.clone() })].into()
}
