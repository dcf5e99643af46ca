//! UD: addressing, the GRH area, Q_Keys, and silence.

use virtio_rdma_abi::{self as abi, cqe_flags, opcode, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use crate::shard::testing::driver::{Guest, Qp, World, av, init_attr, rtr_attr, rts_attr, wqe};
use crate::shard::{Command, Reply, Status};

pub(super) fn ready(world: &mut World, guest: &mut Guest) -> Qp {
    let qp = world.qp(guest, qpt::UD, 16, None);
    for attr in [init_attr(qpt::UD), rtr_attr(qpt::UD, (0, [0; 16])), rts_attr(qpt::UD)] {
        world.modify(guest, &qp, attr).unwrap();
    }
    qp
}

pub(super) fn handle(world: &mut World, guest: &Guest, dgid: [u8; 16]) -> u32 {
    match world.ok(guest, guest.ctx, Command::AhCreate { pdn: guest.pd, av: av(dgid) }) {
        Reply::Object(number) => number,
        other => panic!("{other:?}"),
    }
}

pub(super) fn datagram(ah: u32, qpn: u32, qkey: u32) -> abi::SqWqe {
    let mut request = wqe(opcode::SEND, send_flags::SIGNALED, 1);
    (request.arg0, request.rkey, request.aux) =
        (U64::new(u64::from(ah)), U32::new(qpn), U32::new(qkey));
    request
}

#[test]
fn a_datagram_brings_its_header() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let ah = handle(&mut world, &a, b.gid);
    let (from, bytes) = a.pattern(100, 1);
    let to = b.alloc(4096);
    b.post_receive(&mut qb, 3, &[b.sge(to, 50), b.sge(to + 1000, 3000)]);
    a.post_send(&mut qa, datagram(ah, qb.qpn, 0x1111), &[a.sge(from, 100)]);
    world.settle();
    let received = b.drain(&mut qb.cq);
    assert_eq!((received[0].byte_len.get(), received[0].src_qp.get()), (140, qa.qpn));
    let flags = cqe_flags::RECV | cqe_flags::GRH | cqe_flags::IPV4 | cqe_flags::SMAC;
    assert_eq!(received[0].flags.get(), flags);
    assert_eq!(received[0].smac, [2, 0, 0, 0, 0, 1]);
    let grh = b.read(to, 40);
    assert_eq!((&grh[..20], grh[20], &grh[32..36]), (&[0; 20][..], 0x45, &[10, 0, 0, 1][..]));
    assert_eq!(b.read(to + 40, 10), bytes[..10]);
    assert_eq!(b.read(to + 1000, 90), bytes[10..]);
}

#[test]
fn wrong_keys_and_addresses_are_silence() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let mut other = world.guest(2, 2);
    let (mut qa, mut qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let mut qo = ready(&mut world, &mut other);
    let ah = handle(&mut world, &a, b.gid);
    let nobody = handle(&mut world, &a, [9; 16]);
    let to = b.alloc(4096);
    b.post_receive(&mut qb, 1, &[b.sge(to, 4096)]);
    let to = other.alloc(4096);
    other.post_receive(&mut qo, 1, &[other.sge(to, 4096)]);
    a.post_send(&mut qa, datagram(ah, qb.qpn, 0x2222), &[]);
    a.post_send(&mut qa, datagram(ah, qo.qpn, 0x1111), &[]);
    a.post_send(&mut qa, datagram(nobody, qb.qpn, 0x1111), &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0), (1, 0), (1, 0)]);
    assert!(b.drain(&mut qb.cq).is_empty() && other.drain(&mut qo.cq).is_empty());
}

#[test]
fn too_long_and_foreign_handles_fail_and_the_queue_recovers() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let ah = handle(&mut world, &a, b.gid);
    let (from, _) = a.pattern(4097, 1);
    a.post_send(&mut qa, datagram(ah, 5, 0x1111), &[a.sge(from, 4097)]);
    a.post_send(&mut qa, datagram(ah, 5, 0x1111), &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::LOC_LEN_ERR), (1, wc_status::WR_FLUSH_ERR)]);
    assert_eq!(world.query(&a, &qa).qp_state, abi::qps::SQE);
    let recover = crate::shard::testing::driver::state_attr(abi::qps::RTS);
    world.modify(&a, &qa, recover).unwrap();
    a.post_send(&mut qa, datagram(99, 5, 0x1111), &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::LOC_QP_OP_ERR)]);
}

#[test]
fn handles_need_a_header_and_an_address_of_ones_own() {
    let mut world = super::world();
    let a = world.guest(1, 1);
    let mut no_header = av(a.gid);
    no_header.flags = 0;
    let mut no_source = av(a.gid);
    no_source.sgid_index = 5.into();
    for av in [no_header, no_source] {
        let refused = world.execute(&a, a.ctx, Command::AhCreate { pdn: a.pd, av });
        assert_eq!(refused.unwrap_err(), Status::INVAL);
    }
}

#[test]
fn what_does_not_fit_is_dropped_and_takes_nothing() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let ah = handle(&mut world, &a, b.gid);
    let (from, bytes) = a.pattern(4096, 1);
    let to = b.alloc(4096);
    b.post_receive(&mut qb, 3, &[b.sge(to, 104)]);
    for _ in 0..100 {
        for len in [65, 4096] {
            a.post_send(&mut qa, datagram(ah, qb.qpn, 0x1111), &[a.sge(from, len)]);
            world.settle();
        }
        assert!(a.statuses(&mut qa.cq).iter().all(|&done| done == (1, 0)));
    }
    assert!(b.drain(&mut qb.cq).is_empty());
    assert_eq!(b.read(to, 104), [0; 104]);
    a.post_send(&mut qa, datagram(ah, qb.qpn, 0x1111), &[a.sge(from, 64)]);
    world.settle();
    assert_eq!(b.statuses(&mut qb.cq), [(3, 0)]);
    assert_eq!(b.read(to + 40, 64), bytes[..64]);
}

#[test]
fn what_the_receiver_posted_wrongly_is_the_receivers_error() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = (ready(&mut world, &mut a), ready(&mut world, &mut b));
    let ah = handle(&mut world, &a, b.gid);
    let to = b.alloc(4096);
    let mut denied = b.sge(to, 4096);
    denied.lkey = U32::new(b.key ^ 0x100);
    b.post_receive(&mut qb, 3, &[denied]);
    b.post_receive(&mut qb, 4, &[b.sge(to, 4096)]);
    a.post_send(&mut qa, datagram(ah, qb.qpn, 0x1111), &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)]);
    let failed = [(3, wc_status::LOC_PROT_ERR), (4, wc_status::WR_FLUSH_ERR)];
    assert_eq!(b.statuses(&mut qb.cq), failed);
    assert_eq!(world.query(&b, &qb).qp_state, abi::qps::ERR);
}

/// A round looks at some of the doorbell pages that there are, so it sees the sender's post before
/// the receiver's at times.
#[test]
fn a_receive_counts_from_when_it_is_posted() {
    let mut world = super::world();
    let mut b = world.guest(1, 2);
    crate::shard::tests::parking::contexts(&mut world, (&mut b, 2), 100);
    let mut a = world.guest(1, 1);
    let ah = handle(&mut world, &a, b.gid);
    let (from, to) = (a.alloc(64), b.alloc(4096));
    for kind in [qpt::UD, qpt::UC, qpt::RC] {
        let [mut qa, mut qb] = [&mut a, &mut b].map(|guest| world.qp(guest, kind, 16, None));
        for (guest, qp, peer) in [(&a, &qa, (qb.qpn, b.gid)), (&b, &qb, (qa.qpn, a.gid))] {
            let impatient = abi::QpAttr { rnr_retry: 0, ..rts_attr(kind) };
            for attr in [init_attr(kind), rtr_attr(kind, peer), impatient] {
                world.modify(guest, qp, attr).unwrap();
            }
        }
        for n in 0..40 {
            // Long enough for no page to be lively any more.
            (0..2000).for_each(|_| _ = world.round());
            b.post_receive(&mut qb, n, &[b.sge(to, 4096)]);
            let send = match kind {
                qpt::UD => datagram(ah, qb.qpn, 0x1111),
                _ => wqe(opcode::SEND, send_flags::SIGNALED, 1),
            };
            a.post_send(&mut qa, send, &[a.sge(from, 64)]);
            world.settle();
            assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "{kind}");
            assert_eq!(b.statuses(&mut qb.cq), [(n, 0)], "{kind}");
        }
    }
}
