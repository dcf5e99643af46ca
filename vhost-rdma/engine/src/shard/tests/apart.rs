//! Guests on two shards of one network: what a verbs program sees is what it sees on one, also over
//! a link that loses, repeats, reorders and delays.

use virtio_rdma_abi::{self as abi, opcode, qps, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::datagram::{datagram, handle, ready};
use super::mirror::{AT, request};
use crate::shard::testing::air::{Air, Faults};
use crate::shard::testing::driver::{
    Guest, Lcg, Qp, World, init_attr, rtr_attr, rts_attr, state_attr, wqe,
};
use crate::shard::{Command, JobKind, Random as _, Status};

const SIGNALED: u8 = send_flags::SIGNALED;
const SECOND: u64 = 1_000_000_000;
pub(super) const BAD: Faults =
    Faults { lost: 5, requests_alone: false, repeated: 10, delay: 300_000, lag: 0, mtu: None };

pub(super) fn apart(air: Air) -> (World, Guest, Guest) {
    let mut world = World::beside(air);
    let (a, b) = (world.guest_on(0, 1, 1), world.guest_on(1, 1, 2));
    (world, a, b)
}

pub(super) fn remote(code: u8, id: u64, (b, at): (&Guest, u64)) -> abi::SqWqe {
    let mut request = wqe(code, SIGNALED, id);
    (request.remote_addr, request.rkey) = (U64::new(at), U32::new(b.key));
    request
}

#[test]
fn every_request_crosses_with_its_data() {
    let (mut world, mut a, mut b) = apart(Air::still());
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let len = 300 << 10;
    let (from, bytes) = a.pattern(len, 5);
    let (to, back, word) = (b.alloc(len as u64), a.alloc(len as u64), b.alloc(8));
    let found = a.alloc(8);
    b.write(word, &40u64.to_le_bytes());
    b.post_receive(&mut qb, 7, &[b.sge(to, len as u32)]);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, len as u32)]);
    world.settle();
    assert!(b.read(to, len) == bytes);
    b.write(to, &vec![0; len]);
    let all = [(opcode::RDMA_WRITE, from, len), (opcode::RDMA_READ, back, len)];
    for (code, local, len) in all {
        a.post_send(&mut qa, remote(code, 2, (&b, to)), &[a.sge(local, len as u32)]);
    }
    let mut add = remote(opcode::ATOMIC_FETCH_AND_ADD, 3, (&b, word));
    add.arg0 = U64::new(2);
    a.post_send(&mut qa, add, &[a.sge(found, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0), (2, 0), (2, 0), (3, 0)]);
    assert_eq!(b.statuses(&mut qb.cq), [(7, 0)]);
    assert!(b.read(to, len) == bytes && a.read(back, len) == bytes);
    assert_eq!((a.read(found, 8), b.read(word, 8)[0]), (40u64.to_le_bytes().to_vec(), 42));
    // A wrong key is refused, over there and here.
    let mut wrong = remote(opcode::RDMA_WRITE, 4, (&b, to));
    wrong.rkey = U32::new(b.key ^ 0x100);
    a.post_send(&mut qa, wrong, &[a.sge(from, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(4, wc_status::REM_ACCESS_ERR)]);
}

/// Queue pairs that try again as often as they can.
pub(super) fn patient_pair(world: &mut World, a: &mut Guest, b: &mut Guest) -> (Qp, Qp) {
    pair_with(world, (a, b), abi::QpAttr { retry_cnt: 7, ..rts_attr(qpt::RC) })
}

fn pair_with(world: &mut World, (a, b): (&mut Guest, &mut Guest), rts: abi::QpAttr) -> (Qp, Qp) {
    let (qa, qb) = (world.qp(a, qpt::RC, 16, None), world.qp(b, qpt::RC, 16, None));
    for (guest, qp, peer) in [(&*a, &qa, (qb.qpn, b.gid)), (&*b, &qb, (qa.qpn, a.gid))] {
        for attr in [init_attr(qpt::RC), rtr_attr(qpt::RC, peer), rts] {
            world.modify(guest, qp, attr).unwrap();
        }
    }
    (qa, qb)
}

/// What a program may rely on: each request once, in order, with its bytes.
pub(super) fn once_and_in_order(seed: u64, meanwhile: Meanwhile) -> [u64; 3] {
    over(BAD, seed, meanwhile)
}

/// What goes on in the middle of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meanwhile {
    Nothing,
    /// Another process goes on.
    HandOver,
    /// NICs move to and fro.
    Moves,
}

fn over(faults: Faults, seed: u64, meanwhile: Meanwhile) -> [u64; 3] {
    let mut chance = Lcg(seed);
    let (mut world, mut a, mut b) = apart(Air::new(faults, seed));
    let (mut qa, mut qb) = patient_pair(&mut world, &mut a, &mut b);
    let (word, found) = (b.alloc(8), a.alloc(8));
    let len = 200 << 10;
    let (from, bytes) = a.pattern(len, seed as u8);
    let (to, back) = (b.alloc(len as u64), a.alloc(len as u64));
    for round in 0..12u64 {
        b.post_receive(&mut qb, round, &[b.sge(to, len as u32)]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, round), &[a.sge(from, len as u32)]);
        let mut add = remote(opcode::ATOMIC_FETCH_AND_ADD, round, (&b, word));
        add.arg0 = U64::new(1);
        a.post_send(&mut qa, add, &[a.sge(found, 8)]);
        let read = remote(opcode::RDMA_READ, round, (&b, to));
        a.post_send(&mut qa, read, &[a.sge(back, len as u32)]);
        match meanwhile {
            Meanwhile::Nothing => {}
            Meanwhile::HandOver => {
                world.advance(700_000 * (1 + round));
                world.hand_over(&mut [&mut a, &mut b]);
            }
            Meanwhile::Moves => {
                for _ in 0..40 {
                    (0..chance.next_u32() % 4).for_each(|_| _ = world.round());
                    world.advance(u64::from(chance.next_u32() % 200_000));
                    let guest = if chance.next_u32().is_multiple_of(2) { &mut a } else { &mut b };
                    assert!(world.change_shard(guest));
                }
            }
        }
        world.advance(20 * SECOND);
        assert_eq!(a.statuses(&mut qa.cq), [(round, 0); 3], "seed {seed}, round {round}");
        assert_eq!(b.statuses(&mut qb.cq), [(round, 0)], "one receive for one send");
        assert_eq!(a.read(found, 8), round.to_le_bytes(), "seed {seed}: added once");
        assert!(b.read(to, len) == bytes && a.read(back, len) == bytes, "seed {seed}");
        b.write(to, &vec![0; len]);
        a.write(back, &vec![1; len]);
    }
    world.beside.as_ref().map_or([0; 3], |(_, air)| [air.lost, air.repeated, air.reordered])
}

#[test]
fn a_bad_link_loses_nothing_and_repeats_nothing() {
    let mut seen = [0; 3];
    for seed in 0..24 {
        let faults = once_and_in_order(seed, Meanwhile::Nothing);
        seen.iter_mut().zip(faults).for_each(|(seen, more)| *seen += more);
    }
    assert!(seen.iter().all(|&seen| seen > 50), "lost, repeated, reordered: {seen:?}");
}

/// Fifty pieces of each message, and faults among them.
#[test]
fn small_pieces_make_the_same_messages() {
    for seed in 0..6 {
        let faults = Faults { lost: 2, mtu: Some(4096), ..BAD };
        let how = [Meanwhile::Nothing, Meanwhile::HandOver, Meanwhile::Moves][seed as usize % 3];
        let seen = over(faults, seed, how);
        // NICs that move are together half of the time.
        let least = if how == Meanwhile::Moves { 2 } else { 20 };
        assert!(seen.iter().all(|&seen| seen > least), "lost, repeated, reordered: {seen:?}");
    }
}

#[test]
fn another_process_goes_on_in_the_middle_of_it() {
    for seed in 0..12 {
        once_and_in_order(100 + seed, Meanwhile::HandOver);
    }
}

/// A receiver that is not ready has answered, so tries without an answer count in a row: who waits
/// for ever (rnr_retry 7) waits also where many of its requests are lost.
#[test]
fn who_waits_for_ever_outlives_losses() {
    let faults = Faults { lost: 30, requests_alone: true, ..Faults::default() };
    let (mut world, mut a, mut b) = apart(Air::new(faults, 5));
    let rts = abi::QpAttr { retry_cnt: 7, rnr_retry: 7, ..rts_attr(qpt::RC) };
    let (mut qa, mut qb) = pair_with(&mut world, (&mut a, &mut b), rts);
    let (from, bytes) = a.pattern(64, 9);
    let to = b.alloc(64);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, 64)]);
    world.advance(100 * SECOND);
    assert!(world.beside.as_ref().is_some_and(|(_, air)| air.lost > 30));
    assert!(a.statuses(&mut qa.cq).is_empty(), "it waits");
    b.post_receive(&mut qb, 7, &[b.sge(to, 64)]);
    world.advance(20 * SECOND);
    assert_eq!((a.statuses(&mut qa.cq), b.statuses(&mut qb.cq)), (vec![(1, 0)], vec![(7, 0)]));
    assert!(b.read(to, 64) == bytes);
}

/// Whoever is given a request again while the first is under way, and a NIC that stands still when
/// its answer comes.
#[test]
fn an_answer_that_finds_the_nic_paused_is_not_asked_for_again() {
    let delay = 1_000_000;
    let air = Air::new(Faults { delay, ..Faults::default() }, 3);
    let (mut world, mut a, mut b) = apart(air);
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (word, found) = (b.alloc(8), a.alloc(8));
    for round in 0..20u64 {
        let mut add = remote(opcode::ATOMIC_FETCH_AND_ADD, round, (&b, word));
        add.arg0 = U64::new(1);
        a.post_send(&mut qa, add, &[a.sge(found, 8)]);
        world.settle();
        a.write(found, &[0xff; 8]);
        while world.at(0).pause(a.nic) {}
        world.advance(5 * SECOND);
        assert_eq!(a.read(found, 8), [0xff; 8], "nobody touches it while it stands still");
        if round % 2 == 1 {
            world.hand_over(&mut [&mut a, &mut b]);
        }
        world.at(0).resume(a.nic);
        world.advance(5 * SECOND);
        assert_eq!(a.statuses(&mut qa.cq), [(round, 0)]);
        assert_eq!(a.read(found, 8), round.to_le_bytes());
        assert_eq!(b.read(word, 8), (round + 1).to_le_bytes(), "added once");
    }
}

/// The responder says it once: its queue pair is in an error then.
#[test]
fn a_refusal_that_finds_the_nic_paused_is_kept() {
    for is_handed_over in [false, true] {
        let air = Air::new(Faults { delay: 1_000_000, ..Faults::default() }, 3);
        let (mut world, mut a, mut b) = apart(air);
        let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
        let (from, to) = (a.alloc(8), b.alloc(8));
        let mut wrong = remote(opcode::RDMA_WRITE, 4, (&b, to));
        wrong.rkey = U32::new(b.key ^ 0x100);
        a.post_send(&mut qa, wrong, &[a.sge(from, 8)]);
        world.settle();
        while world.at(0).pause(a.nic) {}
        world.advance(5 * SECOND);
        assert!(a.statuses(&mut qa.cq).is_empty(), "it stands still");
        if is_handed_over {
            world.hand_over(&mut [&mut a, &mut b]);
        }
        world.at(0).resume(a.nic);
        world.advance(5 * SECOND);
        let ended = [(4, wc_status::REM_ACCESS_ERR)];
        assert_eq!(a.statuses(&mut qa.cq), ended, "handed over: {is_handed_over}");
    }
}

/// Its peer counted requests of an earlier life in another process: none of those is one of now.
#[test]
fn who_begins_anew_after_a_hand_over_is_not_taken_for_who_it_was() {
    let (mut world, mut a, mut b) = apart(Air::still());
    let (mut qa, qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (from, to) = (a.alloc(8), b.alloc(8));
    for round in 1..6u64 {
        a.write(from, &round.to_le_bytes());
        a.post_send(&mut qa, remote(opcode::RDMA_WRITE, round, (&b, to)), &[a.sge(from, 8)]);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(round, 0)]);
    }
    world.modify(&a, &qa, state_attr(qps::RESET)).unwrap();
    qa.posted = [0; 2];
    world.hand_over(&mut [&mut a, &mut b]);
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    a.write(from, &[0xee; 8]);
    a.post_send(&mut qa, remote(opcode::RDMA_WRITE, 9, (&b, to)), &[a.sge(from, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(9, 0)]);
    assert_eq!(b.read(to, 8), [0xee; 8], "it was executed");
}

#[test]
fn a_receive_wakes_who_waits_for_it_on_the_other_shard() {
    let (mut world, mut a, mut b) = apart(Air::still());
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (from, _) = a.pattern(8, 1);
    let to = b.alloc(8);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, 8)]);
    world.settle();
    assert!(a.statuses(&mut qa.cq).is_empty(), "there is no receive");
    b.post_receive(&mut qb, 2, &[b.sge(to, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "no time has passed");
}

#[test]
fn what_is_under_way_is_bounded_and_all_of_it_arrives() {
    let (mut world, mut a, mut b) = apart(Air::new(Faults { delay: 1000, ..BAD }, 9));
    world.beside = world
        .beside
        .map(|(other, _)| (other, Air::new(Faults { delay: 1_000_000, ..Faults::default() }, 9)));
    let (qa, qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let (mut qa, mut qb) = (qa, qb);
    let ah = handle(&mut world, &a, b.gid);
    let (from, bytes) = a.pattern(64, 1);
    let to = b.alloc(4096);
    let mut arrived = 0;
    for _ in 0..20 {
        for n in 0..15 {
            b.post_receive(&mut qb, n, &[b.sge(to, 4096)]);
            a.post_send(&mut qa, datagram(ah, qb.qpn, 0x1111), &[a.sge(from, 64)]);
        }
        world.advance(SECOND);
        assert_eq!(a.drain(&mut qa.cq).len(), 15);
        arrived += b.drain(&mut qb.cq).len();
        assert_eq!(b.read(to + 40, 64), bytes);
    }
    assert_eq!(arrived, 300);
}

#[test]
fn a_group_has_members_on_both_shards() {
    let (mut world, mut a, mut b) = apart(Air::still());
    let mut c = world.guest_on(1, 2, 3);
    let mut qps = [&mut a, &mut b, &mut c].map(|guest| ready(&mut world, guest));
    let mut group = [0; 16];
    group[..2].copy_from_slice(&[0xff, 0x0e]);
    for (guest, qp) in [&a, &b, &c].into_iter().zip(&qps) {
        let command = Command::McastAttach { qpn: qp.qpn, mgid: group };
        world.ok(guest, guest.ctx, command);
    }
    let at = [&mut a, &mut b, &mut c].map(|guest| guest.alloc(4096));
    for ((guest, qp), at) in [&a, &b, &c].into_iter().zip(&mut qps).zip(at) {
        guest.post_receive(qp, 1, &[guest.sge(at, 4096)]);
    }
    let ah = handle(&mut world, &a, group);
    let (from, bytes) = a.pattern(32, 4);
    a.post_send(&mut qps[0], datagram(ah, 0xff_ffff, 0x1111), &[a.sge(from, 32)]);
    world.settle();
    assert_eq!((a.read(at[0] + 40, 32), b.read(at[1] + 40, 32)), (bytes.clone(), bytes));
    assert!(c.drain(&mut qps[2].cq).is_empty(), "another network's group");
    // One has left; the other shard has none any more.
    world.ok(&b, b.ctx, Command::McastDetach { qpn: qps[1].qpn, mgid: group });
    b.drain(&mut qps[1].cq);
    b.post_receive(&mut qps[1], 2, &[b.sge(at[1], 4096)]);
    a.post_send(&mut qps[0], datagram(ah, 0xff_ffff, 0x1111), &[a.sge(from, 32)]);
    world.settle();
    assert!(b.drain(&mut qps[1].cq).is_empty());
}

#[test]
fn an_address_is_one_nics_on_whatever_shard() {
    let (mut world, a, b) = apart(Air::still());
    let taken = Command::GidSet { index: 2, gid: Some(a.gid) };
    assert_eq!(world.execute(&b, 0, taken).map(|_| ()), Err(Status::EXIST));
    world.at(0).reset(a.nic);
    world.ok(&b, 0, Command::GidSet { index: 2, gid: Some(a.gid) });
}

/// An owner does its part for a requester of another shard, once; and one that never does keeps
/// neither the requester's window nor its queue pair for ever.
#[test]
fn owners_do_their_part_for_another_shard() {
    for (faults, silent) in [(Faults::default(), false), (BAD, false), (BAD, true)] {
        let (mut world, mut a, mut b) = apart(Air::new(faults, 5));
        let (mut qa, _qb) = patient_pair(&mut world, &mut a, &mut b);
        let (nic, ctx) = (b.nic, b.ctx);
        world.at(1).serve_mirrors(nic, ctx);
        let (shadow, key) = super::mirror::region(&mut world, &mut b);
        let (from, bytes) = a.pattern(100, 3);
        let found = a.alloc(8);
        a.post_send(&mut qa, request(opcode::RDMA_WRITE, key, AT + 8), &[a.sge(from, 100)]);
        let mut add = request(opcode::ATOMIC_FETCH_AND_ADD, key, AT + 256);
        add.arg0 = U64::new(1);
        a.post_send(&mut qa, add, &[a.sge(found, 8)]);
        let mut done = Vec::new();
        for _ in 0..200 {
            world.advance(100_000_000);
            for job in b.jobs().into_iter().filter(|_| !silent) {
                done.push(job.kind);
                world.at(1).owner_answered(nic, ctx, &[(job.number, Some(77))]);
            }
        }
        if silent {
            assert_eq!(
                a.statuses(&mut qa.cq),
                [(9, wc_status::RETRY_EXC_ERR), (9, wc_status::WR_FLUSH_ERR)]
            );
            continue;
        }
        assert_eq!(a.statuses(&mut qa.cq), [(9, 0), (9, 0)]);
        assert_eq!(b.read(shadow + 8, 100), bytes);
        assert_eq!(a.read(found, 8), 77u64.to_le_bytes());
        let adds = done.iter().filter(|kind| **kind == JobKind::FetchAdd).count();
        assert_eq!(adds, 1, "{done:?}");
    }
}
