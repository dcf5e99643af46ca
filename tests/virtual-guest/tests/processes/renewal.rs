//! Another process goes on with a network's NICs, as planned: `vhost-rdma network restart`.

use std::io::Write as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::Value;
use virtual_guest::daemon::{Daemon, patience};
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::SendWr;
use virtual_guest::spec::{ARM_ANY, status};

use super::{eventually, node, pair, processes, start_anew, told_that_it_is_lost, under_traffic};
use super::{world, writes};

/// Restarts a network; what is said of it.
fn restart(daemon: &Daemon, network: &str) -> Value {
    let before = processes(daemon)[network];
    let said = daemon.run(&["network", "restart", network, "--json"]);
    assert_ne!(processes(daemon)[network], before, "the same process");
    serde_json::from_str(&said).expect("JSON")
}

fn lost_nothing(said: &Value, nics: usize) {
    let kept = said["kept"].as_array().map(Vec::len);
    assert_eq!((kept, said["lost"].as_array().map(Vec::len)), (Some(nics), Some(0)), "{said}");
}

#[test]
fn queue_pairs_live_on_under_traffic_and_another_network_notices_nothing() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let (c, d) = (node(&world, "red"), node(&world, "red"));
    let (mut here, mut there) = (pair(&a, &b), pair(&c, &d));
    writes(&mut here, 1);
    let count = || world.daemon.show_nic(&a.name)["counters"]["tx_messages"].as_u64().unwrap();
    let mut counted = count();
    let mut written = 1;
    under_traffic(&mut there, |_| {
        let (_, sent) = under_traffic(&mut here, |sent| {
            for _ in 0..5 {
                lost_nothing(&restart(&world.daemon, "net"), 2);
                let before = sent.load(Ordering::Relaxed);
                eventually("nothing goes on", || sent.load(Ordering::Relaxed) > before + 20);
                let now = count();
                assert!(now > counted && now < counted + 10_000_000, "{counted} to {now}");
                counted = now;
            }
        });
        written += sent;
    });
    assert_eq!(count(), written, "each is counted once");
    for node in [&a, &b] {
        assert_eq!(node.guest.async_event(Duration::ZERO).expect("its queue"), None);
        assert_eq!(world.daemon.show_nic(&node.name)["session"], "driver_ready");
    }
    // What is made afterwards is beside what was there before.
    writes(&mut pair(&b, &a), 3);
    writes(&mut here, 4);
    let metrics = world.daemon.metrics().unwrap();
    assert!(metrics["vhost_rdma_process_deaths_total{network=\"net\"}"] < 0.5, "it died");
}

/// What is posted, and waits for the other side, is there afterwards; and so are events.
#[test]
fn waits_receives_and_events_are_handed_on() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let (mut near, mut far) = pair(&a, &b);
    let (from, to) = (a.area_of(&[7; 64]), b.area(64));
    near.qp.post_send(&SendWr::send(5, &[from.sge()]));
    std::thread::sleep(Duration::from_millis(20));
    lost_nothing(&restart(&world.daemon, "net"), 2);
    assert!(near.scq.poll().is_none(), "nobody has posted a receive");
    far.qp.post_recv(6, &[to.sge()]);
    assert_eq!(
        near.scq.wait(Duration::from_secs(10) * patience()).unwrap().status,
        status::SUCCESS
    );
    assert_eq!(to.bytes(), [7; 64]);
    far.rcq.wait(Duration::from_secs(10) * patience()).expect("its completion");

    far.rcq.arm(ARM_ANY);
    far.qp.post_recv(7, &[to.sge()]);
    lost_nothing(&restart(&world.daemon, "net"), 2);
    near.qp.post_send(&SendWr::send(8, &[from.sge()]));
    let event = b.guest.comp_event(0, Duration::from_secs(10) * patience());
    assert!(event.expect("its queue").is_some(), "no event for an arm from before");
}

/// A machine that is paused meanwhile goes on when its VMM says so.
#[test]
fn a_guest_that_stands_still_goes_on_later() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let mut ends = pair(&a, &b);
    writes(&mut ends, 1);
    let bases = a.guest.stop_rings().expect("they stop");
    lost_nothing(&restart(&world.daemon, "net"), 2);
    for (index, base) in bases.into_iter().enumerate() {
        a.guest.start_ring(index, base).expect("it starts");
    }
    writes(&mut ends, 2);
    a.guest.pause_and_continue().expect("it goes on");
    lost_nothing(&restart(&world.daemon, "net"), 2);
    writes(&mut ends, 3);
}

/// A driver that has not begun, and one that begins anew.
#[test]
fn whoever_has_nothing_loses_nothing() {
    let world = world();
    let (a, b) = (node(&world, "net"), world.vacancy_with("net", &super::SOFT));
    let early = Guest::connect(&b.socket, GuestConfig::default());
    lost_nothing(&restart(&world.daemon, "net"), 1 + usize::from(early.is_ok()));
    let a = start_anew(&a);
    lost_nothing(&restart(&world.daemon, "net"), 1 + usize::from(early.is_ok()));
    writes(&mut pair(&a, &a), 4);
}

/// A VMM that has said half of a message holds nobody up, and loses its own session alone.
#[test]
fn a_vmm_in_the_middle_of_a_message_costs_nobody_else_anything() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let villain = world.vacancy_with("net", &super::SOFT);
    let mut stream = std::os::unix::net::UnixStream::connect(&villain.socket).expect("it gets in");
    stream.write_all(&[1, 0, 0, 0, 1]).expect("half a header");
    eventually("it is not seen", || world.daemon.show_nic(&villain.name)["session"] != "absent");
    let mut ends = pair(&a, &b);
    let begin = Instant::now();
    let (longest, _) = under_traffic(&mut ends, |_| {
        let said = world.daemon.cli(&["network", "restart", "net", "--json"]);
        let why = said.expect_err("the villain's is lost, and the exit status tells");
        assert!(why.contains(&villain.name), "{why}");
    });
    let most = Duration::from_secs(5) * patience();
    assert!(longest < most && begin.elapsed() < most, "{longest:?}");
    writes(&mut ends, 5);
}

#[test]
fn what_has_no_process_is_not_restarted() {
    let world = world();
    let none = world.daemon.cli(&["network", "restart", "red"]).expect_err("it has no NIC");
    assert!(none.contains("no process serves this network"), "{none}");
    let unknown = world.daemon.cli(&["network", "restart", "nowhere"]).expect_err("unknown");
    assert!(unknown.contains("nowhere"), "{unknown}");
}

/// A process that dies while it takes over what was handed on leaves guests as a crash does.
#[test]
fn a_death_right_afterwards_is_a_death_like_any_other() {
    let world = world();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    writes(&mut pair(&a, &b), 1);
    lost_nothing(&restart(&world.daemon, "net"), 2);
    super::replace(&world.daemon, "net");
    told_that_it_is_lost(&a.guest);
    told_that_it_is_lost(&b.guest);
    let (a, b) = (start_anew(&a), start_anew(&b));
    writes(&mut pair(&a, &b), 2);
}
