//! What was deleted and is there again under its name, which a watch that begins anew shows as a
//! change.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use vhost_rdma_cluster_api::{
    NETWORK_FINALIZER, NicStatus, RdmaNetwork, RdmaNetworkSpec, RdmaNode, RdmaNodeSpec,
    RdmaNodeStatus, RdmaTenant, RdmaTenantSpec, Soft,
};

use super::*;
use crate::core::{Settings, Write, plan};

fn at(second: i64) -> Option<Time> {
    Some(Time(Timestamp::from_second(second).unwrap()))
}

#[test]
fn a_tenant_that_is_made_again_comes_after_those_that_stayed() {
    let mut world = World::new(false);
    let tenant = |world: &mut World, name: &str, second| {
        let mut tenant = RdmaTenant::new(name, RdmaTenantSpec::default());
        tenant.metadata.creation_timestamp = at(second);
        world.apply(Object::Tenant(tenant), Mono::ZERO);
    };
    let namespace = NamespaceInfo { name: "a".to_owned(), ..NamespaceInfo::default() };
    world.apply(Object::Namespace(namespace), Mono::ZERO);
    tenant(&mut world, "first", 1);
    tenant(&mut world, "second", 2);
    assert_eq!(world.index.tenant_of("a"), Some("first"));
    world.take_dirty();
    tenant(&mut world, "first", 3);
    assert_eq!(world.index.tenant_of("a"), Some("second"));
    assert!(world.take_dirty().contains(&Key::Tenant("second".to_owned())));
}

#[test]
fn a_network_that_is_made_again_has_a_deadline_of_its_own() {
    let mut world = World::new(false);
    let info = NodeInfo { name: "n1".to_owned(), ready: true, ..NodeInfo::default() };
    world.apply(Object::Node(info), Mono::ZERO);
    let nic = NicStatus { network: "blue".to_owned(), ..NicStatus::default() };
    let mut node = RdmaNode::new("n1", RdmaNodeSpec::default());
    node.status = Some(RdmaNodeStatus { nics: vec![nic], ..RdmaNodeStatus::default() });
    world.apply(Object::RdmaNode(node), Mono::ZERO);
    let deleted = |uid: &str| {
        let spec = RdmaNetworkSpec { soft: Some(Soft {}), ..RdmaNetworkSpec::default() };
        let mut network = RdmaNetwork::new("blue", spec);
        network.metadata.uid = Some(uid.to_owned());
        network.metadata.finalizers = Some(vec![NETWORK_FINALIZER.to_owned()]);
        network.metadata.deletion_timestamp = at(1);
        Object::Network(network)
    };
    let settings = Settings::default();
    let goes = |world: &World, now: Mono| {
        let plan = plan(world, &Key::Network("blue".to_owned()), now, &settings);
        plan.writes.iter().any(|write| matches!(write, Write::NetworkFinalizers(_)))
    };
    world.apply(deleted("u1"), Mono::ZERO);
    assert!(!goes(&world, settings.network_deadline - Duration::from_secs(1)));
    world.apply(deleted("u2"), settings.network_deadline - Duration::from_secs(1));
    assert!(!goes(&world, settings.network_deadline), "its pods have had a second");
    assert!(goes(&world, settings.network_deadline * 2));
}
