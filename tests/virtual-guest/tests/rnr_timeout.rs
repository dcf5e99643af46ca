//! Real timing: RNR waits and retry counts, ACK timeouts towards nobody, early wake when the reason
//! is gone (8.3).
//!
//! Lower bounds are strict: a wait that is cut short is a bug. Upper bounds are wide, since the
//! machine may be busy.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::control::quiet;
use virtual_guest::daemon::patience;
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{qps, qpt, status};
use virtual_guest::world::{End, World};

/// What a busy machine may add to a wait: a bound on waits that do not end. How exact timers are is
/// tested where a test turns the clock, in the engine.
fn slack() -> Duration {
    Duration::from_secs(10) * patience()
}

fn timed(a: &mut End, request: &SendWr) -> (u8, Duration) {
    let start = Instant::now();
    a.qp.post_send(request);
    let cqe = a.scq.one();
    (cqe.status, start.elapsed())
}

fn ack_timeout(code: u8) -> Duration {
    Duration::from_nanos(4096 << code)
}

#[track_caller]
fn within(what: &str, took: Duration, expected: Duration) {
    assert!(took >= expected.mul_f64(0.98), "{what}: {took:?} is shorter than {expected:?}");
    assert!(
        took <= expected.mul_f64(1.5) + slack(),
        "{what}: {took:?} is longer than {expected:?}"
    );
}

#[test]
fn rnr_waits_last_as_long_as_the_responder_says() {
    let world = World::new();
    let _quiet = quiet();
    // IBTA table 45: code 0 is 655.36 ms, 1 is 10 us, 20 is 10.24 ms, 24 is 40.96 ms.
    for (code, timer, retries) in
        [(20, 10_240, 3u8), (24, 40_960, 2), (26, 81_920, 1), (0, 655_360, 1)]
    {
        let path = Path { min_rnr_timer: code, rnr_retry: retries, ..Path::default() };
        let (mut a, mut b) = world.pair(&QpSpec::new(qpt::RC), &path);
        let (got, took) = timed(&mut a, &SendWr::send(1, &[]).inline(&[1; 8]));
        assert_eq!(got, status::RNR_RETRY_EXC_ERR);
        let expected = Duration::from_micros(timer) * u32::from(retries);
        within(&format!("RNR code {code} x {retries}"), took, expected);
        assert_eq!(a.qp.state().unwrap(), qps::ERR);
        b.rcq.silent(Duration::from_millis(5));
        assert_eq!(b.qp.state().unwrap(), qps::RTS, "the responder is not to blame");
    }
}

#[test]
fn rnr_retry_zero_fails_at_once() {
    let world = World::new();
    let _quiet = quiet();
    let path = Path { min_rnr_timer: 24, rnr_retry: 0, ..Path::default() };
    let (mut a, _b) = world.pair(&QpSpec::new(qpt::RC), &path);
    let (got, took) = timed(&mut a, &SendWr::send(1, &[]).inline(&[1; 8]));
    assert_eq!(got, status::RNR_RETRY_EXC_ERR);
    assert!(took < Duration::from_millis(40) + slack(), "{took:?}");
}

#[test]
fn rnr_retry_seven_waits_for_ever_and_wakes_early() {
    let world = World::new();
    let _quiet = quiet();
    // Code 0 is 655 ms: a receive that arrives after 60 ms must not wait for the timer.
    let path = Path { min_rnr_timer: 0, rnr_retry: 7, ..Path::default() };
    let (mut a, mut b) = world.pair(&QpSpec::new(qpt::RC), &path);
    let inbox = b.node.area(8);
    a.qp.post_send(&SendWr::send(1, &[]).inline(&[9; 8]));
    a.scq.silent(Duration::from_millis(60));
    let mut late = Vec::new();
    loop {
        let start = Instant::now();
        b.qp.post_recv(2, &[inbox.sge()]);
        a.scq.ok();
        let took = start.elapsed();
        b.rcq.ok();
        assert_eq!(inbox.bytes(), [9; 8]);
        if took < Duration::from_millis(400) || !rules().rnr_wait_ends_early {
            break;
        }
        // A busy machine may be late, too, but not each time.
        late.push(took);
        assert!(late.len() < 10, "woken only by the timer: {late:?}");
        a.qp.post_send(&SendWr::send(1, &[]).inline(&[9; 8]));
        a.scq.silent(Duration::from_millis(60));
    }
    let naks = b.node.guest.query_counters().unwrap().rnr_naks_sent;
    assert!(naks >= 1 || !rules().inbound_is_counted, "the responder counts what it refused");
}

#[test]
fn a_write_with_immediate_waits_for_a_receive_too() {
    let world = World::new();
    let _quiet = quiet();
    let path = Path { min_rnr_timer: 20, rnr_retry: 2, ..Path::default() };
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &path);
    let target = b.node.area(8);
    let write = SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]).imm(5);
    let (got, took) = timed(&mut a, &write);
    assert_eq!(got, status::RNR_RETRY_EXC_ERR);
    within("RNR of a write", took, Duration::from_micros(2 * 10_240));
    assert_eq!(target.bytes(), [0; 8], "each time it is sent it would be stored again");
}

#[test]
fn each_message_has_all_its_rnr_retries() {
    let world = World::new();
    let path = Path { min_rnr_timer: 26, rnr_retry: 6, ..Path::default() };
    let (mut a, mut b) = world.pair(&QpSpec::new(qpt::RC), &path);
    let inbox = b.node.area(8);
    for i in 0..10 {
        a.qp.post_send(&SendWr::send(i, &[]).inline(&[1; 8]));
        // Longer than one wait of 82 ms, so that ten messages use more retries than one may.
        std::thread::sleep(Duration::from_millis(100));
        b.qp.post_recv(i, &[inbox.sge()]);
        assert_eq!(a.scq.ok().wr_id, i);
        b.rcq.ok();
    }
}

#[test]
fn ack_timeouts_towards_a_destroyed_peer_last_as_specified() {
    let world = World::new();
    let _quiet = quiet();
    let most = if rules().seven_retries_end { 7 } else { 6 };
    for (code, retries) in [(10u8, 0u8), (12, 3), (13, most), (15, 1), (16, 0)] {
        let path = Path { timeout: code, retry_cnt: retries, ..Path::default() };
        let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &path);
        b.qp.destroy().unwrap();
        let target = a.node.area(8);
        let (got, took) = timed(&mut a, &SendWr::write(1, &[target.sge()], 0x1000, 0x77));
        assert_eq!(got, status::RETRY_EXC_ERR);
        let expected = ack_timeout(code) * (u32::from(retries) + 1);
        within(&format!("timeout {code}, {retries} retries"), took, expected);
        assert_eq!(a.qp.state().unwrap(), qps::ERR);
    }
}

#[test]
fn a_peer_that_is_not_connected_back_answers_nothing() {
    let world = World::new();
    let _quiet = quiet();
    let path = Path { timeout: 13, retry_cnt: 1, ..Path::default() };
    let (na, nb) = (world.node(), world.node());
    let expected = ack_timeout(13) * 2;
    let nc = if rules().packets_name_their_qp { na.clone() } else { world.node() };
    // In RESET, in INIT, connected to somebody else, in ERR.
    for case in 0..4 {
        let (mut a, b, c) = (na.rc(), nb.rc(), nc.rc());
        a.connect(&b, &path);
        match case {
            0 => {}
            1 => b.qp.to_init(&path).unwrap(),
            2 => b.connect(&c, &path),
            _ => {
                b.connect(&a, &path);
                b.qp.fail().unwrap();
            }
        }
        let target = nb.area(8);
        let request = SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[1; 8]);
        let (got, took) = timed(&mut a, &request);
        assert_eq!(got, status::RETRY_EXC_ERR, "case {case}");
        within(&format!("case {case}"), took, expected);
        assert_eq!(target.bytes(), [0; 8], "case {case}");
    }
}

#[test]
fn a_peer_that_becomes_ready_in_time_is_served() {
    let world = World::new();
    let path = Path { timeout: 19, retry_cnt: 7, ..Path::default() };
    let (na, nb) = (world.node(), world.node());
    let (mut a, b) = (na.rc(), nb.rc());
    a.connect(&b, &path);
    let target = nb.area(8);
    a.qp.post_send(&SendWr::write(1, &[], target.addr(0), target.rkey()).inline(&[4; 8]));
    a.scq.silent(Duration::from_millis(50));
    let start = Instant::now();
    b.connect(&a, &path);
    a.scq.ok();
    // The retransmission is due after at most 2.1 s; an early wake is better and allowed.
    assert!(start.elapsed() < ack_timeout(19) + slack(), "{:?}", start.elapsed());
    assert_eq!(target.bytes(), [4; 8]);
}

#[test]
fn a_peer_whose_guest_vanishes_times_out() {
    let world = World::new();
    let path = Path { timeout: 14, retry_cnt: 1, ..Path::default() };
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &path);
    b.node.guest.disconnect();
    // The socket closes at once, the daemon lets go of the QP a moment later; until then it would
    // be the peer's key that is wrong.
    let deadline = Instant::now() + Duration::from_secs(5);
    while world.daemon.show_nic(&b.node.name)["session"] != "absent" {
        assert!(Instant::now() < deadline, "the daemon does not see that the guest is gone");
    }
    let local = a.node.area(8);
    let (got, _) = timed(&mut a, &SendWr::write(1, &[local.sge()], 0x1000, 0x77));
    assert_eq!(got, status::RETRY_EXC_ERR);
}

#[test]
fn timeout_zero_waits_for_ever() {
    let world = World::new();
    let path = Path { timeout: 0, retry_cnt: 0, ..Path::default() };
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &path);
    b.qp.destroy().unwrap();
    let local = a.node.area(8);
    a.qp.post_send(&SendWr::write(1, &[local.sge()], 0x1000, 0x77));
    a.scq.silent(Duration::from_millis(300));
    assert_eq!(a.qp.state().unwrap(), qps::RTS);
    a.qp.fail().unwrap();
    assert_eq!(a.scq.one().status, status::WR_FLUSH_ERR);
}
