//! An agent that dies at any step, and a daemon that fails at any call: nothing is lost, nothing is
//! given twice.

use crate::world::{BLUE, CONFIG, World};

/// The daemon fails from its n-th change on, in the middle of an allocation; then the agent is
/// killed, and all comes back.
#[tokio::test]
async fn whatever_fails_in_an_allocation_leaves_nothing_behind() {
    for fuse in 0..6 {
        let mut world = World::new().await;
        world.daemon.table().fuse = Some(fuse);
        let answered = world.allocate(&["blue-0", "blue-1"]).await;
        world.kill_agent().await;
        world.daemon.table().fuse = None;
        world.start_agent(CONFIG).await;
        if answered.is_ok() {
            // The kubelet has the answer, so the pod is listed.
            world.kubelet.give("p", BLUE, "blue-0");
            world.kubelet.give("p", BLUE, "blue-1");
        }
        world.settle().await;
        let expected: Vec<&str> =
            if answered.is_ok() { vec!["k8s.blue-0", "k8s.blue-1"] } else { Vec::new() };
        assert_eq!(world.nics(), expected, "fuse {fuse}: {answered:?}");
        let status = world.agent().status().await;
        assert_eq!(status.pools[0].granted as usize, expected.len(), "fuse {fuse}");
        // And everything can be had again.
        world.kubelet.delete("p");
        world.settle().await;
        assert!(
            world.allocate(&["blue-0", "blue-1", "blue-2", "blue-3"]).await.is_ok(),
            "fuse {fuse}"
        );
    }
}

/// Killed at any byte of the ledger: what was answered holds.
#[tokio::test]
async fn a_ledger_that_is_cut_after_an_answer_is_made_whole_from_the_kubelet() {
    let mut world = World::new().await;
    let env = world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    world.kill_agent().await;
    // The disk lied about fsync, or somebody moved the file away: the worst case.
    std::fs::remove_file(world.path("state/journal")).unwrap();
    world.start_agent(CONFIG).await;
    world.settle().await;
    assert_eq!(world.state_of("blue-0").await, "granted");
    assert_eq!(world.daemon.table().nics["k8s.blue-0"].mac, env["VHOST_RDMA_BLUE_0_MAC"]);
    // The pod still has it: nobody else gets it, and the same container gets the same.
    assert_eq!(world.allocate(&["blue-0"]).await.unwrap(), env);
}

#[tokio::test]
async fn a_running_pod_keeps_its_nic_when_the_agent_is_killed() {
    let mut world = World::new().await;
    let env = world.allocate(&["blue-1"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-1");
    for _ in 0..3 {
        world.kill_agent().await;
        world.start_agent(CONFIG).await;
        world.settle().await;
        assert_eq!(world.allocate(&["blue-1"]).await.unwrap(), env);
    }
}

#[tokio::test]
async fn a_kubelet_that_dies_before_it_notes_the_answer_loses_nothing() {
    let mut world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.restart();
    // It asks again, for another ID; the first was never used and goes back.
    world.allocate(&["blue-1"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-1");
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.blue-1"]);
}

#[tokio::test]
async fn leftovers_of_a_lost_ledger_are_removed_and_other_peoples_nics_are_not() {
    use vhost_rdma_agent::daemon::Daemon as _;
    use vhost_rdma_proto::v1::AddNicRequest;

    let world = World::new().await;
    for name in ["k8s.blue-0", "vm1"] {
        let request = AddNicRequest { name: name.to_owned(), ..AddNicRequest::default() };
        world.daemon.add_nic(request).await.unwrap();
    }
    world.settle().await;
    assert_eq!(world.nics(), ["vm1"]);
}
