//! NICs that have a name: two nodes and one API server, which is played as far as agents ask it:
//! versions of objects and merge patches of their status.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request as HttpRequest, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use vhost_rdma_agent_api::{Reply, Request};
use vhost_rdma_proto::v1::Session;

use crate::cluster::{given, led, object, report, same, starts};
use crate::daemon::Late;
use crate::world::{World, attach};

const MAC: &str = "02:00:00:00:00:77";

/// What the API server has.
#[derive(Default)]
struct Objects {
    /// Pods of the namespace `ns`: UID and annotation.
    pods: BTreeMap<String, (String, Option<String>)>,
    nics: BTreeMap<String, Value>,
    version: u64,
    away: bool,
    /// Changes that were taken.
    taken: u32,
    /// Readers of a NIC wait here for each other.
    together: Option<Arc<Barrier>>,
    /// The next reader of a pod is answered when it is told to be.
    late: Option<Arc<Late>>,
}

#[derive(Clone)]
struct Server {
    objects: Arc<Mutex<Objects>>,
    url: String,
}

fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (name, value) in fields {
        if value.is_null() {
            into.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut into[name], value);
        }
    }
}

impl Objects {
    fn answer(&mut self, method: &Method, path: &[&str], body: &Value) -> (u16, Value) {
        let status = |code: u16, why: &str| {
            let reason = if code == 409 { "Conflict" } else { "NotFound" };
            (
                code,
                json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason,
                "message": why}),
            )
        };
        let partial = |metadata: Value| {
            let kind = "PartialObjectMetadata";
            (200, json!({"apiVersion": "meta.k8s.io/v1", "kind": kind, "metadata": metadata}))
        };
        if self.away {
            return status(503, "away");
        }
        match path {
            ["api", "v1", "namespaces", name] => {
                partial(json!({"name": name, "labels": {"team": "p"}}))
            }
            ["api", "v1", "namespaces", "ns", "pods", name] => match self.pods.get(*name) {
                Some((uid, names)) => {
                    let annotations =
                        names.as_ref().map(|names| json!({"vhost-rdma.io/nic": names}));
                    partial(json!({"name": name, "uid": uid, "annotations": annotations}))
                }
                None => status(404, "no such pod"),
            },
            ["apis", _, _, "namespaces", "ns", "rdmanics", name, rest @ ..] => {
                let Some(nic) = self.nics.get_mut(*name) else { return status(404, "no NIC") };
                if *method == Method::GET {
                    return (200, nic.clone());
                }
                assert_eq!(rest, ["status"], "an agent writes nothing but the status");
                for key in ["uid", "resourceVersion"] {
                    if nic["metadata"][key] != body["metadata"][key] {
                        return status(409, "another version");
                    }
                }
                merge(&mut nic["status"], &body["status"]);
                self.version += 1;
                self.taken += 1;
                nic["metadata"]["resourceVersion"] = format!("1{}", self.version).into();
                (200, nic.clone())
            }
            other => panic!("nobody may ask for {other:?}"),
        }
    }
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { objects: Arc::default(), url };
        let objects = Arc::clone(&server.objects);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let objects = Arc::clone(&objects);
                let service = service_fn(move |request| answered(Arc::clone(&objects), request));
                let server = hyper::server::conn::http1::Builder::new();
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        server
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap()
    }

    fn meets(&self, world: &World, node: &str) {
        let config = kube::Config::new(self.url.parse().unwrap());
        world.agent().meet(kube::Client::try_from(config).unwrap(), node);
    }

    /// A NIC that the controller has accepted.
    fn nic(&self, name: &str, spec: &Value) {
        let object = json!({
            "apiVersion": "vhost-rdma.io/v1alpha1", "kind": "RdmaNic", "spec": spec,
            "metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}"),
                "resourceVersion": "1", "generation": 1},
            "status": {"conditions": [{"type": "Accepted", "status": "True", "reason": "Valid",
                "observedGeneration": 1}]},
        });
        self.objects().nics.insert(name.to_owned(), object);
    }

    fn pod(&self, name: &str, names: Option<&str>) {
        let pod = (format!("uid-{name}"), names.map(str::to_owned));
        self.objects().pods.insert(name.to_owned(), pod);
    }

    fn status(&self, nic: &str) -> Value {
        self.objects().nics[nic]["status"].clone()
    }

    fn holder(&self, nic: &str) -> Option<(String, String)> {
        let status = self.status(nic);
        let text = |key: &str| status[key].as_str().map(str::to_owned);
        Some((text("node")?, text("podUid")?))
    }
}

async fn answered(
    objects: Arc<Mutex<Objects>>,
    request: HttpRequest<Incoming>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let body = request.into_body().collect().await?.to_bytes();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let path: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (code, said) = objects.lock().unwrap().answer(&method, &path, &body);
    let barrier = objects.lock().unwrap().together.clone();
    if let Some(barrier) = barrier.filter(|_| method == Method::GET && path.contains(&"rdmanics")) {
        // Both have read; what comes later does not wait.
        barrier.wait().await;
        objects.lock().unwrap().together = None;
    }
    if path.contains(&"pods") {
        let late = objects.lock().unwrap().late.take();
        if let Some(late) = late {
            late.asked.notify_one();
            late.arrive.notified().await;
        }
    }
    let answer = Response::builder().status(code).header("content-type", "application/json");
    Ok(answer.body(Full::new(Bytes::from(said.to_string()))).unwrap())
}

fn spec() -> Value {
    json!({"network": "red", "mac": MAC, "address": "10.9.1.7", "limits": {"maxQps": 3}})
}

/// A node, and the API server with a NIC `db`.
async fn one() -> (World, Server) {
    let (world, server) = (led().await, Server::start().await);
    server.nic("db", &spec());
    server.meets(&world, "node-1");
    (world, server)
}

/// The names that are owed are given back, and sessions told.
async fn tended(world: &World) {
    let _ = tokio::time::timeout(Duration::from_millis(300), world.agent().tend_names()).await;
}

fn nic(world: &World, id: &str) -> vhost_rdma_proto::v1::Nic {
    world.daemon.table().nics[&format!("k8s.{id}")].clone()
}

/// The pod ends, and its node takes everything back.
async fn ends(world: &World, pod: &str) {
    world.kubelet.delete(pod);
    world.kubelet.note(&[]);
    for _ in 0..50 {
        world.settle().await;
        if world.nics().is_empty() {
            return tended(world).await;
        }
    }
    panic!("left: {:?}", world.nics());
}

#[tokio::test]
async fn a_pod_has_the_nic_that_it_names_and_nobody_else_until_it_is_gone() {
    let (first, server) = one().await;
    let second = led().await;
    server.meets(&second, "node-2");
    server.pod("p", Some("db"));
    server.pod("q", Some("db"));
    given(&first, "p", "red-0").await;
    let random = nic(&first, "red-0").mac;
    starts(&first, "red-0").await.unwrap();
    let now = nic(&first, "red-0");
    assert_ne!(random, MAC);
    assert_eq!((now.mac.as_str(), now.addresses), (MAC, vec!["10.9.1.7".to_owned()]));
    assert_eq!(now.limits.unwrap().max_qps, 3, "the class says 5");
    assert_eq!(server.holder("db"), Some(("node-1".to_owned(), "uid-p".to_owned())));
    assert_eq!(server.status("db")["pod"], "p");
    // What the class says holds where it is less.
    let less = |spec: &mut Value| spec["pools"][0]["nic"]["limits"]["maxQps"] = 2.into();
    first.agent().follow(&object(2, less)).await.unwrap();
    first.agent().reconcile().await;
    assert_eq!(nic(&first, "red-0").limits.unwrap().max_qps, 2);
    first.agent().follow(&object(3, same)).await.unwrap();
    first.agent().reconcile().await;
    assert_eq!(nic(&first, "red-0").limits.unwrap().max_qps, 3);

    first.daemon.set_session("k8s.red-0", Session::DriverReady);
    first.agent().reconcile().await;
    tended(&first).await;
    assert_eq!(server.status("db")["session"], "driver_ready");
    assert_eq!(report(&first).await.nics[0].mac.as_deref(), Some(MAC));

    given(&second, "q", "red-0").await;
    let refused = starts(&second, "red-0").await.unwrap_err();
    assert!(refused.contains("\"p\"") && refused.contains("\"node-1\""), "{refused}");
    assert_ne!(nic(&second, "red-0").mac, MAC);
    first.daemon.set_session("k8s.red-0", Session::Absent);
    ends(&first, "p").await;
    assert_eq!(server.holder("db"), None);
    assert!(server.status("db").get("session").is_none(), "{}", server.status("db"));
    starts(&second, "red-0").await.unwrap();
    assert_eq!(nic(&second, "red-0").mac, MAC);
    assert_eq!(server.holder("db"), Some(("node-2".to_owned(), "uid-q".to_owned())));
}

#[tokio::test]
async fn of_two_agents_that_read_the_same_version_one_has_the_nic() {
    let (first, server) = one().await;
    let second = led().await;
    server.meets(&second, "node-2");
    for (world, pod) in [(&first, "p"), (&second, "q")] {
        server.pod(pod, Some("db"));
        given(world, pod, "red-0").await;
    }
    server.objects().together = Some(Arc::new(Barrier::new(2)));
    let (one, two) = tokio::join!(starts(&first, "red-0"), starts(&second, "red-0"));
    assert!(one.is_ok() != two.is_ok(), "{one:?} {two:?}");
    assert_eq!(server.objects().taken, 1);
    let macs = [nic(&first, "red-0").mac, nic(&second, "red-0").mac];
    assert_eq!(macs.iter().filter(|mac| *mac == MAC).count(), 1, "{macs:?}");
}

#[tokio::test]
async fn a_container_that_starts_again_asks_nobody_and_has_its_nic() {
    let (mut world, server) = one().await;
    server.pod("p", Some("db"));
    given(&world, "p", "red-0").await;
    starts(&world, "red-0").await.unwrap();
    server.objects().away = true;
    world.kill_agent().await;
    // The machine was off meanwhile.
    world.daemon.table().nics.clear();
    std::fs::remove_dir_all(world.path("nics")).unwrap();
    world.start_agent(crate::world::CONFIG).await;
    world.settle().await;
    starts(&world, "red-0").await.unwrap();
    let now = nic(&world, "red-0");
    assert_eq!((now.mac.as_str(), now.addresses), (MAC, vec!["10.9.1.7".to_owned()]));
    assert_eq!(now.limits.unwrap().max_qps, 3);
}

#[tokio::test]
async fn an_agent_that_ended_between_claim_and_ledger_has_what_it_claimed() {
    let (world, server) = one().await;
    server.pod("p", Some("db"));
    given(&world, "p", "red-0").await;
    for (key, value) in [("node", "node-1"), ("pod", "p"), ("podUid", "uid-p")] {
        server.objects().nics.get_mut("db").unwrap()["status"][key] = value.into();
    }
    starts(&world, "red-0").await.unwrap();
    assert_eq!(nic(&world, "red-0").mac, MAC);
    assert_eq!(server.objects().taken, 0);
}

#[tokio::test]
async fn what_a_pod_may_not_have_it_is_told_and_nothing_is_claimed() {
    let (world, server) = one().await;
    server.nic("blue", &json!({"network": "blue"}));
    server.nic("large", &json!({"network": "red", "class": "large"}));
    server.nic("new", &json!({"network": "red"}));
    server.objects().nics.get_mut("new").unwrap()["metadata"]["generation"] = 2.into();
    server.nic("bad", &json!({"network": "red"}));
    let bad = json!([{"type": "Accepted", "status": "False", "reason": "Invalid",
        "message": "another NIC of the network has it", "observedGeneration": 1}]);
    server.objects().nics.get_mut("bad").unwrap()["status"]["conditions"] = bad;
    given(&world, "p", "red-0").await;
    for (names, says) in [
        ("nobody", "no such RdmaNic"),
        ("blue", "asks for no NIC of its network \"blue\""),
        ("large", "of the class \"large\""),
        ("new", "has not looked at"),
        ("bad", "another NIC of the network has it"),
        ("../x", "is no name"),
        // All or none: what was claimed before the one that is refused is given back.
        ("db,large", "asks for no NIC"),
    ] {
        server.pod("p", Some(names));
        let refused = starts(&world, "red-0").await.unwrap_err();
        assert!(refused.contains(says), "{names}: {refused}");
        tended(&world).await;
        for name in ["blue", "large", "new", "bad", "db"] {
            assert_eq!(server.holder(name), None, "{names}: {name} is taken");
        }
        assert_ne!(nic(&world, "red-0").mac, MAC);
    }
    server.objects().away = true;
    assert!(starts(&world, "red-0").await.unwrap_err().contains("nobody can tell"));
    server.objects().away = false;
    server.pod("p", None);
    starts(&world, "red-0").await.unwrap();
    assert_eq!(server.holder("db"), None);
}

#[tokio::test]
async fn an_identity_that_the_daemon_does_not_take_is_given_back() {
    let (world, server) = one().await;
    server.pod("p", Some("db"));
    given(&world, "p", "red-0").await;
    given(&world, "q", "red-1").await;
    world
        .kubelet
        .note(&[("uid-p", crate::cluster::RED, "red-0"), ("uid-q", crate::cluster::RED, "red-1")]);
    let random = nic(&world, "red-0").mac;
    world.daemon.table().nics.get_mut("k8s.red-1").unwrap().mac = MAC.to_owned();
    let refused = starts(&world, "red-0").await.unwrap_err();
    assert!(refused.contains("cannot become the NIC \"db\""), "{refused}");
    tended(&world).await;
    assert_eq!(server.holder("db"), None);
    assert_eq!(nic(&world, "red-0").mac, random);
}

#[tokio::test]
async fn a_nic_that_a_guest_has_seen_becomes_no_other() {
    let (world, server) = one().await;
    server.pod("p", Some("db"));
    given(&world, "p", "red-0").await;
    world.daemon.set_session("k8s.red-0", Session::DriverReady);
    world.agent().reconcile().await;
    let refused = starts(&world, "red-0").await.unwrap_err();
    assert!(refused.contains("in use already"), "{refused}");
    tended(&world).await;
    assert_eq!(server.holder("db"), None);
    assert_ne!(nic(&world, "red-0").mac, MAC);
}

#[tokio::test]
async fn the_cni_plugin_and_what_multus_asks_for() {
    let (world, server) = one().await;
    server.pod("p", Some("db"));
    given(&world, "p", "red-0").await;
    let asked = attach("p", "c1");
    match world.ask(Request::Attach(asked.clone())).await {
        Reply::Nics(nics) => assert_eq!(nics[0].mac.as_deref(), Some(MAC)),
        other => panic!("{other:?}"),
    }
    let another = Some("02:00:00:00:00:78".to_owned());
    match world.ask(Request::Attach(vhost_rdma_agent_api::Attach { mac: another, ..asked })).await {
        Reply::Fault(fault) => assert!(fault.message.contains("\"db\""), "{fault:?}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(nic(&world, "red-0").mac, MAC);
}

#[tokio::test]
async fn a_grant_that_nobody_used_does_not_pass_its_name_on() {
    let (world, server) = one().await;
    server.pod("p", Some("db"));
    server.pod("q", None);
    given(&world, "p", "red-0").await;
    starts(&world, "red-0").await.unwrap();
    // The pod goes before its container ran, and another gets the ID at once.
    world.kubelet.delete("p");
    world.kubelet.note(&[]);
    given(&world, "q", "red-0").await;
    assert_ne!(nic(&world, "red-0").mac, MAC);
    starts(&world, "red-0").await.unwrap();
    tended(&world).await;
    assert_eq!(server.holder("db"), None);
}

/// What the controller says of the object, and the NIC's limit afterwards.
async fn says(world: &World, generation: i64, of: i64, qps: Option<u32>) -> u32 {
    let nics = json!([{"uid": "uid-db", "generation": of, "limits": {"maxQps": qps}}]);
    let node = object(generation, |spec| spec["nics"] = nics.clone());
    world.agent().follow(&node).await.unwrap();
    world.agent().reconcile().await;
    nic(world, "red-0").limits.unwrap().max_qps
}

#[tokio::test]
async fn a_limit_of_the_object_that_changes_holds_on_a_nic_that_runs() {
    let (mut world, server) = one().await;
    server.pod("p", Some("db"));
    given(&world, "p", "red-0").await;
    starts(&world, "red-0").await.unwrap();
    world.daemon.set_session("k8s.red-0", Session::DriverReady);
    let before = nic(&world, "red-0");
    assert_eq!(before.limits.unwrap().max_qps, 3);
    assert_eq!(says(&world, 2, 2, Some(2)).await, 2);
    assert_eq!(says(&world, 3, 3, Some(4)).await, 4, "also upwards");
    assert_eq!(says(&world, 4, 4, Some(9)).await, 5, "the class says 5");
    assert_eq!(says(&world, 5, 5, Some(1)).await, 1);
    assert_eq!(says(&world, 6, 4, Some(4)).await, 1, "an old word counts no more");
    assert_eq!(says(&world, 7, 6, None).await, 5, "none of its own");
    assert_eq!(says(&world, 8, 7, Some(2)).await, 2);
    assert_eq!(report(&world).await.nics[0].limits.max_qps, Some(2));
    // It is in the ledger: neither an agent that begins anew nor a controller that says nothing of
    // the object any more changes it.
    world.kill_agent().await;
    world.start_agent(crate::world::CONFIG).await;
    world.agent().follow(&object(9, same)).await.unwrap();
    world.settle().await;
    let after = nic(&world, "red-0");
    assert_eq!(after.limits.unwrap().max_qps, 2);
    assert_eq!((after.mac, after.addresses), (before.mac, before.addresses));
}

#[tokio::test]
async fn what_is_said_of_an_object_concerns_no_other_nic() {
    let (world, server) = one().await;
    server.nic("other", &json!({"network": "red"}));
    server.pod("p", Some("db"));
    server.pod("q", Some("other"));
    given(&world, "p", "red-0").await;
    given(&world, "q", "red-1").await;
    let held = [("uid-p", crate::cluster::RED, "red-0"), ("uid-q", crate::cluster::RED, "red-1")];
    world.kubelet.note(&held);
    starts(&world, "red-0").await.unwrap();
    starts(&world, "red-1").await.unwrap();
    assert_eq!(says(&world, 2, 2, Some(1)).await, 1);
    assert_eq!(nic(&world, "red-1").limits.unwrap().max_qps, 5);
}

/// A pod is deleted while it is asked for its names, and the kubelet gives its NIC to another.
#[tokio::test]
async fn a_nic_that_went_to_another_pod_meanwhile_becomes_nothing_of_the_first_ones() {
    let (world, server) = one().await;
    server.pod("p", Some("db"));
    given(&world, "p", "red-0").await;
    let late = Arc::new(Late::default());
    server.objects().late = Some(Arc::clone(&late));
    let agent = Arc::clone(world.agent());
    let first = tokio::spawn(async move { agent.answer(Request::Attach(attach("p", "c1"))).await });
    late.asked.notified().await;
    world.kubelet.delete("p");
    given(&world, "q", "red-0").await;
    let before = nic(&world, "red-0");
    late.arrive.notify_one();
    let refused = first.await.unwrap();
    assert!(matches!(&refused, Reply::Fault(fault) if fault.message.contains("allocated again")));
    tended(&world).await;
    assert_eq!((nic(&world, "red-0").mac, server.holder("db")), (before.mac, None));
    world.settle().await;
    server.pod("q", None);
    let Reply::Nics(nics) = world.ask(Request::Attach(attach("q", "c2"))).await else { panic!() };
    assert_eq!(nics.len(), 1, "it is the second one's");
}
