//! What cannot be undone: a tenant writes the configuration that its DEL is made with.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost_rdma_agent_api::{Detached, FaultKind, Reply, Request};

use crate::kubelet::eventually;
use crate::world::{BLUE, CONFIG, World, attach, attachment};

/// A plugin that never undoes anything, and says how often it was called.
fn failing(world: &World) {
    plugin(world, "echo '{\"code\":5,\"msg\":\"broken\"}'; exit 1");
}

pub(crate) fn plugin(world: &World, does: &str) {
    let (plugin, calls) = (world.path("vhost-rdma-cni"), world.path("calls"));
    let script = format!("#!/bin/sh\necho called >> {}\n{does}\n", calls.display());
    std::fs::write(&plugin, script).unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();
}

pub(crate) fn calls(world: &World) -> usize {
    std::fs::read_to_string(world.path("calls")).map_or(0, |text| text.lines().count())
}

/// A pod has `blue-0`, and its attachment is written down.
async fn attached(world: &World) {
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    let reply = world.ask(Request::Attach(attach("p", "c1"))).await;
    assert!(matches!(reply, Reply::Nics(_)), "{reply:?}");
}

fn undone() -> Request {
    Request::Detached(Detached { attachment: attachment("c1", "eth0"), nics: Vec::new() })
}

/// Whether the kubelet may give the ID to a pod.
pub(crate) fn healthy(world: &World, id: &str) -> bool {
    let list = world.agent().subscribe("blue").unwrap().borrow().clone();
    list.iter().any(|device| device.id == id && device.health == "Healthy")
}

#[tokio::test]
async fn what_cannot_be_undone_is_given_to_nobody_and_keeps_nobody_waiting() {
    let world = World::new().await;
    attached(&world).await;
    failing(&world);
    world.kubelet.delete("p");
    world.settle().await;
    assert!(!healthy(&world, "blue-0") && healthy(&world, "blue-1"));
    // The kubelet has not heard of it yet.
    let refused = world.allocate(&["blue-0"]).await.unwrap_err();
    assert!(refused.contains("broken"), "{refused}");
    world.settle().await;
    assert_eq!(calls(&world), 1, "it rests before it is tried again");
    assert!(!healthy(&world, "blue-0"));
    assert_eq!(world.nics(), ["k8s.blue-0"]);
    // The runtime is better off.
    world.ask(undone()).await;
    world.settle().await;
    assert!(healthy(&world, "blue-0") && world.nics().is_empty());
    world.allocate(&["blue-0"]).await.unwrap();
}

#[tokio::test]
async fn a_pod_keeps_its_nic_healthy_whatever_became_of_its_earlier_sandbox() {
    let world = World::new().await;
    attached(&world).await;
    failing(&world);
    let reply = world.ask(Request::Attach(attach("p", "c2"))).await;
    assert!(
        matches!(&reply, Reply::Fault(fault) if fault.kind == FaultKind::TryAgain),
        "{reply:?}"
    );
    world.settle().await;
    assert!(healthy(&world, "blue-0"));
    // It is tried again whenever the runtime tries.
    world.ask(Request::Attach(attach("p", "c2"))).await;
    assert_eq!(calls(&world), 2);
}

/// A helper that asks and asks, and whose calls come to nothing.
#[tokio::test]
async fn a_helper_that_gets_nowhere_is_not_waited_for() {
    let mut world = World::new().await;
    world.undo = vhost_rdma_agent::agent::Undo::ByHelper;
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    attached(&world).await;
    world.kubelet.delete("p");
    world.daemon.set_session("k8s.blue-0", vhost_rdma_proto::v1::Session::Absent);
    let agent = Arc::clone(world.agent());
    let helper = tokio::spawn(async move {
        loop {
            agent.answer(Request::Forgotten).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let began = Instant::now();
    let refused = world.allocate(&["blue-0"]).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10), "{refused} after {:?}", began.elapsed());
    world.settle().await;
    assert!(!healthy(&world, "blue-0"));
    helper.abort();
    let _ = helper.await;
}

#[tokio::test]
async fn it_is_tried_again_and_is_free_as_soon_as_it_is_undone() {
    let mut world = World::new().await;
    world.rest = Duration::ZERO;
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    attached(&world).await;
    failing(&world);
    world.kubelet.delete("p");
    world.settle().await;
    let before = calls(&world);
    assert!(before > 1 && !healthy(&world, "blue-0"));
    plugin(&world, "while [ ! -e \"$0.done\" ]; do sleep 0.01; done");
    let agent = Arc::clone(world.agent());
    let round = tokio::spawn(async move { agent.reconcile().await });
    eventually("the plugin is called", || (calls(&world) > before).then_some(())).await;
    world.ask(undone()).await;
    std::fs::write(world.path("vhost-rdma-cni.done"), "").unwrap();
    round.await.unwrap();
    world.settle().await;
    assert!(healthy(&world, "blue-0") && world.nics().is_empty());
}
