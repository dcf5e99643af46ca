//! NICs that have nothing to do are not visited, and whatever gives them work brings them back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_rdma_abi::{self as abi, arm, opcode, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::apart::apart;
use super::budgets::generous;
use super::datagram::{datagram, handle, ready};
use crate::link::MULTICAST_QPN;
use crate::memory::{AddressSpace, Ring};
use crate::nic::budget::{Clock, cost};
use crate::shard::strain::Strain;
use crate::shard::testing::air::Air;
use crate::shard::testing::driver::{Guest, Lcg, Qp, World, init_attr, rtr_attr, rts_attr, wqe};
use crate::shard::{Command, Look, Nanos, Shard};

const SIGNALED: u8 = send_flags::SIGNALED;
const DONE: [(u64, u8); 1] = [(1, wc_status::SUCCESS)];

fn write_to(peer: &Guest) -> virtio_rdma_abi::SqWqe {
    virtio_rdma_abi::SqWqe {
        rkey: U32::new(peer.key),
        remote_addr: U64::new(0),
        ..wqe(opcode::RDMA_WRITE, SIGNALED, 1)
    }
}

/// Two guests whose NICs are parked, with a connected pair.
fn parked() -> (World, (Guest, Qp), (Guest, Qp)) {
    parked_in(World::new())
}

fn parked_in(mut world: World) -> (World, (Guest, Qp), (Guest, Qp)) {
    world.shard.park_at_once();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (qa, qb) = world.pair(&mut a, &mut b, qpt::RC);
    rest(&mut world);
    assert!(a.asked_to_kick() && b.asked_to_kick());
    (world, (a, qa), (b, qb))
}

/// A clock by which every look is over when it is asked.
#[derive(Debug, Default)]
struct Hasty(AtomicU64);

impl Clock for Hasty {
    fn now(&self) -> Nanos {
        self.0.fetch_add(60_000, Ordering::Relaxed)
    }
}

fn poll(world: &mut World) {
    world.shard.poll(world.now);
}

/// Rounds until everyone is parked.
fn rest(world: &mut World) {
    for _ in 0..8 {
        world.settle();
    }
}

#[test]
fn what_arrives_at_a_parked_nic_is_stamped_with_the_present() {
    let (mut world, (a, mut qa), (b, mut qb)) = parked();
    b.post_receive(&mut qb, 1, &[]);
    world.settle();
    rest(&mut world);
    world.now += 5_000_000;
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    let received = b.drain(&mut qb.cq);
    assert_eq!((received.len(), received[0].timestamp.get()), (1, world.now));
}

/// Two guests that are awake, the second of which waits for a message; time has passed since the
/// last round.
fn awaited() -> (World, (Guest, Qp), (Guest, Qp)) {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    b.post_receive(&mut qb, 1, &[]);
    world.settle();
    world.now += 5_000_000;
    (world, (a, qa), (b, qb))
}

/// A NIC that has rest from its slow memory has peers that have none.
#[test]
fn what_arrives_at_a_nic_that_rests_is_stamped_with_the_present() {
    let (mut world, (a, mut qa), (b, mut qb)) = awaited();
    world.shard.strains.put(b.nic.0 as usize, Strain::resting(u64::MAX));
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    let received = b.drain(&mut qb.cq);
    assert_eq!((received.len(), received[0].timestamp.get()), (1, world.now));
}

/// Whoever shrinks a CQ has what was posted executed at once, whenever the last round was.
#[test]
fn what_arrives_between_rounds_is_stamped_with_the_present() {
    let (mut world, (mut a, mut qa), (b, mut qb)) = awaited();
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    qa.cq = world.resize(&mut a, &qa.cq.clone(), 128);
    let (sent, received) = (a.drain(&mut qa.cq), b.drain(&mut qb.cq));
    assert_eq!((sent.len(), sent[0].timestamp.get()), (1, world.now));
    assert_eq!((received.len(), received[0].timestamp.get()), (1, world.now));
}

/// The first round after a sleep begins with what other shards sent.
#[test]
fn a_datagram_to_a_group_that_wakes_a_shard_is_stamped_with_the_present() {
    let (mut world, mut a, mut b) = apart(Air::still());
    let (mut qa, mut qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let mut mgid = [0; 16];
    mgid[10..].copy_from_slice(&[0xff, 0xff, 230, 0, 0, 1]);
    world.ok(&b, b.ctx, Command::McastAttach { qpn: qb.qpn, mgid });
    let ah = handle(&mut world, &a, mgid);
    let to = b.alloc(4096);
    b.post_receive(&mut qb, 1, &[b.sge(to, 4096)]);
    world.settle();
    a.post_send(&mut qa, datagram(ah, MULTICAST_QPN, 0x1111), &[]);
    world.shard.poll(world.now);
    world.now += 5_000_000;
    let parcels: Vec<_> = world.shard.outgoing()[1].drain(..).collect();
    parcels.into_iter().for_each(|parcel| world.at(1).arrive(parcel));
    let now = world.now;
    world.at(1).poll(now);
    let received = b.drain(&mut qb.cq);
    assert_eq!((received.len(), received[0].timestamp.get()), (1, now));
}

#[test]
fn idle_neighbours_are_charged_to_nobody() {
    const IDLE: u8 = 200;
    let mut world = World::new();
    world.ram = 1 << 20;
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let idle: Vec<_> = (3..3 + IDLE).map(|host| world.guest(1, host)).collect();
    let mut round = |world: &mut World| {
        a.post_send(&mut qa, write_to(&b), &[]);
        let before = world.shard.charged();
        world.now += 10_000;
        world.shard.poll(world.now);
        assert_eq!(a.statuses(&mut qa.cq), DONE);
        world.shard.charged() - before
    };
    let crowded = round(&mut world);
    let parked = (0..200).map(|_| round(&mut world)).last().unwrap_or(crowded);
    assert!(crowded >= parked + u64::from(IDLE) * 8, "{crowded} ns at first, then {parked}");
    assert!(parked <= 500, "a round beside idle NICs was charged {parked} ns");
    let asked = idle.iter().filter(|guest| guest.asked_to_kick()).count();
    assert_eq!(asked, usize::from(IDLE) - 2, "the busy ones and two more are visited");
    assert!(!a.asked_to_kick());
}

#[test]
fn a_kick_brings_a_nic_back() {
    let (mut world, (a, mut qa), (b, _qb)) = parked();
    a.post_send(&mut qa, write_to(&b), &[]);
    for _ in 0..100 {
        world.shard.poll(world.now);
    }
    assert_eq!(a.statuses(&mut qa.cq), [], "nobody looks there");
    world.hear();
    world.shard.poll(world.now);
    assert_eq!(a.statuses(&mut qa.cq), DONE);
    assert!(!a.asked_to_kick());
    rest(&mut world);
    assert!(a.asked_to_kick() && b.asked_to_kick(), "parked again");
}

#[test]
fn a_post_before_the_last_look_keeps_a_nic_awake() {
    let (mut world, (a, mut qa), (b, _qb)) = parked();
    world.shard.kicked(a.nic);
    for _ in 0..1000 {
        // The kick does not come: it is the look that finds it, whichever round it falls into.
        world.shard.poll(world.now);
        if a.asked_to_kick() {
            world.shard.kicked(a.nic);
        }
        a.post_send(&mut qa, write_to(&b), &[]);
        world.shard.poll(world.now);
        assert_eq!(a.statuses(&mut qa.cq), DONE);
    }
}

/// So many contexts more.
pub(super) fn contexts(world: &mut World, (guest, host): (&mut Guest, u8), count: usize) {
    generous(world, guest, host);
    for _ in 0..count {
        let page = guest.alloc(4096);
        let db_page = Ring::page(&guest.space, page).unwrap();
        world.ok(guest, 0, Command::ContextCreate { db_page });
    }
}

#[test]
fn a_kick_during_the_last_look_is_not_forgotten() {
    let (mut world, (mut a, mut qa), (b, _qb)) = parked();
    // More than one piece of a last look.
    contexts(&mut world, (&mut a, 1), 400);
    let mut seen = 0;
    for rounds in 0..40 {
        world.shard.kicked(a.nic);
        while !a.asked_to_kick() {
            world.shard.poll(world.now);
        }
        // The look goes on for some rounds, and passes the page of this queue in one of them.
        (0..rounds).for_each(|_| poll(&mut world));
        seen += u32::from(a.statuses(&mut qa.cq).len() == 1);
        a.post_send(&mut qa, write_to(&b), &[]);
        world.hear();
        (0..100).for_each(|_| poll(&mut world));
        assert_eq!(a.statuses(&mut qa.cq), DONE, "after {rounds} rounds");
    }
    assert_eq!(seen, 0);
}

#[test]
fn a_message_a_deadline_and_a_command_bring_a_nic_back() {
    let (mut world, (a, mut qa), (b, mut qb)) = parked();
    // A message: its completion is the receiver's news.
    b.post_receive(&mut qb, 7, &[b.sge(0, 8)]);
    rest(&mut world);
    assert!(b.asked_to_kick());
    b.arm(&qb.cq, arm::ANY);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.hear();
    world.shard.poll(world.now);
    assert!(!b.asked_to_kick(), "it has something to tell");
    world.settle();
    assert_eq!(b.completion_events().len(), 1);
    assert_eq!((a.statuses(&mut qa.cq).len(), b.statuses(&mut qb.cq).len()), (1, 1));
    // A deadline: the sender waits for a receive that nobody posts.
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    rest(&mut world);
    assert!(a.asked_to_kick() && world.shard.next_deadline().is_some());
    world.advance(2_000_000_000);
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::RNR_RETRY_EXC_ERR)]);
    // A command.
    rest(&mut world);
    assert!(a.asked_to_kick());
    world.ok(&a, 0, Command::Keepalive);
    assert!(!a.asked_to_kick());
}

#[test]
fn a_nic_that_is_parked_can_be_paused_reset_and_removed() {
    let (mut world, (mut a, mut qa), (b, _qb)) = parked();
    world.shard.pause(a.nic);
    rest(&mut world);
    a.post_send(&mut qa, write_to(&b), &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), []);
    world.shard.resume(a.nic);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), DONE);
    rest(&mut world);
    world.shard.memory_changed(a.nic, AddressSpace::default());
    world.settle();
    assert_eq!(a.asynchronous().len(), 1, "the NIC fails, parked or not");
    world.shard.reset(a.nic);
    rest(&mut world);
    a.write(0, &[0; 64]);
    world.start_again(&mut a);
    assert!(!a.asked_to_kick());
    rest(&mut world);
    let (old, gid) = (a.nic, a.gid);
    world.shard.remove_nic(old);
    rest(&mut world);
    world.shard.kicked(old);
    assert_eq!(world.shard.status(old).map(|seen| seen.ready), None);
    let mut again = world.guest(1, 1);
    assert_eq!((again.nic, again.gid), (old, gid), "the number is free");
    let mut b = b;
    let (mut qa, _qb) = world.pair(&mut again, &mut b, qpt::RC);
    rest(&mut world);
    again.post_send(&mut qa, write_to(&b), &[]);
    world.settle();
    assert_eq!(again.statuses(&mut qa.cq), DONE);
}

#[test]
fn the_workers_sleep_passes_those_that_are_parked() {
    let (mut world, (a, mut qa), (b, _qb)) = parked();
    assert_eq!(world.shard.prepare_sleep(), Look::Clear);
    world.shard.wake();
    assert!(a.asked_to_kick() && b.asked_to_kick(), "they are still parked");
    a.post_send(&mut qa, write_to(&b), &[]);
    assert_eq!(world.shard.prepare_sleep(), Look::Clear, "the kick wakes the worker");
    world.hear();
    world.shard.wake();
    world.shard.poll(world.now);
    assert_eq!(a.statuses(&mut qa.cq), DONE);
}

#[test]
fn a_nic_that_becomes_awake_during_the_workers_last_look_is_not_passed_by() {
    let shard = Shard::new(Box::new(Lcg(7))).with_clock(Box::new(Hasty::default()));
    let (mut world, (a, mut qa), (mut b, _qb)) = parked_in(World::of(shard));
    contexts(&mut world, (&mut b, 2), 400);
    assert!(a.asked_to_kick() && !b.asked_to_kick());
    let mut look = world.shard.prepare_sleep();
    assert_eq!(look, Look::More);
    a.post_send(&mut qa, write_to(&b), &[]);
    world.hear();
    while look == Look::More {
        look = world.shard.look_on();
    }
    assert_eq!(look, Look::Found);
    world.shard.wake();
    poll(&mut world);
    assert_eq!(a.statuses(&mut qa.cq), DONE);
}

/// A clock by which each piece of work takes fourteen times what it is charged.
#[derive(Clone, Debug, Default)]
struct Late(Arc<AtomicU64>);

impl Clock for Late {
    fn now(&self) -> Nanos {
        self.0.fetch_add(14_000, Ordering::Relaxed)
    }
}

/// Rounds that have no time to look everywhere have time to do what they found all the same.
#[test]
fn looking_at_many_leaves_time_to_serve_them() {
    // Visited within no time, and more than that.
    [30, 60].into_iter().for_each(look_and_serve);
}

fn look_and_serve(many: u8) {
    let clock = Late::default();
    let shard = Shard::new(Box::new(Lcg(7))).with_clock(Box::new(clock.clone()));
    let mut world = World::of(shard);
    world.ram = 1 << 20;
    let mut all: Vec<_> = (1..=many)
        .map(|host| {
            let mut guest = world.guest(1, host);
            contexts(&mut world, (&mut guest, host), 20);
            let qp = world.qp(&mut guest, qpt::RC, 4, None);
            world.connect(&guest, &qp, qpt::RC, (qp.qpn, guest.gid));
            (guest, qp)
        })
        .collect();
    for (guest, qp) in &mut all {
        guest.post_send(qp, write_to(guest), &[]);
    }
    for _ in 0..many / 2 {
        world.now = clock.now();
        poll(&mut world);
    }
    let done = all.iter_mut().map(|(guest, qp)| guest.statuses(&mut qp.cq).len()).sum::<usize>();
    assert_eq!(done, usize::from(many), "more than one a round");
}

/// Nor are those who wait for a receive woken one a round.
#[test]
fn looking_at_many_leaves_time_to_wake_who_waits() {
    const MANY: usize = 16;
    let clock = Late::default();
    let shard = Shard::new(Box::new(Lcg(7))).with_clock(Box::new(clock.clone()));
    let mut world = World::of(shard);
    world.ram = 1 << 20;
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    generous(&mut world, &a, 1);
    generous(&mut world, &b, 2);
    let mut all: Vec<_> = (0..MANY)
        .map(|_| {
            let [one, other] = [&mut a, &mut b].map(|guest| world.qp(guest, qpt::RC, 4, None));
            for (guest, qp, peer) in
                [(&a, &one, (other.qpn, b.gid)), (&b, &other, (one.qpn, a.gid))]
            {
                // 655 ms: longer than all of this.
                let slow = abi::QpAttr { min_rnr_timer: 0, ..rtr_attr(qpt::RC, peer) };
                for attr in [init_attr(qpt::RC), slow, rts_attr(qpt::RC)] {
                    world.modify(guest, qp, attr).unwrap();
                }
            }
            (one, other)
        })
        .collect();
    for (one, _) in &mut all {
        a.post_send(one, wqe(opcode::SEND, SIGNALED, 1), &[]);
    }
    let rounds = |world: &mut World, count: usize| {
        for _ in 0..count {
            world.now = clock.now();
            poll(world);
        }
    };
    rounds(&mut world, 100);
    let mut crowd: Vec<_> = (3..30).map(|host| (world.guest(1, host), host)).collect();
    for (guest, host) in &mut crowd {
        contexts(&mut world, (guest, *host), 20);
    }
    for (_, other) in &mut all {
        b.post_receive(other, 1, &[]);
    }
    rounds(&mut world, 10);
    let done = all.iter_mut().map(|(one, _)| a.statuses(&mut one.cq).len()).sum::<usize>();
    assert_eq!(done, MANY);
}

/// Many that post now and then go to sleep as fast as they wake.
#[test]
fn many_that_are_quiet_are_parked_within_some_rounds() {
    const MANY: u8 = 200;
    let mut world = World::new();
    world.ram = 1 << 20;
    let all: Vec<_> = (1..=MANY).map(|host| world.guest(1, host)).collect();
    world.settle();
    for _ in 0..50 {
        world.now += 10_000;
        poll(&mut world);
    }
    let asked = all.iter().filter(|guest| guest.asked_to_kick()).count();
    assert_eq!(asked, usize::from(MANY) - 4, "a few are visited in any case");
}

/// Those who are awake have their idle doorbell pages looked at in turn. Where somebody's work
/// waits already, few of them.
#[test]
fn who_has_work_does_not_wait_for_looks_at_others_idle_pages() {
    const CONTEXTS: usize = 100;
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let request = write_to(&b);
    // What a round is charged that finds a post, and one that finds none.
    let mut rounds = |world: &mut World, a: &Guest| {
        world.settle();
        [true, false].map(|posts| {
            if posts {
                a.post_send(&mut qa, request, &[]);
            }
            let before = world.shard.charged();
            world.shard.poll(world.now);
            assert_eq!(a.statuses(&mut qa.cq).len(), usize::from(posts));
            world.shard.charged() - before
        })
    };
    let [busy, idle] = rounds(&mut world, &a);
    contexts(&mut world, (&mut b, 2), CONTEXTS);
    let [busy_beside, idle_beside] = rounds(&mut world, &a);
    assert!(idle_beside - idle >= 8 * cost::DOORBELL_PAGE, "an idle round looks at many");
    assert!(busy_beside - busy <= 4 * cost::DOORBELL_PAGE, "{busy} and {busy_beside}");
}

/// However much others have to do, each page has its turn.
#[test]
fn a_page_has_its_turn_beside_one_who_always_has_work() {
    const CONTEXTS: usize = 100;
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    contexts(&mut world, (&mut b, 2), CONTEXTS);
    // Its own page, which comes last, never rang.
    b.become_kernel(&mut world);
    let (_peer, mut late) = world.pair(&mut a, &mut b, qpt::RC);
    world.settle();
    b.post_send(&mut late, write_to(&a), &[]);
    for _ in 0..=CONTEXTS / 4 {
        a.post_send(&mut qa, write_to(&b), &[]);
        world.shard.poll(world.now);
        assert_eq!(a.statuses(&mut qa.cq), DONE);
    }
    assert_eq!(b.statuses(&mut late.cq), DONE);
}
