//! What a responder does with every request that it cannot carry out: IBTA's responder error
//! classes (9.9.3), one table for all services and opcodes (8.3).
//!
//! The classes in our words. A: the receiver's own work request is at fault; it completes in error
//! and its QP ends. B: no receive; RC asks for patience. C: RC refuses, and both QPs end. D: what
//! is not reliable is dropped, and consumes nothing. J: the key of a SEND_WITH_INV opens nothing;
//! the receiver's error alone. (E and F are of services that there are not, G is a CQ's overrun, H
//! and I are of path migration.)
//!
//! The point of class D is who pays: a peer that can complete a receive in error takes it from its
//! owner, and Linux's connection manager posts no failed receive again.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::qp::{Av, Path, QpSpec, SendWr};
use virtual_guest::rings::Sge;
use virtual_guest::spec::{GSI_QKEY, access, cap, err, event, qps, qpt, status, wr};
use virtual_guest::world::{Area, End, Node, World, pattern};

const SECOND: Duration = Duration::from_secs(1);
const MOMENT: Duration = Duration::from_millis(20);
const QKEY: u32 = 0x0bad_cafe;
const GRH: u64 = 40;
const MAD: u64 = 256;
/// Opcodes that only some devices offer.
const ATOMIC_WRITE: u8 = 15;
const FLUSH: u8 = 14;

fn datagrams(node: &Node) -> End {
    let end = node.end(&QpSpec::new(qpt::UD));
    end.qp.start_datagrams(QKEY).expect("UD to RTS");
    end
}

#[track_caller]
fn comes_to(end: &End, state: u8) {
    let deadline = Instant::now() + SECOND * virtual_guest::daemon::patience();
    while end.qp.state().unwrap() != state {
        assert!(Instant::now() < deadline, "in state {}", end.qp.state().unwrap());
    }
}

/// A request that the table makes out of a local and a remote area.
type Make = fn(&Area, &Area) -> SendWr;

fn send(local: &Area, _: &Area) -> SendWr {
    SendWr::send(7, &[local.sge()])
}

fn send_imm(local: &Area, remote: &Area) -> SendWr {
    send(local, remote).imm(5)
}

fn write(local: &Area, remote: &Area) -> SendWr {
    SendWr::write(7, &[local.sge()], remote.addr(0), remote.rkey())
}

fn write_imm(local: &Area, remote: &Area) -> SendWr {
    write(local, remote).imm(5)
}

fn read(local: &Area, remote: &Area) -> SendWr {
    SendWr::read(7, &[local.sge()], remote.addr(0), remote.rkey())
}

fn fetch_add(local: &Area, remote: &Area) -> SendWr {
    SendWr::faa(7, local.part(0, 8), (remote.addr(0), remote.rkey()), 1)
}

fn compare_swap(local: &Area, remote: &Area) -> SendWr {
    SendWr::cas(7, local.part(0, 8), (remote.addr(0), remote.rkey()), 0, 1)
}

fn atomic_write(local: &Area, remote: &Area) -> SendWr {
    let base = SendWr::new(7, ATOMIC_WRITE, &[local.part(0, 8)]);
    SendWr { remote_addr: remote.addr(0), rkey: remote.rkey(), ..base }
}

fn flush(_: &Area, remote: &Area) -> SendWr {
    let base = SendWr::new(7, FLUSH, &[]);
    SendWr { remote_addr: remote.addr(0), rkey: remote.rkey(), arg0: 8, aux: 1, ..base }
}

/// Requests that name remote memory: the right that each needs, and the capability.
const REMOTE: [(&str, Make, u32, u64); 7] = [
    ("RDMA_WRITE", write, access::REMOTE_WRITE, 0),
    ("RDMA_WRITE_WITH_IMM", write_imm, access::REMOTE_WRITE, 0),
    ("RDMA_READ", read, access::REMOTE_READ, 0),
    ("ATOMIC_FETCH_AND_ADD", fetch_add, access::REMOTE_ATOMIC, cap::ATOMIC),
    ("ATOMIC_CMP_AND_SWP", compare_swap, access::REMOTE_ATOMIC, cap::ATOMIC),
    ("ATOMIC_WRITE", atomic_write, access::REMOTE_WRITE, cap::ATOMIC_WRITE),
    ("FLUSH", flush, access::FLUSH_GLOBAL, cap::FLUSH),
];

/// Every right that the device offers.
fn all_rights(node: &Node) -> u32 {
    let flush = node.guest.query_device().unwrap().caps & cap::FLUSH != 0;
    access::ALL | if flush { access::FLUSH_GLOBAL } else { 0 }
}

fn offered(node: &Node, capability: u64) -> bool {
    capability == 0 || node.guest.query_device().unwrap().caps & capability != 0
}

/// Two nodes of one world, on which the rows of a table make their QPs.
fn nodes(world: &World) -> (Node, Node) {
    (world.node(), world.node())
}

fn connected(nodes: &(Node, Node), kind: u32, rights: u32) -> (End, End) {
    let (a, b) = (nodes.0.end(&QpSpec::new(kind)), nodes.1.end(&QpSpec::new(kind)));
    let path = Path { access: rights, ..Path::default() };
    a.connect(&b, &path);
    b.connect(&a, &path);
    (a, b)
}

/// Class C: the requester is told, the responder's QP says why and ends, and no receive is consumed
/// but by the flush.
#[track_caller]
fn refused(what: &str, a: &mut End, b: &mut End, request: &SendWr, expected: (u8, u32)) {
    b.qp.post_recv(3, &[]);
    let failed = a.run(request);
    assert_eq!(failed.status, expected.0, "{what}: {failed:?}");
    comes_to(a, qps::ERR);
    comes_to(b, qps::ERR);
    if rules().responder_events {
        b.node.guest.await_async(expected.1, b.qp.qpn, SECOND).expect(what);
    }
    let flushed = b.rcq.one();
    assert_eq!((flushed.wr_id, flushed.status), (3, status::WR_FLUSH_ERR), "{what}");
}

#[test]
fn reliable_requests_for_memory_that_is_not_open_are_refused() {
    let world = World::new();
    let nodes = nodes(&world);
    let all = all_rights(&nodes.1);
    for (what, make, right, capability) in REMOTE {
        if !offered(&nodes.0, capability) {
            continue;
        }
        let local = nodes.0.area_of(&[9; 64]);
        // A key that nobody has, another generation of one, beyond the end, and a region without
        // the right.
        for row in 0..4 {
            let (mut a, mut b) = connected(&nodes, qpt::RC, all);
            let rights = if row == 3 { all & !right } else { all };
            let remote = nodes.1.area_with(64, rights);
            let mut request = make(&local, &remote);
            match row {
                0 => request.rkey ^= 0x0000_0100,
                1 => request.rkey ^= 1,
                2 => request.remote_addr += 2 * virtual_guest::spec::PAGE,
                _ => {}
            }
            let named = format!("{what}, row {row}");
            let expected = (status::REM_ACCESS_ERR, event::QP_ACCESS_ERR);
            refused(&named, &mut a, &mut b, &request, expected);
            assert_eq!(remote.bytes(), [0; 64], "{named}");
        }
        // And a QP that does not enable it.
        let (mut a, mut b) = connected(&nodes, qpt::RC, all & !right);
        let remote = nodes.1.area_with(64, all);
        let request = make(&local, &remote);
        refused(what, &mut a, &mut b, &request, (rules().not_enabled, event::QP_ACCESS_ERR));
        assert_eq!(remote.bytes(), [0; 64], "{what}");
    }
}

#[test]
fn reliable_atomics_out_of_place_are_malformed() {
    let world = World::new();
    let nodes = nodes(&world);
    if !rules().misaligned_atomic_is_sent || !offered(&nodes.0, cap::ATOMIC) {
        return;
    }
    for (what, make) in [
        ("ATOMIC_FETCH_AND_ADD", fetch_add as Make),
        ("ATOMIC_CMP_AND_SWP", compare_swap),
        ("ATOMIC_WRITE", atomic_write),
    ] {
        let (mut a, mut b) = connected(&nodes, qpt::RC, access::ALL);
        let (local, remote) = (nodes.0.area_of(&[9; 64]), nodes.1.area(64));
        let mut request = make(&local, &remote);
        request.remote_addr += 4;
        let expected = (status::REM_INV_REQ_ERR, event::QP_REQ_ERR);
        refused(what, &mut a, &mut b, &request, expected);
        assert_eq!(remote.bytes(), [0; 64], "{what}");
    }
}

#[test]
fn reliable_messages_that_do_not_fit_end_both() {
    let world = World::new();
    let nodes = nodes(&world);
    for (what, make) in [("SEND", send as Make), ("SEND_WITH_IMM", send_imm)] {
        let (mut a, mut b) = connected(&nodes, qpt::RC, access::ALL);
        let (from, to) = (nodes.0.area_of(&[1; 65]), nodes.1.area(64));
        b.qp.post_recv(3, &[to.sge()]);
        let [sender, receiver] = rules().long_message;
        assert_eq!(a.run(&make(&from, &to)).status, sender, "{what}");
        let failed = b.rcq.one();
        assert_eq!((failed.wr_id, failed.status), (3, receiver), "{what}");
        comes_to(&b, qps::ERR);
    }
}

/// Class A, on every service: what the receiver posted wrongly is the receiver's, and ends its QP.
#[test]
fn a_receive_that_its_own_keys_deny_ends_its_queue_pair() {
    let world = World::new();
    let nodes = nodes(&world);
    for (kind, answer) in [(qpt::RC, status::REM_OP_ERR), (qpt::UC, status::SUCCESS)] {
        let (mut a, mut b) = connected(&nodes, kind, access::ALL);
        let (from, to) = (nodes.0.area_of(&[1; 64]), nodes.1.area(64));
        b.qp.post_recv(3, &[Sge { lkey: to.sge().lkey ^ 0x100, ..to.sge() }]);
        assert_eq!(a.run(&SendWr::send(7, &[from.sge()])).status, answer);
        let failed = b.rcq.one();
        assert_eq!((failed.wr_id, failed.status), (3, rules().bad_receive));
        comes_to(&b, qps::ERR);
        assert_eq!(to.bytes(), [0; 64]);
    }
    let (mut a, mut b) = (datagrams(&nodes.0), datagrams(&nodes.1));
    let ah = nodes.0.ctx.create_ah(nodes.0.pdn, &Av::to(nodes.1.gid)).unwrap();
    let to = nodes.1.area(GRH + 8);
    b.qp.post_recv(3, &[Sge { lkey: to.sge().lkey ^ 0x100, ..to.sge() }]);
    a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[1; 8]));
    let failed = b.rcq.one();
    assert_eq!((failed.wr_id, failed.status), (3, rules().bad_receive));
    comes_to(&b, qps::ERR);
    if !rules().dma_key_is_for_all {
        return; // QP 1 on an RNIC is the daemon's.
    }
    let (mut a, mut b) = (nodes.0.gsi(), nodes.1.gsi());
    let (from, to) = (a.node.area(MAD), b.node.area(GRH + MAD));
    let ah = a.node.ctx.create_ah(a.node.pdn, &Av::to(nodes.1.gid)).unwrap();
    b.qp.post_recv(3, &[Sge { lkey: to.sge().lkey ^ 0x100, ..to.sge() }]);
    a.run_ok(&SendWr::datagram(1, &[from.sge()], ah, 1, GSI_QKEY));
    let failed = b.rcq.one();
    assert_eq!((failed.wr_id, failed.status), (3, rules().bad_receive));
    comes_to(&b, qps::ERR);
}

/// As the last one, for a receive that names more elements than its queue takes.
#[test]
fn a_receive_of_too_many_elements_ends_its_queue_pair() {
    let world = World::new();
    let nodes = nodes(&world);
    let too_many = |end: &mut End, to: &Area| {
        end.qp.queue_recv(3, &[to.part(0, 8)]);
        let (ring, at, _) = end.qp.raw_rq(0);
        ring.store16(at + 8, 60_000, std::sync::atomic::Ordering::Relaxed);
        end.qp.ring_rq();
    };
    let to = nodes.1.area(GRH + 8);
    if !rules().srq_has_a_domain {
        // rdma_rxe is never shown it: its QP ends without a message.
        return;
    }
    for (kind, answer) in [(qpt::RC, status::REM_OP_ERR), (qpt::UC, status::SUCCESS)] {
        let (mut a, mut b) = connected(&nodes, kind, access::ALL);
        too_many(&mut b, &to);
        assert_eq!(a.run(&SendWr::send(7, &[]).inline(&[1; 8])).status, answer);
        let failed = b.rcq.one();
        assert_eq!((failed.wr_id, failed.status), (3, status::LOC_QP_OP_ERR));
        comes_to(&b, qps::ERR);
    }
    let (mut a, mut b) = (datagrams(&nodes.0), datagrams(&nodes.1));
    let ah = nodes.0.ctx.create_ah(nodes.0.pdn, &Av::to(nodes.1.gid)).unwrap();
    too_many(&mut b, &to);
    a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[1; 8]));
    let failed = b.rcq.one();
    assert_eq!((failed.wr_id, failed.status), (3, status::LOC_QP_OP_ERR));
    comes_to(&b, qps::ERR);
}

/// Class B, for each opcode that takes a receive: RC asks for patience until there is none left.
#[test]
fn reliable_messages_without_a_receive_wait() {
    let world = World::new();
    let nodes = nodes(&world);
    for (what, make) in [("SEND", send as Make), ("SEND_IMM", send_imm), ("WRITE_IMM", write_imm)] {
        let (mut a, mut b) = (nodes.0.rc(), nodes.1.rc());
        let path = Path { rnr_retry: 1, min_rnr_timer: 1, ..Path::default() };
        a.connect(&b, &path);
        b.connect(&a, &path);
        let (local, remote) = (nodes.0.area_of(&[9; 64]), nodes.1.area(64));
        let failed = a.run(&make(&local, &remote));
        assert_eq!(failed.status, status::RNR_RETRY_EXC_ERR, "{what}");
        comes_to(&a, qps::ERR);
        assert_eq!(b.qp.state().unwrap(), qps::RTS, "{what}");
        b.rcq.silent(MOMENT);
    }
}

/// Class B on what is not reliable: dropped.
#[test]
fn unreliable_messages_without_a_receive_are_dropped() {
    let world = World::new();
    let nodes = nodes(&world);
    let (mut a, mut b) = connected(&nodes, qpt::UC, access::ALL);
    let (local, remote) = (nodes.0.area_of(&[9; 64]), nodes.1.area(64));
    for make in [send as Make, send_imm, write_imm] {
        a.run_ok(&make(&local, &remote));
    }
    let (mut c, mut d) = (datagrams(&nodes.0), datagrams(&nodes.1));
    let ah = nodes.0.ctx.create_ah(nodes.0.pdn, &Av::to(nodes.1.gid)).unwrap();
    let datagram = SendWr::datagram(1, &[local.sge()], ah, d.qp.qpn, QKEY);
    c.run_ok(&datagram);
    c.run_ok(&datagram.imm(5));
    for end in [&mut b, &mut d] {
        end.rcq.silent(MOMENT);
        assert_eq!(end.qp.state().unwrap(), qps::RTS);
        let to = nodes.1.area(GRH + 64);
        end.qp.post_recv(6, &[to.sge()]);
    }
    a.run_ok(&SendWr::send(8, &[local.sge()]));
    assert_eq!(b.rcq.ok().wr_id, 6, "the next one arrives");
}

/// What `rdma_disconnect` does: the owner moves its QP to ERR, and its peer is told nothing.
#[test]
fn a_peer_that_left_by_itself_answers_nothing() {
    let world = World::new();
    let nodes = nodes(&world);
    for (what, make, ..) in REMOTE.into_iter().take(3).chain([("SEND", send as Make, 0, 0)]) {
        let (mut a, mut b) = (nodes.0.rc(), nodes.1.rc());
        a.connect(&b, &Path::hasty());
        b.connect(&a, &Path::hasty());
        let (local, remote) = (nodes.0.area_of(&[9; 64]), nodes.1.area(64));
        b.qp.post_recv(3, &[]);
        b.qp.fail().unwrap();
        assert_eq!(b.rcq.one().status, status::WR_FLUSH_ERR);
        assert_eq!(a.qp.state().unwrap(), qps::RTS, "{what}: nobody told it");
        let failed = a.run(&make(&local, &remote));
        assert_eq!(failed.status, status::RETRY_EXC_ERR, "{what}");
        assert_eq!(remote.bytes(), [0; 64], "{what}");
        if rules().responder_events {
            assert!(nodes.1.guest.async_event(MOMENT).unwrap().is_none(), "{what}");
        }
    }
}

#[test]
fn unreliable_requests_that_fail_consume_nothing() {
    let world = World::new();
    let nodes = nodes(&world);
    let (mut a, mut b) = connected(&nodes, qpt::UC, access::ALL & !access::REMOTE_READ);
    let (local, remote) = (nodes.0.area_of(&pattern(3, 65)), nodes.1.area(65));
    let closed = nodes.1.area_with(65, access::LOCAL_WRITE);
    let to = nodes.1.area(64);
    b.qp.post_recv(3, &[to.sge()]);
    let wrong_key = SendWr { rkey: remote.rkey() ^ 0x100, ..write(&local, &remote) };
    let rows = [
        ("SEND longer than the receive", send(&local, &remote)),
        ("SEND_WITH_IMM longer than the receive", send_imm(&local, &remote)),
        ("RDMA_WRITE with a wrong key", wrong_key.clone()),
        ("RDMA_WRITE_WITH_IMM with a wrong key", wrong_key.imm(5)),
        ("RDMA_WRITE without the right", write(&local, &closed)),
        ("RDMA_WRITE_WITH_IMM without the right", write_imm(&local, &closed)),
    ];
    for (what, request) in rows {
        // Many times, and fewer than the 256 wrong keys that end a connection.
        for _ in 0..20 {
            assert_eq!(a.run(&request).status, status::SUCCESS, "{what}");
        }
        b.rcq.silent(MOMENT);
        assert_eq!(b.qp.state().unwrap(), qps::RTS, "{what}");
        assert_eq!(remote.bytes(), [0; 65], "{what}");
        assert_eq!(closed.bytes(), [0; 65], "{what}");
    }
    a.run_ok(&SendWr::send(8, &[local.part(0, 64)]));
    assert_eq!(b.rcq.ok().wr_id, 3, "the receive is there for the next message");
    assert_eq!(to.bytes(), pattern(3, 65)[..64]);
}

#[test]
fn datagrams_that_fail_consume_nothing() {
    let world = World::new();
    let nodes = nodes(&world);
    if rules().short_datagram_receive_fails {
        return;
    }
    let (mut a, mut b) = (datagrams(&nodes.0), datagrams(&nodes.1));
    let ah = nodes.0.ctx.create_ah(nodes.0.pdn, &Av::to(nodes.1.gid)).unwrap();
    let (from, to) = (nodes.0.area_of(&pattern(1, 4096)), nodes.1.area(GRH + 64));
    b.qp.post_recv(3, &[to.sge()]);
    let rows = [
        ("longer than the receive", from.part(0, 65), QKEY),
        ("much longer", from.sge(), QKEY),
        ("another Q_Key", from.part(0, 8), QKEY ^ 1),
    ];
    for (what, sge, qkey) in rows {
        for _ in 0..100 {
            a.run_ok(&SendWr::datagram(1, &[sge], ah, b.qp.qpn, qkey));
            a.run_ok(&SendWr::datagram(1, &[sge], ah, b.qp.qpn, qkey).imm(1));
        }
        b.rcq.silent(MOMENT);
        assert_eq!(b.qp.state().unwrap(), qps::RTS, "{what}");
        assert!(to.bytes().iter().all(|byte| *byte == 0), "{what}");
    }
    a.run_ok(&SendWr::datagram(2, &[from.part(0, 64)], ah, b.qp.qpn, QKEY));
    assert_eq!(b.rcq.ok().wr_id, 3, "the receive is there for the next one");
    assert_eq!(to.bytes()[GRH as usize..], pattern(1, 4096)[..64]);
}

/// A shared queue's receives belong to all its QPs: one of them that gets what does not fit takes
/// none from the others.
#[test]
fn datagrams_that_do_not_fit_leave_a_shared_queue_to_its_others() {
    let world = World::new();
    let nodes = nodes(&world);
    if !rules().srq_has_a_domain {
        return;
    }
    let ctx = &nodes.1.ctx;
    let mut shared = virtual_guest::rings::Srq::create(ctx, nodes.1.pdn, 16, 2, 0).unwrap();
    let spec = QpSpec::new(qpt::UD).with_srq(&shared);
    let (flooded, mut other) = (nodes.1.end(&spec), nodes.1.end(&spec));
    for end in [&flooded, &other] {
        end.qp.start_datagrams(QKEY).unwrap();
    }
    let to = nodes.1.area(GRH + 64);
    for n in 0..3 {
        shared.post(n, &[to.sge()]);
    }
    let mut a = datagrams(&nodes.0);
    let ah = nodes.0.ctx.create_ah(nodes.0.pdn, &Av::to(nodes.1.gid)).unwrap();
    let from = nodes.0.area_of(&[1; 65]);
    for _ in 0..100 {
        a.run_ok(&SendWr::datagram(1, &[from.sge()], ah, flooded.qp.qpn, QKEY));
    }
    for _ in 0..2 {
        a.run_ok(&SendWr::datagram(2, &[from.part(0, 64)], ah, other.qp.qpn, QKEY));
        other.rcq.ok();
    }
}

#[test]
fn no_datagram_takes_a_receive_of_the_connection_manager_but_one_of_its_own() {
    let world = World::new();
    let (na, nb) = nodes(&world);
    let (mut a, mut b) = (na.gsi(), nb.gsi());
    let from = a.node.area_of(&pattern(1, 4096));
    let to = b.node.area(GRH + MAD);
    let ah = a.node.ctx.create_ah(a.node.pdn, &Av::to(nb.gid)).unwrap();
    b.qp.post_recv(7, &[to.sge()]);
    let own = rules().dma_key_is_for_all;
    // QP 1 on an RNIC is the daemon's, which refuses other lengths at the sender.
    let lengths: &[u64] = if own { &[0, 1, 255, 257, 4096] } else { &[] };
    for &len in lengths {
        for _ in 0..150 {
            a.run_ok(&SendWr::datagram(1, &[from.part(0, len)], ah, 1, GSI_QKEY));
        }
        b.rcq.silent(MOMENT);
    }
    for _ in 0..100 {
        a.run_ok(&SendWr::datagram(1, &[from.part(0, MAD)], ah, 1, QKEY));
    }
    b.rcq.silent(MOMENT);
    assert_eq!(b.qp.state().unwrap(), qps::RTS);
    a.run_ok(&SendWr::datagram(1, &[from.part(0, MAD)], ah, 1, GSI_QKEY));
    let received = b.rcq.ok();
    assert_eq!((received.wr_id, u64::from(received.byte_len)), (7, GRH + MAD));
    assert_eq!(to.bytes()[GRH as usize..], pattern(1, 256)[..]);
}

#[test]
fn a_management_datagram_that_finds_no_room_consumes_nothing() {
    let world = World::new();
    let (na, nb) = nodes(&world);
    let (mut a, mut b) = (na.gsi(), nb.gsi());
    let from = a.node.area_of(&pattern(1, 256));
    let (small, to) = (b.node.area(GRH + MAD - 1), b.node.area(GRH + MAD));
    let ah = a.node.ctx.create_ah(a.node.pdn, &Av::to(nb.gid)).unwrap();
    b.qp.post_recv(7, &[small.sge()]);
    b.qp.post_recv(8, &[to.sge()]);
    for _ in 0..100 {
        a.run_ok(&SendWr::datagram(1, &[from.sge()], ah, 1, GSI_QKEY));
    }
    b.rcq.silent(MOMENT);
    assert_eq!(b.qp.state().unwrap(), qps::RTS);
    assert!(small.bytes().iter().all(|byte| *byte == 0));
}

/// One datagram to a group is for those who joined it: not for every QP 1 of the network by its
/// number (IBTA 10.5.2).
#[test]
fn a_group_is_no_way_to_a_queue_pair_that_is_not_in_it() {
    const GROUP: [u8; 16] = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 224, 1, 2, 3];
    let world = World::new();
    let (na, nb) = nodes(&world);
    if !rules().groups_end_with_the_network {
        return;
    }
    let (mut a, mut b, mut member) = (datagrams(&na), datagrams(&nb), datagrams(&nb));
    let body = virtual_guest::spec::Put::new().u32(member.qp.qpn).u32(0).bytes(&GROUP).done(24);
    nb.ctx.command(virtual_guest::spec::cmd::MCAST_ATTACH, &body, 0).unwrap();
    let ah = na.ctx.create_ah(na.pdn, &Av::to(GROUP)).unwrap();
    let to = nb.area(GRH + 8);
    b.qp.post_recv(3, &[to.sge()]);
    member.qp.post_recv(4, &[to.sge()]);
    a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[1; 8]));
    b.rcq.silent(MOMENT);
    a.run_ok(&SendWr::datagram(1, &[], ah, 0x00ff_ffff, QKEY).inline(&[1; 8]));
    assert_eq!(member.rcq.ok().wr_id, 4);
    b.rcq.silent(MOMENT);
}

#[test]
fn a_group_is_nobodys_address() {
    let world = World::new();
    let node = world.node();
    for group in [
        [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 224, 1, 2, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3],
    ] {
        let refused = node.guest.set_gid(3, virtual_guest::spec::GID_ROCE_V2, group);
        assert_eq!(refused.unwrap_err().status(), Some(err::INVAL));
    }
}

/// Class J: nobody but the receiver hears of a key that cannot be invalidated, and the data are
/// there.
#[test]
fn a_key_that_cannot_be_invalidated_is_the_receivers_error_alone() {
    let world = World::new();
    let nodes = nodes(&world);
    if !offered(&nodes.1, cap::MEM_MGT) {
        return;
    }
    let plain = nodes.1.area(8);
    for key in [plain.rkey(), 0, 0x1234_5678] {
        let (mut a, mut b) = connected(&nodes, qpt::RC, access::ALL);
        let to = nodes.1.area(8);
        b.qp.post_recv(3, &[to.sge()]);
        b.qp.post_recv(4, &[to.sge()]);
        let mut request = SendWr::send(7, &[]).inline(&[5; 8]);
        (request.opcode, request.imm) = (wr::SEND_WITH_INV, key);
        a.run_ok(&request);
        let failed = b.rcq.one();
        assert_eq!((failed.wr_id, failed.status), (3, status::LOC_PROT_ERR));
        assert_eq!(to.bytes(), [5; 8]);
        let flushed = b.rcq.one();
        assert_eq!((flushed.wr_id, flushed.status), (4, status::WR_FLUSH_ERR));
        comes_to(&b, qps::ERR);
        assert_eq!(a.qp.state().unwrap(), qps::RTS, "the sender goes on until nobody answers");
        // The region that was named stays what it was.
        let mut again = connected(&nodes, qpt::RC, access::ALL);
        let local = nodes.0.area_of(&[6; 8]);
        again.0.run_ok(&write(&local, &plain));
    }
}

/// Class J for windows: one that another QP has bound, of the other type, and one that is free.
#[test]
fn a_window_of_another_queue_pair_cannot_be_invalidated() {
    let world = World::new();
    let nodes = nodes(&world);
    // Without MEM_MGT the hardware says what it says: rdma_rxe REM_INV_REQ_ERR.
    let needed = [cap::MEM_MGT, cap::MW_TYPE1, cap::MW_TYPE2];
    if !needed.iter().all(|needed| offered(&nodes.1, *needed)) {
        return;
    }
    let flags = access::ALL | access::MW_BIND;
    let mr = nodes.1.ctx.mr(nodes.1.pdn, 64, flags).unwrap();
    for (kind, bound) in [(1, true), (2, true), (2, false)] {
        let body = virtual_guest::spec::Put::new().u32(nodes.1.pdn).u32(kind).done(8);
        let made = nodes.1.ctx.command(virtual_guest::spec::cmd::MW_ALLOC, &body, 8).unwrap();
        let key = virtual_guest::spec::Take::u32_at(&made[..], 0);
        let (_other, mut owner) = connected(&nodes, qpt::RC, access::ALL);
        if bound {
            let mut bind = SendWr::new(1, wr::BIND_MW, &[]);
            (bind.imm, bind.rkey, bind.arg1) = (key, key, u64::from(mr.lkey));
            (bind.remote_addr, bind.arg0, bind.aux) = (mr.addr(0), 64, access::REMOTE_WRITE);
            owner.run_ok(&bind);
        }
        let (mut a, mut b) = connected(&nodes, qpt::RC, access::ALL);
        let to = nodes.1.area(8);
        b.qp.post_recv(3, &[to.sge()]);
        let mut request = SendWr::send(7, &[]).inline(&[5; 8]);
        (request.opcode, request.imm) = (wr::SEND_WITH_INV, key);
        a.run_ok(&request);
        let failed = b.rcq.one();
        let what = (kind, bound);
        assert_eq!((failed.wr_id, failed.status), (3, status::LOC_PROT_ERR), "{what:?}");
        assert_eq!(to.bytes(), [5; 8], "{what:?}");
        comes_to(&b, qps::ERR);
    }
}
