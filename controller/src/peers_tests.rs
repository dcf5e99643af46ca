//! The service as agents meet it: over TLS, on this machine.

use std::net::SocketAddr;

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use vhost_rdma_cluster_api::Cidr;
use vhost_rdma_cluster_api::peers::Digest;
use vhost_rdma_cluster_api::peers::v1::peers_client::PeersClient;
use vhost_rdma_cluster_api::{
    NODE_PREFIX, NODES, NodeNetwork, RdmaIPBlock, RdmaIPBlockSpec, RdmaNetwork, RdmaNetworkSpec,
    RdmaNode, RdmaNodeSpec, RdmaNodeStatus, Rnic, block_name,
};

use super::*;
use crate::core::Object;
use crate::pki::{self, Pair, Root};

const NAME: &str = "vhost-rdma-controller.vhost-rdma.svc";
const WAIT: Duration = Duration::from_secs(20);

struct Bench {
    pair: Pair,
    hub: Arc<Hub>,
    address: SocketAddr,
    world: World,
}

fn object<T>(made: T, uid: &str, meta: impl Fn(&mut T) -> &mut kube::api::ObjectMeta) -> T {
    let mut made = made;
    meta(&mut made).uid = Some(uid.to_owned());
    made
}

impl Bench {
    /// A network of which `n1` hosts all and `n2` has blocks.
    async fn new() -> Self {
        let pair = pki::new_root(wall(), 86_400).expect("a root");
        let root = Root::read(&pair.cert).expect("a certificate");
        let names = tls::names("vhost-rdma");
        let identity = Identity::new(&pair, &[root], &names).expect("an identity");
        let (sender, shown) = watch::channel(Some(identity));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let hub = Arc::new(Hub::new(Arc::new(Metrics::default())));
        let served = Arc::clone(&hub);
        tokio::spawn(async move {
            serve(listener, shown, served).await;
            drop(sender);
        });
        let mut bench = Self { pair, hub, address, world: World::default() };
        let addressing = vhost_rdma_cluster_api::Addressing::Flat;
        let spec = RdmaNetworkSpec {
            rnic: Some(Rnic { fabric: "f".to_owned(), addressing }),
            ..RdmaNetworkSpec::default()
        };
        let network = object(RdmaNetwork::new("red", spec), "u", |o| &mut o.metadata);
        bench.world.apply(Object::Network(network), Duration::ZERO);
        for name in ["n1", "n2"] {
            let hosted =
                NodeNetwork { name: "red".into(), uid: "u".into(), ..NodeNetwork::default() };
            let spec = RdmaNodeSpec { networks: vec![hosted], ..RdmaNodeSpec::default() };
            let mut node = RdmaNode::new(name, spec);
            node.status = Some(RdmaNodeStatus::default());
            bench.world.apply(Object::RdmaNode(node), Duration::ZERO);
        }
        bench
    }

    fn blocks(&mut self, these: std::ops::Range<u32>) {
        for n in these {
            let cidr = range(n);
            let spec = RdmaIPBlockSpec {
                network: "red".to_owned(),
                network_uid: "u".to_owned(),
                cidr,
                node: "n2".to_owned(),
                releasing: false,
            };
            let block = RdmaIPBlock::new(&block_name("red", &cidr), spec);
            self.world.apply(Object::Block(block), Duration::ZERO);
        }
        self.hub.update(&mut self.world);
    }

    fn own(&self, common: &str, organization: &str, by: &Pair) -> tonic::transport::Identity {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, organization);
        params.distinguished_name.push(DnType::CommonName, common);
        params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())];
        let key = KeyPair::generate().expect("a key");
        let issuer = rcgen::Issuer::from_ca_cert_pem(
            &by.cert,
            KeyPair::from_pem(&by.key).expect("the root's key"),
        );
        let cert = params.signed_by(&key, &issuer.expect("a root")).expect("a certificate");
        tonic::transport::Identity::from_pem(cert.pem(), key.serialize_pem())
    }

    async fn connect(&self, identity: Option<tonic::transport::Identity>) -> PeersClient<Channel> {
        let mut tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.pair.cert))
            .domain_name(NAME);
        if let Some(identity) = identity {
            tls = tls.identity(identity);
        }
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address)).expect("a URL");
        PeersClient::new(endpoint.tls_config(tls).expect("TLS").connect_lazy())
    }

    async fn agent(&self, node: &str) -> PeersClient<Channel> {
        let common = format!("{NODE_PREFIX}{node}");
        self.connect(Some(self.own(&common, NODES, &self.pair))).await
    }
}

fn range(n: u32) -> Cidr {
    let cidr = format!("10.{}.{}.{}/32", n >> 16, n >> 8 & 255, n & 255);
    cidr.parse().expect("a range")
}

fn asks(node: &str, held: Vec<Held>) -> FollowRequest {
    FollowRequest { node: node.to_owned(), held }
}

async fn take(stream: &mut tonic::Streaming<Update>) -> Update {
    let message = tokio::time::timeout(WAIT, stream.message()).await.expect("in time");
    message.expect("no fault").expect("a message")
}

async fn refused(client: &mut PeersClient<Channel>, node: &str) -> tonic::Code {
    let asked = tokio::time::timeout(WAIT, client.follow(asks(node, Vec::new()))).await;
    asked.expect("in time").expect_err("refused").code()
}

#[tokio::test]
async fn an_agent_is_sent_the_list_and_then_what_changes() {
    let mut bench = Bench::new().await;
    bench.blocks(0..1300);
    let mut client = bench.agent("n1").await;
    let mut stream = client.follow(asks("n1", Vec::new())).await.expect("let in").into_inner();
    let mut all = 0;
    let mut last = Update::default();
    for n in 0..3 {
        last = take(&mut stream).await;
        assert!(last.whole && last.network == "red" && last.network_uid == "u");
        assert_eq!(last.more, n < 2);
        all += last.add.len();
    }
    assert_eq!(all, 1300);
    bench.blocks(1300..1301);
    let delta = take(&mut stream).await;
    assert!(!delta.whole && !delta.more && delta.epoch == last.epoch);
    assert_eq!((delta.add.len(), delta.remove.len()), (1, 0));
    assert_eq!(delta.add[0].cidr, "10.0.5.20/32");
    // One that comes back is sent what it lacks; one of another run everything.
    bench.blocks(1301..1303);
    let held = |epoch, digest| {
        let (network_uid, generation) = ("u".to_owned(), delta.generation);
        vec![Held { network_uid, epoch, generation, digest }]
    };
    let mut again =
        client.follow(asks("n1", held(delta.epoch, Vec::new()))).await.expect("in").into_inner();
    let missed = take(&mut again).await;
    assert_eq!((missed.whole, missed.add.len()), (false, 2));
    let ended = loop {
        match tokio::time::timeout(WAIT, stream.message()).await.expect("in time") {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream before ended without a word"),
            Err(status) => break status.code(),
        }
    };
    assert_eq!(ended, tonic::Code::Aborted, "one stream a node");
    let mut other = client.follow(asks("n1", held(1, Vec::new()))).await.expect("in").into_inner();
    assert!(take(&mut other).await.whole);
    let wrong = held(1, Digest::default().to_bytes());
    let mut other = client.follow(asks("n1", wrong)).await.expect("in").into_inner();
    assert!(take(&mut other).await.whole);
    // One of another run that has all of it is told so, and then what changes.
    let all = (0..1303).map(|n| Digest::of(&range(n), "", ""));
    let all = all.fold(Digest::default(), Digest::and);
    let mut same = client.follow(asks("n1", held(1, all.to_bytes()))).await.expect("in");
    let told = take(same.get_mut()).await;
    assert!(told.same && !told.whole && told.epoch == delta.epoch && told.network == "red");
    assert!(told.add.is_empty() && told.remove.is_empty() && !told.more);
    assert_eq!(told.generation, missed.generation);
    bench.blocks(1303..1304);
    let next = take(same.get_mut()).await;
    assert_eq!((next.whole, next.same, next.add.len()), (false, false, 1));
    // Its own blocks are not among what a node is told.
    let mut owner = bench.agent("n2").await;
    let mut stream = owner.follow(asks("n2", Vec::new())).await.expect("in").into_inner();
    let own = take(&mut stream).await;
    assert!(own.whole && own.add.is_empty() && !own.more);
}

#[tokio::test]
async fn only_a_node_is_let_in_and_only_as_itself() {
    let mut bench = Bench::new().await;
    let mut early = bench.agent("n1").await;
    assert_eq!(refused(&mut early, "n1").await, tonic::Code::Unavailable);
    bench.blocks(0..1);
    assert_eq!(refused(&mut early, "n2").await, tonic::Code::PermissionDenied);
    // A certificate of the authority that is not a node's.
    let server = bench.own("vhost-rdma-controller", "x", &bench.pair);
    let mut server = bench.connect(Some(server)).await;
    assert_eq!(refused(&mut server, "n1").await, tonic::Code::Unauthenticated);
    // None at all, and that of another authority: no further than the handshake.
    let mut nobody = bench.connect(None).await;
    // TLS 1.3 tells a client of it in the midst of its request or before.
    let cut = [tonic::Code::Unavailable, tonic::Code::Unknown];
    assert!(cut.contains(&refused(&mut nobody, "n1").await));
    let foreign = pki::new_root(wall(), 86_400).expect("a root");
    let foreign = bench.own("vhost-rdma:node:n1", NODES, &foreign);
    let mut foreign = bench.connect(Some(foreign)).await;
    assert!(cut.contains(&refused(&mut foreign, "n1").await));
    // A node that hosts nothing hears nothing.
    let mut idle = bench.agent("n9").await;
    let mut stream = idle.follow(asks("n9", Vec::new())).await.expect("in").into_inner();
    let heard = tokio::time::timeout(Duration::from_millis(300), stream.message()).await;
    assert!(heard.is_err(), "{heard:?}");
    let most = (0..=HELD_MAX).map(|_| Held::default()).collect();
    let said = idle.follow(asks("n9", most)).await.expect_err("too many");
    assert_eq!(said.code(), tonic::Code::InvalidArgument);
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_nobody_up() {
    let mut bench = Bench::new().await;
    bench.blocks(0..60_000);
    let mut slow = bench.agent("n1").await;
    let unread = slow.follow(asks("n1", Vec::new())).await.expect("in").into_inner();
    let mut quick = bench.agent("n2").await;
    let mut stream = quick.follow(asks("n2", Vec::new())).await.expect("in").into_inner();
    assert!(take(&mut stream).await.whole);
    // Changes go on, and the quick one hears of each; the slow one's stream is as long as it was.
    for n in 0..50 {
        bench.blocks(60_000 + n..60_001 + n);
        let heard = take(&mut stream).await;
        assert!(!heard.whole);
    }
    drop(unread);
    // Whoever read nothing is told everything, once.
    let mut again = slow.follow(asks("n1", Vec::new())).await.expect("in").into_inner();
    let mut all = 0;
    loop {
        let update = take(&mut again).await;
        assert!(update.whole);
        all += update.add.len();
        if !update.more {
            break;
        }
    }
    assert_eq!(all, 60_050);
}
