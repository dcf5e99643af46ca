//! Page lists, regions, keys, and guest memory that comes and goes (6).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtual_guest::backing::rules;
use virtual_guest::control::Mr;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{self, PAGE, access, cap, err, qpt, status};
use virtual_guest::world::{End, Node, World, pattern};

fn register(node: &Node, iova: u64, len: u64, list: &PageList) -> Result<(u32, u32), u32> {
    node.ctx
        .mr_reg(node.pdn, access::ALL, (iova, len), list)
        .map_err(|e| e.status().expect("an answer"))
}

/// Writes to and reads from a region through `a`.
fn round_trip(a: &mut End, iova: u64, rkey: u32, len: u64) -> Vec<u8> {
    let data = pattern(iova ^ len, len as usize);
    let (from, back) = (a.node.area_of(&data), a.node.area(len));
    a.run_ok(&SendWr::write(1, &[from.sge()], iova, rkey));
    a.run_ok(&SendWr::read(2, &[back.sge()], iova, rkey));
    assert_eq!(back.bytes(), data);
    data
}

#[test]
fn page_lists_of_every_depth_reach_the_same_bytes() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let buf = Buf::scattered(b.node.guest.ram(), 333, 40_000);
    for levels in 1..=4 {
        buf.view().fill(0, buf.len(), 0);
        let list = PageList::tree(b.node.guest.ram(), buf.pages().gpas(), 333, 12, levels);
        let iova = 0x7000_0000_0000 + 333;
        let (_, rkey) = register(&b.node, iova, buf.len(), &list).expect("MR_REG");
        // The list pages are the driver's again once the command has returned.
        for page in list.lists() {
            page.view(0, PAGE).fill(0, PAGE, 0xff);
        }
        drop(list);
        let data = round_trip(&mut a, iova, rkey, buf.len());
        assert_eq!(buf.view().vec(0, buf.len()), data);
    }
}

#[test]
fn a_list_of_more_than_one_list_page_works() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let len = 600 * PAGE;
    let buf = Buf::scattered(b.node.guest.ram(), 0, len);
    let list = PageList::of(b.node.guest.ram(), buf.pages(), 0);
    assert_eq!((list.levels, list.npages), (2, 600));
    let (_, rkey) = register(&b.node, 1 << 40, len, &list).expect("MR_REG");
    let data = round_trip(&mut a, 1 << 40, rkey, len);
    assert_eq!(buf.view().vec(0, len), data);
}

#[test]
fn larger_pages_work() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let ram = b.node.guest.ram();
    for shift in [14u8, 16, 20] {
        let size = 1u64 << shift;
        let (first, second) = (
            ram.alloc_in(None, (size / PAGE) as usize, size),
            ram.alloc_in(None, (size / PAGE) as usize, size),
        );
        let list = PageList::tree(ram, &[second.gpa(0), first.gpa(0)], 4096, shift, 1);
        let len = 2 * size - 4096;
        let (_, rkey) = register(&b.node, 1 << 33, len, &list).expect("MR_REG");
        let data = round_trip(&mut a, 1 << 33, rkey, len);
        assert_eq!(
            second.view(4096, size - 4096).vec(0, size - 4096),
            data[..(size - 4096) as usize]
        );
        assert_eq!(first.view(0, size).vec(0, size), data[(size - 4096) as usize..]);
    }
}

#[test]
fn wrong_page_lists_are_refused_with_the_right_status() {
    let world = World::new();
    let node = world.node();
    let ram = node.guest.ram();
    let page = ram.alloc(2);
    let (good, base) = (page.gpa(0), ram.regions()[0].gpa());
    let end = base + ram.regions()[0].size();
    let list = |addr, npages, offset, shift| PageList::contiguous(addr, npages, offset, shift);
    let mut deep = list(good, 1, 0, 12);
    deep.levels = 5;
    let outside_tree = PageList::tree(ram, &[good, end + PAGE], 0, 12, 1);
    let misaligned_tree = PageList::tree(ram, &[good, good + 8], 0, 12, 1);
    let mut misaligned_root = PageList::tree(ram, &[good], 0, 12, 1);
    misaligned_root.addr += 8;
    let mut outside_root = PageList::tree(ram, &[good], 0, 12, 1);
    outside_root.addr = 0x10;
    let mut beyond_root = PageList::tree(ram, &[good], 0, 12, 1);
    beyond_root.addr = !0xfff;
    let cases = [
        ("outside", list(end, 1, 0, 12), 1, err::FAULT),
        ("runs out of memory", list(end - PAGE, 2, 0, 12), 2 * PAGE, err::FAULT),
        ("wraps", list(!0xfff, 2, 0, 12), 2 * PAGE, err::FAULT),
        ("misaligned", list(good + 64, 1, 0, 12), 64, err::FAULT),
        ("misaligned for its page size", list(base + PAGE, 1, 0, 13), PAGE, err::FAULT),
        ("outside in a list", outside_tree, 2 * PAGE, err::FAULT),
        ("misaligned in a list", misaligned_tree, 2 * PAGE, err::FAULT),
        ("outside root", outside_root, 1, err::FAULT),
        ("root at the end of all", beyond_root, 1, err::FAULT),
        ("misaligned root", misaligned_root, 1, err::FAULT),
        ("page shift 11", list(good, 1, 0, 11), 1, err::INVAL),
        ("page shift 31", list(good, 1, 0, 31), 1, err::INVAL),
        ("page shift 200", list(good, 1, 0, 200), 1, err::INVAL),
        ("offset of a page", list(good, 2, 4096, 12), 1, err::INVAL),
        ("five levels", deep, 1, err::INVAL),
        ("too small", list(good, 1, 0, 12), PAGE + 1, err::INVAL),
        ("too small with its offset", list(good, 1, 1, 12), PAGE, err::INVAL),
        ("no pages", list(good, 0, 0, 12), 1, err::INVAL),
    ];
    for (what, list, len, expected) in cases {
        let got = register(&node, 1 << 32, len, &list);
        assert_eq!(got, Err(expected), "{what}");
    }
    let huge = register(&node, 1 << 32, u64::MAX, &list(base, u32::MAX, 0, 30));
    assert!(huge.is_err());
    register(&node, 1 << 32, PAGE, &list(good, 1, 0, 12)).expect("the next one is served");
}

#[test]
fn access_flags_are_checked() {
    let world = World::new();
    let node = world.node();
    let page = node.guest.ram().alloc(1);
    let list = PageList::contiguous(page.gpa(0), 1, 0, 12);
    let reg = |flags: u32, iova: u64| {
        node.ctx.mr_reg(node.pdn, flags, (iova, PAGE), &list).map_err(|e| e.status().unwrap_or(99))
    };
    assert_eq!(reg(access::REMOTE_WRITE, 0x1000), Err(err::INVAL));
    assert_eq!(reg(access::REMOTE_ATOMIC, 0x1000), Err(err::INVAL));
    assert_eq!(reg(access::LOCAL_WRITE | 0x80, 0x1000), Err(err::INVAL));
    assert_eq!(reg(access::LOCAL_WRITE | 0x4000_0000, 0x1000), Err(err::INVAL));
    reg(access::LOCAL_WRITE | 0x10_0000, 0x1000).expect("relaxed ordering is optional");
    reg(access::LOCAL_WRITE | access::OPTIONAL_MASK, 0x1000).expect("optional flags are ignored");
    reg(0, 0x1000).expect("read-only memory");
    assert_eq!(reg(access::ALL, u64::MAX - 4094), Err(err::INVAL), "the range wraps");
    if node.guest.query_device().unwrap().caps & cap::ZERO_BASED != 0 {
        assert_eq!(reg(access::ALL | access::ZERO_BASED, 0x1000), Err(err::INVAL));
        reg(access::ALL | access::ZERO_BASED, 0).expect("zero based");
    }
}

#[test]
fn a_zero_based_region_is_addressed_from_zero() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    if b.node.guest.query_device().unwrap().caps & cap::ZERO_BASED == 0 {
        let refused = b.node.ctx.mr(b.node.pdn, 100, access::ALL | access::ZERO_BASED);
        assert_eq!(refused.unwrap_err().status(), Some(err::NOTSUPP));
        return;
    }
    let mr = b.node.ctx.mr(b.node.pdn, 10_000, access::ALL | access::ZERO_BASED).unwrap();
    assert_eq!(mr.iova, 0);
    let data = round_trip(&mut a, 0, mr.rkey, 10_000);
    assert_eq!(mr.view().vec(0, 10_000), data);
}

#[test]
fn keys_are_not_predictable_and_not_reused_soon() {
    let world = World::new();
    let node = world.node();
    let mut seen = BTreeSet::new();
    let mut last: Option<u32> = None;
    let mut steps = BTreeSet::new();
    for _ in 0..200 {
        let mr = node.mr(64);
        assert_eq!(mr.lkey, mr.rkey);
        assert!(seen.insert(mr.lkey >> 8), "a key's index came back at once");
        if let Some(last) = last {
            steps.insert((mr.lkey >> 8).wrapping_sub(last >> 8));
        }
        last = Some(mr.lkey);
        node.ctx.dereg(mr.lkey).unwrap();
    }
    if !rules().numbers_are_random {
        return;
    }
    let bits = seen.iter().fold(0, |all, index| all | index);
    assert!(bits.count_ones() >= 22, "only these bits of a key change: {bits:#x}");
    assert!(steps.len() > 150, "keys follow a pattern: {} different steps", steps.len());
}

#[test]
fn queue_pair_numbers_are_random_and_not_reused_soon() {
    let world = World::new();
    let node = world.node();
    let (scq, rcq) = (node.cq(16), node.cq(16));
    let spec = QpSpec { sq: 2, rq: 2, ..QpSpec::new(qpt::RC) };
    let mut seen = BTreeSet::new();
    let mut steps = BTreeSet::new();
    let mut last = 0u32;
    for _ in 0..200 {
        let qp = virtual_guest::qp::Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec).unwrap();
        assert!((2..1 << 24).contains(&qp.qpn));
        assert!(seen.insert(qp.qpn), "a number came back at once");
        steps.insert(qp.qpn.wrapping_sub(last));
        last = qp.qpn;
        qp.destroy().unwrap();
    }
    if !rules().numbers_are_random {
        return;
    }
    let bits = seen.iter().fold(0, |all, number| all | number);
    assert!(bits.count_ones() >= 22, "only these bits of a QPN change: {bits:#x}");
    assert!(steps.len() > 150, "numbers follow a pattern");
}

#[test]
fn a_dma_key_covers_guest_physical_memory_and_is_the_kernels_alone() {
    let world = World::new();
    let node = world.node();
    let refused = node.ctx.mr_dma(node.pdn, access::LOCAL_WRITE).unwrap_err();
    assert_ne!(refused.status(), None);
    let kernel = node.guest.kernel().unwrap();
    let pdn = kernel.create_pd().unwrap();
    let made = kernel.mr_dma(pdn, access::LOCAL_WRITE);
    if node.guest.query_device().unwrap().caps & cap::DMA_MR == 0 {
        assert_eq!(made.unwrap_err().status(), Some(err::NOTSUPP));
    } else {
        made.unwrap();
    }
}

#[test]
fn rereg_changes_what_the_key_opens() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    if b.node.guest.query_device().unwrap().caps & cap::MR_REREG == 0 {
        return;
    }
    let mr = b.node.mr(4096);
    let rereg = |flags: u32, rights: u32| {
        let body = spec::Put::new()
            .u32(mr.lkey)
            .u32(flags)
            .u32(b.node.pdn)
            .u32(rights)
            .u64(0)
            .u64(0)
            .bytes(&PageList::none().bytes())
            .done(56);
        b.node.ctx.command(spec::cmd::MR_REREG, &body, 8)
    };
    let answer = rereg(spec::REREG_ACCESS, access::LOCAL_WRITE | access::REMOTE_READ).unwrap();
    let [lkey, rkey] = [0, 4].map(|at| spec::Take::u32_at(answer.as_slice(), at));
    assert_eq!(lkey == mr.lkey, rules().rereg_keeps_the_key);
    let (local, addr) = (a.node.area(8), mr.addr(0));
    a.run_ok(&SendWr::read(1, &[local.sge()], addr, rkey));
    let failed = a.run(&SendWr::write(2, &[local.sge()], addr, rkey));
    assert_eq!(failed.status, status::REM_ACCESS_ERR);
}

/// Scattered memory is mapped run by run for an RNIC, and a NIC has only so many mappings
/// (docs/RNIC.md, 1); the engine needs none.
#[test]
fn scattered_regions_come_to_an_end_where_they_are_mapped_and_the_daemon_lives() {
    const PAGES: u64 = 6000;
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let buf = Buf::scattered(b.node.guest.ram(), 0, PAGES * PAGE);
    let list = PageList::of(b.node.guest.ram(), buf.pages(), 0);
    let len = PAGES * PAGE;
    let before = world.daemon.mappings().values().sum::<usize>();
    for _ in 0..2 {
        let made: Vec<_> =
            (0..8u64).map(|n| register(&b.node, (n + 1) << 40, len, &list)).collect();
        let keys: Vec<u32> = made.iter().flatten().map(|(lkey, _)| *lkey).collect();
        if rules().numbers_are_random {
            assert_eq!(keys.len(), 8);
        } else {
            assert!((2..6).contains(&keys.len()), "{} of them fit", keys.len());
            assert!(made.iter().skip(keys.len()).all(|refused| *refused == Err(err::NOMEM)));
        }
        // What was made is good, and so is what is in one piece.
        let (_, rkey) = made[0].expect("the first one");
        let data = round_trip(&mut a, 1 << 40, rkey, 10 * PAGE);
        assert_eq!(buf.view().vec(0, 10 * PAGE), data);
        let whole = Buf::contiguous(b.node.guest.ram(), 4 * PAGE);
        let whole = b.node.ctx.register(b.node.pdn, Arc::new(whole), access::ALL).expect("MR_REG");
        b.node.ctx.dereg(whole.lkey).unwrap();
        keys.into_iter().for_each(|key| b.node.ctx.dereg(key).unwrap());
    }
    let after = world.daemon.mappings().values().sum::<usize>();
    assert!(after <= before + 8 + 64, "{before} mappings were {after}: two small regions remain");
}

fn in_region(node: &Node, gpa: u64, len: u64) -> Mr {
    let buf = Arc::new(Buf::contiguous_in(node.guest.ram(), gpa, len));
    buf.view().fill(0, len, 0);
    node.ctx.register(node.pdn, buf, access::ALL).expect("MR_REG in the new region")
}

const PLUGGED: u64 = 0x1_0000_0000;

#[test]
fn memory_that_is_plugged_in_can_be_used_and_unplugged() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    for round in 0..5u64 {
        b.node.guest.add_memory(PLUGGED, 4 << 20).unwrap();
        let old = b.node.area(64);
        let mr = in_region(&b.node, PLUGGED, 100_000);
        let data = round_trip(&mut a, mr.iova, mr.rkey, 100_000);
        assert_eq!(mr.view().vec(0, 100_000), data);
        b.node.ctx.dereg(mr.lkey).unwrap();
        b.node.guest.remove_memory(PLUGGED).unwrap();
        a.run_ok(&SendWr::write(round, &[], old.addr(0), old.rkey()).inline(&[1; 8]));
    }
}

#[test]
fn an_access_to_memory_that_was_unplugged_is_an_error_and_nothing_worse() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    b.node.guest.add_memory(PLUGGED, 4 << 20).unwrap();
    let mr = in_region(&b.node, PLUGGED, 100_000);
    let (old, local) = (b.node.area(64), a.node.area(64));
    a.run_ok(&SendWr::write(1, &[local.sge()], mr.addr(0), mr.rkey));
    b.node.guest.remove_memory(PLUGGED).unwrap();
    let failed = a.run(&SendWr::write(2, &[local.sge()], mr.addr(0), mr.rkey));
    assert_eq!(failed.status, status::REM_ACCESS_ERR);
    let (c, d) = (a.node.rc(), b.node.rc());
    c.connect(&d, &Path::default());
    d.connect(&c, &Path::default());
    let mut c = c;
    c.run_ok(&SendWr::write(3, &[local.sge()], old.addr(0), old.rkey()));
}

#[test]
fn memory_that_is_unplugged_under_traffic_is_left_alone_afterwards() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    for _ in 0..5 {
        let region = b.node.guest.add_memory(PLUGGED, 4 << 20).unwrap();
        let mr = in_region(&b.node, PLUGGED, 2 << 20);
        let (mut c, d) = (a.node.rc(), b.node.rc());
        c.connect(&d, &Path::default());
        d.connect(&c, &Path::default());
        let from = a.node.area_of(&pattern(1, 2 << 20));
        for i in 0..60 {
            c.qp.queue_send(&SendWr::write(i, &[from.sge()], mr.addr(0), mr.rkey));
        }
        c.qp.ring_sq();
        c.scq.ok();
        b.node.guest.remove_memory(PLUGGED).unwrap();
        // The daemon has let go: what it wrote so far is all that it will ever write.
        mr.view().fill(0, 2 << 20, 0x11);
        let mut last = status::SUCCESS;
        for _ in 1..60 {
            last = c.scq.one().status;
            if last != status::SUCCESS {
                break;
            }
        }
        assert!(
            mr.view().vec(0, 2 << 20).iter().all(|b| *b == 0x11),
            "written after it was unplugged"
        );
        assert!([status::SUCCESS, status::REM_ACCESS_ERR].contains(&last));
        drop(region);
        let word = b.node.area(8);
        a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    }
}

#[test]
fn the_whole_table_can_be_sent_again_under_traffic() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let inbox = b.node.area(8);
    for i in 0..50u64 {
        if i % 10 == 0 {
            b.node.guest.resend_memory().unwrap();
            a.node.guest.resend_memory().unwrap();
        }
        b.qp.post_recv(i, &[inbox.sge()]);
        a.run_ok(&SendWr::send(i, &[]).inline(&i.to_le_bytes()));
        b.rcq.ok();
        assert_eq!(inbox.word(0), i);
    }
}

#[test]
fn memory_may_come_in_single_regions_from_the_start() {
    let world = World::new();
    let config = GuestConfig { memory_table: false, event_idx: false, ..GuestConfig::default() };
    let node = world.node_with("net", &[], config);
    let mut a = node.rc();
    a.qp.connect(a.address(), &Path::default()).unwrap();
    let word = node.area(8);
    a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    assert_eq!(word.bytes(), [1; 8]);
    assert_eq!(word.mr.view().load8(0, Ordering::Relaxed), 0x5a);
}

#[test]
fn a_region_across_two_memory_slots_works() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let first = b.node.guest.ram().regions()[0].clone();
    let next = first.gpa() + first.size();
    b.node.guest.add_memory(next, 1 << 20).unwrap();
    // The last page of the first region may be in use by a ring; its bytes are only read here.
    let list = PageList::contiguous(next - PAGE, 2, 0, 12);
    let (_, rkey) = register(&b.node, 1 << 32, 2 * PAGE, &list).expect("a region over a seam");
    let second = b.node.guest.ram().view(next, PAGE);
    second.write(0, &pattern(7, PAGE as usize));
    let before = b.node.guest.ram().view(next - PAGE, PAGE).vec(0, PAGE);
    let back = a.node.area(2 * PAGE);
    a.run_ok(&SendWr::read(1, &[back.sge()], 1 << 32, rkey));
    assert_eq!(back.bytes()[..PAGE as usize], before);
    assert_eq!(back.bytes()[PAGE as usize..], pattern(7, PAGE as usize));
}

#[test]
fn an_access_that_begins_below_its_region_is_refused() {
    let world = World::new();
    for below in [1u64, 8, 4096] {
        let (mut a, b) = world.rc_pair();
        let (local, remote) = (a.node.area(64), b.node.mr(256));
        let addr = remote.iova - below;
        let failed = a.run(&SendWr::write(1, &[local.part(0, 16)], addr, remote.rkey));
        assert_eq!(failed.status, status::REM_ACCESS_ERR, "{below} bytes below");
        let (mut a, b) = world.rc_pair();
        let (local, remote) = (a.node.mr(256), b.node.area(64));
        let mut sge = local.sge(0, 16);
        sge.addr -= below;
        let failed = a.run(&SendWr::write(1, &[sge], remote.addr(0), remote.rkey()));
        assert_eq!(failed.status, rules().local_protection, "{below} bytes below");
        assert_eq!(remote.bytes(), [0; 64]);
    }
}

#[test]
fn a_vmm_shares_as_much_memory_as_its_nic_may_have_and_no_more() {
    let world = World::new();
    let place = world.vacancy_with("net", &["--max-guest-bytes", "24M"]);
    let ram = |mebibytes: u64| GuestConfig { ram_bytes: mebibytes << 20, ..GuestConfig::default() };
    let meet = |mebibytes| Guest::connect(&place.socket, ram(mebibytes));
    assert!(meet(32).is_err(), "the daemon ends the connection");
    let error = world.daemon.show_nic(&place.name)["error"].as_str().unwrap_or("").to_owned();
    assert!(error.contains("max_guest_bytes"), "and says why: {error:?}");
    meet(16).expect("as much as it may").disconnect();
    world.daemon.run(&["nic", "set", &place.name, "--max-guest-bytes", "32M"]);
    meet(32).expect("as much as it may now");
}
