//! Events, as an API server sees them: one that is played here, over HTTP.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use vhost_rdma_agent::events::Events;
use vhost_rdma_proto::v1::Session;

use crate::kubelet::eventually;
use crate::world::{BLUE, World};

/// A call that the server took.
#[derive(Debug, Clone)]
struct Call {
    method: Method,
    path: String,
    body: Value,
}

impl Call {
    fn text(&self, pointer: &str) -> &str {
        self.body.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }
}

/// Takes events, or keeps whoever sends them waiting, or refuses.
#[derive(Clone)]
struct ApiServer {
    calls: Arc<Mutex<Vec<Call>>>,
    answers: Arc<Mutex<VecDeque<u16>>>,
    open: watch::Sender<bool>,
}

impl ApiServer {
    /// The server, and who sends to it.
    async fn start() -> (Self, Events) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server =
            Self { calls: Arc::default(), answers: Arc::default(), open: watch::Sender::new(true) };
        let serving = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serving.clone().converse(stream));
            }
        });
        let config = kube::Config::new(format!("http://{address}").parse().unwrap());
        let client = kube::Client::try_from(config).unwrap();
        (server, Events::to_client("node-1".to_owned(), client))
    }

    async fn converse(self, stream: TcpStream) {
        let service = service_fn(move |request| {
            let server = self.clone();
            async move { server.take(request).await }
        });
        let server = hyper::server::conn::http1::Builder::new();
        let _ = server.serve_connection(TokioIo::new(stream), service).await;
    }

    async fn take(
        self,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, hyper::http::Error> {
        let (parts, body) = request.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body: Value = serde_json::from_slice(&bytes).unwrap();
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        let path = parts.uri.path().to_owned();
        let code = self.answers.lock().unwrap().pop_front().unwrap_or(200);
        let answer = if code == 200 {
            let answer = body.clone();
            self.calls.lock().unwrap().push(Call { method: parts.method, path, body });
            answer
        } else {
            json!({
                "kind": "Status", "status": "Failure", "code": code, "reason": "Forbidden",
                "message": "no"
            })
        };
        Response::builder().status(code).body(Full::new(Bytes::from(answer.to_string())))
    }

    fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    /// The calls about something, as soon as there are so many.
    async fn about(&self, reason: &str, count: usize) -> Vec<Call> {
        eventually(&format!("{count} events {reason}"), || {
            let calls = self.calls().into_iter();
            let found: Vec<Call> = calls.filter(|call| call.text("/reason") == reason).collect();
            (found.len() >= count).then_some(found)
        })
        .await
    }
}

const PODS: &str = "/apis/events.k8s.io/v1/namespaces/ns/events";
const NODES: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

/// A pod with two NICs that VMMs use.
async fn pod(events: Events) -> World {
    let world = World::with_events(events).await;
    world.allocate(&["blue-0", "blue-1"]).await.unwrap();
    for id in ["blue-0", "blue-1"] {
        world.kubelet.give("p", BLUE, id);
        world.daemon.set_session(&format!("k8s.{id}"), Session::DriverReady);
    }
    world.settle().await;
    world
}

async fn lose_daemon(world: &World) {
    world.daemon.restart();
    world.settle().await;
}

async fn reconnect(world: &World) {
    for id in ["blue-0", "blue-1"] {
        world.daemon.set_session(&format!("k8s.{id}"), Session::DriverReady);
    }
    world.settle().await;
}

#[tokio::test]
async fn a_pod_hears_of_each_of_its_nics_and_a_repetition_is_counted() {
    let (server, events) = ApiServer::start().await;
    let world = pod(events).await;
    lose_daemon(&world).await;
    let sick = server.about("NicUnhealthy", 2).await;
    let mut nics: Vec<&str> = sick.iter().map(|call| call.text("/related/name")).collect();
    nics.sort_unstable();
    assert_eq!(nics, ["blue-0", "blue-1"]);
    for call in &sick {
        assert_eq!((&call.method, call.path.as_str()), (&Method::POST, PODS));
        assert_eq!(call.text("/type"), "Warning");
        assert_eq!(call.text("/regarding/kind"), "Pod");
        assert_eq!(call.text("/regarding/name"), "p");
        assert_eq!(call.text("/reportingController"), "vhost-rdma-agent");
        assert_eq!(call.text("/reportingInstance"), "node-1");
        assert!(call.text("/note").contains(call.text("/related/name")), "{call:?}");
        assert!(call.text("/note").contains("pod"), "it says what to do: {call:?}");
    }
    reconnect(&world).await;
    let well = server.about("NicHealthy", 2).await;
    assert_eq!(well[0].text("/type"), "Normal");
    // It happens again: the API server has the events, and gets their count.
    lose_daemon(&world).await;
    let again = server.about("NicUnhealthy", 4).await;
    for call in &again[2..] {
        assert_eq!(call.method, Method::PATCH);
        assert_eq!(call.body["series"]["count"], 2);
        let name = call.path.strip_prefix(PODS).unwrap().trim_start_matches('/');
        assert!(sick.iter().any(|first| first.text("/metadata/name") == name), "{call:?}");
    }
}

#[tokio::test]
async fn each_refused_configuration_is_told_in_its_own_words_and_no_more_than_fit() {
    let (server, events) = ApiServer::start().await;
    let world = World::with_events(events).await;
    world.agent().refused("line 1: no").await;
    world.agent().refused(&format!("line 2: {}", "é".repeat(2000))).await;
    let told = server.about("ConfigurationRefused", 2).await;
    assert!(told.iter().all(|call| call.method == Method::POST && call.path == NODES), "{told:?}");
    assert_eq!(told[0].text("/note"), "line 1: no");
    assert!(told[1].text("/note").starts_with("line 2: é") && told[1].text("/note").len() <= 1024);
    assert_eq!(
        (told[0].text("/regarding/kind"), told[0].text("/regarding/name")),
        ("Node", "node-1")
    );
}

#[tokio::test]
async fn a_refusal_loses_one_event_and_not_the_next() {
    let (server, events) = ApiServer::start().await;
    server.answers.lock().unwrap().push_back(403);
    let world = World::with_events(events).await;
    world.agent().refused("first").await;
    world.agent().refused("second").await;
    let told = server.about("ConfigurationRefused", 1).await;
    assert_eq!(told[0].text("/note"), "second");
}

#[tokio::test]
async fn an_api_server_that_hangs_holds_nobody_up_and_fills_nothing() {
    const MANY: usize = 3000;
    let (server, events) = ApiServer::start().await;
    server.open.send_replace(false);
    let world = World::with_events(events).await;
    for number in 0..MANY {
        world.agent().refused(&format!("{number}")).await;
    }
    world.allocate(&["blue-0"]).await.unwrap();
    assert!(server.calls().is_empty());
    server.open.send_replace(true);
    // What waited is sent; the rest was lost, and the agent goes on.
    server.about("ConfigurationRefused", 1000).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let told = server.calls().len();
    assert!((1000..1100).contains(&told), "{told} of {MANY}");
}

#[tokio::test]
async fn an_api_server_that_wants_a_namespace_for_an_event_about_a_node_is_told_one() {
    let (server, events) = ApiServer::start().await;
    // As one before 1.22 does.
    server.answers.lock().unwrap().push_back(422);
    let world = World::with_events(events).await;
    world.agent().refused("first").await;
    let told = server.about("ConfigurationRefused", 1).await;
    assert_eq!((told[0].text("/note"), told[0].path.as_str()), ("first", NODES));
    assert_eq!(told[0].body["regarding"]["namespace"], "default");
    assert_eq!(told[0].body["metadata"]["namespace"], "default");
    // Others are not: what describes a node looks for events without.
    world.agent().refused("second").await;
    let told = server.about("ConfigurationRefused", 2).await;
    assert_eq!(told[1].text("/note"), "second");
    assert!(told[1].body["regarding"]["namespace"].is_null(), "{told:?}");
}
