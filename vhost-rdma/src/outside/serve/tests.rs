//! The process without its sandbox, as a thread: what the supervisor and networks' processes say to
//! it, the latter whatever they like.

use std::thread::JoinHandle;
use std::time::Duration;

use super::*;
use crate::aside::tests::slow;
use crate::network_process::{Asked, Settled};
use crate::node::{Guests, MacAddr, NicConfig, NicLimits, SocketAccess};

/// How long something may take that must happen.
const PATIENCE: Duration = Duration::from_secs(10);

struct Scene {
    supervisor: Wire,
    thread: JoinHandle<Result<(), Fault>>,
}

fn mac(number: u8) -> MacAddr {
    format!("02:00:00:00:00:{number:02x}").parse().unwrap()
}

/// A NIC on the null RNIC, whose host's address is its own.
fn nic(vni: u32, number: u8) -> NicConfig {
    NicConfig {
        number: 0,
        name: format!("nic{number}"),
        network: format!("net{vni}"),
        vni,
        mac: mac(number),
        addresses: vec![],
        virtio_id: None,
        comp_vectors: 1,
        limits: NicLimits::default(),
        backing: "rnic:null".parse().unwrap(),
        guests: Guests::Vm,
        socket: std::path::PathBuf::new(),
        access: SocketAccess::default(),
        configured: false,
    }
}

impl Scene {
    fn new() -> Self {
        let (supervisor, far) = Wire::pair().unwrap();
        supervisor.set_hearing(PATIENCE).unwrap();
        let thread = std::thread::spawn(move || {
            Process::new(Wire::new(far), Arc::default(), None).unwrap().run()
        });
        Self { supervisor, thread }
    }

    fn order(&self, order: &Order) {
        self.supervisor.send(&encode(order).unwrap(), &[]).unwrap();
    }

    fn hears(&self) -> Said {
        decode(&self.supervisor.receive().unwrap().unwrap().bytes).unwrap()
    }

    /// Network `number`, with its NIC and its process.
    fn network(&self, number: u64) -> Wire {
        let vni = u32::try_from(number).unwrap();
        self.order(&Order::Open(number, vni));
        self.order(&Order::Put(number, nic(vni, u8::try_from(number).unwrap())));
        self.attach(number)
    }

    fn attach(&self, number: u64) -> Wire {
        let (near, far) = Wire::pair().unwrap();
        near.set_hearing(PATIENCE).unwrap();
        let order = encode(&Order::Attach(number)).unwrap();
        self.supervisor.send(&order, &[far.as_fd()]).unwrap();
        near
    }

    fn end(self) {
        drop(self.supervisor);
        self.thread.join().unwrap().unwrap();
    }
}

fn says(process: &Wire, told: &Told) {
    process.send(&encode(told).unwrap(), &[]).unwrap();
}

/// Whether the NIC of a network may have an address.
fn claims(process: &Wire, number: u8, last: u8) -> bool {
    let gid = std::net::Ipv4Addr::new(10, 0, 0, last).to_ipv6_mapped().octets();
    says(process, &Told::Asked(Some(7), Asked::Address(mac(number).octets(), gid)));
    match decode(&process.receive().unwrap().unwrap().bytes).unwrap() {
        Host::Settled(7, Settled::Address(granted)) => granted,
        other => panic!("{other:?}"),
    }
}

fn is_over(process: &Wire) -> bool {
    process.receive().is_ok_and(|packet| packet.is_none())
}

#[test]
fn what_a_process_had_goes_with_its_socket() {
    let scene = Scene::new();
    let (one, other) = (scene.network(1), scene.network(2));
    assert!(claims(&one, 1, 9), "flat: one guest's in all networks");
    assert!(!claims(&other, 2, 9));
    drop(one);
    let begin = Instant::now();
    while !claims(&other, 2, 9) {
        assert!(begin.elapsed() < PATIENCE, "it went with the process");
    }
    let next = scene.attach(1);
    assert!(!claims(&next, 1, 9));
    // Another socket takes the place of one that is still open.
    let third = scene.attach(2);
    assert!(is_over(&other));
    assert!(claims(&next, 1, 9), "what the earlier one had told is void");
    assert!(!claims(&third, 2, 9));
    scene.order(&Order::Close(1));
    assert!(is_over(&next));
    scene.end();
}

#[test]
fn who_talks_nonsense_is_heard_no_more_and_the_supervisor_is_told() {
    let scene = Scene::new();
    let bystander = scene.network(9);
    let mut number = 0;
    let mut nonsense = |bytes: &[u8], files: usize| {
        number += 1;
        let process = scene.network(number);
        assert!(claims(&process, u8::try_from(number).unwrap(), 1));
        let null = File::open("/dev/null").unwrap();
        process.send(bytes, &vec![null.as_fd(); files]).unwrap();
        assert_eq!(scene.hears(), Said::Nonsense(number));
        assert!(is_over(&process));
        assert!(claims(&bystander, 9, 2));
    };
    nonsense(b"x", 0);
    nonsense(&vec![b'['; crate::network_process::MESSAGE_MAX], 0);
    nonsense(&vec![b' '; crate::network_process::MESSAGE_MAX + 1], 0);
    let (device, new) = ("rxe0".to_owned(), vec![0; crate::network_process::QPS_MAX + 1]);
    nonsense(&encode(&Told::Queues { device, new, gone: vec![] }).unwrap(), 0);
    nonsense(&encode(&Told::Wanted([0; 16])).unwrap(), 1);
    scene.end();
}

/// A VMM can make such a descriptor, and a process that is not itself any more hand it on.
#[test]
fn who_sends_what_is_slow_to_close_holds_up_nobody() {
    let scene = Scene::new();
    let bystander = scene.network(9);
    let mut kept = Vec::new();
    for number in 1..4 {
        let process = scene.network(number);
        let (slow, peer) = slow(3 * PATIENCE);
        process.send(&encode(&Told::Wanted([0; 16])).unwrap(), &[slow.as_fd()]).unwrap();
        drop(slow);
        kept.push(peer);
        let begin = Instant::now();
        assert!(claims(&bystander, 9, 2));
        assert_eq!(scene.hears(), Said::Nonsense(number));
        assert!(is_over(&process));
        // What it says behind it is not heard either.
        scene.order(&Order::Close(number));
        assert!(claims(&bystander, 9, 2));
        assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
    }
    scene.end();
}

/// All the while it is answered in no time.
#[test]
fn who_floods_is_heard_no_more_than_its_share() {
    let scene = Scene::new();
    let (flooder, bystander) = (scene.network(1), scene.network(2));
    let far = flooder.as_fd().try_clone_to_owned().unwrap();
    let (device, new) = ("rxe0".to_owned(), (0..1024).collect());
    let bytes = encode(&Told::Queues { device, new, gone: vec![] }).unwrap();
    let flood = std::thread::spawn(move || {
        let (wire, begin) = (Wire::new(far), Instant::now());
        let mut sent = 0u32;
        while begin.elapsed() < Duration::from_secs(1) {
            wire.send(&bytes, &[]).unwrap();
            sent += 1;
        }
        sent
    });
    let mut longest = Duration::ZERO;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(1) {
        let asked = Instant::now();
        claims(&bystander, 2, 1);
        longest = longest.max(asked.elapsed());
        std::thread::sleep(Duration::from_millis(1));
    }
    let sent = flood.join().unwrap();
    // A share in each tenth of a second, and what the socket holds.
    assert!((400..400 * 12 + 300).contains(&sent), "{sent}");
    assert!(longest < Duration::from_millis(500), "{longest:?}");
    // One that hangs up while it rests is gone.
    drop(flooder);
    assert!(claims(&bystander, 2, 3));
    scene.end();
}

#[test]
fn an_order_for_nobody_and_one_without_its_file_change_nothing() {
    let scene = Scene::new();
    let process = scene.network(1);
    for order in [
        Order::Put(7, nic(7, 7)),
        Order::TakeAway(7, nic(7, 7)),
        Order::Attach(7),
        Order::Close(7),
        Order::Peers(1),
        Order::Identity,
        Order::Forget(7),
        Order::Log(None),
    ] {
        scene.order(&order);
    }
    assert!(claims(&process, 1, 1));
    scene.order(&Order::TakeAway(1, nic(1, 1)));
    let begin = Instant::now();
    while claims(&process, 1, 2) {
        assert!(begin.elapsed() < PATIENCE, "its NIC is gone");
    }
    scene.end();
}
