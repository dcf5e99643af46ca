//! The state machine with work under way, and limits that are reached.

use std::sync::Arc;

use virtio_rdma_abi::{
    self as abi, attr_mask as m, event, opcode, qps, qpt, rereg, send_flags, srq_mask, wc_status,
};
use zerocopy::little_endian::{U32, U64};

use super::datagram;
use crate::link::PIECE;
use crate::memory::{PageList, Ring, Translation};
use crate::shard::testing::driver::{
    Guest, Qp, RQ_STRIDE, World, init_attr, limits, rtr_attr, rts_attr, state_attr, wqe,
};
use crate::shard::{Command, Reply, Status, control_offset};

const SIGNALED: u8 = send_flags::SIGNALED;

fn drain(notify: Option<u8>) -> abi::QpAttr {
    let mut attr = state_attr(qps::SQD);
    if let Some(notify) = notify {
        attr.mask = U32::new(m::STATE | m::EN_SQD_ASYNC_NOTIFY);
        attr.en_sqd_async_notify = notify;
    }
    attr
}

fn drained(guest: &Guest) -> usize {
    guest.asynchronous().iter().filter(|(kind, _)| *kind == event::SQ_DRAINED).count()
}

/// A datagram queue pair, and a sink.
fn datagrams(entries: u32) -> (World, Guest, Qp, abi::SqWqe) {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let sink = datagram::ready(&mut world, &mut b);
    let cq = world.cq(&mut a, 1024);
    let qp = world.qp_on(&mut a, (qpt::UD, entries, None), cq);
    for attr in [init_attr(qpt::UD), rtr_attr(qpt::UD, (0, [0; 16])), rts_attr(qpt::UD)] {
        world.modify(&a, &qp, attr).unwrap();
    }
    let ah = datagram::handle(&mut world, &a, b.gid);
    let request = datagram::datagram(ah, sink.qpn, 0x1111);
    (world, a, qp, request)
}

/// IBTA 10.3.1.5: what stands behind a send that failed is flushed, in RTS by then or not, also
/// what no round has seen yet; and what is posted from then on is sent.
#[test]
fn whoever_leaves_sqe_at_once_has_all_flushed_that_it_posted_before() {
    for (seen, before) in [(1, 300), (0, 300), (1, 40)] {
        let (mut world, a, mut qp, good) = datagrams(1024);
        let bad = abi::SqWqe { opcode: 0x55, ..good };
        a.post_send(&mut qp, bad, &[]);
        let unseen = 5;
        (1..before).for_each(|_| a.post_send(&mut qp, good, &[]));
        while world.query(&a, &qp).qp_state != qps::SQE {
            world.round();
        }
        (0..seen).for_each(|_| _ = world.round());
        (0..unseen).for_each(|_| a.post_send(&mut qp, good, &[]));
        world.modify(&a, &qp, state_attr(qps::RTS)).unwrap();
        a.post_send(&mut qp, good, &[]);
        world.settle();
        let all: Vec<u8> = a.statuses(&mut qp.cq).iter().map(|(_, status)| *status).collect();
        let mut expected = vec![wc_status::WR_FLUSH_ERR; before + unseen + 1];
        expected[0] = wc_status::LOC_QP_OP_ERR;
        expected[before + unseen] = wc_status::SUCCESS;
        assert!(all == expected, "{seen} rounds, {before} posted: {all:?}");
        assert_eq!(world.query(&a, &qp).qp_state, qps::RTS);
    }
}

/// A completion that finds no place is the end of its queue pair, whatever it tells of.
#[test]
fn a_send_that_fails_into_a_full_cq_leads_to_err() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let small = world.cq(&mut a, 1);
    let mut qa = world.qp_on(&mut a, (qpt::UC, 16, None), small);
    let qb = world.qp(&mut b, qpt::UC, 16, None);
    world.connect(&a, &qa, qpt::UC, (qb.qpn, b.gid));
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.settle();
    a.post_send(&mut qa, wqe(0x55, SIGNALED, 2), &[]);
    world.round();
    assert_eq!(world.query(&a, &qa).qp_state, qps::ERR);
    world.settle();
    let events = a.asynchronous();
    assert!(events.contains(&(event::CQ_ERR, small.cqn)), "{events:?}");
    assert!(events.contains(&(event::QP_FATAL, qa.qpn)), "{events:?}");
    assert_eq!(world.query(&a, &qa).qp_state, qps::ERR);
}

/// The notification is asked for with each SQD.
#[test]
fn a_drained_queue_says_so_as_often_as_it_is_asked_to() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    for (notify, events) in [(None, 0), (Some(1), 1), (None, 0), (Some(0), 0), (Some(1), 1)] {
        world.modify(&a, &qa, drain(notify)).unwrap();
        world.settle();
        assert_eq!(drained(&a), events, "{notify:?}");
        world.modify(&a, &qa, state_attr(qps::RTS)).unwrap();
    }
}

/// docs/virtio-rdma.md §8: `sq_draining` is that of SQD.
#[test]
fn a_queue_pair_that_failed_while_it_drained_does_not_drain() {
    let mut world = World::new();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::UC);
    let len = 8 * PIECE;
    let (from, to) = (a.alloc(len.into()), b.alloc(len.into()));
    b.post_receive(&mut qb, 1, &[b.sge(to, len)]);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, len)]);
    world.round();
    world.modify(&a, &qa, drain(Some(1))).unwrap();
    assert_eq!(world.query(&a, &qa).sq_draining, 1, "it has begun");
    // Its memory goes, and it fails.
    world.ok(&a, a.ctx, Command::MrDereg(a.key));
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::LOC_PROT_ERR)]);
    assert_eq!(world.query(&a, &qa).qp_state, qps::SQE);
    assert_eq!(world.query(&a, &qa).sq_draining, 0);
    assert_eq!(drained(&a), 0);
}

/// The limit is of what is registered, and the old memory is not any more.
#[test]
fn a_region_at_the_limit_can_get_other_memory() {
    let mut world = World::new();
    let limit = limits().max_mr_bytes;
    world.ram = usize::try_from(limit).unwrap();
    let a = world.guest(1, 1);
    world.ok(&a, a.ctx, Command::MrDereg(a.key));
    let map = |len: u64| {
        let list = PageList { npages: (len >> 12) as u32, page_shift: 12, ..PageList::default() };
        Arc::new(list.resolve(&a.space, len).unwrap())
    };
    let key = world.register(&a, 0, map(limit), 1).unwrap();
    let change = |len: u64| Command::MrRereg {
        req: abi::MrReregReq {
            lkey: U32::new(key),
            flags: U32::new(rereg::TRANSLATION),
            length: U64::new(len),
            ..abi::MrReregReq::default()
        },
        map: Some(map(len)),
    };
    for len in [limit, 4096, limit, limit - 4096] {
        world.ok(&a, a.ctx, change(len));
        assert_eq!(world.status(&a).objects.mr_bytes, len);
    }
    world.register(&a, 0, map(4096), 1).unwrap();
    assert_eq!(world.execute(&a, a.ctx, change(limit)).unwrap_err(), Status::NOMEM);
    assert_eq!(world.register(&a, 0, map(4096), 1), Err(Status::NOMEM));
    world.ok(&a, a.ctx, change(4096));
    assert_eq!(world.status(&a).objects.mr_bytes, 8192);
}

/// The tables of a page list are large, and a worker serves others, too: it does not end them, also
/// where it has nothing to do with them.
#[test]
fn what_a_refused_command_brings_is_ended_by_who_gave_it() {
    type Refused = fn(Arc<Translation>, [u32; 2]) -> Command;
    let mut world = World::new();
    let mut a = world.guest(1, 1);
    let (cq, nobody) = (world.cq(&mut a, 16).cqn, a.pd + 100);
    let page = |a: &Guest| {
        let list = PageList { addr: 0, npages: 1, page_shift: 12, ..PageList::default() };
        Arc::new(list.resolve(&a.space, 4096).unwrap())
    };
    let refused: [Refused; 6] = [
        |map, [_, pdn]| Command::MrReg { pdn, access: 1, iova: 0, map },
        |map, _| {
            let flags = U32::new(rereg::TRANSLATION);
            let req = abi::MrReregReq { flags, ..abi::MrReregReq::default() };
            Command::MrRereg { req, map: Some(map) }
        },
        |map, _| Command::CqCreate { entries: 3, vector: 0, ring: Ring::new(map) },
        |map, [cqn, _]| Command::CqResize {
            cqn: cqn + 1,
            entries: 4,
            requested: 4,
            ring: Ring::new(map),
        },
        |map, _| Command::SrqCreate { req: abi::SrqCreateReq::default(), ring: Ring::new(map) },
        |map, _| {
            let sq = Some(Ring::new(map));
            Command::QpCreate { req: Box::default(), sq, rq: None }
        },
    ];
    for (n, command) in refused.into_iter().enumerate() {
        let map = page(&a);
        let seen = Arc::downgrade(&map);
        let command = command(map, [cq, nobody]);
        assert!(world.shard.execute(a.nic, a.ctx, command, world.now).is_err(), "{n}");
        assert!(seen.upgrade().is_some(), "command {n}: the worker has ended it");
        drop(world.shard.take_deferred_drops(a.nic));
        assert!(seen.upgrade().is_none(), "command {n}: it is kept");
    }
}

/// docs/virtio-rdma.md §7: no entry crosses a page, in the ring that an SRQ moves to either. The
/// request does not say the stride.
#[test]
fn an_srq_moves_to_no_ring_whose_entries_cross_pages() {
    let mut world = World::new();
    let mut a = world.guest(1, 1);
    let (_, ring) = a.ring(control_offset(4 << RQ_STRIDE) + 128);
    let req = abi::SrqCreateReq {
        pdn: U32::new(a.pd),
        entries: U32::new(4),
        max_wr: U32::new(4),
        max_sge: U32::new(1),
        log2_stride: RQ_STRIDE,
        ..abi::SrqCreateReq::default()
    };
    let Reply::Srq(srq) = world.ok(&a, a.ctx, Command::SrqCreate { req, ring }) else {
        panic!("not an SRQ")
    };
    let at = a.alloc(8192);
    for (offset, fits) in [(64, false), (128, true), (192, false), (0, true)] {
        let list = PageList { addr: at, npages: 2, offset, page_shift: 12, ..PageList::default() };
        let map = list.resolve(&a.space, control_offset(8 << RQ_STRIDE) + 128).unwrap();
        let req = abi::SrqModifyReq {
            srqn: srq.srqn,
            mask: U32::new(srq_mask::MAX_WR),
            max_wr: U32::new(8),
            entries: U32::new(8),
            ..abi::SrqModifyReq::default()
        };
        let ring = Some(Ring::new(Arc::new(map)));
        let answer = world.execute(&a, a.ctx, Command::SrqModify { req, ring });
        assert_eq!(answer.is_ok(), fits, "{offset}: {answer:?}");
    }
}
