//! Shared receive queues: taking, limit events, protection domain, flush on error (7.2, 8.1).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::Duration;

use virtual_guest::backing::rules;
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::rings::Srq;
use virtual_guest::spec::{cqe, err, event, qpt, status};
use virtual_guest::world::{End, Node, World, pattern};

const SECOND: Duration = Duration::from_secs(1);

fn with_srq(world: &World, entries: u32, limit: u32, peers: usize) -> (Node, Srq, Vec<(End, End)>) {
    let node = world.node();
    let srq = Srq::create(&node.ctx, node.pdn, entries, 4, limit).expect("SRQ_CREATE");
    let mut pairs = Vec::new();
    for _ in 0..peers {
        let sender = world.node().rc();
        let receiver = node.end(&QpSpec::new(qpt::RC).with_srq(&srq));
        sender.connect(&receiver, &Path::default());
        receiver.connect(&sender, &Path::default());
        pairs.push((sender, receiver));
    }
    (node, srq, pairs)
}

#[test]
fn receives_are_taken_by_whoever_needs_them() {
    let world = World::new();
    let (node, mut srq, mut pairs) = with_srq(&world, 64, 0, 3);
    let inbox = node.area(60 * 512);
    for i in 0..60 {
        srq.post(i, &[inbox.part(i * 512, 200), inbox.part(i * 512 + 200, 312)]);
    }
    let mut next = 0;
    for round in 0..20u64 {
        for (i, (a, b)) in pairs.iter_mut().enumerate() {
            let data = pattern(round * 3 + i as u64, 500);
            a.run_ok(&SendWr::send(round, &[a.node.area_of(&data).sge()]));
            let received = b.rcq.ok();
            assert_eq!(received.qpn, b.qp.qpn);
            assert_eq!(received.flags & (cqe::RECV | cqe::SRQ), cqe::RECV | cqe::SRQ);
            assert_eq!(received.wr_id, next, "receives are taken in the order of posting");
            assert_eq!(inbox.bytes()[received.wr_id as usize * 512..][..500], data);
            next += 1;
            assert_eq!(u64::from(srq.taken()), next);
        }
    }
}

#[test]
fn the_limit_event_comes_once_and_is_armed_again_by_a_modify() {
    let world = World::new();
    let (node, mut srq, mut pairs) = with_srq(&world, 16, 7, 1);
    let inbox = node.area(64);
    for i in 0..10 {
        srq.post(i, &[inbox.sge()]);
    }
    assert_eq!(srq.query().unwrap(), (16, 4, 7));
    let (a, b) = &mut pairs[0];
    for _ in 0..3 {
        a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
        b.rcq.ok();
    }
    let early = node.guest.await_async(event::SRQ_LIMIT_REACHED, srq.srqn, SECOND / 20);
    assert!(early.is_err(), "7 receives are left: not below the limit");
    a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
    b.rcq.ok();
    node.guest.await_async(event::SRQ_LIMIT_REACHED, srq.srqn, SECOND).expect("limit event");
    assert_eq!(srq.query().unwrap().2, 0, "the limit is disarmed");
    for _ in 0..3 {
        a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
        b.rcq.ok();
    }
    assert!(node.guest.await_async(event::SRQ_LIMIT_REACHED, srq.srqn, SECOND / 20).is_err());
    srq.set_limit(2).unwrap();
    for _ in 0..2 {
        a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
        b.rcq.ok();
    }
    node.guest.await_async(event::SRQ_LIMIT_REACHED, srq.srqn, SECOND).expect("second event");
}

#[test]
fn an_empty_srq_is_a_receiver_that_is_not_ready() {
    let world = World::new();
    let (node, mut srq, mut pairs) = with_srq(&world, 16, 0, 1);
    let inbox = node.area(8);
    let (a, b) = &mut pairs[0];
    a.qp.post_send(&SendWr::send(1, &[]).inline(&[6; 8]));
    a.scq.silent(Duration::from_millis(30));
    srq.post(4, &[inbox.sge()]);
    a.scq.ok();
    assert_eq!(b.rcq.ok().wr_id, 4);
    assert_eq!(inbox.bytes(), [6; 8]);
}

#[test]
fn a_queue_pair_with_an_srq_in_error_flushes_no_receive_and_says_when_it_takes_no_more() {
    let world = World::new();
    let (node, mut srq, mut pairs) = with_srq(&world, 16, 0, 2);
    let inbox = node.area(8);
    for i in 0..4 {
        srq.post(i, &[inbox.sge()]);
    }
    pairs[0].1.qp.fail().unwrap();
    let qpn = pairs[0].1.qp.qpn;
    node.guest.await_async(event::QP_LAST_WQE_REACHED, qpn, SECOND).expect("last WQE event");
    pairs[0].1.rcq.silent(Duration::from_millis(20));
    let (a, b) = &mut pairs[1];
    a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
    assert_eq!(b.rcq.ok().wr_id, 0, "the other queue pair has all receives");
}

#[test]
fn receive_buffers_are_checked_in_the_domain_of_the_srq() {
    let world = World::new();
    let node = world.node();
    let srq_pd = node.ctx.create_pd().unwrap();
    let mut srq = Srq::create(&node.ctx, srq_pd, 16, 1, 0).unwrap();
    let sender = world.node();
    let connected = |srq: &Srq| {
        let a = sender.rc();
        let b = node.end(&QpSpec::new(qpt::RC).with_srq(srq));
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        (a, b)
    };
    let (mut a, mut b) = connected(&srq);
    let [own, foreign] =
        if rules().srq_has_a_domain { [srq_pd, node.pdn] } else { [node.pdn, srq_pd] };
    let good = node.ctx.mr(own, 64, 1).unwrap();
    srq.post(1, &[good.sge(0, 64)]);
    a.run_ok(&SendWr::send(1, &[]).inline(&[5; 8]));
    assert_eq!(b.rcq.ok().wr_id, 1);
    assert_eq!(good.view().vec(0, 8), [5; 8]);
    let other = node.ctx.mr(foreign, 64, 1).unwrap();
    srq.post(2, &[other.sge(0, 64)]);
    assert_eq!(a.run(&SendWr::send(2, &[]).inline(&[6; 8])).status, status::REM_OP_ERR);
    let failed = b.rcq.one();
    assert_eq!((failed.wr_id, failed.status), (2, rules().bad_receive));
    assert_eq!(other.view().vec(0, 8), [0; 8]);
}

#[test]
fn posting_beyond_the_ring_is_an_srq_error_and_harms_nobody_else() {
    let world = World::new();
    let (node, srq, pairs) = with_srq(&world, 16, 0, 1);
    let other = node.rc();
    srq.doorbell().ring(17);
    node.guest.await_async(event::SRQ_ERR, srq.srqn, SECOND).expect("SRQ_ERR");
    assert_eq!(other.qp.state().unwrap(), 0);
    pairs[0].0.qp.fail().unwrap();
    node.guest.keepalive().unwrap();
}

#[test]
fn an_srq_in_use_can_not_be_destroyed() {
    let world = World::new();
    let (_, srq, pairs) = with_srq(&world, 16, 0, 1);
    assert_eq!(srq.destroy().unwrap_err().status(), Some(err::BUSY));
    pairs[0].1.qp.destroy().unwrap();
    srq.destroy().unwrap();
    assert_eq!(srq.query().unwrap_err().status(), Some(err::NOENT));
}

#[test]
fn the_ring_of_an_srq_wraps() {
    let world = World::new();
    let (node, mut srq, mut pairs) = with_srq(&world, 4, 0, 1);
    let inbox = node.area(8);
    let (a, b) = &mut pairs[0];
    for i in 0..200u64 {
        srq.post(i, &[inbox.sge()]);
        a.run_ok(&SendWr::send(i, &[]).inline(&i.to_le_bytes()));
        assert_eq!(b.rcq.ok().wr_id, i);
        assert_eq!(inbox.word(0), i);
    }
}

#[test]
fn a_resize_keeps_the_receives_that_wait() {
    let world = World::new();
    let (node, mut srq, mut pairs) = with_srq(&world, 8, 0, 1);
    let caps = node.guest.query_device().unwrap().caps;
    if caps & virtual_guest::spec::cap::SRQ_RESIZE == 0 {
        assert_eq!(srq.resize(32).unwrap_err().status(), Some(err::NOTSUPP));
        return;
    }
    let inbox = node.area(8);
    let (a, b) = &mut pairs[0];
    let mut next = 0;
    let mut take = |a: &mut End, b: &mut End, n: u64| {
        for _ in 0..n {
            a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
            assert_eq!(b.rcq.ok().wr_id, next);
            next += 1;
        }
    };
    for i in 0..8 {
        srq.post(i, &[inbox.sge()]);
    }
    take(a, b, 5);
    assert_eq!(srq.resize(2).unwrap_err().status(), Some(err::INVAL), "three receives wait");
    srq.resize(32).unwrap();
    assert_eq!(srq.query().unwrap().0, 32);
    assert_eq!(srq.taken(), 5);
    take(a, b, 2);
    for i in 8..39 {
        srq.post(i, &[inbox.sge()]);
    }
    take(a, b, 30);
    srq.resize(4).unwrap();
    take(a, b, 2);
    assert_eq!(srq.taken(), 39);
}

#[test]
fn what_was_posted_just_before_a_resize_moves_with_it() {
    let world = World::new();
    let (node, mut srq, mut pairs) = with_srq(&world, 8, 0, 1);
    let inbox = node.area(8);
    let (a, b) = &mut pairs[0];
    for round in 0..60u64 {
        for i in 0..4 {
            srq.post(round * 4 + i, &[inbox.sge()]);
        }
        // The device may not have looked at the doorbell yet.
        srq.resize(if round % 2 == 0 { 32 } else { 8 }).unwrap();
        for i in 0..4 {
            a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
            assert_eq!(b.rcq.ok().wr_id, round * 4 + i);
        }
    }
}
