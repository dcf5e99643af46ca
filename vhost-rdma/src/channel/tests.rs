//! The channel under floods: of a guest's datagrams, and of strangers' connections.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::inbound::HANDSHAKE;
use super::*;
use crate::cm::{Inbox, MAD_LEN};
use crate::link::Gid;
use crate::rnic::{PER_NIC, Peer, Remote};

const HOST: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// Connections of daemons, where a test asks for no other number.
const DAEMONS: usize = 64;
const STRANGE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
/// More than there are places for strangers and daemons together.
const MANY: usize = 300;

fn gid(host: u8) -> Gid {
    Ipv4Addr::new(10, 0, 0, host).to_ipv6_mapped().octets()
}

fn mad(source: u8, first: u8) -> Mad {
    let mut bytes = [0; MAD_LEN];
    bytes[0] = first;
    Mad { source: gid(source), dest: gid(2), traffic_class: 0, sl: 0, bytes }
}

#[test]
fn a_flood_of_datagrams_takes_no_other_nics_place() {
    let (queue, mut waiting) = mpsc::unbounded_channel();
    let out = Out { queue };
    let daemon: Arc<str> = "192.0.2.1:4790".into();
    // More than a queue with room for so many would take.
    let flooders: [NicQuota; 20] = std::array::from_fn(|_| NicQuota::default());
    let bystander = NicQuota::default();
    for _ in 0..1000 {
        for quota in &flooders {
            out.carry(quota, &daemon, "net", mad(1, 0));
        }
    }
    assert!(out.carry(&bystander, &daemon, "net", mad(3, 0)), "there is room for who floods not");
    let mut order = Vec::new();
    while let Ok(outgoing) = waiting.try_recv() {
        order.push(outgoing.frame.mad.source);
        drop(outgoing);
        if !order.contains(&gid(3)) {
            flooders.iter().for_each(|quota| while out.carry(quota, &daemon, "net", mad(1, 0)) {});
        }
    }
    let ahead = order.iter().position(|source| *source == gid(3));
    assert_eq!(ahead, Some(flooders.len() * PER_NIC), "it waits for a share of each, no more");
}

/// Certificates for the same host, by an authority of their own.
struct Certified {
    _dir: tempfile::TempDir,
    identities: Vec<Identity>,
}

impl Certified {
    fn new() -> Self {
        Self::many(2)
    }

    fn many(count: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, pem: String| -> PathBuf {
            let path = dir.path().join(name);
            std::fs::write(&path, pem).unwrap();
            path
        };
        let key = KeyPair::generate().unwrap();
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = write("ca.pem", authority.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(authority, key);
        let identity = |n| {
            let key = KeyPair::generate().unwrap();
            let own = CertificateParams::new(vec![HOST.to_string()]).unwrap();
            let cert = write(&format!("{n}.pem"), own.signed_by(&key, &issuer).unwrap().pem());
            let key = write(&format!("{n}.key"), key.serialize_pem());
            Identity::of(&Pems::read(&Files { cert, key, ca: ca.clone() }).unwrap()).unwrap()
        };
        let identities = (0..count).map(identity).collect();
        Self { _dir: dir, identities }
    }
}

/// A daemon that listens for another, which has the guest 10.0.0.1, and its own guest 10.0.0.2.
struct Listening {
    at: SocketAddr,
    certified: Certified,
    inbox: Arc<Inbox>,
    identity: watch::Sender<Known>,
}

impl Listening {
    async fn new() -> Self {
        Self::with(Certified::new(), DAEMONS).await
    }

    async fn with(certified: Certified, daemons: usize) -> Self {
        let inbox = Arc::new(Inbox::new(Arc::new(|| {})));
        let directory: Arc<Directory> = Arc::default();
        directory.add_holder(("rxe0", 7, gid(2)), gid(2), inbox.clone());
        let (address, through) = (Ipv4Addr::new(10, 0, 0, 1).into(), None);
        let daemon = format!("{HOST}:4790").into();
        let remote = Some(Remote { daemon, host: HOST.to_string().into(), network: "net".into() });
        directory.set_peers(7, vec![Peer { address, prefix_len: 32, through, remote }]);
        let listener = TcpListener::bind((HOST, 0)).await.unwrap();
        let at = listener.local_addr().unwrap();
        let (identity, known_as) = watch::channel(Some(certified.identities[0].clone()));
        tokio::spawn(inbound::listen(listener, known_as, directory, daemons));
        Self { at, certified, inbox, identity }
    }

    /// The other daemon's connection, unless it takes longer than that daemon waits.
    async fn connect(&self) -> Option<TlsStream<TcpStream>> {
        self.connect_by(0).await
    }

    /// With one or the other certificate.
    async fn connect_by(&self, certificate: usize) -> Option<TlsStream<TcpStream>> {
        let connector = TlsConnector::from(self.certified.identities[certificate].client.clone());
        let made = async {
            let stream = TcpStream::connect(self.at).await?;
            connector.connect(ServerName::from(IpAddr::from(HOST)), stream).await
        };
        timeout(HANDSHAKE, made).await.ok()?.ok()
    }

    /// Sends a datagram of its guest and waits for it where it must arrive.
    async fn brings(&self, stream: &mut TlsStream<TcpStream>, first: u8) -> bool {
        let frame = Frame { network: "net".to_owned(), mad: mad(1, first) };
        stream.write_all(&frame.encode().unwrap()).await.unwrap();
        stream.flush().await.unwrap();
        let arrives = async {
            loop {
                if let Some(mad) = self.inbox.take() {
                    return mad.bytes[0] == first;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(HANDSHAKE, arrives).await.unwrap_or(false)
    }

    /// A connection of somebody who says nothing.
    async fn stranger(at: SocketAddr, from: Ipv4Addr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        socket.connect(at).await.unwrap()
    }

    async fn strangers(&self, from: Ipv4Addr) -> Vec<TcpStream> {
        let mut all = Vec::new();
        for _ in 0..MANY {
            all.push(Self::stranger(self.at, from).await);
        }
        all
    }
}

/// How many of these have not ended.
async fn open(connections: &mut [impl AsyncRead + Unpin]) -> usize {
    let mut open = 0;
    for connection in connections {
        let mut byte = [0];
        let heard = connection.read(&mut byte);
        open += usize::from(timeout(Duration::from_millis(20), heard).await.is_err());
    }
    open
}

#[tokio::test]
async fn strangers_who_say_nothing_keep_no_daemon_out() {
    let listening = Listening::new().await;
    // From elsewhere, and from the daemon's own address.
    let _held = (listening.strangers(STRANGE).await, listening.strangers(HOST).await);
    let mut stream = listening.connect().await.expect("a daemon finds a place");
    assert!(listening.brings(&mut stream, 1).await);
    let _more = (listening.strangers(STRANGE).await, listening.strangers(HOST).await);
    assert!(listening.brings(&mut stream, 2).await, "and keeps it");
}

#[tokio::test]
async fn strangers_who_come_all_the_time_keep_no_daemon_at_another_address_out() {
    let listening = Listening::new().await;
    let at = listening.at;
    let mut held: std::collections::VecDeque<_> = listening.strangers(STRANGE).await.into();
    let flood = tokio::spawn(async move {
        loop {
            held.pop_front();
            held.push_back(Listening::stranger(at, STRANGE).await);
        }
    });
    for first in 1..10 {
        let mut stream = listening.connect().await.expect("a daemon finds a place");
        assert!(listening.brings(&mut stream, first).await);
    }
    assert!(!flood.is_finished(), "they came until the end");
    flood.abort();
}

#[tokio::test]
async fn there_are_no_more_connections_than_places() {
    let listening = Listening::new().await;
    let mut held = listening.strangers(STRANGE).await;
    assert_eq!(open(&mut held).await, inbound::STRANGERS);
}

#[tokio::test]
async fn a_daemon_that_opens_many_connections_loses_its_own() {
    let listening = Listening::new().await;
    let mut stream = listening.connect().await.unwrap();
    let mut held = Vec::new();
    for _ in 0..inbound::OF_ONE + 6 {
        held.push(listening.connect_by(1).await.expect("a daemon finds a place"));
    }
    assert!(listening.brings(&mut stream, 1).await);
    assert_eq!(open(&mut held).await, inbound::OF_ONE);
}

#[tokio::test]
async fn a_hundred_daemons_are_heard_at_once() {
    let listening = Listening::with(Certified::many(100), 100).await;
    let mut held = Vec::new();
    for n in 0..100 {
        held.push(listening.connect_by(n).await.expect("a daemon finds a place"));
    }
    for (stream, first) in held.iter_mut().zip(0..) {
        assert!(listening.brings(stream, first).await, "daemon {first}");
    }
}

#[tokio::test]
async fn there_are_as_many_daemons_as_the_operator_chose() {
    let listening = Listening::with(Certified::many(12), 5).await;
    let mut held = Vec::new();
    for n in 0..12 {
        held.push(listening.connect_by(n).await.expect("a daemon finds a place"));
    }
    assert_eq!(open(&mut held).await, 5);
    let newest = held.last_mut().unwrap();
    assert!(listening.brings(newest, 1).await, "the newest has its place");
}

#[tokio::test]
async fn a_nic_that_speaks_to_many_daemons_takes_no_other_nics_connection() {
    let certified = Certified::new();
    let listener = TcpListener::bind((HOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (queue, waiting) = mpsc::unbounded_channel();
    let out = Out { queue };
    let (_identity, known_as) = watch::channel(Some(certified.identities[0].clone()));
    tokio::spawn(link::dispatch(waiting, known_as, 3));
    let (flooder, bystander) = (NicQuota::default(), NicQuota::default());
    // Every address of 127.0.0.0/8 is the listener's; it says nothing, and so TLS never begins.
    let any = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
    let many = any.local_addr().unwrap().port();
    let daemon: Arc<str> = format!("{HOST}:{port}").into();
    assert!(out.carry(&bystander, &daemon, "net", mad(3, 0)));
    let (mut theirs, _) = listener.accept().await.unwrap();
    let mut flood = Vec::new();
    for n in 1..20 {
        let daemon: Arc<str> = format!("127.0.1.{n}:{many}").into();
        assert!(out.carry(&flooder, &daemon, "net", mad(1, 0)));
        flood.push(any.accept().await.unwrap().0);
    }
    let hello = |stream: TcpStream| async move {
        // The beginning of TLS is there; what follows is nothing, or the end.
        let (mut stream, mut bytes) = (stream, [0; 4096]);
        let first = stream.read(&mut bytes).await.unwrap_or(0);
        let more = timeout(Duration::from_millis(200), stream.read(&mut bytes)).await;
        first > 0 && more.is_err()
    };
    let mut there = 0;
    for stream in flood {
        there += usize::from(hello(stream).await);
    }
    assert_eq!(there, 2, "as many as are left");
    let mut bytes = [0; 4096];
    assert!(theirs.read(&mut bytes).await.unwrap() > 0);
    assert_eq!(open(std::slice::from_mut(&mut theirs)).await, 1, "the bystander's is there");
}

#[tokio::test]
async fn certificates_that_are_renewed_end_connections_by_the_old_ones() {
    let listening = Listening::new().await;
    let mut stream = listening.connect().await.unwrap();
    assert!(listening.brings(&mut stream, 1).await);
    // Another authority: whoever has a certificate of the old one is a stranger now.
    let other = Certified::new();
    listening.identity.send_replace(Some(other.identities[0].clone()));
    assert_eq!(open(std::slice::from_mut(&mut stream)).await, 0, "it is not spoken with any more");
    let mut refused = listening.connect().await;
    let entered = match &mut refused {
        Some(stream) => listening.brings(stream, 2).await,
        None => false,
    };
    assert!(!entered, "the old authority's daemon is let in");
    let listening = Listening { certified: other, ..listening };
    let mut stream = listening.connect().await.expect("the new one's is");
    assert!(listening.brings(&mut stream, 3).await);
}
