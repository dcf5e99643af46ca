//! Keys that work requests change: windows, fast registration, invalidation; multicast; SRQ resize.

use std::sync::Arc;

use virtio_rdma_abi::{
    self as abi, access, cqe_flags, mw_type, opcode, qpt, send_flags, wc_opcode, wc_status,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::memory::PageList;
use crate::shard::testing::driver::{Cq, Guest, Qp, World, av, init_attr, rtr_attr, rts_attr, wqe};
use crate::shard::{Command, Reply, Status};

const SIGNALED: u8 = send_flags::SIGNALED;

fn window(world: &mut World, guest: &Guest, kind: u32) -> u32 {
    match world.ok(guest, guest.ctx, Command::MwAlloc { pdn: guest.pd, kind }) {
        Reply::Object(key) => key,
        other => panic!("{other:?}"),
    }
}

fn bindable(world: &mut World, guest: &mut Guest) -> (u64, u32) {
    let at = guest.alloc(8192);
    let list = PageList { addr: at, npages: 2, page_shift: 12, ..PageList::default() };
    let map = Arc::new(list.resolve(&guest.space, 8192).unwrap());
    (at, world.register(guest, at, map, 0x1f).unwrap())
}

struct Bind {
    present: u32,
    new: u32,
    region: u32,
    addr: u64,
    len: u64,
    access: u32,
}

fn bind(request: &Bind) -> abi::SqWqe {
    let mut wqe = wqe(opcode::BIND_MW, SIGNALED, 50);
    wqe.imm = U32::new(request.present);
    wqe.rkey = U32::new(request.new);
    wqe.remote_addr = U64::new(request.addr);
    wqe.arg0 = U64::new(request.len);
    wqe.arg1 = U64::new(u64::from(request.region));
    wqe.aux = U32::new(request.access);
    wqe
}

fn write_to(addr: u64, key: u32) -> abi::SqWqe {
    let mut wqe = wqe(opcode::RDMA_WRITE, SIGNALED, 1);
    (wqe.remote_addr, wqe.rkey) = (U64::new(addr), U32::new(key));
    wqe
}

#[test]
fn a_window_shows_its_part_until_it_is_unbound() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (at, region) = bindable(&mut world, &mut b);
    let key = window(&mut world, &b, mw_type::TYPE1);
    let new = key ^ 1;
    let bound =
        Bind { present: key, new, region, addr: at + 64, len: 64, access: access::REMOTE_WRITE };
    b.post_send(&mut qb, bind(&bound), &[]);
    world.settle();
    let done = b.drain(&mut qb.cq);
    assert_eq!((done[0].status, done[0].opcode), (wc_status::SUCCESS, wc_opcode::BIND_MW));
    let busy = world.execute(&b, b.ctx, Command::MrDereg(region));
    assert_eq!(busy.unwrap_err(), Status::BUSY);
    let (from, bytes) = a.pattern(64, 4);
    a.post_send(&mut qa, write_to(at + 64, new), &[a.sge(from, 64)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)]);
    assert_eq!(b.read(at + 64, 64), bytes);
    let unbound = Bind { present: new, new: key, len: 0, ..bound };
    b.post_send(&mut qb, bind(&unbound), &[]);
    world.settle();
    a.post_send(&mut qa, write_to(at + 64, new), &[a.sge(from, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::REM_ACCESS_ERR)]);
    world.ok(&b, b.ctx, Command::MrDereg(region));
}

#[test]
fn a_window_is_freed_by_the_key_that_it_was_made_with() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (_, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (addr, region) = bindable(&mut world, &mut b);
    let present = window(&mut world, &b, mw_type::TYPE2);
    let new = present ^ 0x7f;
    let bound = Bind { present, new, region, addr, len: 8, access: access::REMOTE_READ };
    b.post_send(&mut qb, bind(&bound), &[]);
    world.settle();
    assert_eq!(b.statuses(&mut qb.cq), [(50, wc_status::SUCCESS)]);
    world.ok(&b, b.ctx, Command::MwDealloc(present));
    world.ok(&b, b.ctx, Command::MrDereg(region));
}

#[test]
fn a_window_is_no_wider_than_it_was_bound() {
    for (offset, access) in [(60, access::REMOTE_WRITE), (0, access::REMOTE_READ)] {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        let (at, region) = bindable(&mut world, &mut b);
        let key = window(&mut world, &b, mw_type::TYPE1);
        b.post_send(
            &mut qb,
            bind(&Bind { present: key, new: key ^ 1, region, addr: at, len: 64, access }),
            &[],
        );
        world.settle();
        let (from, _) = a.pattern(8, 4);
        a.post_send(&mut qa, write_to(at + offset, key ^ 1), &[a.sge(from, 8)]);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::REM_ACCESS_ERR)]);
    }
}

#[test]
fn a_type_2_window_belongs_to_its_qp_and_is_invalidated_by_peer_or_owner() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (mut other, _peer) = world.pair(&mut a, &mut b, qpt::RC);
    let (at, region) = bindable(&mut world, &mut b);
    let key = window(&mut world, &b, mw_type::TYPE2);
    let request = Bind {
        present: key,
        new: key ^ 7,
        region,
        addr: at,
        len: 64,
        access: access::REMOTE_WRITE,
    };
    b.post_send(&mut qb, bind(&request), &[]);
    world.settle();
    let (from, _) = a.pattern(8, 4);
    a.post_send(&mut other, write_to(at, key ^ 7), &[a.sge(from, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut other.cq), [(1, wc_status::REM_ACCESS_ERR)], "bound to another QP");
    a.post_send(&mut qa, write_to(at, key ^ 7), &[a.sge(from, 8)]);
    b.post_receive(&mut qb, 4, &[]);
    let mut last = wqe(opcode::SEND_WITH_INV, SIGNALED, 2);
    last.imm = U32::new(key ^ 7);
    a.post_send(&mut qa, last, &[]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0), (2, 0)]);
    let received = b.drain(&mut qb.cq);
    let received = received.last().unwrap();
    assert_eq!(received.flags.get() & cqe_flags::INV, cqe_flags::INV);
    assert_eq!(received.imm.get(), key ^ 7);
    a.post_send(&mut qa, write_to(at, key ^ 7), &[a.sge(from, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::REM_ACCESS_ERR)]);
}

#[test]
fn bad_binds_fail() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    for case in 0..3 {
        let (_qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        let (at, region) = bindable(&mut world, &mut b);
        let key = window(&mut world, &b, mw_type::TYPE1);
        let good = Bind {
            present: key,
            new: key ^ 1,
            region,
            addr: at,
            len: 64,
            access: access::REMOTE_WRITE,
        };
        let bad = match case {
            0 => Bind { region: b.key, ..good },
            1 => Bind { addr: at + 8190, ..good },
            _ => Bind { present: key ^ 2, ..good },
        };
        b.post_send(&mut qb, bind(&bad), &[]);
        world.settle();
        assert_eq!(b.statuses(&mut qb.cq), [(50, wc_status::MW_BIND_ERR)], "case {case}");
    }
}

/// A kernel with a QP of its own: context 0 gets a doorbell page, a PD and a connected pair.
fn kernel_guest(world: &mut World, host: u8) -> Guest {
    let mut guest = world.guest(1, host);
    guest.become_kernel(world);
    guest
}

fn fast_register(guest: &mut Guest, key: u32, pages: &[u64], len: u64) -> abi::SqWqe {
    let array = guest.alloc(4096);
    guest.write(array, pages.iter().map(|page| U64::new(*page)).collect::<Vec<_>>().as_bytes());
    let mut wqe = wqe(opcode::REG_MR, SIGNALED, 60);
    wqe.rkey = U32::new(key);
    wqe.remote_addr = U64::new(0x7000_0010);
    wqe.arg0 = U64::new(len);
    wqe.imm = U32::new(access::LOCAL_WRITE | access::REMOTE_WRITE);
    wqe.aux = U32::new(pages.len() as u32);
    wqe.arg1 = U64::new(array | 12 << 56);
    wqe
}

#[test]
fn fast_registration_opens_scattered_pages_until_invalidated() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), kernel_guest(&mut world, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let Reply::Object(key) = world.ok(&b, 0, Command::MrAlloc { pdn: b.pd, max_pages: 4 }) else {
        panic!()
    };
    let (low, high) = (b.alloc(4096), b.alloc(4096));
    let new = key ^ 3;
    let register = fast_register(&mut b, new, &[high, low], 8000);
    b.post_send(&mut qb, register, &[]);
    world.settle();
    assert_eq!(b.statuses(&mut qb.cq), [(60, 0)]);
    let (from, bytes) = a.pattern(6000, 2);
    a.post_send(&mut qa, write_to(0x7000_0010, new), &[a.sge(from, 6000)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)]);
    assert_eq!(b.read(high + 16, 4080), bytes[..4080]);
    assert_eq!(b.read(low, 1920), bytes[4080..]);
    let mut invalidate = wqe(opcode::LOCAL_INV, SIGNALED, 61);
    invalidate.imm = U32::new(new);
    b.post_send(&mut qb, invalidate, &[]);
    world.settle();
    assert_eq!(b.statuses(&mut qb.cq), [(61, 0)]);
    a.post_send(&mut qa, write_to(0x7000_0010, new), &[a.sge(from, 8)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::REM_ACCESS_ERR)]);
}

#[test]
fn fast_registration_refuses_what_is_not_its_own() {
    type Spoil = fn(&mut abi::SqWqe);
    let spoils: [Spoil; 4] = [
        |wqe| wqe.aux = U32::new(5),
        |wqe| wqe.arg0 = U64::new(1 << 40),
        |wqe| wqe.arg1 = U64::new(1 << 40 | 12 << 56),
        |wqe| wqe.rkey = U32::new(0x5500),
    ];
    for spoil in spoils {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), kernel_guest(&mut world, 2));
        let (_qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        let Reply::Object(key) = world.ok(&b, 0, Command::MrAlloc { pdn: b.pd, max_pages: 4 })
        else {
            panic!()
        };
        let page = b.alloc(4096);
        let mut register = fast_register(&mut b, key, &[page], 100);
        spoil(&mut register);
        b.post_send(&mut qb, register, &[]);
        world.settle();
        assert_eq!(b.statuses(&mut qb.cq), [(60, wc_status::LOC_QP_OP_ERR)]);
    }
}

#[test]
fn user_space_names_no_physical_page() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (_qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let alloc = Command::MrAlloc { pdn: b.pd, max_pages: 4 };
    assert_eq!(world.execute(&b, b.ctx, alloc).unwrap_err(), Status::PERM);
    let key = b.key;
    let register = fast_register(&mut b, key, &[0], 100);
    b.post_send(&mut qb, register, &[]);
    world.settle();
    assert_eq!(b.statuses(&mut qb.cq), [(60, wc_status::LOC_QP_OP_ERR)]);
}

fn datagram_qp(world: &mut World, guest: &mut Guest) -> Qp {
    let qp = world.qp(guest, qpt::UD, 16, None);
    for attr in [init_attr(qpt::UD), rtr_attr(qpt::UD, (0, [0; 16])), rts_attr(qpt::UD)] {
        world.modify(guest, &qp, attr).unwrap();
    }
    qp
}

#[test]
fn a_group_reaches_its_members_in_the_network_only() {
    let mut world = super::world();
    let mut guests = [world.guest(1, 1), world.guest(1, 2), world.guest(2, 3)];
    let mut group = [0; 16];
    group[10..].copy_from_slice(&[0xff, 0xff, 230, 0, 0, 1]);
    let mut qps: Vec<Qp> = guests.iter_mut().map(|guest| datagram_qp(&mut world, guest)).collect();
    for (guest, qp) in guests.iter_mut().zip(&mut qps) {
        world.ok(guest, guest.ctx, Command::McastAttach { qpn: qp.qpn, mgid: group });
        let to = guest.alloc(4096);
        guest.post_receive(qp, 3, &[guest.sge(to, 4096)]);
    }
    let ah = match world.ok(
        &guests[0],
        guests[0].ctx,
        Command::AhCreate { pdn: guests[0].pd, av: av(group) },
    ) {
        Reply::Object(number) => number,
        other => panic!("{other:?}"),
    };
    let mut send = wqe(opcode::SEND, 0, 1);
    (send.arg0, send.rkey, send.aux) =
        (U64::new(u64::from(ah)), U32::new(0xff_ffff), U32::new(0x1111));
    guests[0].post_send(&mut qps[0], send, &[]);
    world.settle();
    let received: Vec<usize> =
        guests.iter().zip(&mut qps).map(|(g, qp)| g.drain(&mut qp.cq).len()).collect();
    assert_eq!(received, [1, 1, 0]);
    world.ok(&guests[1], guests[1].ctx, Command::McastDetach { qpn: qps[1].qpn, mgid: group });
    let not_there = Command::McastDetach { qpn: qps[1].qpn, mgid: group };
    assert_eq!(world.execute(&guests[1], guests[1].ctx, not_there).unwrap_err(), Status::INVAL);
}

#[test]
fn a_cq_grows_without_losing_entries_and_never_shrinks_below_them() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let small = world.cq(&mut a, 8);
    let mut qa = world.qp_on(&mut a, (qpt::RC, 16, None), small);
    let mut qb = world.qp(&mut b, qpt::RC, 16, None);
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    for n in 0..6 {
        b.post_receive(&mut qb, n, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, n), &[]);
    }
    world.settle();
    let (_, ring) = a.ring(1024);
    let shrink = Command::CqResize { cqn: small.cqn, entries: 4, requested: 4, ring };
    assert_eq!(world.execute(&a, a.ctx, shrink).unwrap_err(), Status::INVAL);
    let mut larger: Cq = world.resize(&mut a, &small, 64);
    assert_eq!(a.statuses(&mut larger), (0..6).map(|n| (n, 0)).collect::<Vec<_>>());
}

#[test]
fn the_network_forgets_the_groups_of_qps_that_are_gone() {
    let mut world = super::world();
    let mut guest = world.guest(1, 1);
    for host in 1..4 {
        let qp = datagram_qp(&mut world, &mut guest);
        let mut mgid = [0; 16];
        mgid[10..].copy_from_slice(&[0xff, 0xff, 230, 0, 0, host]);
        world.ok(&guest, guest.ctx, Command::McastAttach { qpn: qp.qpn, mgid });
        assert_eq!(world.at(guest.on).engine.group_count(), 1);
        if host < 3 {
            world.ok(&guest, guest.ctx, Command::QpDestroy(qp.qpn));
        } else {
            world.ok(&guest, guest.ctx, Command::ContextDestroy);
        }
        assert_eq!(world.at(guest.on).engine.group_count(), 0);
    }
}
