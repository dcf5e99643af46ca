//! What verbs promise, where no other file of tests has it: memory, keys, work requests,
//! completions, arming, states and addresses (docs/virtio-rdma.md 6 to 9).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::control::Mr;
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::qp::{Attr, Av, Path, Qp, QpSpec, SendWr};
use virtual_guest::rings::{Sge, ring_with_control};
use virtual_guest::spec::{
    self, ARM_ANY, GSI_QKEY, Put, Take, access, attr, cap, cmd, cqe, err, event, qps, qpt, send,
    status, wr,
};
use virtual_guest::world::{End, Node, World, ipv4_gid, pattern};

const LONG: Duration = Duration::from_secs(20);
const MOMENT: Duration = Duration::from_millis(30);
const PLUGGED: u64 = 1 << 32;
const GRH: u64 = 40;
const MAD: u64 = 256;
/// Opcodes that only some devices have.
const FLUSH: u8 = 14;
const ATOMIC_WRITE: u8 = 15;

fn offered(node: &Node, capability: u64) -> bool {
    node.guest.query_device().unwrap().caps & capability == capability
}

fn pair(a: &Node, b: &Node, path: &Path) -> (End, End) {
    let (x, y) = (a.rc(), b.rc());
    x.connect(&y, path);
    y.connect(&x, path);
    (x, y)
}

#[test]
fn list_pages_are_not_looked_at_after_the_answer() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let ram = b.node.guest.ram();
    let buf = Buf::scattered(ram, 0, 700 * spec::PAGE);
    let list = PageList::of(ram, buf.pages(), 0);
    assert_eq!(list.levels, 2);
    let iova = 0x7000_0000_0000;
    let (_, rkey) =
        b.node.ctx.mr_reg(b.node.pdn, access::ALL, (iova, buf.len()), &list).expect("MR_REG");
    for page in list.lists() {
        page.view(0, spec::PAGE).fill(0, spec::PAGE, 0xff);
    }
    for page in [0, 300, 699] {
        let at = page * spec::PAGE;
        a.run_ok(&SendWr::write(1, &[], iova + at, rkey).inline(&[9; 8]));
        assert_eq!(buf.view().vec(at, 8), [9; 8]);
    }
}

#[test]
fn the_status_page_is_the_drivers_but_for_one_word() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let page = a.node.guest.status_page().clone();
    let alive = page.load32(spec::STATUS_ALIVE, Ordering::Relaxed);
    let word = b.node.area(8);
    for n in 0..20 {
        // Asleep and awake.
        std::thread::sleep(Duration::from_millis(2));
        a.run_ok(&SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    }
    a.node.guest.keepalive().unwrap();
    assert_eq!(page.load32(spec::STATUS_ALIVE, Ordering::Relaxed), alive);
    assert!(page.vec(4, 60).iter().chain(&page.vec(68, spec::PAGE - 68)).all(|byte| *byte == 0));
}

/// The ring of a CQ or an SRQ lies in memory that the monitor takes away.
#[test]
fn a_ring_whose_memory_goes_ends_its_object() {
    let world = World::new();
    let node = world.node();
    node.guest.add_memory(PLUGGED, 2 << 20).unwrap();
    let ring = Buf::contiguous_in(node.guest.ram(), PLUGGED, 4 * spec::PAGE);
    ring.view().fill(0, ring.len(), 0);
    let page = |n: u64| PageList::contiguous(ring.pages().gpa(n * spec::PAGE), 1, 0, 12).bytes();
    let cq = Put::new().u32(16).u32(0).bytes(&page(0)).done(32);
    let cqn = node.ctx.command(cmd::CQ_CREATE, &cq, 8).unwrap().u32_at(0);
    let srq = Put::new().u32(node.pdn).u32(16).u32(16).u32(1).u32(0).u8(5).zero(3);
    let srq = srq.bytes(&page(1)).done(48);
    let srqn = node.ctx.command(cmd::SRQ_CREATE, &srq, 8).unwrap().u32_at(0);
    node.guest.remove_memory(PLUGGED).unwrap();
    let mut raised = Vec::new();
    let deadline = Instant::now() + LONG;
    for expected in [(event::CQ_ERR, cqn), (event::SRQ_ERR, srqn)] {
        while !raised.contains(&expected) {
            assert!(Instant::now() < deadline, "{expected:?} is not in {raised:?}");
            let event = node.guest.async_event(MOMENT).unwrap();
            raised.extend(event.map(|event| (event.kind, event.object)));
        }
    }
    node.guest.keepalive().expect("the NIC goes on");
}

fn window(node: &Node, kind: u32) -> u32 {
    let body = Put::new().u32(node.pdn).u32(kind).done(8);
    node.ctx.command(cmd::MW_ALLOC, &body, 8).expect("MW_ALLOC").u32_at(0)
}

fn bind(key: u32, new: u32, mr: &Mr, (at, len): (u64, u64), rights: u32) -> SendWr {
    SendWr {
        imm: key,
        rkey: new,
        remote_addr: mr.addr(at),
        arg0: len,
        arg1: u64::from(mr.lkey),
        aux: rights,
        ..SendWr::new(90, wr::BIND_MW, &[])
    }
}

#[test]
fn who_binds_chooses_the_low_byte_of_the_key() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MW_TYPE1 | cap::MW_TYPE2) {
        return;
    }
    let mr = nb.ctx.mr(nb.pdn, 4096, access::ALL | access::MW_BIND).unwrap();
    for kind in [1, 2] {
        let (mut a, mut b) = pair(&na, &nb, &Path::default());
        let first = window(&nb, kind);
        // The upper 24 bits of what is asked for mean nothing.
        b.run_ok(&bind(first, 0x1234_5601, &mr, (0, 64), access::REMOTE_WRITE));
        let key = first & !0xff | 1;
        a.run_ok(&SendWr::write(1, &[], mr.addr(0), key).inline(&[kind as u8; 8]));
        assert_eq!(mr.view().vec(0, 8), [kind as u8; 8]);
        // The driver may not know the last low byte.
        nb.ctx.object(cmd::MW_DEALLOC, first).expect("by its number");
    }
}

#[test]
fn zero_lengths_and_zero_bases_of_windows() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&nb, cap::MW_TYPE2) || !rules().windows_have_bounds || !rules().moves_data {
        return;
    }
    let mr = nb.ctx.mr(nb.pdn, 4096, access::ALL | access::MW_BIND).unwrap();
    let rights = access::REMOTE_WRITE | access::ZERO_BASED;
    let (mut a, mut b) = pair(&na, &nb, &Path::default());
    let key = window(&nb, 2);
    b.run_ok(&bind(key, key, &mr, (100, 64), rights));
    a.run_ok(&SendWr::write(1, &[], 8, key).inline(&[5; 8]));
    assert_eq!(mr.view().vec(100, 24)[..], [[0; 8], [5; 8], [0; 8]].concat());
    let beyond = a.run(&SendWr::write(2, &[], 60, key).inline(&[5; 8]));
    assert_eq!(beyond.status, status::REM_ACCESS_ERR);
    // A window of type 2 is not unbound by a bind of nothing.
    let (_a, mut b) = pair(&na, &nb, &Path::default());
    let key = window(&nb, 2);
    let failed = b.run(&bind(key, key, &mr, (0, 0), access::REMOTE_WRITE));
    assert_eq!(failed.status, status::MW_BIND_ERR);
    // And none shows a region that has no addresses of its own.
    let flags = access::ALL | access::MW_BIND | access::ZERO_BASED;
    let based = nb.ctx.mr(nb.pdn, 4096, flags).unwrap();
    let (_a, mut b) = pair(&na, &nb, &Path::default());
    let failed = b.run(&bind(key, key, &based, (0, 64), access::REMOTE_WRITE));
    assert_eq!(failed.status, status::MW_BIND_ERR);
    // Nor has it rights that no window has.
    let (_a, mut b) = pair(&na, &nb, &Path::default());
    let failed = b.run(&bind(key, key, &mr, (0, 64), access::REMOTE_WRITE | 0x8000));
    assert_eq!(failed.status, status::MW_BIND_ERR);
}

#[test]
fn flags_that_there_are_not_are_refused() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let word = nb.area(8);
    for flag in [0x10, 0x20, 0x40, 0x80] {
        let (mut a, _b) = pair(&na, &nb, &Path::default());
        let write = SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]);
        let failed = a.run(&SendWr { flags: write.flags | flag, ..write });
        assert_eq!(failed.status, status::LOC_QP_OP_ERR, "{flag:#x}");
        assert_eq!(word.bytes(), [0; 8]);
        let local = SendWr::new(2, wr::LOCAL_INV, &[]);
        let (mut a, _b) = pair(&na, &nb, &Path::default());
        assert_eq!(a.run(&local.flag(flag)).status, status::LOC_QP_OP_ERR, "{flag:#x}");
    }
}

#[test]
fn more_reads_than_may_be_under_way_wait() {
    let world = World::new();
    let path = Path { rd_atomic: 1, ..Path::default() };
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &path);
    let (to, from) = (a.node.area(1 << 16), b.node.area_of(&pattern(5, 1 << 16)));
    for n in 0..32 {
        let (at, sge) = (from.addr(n * 2048), to.part(n * 2048, 2048));
        a.qp.queue_send(&SendWr::read(n, &[sge], at, from.rkey()));
    }
    a.qp.ring_sq();
    for n in 0..32 {
        assert_eq!(a.scq.ok().wr_id, n);
    }
    assert_eq!(to.bytes(), pattern(5, 1 << 16));
}

#[test]
fn who_sees_a_message_sees_the_writes_before_it() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let len = 3u64 << 16;
    let (from, to) = (a.node.area(len), b.node.area(len));
    for round in 1..=100u8 {
        from.set(&vec![round; len as usize]);
        b.qp.post_recv(u64::from(round), &[]);
        a.qp.queue_send(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()).unsignaled());
        a.qp.queue_send(&SendWr::send(2, &[]));
        a.qp.ring_sq();
        assert_eq!(b.rcq.ok().wr_id, u64::from(round));
        // The ends and the middle: a whole look would give late bytes the time to come.
        let view = to.mr.view();
        for at in [192, 192 + len / 2, 192 + len - 1] {
            assert_eq!(view.vec(at, 1), [round], "byte {at} of round {round}");
        }
        a.scq.ok();
    }
}

#[test]
fn atomics_count_in_little_endian() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    if !offered(&a.node, cap::ATOMIC) {
        return;
    }
    let (back, word) = (a.node.area(8), b.node.area_of(&[0xff, 0, 0, 0, 0, 0, 0, 1]));
    a.run_ok(&SendWr::faa(1, back.sge(), (word.addr(0), word.rkey()), 1));
    assert_eq!(word.bytes(), [0, 1, 0, 0, 0, 0, 0, 1]);
    assert_eq!(back.bytes(), [0xff, 0, 0, 0, 0, 0, 0, 1], "what was there, as it lay");
}

#[test]
fn an_atomic_write_is_stored_and_a_flush_ends_when_all_can_see() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !offered(&na, cap::FLUSH | cap::ATOMIC_WRITE) {
        return;
    }
    let rights = access::ALL | access::FLUSH_GLOBAL;
    let path = Path { access: rights, ..Path::default() };
    let (mut a, _b) = pair(&na, &nb, &path);
    let (from, to) = (na.area_of(&[7; 8]), nb.area_with(64, rights));
    let base = SendWr { remote_addr: to.addr(8), rkey: to.rkey(), ..SendWr::default() };
    let stored = SendWr { opcode: ATOMIC_WRITE, flags: send::SIGNALED, ..base.clone() };
    a.run_ok(&SendWr { wr_id: 1, sges: vec![from.sge()], ..stored.clone() });
    assert_eq!(to.bytes()[..24], [[0; 8], [7; 8], [0; 8]].concat());
    a.run_ok(&SendWr { wr_id: 2, ..stored }.inline(&[8; 8]));
    a.qp.queue_send(&SendWr::write(3, &[from.sge()], to.addr(16), to.rkey()).unsignaled());
    let flush = SendWr { opcode: FLUSH, flags: send::SIGNALED, arg0: 32, aux: 1, ..base };
    a.run_ok(&SendWr { wr_id: 4, ..flush });
    assert_eq!(to.bytes()[..24], [[0; 8], [8; 8], [7; 8]].concat());
}

fn datagrams(node: &Node, qkey: u32) -> End {
    let end = node.end(&QpSpec::new(qpt::UD));
    end.qp.start_datagrams(qkey).expect("UD to RTS");
    end
}

#[test]
fn a_qkey_with_the_high_bit_is_the_senders_own() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b, mut c) = (datagrams(&na, 0x1111), datagrams(&nb, 0x1111), datagrams(&nb, 5));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    let to = nb.area(GRH + 8);
    b.qp.post_recv(1, &[to.sge()]);
    c.qp.post_recv(2, &[to.sge()]);
    for (end, n) in [(&c, 3), (&b, 4)] {
        a.run_ok(&SendWr::datagram(n, &[], ah, end.qp.qpn, 0x8000_0005).inline(&[1; 8]));
    }
    assert_eq!(b.rcq.ok().wr_id, 1, "it carried 0x1111");
    c.rcq.silent(MOMENT);
}

#[test]
fn queue_pair_1_keeps_its_qkey() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (na.gsi(), nb.gsi());
    let another = Attr { mask: attr::QKEY, qkey: 0x1234, ..Attr::default() };
    b.qp.modify(&another).expect("RTS to RTS takes it");
    let (from, to) = (a.node.area_of(&pattern(1, 256)), b.node.area(GRH + MAD));
    let ah = a.node.ctx.create_ah(a.node.pdn, &Av::to(nb.gid)).unwrap();
    b.qp.post_recv(7, &[to.sge()]);
    a.run_ok(&SendWr::datagram(1, &[from.sge()], ah, 1, 0x1234));
    b.rcq.silent(MOMENT);
    a.run_ok(&SendWr::datagram(2, &[from.sge()], ah, 1, GSI_QKEY));
    assert_eq!(b.rcq.ok().wr_id, 7);
}

#[test]
fn an_arm_for_nothing_is_none_and_one_for_both_is_for_any() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let to = b.node.area(8);
    let event = |b: &End, timeout| b.node.guest.comp_event(0, timeout).unwrap();
    for (what, expected) in [(0, false), (3, true)] {
        let at = b.rcq.control_block() + spec::CTRL_ARM;
        b.rcq.view().store32(at, 1 << spec::ARM_SEQ_SHIFT | what, Ordering::SeqCst);
        b.qp.post_recv(1, &[to.sge()]);
        a.run_ok(&SendWr::send(2, &[]).inline(&[1; 8]));
        b.rcq.ok();
        let came = event(&b, if expected { LONG } else { MOMENT });
        assert_eq!(came.is_some(), expected, "what = {what}");
    }
}

#[test]
fn completions_are_there_before_their_event() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let to = b.node.area(8);
    for n in 0..200 {
        b.qp.post_recv(n, &[to.sge()]);
        b.rcq.arm(ARM_ANY);
        a.run_ok(&SendWr::send(n, &[]).inline(&[1; 8]));
        b.node.guest.comp_event(0, LONG).unwrap().expect("an event");
        assert!(b.rcq.ready(), "an event without its completion, round {n}");
        b.rcq.ok();
    }
}

#[test]
fn every_error_is_solicited_and_reserved_bytes_are_zero() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let (from, to) = (a.node.area_of(&[1; 65]), b.node.area(64));
    b.qp.post_recv(1, &[to.sge()]);
    b.qp.post_recv(2, &[to.sge()]);
    a.qp.queue_send(&SendWr::send(3, &[from.sge()]));
    a.qp.queue_send(&SendWr::send(4, &[from.sge()]));
    a.qp.ring_sq();
    for (cq, own) in [(&mut a.scq, 0), (&mut b.rcq, cqe::RECV)] {
        for _ in 0..2 {
            let failed = cq.one();
            assert_ne!(failed.status, status::SUCCESS);
            assert_eq!(failed.flags & (cqe::RECV | cqe::SOLICITED), own | cqe::SOLICITED);
        }
        for index in 0..2 {
            let raw = cq.view().vec(index * 64, 64);
            assert_eq!((raw[39], &raw[54..60]), (0, &[0; 6][..]));
        }
    }
}

#[test]
fn psns_have_24_bits() {
    let world = World::new();
    let node = world.node();
    let (mut a, mut b) = (node.rc(), node.rc());
    for (end, peer) in [(&a, &b), (&b, &a)] {
        end.qp.to_init(&Path::default()).unwrap();
        let rtr = end.qp.rtr_attr(peer.address(), &Path::default());
        end.qp.modify(&Attr { rq_psn: 0xab00_0007, ..rtr }).expect("any 32 bits");
        let rts = end.qp.rts_attr(&Path::default());
        end.qp.modify(&Attr { sq_psn: 0xcd00_0007, ..rts }).expect("any 32 bits");
        let got = end.qp.query().unwrap();
        assert_eq!((got.rq_psn, got.sq_psn), (7, 7));
    }
    let to = node.area(8);
    b.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::send(2, &[]).inline(&[1; 8]));
    b.rcq.ok();
}

#[test]
fn a_queue_pair_in_reset_can_be_moved_to_error() {
    let world = World::new();
    let node = world.node();
    let mut end = node.rc();
    end.qp.fail().expect("RESET to ERR");
    assert_eq!(end.qp.state().unwrap(), qps::ERR);
    end.qp.post_send(&SendWr::send(1, &[]).unsignaled());
    end.qp.post_recv(2, &[]);
    assert_eq!(end.scq.one().status, status::WR_FLUSH_ERR);
    assert_eq!(end.rcq.one().status, status::WR_FLUSH_ERR);
}

#[test]
fn what_a_queue_pair_in_reset_shows_is_not_looked_at() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let word = b.node.area(8);
    let write = |n| SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[1; 8]);
    for n in 0..5 {
        a.run_ok(&write(n));
    }
    for end in [&mut a, &mut b] {
        end.qp.modify(&Attr::state(qps::RESET)).unwrap();
    }
    // As a late post of another thread: the old index, rung once more.
    let (_, _, doorbell) = a.qp.raw_sq(0);
    doorbell.ring(9);
    a.scq.silent(MOMENT);
    assert!(a.node.guest.async_event(MOMENT).unwrap().is_none(), "no QP_FATAL");
    // The next life begins at index 0, and finds nothing of it. By hand: another RESET would hide
    // it.
    doorbell.store(0);
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    a.scq.silent(MOMENT);
    let (ring, at, doorbell) = a.qp.raw_sq(0);
    write(77).encode(&ring, at);
    doorbell.ring(1);
    let done = a.scq.ok();
    assert_eq!((done.wr_id, done.wqe_index), (77, 0));
    a.scq.silent(MOMENT);
}

#[test]
fn a_queue_of_no_entries_does_not_exist() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let none = QpSpec { sq: 0, rq: 0, ..QpSpec::new(qpt::RC) };
    let (scq, rcq) = (nb.cq(16), nb.cq(16));
    let mut b =
        End { qp: Qp::create(&nb.ctx, nb.pdn, &scq, &rcq, &none).unwrap(), scq, rcq, node: nb };
    let mut a = na.rc();
    let path = Path { rnr_retry: 0, ..Path::default() };
    a.connect(&b, &path);
    b.connect(&a, &path);
    let word = b.node.area(8);
    a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    let failed = a.run(&SendWr::send(2, &[]).inline(&[1; 8]));
    assert_eq!(failed.status, status::RNR_RETRY_EXC_ERR);
    b.qp.fail().unwrap();
    b.rcq.silent(MOMENT);
    b.qp.destroy().unwrap();
}

#[test]
fn four_kilobyte_pages_are_good_for_everything_and_larger_ones_as_told() {
    let world = World::new();
    let node = world.node();
    let sizes = node.guest.query_device().unwrap().page_size_cap;
    assert_eq!(sizes & 4096, 4096);
    assert_eq!(sizes & 0xfff, 0, "none is smaller than a list page");
    let buf = Buf::contiguous(node.guest.ram(), 4 << 20);
    for shift in 12..=21u8 {
        let at = buf.pages().gpa(0).next_multiple_of(1 << shift);
        let list = PageList::contiguous(at, 1, 0, shift);
        let made = node.ctx.mr_reg(node.pdn, access::ALL, (0, 4096), &list);
        match made {
            Ok((lkey, _)) => node.ctx.dereg(lkey).unwrap(),
            Err(e) => assert_eq!(
                (e.status(), sizes >> shift & 1),
                (Some(err::INVAL), 0),
                "pages of 1 << {shift}"
            ),
        }
    }
}

#[test]
fn rings_wrap_where_they_end() {
    let world = World::new();
    let node = world.node();
    let (scq, rcq) = (node.cq(2), node.cq(2));
    let spec = QpSpec { sq: 2, rq: 2, ..QpSpec::new(qpt::RC) };
    let mut end = node.end_with(&spec, scq, rcq);
    end.qp.connect(end.address(), &Path::default()).unwrap();
    let to = node.area(8);
    let (bytes, ctrl) = ring_with_control(2, 6);
    assert_eq!((bytes, ctrl), (256, 128));
    for n in 0..9u64 {
        end.qp.post_recv(n, &[Sge { length: 8, ..to.sge() }]);
        end.scq.arm(ARM_ANY);
        let sent = end.run_ok(&SendWr::send(n, &[]).inline(&n.to_le_bytes()));
        assert_eq!(u64::from(sent.wqe_index), n);
        assert_eq!(end.rcq.ok().wr_id, n);
        assert_eq!(to.word(0), n);
        end.node.guest.comp_event(0, LONG).unwrap().expect("an event");
        // The driver's half of the control block is the driver's: two words of it.
        assert_eq!(end.scq.view().vec(ctrl + 8, 56), [0; 56]);
    }
}

#[test]
fn addresses_are_set_again_replaced_and_removed() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if rules().strangers_are_refused {
        // An RNIC has the addresses of its host, and no others can be made up here.
        return;
    }
    let (guest, first, second) = (&nb.guest, nb.gid, ipv4_gid(7, 7));
    let set = |gid| guest.set_gid(5, spec::GID_ROCE_V2, gid);
    let remove = || guest.set_gid(5, spec::GID_NONE, [0; 16]);
    remove().expect("nothing was there");
    set(first).expect("an address that it has");
    set(first).expect("once more");
    set(second).expect("another in its place");
    let reach = |gid: [u8; 16], index: u16| {
        let (a, b) = (na.rc(), nb.rc());
        let hasty = Path::hasty();
        a.qp.connect((gid, b.qp.qpn), &hasty).unwrap();
        b.qp.to_init(&hasty).unwrap();
        let rtr = b.qp.rtr_attr(a.address(), &hasty);
        b.qp.modify(&Attr { av: Av { sgid_index: index, ..rtr.av }, ..rtr }).unwrap();
        b.qp.to_rts(&hasty).unwrap();
        let word = nb.area(8);
        let write = SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]);
        (a, b, write)
    };
    let (mut a, b, write) = reach(second, 5);
    a.run_ok(&write);
    remove().expect("it was there");
    remove().expect("and is not");
    // Nobody finds the NIC by it, nor does it move anything under it.
    assert_eq!(a.run(&write).status, status::RETRY_EXC_ERR);
    let refused = b.qp.modify(&b.qp.rtr_attr(a.address(), &Path::default()));
    assert_eq!(refused.unwrap_err().status(), Some(err::INVAL));
    let (mut a, _b, write) = reach(first, 0);
    a.run_ok(&write);
}

/// IBTA's responder class A (8.3) for every opcode that takes a receive; a write with immediate
/// puts its bytes elsewhere, and any receive will do.
#[test]
fn a_receives_own_fault_counts_where_its_elements_do() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let to = nb.area(8);
    let denied = Sge { lkey: to.sge().lkey ^ 0x100, ..to.sge() };
    let inline = |request: SendWr| request.inline(&[7; 8]);
    let mut rows = vec![("SEND", inline(SendWr::send(1, &[])))];
    rows.push(("SEND_WITH_IMM", inline(SendWr::send(1, &[]).imm(5))));
    if offered(&nb, cap::MEM_MGT) {
        let opcode = wr::SEND_WITH_INV;
        rows.push(("SEND_WITH_INV", SendWr { opcode, ..inline(SendWr::send(1, &[])) }));
    }
    for (what, request) in rows {
        let (mut a, mut b) = pair(&na, &nb, &Path::default());
        b.qp.post_recv(3, &[denied]);
        assert_eq!(a.run(&request).status, status::REM_OP_ERR, "{what}");
        assert_eq!(b.rcq.one().status, rules().bad_receive, "{what}");
        assert_eq!(to.bytes(), [0; 8], "{what}");
    }
    let (mut a, mut b) = pair(&na, &nb, &Path::default());
    let place = nb.area(8);
    b.qp.post_recv(3, &[denied]);
    a.run_ok(&inline(SendWr::write(1, &[], place.addr(0), place.rkey())).imm(5));
    let received = b.rcq.ok();
    assert_eq!((received.wr_id, received.imm, received.byte_len), (3, 5, 8));
    assert_eq!(place.bytes(), [7; 8]);
}
