//! NICs that move between two shards while they run: their guests cannot tell, and nothing waits
//! longer for it. The reference model does the same at random steps ([`super::reference`]).

use virtio_rdma_abi::{opcode, qpt};
use zerocopy::little_endian::U64;

use super::apart::{Meanwhile, apart, once_and_in_order, remote};
use super::datagram::{datagram, handle, ready};
use super::mirror::{AT, SIGNALED, region, request};
use crate::shard::NicLoad;
use crate::shard::testing::air::{Air, Faults};
use crate::shard::testing::driver::{Guest, Qp, World, wqe};

/// A message of several pieces.
const LONG: u32 = 700 << 10;

struct Scene {
    world: World,
    guests: [Guest; 2],
    qps: [Qp; 2],
}

fn scene(kind: u32) -> Scene {
    let (mut world, mut a, mut b) = apart(Air::still());
    let (qa, qb) = world.pair(&mut a, &mut b, kind);
    Scene { world, guests: [a, b], qps: [qa, qb] }
}

impl Scene {
    fn timeouts(&mut self) -> u64 {
        let Self { world, guests, .. } = self;
        let of = |guest: &Guest| world.at(guest.on).status(guest.nic).unwrap().counters;
        guests.iter().map(of).map(|counters| counters.ack_timeouts).sum()
    }
}

/// Every kind of request; each end moves after every number of rounds, is on its way for some, and
/// comes back or not. No time passes, so that whoever had to wait for a timer would never be done.
#[test]
fn a_move_in_the_middle_of_every_request_costs_no_time() {
    let codes = [
        opcode::SEND,
        opcode::RDMA_WRITE,
        opcode::RDMA_READ,
        opcode::ATOMIC_FETCH_AND_ADD,
        opcode::ATOMIC_CMP_AND_SWP,
    ];
    for code in codes {
        for (who, rounds, away) in
            (0..3).flat_map(|who| (0..8).flat_map(move |n| (0..3).map(move |m| (who, n, m))))
        {
            one_request(code, (who, rounds, away));
        }
    }
}

/// `who`: one end, the other, or both.
fn one_request(code: u8, (who, rounds, away): (usize, u32, u32)) {
    let case = format!("opcode {code}, who {who}, rounds {rounds}, away {away}");
    let mut scene = scene(qpt::RC);
    let Scene { world, guests, qps } = &mut scene;
    let is_word = matches!(code, opcode::ATOMIC_FETCH_AND_ADD | opcode::ATOMIC_CMP_AND_SWP);
    let len = if is_word { 8 } else { LONG };
    let (local, mine) = guests[0].pattern(len as usize, 3);
    let (far, theirs) = guests[1].pattern(len as usize, 5);
    let mut request = remote(code, 1, (&guests[1], far));
    (request.arg0, request.arg1) = (U64::new(1), U64::new(2));
    if code == opcode::SEND {
        let sge = guests[1].sge(far, len);
        guests[1].post_receive(&mut qps[1], 9, &[sge]);
    }
    let sge = guests[0].sge(local, len);
    guests[0].post_send(&mut qps[0], request, &[sge]);
    for turn in 0..4 {
        (0..rounds).for_each(|_| _ = world.round());
        for (number, guest) in guests.iter_mut().enumerate() {
            if who == number || who == 2 {
                let moved = world.take_off(guest).unwrap();
                (0..away).for_each(|_| _ = world.round());
                world.put_on(guest, moved);
            }
        }
        // Not always in step.
        (0..turn).for_each(|_| _ = world.round());
    }
    world.settle();
    assert_eq!(guests[0].statuses(&mut qps[0].cq), [(1, 0)], "{case}");
    let (near, far) = (guests[0].read(local, mine.len()), guests[1].read(far, mine.len()));
    match code {
        opcode::SEND | opcode::RDMA_WRITE => assert!(far == mine, "{case}"),
        opcode::RDMA_READ => assert!(near == theirs, "{case}"),
        opcode::ATOMIC_FETCH_AND_ADD => {
            let before = u64::from_le_bytes(theirs.try_into().unwrap());
            assert_eq!(far, (before + 1).to_le_bytes(), "{case}: added once");
            assert_eq!(near, before.to_le_bytes(), "{case}");
        }
        _ => assert!(near == theirs, "{case}"),
    }
    let received = guests[1].statuses(&mut qps[1].cq);
    assert_eq!(received.len(), usize::from(code == opcode::SEND), "{case}");
    assert_eq!(scene.timeouts(), 0, "{case}");
}

#[test]
fn over_a_bad_link_too_each_request_is_executed_once() {
    let mut seen = [0; 3];
    for seed in 0..24 {
        let faults = once_and_in_order(300 + seed, Meanwhile::Moves);
        seen.iter_mut().zip(faults).for_each(|(seen, more)| *seen += more);
    }
    assert!(seen.iter().all(|&seen| seen > 50), "lost, repeated, reordered: {seen:?}");
}

/// A request that is lost on its way after a NIC that has moved was counted by the shard that sent
/// it first, which waits for it before NICs are saved.
#[test]
fn what_is_lost_behind_a_nic_that_moved_keeps_nobody_from_being_saved() {
    let mut lost = 0;
    for seed in 0..40 {
        let faults = Faults { lost: 50, requests_alone: true, ..Faults::default() };
        let (mut world, mut a, mut b) = apart(Air::new(faults, seed));
        let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
        let (from, to) = (a.alloc(8), b.alloc(8));
        a.post_send(&mut qa, remote(opcode::RDMA_READ, 1, (&b, to)), &[a.sge(from, 8)]);
        let now = world.now;
        world.at(0).poll(now);
        assert!(world.change_shard(&mut b));
        world.hand_over(&mut [&mut a, &mut b]);
        lost += world.beside.as_ref().map_or(0, |(_, air)| air.lost);
        world.advance(20_000_000_000);
        assert_eq!(a.statuses(&mut qa.cq).len(), 1);
    }
    assert!(lost > 20, "{lost}");
}

/// Whoever waits for a receive is woken by it, wherever both are by then.
#[test]
fn a_receive_wakes_who_has_moved_meanwhile() {
    for begins_together in [false, true] {
        for moves in [[0, 1], [1, 0], [1, 1], [2, 1], [1, 2]] {
            let mut scene = scene(qpt::RC);
            let Scene { world, guests, qps } = &mut scene;
            if begins_together {
                assert!(world.change_shard(&mut guests[0]));
            }
            let (from, to) = (guests[0].alloc(8), guests[1].alloc(8));
            let sge = guests[0].sge(from, 8);
            guests[0].post_send(&mut qps[0], wqe(opcode::SEND, SIGNALED, 1), &[sge]);
            world.settle();
            for (guest, times) in guests.iter_mut().zip(moves) {
                (0..times).for_each(|_| assert!(world.change_shard(guest)));
            }
            world.settle();
            let sge = guests[1].sge(to, 8);
            guests[1].post_receive(&mut qps[1], 2, &[sge]);
            world.settle();
            let statuses = guests[0].statuses(&mut qps[0].cq);
            assert_eq!(statuses, [(1, 0)], "{begins_together} {moves:?}: no time has passed");
        }
    }
}

#[test]
fn datagrams_and_groups_find_who_has_moved() {
    let (mut world, mut a, mut b) = apart(Air::still());
    let (mut qa, mut qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let mut group = [0; 16];
    group[..2].copy_from_slice(&[0xff, 0x0e]);
    world.ok(&b, b.ctx, crate::shard::Command::McastAttach { qpn: qb.qpn, mgid: group });
    let (from, bytes) = a.pattern(64, 1);
    let to = b.alloc(4096);
    let handles = [b.gid, group].map(|gid| handle(&mut world, &a, gid));
    for round in 0..12 {
        for (ah, qpn) in handles.into_iter().zip([qb.qpn, 0xff_ffff]) {
            b.post_receive(&mut qb, round, &[b.sge(to, 4096)]);
            a.post_send(&mut qa, datagram(ah, qpn, 0x1111), &[a.sge(from, 64)]);
            world.settle();
            assert_eq!(a.drain(&mut qa.cq).len(), 1);
            assert_eq!(b.drain(&mut qb.cq).len(), 1, "round {round}, qpn {qpn:x}");
            assert_eq!(b.read(to + 40, 64), bytes);
            b.write(to, &[0; 128]);
        }
        assert!(world.change_shard(if round % 3 == 0 { &mut a } else { &mut b }));
    }
    // One that was on its way when its NIC left.
    b.post_receive(&mut qb, 99, &[b.sge(to, 4096)]);
    a.post_send(&mut qa, datagram(handles[0], qb.qpn, 0x1111), &[a.sge(from, 64)]);
    if a.on == b.on {
        assert!(world.change_shard(&mut b));
    }
    let now = world.now;
    world.at(a.on).poll(now);
    assert!(world.change_shard(&mut b));
    world.settle();
    assert_eq!(b.drain(&mut qb.cq).len(), 1);
}

/// Its deadlines, its objects and its kicks go along, and what is left of it is nobody's.
#[test]
fn nothing_is_left_of_it_where_it_was() {
    let mut scene = scene(qpt::RC);
    let Scene { world, guests, qps } = &mut scene;
    [0, 1].into_iter().for_each(|on| world.at(on).park_at_once());
    let from = guests[0].alloc(8);
    let sge = guests[0].sge(from, 8);
    guests[0].post_send(&mut qps[0], wqe(opcode::SEND, SIGNALED, 1), &[sge]);
    world.settle();
    assert_eq!([world.at(0).waits(), world.at(1).waits()], [1, 0], "for a receive");
    assert!(world.change_shard(&mut guests[0]));
    assert_eq!([world.at(0).waits(), world.at(1).waits()], [0, 1]);
    assert!(world.at(0).status(guests[0].nic).is_none());
    assert_eq!(world.at(0).next_deadline(), None);
    let objects = world.at(1).status(guests[0].nic).unwrap().objects;
    assert_eq!((objects.qps, objects.mrs, objects.pds), (1, 1, 1));
    world.advance(3_000_000_000);
    assert_eq!(guests[0].statuses(&mut qps[0].cq).len(), 1, "its retries are over");
    // It ends where it is, and its number is free.
    let (nic, on) = (guests[0].nic, guests[0].on);
    world.at(on).remove_nic(nic);
    let next = world.guest_on(0, 1, 1);
    assert_eq!(next.nic, nic, "and its address is");
}

/// An owner's jobs name requesters of its shard; an atomic that it has done must not be done again.
#[test]
fn owners_and_who_waits_for_them_stay() {
    let (mut world, mut a, mut b) = apart(Air::still());
    let mut c = world.guest_on(1, 1, 3);
    assert!(world.change_shard(&mut a));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    world.at(1).serve_mirrors(b.nic, b.ctx);
    let (_, key) = region(&mut world, &mut b);
    assert!(!world.change_shard(&mut b), "it serves mirrored memory");
    let (from, _) = a.pattern(8, 3);
    a.post_send(&mut qa, request(opcode::RDMA_WRITE, key, AT), &[a.sge(from, 8)]);
    world.settle();
    assert!(!world.change_shard(&mut a), "it waits for an owner");
    assert!(world.change_shard(&mut c), "who has no part in it may");
    let jobs = b.jobs();
    world.at(1).owner_answered(b.nic, b.ctx, &[(jobs[0].number, Some(0))]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(9, 0)]);
    assert!(world.change_shard(&mut a));
    a.post_send(&mut qa, request(opcode::RDMA_WRITE, key, AT), &[a.sge(from, 8)]);
    world.settle();
    let jobs = b.jobs();
    world.at(1).owner_answered(b.nic, b.ctx, &[(jobs[0].number, Some(0))]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(9, 0)]);
}

/// What is asked for is what it was served, and with whom it has to do, on either side.
#[test]
fn a_shard_says_what_each_nic_cost_and_who_belong_together() {
    let mut scene = scene(qpt::RC);
    let Scene { world, guests, qps } = &mut scene;
    let quiet = world.guest_on(0, 1, 3);
    let (local, far) = (guests[0].alloc(LONG.into()), guests[1].alloc(LONG.into()));
    world.settle();
    [0, 1].into_iter().for_each(|on| _ = world.at(on).take_loads());
    let request = remote(opcode::RDMA_WRITE, 1, (&guests[1], far));
    let sge = guests[0].sge(local, LONG);
    guests[0].post_send(&mut qps[0], request, &[sge]);
    world.settle();
    let loads = [0, 1].map(|on| world.at(on).take_loads());
    let of = |on: usize, guest: &Guest| -> Option<NicLoad> {
        loads[on].iter().find(|load| load.id == guest.nic).cloned()
    };
    let (a, b) = (of(0, &guests[0]).unwrap(), of(1, &guests[1]).unwrap());
    assert!(a.spent > 10_000 && b.spent > 10_000, "{a:?} {b:?}");
    assert_eq!((a.talks[0].0, a.talks[0].1), (1, guests[1].nic));
    assert_eq!((b.talks[0].0, b.talks[0].1), (0, guests[0].nic));
    assert_eq!(of(0, &quiet), None, "it cost nothing");
    assert!(world.at(0).take_loads().is_empty(), "since it was asked last");
}

/// A parcel that is late, for a NIC that has moved twice, finds it.
#[test]
fn a_late_answer_follows_through_two_moves() {
    let delay = 1_000_000;
    let (mut world, mut a, mut b) = apart(Air::new(Faults { delay, ..Faults::default() }, 4));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let word = b.alloc(8);
    for round in 0..20u64 {
        let mut add = remote(opcode::ATOMIC_FETCH_AND_ADD, round, (&b, word));
        add.arg0 = U64::new(1);
        let found = a.alloc(8);
        a.post_send(&mut qa, add, &[a.sge(found, 8)]);
        world.settle();
        assert!(world.change_shard(&mut a));
        world.advance(400_000);
        assert!(world.change_shard(&mut a));
        world.advance(100_000_000);
        assert_eq!(a.statuses(&mut qa.cq), [(round, 0)], "long before its time is up");
        assert_eq!(a.read(found, 8), round.to_le_bytes());
        assert_eq!(b.read(word, 8), (round + 1).to_le_bytes(), "added once");
    }
}
