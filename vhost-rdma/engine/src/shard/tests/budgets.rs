//! What a guest can make one turn last: attacks by number, each as long as its maker likes, and the
//! charge of every round and step of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_rdma_abi::{self as abi, event, opcode, qps, qpt, send_flags, srq_mask, wc_status};
use zerocopy::little_endian::{U32, U64};

use crate::memory::Ring;
use crate::nic::budget::Clock;
use crate::shard::testing::driver::{
    Guest, Lcg, Qp, World, av, init_attr, limits, rtr_attr, rts_attr, wqe,
};
use crate::shard::testing::time::Late;
use crate::shard::{Command, Limits, Look, Nanos, NicSettings, Reply, Shard, Status, Step};

const SIGNALED: u8 = send_flags::SIGNALED;
/// The most that a round or a step of a command may be charged: its time, what it tells the guests,
/// and the piece that was begun last.
const MOST: Nanos = 110_000;

fn many() -> Limits {
    Limits {
        max_contexts: 2000,
        max_pds: 100_000,
        max_mrs: 100_000,
        max_cqs: 4096,
        max_srqs: 64,
        max_qps: 4096,
        max_ahs: 100_000,
        ..limits()
    }
}

/// Lets a guest have as much as many do.
pub(super) fn generous(world: &mut World, guest: &Guest, host: u8) {
    let settings = NicSettings {
        number: 0,
        vni: 1,
        mac: [2, 0, 0, 0, 0, host],
        gids: Vec::new(),
        comp_vectors: 4,
        kick_queues: 2,
        limits: many(),
    };
    world.shard.update_nic(guest.nic, settings);
}

fn guests() -> (World, Guest, Guest) {
    let mut world = World::new();
    world.ram = 48 << 20;
    let (a, b) = (world.guest(1, 1), world.guest(1, 2));
    generous(&mut world, &a, 1);
    generous(&mut world, &b, 2);
    (world, a, b)
}

/// Rounds until nothing is left to do; the most that one was charged, and how many there were.
fn rounds(world: &mut World) -> (Nanos, u32) {
    let (mut most, mut count) = (0, 0);
    loop {
        let before = world.shard.charged();
        let busy = world.shard.poll(world.now);
        most = most.max(world.shard.charged() - before);
        if !busy {
            return (most, count);
        }
        count += 1;
        assert!(count < 100_000, "the shard never comes to rest");
    }
}

/// Steps of a command with a round between; its result, the most that a step was charged, and how
/// many there were.
fn steps(
    world: &mut World,
    guest: &Guest,
    command: Command,
) -> (Result<Reply, Status>, Nanos, u32) {
    let (mut command, mut most, mut count) = (command, 0, 0);
    loop {
        let before = world.shard.charged();
        let reply = world.shard.execute(guest.nic, guest.ctx, command, world.now);
        most = most.max(world.shard.charged() - before);
        count += 1;
        drop(world.shard.take_deferred_drops(guest.nic));
        match reply {
            Ok(Step::More) => command = Command::Continue,
            Ok(Step::Done(reply)) => return (Ok(reply), most, count),
            Ok(Step::Blocking(job)) => panic!("nothing blocks here: {job:?}"),
            Err(status) => return (Err(status), most, count),
        }
        world.shard.poll(world.now);
    }
}

fn write_to(guest: &Guest, at: u64) -> abi::SqWqe {
    let mut wqe = wqe(opcode::RDMA_WRITE, SIGNALED, 1);
    (wqe.remote_addr, wqe.rkey) = (U64::new(at), U32::new(guest.key));
    wqe
}

/// Connected pairs whose sending side has `entries` and a CQ as large.
fn pairs(
    world: &mut World,
    (a, b): (&mut Guest, &mut Guest),
    count: usize,
    entries: u32,
) -> Vec<Qp> {
    let pair = |_| {
        let cq = world.cq(a, entries);
        let (qa, qb) =
            (world.qp_on(a, (qpt::RC, entries, None), cq), world.qp(b, qpt::RC, 16, None));
        world.connect(a, &qa, qpt::RC, (qb.qpn, b.gid));
        world.connect(b, &qb, qpt::RC, (qa.qpn, a.gid));
        qa
    };
    (0..count).map(pair).collect()
}

#[test]
fn requests_of_many_elements_do_not_make_a_round_long() {
    let (mut world, mut a, mut b) = guests();
    let mut queues = pairs(&mut world, (&mut a, &mut b), 8, 256);
    let (from, to) = (a.alloc(4096), b.alloc(4096));
    let four = [a.sge(from, 1), a.sge(from, 1), a.sge(from, 1), a.sge(from, 1)];
    for qp in &mut queues {
        for _ in 0..256 {
            a.post_send(qp, write_to(&b, to), &four);
        }
    }
    let (most, count) = rounds(&mut world);
    assert!(most <= MOST, "a round was charged {most} ns");
    assert!(count >= 4, "{count} rounds: none of them took it all");
    for qp in &mut queues {
        assert_eq!(a.statuses(&mut qp.cq).len(), 256);
    }
}

/// A clock that makes every look at it 30 µs late, as memory that is slow to reach does.
#[derive(Debug, Default)]
struct Slow(Arc<AtomicU64>);

impl Clock for Slow {
    fn now(&self) -> Nanos {
        self.0.fetch_add(30_000, Ordering::Relaxed)
    }
}

#[test]
fn requests_that_take_longer_than_they_are_charged_end_the_round() {
    let (mut world, mut a, mut b) = guests_with(Slow::default());
    let mut queues = pairs(&mut world, (&mut a, &mut b), 1, 64);
    let (from, to) = (a.alloc(4096), b.alloc(4096));
    for _ in 0..64 {
        a.post_send(&mut queues[0], write_to(&b, to), &[a.sge(from, 1)]);
    }
    world.shard.poll(0);
    let done = a.statuses(&mut queues[0].cq).len();
    assert!((1..40).contains(&done), "{done} requests in one round, though the clock ran");
    rounds(&mut world);
    assert_eq!(done + a.statuses(&mut queues[0].cq).len(), 64);
}

fn guests_with(clock: impl Clock + 'static) -> (World, Guest, Guest) {
    let shard = Shard::new(Box::new(Lcg(7))).with_clock(Box::new(clock));
    let mut world = World::of(shard);
    let (a, b) = (world.guest(1, 1), world.guest(1, 2));
    (world, a, b)
}

#[test]
fn who_wants_little_is_served_in_the_next_round() {
    const LARGE: u32 = 1 << 20;
    let mut world = World::new();
    let mut queues = Vec::new();
    let mut villains: Vec<Guest> = (1..=8).map(|host| world.guest(1, host)).collect();
    for guest in &mut villains {
        let cq = world.cq(guest, 256);
        let mut qp = world.qp_on(guest, (qpt::RC, 16, None), cq);
        let (qpn, gid) = (qp.qpn, guest.gid);
        world.connect(guest, &qp, qpt::RC, (qpn, gid));
        let (from, to) = (guest.alloc(LARGE.into()), guest.alloc(LARGE.into()));
        for _ in 0..16 {
            guest.post_send(&mut qp, write_to(guest, to), &[guest.sge(from, LARGE)]);
        }
        queues.push(qp);
    }
    let (mut a, mut b) = (world.guest(2, 21), world.guest(2, 22));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (from, to) = (a.alloc(64), b.alloc(64));
    (0..20).for_each(|_| assert!(world.shard.poll(world.now)));
    for turn in 0..50 {
        a.post_send(&mut qa, write_to(&b, to), &[a.sge(from, 64)]);
        let before = world.shard.charged();
        assert!(world.shard.poll(world.now), "the villains have work for long");
        let waited = world.shard.charged() - before;
        assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::SUCCESS)], "turn {turn}");
        assert!(waited <= MOST, "{waited} ns");
    }
    world.settle();
    for (guest, qp) in villains.iter().zip(&mut queues) {
        assert_eq!(guest.statuses(&mut qp.cq).len(), 16);
    }
}

/// Messages of 64 KiB that the first round moves for each of so many NICs, and how many looks at
/// the clock are `apart`.
fn moved(nics: u8, apart: Nanos) -> Vec<usize> {
    const LEN: u32 = 64 << 10;
    let late = Late::by(apart);
    let mut world = World::of(Shard::new(Box::new(Lcg(7))).with_clock(Box::new(late)));
    let mut writers: Vec<(Guest, Qp)> = Vec::new();
    for host in 1..=nics {
        let mut guest = world.guest(1, host);
        let cq = world.cq(&mut guest, 64);
        let mut qp = world.qp_on(&mut guest, (qpt::RC, 16, None), cq);
        let (qpn, gid) = (qp.qpn, guest.gid);
        world.connect(&guest, &qp, qpt::RC, (qpn, gid));
        let (from, to) = (guest.alloc(LEN.into()), guest.alloc(LEN.into()));
        for _ in 0..16 {
            guest.post_send(&mut qp, write_to(&guest, to), &[guest.sge(from, LEN)]);
        }
        writers.push((guest, qp));
    }
    world.shard.poll(0);
    writers.iter_mut().map(|(guest, qp)| guest.statuses(&mut qp.cq).len()).collect()
}

#[test]
fn who_is_alone_goes_on_and_who_is_not_takes_turns() {
    assert!(moved(1, 100)[0] >= 5, "alone, and quick: {:?}", moved(1, 100));
    assert_eq!(moved(1, 10_000), [3], "alone, and slow");
    let beside = moved(3, 100);
    assert!(beside.iter().all(|&count| (1..=4).contains(&count)), "{beside:?}");
}

#[test]
fn all_that_write_much_get_the_same() {
    let mut world = World::new();
    let area = 65536;
    let mut villains: Vec<(Guest, Qp)> = Vec::new();
    // One has eight queue pairs, the others one.
    for (host, count) in [(1, 8), (2, 1), (3, 1)] {
        let mut guest = world.guest(1, host);
        let (from, to) = (guest.alloc(area), guest.alloc(area));
        for _ in 0..count {
            let cq = world.cq(&mut guest, 256);
            let mut qp = world.qp_on(&mut guest, (qpt::RC, 256, None), cq);
            let (qpn, gid) = (qp.qpn, guest.gid);
            world.connect(&guest, &qp, qpt::RC, (qpn, gid));
            for _ in 0..256 {
                guest.post_send(&mut qp, write_to(&guest, to), &[guest.sge(from, 65536)]);
            }
            villains.push((guest, qp));
            guest = villains.last().map(|(guest, _)| guest.again()).unwrap();
        }
    }
    (0..60).for_each(|_| assert!(world.shard.poll(world.now)));
    let sent = |host: u8| {
        let of = |(guest, _): &&(Guest, Qp)| guest.gid[15] == host;
        let nic = villains.iter().find(of).unwrap().0.nic;
        world.shard.status(nic).unwrap().counters.tx_bytes
    };
    let (greedy, modest) = (sent(1), sent(2).min(sent(3)));
    assert!(greedy <= modest * 3 / 2, "{greedy} bytes for eight queue pairs, {modest} for one");
}

#[test]
fn a_datagram_to_a_large_group_goes_in_steps() {
    const MEMBERS: usize = 60;
    let (mut world, mut a, mut b) = guests();
    let mut group = [0; 16];
    group[10..].copy_from_slice(&[0xff, 0xff, 230, 0, 0, 1]);
    let mut members = Vec::new();
    for _ in 0..MEMBERS {
        let mut qp = world.qp(&mut b, qpt::UD, 16, None);
        ready(&mut world, &b, &qp);
        world.ok(&b, b.ctx, Command::McastAttach { qpn: qp.qpn, mgid: group });
        let to = b.alloc(64);
        for n in 0..16 {
            b.post_receive(&mut qp, n, &[b.sge(to, 64)]);
        }
        members.push(qp);
    }
    let cq = world.cq(&mut a, 256);
    let mut sender = world.qp_on(&mut a, (qpt::UD, 256, None), cq);
    ready(&mut world, &a, &sender);
    let handle = Command::AhCreate { pdn: a.pd, av: av(group) };
    let Reply::Object(ah) = world.ok(&a, a.ctx, handle) else { panic!("not a handle") };
    let from = a.alloc(64);
    for n in 0..256 {
        let mut send = wqe(opcode::SEND, SIGNALED, n);
        (send.arg0, send.rkey, send.aux) =
            (U64::new(ah.into()), U32::new(0xff_ffff), U32::new(0x1111));
        a.post_send(&mut sender, send, &[a.sge(from, 1)]);
    }
    let (most, count) = rounds(&mut world);
    assert!(most <= MOST, "a round was charged {most} ns");
    assert!(count >= 4, "{count} rounds");
    assert_eq!(a.statuses(&mut sender.cq).len(), 256);
    for qp in &mut members {
        let got = b.statuses(&mut qp.cq);
        assert_eq!(got, (0..16).map(|n| (n, wc_status::SUCCESS)).collect::<Vec<_>>());
    }
}

fn ready(world: &mut World, guest: &Guest, qp: &Qp) {
    for attr in [init_attr(qpt::UD), rtr_attr(qpt::UD, (0, [0; 16])), rts_attr(qpt::UD)] {
        world.modify(guest, qp, attr).unwrap();
    }
}

#[test]
fn queues_that_die_take_their_users_along_in_steps() {
    const USERS: usize = 400;
    let (mut world, mut a, _b) = guests();
    let cq = world.cq(&mut a, 1);
    let queues: Vec<Qp> =
        (0..USERS).map(|_| world.qp_on(&mut a, (qpt::RC, 16, None), cq)).collect();
    let mut pair = [queues[0].clone(), queues[1].clone()];
    let gid = a.gid;
    world.connect(&a, &pair[0], qpt::RC, (pair[1].qpn, gid));
    world.connect(&a, &pair[1], qpt::RC, (pair[0].qpn, gid));
    for n in 0..3 {
        let mut none = write_to(&a, 0);
        none.wr_id = U64::new(n);
        a.post_send(&mut pair[0], none, &[]);
    }
    let (most, count) = rounds(&mut world);
    assert!(most <= MOST, "a round was charged {most} ns");
    assert!(count >= 2, "{count} rounds");
    let events = a.asynchronous();
    assert!(events.contains(&(event::CQ_ERR, cq.cqn)));
    for qp in &queues {
        assert_eq!(events.iter().filter(|e| **e == (event::QP_FATAL, qp.qpn)).count(), 1);
    }
    assert_eq!(world.query(&a, &pair[0]).qp_state, qps::ERR);
}

#[test]
fn the_end_of_a_context_goes_in_steps() {
    const HANDLES: u32 = 20_000;
    let (mut world, mut a, mut b) = guests();
    let (qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    for _ in 0..HANDLES {
        world.ok(&a, a.ctx, Command::AhCreate { pdn: a.pd, av: av(b.gid) });
        world.ok(&a, a.ctx, Command::MwAlloc { pdn: a.pd, kind: abi::mw_type::TYPE1 });
    }
    let busy = world.execute(&a, a.ctx, Command::PdDestroy(a.pd)).unwrap_err();
    assert_eq!(busy, Status::BUSY);
    let (result, most, count) = steps(&mut world, &a, Command::ContextDestroy);
    assert!(matches!(result, Ok(Reply::Done)), "{result:?}");
    assert!(most <= MOST, "a step was charged {most} ns");
    assert!(count >= 10, "{count} steps");
    let left = world.shard.status(a.nic).unwrap().objects;
    assert_eq!((left.contexts, left.pds, left.mrs, left.qps, left.ahs), (0, 0, 0, 0, 0));
    assert_eq!(world.execute(&a, a.ctx, Command::QpQuery(qa.qpn)).unwrap_err(), Status::NOENT);
}

/// As when an operator gives a NIC of processes another address while one of them ends.
#[test]
fn what_the_host_sets_cuts_no_command() {
    let (mut world, a, _) = guests();
    for _ in 0..20_000 {
        world.ok(&a, a.ctx, Command::MwAlloc { pdn: a.pd, kind: abi::mw_type::TYPE1 });
    }
    let mut command = Command::ContextDestroy;
    let mut steps = 0;
    let other = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
    loop {
        let step = world.shard.execute(a.nic, a.ctx, command, world.now);
        match step.expect("the context ends") {
            Step::Done(_) => break,
            _ => command = Command::Continue,
        }
        world.shard.set_gid(a.nic, 2, (steps % 2 == 0).then_some(other)).expect("it is set");
        steps += 1;
    }
    assert!(steps >= 5, "{steps} steps");
    let left = world.shard.status(a.nic).unwrap().objects;
    assert_eq!((left.contexts, left.pds, left.mrs), (0, 0, 0));
}

/// As when a driver has given an answer up.
#[test]
fn a_context_that_ended_in_part_can_be_ended_again() {
    let (mut world, a, _) = guests();
    for _ in 0..20_000 {
        world.ok(&a, a.ctx, Command::MwAlloc { pdn: a.pd, kind: abi::mw_type::TYPE1 });
    }
    let first = world.shard.execute(a.nic, a.ctx, Command::ContextDestroy, world.now);
    assert!(matches!(first, Ok(Step::More)), "{first:?}");
    world.ok(&a, 0, Command::Keepalive);
    let goes_on = world.shard.execute(a.nic, a.ctx, Command::Continue, world.now);
    assert_eq!(goes_on.unwrap_err(), Status::STATE);
    world.ok(&a, a.ctx, Command::ContextDestroy);
    let left = world.shard.status(a.nic).unwrap().objects;
    assert_eq!((left.contexts, left.pds, left.mrs), (0, 0, 0));
}

#[test]
fn a_domain_is_free_when_its_last_object_is() {
    let (mut world, mut a, mut b) = guests();
    let destroy = |world: &mut World, a: &Guest| world.execute(a, a.ctx, Command::PdDestroy(a.pd));
    let (qa, _) = world.pair(&mut a, &mut b, qpt::RC);
    let handle = Command::AhCreate { pdn: a.pd, av: av(b.gid) };
    let Reply::Object(ah) = world.ok(&a, a.ctx, handle) else { panic!("not a handle") };
    let window = Command::MwAlloc { pdn: a.pd, kind: abi::mw_type::TYPE1 };
    let Reply::Object(window) = world.ok(&a, a.ctx, window) else { panic!("not a window") };
    for last in [
        Command::QpDestroy(qa.qpn),
        Command::AhDestroy(ah),
        Command::MwDealloc(window),
        Command::MrDereg(a.key),
    ] {
        assert_eq!(destroy(&mut world, &a).unwrap_err(), Status::BUSY, "before {last:?}");
        world.ok(&a, a.ctx, last);
    }
    assert!(matches!(destroy(&mut world, &a), Ok(Reply::Done)));
}

#[test]
fn a_shared_queue_moves_to_a_larger_ring_in_steps() {
    const ENTRIES: u32 = 8192;
    let (mut world, mut a, mut b) = guests();
    let stride = crate::shard::testing::driver::RQ_STRIDE;
    let bytes = |entries: u32| (u64::from(entries) << stride) + 256;
    let (at, ring) = a.ring(bytes(ENTRIES));
    let req = abi::SrqCreateReq {
        pdn: U32::new(a.pd),
        entries: U32::new(ENTRIES),
        max_wr: U32::new(ENTRIES),
        max_sge: U32::new(4),
        log2_stride: stride,
        ..abi::SrqCreateReq::default()
    };
    let Reply::Srq(srq) = world.ok(&a, a.ctx, Command::SrqCreate { req, ring }) else {
        panic!("not an SRQ")
    };
    let to = a.alloc(64);
    for index in 0..ENTRIES {
        a.post_shared((at, ENTRIES, srq.db.get()), index, a.sge(to, 64));
    }
    let (_, ring) = a.ring(bytes(2 * ENTRIES));
    let req = abi::SrqModifyReq {
        srqn: srq.srqn,
        mask: U32::new(srq_mask::MAX_WR),
        entries: U32::new(2 * ENTRIES),
        max_wr: U32::new(2 * ENTRIES),
        ..abi::SrqModifyReq::default()
    };
    let modify = Command::SrqModify { req, ring: Some(ring) };
    let (result, most, count) = steps(&mut world, &a, modify);
    assert!(matches!(result, Ok(Reply::Done)), "{result:?}");
    assert!(most <= MOST, "a step was charged {most} ns");
    assert!(count >= 4, "{count} steps");
    let qa = world.qp(&mut a, qpt::RC, 16, Some(srq.srqn.get()));
    let mut qb = world.qp(&mut b, qpt::RC, 16, None);
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    b.post_send(&mut qb, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    let mut cq = qa.cq;
    assert_eq!(a.statuses(&mut cq), [(0, wc_status::SUCCESS)], "the receives moved along");
}

#[test]
fn a_completion_queue_moves_to_a_larger_ring_in_steps() {
    const ENTRIES: u32 = 16384;
    let (mut world, mut a, mut b) = guests();
    let cq = world.cq(&mut a, ENTRIES);
    let mut qa = world.qp_on(&mut a, (qpt::RC, 256, None), cq);
    let qb = world.qp(&mut b, qpt::RC, 16, None);
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    for _ in 0..ENTRIES / 256 {
        for _ in 0..256 {
            a.post_send(&mut qa, write_to(&b, 0), &[]);
        }
        world.settle();
    }
    let (at, ring) = a.ring(crate::shard::control_offset(u64::from(2 * ENTRIES) * 64) + 128);
    let command =
        Command::CqResize { cqn: cq.cqn, entries: 2 * ENTRIES, requested: 2 * ENTRIES, ring };
    let (result, most, count) = steps(&mut world, &a, command);
    assert!(matches!(result, Ok(Reply::Done)), "{result:?}");
    assert!(most <= MOST, "a step was charged {most} ns");
    assert!(count >= 4, "{count} steps");
    let mut moved = cq.moved(at, 2 * ENTRIES);
    assert_eq!(a.statuses(&mut moved).len(), ENTRIES as usize);
}

#[test]
fn many_doorbell_pages_cost_a_round_little_and_lose_no_post() {
    const CONTEXTS: u64 = 1000;
    let (mut world, mut a, mut b) = guests();
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    for _ in 0..CONTEXTS {
        // Nobody ever rings there.
        let page = a.alloc(4096);
        let db_page = Ring::page(&a.space, page).unwrap();
        world.ok(&a, 0, Command::ContextCreate { db_page });
    }
    rounds(&mut world);
    let before = world.shard.charged();
    world.shard.poll(world.now);
    let idle = world.shard.charged() - before;
    assert!(idle <= 1_000, "a round without work was charged {idle} ns");
    // A post to any page is found by a few rounds, and by the last look before sleep at the latest.
    for in_sleep in [false, true] {
        a.post_send(&mut qa, write_to(&b, 0), &[]);
        if in_sleep {
            let mut look = world.shard.prepare_sleep();
            while look == Look::More {
                look = world.shard.look_on();
            }
            assert_eq!(look, Look::Found);
            world.shard.wake();
        }
        for _ in 0..CONTEXTS / 8 {
            world.shard.poll(world.now);
        }
        assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::SUCCESS)]);
    }
    rounds(&mut world);
    let before = world.shard.charged();
    let (mut look, mut most) = (world.shard.prepare_sleep(), 0);
    let mut last = before;
    while look == Look::More {
        most = most.max(world.shard.charged() - last);
        last = world.shard.charged();
        look = world.shard.look_on();
    }
    assert_eq!(look, Look::Clear);
    assert!(most <= MOST && world.shard.charged() - before >= CONTEXTS * 8, "all were looked at");
}

#[test]
fn deadlines_that_come_together_are_met_in_steps() {
    const WAITERS: usize = 400;
    let (mut world, mut a, mut b) = guests();
    let mut queues = pairs(&mut world, (&mut a, &mut b), WAITERS, 16);
    for qp in &mut queues {
        // Nobody has posted a receive.
        a.post_send(qp, wqe(opcode::SEND, SIGNALED, 1), &[]);
    }
    world.settle();
    let mut most = 0;
    while let Some(deadline) = world.shard.next_deadline() {
        world.now = world.now.max(deadline);
        most = most.max(rounds(&mut world).0);
    }
    assert!(most <= MOST, "a round was charged {most} ns");
    for qp in &mut queues {
        assert_eq!(a.statuses(&mut qp.cq), [(1, wc_status::RNR_RETRY_EXC_ERR)]);
    }
}

#[test]
fn a_nic_goes_on_after_a_pause_in_steps() {
    const WAITERS: usize = 300;
    let (mut world, mut a, mut b) = guests();
    let mut queues = pairs(&mut world, (&mut a, &mut b), WAITERS, 16);
    world.shard.pause(a.nic);
    for qp in &mut queues {
        a.post_send(qp, write_to(&b, 0), &[]);
    }
    rounds(&mut world);
    let before = world.shard.charged();
    world.shard.resume(a.nic);
    assert!(world.shard.charged() - before < 1_000, "a resume only begins");
    let (most, _) = rounds(&mut world);
    assert!(most <= MOST, "a round was charged {most} ns");
    for qp in &mut queues {
        assert_eq!(a.statuses(&mut qp.cq).len(), 1);
    }
}

#[test]
fn a_reset_gives_its_numbers_back_in_steps() {
    let (mut world, mut a, mut b) = guests();
    pairs(&mut world, (&mut a, &mut b), 400, 16);
    let before = world.shard.charged();
    world.shard.reset(a.nic);
    assert!(world.shard.charged() - before < 10_000);
    assert!(rounds(&mut world).0 <= MOST);
    assert_eq!(world.shard.prepare_sleep(), Look::Clear, "nothing is left to do");
}
