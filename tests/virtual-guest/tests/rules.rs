//! Rules that programs found broken: regions of nothing, registrations changed under traffic,
//! clocks, counters and numbers (5.7, 6.2, 7.3).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::collections::HashSet;
use std::time::Duration;

use virtual_guest::backing::rules;
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::qp::{Av, Qp, QpSpec, SendWr};
use virtual_guest::rings::{Cq, Sge, Srq};
use virtual_guest::spec::{self, access, cap, cmd, err, qpt, status};
use virtual_guest::world::{Node, World};

/// Several turns of a worker.
const LONG: u64 = 2 << 20;

#[test]
fn a_region_of_length_zero_opens_nothing() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let made = b.node.ctx.mr_reg(b.node.pdn, access::ALL, (0x1234, 0), &PageList::none());
    if !rules().numbers_are_random {
        assert_eq!(made.unwrap_err().status(), Some(err::INVAL), "a registration has pages");
        return;
    }
    let (lkey, rkey) = made.unwrap();
    a.run_ok(&SendWr::write(1, &[], 0x1234, rkey));
    a.run_ok(&SendWr::read(2, &[], 0x1234, rkey));
    let local = a.node.area(1);
    let failed = a.run(&SendWr::write(3, &[local.sge()], 0x1234, rkey));
    assert_eq!(failed.status, status::REM_ACCESS_ERR);
    b.node.ctx.dereg(lkey).unwrap();
    // As many as there may be regions, and no more of them than of others.
    let most = b.node.ctx.limits().unwrap().max_mr;
    let few = most.min(64);
    let zero = || b.node.ctx.mr_reg(b.node.pdn, access::ALL, (0, 0), &PageList::none());
    let keys: Vec<u32> = (0..few).map(|_| zero().unwrap().0).collect();
    keys.into_iter().for_each(|key| b.node.ctx.dereg(key).unwrap());
}

fn reregister(node: &Node, lkey: u32, buf: &Buf) {
    let list = PageList::of(node.guest.ram(), buf.pages(), 0);
    let body = spec::Put::new()
        .u32(lkey)
        .u32(spec::REREG_TRANSLATION)
        .u32(node.pdn)
        .u32(access::ALL)
        .u64(0)
        .u64(LONG)
        .bytes(&list.bytes())
        .done(56);
    node.ctx.command(cmd::MR_REREG, &body, 8).unwrap();
}

/// A writer names a region that its kernel registers anew all the while, over two buffers of
/// different bytes.
#[test]
fn a_message_sees_one_registration_or_fails() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let caps = na.guest.query_device().unwrap().caps;
    if caps & cap::MR_REREG == 0 || !rules().rereg_keeps_the_key {
        return;
    }
    let bufs = [1u8, 2].map(|byte| {
        let buf = Buf::contiguous(na.guest.ram(), LONG);
        buf.view().fill(0, LONG, byte);
        buf
    });
    let target = nb.mr(LONG);
    let list = PageList::of(na.guest.ram(), bufs[0].pages(), 0);
    let (lkey, _) = na.ctx.mr_reg(na.pdn, access::ALL, (0, LONG), &list).unwrap();
    let (mut whole, mut failed) = (0, 0);
    for round in 0..60 {
        let (mut a, b) = (na.rc(), nb.rc());
        a.connect(&b, &Default::default());
        b.connect(&a, &Default::default());
        target.view().fill(0, LONG, 0);
        let sge = Sge { addr: 0, length: LONG as u32, lkey };
        a.qp.post_send(&SendWr::write(1, &[sge], target.addr(0), target.rkey));
        reregister(&na, lkey, &bufs[(round + 1) % 2]);
        let done = a.scq.one();
        let bytes = target.view().vec(0, LONG);
        let of = |byte: u8| bytes.contains(&byte);
        assert!(!(of(1) && of(2)), "old and new memory in one message");
        if done.status == status::SUCCESS {
            assert!(!of(0));
            whole += 1;
        } else {
            assert_eq!(done.status, status::LOC_PROT_ERR);
            failed += 1;
        }
        a.qp.destroy().unwrap();
        b.qp.destroy().unwrap();
    }
    eprintln!("{whole} whole, {failed} failed");
    assert!(whole > 0, "every message failed");
}

#[test]
fn completions_carry_the_device_clock() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    assert_eq!(a.node.guest.query_device().unwrap().clock_khz, 1_000_000);
    let mut last = [0; 2];
    for n in 0..20 {
        b.qp.post_recv(n, &[]);
        a.run_ok(&SendWr::send(n, &[]));
        let received = b.rcq.ok();
        b.qp.post_recv(n, &[]);
        let began = std::time::Instant::now();
        std::thread::sleep(Duration::from_millis(5));
        let sent = a.run_ok(&SendWr::send(n, &[]));
        let again = b.rcq.ok();
        let passed = u64::try_from(began.elapsed().as_nanos()).unwrap();
        assert!(received.timestamp > last[1] && sent.timestamp > last[0]);
        let between = again.timestamp - received.timestamp;
        // Since the first was stamped nothing but the sleep has certainly gone by.
        assert!(between >= 5_000_000, "{between} ns");
        assert!(between <= passed + 2_000_000_000, "{between} of {passed} ns");
        last = [sent.timestamp, again.timestamp];
    }
}

#[test]
fn the_service_level_of_a_datagram_tells_its_header() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if !rules().header_version_is_told {
        return;
    }
    let addresses = [
        (0, na.gid, nb.gid, 2u8),
        (1, virtual_guest::world::ipv6_gid(1), virtual_guest::world::ipv6_gid(2), 1),
    ];
    for (index, from, to, kind) in addresses {
        if index > 0 {
            na.guest.set_gid(index, spec::GID_ROCE_V2, from).unwrap();
            nb.guest.set_gid(index, spec::GID_ROCE_V2, to).unwrap();
        }
        let (mut a, mut b) = (na.end(&QpSpec::new(qpt::UD)), nb.end(&QpSpec::new(qpt::UD)));
        a.qp.start_datagrams(7).unwrap();
        b.qp.start_datagrams(7).unwrap();
        let ah = na.ctx.create_ah(na.pdn, &Av { sgid_index: index, ..Av::to(to) }).unwrap();
        let area = nb.area(48);
        b.qp.post_recv(1, &[area.sge()]);
        a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, 7).inline(&[1; 8]));
        assert_eq!(b.rcq.ok().sl & 7, kind);
    }
}

#[test]
fn counters_begin_with_init() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    b.qp.post_recv(1, &[]);
    a.run_ok(&SendWr::send(1, &[]));
    b.rcq.ok();
    for end in [&a, &b] {
        let counters = end.node.guest.query_counters().unwrap();
        assert!(counters.completions > 0 && counters.commands > 0);
    }
    for guest in [&a.node.guest, &b.node.guest] {
        guest.init().unwrap();
        let counters = guest.query_counters().unwrap();
        assert!(counters.commands <= 1, "INIT itself at most: {counters:?}");
        let others = counters.completions + counters.tx_messages + counters.rx_messages;
        assert_eq!((others, counters.events, counters.tx_bytes), (0, 0, 0), "{counters:?}");
    }
}

/// An event names its object by a number alone, or a work request a region.
#[test]
fn numbers_that_events_and_requests_name_are_the_nics() {
    let world = World::new();
    let node = world.node();
    let contexts: Vec<_> = (0..4).map(|_| node.guest.open().unwrap()).collect();
    let (mut cqns, mut srqns) = (HashSet::new(), HashSet::new());
    let (mut qpns, mut keys) = (HashSet::new(), HashSet::new());
    let mut kept = Vec::new();
    for ctx in contexts.iter().cycle().take(40) {
        let pdn = ctx.create_pd().unwrap();
        let cq = Cq::create(ctx, 16, 0).unwrap();
        let srq = Srq::create(ctx, pdn, 16, 1, 0).unwrap();
        let mr = ctx.mr(pdn, 64, access::ALL).unwrap();
        assert!(cqns.insert(cq.cqn), "CQ {:#x} twice", cq.cqn);
        assert!(srqns.insert(srq.srqn), "SRQ {:#x} twice", srq.srqn);
        assert!(keys.insert(mr.lkey), "key {:#x} twice", mr.lkey);
        let qp = Qp::create(ctx, pdn, &cq, &cq, &QpSpec::new(qpt::RC)).unwrap();
        assert!(qpns.insert(qp.qpn), "QP {:#x} twice", qp.qpn);
        kept.push((cq, srq, mr, qp));
    }
}

#[test]
fn the_numbers_of_queues_that_are_gone_rest() {
    let world = World::new();
    let node = world.node();
    let mut seen = HashSet::new();
    for _ in 0..200 {
        let cq = Cq::create(&node.ctx, 16, 0).unwrap();
        assert!(seen.insert(cq.cqn), "CQ {:#x} came back", cq.cqn);
        cq.destroy().unwrap();
        let again = node.ctx.object(cmd::CQ_DESTROY, cq.cqn).unwrap_err();
        assert_eq!(again.status(), Some(err::NOENT));
    }
    seen.clear();
    for _ in 0..200 {
        let srq = Srq::create(&node.ctx, node.pdn, 16, 1, 0).unwrap();
        assert!(seen.insert(srq.srqn), "SRQ {:#x} came back", srq.srqn);
        srq.destroy().unwrap();
        let again = node.ctx.object(cmd::SRQ_DESTROY, srq.srqn).unwrap_err();
        assert_eq!(again.status(), Some(err::NOENT));
    }
}
