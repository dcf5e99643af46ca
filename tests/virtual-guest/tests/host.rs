//! What a NIC on an RNIC does when its host is short of something, or takes the RNIC away
//! (docs/RNIC.md, 5).
//!
//! These tests change the host that they run on, so `cargo xtask vm rnic` runs them, in a VM:
//! `rxe0` on `eth0` has the addresses 10.0.0.1 and on, `rxe1` on `dummy0` has 10.0.1.1 and on, and
//! 64 huge pages are set aside.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::daemon::{DaemonOptions, patience};
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::{PAGE, access, err, event, status};
use virtual_guest::world::{End, Node, World, ipv4_gid, pattern};

const HUGE: u64 = 2 << 20;
fn soon() -> Duration {
    Duration::from_secs(10) * patience()
}

/// Runs a command of the host, which must end well, and in time: a removal that waits for somebody
/// never ends.
fn host(script: &str) {
    let mut child = Command::new("sh").args(["-exc", script]).stdin(Stdio::null()).spawn().unwrap();
    let late = Instant::now() + soon();
    let ended = loop {
        if let Some(ended) = child.try_wait().unwrap() {
            break ended;
        }
        assert!(Instant::now() < late, "{script}: no end");
        thread::sleep(Duration::from_millis(20));
    };
    assert!(ended.success(), "{script}: {ended}");
}

/// Waits until something of the host is so.
fn host_awaits(condition: &str) {
    host(&format!("until {condition}; do sleep 0.1; done"));
}

/// The objects of the host's RDMA devices: `pd 1 cq 1 …` of each. The number before a name changes
/// when the device is made anew.
fn resources() -> Vec<String> {
    let output = Command::new("rdma").args(["resource", "show"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines: Vec<String> = text
        .lines()
        .filter_map(|line| line.split_once(": ").map(|(_, rest)| rest.trim().to_owned()))
        .collect();
    lines.sort();
    lines
}

/// Removes all NICs: nothing of them may be left on the host while the daemon lives on.
#[track_caller]
fn leaves_nothing(world: &World, nics: &[&str], before: &[String]) {
    for nic in nics {
        world.daemon.run(&["nic", "rm", nic]);
    }
    let late = Instant::now() + soon();
    while resources() != before {
        assert!(Instant::now() < late, "{:?} is left of {before:?}", resources());
        thread::sleep(Duration::from_millis(100));
    }
}

/// A guest on `rxe1`, with the address 10.0.1.`n`.
fn on_rxe1(world: &World, n: u8) -> Node {
    let name = format!("other{n}");
    let socket = world.daemon.add_nic(&name, "net", &["--backing", "rnic:rxe1"]);
    let guest = Guest::connect(&socket, GuestConfig::default()).unwrap();
    Node::start(name, socket, guest, ipv4_gid(1, n))
}

fn pair(a: &Node, b: &Node) -> (End, End) {
    let (a, b) = (a.rc(), b.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    (a, b)
}

/// Makes new connections until one ends so.
#[track_caller]
fn until_connecting_says(node: &Node, peer: &End, expected: Result<(), Option<u32>>) {
    let late = Instant::now() + soon();
    loop {
        let end = node.rc();
        end.qp.to_init(&Path::default()).unwrap();
        let got = end.qp.to_rtr(peer.address(), &Path::default()).map_err(|error| error.status());
        end.qp.destroy().unwrap();
        if got == expected {
            return;
        }
        assert!(Instant::now() < late, "{got:?}, not {expected:?}");
        thread::sleep(Duration::from_millis(500));
    }
}

/// A pair whose traffic never rests.
struct Neighbours {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Neighbours {
    fn start((mut a, b): (End, End)) -> Self {
        let (rounds, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (done, over) = (rounds.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let word = b.node.area(8);
            while !over.load(Ordering::Relaxed) {
                let round = done.fetch_add(1, Ordering::Relaxed);
                let write = SendWr::write(round, &[], word.addr(0), word.rkey());
                a.run_ok(&write.inline(&round.to_le_bytes()));
                assert_eq!(word.word(0), round);
            }
        });
        Self { rounds, stop, thread }
    }

    /// Many more rounds from now on.
    #[track_caller]
    fn go_on(&self) {
        let (goal, late) = (self.rounds.load(Ordering::Relaxed) + 20, Instant::now() + soon());
        while self.rounds.load(Ordering::Relaxed) < goal {
            assert!(Instant::now() < late && !self.thread.is_finished(), "they do not go on");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(self) {
        self.go_on();
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("all their requests succeed");
    }
}

fn writes(end: &mut End, to: &Node) {
    let word = to.area(8);
    end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[7; 8]));
    assert_eq!(word.bytes(), [7; 8]);
}

#[test]
#[ignore = "takes rxe0 away: `cargo xtask vm rnic` runs it in a VM"]
fn an_rnic_that_is_removed_under_traffic_is_fatal_to_its_guests_alone_and_comes_back() {
    let before = resources();
    let world = World::new();
    let neighbours = Neighbours::start(pair(&on_rxe1(&world, 1), &on_rxe1(&world, 2)));
    let (na, nb) = (world.node(), world.node());
    let (mut a, _b) = pair(&na, &nb);
    writes(&mut a, &nb);
    let (from, to) = (na.area_of(&pattern(1, 1 << 20)), nb.area(1 << 20));
    for n in 0..60 {
        a.qp.queue_send(&SendWr::write(n, &[from.sge()], to.addr(0), to.rkey()));
    }
    a.qp.ring_sq();
    host("rdma link delete rxe0");
    for node in [&na, &nb] {
        node.guest.await_async(event::DEVICE_FATAL, 0, soon()).expect("DEVICE_FATAL");
        assert_eq!(node.ctx.create_pd().unwrap_err().status(), Some(err::FATAL));
        assert_eq!(world.daemon.show_nic(&node.name)["session"], "failed");
    }
    neighbours.go_on();
    // A driver that begins anew while there is no device is told so.
    na.guest.reset().unwrap();
    assert_eq!(na.guest.init().unwrap_err().status(), Some(err::FATAL));
    host("rdma link add rxe0 type rxe netdev eth0");
    host_awaits("grep -q ffff:0a00:0002 /sys/class/infiniband/rxe0/ports/1/gids/*");
    let again = [&na, &nb].map(|node| {
        node.guest.reset().unwrap();
        Node::start(node.name.clone(), node.socket.clone(), node.guest.clone(), node.gid)
    });
    let (mut c, _d) = pair(&again[0], &again[1]);
    writes(&mut c, &again[1]);
    neighbours.end();
    leaves_nothing(&world, &["nic1", "nic2", "other1", "other2"], &before);
}

#[test]
#[ignore = "takes a netdev down: `cargo xtask vm rnic` runs it in a VM"]
fn a_port_that_goes_down_and_up_is_told_and_other_ports_go_on() {
    let before = resources();
    let world = World::new();
    let neighbours = Neighbours::start(pair(&world.node(), &world.node()));
    let (na, nb) = (on_rxe1(&world, 1), on_rxe1(&world, 2));
    let (mut a, b) = pair(&na, &nb);
    writes(&mut a, &nb);
    let word = nb.area(8);
    host("ip link set dummy0 down");
    for node in [&na, &nb] {
        node.guest.await_async(event::PORT_ERR, 1, soon()).expect("PORT_ERR");
        assert_ne!(node.guest.query_port().unwrap().state, 4, "not ACTIVE");
    }
    let lost = a.run(&SendWr::write(2, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    assert_ne!(lost.status, status::SUCCESS);
    neighbours.go_on();
    host("ip link set dummy0 up; for n in 1 2 3; do ip addr replace 10.0.1.$n/32 dev dummy0; done");
    for node in [&na, &nb] {
        node.guest.await_async(event::PORT_ACTIVE, 1, soon()).expect("PORT_ACTIVE");
        assert_eq!(node.guest.query_port().unwrap().state, 4);
    }
    drop((a, b));
    let (mut c, _d) = pair(&na, &nb);
    writes(&mut c, &nb);
    neighbours.end();
    leaves_nothing(&world, &["nic1", "nic2", "other1", "other2"], &before);
}

#[test]
#[ignore = "takes an address away: `cargo xtask vm rnic` runs it in a VM"]
fn an_address_that_is_removed_makes_no_more_connections_and_others_do() {
    let before = resources();
    let world = World::new();
    let (na, nb, nc) = (on_rxe1(&world, 1), on_rxe1(&world, 2), on_rxe1(&world, 3));
    let (mut a, peer) = pair(&na, &nb);
    writes(&mut a, &nb);
    host("ip addr del 10.0.1.1/32 dev dummy0");
    until_connecting_says(&na, &peer, Err(Some(err::UNREACH)));
    let (mut b, _) = pair(&nb, &nc);
    writes(&mut b, &nc);
    host("ip addr add 10.0.1.1/32 dev dummy0");
    until_connecting_says(&na, &peer, Ok(()));
    let (mut again, _) = pair(&na, &nb);
    writes(&mut again, &nb);
    leaves_nothing(&world, &["other1", "other2", "other3"], &before);
}

#[test]
#[ignore = "needs an RNIC whose driver counts locked memory: `cargo xtask vm rnic` runs it in a VM"]
fn memory_that_may_not_be_locked_is_enomem_and_nothing_worse() {
    let before = resources();
    let options = DaemonOptions { memlock: Some(8 << 20), ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(120));
    let (na, nb) = (world.node(), world.node());
    let (mut a, _b) = pair(&na, &nb);
    let buf = Arc::new(Buf::contiguous(na.guest.ram(), 6 << 20));
    let first = na.ctx.register(na.pdn, buf.clone(), access::ALL).unwrap();
    for node in [&na, &nb] {
        let list = PageList::contiguous(node.guest.ram().regions()[0].gpa(), 1024, 0, 12);
        let refused = node.ctx.mr_reg(node.pdn, access::ALL, (1 << 40, 4 << 20), &list);
        assert_eq!(refused.unwrap_err().status(), Some(err::NOMEM), "the process has one limit");
    }
    writes(&mut a, &nb);
    na.ctx.dereg(first.lkey).unwrap();
    let second = na.ctx.register(na.pdn, buf, access::ALL).expect("there is room again");
    na.ctx.dereg(second.lkey).unwrap();
    leaves_nothing(&world, &["nic1", "nic2"], &before);
}

#[test]
#[ignore = "needs huge pages: `cargo xtask vm rnic` runs it in a VM"]
fn a_guest_on_huge_pages_registers_whole_ones_in_any_order_and_pieces_only_in_one() {
    let before = resources();
    let world = World::new();
    let config = GuestConfig { huge_pages: true, ..GuestConfig::default() };
    let (na, nb) = (world.node(), world.node_with("net", &[], config));
    let (mut a, mut b) = pair(&na, &nb);
    let ram = nb.guest.ram();
    // What lies in one piece: within a huge page, and across three.
    for len in [10_000, 2 * HUGE + 10_000] {
        let buf = Arc::new(Buf::contiguous(ram, len));
        let mr = nb.ctx.register(nb.pdn, buf, access::ALL).unwrap();
        let data = pattern(len, len as usize);
        let (from, back) = (na.area_of(&data), na.area(len));
        a.run_ok(&SendWr::write(1, &[from.sge()], mr.iova, mr.rkey));
        assert!(mr.view().vec(0, len) == data);
        a.run_ok(&SendWr::read(2, &[back.sge()], mr.iova, mr.rkey));
        assert!(back.bytes() == data);
        nb.ctx.dereg(mr.lkey).unwrap();
    }
    // Whole ones, the second before the first, from within one to within the other.
    let pages = (HUGE / PAGE) as usize;
    let (first, second) = (ram.alloc_in(None, pages, HUGE), ram.alloc_in(None, pages, HUGE));
    let list = PageList::tree(ram, &[second.gpa(0), first.gpa(0)], 4096, 21, 1);
    let len = 2 * HUGE - 8192;
    let (lkey, rkey) = nb.ctx.mr_reg(nb.pdn, access::ALL, (1 << 33, len), &list).unwrap();
    let data = pattern(3, len as usize);
    let from = na.area_of(&data);
    a.run_ok(&SendWr::write(3, &[from.sge()], 1 << 33, rkey));
    let (head, tail) = data.split_at((HUGE - 4096) as usize);
    assert!(second.view(4096, HUGE - 4096).vec(0, HUGE - 4096) == head);
    assert!(first.view(0, HUGE - 4096).vec(0, HUGE - 4096) == tail);
    nb.ctx.dereg(lkey).unwrap();
    // Pieces of huge pages cannot be mapped in another order; the engine needs no mapping.
    let pieces = Buf::scattered(ram, 0, 64 * PAGE);
    let list = PageList::of(ram, pieces.pages(), 0);
    let made = nb.ctx.mr_reg(nb.pdn, access::ALL, (1 << 40, 64 * PAGE), &list);
    if rules().numbers_are_random {
        made.expect("MR_REG");
    } else {
        assert_eq!(made.unwrap_err().status(), Some(err::NOMEM));
    }
    writes(&mut b, &na);
    leaves_nothing(&world, &["nic1", "nic2"], &before);
}
