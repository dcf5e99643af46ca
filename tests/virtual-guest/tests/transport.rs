//! What comes before any verb: features, configuration space, virtqueues, requests, lives, and what
//! drivers and devices of different ages make of each other (docs/virtio-rdma.md 2 to 5).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use virtual_guest::backing::rules;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{
    self, ARM_ANY, Put, Take, access, cap, cmd, err, event, qps, qpt, status,
};
use virtual_guest::world::{End, World};

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(20);
/// Memory that is plugged in.
const PLUGGED: u64 = 1 << 32;
/// Opcodes that only some devices have.
const FLUSH: u8 = 14;
const ATOMIC_WRITE: u8 = 15;
/// Not an opcode.
const NOTHING: u16 = 0x7777;

#[track_caller]
fn refused<T: std::fmt::Debug>(what: &str, got: virtual_guest::guest::Result<T>, expected: u32) {
    match got {
        Err(e) => assert_eq!(e.status(), Some(expected), "{what}: {e}"),
        Ok(v) => panic!("{what}: accepted with {v:?}, expected status {expected}"),
    }
}

fn bare(world: &World) -> Guest {
    let socket = world.daemon.add_nic("bare", "net", &[]);
    Guest::connect(&socket, GuestConfig::default()).expect("a connection")
}

#[test]
fn the_features_are_those_of_the_specification() {
    const INDIRECT_DESC: u64 = 1 << 28;
    const EVENT_IDX: u64 = 1 << 29;
    const PROTOCOL_FEATURES: u64 = 1 << 30;
    const VERSION_1: u64 = 1 << 32;
    let world = World::new();
    let socket = world.daemon.add_nic("bare", "net", &[]);
    let mut front = Frontend::from_stream(UnixStream::connect(socket).unwrap(), 64);
    let offered = front.get_features().unwrap();
    // Bit 30 is vhost-user's own, and no guest sees it.
    assert_eq!(offered, INDIRECT_DESC | EVENT_IDX | VERSION_1 | PROTOCOL_FEATURES);
    front.set_owner().unwrap();
    let protocol = front.get_protocol_features().unwrap();
    let absent = VhostUserProtocolFeatures::LOG_SHMFD | VhostUserProtocolFeatures::STATUS;
    assert!((protocol & absent).is_empty(), "{protocol:?}: no migration, no device status");
}

#[test]
fn the_configuration_space_answers_any_window_and_stays_as_it_is() {
    let world = World::new();
    let guest = bare(&world);
    let read = |offset: u32, size: u32| {
        let zeroes = vec![0; size as usize];
        let none = VhostUserConfigFlags::empty();
        guest.front(|f| f.get_config(offset, size, none, &zeroes)).unwrap().1
    };
    let whole = read(0, 64);
    assert!(whole.u16_at(8) >= 1 && whole.u16_at(10) >= 1, "vectors and kick queues");
    assert_eq!(whole[18..], [0; 46], "reserved");
    guest.init().unwrap();
    for (offset, size) in [(0, 4), (1, 1), (11, 7), (60, 8), (64, 4), (0, 200), (100, 100)] {
        let got = read(offset, size);
        for (n, byte) in got.iter().enumerate() {
            let expected = whole.get(offset as usize + n).copied().unwrap_or(0);
            assert_eq!(*byte, expected, "byte {n} of {size} at {offset}");
        }
    }
    guest.query_device().unwrap();
}

#[test]
fn queues_of_every_size_serve() {
    let world = World::new();
    for queue_size in [4, 8, 256, 1024] {
        let event_buffers = queue_size.min(48) - 1;
        let config = GuestConfig { queue_size, event_buffers, ..GuestConfig::default() };
        let node = world.node_with("net", &[], config);
        let mut end = node.rc();
        end.qp.connect(end.address(), &Path::default()).unwrap();
        let word = node.area(8);
        // More events than the smallest queue has entries.
        for n in 0..6 {
            end.scq.arm(ARM_ANY);
            end.run_ok(&SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
            let event = node.guest.comp_event(0, LONG).unwrap().expect("an event");
            assert_eq!(event.cqn, end.scq.cqn, "queues of {queue_size}");
        }
    }
}

#[test]
fn notifications_are_no_counts() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    let write = |n| SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[1; 8]);
    // One notification at most for fifty.
    for n in 0..50 {
        a.qp.queue_send(&write(n));
    }
    a.qp.ring_sq();
    for n in 0..50 {
        assert_eq!(a.scq.ok().wr_id, n);
    }
    // Fifty for nothing, and for one.
    let (_, _, doorbell) = a.qp.raw_sq(0);
    for _ in 0..50 {
        doorbell.kick();
    }
    a.scq.silent(Duration::from_millis(20));
    a.qp.queue_send(&write(50));
    a.qp.ring_sq();
    for _ in 0..50 {
        doorbell.kick();
    }
    assert_eq!(a.scq.ok().wr_id, 50);
    a.scq.silent(Duration::from_millis(20));
}

#[test]
fn a_request_that_changes_is_looked_at_once() {
    let world = World::new();
    let guest = bare(&world);
    guest.init().unwrap();
    let pages = guest.ram().alloc(2);
    let view = pages.view(0, pages.len());
    view.write(0, &Put::new().u16(cmd::QUERY_PORT).zero(2).u32(0).u64(0).done(16));
    let stop = AtomicBool::new(false);
    let mut seen = [0u32; 2];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                view.store16(0, NOTHING, Ordering::Relaxed);
                std::hint::spin_loop();
                view.store16(0, cmd::QUERY_PORT, Ordering::Relaxed);
            }
        });
        for round in 0..500 {
            guest.with_queue(spec::VQ_CONTROL, |q| {
                view.fill(spec::PAGE, 64, 0xee);
                q.add(&[(pages.gpa(0), 16)], &[(pages.gpa(spec::PAGE), 40)]).expect("room");
                q.kick().unwrap();
                let (_, len) = q.wait(LONG).unwrap().expect("an answer");
                // One of the two, whole.
                match (len, view.vec(spec::PAGE, 4).as_slice().u32_at(0)) {
                    (40, err::OK) => seen[0] += 1,
                    (8, err::NOTSUPP) => seen[1] += 1,
                    other => panic!("round {round}: {other:?}"),
                }
            });
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(seen[0] > 0, "{seen:?}");
    guest.query_port().unwrap();
}

/// A life whose status page lies in memory that can be taken away.
fn init_in(guest: &Guest, gpa: u64) -> virtual_guest::guest::Result<Vec<u8>> {
    let body = Put::new().u32(1).u32(0).u64(5).u64(gpa).done(24);
    guest.command(cmd::INIT, 0, &body, 8)
}

#[test]
fn what_a_nic_is_comes_before_what_it_is_asked() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let guest = bare(&world);
    refused("unknown, before INIT", guest.command(NOTHING, 0, &[], 0), err::STATE);
    let page = Put::new().u64(u64::MAX).done(8);
    refused("wrong, before INIT", guest.command(cmd::CONTEXT_CREATE, 0, &page, 8), err::STATE);
    guest.add_memory(PLUGGED, 2 << 20).unwrap();
    let status_page = Buf::contiguous_in(guest.ram(), PLUGGED, spec::PAGE);
    status_page.view().fill(0, spec::PAGE, 0);
    init_in(&guest, status_page.pages().gpa(0)).unwrap();
    refused("unknown", guest.command(NOTHING, 0, &[], 0), err::NOTSUPP);
    guest.remove_memory(PLUGGED).unwrap();
    guest.await_async(event::DEVICE_FATAL, 0, LONG).expect("DEVICE_FATAL");
    refused("after the loss", guest.query_device(), err::FATAL);
    refused("unknown, after it", guest.command(NOTHING, 0, &[], 0), err::FATAL);
    refused("INIT, after it", guest.init(), err::FATAL);
    refused("a wrong INIT, after it", init_in(&guest, 1), err::FATAL);
    guest.shutdown().expect("its objects can go");
    refused("after SHUTDOWN", guest.query_device(), err::STATE);
    guest.init().expect("a new life");
    guest.query_device().unwrap();
    // Nobody else noticed.
    let word = b.node.area(8);
    a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
}

#[test]
fn a_queue_that_is_disabled_is_not_served_and_that_is_all() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    let guest = &b.node.guest;
    let enable = |on| {
        guest.front(|front| front.set_vring_enable(spec::VQ_CONTROL, on)).unwrap();
    };
    let pages = guest.ram().alloc(1);
    let request = Put::new().u16(cmd::PD_CREATE).zero(2).u32(b.node.ctx.id()).u64(0).done(16);
    pages.view(0, 16).write(0, &request);
    enable(false);
    let head = guest.with_queue(spec::VQ_CONTROL, |queue| {
        let head = queue.add(&[(pages.gpa(0), 16)], &[(pages.gpa(64), 16)]).expect("room");
        queue.kick().unwrap();
        head
    });
    let wait = |time| guest.with_queue(spec::VQ_CONTROL, |queue| queue.wait(time));
    assert_eq!(wait(Duration::from_millis(100)).unwrap(), None, "it is disabled");
    // The life goes on, and with it the guest's memory is the device's.
    a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[7; 8]));
    assert_eq!(word.bytes(), [7; 8]);
    enable(true);
    assert_eq!(wait(LONG).unwrap(), Some((head, 16)), "the command waited");
    assert_eq!(pages.view(64, 4).load32(0, Ordering::Relaxed), err::OK);
    b.qp.query().expect("its objects are there");
}

#[test]
fn a_queue_that_is_not_started_keeps_no_other_waiting() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let word = b.node.area(8);
    let guest = &b.node.guest;
    let bases =
        [spec::VQ_EVENT, spec::VQ_EVENT + 1].map(|index| (index, guest.stop_ring(index).unwrap()));
    // A doorbell that cannot be true: QP_FATAL, for which there is no queue.
    let mut broken = b.node.rc();
    broken.qp.to_init(&Path::default()).unwrap();
    broken.qp.raw_rq(0).2.ring(0x8000_0000);
    let deadline = Instant::now() + LONG;
    while broken.qp.state().unwrap() != qps::ERR {
        assert!(Instant::now() < deadline, "the doorbell does no harm");
    }
    let mut own = b.node.rc();
    own.qp.connect(own.address(), &Path::default()).unwrap();
    own.scq.arm(ARM_ANY);
    let write = |n| SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[n as u8; 8]);
    own.run_ok(&write(1));
    a.run_ok(&write(2));
    guest.query_device().expect("commands go on");
    for (index, base) in bases {
        guest.start_ring(index, base).unwrap();
    }
    guest.await_async(event::QP_FATAL, broken.qp.qpn, LONG).expect("the event waited");
    let told = guest.comp_event(0, LONG).unwrap().expect("this one too");
    assert_eq!(told.cqn, own.scq.cqn);
}

/// All queues stop and begin again at index 0, as after a reset, or where an index wrapped.
fn begin_again(guest: &Guest) {
    guest.stop_rings().unwrap();
    guest.start_rings().unwrap();
}

#[test]
fn a_driver_that_lives_goes_on_from_index_0() {
    let world = World::new();
    let path = Path { timeout: 18, ..Path::default() };
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &path);
    let word = b.node.area(8);
    let write = |n: u64| SendWr::write(n, &[], word.addr(0), word.rkey()).inline(&[n as u8; 8]);
    a.run_ok(&write(1));
    begin_again(&b.node.guest);
    if rules().pause_keeps_connections {
        // Nobody has said yet whose memory this is.
        a.qp.post_send(&write(2));
        a.scq.silent(Duration::from_millis(100));
        assert_eq!(word.bytes(), [1; 8]);
        b.node.guest.keepalive().expect("it is still there");
        assert_eq!(a.scq.ok().wr_id, 2);
        assert_eq!(word.bytes(), [2; 8]);
    } else {
        b.node.guest.keepalive().expect("it is still there");
    }
    b.qp.query().expect("its objects too");
    b.node.mr(64);
    // Also with work of its own.
    let mut own = b.node.rc();
    own.qp.connect(own.address(), &Path::default()).unwrap();
    own.run_ok(&write(3));
}

#[test]
fn a_life_that_nobody_claims_is_over() {
    let world = World::new();
    for first in 0..3 {
        let node = world.node();
        let end = node.rc();
        begin_again(&node.guest);
        let nonce = Put::new().u64(0x4444).done(8);
        match first {
            0 => refused("a query", node.guest.query_device(), err::STATE),
            1 => refused("no nonce", node.guest.command(cmd::KEEPALIVE, 0, &nonce, 0), err::STATE),
            _ => assert_eq!(node.guest.raw_control(&[&[0; 3]], &[8], LONG).unwrap().unwrap().0, 8),
        }
        refused("too late", node.guest.keepalive(), err::STATE);
        refused("its objects", end.qp.query(), err::STATE);
        let deadline = Instant::now() + LONG;
        while world.daemon.show_nic(&node.name)["objects"]["qps"] != 0 {
            assert!(Instant::now() < deadline, "{first}: objects of a life that is over");
        }
        node.guest.init().expect("a new life");
        refused("its objects, in the next life", end.qp.query(), err::NOENT);
    }
}

#[test]
fn the_timers_of_a_stopped_guest_stand_still() {
    let world = World::new();
    let _quiet = virtual_guest::control::quiet();
    // One wait of 1074 ms, which would be over when the guest goes on.
    let path = Path { timeout: 18, retry_cnt: 0, ..Path::default() };
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &path);
    if !rules().pause_keeps_connections {
        return;
    }
    b.qp.destroy().unwrap();
    a.qp.post_send(&SendWr::write(1, &[], 0x1000, 7).inline(&[1; 8]));
    let bases = a.node.guest.stop_rings().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!a.scq.ready(), "written while the queue was stopped");
    // Before the first queue starts: the life goes on with that one.
    let resumed = Instant::now();
    for (index, base) in bases.into_iter().enumerate() {
        a.node.guest.start_ring(index, base).unwrap();
    }
    assert_eq!(a.scq.one().status, status::RETRY_EXC_ERR);
    let least = Duration::from_millis(1050);
    assert!(resumed.elapsed() >= least, "{:?}: a wait ran out meanwhile", resumed.elapsed());
}

#[test]
fn a_context_has_a_kick_queue_and_its_pages_are_numbered() {
    let world = World::new();
    let node = world.node();
    let queues = node.guest.first_kick_queue()..node.guest.queue_count();
    for _ in 0..3 {
        let ctx = node.guest.open().expect("CONTEXT_CREATE");
        assert!(ctx.id() != 0 && queues.contains(&ctx.kick_queue()));
        for page in 1..4 {
            assert_eq!(ctx.add_doorbell_page().expect("DB_PAGE_ADD"), page);
        }
    }
    let kernel = node.guest.kernel().expect("context 0 begins without a page");
    assert_eq!(kernel.kick_queue(), node.guest.first_kick_queue());
}

/// Behind a device that has less, what is missing is refused: commands, flags and work requests.
#[test]
fn what_is_not_offered_is_refused() {
    let world = World::new();
    let node =
        world.node_with("net", &["--backing", "rnic:null@192.0.2.1"], GuestConfig::default());
    let caps = node.guest.query_device().unwrap().caps;
    let missing = cap::MEM_MGT | cap::ZERO_BASED | cap::FLUSH | cap::ATOMIC_WRITE;
    assert_eq!(caps & missing, 0, "{caps:#x}: this device has more than this test needs");
    let body = Put::new().u32(node.pdn).u32(4).done(8);
    refused("MR_ALLOC", node.ctx.command(cmd::MR_ALLOC, &body, 8), err::NOTSUPP);
    let flags = access::ALL | access::ZERO_BASED;
    refused("ZERO_BASED", node.ctx.mr(node.pdn, 4096, flags), err::NOTSUPP);
    for opcode in [FLUSH, ATOMIC_WRITE] {
        let mut end = node.rc();
        end.qp.connect(end.address(), &Path::default()).unwrap();
        let word = node.area(8);
        let base = SendWr { remote_addr: word.addr(0), rkey: word.rkey(), ..SendWr::default() };
        let request = SendWr { opcode, arg0: 8, aux: 1, ..base };
        assert_eq!(end.run(&request).status, status::LOC_QP_OP_ERR, "opcode {opcode}");
    }
}

/// A driver that was built with one feature more (a label of 32 bits at the end of QP_CREATE, by a
/// capability behind the last one) and this device.
#[test]
fn a_newer_driver_finds_out_and_does_without() {
    const LABEL: u64 = 1 << 18;
    let world = World::new();
    let node = world.node();
    let guest = &node.guest;
    let status_page = Buf::contiguous(guest.ram(), spec::PAGE);
    status_page.view().fill(0, spec::PAGE, 0);
    status_page.view().store32(spec::STATUS_ALIVE, 5, Ordering::Release);
    let init = Put::new().u32(1).u32(0).u64(5).u64(status_page.pages().gpa(0)).u64(LABEL).done(32);
    let answer = guest.command(cmd::INIT, 0, &init, 16).expect("INIT with an unknown capability");
    assert_eq!(answer.u64_at(8) & LABEL, 0, "not in effect");
    let ctx = guest.open().unwrap();
    let pdn = ctx.create_pd().unwrap();
    let cq = virtual_guest::rings::Cq::create(&ctx, 16, 0).unwrap();
    let ring = Buf::contiguous(guest.ram(), spec::PAGE);
    let list = PageList::of(guest.ram(), ring.pages(), 0).bytes();
    let create = |label: u32| {
        let body = Put::new()
            .u32(pdn)
            .u32(qpt::RC)
            .u32(0)
            .u32(cq.cqn)
            .u32(cq.cqn)
            .u32(spec::NO_SRQ)
            .u32(16)
            .u32(0)
            .u32(16)
            .u32(0)
            .u16(1)
            .u16(0)
            .u16(0)
            .u8(6)
            .u8(5)
            .bytes(&list)
            .bytes(&PageList::none().bytes())
            .u32(label)
            .u32(0)
            .done(104);
        // With room for a response that has grown too.
        let header = Put::new().u16(cmd::QP_CREATE).zero(2).u32(ctx.id()).u64(0).done(16);
        guest.raw_control(&[&header, &body], &[8 + 32], LONG).unwrap().expect("an answer")
    };
    let (len, bytes) = create(7);
    assert_eq!((len, bytes.u32_at(0)), (8, err::NOTSUPP), "a label that it would not get");
    let (len, bytes) = create(0);
    assert_eq!((len, bytes.u32_at(0)), (8 + 16, err::OK), "no label, as before");
    assert_eq!(bytes.u32_at(8 + 8), spec::DB_NONE, "the receive queue does not exist");
}

#[test]
fn fields_that_an_opcode_does_not_use_are_ignored() {
    let world = World::new();
    let (mut a, mut b): (End, End) = world.rc_pair();
    let (from, to) = (a.node.area_of(&[3; 8]), b.node.area(8));
    // The reserved bytes of a receive.
    b.qp.queue_recv(1, &[to.sge()]);
    let (ring, at, _) = b.qp.raw_rq(0);
    ring.fill(at + 10, 6, 0xff);
    b.qp.ring_rq();
    let noise = SendWr {
        imm: u32::MAX,
        remote_addr: u64::MAX,
        rkey: u32::MAX,
        aux: u32::MAX,
        arg0: u64::MAX,
        arg1: u64::MAX,
        ..SendWr::send(2, &[from.sge()])
    };
    a.run_ok(&noise);
    let received = b.rcq.ok();
    assert_eq!((received.wr_id, received.imm), (1, 0));
    assert_eq!(to.bytes(), [3; 8]);
    assert_eq!(a.qp.state().unwrap(), qps::RTS);
    assert!(b.rcq.wait(SECOND / 50).is_none());
}
