//! A request of one element goes a way of its own, one of two elements the ordinary way
//! (`soft/requester/plain.rs`), and so does a send into a receive of two: what comes of all must be
//! the same.

use std::sync::{Arc, Mutex};

use virtio_rdma_abi::{
    self as abi, Cqe, arm, cqe_flags, event, opcode, qpt, send_flags, wc_status,
};
use zerocopy::little_endian::{U32, U64};

use super::mirror;
use crate::link::PIECE;
use crate::memory::PageList;
use crate::nic::Nanos;
use crate::nic::budget::{Clock, Looked};
use crate::shard::testing::driver::{
    Guest, Lcg, Qp, RAM, RQ_STRIDE, World, init_attr, rtr_attr, wqe,
};
use crate::shard::testing::time::Late;
use crate::shard::{Command, Counters, Reply, Shard, control_offset};
use crate::soft::WENT;

/// What is wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    PeerKey,
    PeerRange,
    OwnKey,
    OwnRange,
}

/// Statuses, counters of both NICs, and the bytes where they went.
type Came = (Vec<(u64, u8)>, [Counters; 2], Vec<u8>);

/// A write or a read of 64 bytes in one element or two.
fn request(kind: u32, code: u8, wrong: Wrong, elements: u32) -> Came {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, kind);
    let ((here, _), (there, _)) = (a.pattern(64, 1), b.pattern(64, 2));
    let end = (RAM - 32) as u64;
    let mut request = wqe(code, send_flags::SIGNALED, 7);
    request.remote_addr = U64::new(if wrong == Wrong::PeerRange { end } else { there });
    request.rkey = U32::new(if wrong == Wrong::PeerKey { b.key ^ 1 } else { b.key });
    let len = 64 / elements;
    let first = if wrong == Wrong::OwnRange { end } else { here };
    let sges: Vec<_> = (0..elements)
        .map(|n| {
            let mut sge = a.sge(first + u64::from(n * len), len);
            if wrong == Wrong::OwnKey {
                sge.lkey = U32::new(a.key ^ 1);
            }
            sge
        })
        .collect();
    a.post_send(&mut qa, request, &sges);
    world.settle();
    let counters = [a.nic, b.nic].map(|nic| world.shard.status(nic).unwrap().counters);
    let bytes = [a.read(here, 64), b.read(there, 64)].concat();
    (a.statuses(&mut qa.cq), counters, bytes)
}

#[test]
fn both_ways_lead_to_the_same() {
    for (kind, code) in
        [(qpt::RC, opcode::RDMA_WRITE), (qpt::RC, opcode::RDMA_READ), (qpt::UC, opcode::RDMA_WRITE)]
    {
        for wrong in
            [Wrong::Nothing, Wrong::PeerKey, Wrong::PeerRange, Wrong::OwnKey, Wrong::OwnRange]
        {
            let one = request(kind, code, wrong, 1);
            assert_eq!(one, request(kind, code, wrong, 2), "{code} of {kind}: {wrong:?}");
            assert_eq!(one.0.len(), 1, "{code} of {kind}: {wrong:?}");
        }
    }
}

/// In the midst of a turn the peer may find its completion queue full, or its NIC may have stopped:
/// a request that asks for no completion goes on all the same, one that does ends the queue pair.
#[test]
fn a_full_completion_queue_ends_the_turn() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let cq = world.cq(&mut a, 2);
    let mut qa = world.qp_on(&mut a, (qpt::RC, 16, None), cq);
    let qb = world.qp(&mut b, qpt::RC, 16, None);
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    let (here, there) = (a.alloc(64), b.alloc(64));
    for n in 0..6u8 {
        a.write(here + u64::from(n), &[n + 1]);
        let mut write = wqe(opcode::RDMA_WRITE, send_flags::SIGNALED, n.into());
        write.remote_addr = U64::new(there + u64::from(n));
        write.rkey = U32::new(b.key);
        a.post_send(&mut qa, write, &[a.sge(here + u64::from(n), 1)]);
    }
    world.settle();
    // The third finds no place, and none behind it is executed.
    assert_eq!(b.read(there, 6), [1, 2, 3, 0, 0, 0]);
    assert_eq!(a.statuses(&mut qa.cq), [(0, 0), (1, 0)]);
}

/// How many of `count` writes to `there` went the plain way; all of them arrived.
fn went(world: &mut World, ends: (&mut Guest, &Guest), qp: &mut Qp, count: u32) -> u32 {
    let (a, b) = ends;
    let (here, bytes) = a.pattern(64, 5);
    let there = (RAM - 4096) as u64;
    b.write(there, &[0; 64]);
    let before = WENT.get().0;
    for n in 0..count {
        let mut write = wqe(opcode::RDMA_WRITE, send_flags::SIGNALED, n.into());
        (write.remote_addr, write.rkey) = (U64::new(there), U32::new(b.key));
        a.post_send(qp, write, &[a.sge(here, 64)]);
    }
    world.settle();
    let came = a.drain(&mut qp.cq);
    let told: Vec<_> = came.iter().map(|cqe| (cqe.wr_id.get(), cqe.status)).collect();
    let all: Vec<_> = (0..count).map(|n| (n.into(), wc_status::SUCCESS)).collect();
    assert_eq!(told, all);
    let follow = |pair: &[Cqe]| pair[1].wqe_index.get() == pair[0].wqe_index.get() + 1;
    assert!(came.windows(2).all(follow), "{came:?}");
    assert_eq!(b.read(there, 64), bytes);
    WENT.get().0 - before
}

/// Programs that only answer leave their queue pair in RTR, perftest's server for one.
#[test]
fn all_but_the_first_go_plainly_to_a_peer_in_rtr() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, qb) = (world.qp(&mut a, qpt::RC, 16, None), world.qp(&mut b, qpt::RC, 16, None));
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.modify(&b, &qb, init_attr(qpt::RC)).unwrap();
    world.modify(&b, &qb, rtr_attr(qpt::RC, (qa.qpn, a.gid))).unwrap();
    assert_eq!(went(&mut world, (&mut a, &b), &mut qa, 5), 4, "the peer is told of the first");
    assert_eq!(went(&mut world, (&mut a, &b), &mut qa, 3), 3);
}

#[test]
fn memory_that_is_shared_is_reached_plainly_beside_memory_that_its_owner_copies() {
    let mut scene = mirror::scene(qpt::RC);
    let (a, b) = (&mut scene.a, &scene.b);
    assert_eq!(went(&mut scene.world, (a, b), &mut scene.qa, 3), 3);
    let (from, _) = scene.a.pattern(64, 3);
    let before = WENT.get().0;
    scene.post(opcode::RDMA_WRITE, 8, (from, 64));
    assert_eq!(scene.jobs().len(), 1, "its owner has not been asked");
    assert_eq!(WENT.get().0, before);
}

/// Requests that are checked together are executed one after the other, and none behind one that
/// fails.
#[test]
fn requests_that_are_checked_together_keep_their_order() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (here, back, there) = (a.alloc(64), a.alloc(64), b.alloc(64));
    let before = WENT.get().0;
    for n in 1..=6u8 {
        a.write(here + u64::from(n), &[n]);
        let code = if n % 2 == 0 { opcode::RDMA_READ } else { opcode::RDMA_WRITE };
        let mut request = wqe(code, 0, n.into());
        request.remote_addr = U64::new(there);
        request.rkey = U32::new(if n == 5 { b.key ^ 1 } else { b.key });
        let own = if n % 2 == 0 { back } else { here };
        a.post_send(&mut qa, request, &[a.sge(own + u64::from(n), 1)]);
    }
    world.settle();
    // Each read saw what the write before it wrote; the fifth ended the queue pair.
    assert_eq!((b.read(there, 1), a.read(back, 7)), (vec![3], vec![0, 0, 1, 0, 3, 0, 0]));
    let failed = [(5, wc_status::REM_ACCESS_ERR), (6, wc_status::WR_FLUSH_ERR)];
    assert_eq!(a.statuses(&mut qa.cq), failed);
    assert_eq!(WENT.get().0 - before, 4);
    let status = world.shard.status(a.nic).unwrap().counters;
    assert_eq!((status.tx_bytes, status.rx_bytes), (2, 2));
}

/// Until all are parked: those that are awake count as ones that may have work.
fn rest(world: &mut World) {
    (0..100).for_each(|_| {
        world.shard.poll(world.now);
    });
}

/// In how many streaks so many writes of `len` bytes go, to a NIC whose last pieces were so often
/// slow, while so many other NICs have much to write.
fn streaks((slow, others): (u32, u8), count: u32, len: u32) -> u32 {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (here, there) = (a.alloc(len.into()), b.alloc(len.into()));
    for other in 0..others {
        let mut guest = world.guest(1, 10 + other);
        let mut qp = world.qp(&mut guest, qpt::RC, 16, None);
        let (qpn, gid, at) = (qp.qpn, guest.gid, guest.alloc(1 << 20));
        world.connect(&guest, &qp, qpt::RC, (qpn, gid));
        for _ in 0..16 {
            // To itself, which is the ordinary way.
            let mut write = wqe(opcode::RDMA_WRITE, 0, 0);
            (write.remote_addr, write.rkey) = (U64::new(at), U32::new(guest.key));
            guest.post_send(&mut qp, write, &[guest.sge(at, 1 << 20)]);
        }
    }
    if others == 0 {
        rest(&mut world);
    }
    let nic = world.shard.nic_mut(a.nic).unwrap();
    (0..slow).for_each(|_| nic.backing.pace.judge(Looked { charged: 1_000, lasted: 100_000 }));
    for n in 0..count {
        let mut write = wqe(opcode::RDMA_WRITE, 0, n.into());
        (write.remote_addr, write.rkey) = (U64::new(there), U32::new(b.key));
        a.post_send(&mut qa, write, &[a.sge(here, len)]);
    }
    let before = WENT.get();
    world.settle();
    assert_eq!(WENT.get().0 - before.0, count);
    WENT.get().1 - before.1
}

/// What goes between two looks at the clock is a neighbour's wait.
#[test]
fn what_is_checked_together_is_a_piece_beside_others_and_a_slow_nic_has_smaller_ones() {
    assert_eq!(streaks((0, 2), 8, 16), 1);
    assert_eq!(streaks((0, 2), 9, 16), 2);
    assert_eq!(streaks((0, 2), 4, PIECE / 2), 2);
    assert_eq!(streaks((9, 0), 8, 16), 8, "one element at a time");
    // A quarter of a piece, half of one since that came in time, and the rest.
    assert_eq!(streaks((2, 0), 8, PIECE / 8), 3);
}

#[test]
fn while_nobody_else_has_work_it_is_several_pieces() {
    assert_eq!(streaks((0, 0), 16, PIECE / 2), 5, "eight, and then by two");
    assert_eq!(streaks((0, 0), 16, PIECE), 13, "four");
    assert_eq!(streaks((0, 0), 15, PIECE / 2), 8, "not many wait");
    assert_eq!(streaks((1, 0), 16, PIECE / 2), 9, "a slow NIC: half a piece first");
}

/// Sends, writes and reads of half a piece under such a clock: what came of them, and how many
/// streaks the clock ended.
fn mixed(late: Nanos) -> (Sent, u32) {
    const LEN: u32 = PIECE / 2;
    let clock = Late::by(late);
    let mut world = World::of(Shard::new(Box::new(Lcg(7))).with_clock(Box::new(clock)));
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (here, there) = (a.alloc(17 * u64::from(LEN)), b.alloc(17 * u64::from(LEN)));
    rest(&mut world);
    let order = [opcode::SEND, opcode::RDMA_WRITE, opcode::RDMA_READ];
    for (n, code) in (0..16u64).zip(order.into_iter().cycle()) {
        let (own, peers) = (here + n * u64::from(LEN), there + n * u64::from(LEN));
        a.write(own, &[n as u8 + 1; 4]);
        b.write(peers, &[n as u8 + 21; 4]);
        b.post_receive(&mut qb, 30 + n, &[b.sge(there + (15 - n) * u64::from(LEN) + 8, LEN)]);
        let flags = if n % 2 == 0 { send_flags::SIGNALED } else { 0 };
        let mut request = wqe(code, flags, n);
        (request.remote_addr, request.rkey) = (U64::new(peers), U32::new(b.key));
        a.post_send(&mut qa, request, &[a.sge(own, LEN)]);
    }
    let before = WENT.get();
    world.settle();
    let counters = [a.nic, b.nic].map(|nic| world.shard.status(nic).unwrap().counters);
    let bytes = [a.read(here, 16 * LEN as usize), b.read(there, 17 * LEN as usize)].concat();
    let mut arrived = b.drain(&mut qb.cq);
    arrived.iter_mut().for_each(|cqe| cqe.timestamp = U64::ZERO);
    ((a.statuses(&mut qa.cq), arrived, counters, bytes), WENT.get().2 - before.2)
}

/// Those that were checked and not executed are as if they had not been looked at.
#[test]
fn time_that_is_up_ends_what_was_checked_together() {
    let (came, ended) = mixed(0);
    assert_eq!((ended, came.0.len(), came.1.len()), (0, 8, 6));
    let ended: u32 = (1..20)
        .map(|late| {
            let (cut, ended) = mixed(late * 1_000);
            assert!(cut == came, "{late} us");
            ended
        })
        .sum();
    assert!(ended > 0, "the clock ended none");
}

/// A clock that stands still and counts what has arrived at a guest whenever somebody looks.
#[derive(Clone, Default)]
struct Watch(Arc<Mutex<(Option<Guest>, Vec<usize>)>>);

/// Three quarters of a piece: two are more than one.
const LARGE: u32 = PIECE / 4 * 3;
const LARGE_ONES: u64 = 16;

impl Clock for Watch {
    fn now(&self) -> Nanos {
        let (guest, seen) = &mut *self.0.lock().unwrap();
        if let Some(guest) = guest {
            let last = |n: u64| guest.read((n + 1) * u64::from(LARGE) - 1 + WATCHED, 1) != [0];
            seen.push((0..LARGE_ONES).filter(|n| last(*n)).count());
        }
        0
    }
}

/// Where the peer's memory begins that is watched.
const WATCHED: u64 = 8 << 20;

#[test]
fn the_clock_is_looked_at_before_more_than_a_piece_has_gone() {
    let watch = Watch::default();
    let mut world = World::of(Shard::new(Box::new(Lcg(7))).with_clock(Box::new(watch.clone())));
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    rest(&mut world);
    let here = a.alloc(LARGE.into());
    a.write(here, &[1; LARGE as usize]);
    for n in 0..LARGE_ONES {
        let mut write = wqe(opcode::RDMA_WRITE, 0, n);
        write.remote_addr = U64::new(WATCHED + n * u64::from(LARGE));
        write.rkey = U32::new(b.key);
        a.post_send(&mut qa, write, &[a.sge(here, LARGE)]);
    }
    watch.0.lock().unwrap().0 = Some(b);
    let before = WENT.get().1;
    // Who drives the shard looks at the clock before each round.
    while world.shard.poll(watch.now()) {}
    assert!(WENT.get().1 - before < 16, "no streak had several");
    let seen = watch.0.lock().unwrap().1.clone();
    assert_eq!(seen.last(), Some(&16));
    assert!(seen.windows(2).all(|pair| pair[1] - pair[0] <= 1), "{seen:?}");
}

/// What is wrong with a send or its receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Amiss {
    Nothing,
    OwnKey,
    ReceiveKey,
    ReadOnly,
    Short,
    Absent,
}

/// What came of a send at both ends: statuses, the receive's completion, counters, and the bytes.
type Sent = (Vec<(u64, u8)>, Vec<Cqe>, [Counters; 2], Vec<u8>);

/// A send of 64 bytes with this opcode into a receive of so many elements, of 80 bytes in all.
fn send((kind, code): (u32, u8), amiss: Amiss, elements: u32) -> Sent {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, kind);
    let ((here, _), there) = (a.pattern(64, 1), b.alloc(80));
    let read_only = PageList { addr: 0, npages: 1, page_shift: 12, ..PageList::default() };
    let map = Arc::new(read_only.resolve(&b.space, 4096).unwrap());
    let read_only = world.register(&b, 0, map, 0).unwrap();
    let len = if amiss == Amiss::Short { 40 } else { 80 } / elements;
    let sges: Vec<_> = (0..elements)
        .map(|n| {
            let mut sge = b.sge(there + u64::from(n * len), len);
            match amiss {
                Amiss::ReceiveKey => sge.lkey = U32::new(b.key ^ 1),
                Amiss::ReadOnly => (sge.lkey, sge.addr) = (U32::new(read_only), U64::new(0)),
                _ => {}
            }
            sge
        })
        .collect();
    if amiss != Amiss::Absent {
        b.post_receive(&mut qb, 5, &sges);
    }
    let mut request = wqe(code, send_flags::SIGNALED | send_flags::SOLICITED, 7);
    request.imm = U32::new(0x0102_0304);
    let mut sge = a.sge(here, 64);
    if amiss == Amiss::OwnKey {
        sge.lkey = U32::new(a.key ^ 1);
    }
    b.arm(&qb.cq, arm::SOLICITED);
    a.post_send(&mut qa, request, &[sge]);
    world.advance(1_000_000_000);
    let counters = [a.nic, b.nic].map(|nic| world.shard.status(nic).unwrap().counters);
    let mut arrived = b.drain(&mut qb.cq);
    // The number of the sender's queue pair is drawn.
    assert!(arrived.iter().all(|cqe| cqe.status != 0 || cqe.src_qp.get() == qa.qpn));
    let numbers = |cqe: &mut Cqe| (cqe.src_qp, cqe.qpn) = (U32::ZERO, U32::ZERO);
    arrived.iter_mut().for_each(numbers);
    (a.statuses(&mut qa.cq), arrived, counters, b.read(there, 80))
}

#[test]
fn sends_come_to_the_same_by_both_ways() {
    let all = [
        Amiss::Nothing,
        Amiss::OwnKey,
        Amiss::ReceiveKey,
        Amiss::ReadOnly,
        Amiss::Short,
        Amiss::Absent,
    ];
    for what in [qpt::RC, qpt::UC]
        .map(|kind| [opcode::SEND, opcode::SEND_WITH_IMM].map(|c| (kind, c)))
        .concat()
    {
        for amiss in all {
            let before = WENT.get().0;
            let plain = send(what, amiss, 1);
            assert_eq!(WENT.get().0 - before, u32::from(amiss == Amiss::Nothing), "{amiss:?}");
            let ordinary = send(what, amiss, 2);
            assert_eq!(WENT.get().0 - before, u32::from(amiss == Amiss::Nothing), "{amiss:?}");
            assert_eq!(plain.0, ordinary.0, "{what:?}: {amiss:?}");
            assert_eq!(plain, ordinary, "{what:?}: {amiss:?}");
        }
    }
}

/// Sends and writes that are checked together: each receive once, in order, and none is taken by
/// what fails.
#[test]
fn sends_take_their_receives_in_order() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (here, there) = (a.alloc(64), b.alloc(4096));
    for round in 0..3u64 {
        for n in 0..6u64 {
            b.post_receive(&mut qb, 10 * round + n, &[b.sge(there + 16 * n, 16)]);
        }
        let before = WENT.get();
        for n in 0..7u8 {
            a.write(here + u64::from(n), &[n + 1]);
            let code = if n == 3 { opcode::RDMA_WRITE } else { opcode::SEND };
            let mut request = wqe(code, send_flags::SIGNALED, n.into());
            (request.remote_addr, request.rkey) = (U64::new(there + 1000), U32::new(b.key));
            a.post_send(&mut qa, request, &[a.sge(here + u64::from(n), 1)]);
        }
        world.settle();
        assert_eq!((WENT.get().0 - before.0, WENT.get().1 - before.1), (7, 1));
        assert_eq!(a.statuses(&mut qa.cq), (0..7).map(|n| (n, 0)).collect::<Vec<_>>());
        let came: Vec<_> = (0..6).map(|n| (10 * round + n, 0)).collect();
        assert_eq!(b.statuses(&mut qb.cq), came);
        let firsts: Vec<u8> = (0..6).map(|n| b.read(there + 16 * n, 1)[0]).collect();
        assert_eq!((firsts, b.read(there + 1000, 1)), (vec![1, 2, 3, 5, 6, 7], vec![4]));
    }
    // One receive, and two sends: the second waits.
    b.post_receive(&mut qb, 77, &[b.sge(there, 16)]);
    (0..2).for_each(|n| {
        a.post_send(&mut qa, wqe(opcode::SEND, send_flags::SIGNALED, n), &[a.sge(here, 1)]);
    });
    world.settle();
    assert_eq!((a.statuses(&mut qa.cq), b.statuses(&mut qb.cq)), (vec![(0, 0)], vec![(77, 0)]));
    b.post_receive(&mut qb, 78, &[b.sge(there, 16)]);
    world.settle();
    assert_eq!((a.statuses(&mut qa.cq), b.statuses(&mut qb.cq)), (vec![(1, 0)], vec![(78, 0)]));
}

/// A receiver whose completion queue is full loses its queue pair, and nothing behind the first
/// completion that finds no place is executed.
#[test]
fn a_full_completion_queue_of_the_receiver_ends_its_queue_pair() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let cq = world.cq(&mut b, 2);
    let mut qa = world.qp(&mut a, qpt::RC, 16, None);
    let mut qb = world.qp_on(&mut b, (qpt::RC, 16, None), cq);
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    let (here, there) = (a.alloc(64), b.alloc(64));
    for n in 0..6u8 {
        a.write(here + u64::from(n), &[n + 1]);
        b.post_receive(&mut qb, n.into(), &[b.sge(there + u64::from(n), 1)]);
        let send = wqe(opcode::SEND, send_flags::SIGNALED, n.into());
        a.post_send(&mut qa, send, &[a.sge(here + u64::from(n), 1)]);
    }
    world.advance(10_000_000_000);
    assert_eq!(b.read(there, 6), [1, 2, 3, 0, 0, 0]);
    assert_eq!(b.statuses(&mut qb.cq), [(0, 0), (1, 0)]);
    let told = a.statuses(&mut qa.cq);
    assert_eq!(told[..3], [(0, 0), (1, 0), (2, 0)]);
    assert_eq!(told[3], (3, wc_status::RETRY_EXC_ERR));
}

/// Receives that queue pairs share are taken so too: each once, the guest is told that slots are
/// free, and the limit fires once.
#[test]
fn sends_take_shared_receives() {
    const ENTRIES: u32 = 8;
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let bytes = control_offset(u64::from(ENTRIES) << RQ_STRIDE) + 128;
    let (at, ring) = b.ring(bytes);
    let req = abi::SrqCreateReq {
        pdn: U32::new(b.pd),
        entries: U32::new(ENTRIES),
        max_wr: U32::new(ENTRIES),
        max_sge: U32::new(1),
        log2_stride: RQ_STRIDE,
        ..Default::default()
    };
    let reply = world.ok(&b, b.ctx, Command::SrqCreate { req, ring });
    let Reply::Srq(srq) = reply else { panic!("not an SRQ") };
    let srqn = srq.srqn.get();
    let mut qa = world.qp(&mut a, qpt::RC, 16, None);
    let mut qb = world.qp(&mut b, qpt::RC, 16, Some(srqn));
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    let (here, there) = (a.alloc(64), b.alloc(64));
    let mut posted = 0;
    for round in 0..5u8 {
        for n in 0..4u64 {
            b.post_shared((at, ENTRIES, srq.db.get()), posted, b.sge(there + 8 * n, 8));
            posted += 1;
        }
        let limit = abi::SrqModifyReq {
            srqn: srq.srqn,
            mask: U32::new(abi::srq_mask::LIMIT),
            limit: U32::new(2),
            ..Default::default()
        };
        world.ok(&b, b.ctx, Command::SrqModify { req: limit, ring: None });
        let before = WENT.get();
        for n in 0..4u8 {
            a.write(here + u64::from(n), &[round * 4 + n]);
            a.post_send(&mut qa, wqe(opcode::SEND, 0, 0), &[a.sge(here + u64::from(n), 1)]);
        }
        world.settle();
        assert_eq!((WENT.get().0 - before.0, WENT.get().1 - before.1), (4, 1));
        let came = b.drain(&mut qb.cq);
        let flags = cqe_flags::RECV | cqe_flags::SRQ;
        assert!(came.iter().all(|cqe| cqe.flags.get() == flags && cqe.byte_len.get() == 1));
        let indices: Vec<u32> = came.iter().map(|cqe| cqe.wqe_index.get()).collect();
        assert_eq!(indices, (posted - 4..posted).collect::<Vec<_>>());
        let bytes: Vec<u8> = (0..4).map(|n| b.read(there + 8 * n, 1)[0]).collect();
        assert_eq!(bytes, (round * 4..round * 4 + 4).collect::<Vec<_>>());
        let events = b.asynchronous();
        let limits = events.iter().filter(|event| event.0 == event::SRQ_LIMIT_REACHED).count();
        assert_eq!(limits, 1, "{events:?}");
        let used = control_offset(u64::from(ENTRIES) << RQ_STRIDE);
        let used = b.read(at + used + abi::ctrl::TAKEN as u64, 4);
        assert_eq!(used, posted.to_le_bytes());
    }
}
