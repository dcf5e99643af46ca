//! rdma_cm between daemons: datagrams of QP 1 reach guests behind another daemon, and only from
//! whom the operator said.
//!
//! Two daemons on addresses of their own of the loopback interface, their NICs on null host verbs:
//! what is carried here never touches an RNIC.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test")]

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustix::process::{Pid, Signal, kill_process};
use virtual_guest::daemon::{Daemon, DaemonOptions, patience};
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::{Av, SendWr};
use virtual_guest::spec::{GSI_QKEY, event};
use virtual_guest::world::{End, Node, Watchdog, ipv4_gid, pattern};

const A: &str = "127.0.0.1";
const B: &str = "127.0.0.2";
const MAD: usize = 256;
const GRH: usize = 40;

/// An authority, and the directory with what it made.
struct Authority {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let own = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), own.pem()).unwrap();
        Self { dir, issuer: Issuer::new(params, key) }
    }

    /// The file of a certificate for `host`, whose key lies beside it.
    fn certify(&self, host: &str) -> String {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let path = self.dir.path().join(format!("{host}.pem"));
        std::fs::write(&path, cert.pem()).unwrap();
        std::fs::write(path.with_extension("key"), key.serialize_pem()).unwrap();
        path.display().to_string()
    }

    fn ca(&self) -> String {
        self.dir.path().join("ca.pem").display().to_string()
    }
}

/// A daemon with the network `net`, and where others reach it.
struct Host {
    daemon: Daemon,
    at: String,
}

impl Host {
    /// A daemon at `address` with a certificate for `name`.
    fn start(address: &str, authority: &Authority, name: &str) -> Self {
        // Nobody takes it between here and there but by the worst of luck.
        let port = TcpListener::bind((address, 0)).unwrap().local_addr().unwrap().port();
        let at = format!("{address}:{port}");
        let cert = authority.certify(name);
        Self::spawn(at, &cert, authority.ca(), &[])
    }

    /// A daemon with these files, which need not be there yet.
    fn spawn(at: String, cert: &str, ca: String, more: &[&str]) -> Self {
        let key = Path::new(cert).with_extension("key").display().to_string();
        let options = ["--cm-listen", &at, "--cm-cert", cert, "--cm-key", &key, "--cm-ca"];
        let mut args: Vec<String> = options.map(str::to_owned).into();
        args.push(ca);
        args.extend(more.iter().map(|arg| (*arg).to_owned()));
        let daemon = Daemon::spawn(&DaemonOptions { args, ..DaemonOptions::default() });
        daemon.add_network("net", 100);
        Self { daemon, at }
    }

    /// QP 1 of a guest with the address 10.0.0.`host`.
    fn guest(&self, network: &str, host: u8) -> End {
        let backing = ["--backing", "rnic:null@192.0.2.1"];
        let socket = self.daemon.add_nic(&format!("nic{host}"), network, &backing);
        let guest = Guest::connect(&socket, GuestConfig::default()).unwrap();
        Node::start(format!("nic{host}"), socket, guest, ipv4_gid(0, host)).gsi()
    }

    /// Lets the guests of a network reach 10.0.0.`host`, which `other` serves.
    fn add_peer(&self, network: &str, host: u8, other: &Self) {
        let peer = format!("10.0.0.{host}");
        self.daemon.run(&["peer", "add", &peer, "--network", network, "--daemon", &other.at]);
    }

    /// Waits until the daemon has said something.
    fn says(&self, what: &str) {
        let deadline = Instant::now() + Duration::from_secs(10) * patience();
        while !self.daemon.log().contains(what) {
            assert!(Instant::now() < deadline, "not said: {what}\n{}", self.daemon.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A guest on each of two daemons, and their entries for each other.
fn guests_that_meet(a: &Host, b: &Host) -> (End, End) {
    let guests = (a.guest("net", 1), b.guest("net", 2));
    a.add_peer("net", 2, b);
    b.add_peer("net", 1, a);
    guests
}

/// Sends a datagram of QP 1.
fn send(from: &mut End, to: [u8; 16], seed: u64) {
    let data = from.node.area_of(&pattern(seed, MAD));
    let ah = from.node.ctx.create_ah(from.node.pdn, &Av::to(to)).unwrap();
    from.run_ok(&SendWr::datagram(seed, &[data.sge()], ah, 1, GSI_QKEY));
}

/// Sends one and looks at it where it arrives.
fn exchange(from: &mut End, to: &mut End, seed: u64) {
    let area = to.node.area((GRH + MAD) as u64);
    to.qp.post_recv(seed, &[area.sge()]);
    send(from, to.node.gid, seed);
    let received = to.rcq.ok();
    assert_eq!((received.wr_id, received.src_qp), (seed, 1));
    let bytes = area.bytes();
    assert_eq!(bytes[GRH..], pattern(seed, MAD));
    assert_eq!(bytes[32..36], from.node.gid[12..], "as the guest of the other daemon knows itself");
    assert_eq!(bytes[36..40], to.node.gid[12..]);
}

/// A datagram that must not arrive.
fn stays_away(from: &mut End, to: &mut End) {
    let area = to.node.area((GRH + MAD) as u64);
    to.qp.post_recv(99, &[area.sge()]);
    send(from, to.node.gid, 99);
    to.rcq.silent(Duration::from_millis(200));
    assert!(area.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn datagrams_reach_guests_behind_another_daemon_until_the_peer_is_removed() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let authority = Authority::new();
    let (a, b) = (Host::start(A, &authority, A), Host::start(B, &authority, B));
    let (mut on_a, mut on_b) = guests_that_meet(&a, &b);
    for seed in 0..20 {
        exchange(&mut on_a, &mut on_b, 2 * seed);
        exchange(&mut on_b, &mut on_a, 2 * seed + 1);
    }
    b.daemon.run(&["peer", "rm", "10.0.0.1", "--network", "net"]);
    stays_away(&mut on_a, &mut on_b);
    b.says("is refused");
    b.add_peer("net", 1, &a);
    // The receive of the datagram that stayed away is still there.
    send(&mut on_a, on_b.node.gid, 7);
    assert_eq!(on_b.rcq.ok().wr_id, 99);
}

#[test]
fn a_daemon_that_comes_back_is_found_again() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let authority = Authority::new();
    let (a, b) = (Host::start(A, &authority, A), Host::start(B, &authority, B));
    let (mut on_a, mut on_b) = (a.guest("net", 1), b.guest("net", 2));
    // Nobody listens there: what is sent is lost, and the sender is not held up.
    let port = TcpListener::bind((B, 0)).unwrap().local_addr().unwrap().port();
    let nobody = format!("{B}:{port}");
    a.daemon.run(&["peer", "add", "10.0.0.2", "--network", "net", "--daemon", &nobody]);
    b.add_peer("net", 1, &a);
    stays_away(&mut on_a, &mut on_b);
    a.says("another daemon cannot be reached");
    a.add_peer("net", 2, &b);
    send(&mut on_a, on_b.node.gid, 1);
    assert_eq!(on_b.rcq.ok().wr_id, 99);
}

#[test]
fn another_authority_is_refused() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (a, b) = (Host::start(A, &theirs, A), Host::start(B, &ours, B));
    let (mut on_a, mut on_b) = guests_that_meet(&a, &b);
    stays_away(&mut on_a, &mut on_b);
    a.says("another daemon cannot be reached");
}

#[test]
fn a_daemon_speaks_for_nobody_elses_guests() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let authority = Authority::new();
    // Of the right authority, but its certificate is for another host than the peer entry says.
    let (a, b) = (Host::start(A, &authority, "127.0.0.3"), Host::start(B, &authority, B));
    let (mut on_a, mut on_b) = guests_that_meet(&a, &b);
    stays_away(&mut on_a, &mut on_b);
    b.says("no peer entry of this network names its source and the daemon that sent it");
}

#[test]
fn another_network_is_refused() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let authority = Authority::new();
    let (a, b) = (Host::start(A, &authority, A), Host::start(B, &authority, B));
    for host in [&a, &b] {
        host.daemon.add_network("other", 101);
    }
    let (mut on_a, mut on_b) = (a.guest("other", 1), b.guest("net", 2));
    a.add_peer("other", 2, &b);
    // The source is a peer of the receiver's network, but it is sent for another.
    b.add_peer("net", 1, &a);
    stays_away(&mut on_a, &mut on_b);
    b.says("no peer entry of this network names its source and the daemon that sent it");
    // And where the other network has that peer, it has no NIC with this address.
    b.daemon.run(&["peer", "rm", "10.0.0.1", "--network", "net"]);
    b.add_peer("other", 1, &a);
    stays_away(&mut on_a, &mut on_b);
}

/// A network that is removed takes its peers along: one that comes after it, with its VNI or its
/// name, has none of them.
#[test]
fn a_network_that_comes_after_another_inherits_no_peer() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let authority = Authority::new();
    let (a, b) = (Host::start(A, &authority, A), Host::start(B, &authority, B));
    let mut on_a = a.guest("net", 1);
    a.add_peer("net", 2, &b);
    b.add_peer("net", 1, &a);
    let mut on_b = b.guest("net", 2);
    exchange(&mut on_a, &mut on_b, 1);
    // The same name and VNI, the same name, the same VNI.
    for (name, vni) in [("net", Some(100)), ("net", None), ("other", Some(100))] {
        drop(on_b);
        b.daemon.run(&["nic", "rm", "nic2"]);
        b.daemon.run(&["network", "rm", "net"]);
        match vni {
            Some(vni) => b.daemon.add_network(name, vni),
            None => drop(b.daemon.run(&["network", "add", name])),
        }
        on_b = b.guest(name, 2);
        // Neither do the old tenant's peers reach it, nor does it reach them.
        stays_away(&mut on_a, &mut on_b);
        b.says("no peer entry of this network names its source and the daemon that sent it");
        let to = Av::to(on_a.node.gid);
        assert!(on_b.node.ctx.create_ah(on_b.node.pdn, &to).is_err(), "{name} {vni:?}");
    }
}

/// Files of a daemon that others renew.
struct Files {
    dir: tempfile::TempDir,
    host: &'static str,
}

impl Files {
    fn new(host: &'static str) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), host }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn certify(&self, authority: &Authority) {
        let made = authority.certify(self.host);
        let key = Path::new(&made).with_extension("key");
        std::fs::copy(key, self.path("own.key")).unwrap();
        std::fs::copy(made, self.path("own.pem")).unwrap();
    }

    fn trust(&self, roots: &[&Authority]) {
        let read = |root: &&Authority| std::fs::read_to_string(root.ca()).unwrap();
        std::fs::write(self.path("ca.pem"), roots.iter().map(read).collect::<String>()).unwrap();
    }
}

/// Sends as a connection manager does, again and again until it has arrived.
fn arrives(from: &mut End, to: &mut End, seed: u64) {
    let area = to.node.area((GRH + MAD) as u64);
    to.qp.post_recv(seed, &[area.sge()]);
    let received = (0..40).find_map(|_| {
        send(from, to.node.gid, seed);
        to.rcq.wait(Duration::from_millis(500) * patience())
    });
    let received = received.expect("a datagram arrives");
    assert_eq!((received.wr_id, received.src_qp), (seed, 1));
}

/// As in a cluster: daemons begin without certificate and peers, are given both, and another root
/// takes the place of the first while guests speak.
#[test]
fn daemons_that_are_given_peers_and_certificates_later_and_other_ones_after_that() {
    let _watchdog = Watchdog::new(Duration::from_secs(300) * patience());
    let (old, new) = (Authority::new(), Authority::new());
    let files = [Files::new(A), Files::new(B)];
    let start = |files: &Files| {
        let port = TcpListener::bind((files.host, 0)).unwrap().local_addr().unwrap().port();
        let at = format!("{}:{port}", files.host);
        Host::spawn(at, &files.path("own.pem"), files.path("ca.pem"), &["--cm-wait"])
    };
    let hosts = [start(&files[0]), start(&files[1])];
    let (mut on_a, mut on_b) = (hosts[0].guest("net", 1), hosts[1].guest("net", 2));
    for (host, other, guest) in [(&hosts[0], &hosts[1], 2), (&hosts[1], &hosts[0], 1)] {
        let set = format!(r#"[{{"address": "10.0.0.{guest}/32", "daemon": "{}"}}]"#, other.at);
        let path = files[0].path("set.json");
        std::fs::write(&path, set).unwrap();
        let command = ["peer", "replace", "--network", "net", "--generation", "1", "--file", &path];
        host.daemon.run(&command);
    }
    stays_away(&mut on_a, &mut on_b);
    // The receive of the datagram that stayed away is still there.
    let mut first = true;
    let mut both_speak = |step: &str| {
        if std::mem::take(&mut first) {
            for _ in 0..40 {
                send(&mut on_a, on_b.node.gid, 1);
                if on_b.rcq.wait(Duration::from_millis(500) * patience()).is_some() {
                    break;
                }
            }
        }
        eprintln!("{step}");
        for seed in 0..5 {
            arrives(&mut on_a, &mut on_b, 2 * seed);
            arrives(&mut on_b, &mut on_a, 2 * seed + 1);
        }
    };
    let reload = |host: &Host| {
        assert!(host.daemon.run(&["reload"]).contains("certificates"), "something is new");
    };
    for (host, files) in hosts.iter().zip(&files) {
        files.certify(&old);
        files.trust(&[&old]);
        reload(host);
    }
    both_speak("with certificates that came later");
    for (host, files) in hosts.iter().zip(&files) {
        files.trust(&[&old, &new]);
        reload(host);
        both_speak("while both roots are trusted");
    }
    for (host, files) in hosts.iter().zip(&files) {
        files.certify(&new);
        reload(host);
        both_speak("with a renewed certificate");
    }
    for (host, files) in hosts.iter().zip(&files) {
        files.trust(&[&new]);
        reload(host);
        both_speak("without the old root");
    }
}

/// The process of what NICs on RNICs share is killed, again and again: no guest loses its device,
/// and the next one is told all that there is.
#[test]
fn guests_are_reached_again_when_what_they_share_was_killed() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let authority = Authority::new();
    let (a, b) = (Host::start(A, &authority, A), Host::start(B, &authority, B));
    let (mut on_a, mut on_b) = guests_that_meet(&a, &b);
    exchange(&mut on_a, &mut on_b, 1);
    let network = b.daemon.pid_of("net+rnic").unwrap();
    for round in 2..5 {
        let old = b.daemon.outside().unwrap();
        kill_process(Pid::from_raw(old.cast_signed()).unwrap(), Signal::KILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10) * patience();
        while b.daemon.outside().is_none_or(|pid| pid == old) {
            assert!(Instant::now() < deadline, "no process comes after it");
            std::thread::sleep(Duration::from_millis(10));
        }
        arrives(&mut on_a, &mut on_b, 2 * round);
        arrives(&mut on_b, &mut on_a, 2 * round + 1);
    }
    assert_eq!(b.daemon.pid_of("net+rnic"), Some(network), "no other process was touched");
    let shown = b.daemon.show_nic("nic2");
    assert_eq!(shown["session"], "driver_ready", "{shown}");
    let deaths =
        &b.daemon.metrics().unwrap()["vhost_rdma_process_deaths_total{network=\"+outside\"}"];
    assert!((deaths - 3.0).abs() < 0.1, "{deaths} deaths");
    // A peer that is removed while nobody is there stays removed.
    b.daemon.run(&["peer", "rm", "10.0.0.1", "--network", "net"]);
    let old = b.daemon.outside().unwrap();
    kill_process(Pid::from_raw(old.cast_signed()).unwrap(), Signal::KILL).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    send(&mut on_a, on_b.node.gid, 20);
    on_b.rcq.silent(Duration::from_secs(2));
}

/// Daemons may be named as they are in a resolver, which who speaks to them asks in its sandbox.
#[test]
fn a_daemon_is_found_by_its_name() {
    let authority = Authority::new();
    let start = |address: &str, name: &str| {
        let port = TcpListener::bind((address, 0)).unwrap().local_addr().unwrap().port();
        let cert = authority.certify(name);
        let host = Host::spawn(format!("{address}:{port}"), &cert, authority.ca(), &[]);
        Host { at: format!("{name}:{port}"), ..host }
    };
    let (a, b) = (start(A, "localhost"), start(B, B));
    let (mut on_a, mut on_b) = guests_that_meet(&a, &b);
    exchange(&mut on_b, &mut on_a, 1);
    exchange(&mut on_a, &mut on_b, 2);
}

/// Nothing that guests or other hosts say is read by who has a privilege.
#[test]
fn who_hears_other_daemons_has_no_privilege() {
    let authority = Authority::new();
    let a = Host::start(A, &authority, A);
    let pid = a.daemon.outside().expect("it is there before the first NIC");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut threads = 0;
    for task in tasks.flatten() {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap();
        let has = |line: &str| status.lines().any(|other| other == line);
        for set in ["Inh", "Prm", "Eff", "Bnd", "Amb"] {
            assert!(has(&format!("Cap{set}:\t0000000000000000")), "{status}");
        }
        assert!(has("NoNewPrivs:\t1") && has("Seccomp:\t2"), "{status}");
        threads += 1;
    }
    assert!(threads >= 2, "its own, and the channel's: {threads}");
}

/// The process that serves a network is killed: its guest begins anew, and is reached as before.
#[test]
fn guests_are_reached_again_when_their_process_was_killed() {
    let _watchdog = Watchdog::new(Duration::from_secs(120) * patience());
    let authority = Authority::new();
    let start = |host: &'static str| {
        let port = TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port();
        let cert = authority.certify(host);
        Host::spawn(format!("{host}:{port}"), &cert, authority.ca(), &[])
    };
    let (a, b) = (start(A), start(B));
    let (mut on_a, mut on_b) = guests_that_meet(&a, &b);
    exchange(&mut on_a, &mut on_b, 1);
    let pid = b.daemon.pid_of("net+rnic").unwrap();
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
    let node = &on_b.node;
    node.guest.await_async(event::DEVICE_FATAL, 0, Duration::from_secs(10) * patience()).unwrap();
    node.guest.reset().unwrap();
    let (name, socket) = (node.name.clone(), node.socket.clone());
    on_b = Node::start(name, socket, node.guest.clone(), node.gid).gsi();
    arrives(&mut on_a, &mut on_b, 2);
    arrives(&mut on_b, &mut on_a, 3);
}
