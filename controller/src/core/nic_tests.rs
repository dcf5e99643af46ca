//! Whose an identity is.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use vhost_rdma_cluster_api::{
    Ipam, LabelSelector, RdmaIPBlock, RdmaIPBlockSpec, RdmaNetwork, RdmaNetworkSpec, RdmaNic,
    RdmaNicSpec, RdmaTenant, RdmaTenantSpec, Soft,
};

use crate::core::{Key, Kind, Mono, NamespaceInfo, Object, Settings, World, Write, plan};

fn text(name: &str) -> String {
    name.to_owned()
}

/// Those of the namespaces with the label `team=NAME`, who may use `networks`.
fn tenant(name: &str, networks: &[&str]) -> Object {
    let labels = [(text("team"), text(name))].into();
    let selector = LabelSelector { match_labels: labels, ..LabelSelector::default() };
    let networks = networks.iter().copied().map(text).collect();
    let spec = RdmaTenantSpec { namespace_selector: selector, networks, ..Default::default() };
    Object::Tenant(RdmaTenant::new(name, spec))
}

/// The namespace of this name, of the tenant that is called as it.
fn namespace(name: &str) -> Object {
    let labels = [(text("team"), text(name))].into();
    Object::Namespace(NamespaceInfo { name: text(name), labels })
}

fn network(named: &str) -> Object {
    let ipam = Ipam {
        cidrs: vec!["10.1.0.0/24".parse().unwrap()],
        named: vec![named.parse().unwrap()],
        block_size: 16,
    };
    let spec = RdmaNetworkSpec { soft: Some(Soft {}), ipam: Some(ipam), ..Default::default() };
    Object::Network(RdmaNetwork::new("blue", spec))
}

/// One that wants 10.0.0.5, made at this second.
fn nic(namespace: &str, second: i64) -> RdmaNic {
    let spec = RdmaNicSpec {
        network: text("blue"),
        address: Some(text("10.0.0.5")),
        ..RdmaNicSpec::default()
    };
    let mut nic = RdmaNic::new("db", spec);
    nic.metadata.namespace = Some(text(namespace));
    nic.metadata.uid = Some(text(namespace));
    nic.metadata.generation = Some(1);
    nic.metadata.creation_timestamp =
        Some(Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap()));
    nic
}

/// Does what is planned for NICs until nothing is.
fn settle(world: &mut World) {
    for _ in 0..16 {
        let dirty = world.take_dirty();
        let mut quiet = true;
        for key in dirty.iter().filter(|key| matches!(key, Key::Nic(..))) {
            for write in plan(world, key, Mono::ZERO, &Settings::default()).writes {
                let Write::NicStatus(nic) = write else { panic!("{write:?}") };
                world.apply(Object::Nic(nic), Mono::ZERO);
                quiet = false;
            }
        }
        if quiet {
            return;
        }
    }
    panic!("it never settles");
}

/// What is said of a namespace's NIC; nothing if it is accepted.
fn refusal(world: &World, namespace: &str) -> String {
    let nic = &world.nics_named[&(text(namespace), text("db"))];
    let said = nic.status.iter().flat_map(|status| &status.conditions).next().unwrap();
    assert_eq!(said.holds(), said.message.is_empty());
    said.message.clone()
}

/// The tenant `b` has the network, the tenant `c` has it too; namespaces are called as tenants.
fn world() -> World {
    let mut world = World::new(false);
    for object in [
        tenant("b", &["blue"]),
        tenant("c", &["blue"]),
        namespace("aaa"),
        namespace("b"),
        namespace("c"),
        network("10.0.0.0/24"),
    ] {
        world.apply(object, Mono::ZERO);
    }
    world
}

fn apply(world: &mut World, object: Object) {
    world.apply(object, Mono::ZERO);
    settle(world);
}

#[test]
fn who_may_not_have_a_nic_keeps_no_identity_from_who_may() {
    let mut world = world();
    apply(&mut world, Object::Nic(nic("aaa", 1)));
    apply(&mut world, Object::Nic(nic("b", 2)));
    assert_eq!(refusal(&world, "b"), "");
    let why = refusal(&world, "aaa");
    assert!(why.contains("no tenant"), "{why}");
    assert!(!why.contains("10.0.0.5"), "what others have is not told to strangers: {why}");
}

#[test]
fn what_is_accepted_is_not_lost_to_an_older_one_that_becomes_fit() {
    let mut world = world();
    apply(&mut world, Object::Nic(nic("aaa", 1)));
    apply(&mut world, Object::Nic(nic("b", 2)));
    apply(&mut world, tenant("aaa", &["red"]));
    assert!(refusal(&world, "aaa").contains("not one of the tenant's"));
    apply(&mut world, tenant("aaa", &["blue"]));
    assert_eq!(refusal(&world, "b"), "");
    assert_eq!(refusal(&world, "aaa"), "another NIC of the network has 10.0.0.5");
    // It is the next, when that one is gone.
    world.remove(Kind::Nic, "b/db", Mono::ZERO);
    settle(&mut world);
    assert_eq!(refusal(&world, "aaa"), "");
}

#[test]
fn whoever_is_no_longer_fit_makes_room_and_does_not_take_it_back() {
    let mut world = world();
    apply(&mut world, Object::Nic(nic("b", 1)));
    apply(&mut world, Object::Nic(nic("c", 2)));
    assert_eq!((refusal(&world, "b").as_str(), refusal(&world, "c").is_empty()), ("", false));
    // By its tenant, its namespace, the range of the network: each makes the other's way free.
    apply(&mut world, tenant("b", &[]));
    assert_eq!((refusal(&world, "b").is_empty(), refusal(&world, "c").as_str()), (false, ""));
    apply(&mut world, tenant("b", &["blue"]));
    assert_eq!((refusal(&world, "b").is_empty(), refusal(&world, "c").as_str()), (false, ""));
    world.remove(Kind::Namespace, "c", Mono::ZERO);
    settle(&mut world);
    assert_eq!((refusal(&world, "b").as_str(), refusal(&world, "c").is_empty()), ("", false));
    apply(&mut world, namespace("c"));
    assert_eq!((refusal(&world, "b").as_str(), refusal(&world, "c").is_empty()), ("", false));
    apply(&mut world, network("10.0.9.0/24"));
    assert!(refusal(&world, "b").contains("no range") && refusal(&world, "c").contains("no range"));
    apply(&mut world, network("10.0.0.0/24"));
    assert_eq!((refusal(&world, "b").as_str(), refusal(&world, "c").is_empty()), ("", false));
}

#[test]
fn a_pods_nic_keeps_its_identity_whatever_becomes_of_its_tenant() {
    let mut world = world();
    apply(&mut world, Object::Nic(nic("b", 2)));
    let mut had = world.nics_named[&(text("b"), text("db"))].clone();
    let status = had.status.get_or_insert_default();
    (status.node, status.pod_uid) = (Some(text("one")), Some(text("pod")));
    world.apply(Object::Nic(had.clone()), Mono::ZERO);
    world.take_dirty();
    apply(&mut world, tenant("b", &[]));
    apply(&mut world, Object::Nic(nic("c", 1)));
    assert_eq!(refusal(&world, "c"), "another NIC of the network has 10.0.0.5");
    // The pod is gone.
    had.status = None;
    apply(&mut world, Object::Nic(had));
    assert_eq!(refusal(&world, "c"), "");
}

/// A range was one of blocks and is one of named NICs now: a node gives out of it until its pods
/// have ended.
#[test]
fn an_address_in_a_block_that_is_being_given_back_is_not_a_nics_yet() {
    let name = "blue.10.0.0.0-28";
    let block = || {
        let cidr = "10.0.0.0/28".parse().unwrap();
        let spec = RdmaIPBlockSpec {
            network: text("blue"),
            network_uid: text("u"),
            cidr,
            node: text("one"),
            releasing: true,
        };
        Object::Block(RdmaIPBlock::new(name, spec))
    };
    let mut world = world();
    world.apply(block(), Mono::ZERO);
    apply(&mut world, Object::Nic(nic("b", 1)));
    let why = refusal(&world, "b");
    assert!(why.contains("10.0.0.0/28"), "{why}");
    apply(&mut world, Object::Nic(nic("aaa", 1)));
    let why = refusal(&world, "aaa");
    assert!(!why.contains("block"), "what others have is not told to strangers: {why}");
    world.remove(Kind::Block, name, Mono::ZERO);
    settle(&mut world);
    assert_eq!(refusal(&world, "b"), "");
    // The block is heard of later than the NIC.
    world.apply(block(), Mono::ZERO);
    settle(&mut world);
    assert!(refusal(&world, "b").contains("10.0.0.0/28"));
}
