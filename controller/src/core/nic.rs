//! NICs with a name: may they be, and is their identity their own.

use vhost_rdma_cluster_api::{RdmaNic, check};

use super::World;
use super::condition::accepted;
use super::write::{Plan, Write};

pub(super) fn plan(world: &World, namespace: &str, name: &str) -> Plan {
    let key = (namespace.to_owned(), name.to_owned());
    let Some(nic) = world.nics_named.get(&key) else { return Plan::default() };
    let mut wrong = Vec::new();
    let tenant = world.index.tenant_of(namespace).and_then(|tenant| world.tenants.get(tenant));
    match (world.networks.get(&nic.spec.network), tenant) {
        (None, _) => wrong.push(format!("there is no network {:?}", nic.spec.network)),
        (_, None) => wrong.push(format!("the namespace {namespace:?} belongs to no tenant")),
        (Some(network), Some(tenant)) => {
            if !tenant.spec.networks.contains(&nic.spec.network) {
                wrong.push(format!(
                    "the network {:?} is not one of the tenant's: {}",
                    nic.spec.network,
                    tenant.spec.networks.join(", ")
                ));
            }
            if let Some(class) = &nic.spec.class
                && !tenant.spec.classes.contains(class)
            {
                wrong.push(format!(
                    "the class {class:?} is not one of the tenant's: {}",
                    tenant.spec.classes.join(", ")
                ));
            }
            wrong.extend(check::nic(&nic.spec, &network.spec));
        }
    }
    // Names of another tenant's namespace are not told.
    for identity in [&nic.spec.mac, &nic.spec.address].into_iter().flatten() {
        if world.first_with(&nic.spec.network, identity) != Some(&key) {
            wrong.push(format!("another NIC of the network has {identity}"));
        }
    }
    let mut status = nic.status.clone().unwrap_or_default();
    status.observed_generation = nic.metadata.generation;
    accepted(&mut status.conditions, &wrong, nic.metadata.generation);
    if nic.status.as_ref() == Some(&status) {
        return Plan::default();
    }
    vec![Write::NicStatus(RdmaNic { status: Some(status), ..nic.clone() })].into()
}
