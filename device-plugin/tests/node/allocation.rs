//! Who gets what, and who does not.

use std::sync::Arc;

use vhost_rdma_agent::host::{Function, Parent};
use vhost_rdma_agent_api::{Attached, Detached, Reply, Request};
use vhost_rdma_proto::v1::Session;

use crate::daemon::Late;
use crate::world::{BLUE, CONFIG, World, attach, attachment, config};

#[tokio::test]
async fn an_allocation_that_is_repeated_gives_the_same_nic() {
    let world = World::new().await;
    let first = world.allocate(&["blue-0"]).await.unwrap();
    assert_eq!(world.allocate(&["blue-0"]).await.unwrap(), first);
    // The container that asked runs now, and its init container's ID is asked for again.
    world.daemon.set_session("k8s.blue-0", Session::DriverReady);
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    assert_eq!(world.allocate(&["blue-0"]).await.unwrap(), first);
    assert_eq!(world.nics(), ["k8s.blue-0"]);
}

#[tokio::test]
async fn an_id_goes_to_another_pod_only_torn_down_and_never_from_a_living_one() {
    let world = World::new().await;
    let first = world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.daemon.set_session("k8s.blue-0", Session::Connected);
    world.settle().await;
    // The kubelet forgot the pod, the VMM lives.
    world.kubelet.delete("p");
    world.settle().await;
    let refused = world.allocate(&["blue-0"]).await.unwrap_err();
    assert!(refused.contains("in use by pod ns/p") && refused.contains("VMM"), "{refused}");
    assert_eq!(world.nics(), ["k8s.blue-0"]);
    world.daemon.set_session("k8s.blue-0", Session::Absent);
    let second = world.allocate(&["blue-0"]).await.unwrap();
    assert_ne!(first["VHOST_RDMA_BLUE_0_MAC"], second["VHOST_RDMA_BLUE_0_MAC"]);
}

#[tokio::test]
async fn without_the_kubelets_word_a_used_id_is_given_to_nobody() {
    let mut world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.daemon.set_session("k8s.blue-0", Session::Connected);
    world.settle().await;
    world.daemon.set_session("k8s.blue-0", Session::Absent);
    world.kubelet.kill();
    assert!(world.allocate(&["blue-0"]).await.unwrap_err().contains("pod-resources"));
    // A free one needs no word.
    world.allocate(&["blue-1"]).await.unwrap();
}

#[tokio::test]
async fn what_a_pod_left_is_taken_back_and_nothing_remains() {
    let world = World::new().await;
    world.allocate(&["blue-0", "blue-1"]).await.unwrap();
    for id in ["blue-0", "blue-1"] {
        world.kubelet.give("p", BLUE, id);
    }
    world.settle().await;
    assert_eq!(world.state_of("blue-1").await, "granted");
    world.kubelet.delete("p");
    world.settle().await;
    assert_eq!(world.state_of("blue-0").await, "free");
    assert!(world.nics().is_empty());
    assert_eq!(std::fs::read_dir(world.path("nics")).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(world.path("devinfo")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_daemon_that_loses_its_state_gets_the_same_nics_again() {
    let world = World::new().await;
    let env = world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    {
        let mut table = world.daemon.table();
        table.nics.clear();
        table.runs += 1;
    }
    world.settle().await;
    assert_eq!(world.daemon.table().nics["k8s.blue-0"].mac, env["VHOST_RDMA_BLUE_0_MAC"]);
}

#[tokio::test]
async fn files_that_a_reboot_took_are_written_again() {
    let mut world = World::new().await;
    world.kill_agent().await;
    world.start_agent(&CONFIG.replace("classic", "cdi")).await;
    world.agent().allocate("blue", &[vec!["blue-0".to_owned()]]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    let files = [
        "cdi/vhost-rdma.io-nic_blue-0.json",
        "devinfo/vhost-rdma.io-blue-blue-0-device.json",
        "nics/k8s.blue-0/nic.json",
    ];
    for file in files {
        let before = std::fs::read(world.path(file)).unwrap();
        std::fs::remove_file(world.path(file)).unwrap();
        world.settle().await;
        assert_eq!(std::fs::read(world.path(file)).unwrap(), before, "{file}");
    }
}

#[tokio::test]
async fn a_vmm_that_does_not_come_back_to_a_new_daemon_makes_its_id_unhealthy() {
    let world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.daemon.set_session("k8s.blue-0", Session::DriverReady);
    world.settle().await;
    world.daemon.restart();
    world.settle().await;
    let sick = |status: &vhost_rdma_agent_api::Status| {
        status
            .devices
            .iter()
            .filter(|device| !device.healthy)
            .map(|device| device.id.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(sick(&world.agent().status().await), ["blue-0"]);
    // One that can connect again is well again.
    world.daemon.set_session("k8s.blue-0", Session::DriverReady);
    world.settle().await;
    assert!(sick(&world.agent().status().await).is_empty());
    // And a pod that is made again gets its turn.
    world.daemon.restart();
    world.settle().await;
    world.kubelet.delete("p");
    world.settle().await;
    assert!(sick(&world.agent().status().await).is_empty());
}

#[tokio::test]
async fn a_vmm_that_came_and_lost_the_daemon_unseen_makes_its_id_unhealthy() {
    let mut world = World::new().await;
    world.allocate(&["blue-0", "blue-1"]).await.unwrap();
    for id in ["blue-0", "blue-1"] {
        world.kubelet.give("p", BLUE, id);
    }
    world.settle().await;
    // No look fell between its connection and the daemon's end, and then the agent ended too: only
    // the daemon knows.
    world.kill_agent().await;
    world.daemon.restart();
    world.daemon.table().nics.get_mut("k8s.blue-0").unwrap().interrupted = true;
    world.start_agent(CONFIG).await;
    world.settle().await;
    let status = world.agent().status().await;
    let sick: Vec<_> = status.devices.iter().filter(|device| !device.healthy).collect();
    assert_eq!(sick.len(), 1, "{sick:?}");
    assert!(
        sick[0].id == "blue-0" && sick[0].reason.as_ref().unwrap().contains("recreate the pod")
    );
}

#[tokio::test]
async fn a_look_that_is_older_than_an_allocation_makes_nothing_again() {
    use std::os::unix::fs::MetadataExt as _;
    use std::sync::Arc;

    let world = World::new().await;
    let late = Arc::new(Late::default());
    world.daemon.table().late = Some(Arc::clone(&late));
    let agent = Arc::clone(world.agent());
    let round = tokio::spawn(async move { agent.reconcile().await });
    late.asked.notified().await;
    world.allocate(&["blue-0"]).await.unwrap();
    // The container has this directory and this file mounted by now.
    let seen = || {
        let file = std::fs::metadata(world.path("nics/k8s.blue-0/nic.json")).unwrap();
        (world.daemon.table().calls, file.ino(), file.modified().unwrap())
    };
    let before = seen();
    late.arrive.notify_one();
    round.await.unwrap();
    assert_eq!(seen(), before, "the NIC was made a second time");
    assert_eq!(world.nics(), ["k8s.blue-0"]);
}

#[tokio::test]
async fn another_configuration_takes_nothing_from_a_pod() {
    let world = World::new().await;
    world.allocate(&["blue-3"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-3");
    world.settle().await;
    world.agent().reloaded(config(&CONFIG.replace("count=4", "count=2"))).await;
    let list = world.agent().subscribe("blue").unwrap().borrow().clone();
    let health: Vec<_> =
        list.iter().map(|device| (device.id.as_str(), device.health.as_str())).collect();
    assert_eq!(health, [("blue-0", "Healthy"), ("blue-1", "Healthy"), ("blue-3", "Unhealthy")]);
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.blue-3"]);
    world.agent().refused("line 1: no").await;
    assert!(world.agent().status().await.problems[0].contains("line 1"));
    // The whole pool goes; the pod keeps what it has until it ends.
    world.agent().reloaded(config("")).await;
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.blue-3"]);
    world.kubelet.delete("p");
    world.settle().await;
    assert!(world.nics().is_empty());
}

#[tokio::test]
async fn a_cordoned_id_is_offered_to_nobody_and_kept_by_who_has_it() {
    use vhost_rdma_agent_api::{Reply, Request, Target};

    let mut world = World::new().await;
    let cordon = |id: &str| Request::Cordon(Target { id: id.to_owned() });
    assert_eq!(world.ask(cordon("blue-0")).await, Reply::Done);
    assert!(matches!(world.ask(cordon("nobody")).await, Reply::Fault(_)));
    assert!(world.allocate(&["blue-0"]).await.unwrap_err().contains("cordoned"));
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    assert!(world.allocate(&["blue-0"]).await.is_err(), "a cordon outlives the agent");
    world.ask(Request::Uncordon(Target { id: "blue-0".to_owned() })).await;
    world.allocate(&["blue-0"]).await.unwrap();
}

#[tokio::test]
async fn cdi_tells_names_and_writes_specifications() {
    let mut world = World::new().await;
    world.kill_agent().await;
    world.start_agent(&CONFIG.replace("classic", "cdi")).await;
    let answer =
        world.agent().allocate("blue", &[vec!["blue-0".to_owned()]]).await.unwrap().remove(0);
    assert_eq!(answer.cdi_devices[0].name, "vhost-rdma.io/nic=blue-0");
    assert!(answer.mounts.is_empty());
    let spec = std::fs::read(world.path("cdi/vhost-rdma.io-nic_blue-0.json")).unwrap();
    let spec: serde_json::Value = serde_json::from_slice(&spec).unwrap();
    assert_eq!(spec["devices"][0]["name"], "blue-0");
    world.settle().await;
    assert!(!world.path("cdi/vhost-rdma.io-nic_blue-0.json").exists());
}

#[tokio::test]
async fn a_pools_backing_is_that_of_its_new_nics() {
    use vhost_rdma_agent::daemon::Daemon as _;

    let backing = |world: &World, id: &str| world.daemon.table().nics[id].backing.clone();
    let world = World::new().await;
    let first = world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    assert_eq!(backing(&world, "k8s.blue-0"), "soft");
    let rnic = CONFIG.replace("network='blue'", "network='blue'\nbacking='rnic:rxe0'");
    world
        .hardware
        .0
        .lock()
        .unwrap()
        .functions
        .push(Function { rdma: Some("rxe0".to_owned()), ..Default::default() });
    world.agent().reloaded(config(&rnic)).await;
    // The pod's own NIC stays what it is, also when its container asks again.
    assert_eq!(world.allocate(&["blue-0"]).await.unwrap(), first);
    assert_eq!(backing(&world, "k8s.blue-0"), "soft");
    // What an earlier grant left is of the old backing, and so of no use.
    let left = vhost_rdma_proto::v1::AddNicRequest {
        name: "k8s.blue-2".to_owned(),
        network: "blue".to_owned(),
        backing: "soft".to_owned(),
        ..Default::default()
    };
    world.daemon.add_nic(left).await.unwrap();
    world.allocate(&["blue-1", "blue-2"]).await.unwrap();
    for id in ["k8s.blue-1", "k8s.blue-2"] {
        assert_eq!(backing(&world, id), "rnic:rxe0");
    }
}

/// What an agent knew of a function is old: it looks before it gives it away.
#[tokio::test]
async fn a_function_is_given_as_it_is_and_not_as_it_was() {
    let function = |rdma: Option<&str>, uverbs: &str| Function {
        pci: Some("0000:03:00.1".to_owned()),
        parent: Some(Parent { pci: "0000:03:00.0".to_owned(), netdev: None, vf: 0 }),
        vendor: "15b3".to_owned(),
        driver: Some("mlx5_core".to_owned()),
        rdma: rdma.map(str::to_owned),
        char_devices: vec![format!("/dev/infiniband/{uverbs}").into()],
        ..Function::default()
    };
    let mut world = World::new().await;
    let hardware = Arc::clone(&world.hardware);
    let is = |function| hardware.0.lock().unwrap().functions = vec![function];
    is(function(Some("mlx5_1"), "uverbs1"));
    world.kill_agent().await;
    let text = "injection='classic'\n[[pools]]\nname='fast'\nkind='vf'\n\
                selectors=[{pci=['0000:03:00.1']}]\n";
    world.start_agent(text).await;
    let given = async || {
        let ids = [vec!["0000:03:00.1".to_owned()]];
        let answer =
            world.agent().allocate("fast", &ids).await.map_err(|error| error.to_string())?;
        let env = answer[0].envs["VHOST_RDMA_FAST_0_RDMA_DEVICE"].clone();
        let nodes: Vec<_> = answer[0].devices.iter().map(|node| node.host_path.clone()).collect();
        Ok::<_, String>((env, nodes))
    };
    let as_it_is =
        |rdma: &str, uverbs: &str| Ok((rdma.to_owned(), vec![format!("/dev/infiniband/{uverbs}")]));
    // Made as new by the plugin since the last look.
    is(function(Some("mlx5_2"), "uverbs2"));
    assert_eq!(given().await, as_it_is("mlx5_2", "uverbs2"));
    // Its pod is gone, and it has no RDMA device (yet).
    world.kubelet.give("p", "vhost-rdma.io/fast", "0000:03:00.1");
    world.settle().await;
    let record = Request::Attach(attach("p", "c1"));
    assert!(matches!(world.ask(record).await, Reply::Nics(nics) if nics.len() == 1));
    let done = Attached { attachment: attachment("c1", "eth0"), nics: Vec::new() };
    assert_eq!(world.ask(Request::Attached(done)).await, Reply::Done);
    let gone = Detached { attachment: attachment("c1", "eth0"), nics: Vec::new() };
    assert_eq!(world.ask(Request::Detached(gone)).await, Reply::Done);
    is(function(None, "uverbs2"));
    let refused = given().await.unwrap_err();
    assert!(refused.contains("no RDMA device"), "{refused}");
    is(function(Some("mlx5_3"), "uverbs3"));
    assert_eq!(given().await, as_it_is("mlx5_3", "uverbs3"));
}
