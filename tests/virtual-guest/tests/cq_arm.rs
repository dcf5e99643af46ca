//! Arming a completion queue through memory (7.4): one event per arm, solicited, no event lost,
//! overrun, discard.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test on a 64-bit host"
)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use virtual_guest::backing::rules;
use virtual_guest::daemon::tries;
use virtual_guest::qp::{Path, Qp, QpSpec, SendWr};
use virtual_guest::rings::Cq;
use virtual_guest::spec::{self, ARM_ANY, ARM_SOLICITED, cqe, event, qps, qpt, send, status};
use virtual_guest::world::{End, World};

const SECOND: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(30);

fn event_of(end: &End, cq: &Cq, timeout: Duration) -> bool {
    match end.node.guest.comp_event(0, timeout).expect("the event queue works") {
        Some(e) => {
            assert_eq!(e.cqn, cq.cqn);
            true
        }
        None => false,
    }
}

#[test]
fn an_unarmed_queue_raises_nothing_and_an_armed_one_raises_once() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let target = b.node.area(8);
    let write = SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]);
    a.run_ok(&write);
    assert!(!event_of(&a, &a.scq, SHORT));
    a.scq.arm(ARM_ANY);
    assert!(a.scq.armed());
    a.run_ok(&write);
    assert!(event_of(&a, &a.scq, SECOND));
    assert!(!a.scq.armed());
    a.run_ok(&write);
    assert!(!event_of(&a, &a.scq, SHORT), "an arm is good for one event");
}

#[test]
fn an_event_names_the_arm_that_it_answers() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let target = b.node.area(8);
    let write = SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]);
    for seq in 1..20 {
        a.scq.arm(ARM_ANY);
        a.run_ok(&write);
        let e = a.node.guest.comp_event(0, SECOND).unwrap().expect("an event");
        assert_eq!((e.cqn, e.arm_seq), (a.scq.cqn, seq));
    }
}

#[test]
fn solicited_arming_waits_for_a_solicited_message() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let inbox = b.node.area(8);
    for i in 0..4 {
        b.qp.post_recv(i, &[inbox.sge()]);
    }
    b.rcq.arm(ARM_SOLICITED);
    a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
    let received = b.rcq.ok();
    if rules().solicited_is_told {
        assert_eq!(received.flags & cqe::SOLICITED, 0);
        assert!(!event_of(&b, &b.rcq, SHORT));
    } else {
        assert_eq!(received.flags & cqe::SOLICITED, cqe::SOLICITED);
        assert!(event_of(&b, &b.rcq, SECOND), "an event too many is better than one too few");
        b.rcq.arm(ARM_SOLICITED);
    }
    a.run_ok(&SendWr::send(2, &[]).inline(&[1; 8]).flag(send::SOLICITED));
    assert_eq!(b.rcq.ok().flags & cqe::SOLICITED, cqe::SOLICITED);
    assert!(event_of(&b, &b.rcq, SECOND));
    // A write with immediate can be solicited too.
    b.rcq.arm(ARM_SOLICITED);
    let write = SendWr::write(3, &[], inbox.addr(0), inbox.rkey()).inline(&[1; 8]).imm(1);
    a.run_ok(&write.flag(send::SOLICITED));
    assert!(event_of(&b, &b.rcq, SECOND));
    // Widened to any, keeping the same arm.
    b.rcq.ok();
    b.rcq.arm(ARM_SOLICITED);
    b.rcq.arm(ARM_ANY);
    a.run_ok(&SendWr::send(4, &[]).inline(&[1; 8]));
    assert!(event_of(&b, &b.rcq, SECOND));
}

#[test]
fn an_error_counts_as_solicited() {
    let world = World::new();
    let (mut a, _b) = world.rc_pair();
    let inbox = a.node.area(8);
    a.qp.post_recv(1, &[inbox.sge()]);
    a.rcq.arm(ARM_SOLICITED);
    a.qp.fail().unwrap();
    assert_eq!(a.rcq.one().status, status::WR_FLUSH_ERR);
    assert!(event_of(&a, &a.rcq, SECOND));
}

#[test]
fn moderated_events_wait_for_the_count_or_the_period() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let target = b.node.area(8);
    let write = SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]);
    // The longest period, so that only the count can end the first wait within it.
    a.scq.moderate(8, u16::MAX).unwrap();
    let start = std::time::Instant::now();
    a.scq.arm(ARM_ANY);
    for _ in 0..7 {
        a.run_ok(&write);
    }
    let early = event_of(&a, &a.scq, Duration::from_millis(1));
    // A machine that is slow enough may have reached the period.
    assert!(!early || start.elapsed() >= Duration::from_millis(65), "seven are not eight");
    if !early {
        a.run_ok(&write);
        assert!(event_of(&a, &a.scq, SECOND));
    }
    // One alone comes after the period, and not before.
    for _ in 0..3 {
        a.scq.arm(ARM_ANY);
        let start = std::time::Instant::now();
        a.run_ok(&write);
        assert!(event_of(&a, &a.scq, SECOND), "nothing else will come");
        assert!(start.elapsed() >= Duration::from_micros(65_535), "{:?}", start.elapsed());
    }
    assert!(!event_of(&a, &a.scq, Duration::from_millis(100)), "not armed");
    // A completion between two program runs must not stay in the device: off is off at once.
    a.scq.arm(ARM_ANY);
    a.run_ok(&write);
    a.scq.moderate(0, 0).unwrap();
    assert!(event_of(&a, &a.scq, SECOND));
    let counters = a.node.guest.query_counters().unwrap();
    assert!(counters.completions >= 11 && counters.events >= 5 && counters.commands > 10);
}

#[test]
fn an_error_is_not_kept_waiting() {
    let world = World::new();
    // What waits for the period never comes before it; on a busy machine, what does not wait may
    // come late, but not each time.
    let soon = (0..20).any(|_| {
        let (mut a, _b) = world.rc_pair();
        let inbox = a.node.area(8);
        a.qp.post_recv(1, &[inbox.sge()]);
        a.rcq.moderate(u16::MAX, u16::MAX).unwrap();
        a.rcq.arm(ARM_ANY);
        let start = std::time::Instant::now();
        a.qp.fail().unwrap();
        assert!(event_of(&a, &a.rcq, SECOND));
        let took = start.elapsed();
        assert_eq!(a.rcq.one().status, status::WR_FLUSH_ERR);
        took < Duration::from_micros(65_535)
    });
    assert!(soon, "it waited for the period, twenty times");
}

#[test]
fn vectors_have_queues_of_their_own() {
    let world = World::new();
    let node = world.node();
    let vectors = node.guest.device().comp_vectors;
    let target = node.area(8);
    for vector in 0..vectors {
        let scq = Cq::create(&node.ctx, 16, vector as u32).unwrap();
        let rcq = node.cq(16);
        let mut a = node.end_with(&QpSpec::new(qpt::RC), scq, rcq);
        a.qp.connect(a.address(), &Path::default()).unwrap();
        a.scq.arm(ARM_ANY);
        a.run_ok(&SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
        let e = node.guest.comp_event(vector, SECOND).unwrap().expect("an event on this vector");
        assert_eq!(e.cqn, a.scq.cqn);
    }
    let refused = Cq::create(&node.ctx, 16, vectors as u32).unwrap_err();
    assert_eq!(refused.status(), Some(spec::err::INVAL));
}

/// The consumer sleeps whenever it found nothing, as `ibv_get_cq_event` programs do; a lost event
/// is a hang.
fn sleep_when_empty(rounds: u64, what: u32, solicited: bool) {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let inbox = b.node.area(64 * 8);
    let stop = AtomicBool::new(false);
    let flags = if solicited { send::SOLICITED } else { 0 };
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            for i in 0..rounds {
                a.qp.post_send(&SendWr::send(i, &[]).inline(&i.to_le_bytes()).flag(flags));
                a.scq.ok();
                // Vary the distance between completion and arm.
                for _ in 0..(i * 37 % 300) {
                    std::hint::spin_loop();
                }
                assert!(!stop.load(Ordering::Relaxed), "the receiver gave up");
            }
        });
        for i in 0..32 {
            b.qp.post_recv(i, &[inbox.part(i * 8, 8)]);
        }
        let mut seen = 0;
        while seen < rounds {
            b.rcq.arm(what);
            // Arm, then look once more, then sleep.
            let mut found = false;
            while let Some(cqe) = b.rcq.poll() {
                assert_eq!(cqe.status, status::SUCCESS);
                assert_eq!(inbox.word((seen % 32) * 8), seen);
                b.qp.post_recv(seen + 32, &[inbox.part((seen % 32) * 8, 8)]);
                seen += 1;
                found = true;
            }
            if !found && b.node.guest.comp_event(0, Duration::from_secs(5)).unwrap().is_none() {
                stop.store(true, Ordering::Relaxed);
                panic!("an event was lost: {seen} of {rounds} seen, ready: {}", b.rcq.ready());
            }
        }
        sender.join().expect("the sender");
    });
}

#[test]
fn no_event_is_lost_when_arming_races_with_completions() {
    sleep_when_empty(tries(20_000), ARM_ANY, false);
}

#[test]
fn no_solicited_event_is_lost_either() {
    sleep_when_empty(tries(10_000), ARM_SOLICITED, true);
}

#[test]
fn without_buffers_events_wait_in_their_queues() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let target = nb.area(8);
    let buffers = na.guest.with_comp(0, |q| {
        q.restock = false;
        q.in_stock()
    });
    // More completion queues than there are buffers.
    let mut ends = Vec::new();
    for _ in 0..buffers + 5 {
        let (a, b) = (na.rc(), nb.rc());
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        a.scq.arm(ARM_ANY);
        ends.push((a, b));
    }
    for (a, _) in &mut ends {
        a.run_ok(&SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
    }
    let mut seen = std::collections::BTreeSet::new();
    while let Some(e) = na.guest.comp_event(0, Duration::from_millis(200)).unwrap() {
        assert!(seen.insert(e.cqn), "one event per queue");
        assert_eq!(e.arm_seq, 1, "the arm that it answers");
    }
    assert_eq!(seen.len(), buffers);
    na.guest.with_comp(0, |q| {
        q.add_buffers(8);
        q.vq.kick().unwrap();
    });
    while let Some(e) = na.guest.comp_event(0, Duration::from_millis(200)).unwrap() {
        assert!(seen.insert(e.cqn), "one event per queue");
        assert_eq!(e.arm_seq, 1, "the arm that it answers");
    }
    assert_eq!(seen.len(), buffers + 5, "events that waited are delivered");
}

#[test]
fn an_overrun_overwrites_nothing_and_breaks_all_queue_pairs_of_the_queue() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut scq, rcq) = (na.cq(8), na.cq(8));
    scq.release = false;
    let mut a = na.end_with(&QpSpec::new(qpt::RC), scq, rcq);
    let b = nb.rc();
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let second = Qp::create(&na.ctx, na.pdn, &a.scq, &a.rcq, &QpSpec::new(qpt::RC)).unwrap();
    second.connect(b.address(), &Path::default()).unwrap();
    let target = nb.area(8);
    for i in 0..8 {
        a.run_ok(&SendWr::write(i, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
    }
    let before = a.scq.view().vec(0, 8 * 64);
    a.qp.post_send(&SendWr::write(8, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
    na.guest.await_async(event::CQ_ERR, a.scq.cqn, SECOND).expect("CQ_ERR");
    assert_eq!(a.scq.view().vec(0, 8 * 64), before, "no entry is overwritten");
    assert_eq!(a.qp.state().unwrap(), qps::ERR);
    assert_eq!(second.state().unwrap(), qps::ERR);
    a.scq.release = true;
    a.scq.publish();
    a.qp.post_send(&SendWr::send(9, &[]));
    a.scq.silent(SHORT);
    let mut other = na.rc();
    other.qp.connect(other.address(), &Path::default()).unwrap();
    let word = na.area(8);
    other.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
}

#[test]
fn an_overrun_raises_qp_fatal_for_the_queue_pairs() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (mut scq, rcq) = (a.node.cq(4), a.node.cq(4));
    scq.release = false;
    let mut small = a.node.end_with(&QpSpec::new(qpt::RC), scq, rcq);
    let peer = b.node.rc();
    small.connect(&peer, &Path::default());
    peer.connect(&small, &Path::default());
    let target = b.node.area(8);
    for i in 0..5 {
        small.qp.post_send(&SendWr::write(i, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
    }
    a.node.guest.await_async(event::QP_FATAL, small.qp.qpn, SECOND).expect("QP_FATAL");
    a.run_ok(&SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]));
}

#[test]
fn a_queue_of_the_largest_size_works_and_a_larger_one_is_refused() {
    let world = World::new();
    let node = world.node();
    let max = node.ctx.limits().unwrap().max_cqe;
    assert!(max >= 1024);
    let entries = 1 << max.ilog2();
    let scq = Cq::create(&node.ctx, entries.min(1 << 15), 0).unwrap();
    let mut a = node.end_with(&QpSpec::new(qpt::RC), scq, node.cq(16));
    a.qp.connect(a.address(), &Path::default()).unwrap();
    let word = node.area(8);
    a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    let too_large = virtual_guest::pages::PageList::contiguous(
        node.guest.ram().regions()[0].gpa(),
        1 << 12,
        0,
        12,
    );
    let body = spec::Put::new()
        .u32((max + 1).next_power_of_two().max(2 * entries))
        .u32(0)
        .bytes(&too_large.bytes())
        .done(32);
    let refused = node.ctx.command(spec::cmd::CQ_CREATE, &body, 8).unwrap_err();
    assert_eq!(refused.status(), Some(spec::err::INVAL));
}

#[test]
fn a_queue_in_use_can_not_be_destroyed() {
    let world = World::new();
    let (a, _b) = world.rc_pair();
    assert_eq!(a.scq.destroy().unwrap_err().status(), Some(spec::err::BUSY));
    a.qp.destroy().unwrap();
    a.scq.destroy().unwrap();
    assert_eq!(a.scq.destroy().unwrap_err().status(), Some(spec::err::NOENT));
}
