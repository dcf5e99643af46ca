//! What of a node's object concerns its pods: who is moved, and when the object may go.

use vhost_rdma_cluster_api::{
    NicStatus, NodeNetworkStatus, PolicyPool, RdmaNetwork, RdmaNetworkSpec, RdmaNetworkStatus,
    RdmaNode, RdmaNodePolicy, RdmaNodePolicySpec, RdmaNodePolicyStatus, RdmaNodeSpec,
    RdmaNodeStatus, Rollout, Soft,
};

use super::render;
use crate::core::{Claim, Key, Kind, Mono, NodeInfo, Object, Settings, World, Write, plan};

fn apply(world: &mut World, object: Object) {
    world.apply(object, Mono::ZERO);
}

fn policy(name: &str, rolling: &[&str]) -> RdmaNodePolicy {
    let pool = PolicyPool {
        name: name.to_owned(),
        network: "blue".to_owned(),
        count: 1,
        ..PolicyPool::default()
    };
    let evict = !rolling.is_empty();
    let spec = RdmaNodePolicySpec {
        pools: vec![pool],
        rollout: Rollout { evict, max_unavailable: None },
        ..RdmaNodePolicySpec::default()
    };
    let mut policy = RdmaNodePolicy::new(name, spec);
    let rolling = rolling.iter().map(|node| (*node).to_owned()).collect();
    policy.status = Some(RdmaNodePolicyStatus { rolling, ..RdmaNodePolicyStatus::default() });
    policy
}

/// A node with a network that offers pools of these policies.
fn world(policies: &[RdmaNodePolicy]) -> World {
    let mut world = World::new(false);
    let spec = RdmaNetworkSpec { soft: Some(Soft {}), ..RdmaNetworkSpec::default() };
    let mut network = RdmaNetwork::new("blue", spec);
    network.status = Some(RdmaNetworkStatus { vni: Some(7), ..RdmaNetworkStatus::default() });
    network.metadata.uid = Some("u".to_owned());
    apply(&mut world, Object::Network(network));
    for policy in policies {
        apply(&mut world, Object::Policy(policy.clone()));
    }
    let info = NodeInfo { name: "n1".to_owned(), ready: true, ..NodeInfo::default() };
    apply(&mut world, Object::Node(info));
    world
}

/// A NIC of a pool that was made as the pool is no longer.
fn outdated(pool: &str) -> NicStatus {
    NicStatus {
        id: format!("{pool}-0"),
        pool: pool.to_owned(),
        revision: "of another time".to_owned(),
        ..NicStatus::default()
    }
}

#[test]
fn a_rollout_moves_pods_of_its_own_policy_only() {
    let mut world = world(&[policy("moves", &["n1"]), policy("stays", &[])]);
    let mut node = RdmaNode::new("n1", render(&world, "n1").unwrap());
    let nics = ["moves", "stays", "gone"].map(outdated).to_vec();
    node.status = Some(RdmaNodeStatus { nics, ..RdmaNodeStatus::default() });
    apply(&mut world, Object::RdmaNode(node));
    // Whose a pool was that is gone nobody knows any more.
    assert_eq!(render(&world, "n1").unwrap().cordon, ["gone-0", "moves-0"]);
    // Its turn on this node comes, and with it that of its pods.
    apply(&mut world, Object::Policy(policy("stays", &["n1"])));
    assert_eq!(render(&world, "n1").unwrap().cordon, ["gone-0", "moves-0", "stays-0"]);
}

/// Its daemon may have a network without a NIC that was admitted: the number stays the network's.
#[test]
fn the_object_of_a_node_that_offers_nothing_stays_while_its_daemon_has_a_network() {
    let mut world = world(&[]);
    let network = NodeNetworkStatus { name: "blue".to_owned(), uid: "u".to_owned(), addresses: 0 };
    let mut node = RdmaNode::new("n1", RdmaNodeSpec::default());
    node.metadata.generation = Some(1);
    node.status = Some(RdmaNodeStatus {
        observed_generation: Some(1),
        networks: vec![network],
        ..RdmaNodeStatus::default()
    });
    apply(&mut world, Object::Claim(Claim::new(7, "blue", "u")));
    world.remove(Kind::Network, "blue", Mono::ZERO);
    let does = |world: &World, key: Key| {
        let plan = plan(world, &key, Mono::ZERO, &Settings::default());
        plan.writes.len()
    };
    apply(&mut world, Object::RdmaNode(node.clone()));
    let (of_node, of_claim) = (Key::Node("n1".to_owned()), Key::Claim(7));
    assert_eq!(does(&world, of_claim.clone()), 0, "the node has the network");
    assert_eq!(does(&world, of_node.clone()), 0, "so its object says for as long as it has it");
    node.status.as_mut().unwrap().networks.clear();
    apply(&mut world, Object::RdmaNode(node));
    assert_eq!((does(&world, of_claim), does(&world, of_node)), (1, 1));
}

/// An agent is trusted with its own node, and says itself which pods have its NICs: the API server
/// is asked whether they are there.
#[test]
fn an_eviction_names_the_node_that_asks_for_it() {
    let mut world = world(&[policy("moves", &["n1"])]);
    let mut spec = render(&world, "n1").unwrap();
    spec.cordon = vec!["moves-0".to_owned()];
    let mut node = RdmaNode::new("n1", spec);
    let ready = vhost_rdma_cluster_api::Condition::new("Ready", true, "Serving", "");
    node.status = Some(RdmaNodeStatus {
        nics: vec![outdated("moves")],
        conditions: vec![ready],
        ..RdmaNodeStatus::default()
    });
    apply(&mut world, Object::RdmaNode(node));
    let plan = plan(&world, &Key::Node("n1".to_owned()), Mono::ZERO, &Settings::default());
    assert!(
        matches!(&plan.writes[..], [Write::Evict { node, .. }] if node == "n1"),
        "{:?}",
        plan.writes
    );
}
