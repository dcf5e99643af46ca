//! Keys that work requests make and unmake: memory windows, fast registration, remote invalidation
//! (6.2, 7.1).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::sync::atomic::Ordering;

use virtual_guest::backing::rules;
use virtual_guest::control::Mr;
use virtual_guest::qp::{Path, Qp, QpSpec, SendWr};
use virtual_guest::rings::{Cq, Sge};
use virtual_guest::spec::{Put, Take, access, cap, cmd, cqe, err, qps, qpt, status, wc, wr};
use virtual_guest::world::{End, Node, World, pattern};

const BINDABLE: u32 = access::ALL | access::MW_BIND;

fn offered(node: &Node, capability: u64) -> bool {
    node.guest.query_device().unwrap().caps & capability == capability
}

/// Windows that are not offered are not made.
fn refused(node: &Node, kind: u32) {
    let body = Put::new().u32(node.pdn).u32(kind).done(8);
    let refused = node.ctx.command(cmd::MW_ALLOC, &body, 8).unwrap_err();
    assert_eq!(refused.status(), Some(err::NOTSUPP));
}

fn window(node: &Node, kind: u32) -> u32 {
    let body = Put::new().u32(node.pdn).u32(kind).done(8);
    node.ctx.command(cmd::MW_ALLOC, &body, 8).expect("MW_ALLOC").u32_at(0)
}

/// BIND_MW of `len` bytes of `mr` from `at` on; the new key keeps the number and has `low` as its
/// low byte.
fn bind(key: u32, low: u8, mr: &Mr, (at, len): (u64, u64), rights: u32) -> (SendWr, u32) {
    let new = key & !0xff | u32::from(low);
    let mut request = SendWr::new(90, wr::BIND_MW, &[]);
    request.imm = key;
    request.rkey = new;
    request.remote_addr = mr.addr(at);
    request.arg0 = len;
    request.arg1 = u64::from(mr.lkey);
    request.aux = rights;
    (request, new)
}

fn invalidate(key: u32) -> SendWr {
    SendWr { imm: key, ..SendWr::new(91, wr::LOCAL_INV, &[]) }
}

/// Two new connected queue pairs between the nodes: an error ends the pair that it happens on.
fn pair(a: &Node, b: &Node) -> (End, End) {
    let (x, y) = (a.rc(), b.rc());
    x.connect(&y, &Path::default());
    y.connect(&x, &Path::default());
    (x, y)
}

#[test]
fn a_window_of_type_1_opens_its_part_and_nothing_else() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MW_TYPE1) {
        return refused(&nb, 1);
    }
    let mr = nb.ctx.mr(nb.pdn, 8192, BINDABLE).unwrap();
    let (mut a, mut b) = pair(&na, &nb);
    let first = window(&nb, 1);
    let data = pattern(1, 100);
    let from = na.area_of(&data);
    let (request, key) =
        bind(first, 0x77, &mr, (1000, 100), access::REMOTE_WRITE | access::REMOTE_READ);
    assert_eq!(b.run_ok(&request).opcode, wc::BIND_MW);
    a.run_ok(&SendWr::write(1, &[from.sge()], mr.addr(1000), key));
    assert_eq!(mr.view().vec(1000, 100), data);
    assert_eq!(mr.view().vec(999, 1), [0]);
    assert_eq!(mr.view().vec(1100, 1), [0]);
    // A region with a window stays.
    assert_eq!(nb.ctx.dereg(mr.lkey).unwrap_err().status(), Some(err::BUSY));
    // Bound again to another part, the old key is dead.
    let (request, next) = bind(key, 0x78, &mr, (4000, 50), access::REMOTE_READ);
    b.run_ok(&request);
    let back = na.area(50);
    a.run_ok(&SendWr::read(2, &[back.sge()], mr.addr(4000), next));
    assert_eq!(
        a.run(&SendWr::read(3, &[back.sge()], mr.addr(1000), key)).status,
        status::REM_ACCESS_ERR
    );
    // Outside its part, or beyond its rights.
    let cases = [
        (mr.addr(3999), 50u64, wr::RDMA_READ),
        (mr.addr(4001), 50, wr::RDMA_READ),
        (mr.addr(4000), 8, wr::RDMA_WRITE),
    ];
    for (addr, len, opcode) in cases {
        let (mut a, _b) = pair(&na, &nb);
        let mut request = SendWr::new(4, opcode, &[back.part(0, len)]);
        (request.remote_addr, request.rkey) = (addr, next);
        let shown = opcode == wr::RDMA_READ && !rules().windows_have_bounds;
        let expected = if shown { status::SUCCESS } else { status::REM_ACCESS_ERR };
        assert_eq!(a.run(&request).status, expected, "{addr:#x} {len} {opcode}");
    }
    // Unbound, it opens nothing, and the region may go.
    let (_a, mut b) = pair(&na, &nb);
    let (request, last) = bind(next, 0x79, &mr, (0, 0), 0);
    b.run_ok(&request);
    let (mut a, _b) = pair(&na, &nb);
    assert_eq!(
        a.run(&SendWr::read(5, &[back.sge()], mr.addr(4000), last)).status,
        status::REM_ACCESS_ERR
    );
    nb.ctx.dereg(mr.lkey).unwrap();
    nb.ctx.object(cmd::MW_DEALLOC, last).unwrap();
}

#[test]
fn a_window_of_type_2_belongs_to_its_queue_pair_and_is_invalidated() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MW_TYPE2) {
        return refused(&nb, 2);
    }
    let mr = nb.ctx.mr(nb.pdn, 4096, BINDABLE).unwrap();
    let (mut a, mut b) = pair(&na, &nb);
    let key = window(&nb, 2);
    let (request, key) = bind(key, 5, &mr, (64, 64), access::REMOTE_READ);
    b.run_ok(&request);
    let back = na.area(64);
    a.run_ok(&SendWr::read(1, &[back.sge()], mr.addr(64), key));
    // Another queue pair of the same domain has no use of it.
    let (mut other, _peer) = pair(&na, &nb);
    assert_eq!(
        other.run(&SendWr::read(2, &[back.sge()], mr.addr(64), key)).status,
        status::REM_ACCESS_ERR
    );
    assert_eq!(b.run_ok(&invalidate(key)).opcode, wc::LOCAL_INV);
    assert_eq!(
        a.run(&SendWr::read(3, &[back.sge()], mr.addr(64), key)).status,
        status::REM_ACCESS_ERR
    );
    nb.ctx.dereg(mr.lkey).unwrap();
    // Bound twice without being freed in between.
    let mr = nb.ctx.mr(nb.pdn, 4096, BINDABLE).unwrap();
    let (_a, mut b) = pair(&na, &nb);
    let (request, key) = bind(key, 6, &mr, (0, 64), access::REMOTE_READ);
    b.run_ok(&request);
    let (request, _) = bind(key, 7, &mr, (0, 64), access::REMOTE_READ);
    assert_eq!(b.run(&request).status, status::MW_BIND_ERR);
    assert_eq!(b.qp.state().unwrap(), qps::ERR);
}

#[test]
fn a_bind_is_checked() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MW_TYPE1) {
        return refused(&nb, 1);
    }
    let good = nb.ctx.mr(nb.pdn, 4096, BINDABLE).unwrap();
    let unbindable = nb.ctx.mr(nb.pdn, 4096, access::ALL).unwrap();
    let readonly = nb.ctx.mr(nb.pdn, 4096, access::REMOTE_READ | access::MW_BIND).unwrap();
    let other_pd = nb.ctx.create_pd().unwrap();
    let foreign = nb.ctx.mr(other_pd, 4096, BINDABLE).unwrap();
    let read = access::REMOTE_READ;
    let cases = [
        ("no MW_BIND", &unbindable, (0, 64), read, 0u32),
        ("another domain", &foreign, (0, 64), read, 0),
        ("write without local write", &readonly, (0, 64), access::REMOTE_WRITE, 0),
        ("beyond the region", &good, (4095, 2), read, 0),
        ("length wraps", &good, (8, u64::MAX - 4), read, 0),
        ("wrong present key", &good, (0, 64), read, 1),
        ("key of nothing", &good, (0, 64), read, 0x0100_0000),
    ];
    for (what, mr, range, rights, spoil) in cases {
        let (_a, mut b) = pair(&na, &nb);
        let key = window(&nb, 1);
        let (mut request, _) = bind(key, 9, mr, range, rights);
        request.imm ^= spoil;
        assert_eq!(b.run(&request).status, status::MW_BIND_ERR, "{what}");
    }
    assert_eq!(
        nb.ctx
            .command(cmd::MW_ALLOC, &Put::new().u32(nb.pdn).u32(3).done(8), 8)
            .unwrap_err()
            .status(),
        Some(err::INVAL)
    );
}

/// A node's kernel: context 0, where fast registration is allowed.
fn kernel(node: &Node) -> Node {
    let ctx = node.guest.kernel().expect("context 0");
    let pdn = ctx.create_pd().unwrap();
    Node { ctx, pdn, ..node.clone() }
}

fn kernel_end(node: &Node) -> End {
    let (scq, rcq) = (Cq::create(&node.ctx, 64, 0).unwrap(), Cq::create(&node.ctx, 64, 0).unwrap());
    let qp = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &QpSpec::new(qpt::RC)).unwrap();
    End { node: node.clone(), qp, scq, rcq }
}

fn fast(node: &Node, pages: u32) -> virtual_guest::guest::Result<u32> {
    let body = Put::new().u32(node.pdn).u32(pages).done(8);
    Ok(node.ctx.command(cmd::MR_ALLOC, &body, 8)?.u32_at(0))
}

/// REG_MR over `pages`, with `low` as the key's low byte.
fn reg_mr(key: u32, low: u8, iova: u64, len: u64, array: u64, pages: u32) -> (SendWr, u32) {
    let new = key & !0xff | u32::from(low);
    let mut request = SendWr::new(92, wr::REG_MR, &[]);
    request.rkey = new;
    request.remote_addr = iova;
    request.arg0 = len;
    request.imm = access::ALL;
    request.aux = pages;
    request.arg1 = array | 12 << 56;
    (request, new)
}

#[test]
fn a_fast_registration_maps_scattered_pages_and_is_invalidated() {
    let world = World::new();
    let (na, nb) = (world.node(), kernel(&world.node()));
    if !offered(&nb, cap::MEM_MGT) {
        assert_eq!(fast(&nb, 4).unwrap_err().status(), Some(err::NOTSUPP));
        return;
    }
    let (mut a, mut b) = (na.rc(), kernel_end(&nb));
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let ram = nb.guest.ram();
    let (pages, array) = (ram.alloc_scattered(5), ram.alloc(1));
    let view = pages.view(0, pages.len());
    view.fill(0, pages.len(), 0);
    for (i, gpa) in pages.gpas().iter().enumerate() {
        array.view(0, 4096).store64(8 * i as u64, *gpa, Ordering::Relaxed);
    }
    let mut key = fast(&nb, 8).unwrap();
    let data = pattern(3, 15_000);
    let from = na.area_of(&data);
    for round in 0..5u8 {
        let iova = 0x10_0000_0000 + 300;
        let (request, new) = reg_mr(key, round, iova, 15_000, array.gpa(0), 5);
        assert_eq!(b.run_ok(&request).opcode, wc::REG_MR);
        a.run_ok(&SendWr::write(1, &[from.sge()], iova, new));
        assert_eq!(view.vec(300, 15_000), data);
        assert_eq!(view.vec(299, 1), [0]);
        b.run_ok(&invalidate(new));
        key = new;
        view.fill(0, pages.len(), 0);
    }
    // Invalid now: its key opens nothing, and can not be invalidated again.
    let failed = a.run(&SendWr::write(2, &[from.sge()], 0x10_0000_0000 + 300, key));
    assert_eq!(failed.status, status::REM_ACCESS_ERR);
    assert!(view.vec(0, pages.len()).iter().all(|x| *x == 0));
}

#[test]
fn a_fast_registration_is_checked() {
    let world = World::new();
    let (na, nb) = (world.node(), kernel(&world.node()));
    if !offered(&nb, cap::MEM_MGT) {
        return;
    }
    let ram = nb.guest.ram();
    let (pages, array) = (ram.alloc(2), ram.alloc(1));
    array.view(0, 4096).store64(0, pages.gpa(0), Ordering::Relaxed);
    array.view(0, 4096).store64(8, pages.gpa(4096), Ordering::Relaxed);
    array.view(0, 4096).store64(16, pages.gpa(4096) + 8, Ordering::Relaxed);
    array.view(0, 4096).store64(24, 0x10, Ordering::Relaxed);
    let at = array.gpa(0);
    let cases = [
        ("more pages than allocated", 3u32, 4096 * 3, at),
        ("too few pages for its length", 1, 4097, at),
        ("misaligned page", 1, 4096, at + 16),
        ("page outside memory", 1, 4096, at + 24),
        ("array outside memory", 1, 4096, 0x10),
        ("no length", 1, 0, at),
    ];
    for (what, count, len, array) in cases {
        let (a, mut b) = (na.rc(), kernel_end(&nb));
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        let key = fast(&nb, 2).unwrap();
        let (request, _) = reg_mr(key, 1, 0x1000_0000, len, array, count);
        let failed = b.run(&request);
        assert_ne!(failed.status, status::SUCCESS, "{what}");
        assert_eq!(b.qp.state().unwrap(), qps::ERR, "{what}");
    }
    // Twice without an invalidation.
    let (a, mut b) = (na.rc(), kernel_end(&nb));
    b.connect(&a, &Path::default());
    let key = fast(&nb, 2).unwrap();
    let (request, key) = reg_mr(key, 1, 0x1000_0000, 4096, at, 1);
    b.run_ok(&request);
    let (request, _) = reg_mr(key, 2, 0x1000_0000, 4096, at, 1);
    assert_ne!(b.run(&request).status, status::SUCCESS);
    // Only the kernel may allocate.
    let user = world.node();
    assert_eq!(fast(&user, 2).unwrap_err().status(), Some(err::PERM));
    let most = nb.guest.query_device().unwrap();
    assert!(most.max_mr > 0);
    assert_eq!(fast(&nb, 0).unwrap_err().status(), Some(err::INVAL));
}

#[test]
fn a_send_with_invalidate_closes_the_key_before_the_receive_completes() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MW_TYPE2) {
        return refused(&nb, 2);
    }
    let mr = nb.ctx.mr(nb.pdn, 4096, BINDABLE).unwrap();
    let (mut a, mut b) = pair(&na, &nb);
    let (request, key) = bind(window(&nb, 2), 3, &mr, (0, 64), access::REMOTE_WRITE);
    b.run_ok(&request);
    a.run_ok(&SendWr::write(1, &[], mr.addr(0), key).inline(&[9; 8]));
    let inbox = nb.area(8);
    b.qp.post_recv(2, &[inbox.sge()]);
    let mut send = SendWr::send(3, &[]).inline(&[4; 8]);
    (send.opcode, send.imm) = (wr::SEND_WITH_INV, key);
    a.run_ok(&send);
    let received = b.rcq.ok();
    assert_eq!(received.flags & (cqe::INV | cqe::IMM), cqe::INV);
    assert_eq!(received.imm, key);
    assert_eq!(inbox.bytes(), [4; 8]);
    let failed = a.run(&SendWr::write(4, &[], mr.addr(0), key).inline(&[8; 8]));
    assert_eq!(failed.status, status::REM_ACCESS_ERR);
    assert_eq!(mr.view().vec(0, 8), [9; 8]);
}

#[test]
fn a_send_that_can_not_invalidate_is_the_receivers_error() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MEM_MGT) {
        return;
    }
    let plain = nb.mr(64);
    let (mut a, mut b) = pair(&na, &nb);
    let inbox = nb.area(8);
    b.qp.post_recv(2, &[inbox.sge()]);
    let mut send = SendWr::send(3, &[]).inline(&[4; 8]);
    (send.opcode, send.imm) = (wr::SEND_WITH_INV, plain.rkey);
    a.run_ok(&send);
    let failed = b.rcq.one();
    assert_eq!((failed.wr_id, failed.status), (2, status::LOC_PROT_ERR));
    assert_eq!(b.qp.state().unwrap(), qps::ERR);
}

#[test]
fn a_region_that_was_registered_by_a_command_can_not_be_invalidated() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let plain = nb.mr(64);
    let (_a, mut b) = pair(&na, &nb);
    assert_eq!(b.run(&invalidate(plain.rkey)).status, status::LOC_QP_OP_ERR);
    let (mut a, _b) = pair(&na, &nb);
    a.run_ok(&SendWr::write(1, &[], plain.addr(0), plain.rkey).inline(&[1; 8]));
}

#[test]
fn a_window_never_opens_anything_to_its_own_side() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MW_TYPE1) {
        return refused(&nb, 1);
    }
    let mr = nb.ctx.mr(nb.pdn, 4096, BINDABLE).unwrap();
    let (_a, mut b) = pair(&na, &nb);
    let (request, key) = bind(window(&nb, 1), 3, &mr, (0, 64), access::REMOTE_WRITE);
    b.run_ok(&request);
    let target = na.area(64);
    let sge = Sge { addr: mr.addr(0), length: 64, lkey: key };
    let failed = b.run(&SendWr::write(1, &[sge], target.addr(0), target.rkey()));
    assert_eq!(failed.status, rules().local_protection);
    assert_eq!(target.bytes(), [0; 64]);
}
