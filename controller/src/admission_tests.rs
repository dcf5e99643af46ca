//! Reviews: what is asked, what is answered, and who is answered at all.

use std::net::SocketAddr;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::pki::{self, Root};
use crate::trust::wall;

/// A server, its address, and what a client needs to know it.
async fn served() -> (SocketAddr, TlsConnector) {
    let pair = pki::new_root(wall(), 86_400).expect("a root");
    let root = Root::read(&pair.cert).expect("a certificate");
    let made = Identity::new(&pair, &[root], &tls::names("vhost-rdma")).expect("an identity");
    let made = Identity { token: "secret".to_owned(), ..made };
    let (sender, identity) = watch::channel(Some(made));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let config = kube::Config::new("http://127.0.0.1:1".parse().expect("an address"));
    let client = Client::try_from(config).expect("a client");
    let (engine, _) = mpsc::channel(1);
    let gate = Gate { client, engine, metrics: Arc::default(), identity };
    tokio::spawn(async move {
        serve(listener, gate).await;
        drop(sender);
    });
    let mut roots = RootCertStore::empty();
    let der = CertificateDer::from_pem_slice(pair.cert.as_bytes()).expect("a certificate");
    roots.add(der).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS")
        .with_root_certificates(roots)
        .with_no_client_auth();
    (address, TlsConnector::from(Arc::new(config)))
}

/// Sends a request, on a connection that is not to end.
async fn ask(stream: TcpStream, tls: &TlsConnector, path: &str) -> TlsStream<TcpStream> {
    let name = ServerName::try_from("vhost-rdma-controller.vhost-rdma.svc").expect("a name");
    let mut stream = tls.connect(name, stream).await.expect("a handshake");
    let text = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}");
    stream.write_all(text.as_bytes()).await.expect("a request");
    stream
}

#[tokio::test]
async fn who_is_not_the_api_server_takes_no_place_from_it() {
    let (address, tls) = served().await;
    let connect = || async { TcpStream::connect(address).await.expect("a connection") };
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(connect().await);
    }
    let own = async {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind("127.0.0.2:0".parse().expect("an address")).expect("another address");
        let stream = socket.connect(address).await.expect("a connection");
        let mut own = ask(stream, &tls, "/admit/secret").await;
        let mut said = [0; 12];
        own.read_exact(&mut said).await.expect("an answer");
        assert_eq!(&said, b"HTTP/1.1 400", "it was no review");
    };
    let limit = Duration::from_secs(1);
    tokio::time::timeout(limit, own).await.expect("in a second");
    // One that guesses is told so and is gone; one that says nothing any more has ten seconds.
    let mut guess = ask(connect().await, &tls, "/admit/guess").await;
    let mut said = Vec::new();
    let end = tokio::time::timeout(limit, guess.read_to_end(&mut said)).await;
    let _ = end.expect("it ends");
    assert!(said.starts_with(b"HTTP/1.1 404"));
    let name = ServerName::try_from("vhost-rdma-controller.vhost-rdma.svc").expect("a name");
    let mut idle = tls.connect(name, connect().await).await.expect("a handshake");
    let end = tokio::time::timeout(UNKNOWN * 2, idle.read(&mut [0; 64])).await;
    assert!(matches!(end.expect("it ends"), Ok(0) | Err(_)));
}

fn pod(spec: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod")
}

fn container(pools: &[(&str, &str)]) -> Value {
    let limits: BTreeMap<String, &str> =
        pools.iter().map(|(pool, count)| (format!("vhost-rdma.io/{pool}"), *count)).collect();
    json!({"name": "c", "resources": {"limits": limits}})
}

#[test]
fn what_a_pod_asks_for_is_what_it_can_hold_at_a_time() {
    let count = |spec: Value| asked(&pod(&spec)).into_iter().collect::<Vec<_>>();
    assert!(count(json!({"containers": [{"name": "c"}]})).is_empty());
    let two = json!({"containers": [container(&[("blue", "1")]), container(&[("blue", "2")])]});
    assert_eq!(count(two), [("blue".to_owned(), 3)]);
    let init = json!({
        "initContainers": [container(&[("blue", "5")]), container(&[("red", "1")])],
        "containers": [container(&[("blue", "2")])],
    });
    assert_eq!(count(init), [("blue".to_owned(), 5), ("red".to_owned(), 1)]);
    let mut sidecar = container(&[("blue", "2")]);
    sidecar["restartPolicy"] = "Always".into();
    let with = json!({
        "initContainers": [sidecar, container(&[("blue", "4")])],
        "containers": [container(&[("blue", "3")])],
    });
    assert_eq!(count(with), [("blue".to_owned(), 6)]);
    let large = json!({"containers": [container(&[("blue", "1k")])]});
    assert_eq!(count(large), [("blue".to_owned(), u32::MAX)]);
    let requests = json!({"containers": [
        {"name": "c", "resources": {"requests": {"vhost-rdma.io/blue": "2"}}}]});
    assert_eq!(count(requests), [("blue".to_owned(), 2)]);
}

/// A gate whose copy of the cluster knows of these users; what it was asked about.
fn gate(users: &'static [&'static str]) -> (Gate, mpsc::UnboundedReceiver<Leaving>) {
    let config = kube::Config::new("http://127.0.0.1:1".parse().expect("an address"));
    let client = Client::try_from(config).expect("a client");
    let (engine, mut questions) = mpsc::channel(1);
    let (told, asked) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Question::Users(leaving, answer)) = questions.recv().await {
            told.send(leaving).expect("somebody listens");
            let users = users.iter().map(|user| (*user).to_owned()).collect();
            answer.send(users).expect("somebody asked");
        }
    });
    let (_, identity) = watch::channel(None);
    (Gate { client, engine, metrics: Arc::default(), identity }, asked)
}

/// Of a collection that is deleted each object is asked about, and the request has no name
/// (apiserver, `DeleteCollection`); so a namespace ends.
fn one_of_all(resource: &str, namespace: &str, object: &Value) -> Asked {
    let review = json!({"request": {
        "uid": "u", "operation": "DELETE", "namespace": namespace, "object": null,
        "resource": {"group": GROUP, "version": "v1alpha1", "resource": resource},
        "oldObject": object,
    }});
    let review: Review = serde_json::from_value(review).expect("a review");
    review.request.expect("a request")
}

#[tokio::test]
async fn what_is_deleted_with_all_others_is_asked_about_by_its_own_name() {
    let (gate, mut asked) = gate(&["a/p"]);
    let blue = json!({"metadata": {"name": "blue"}});
    let refused = gate.admit(&one_of_all("rdmanetworks", "", &blue)).await;
    assert!(matches!(refused, Err((403, why)) if why.contains("\"blue\"")));
    assert_eq!(asked.recv().await, Some(Leaving::Network("blue".to_owned())));
    let db = json!({"metadata": {"name": "db", "namespace": "a"}});
    let refused = gate.admit(&one_of_all("rdmanics", "a", &db)).await;
    assert!(matches!(refused, Err((403, _))));
    assert_eq!(asked.recv().await, Some(Leaving::Nic("a".to_owned(), "db".to_owned())));
}

#[tokio::test]
async fn a_nic_that_was_claimed_a_moment_ago_is_not_deleted() {
    let (gate, _asked) = gate(&[]);
    let mut db = json!({
        "metadata": {"name": "db", "namespace": "a"},
        "status": {"node": "n1", "pod": "q", "podUid": "uid"},
    });
    let refused = gate.admit(&one_of_all("rdmanics", "a", &db)).await;
    assert!(matches!(refused, Err((403, why)) if why.contains("a/q")));
    db["status"] = json!({"conditions": []});
    assert_eq!(gate.admit(&one_of_all("rdmanics", "a", &db)).await, Ok(()));
}

#[test]
fn a_refusal_has_a_code_and_a_sentence() {
    let text = answer("u", Err((403, "full".to_owned())));
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["response"]["allowed"], false);
    assert_eq!(value["response"]["status"], json!({"code": 403, "message": "full"}));
    let value: Value = serde_json::from_str(&answer("u", Ok(()))).expect("JSON");
    assert_eq!(value["response"], json!({"uid": "u", "allowed": true}));
}
