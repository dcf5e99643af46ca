//! One test per cause of an error (8.3): the status at the requester, what the responder sees, and
//! that no byte moved.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::qp::{Attr, Path, QpSpec, SendWr};
use virtual_guest::spec::{self, access, attr, event, qps, qpt, send, status, wr};
use virtual_guest::world::{End, World};

const SECOND: Duration = Duration::from_secs(1);

/// The request fails with `status` at the requester, which is then in ERR and flushes what follows.
#[track_caller]
fn fails(a: &mut End, request: &SendWr, expected: u8) {
    let follower = SendWr::send(4242, &[]).unsignaled();
    a.qp.queue_send(request);
    a.qp.queue_send(&follower);
    a.qp.ring_sq();
    let failed = a.scq.one();
    assert_eq!((failed.wr_id, failed.status), (request.wr_id, expected), "{failed:?}");
    let flushed = a.scq.one();
    assert_eq!((flushed.wr_id, flushed.status), (4242, status::WR_FLUSH_ERR), "{flushed:?}");
    assert_eq!(a.qp.state().unwrap(), qps::ERR);
}

/// The responder gets no completion, the event, and goes to ERR.
#[track_caller]
fn responder_broke(b: &mut End, kind: u32) {
    if rules().responder_events {
        b.node.guest.await_async(kind, b.qp.qpn, SECOND).expect("an asynchronous event");
    }
    ends_in_error(b);
    b.rcq.silent(Duration::from_millis(10));
}

/// The requester may hear of it before the responder's own state is changed.
#[track_caller]
fn ends_in_error(end: &End) {
    let deadline = Instant::now() + SECOND * virtual_guest::daemon::patience();
    while end.qp.state().unwrap() != qps::ERR {
        assert!(Instant::now() < deadline, "in state {}", end.qp.state().unwrap());
    }
}

#[test]
fn a_bad_local_key_is_a_local_protection_error() {
    let world = World::new();
    for make in [0, 1, 2, 3, 4] {
        let (mut a, b) = world.rc_pair();
        let (local, remote) = (a.node.area(64), b.node.area(64));
        let mut sge = local.sge();
        match make {
            0 => sge.lkey ^= 0x0000_0100,
            1 => sge.lkey ^= 1,
            2 => sge.addr += spec::PAGE * 2,
            3 => sge.length = 64 + 193,
            _ => (sge.addr, sge.length) = (u64::MAX - 31, 64),
        }
        let request = SendWr::write(7, &[sge], remote.addr(0), remote.rkey());
        fails(&mut a, &request, rules().local_protection);
        assert_eq!(remote.bytes(), [0; 64]);
        assert_eq!(b.qp.state().unwrap(), qps::RTS, "the peer does not notice");
    }
}

#[test]
fn a_region_of_another_domain_is_a_local_protection_error() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let other = a.node.ctx.create_pd().unwrap();
    let foreign = a.node.ctx.mr(other, 64, access::ALL).unwrap();
    let remote = b.node.area(64);
    let request = SendWr::write(7, &[foreign.sge(0, 64)], remote.addr(0), remote.rkey());
    fails(&mut a, &request, rules().local_protection);
}

#[test]
fn a_read_into_a_region_without_local_write_is_a_local_protection_error() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (local, remote) = (a.node.area_with(64, access::REMOTE_READ), b.node.area_of(&[1; 64]));
    let request = SendWr::read(7, &[local.sge()], remote.addr(0), remote.rkey());
    fails(&mut a, &request, status::LOC_PROT_ERR);
    assert_eq!(local.bytes(), [0; 64]);
}

#[test]
fn a_deregistered_key_is_dead() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (local, remote) = (a.node.area(64), b.node.area(64));
    a.run_ok(&SendWr::write(1, &[local.sge()], remote.addr(0), remote.rkey()));
    a.node.ctx.dereg(local.mr.lkey).unwrap();
    let request = SendWr::write(7, &[local.sge()], remote.addr(0), remote.rkey());
    fails(&mut a, &request, rules().local_protection);
    let (mut a, mut b2) = world.rc_pair();
    let (local, remote) = (a.node.area(64), b2.node.area(64));
    b2.node.ctx.dereg(remote.rkey()).unwrap();
    let request = SendWr::write(7, &[local.sge()], remote.addr(0), remote.rkey());
    fails(&mut a, &request, status::REM_ACCESS_ERR);
    responder_broke(&mut b2, event::QP_ACCESS_ERR);
    drop(b);
}

#[test]
fn a_bad_remote_key_is_a_remote_access_error() {
    let world = World::new();
    for make in [0, 1, 2, 3, 4] {
        let (mut a, mut b) = world.rc_pair();
        let (local, remote) = (a.node.area_of(&[1; 64]), b.node.area(64));
        let (mut addr, mut rkey, mut sge) = (remote.addr(0), remote.rkey(), local.sge());
        match make {
            0 => rkey ^= 0x0000_0100,
            1 => rkey ^= 1,
            2 => addr += spec::PAGE * 2,
            3 => (addr, sge.length) = (remote.addr(0) + 64 + 191, 2),
            _ => addr = u64::MAX - 31,
        }
        fails(&mut a, &SendWr::write(7, &[sge], addr, rkey), status::REM_ACCESS_ERR);
        responder_broke(&mut b, event::QP_ACCESS_ERR);
        assert_eq!(remote.bytes(), [0; 64]);
    }
}

#[test]
fn a_remote_region_of_another_domain_is_a_remote_access_error() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let other = b.node.ctx.create_pd().unwrap();
    let foreign = b.node.ctx.mr(other, 64, access::ALL).unwrap();
    let local = a.node.area_of(&[1; 64]);
    let request = SendWr::write(7, &[local.sge()], foreign.addr(0), foreign.rkey);
    fails(&mut a, &request, status::REM_ACCESS_ERR);
    responder_broke(&mut b, event::QP_ACCESS_ERR);
    assert_eq!(foreign.view().vec(0, 64), [0; 64]);
}

#[test]
fn each_remote_right_is_needed_on_the_region() {
    let world = World::new();
    let rights = [
        (wr::RDMA_WRITE, access::REMOTE_WRITE),
        (wr::RDMA_READ, access::REMOTE_READ),
        (wr::ATOMIC_FETCH_AND_ADD, access::REMOTE_ATOMIC),
        (wr::ATOMIC_CMP_AND_SWP, access::REMOTE_ATOMIC),
    ];
    for (opcode, right) in rights {
        let (mut a, mut b) = world.rc_pair();
        let (local, remote) = (a.node.area(8), b.node.area_with(8, access::ALL & !right));
        let mut request = SendWr::new(7, opcode, &[local.sge()]);
        (request.remote_addr, request.rkey) = (remote.addr(0), remote.rkey());
        (request.arg0, request.arg1) = (0, 5);
        fails(&mut a, &request, status::REM_ACCESS_ERR);
        responder_broke(&mut b, event::QP_ACCESS_ERR);
        assert_eq!(remote.bytes(), [0; 8]);
    }
}

#[test]
fn each_remote_right_is_needed_on_the_queue_pair() {
    let world = World::new();
    let rights = [
        (wr::RDMA_WRITE, access::REMOTE_WRITE),
        (wr::RDMA_READ, access::REMOTE_READ),
        (wr::ATOMIC_FETCH_AND_ADD, access::REMOTE_ATOMIC),
    ];
    for (opcode, right) in rights {
        let path = Path { access: access::ALL & !right, ..Path::default() };
        let (mut a, mut b) = world.pair(&QpSpec::new(qpt::RC), &path);
        let (local, remote) = (a.node.area(8), b.node.area(8));
        let mut request = SendWr::new(7, opcode, &[local.sge()]);
        (request.remote_addr, request.rkey) = (remote.addr(0), remote.rkey());
        request.arg0 = 1;
        fails(&mut a, &request, rules().not_enabled);
        responder_broke(&mut b, event::QP_ACCESS_ERR);
        assert_eq!(remote.bytes(), [0; 8]);
    }
}

#[test]
fn a_receive_that_is_too_small_breaks_both_ends() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let (from, to) = (a.node.area_of(&[1; 65]), b.node.area(64));
    b.qp.post_recv(3, &[to.sge()]);
    b.qp.post_recv(4, &[to.sge()]);
    let [sender, receiver] = rules().long_message;
    fails(&mut a, &SendWr::send(7, &[from.sge()]), sender);
    let failed = b.rcq.one();
    assert_eq!((failed.wr_id, failed.status), (3, receiver));
    let flushed = b.rcq.one();
    assert_eq!((flushed.wr_id, flushed.status), (4, status::WR_FLUSH_ERR));
    ends_in_error(&b);
    to.bytes();
}

#[test]
fn a_receive_with_a_bad_element_breaks_both_ends() {
    let world = World::new();
    for make in [0, 1, 2] {
        let (mut a, mut b) = world.rc_pair();
        let (from, to) = (a.node.area_of(&[1; 64]), b.node.area(64));
        let readonly = b.node.area_with(64, access::REMOTE_READ);
        let mut sge = to.sge();
        match make {
            0 => sge.lkey ^= 0x0000_0100,
            1 => sge = readonly.sge(),
            _ => sge.addr = to.addr(0) + 64 + 192 - 8,
        }
        b.qp.post_recv(3, &[sge]);
        fails(&mut a, &SendWr::send(7, &[from.sge()]), status::REM_OP_ERR);
        let failed = b.rcq.one();
        assert_eq!((failed.wr_id, failed.status), (3, rules().bad_receive));
        ends_in_error(&b);
        assert_eq!(to.bytes(), [0; 64]);
        assert_eq!(readonly.bytes(), [0; 64]);
    }
}

#[test]
fn malformed_requests_are_local_operation_errors() {
    let world = World::new();
    let (sample, peer) = world.rc_pair();
    let (local, remote) = (sample.node.area(256), peer.node.area(256));
    let one = local.part(0, 8);
    let at = (remote.addr(0), remote.rkey());
    let requests = [
        ("unknown opcode", SendWr::new(7, 0x77, &[one])),
        ("REG_MR from user space", SendWr::new(7, wr::REG_MR, &[])),
        ("too many elements", SendWr::write(7, &[one; 5], at.0, at.1)),
        ("a count beyond the stride", SendWr { num_sge: Some(60_000), ..SendWr::send(7, &[one]) }),
        (
            "too much inline data",
            SendWr { num_sge: Some(65), ..SendWr::send(7, &[]).inline(&[0; 64]) },
        ),
        ("inline read", SendWr::read(7, &[], at.0, at.1).inline(&[0; 8])),
        ("inline atomic", SendWr::faa(7, one, at, 1).flag(send::INLINE)),
    ];
    for (what, request) in requests {
        let mut a = sample.node.rc();
        let b = peer.node.rc();
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        let failed = a.run(&request);
        assert_eq!(failed.status, status::LOC_QP_OP_ERR, "{what}: {failed:?}");
        assert_eq!(a.qp.state().unwrap(), qps::ERR, "{what}");
        assert_eq!(b.qp.state().unwrap(), qps::RTS, "{what}");
    }
    assert_eq!(remote.bytes(), [0; 256]);
}

#[test]
fn a_message_longer_than_the_port_allows_is_a_length_error() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let max = a.node.guest.query_port().unwrap().max_msg_sz;
    let (local, remote) = (a.node.area(64), b.node.area(64));
    let huge = virtual_guest::rings::Sge { length: max / 2 + 1, ..local.sge() };
    let request = SendWr::write(7, &[huge, huge], remote.addr(0), remote.rkey());
    fails(&mut a, &request, status::LOC_LEN_ERR);
}

#[test]
fn everything_is_flushed_in_posting_order() {
    let world = World::new();
    let (mut a, _b) = world.rc_pair();
    let inbox = a.node.area(8);
    for i in 0..10 {
        a.qp.post_recv(100 + i, &[inbox.sge()]);
    }
    a.qp.fail().unwrap();
    for i in 0..10 {
        a.qp.post_send(&SendWr::send(i, &[]).unsignaled());
    }
    for i in 10..20 {
        a.qp.post_recv(100 + i, &[inbox.sge()]);
    }
    for i in 0..10 {
        let flushed = a.scq.one();
        assert_eq!((flushed.wr_id, flushed.status), (i, status::WR_FLUSH_ERR));
        assert_eq!(flushed.qpn, a.qp.qpn);
    }
    for i in 0..20 {
        let flushed = a.rcq.one();
        assert_eq!((flushed.wr_id, flushed.status), (100 + i, status::WR_FLUSH_ERR));
        assert_eq!(flushed.flags & spec::cqe::RECV, spec::cqe::RECV);
    }
}

#[test]
fn unsignaled_successes_before_an_error_stay_silent() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (local, remote) = (a.node.area(8), b.node.area(8));
    for i in 0..5 {
        a.qp.queue_send(
            &SendWr::write(i, &[local.sge()], remote.addr(0), remote.rkey()).unsignaled(),
        );
    }
    a.qp.queue_send(
        &SendWr::write(5, &[local.sge()], remote.addr(0), remote.rkey() ^ 0x100).unsignaled(),
    );
    a.qp.queue_send(&SendWr::write(6, &[local.sge()], remote.addr(0), remote.rkey()).unsignaled());
    a.qp.ring_sq();
    let failed = a.scq.one();
    assert_eq!((failed.wr_id, failed.status, failed.wqe_index), (5, status::REM_ACCESS_ERR, 5));
    let flushed = a.scq.one();
    assert_eq!((flushed.wr_id, flushed.status), (6, status::WR_FLUSH_ERR));
}

#[test]
fn reset_forgets_what_was_posted_and_the_queue_pair_lives_again() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let inbox = b.node.area(64);
    b.qp.post_recv(1, &[inbox.sge()]);
    b.qp.post_recv(2, &[inbox.sge()]);
    b.qp.reset(&[&b.scq, &b.rcq]).unwrap();
    b.rcq.silent(Duration::from_millis(20));
    a.qp.reset(&[&a.scq, &a.rcq]).unwrap();
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    b.qp.post_recv(3, &[inbox.sge()]);
    let done = a.run_ok(&SendWr::send(4, &[]).inline(&[7; 8]));
    assert_eq!(done.wqe_index, 0, "indices start again at 0");
    let received = b.rcq.ok();
    assert_eq!((received.wr_id, received.wqe_index), (3, 0));
    assert_eq!(inbox.bytes()[..8], [7; 8]);
}

#[test]
fn a_queue_pair_in_error_recovers_through_reset() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (local, remote) = (a.node.area_of(&[3; 8]), b.node.area(8));
    fails(
        &mut a,
        &SendWr::write(1, &[local.sge()], remote.addr(0), 0x1234_5678),
        status::REM_ACCESS_ERR,
    );
    let (mut a, mut b) = (a, b);
    a.qp.reset(&[&a.scq, &a.rcq]).unwrap();
    b.qp.reset(&[&b.scq, &b.rcq]).unwrap();
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    a.run_ok(&SendWr::write(2, &[local.sge()], remote.addr(0), remote.rkey()));
    assert_eq!(remote.bytes(), [3; 8]);
}

#[test]
fn a_producer_index_too_far_ahead_is_fatal_for_its_queue_pair_only() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let mut other = a.node.rc();
    other.qp.connect(other.address(), &Path::default()).unwrap();
    let (_, _, doorbell) = a.qp.raw_sq(0);
    doorbell.ring(65);
    a.node.guest.await_async(event::QP_FATAL, a.qp.qpn, SECOND).expect("QP_FATAL");
    assert_eq!(a.qp.state().unwrap(), qps::ERR);
    let (_, _, doorbell) = b.qp.raw_rq(0);
    doorbell.ring(0x8000_0000);
    b.node.guest.await_async(event::QP_FATAL, b.qp.qpn, SECOND).expect("QP_FATAL");
    let word = other.node.area(8);
    other.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
}

#[test]
fn draining_stops_new_sends_and_says_so() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (local, remote) = (a.node.area_of(&[5; 8]), b.node.area(8));
    a.run_ok(&SendWr::write(1, &[local.sge()], remote.addr(0), remote.rkey()));
    let drain = Attr {
        mask: attr::STATE | attr::EN_SQD_ASYNC_NOTIFY,
        state: qps::SQD,
        en_sqd_async_notify: 1,
        ..Attr::default()
    };
    a.qp.modify(&drain).unwrap();
    a.node.guest.await_async(event::SQ_DRAINED, a.qp.qpn, SECOND).expect("SQ_DRAINED");
    let second = a.node.area_of(&[6; 8]);
    a.qp.post_send(&SendWr::write(2, &[second.sge()], remote.addr(0), remote.rkey()));
    a.scq.silent(Duration::from_millis(30));
    assert_eq!(remote.bytes(), [5; 8]);
    a.qp.modify(&Attr::state(qps::RTS)).unwrap();
    assert_eq!(a.scq.ok().wr_id, 2);
    assert_eq!(remote.bytes(), [6; 8]);
}
