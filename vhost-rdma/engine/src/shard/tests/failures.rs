//! Errors: the status of each cause, the order of flushes, waits and their ends.

use std::sync::Arc;

use virtio_rdma_abi::{self as abi, access, event, opcode, qps, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use crate::memory::PageList;
use crate::shard::Command;
use crate::shard::testing::driver::{Guest, Qp, World, state_attr, wqe};

const SIGNALED: u8 = send_flags::SIGNALED;

pub(super) fn rdma(code: u8, addr: u64, key: u32) -> abi::SqWqe {
    let mut request = wqe(code, SIGNALED, 1);
    (request.remote_addr, request.rkey) = (U64::new(addr), U32::new(key));
    request
}

pub(super) struct Pair {
    pub(super) world: World,
    pub(super) a: Guest,
    pub(super) b: Guest,
    pub(super) qa: Qp,
    pub(super) qb: Qp,
}

pub(super) fn pair(kind: u32) -> Pair {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (qa, qb) = world.pair(&mut a, &mut b, kind);
    Pair { world, a, b, qa, qb }
}

#[test]
fn remote_violations_end_both_qps() {
    let right = |p: &Pair| p.b.key;
    type Case = (u8, u64, fn(&Pair) -> u32, u8, u32);
    let cases: [Case; 5] = [
        (opcode::RDMA_WRITE, 0x8000, |_| 0x1234, wc_status::REM_ACCESS_ERR, event::QP_ACCESS_ERR),
        (
            opcode::RDMA_WRITE,
            (16 << 20) - 4,
            right,
            wc_status::REM_ACCESS_ERR,
            event::QP_ACCESS_ERR,
        ),
        (opcode::RDMA_READ, u64::MAX - 3, right, wc_status::REM_ACCESS_ERR, event::QP_ACCESS_ERR),
        (opcode::RDMA_READ, 0x8000, |p| p.a.key, wc_status::REM_ACCESS_ERR, event::QP_ACCESS_ERR),
        (
            opcode::ATOMIC_FETCH_AND_ADD,
            0x8004,
            right,
            wc_status::REM_INV_REQ_ERR,
            event::QP_REQ_ERR,
        ),
    ];
    for (code, addr, key, status, cause) in cases {
        let mut p = pair(qpt::RC);
        let (from, _) = p.a.pattern(8, 1);
        let key = key(&p);
        p.b.post_receive(&mut p.qb, 7, &[]);
        p.a.post_send(&mut p.qa, rdma(code, addr, key), &[p.a.sge(from, 8)]);
        let mut silent = wqe(opcode::SEND, 0, 2);
        silent.flags = 0;
        p.a.post_send(&mut p.qa, silent, &[]);
        p.world.settle();
        assert_eq!(
            p.a.statuses(&mut p.qa.cq),
            [(1, status), (2, wc_status::WR_FLUSH_ERR)],
            "opcode {code}"
        );
        assert_eq!(p.b.statuses(&mut p.qb.cq), [(7, wc_status::WR_FLUSH_ERR)]);
        let events = p.b.asynchronous();
        assert!(events.contains(&(cause, p.qb.qpn)), "{events:?}");
        assert_eq!(p.world.query(&p.a, &p.qa).qp_state, qps::ERR);
        assert_eq!(p.world.query(&p.b, &p.qb).qp_state, qps::ERR);
    }
}

#[test]
fn rights_of_the_qp_count_too() {
    let mut p = pair(qpt::RC);
    let mut attr = state_attr(qps::RTS);
    attr.mask = U32::new(abi::attr_mask::STATE | abi::attr_mask::ACCESS_FLAGS);
    attr.qp_access_flags = U32::new(access::REMOTE_READ);
    p.world.modify(&p.b, &p.qb, attr).unwrap();
    let (from, _) = p.a.pattern(8, 1);
    p.a.post_send(&mut p.qa, rdma(opcode::RDMA_WRITE, 0x8000, p.b.key), &[p.a.sge(from, 8)]);
    p.world.settle();
    assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, wc_status::REM_ACCESS_ERR)]);
}

#[test]
fn local_violations_are_the_senders() {
    let mut p = pair(qpt::RC);
    let mut bad = p.a.sge(0x8000, 8);
    bad.lkey = U32::new(0x77);
    p.a.post_send(&mut p.qa, rdma(opcode::RDMA_WRITE, 0x8000, p.b.key), &[bad]);
    p.world.settle();
    assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, wc_status::LOC_PROT_ERR)]);
    assert_eq!(p.world.query(&p.b, &p.qb).qp_state, qps::RTS, "the peer never learns of it");
}

#[test]
fn read_only_memory_takes_no_read_data() {
    let mut p = pair(qpt::RC);
    let list = PageList { addr: 0x8000, npages: 1, page_shift: 12, ..PageList::default() };
    let map = Arc::new(list.resolve(&p.a.space, 4096).unwrap());
    let key = p.world.register(&p.a, 0x5000_0000, map, 0).unwrap();
    let mut sge = p.a.sge(0x5000_0000, 8);
    sge.lkey = U32::new(key);
    p.a.post_send(&mut p.qa, rdma(opcode::RDMA_READ, 0x8000, p.b.key), &[sge]);
    p.world.settle();
    assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, wc_status::LOC_PROT_ERR)]);
}

#[test]
fn receives_too_small_or_bad_blame_the_receiver() {
    for (length, key_offset, at_sender, at_receiver) in [
        (4, 0, wc_status::REM_INV_REQ_ERR, wc_status::LOC_LEN_ERR),
        (8, 1, wc_status::REM_OP_ERR, wc_status::LOC_PROT_ERR),
    ] {
        let mut p = pair(qpt::RC);
        let to = p.b.alloc(64);
        let mut sge = p.b.sge(to, length);
        sge.lkey = U32::new(p.b.key.wrapping_add(key_offset));
        p.b.post_receive(&mut p.qb, 4, &[sge]);
        let (from, _) = p.a.pattern(8, 1);
        p.a.post_send(&mut p.qa, wqe(opcode::SEND, SIGNALED, 1), &[p.a.sge(from, 8)]);
        p.world.settle();
        assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, at_sender)]);
        assert_eq!(p.b.statuses(&mut p.qb.cq), [(4, at_receiver)]);
        assert_eq!(p.b.read(to, 8), [0; 8]);
    }
}

#[test]
fn malformed_requests_fail_locally() {
    let oversize = (1u32 << 30) + 1;
    for (code, flags, count, length, status) in [
        (0x55, SIGNALED, 1, 8, wc_status::LOC_QP_OP_ERR),
        (opcode::SEND, SIGNALED, 5, 8, wc_status::LOC_QP_OP_ERR),
        (opcode::SEND, SIGNALED, u16::MAX, 8, wc_status::LOC_QP_OP_ERR),
        (opcode::SEND, SIGNALED | send_flags::INLINE, 129, 0, wc_status::LOC_QP_OP_ERR),
        (opcode::RDMA_READ, SIGNALED | send_flags::INLINE, 1, 0, wc_status::LOC_QP_OP_ERR),
        (opcode::ATOMIC_FETCH_AND_ADD, SIGNALED, 1, 4, wc_status::LOC_LEN_ERR),
        (opcode::SEND, SIGNALED, 1, oversize, wc_status::LOC_LEN_ERR),
    ] {
        let mut p = pair(qpt::RC);
        let mut request = wqe(code, flags, 1);
        request.num_sge = count.into();
        let sge = p.a.sge(0x8000, length);
        p.a.post_raw(&mut p.qa, request, zerocopy::IntoBytes::as_bytes(&[sge]));
        p.world.settle();
        assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, status)], "{code:#x} {flags:#x} {count}");
    }
}

#[test]
fn a_posted_receive_ends_the_wait_at_once() {
    let mut p = pair(qpt::RC);
    p.a.post_send(&mut p.qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    p.world.settle();
    p.b.post_receive(&mut p.qb, 3, &[]);
    p.world.settle();
    assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, wc_status::SUCCESS)]);
}

#[test]
fn another_network_is_silence() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(2, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    b.post_receive(&mut qb, 1, &[]);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.advance(1_000_000_000);
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::RETRY_EXC_ERR)]);
    assert!(b.drain(&mut qb.cq).is_empty());
}

#[test]
fn a_peer_that_is_connected_elsewhere_does_not_listen() {
    let mut p = pair(qpt::RC);
    let mut intruder = p.world.guest(1, 3);
    let mut qi = p.world.qp(&mut intruder, qpt::RC, 16, None);
    p.world.connect(&intruder, &qi, qpt::RC, (p.qb.qpn, p.b.gid));
    let (from, _) = intruder.pattern(8, 1);
    intruder.post_send(
        &mut qi,
        rdma(opcode::RDMA_WRITE, 0x8000, p.b.key),
        &[intruder.sge(from, 8)],
    );
    p.world.advance(1_000_000_000);
    assert_eq!(intruder.statuses(&mut qi.cq), [(1, wc_status::RETRY_EXC_ERR)]);
    assert_eq!(p.world.query(&p.b, &p.qb).qp_state, qps::RTS);
}

#[test]
fn everything_posted_is_flushed_in_order_and_later_posts_too() {
    let mut p = pair(qpt::RC);
    for n in 0..3 {
        p.b.post_receive(&mut p.qb, n, &[]);
    }
    p.world.settle();
    p.world.modify(&p.b, &p.qb, state_attr(qps::ERR)).unwrap();
    p.world.settle();
    let flushed =
        |from: u64, to: u64| (from..to).map(|n| (n, wc_status::WR_FLUSH_ERR)).collect::<Vec<_>>();
    assert_eq!(p.b.statuses(&mut p.qb.cq), flushed(0, 3));
    p.b.post_receive(&mut p.qb, 3, &[]);
    p.b.post_send(&mut p.qb, wqe(opcode::SEND, 0, 4), &[]);
    p.world.settle();
    let mut late = p.b.statuses(&mut p.qb.cq);
    late.sort_unstable();
    assert_eq!(late, flushed(3, 5));
}

#[test]
fn unreliable_messages_vanish_without_a_receive() {
    let mut p = pair(qpt::UC);
    let (from, bytes) = p.a.pattern(8, 1);
    p.a.post_send(&mut p.qa, wqe(opcode::SEND, SIGNALED, 1), &[p.a.sge(from, 8)]);
    p.a.post_send(&mut p.qa, rdma(opcode::RDMA_WRITE, 0x8000, 0xbad), &[p.a.sge(from, 8)]);
    p.world.settle();
    assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, 0), (1, 0)]);
    let to = p.b.alloc(64);
    p.b.post_receive(&mut p.qb, 5, &[p.b.sge(to, 64)]);
    p.a.post_send(&mut p.qa, wqe(opcode::SEND, SIGNALED, 3), &[p.a.sge(from, 8)]);
    p.world.settle();
    assert_eq!(p.b.statuses(&mut p.qb.cq), [(5, 0)]);
    assert_eq!(p.b.read(to, 8), bytes);
}

#[test]
fn an_overrun_kills_the_cq_and_its_qps_but_overwrites_nothing() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let small = world.cq(&mut a, 2);
    let mut qa = world.qp_on(&mut a, (qpt::RC, 16, None), small);
    let mut qb = world.qp(&mut b, qpt::RC, 16, None);
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    for n in 0..4 {
        b.post_receive(&mut qb, n, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, n), &[]);
    }
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(0, 0), (1, 0)]);
    let events = a.asynchronous();
    assert!(
        events.contains(&(event::CQ_ERR, small.cqn)) && events.contains(&(event::QP_FATAL, qa.qpn)),
        "{events:?}"
    );
    assert_eq!(world.query(&a, &qa).qp_state, qps::ERR);
}

#[test]
fn an_impossible_producer_index_is_fatal_to_its_qp_alone() {
    let mut p = pair(qpt::RC);
    p.a.raw_doorbell(&p.qa, 17);
    p.world.settle();
    assert_eq!(p.a.asynchronous(), [(event::QP_FATAL, p.qa.qpn)]);
    assert!(!p.world.status(&p.a).failed);
}

#[test]
fn stale_keys_open_nothing() {
    let mut p = pair(qpt::RC);
    p.world.ok(&p.b, p.b.ctx, Command::MrDereg(p.b.key));
    let (from, _) = p.a.pattern(8, 1);
    p.a.post_send(&mut p.qa, rdma(opcode::RDMA_WRITE, 0x8000, p.b.key), &[p.a.sge(from, 8)]);
    p.world.settle();
    assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, wc_status::REM_ACCESS_ERR)]);
}

#[test]
fn retries_begin_anew_for_each_request() {
    let mut p = pair(qpt::RC);
    for n in 0..3 {
        p.a.post_send(&mut p.qa, wqe(opcode::SEND, SIGNALED, n), &[]);
        p.world.advance(2 * 640_000);
        p.b.post_receive(&mut p.qb, n, &[]);
        p.world.settle();
        assert_eq!(p.a.statuses(&mut p.qa.cq), [(n, wc_status::SUCCESS)]);
    }
}

#[test]
fn waits_that_are_cut_short_leave_one_deadline_per_qp() {
    let mut p = pair(qpt::RC);
    let peer = (p.qb.qpn, p.b.gid);
    for round in 0..100 {
        p.world.modify(&p.b, &p.qb, state_attr(qps::RESET)).unwrap();
        p.world.modify(&p.a, &p.qa, state_attr(qps::RESET)).unwrap();
        p.qa.posted = [0; 2];
        p.a.raw_reset(&p.qa);
        p.world.connect(&p.a, &p.qa, qpt::RC, peer);
        p.a.post_send(&mut p.qa, wqe(opcode::SEND, SIGNALED, round), &[]);
        p.world.now += 1;
        p.world.settle();
        assert_eq!(p.world.at(p.a.on).waits(), 1, "a wait for an answer that does not come");
    }
    let command = Command::QpDestroy(p.qa.qpn);
    p.world.ok(&p.a, p.a.ctx, command);
    assert_eq!(p.world.at(p.a.on).waits(), 0, "a QP takes its deadline with it");
}
