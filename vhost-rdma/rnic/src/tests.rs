//! The backing over null host verbs, through the shard: what becomes of work requests, of faults of
//! the host, and of host objects.

mod ending;
mod groups;
mod queues;
mod reach;
mod registrations;
mod windows;

use std::sync::Arc;

use vhost_rdma_engine::nic::{Command, Reply, Status};
use vhost_rdma_engine::shard::testing::driver::{self, Guest, Qp, World, state_attr, wqe};
use vhost_rdma_memory::PageList;
use virtio_rdma_abi::{self as abi, event, opcode, qps, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::nic::Rnic;
use super::{
    Call, Directory, Faults, HostError, HostEvent, HostGid, HostObjects, HostVerbs, Null, Opener,
    Peer, Place,
};

const SIGNALED: u8 = send_flags::SIGNALED;

/// One RNIC, and the guests on it.
struct Bench {
    world: World,
    directory: Arc<Directory>,
}

impl Bench {
    fn new() -> Self {
        Self { world: World::new(), directory: Arc::default() }
    }

    /// A guest with a device context of its own, whose address 10.0.0.`host` is the host's.
    fn guest(&mut self, vni: u32, host: u8) -> (Guest, Faults) {
        let faults = Faults::default();
        faults.set_gids(vec![address(host)]);
        (self.guest_on(vni, host, &faults), faults)
    }

    /// The same on a device that is there already.
    fn guest_on(&mut self, vni: u32, host: u8, faults: &Faults) -> Guest {
        let script = faults.clone();
        let opener: Opener = Arc::new(move || {
            if script.is_gone() {
                return Err(HostError(libc::ENODEV));
            }
            let opened = Null::new(script.clone()).map_err(|_| HostError(libc::EMFILE))?;
            Ok(Box::new(opened) as Box<dyn HostVerbs>)
        });
        let directory = self.directory.clone();
        self.world.guest_with(vni, host, |shard, settings, port| {
            let host = opener().unwrap();
            let wake = Arc::new(|| {});
            let device = "null".to_owned();
            let place = Place { device, through: None, directory, opener, wake };
            shard.add_provided(Box::new(Rnic::nic(place, settings, host, port)))
        })
    }

    /// Two connected QPs of one guest.
    fn pair(&mut self, guest: &mut Guest) -> (Qp, Qp) {
        let a = self.world.qp(guest, qpt::RC, 16, None);
        let b = self.world.qp(guest, qpt::RC, 16, None);
        self.world.connect(guest, &a, qpt::RC, (b.qpn, guest.gid));
        self.world.connect(guest, &b, qpt::RC, (a.qpn, guest.gid));
        (a, b)
    }
}

/// 10.0.0.`host`, an address of the device.
fn address(host: u8) -> HostGid {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, host]);
    HostGid { index: host.into(), gid }
}

fn send(guest: &Guest, qp: &mut Qp, flags: u8, wr_id: u64) {
    guest.post_send(qp, wqe(opcode::SEND, flags, wr_id), &[guest.sge(0, 8)]);
}

#[test]
fn completions_come_in_order_and_only_those_that_are_wanted() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (mut a, mut b) = bench.pair(&mut guest);
    for n in 0..8 {
        guest.post_receive(&mut b, 100 + n, &[guest.sge(0, 64)]);
    }
    bench.world.settle();
    for n in 0..8 {
        send(&guest, &mut a, if n % 2 == 1 { SIGNALED } else { 0 }, n);
    }
    bench.world.settle();
    assert_eq!(guest.statuses(&mut a.cq), [(1, 0), (3, 0), (5, 0), (7, 0)]);
    let received = guest.drain(&mut b.cq);
    assert_eq!(received.len(), 8);
    for (n, cqe) in received.iter().enumerate() {
        assert_eq!((cqe.wr_id.get(), cqe.wqe_index.get()), (100 + n as u64, n as u32));
        assert_eq!((cqe.byte_len.get(), cqe.qpn.get()), (8, b.qpn));
    }
    let counters = bench.world.shard.status(guest.nic).unwrap().counters;
    assert_eq!((counters.tx_messages, counters.rx_messages, counters.tx_bytes), (8, 8, 64));
}

#[test]
fn a_receive_is_with_the_hardware_before_a_send_that_was_rung_for_later() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (mut a, mut b) = bench.pair(&mut guest);
    // Both are seen in one look at the doorbells, the send queue first; null host verbs drop what
    // finds no receive.
    guest.post_receive(&mut b, 1, &[guest.sge(0, 64)]);
    send(&guest, &mut a, SIGNALED, 2);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut b.cq), [(1, 0)]);
}

#[test]
fn a_queue_of_unsignaled_requests_never_blocks() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (mut a, _) = bench.pair(&mut guest);
    for round in 0..64 {
        for n in 0..16 {
            let wqe = wqe(opcode::RDMA_WRITE, 0, round * 16 + n);
            guest.post_send(&mut a, wqe, &[guest.sge(0, 8)]);
        }
        bench.world.settle();
    }
    guest.post_send(&mut a, wqe(opcode::RDMA_WRITE, SIGNALED, 9), &[guest.sge(0, 8)]);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut a.cq), [(9, 0)]);
}

#[test]
fn a_malformed_request_fails_in_its_turn_and_the_rest_is_flushed() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (mut a, mut b) = bench.pair(&mut guest);
    guest.post_receive(&mut a, 50, &[guest.sge(0, 64)]);
    guest.post_receive(&mut b, 60, &[guest.sge(0, 64)]);
    bench.world.settle();
    send(&guest, &mut a, 0, 1);
    guest.post_send(&mut a, wqe(0x77, SIGNALED, 2), &[]);
    send(&guest, &mut a, 0, 3);
    bench.world.settle();
    send(&guest, &mut a, 0, 4);
    guest.post_receive(&mut a, 51, &[guest.sge(0, 64)]);
    bench.world.settle();
    let mut statuses = guest.statuses(&mut a.cq);
    let sends: Vec<_> = statuses.iter().copied().filter(|(id, _)| *id < 50).collect();
    assert_eq!(
        sends,
        [(2, wc_status::LOC_QP_OP_ERR), (3, wc_status::WR_FLUSH_ERR), (4, wc_status::WR_FLUSH_ERR)]
    );
    statuses.retain(|(id, _)| *id >= 50);
    assert_eq!(statuses, [(50, wc_status::WR_FLUSH_ERR), (51, wc_status::WR_FLUSH_ERR)]);
    assert_eq!(guest.statuses(&mut b.cq), [(60, 0)], "what came before arrived");
    assert_eq!(bench.world.query(&guest, &a).qp_state, qps::ERR);
}

#[test]
fn an_error_of_the_hardware_reaches_the_guest() {
    let mut bench = Bench::new();
    let (mut guest, faults) = bench.guest(1, 1);
    let (mut a, _) = bench.pair(&mut guest);
    faults.fail_send(wc_status::REM_ACCESS_ERR);
    for n in 0..3 {
        send(&guest, &mut a, 0, n);
    }
    bench.world.settle();
    assert_eq!(
        guest.statuses(&mut a.cq),
        [
            (0, wc_status::REM_ACCESS_ERR),
            (1, wc_status::WR_FLUSH_ERR),
            (2, wc_status::WR_FLUSH_ERR)
        ]
    );
    assert_eq!(bench.world.query(&guest, &a).qp_state, qps::ERR);
}

#[test]
fn what_the_host_refuses_to_take_is_completed_all_the_same() {
    let mut bench = Bench::new();
    let (mut guest, faults) = bench.guest(1, 1);
    let (mut a, _) = bench.pair(&mut guest);
    faults.refuse(Call::PostSend, libc::EINVAL);
    for n in 0..3 {
        send(&guest, &mut a, 0, n);
    }
    bench.world.settle();
    let flushed = wc_status::WR_FLUSH_ERR;
    assert_eq!(
        guest.statuses(&mut a.cq),
        [(0, wc_status::LOC_QP_OP_ERR), (1, flushed), (2, flushed)]
    );
    assert_eq!(guest.asynchronous(), [(event::QP_FATAL, a.qpn)]);
    assert_eq!(bench.world.query(&guest, &a).qp_state, qps::ERR);
    let (mut b, _) = bench.pair(&mut guest);
    faults.refuse(Call::PostRecv, libc::EINVAL);
    for n in 10..13 {
        guest.post_receive(&mut b, n, &[guest.sge(0, 64)]);
    }
    bench.world.settle();
    assert_eq!(guest.statuses(&mut b.cq), [(10, flushed), (11, flushed), (12, flushed)]);
    assert_eq!(bench.world.query(&guest, &b).qp_state, qps::ERR);
}

#[test]
fn a_misaligned_atomic_never_reaches_the_host() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (mut a, _) = bench.pair(&mut guest);
    let mut request = wqe(opcode::ATOMIC_FETCH_AND_ADD, SIGNALED, 1);
    request.remote_addr = 0x1004.into();
    guest.post_send(&mut a, request, &[guest.sge(0, 8)]);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut a.cq), [(1, wc_status::REM_INV_REQ_ERR)]);
    assert_eq!(bench.world.query(&guest, &a).qp_state, qps::ERR);
}

#[test]
fn a_shared_queue_serves_its_qps_and_counts_what_is_used() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (at, ring) = guest.ring((8 << driver::RQ_STRIDE) + 128);
    let req = abi::SrqCreateReq {
        pdn: U32::new(guest.pd),
        entries: U32::new(8),
        max_wr: U32::new(8),
        max_sge: U32::new(1),
        log2_stride: driver::RQ_STRIDE,
        ..abi::SrqCreateReq::default()
    };
    let ctx = guest.ctx;
    let Reply::Srq(srq) = bench.world.ok(&guest, ctx, Command::SrqCreate { req, ring }) else {
        panic!("not an SRQ")
    };
    let mut a = bench.world.qp(&mut guest, qpt::RC, 16, None);
    let mut b = bench.world.qp(&mut guest, qpt::RC, 16, Some(srq.srqn.get()));
    bench.world.connect(&guest, &a, qpt::RC, (b.qpn, guest.gid));
    bench.world.connect(&guest, &b, qpt::RC, (a.qpn, guest.gid));
    for n in 0..8 {
        guest.post_shared((at, 8, srq.db.get()), n, guest.sge(0, 64));
    }
    bench.world.settle();
    for n in 0..3 {
        send(&guest, &mut a, SIGNALED, n);
    }
    bench.world.settle();
    assert_eq!(guest.statuses(&mut b.cq), [(0, 0), (1, 0), (2, 0)]);
    let taken = guest.read(at + (8 << driver::RQ_STRIDE) + abi::ctrl::TAKEN as u64, 4);
    assert_eq!(taken, 3u32.to_le_bytes());
}

#[test]
fn completions_of_an_earlier_life_are_nobodys() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (mut a, _) = bench.pair(&mut guest);
    guest.post_receive(&mut a, 1, &[guest.sge(0, 64)]);
    bench.world.settle();
    bench.world.modify(&guest, &a, state_attr(qps::ERR)).unwrap();
    bench.world.modify(&guest, &a, state_attr(qps::RESET)).unwrap();
    guest.raw_reset(&a);
    a.posted = [0; 2];
    let before = guest.drain(&mut a.cq).len();
    assert!(before <= 1, "flushed before the reset, or not at all");
    bench.world.connect(&guest, &a, qpt::RC, (a.qpn, guest.gid));
    guest.post_receive(&mut a, 2, &[guest.sge(0, 64)]);
    send(&guest, &mut a, SIGNALED, 3);
    bench.world.settle();
    let mut statuses = guest.statuses(&mut a.cq);
    statuses.sort_unstable();
    assert_eq!(statuses, [(2, 0), (3, 0)]);
}

#[test]
fn a_refused_registration_is_no_memory_and_harms_nobody() {
    let mut bench = Bench::new();
    let (one, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (before, _) = faults.live();
    for errno in [libc::ENOMEM, libc::ENOSPC, libc::EAGAIN] {
        faults.refuse(Call::Register, errno);
        let list = PageList { npages: 1, page_shift: 12, ..PageList::default() };
        let map = Arc::new(list.resolve(&one.space, 4096).unwrap());
        assert_eq!(bench.world.register(&one, 0x1000, map, 1), Err(Status::NOMEM));
    }
    assert_eq!(faults.live().0, before, "nothing is left of what was refused");
    let (mut a, _) = bench.pair(&mut other);
    send(&other, &mut a, SIGNALED, 1);
    bench.world.settle();
    assert_eq!(other.statuses(&mut a.cq), [(1, 0)]);
    faults.refuse(Call::Register, 0);
    let list = PageList { npages: 1, page_shift: 12, ..PageList::default() };
    let map = Arc::new(list.resolve(&one.space, 4096).unwrap());
    assert!(bench.world.register(&one, 0x1000, map, 1).is_ok());
}

#[test]
fn a_refused_object_leaves_nothing_behind() {
    let mut bench = Bench::new();
    let (mut guest, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (mut a, _) = bench.pair(&mut other);
    let cq = bench.world.cq(&mut guest, 16);
    let (before, _) = faults.live();
    let ctx = guest.ctx;
    let create = |guest: &mut Guest| {
        let (_, sq) = guest.ring(16 << driver::SQ_STRIDE);
        let req = abi::QpCreateReq {
            pdn: U32::new(guest.pd),
            r#type: U32::new(qpt::RC),
            send_cqn: U32::new(cq.cqn),
            recv_cqn: U32::new(cq.cqn),
            srqn: U32::new(abi::NO_SRQ),
            sq_entries: U32::new(16),
            max_send_wr: U32::new(16),
            max_send_sge: 4.into(),
            sq_log2_stride: driver::SQ_STRIDE,
            ..abi::QpCreateReq::default()
        };
        Command::QpCreate { req: Box::new(req), sq: Some(sq), rq: None }
    };
    faults.refuse(Call::CreateQp, libc::ENOMEM);
    let command = create(&mut guest);
    assert_eq!(bench.world.execute(&guest, ctx, command).unwrap_err(), Status::NOMEM);
    faults.refuse(Call::AllocPd, libc::ENOMEM);
    assert_eq!(bench.world.execute(&guest, ctx, Command::PdCreate).unwrap_err(), Status::NOMEM);
    faults.refuse(Call::CreateAh, libc::EHOSTUNREACH);
    let ah = Command::AhCreate { pdn: guest.pd, av: driver::av(guest.gid) };
    assert_eq!(bench.world.execute(&guest, ctx, ah).unwrap_err(), Status::UNREACH);
    faults.refuse(Call::CreateSrq, libc::ENOMEM);
    let (_, ring) = guest.ring((8 << driver::RQ_STRIDE) + 128);
    let req = abi::SrqCreateReq {
        pdn: U32::new(guest.pd),
        entries: U32::new(8),
        max_wr: U32::new(8),
        max_sge: U32::new(1),
        log2_stride: driver::RQ_STRIDE,
        ..abi::SrqCreateReq::default()
    };
    let srq = Command::SrqCreate { req, ring };
    assert_eq!(bench.world.execute(&guest, ctx, srq).unwrap_err(), Status::NOMEM);
    assert_eq!(faults.live().0, before);
    send(&other, &mut a, SIGNALED, 1);
    bench.world.settle();
    assert_eq!(other.statuses(&mut a.cq), [(1, 0)], "others go on");
    faults.refuse(Call::CreateQp, 0);
    let command = create(&mut guest);
    assert!(bench.world.execute(&guest, ctx, command).is_ok());
}

#[test]
fn the_host_cq_is_never_promised_twice() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let cq = bench.world.cq(&mut guest, 16);
    // A ring as long as the device has takes half of the CQ each.
    let (_, ring) = guest.ring((1 << 14) << 6);
    let ctx = guest.ctx;
    let create = |bench: &mut Bench| {
        let req = abi::QpCreateReq {
            pdn: U32::new(guest.pd),
            r#type: U32::new(qpt::UC),
            send_cqn: U32::new(cq.cqn),
            recv_cqn: U32::new(cq.cqn),
            srqn: U32::new(abi::NO_SRQ),
            sq_entries: U32::new(1 << 14),
            max_send_wr: U32::new(1 << 14),
            max_send_sge: 1.into(),
            sq_log2_stride: 6,
            ..abi::QpCreateReq::default()
        };
        let command = Command::QpCreate { req: Box::new(req), sq: Some(ring.clone()), rq: None };
        bench.world.execute(&guest, ctx, command)
    };
    let Ok(Reply::Qp(first)) = create(&mut bench) else { panic!("half is free") };
    assert!(create(&mut bench).is_ok(), "the other half");
    assert_eq!(create(&mut bench).unwrap_err(), Status::NOMEM);
    bench.world.ok(&guest, ctx, Command::QpDestroy(first.qpn.get()));
    assert!(create(&mut bench).is_ok(), "half is free again");
}

#[test]
fn a_device_that_is_gone_is_fatal_to_its_guest_alone_and_may_come_back() {
    let mut bench = Bench::new();
    let (mut one, faults) = bench.guest(1, 1);
    let (mut other, _) = bench.guest(1, 2);
    let (mut a, _) = bench.pair(&mut other);
    bench.pair(&mut one);
    faults.remove_device(true);
    bench.world.advance(2_000_000);
    assert!(one.asynchronous().contains(&(event::DEVICE_FATAL, 0)));
    // Its removal may wait for that; it is closed on a thread of its own.
    let late = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while faults.live() != (HostObjects::default(), 0) {
        assert!(std::time::Instant::now() < late, "the device is still open: {:?}", faults.live());
        std::thread::yield_now();
    }
    let ctx = one.ctx;
    assert_eq!(bench.world.execute(&one, ctx, Command::PdCreate).unwrap_err(), Status::FATAL);
    assert!(bench.world.shard.status(one.nic).unwrap().failed);
    send(&other, &mut a, SIGNALED, 7);
    bench.world.settle();
    assert_eq!(other.statuses(&mut a.cq), [(7, 0)]);
    assert!(other.asynchronous().is_empty());
    // Not yet back: an INIT finds nothing.
    bench.world.shard.reset(one.nic);
    let status_page = vhost_rdma_memory::Ring::page(&one.space, 0).unwrap();
    let init = Command::Init { space: one.space.clone(), status_page };
    assert_eq!(bench.world.execute(&one, 0, init).unwrap_err(), Status::FATAL);
    faults.remove_device(false);
    bench.world.start_again(&mut one);
    let (mut b, _) = bench.pair(&mut one);
    send(&one, &mut b, SIGNALED, 8);
    bench.world.settle();
    assert_eq!(one.statuses(&mut b.cq), [(8, 0)]);
}

#[test]
fn events_of_the_host_are_the_guests() {
    let mut bench = Bench::new();
    let (mut guest, faults) = bench.guest(1, 1);
    let (a, b) = bench.pair(&mut guest);
    faults.set_port_down(true);
    bench.world.advance(2_000_000);
    assert_eq!(guest.asynchronous(), [(event::PORT_ERR, 1)]);
    let Reply::Port(port) = bench.world.ok(&guest, 0, Command::QueryPort) else { panic!("a port") };
    assert_eq!(port.state, 1);
    faults.set_port_down(false);
    // The first QP that was made has handle 0 at the host.
    faults.raise(HostEvent::Qp(super::HostQp(0), event::QP_ACCESS_ERR));
    faults.raise(HostEvent::Qp(super::HostQp(1), event::COMM_EST));
    bench.world.advance(2_000_000);
    assert_eq!(
        guest.asynchronous(),
        [(event::PORT_ACTIVE, 1), (event::QP_ACCESS_ERR, a.qpn), (event::COMM_EST, b.qpn)]
    );
    assert_eq!(bench.world.query(&guest, &a).qp_state, qps::ERR);
    assert_eq!(bench.world.query(&guest, &b).qp_state, qps::RTS);
}

#[test]
fn nothing_is_left_of_a_nic() {
    let mut bench = Bench::new();
    let (mut guest, faults) = bench.guest(1, 1);
    let (a, _) = bench.pair(&mut guest);
    let ah = Command::AhCreate { pdn: guest.pd, av: driver::av(guest.gid) };
    let ctx = guest.ctx;
    bench.world.ok(&guest, ctx, ah);
    bench.world.ok(&guest, ctx, Command::MwAlloc { pdn: guest.pd, kind: abi::mw_type::TYPE1 });
    let (live, contexts) = faults.live();
    assert_eq!(
        live,
        HostObjects { pds: 1, mrs: 1, mws: 1, qps: 2, srqs: 0, ahs: 1, attachments: 0 }
    );
    assert_eq!(contexts, 1);
    bench.world.ok(&guest, ctx, Command::QpDestroy(a.qpn));
    assert_eq!(faults.live().0.qps, 1);
    bench.world.ok(&guest, ctx, Command::ContextDestroy);
    assert_eq!(faults.live(), (HostObjects::default(), 1), "a context takes all it owns along");
    bench.world.start_again(&mut guest);
    bench.pair(&mut guest);
    bench.world.shard.remove_nic(guest.nic);
    drop(bench.world.shard.take_deferred_drops(guest.nic));
    assert_eq!(faults.live(), (HostObjects::default(), 0));
}

#[test]
fn peers_are_reached_only_where_that_is_allowed() {
    let mut bench = Bench::new();
    let (mut one, _) = bench.guest(1, 1);
    let (two, _) = bench.guest(1, 2);
    let (stranger, _) = bench.guest(2, 3);
    let mut foreign = one.gid;
    foreign[15] = 200;
    let a = bench.world.qp(&mut one, qpt::RC, 16, None);
    bench.world.modify(&one, &a, driver::init_attr(qpt::RC)).unwrap();
    let reach = |bench: &mut Bench, gid| {
        let reached = bench.world.modify(&one, &a, driver::rtr_attr(qpt::RC, (0x99, gid)));
        if reached.is_ok() {
            bench.world.modify(&one, &a, state_attr(qps::RESET)).unwrap();
            bench.world.modify(&one, &a, driver::init_attr(qpt::RC)).unwrap();
        }
        reached
    };
    assert_eq!(reach(&mut bench, two.gid), Ok(()), "another NIC of the network");
    assert_eq!(reach(&mut bench, stranger.gid), Err(Status::UNREACH), "one of another network");
    assert_eq!(reach(&mut bench, foreign), Err(Status::UNREACH), "nobody named it");
    let peer = Peer {
        address: "10.0.0.192".parse().unwrap(),
        prefix_len: 26,
        through: None,
        remote: None,
    };
    bench.directory.set_peers(1, vec![peer]);
    assert_eq!(reach(&mut bench, foreign), Ok(()));
    bench.directory.set_peers(2, Vec::new());
    assert_eq!(reach(&mut bench, stranger.gid), Err(Status::UNREACH));
}

#[test]
fn a_qp_of_another_network_is_no_peer_though_the_address_is_one_of_ours() {
    let mut bench = Bench::new();
    let faults = Faults::default();
    faults.set_gids(vec![address(1), address(3)]);
    let mut one = bench.guest_on(1, 1, &faults);
    let mut stranger = bench.guest_on(2, 3, &faults);
    let theirs = bench.world.qp(&mut stranger, qpt::RC, 16, None);
    let ours = bench.world.qp(&mut one, qpt::RC, 16, None);
    let a = bench.world.qp(&mut one, qpt::RC, 16, None);
    bench.world.modify(&one, &a, driver::init_attr(qpt::RC)).unwrap();
    // The hardware looks at the number alone; the address is one that may be reached.
    let rtr = driver::rtr_attr(qpt::RC, (theirs.qpn, one.gid));
    assert_eq!(bench.world.modify(&one, &a, rtr), Err(Status::UNREACH));
    let rtr = driver::rtr_attr(qpt::RC, (ours.qpn, one.gid));
    assert_eq!(bench.world.modify(&one, &a, rtr), Ok(()));
}

#[test]
fn a_rule_that_is_revoked_ends_its_connections() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let peer = Peer {
        address: "10.0.0.200".parse().unwrap(),
        prefix_len: 32,
        through: None,
        remote: None,
    };
    bench.directory.set_peers(1, vec![peer]);
    let mut foreign = guest.gid;
    foreign[15] = 200;
    let a = bench.world.qp(&mut guest, qpt::RC, 16, None);
    bench.world.connect(&guest, &a, qpt::RC, (0x99, foreign));
    let (b, _) = bench.pair(&mut guest);
    bench.directory.set_peers(1, Vec::new());
    bench.world.shard.peers_changed(guest.nic);
    bench.world.settle();
    assert_eq!(guest.asynchronous(), [(event::QP_FATAL, a.qpn)]);
    assert_eq!(bench.world.query(&guest, &a).qp_state, qps::ERR);
    assert_eq!(bench.world.query(&guest, &b).qp_state, qps::RTS, "another connection goes on");
}

#[test]
fn a_guest_that_is_paused_is_not_written_to() {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (mut a, mut b) = bench.pair(&mut guest);
    guest.post_receive(&mut b, 1, &[guest.sge(0, 64)]);
    bench.world.settle();
    bench.world.shard.pause(guest.nic);
    bench.world.advance(2_000_000);
    assert!(guest.drain(&mut b.cq).is_empty() && guest.asynchronous().is_empty());
    bench.world.shard.resume(guest.nic);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut b.cq), [(1, wc_status::WR_FLUSH_ERR)]);
    let mut events = guest.asynchronous();
    events.sort_unstable();
    assert_eq!(events, [(event::QP_FATAL, a.qpn.min(b.qpn)), (event::QP_FATAL, a.qpn.max(b.qpn))]);
    send(&guest, &mut a, 0, 2);
    bench.world.settle();
    assert_eq!(guest.statuses(&mut a.cq), [(2, wc_status::WR_FLUSH_ERR)]);
}

#[test]
fn what_libibverbs_does_not_pass_on_is_not_offered() {
    let mut bench = Bench::new();
    let (guest, _) = bench.guest(1, 1);
    let Reply::Device(device) = bench.world.ok(&guest, 0, Command::QueryDevice) else {
        panic!("a device")
    };
    let missing = abi::cap::MEM_MGT | abi::cap::FLUSH | abi::cap::ATOMIC_WRITE;
    assert_eq!(device.caps.get() & missing, 0);
    assert_eq!(device.max_qp.get(), driver::limits().max_qps, "the lower of the two limits");
    let fast = Command::MrAlloc { pdn: guest.pd, max_pages: 4 };
    assert_eq!(bench.world.execute(&guest, guest.ctx, fast).unwrap_err(), Status::NOTSUPP);
    // A key for all of memory is the kernel's, for QP 1, and never one that a peer may use.
    assert_ne!(device.caps.get() & abi::cap::DMA_MR, 0);
    let dma = |access| Command::MrDma { pdn: guest.pd, access };
    let refused = |world: &mut World, ctx, access| world.execute(&guest, ctx, dma(access)).err();
    assert_eq!(refused(&mut bench.world, guest.ctx, 1), Some(Status::PERM));
    assert_eq!(refused(&mut bench.world, 0, 1), Some(Status::NOENT), "another context's domain");
    let Reply::Object(pdn) = bench.world.ok(&guest, 0, Command::PdCreate) else { panic!("a PD") };
    let mut dma = |access| bench.world.execute(&guest, 0, Command::MrDma { pdn, access });
    let remote = abi::access::LOCAL_WRITE | abi::access::REMOTE_READ;
    assert_eq!(dma(remote).err(), Some(Status::INVAL));
    let Ok(Reply::Mr(key)) = dma(abi::access::LOCAL_WRITE) else { panic!("a key") };
    let destroy = |bench: &mut Bench| bench.world.execute(&guest, 0, Command::PdDestroy(pdn)).err();
    assert_eq!(destroy(&mut bench), Some(Status::BUSY));
    bench.world.ok(&guest, 0, Command::MrDereg(key.lkey.get()));
    assert_eq!(destroy(&mut bench), None);
}
