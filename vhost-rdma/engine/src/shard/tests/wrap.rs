//! Free-running indices have 32 bits: every ring, and the arm word's 30, where they begin again at
//! 0.

use virtio_rdma_abi::{self as abi, arm, opcode, qpt, send_flags};

use crate::shard::testing::driver::{Cq, Guest, Qp, World, wqe};
use crate::soft::Qp as EngineQp;

const SIGNALED: u8 = send_flags::SIGNALED;
/// The last index, and the greatest `seq` of an arm word.
const LAST: u32 = u32::MAX;
const LAST_ARM: u32 = u32::MAX >> arm::SEQ_SHIFT;

fn own<'a>(world: &'a mut World, guest: &Guest, qp: &Qp) -> &'a mut EngineQp {
    world.at(guest.on).nic_mut(guest.nic).unwrap().qps.get_mut(&qp.qpn).unwrap()
}

/// As if both queues and the CQ of a QP had been used up to `index`.
fn age(world: &mut World, guest: &Guest, qp: &mut Qp, index: u32) {
    let engine = own(world, guest, qp);
    engine.send.as_mut().unwrap().begin_at(index);
    engine.receive.as_mut().unwrap().begin_at(index);
    age_cq(world, guest, &mut qp.cq, index, 0);
    qp.posted = [index; 2];
}

fn age_cq(world: &mut World, guest: &Guest, cq: &mut Cq, index: u32, fired: u32) {
    let nic = world.at(guest.on).nic_mut(guest.nic).unwrap();
    nic.cqs.get_mut(cq.cqn as usize).unwrap().begin_at(index, fired);
    cq.consumer = index;
}

/// Sends `count` messages, from number `from` on.
fn sends(world: &mut World, by: (&Guest, &mut Qp), to: (&Guest, &mut Qp), from: u64, count: u64) {
    let ((a, qa), (b, qb)) = (by, to);
    for n in from..from + count {
        b.post_receive(qb, n, &[]);
        a.post_send(qa, wqe(opcode::SEND, SIGNALED, n), &[]);
    }
    world.settle();
}

#[test]
fn work_and_completion_queues_go_on() {
    for before in [0, 1, 2, 15, 16, 17] {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        let first = LAST.wrapping_sub(before);
        age(&mut world, &a, &mut qa, first);
        age(&mut world, &b, &mut qb, first);
        assert!(a.poll(&mut qa.cq).is_none() && b.poll(&mut qb.cq).is_none());
        for batch in 0..6u64 {
            sends(&mut world, (&a, &mut qa), (&b, &mut qb), batch * 8, 8);
            for (guest, cq) in [(&a, &mut qa.cq), (&b, &mut qb.cq)] {
                let done = guest.drain(cq);
                let ids: Vec<u64> = done.iter().map(|cqe| cqe.wr_id.get()).collect();
                assert_eq!(ids, (batch * 8..batch * 8 + 8).collect::<Vec<_>>());
                for cqe in done {
                    let index = first.wrapping_add(u32::try_from(cqe.wr_id.get()).unwrap());
                    assert_eq!((cqe.status, cqe.wqe_index.get()), (0, index));
                }
                assert!(guest.poll(cq).is_none());
            }
        }
    }
}

#[test]
fn an_index_too_far_ahead_is_one_on_either_side() {
    for ahead in [16u32, 17] {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (mut qa, _) = world.pair(&mut a, &mut b, qpt::UC);
        age(&mut world, &a, &mut qa, LAST - 7);
        a.raw_doorbell(&qa, (LAST - 7).wrapping_add(ahead));
        world.settle();
        let state = world.query(&a, &qa).qp_state;
        let expected = if ahead == 16 { abi::qps::SQE } else { abi::qps::ERR };
        // What the ring holds is nonsense, but sixteen of it may be posted.
        assert!(state == expected || (ahead == 16 && state == abi::qps::RTS), "{ahead}: {state}");
    }
}

#[test]
fn a_shared_queue_goes_on_and_moves() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (at, ring) = b.ring(16 * 128 + 128);
    let req = abi::SrqCreateReq {
        pdn: b.pd.into(),
        entries: 16.into(),
        max_wr: 16.into(),
        max_sge: 4.into(),
        log2_stride: crate::shard::testing::driver::RQ_STRIDE,
        ..Default::default()
    };
    let reply = world.ok(&b, b.ctx, crate::shard::Command::SrqCreate { req, ring });
    let crate::shard::Reply::Srq(made) = reply else { panic!("not an SRQ") };
    let srqn = made.srqn.get();
    let mut qa = world.qp(&mut a, qpt::RC, 16, None);
    let mut qb = world.qp(&mut b, qpt::RC, 16, Some(srqn));
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    let nic = world.at(b.on).nic_mut(b.nic).unwrap();
    nic.srqs.get_mut(srqn as usize).unwrap().ring.begin_at(LAST - 4);
    let to = b.alloc(64);
    let mut shared = (at, 16, made.db.get());
    for round in 0..3u32 {
        let first = (LAST - 4).wrapping_add(round * 8);
        for n in 0..8 {
            b.post_shared(shared, first.wrapping_add(n), b.sge(to, 64));
        }
        world.settle();
        if round == 0 {
            let (moved, ring) = b.ring(32 * 128 + 128);
            let req = abi::SrqModifyReq {
                srqn: srqn.into(),
                mask: abi::srq_mask::MAX_WR.into(),
                entries: 32.into(),
                max_wr: 32.into(),
                ..Default::default()
            };
            world.ok(&b, b.ctx, crate::shard::Command::SrqModify { req, ring: Some(ring) });
            shared = (moved, 32, made.db.get());
        }
        for n in 0..8 {
            a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, n), &[]);
        }
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), (0..8).map(|n| (n, 0)).collect::<Vec<_>>());
        let ids: Vec<u64> = b.drain(&mut qb.cq).iter().map(|cqe| cqe.wr_id.get()).collect();
        let expected = (0..8).map(|n| u64::from(first.wrapping_add(n)));
        assert_eq!(ids, expected.collect::<Vec<_>>());
    }
}

/// Index 0xffffffff has `seq` 0, like a slot that nobody has written (docs/virtio-rdma.md §7.3).
#[test]
fn a_cq_that_moves_just_before_the_wrap_shows_nothing_that_is_not_there() {
    for (before, waiting, entries) in
        (0..9).flat_map(|b| [0, 1, 3].map(|w| (b, w))).flat_map(|(b, w)| [4, 16].map(|e| (b, w, e)))
    {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let small = world.cq(&mut b, 8);
        let mut qa = world.qp(&mut a, qpt::RC, 16, None);
        let mut qb = world.qp_on(&mut b, (qpt::RC, 16, None), small);
        world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
        world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
        age_cq(&mut world, &b, &mut qb.cq, LAST - before, 0);
        sends(&mut world, (&a, &mut qa), (&b, &mut qb), 0, waiting);
        qb.cq = world.resize(&mut b, &qb.cq, entries);
        let seen = b.drain(&mut qb.cq).len() as u64;
        assert_eq!(seen, waiting, "{before} before the wrap, {entries} entries");
        for n in waiting..20 {
            assert!(b.poll(&mut qb.cq).is_none());
            sends(&mut world, (&a, &mut qa), (&b, &mut qb), n, 1);
            assert_eq!(b.statuses(&mut qb.cq), [(n, 0)]);
            a.drain(&mut qa.cq);
        }
    }
}

#[test]
fn arming_goes_on() {
    for fired in [LAST_ARM - 1, LAST_ARM, 0] {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        age_cq(&mut world, &b, &mut qb.cq, LAST - 1, fired);
        sends(&mut world, (&a, &mut qa), (&b, &mut qb), 0, 1);
        assert!(b.completion_events().is_empty(), "not armed at {fired:#x}");
        for n in 1..4 {
            b.arm(&qb.cq, arm::ANY);
            sends(&mut world, (&a, &mut qa), (&b, &mut qb), n, 1);
            assert_eq!(b.completion_events().len(), 1, "{n} after {fired:#x}");
        }
    }
}
