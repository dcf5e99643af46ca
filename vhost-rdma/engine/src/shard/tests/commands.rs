//! Commands, and what was posted before them.

use std::sync::atomic::{AtomicU64, Ordering};

use virtio_rdma_abi::{self as abi, qpt};

use super::datagram::{datagram, handle};
use crate::memory::Usage;
use crate::nic::Step;
use crate::nic::budget::Clock;
use crate::shard::strain::Strain;
use crate::shard::testing::driver::{
    Guest, Lcg, Qp, World, init_attr, rtr_attr, rts_attr, state_attr,
};
use crate::shard::{Command, Nanos, Shard};

const SENDS: usize = 20;
/// The most that a command that ends something may be charged: its time, the request that was begun
/// last, and its own work.
const MOST: Nanos = 30_000;

/// A queue pair with room for many datagrams.
fn roomy(world: &mut World, guest: &mut Guest) -> Qp {
    let cq = world.cq(guest, 256);
    let qp = world.qp_on(guest, (qpt::UD, 64, None), cq);
    for attr in [init_attr(qpt::UD), rtr_attr(qpt::UD, (0, [0; 16])), rts_attr(qpt::UD)] {
        world.modify(guest, &qp, attr).unwrap();
    }
    qp
}

/// One who has posted datagrams that no round has seen, with their handle, and whom they are for.
fn posted(world: &mut World) -> ((Guest, Qp, u32), (Guest, Qp)) {
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = (roomy(world, &mut a), roomy(world, &mut b));
    let ah = handle(world, &a, b.gid);
    let to = b.alloc(4096);
    (0..SENDS).for_each(|_| b.post_receive(&mut qb, 3, &[b.sge(to, 200)]));
    world.settle();
    let (from, _) = a.pattern(100, 1);
    for _ in 0..SENDS {
        a.post_send(&mut qa, datagram(ah, qb.qpn, 0x1111), &[a.sge(from, 100)]);
    }
    ((a, qa, ah), (b, qb))
}

/// More than all turns before a command can take, in many queue pairs.
fn post_much(world: &mut World, guest: &mut Guest, ah: u32, to: u32) {
    let (from, _) = guest.pattern(100, 1);
    for _ in 0..30 {
        let mut qp = roomy(world, guest);
        for _ in 0..3 * SENDS {
            guest.post_send(&mut qp, datagram(ah, to, 0x1111), &[guest.sge(from, 100)]);
        }
    }
}

/// Programs end what a send names as soon as it is posted, and an adapter has sent it by then.
#[test]
fn what_was_posted_before_something_ends_is_sent() {
    let end = |which, ah, a: &Guest, qp: &Qp| match which {
        0 => Command::AhDestroy(ah),
        1 => Command::MrDereg(a.key),
        2 => Command::QpDestroy(qp.qpn),
        3 => Command::QpModify { qpn: qp.qpn, attr: Box::new(state_attr(abi::qps::ERR)) },
        _ => Command::ContextDestroy,
    };
    for which in 0..5 {
        let mut world = super::world();
        let ((a, qa, ah), (b, mut qb)) = posted(&mut world);
        world.ok(&a, a.ctx, end(which, ah, &a, &qa));
        world.settle();
        assert_eq!(b.drain(&mut qb.cq).len(), SENDS, "end {which}");
    }
}

/// A NIC that has rest from its slow memory has it from commands too.
#[test]
fn a_nic_that_rests_executes_nothing_for_a_command() {
    let mut world = World::new();
    let ((mut a, mut qa, ah), (b, mut qb)) = posted(&mut world);
    world.shard.strains.put(a.nic.0 as usize, Strain::resting(u64::MAX));
    qa.cq = world.resize(&mut a, &qa.cq.clone(), 128);
    world.ok(&a, a.ctx, Command::AhDestroy(ah));
    world.settle();
    assert_eq!(b.drain(&mut qb.cq).len(), 0);
    world.shard.strains.put(a.nic.0 as usize, Strain::default());
    world.settle();
    // Its handle is gone by then, and what stands behind the first is flushed.
    assert_eq!((b.drain(&mut qb.cq).len(), a.statuses(&mut qa.cq).len()), (0, SENDS));
}

/// A clock by which everything takes 5 ms, of memory that was missing.
#[derive(Debug, Default)]
struct SlowMemory([AtomicU64; 2]);

impl Clock for SlowMemory {
    fn now(&self) -> Nanos {
        self.0[0].fetch_add(5_000_000, Ordering::Relaxed)
    }

    fn usage(&self) -> Usage {
        Usage { faults: self.0[1].fetch_add(1, Ordering::Relaxed), ..Usage::default() }
    }
}

#[test]
fn whose_commands_touch_slow_memory_rests() {
    let shard = Shard::new(Box::new(Lcg(7))).with_clock(Box::new(SlowMemory::default()));
    let mut world = World::of(shard);
    let a = world.guest(1, 1);
    let slot = a.nic.0 as usize;
    // Rounds that are late make suspects of those who have turns.
    for _ in 0..6 {
        world.now += 20_000_000;
        world.shard.poll(world.now);
        world.ok(&a, a.ctx, Command::Keepalive);
    }
    assert!(world.shard.strains.rests(slot, 0));
}

/// Nobody has neighbours wait by posting much before a command.
#[test]
fn what_was_posted_before_a_command_has_little_time() {
    let mut world = World::new();
    world.ram = 48 << 20;
    let ((mut a, _, ah), (b, qb)) = posted(&mut world);
    post_much(&mut world, &mut a, ah, qb.qpn);
    let (mut command, mut turns) = (Command::AhDestroy(ah), 0);
    loop {
        let before = world.shard.charged();
        let step = world.shard.execute(a.nic, a.ctx, command, world.now).unwrap();
        let charged = world.shard.charged() - before;
        turns += 1;
        assert!((10_000..=MOST).contains(&charged), "{charged} ns in turn {turns}");
        match step {
            Step::More => command = Command::Continue,
            _ => break,
        }
    }
    assert_eq!(turns, 9, "it is carried out in the end");
    drop(b);
}

/// A clock that goes on by 50 us whenever somebody looks: the host runs others meanwhile.
#[derive(Debug, Default)]
struct Crowded(AtomicU64);

impl Clock for Crowded {
    fn now(&self) -> Nanos {
        self.0.fetch_add(50_000, Ordering::Relaxed)
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Whoever had no time yet has a round, as between all steps.
#[test]
fn a_host_that_is_busy_loses_nothing_that_was_posted_before() {
    let shard = Shard::new(Box::new(Lcg(7))).with_clock(Box::new(Crowded::default()));
    let mut world = World::of(shard);
    let ((a, _, ah), (b, mut qb)) = posted(&mut world);
    let (mut command, mut turns) = (Command::AhDestroy(ah), 0);
    while let Step::More = world.shard.execute(a.nic, a.ctx, command, world.now).unwrap() {
        command = Command::Continue;
        turns += 1;
        world.now = world.now.max(world.shard.meter.now());
        world.shard.poll(world.now);
    }
    world.settle();
    assert_eq!(b.drain(&mut qb.cq).len(), SENDS, "after {turns} turns");
}

/// A driver that gives up waits for no answer, and its next command is its own.
#[test]
fn another_command_takes_the_place_of_one_that_is_held_back() {
    let mut world = World::new();
    world.ram = 48 << 20;
    let ((mut a, _, ah), (_b, qb)) = posted(&mut world);
    post_much(&mut world, &mut a, ah, qb.qpn);
    let step = world.shard.execute(a.nic, a.ctx, Command::AhDestroy(ah), world.now);
    assert!(matches!(step, Ok(Step::More)), "{step:?}");
    world.ok(&a, a.ctx, Command::Keepalive);
    let after = world.shard.execute(a.nic, a.ctx, Command::Continue, world.now);
    assert_eq!(after.unwrap_err(), crate::nic::Status::STATE);
    world.ok(&a, a.ctx, Command::AhDestroy(ah));
}
