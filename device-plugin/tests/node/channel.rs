//! The node's part in the channel between nodes: peers that the controller sends by TLS, and what a
//! controller that is not one, or not a good one, can do.
//!
//! The server is a real one for TLS and gRPC, with the controller's own code for certificates; what
//! it says is the tests' choice. With the controller's own server and a real API server the same is
//! shown by `cargo xtask k8s test`.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status};
use vhost_rdma_agent::channel;
use vhost_rdma_agent::member::Settings;
use vhost_rdma_agent::member::identity::{Pair as Own, Request as Asked, Roots};
use vhost_rdma_agent::member::store::{Kept, Store};
use vhost_rdma_cluster_api::peers::Digest;
use vhost_rdma_cluster_api::peers::v1::peers_server::{Peers, PeersServer};
use vhost_rdma_cluster_api::peers::v1::{FollowRequest, PeerEntry, Update};
use vhost_rdma_cluster_api::{Condition, RdmaNode};
use vhost_rdma_controller::core::{Object, World as Cluster};
use vhost_rdma_controller::metrics::Metrics;
use vhost_rdma_controller::peers::{Hub, serve};
use vhost_rdma_controller::{pki, tls};

use crate::kubelet::eventually;
use crate::world::{CONFIG, World};

const NAME: &str = "vhost-rdma-controller.ns.svc";
const LIFE: u64 = 3600;

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A connection that is TLS already.
struct Secured(TlsStream<TcpStream>);

impl Connected for Secured {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Secured {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

type Said = mpsc::Sender<Result<Update, Status>>;

/// What an agent asked, and the stream that it has been given.
type Call = (FollowRequest, Said);

struct Script(mpsc::Sender<Call>);

#[tonic::async_trait]
impl Peers for Script {
    type FollowStream = ReceiverStream<Result<Update, Status>>;

    async fn follow(
        &self,
        request: Request<FollowRequest>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        let (said, stream) = mpsc::channel(4);
        let call = (request.into_inner(), said);
        self.0.send(call).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// A server of lists whose certificate is of `root` and for `name`, which believes `clients`.
struct Controller {
    at: String,
    calls: mpsc::Receiver<Call>,
    serving: JoinHandle<()>,
}

/// What a server shows, and whom it lets in.
fn shown(root: &pki::Pair, name: &str, clients: &pki::Pair) -> Arc<ServerConfig> {
    let own = pki::sign_server(root, &[name.to_owned()], now(), LIFE).unwrap();
    let chain = CertificateDer::pem_slice_iter(own.cert.as_bytes()).collect::<Result<_, _>>();
    let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(clients.cert.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(chain.unwrap(), key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

impl Controller {
    async fn start(root: &pki::Pair, name: &str, clients: &pki::Pair) -> Self {
        let acceptor = TlsAcceptor::from(shown(root, name, clients));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap().to_string();
        let (calls, called) = mpsc::channel(4);
        let incoming = async_stream(listener, acceptor);
        let serving = tokio::spawn(async move {
            let server = Server::builder().add_service(PeersServer::new(Script(calls)));
            server.serve_with_incoming(incoming).await.unwrap();
        });
        Self { at, calls: called, serving }
    }

    async fn called(&mut self) -> Call {
        let called = tokio::time::timeout(Duration::from_secs(60), self.calls.recv()).await;
        called.expect("an agent comes").unwrap()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn async_stream(
    listener: TcpListener,
    acceptor: TlsAcceptor,
) -> ReceiverStream<Result<Secured, std::io::Error>> {
    let (made, stream) = mpsc::channel(4);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // One that fails is the client's to see.
            if let Ok(stream) = acceptor.accept(stream).await
                && made.send(Ok(Secured(stream))).await.is_err()
            {
                return;
            }
        }
    });
    ReceiverStream::new(stream)
}

/// The node's object: a network on the fabric `east`, and one of the daemon's own.
fn object(generation: i64, change: impl FnOnce(&mut Value)) -> RdmaNode {
    let mut spec = json!({
        "networks": [
            {
                "name": "red", "uid": "uid-red", "vni": 9, "fabric": "east",
                "allow": ["10.200.0.0/16"],
            },
            {"name": "soft", "uid": "uid-soft", "vni": 10},
        ],
    });
    change(&mut spec);
    let object = json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": "RdmaNode", "spec": spec,
        "metadata": {"name": "node-1", "uid": "uid-node", "generation": generation},
    });
    serde_json::from_value(object).unwrap()
}

fn same(_: &mut Value) {}

/// A node with a certificate of `root` on its disk.
struct Node {
    world: World,
    running: Option<JoinHandle<()>>,
}

impl Node {
    /// Whose certificate is as the controller signs one.
    async fn new(root: &pki::Pair, controller: &str) -> Self {
        let mut world = World::new().await;
        world.kill_agent().await;
        world.cluster = true;
        let settings = Settings {
            node: "node-1".to_owned(),
            endpoint: "127.0.0.1:4790".parse().unwrap(),
            shared: world.path("shared"),
            namespace: "ns".to_owned(),
            controller: controller.to_owned(),
            controller_name: NAME.to_owned(),
        };
        let asked = Asked::new("node-1", settings.endpoint.ip()).unwrap();
        let read = pki::read_request(asked.request.as_bytes()).unwrap();
        let cert = pki::sign_node(root, &read, now(), LIFE).unwrap();
        let id = pki::Root::read(&root.cert).unwrap().id;
        let kept = Kept {
            roots: Some(Roots::read(&root.cert, &id).unwrap()),
            pair: Some(Own { cert, key: asked.key }),
            asked: None,
        };
        Store::new(&world.path("state"), &settings.shared).write(&kept).unwrap();
        world.channel = Some(settings);
        let mut node = Self { world, running: None };
        node.start().await;
        node.world.agent().follow(&object(1, same)).await.unwrap();
        node
    }

    async fn start(&mut self) {
        self.world.start_agent(CONFIG).await;
        let agent = Arc::clone(self.world.agent());
        let run = async move { channel::run(&*agent, agent.channel().unwrap()).await };
        self.running = Some(tokio::spawn(run));
    }

    async fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
            let _ = running.await;
        }
        self.world.kill_agent().await;
    }

    /// What the daemon has of the network, an address and the host behind it.
    fn peers(&self) -> Vec<String> {
        let table = self.world.daemon.table();
        let peers = table.peers.get("red").into_iter().flat_map(|(_, peers)| peers.values());
        peers.map(|peer| format!("{} {} {}", peer.address, peer.through, peer.daemon)).collect()
    }

    async fn has(&self, what: &[&str]) {
        let wanted: Vec<String> = what.iter().map(|text| (*text).to_owned()).collect();
        let mut last = Vec::new();
        for _ in 0..400 {
            last = self.peers();
            if last == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("{last:?} and not {wanted:?}");
    }

    async fn condition(&self, type_: &str) -> Condition {
        let status = self.world.agent().report().await.unwrap().1;
        status.conditions.into_iter().find(|condition| condition.type_ == type_).unwrap()
    }

    /// Waits until the lists are not followed for this reason.
    async fn ends(&self, reason: &str, word: &str) {
        let mut last = None;
        for _ in 0..400 {
            let found = self.condition("PeersFollowed").await;
            if found.reason == reason && found.message.contains(word) {
                assert!(!found.holds());
                return;
            }
            last = Some(found);
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("{last:?} and not {reason}");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }
}

const ALLOWED: &str = "10.200.0.0/16  ";
const THERE: &str = "10.1.0.0/26 192.0.2.1 192.0.2.1:4790";

fn entry(cidr: &str, host: &str) -> PeerEntry {
    let (through, daemon) = (host.to_owned(), format!("{host}:4790"));
    PeerEntry { cidr: cidr.to_owned(), through, daemon }
}

fn update(generation: u64, whole: bool, add: Vec<PeerEntry>, remove: &[&str]) -> Update {
    Update {
        network: "red".to_owned(),
        network_uid: "uid-red".to_owned(),
        epoch: 5,
        generation,
        whole,
        add,
        remove: remove.iter().map(|cidr| (*cidr).to_owned()).collect(),
        more: false,
        same: false,
    }
}

fn first() -> Update {
    update(1, true, vec![entry("10.1.0.0/26", "192.0.2.1")], &[])
}

fn root() -> pki::Pair {
    pki::new_root(now(), LIFE).unwrap()
}

/// A controller, a node that follows it, and what is said to it.
async fn followed() -> (Controller, Node, Said) {
    let root = root();
    let mut controller = Controller::start(&root, NAME, &root).await;
    let node = Node::new(&root, &controller.at.clone()).await;
    let (_, say) = controller.called().await;
    (controller, node, say)
}

#[tokio::test]
async fn peers_reach_the_daemon_and_come_back_without_a_control_plane() {
    let root = root();
    let mut controller = Controller::start(&root, NAME, &root).await;
    let mut node = Node::new(&root, &controller.at.clone()).await;
    let (asked, say) = controller.called().await;
    assert_eq!((asked.node.as_str(), asked.held.len()), ("node-1", 0));
    node.world.agent().reconcile().await;
    node.has(&[ALLOWED]).await;
    say.send(Ok(first())).await.unwrap();
    node.has(&[THERE, ALLOWED]).await;
    let change = vec![entry("10.1.0.64/26", "192.0.2.2")];
    say.send(Ok(update(2, false, change, &["10.1.0.0/26"]))).await.unwrap();
    let second = "10.1.0.64/26 192.0.2.2 192.0.2.2:4790";
    node.has(&[second, ALLOWED]).await;
    assert_eq!(node.world.daemon.table().told, [true, false, false]);
    assert!(node.condition("PeersFollowed").await.holds());
    assert!(node.condition("Certified").await.holds());
    let status = node.world.agent().report().await.unwrap().1;
    let reported = status.channel.unwrap();
    assert_eq!(reported.endpoint, "127.0.0.1:4790");
    assert_eq!(reported.certificate.unwrap().issuer, pki::Root::read(&root.cert).unwrap().id);
    let seen = eventually("the figures are those of now", || {
        let seen = node.world.agent().snapshot().channel.clone();
        seen.contains(&("peers", "Entries of the lists of peers", 1)).then_some(seen)
    })
    .await;
    let figure = |name: &str| seen.iter().find(|(of, ..)| *of == name).unwrap().2;
    assert_eq!(figure("peers_connected"), 1);
    let soon = i64::try_from(now() + LIFE).unwrap();
    assert!((soon - 60..=soon).contains(&figure("certificate_not_after_seconds")));
    assert!(figure("peers_updated_seconds") > soon - i64::try_from(LIFE).unwrap() - 60);
    // The daemon was told to read the certificate, which lies where it looks.
    let shared = node.world.path("shared/current");
    assert!(node.world.daemon.table().reloads >= 1 && shared.join("cert.pem").exists());
    // The node boots, and neither API server nor controller is there.
    drop((say, controller));
    node.kill().await;
    node.world.daemon.restart();
    std::fs::remove_dir_all(node.world.path("shared")).unwrap();
    assert_eq!(node.peers(), Vec::<String>::new());
    node.start().await;
    node.has(&[second, ALLOWED]).await;
    eventually("the certificate is there", || shared.join("key.pem").exists().then_some(())).await;
    // So it is when only the daemon is another.
    node.world.daemon.restart();
    node.world.agent().reconcile().await;
    node.has(&[second, ALLOWED]).await;
}

#[tokio::test]
async fn what_the_controller_can_continue_is_not_sent_again() {
    let (mut controller, node, say) = followed().await;
    say.send(Ok(first())).await.unwrap();
    node.has(&[THERE, ALLOWED]).await;
    // The replica goes, and the next one hears what there is.
    drop(say);
    let (asked, say) = controller.called().await;
    let held: Vec<_> =
        asked.held.iter().map(|h| (&*h.network_uid, h.epoch, h.generation)).collect();
    assert_eq!(held, [("uid-red", 5, 1)]);
    // One of another run that finds it to be as it is says so.
    let through = Digest::of(&"10.1.0.0/26".parse().unwrap(), "192.0.2.1", "192.0.2.1:4790");
    assert_eq!(asked.held[0].digest, through.to_bytes());
    let same = Update { epoch: 6, same: true, ..update(1, false, Vec::new(), &[]) };
    say.send(Ok(same)).await.unwrap();
    drop(say);
    let (asked, say) = controller.called().await;
    assert_eq!((asked.held[0].epoch, asked.held[0].generation), (6, 1));
    node.has(&[THERE, ALLOWED]).await;
    let update = |generation, whole, add, remove: &[&str]| Update {
        epoch: 6,
        ..update(generation, whole, add, remove)
    };
    say.send(Ok(update(7, false, Vec::new(), &["10.1.0.0/26"]))).await.unwrap();
    node.has(&[ALLOWED]).await;
    // A network that the node does not host any more is no longer asked for.
    let nothing = |spec: &mut Value| *spec = json!({});
    node.world.agent().follow(&object(2, nothing)).await.unwrap();
    drop(say);
    let (asked, _say) = controller.called().await;
    assert_eq!(asked.held.len(), 0);
}

#[tokio::test]
async fn a_controller_that_is_not_good_changes_nothing_and_is_told() {
    let (mut controller, node, say) = followed().await;
    say.send(Ok(first())).await.unwrap();
    node.has(&[THERE, ALLOWED]).await;
    drop(say);
    let good = || vec![entry("10.1.0.64/26", "192.0.2.2")];
    let named = |name: &str, uid: &str| Update {
        network: name.to_owned(),
        network_uid: uid.to_owned(),
        ..update(2, true, good(), &[])
    };
    let bad = [
        (update(2, true, vec![entry("everything", "192.0.2.2")], &[]), "everything"),
        (named("soft", "uid-soft"), "soft"),
    ];
    for (update, word) in bad {
        let (_, say) = controller.called().await;
        say.send(Ok(update)).await.unwrap();
        node.ends("NotUsable", word).await;
    }
    // Half a list, and then it goes.
    let (_, say) = controller.called().await;
    say.send(Ok(Update { more: true, ..update(2, true, good(), &[]) })).await.unwrap();
    drop(say);
    node.ends("Unreachable", "").await;
    assert_eq!(node.peers(), [THERE, ALLOWED]);
    let (asked, say) = controller.called().await;
    assert_eq!(asked.held[0].generation, 1);
    say.send(Err(Status::permission_denied("not your node"))).await.unwrap();
    node.ends("Refused", "not your node").await;
}

#[tokio::test]
async fn a_controller_that_floods_is_heard_a_few_times_a_second() {
    let (_controller, node, say) = followed().await;
    let begin = std::time::Instant::now();
    for generation in 1..=2000 {
        let host = format!("192.0.2.{}", generation % 200 + 1);
        let list = vec![entry("10.1.0.0/26", &host)];
        say.send(Ok(update(generation, true, list, &[]))).await.unwrap();
    }
    let last = "10.1.0.0/26 192.0.2.1 192.0.2.1:4790";
    node.has(&[last, ALLOWED]).await;
    let calls = node.world.daemon.table().told.len();
    // One for each fifth of a second, and one at either end.
    let most = begin.elapsed().as_millis() / 200 + 3;
    assert!(calls as u128 <= most, "{calls} calls in {:?}", begin.elapsed());
}

#[tokio::test]
async fn who_is_not_the_controller_is_not_spoken_with() {
    let (ours, other) = (root(), root());
    // Another authority's, one of another name, and one that does not believe this node.
    let name = "somebody.ns.svc";
    for (root, name, clients) in
        [(&other, NAME, &ours), (&ours, name, &ours), (&ours, NAME, &other)]
    {
        let mut controller = Controller::start(root, name, clients).await;
        let node = Node::new(&ours, &controller.at.clone()).await;
        node.ends("Unreachable", "").await;
        assert!(controller.calls.try_recv().is_err());
        assert!(node.condition("Certified").await.holds());
    }
    // A node's own certificate makes no controller: it has no names.
    let node = Node::new(&ours, "127.0.0.1:1").await;
    node.ends("Unreachable", "cannot connect").await;
}

#[tokio::test]
async fn a_daemon_that_does_not_take_them_is_asked_again_and_told_of() {
    let (_controller, node, say) = followed().await;
    node.world.agent().reconcile().await;
    node.has(&[ALLOWED]).await;
    node.world.daemon.table().fuse = Some(0);
    say.send(Ok(first())).await.unwrap();
    node.ends("DaemonRefuses", "fuse").await;
    assert_eq!(node.peers(), [ALLOWED]);
    node.world.daemon.table().fuse = None;
    node.world.agent().reconcile().await;
    node.has(&[THERE, ALLOWED]).await;
    assert!(node.condition("PeersFollowed").await.holds());
}

/// An object of the cluster.
fn made<T: serde::de::DeserializeOwned>(kind: &str, name: &str, uid: &str, more: &Value) -> T {
    let mut object = json!({
        "apiVersion": "vhost-rdma.io/v1alpha1", "kind": kind,
        "metadata": {"name": name, "uid": uid, "generation": 1},
    });
    let fields = more.as_object().unwrap().clone();
    object.as_object_mut().unwrap().extend(fields);
    serde_json::from_value(object).unwrap()
}

/// The cluster as the controller knows it: the network, this node, and another with a block.
fn cluster(cluster: &mut Cluster, allow: &[&str], daemon: &str) {
    let now = Duration::ZERO;
    let rnic = json!({"fabric": "east", "addressing": "Translated"});
    let spec = json!({"spec": {"rnic": rnic, "allow": allow}});
    cluster.apply(Object::Network(made("RdmaNetwork", "red", "uid-red", &spec)), now);
    let hosted =
        json!({"networks": [{"name": "red", "uid": "uid-red", "vni": 9, "fabric": "east"}]});
    let here = json!({"spec": hosted, "status": {"conditions": []}});
    cluster.apply(Object::RdmaNode(made("RdmaNode", "node-1", "uid-node", &here)), now);
    let rnics = json!([{
        "device": "rxe0", "fabric": "east", "hostAddress": "192.0.2.1", "port": "Active",
    }]);
    let status = json!({"rnics": rnics, "channel": {"endpoint": daemon}, "conditions": []});
    let there = json!({"spec": hosted, "status": status});
    cluster.apply(Object::RdmaNode(made("RdmaNode", "node-2", "uid-2", &there)), now);
    let block = json!({"spec": {
        "network": "red", "networkUid": "uid-red", "cidr": "10.1.0.0/26", "node": "node-2",
    }});
    cluster.apply(Object::Block(made("RdmaIPBlock", "red-10.1.0.0-26", "uid-b", &block)), now);
}

#[tokio::test]
async fn an_agent_and_the_controllers_own_server() {
    let root = root();
    let nodes = shown(&root, NAME, &root);
    let identity = tls::Identity {
        anybody: Arc::clone(&nodes),
        nodes,
        roots: root.cert.clone(),
        token: String::new(),
    };
    let (_identity, known_as) = tokio::sync::watch::channel(Some(identity));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let hub = Arc::new(Hub::new(Arc::new(Metrics::default())));
    let serving = tokio::spawn(serve(listener, known_as, Arc::clone(&hub)));
    let mut world = Cluster::default();
    cluster(&mut world, &["10.200.0.0/16"], "192.0.2.1:4790");
    hub.update(&mut world);
    let node = Node::new(&root, &at).await;
    node.has(&[THERE, ALLOWED]).await;
    // The other node's daemon is elsewhere; then the node has no block any more.
    cluster(&mut world, &["10.200.0.0/16"], "192.0.2.1:4791");
    hub.update(&mut world);
    node.has(&["10.1.0.0/26 192.0.2.1 192.0.2.1:4791", ALLOWED]).await;
    world.remove(vhost_rdma_controller::core::Kind::Block, "red-10.1.0.0-26", Duration::ZERO);
    hub.update(&mut world);
    node.has(&[ALLOWED]).await;
    assert_eq!(node.world.daemon.table().told.iter().filter(|whole| **whole).count(), 1);
    serving.abort();
}
