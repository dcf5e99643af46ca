//! Asynchronous events: delivery, waiting without buffers, and none for objects that are gone
//! (7.5).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::daemon::{backing, patience};
use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{ARM_ANY, event, qps, qpt};
use virtual_guest::world::{End, World};

const SHORT: Duration = Duration::from_millis(150);

/// Breaks `b` by a write with a key that does not exist, where that raises an event; else by a
/// doorbell that cannot be true. Which event it raises.
fn break_responder(a: &mut End, b: &mut End) -> u32 {
    if rules().responder_events {
        a.run(&SendWr::write(1, &[], 0x1000, 0x7777_7777).inline(&[1; 8]));
        return event::QP_ACCESS_ERR;
    }
    let (_, _, doorbell) = b.qp.raw_rq(0);
    doorbell.ring(0x8000_0000);
    let deadline = Instant::now() + Duration::from_secs(10);
    while b.qp.state().unwrap() != qps::ERR {
        assert!(Instant::now() < deadline, "the doorbell does no harm");
    }
    event::QP_FATAL
}

#[test]
fn an_event_carries_its_object_and_context() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let kind = break_responder(&mut a, &mut b);
    let e = b.node.guest.await_async(kind, b.qp.qpn, Duration::from_secs(1)).expect("an event");
    assert_eq!(e.ctx, b.node.ctx.id());
    assert_ne!(e.ctx, 0);
}

/// What `nic show` calls events and what the guest is told are one number: both kinds of events.
#[test]
fn operator_and_guest_count_the_same_events() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let told = |end: &End| end.node.guest.query_counters().unwrap().events;
    let shown = |end: &End| {
        let nic = world.daemon.show_nic(&end.node.name);
        nic["counters"]["events"].as_u64().expect("a counter")
    };
    let before = [&a, &b].map(|end| (told(end), shown(end)));
    let target = b.node.area(8);
    for index in 0..9 {
        a.scq.arm(ARM_ANY);
        a.run_ok(&SendWr::write(index, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
        let event = a.node.guest.comp_event(0, Duration::from_secs(5)).unwrap();
        assert_eq!(event.expect("a completion event").cqn, a.scq.cqn);
    }
    let kind = break_responder(&mut a, &mut b);
    b.node.guest.await_async(kind, b.qp.qpn, Duration::from_secs(5)).expect("an event");
    for ((end, (told_before, shown_before)), least) in [&a, &b].into_iter().zip(before).zip([9, 1])
    {
        let grown = told(end) - told_before;
        assert!(grown >= least, "{grown} events were told");
        assert_eq!(shown(end) - shown_before, grown, "{}", end.node.name);
    }
}

#[test]
fn without_buffers_each_object_keeps_one_event_of_each_type() {
    let world = World::new();
    let a = world.node();
    let b = world.node_with("net", &[], GuestConfig { event_buffers: 0, ..GuestConfig::default() });
    let mut expected = BTreeMap::new();
    let mut ends = Vec::new();
    let mut kind = 0;
    for _ in 0..70 {
        let (mut from, mut to) = (a.rc(), b.rc());
        from.connect(&to, &Path::default());
        to.connect(&from, &Path::default());
        kind = break_responder(&mut from, &mut to);
        expected.insert(to.qp.qpn, 0);
        ends.push((from, to));
    }
    b.guest.with_async(|q| assert_eq!(q.in_stock(), 0));
    b.guest.with_async(|q| {
        q.add_buffers(64);
        q.vq.kick().unwrap();
    });
    while let Some(e) = b.guest.async_event(SHORT).unwrap() {
        if e.kind == kind {
            *expected.get_mut(&e.object).expect("a queue pair of this guest") += 1;
        }
    }
    assert!(expected.values().all(|n| *n == 1), "{expected:?}");
}

#[test]
fn events_of_destroyed_objects_are_dropped() {
    let world = World::new();
    let a = world.node();
    let b = world.node_with("net", &[], GuestConfig { event_buffers: 0, ..GuestConfig::default() });
    let (mut from, mut to) = (a.rc(), b.rc());
    from.connect(&to, &Path::default());
    to.connect(&from, &Path::default());
    break_responder(&mut from, &mut to);
    std::thread::sleep(Duration::from_millis(20));
    to.qp.destroy().unwrap();
    b.guest.with_async(|q| {
        q.add_buffers(16);
        q.vq.kick().unwrap();
    });
    while let Some(e) = b.guest.async_event(SHORT).unwrap() {
        assert_ne!(e.object, to.qp.qpn, "{e:?}");
    }
}

#[test]
fn completion_events_of_destroyed_queues_are_dropped() {
    let world = World::new();
    let a = world.node_with("net", &[], GuestConfig { event_buffers: 0, ..GuestConfig::default() });
    let mut end = a.rc();
    end.qp.connect(end.address(), &Path::default()).unwrap();
    let word = a.area(8);
    end.scq.arm(ARM_ANY);
    end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    end.qp.destroy().unwrap();
    end.scq.destroy().unwrap();
    a.guest.with_comp(0, |q| {
        q.add_buffers(8);
        q.vq.kick().unwrap();
    });
    assert_eq!(a.guest.comp_event(0, SHORT).unwrap(), None);
}

#[test]
fn comm_est_comes_once() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (na.rc(), nb.rc());
    b.qp.to_init(&Path::default()).unwrap();
    b.qp.to_rtr(a.address(), &Path::default()).unwrap();
    a.connect(&b, &Path::default());
    let inbox = nb.area(8);
    for i in 0..3 {
        b.qp.post_recv(i, &[inbox.sge()]);
        a.run_ok(&SendWr::send(i, &[]).inline(&[1; 8]));
        b.rcq.ok();
    }
    let mut seen = 0;
    while let Some(e) = nb.guest.async_event(SHORT).unwrap() {
        seen += usize::from(e.kind == event::COMM_EST && e.object == b.qp.qpn);
    }
    assert_eq!(seen, usize::from(rules().comm_est));
}

#[test]
fn no_comm_est_in_rts() {
    let world = World::new();
    let (mut a, mut b) = world.pair(&QpSpec::new(qpt::RC), &Path::default());
    let inbox = b.node.area(8);
    b.qp.post_recv(1, &[inbox.sge()]);
    a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
    b.rcq.ok();
    while let Some(e) = b.node.guest.async_event(SHORT).unwrap() {
        assert_ne!(e.kind, event::COMM_EST);
    }
}

#[test]
fn interrupts_work_without_event_index_too() {
    let world = World::new();
    let a = world.node_with("net", &[], GuestConfig { event_idx: false, ..GuestConfig::default() });
    let mut end = a.rc();
    end.qp.connect(end.address(), &Path::default()).unwrap();
    let word = a.area(8);
    for i in 0..100 {
        end.scq.arm(ARM_ANY);
        end.run_ok(&SendWr::write(i, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
        let e = a.guest.comp_event(0, Duration::from_secs(2)).unwrap().expect("an event");
        assert_eq!(e.cqn, end.scq.cqn);
    }
}

#[test]
fn an_address_that_is_taken_back_is_an_event() {
    let world = World::new();
    let node = world.node_with("net", &["--address", "10.0.0.1"], GuestConfig::default());
    world.daemon.run(&["nic", "set", &node.name, "--address", "10.0.0.2"]);
    node.guest.await_async(event::GID_CHANGE, 1, Duration::from_secs(5)).expect("GID_CHANGE");
}

/// The netdev of the RNIC under test; none with the daemon's own engine, whose port has no link
/// that could go.
fn netdev() -> Option<String> {
    let backing = backing();
    let device = backing.strip_prefix("rnic:")?;
    let path = format!("/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0");
    Some(std::fs::read_to_string(path).expect("the netdev of the RNIC").trim().to_owned())
}

fn set_link(netdev: &str, state: &str) {
    let ip = std::process::Command::new("ip").args(["link", "set", netdev, state]).status();
    assert!(ip.expect("ip (iproute2)").success(), "ip link set {netdev} {state}");
}

#[test]
fn the_port_goes_down_and_comes_back_with_that_of_the_host() {
    let world = World::new();
    let node = world.node();
    if let Some(netdev) = netdev() {
        let limit = Duration::from_secs(5) * patience();
        set_link(&netdev, "down");
        let gone = node.guest.await_async(event::PORT_ERR, 1, limit);
        let state = node.guest.query_port().map(|port| port.state);
        set_link(&netdev, "up");
        gone.expect("PORT_ERR");
        assert_eq!(state.expect("QUERY_PORT"), 1);
        node.guest.await_async(event::PORT_ACTIVE, 1, limit).expect("PORT_ACTIVE");
    }
    assert_eq!(node.guest.query_port().expect("QUERY_PORT").state, 4);
    let (mut a, b) = world.rc_pair();
    let target = b.node.area(8);
    a.run_ok(&SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[5; 8]));
    assert_eq!(target.bytes(), [5; 8]);
}
