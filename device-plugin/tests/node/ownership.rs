//! Whose a NIC is, and whether its pod lives: what the kubelet says, and nobody else.

use vhost_rdma_agent_api::{Attach, FaultKind, Pod, Reply, Request};

use crate::world::{BLUE, CONFIG, World, attach, config};

fn named(pod: &str, container: &str, id: &str) -> Attach {
    Attach { device_id: Some(id.to_owned()), ..attach(pod, container) }
}

async fn refused(world: &World, asked: Attach) -> FaultKind {
    match world.ask(Request::Attach(asked)).await {
        Reply::Fault(fault) => fault.kind,
        other => panic!("{other:?}"),
    }
}

async fn given(world: &World, asked: Attach) -> Vec<String> {
    match world.ask(Request::Attach(asked)).await {
        Reply::Nics(nics) => nics.into_iter().map(|nic| nic.id).collect(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_id_that_the_kubelet_does_not_list_is_not_for_whoever_names_it() {
    let world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    // An init container's: promised, and listed by no kubelet.
    world.kubelet.admit("victim");
    world.kubelet.admit("thief");
    assert_eq!(refused(&world, named("thief", "c1", "blue-0")).await, FaultKind::NotFound);
    world.kubelet.note(&[("uid-victim", BLUE, "blue-0")]);
    assert_eq!(refused(&world, named("thief", "c1", "blue-0")).await, FaultKind::Conflict);
    // Not even without a UID, or under the victim's name.
    let anonymous = |pod: &str| Attach {
        pod: Pod { uid: None, ..attach(pod, "c1").pod },
        ..named(pod, "c1", "blue-0")
    };
    assert_eq!(refused(&world, anonymous("victim")).await, FaultKind::NotFound);
    let nobody = Attach { pod: Pod::default(), ..named("thief", "c1", "blue-0") };
    assert_eq!(refused(&world, nobody).await, FaultKind::BadRequest);
    let impostor = Attach {
        pod: Pod { uid: Some("uid-thief".to_owned()), ..attach("victim", "c1").pod },
        ..named("victim", "c1", "blue-0")
    };
    assert_eq!(refused(&world, impostor).await, FaultKind::Conflict);
    assert_eq!(world.state_of("blue-0").await, "granted", "nothing was written down");
    // The pod itself, by its UID, with Multus and without.
    assert_eq!(given(&world, named("victim", "c2", "blue-0")).await, ["blue-0"]);
    assert_eq!(given(&world, attach("victim", "c2")).await, ["blue-0"]);
    assert!(given(&world, attach("thief", "c1")).await.is_empty());
}

#[tokio::test]
async fn a_pod_of_the_same_name_is_another_pod() {
    let world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("web-0", BLUE, "blue-0");
    world.kubelet.note(&[("old-uid", BLUE, "blue-0")]);
    assert_eq!(refused(&world, named("web-0", "c1", "blue-0")).await, FaultKind::Conflict);
    assert!(given(&world, attach("web-0", "c1")).await.is_empty());
}

#[tokio::test]
async fn a_nic_is_attached_to_one_interface_of_its_pod_however_often_it_is_named() {
    let world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    let as_interface = |name: &str| {
        let mut asked = named("p", "c1", "blue-0");
        name.clone_into(&mut asked.attachment.if_name);
        asked
    };
    assert_eq!(given(&world, as_interface("net1")).await, ["blue-0"]);
    assert_eq!(given(&world, as_interface("net1")).await, ["blue-0"]);
    assert_eq!(refused(&world, as_interface("net2")).await, FaultKind::Conflict);
}

#[tokio::test]
async fn what_is_remembered_of_an_attachment_has_a_bound() {
    let world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    let long = serde_json::json!({"name": "x".repeat(1 << 20)});
    let asked = Attach { config: Some(long), ..attach("p", "c1") };
    assert_eq!(refused(&world, asked).await, FaultKind::BadRequest);
    let asked = Attach { netns: "/".repeat(1 << 20), ..attach("p", "c1") };
    assert_eq!(refused(&world, asked).await, FaultKind::BadRequest);
    assert_eq!(world.state_of("blue-0").await, "granted");
}

/// The kubelet was started again with no control plane in reach: it lists nobody, or static pods,
/// and everything runs.
#[tokio::test]
async fn a_kubelet_that_has_not_heard_of_its_pods_takes_nothing_from_them() {
    let mut world = World::new().await;
    world.allocate(&["blue-0", "blue-1"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.kubelet.give("q", BLUE, "blue-1");
    world.kubelet.note(&[("uid-p", BLUE, "blue-0"), ("uid-q", BLUE, "blue-1")]);
    world.settle().await;
    world.kubelet.delete("p");
    world.kubelet.delete("q");
    world.kubelet.restart();
    world.kubelet.admit("static");
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.blue-0", "k8s.blue-1"]);
    // Nor does an agent that was started again at that time, though it knows of an own pod.
    world.own_pod = Some(("ns".to_owned(), "agent".to_owned()));
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.blue-0", "k8s.blue-1"]);
    // Now it has heard of them, and one of them is gone.
    world.kubelet.admit("agent");
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.blue-0"]);
    // The other ends under the eyes of both, which is enough without the agent's own pod.
    world.own_pod = None;
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    world.settle().await;
    world.kubelet.delete("p");
    world.settle().await;
    assert!(world.nics().is_empty());
}

#[tokio::test]
async fn a_pod_whose_nic_is_an_init_containers_keeps_it() {
    let world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.admit("p");
    world.kubelet.note(&[("uid-p", BLUE, "blue-0")]);
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.blue-0"], "whose it is is not known, and it is somebody's");
    assert_eq!(given(&world, attach("p", "c1")).await, ["blue-0"]);
    world.settle().await;
    assert_eq!(world.state_of("blue-0").await, "attaching");
    // The kubelet gives it to nobody any more.
    world.kubelet.delete("p");
    world.kubelet.note(&[]);
    let undone = vhost_rdma_agent_api::Detached {
        attachment: attach("p", "c1").attachment,
        nics: Vec::new(),
    };
    world.ask(Request::Detached(undone)).await;
    world.settle().await;
    assert!(world.nics().is_empty());
}

#[tokio::test]
async fn another_resource_prefix_takes_nothing_from_a_pod() {
    let mut world = World::new().await;
    let env = world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.kubelet.note(&[("uid-p", BLUE, "blue-0")]);
    world.settle().await;
    let other = format!("resource_prefix='other.example'\n{CONFIG}");
    world.agent().reloaded(config(&other)).await;
    let list = world.agent().subscribe("blue").unwrap().borrow().clone();
    let health: Vec<&str> = list.iter().map(|device| device.health.as_str()).collect();
    assert_eq!(health, ["Unhealthy", "Healthy", "Healthy", "Healthy"], "it is offered to nobody");
    let mac = || world.daemon.table().nics["k8s.blue-0"].mac.clone();
    let asked = world.allocate(&["blue-0"]).await.unwrap_err();
    assert!(asked.contains("in use by pod ns/p"), "{asked}");
    assert_eq!(mac(), env["VHOST_RDMA_BLUE_0_MAC"]);
    // Whatever is repeated or made again is what the pod was given.
    let devinfo = world.path("devinfo/vhost-rdma.io-blue-blue-0-device.json");
    std::fs::remove_file(&devinfo).unwrap();
    world.settle().await;
    assert!(devinfo.exists());
    assert_eq!(given(&world, attach("p", "c1")).await, ["blue-0"]);
    world.kill_agent().await;
    world.start_agent(&other).await;
    world.settle().await;
    assert_eq!(world.daemon.table().nics["k8s.blue-0"].mac, env["VHOST_RDMA_BLUE_0_MAC"]);
    let undone = vhost_rdma_agent_api::Detached {
        attachment: attach("p", "c1").attachment,
        nics: Vec::new(),
    };
    world.ask(Request::Detached(undone)).await;
    world.kubelet.delete("p");
    world.settle().await;
    assert!(world.nics().is_empty() && !devinfo.exists());
    world.allocate(&["blue-0"]).await.unwrap();
    assert!(world.path("devinfo/other.example-blue-blue-0-device.json").exists());
}
