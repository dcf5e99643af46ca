//! Rules that peers and programs rely on: whole messages, keys by their low byte, regions of
//! nothing, clocks and numbers.

use std::collections::HashSet;
use std::sync::Arc;

use virtio_rdma_abi::{self as abi, access, mw_type, opcode, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use crate::link::PIECE;
use crate::memory::{AddressSpace, PageList, Ring, Translation};
use crate::shard::testing::driver::{Guest, Qp, World, limits, wqe};
use crate::shard::{Command, NicSettings, Reply, Step};

const SIGNALED: u8 = send_flags::SIGNALED;
const LEN: usize = 5 * PIECE as usize;

fn pages(guest: &Guest, at: u64, len: usize) -> Arc<Translation> {
    let npages = u32::try_from(len / 4096).unwrap();
    let list = PageList { addr: at, npages, page_shift: 12, ..PageList::default() };
    Arc::new(list.resolve(&guest.space, len as u64).unwrap())
}

/// A region over `old`, with a key for all rights.
fn region(world: &mut World, guest: &Guest, old: u64) -> u32 {
    world.register(guest, 0, pages(guest, old, LEN), 0xf).unwrap()
}

/// The key means `new` from now on.
fn move_region(world: &mut World, guest: &Guest, key: u32, new: u64) {
    let req = abi::MrReregReq {
        lkey: U32::new(key),
        flags: U32::new(abi::rereg::TRANSLATION),
        length: U64::new(LEN as u64),
        ..Default::default()
    };
    let map = Some(pages(guest, new, LEN));
    world.ok(guest, guest.ctx, Command::MrRereg { req, map });
}

fn element(key: u32) -> abi::Sge {
    abi::Sge { addr: U64::new(0), length: U32::new(LEN as u32), lkey: U32::new(key) }
}

pub(super) struct Scene {
    pub(super) world: World,
    pub(super) a: Guest,
    pub(super) b: Guest,
    pub(super) qa: Qp,
    pub(super) qb: Qp,
}

pub(super) fn scene(kind: u32) -> Scene {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (qa, qb) = world.pair(&mut a, &mut b, kind);
    Scene { world, a, b, qa, qb }
}

/// Lets time go on until a message is there in part.
fn begin(world: &mut World, begun: impl Fn() -> bool) {
    for _ in 0..1000 {
        if !world.round() {
            world.wait_for_arrivals();
        }
        if begun() {
            return;
        }
    }
    panic!("nothing comes");
}

/// Bytes that arrived are all of the same pattern: `seed` in front, nothing else behind it.
fn is_unmixed(bytes: &[u8], other: u8) -> bool {
    !bytes.contains(&other)
}

#[test]
fn a_source_that_is_registered_anew_in_mid_message_is_never_mixed() {
    for kind in [qpt::RC, qpt::UC] {
        let Scene { mut world, mut a, mut b, mut qa, mut qb } = scene(kind);
        let (old, new) = (a.alloc(LEN as u64), a.alloc(LEN as u64));
        a.write(old, &[1; LEN]);
        a.write(new, &[2; LEN]);
        let to = b.alloc(LEN as u64);
        let key = region(&mut world, &a, old);
        b.post_receive(&mut qb, 9, &[b.sge(to, LEN as u32)]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[element(key)]);
        // A piece has left; over a link the rest may have left too before it arrives.
        world.round();
        move_region(&mut world, &a, key, new);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::LOC_PROT_ERR)]);
        assert!(is_unmixed(&b.read(to, LEN), 2), "new bytes behind old ones");
    }
}

#[test]
fn a_receive_that_is_registered_anew_in_mid_message_is_never_mixed() {
    let Scene { mut world, mut a, mut b, mut qa, mut qb } = scene(qpt::RC);
    let (from, _) = a.pattern(LEN, 1);
    a.write(from, &[1; LEN]);
    let (old, new) = (b.alloc(LEN as u64), b.alloc(LEN as u64));
    let key = region(&mut world, &b, old);
    b.post_receive(&mut qb, 9, &[element(key)]);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, LEN as u32)]);
    begin(&mut world, || b.read(old, 1) == [1]);
    move_region(&mut world, &b, key, new);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::REM_OP_ERR)]);
    assert_eq!(b.statuses(&mut qb.cq), [(9, wc_status::LOC_PROT_ERR)]);
    assert!(b.read(new, LEN).iter().all(|byte| *byte == 0));
}

#[test]
fn a_target_that_is_registered_anew_in_mid_message_is_never_mixed() {
    for (code, refused) in [(opcode::RDMA_WRITE, 1), (opcode::RDMA_READ, 1)] {
        let Scene { mut world, mut a, mut b, mut qa, qb } = scene(qpt::RC);
        let (old, new) = (b.alloc(LEN as u64), b.alloc(LEN as u64));
        b.write(old, &[1; LEN]);
        b.write(new, &[2; LEN]);
        let local = a.alloc(LEN as u64);
        a.write(local, &[3; LEN]);
        let key = region(&mut world, &b, old);
        let mut request = wqe(code, SIGNALED, 1);
        request.rkey = U32::new(key);
        a.post_send(&mut qa, request, &[a.sge(local, LEN as u32)]);
        let writes = code == opcode::RDMA_WRITE;
        begin(&mut world, || if writes { b.read(old, 1) == [3] } else { a.read(local, 1) == [1] });
        move_region(&mut world, &b, key, new);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(refused, wc_status::REM_ACCESS_ERR)]);
        assert_eq!(world.query(&b, &qb).qp_state, abi::qps::ERR);
        assert!(is_unmixed(&a.read(local, LEN), 2), "new bytes behind old ones");
        assert!(is_unmixed(&b.read(new, LEN), 3), "the rest of a write elsewhere");
    }
}

#[test]
fn other_regions_may_change_meanwhile() {
    let Scene { mut world, mut a, mut b, mut qa, .. } = scene(qpt::RC);
    let (old, new) = (b.alloc(LEN as u64), b.alloc(LEN as u64));
    let other = region(&mut world, &b, old);
    let target = b.alloc(LEN as u64);
    let key = region(&mut world, &b, target);
    let (from, bytes) = a.pattern(LEN, 7);
    let mut request = wqe(opcode::RDMA_WRITE, SIGNALED, 1);
    request.rkey = U32::new(key);
    a.post_send(&mut qa, request, &[a.sge(from, LEN as u32)]);
    begin(&mut world, || b.read(target, 1) == bytes[..1]);
    move_region(&mut world, &b, other, new);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0)]);
    assert!(b.read(target, LEN) == bytes);
}

#[test]
fn a_message_whose_peer_began_a_new_life_is_not_carried_on() {
    let Scene { mut world, mut a, mut b, mut qa, qb } = scene(qpt::RC);
    let target = b.alloc(LEN as u64);
    let key = region(&mut world, &b, target);
    let (from, _) = a.pattern(LEN, 7);
    a.write(from, &[1; LEN]);
    let mut request = wqe(opcode::RDMA_WRITE, SIGNALED, 1);
    request.rkey = U32::new(key);
    a.post_send(&mut qa, request, &[a.sge(from, LEN as u32)]);
    begin(&mut world, || b.read(target, 1) == [1]);
    let begun = b.read(target, LEN);
    assert!(begun[0] == 1 && begun[LEN - 1] == 0, "some of it is there");
    world.modify(&b, &qb, crate::shard::testing::driver::state_attr(abi::qps::RESET)).unwrap();
    b.raw_reset(&qb);
    world.connect(&b, &qb, qpt::RC, (qa.qpn, a.gid));
    world.advance(10_000_000_000);
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::RETRY_EXC_ERR)]);
    assert!(b.read(target, LEN) == begun, "and nothing more");
}

#[test]
fn a_bind_takes_the_low_byte_of_its_new_key() {
    for kind in [mw_type::TYPE1, mw_type::TYPE2] {
        let Scene { mut world, mut a, mut b, mut qa, mut qb } = scene(qpt::RC);
        let at = b.alloc(LEN as u64);
        let map = pages(&b, at, LEN);
        let rights = access::LOCAL_WRITE | access::REMOTE_WRITE | access::MW_BIND;
        let region = world.register(&b, at, map, rights).unwrap();
        let Reply::Object(key) = world.ok(&b, b.ctx, Command::MwAlloc { pdn: b.pd, kind }) else {
            panic!("not a window")
        };
        let mut bind = wqe(opcode::BIND_MW, SIGNALED, 1);
        bind.imm = U32::new(key);
        // As ibv_inc_rkey does, and with upper bits of no meaning.
        bind.rkey = U32::new(0x5a5a_5a00 | (key.wrapping_add(1) & 0xff));
        (bind.remote_addr, bind.arg0) = (U64::new(at), U64::new(64));
        (bind.arg1, bind.aux) = (U64::new(region.into()), U32::new(access::REMOTE_WRITE));
        b.post_send(&mut qb, bind, &[]);
        world.settle();
        assert_eq!(b.statuses(&mut qb.cq), [(1, 0)]);
        let mut write = wqe(opcode::RDMA_WRITE, SIGNALED, 2);
        write.remote_addr = U64::new(at);
        write.rkey = U32::new(key & !0xff | (key.wrapping_add(1) & 0xff));
        let (from, bytes) = a.pattern(64, 3);
        a.post_send(&mut qa, write, &[a.sge(from, 64)]);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(2, 0)]);
        assert_eq!(b.read(at, 64), bytes);
    }
}

#[test]
fn a_region_of_nothing_opens_nothing() {
    let Scene { mut world, mut a, mut b, mut qa, mut qb } = scene(qpt::RC);
    for iova in [0, 0x1234, u64::MAX] {
        let key = world.register(&b, iova, Translation::empty(), 0xf).unwrap();
        let mut write = wqe(opcode::RDMA_WRITE, SIGNALED, 1);
        (write.remote_addr, write.rkey) = (U64::new(iova), U32::new(key));
        a.post_send(&mut qa, write, &[]);
        world.settle();
        assert_eq!(a.statuses(&mut qa.cq), [(1, 0)]);
        world.ok(&b, b.ctx, Command::MrDereg(key));
    }
    let key = world.register(&b, 0, Translation::empty(), 0xf).unwrap();
    let mut write = wqe(opcode::RDMA_WRITE, SIGNALED, 1);
    write.rkey = U32::new(key);
    let (from, _) = a.pattern(1, 1);
    a.post_send(&mut qa, write, &[a.sge(from, 1)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::REM_ACCESS_ERR)]);
    b.drain(&mut qb.cq);
    // It may become one of something.
    let at = b.alloc(LEN as u64);
    move_region(&mut world, &b, key, at);
    assert_eq!(world.status(&b).objects.mrs, 2);
}

#[test]
fn the_number_of_a_cq_that_is_gone_rests() {
    let mut world = super::world();
    let mut a = world.guest(1, 1);
    let ring = a.ring(4096).1;
    let mut seen = HashSet::new();
    for _ in 0..2000 {
        let command = Command::CqCreate { entries: 16, vector: 0, ring: ring.clone() };
        let Reply::Object(cqn) = world.ok(&a, a.ctx, command) else { panic!("not a CQ") };
        assert!(seen.insert(cqn), "{cqn:#x} came back");
        world.ok(&a, a.ctx, Command::CqDestroy(cqn));
        assert!(world.execute(&a, a.ctx, Command::CqDestroy(cqn)).is_err());
    }
}

#[test]
fn keys_for_all_of_memory_share_one_map() {
    const KEYS: u32 = 65_536;
    let mut world = super::world();
    let settings = NicSettings {
        number: 0,
        vni: 9,
        mac: [2, 0, 0, 0, 0, 9],
        gids: Vec::new(),
        comp_vectors: 1,
        kick_queues: 1,
        limits: crate::shard::Limits { max_mrs: KEYS, ..limits() },
    };
    let nic = world.shard.add_nic(settings, Box::new(crate::nic::Nowhere));
    let pieces = |count: u64| (0..count).map(|n| (n << 20, 4096)).collect::<Vec<_>>();
    let space = AddressSpace::anonymous(&pieces(500)).unwrap();
    let status_page = Ring::page(&space, 0).unwrap();
    let mut run = |ctx, command| world.shard.execute(nic, ctx, command, 1);
    run(0, Command::Init { space: space.clone(), status_page }).unwrap();
    let Ok(Step::Done(Reply::Object(pdn))) = run(0, Command::PdCreate) else { panic!("not a PD") };
    for _ in 0..KEYS {
        run(0, Command::MrDma { pdn, access: 1 }).unwrap();
    }
    assert!(run(0, Command::MrDma { pdn, access: 1 }).is_err(), "one more than the limit");
    let maps = |world: &mut World| world.shard.nic_mut(nic).unwrap().region_maps();
    assert_eq!(maps(&mut world), 1);
    // Nor does a new memory map give each a map of its own.
    world.shard.memory_changed(nic, space);
    while world.shard.follow_memory(nic) {}
    assert_eq!(maps(&mut world), 1);
}

#[test]
fn a_nic_without_its_address_moves_nothing() {
    for withdrawn in [0, 1] {
        for (kind, status) in [(qpt::RC, None), (qpt::UC, Some(wc_status::SUCCESS))] {
            let Scene { mut world, mut a, mut b, mut qa, mut qb } = scene(kind);
            let to = b.alloc(4096);
            b.post_receive(&mut qb, 9, &[b.sge(to, 8)]);
            let side = if withdrawn == 0 { &a } else { &b };
            let (on, nic, gid) = (side.on, side.nic, side.gid);
            let set = |world: &mut World, gid| {
                let command = Command::GidSet { index: 1, gid };
                let now = world.now;
                world.at(on).execute(nic, 0, command, now).unwrap();
            };
            set(&mut world, None);
            let (from, bytes) = a.pattern(8, 3);
            a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, 8)]);
            world.settle();
            assert_eq!(a.statuses(&mut qa.cq).first().map(|done| done.1), status);
            assert!(b.drain(&mut qb.cq).is_empty());
            assert_eq!(b.read(to, 8), [0; 8]);
            set(&mut world, Some(gid));
            if kind == qpt::UC {
                a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[a.sge(from, 8)]);
            }
            world.advance(200_000_000);
            assert_eq!(a.statuses(&mut qa.cq), [(1, 0)], "it goes on");
            assert_eq!(b.read(to, 8), bytes);
        }
    }
}
