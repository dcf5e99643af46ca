//! Work queues, completion queues and doorbells with wild contents.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::rings::{Sge, Srq};
use virtual_guest::spec::{self, cap, event, qps, qpt, send, status};
use virtual_guest::world::{End, Node};

use crate::scene::{Noise, SOON, case, hasty};

/// A queue pair that is connected to itself.
fn alone(node: &Node) -> End {
    let end = node.rc();
    end.qp.connect(end.address(), &hasty()).expect("to itself");
    end
}

#[track_caller]
fn raised(node: &Node, kind: u32, object: u32) {
    let seen = node.guest.await_async(kind, object, SOON);
    assert!(seen.is_ok(), "no event {kind} for {object:#x}: {seen:?}");
}

#[test]
fn wild_producer_indices_end_their_queue_only() {
    case(|scene| {
        let node = scene.villain();
        for wild in [65, 0x8000_0000, u32::MAX, u32::MAX - 64] {
            let mut end = alone(&node);
            let (_, _, doorbell) = end.qp.raw_sq(0);
            doorbell.ring(wild);
            raised(&node, event::QP_FATAL, end.qp.qpn);
            assert_eq!(end.qp.state().expect("QP_QUERY"), qps::ERR);
            let mut end = alone(&node);
            let (_, _, doorbell) = end.qp.raw_rq(0);
            doorbell.ring(wild);
            raised(&node, event::QP_FATAL, end.qp.qpn);
            let srq = Srq::create(&node.ctx, node.pdn, 64, 1, 0).expect("SRQ_CREATE");
            srq.doorbell().ring(wild);
            raised(&node, event::SRQ_ERR, srq.srqn);
        }
        // Backwards: what was posted can not be taken back.
        let mut end = alone(&node);
        end.qp.queue_recv(1, &[]);
        end.qp.queue_recv(2, &[]);
        end.qp.ring_rq();
        node.guest.works();
        let (_, _, doorbell) = end.qp.raw_rq(0);
        std::thread::sleep(Duration::from_millis(20));
        doorbell.ring(1);
        raised(&node, event::QP_FATAL, end.qp.qpn);
        let mut end = alone(&node);
        let word = node.area(8);
        let write = SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[3; 8]);
        end.run_ok(&write);
    });
}

#[test]
fn a_wild_consumer_index_ends_its_cq_only() {
    case(|scene| {
        let node = scene.villain();
        for wild in [1000, u32::MAX / 2, u32::MAX] {
            let mut end = alone(&node);
            let word = node.area(8);
            let write = SendWr::write(1, &[], word.addr(0), word.rkey());
            end.scq.release = false;
            let block = end.scq.control_block();
            end.scq.view().store32(block + spec::CTRL_CONSUMER, wild, Ordering::Release);
            // The device looks at the index when it believes the ring full.
            for _ in 0..end.scq.entries {
                if end.scq.wait(Duration::ZERO).is_none() {
                    end.qp.post_send(&write);
                    if end.scq.wait(Duration::from_millis(200)).is_none() {
                        break;
                    }
                }
            }
            end.qp.post_send(&write);
            raised(&node, event::CQ_ERR, end.scq.cqn);
            raised(&node, event::QP_FATAL, end.qp.qpn);
        }
        let mut end = alone(&node);
        let word = node.area(8);
        end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[3; 8]));
    });
}

#[test]
fn work_requests_that_can_not_be_meant_complete_with_their_status() {
    case(|scene| {
        let node = scene.villain();
        let area = node.area(4096);
        let (addr, rkey) = (area.addr(0), area.rkey());
        let sge = |addr, length| Sge { addr, length, lkey: area.mr.lkey };
        let huge = vec![sge(addr, u32::MAX); 4];
        let write = |sges: &[Sge]| SendWr::write(1, sges, addr, rkey);
        let counted = |count| SendWr { num_sge: Some(count), ..write(&[area.sge()]) };
        let windows = node.guest.query_device().expect("QUERY_DEVICE").caps & cap::MW_TYPE1 != 0;
        let no_window = if windows { status::MW_BIND_ERR } else { status::LOC_QP_OP_ERR };
        let cases: Vec<(&str, SendWr, u8)> = vec![
            ("65535 elements", counted(u16::MAX), status::LOC_QP_OP_ERR),
            ("five elements of four", counted(5), status::LOC_QP_OP_ERR),
            ("65535 inline bytes", counted(u16::MAX).flag(send::INLINE), status::LOC_QP_OP_ERR),
            ("lengths whose sum wraps", write(&huge), status::LOC_LEN_ERR),
            ("an element of 4 GiB", write(&huge[..1]), status::LOC_LEN_ERR),
            ("an address that wraps", write(&[sge(u64::MAX - 3, 8)]), rules().local_protection),
            ("beyond the end", write(&[sge(addr + 5000, 8)]), rules().local_protection),
            (
                "a remote address that wraps",
                SendWr::write(1, &[area.part(0, 8)], u64::MAX - 3, rkey),
                status::REM_ACCESS_ERR,
            ),
            (
                "a read from address 2^64-1",
                SendWr::read(1, &[area.part(0, 64)], u64::MAX, rkey),
                status::REM_ACCESS_ERR,
            ),
            (
                "an atomic that is not aligned",
                SendWr::faa(1, area.part(0, 8), (addr + 4, rkey), 1),
                status::REM_INV_REQ_ERR,
            ),
            (
                "an atomic of 4 bytes",
                SendWr::faa(1, area.part(0, 4), (addr, rkey), 1),
                status::LOC_LEN_ERR,
            ),
            (
                "a fast registration by a process",
                SendWr::new(1, spec::wr::REG_MR, &[]),
                status::LOC_QP_OP_ERR,
            ),
            (
                "a window that is none",
                SendWr { imm: u32::MAX, ..SendWr::new(1, spec::wr::BIND_MW, &[]) },
                no_window,
            ),
        ];
        for (what, request, expected) in cases {
            let mut end = alone(&node);
            let failed = end.run(&request);
            if !rules().moves_data {
                // The null device finds no fault; that there is an answer is all.
                continue;
            }
            assert!(rules().own_error(failed.status, expected), "{what}: {failed:?}");
            assert_eq!(end.qp.state().expect("QP_QUERY"), qps::ERR, "{what}");
            end.qp.destroy().expect("QP_DESTROY");
        }
        let known = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0x20];
        for opcode in (0..=255u8).filter(|opcode| !known.contains(opcode)) {
            let mut end = alone(&node);
            let failed = end.run(&SendWr { aux: 0, ..SendWr::new(1, opcode, &[]) });
            assert_ne!(failed.status, status::SUCCESS, "opcode {opcode:#x}");
            end.qp.destroy().expect("QP_DESTROY");
        }
        area.bytes();
    });
}

/// 2^32-1 elements in a receive: an error of both sides of the connection.
#[test]
fn a_receive_of_endless_elements_fails_on_both_sides() {
    case(|scene| {
        let node = scene.villain();
        let (mut a, mut b) = (node.rc(), node.rc());
        a.connect(&b, &hasty());
        b.connect(&a, &hasty());
        let (ring, at, doorbell) = b.qp.raw_rq(0);
        ring.store64(at, 7, Ordering::Relaxed);
        ring.store64(at + 8, u64::from(u32::MAX), Ordering::Relaxed);
        doorbell.ring(1);
        let sent = a.run(&SendWr::send(1, &[]).inline(&[1; 8]));
        if !rules().moves_data {
            return node.guest.works();
        }
        assert_eq!(sent.status, status::REM_OP_ERR);
        let received = b.rcq.one();
        assert_eq!((received.wr_id, received.status), (7, status::LOC_QP_OP_ERR));
    });
}

#[test]
fn doorbell_pages_full_of_noise_harm_nobody() {
    case(|scene| {
        let node = scene.villain();
        let mut ends: Vec<End> = (0..16).map(|_| alone(&node)).collect();
        let page = node.ctx.doorbell_page(0);
        let mut noise = Noise(0xd00_4be11);
        let deadline = Instant::now() + Duration::from_millis(1500);
        scene.during(|| {
            while Instant::now() < deadline {
                for _ in 0..64 {
                    let word = noise.next();
                    page.store32(word % 1024 * 4, (word >> 20) as u32 % 300, Ordering::Relaxed);
                }
                for group in 0..15 {
                    page.store8(spec::DB_SUMMARY + group, noise.next() as u8, Ordering::Release);
                }
                let (ring, at, doorbell) = ends[noise.next() as usize % 16].qp.raw_sq(0);
                for n in 0..32 {
                    ring.store64(at + 8 * n, noise.next(), Ordering::Relaxed);
                }
                doorbell.ring(noise.next() as u32 % 64);
            }
        });
        assert_eq!(scene.state(), "driver_ready", "a guest may fill its own doorbells with noise");
    });
}

/// Bytes of work requests change while the device reads and executes them.
#[test]
fn work_requests_that_change_while_they_are_executed_reach_nothing_else() {
    case(|scene| {
        let node = scene.villain();
        let guarded = node.area(64 << 10);
        let mut end = node.end(&QpSpec::new(qpt::RC));
        let stop = std::sync::atomic::AtomicBool::new(false);
        let (ring, at, _) = end.qp.raw_sq(0);
        scene.during(|| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut noise = Noise(0xf11b);
                    while !stop.load(Ordering::Relaxed) {
                        let word = noise.next();
                        // Opcode, flags, number of elements; addresses, lengths and keys by turns.
                        let field = [8, 9, 10, 16, 24, 48, 56, 60][(word % 8) as usize];
                        let slot = word >> 8 & 63;
                        ring.store8(at + slot * 128 + field, (word >> 16) as u8, Ordering::Relaxed);
                    }
                });
                let deadline = Instant::now() + Duration::from_secs(2);
                while Instant::now() < deadline {
                    end.qp.reset(&[&end.scq, &end.rcq]).expect("to RESET");
                    end.qp.connect(end.address(), &Path::default()).expect("to itself");
                    for n in 0..48 {
                        let part = guarded.part(n * 512, 512);
                        end.qp.queue_send(&SendWr::write(
                            n,
                            &[part],
                            guarded.addr(n * 512),
                            guarded.rkey(),
                        ));
                    }
                    end.qp.ring_sq();
                    for _ in 0..48 {
                        if end.scq.wait(Duration::from_millis(5)).is_none() {
                            break;
                        }
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
        });
        assert_eq!(scene.state(), "driver_ready");
    });
}
