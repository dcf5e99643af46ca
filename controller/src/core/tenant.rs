//! A tenant's sums.

use vhost_rdma_cluster_api::{Condition, RdmaTenant, set_condition};

use std::time::Duration;

use super::condition::{accepted, some};
use super::network::count;
use super::write::{Plan, Write};
use super::{Mono, World};

/// How long a pod may be let in and not be there: the API server stores it after it asked.
const STORED: Duration = Duration::from_secs(65);
/// How often it is asked whether pods that start are there still.
const LOOK: Duration = Duration::from_secs(15);
/// Pods that are asked about at a time.
const ASKED: usize = 64;

pub(super) fn plan(world: &World, name: &str, now: Mono) -> Plan {
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
    // Both in one write: what is counted here is counted no longer there.
    status.used = world.used(name);
    status
        .reserved
        .retain(|place| world.index.nics_of_pod(&place.pod_uid) < place.usage.nics.max(1));
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
    let again = (!status.reserved.is_empty()).then_some(LOOK);
    if tenant.status.as_ref() != Some(&status) {
        let write = Write::TenantStatus(RdmaTenant { status: Some(status), ..tenant.clone() });
        return Plan { writes: vec![write], again };
    }
    let since = |uid: &String| world.reserved_since.get(uid).copied().unwrap_or(now);
    let mut old: Vec<String> = status
        .reserved
        .iter()
        .map(|place| place.pod_uid.clone())
        .filter(|uid| now.saturating_sub(since(uid)) >= STORED)
        .collect();
    // Others come the next time: which are first changes with time.
    let turn = usize::try_from(now.as_secs() / LOOK.as_secs()).unwrap_or(0);
    let first = (turn * ASKED) % old.len().max(1);
    old.rotate_left(first);
    old.truncate(ASKED);
    let writes = (!old.is_empty()).then(|| Write::ExpireReservations(tenant.clone(), old));
    Plan { writes: writes.into_iter().collect(), again }
}
