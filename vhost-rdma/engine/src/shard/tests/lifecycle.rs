//! Objects come and go: limits, ownership, busy objects, reset, pause, memory that goes away, SRQs.

use std::sync::Arc;

use virtio_rdma_abi::{self as abi, event, opcode, qps, qpt, send_flags, srq_mask, wc_status};
use zerocopy::little_endian::U32;

use crate::memory::{AddressSpace, PageList};
use crate::shard::testing::driver::{Guest, RQ_STRIDE, init_attr, rtr_attr, state_attr, wqe};
use crate::shard::{Command, Objects, Reply, Status, control_offset};

const SIGNALED: u8 = send_flags::SIGNALED;

fn page(guest: &Guest, addr: u64) -> Arc<crate::memory::Translation> {
    let list = PageList { addr, npages: 1, page_shift: 12, ..PageList::default() };
    Arc::new(list.resolve(&guest.space, 4096).unwrap())
}

#[test]
fn limits_are_honoured_to_the_last_object() {
    let mut world = super::world();
    let guest = world.guest(1, 1);
    for _ in 1..crate::shard::testing::driver::limits().max_pds {
        world.ok(&guest, guest.ctx, Command::PdCreate);
    }
    assert_eq!(world.execute(&guest, guest.ctx, Command::PdCreate).unwrap_err(), Status::NOMEM);
    for _ in 1..crate::shard::testing::driver::limits().max_mrs {
        world.register(&guest, 0, page(&guest, 0x8000), 1).unwrap();
    }
    assert_eq!(world.register(&guest, 0, page(&guest, 0x8000), 1), Err(Status::NOMEM));
}

#[test]
fn objects_belong_to_their_context() {
    let mut world = super::world();
    let guest = world.guest(1, 1);
    let stranger = guest.ctx + 1;
    for command in
        [Command::PdDestroy(guest.pd), Command::MrDereg(guest.key), Command::CqDestroy(0)]
    {
        assert_eq!(world.execute(&guest, stranger, command).unwrap_err(), Status::NOENT);
    }
    let dma = Command::MrDma { pdn: guest.pd, access: 1 };
    assert_eq!(world.execute(&guest, guest.ctx, dma).unwrap_err(), Status::PERM);
}

#[test]
fn what_is_in_use_is_busy() {
    let mut world = super::world();
    let mut guest = world.guest(1, 1);
    let qp = world.qp(&mut guest, qpt::RC, 4, None);
    let busy = [Command::PdDestroy(guest.pd), Command::CqDestroy(qp.cq.cqn)];
    for command in busy {
        assert_eq!(world.execute(&guest, guest.ctx, command).unwrap_err(), Status::BUSY);
    }
    world.ok(&guest, guest.ctx, Command::QpDestroy(qp.qpn));
    world.ok(&guest, guest.ctx, Command::CqDestroy(qp.cq.cqn));
    world.ok(&guest, guest.ctx, Command::MrDereg(guest.key));
    world.ok(&guest, guest.ctx, Command::PdDestroy(guest.pd));
}

#[test]
fn a_context_goes_with_all_it_owns() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    world.ok(&a, a.ctx, Command::ContextDestroy);
    world.advance(1_000_000_000);
    assert_eq!(world.status(&a).objects, Objects::default());
}

#[test]
fn nothing_before_init_and_nothing_left_after_reset() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (_qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    world.at(a.on).reset(a.nic);
    assert_eq!(world.execute(&a, 0, Command::QueryDevice).unwrap_err(), Status::STATE);
    assert_eq!(world.status(&a).objects, Objects::default());
    b.post_send(&mut qb, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.advance(1_000_000_000);
    assert_eq!(b.statuses(&mut qb.cq), [(1, wc_status::RETRY_EXC_ERR)]);
}

#[test]
fn a_paused_nic_touches_nothing_and_goes_on_later() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let to = b.alloc(64);
    b.post_receive(&mut qb, 1, &[b.sge(to, 64)]);
    world.settle();
    world.at(b.on).pause(b.nic);
    let (from, bytes) = a.pattern(16, 3);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 2), &[a.sge(from, 16)]);
    world.advance(10_000_000);
    assert_eq!(b.read(to, 16), [0; 16]);
    world.at(b.on).resume(b.nic);
    world.advance(100_000_000);
    assert_eq!(a.statuses(&mut qa.cq), [(2, wc_status::SUCCESS)]);
    assert_eq!(b.read(to, 16), bytes);
}

#[test]
fn memory_that_goes_away_takes_its_objects_along() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (_qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let elsewhere = AddressSpace::anonymous(&[(0, 1 << 20)]).unwrap();
    world.at(a.on).memory_changed(a.nic, elsewhere);
    while world.at(a.on).follow_memory(a.nic) {}
    world.settle();
    assert!(world.status(&a).failed);
    assert!(a.asynchronous().contains(&(event::DEVICE_FATAL, 0)));
    assert_eq!(world.execute(&a, a.ctx, Command::PdCreate).unwrap_err(), Status::FATAL);
    assert!(!world.status(&b).failed);
}

#[test]
fn addresses_are_ones_own_and_unique() {
    let mut world = super::world();
    let (a, b) = (world.guest(1, 1), world.guest(1, 2));
    let set = |gid| Command::GidSet { index: 5, gid };
    assert_eq!(world.execute(&a, 0, set(Some(b.gid))).unwrap_err(), Status::EXIST);
    world.ok(&b, 0, Command::GidSet { index: 1, gid: None });
    world.ok(&a, 0, set(Some(b.gid)));
    let outside = Command::GidSet { index: 9999, gid: None };
    assert_eq!(world.execute(&a, 0, outside).unwrap_err(), Status::INVAL);
}

#[test]
fn transitions_take_exactly_their_attributes() {
    let mut world = super::world();
    let mut a = world.guest(1, 1);
    let qp = world.qp(&mut a, qpt::RC, 4, None);
    let mut missing = init_attr(qpt::RC);
    missing.mask = U32::new(missing.mask.get() & !abi::attr_mask::PORT);
    let mut surplus = init_attr(qpt::RC);
    surplus.mask = U32::new(surplus.mask.get() | abi::attr_mask::QKEY);
    let mut bad_port = init_attr(qpt::RC);
    bad_port.port_num = 2;
    for attr in [missing, surplus, bad_port, rtr_attr(qpt::RC, (2, a.gid)), state_attr(qps::RTS)] {
        assert_eq!(world.modify(&a, &qp, attr), Err(Status::INVAL));
        assert_eq!(world.query(&a, &qp).qp_state, qps::RESET);
    }
    world.modify(&a, &qp, init_attr(qpt::RC)).unwrap();
    world.modify(&a, &qp, rtr_attr(qpt::RC, (77, a.gid))).unwrap();
    let attr = world.query(&a, &qp);
    assert_eq!((attr.dest_qpn.get(), attr.min_rnr_timer, attr.path_mtu), (77, 12, 5));
    assert_eq!(attr.ah.dgid, a.gid);
}

#[test]
fn a_drained_queue_says_so() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    let mut drain = state_attr(qps::SQD);
    drain.mask = U32::new(abi::attr_mask::STATE | abi::attr_mask::EN_SQD_ASYNC_NOTIFY);
    drain.en_sqd_async_notify = 1;
    world.modify(&a, &qa, drain).unwrap();
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 2), &[]);
    world.settle();
    assert_eq!(world.query(&a, &qa).sq_draining, 1);
    assert_eq!(world.modify(&a, &qa, state_attr(qps::RTS)), Err(Status::INVAL));
    b.post_receive(&mut qb, 1, &[]);
    b.post_receive(&mut qb, 2, &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "the second send has not begun");
    assert!(a.asynchronous().contains(&(event::SQ_DRAINED, qa.qpn)));
    world.modify(&a, &qa, state_attr(qps::RTS)).unwrap();
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(2, 0)]);
}

#[test]
fn a_shared_queue_serves_many_and_tells_when_it_runs_low() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let entries = 8;
    let bytes = control_offset(u64::from(entries) << RQ_STRIDE) + 128;
    let (at, ring) = b.ring(bytes);
    let req = abi::SrqCreateReq {
        pdn: U32::new(b.pd),
        entries: U32::new(entries),
        max_wr: U32::new(entries),
        max_sge: U32::new(1),
        log2_stride: RQ_STRIDE,
        ..abi::SrqCreateReq::default()
    };
    let Reply::Srq(srq) = world.ok(&b, b.ctx, Command::SrqCreate { req, ring }) else {
        panic!("not an SRQ")
    };
    let shared = (at, entries, srq.db.get());
    let (mut qa, mut other) =
        (world.qp(&mut a, qpt::RC, 16, None), world.qp(&mut a, qpt::RC, 16, None));
    let qb = world.qp(&mut b, qpt::RC, 16, Some(srq.srqn.get()));
    let qc = world.qp_on(&mut b, (qpt::RC, 16, Some(srq.srqn.get())), qb.cq);
    for (mine, theirs) in [(&qa, &qb), (&other, &qc)] {
        world.connect(&a, mine, qpt::RC, (theirs.qpn, b.gid));
        world.connect(&b, theirs, qpt::RC, (mine.qpn, a.gid));
    }
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    let limit = abi::SrqModifyReq {
        srqn: srq.srqn,
        mask: U32::new(srq_mask::LIMIT),
        limit: U32::new(2),
        ..Default::default()
    };
    world.ok(&b, b.ctx, Command::SrqModify { req: limit, ring: None });
    let to = b.alloc(4096);
    for n in 0..3 {
        b.post_shared(shared, n, b.sge(to, 64));
    }
    world.settle();
    a.post_send(&mut other, wqe(opcode::SEND, SIGNALED, 2), &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)]);
    assert_eq!(a.statuses(&mut other.cq), [(2, 0)]);
    let mut cq = qb.cq;
    assert_eq!(b.statuses(&mut cq), [(0, 0), (1, 0)]);
    let limits = b
        .asynchronous()
        .iter()
        .filter(|e| **e == (event::SRQ_LIMIT_REACHED, srq.srqn.get()))
        .count();
    assert_eq!(limits, 1);
    let Reply::SrqAttr(attr) = world.ok(&b, b.ctx, Command::SrqQuery(srq.srqn.get())) else {
        panic!("no answer")
    };
    assert_eq!(attr.limit.get(), 0, "the limit fires once");
    world.modify(&b, &qc, state_attr(qps::ERR)).unwrap();
    world.settle();
    assert!(b.asynchronous().contains(&(event::QP_LAST_WQE_REACHED, qc.qpn)));
    assert!(b.drain(&mut cq).is_empty(), "receives of a shared queue are not flushed");
}

#[test]
fn a_reset_qp_forgets_and_begins_again() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    for round in 0..3 {
        b.post_receive(&mut qb, round, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, round), &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 100), &[]);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(round, 0)]);
        for (guest, qp) in [(&a, &mut qa), (&b, &mut qb)] {
            world.modify(guest, qp, state_attr(qps::RESET)).unwrap();
            qp.posted = [0; 2];
            guest.raw_reset(qp);
        }
        world.advance(1_000_000_000);
        assert!(a.drain(&mut qa.cq).is_empty(), "nothing is completed by a reset");
        world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
        world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    }
}

#[test]
fn an_index_left_from_before_a_reset_does_not_hide_the_next_posts() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    for round in 0..3 {
        b.post_receive(&mut qb, round, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, round), &[]);
        for (guest, qp) in [(&a, &qa), (&b, &qb)] {
            world.modify(guest, qp, state_attr(qps::RESET)).unwrap();
        }
        // The device looks between its answer and the driver's stores.
        world.settle();
        for (guest, qp) in [(&a, &mut qa), (&b, &mut qb)] {
            qp.posted = [0; 2];
            guest.raw_reset(qp);
        }
        world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
        world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
        b.post_receive(&mut qb, round, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 10 + round), &[]);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(10 + round, 0)], "round {round}");
        assert_eq!(b.statuses(&mut qb.cq), [(round, 0)]);
        for (guest, qp) in [(&a, &mut qa), (&b, &mut qb)] {
            world.modify(guest, qp, state_attr(qps::RESET)).unwrap();
            qp.posted = [0; 2];
            guest.raw_reset(qp);
        }
        world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
        world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    }
}
