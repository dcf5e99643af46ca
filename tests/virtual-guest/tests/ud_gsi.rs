//! Datagrams and the general service interface: GRH area, Q_Keys, sizes, QP 1 (7.1, 8, 9).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::{Attr, Av, Path, Qp, QpSpec, SendWr};
use virtual_guest::spec::{self, access, cqe, err, qpt, status, wc};
use virtual_guest::world::{End, Node, World, ipv4_gid, ipv6_gid, pattern};

const QKEY: u32 = 0x0bad_cafe;
const GRH: usize = 40;

fn datagram(node: &Node) -> End {
    let end = node.end(&QpSpec::new(qpt::UD));
    end.qp.start_datagrams(QKEY).expect("UD to RTS");
    end
}

fn ipv4_sum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[test]
fn a_datagram_arrives_with_its_ipv4_header() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    for size in [0usize, 1, 100, 4096] {
        let data = pattern(size as u64, size);
        let (from, to) = (na.area_of(&data), nb.area((GRH + size) as u64));
        b.qp.post_recv(5, &to.parts(2));
        let sent = a.run_ok(&SendWr::datagram(6, &from.parts(2), ah, b.qp.qpn, QKEY));
        assert_eq!(sent.opcode, wc::SEND);
        let received = b.rcq.ok();
        assert_eq!(received.byte_len as usize, GRH + size);
        assert_eq!(received.src_qp, a.qp.qpn);
        assert_eq!(received.flags & (cqe::GRH | cqe::RECV), cqe::GRH | cqe::RECV);
        assert_eq!(received.flags & cqe::IPV4, cqe::IPV4);
        let bytes = to.bytes();
        assert_eq!(bytes[GRH..], data);
        assert_eq!(bytes[..20], [0; 20]);
        let ip = &bytes[20..40];
        assert_eq!(ip[0], 0x45);
        assert_eq!(ip[9], 17, "RoCE v2 is UDP");
        assert_eq!(ip[12..16], na.gid[12..]);
        assert_eq!(ip[16..20], nb.gid[12..]);
        if rules().header_has_a_checksum {
            assert_eq!(ipv4_sum(ip), 0xffff, "header checksum");
        }
    }
}

/// The device looks at some of many doorbell pages at a time, and so at the sender's before the
/// receiver's at times (6.4).
#[test]
fn a_receive_counts_from_when_it_is_posted() {
    if rules().strangers_are_refused {
        // An RNIC looks for a receive itself, among those that have come to it by then.
        return;
    }
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let _idle: Vec<_> = (0..100).map(|_| nb.guest.open().expect("CONTEXT_CREATE")).collect();
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    let to = nb.area(100);
    for n in 0..100 {
        // Both have been silent for a while.
        std::thread::sleep(Duration::from_millis(2));
        b.qp.post_recv(n, &to.parts(1));
        a.qp.post_send(&SendWr::datagram(n, &[], ah, b.qp.qpn, QKEY).inline(b"once"));
        assert_eq!((a.scq.ok().wr_id, b.rcq.ok().wr_id), (n, n));
    }
}

/// What of an address vector is told to the receiver, and what is wrong with no value (8.2).
#[test]
fn an_address_vector_is_taken_at_its_word_where_that_counts() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    if rules().strangers_are_refused {
        // An RNIC has its host's ideas of each of these fields.
        return;
    }
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let odd = Av {
        dmac: [0x33; 6],
        flow_label: 0xf_ffff,
        static_rate: 0xff,
        traffic_class: 0x5b,
        sl: 9,
        ..Av::to(nb.gid)
    };
    let to = nb.area(GRH as u64 + 8);
    for (hop_limit, arrives) in [(7, 7), (0, 1)] {
        let ah = na.ctx.create_ah(na.pdn, &Av { hop_limit, ..odd }).unwrap();
        b.qp.post_recv(1, &[to.sge()]);
        a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[3; 8]));
        b.rcq.ok();
        let ip = &to.bytes()[20..40];
        assert_eq!((ip[1], ip[8]), (0x5b, arrives), "traffic class and hop limit");
        assert_eq!(ipv4_sum(ip), 0xffff, "header checksum");
    }
    // The service level of a datagram of the connection manager.
    let (mut from, mut at) = (na.gsi(), nb.gsi());
    let (mad, inbox) = (from.node.area(256), at.node.area(GRH as u64 + 256));
    let ah = from.node.ctx.create_ah(from.node.pdn, &odd).unwrap();
    at.qp.post_recv(2, &[inbox.sge()]);
    from.run_ok(&SendWr::datagram(2, &[mad.sge()], ah, 1, 0x8001_0000));
    assert_eq!(at.rcq.ok().sl, 9);
    // A connection with a vector like that is one like any other, and answers it as it was set.
    let (mut c, mut d) = (na.rc(), nb.rc());
    let path = Path::default();
    d.qp.connect(c.address(), &path).unwrap();
    c.qp.to_init(&path).unwrap();
    let rtr = c.qp.rtr_attr(d.address(), &path);
    c.qp.modify(&Attr { av: odd, ..rtr }).unwrap();
    c.qp.to_rts(&path).unwrap();
    let word = nb.area(8);
    c.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[5; 8]));
    let av = c.qp.query().unwrap().av;
    assert_eq!((av.dmac, av.flow_label, av.sl), (odd.dmac, odd.flow_label, odd.sl));
    d.rcq.silent(Duration::ZERO);
}

/// Nobody holds these addresses, or nobody whom this NIC may reach: that is no fault of a vector.
#[test]
fn only_a_host_finds_an_address_unreachable() {
    let world = World::new();
    world.daemon.add_network("other", 200);
    let (node, there) = (world.node(), world.node_with("other", &[], GuestConfig::default()));
    let group = Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0xffff, 0xe000, 5).octets();
    for dgid in [there.gid, ipv4_gid(99, 99), ipv6_gid(9), group, [0; 16]] {
        let made = node.ctx.create_ah(node.pdn, &Av::to(dgid));
        let end = node.rc();
        end.qp.to_init(&Path::hasty()).unwrap();
        let set = end.qp.to_rtr((dgid, 0x77), &Path::hasty());
        if rules().strangers_are_refused {
            if let Err(refused) = made {
                assert_eq!(refused.status(), Some(err::UNREACH), "{dgid:x?}");
            }
        } else {
            made.expect("a handle");
            set.expect("a path");
        }
    }
}

#[test]
fn a_datagram_between_ipv6_addresses_has_an_ipv6_header() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    na.guest.set_gid(1, spec::GID_ROCE_V2, ipv6_gid(1)).unwrap();
    nb.guest.set_gid(1, spec::GID_ROCE_V2, ipv6_gid(2)).unwrap();
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let av = Av { sgid_index: 1, traffic_class: 0x20, ..Av::to(ipv6_gid(2)) };
    let ah = na.ctx.create_ah(na.pdn, &av).unwrap();
    let to = nb.area(GRH as u64 + 64);
    b.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[3; 64]).imm(0x55aa));
    let received = b.rcq.ok();
    assert_eq!((received.byte_len as usize, received.imm), (GRH + 64, 0x55aa));
    let guess = if rules().header_version_is_told { 0 } else { cqe::IPV4 };
    assert_eq!(received.flags & (cqe::GRH | cqe::IPV4 | cqe::IMM), cqe::GRH | guess | cqe::IMM);
    let bytes = to.bytes();
    assert_eq!(bytes[0] >> 4, 6);
    assert_eq!(bytes[8..24], ipv6_gid(1));
    assert_eq!(bytes[24..40], ipv6_gid(2));
    assert_eq!(bytes[GRH..], [3; 64]);
}

#[test]
fn a_wrong_qkey_is_dropped_silently() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    let to = nb.area(64);
    b.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY ^ 1).inline(&[1; 8]));
    b.rcq.silent(Duration::from_millis(30));
    assert_eq!(to.bytes(), [0; 64]);
    // Bit 31 of the work request's Q_Key means "the queue pair's own".
    a.run_ok(&SendWr::datagram(2, &[], ah, b.qp.qpn, 0x8000_0000).inline(&[2; 8]));
    assert_eq!(b.rcq.ok().wr_id, 1);
}

#[test]
fn nobody_there_is_a_success_for_the_sender() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[1; 8]));
    a.run_ok(&SendWr::datagram(2, &[], ah, 0xfe_dcba, QKEY).inline(&[1; 8]));
    b.rcq.silent(Duration::from_millis(30));
    let to = nb.area(64);
    b.qp.post_recv(9, &[to.sge()]);
    a.run_ok(&SendWr::datagram(3, &[], ah, b.qp.qpn, QKEY).inline(&[2; 8]));
    assert_eq!(b.rcq.ok().wr_id, 9);
}

#[test]
fn a_datagram_larger_than_the_mtu_is_refused_at_the_sender() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    let (from, to) = (na.area_of(&[1; 4097]), nb.area(GRH as u64 + 8192));
    b.qp.post_recv(1, &[to.sge()]);
    let failed = a.run(&SendWr::datagram(1, &[from.sge()], ah, b.qp.qpn, QKEY));
    assert_eq!(failed.status, rules().long_datagram);
    b.rcq.silent(Duration::from_millis(30));
    assert!(to.bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn a_receive_that_is_too_small_is_there_for_the_next_datagram() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    let to = nb.area(GRH as u64 + 7);
    b.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[1; 8]));
    if rules().short_datagram_receive_fails {
        let failed = b.rcq.one();
        assert_eq!((failed.wr_id, failed.status), (1, status::LOC_LEN_ERR));
        return;
    }
    b.rcq.silent(Duration::from_millis(30));
    assert!(to.bytes().iter().all(|byte| *byte == 0), "dropped, and nothing of it written");
    a.run_ok(&SendWr::datagram(2, &[], ah, b.qp.qpn, QKEY).inline(&[2; 7]));
    assert_eq!(b.rcq.ok().wr_id, 1, "the receive is there for the next one");
}

#[test]
fn an_address_handle_of_another_domain_is_refused() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, b) = (datagram(&na), datagram(&nb));
    let other = na.ctx.create_pd().unwrap();
    let ah = na.ctx.create_ah(other, &Av::to(nb.gid)).unwrap();
    let failed = a.run(&SendWr::datagram(1, &[], ah, b.qp.qpn, QKEY).inline(&[1; 8]));
    assert_eq!(failed.status, status::LOC_QP_OP_ERR);
}

#[test]
fn rdma_is_not_for_datagrams() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let mut a = datagram(&na);
    let (local, remote) = (na.area(8), nb.area(8));
    let failed = a.run(&SendWr::write(1, &[local.sge()], remote.addr(0), remote.rkey()));
    assert_eq!(failed.status, status::LOC_QP_OP_ERR);
    assert_eq!(remote.bytes(), [0; 8]);
}

#[test]
fn gsi_is_queue_pair_one_and_carries_management_datagrams() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (na.gsi(), nb.gsi());
    assert_eq!((a.qp.qpn, b.qp.qpn), (1, 1));
    let mad = pattern(1, 256);
    let (from, to) = (a.node.area_of(&mad), b.node.area(40 + 256));
    let ah = a.node.ctx.create_ah(a.node.pdn, &Av::to(nb.gid)).unwrap();
    b.qp.post_recv(7, &[to.sge()]);
    a.run_ok(&SendWr::datagram(1, &[from.sge()], ah, 1, 0x8001_0000));
    let received = b.rcq.ok();
    assert_eq!((received.src_qp, received.byte_len), (1, 296));
    assert_eq!(to.bytes()[40..], mad);
    let back = b.node.ctx.create_ah(b.node.pdn, &Av::to(na.gid)).unwrap();
    let reply_to = a.node.area(296);
    a.qp.post_recv(8, &[reply_to.sge()]);
    b.run_ok(&SendWr::datagram(2, &[to.part(40, 256)], back, 1, 0x8001_0000));
    a.rcq.ok();
    assert_eq!(reply_to.bytes()[40..], mad);
}

#[test]
fn gsi_works_with_a_dma_key() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (na.gsi(), nb.gsi());
    let (lkey_a, _) = a.node.ctx.mr_dma(a.node.pdn, access::LOCAL_WRITE).unwrap();
    let (lkey_b, _) = b.node.ctx.mr_dma(b.node.pdn, access::LOCAL_WRITE).unwrap();
    let (from, to) = (na.guest.ram().alloc(1), nb.guest.ram().alloc(1));
    from.view(0, 4096).write(0, &pattern(9, 256));
    let sge = |gpa, length, lkey| virtual_guest::rings::Sge { addr: gpa, length, lkey };
    b.qp.post_recv(1, &[sge(to.gpa(0), 296, lkey_b)]);
    let ah = a.node.ctx.create_ah(a.node.pdn, &Av::to(nb.gid)).unwrap();
    a.run_ok(&SendWr::datagram(1, &[sge(from.gpa(0), 256, lkey_a)], ah, 1, 0x8001_0000));
    b.rcq.ok();
    assert_eq!(to.view(0, 4096).vec(40, 256), pattern(9, 256));
}

#[test]
fn a_dma_key_opens_memory_to_whom_the_backing_lets_it() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let mut b = datagram(&nb);
    let ctx = na.guest.kernel().unwrap();
    let pdn = ctx.create_pd().unwrap();
    let kernel = Node { ctx, pdn, ..na.clone() };
    let mut a = datagram(&kernel);
    let (lkey, _) = kernel.ctx.mr_dma(pdn, access::LOCAL_WRITE).unwrap();
    let (from, to) = (na.guest.ram().alloc(1), nb.area(GRH as u64 + 8));
    from.view(0, 4096).write(0, &[7; 8]);
    b.qp.post_recv(1, &[to.sge()]);
    let ah = kernel.ctx.create_ah(pdn, &Av::to(nb.gid)).unwrap();
    let sge = virtual_guest::rings::Sge { addr: from.gpa(0), length: 8, lkey };
    let sent = a.run(&SendWr::datagram(1, &[sge], ah, b.qp.qpn, QKEY));
    if rules().dma_key_is_for_all {
        assert_eq!(sent.status, status::SUCCESS);
        b.rcq.ok();
        assert_eq!(to.bytes()[GRH..], [7; 8]);
    } else {
        assert_eq!(sent.status, rules().local_protection);
        b.rcq.silent(Duration::from_millis(30));
        assert!(to.bytes().iter().all(|byte| *byte == 0));
    }
}

#[test]
fn gsi_belongs_to_the_kernel_and_exists_once() {
    let world = World::new();
    let node = world.node();
    let refused =
        Qp::create(&node.ctx, node.pdn, &node.cq(16), &node.cq(16), &QpSpec::new(qpt::GSI));
    assert_ne!(refused.unwrap_err().status().unwrap(), err::OK);
    let first = node.gsi();
    let (ctx, pdn) = (&first.node.ctx, first.node.pdn);
    let again = Qp::create(ctx, pdn, &first.scq, &first.rcq, &QpSpec::new(qpt::GSI));
    assert_ne!(again.unwrap_err().status().unwrap(), err::OK);
    first.qp.destroy().unwrap();
    let again = Qp::create(ctx, pdn, &first.scq, &first.rcq, &QpSpec::new(qpt::GSI)).unwrap();
    assert_eq!(again.qpn, 1);
}

#[test]
fn datagrams_loop_back_to_the_same_nic() {
    let world = World::new();
    let node = world.node_with("net", &[], GuestConfig::default());
    let mut a = datagram(&node);
    let ah = node.ctx.create_ah(node.pdn, &Av::to(node.gid)).unwrap();
    let to = node.area(GRH as u64 + 8);
    a.qp.post_recv(1, &[to.sge()]);
    let own = a.qp.qpn;
    a.run_ok(&SendWr::datagram(2, &[], ah, own, QKEY).inline(&[8; 8]));
    assert_eq!(a.rcq.ok().src_qp, own);
    assert_eq!(to.bytes()[GRH..], [8; 8]);
}

#[test]
fn an_address_vector_without_a_grh_or_a_source_gid_is_refused() {
    let world = World::new();
    let node = world.node();
    let bare = Av { flags: 0, ..Av::to(node.gid) };
    assert_eq!(node.ctx.create_ah(node.pdn, &bare).unwrap_err().status(), Some(err::INVAL));
    let nobody = Av { sgid_index: 5, ..Av::to(node.gid) };
    assert_eq!(node.ctx.create_ah(node.pdn, &nobody).unwrap_err().status(), Some(err::INVAL));
}

/// Programs end a handle as soon as their last send is posted, and an adapter has sent it by then.
/// Here the device sleeps, and the kick does not come: the command itself has it look.
#[test]
fn what_was_posted_before_its_handle_ends_is_sent() {
    const SENDS: u32 = 8;
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (datagram(&na), datagram(&nb));
    let ah = na.ctx.create_ah(na.pdn, &Av::to(nb.gid)).unwrap();
    let (from, to) = (na.area_of(&pattern(1, 100)), nb.area(GRH as u64 + 100));
    for n in 0..SENDS {
        b.qp.post_recv(n.into(), &[to.sge()]);
    }
    let until = Instant::now() + Duration::from_secs(5);
    while !na.guest.need_kick() {
        assert!(Instant::now() < until, "the device never sleeps");
        std::thread::sleep(Duration::from_millis(1));
    }
    for n in 0..SENDS {
        a.qp.queue_send(&SendWr::datagram(n.into(), &[from.sge()], ah, b.qp.qpn, QKEY));
    }
    let (_, _, doorbell) = a.qp.raw_sq(0);
    doorbell.ring_without_kick(SENDS);
    na.ctx.destroy_ah(ah).expect("AH_DESTROY");
    for _ in 0..SENDS {
        b.rcq.ok();
        a.scq.ok();
    }
}
