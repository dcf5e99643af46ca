//! What can be seen where nothing crosses: whoever looks finds all of it done, and nothing of the
//! link's own left.

use virtio_rdma_abi::{self as abi, opcode, qpt, send_flags};

use super::connected::{Moderated, US};
use crate::memory::Ring;
use crate::shard::testing::driver::{Guest, World, av, limits, wqe};
use crate::shard::{Command, Limits, NicSettings, Reply, Status, control_offset};

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

/// Keys and objects of other contexts are not looked at.
#[test]
fn the_end_of_a_context_costs_what_it_has() {
    let mut world = World::new();
    world.ram = 64 << 20;
    let many = Limits {
        max_mrs: 1 << 16,
        max_pds: 1 << 14,
        max_ahs: 1 << 14,
        max_cqs: 4096,
        max_srqs: 512,
        max_qps: 512,
        ..limits()
    };
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
    let (pd, mine) = (a.pd, a.ctx);
    let beside = |what: &str, world: &mut World, a: &mut Guest| {
        let beside = costs(world, a);
        assert!(beside <= 2 * alone, "{alone} ns alone, {beside} ns beside {what} of another");
    };
    (0..20_000).for_each(|_| {
        world.ok(&a, mine, Command::MwAlloc { pdn: pd, kind: abi::mw_type::TYPE1 });
    });
    beside("20 000 keys", &mut world, &mut a);
    (0..10_000).for_each(|_| _ = world.ok(&a, mine, Command::PdCreate));
    beside("10 000 domains", &mut world, &mut a);
    let gid = a.gid;
    (0..10_000).for_each(|_| _ = world.ok(&a, mine, Command::AhCreate { pdn: pd, av: av(gid) }));
    beside("10 000 address handles", &mut world, &mut a);
    let cqs: Vec<_> = (0..2000).map(|_| world.cq(&mut a, 16)).collect();
    beside("2000 CQs", &mut world, &mut a);
    (0..200).for_each(|_| _ = world.qp_on(&mut a, (qpt::RC, 4, None), cqs[0]));
    beside("200 QPs", &mut world, &mut a);
    for _ in 0..300 {
        let (_, ring) = a.ring(control_offset(4 << 7) + 128);
        let req = abi::SrqCreateReq {
            pdn: pd.into(),
            entries: 4.into(),
            max_wr: 4.into(),
            max_sge: 1.into(),
            log2_stride: 7,
            ..abi::SrqCreateReq::default()
        };
        world.ok(&a, mine, Command::SrqCreate { req, ring });
    }
    beside("300 SRQs", &mut world, &mut a);
    // What it has itself ends with it, in steps, and so it does in another process.
    world.hand_over(&mut [&mut a]);
    world.ok(&a, mine, Command::ContextDestroy);
    let left = world.shard.status(a.nic).unwrap().objects;
    let counts = [left.contexts, left.pds, left.mrs, left.ahs, left.cqs, left.srqs, left.qps];
    assert_eq!(counts, [0; 7]);
}
