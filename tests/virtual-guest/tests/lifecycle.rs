//! Reset, pause, disconnection and reconnection in any state, without leak or harm to others (5.3,
//! 5.4, 5.6).

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use virtual_guest::backing::rules;
use virtual_guest::daemon::Daemon;
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{self, Put, cmd, err, qps, qpt, status};
use virtual_guest::world::{End, Node, World, pattern};

/// Keeps a queue pair busy with large writes to `peer` until it fails; how many succeeded.
fn stream(end: &mut End, from: &virtual_guest::world::Area, to: (u64, u32), count: u64) -> u64 {
    let mut done = 0;
    let mut posted = 0;
    while done < count {
        while posted < count && posted - done < 32 {
            end.qp.queue_send(&SendWr::write(posted, &[from.sge()], to.0, to.1));
            posted += 1;
        }
        end.qp.ring_sq();
        match end.scq.wait(Duration::from_secs(5)) {
            Some(cqe) if cqe.status == status::SUCCESS => done += 1,
            _ => break,
        }
    }
    done
}

fn eventually(what: &str, mut f: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !f() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn no_objects(daemon: &Daemon, nic: &str) -> bool {
    let shown = daemon.show_nic(nic);
    ["pds", "mrs", "mr_bytes", "cqs", "srqs", "qps", "ahs"]
        .iter()
        .all(|k| shown["objects"][k].as_u64() == Some(0))
}

#[test]
fn a_context_that_is_destroyed_with_traffic_touches_nothing_afterwards() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    for _ in 0..5 {
        let ctx = nb.guest.open().unwrap();
        let pdn = ctx.create_pd().unwrap();
        let doomed = Node { ctx: ctx.clone(), pdn, ..nb.clone() };
        let (mut a, mut b) = (na.rc(), doomed.rc());
        a.connect(&b, &Path::hasty());
        b.connect(&a, &Path::hasty());
        let (from, to) = (na.area_of(&pattern(1, 1 << 20)), doomed.area(1 << 20));
        let inbox = doomed.area(64);
        for i in 0..30 {
            b.qp.post_recv(i, &[inbox.sge()]);
            a.qp.queue_send(&SendWr::write(i, &[from.sge()], to.addr(0), to.rkey()));
            b.qp.queue_send(&SendWr::write(i, &[to.sge()], from.addr(0), from.rkey()));
        }
        a.qp.ring_sq();
        b.qp.ring_sq();
        a.scq.ok();
        ctx.destroy().unwrap();
        // Everything that was given to the context is the driver's again.
        to.mr.view().fill(0, to.mr.view().len(), 0x11);
        b.rcq.view().fill(0, b.rcq.view().len(), 0x11);
        b.scq.view().fill(0, b.scq.view().len(), 0x11);
        ctx.doorbell_page(0).fill(0, 4096, 0xff);
        std::thread::sleep(Duration::from_millis(20));
        for view in [to.mr.view(), b.rcq.view(), b.scq.view()] {
            assert!(
                view.vec(0, view.len()).iter().all(|b| *b == 0x11),
                "written after the destruction"
            );
        }
        assert!(ctx.doorbell_page(0).vec(0, 4096).iter().all(|b| *b == 0xff));
        assert_eq!(b.qp.query().unwrap_err().status(), Some(err::NOENT));
        // The sender sees a peer that is not there.
        let mut last = status::SUCCESS;
        for _ in 1..30 {
            let cqe = a.scq.one();
            if cqe.status != status::SUCCESS {
                last = cqe.status;
                break;
            }
        }
        let expected = [status::SUCCESS, status::RETRY_EXC_ERR, status::REM_ACCESS_ERR];
        assert!(expected.contains(&last), "status {last}");
    }
    let mut word_end = na.rc();
    word_end.qp.connect(word_end.address(), &Path::hasty()).unwrap();
    let word = na.area(8);
    word_end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
}

#[test]
fn dereg_under_traffic_answers_when_nothing_is_written_any_more() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    for _ in 0..10 {
        let (mut a, b) = (na.rc(), nb.rc());
        a.connect(&b, &Path::hasty());
        b.connect(&a, &Path::hasty());
        let (from, to) = (na.area_of(&pattern(2, 1 << 20)), nb.area(1 << 20));
        for i in 0..20 {
            a.qp.queue_send(&SendWr::write(i, &[from.sge()], to.addr(0), to.rkey()));
        }
        a.qp.ring_sq();
        a.scq.one();
        nb.ctx.dereg(to.rkey()).unwrap();
        to.mr.view().fill(0, to.mr.view().len(), 0x11);
        std::thread::sleep(Duration::from_millis(10));
        let view = to.mr.view();
        assert!(
            view.vec(0, view.len()).iter().all(|b| *b == 0x11),
            "written after the deregistration"
        );
    }
}

/// Two QPs that a pause disconnected.
fn connect_again(a: &mut End, b: &mut End) {
    for end in [&mut *a, &mut *b] {
        end.qp.reset(&[&end.scq, &end.rcq]).unwrap();
    }
    a.connect(b, &Path::default());
    b.connect(a, &Path::default());
}

#[test]
fn a_paused_machine_goes_on_where_it_was() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let (from, to) = (a.node.area(64), b.node.area(64));
    for i in 0..10u64 {
        b.node.guest.pause_and_continue().unwrap();
        if i % 2 == 0 {
            a.node.guest.pause_and_continue().unwrap();
        }
        if !rules().pause_keeps_connections {
            assert_eq!(b.qp.state().unwrap(), qps::ERR);
            connect_again(&mut a, &mut b);
        }
        from.set_word(0, i);
        b.qp.post_recv(i, &[to.sge()]);
        a.run_ok(&SendWr::send(i, &[from.sge()]));
        assert_eq!(b.rcq.ok().wr_id, i);
        assert_eq!(to.word(0), i);
        b.node.guest.keepalive().unwrap();
        b.scq.arm(spec::ARM_ANY);
    }
}

#[test]
fn a_stopped_guest_is_not_touched_and_its_traffic_goes_on_afterwards() {
    let world = World::new();
    let stays = rules().pause_keeps_connections;
    let path =
        if stays { Path { timeout: 18, retry_cnt: 7, ..Path::hasty() } } else { Path::hasty() };
    let (mut a, mut b) = world.pair(&QpSpec::new(qpt::RC), &path);
    let (from, to) = (a.node.area_of(&pattern(3, 1 << 20)), b.node.area(1 << 20));
    let (done, end) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // Writes without a pause: were the stop no stop, one of them would land in the stopped
        // guest.
        let stream = scope.spawn(|| {
            while !end.load(Ordering::SeqCst) {
                for i in 0..16 {
                    a.qp.queue_send(&SendWr::write(i, &[from.sge()], to.addr(0), to.rkey()));
                }
                a.qp.ring_sq();
                for _ in 0..16 {
                    let ended = a.scq.one().status;
                    if ended != status::SUCCESS && !stays {
                        // Its peer is in ERR, and silent.
                        assert_eq!(ended, status::RETRY_EXC_ERR);
                        return;
                    }
                    assert_eq!(ended, status::SUCCESS);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        let more = |n: u64| {
            let seen = done.load(Ordering::SeqCst);
            eventually("the stream stands still", || done.load(Ordering::SeqCst) >= seen + n);
        };
        for _ in 0..5 {
            more(20);
            let bases = b.node.guest.stop_rings().unwrap();
            let view = to.mr.view();
            view.fill(0, view.len(), 0x11);
            std::thread::sleep(Duration::from_millis(30));
            let touched = view.vec(0, view.len()).iter().any(|b| *b != 0x11);
            for (index, base) in bases.into_iter().enumerate() {
                b.node.guest.start_ring(index, base).unwrap();
            }
            end.store(touched, Ordering::SeqCst);
            assert!(!touched, "a stopped guest was written to");
            if !stays {
                break;
            }
        }
        if stays {
            more(20);
            end.store(true, Ordering::SeqCst);
        }
        stream.join().expect("the stream");
    });
    if !stays {
        connect_again(&mut a, &mut b);
        a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
    }
    assert_eq!(to.mr.view().vec(192, 1 << 20), pattern(3, 1 << 20));
}

#[test]
fn a_reset_ends_everything_and_a_new_driver_starts_clean() {
    let world = World::new();
    let a = world.node();
    let mut node = world.node();
    for round in 0..5 {
        let old = node.area(1 << 16);
        node.guest.reset().unwrap();
        let early = node.guest.query_device().unwrap_err().status();
        assert_eq!(early, Some(err::STATE), "round {round}: INIT comes first in a new life");
        eventually("objects survive a reset", || no_objects(&world.daemon, &node.name));
        node = Node::start(node.name.clone(), node.socket.clone(), node.guest.clone(), node.gid);
        let (mut c, d) = (a.rc(), node.rc());
        c.connect(&d, &Path::hasty());
        d.connect(&c, &Path::hasty());
        let word = node.area(8);
        c.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[7; 8]));
        assert_eq!(word.bytes(), [7; 8]);
        let failed = c.run(&SendWr::write(2, &[], old.addr(0), old.rkey()).inline(&[7; 8]));
        assert_eq!(failed.status, status::REM_ACCESS_ERR);
    }
}

#[test]
fn a_reset_under_traffic_stops_all_writes() {
    let world = World::new();
    let a = world.node();
    let mut node = world.node();
    for _ in 0..8 {
        let (mut from_end, to_end) = (a.rc(), node.rc());
        from_end.connect(&to_end, &Path::hasty());
        to_end.connect(&from_end, &Path::hasty());
        let (from, to) = (a.area_of(&pattern(5, 1 << 20)), node.area(1 << 20));
        for i in 0..40 {
            from_end.qp.queue_send(&SendWr::write(i, &[from.sge()], to.addr(0), to.rkey()));
        }
        from_end.qp.ring_sq();
        from_end.scq.one();
        node.guest.reset().unwrap();
        to.mr.view().fill(0, to.mr.view().len(), 0x11);
        std::thread::sleep(Duration::from_millis(20));
        let view = to.mr.view();
        assert!(view.vec(0, view.len()).iter().all(|b| *b == 0x11), "written after the reset");
        node = Node::start(node.name.clone(), node.socket.clone(), node.guest.clone(), node.gid);
    }
}

#[test]
fn twenty_killed_monitors_leave_nothing_behind() {
    let world = World::new();
    let a = world.node();
    let neighbour = (a.rc(), world.node().rc());
    neighbour.0.connect(&neighbour.1, &Path::hasty());
    neighbour.1.connect(&neighbour.0, &Path::hasty());
    let (mut n0, n1) = neighbour;
    let word = n1.node.area(8);
    let socket = world.daemon.add_nic("mortal", "net", &[]);
    let gid = virtual_guest::world::ipv4_gid(3, 3);
    // Once: a region of scattered pages is a mapping for each, where regions are mapped.
    let here = a.area(1 << 18);
    let mut before = None;
    for round in 0..20u64 {
        let guest = Guest::connect(&socket, GuestConfig::default()).expect("a new monitor");
        let node = Node::start("mortal".into(), socket.clone(), guest, gid);
        let (mut out, mut back) = (a.rc(), node.rc());
        out.connect(&back, &Path::hasty());
        back.connect(&out, &Path::hasty());
        let there = node.area(1 << 18);
        let inbox = node.area(64);
        back.qp.post_recv(1, &[inbox.sge()]);
        for i in 0..20 {
            out.qp.queue_send(&SendWr::write(i, &[here.sge()], there.addr(0), there.rkey()));
            back.qp.queue_send(&SendWr::read(i, &[there.sge()], here.addr(0), here.rkey()));
        }
        out.qp.ring_sq();
        back.qp.ring_sq();
        if round % 3 != 0 {
            out.scq.one();
        }
        node.guest.disconnect();
        // The peer's requests end one way or the other.
        for _ in 0..20 {
            if out.scq.one().status != status::SUCCESS {
                break;
            }
            if round % 3 != 0 && out.scq.consumer() == 20 {
                break;
            }
        }
        out.qp.destroy().unwrap();
        n0.run_ok(
            &SendWr::write(round, &[], word.addr(0), word.rkey()).inline(&round.to_le_bytes()),
        );
        assert_eq!(word.word(0), round);
        eventually("objects of a dead monitor stay", || no_objects(&world.daemon, "mortal"));
        // The first rounds may fill caches and pools; afterwards nothing may grow.
        if round == 4 {
            eventually("settled", || {
                let files = world.daemon.open_files();
                std::thread::sleep(Duration::from_millis(50));
                files == world.daemon.open_files()
            });
            before =
                Some((world.daemon.open_files(), world.daemon.threads(), world.daemon.mappings()));
        }
    }
    let before = before.expect("round 4 was run");
    eventually("files leak", || world.daemon.open_files() <= before.0);
    eventually("threads leak", || world.daemon.threads() <= before.1);
    let sum = |mappings: &BTreeMap<String, usize>| mappings.values().sum::<usize>();
    let mut after = world.daemon.mappings();
    let deadline = Instant::now() + Duration::from_secs(5);
    while sum(&after) > sum(&before.2) + 4 {
        assert!(Instant::now() < deadline, "mappings leak: {:?}, then {after:?}", before.2);
        std::thread::sleep(Duration::from_millis(10));
        after = world.daemon.mappings();
    }
}

#[test]
fn a_monitor_that_dies_during_the_handshake_is_forgotten() {
    use std::io::Write;
    let world = World::new();
    let socket = world.daemon.add_nic("early", "net", &[]);
    for i in 0..20usize {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        // Half a header, or garbage.
        let _sent = stream.write(&vec![0x5a; i]);
    }
    let guest =
        Guest::connect(&socket, GuestConfig::default()).expect("the next monitor is served");
    guest.init().unwrap();
}

#[test]
fn removing_a_nic_cuts_its_guest_off_and_nobody_else() {
    let world = World::new();
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &Path::hasty());
    world.daemon.run(&["nic", "rm", &b.node.name]);
    let failed = a.run(&SendWr::write(1, &[], 0x1000, 1).inline(&[1; 8]));
    assert_eq!(failed.status, status::RETRY_EXC_ERR);
    let mut own = a.node.rc();
    own.qp.connect(own.address(), &Path::hasty()).unwrap();
    let word = a.node.area(8);
    own.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[1; 8]));
    assert!(!b.node.socket.exists());
}

#[test]
fn a_removed_nic_leaves_no_directory() {
    let world = World::new();
    for _ in 0..8 {
        let node = world.node();
        world.daemon.run(&["nic", "rm", &node.name]);
        assert!(!node.socket.parent().unwrap().exists());
    }
}

#[test]
fn a_monitor_that_truncates_its_memory_harms_nobody_else() {
    let world = World::new();
    let (mut a, b) = world.pair(&QpSpec::new(qpt::RC), &Path::hasty());
    let (mut c, d) = world.pair(&QpSpec::new(qpt::RC), &Path::hasty());
    let (target, other) = (b.node.area(8), d.node.area(8));
    for region in b.node.guest.ram().regions() {
        // Another descriptor of the same memfd, as a monitor may have any number of. From here on
        // this process must not touch the memory either.
        let path = format!("/proc/self/fd/{}", region.raw_fd());
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(0).unwrap();
    }
    let write = |at: u64, rkey| SendWr::write(1, &[], at, rkey).inline(&[5; 8]);
    // The access that finds out may succeed, in memory that nobody sees; afterwards the NIC is gone
    // for its peers.
    let _found_out = a.run(&write(target.addr(0), target.rkey()));
    let failed = |daemon: &Daemon| daemon.show_nic(&b.node.name)["session"] == "failed";
    eventually("the NIC does not fail", || failed(&world.daemon));
    c.run_ok(&write(other.addr(0), other.rkey()));
    assert_eq!(other.bytes(), [5; 8]);
    b.node.guest.disconnect();
    eventually("the NIC is not free again", || {
        world.daemon.show_nic(&b.node.name)["session"] == "absent"
    });
    assert!(no_objects(&world.daemon, &b.node.name));
}

#[test]
fn a_long_stream_survives_a_neighbours_churn() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (from, to) = (a.node.area_of(&pattern(1, 1 << 16)), b.node.area(1 << 16));
    let churn = world.node();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let mr = churn.mr(10_000);
                let end = churn.rc();
                end.qp.connect(end.address(), &Path::hasty()).unwrap();
                end.qp.destroy().unwrap();
                end.scq.destroy().unwrap();
                end.rcq.destroy().unwrap();
                churn.ctx.dereg(mr.lkey).unwrap();
            }
        });
        let done = stream(&mut a, &from, (to.addr(0), to.rkey()), 3000);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(done, 3000);
    });
    assert_eq!(to.bytes(), pattern(1, 1 << 16));
}

#[test]
fn a_second_vmm_is_refused_while_one_lives_and_a_new_one_finds_a_clean_device() {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (from, to) = (a.node.area_of(&pattern(9, 4096)), b.node.area(4096));
    let mut second = UnixStream::connect(&a.node.socket).unwrap();
    second.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "it is closed, not kept waiting");
    // The first does not notice.
    a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
    // One that comes the moment the first goes, as a container that starts again.
    a.node.guest.disconnect();
    let again = Guest::connect(&a.node.socket, GuestConfig::default()).unwrap();
    assert!(no_objects(&world.daemon, &a.node.name));
    again.init().unwrap();
}

/// Whoever keeps a NIC's socket looks whether its VMM is there, and whether another one waits. A
/// VMM that goes and comes again between the two is its own successor.
#[test]
fn a_vmm_that_begins_anew_at_once_is_no_second_one() {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    // GET_FEATURES, version 1, no payload; its answer is a header and 64 bits.
    const ASKED: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    const TURNS: u32 = 3000;
    let world = World::new();
    let socket = world.vacancy().socket;
    for turn in 0..TURNS {
        let mut vmm = UnixStream::connect(&socket).unwrap();
        vmm.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let answer = vmm.write_all(&ASKED).and_then(|()| vmm.read_exact(&mut [0; 20]));
        assert!(answer.is_ok(), "turn {turn}: refused, {answer:?}");
        // It goes some time after the keeper has let it in; the window is a few microseconds wide.
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(u64::from(turn % 400)) {
            std::hint::spin_loop();
        }
    }
}

/// What the last driver made is not shown as the next one's: while the device is stopped nobody
/// knows whether its guest goes on.
#[test]
fn what_a_driver_made_before_a_reset_is_not_shown_after_it() {
    let world = World::new();
    let node = world.node();
    let _end = node.rc();
    let shown = || {
        let shown = world.daemon.show_nic(&node.name);
        let count = shown["objects"]["qps"].as_u64().unwrap();
        (shown["session"].as_str().unwrap().to_owned(), count)
    };
    assert_eq!(shown(), ("driver_ready".to_owned(), 1));
    node.guest.pause_and_continue().unwrap();
    node.guest.keepalive().unwrap();
    assert_eq!(shown(), ("driver_ready".to_owned(), 1), "a pause ends nothing");
    node.guest.stop_rings().unwrap();
    assert_eq!(shown().0, "connected");
    assert!(no_objects(&world.daemon, &node.name));
    node.guest.start_rings().unwrap();
    assert_eq!(shown().1, 0);
    let kept = || world.daemon.show_nic(&node.name)["objects"]["kept_bytes"].as_u64().unwrap();
    node.guest.init().unwrap();
    let begun = kept();
    assert_eq!(shown(), ("driver_ready".to_owned(), 0));
    node.guest.shutdown().unwrap();
    assert!(kept() < begun && no_objects(&world.daemon, &node.name));
}

/// A command that is under way while its machine is paused: the driver hears of it all the same.
#[test]
fn a_pause_loses_no_command_that_is_under_way() {
    const HANDLES: u32 = 2000;
    const PAUSES: u64 = 16;
    let world = World::new();
    let node = world.node();
    for turn in 0..PAUSES {
        let ctx = node.guest.open().unwrap();
        let pdn = ctx.create_pd().unwrap();
        let av = virtual_guest::qp::Av::to(node.gid);
        for _ in 0..HANDLES {
            ctx.create_ah(pdn, &av).unwrap();
        }
        // The machine stands still meanwhile, and so does its driver.
        let pages = node.guest.ram().alloc(1);
        let view = node.guest.ram().view(pages.gpa(0), spec::PAGE);
        view.write(0, &Put::new().u16(cmd::CONTEXT_DESTROY).zero(2).u32(ctx.id()).u64(0).done(16));
        node.guest.with_queue(spec::VQ_CONTROL, |q| {
            q.add(&[(pages.gpa(0), 16)], &[(pages.gpa(0) + 2048, 8)]).unwrap();
            q.kick().unwrap();
        });
        std::thread::sleep(Duration::from_micros(100 * turn));
        node.guest.pause_and_continue().unwrap();
        let answered = node.guest.with_queue(spec::VQ_CONTROL, |q| q.wait(Duration::from_secs(5)));
        assert!(answered.unwrap().is_some(), "pause {turn}: the driver was not told");
        assert_eq!(view.load32(2048, Ordering::Relaxed), err::OK, "pause {turn}");
        let handles = world.daemon.show_nic(&node.name)["objects"]["ahs"].as_u64();
        assert_eq!(handles, Some(0), "pause {turn}");
    }
}
