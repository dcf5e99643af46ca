//! One authority takes the place of another while two daemons speak to each other: both are trusted
//! for a while, certificates are renewed in any order, and then the old one goes.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::time::sleep;

use super::*;
use crate::cm::{Inbox, MAD_LEN};
use crate::link::Gid;
use crate::rnic::{Peer, Remote};

const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(127, 0, 0, 1), Ipv4Addr::new(127, 0, 0, 2)];
/// How long it may take until something arrives.
const PATIENCE: Duration = Duration::from_secs(10);

fn gid(host: usize) -> Gid {
    let last = u8::try_from(host + 1).unwrap();
    Ipv4Addr::new(10, 0, 0, last).to_ipv6_mapped().octets()
}

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut own = CertificateParams::new(Vec::new()).unwrap();
        own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = own.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(own, key) }
    }
}

/// A daemon's channel with one guest, 10.0.0.1 or 10.0.0.2.
struct Side {
    renewal: Renewal,
    files: Files,
    out: Out,
    quota: NicQuota,
    inbox: Arc<Inbox>,
    other: Arc<str>,
}

fn certify(files: &Files, host: usize, by: &Authority) {
    let key = KeyPair::generate().unwrap();
    let own = CertificateParams::new(vec![HOSTS[host].to_string()]).unwrap();
    fs::write(&files.cert, own.signed_by(&key, &by.issuer).unwrap().pem()).unwrap();
    fs::write(&files.key, key.serialize_pem()).unwrap();
}

fn trust(files: &Files, roots: &[&Authority]) {
    let all: String = roots.iter().map(|root| root.pem.as_str()).collect();
    fs::write(&files.ca, all).unwrap();
}

fn settings(files: &Files) -> Settings {
    let listen = (HOSTS[0], 0).into();
    Settings { listen, files: files.clone(), daemons: 8, wait: true }
}

impl Side {
    fn reload(&self) {
        let settings = settings(&self.files);
        assert!(self.renewal.read(&settings).unwrap().take_effect(), "something is new");
    }

    async fn new(dir: &Path, host: usize, at: [SocketAddr; 2], root: &Authority) -> Self {
        let side = Self::bare(dir, host, at).await;
        certify(&side.files, host, root);
        trust(&side.files, &[root]);
        side.reload();
        side
    }

    /// One without a certificate.
    async fn bare(dir: &Path, host: usize, at: [SocketAddr; 2]) -> Self {
        let path = |what: &str| dir.join(format!("{host}.{what}"));
        let files = Files { cert: path("pem"), key: path("key"), ca: path("ca") };
        let inbox = Arc::new(Inbox::new(Arc::new(|| {})));
        let directory: Arc<Directory> = Arc::default();
        directory.add_holder(("rxe0", 7, gid(host)), gid(host), inbox.clone());
        let other: Arc<str> = at[1 - host].to_string().into();
        let remote = Remote {
            daemon: other.clone(),
            host: HOSTS[1 - host].to_string().into(),
            network: "net".into(),
        };
        let address = std::net::IpAddr::from(gid(1 - host)).to_canonical();
        let peer = Peer { address, prefix_len: 32, through: None, remote: Some(remote) };
        directory.set_peers(7, vec![peer]);
        let (queue, waiting) = mpsc::unbounded_channel();
        let listener = tokio::net::TcpListener::bind(at[host]).await.unwrap();
        let pems = settings(&files).pems().unwrap();
        let identity = pems.as_ref().map(|pems| Identity::of(pems).unwrap());
        let (identity, known_as) = watch::channel(identity);
        tokio::spawn(inbound::listen(listener, known_as.clone(), directory, 8));
        tokio::spawn(link::dispatch(waiting, known_as, 8));
        let give = GiveIdentity(identity);
        let renewal = Renewal::new(pems, move |pems| give.give(&pems).unwrap());
        let out = Out { queue };
        Self { renewal, files, out, quota: NicQuota::default(), inbox, other }
    }

    /// As a connection manager does: sends, and sends again.
    fn send(&self, host: usize) {
        let (source, dest) = (gid(host), gid(1 - host));
        let mad = Mad { source, dest, traffic_class: 0, sl: 0, bytes: [0; MAD_LEN] };
        self.out.carry(&self.quota, &self.other, "net", mad);
    }
}

/// Whether datagrams arrive on both sides within a time, while both send.
async fn speak(sides: &[Side; 2], patience: Duration) -> [bool; 2] {
    let mut heard = [0, 0];
    let begin = Instant::now();
    while begin.elapsed() < patience && heard.iter().any(|count| *count < 5) {
        for (host, side) in sides.iter().enumerate() {
            side.send(host);
            while side.inbox.take().is_some() {
                heard[host] += 1;
            }
        }
        sleep(Duration::from_millis(5)).await;
    }
    heard.map(|count| count >= 5)
}

#[tokio::test]
async fn an_authority_takes_the_place_of_another_under_traffic() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (Authority::new(), Authority::new());
    let free = |host| TcpListener::bind((host, 0)).unwrap().local_addr().unwrap();
    let at = HOSTS.map(free);
    let sides =
        [Side::new(dir.path(), 0, at, &old).await, Side::new(dir.path(), 1, at, &old).await];
    assert_eq!(speak(&sides, PATIENCE).await, [true; 2], "with one authority");
    // Both roots, one daemon after the other.
    for side in &sides {
        trust(&side.files, &[&old, &new]);
        side.reload();
        assert_eq!(speak(&sides, PATIENCE).await, [true; 2], "while both are trusted");
    }
    // New certificates: for a while one is of the old authority and one of the new.
    for (host, side) in sides.iter().enumerate() {
        certify(&side.files, host, &new);
        side.reload();
        assert_eq!(speak(&sides, PATIENCE).await, [true; 2], "with certificate {host} renewed");
    }
    for side in &sides {
        trust(&side.files, &[&new]);
        side.reload();
        assert_eq!(speak(&sides, PATIENCE).await, [true; 2], "without the old root");
    }
    // Who comes with a certificate of the old authority now is nobody.
    certify(&sides[1].files, 1, &old);
    trust(&sides[1].files, &[&old, &new]);
    sides[1].reload();
    // What was on its way.
    speak(&sides, Duration::from_millis(300)).await;
    assert_eq!(speak(&sides, Duration::from_secs(2)).await, [false; 2], "the old one is refused");
    certify(&sides[1].files, 1, &new);
    sides[1].reload();
    assert_eq!(speak(&sides, PATIENCE).await, [true; 2], "and let in again");
}

#[tokio::test]
async fn a_certificate_that_comes_later_is_taken_up_and_not_lost_again() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let free = |host| TcpListener::bind((host, 0)).unwrap().local_addr().unwrap();
    let at = HOSTS.map(free);
    let first = Side::new(dir.path(), 0, at, &authority).await;
    let early = Side::bare(dir.path(), 1, at).await;
    let nothing = early.renewal.read(&settings(&early.files)).unwrap();
    assert!(!nothing.take_effect(), "it is not there yet");
    let sides = [first, early];
    assert_eq!(speak(&sides, Duration::from_millis(500)).await, [false; 2]);
    certify(&sides[1].files, 1, &authority);
    trust(&sides[1].files, &[&authority]);
    sides[1].reload();
    assert_eq!(speak(&sides, PATIENCE).await, [true; 2]);
    fs::remove_file(&sides[1].files.cert).unwrap();
    assert!(sides[1].renewal.read(&settings(&sides[1].files)).is_err());
    assert_eq!(speak(&sides, PATIENCE).await, [true; 2], "it goes on with the one it has");
    let must = Settings { wait: false, ..settings(&sides[1].files) };
    assert!(must.pems().is_err(), "who does not wait wants it at once");
}
