//! Network attachment definitions: what Multus looks a pool up by.
//!
//! One for each pool that a policy offers, since Multus needs the resource's name and that is the
//! pool's. They are in the controller's namespace; pods name them as `NAMESPACE/POOL`, and who may
//! have a NIC is decided on the node. A definition of that name that is not ours is left alone.

use std::collections::BTreeMap;

use vhost_rdma_cluster_api::GROUP;

use super::node::usable;
use super::write::{Plan, Write};
use super::{Attachment, World};

/// Why there are no definitions: the cluster does not know the kind.
pub const NO_ATTACHMENTS: &str =
    "the cluster has no NetworkAttachmentDefinition (Multus is not installed): none are made";

/// What a pool's definition should be.
fn wanted(pool: &str, network: &str) -> Attachment {
    // Sorted: the same text at each look.
    let config: BTreeMap<&str, serde_json::Value> = BTreeMap::from([
        ("cniVersion", "1.0.0".into()),
        ("name", network.into()),
        ("type", "vhost-rdma-cni".into()),
        ("capabilities", serde_json::json!({"CNIDeviceInfoFile": true, "ips": true, "mac": true})),
    ]);
    Attachment {
        name: pool.to_owned(),
        config: serde_json::json!(config).to_string(),
        resource: format!("{GROUP}/{pool}"),
        managed: true,
        uid: String::new(),
    }
}

pub(super) fn plan(world: &World, pool: &str) -> Plan {
    if !world.has_attachments {
        return Plan::default();
    }
    let found = world.attachments.get(pool);
    let network = world
        .policies_with_pool(pool)
        .filter_map(|policy| world.policies[policy].spec.pools.iter().find(|p| p.name == pool))
        .find(|pool| world.networks.get(&pool.network).is_some_and(usable))
        .map(|pool| &pool.network);
    match (found, network) {
        (Some(found), _) if !found.managed => Plan::default(),
        (None, None) => Plan::default(),
        (Some(found), None) => vec![Write::DeleteAttachment(found.clone())].into(),
        (found, Some(name)) => {
            let wanted = wanted(pool, name);
            let same =
                found.is_some_and(|f| f.config == wanted.config && f.resource == wanted.resource);
            if same { Plan::default() } else { vec![Write::ApplyAttachment(wanted)].into() }
        }
    }
}
