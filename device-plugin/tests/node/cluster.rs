//! A node that a controller leads: what its object says is offered, kept, obeyed and reported.
//!
//! The API server is played as far as the agent asks it about namespaces; with a real one the same
//! is shown by `cargo xtask k8s test`.

use std::sync::{Arc, Mutex};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request as HttpRequest, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use vhost_rdma_agent_api::{FaultKind, Reply, Request};
use vhost_rdma_cluster_api::{NicStatus, RdmaNode, RdmaNodeStatus};
use vhost_rdma_proto::v1::Session;

use crate::kubelet::eventually;
use crate::world::{CONFIG, World, attach};

pub(crate) const RED: &str = "vhost-rdma.io/red";

/// The node's object: a pool `red` on a network of its own.
pub(crate) fn object(generation: i64, change: impl FnOnce(&mut Value)) -> RdmaNode {
    let mut spec = json!({
        "networks": [{
            "name": "red", "uid": "uid-red", "vni": 9,
            "tenants": [{"name": "physics", "namespaceSelector": {"matchLabels": {"team": "p"}}}],
        }],
        "pools": [{
            "name": "red", "network": "red", "count": 3, "policy": "all", "class": "small",
            "nic": {"limits": {"maxQps": 5}}, "revision": "r1",
        }],
    });
    change(&mut spec);
    let object = json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": "RdmaNode", "spec": spec,
        "metadata": {"name": "node-1", "uid": "uid-node", "generation": generation},
    });
    serde_json::from_value(object).unwrap()
}

pub(crate) fn same(_: &mut Value) {}

/// A node whose agent follows a controller, which has spoken once.
pub(crate) async fn led() -> World {
    let mut world = World::new().await;
    world.kill_agent().await;
    world.cluster = true;
    world.start_agent(CONFIG).await;
    world.agent().follow(&object(1, same)).await.unwrap();
    world
}

pub(crate) async fn report(world: &World) -> RdmaNodeStatus {
    world.agent().report().await.unwrap().1
}

async fn pools(world: &World) -> Vec<(String, u32)> {
    let status = world.agent().status().await;
    status.pools.into_iter().map(|pool| (pool.name, pool.total)).collect()
}

/// Says what labels namespaces have, and that pods have no annotations, until it is told to be
/// silent.
async fn namespaces(world: &World, team: &str) -> Arc<Mutex<Option<String>>> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let label = Arc::new(Mutex::new(Some(team.to_owned())));
    let told = Arc::clone(&label);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let told = Arc::clone(&told);
            let answer = service_fn(move |request: HttpRequest<Incoming>| {
                let team = told.lock().unwrap().clone();
                let name = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
                async move {
                    let (code, body) = match team {
                        Some(team) => (
                            200,
                            json!({
                                "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                                "metadata": {"name": name, "uid": format!("uid-{name}"),
                                    "labels": {"team": team}},
                            }),
                        ),
                        None => (
                            503,
                            json!({
                                "kind": "Status", "status": "Failure", "code": 503,
                                "reason": "ServiceUnavailable", "message": "away",
                            }),
                        ),
                    };
                    let answer = Response::builder().status(code);
                    answer.body(Full::new(Bytes::from(body.to_string())))
                }
            });
            let server = hyper::server::conn::http1::Builder::new();
            tokio::spawn(server.serve_connection(TokioIo::new(stream), answer));
        }
    });
    let config = kube::Config::new(format!("http://{address}").parse().unwrap());
    world.agent().meet(kube::Client::try_from(config).unwrap(), "node-1");
    label
}

/// The kubelet gives a pod a NIC of the pool.
pub(crate) async fn given(world: &World, pod: &str, id: &str) {
    let asked = vec![vec![id.to_owned()]];
    world.agent().allocate("red", &asked).await.unwrap();
    world.kubelet.give(pod, RED, id);
    world.kubelet.note(&[(&format!("uid-{pod}"), RED, id)]);
}

pub(crate) async fn starts(world: &World, id: &str) -> Result<(), String> {
    world.agent().before_start(&[id.to_owned()]).await
}

fn nics(status: &RdmaNodeStatus) -> Vec<&str> {
    status.nics.iter().map(|nic| nic.id.as_str()).collect()
}

#[tokio::test]
async fn what_the_controller_offers_is_registered_and_there_again_without_it() {
    let mut world = led().await;
    assert_eq!(pools(&world).await, [("blue".to_owned(), 4), ("red".to_owned(), 3)]);
    world.kubelet.plugin(RED).await;
    let said = report(&world).await;
    assert_eq!(said.observed_generation, Some(1));
    assert_eq!(said.networks.iter().map(|n| n.uid.as_str()).collect::<Vec<_>>(), ["uid-red"]);
    assert_eq!(said.daemon.unwrap().version, "test");
    assert!(
        said.conditions.iter().any(|c| c.type_ == "Ready" && c.holds()),
        "{:?}",
        said.conditions
    );
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    assert_eq!(pools(&world).await.len(), 2, "the last copy was not taken up");
    assert_eq!(world.agent().report().await.unwrap().0, "uid-node");
    // Who does not follow a controller has nothing to do with it.
    world.kill_agent().await;
    world.cluster = false;
    world.start_agent(CONFIG).await;
    assert_eq!(pools(&world).await, [("blue".to_owned(), 4)]);
    assert_eq!(world.agent().report().await, None);
}

#[tokio::test]
async fn a_copy_that_is_damaged_is_not_believed_and_keeps_nobody_from_starting() {
    let mut world = led().await;
    world.kill_agent().await;
    let file = world.path("state/node");
    let text = std::fs::read_to_string(&file).unwrap().replace("\"count\":3", "\"count\":4");
    std::fs::write(&file, text).unwrap();
    world.start_agent(CONFIG).await;
    assert_eq!(pools(&world).await, [("blue".to_owned(), 4)]);
    world.agent().follow(&object(1, same)).await.unwrap();
    assert_eq!(pools(&world).await.len(), 2);
}

#[tokio::test]
async fn a_limit_of_a_class_reaches_a_nic_that_runs() {
    let world = led().await;
    given(&world, "p", "red-0").await;
    let limit = || world.daemon.table().nics["k8s.red-0"].limits.unwrap().max_qps;
    assert_eq!(limit(), 5);
    let woken = || tokio::time::timeout(std::time::Duration::ZERO, world.agent().woken());
    let _ = woken().await;
    let more = |spec: &mut Value| spec["pools"][0]["nic"]["limits"]["maxQps"] = 9.into();
    world.agent().follow(&object(2, more)).await.unwrap();
    // It need not wait for the next look.
    assert!(woken().await.is_ok(), "the agent was not woken");
    world.agent().reconcile().await;
    assert_eq!(limit(), 9);
    assert_eq!(report(&world).await.observed_generation, Some(2));
}

#[tokio::test]
async fn a_pod_of_another_tenant_gets_no_further_than_to_be_asked_who_it_is() {
    let world = led().await;
    given(&world, "p", "red-0").await;
    world.settle().await;
    assert!(starts(&world, "red-0").await.unwrap_err().contains("API server"));
    let label = namespaces(&world, "q").await;
    let refused = starts(&world, "red-0").await.unwrap_err();
    assert!(refused.contains("\"ns\"") && refused.contains("\"red\""), "{refused}");
    match world.ask(Request::Attach(attach("p", "c1"))).await {
        Reply::Fault(fault) => assert_eq!(fault.kind, FaultKind::Conflict),
        other => panic!("{other:?}"),
    }
    assert_eq!(nics(&report(&world).await), Vec::<&str>::new(), "it counts against nobody's quota");
    *label.lock().unwrap() = Some("p".to_owned());
    starts(&world, "red-0").await.unwrap();
    let said = report(&world).await;
    let [NicStatus { pod, pod_uid, namespace, class, revision, limits, .. }] = &said.nics[..]
    else {
        panic!("{:?}", said.nics);
    };
    assert_eq!((pod.as_str(), pod_uid.as_str(), namespace.as_str()), ("p", "uid-p", "ns"));
    assert_eq!((class.as_deref(), revision.as_str()), (Some("small"), "r1"));
    assert_eq!(limits.max_qps, Some(5));
}

#[tokio::test]
async fn what_was_admitted_stays_so_without_a_control_plane_and_not_for_another_namespace() {
    let mut world = led().await;
    let label = namespaces(&world, "p").await;
    given(&world, "p", "red-0").await;
    world.settle().await;
    starts(&world, "red-0").await.unwrap();
    let taken = |spec: &mut Value| spec["networks"][0]["tenants"][0]["full"] = true.into();
    world.agent().follow(&object(2, taken)).await.unwrap();
    *label.lock().unwrap() = None;
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    world.settle().await;
    starts(&world, "red-0").await.unwrap();
    // A second one is one too many.
    let label = namespaces(&world, "p").await;
    given(&world, "q", "red-1").await;
    assert!(starts(&world, "red-1").await.unwrap_err().contains("quota"));
    drop(label);
}

#[tokio::test]
async fn a_network_goes_from_the_daemon_after_its_last_nic_and_is_reported_until_then() {
    let world = led().await;
    namespaces(&world, "p").await;
    given(&world, "p", "red-0").await;
    world.settle().await;
    starts(&world, "red-0").await.unwrap();
    let nothing = |spec: &mut Value| *spec = json!({});
    world.agent().follow(&object(2, nothing)).await.unwrap();
    world.settle().await;
    let hosts = |status: &RdmaNodeStatus| status.networks.len();
    assert_eq!(hosts(&report(&world).await), 1);
    assert_eq!(nics(&report(&world).await), ["red-0"], "the pod has it still");
    assert!(world.daemon.table().networks.contains(&"red".to_owned()));
    world.kubelet.delete("p");
    world.kubelet.note(&[]);
    eventually_settled(&world).await;
    assert!(!world.daemon.table().networks.contains(&"red".to_owned()));
    assert_eq!(hosts(&report(&world).await), 0);
}

/// Rounds until no NIC is left.
async fn eventually_settled(world: &World) {
    for _ in 0..50 {
        world.settle().await;
        if world.nics().is_empty() && report(world).await.networks.is_empty() {
            return;
        }
    }
    panic!("left: {:?}", world.nics());
}

#[tokio::test]
async fn an_id_that_the_controller_cordons_is_granted_to_nobody() {
    let world = led().await;
    let cordon = |spec: &mut Value| spec["cordon"] = json!(["red-0"]);
    world.agent().follow(&object(2, cordon)).await.unwrap();
    let asked = vec![vec!["red-0".to_owned()]];
    let refused = world.agent().allocate("red", &asked).await.unwrap_err().to_string();
    assert!(refused.contains("rollout"), "{refused}");
    world.agent().follow(&object(3, same)).await.unwrap();
    world.agent().allocate("red", &asked).await.unwrap();
}

#[tokio::test]
async fn the_kubelet_asks_before_a_container_starts() {
    let world = led().await;
    given(&world, "p", "red-0").await;
    world.daemon.set_session("k8s.red-0", Session::Absent);
    namespaces(&world, "q").await;
    let mut plugin = world.kubelet.plugin(RED).await;
    let options = plugin.get_device_plugin_options(vhost_rdma_agent::v1beta1::Empty {}).await;
    assert!(options.unwrap().into_inner().pre_start_required);
    let request = vhost_rdma_agent::v1beta1::PreStartContainerRequest {
        devices_ids: vec!["red-0".to_owned()],
    };
    let refused = plugin.pre_start_container(request).await.unwrap_err();
    assert!(refused.message().contains("RdmaTenant"), "{refused:?}");
    eventually("the agent counts it", || {
        (world.agent().snapshot().counters.refusals > 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn addresses_are_those_of_blocks_that_the_node_holds() {
    let mut world = led().await;
    let with_block = |spec: &mut Value| {
        spec["networks"][0]["ipam"] = true.into();
        spec["blocks"] = json!([{"network": "red", "cidr": "10.9.0.4/30", "uid": "b1"}]);
    };
    world.agent().follow(&object(2, with_block)).await.unwrap();
    let asked = |id: &str| vec![vec![id.to_owned()]];
    let refused = world.agent().allocate("red", &asked("red-0")).await.unwrap_err().to_string();
    assert!(refused.contains("no addresses"), "{refused}");
    // Told before it is held.
    assert_eq!(report(&world).await.blocks, ["b1"]);
    let offered = world.agent().offered_blocks().await;
    world.agent().own(&offered[0]).await.unwrap();
    given(&world, "p", "red-0").await;
    world.kill_agent().await;
    world.start_agent(CONFIG).await;
    world.settle().await;
    world.agent().allocate("red", &asked("red-1")).await.unwrap();
    let address = |id: &str| world.daemon.table().nics[&format!("k8s.{id}")].addresses.clone();
    assert_eq!(
        (address("red-0"), address("red-1")),
        (vec!["10.9.0.4".into()], vec!["10.9.0.5".into()])
    );
    assert_eq!(report(&world).await.networks[0].addresses, 2);
    // It is wanted back: nothing more is given out of it, and it goes with its last address.
    let without = |spec: &mut Value| spec["networks"][0]["ipam"] = true.into();
    world.agent().follow(&object(3, without)).await.unwrap();
    world.agent().reconcile().await;
    assert_eq!(report(&world).await.blocks, ["b1"]);
    assert!(world.agent().allocate("red", &asked("red-2")).await.is_err());
    world.kubelet.delete("p");
    world.kubelet.note(&[]);
    for _ in 0..50 {
        world.settle().await;
        if report(&world).await.blocks.is_empty() {
            return;
        }
    }
    panic!("the block is held still; NICs: {:?}", world.nics());
}

#[tokio::test]
async fn a_uid_that_was_read_before_the_kubelet_wrote_the_new_one_is_put_right() {
    let world = led().await;
    namespaces(&world, "p").await;
    world.agent().allocate("red", &[vec!["red-0".to_owned()]]).await.unwrap();
    world.kubelet.give("new", RED, "red-0");
    world.kubelet.note(&[("uid-old", RED, "red-0")]);
    world.agent().reconcile().await;
    assert!(report(&world).await.nics.is_empty(), "it is not admitted yet, but looked for");
    world.kubelet.note(&[("uid-new", RED, "red-0")]);
    starts(&world, "red-0").await.unwrap();
    world.agent().reconcile().await;
    assert_eq!(report(&world).await.nics[0].pod_uid, "uid-new");
    // The pod ends. The kubelet strikes it out when it allocates the next time, which may be never.
    world.kubelet.delete("new");
    for _ in 0..50 {
        world.settle().await;
        if world.nics().is_empty() {
            return;
        }
    }
    panic!("left: {:?}", world.nics());
}
