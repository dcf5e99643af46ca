//! What can be seen where nothing crosses: whoever looks finds all of it done, and nothing of the
//! link's own left.

use virtio_rdma_abi::{self as abi, opcode, qpt, send_flags};

use super::connected::{Moderated, US};
use crate::memory::Ring;
use crate::shard::testing::driver::{Guest, World, limits, wqe};
use crate::shard::{Command, Limits, NicSettings, Reply, Status};

#[test]
fn a_moderated_event_leaves_no_timer_behind() {
    let mut moderated = Moderated::new(100, 50);
    moderated.send(1);
    assert!(moderated.world.next_deadline().is_some());
    moderated.world.advance(1_000 * US);
    assert_eq!(moderated.events(), 1);
    assert_eq!(moderated.world.next_deadline(), None);
}

#[test]
fn posted_work_counts_when_a_cq_shrinks() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    for n in 0..6 {
        b.post_receive(&mut qb, n, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, send_flags::SIGNALED, n), &[]);
    }
    let (_, ring) = a.ring(1024);
    let shrink = Command::CqResize { cqn: qa.cq.cqn, entries: 4, requested: 4, ring };
    assert_eq!(world.execute(&a, a.ctx, shrink).unwrap_err(), Status::INVAL);
}

/// Keys of other contexts are not looked at.
#[test]
fn the_end_of_a_context_costs_what_it_has() {
    let mut world = World::new();
    let many = Limits { max_mrs: 1 << 16, ..limits() };
    let mut a = world.guest_with(1, 1, |shard, settings, port| {
        shard.add_nic(NicSettings { limits: many, ..settings }, port)
    });
    let costs = |world: &mut World, a: &mut Guest| {
        let at = a.alloc(4096);
        let db_page = Ring::page(&a.space, at).unwrap();
        let Reply::Context(context) = world.ok(a, 0, Command::ContextCreate { db_page }) else {
            panic!("not a context")
        };
        let before = world.shard.charged();
        world.ok(a, context.ctx.get(), Command::ContextDestroy);
        world.shard.charged() - before
    };
    let alone = costs(&mut world, &mut a);
    for _ in 0..20_000 {
        world.ok(&a, a.ctx, Command::MwAlloc { pdn: a.pd, kind: abi::mw_type::TYPE1 });
    }
    let beside = costs(&mut world, &mut a);
    assert!(beside <= 2 * alone, "{alone} ns alone, {beside} ns beside 20 000 keys of another");
    assert_eq!(world.shard.status(a.nic).unwrap().objects.contexts, 1);
}
