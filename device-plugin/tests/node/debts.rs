//! Addresses that their IPAM plugin does not take back: they keep no NIC.

use std::time::Duration;

use vhost_rdma_agent_api::{
    Attach, Detach, Detached, Gc, Intend, Record, Reply, Request, State, Step,
};

use crate::stuck::{calls, healthy, plugin};
use crate::world::{BLUE, CONFIG, World, attach, attachment};

/// A pod has `blue-0`.
async fn granted() -> World {
    let mut world = World::new().await;
    world.rest = Duration::ZERO;
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    world
}

fn ipam() -> Step {
    Step::Ipam { plugin: "host-local".to_owned(), if_name: "rdma0".to_owned() }
}

/// A sandbox of the pod is attached, and all of it is undone but its address.
async fn owing(world: &World, container: &str) {
    let asked = Attach {
        config: Some(serde_json::json!({"name": "net", "type": "vhost-rdma-cni"})),
        ..attach("p", container)
    };
    let attachment = asked.attachment.clone();
    let reply = world.ask(Request::Attach(asked)).await;
    assert!(matches!(&reply, Reply::Nics(nics) if nics.len() == 1), "{reply:?}");
    let link = Step::MakeLink { name: "rdma0".to_owned(), netns: Some("/nowhere".to_owned()) };
    let nic = "blue-0".to_owned();
    let intend = Intend { attachment: attachment.clone(), nic, steps: vec![link, ipam()] };
    assert_eq!(world.ask(Request::Intend(intend)).await, Reply::Done);
    let ended = Detached { attachment, nics: vec!["blue-0".to_owned()] };
    assert_eq!(world.ask(Request::Owing(ended)).await, Reply::Done);
}

async fn records(world: &World, request: Request) -> Vec<Record> {
    match world.ask(request).await {
        Reply::Records(records) => records,
        other => panic!("{other:?}"),
    }
}

/// What a runtime's DEL has to undo, with Multus' word for the NIC.
async fn left(world: &World, container: &str) -> Vec<Record> {
    let detach = Detach {
        container_id: container.to_owned(),
        if_name: Some("eth0".to_owned()),
        device_id: Some("blue-0".to_owned()),
    };
    records(world, Request::Detach(detach)).await
}

async fn garbage(world: &World, valid: &[&str]) -> usize {
    let valid = valid.iter().map(|container| attachment(container, "eth0")).collect();
    records(world, Request::Gc(Gc { network: "net".to_owned(), valid })).await.len()
}

fn detached(container: &str) -> Request {
    let nics = vec!["blue-0".to_owned()];
    Request::Detached(Detached { attachment: attachment(container, "eth0"), nics })
}

#[tokio::test]
async fn a_nic_whose_address_is_owed_is_free_and_the_address_is_asked_for_again() {
    let mut world = granted().await;
    owing(&world, "c1").await;
    world.kubelet.delete("p");
    world.settle().await;
    assert!(healthy(&world, "blue-0") && world.nics().is_empty());
    assert_eq!(calls(&world), 0, "reconciliation waits for no IPAM plugin");
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("q", BLUE, "blue-0");
    // It outlives the agent. DEL and GC of the runtime may pay it.
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    let owed = left(&world, "c1").await;
    assert_eq!(
        (owed.len(), owed[0].nic.id.as_str(), owed[0].state),
        (1, "blue-0", State::Detaching)
    );
    assert_eq!((&owed[0].steps[..], &owed[0].done), (&[ipam()][..], &None));
    assert_eq!((garbage(&world, &[]).await, garbage(&world, &["c1"]).await), (1, 0));
    let status = world.agent().status().await;
    assert!(status.ready && status.problems.iter().any(|why| why.contains("owed")), "{status:?}");
    assert!(status.devices.iter().all(|device| device.id.starts_with("blue-")), "{status:?}");
    plugin(&world, "cat > /dev/null");
    world.agent().ask_for_debts().await;
    assert_eq!(calls(&world), 1);
    // What is owed still stays so; what is paid is forgotten, and the NIC's new pod keeps it.
    let again = Detached { attachment: attachment("c1", "eth0"), nics: Vec::new() };
    assert_eq!(world.ask(Request::Owing(again)).await, Reply::Done);
    assert_eq!(left(&world, "c1").await.len(), 1);
    assert_eq!(world.ask(detached("c1")).await, Reply::Done);
    assert!(left(&world, "c1").await.is_empty());
    world.agent().ask_for_debts().await;
    world.settle().await;
    assert_eq!((calls(&world), world.nics()), (1, vec!["k8s.blue-0".to_owned()]));
}

#[tokio::test]
async fn debts_have_an_end_and_a_bound_and_are_not_asked_of_who_lives() {
    let world = granted().await;
    plugin(&world, "cat > /dev/null");
    owing(&world, "c0").await;
    for times in 1..9 {
        assert_eq!(left(&world, "c0").await.len(), 1);
        world.agent().ask_for_debts().await;
        assert_eq!(calls(&world), times);
    }
    assert!(left(&world, "c0").await.is_empty(), "it was let go");
    world.agent().ask_for_debts().await;
    assert_eq!(calls(&world), 8);
    for n in 1..80 {
        owing(&world, &format!("c{n}")).await;
    }
    assert_eq!(garbage(&world, &[]).await, 64);
    // The same attachment once more has the address of its name.
    let reply = world.ask(Request::Attach(attach("p", "c1"))).await;
    assert!(matches!(reply, Reply::Nics(_)), "{reply:?}");
    let own = left(&world, "c1").await;
    assert_eq!((own.len(), own[0].steps.len(), garbage(&world, &[]).await), (1, 0, 64));
}
