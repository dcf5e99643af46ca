//! Control commands: framing, life, ownership, limits (5). Those of queue pairs are
//! `qp_attributes`.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test on a 64-bit host"
)]

use std::sync::Arc;
use std::time::Duration;

use virtual_guest::backing::rules;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::qp::{Av, Path, Qp, QpSpec, SendWr};
use virtual_guest::rings::{Cq, Srq, ring_with_control};
use virtual_guest::spec::{self, Put, Take, access, cap, cmd, err, qps, qpt};
use virtual_guest::world::{Node, World};

const SECOND: Duration = Duration::from_secs(1);

fn bare(world: &World) -> Guest {
    let socket = world.daemon.add_nic("bare", "net", &[]);
    Guest::connect(&socket, GuestConfig::default()).expect("a connection")
}

#[track_caller]
fn refused<T: std::fmt::Debug>(what: &str, got: virtual_guest::guest::Result<T>, expected: u32) {
    match got {
        Err(e) => assert_eq!(e.status(), Some(expected), "{what}: {e}"),
        Ok(v) => panic!("{what}: accepted with {v:?}, expected status {expected}"),
    }
}

#[test]
fn nothing_works_before_init() {
    let world = World::new();
    let guest = bare(&world);
    refused("QUERY_DEVICE", guest.query_device(), err::STATE);
    refused("CONTEXT_CREATE", guest.open(), err::STATE);
    refused("KEEPALIVE", guest.keepalive(), err::STATE);
    assert_eq!(guest.init().unwrap(), 1);
    guest.query_device().unwrap();
    guest.keepalive().unwrap();
}

#[test]
fn init_settles_the_version_and_checks_its_arguments() {
    let world = World::new();
    let guest = bare(&world);
    let page = guest.ram().alloc(1);
    page.view(0, 4096).fill(0, 4096, 0);
    let init = |version: u32, nonce: u64, status: u64| {
        let body = Put::new().u32(version).u32(0).u64(nonce).u64(status).done(24);
        guest.command(cmd::INIT, 0, &body, 8)
    };
    refused("version 0", init(0, 5, page.gpa(0)), err::NOTSUPP);
    refused("low half of the nonce is 0", init(1, 5 << 32, page.gpa(0)), err::INVAL);
    refused("status page outside memory", init(1, 5, 0x1000), err::FAULT);
    refused("misaligned status page", init(1, 5, page.gpa(64)), err::FAULT);
    refused("QUERY_DEVICE", guest.query_device(), err::STATE);
    assert_eq!(
        init(77, 5, page.gpa(0)).unwrap().u32_at(0),
        1,
        "the device's version, not the driver's"
    );
    guest.query_device().unwrap();
}

/// The virtual guest sends INIT as it was first; a driver that knows capabilities is told which are
/// in effect.
#[test]
fn capabilities_are_agreed_in_init() {
    let world = World::new();
    let guest = bare(&world);
    let page = guest.ram().alloc(1);
    page.view(0, 4096).fill(0, 4096, 0);
    let init = |caps: u64, room: u32| {
        let body = Put::new().u32(1).u32(0).u64(5).u64(page.gpa(0)).u64(caps).done(32);
        guest.command(cmd::INIT, 0, &body, room)
    };
    let answer = init(u64::MAX, 16).unwrap();
    assert_eq!((answer.u32_at(0), answer.u64_at(8)), (1, 0), "none that this device does not have");
    assert_eq!(init(0, 8).unwrap().u32_at(0), 1, "an answer that is cut");
    let reserved = Put::new().u32(1).u32(1).u64(5).u64(page.gpa(0)).u64(0).done(32);
    refused("a reserved word", guest.command(cmd::INIT, 0, &reserved, 16), err::NOTSUPP);
    guest.query_device().unwrap();
}

#[test]
fn keepalive_knows_its_life() {
    let world = World::new();
    let node = world.node();
    let body = Put::new().u64(0x4444).done(8);
    refused("another nonce", node.guest.command(cmd::KEEPALIVE, 0, &body, 0), err::STATE);
    node.guest.keepalive().unwrap();
}

#[test]
fn the_cut_of_a_request_into_descriptors_has_no_meaning() {
    let world = World::new();
    let node = world.node();
    let request = Put::new().u16(cmd::QUERY_PORT).zero(2).u32(0).u64(0).done(16);
    let whole = node.guest.raw_control(&[&request], &[40], SECOND).unwrap().unwrap();
    assert_eq!(whole.0, 40);
    for (cut_in, cut_out) in
        [(vec![1, 15], vec![8, 32]), (vec![3, 3, 10], vec![1, 6, 1, 32]), (vec![16], vec![39, 1])]
    {
        let mut parts = Vec::new();
        let mut at = 0;
        for n in cut_in {
            parts.push(&request[at..at + n]);
            at += n;
        }
        let got = node.guest.raw_control(&parts, &cut_out, SECOND).unwrap().unwrap();
        assert_eq!(got, whole);
    }
    let mut long = request;
    long.extend([0; 100]);
    let got = node.guest.raw_control(&[&long], &[500], SECOND).unwrap().unwrap();
    assert_eq!(got.0, 40, "zeroes ask for nothing");
    assert_eq!(got.1[..40], whole.1[..]);
    assert_eq!(got.1[40..], [0xee; 460], "nothing is written beyond the response");
    for len in [101, 300] {
        let mut unknown = long.clone();
        unknown.resize(16 + len, 0);
        unknown[115] = 1;
        let got = node.guest.raw_control(&[&unknown], &[500], SECOND).unwrap().unwrap();
        assert_eq!((got.0, got.1.u32_at(0)), (8, err::NOTSUPP), "unknown bytes (5.9)");
    }
    let mut huge = long;
    huge.resize(257, 0);
    let got = node.guest.raw_control(&[&huge], &[500], SECOND).unwrap().unwrap();
    assert_eq!((got.0, got.1.u32_at(0)), (8, err::NOTSUPP), "longer than any request is");
}

#[test]
fn short_chains_are_answered_as_specified() {
    let world = World::new();
    let node = world.node();
    let header = |opcode: u16| Put::new().u16(opcode).zero(2).u32(0).u64(0).done(16);
    let send = |readable: &[u8], writable: &[u32]| {
        node.guest.raw_control(&[readable], writable, SECOND).unwrap().expect("a used chain")
    };
    let port = header(cmd::QUERY_PORT);
    let (len, bytes) = send(&port, &[39]);
    assert_eq!((len, bytes.u32_at(0)), (8, err::INVAL), "the response does not fit");
    let (len, bytes) = send(&port[..15], &[40]);
    assert_eq!((len, bytes.u32_at(0)), (8, err::INVAL), "half a header");
    let (len, bytes) = send(&header(cmd::GID_SET), &[8]);
    assert_eq!((len, bytes.u32_at(0)), (8, err::INVAL), "no body");
    let (len, bytes) = send(&port, &[7]);
    assert_eq!((len, bytes), (0, vec![0xee; 7]), "no room for a header");
    let only_out = node.guest.raw_control(&[], &[40], SECOND).unwrap().expect("a used chain");
    assert_eq!((only_out.0, only_out.1.u32_at(0)), (8, err::INVAL));
    let only_in = node.guest.raw_control(&[&port], &[], SECOND).unwrap().expect("a used chain");
    assert_eq!(only_in.0, 0);
    let (len, bytes) = send(&header(0x7777), &[100]);
    assert_eq!((len, bytes.u32_at(0)), (8, err::NOTSUPP), "an unknown opcode");
    node.guest.query_port().unwrap();
}

#[test]
fn several_commands_may_be_available_at_a_time_and_complete_in_order() {
    let world = World::new();
    let node = world.node();
    let pages = node.guest.ram().alloc(2);
    let view = pages.view(0, pages.len());
    let request = Put::new().u16(cmd::PD_CREATE).zero(2).u32(node.ctx.id()).u64(0).done(16);
    view.write(0, &request);
    let heads: Vec<u16> = node.guest.with_queue(spec::VQ_CONTROL, |q| {
        let heads = (0..20)
            .map(|i| q.add(&[(pages.gpa(0), 16)], &[(pages.gpa(4096 + 16 * i), 16)]).expect("room"))
            .collect();
        q.kick().unwrap();
        heads
    });
    for (i, head) in heads.into_iter().enumerate() {
        let used = node.guest.with_queue(spec::VQ_CONTROL, |q| q.wait(SECOND)).unwrap();
        assert_eq!(used, Some((head, 16)), "command {i}");
        assert_eq!(
            view.load32(4096 + 16 * i as u64, std::sync::atomic::Ordering::Relaxed),
            err::OK
        );
    }
}

#[test]
fn a_queue_of_garbage_descriptors_does_not_stop_the_device() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let villain = world.node();
    // A loop, a chain out of memory, a head out of range.
    villain.guest.with_queue(spec::VQ_CONTROL, |q| {
        {
            let (view, ..) = q.raw();
            let order = std::sync::atomic::Ordering::Relaxed;
            for (id, addr, next) in
                [(60u64, 0x4000_0000u64, 61u16), (61, 0x4000_0000, 60), (62, 0xdead_0000, 0)]
            {
                view.store64(id * 16, addr, order);
                view.store32(id * 16 + 8, 64, order);
                view.store16(id * 16 + 12, u16::from(id != 62), order);
                view.store16(id * 16 + 14, next, order);
            }
        }
        for head in [60, 62, 999] {
            q.publish(head);
        }
        q.kick().unwrap();
    });
    let word = b.node.area(8);
    for i in 0..50u64 {
        a.run_ok(&SendWr::write(i, &[], word.addr(0), word.rkey()).inline(&i.to_le_bytes()));
    }
    a.node.guest.keepalive().unwrap();
}

#[test]
fn notifications_on_every_queue_are_tolerated_at_any_time() {
    let world = World::new();
    let guest = bare(&world);
    let storm = |guest: &Guest| {
        for queue in 0..guest.queue_count() {
            for _ in 0..20 {
                guest.kick_fd(queue).unwrap().write(1).unwrap();
            }
        }
    };
    storm(&guest);
    guest.init().unwrap();
    storm(&guest);
    guest.shutdown().unwrap();
    storm(&guest);
    refused("after SHUTDOWN", guest.query_port(), err::STATE);
    guest.init().unwrap();
    guest.query_port().unwrap();
}

#[test]
fn init_and_shutdown_end_every_object() {
    let world = World::new();
    let node = world.node();
    let mr = node.mr(64);
    let end = node.rc();
    node.guest.init().unwrap();
    refused("a key of the last life", node.ctx.dereg(mr.lkey), err::NOENT);
    refused("a queue pair of the last life", end.qp.query(), err::NOENT);
    let shown = world.daemon.show_nic(&node.name);
    for kind in ["contexts", "pds", "mrs", "mr_bytes", "cqs", "qps"] {
        // The kernel's context may count as one.
        let most = u64::from(kind == "contexts");
        assert!(shown["objects"][kind].as_u64().expect(kind) <= most, "{kind}: {shown}");
    }
    node.guest.shutdown().unwrap();
    refused("after SHUTDOWN", node.guest.query_device(), err::STATE);
    refused("after SHUTDOWN", node.guest.shutdown(), err::STATE);
    assert!(node.guest.stop_rings().is_ok());
}

#[test]
fn a_domain_with_children_can_not_be_destroyed() {
    let world = World::new();
    let node = world.node();
    let mr = node.mr(64);
    refused("a region", node.ctx.destroy_pd(node.pdn), err::BUSY);
    node.ctx.dereg(mr.lkey).unwrap();
    let ah = node.ctx.create_ah(node.pdn, &Av::to(node.gid)).unwrap();
    refused("an address handle", node.ctx.destroy_pd(node.pdn), err::BUSY);
    node.ctx.destroy_ah(ah).unwrap();
    let end = node.rc();
    refused("a queue pair", node.ctx.destroy_pd(node.pdn), err::BUSY);
    end.qp.destroy().unwrap();
    let srq = Srq::create(&node.ctx, node.pdn, 16, 1, 0).unwrap();
    refused("an SRQ", node.ctx.destroy_pd(node.pdn), err::BUSY);
    srq.destroy().unwrap();
    node.ctx.destroy_pd(node.pdn).unwrap();
    refused("twice", node.ctx.destroy_pd(node.pdn), err::NOENT);
}

#[test]
fn limits_are_reported_and_honoured_and_change_on_a_live_nic() {
    let world = World::new();
    let options = ["--max-qps", "3", "--max-mrs", "2", "--max-mr-bytes", "64K", "--max-cqs", "4"];
    let node = world.node_with("net", &options, GuestConfig::default());
    let limits = node.guest.query_device().unwrap();
    assert_eq!((limits.max_qp, limits.max_mr, limits.max_cq), (3, 2, 4));
    assert_eq!(limits.max_mr_bytes, 65_536);
    let (scq, rcq) = (node.cq(16), node.cq(16));
    let spec = QpSpec::new(qpt::RC);
    let make = || Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec);
    let mut kept: Vec<Qp> = (0..3).map(|_| make().unwrap()).collect();
    refused("a fourth queue pair", make(), err::NOMEM);
    world.daemon.run(&["nic", "set", &node.name, "--max-qps", "5"]);
    assert_eq!(node.guest.query_device().unwrap().max_qp, 5);
    kept.extend((0..2).map(|_| make().unwrap()));
    refused("a sixth", make(), err::NOMEM);
    world.daemon.run(&["nic", "set", &node.name, "--max-qps", "1"]);
    for qp in &kept {
        assert_eq!(qp.state().unwrap(), qps::RESET, "existing objects stay");
    }
    for qp in kept.drain(..) {
        refused("above the limit", make(), err::NOMEM);
        qp.destroy().unwrap();
    }
    make().unwrap();
    let mr = |len| node.ctx.mr(node.pdn, len, access::ALL);
    let first = mr(40_000).unwrap();
    refused("more bytes than there may be", mr(40_000), err::NOMEM);
    let _second = mr(20_000).unwrap();
    refused("a third region", mr(100), err::NOMEM);
    node.ctx.dereg(first.lkey).unwrap();
    mr(40_000).unwrap();
    let _more = (node.cq(16), node.cq(16));
    refused("a fifth CQ", Cq::create(&node.ctx, 16, 0), err::NOMEM);
}

#[test]
fn sizes_beyond_the_limits_are_refused_not_clamped() {
    let world = World::new();
    let node = world.node();
    let limits = node.guest.query_device().unwrap();
    let (scq, rcq) = (node.cq(16), node.cq(16));
    // The rings are not as large as they claim to be needed; the size must be refused first or the
    // list as too small.
    let buf = Buf::contiguous(node.guest.ram(), 1 << 20);
    let list = PageList::of(node.guest.ram(), buf.pages(), 0);
    let create = |sq: u32, rq: u32, wr: [u32; 2], sge: [u16; 2], inline: u16, strides: [u8; 2]| {
        let body = Put::new()
            .u32(node.pdn)
            .u32(qpt::RC)
            .u32(0)
            .u32(scq.cqn)
            .u32(rcq.cqn)
            .u32(spec::NO_SRQ)
            .u32(sq)
            .u32(rq)
            .u32(wr[0])
            .u32(wr[1])
            .u16(sge[0])
            .u16(sge[1])
            .u16(inline)
            .u8(strides[0])
            .u8(strides[1])
            .bytes(&list.bytes())
            .bytes(&list.bytes())
            .done(96);
        node.ctx.command(cmd::QP_CREATE, &body, 16)
    };
    create(16, 16, [16, 16], [1, 1], 0, [6, 5]).expect("a sound one");
    create(16, 16, [5, 9], [1, 1], 16, [6, 5]).expect("fewer requests than entries");
    let bad = err::INVAL;
    refused("SQ of 15", create(15, 16, [15, 16], [1, 1], 0, [6, 5]), bad);
    refused("RQ of 3", create(16, 3, [16, 3], [1, 1], 0, [6, 5]), bad);
    refused("more requests than entries", create(16, 16, [17, 16], [1, 1], 0, [6, 5]), bad);
    refused("no requests", create(16, 16, [0, 16], [1, 1], 0, [6, 5]), bad);
    refused("stride too small for SGEs", create(16, 16, [16, 16], [2, 1], 0, [6, 5]), bad);
    refused("stride too small for inline", create(16, 16, [16, 16], [1, 1], 17, [6, 5]), bad);
    refused("RQ stride too small", create(16, 16, [16, 16], [1, 2], 0, [6, 5]), bad);
    refused("stride 32", create(16, 16, [16, 16], [0, 1], 0, [5, 5]), bad);
    refused("stride 8192", create(16, 16, [16, 16], [1, 1], 0, [13, 5]), bad);
    refused("stride 2^255", create(16, 16, [16, 16], [1, 1], 0, [255, 5]), bad);
    let wr = (limits.max_qp_wr + 1).next_power_of_two();
    refused("too many requests", create(wr, 16, [wr, 16], [1, 1], 0, [6, 5]), bad);
    refused("2^31 requests", create(1 << 31, 16, [1 << 31, 16], [1, 1], 0, [6, 5]), bad);
    let sge = limits.max_send_sge as u16 + 1;
    refused("too many send SGEs", create(16, 16, [16, 16], [sge, 1], 0, [12, 5]), bad);
    let sge = limits.max_recv_sge as u16 + 1;
    refused("too many receive SGEs", create(16, 16, [16, 16], [1, sge], 0, [6, 12]), bad);
    let inline = limits.max_inline as u16 + 1;
    refused("too much inline", create(16, 16, [16, 16], [1, 1], inline, [12, 5]), bad);
    refused("CQ of 3", Cq::create(&node.ctx, 3, 0), bad);
    refused("CQ of 0", raw_cq(&node, 0, &list), bad);
}

fn raw_cq(node: &Node, entries: u32, list: &PageList) -> virtual_guest::guest::Result<Vec<u8>> {
    let body = Put::new().u32(entries).u32(0).bytes(&list.bytes()).done(32);
    node.ctx.command(cmd::CQ_CREATE, &body, 8)
}

#[test]
fn ring_lists_must_be_aligned_and_large_enough() {
    let world = World::new();
    let node = world.node();
    let buf = Buf::contiguous(node.guest.ram(), 4 * 4096);
    buf.view().fill(0, buf.len(), 0);
    let gpa = buf.pages().gpa(0);
    let (bytes, _) = ring_with_control(64, 6);
    assert!(bytes > 4096);
    refused(
        "no room for the control block",
        raw_cq(&node, 64, &PageList::contiguous(gpa, 1, 0, 12)),
        err::INVAL,
    );
    refused("offset 32", raw_cq(&node, 16, &PageList::contiguous(gpa, 2, 32, 12)), err::INVAL);
    raw_cq(&node, 16, &PageList::contiguous(gpa, 2, 64, 12)).unwrap();
    raw_cq(&node, 64, &PageList::contiguous(gpa, 2, 0, 12)).unwrap();
}

#[test]
fn doorbell_slots_run_out_and_another_page_helps() {
    let world = World::new();
    let node = world.node();
    let (scq, rcq) = (node.cq(16), node.cq(16));
    let spec = QpSpec { sq: 2, rq: 2, ..QpSpec::new(qpt::RC) };
    let mut qps = Vec::new();
    let mut slots = std::collections::BTreeSet::new();
    loop {
        match Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec) {
            Ok(mut qp) => {
                for doorbell in [qp.raw_sq(0).2.number, qp.raw_rq(0).2.number] {
                    assert!(slots.insert(doorbell), "a slot was given twice");
                }
                qps.push(qp);
            }
            Err(e) => {
                assert_eq!(e.status(), Some(err::NOMEM));
                break;
            }
        }
        assert!(qps.len() <= 480, "960 slots hold 480 queue pairs");
    }
    assert_eq!(qps.len(), 480);
    assert_eq!(node.ctx.add_doorbell_page().unwrap(), 1);
    let mut last = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec).unwrap();
    assert_eq!(last.raw_sq(0).2.number >> 16, 1);
    let mut end = virtual_guest::world::End { node: node.clone(), qp: last, scq, rcq };
    end.qp.connect(end.address(), &Path::default()).unwrap();
    let word = node.area(8);
    end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    // A queue pair that goes gives its slots back.
    qps.pop().unwrap().destroy().unwrap();
    let again = Qp::create(&node.ctx, node.pdn, &end.scq, &end.rcq, &spec).unwrap();
    drop(again);
}

#[test]
fn a_doorbell_slot_that_is_given_again_starts_at_zero() {
    let world = World::new();
    let node = world.node();
    let (scq, rcq) = (node.cq(64), node.cq(64));
    let mut end = node.end_with(&QpSpec::new(qpt::RC), scq, rcq);
    end.qp.connect(end.address(), &Path::default()).unwrap();
    let word = node.area(8);
    for i in 0..10 {
        end.run_ok(&SendWr::write(i, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    }
    let number = end.qp.raw_sq(0).2.number;
    end.qp.destroy().unwrap();
    let mut found = false;
    for _ in 0..16 {
        end.qp =
            Qp::create(&node.ctx, node.pdn, &end.scq, &end.rcq, &QpSpec::new(qpt::RC)).unwrap();
        found |= [end.qp.raw_sq(0).2.number, end.qp.raw_rq(0).2.number].contains(&number);
        end.qp.connect(end.address(), &Path::default()).unwrap();
        // The other slot of the queue pair makes the device look at the whole group.
        end.qp.post_recv(1, &[]);
        end.scq.silent(Duration::from_millis(5));
        let done = end.run_ok(&SendWr::write(77, &[], word.addr(0), word.rkey()).inline(&[2; 8]));
        assert_eq!(done.wqe_index, 0);
    }
    assert!(found, "the slot of a destroyed queue pair never came back");
}

#[test]
fn a_completion_queue_keeps_its_entries_over_a_resize() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    if a.node.guest.query_device().unwrap().caps & cap::CQ_RESIZE == 0 {
        refused("not offered", a.node.ctx.command(cmd::CQ_RESIZE, &[0; 40], 0), err::NOTSUPP);
        return;
    }
    let word = b.node.area(8);
    let write = |i: u64| SendWr::write(i, &[], word.addr(0), word.rkey()).inline(&i.to_le_bytes());
    for i in 0..300u64 {
        a.run_ok(&write(i));
    }
    for i in 300..306 {
        a.qp.post_send(&write(i));
    }
    while word.word(0) != 305 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    let (bytes, ctrl) = ring_with_control(8, 6);
    let ring = Arc::new(Buf::scattered(a.node.guest.ram(), 0, bytes));
    ring.view().fill(0, bytes, 0);
    let list = PageList::of(a.node.guest.ram(), ring.pages(), 0);
    let order = std::sync::atomic::Ordering::SeqCst;
    ring.view().store32(ctrl + spec::CTRL_CONSUMER, a.scq.consumer(), order);
    let small = a.scq.resize_request(4, 4, &list);
    refused("six entries wait", a.node.ctx.command(cmd::CQ_RESIZE, &small, 0), err::INVAL);
    a.node.ctx.command(cmd::CQ_RESIZE, &a.scq.resize_request(8, 8, &list), 0).unwrap();
    a.scq.moved_to(8, ring);
    for i in 300..306 {
        assert_eq!(a.scq.ok().wr_id, i);
    }
    for i in 306..400 {
        assert_eq!(a.run_ok(&write(i)).wr_id, i);
    }
}

#[test]
fn queries_tell_what_the_nic_is() {
    let world = World::new();
    let socket = world.daemon.add_nic("m", "net", &["--mac", "02:11:22:33:44:55"]);
    let guest = Guest::connect(&socket, GuestConfig::default()).unwrap();
    assert_eq!(guest.device().mac, [2, 0x11, 0x22, 0x33, 0x44, 0x55]);
    assert_eq!(guest.device().abi_version, 1);
    guest.init().unwrap();
    let port = guest.query_port().unwrap();
    assert_eq!((port.state, port.phys_state, port.max_mtu, port.active_mtu), (4, 5, 5, 5));
    assert!(port.gid_tbl_len >= 16 && port.pkey_tbl_len == 1 && port.max_msg_sz >= rules().message);
    let device = guest.query_device().unwrap();
    assert_ne!(device.guid, 0);
    assert!(device.max_send_sge >= 16 && device.max_recv_sge >= 16 && device.max_qp_wr >= 4096);
    assert_eq!(device.page_size_cap & 4096, 4096);
}
