//! Too much of everything.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::daemon::tries;
use virtual_guest::guest::GuestConfig;
use virtual_guest::pages::PageList;
use virtual_guest::qp::{Av, Path, Qp, QpSpec, SendWr};
use virtual_guest::spec::{Put, Take, access, cmd, err, qpt};
use virtual_guest::world::{Door, End, Node};

use crate::DOOR;
use crate::scene::{case, case_within, hasty};

const TIME: Duration = Duration::from_secs(2);

#[test]
fn doorbells_and_kicks_without_end() {
    case(|scene| {
        let node = scene.villain();
        let stop = AtomicBool::new(false);
        let kicks = node.guest.kick_fds().expect("descriptors");
        scene.during(|| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        for kick in &kicks {
                            let _full = kick.write(1);
                        }
                    }
                });
                scope.spawn(|| {
                    let page = node.ctx.doorbell_page(0);
                    while !stop.load(Ordering::Relaxed) {
                        (0..15).for_each(|n| page.store8(n, 1, Ordering::Release));
                    }
                });
                std::thread::sleep(TIME);
                stop.store(true, Ordering::Relaxed);
            });
        });
        node.guest.works();
    });
}

/// Sixteen send queues that are never empty, each request as large as it can be.
#[test]
fn work_without_end() {
    case(|scene| {
        let node = scene.villain();
        let blob = node.area(1 << 20);
        let mut ends: Vec<End> = (0..16)
            .map(|_| {
                let end = node.rc();
                end.qp.connect(end.address(), &Path::default()).expect("to itself");
                end
            })
            .collect();
        let deadline = Instant::now() + TIME;
        scene.during(|| {
            while Instant::now() < deadline {
                for end in &mut ends {
                    for _ in 0..2 {
                        let write = SendWr::write(1, &[blob.sge()], blob.addr(0), blob.rkey());
                        end.qp.post_send(&write);
                    }
                }
                for end in &mut ends {
                    (0..2).for_each(|_| assert_eq!(end.scq.ok().status, 0));
                }
            }
        });
    });
}

/// A datagram to a group is as many copies as the group has members.
#[test]
fn datagrams_to_as_many_receivers_as_can_be() {
    case(|scene| {
        let node = scene.villain();
        let mut group = [0; 16];
        group[10..].copy_from_slice(&[0xff, 0xff, 239, 1, 2, 3]);
        if !rules().groups_end_with_the_network {
            scene.world.daemon.add_peer("239.1.2.3", "net");
        }
        let (scq, mut rcq) = (node.cq(256), node.cq(4096));
        let blob = node.area(40 + 4096);
        let mut ends: Vec<Qp> = (0..rules().group_members)
            .map(|_| {
                let spec = QpSpec { sq: 64, rq: 64, ..QpSpec::new(qpt::UD) };
                let qp = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec).expect("QP_CREATE");
                qp.start_datagrams(5).expect("to RTS");
                let join = Put::new().u32(qp.qpn).u32(0).bytes(&group).done(24);
                node.ctx.command(cmd::MCAST_ATTACH, &join, 0).expect("MCAST_ATTACH");
                qp
            })
            .collect();
        let ah = node.ctx.create_ah(node.pdn, &Av::to(group)).expect("AH_CREATE");
        let send = SendWr::datagram(1, &[blob.part(0, 4096)], ah, 0xff_ffff, 5).unsignaled();
        let deadline = Instant::now() + TIME;
        scene.during(|| {
            while Instant::now() < deadline {
                for qp in &mut ends {
                    for n in 0..8 {
                        qp.queue_recv(n, &[blob.sge()]);
                    }
                    qp.ring_rq();
                    qp.queue_send(&send);
                }
                ends.iter_mut().for_each(Qp::ring_sq);
                std::thread::sleep(Duration::from_millis(2));
                // Full queues are their owner's affair; new ones for the next round.
                for qp in &mut ends {
                    qp.reset(&[&scq, &rcq]).expect("to RESET");
                    qp.start_datagrams(5).expect("to RTS");
                }
                // One that is full dies, and takes the queue pairs along in the midst of their
                // changes.
                rcq.drain();
            }
        });
    });
}

/// Makes `n` queue pairs on one pair of CQs, and raises an event on each for which there is no
/// buffer.
fn crowd(node: &Node, n: u32) {
    let spec = QpSpec { sq: 2, rq: 2, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
    let (scq, rcq) = (node.cq(64), node.cq(64));
    for index in 0..n {
        if index % 480 == 479 {
            node.ctx.add_doorbell_page().expect("DB_PAGE_ADD: the others are full");
        }
        let mut qp = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec).expect("QP_CREATE");
        qp.connect((node.gid, qp.qpn), &hasty()).expect("to itself");
        let (_, _, doorbell) = qp.raw_sq(0);
        doorbell.ring(1000);
    }
}

#[test]
fn thousands_of_objects_with_events_that_wait_go_at_once() {
    case_within(32 << 20, |scene| {
        let config =
            GuestConfig { event_buffers: 0, ram_bytes: 96 << 20, ..GuestConfig::default() };
        let node = scene.villain_with(config.clone());
        scene.during(|| crowd(&node, tries(1500) as u32));
        let gpa = node.guest.ram().regions()[0].gpa();
        let one = PageList::contiguous(gpa, 1, 0, 12);
        for n in 0..tries(3000) {
            node.ctx.mr_reg(node.pdn, access::ALL, (n << 12, 4096), &one).expect("MR_REG");
        }
        scene.during(|| scene.place.leave(&node).expect("CONTEXT_DESTROY"));
        let again = scene.place.another(&node, config).expect("a context");
        crowd(&again, tries(500) as u32);
        scene.during(|| match DOOR {
            Door::Monitor => again.guest.reset().expect("a reset"),
            Door::Process => again.guest.disconnect(),
        });
    });
}

/// Every doorbell page is looked at in every round, and costs the guest nothing: it may be the same
/// page again and again.
#[test]
fn doorbell_pages_come_to_an_end() {
    case(|scene| {
        let node = scene.villain();
        let page = node.guest.ram().alloc(1).gpa(0);
        let add = Put::new().u64(page).done(8);
        let mut pages = 0;
        scene.during(|| {
            for _ in 0..200 {
                // A process has the one that it has.
                let made = node.ctx.command(cmd::CONTEXT_CREATE, &add, 8);
                let number = match (made, DOOR) {
                    (Ok(made), _) => made.u32_at(0),
                    (Err(_), Door::Process) => node.ctx.id(),
                    (Err(_), Door::Monitor) => break,
                };
                loop {
                    match node.guest.command(cmd::DB_PAGE_ADD, number, &add, 8) {
                        Ok(_) => pages += 1,
                        Err(refused) => {
                            assert_eq!(refused.status(), Some(err::NOMEM));
                            break;
                        }
                    }
                    assert!(pages < 2000, "there is no end to it");
                }
            }
            assert!(pages > 0, "not one");
        });
    });
}

#[test]
fn ten_thousand_connections() {
    use std::os::unix::net::UnixStream;
    use virtual_guest::guest::Guest;
    use virtual_guest::process::{Process, knock};
    case(|scene| {
        let socket = &scene.place.socket;
        scene.during(|| {
            for n in 0..tries(10_000) {
                // Some say something.
                let talks = n % 100 == 0;
                match DOOR {
                    Door::Monitor => {
                        let stream = UnixStream::connect(socket).expect("a connection");
                        let _refused = talks.then(|| Guest::attach(stream, GuestConfig::default()));
                    }
                    Door::Process => {
                        let stream = knock(socket).expect("a connection");
                        let _refused = talks.then(|| Process::hello(stream));
                    }
                }
            }
        });
    });
}
