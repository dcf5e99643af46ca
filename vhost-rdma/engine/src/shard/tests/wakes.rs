//! What ends a wait (a receive, a peer that appears) ends it also where another process goes on
//! meanwhile: nobody waits for a timer then that would not have.

use virtio_rdma_abi::{self as abi, opcode, qpt, send_flags};

use super::apart::{apart, remote};
use crate::shard::testing::air::{Air, Faults};
use crate::shard::testing::driver::{Guest, Qp, World, init_attr, rtr_attr, rts_attr, wqe};

const SIGNALED: u8 = send_flags::SIGNALED;
/// How long parcels are on their way.
const LAG: u32 = 1_000_000;
/// Longer than that, and shorter than all timers.
const SOON: u64 = 20_000_000;
/// The longest RNR timer there is, 655 ms (IBTA table 45).
const LONG_RNR: u8 = 0;

fn slow() -> Air {
    Air::new(Faults { lag: LAG, ..Faults::default() }, 3)
}

/// Two queue pairs of which the first waits for a receive: for 655 ms, if nobody wakes it.
fn waits_for_a_receive(world: &mut World, a: &mut Guest, b: &mut Guest) -> (Qp, Qp) {
    let (mut qa, qb) = (world.qp(a, qpt::RC, 16, None), world.qp(b, qpt::RC, 16, None));
    for (guest, qp, peer) in [(&*a, &qa, (qb.qpn, b.gid)), (&*b, &qb, (qa.qpn, a.gid))] {
        let rtr = abi::QpAttr { min_rnr_timer: LONG_RNR, ..rtr_attr(qpt::RC, peer) };
        for attr in [init_attr(qpt::RC), rtr, rts_attr(qpt::RC)] {
            world.modify(guest, qp, attr).unwrap();
        }
    }
    let from = a.alloc(8);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, 8)]);
    world.settle_all();
    assert!(a.statuses(&mut qa.cq).is_empty(), "there is no receive");
    assert!(world.next_deadline().is_some_and(|at| at > world.now + SOON));
    (qa, qb)
}

fn receive(b: &mut Guest, qb: &mut Qp) {
    let to = b.alloc(8);
    b.post_receive(qb, 2, &[b.sge(to, 8)]);
}

/// After so many rounds another process goes on: what is said in the first is on its way then.
fn hand_over_after(rounds: usize) {
    let (mut world, mut a, mut b) = apart(slow());
    let (mut qa, mut qb) = waits_for_a_receive(&mut world, &mut a, &mut b);
    receive(&mut b, &mut qb);
    (0..rounds).for_each(|_| _ = world.round());
    let under_way = world.beside.as_ref().and_then(|(_, air)| air.next_arrival());
    assert_eq!(under_way.is_some(), rounds > 0);
    world.hand_over(&mut [&mut a, &mut b]);
    world.advance(SOON);
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "{rounds} rounds");
}

#[test]
fn a_wake_that_is_on_its_way_at_a_save_is_not_lost() {
    (0..3).for_each(hand_over_after);
}

/// By the number of its NIC, since that was on the shard of whoever says so.
#[test]
fn nor_is_one_for_who_has_moved() {
    for rounds in 1..3 {
        let (mut world, mut a, mut b) = apart(slow());
        assert!(world.change_shard(&mut a));
        let (mut qa, mut qb) = waits_for_a_receive(&mut world, &mut a, &mut b);
        assert!(world.change_shard(&mut a));
        receive(&mut b, &mut qb);
        (0..rounds).for_each(|_| _ = world.round());
        world.hand_over(&mut [&mut a, &mut b]);
        world.advance(SOON);
        assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "{rounds} rounds");
    }
}

/// Who waits for ever, as a timeout of 0 has it, would do so.
#[test]
fn a_peer_that_appears_during_a_save_is_found() {
    for rounds in 0..3 {
        let (mut world, mut a, mut b) = apart(slow());
        let (mut qa, qb) =
            (world.qp(&mut a, qpt::RC, 16, None), world.qp(&mut b, qpt::RC, 16, None));
        let rts = abi::QpAttr { timeout: 0, ..rts_attr(qpt::RC) };
        for attr in [init_attr(qpt::RC), rtr_attr(qpt::RC, (qb.qpn, b.gid)), rts] {
            world.modify(&a, &qa, attr).unwrap();
        }
        world.modify(&b, &qb, init_attr(qpt::RC)).unwrap();
        let (from, to) = (a.alloc(8), b.alloc(8));
        a.post_send(&mut qa, remote(opcode::RDMA_WRITE, 1, (&b, to)), &[a.sge(from, 8)]);
        world.settle_all();
        world.modify(&b, &qb, rtr_attr(qpt::RC, (qa.qpn, a.gid))).unwrap();
        (0..rounds).for_each(|_| _ = world.round());
        world.hand_over(&mut [&mut a, &mut b]);
        world.advance(SOON);
        assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "{rounds} rounds");
    }
}

/// NICs are placed anew in another process: whoever was beside its peer may be on another shard.
#[test]
fn who_waits_finds_its_peer_on_whatever_shard_both_are_now() {
    for places in [[0, 1], [1, 0], [1, 1], [0, 0]] {
        for begins_together in [false, true] {
            let (mut world, mut a, mut b) = apart(Air::still());
            if begins_together {
                assert!(world.change_shard(&mut a));
            }
            let (mut qa, mut qb) = waits_for_a_receive(&mut world, &mut a, &mut b);
            world.replace(&mut [&mut a, &mut b], &places);
            [0, 1].into_iter().for_each(|on| world.go_on(on, &[&mut a, &mut b]));
            world.settle_all();
            assert!(a.statuses(&mut qa.cq).is_empty(), "there is no receive");
            receive(&mut b, &mut qb);
            world.settle_all();
            assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "{places:?} {begins_together}");
        }
    }
}

/// Workers are told one after the other that their NICs run: what comes from one to a NIC that is
/// to run in a moment waits for it, and not for a timeout.
#[test]
fn a_shard_that_goes_on_first_is_answered_by_the_one_that_is_next() {
    for first in [0, 1] {
        let (mut world, mut a, mut b) = apart(Air::still());
        let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        world.settle_all();
        let word = [a.alloc(8), b.alloc(8)];
        a.post_send(&mut qa, remote(opcode::RDMA_WRITE, 1, (&b, word[1])), &[a.sge(word[0], 8)]);
        b.post_send(&mut qb, remote(opcode::RDMA_WRITE, 2, (&a, word[0])), &[b.sge(word[1], 8)]);
        world.replace(&mut [&mut a, &mut b], &[0, 1]);
        world.go_on(first, &[&mut a, &mut b]);
        world.settle_all();
        world.go_on(1 - first, &[&mut a, &mut b]);
        world.settle_all();
        assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "{first} is first: no time has passed");
        assert_eq!(b.statuses(&mut qb.cq), [(2, 0)], "{first} is first");
        let timeouts = [&a, &b].map(|guest| world.status(guest).counters.ack_timeouts);
        assert_eq!(timeouts, [0; 2]);
    }
}
