//! Work that is many, in one go: what a turn of the worker was charged for it, by the engine's cost
//! model.
//!
//! The charge is the same on a busy machine and in a build without optimisation, so it is asserted
//! to the microsecond here; what it comes to in time is the benchmark's affair.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtual_guest::backing::rules;
use virtual_guest::daemon::tries;
use virtual_guest::guest::GuestConfig;
use virtual_guest::pages::{Buf, PageList};
use virtual_guest::process::Process;
use virtual_guest::qp::{Av, Path, Qp, QpSpec, SendWr};
use virtual_guest::rings::{Sge, Srq, ring_with_control};
use virtual_guest::spec::{self, Put, access, cap, cmd, qpt};
use virtual_guest::world::{Door, End, Node};

use crate::DOOR;
use crate::scene::{Scene, case, case_within, hasty};

/// The most that a turn may be charged, in seconds: jobs, a round, what is told at its end, and the
/// last piece of each.
const MOST: f64 = 0.000_400;

/// Nothing that the villain did made a turn long.
#[track_caller]
fn turns_are_short(scene: &Scene) {
    let turns = scene.world.daemon.turns();
    let charged = turns.charged;
    // For whoever runs this with a build that is optimised.
    eprintln!("charged {:.1} us, longest turn {:.1} us", charged * 1e6, turns.longest * 1e6);
    assert!(charged > 0.0, "nothing was charged at all");
    assert!(charged <= MOST, "a turn was charged {:.1} us", charged * 1e6);
}

fn large() -> GuestConfig {
    GuestConfig { ram_bytes: 96 << 20, ..GuestConfig::default() }
}

fn has(node: &Node, what: u64) -> bool {
    node.guest.query_device().expect("QUERY_DEVICE").caps & what != 0
}

#[test]
fn requests_of_as_many_elements_as_can_be() {
    case(|scene| {
        let node = scene.villain_with(large());
        let blob = node.area(4096);
        let attr = node.guest.query_device().expect("QUERY_DEVICE");
        let elements = attr.max_send_sge.min(32) as u16;
        let spec = QpSpec { send_sge: elements, ..QpSpec::new(qpt::RC) };
        let mut ends: Vec<End> = (0..16).map(|_| node.end(&spec)).collect();
        for end in &ends {
            end.qp.connect(end.address(), &Path::default()).expect("to itself");
        }
        let bytes: Vec<Sge> = (0..u64::from(elements)).map(|n| blob.part(n, 1)).collect();
        let write = SendWr::write(1, &bytes, blob.addr(64), blob.rkey());
        scene.during(|| {
            for _ in 0..tries(20) {
                for end in &mut ends {
                    (0..60).for_each(|_| end.qp.queue_send(&write));
                }
                ends.iter_mut().for_each(|end| end.qp.ring_sq());
                for end in &mut ends {
                    (0..60).for_each(|_| assert_eq!(end.scq.ok().status, 0));
                }
            }
        });
        turns_are_short(scene);
    });
}

#[test]
fn datagrams_of_one_byte_to_large_groups() {
    case(|scene| {
        let node = scene.villain();
        let mut group = [0; 16];
        group[10..].copy_from_slice(&[0xff, 0xff, 239, 1, 2, 3]);
        if !rules().groups_end_with_the_network {
            scene.world.daemon.add_peer("239.1.2.3", "net");
        }
        let (scq, mut rcq) = (node.cq(256), node.cq(4096));
        let blob = node.area(64);
        let mut ends: Vec<Qp> = (0..rules().group_members)
            .map(|_| {
                let qp = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &QpSpec::new(qpt::UD));
                let qp = qp.expect("QP_CREATE");
                qp.start_datagrams(5).expect("to RTS");
                let join = Put::new().u32(qp.qpn).u32(0).bytes(&group).done(24);
                node.ctx.command(cmd::MCAST_ATTACH, &join, 0).expect("MCAST_ATTACH");
                qp
            })
            .collect();
        let ah = node.ctx.create_ah(node.pdn, &Av::to(group)).expect("AH_CREATE");
        let send = SendWr::datagram(1, &[blob.part(0, 1)], ah, 0xff_ffff, 5).unsignaled();
        scene.during(|| {
            for _ in 0..tries(20) {
                for qp in &mut ends {
                    (0..60).for_each(|n| qp.queue_recv(n, &[blob.sge()]));
                    qp.ring_rq();
                    (0..60).for_each(|_| qp.queue_send(&send));
                }
                ends.iter_mut().for_each(Qp::ring_sq);
                std::thread::sleep(std::time::Duration::from_millis(5));
                for qp in &mut ends {
                    qp.reset(&[&scq, &rcq]).expect("to RESET");
                    qp.start_datagrams(5).expect("to RTS");
                }
                // One that is full dies, and takes the queue pairs along in the midst of their
                // changes.
                rcq.drain();
            }
        });
        turns_are_short(scene);
    });
}

#[test]
fn rings_of_megabytes_that_move() {
    const ENTRIES: u32 = 8192;
    case_within(32 << 20, |scene| {
        let node = scene.villain_with(large());
        let sge = node.area(64).part(0, 1);
        if has(&node, cap::SRQ_RESIZE) {
            let mut srq = Srq::create(&node.ctx, node.pdn, ENTRIES, 4, 0).expect("SRQ_CREATE");
            (0..u64::from(ENTRIES)).for_each(|n| srq.post(n, &[sge]));
            scene.during(|| srq.resize(2 * ENTRIES).expect("SRQ_MODIFY"));
            assert_eq!(srq.query().expect("SRQ_QUERY").0, 2 * ENTRIES);
        }
        if has(&node, cap::CQ_RESIZE) {
            let spec = QpSpec::new(qpt::RC);
            let mut end = node.end_with(&spec, node.cq(ENTRIES), node.cq(16));
            end.qp.connect(end.address(), &Path::default()).expect("to itself");
            let word = node.area(8);
            let write = SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]);
            let mut consumer = 0;
            for _ in 0..ENTRIES / 32 {
                (0..32).for_each(|_| end.qp.queue_send(&write));
                end.qp.ring_sq();
                consumer += 32;
                while !produced(&end, consumer) {
                    std::thread::yield_now();
                }
            }
            let (bytes, ctrl) = ring_with_control(2 * ENTRIES, 6);
            let ring = Arc::new(Buf::scattered(node.guest.ram(), 0, bytes));
            ring.view().fill(0, bytes, 0);
            ring.view().store32(ctrl + spec::CTRL_CONSUMER, 0, Ordering::SeqCst);
            let list = PageList::of(node.guest.ram(), ring.pages(), 0);
            let request = end.scq.resize_request(2 * ENTRIES, 2 * ENTRIES, &list);
            scene.during(|| node.ctx.command(cmd::CQ_RESIZE, &request, 0).expect("CQ_RESIZE"));
            end.scq.moved_to(2 * ENTRIES, ring);
            (0..ENTRIES).for_each(|_| assert_eq!(end.scq.ok().status, 0));
        }
        turns_are_short(scene);
    });
}

/// Whether entry `count` - 1 of the sending CQ is there, unconsumed.
fn produced(end: &End, count: u32) -> bool {
    let at = u64::from(count - 1) * 64 + 60;
    end.scq.view().load32(at, Ordering::Acquire) == count
}

#[test]
fn a_queue_that_dies_under_a_thousand_queue_pairs() {
    case_within(32 << 20, |scene| {
        let node = scene.villain_with(large());
        let spec =
            QpSpec { sq: 4, rq: 2, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
        let (scq, rcq) = (node.cq(1), node.cq(64));
        let mut users: Vec<Qp> = Vec::new();
        for index in 0..tries(1000) {
            if index % 400 == 399 {
                node.ctx.add_doorbell_page().expect("DB_PAGE_ADD: the others are full");
            }
            users.push(Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec).expect("QP_CREATE"));
        }
        let blob = node.area(8);
        let qp = &mut users[0];
        qp.connect((node.gid, qp.qpn), &hasty()).expect("to itself");
        let write = SendWr::write(1, &[blob.part(0, 1)], blob.addr(0), blob.rkey());
        (0..3).for_each(|_| qp.queue_send(&write));
        scene.during(|| {
            qp.ring_sq();
            let deadline = std::time::Instant::now() + crate::scene::SOON;
            while qp.state().expect("QP_QUERY") != spec::qps::ERR {
                assert!(std::time::Instant::now() < deadline, "the queue pair lives on");
            }
        });
        turns_are_short(scene);
    });
}

#[test]
fn a_domain_and_a_context_of_thousands_of_regions() {
    case_within(32 << 20, |scene| {
        let node = scene.villain_with(large());
        let gpa = node.guest.ram().regions()[0].gpa();
        let one = PageList::contiguous(gpa, 1, 0, 12);
        for n in 0..tries(8000) {
            node.ctx.mr_reg(node.pdn, access::ALL, (n << 12, 4096), &one).expect("MR_REG");
        }
        scene.during(|| {
            for _ in 0..tries(200) {
                let busy = node.ctx.destroy_pd(node.pdn).expect_err("it has regions");
                assert_eq!(busy.status(), Some(spec::err::BUSY));
            }
            scene.place.leave(&node).expect("CONTEXT_DESTROY");
        });
        turns_are_short(scene);
    });
}

#[test]
fn a_thousand_processes_that_do_nothing() {
    // A process's session has a thread.
    let many = if DOOR == Door::Process { 300 } else { 1000 };
    case_within(32 << 20, |scene| {
        let node = scene.villain_with(large());
        let page = node.guest.ram().alloc(1).gpa(0);
        let open = Put::new().u64(page).done(8);
        let mut sessions = Vec::new();
        for _ in 0..tries(many) {
            let came = match DOOR {
                Door::Monitor => node.ctx.command(cmd::CONTEXT_CREATE, &open, 8).map(drop),
                Door::Process => Process::connect(&node.socket).map(|it| sessions.push(it)),
            };
            if came.is_err() {
                break;
            }
        }
        // Found among them all, also out of the worker's sleep.
        let mut end = node.rc();
        end.qp.connect(end.address(), &Path::default()).expect("to itself");
        let word = node.area(8);
        let write = SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]);
        scene.during(|| (0..200).for_each(|_| assert_eq!(end.run_ok(&write).status, 0)));
        turns_are_short(scene);
    });
}
