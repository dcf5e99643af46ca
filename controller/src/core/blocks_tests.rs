//! Ranges of unlike sizes: whatever an administrator changes, no address is two nodes'.

use vhost_rdma_cluster_api::{
    Cidr, Ipam, NodeNetworkStatus, PolicyPool, RdmaIPBlock, RdmaIPBlockSpec, RdmaNetwork,
    RdmaNetworkSpec, RdmaNic, RdmaNicSpec, RdmaNicStatus, RdmaNode, RdmaNodePolicy,
    RdmaNodePolicySpec, RdmaNodeSpec, RdmaNodeStatus, Soft, block_name,
};

use super::lacking;
use crate::core::{Key, Kind, Mono, NodeInfo, Object, Settings, World, Write, plan};

fn range(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn network(cidrs: &[&str], named: &[&str], block_size: u32) -> RdmaNetwork {
    let ranges = |texts: &[&str]| texts.iter().map(|text| range(text)).collect();
    let ipam = Ipam { cidrs: ranges(cidrs), named: ranges(named), block_size };
    let spec = RdmaNetworkSpec { soft: Some(Soft {}), ipam: Some(ipam), ..Default::default() };
    let mut network = RdmaNetwork::new("blue", spec);
    network.metadata.uid = Some("u".to_owned());
    network
}

fn block(cidr: Cidr, node: &str, releasing: bool) -> RdmaIPBlock {
    let spec = RdmaIPBlockSpec {
        network: "blue".to_owned(),
        network_uid: "u".to_owned(),
        cidr,
        node: node.to_owned(),
        releasing,
    };
    RdmaIPBlock::new(&block_name("blue", &cidr), spec)
}

fn apply(world: &mut World, object: Object) {
    world.apply(object, Mono::ZERO);
}

fn world(network: RdmaNetwork, blocks: &[(&str, &str)]) -> World {
    let mut world = World::new(false);
    apply(&mut world, Object::Network(network));
    for (cidr, node) in blocks {
        apply(&mut world, Object::Block(block(range(cidr), node, false)));
    }
    world
}

/// What a node is handed now.
fn handed(world: &mut World, node: &str) -> Option<Cidr> {
    let network = world.networks["blue"].clone();
    let writes = lacking(world, node, "blue", &network);
    let Some(Write::CreateBlock(block)) = writes.into_iter().next() else { return None };
    let cidr = block.spec.cidr;
    apply(world, Object::Block(block));
    Some(cidr)
}

/// Hands out to ever more nodes until nothing is left; how much there was.
fn hand_out(world: &mut World) -> usize {
    (0..).take_while(|n| handed(world, &format!("node-{n}")).is_some()).count()
}

fn apart(world: &World) {
    let all: Vec<&Cidr> = world.blocks.values().map(|block| &block.spec.cidr).collect();
    for (n, a) in all.iter().enumerate() {
        let twice = all[..n].iter().find(|b| a.overlaps(b));
        assert!(twice.is_none(), "{a} and {twice:?}");
    }
}

#[test]
fn blocks_of_another_size_leave_what_a_node_has_alone() {
    for (cidr, before, size, left) in [
        ("10.9.0.0/24", "10.9.0.64/26", 16, 12),
        ("10.9.0.0/24", "10.9.0.80/28", 64, 3),
        // Ranges that grow and shrink make blocks of other sizes too.
        ("10.9.0.0/24", "10.9.0.0/28", 64, 3),
        ("10.9.0.0/28", "10.9.0.0/24", 64, 0),
        ("fd00::/120", "fd00::40/122", 16, 12),
    ] {
        let mut world = world(network(&[cidr], &[], size), &[(before, "old")]);
        assert_eq!(hand_out(&mut world), left, "{cidr} {before} {size}");
        apart(&world);
    }
}

#[test]
fn a_block_counts_for_as_many_addresses_as_it_has() {
    let mut world = world(network(&["10.9.0.0/24"], &[], 16), &[("10.9.0.64/26", "n1")]);
    let mut uses = |addresses: u32| {
        let of = NodeNetworkStatus { uid: "u".to_owned(), addresses, ..Default::default() };
        let mut node = RdmaNode::new("n1", RdmaNodeSpec::default());
        node.status = Some(RdmaNodeStatus { networks: vec![of], ..Default::default() });
        apply(&mut world, Object::RdmaNode(node));
        lacking(&world, "n1", "blue", &world.networks["blue"]).len()
    };
    assert_eq!([uses(16), uses(63), uses(64)], [0, 0, 1]);
}

#[test]
fn whoever_waits_hears_of_a_large_block_that_goes() {
    let mut world = world(
        network(&["10.9.0.0/24"], &[], 16),
        &[("10.9.0.0/25", "n1"), ("10.9.0.128/25", "n2")],
    );
    let mut waiting = RdmaNode::new("n3", RdmaNodeSpec::default());
    waiting.spec.networks =
        vec![vhost_rdma_cluster_api::NodeNetwork { name: "blue".to_owned(), ..Default::default() }];
    apply(&mut world, Object::RdmaNode(waiting));
    world.take_dirty();
    assert_eq!(handed(&mut world, "n3"), None);
    world.remove(Kind::Block, &block_name("blue", &range("10.9.0.128/25")), Mono::ZERO);
    assert!(world.take_dirty().contains(&Key::Node("n3".to_owned())));
    assert!(handed(&mut world, "n3").is_some());
}

/// A named NIC with an address, of a pod or not.
fn named(address: &str, pod: Option<&str>) -> Object {
    let spec = RdmaNicSpec {
        network: "blue".to_owned(),
        address: Some(address.to_owned()),
        ..RdmaNicSpec::default()
    };
    let mut nic = RdmaNic::new("db", spec);
    nic.metadata.namespace = Some("a".to_owned());
    nic.status =
        Some(RdmaNicStatus { pod_uid: pod.map(str::to_owned), ..RdmaNicStatus::default() });
    Object::Nic(nic)
}

#[test]
fn a_range_that_is_no_longer_of_named_nics_waits_for_their_pods() {
    let mut world = world(network(&["10.9.0.0/26"], &[], 16), &[]);
    apply(&mut world, named("10.9.0.17", Some("pod")));
    assert_eq!(hand_out(&mut world), 3);
    let mut waiting = RdmaNode::new("n9", RdmaNodeSpec::default());
    waiting.spec.networks =
        vec![vhost_rdma_cluster_api::NodeNetwork { name: "blue".to_owned(), ..Default::default() }];
    apply(&mut world, Object::RdmaNode(waiting));
    world.take_dirty();
    apply(&mut world, named("10.9.0.17", None));
    assert!(world.take_dirty().contains(&Key::Node("n9".to_owned())));
    assert_eq!(handed(&mut world, "n9"), Some(range("10.9.0.16/28")));
}

#[test]
fn nothing_is_handed_out_of_ranges_of_named_nics() {
    let mut world = world(network(&["10.9.0.0/26"], &["10.9.0.32/28"], 16), &[]);
    assert_eq!(hand_out(&mut world), 3);
    assert!(!world.blocks.contains_key("blue.10.9.0.32-28"));
}

/// Somebody deletes a node's object, and the controller makes it again. The agent goes by its last
/// word meanwhile, and so do its pods with their addresses.
#[test]
fn a_node_whose_object_is_deleted_keeps_its_blocks() {
    let mut world = world(network(&["10.9.0.0/24"], &[], 16), &[("10.9.0.16/28", "n1")]);
    let pool = PolicyPool {
        name: "blue".to_owned(),
        network: "blue".to_owned(),
        count: 1,
        ..PolicyPool::default()
    };
    let spec = RdmaNodePolicySpec { pools: vec![pool], ..RdmaNodePolicySpec::default() };
    apply(&mut world, Object::Policy(RdmaNodePolicy::new("p", spec)));
    let info = NodeInfo { name: "n1".to_owned(), ready: true, ..NodeInfo::default() };
    apply(&mut world, Object::Node(info));
    apply(&mut world, Object::RdmaNode(RdmaNode::new("n1", RdmaNodeSpec::default())));
    let name = block_name("blue", &range("10.9.0.16/28"));
    let taken_back = |world: &World| {
        let plan = plan(world, &Key::Block(name.clone()), Mono::ZERO, &Settings::default());
        plan.writes.iter().any(|write| matches!(write, Write::ReplaceBlock(_)))
    };
    assert!(!taken_back(&world));
    world.remove(Kind::RdmaNode, "n1", Mono::ZERO);
    assert!(!taken_back(&world), "the object comes back");
    // One that somebody's finalizer keeps for a while is as good as deleted.
    let mut leaving = RdmaNode::new("n1", RdmaNodeSpec::default());
    leaving.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
        ));
    apply(&mut world, Object::RdmaNode(leaving));
    assert!(!taken_back(&world), "it comes back then, too");
    world.remove(Kind::RdmaNode, "n1", Mono::ZERO);
    world.remove(Kind::Policy, "p", Mono::ZERO);
    assert!(taken_back(&world), "nothing is offered there any more");
}
