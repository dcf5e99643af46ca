//! Unreliable connections: what arrives, what is dropped, and that the sender never hears of it
//! (8.3).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::daemon::patience;
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{access, attr, cqe, qps, qpt, status, wc};
use virtual_guest::world::{Area, End, World, pattern};

fn pair(world: &World) -> (End, End) {
    world.pair(&QpSpec::new(qpt::UC), &Path::default())
}

/// Nobody tells the sender when its bytes are there.
fn arrives(target: &Area, data: &[u8]) {
    let until = Instant::now() + Duration::from_secs(5) * patience();
    while target.bytes() != data {
        assert!(Instant::now() < until, "the bytes do not come");
    }
}

#[test]
fn send_and_write_deliver() {
    let world = World::new();
    let (mut a, mut b) = pair(&world);
    for (i, size) in [0u64, 1, 64, 4097, 100_000].into_iter().enumerate() {
        let data = pattern(i as u64, size as usize);
        let (from, to, target) = (a.node.area_of(&data), b.node.area(size), b.node.area(size));
        b.qp.post_recv(1, &to.parts(2));
        a.run_ok(&SendWr::send(1, &from.parts(3)).imm(77));
        let received = b.rcq.ok();
        assert_eq!((u64::from(received.byte_len), received.imm), (size, 77));
        assert_eq!(to.bytes(), data);
        let done = a.run_ok(&SendWr::write(2, &from.parts(2), target.addr(0), target.rkey()));
        assert_eq!(done.opcode, wc::RDMA_WRITE);
        arrives(&target, &data);
        b.qp.post_recv(3, &[]);
        a.run_ok(&SendWr::write(4, &[from.sge()], target.addr(0), target.rkey()).imm(78));
        let received = b.rcq.ok();
        assert_eq!((received.opcode, received.imm), (wc::RECV_RDMA_WITH_IMM, 78));
        assert_eq!(u64::from(received.byte_len), size);
        assert_eq!(received.flags & cqe::IMM, cqe::IMM);
    }
}

#[test]
fn a_message_without_a_receive_is_dropped_and_the_next_one_arrives() {
    let world = World::new();
    let (mut a, mut b) = pair(&world);
    let to = b.node.area(8);
    a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
    b.rcq.silent(Duration::from_millis(30));
    b.qp.post_recv(2, &[to.sge()]);
    b.rcq.silent(Duration::from_millis(30));
    a.run_ok(&SendWr::send(3, &[]).inline(&[2; 8]));
    assert_eq!(b.rcq.ok().wr_id, 2);
    assert_eq!(to.bytes(), [2; 8]);
}

#[test]
fn a_write_through_a_bad_key_is_dropped_and_hurts_nobody() {
    let world = World::new();
    let (mut a, b) = pair(&world);
    let from = a.node.area_of(&[7; 64]);
    let (to, last) = (b.node.area(64), b.node.area(64));
    let unwritable = b.node.area_with(64, access::LOCAL_WRITE | access::REMOTE_READ);
    a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey() ^ 0x0100_0000));
    a.run_ok(&SendWr::write(2, &[from.sge()], to.addr(0) + 4096, to.rkey()));
    a.run_ok(&SendWr::write(3, &[from.sge()], unwritable.addr(0), unwritable.rkey()));
    // It comes behind the others.
    a.run_ok(&SendWr::write(4, &[from.sge()], last.addr(0), last.rkey()));
    arrives(&last, &[7; 64]);
    assert_eq!(to.bytes(), [0; 64]);
    assert_eq!(unwritable.bytes(), [0; 64]);
    assert_eq!(b.qp.state().unwrap(), qps::RTS);
}

#[test]
fn towards_an_absent_peer_everything_succeeds() {
    let world = World::new();
    let (mut a, b) = pair(&world);
    b.qp.destroy().unwrap();
    let from = a.node.area(64);
    a.run_ok(&SendWr::send(1, &[from.sge()]));
    a.run_ok(&SendWr::write(2, &[from.sge()], 0x1000, 1));
    assert_eq!(a.qp.state().unwrap(), qps::RTS);
}

#[test]
fn reads_and_atomics_are_not_for_uc() {
    let world = World::new();
    let (mut a, b) = pair(&world);
    let (local, remote) = (a.node.area(8), b.node.area(8));
    let failed = a.run(&SendWr::read(1, &[local.sge()], remote.addr(0), remote.rkey()));
    assert_eq!(failed.status, status::LOC_QP_OP_ERR);
    let (mut a, _b) = pair(&world);
    let local = a.node.area(8);
    let failed = a.run(&SendWr::faa(1, local.sge(), (remote.addr(0), remote.rkey()), 1));
    assert_eq!(failed.status, status::LOC_QP_OP_ERR);
}

#[test]
fn a_send_error_leads_to_sqe_and_receives_go_on() {
    let world = World::new();
    let (mut a, mut b) = pair(&world);
    let to = a.node.area(8);
    a.qp.post_recv(50, &[to.sge()]);
    let from = a.node.area(8);
    let mut wrong = from.sge();
    wrong.lkey ^= 0x0100_0000;
    a.qp.queue_send(&SendWr::send(1, &[wrong]));
    a.qp.queue_send(&SendWr::send(2, &[from.sge()]));
    a.qp.ring_sq();
    assert_eq!(a.scq.one().status, rules().local_protection);
    let flushed = a.scq.one();
    assert_eq!((flushed.wr_id, flushed.status), (2, status::WR_FLUSH_ERR));
    if !rules().send_errors_end_in_sqe {
        assert_eq!(a.qp.state().unwrap(), qps::ERR);
        let flushed = a.rcq.one();
        assert_eq!((flushed.wr_id, flushed.status), (50, status::WR_FLUSH_ERR));
        return;
    }
    assert_eq!(a.qp.state().unwrap(), qps::SQE);
    b.run_ok(&SendWr::send(3, &[]).inline(&[4; 8]));
    assert_eq!(a.rcq.ok().wr_id, 50);
    assert_eq!(to.bytes(), [4; 8]);
    let again = virtual_guest::qp::Attr {
        mask: attr::STATE | attr::CUR_STATE,
        state: qps::RTS,
        cur_state: qps::SQE,
        ..Default::default()
    };
    a.qp.modify(&again).unwrap();
    b.qp.post_recv(9, &[b.node.area(8).sge()]);
    a.run_ok(&SendWr::send(4, &[from.sge()]));
    assert_eq!(b.rcq.ok().wr_id, 9);
}
