//! Objects that go away under traffic.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::{Av, QpSpec, SendWr};
use virtual_guest::rings::Srq;
use virtual_guest::spec::{err, qpt};
use virtual_guest::world::{Area, Door, End, Node, Vacancy};

use crate::DOOR;
use crate::scene::{case, hasty};

const TIME: Duration = Duration::from_secs(2);

/// Posts until told to stop, whatever comes of it.
fn pour(end: &mut End, area: &Area, stop: &AtomicBool) {
    let write = SendWr::write(1, &[area.sge()], area.addr(0), area.rkey());
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..16 {
            end.qp.queue_send(&write);
        }
        end.qp.ring_sq();
        let mut left = 16;
        while left > 0 && end.scq.wait(Duration::from_millis(2)).is_some() {
            left -= 1;
        }
        if left > 0 {
            return;
        }
    }
}

/// One connection with itself in full traffic, and what `end_it` does to it.
fn under_traffic(place: &Vacancy, node: &Node, end_it: impl Fn(&Node, (u32, u32, u32), &Area)) {
    let process = place.another(node, GuestConfig::default()).expect("a context");
    let area = process.area(32 << 10);
    let mut end = process.rc();
    end.qp.connect(end.address(), &hasty()).expect("to itself");
    let numbers = (end.qp.qpn, end.scq.cqn, end.rcq.cqn);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| pour(&mut end, &area, &stop));
        std::thread::sleep(Duration::from_millis(3));
        end_it(&process, numbers, &area);
        stop.store(true, Ordering::Relaxed);
    });
    // Destroyed by the end of its context, if not before.
    let _gone = place.leave(&process);
}

#[test]
fn objects_destroyed_in_full_traffic_are_gone_when_the_command_returns() {
    use virtual_guest::spec::cmd;
    case(|scene| {
        let node = scene.villain();
        let deadline = Instant::now() + TIME;
        scene.during(|| {
            let mut n = 0;
            while Instant::now() < deadline {
                under_traffic(&scene.place, &node, |process, (qpn, scq, _), area| {
                    let ctx = &process.ctx;
                    match n % 5 {
                        0 => {
                            ctx.object(cmd::QP_DESTROY, qpn).expect("QP_DESTROY");
                            ctx.object(cmd::CQ_DESTROY, scq).expect("CQ_DESTROY");
                        }
                        1 => {
                            let busy = ctx.object(cmd::CQ_DESTROY, scq).expect_err("it is in use");
                            assert_eq!(busy.status(), Some(err::BUSY));
                        }
                        2 => {
                            ctx.dereg(area.mr.lkey).expect("MR_DEREG");
                            // Nothing is written any more.
                            area.mr.view().fill(0, 1024, 0x11);
                            std::thread::sleep(Duration::from_millis(2));
                            assert!(area.mr.view().vec(0, 1024).iter().all(|b| *b == 0x11));
                        }
                        3 => scene.place.leave(process).expect("CONTEXT_DESTROY"),
                        _ => {
                            let busy = ctx.destroy_pd(process.pdn).expect_err("it is in use");
                            assert_eq!(busy.status(), Some(err::BUSY));
                        }
                    }
                });
                n += 1;
            }
        });
    });
}

#[test]
fn shared_queues_and_handles_go_away_under_their_users() {
    case(|scene| {
        let node = scene.villain();
        let deadline = Instant::now() + TIME;
        scene.during(|| {
            while Instant::now() < deadline {
                let process =
                    scene.place.another(&node, GuestConfig::default()).expect("a context");
                let mut srq = Srq::create(&process.ctx, process.pdn, 64, 1, 8).expect("SRQ_CREATE");
                let area = process.area(512);
                let mut b = process.end(&QpSpec::new(qpt::RC).with_srq(&srq));
                let mut a = process.rc();
                a.connect(&b, &hasty());
                b.connect(&a, &hasty());
                for n in 0..32 {
                    srq.post(n, &[area.sge()]);
                    a.qp.queue_send(&SendWr::send(n, &[area.part(0, 256)]));
                }
                a.qp.ring_sq();
                assert_eq!(srq.destroy().expect_err("in use").status(), Some(err::BUSY));
                b.qp.destroy().expect("QP_DESTROY");
                srq.destroy().expect("SRQ_DESTROY");
                let _flushed = a.scq.wait(Duration::from_millis(1));
                let _none = b.rcq.poll();
                let mut d = process.end(&QpSpec::new(qpt::UD));
                d.qp.start_datagrams(3).expect("to RTS");
                let ah = process.ctx.create_ah(process.pdn, &Av::to(process.gid)).expect("AH");
                for n in 0..32 {
                    let datagram = SendWr::datagram(n, &[area.part(0, 64)], ah, d.qp.qpn, 3);
                    d.qp.queue_send(&datagram);
                }
                d.qp.ring_sq();
                process.ctx.destroy_ah(ah).expect("AH_DESTROY");
                scene.place.leave(&process).expect("CONTEXT_DESTROY");
            }
        });
    });
}

#[test]
fn a_device_that_is_reset_and_cut_off_in_full_traffic_leaves_nothing() {
    case(|scene| {
        let deadline = Instant::now() + TIME;
        let mut n = 0;
        while Instant::now() < deadline {
            let node = scene.villain();
            under_traffic(&scene.place, &node, |process, _, _| {
                scene.during(|| match (n % 3, DOOR) {
                    (0, Door::Monitor) => process.guest.reset().expect("a reset"),
                    (1, Door::Monitor) => process.guest.shutdown().expect("SHUTDOWN"),
                    _ => process.guest.disconnect(),
                });
            });
            n += 1;
        }
    });
}
