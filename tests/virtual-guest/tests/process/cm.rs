//! The connection manager of processes (section 8), as raw commands over the real socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtual_guest::guest::GuestConfig;
use virtual_guest::process::{CmChannel, Process};
use virtual_guest::qp::{Av, QpSpec, SendWr};
use virtual_guest::spec::{Put, Take, err, qpt};
use virtual_guest::world::{End, Node, ipv4_gid};

use crate::scene::Scene;

/// Commands (rdma/rdma_user_cm.h).
mod ucm {
    pub(super) const CREATE: u32 = 0;
    pub(super) const DESTROY: u32 = 1;
    pub(super) const BIND: u32 = 2;
    pub(super) const RESOLVE: u32 = 3;
    pub(super) const ROUTE: u32 = 4;
    pub(super) const QUERY: u32 = 5;
    pub(super) const CONNECT: u32 = 6;
    pub(super) const LISTEN: u32 = 7;
    pub(super) const ACCEPT: u32 = 8;
    pub(super) const DISCONNECT: u32 = 10;
    pub(super) const GET_EVENT: u32 = 12;
}

/// Events (`enum rdma_cm_event_type`).
mod event {
    pub(super) const ADDR_RESOLVED: u32 = 0;
    pub(super) const ROUTE_RESOLVED: u32 = 2;
    pub(super) const CONNECT_REQUEST: u32 = 4;
    pub(super) const CONNECT_RESPONSE: u32 = 5;
    pub(super) const REJECTED: u32 = 8;
    pub(super) const ESTABLISHED: u32 = 9;
    pub(super) const DISCONNECTED: u32 = 10;
}

const PORT: u16 = 7471;
const SOON: Duration = Duration::from_secs(10);

/// A `struct sockaddr_in` in the room of a `sockaddr_in6`.
fn address(host: u8, port: u16) -> Vec<u8> {
    let ip = if host == 0 { [0; 4] } else { [10, 0, 9, host] };
    let family = Put::new().u16(2).bytes(&port.to_be_bytes());
    family.bytes(&ip).bytes(&[0; 20]).done(28)
}

/// A process with a channel.
struct Program {
    node: Node,
    channel: CmChannel,
}

impl Program {
    fn of(node: Node) -> Self {
        let channel = node.guest.process().cm_channel().unwrap();
        Self { node, channel }
    }

    fn process(&self) -> &Process {
        self.node.guest.process()
    }

    /// Status and response.
    fn ask(&self, number: u32, body: &[u8]) -> (u32, Vec<u8>) {
        self.process().cm(self.channel.number, number, body).unwrap()
    }

    #[track_caller]
    fn ok(&self, number: u32, body: &[u8]) -> Vec<u8> {
        let (status, response) = self.ask(number, body);
        assert_eq!(status, err::OK, "command {number}");
        response
    }

    #[track_caller]
    fn create(&self, uid: u64) -> u32 {
        let body = Put::new().u64(uid).u64(0).u16(0x0106).u16(2).u32(0).done(24);
        self.ok(ucm::CREATE, &body).u32_at(0)
    }

    #[track_caller]
    fn listen(&self, uid: u64, backlog: u32) -> u32 {
        let id = self.create(uid);
        let bind = Put::new().u64(0).bytes(&address(0, PORT)).u32(id).done(40);
        self.ok(ucm::BIND, &bind);
        self.ok(ucm::LISTEN, &Put::new().u32(id).u32(backlog).done(8));
        id
    }

    /// One that has asked.
    #[track_caller]
    fn connect(&self, uid: u64, host: u8, qpn: u32) -> u32 {
        let id = self.create(uid);
        let body =
            Put::new().bytes(&[0; 28]).bytes(&address(host, PORT)).u32(id).u32(2000).done(64);
        self.ok(ucm::RESOLVE, &body);
        self.expects(event::ADDR_RESOLVED);
        self.ok(ucm::ROUTE, &Put::new().u32(id).u32(2000).done(8));
        self.expects(event::ROUTE_RESOLVED);
        self.ok(ucm::CONNECT, &Put::new().bytes(&param(qpn)).u32(id).bytes(&[0; 12]).done(288));
        id
    }

    fn accept(&self, id: u32, uid: u64, qpn: Option<u32>) -> u32 {
        let param = qpn.map_or_else(|| vec![0; 272], param);
        self.ask(ucm::ACCEPT, &Put::new().u64(uid).bytes(&param).u32(id).bytes(&[0; 12]).done(296))
            .0
    }

    #[track_caller]
    fn destroy(&self, id: u32) {
        self.ok(ucm::DESTROY, &Put::new().u64(0).u32(id).u32(0).done(16));
    }

    /// The next event: kind, identifier, whose, status.
    fn event(&self, time: Duration) -> Option<(u32, u32, u64, i32)> {
        let begin = Instant::now();
        while self.channel.token(time.saturating_sub(begin.elapsed())) {
            let (status, event) = self.ask(ucm::GET_EVENT, &[0; 8]);
            if status == err::OK {
                let happened = event.u32_at(16).cast_signed();
                return Some((event.u32_at(12), event.u32_at(8), event.u64_at(0), happened));
            }
            assert_eq!(status, err::BUSY);
        }
        None
    }

    #[track_caller]
    fn expects(&self, kind: u32) -> (u32, u64, i32) {
        let event = self.event(SOON).expect("an event");
        assert_eq!(event.0, kind, "{event:?}");
        (event.1, event.2, event.3)
    }
}

/// A `struct rdma_ucm_conn_param`.
fn param(qpn: u32) -> Vec<u8> {
    let head = Put::new().u32(qpn).u32(0).bytes(&[0; 256]);
    head.bytes(&[0, 0, 1, 1, 0, 7, 7, 1]).done(272)
}

/// Two programs with a connection, and its ends.
fn connected(scene: &Scene) -> ((Program, u32), (Program, u32)) {
    let (a, b) = (Program::of(scene.blue()), Program::of(scene.red()));
    b.listen(7, 0);
    let active = a.connect(1, 2, 0x11);
    let (passive, uid, _) = b.expects(event::CONNECT_REQUEST);
    assert_eq!(uid, 7);
    assert_eq!(b.accept(passive, 2, Some(0x22)), err::OK);
    a.expects(event::CONNECT_RESPONSE);
    assert_eq!(a.accept(active, 0, None), err::OK);
    assert_eq!(b.expects(event::ESTABLISHED).1, 2);
    ((a, active), (b, passive))
}

#[test]
fn processes_connect_and_part() {
    let scene = Scene::new();
    let ((a, active), (b, passive)) = connected(&scene);
    let route = a.ok(ucm::QUERY, &Put::new().u64(0).u32(active).u32(0).done(16));
    // What librdmacm finds the device by, and both ends.
    assert_eq!(route[8..24], ipv4_gid(9, 2));
    assert_eq!(route[24..40], ipv4_gid(9, 1));
    assert_ne!(route[..8], [0; 8]);
    a.ok(ucm::DISCONNECT, &Put::new().u32(active).done(4));
    a.expects(event::DISCONNECTED);
    b.expects(event::DISCONNECTED);
    a.destroy(active);
    b.destroy(passive);
    drop((a, b));
    scene.awaits_nothing("blue");
    scene.awaits_nothing("red");
}

#[test]
fn identifiers_of_another_process_are_none() {
    let scene = Scene::new();
    let ((a, active), _b) = connected(&scene);
    let thief = Program::of(scene.blue());
    let id = Put::new().u32(active).done(4);
    assert_eq!(thief.ask(ucm::DISCONNECT, &id).0, err::NOENT);
    let named = Put::new().u64(0).u32(active).u32(0).done(16);
    assert_eq!(thief.ask(ucm::DESTROY, &named).0, err::NOENT);
    assert_eq!(thief.ask(ucm::QUERY, &named).0, err::NOENT);
    // Nor is its channel.
    let (status, _) = thief.process().cm(a.channel.number, ucm::GET_EVENT, &[0; 8]).unwrap();
    assert_eq!(status, err::NOENT);
    assert_eq!(thief.process().end_cm(a.channel.number).unwrap(), err::NOENT);
    assert!(a.event(Duration::from_millis(50)).is_none(), "the connection is up");
}

/// Whatever the state was: who is left hears of it, and nothing stays.
#[test]
fn a_process_that_dies_in_any_state_is_missed() {
    let scene = Scene::new();
    // It has asked.
    let (a, b) = (Program::of(scene.blue()), Program::of(scene.red()));
    b.listen(7, 0);
    a.connect(1, 2, 0x11);
    let (passive, ..) = b.expects(event::CONNECT_REQUEST);
    drop(a);
    scene.awaits_nothing("blue");
    let begin = Instant::now();
    while b.accept(passive, 2, Some(0x22)) == err::OK && begin.elapsed() < SOON {
        std::thread::sleep(Duration::from_millis(10));
    }
    // It was asked, and has not answered.
    let a = Program::of(scene.blue());
    a.connect(1, 2, 0x12);
    b.expects(event::CONNECT_REQUEST);
    drop(b);
    assert_eq!(a.expects(event::REJECTED).2, 28);
    drop(a);
    scene.awaits_nothing("red");
    // It is connected, at either end.
    for active_dies in [true, false] {
        let ((a, _), (b, _)) = connected(&scene);
        let (dead, left) = if active_dies { (a, b) } else { (b, a) };
        drop(dead);
        left.expects(event::DISCONNECTED);
        drop(left);
    }
    scene.awaits_nothing("blue");
    scene.awaits_nothing("red");
}

/// A VM of the network floods a listener with requests of its own making: the backlog is what its
/// process sees, and other connections come about all the while.
#[test]
fn a_flood_of_requests_leaves_others_alone() {
    let scene = Scene::new();
    let victim = Program::of(scene.red());
    victim.listen(7, 4);
    let mut flooder = Speaker::new(&scene, ipv4_gid(9, 2));
    for n in 0..2000 {
        flooder.says(&request(&flooder.gid(), n));
    }
    let mut seen = 0;
    while let Some((kind, id, ..)) = victim.event(Duration::from_millis(300)) {
        assert_eq!(kind, event::CONNECT_REQUEST);
        seen += 1;
        victim.destroy(id);
        assert!(seen < 200, "what was not heard does not come again");
    }
    assert!(seen >= 4, "{seen}");
    let bystander = Program::of(scene.blue());
    let id = bystander.connect(1, 2, 0x11);
    let (passive, ..) = victim.expects(event::CONNECT_REQUEST);
    assert_eq!(victim.accept(passive, 2, Some(0x22)), err::OK);
    bystander.expects(event::CONNECT_RESPONSE);
    assert_eq!(bystander.accept(id, 0, None), err::OK);
}

/// A NIC ends while VMs ask it for connections without end, at a port where nobody listens: each
/// request has an answer, and there are always more. It says what it had to say (that a connection
/// is over), and hears nothing more.
#[test]
fn a_flood_of_requests_does_not_keep_a_nic_from_its_end() {
    let scene = Scene::new();
    let ((_caller, _), (victim, _)) = connected(&scene);
    let over = Arc::new(AtomicBool::new(false));
    let speakers: Vec<_> = (0..3).map(|_| Speaker::new(&scene, ipv4_gid(9, 2))).collect();
    let floods: Vec<_> = speakers
        .into_iter()
        .map(|mut speaker| {
            let over = over.clone();
            std::thread::spawn(move || {
                let mut asks = request(&speaker.gid(), 1);
                asks[32..40].copy_from_slice(&(0x0106_0000 | u64::from(PORT + 1)).to_be_bytes());
                while !over.load(Ordering::Relaxed) {
                    speaker.says_often(&asks);
                }
                speaker
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    scene.world.daemon.run(&["nic", "rm", "red"]);
    let took = begin.elapsed();
    over.store(true, Ordering::Relaxed);
    let mut speakers: Vec<_> = floods.into_iter().map(|flood| flood.join().unwrap()).collect();
    assert!(took < Duration::from_secs(10), "{took:?}");
    // Their devices are there.
    for speaker in &mut speakers {
        speaker.says(&request(&speaker.gid(), 1));
    }
    drop(victim);
}

/// A VM that asks for connections without end and takes none up: those of others come about without
/// a datagram that has to be said again (the first wait is 250 ms).
#[test]
fn a_flood_of_connections_delays_no_others() {
    const COUNT: usize = 20;
    let scene = Scene::new();
    let victim = Program::of(scene.red());
    victim.listen(7, 64);
    let flooder = Speaker::new(&scene, ipv4_gid(9, 2));
    let bystander = Program::of(scene.blue());
    let stop = AtomicBool::new(false);
    let mut waits = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut flooder = flooder;
            for n in 0.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                flooder.says(&request(&flooder.gid(), n));
            }
        });
        scope.spawn(|| {
            // It takes up whatever comes.
            let mut qpn = 0x1000;
            while !stop.load(Ordering::Relaxed) {
                let event = victim.event(Duration::from_millis(20));
                if let Some((event::CONNECT_REQUEST, id, ..)) = event {
                    victim.accept(id, id.into(), Some(qpn));
                    qpn += 1;
                }
            }
        });
        std::thread::sleep(Duration::from_secs(2));
        let waits: Vec<Duration> = (0..COUNT as u32)
            .map(|n| {
                let begin = Instant::now();
                let id = bystander.connect(1, 2, 0x100 + n);
                let event = bystander.event(SOON);
                let took = begin.elapsed();
                if event.is_none_or(|event| event.0 != event::CONNECT_RESPONSE) {
                    stop.store(true, Ordering::Relaxed);
                    panic!("no answer but {event:?} after {took:?}");
                }
                assert_eq!(bystander.accept(id, 0, None), err::OK);
                bystander.destroy(id);
                took
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        waits
    });
    waits.sort_unstable();
    println!("{waits:?}");
    let most = Duration::from_millis(250) * virtual_guest::daemon::patience();
    assert!(waits[COUNT * 3 / 4] < most, "{waits:?}");
}

/// Noise of every kind from QP 1 of a VM, beside a connection that stays.
#[test]
fn noise_from_queue_pair_1_hurts_nobody() {
    let scene = Scene::new();
    let ((a, active), (b, _)) = connected(&scene);
    let mut speaker = Speaker::new(&scene, ipv4_gid(9, 2));
    let mut seed = 1u64;
    for n in 0..3000u32 {
        let mut mad = [0u8; 256];
        for byte in &mut mad {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = seed.to_le_bytes()[5];
        }
        if n % 4 != 0 {
            // Messages in form, of connections that are not this VM's.
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[16..18].copy_from_slice(&(0x10 + (n % 11) as u16).to_be_bytes());
            mad[28..32].copy_from_slice(&active.to_be_bytes());
        }
        speaker.says(&mad);
    }
    assert!(b.event(Duration::from_millis(300)).is_none());
    a.ok(ucm::DISCONNECT, &Put::new().u32(active).done(4));
    b.expects(event::DISCONNECTED);
}

/// A process's own datagrams are none of the connection manager's, whatever they say.
#[test]
fn only_queue_pair_1_speaks_for_a_nic() {
    let scene = Scene::new();
    let victim = Program::of(scene.red());
    victim.listen(7, 0);
    let node = scene.blue();
    let mut end = node.end(&QpSpec::new(qpt::UD));
    if end.qp.start_datagrams(0x8001_0000).is_ok() {
        let ah = node.ctx.create_ah(node.pdn, &Av::to(ipv4_gid(9, 2))).unwrap();
        let mad = node.area(256);
        mad.set(&request(&ipv4_gid(9, 1), 1));
        end.run_ok(&SendWr::datagram(1, &[mad.sge()], ah, 1, 0x8001_0000));
    }
    assert!(victim.event(Duration::from_millis(300)).is_none());
}

/// A VM's QP 1.
struct Speaker {
    end: End,
    ah: u32,
    mad: virtual_guest::world::Area,
}

impl Speaker {
    fn new(scene: &Scene, to: [u8; 16]) -> Self {
        let node = scene.world.node_with("net", &[], GuestConfig::default());
        let end = node.gsi();
        let ah = end.node.ctx.create_ah(end.node.pdn, &Av::to(to)).unwrap();
        let mad = end.node.area(256);
        Self { end, ah, mad }
    }

    fn gid(&self) -> [u8; 16] {
        self.end.node.gid
    }

    fn says(&mut self, bytes: &[u8; 256]) {
        self.mad.set(bytes);
        let send = SendWr::datagram(1, &[self.mad.sge()], self.ah, 1, 0x8001_0000);
        self.end.run_ok(&send);
    }

    /// The same a number of times, with nothing between.
    fn says_often(&mut self, bytes: &[u8; 256]) {
        self.mad.set(bytes);
        for n in 0..LIST {
            let send = SendWr::datagram(n, &[self.mad.sge()], self.ah, 1, 0x8001_0000);
            self.end.qp.post_send(&send);
        }
        for _ in 0..LIST {
            assert_eq!(self.end.scq.one().status, 0);
        }
    }
}

/// Datagrams that are posted as one list.
const LIST: u64 = 32;

/// A REQ for our port at 10.0.9.2, of this communication ID and queue pair.
fn request(from: &[u8; 16], number: u32) -> [u8; 256] {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[16..18].copy_from_slice(&[0, 0x10]);
    let body = &mut mad[24..];
    body[..4].copy_from_slice(&number.to_be_bytes());
    body[8..16].copy_from_slice(&(0x0106_0000 | u64::from(PORT)).to_be_bytes());
    body[32..35].copy_from_slice(&number.to_be_bytes()[1..]);
    body[50] = 5 << 4;
    body[141] = 0x40;
    body[156..160].copy_from_slice(&from[12..]);
    body[172..176].copy_from_slice(&[10, 0, 9, 2]);
    mad
}
