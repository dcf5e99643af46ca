//! Whoever connects while the daemon is away, or becomes another program, waits and is served.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use virtual_guest::daemon::{Daemon, DaemonOptions};
use virtual_guest::guest::{Guest, GuestConfig};
use virtual_guest::lingering::{let_go, lingering};
use virtual_guest::process;
use virtual_guest::world::{Ends, Node, World};

use super::{eventually, kept, kill, node, pair, replace_supervisor, start_anew};
use super::{told_that_it_is_lost, writes};

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a process");
    kill_process(pid, signal).expect("it is there");
}

/// Runs `meanwhile` while there is no daemon: it was killed, and its parent starts no other.
fn without_daemon<T>(daemon: &Daemon, meanwhile: impl FnOnce() -> T) -> T {
    let (parent, pid) = (daemon.pid(), daemon.supervisor().expect("it is there"));
    signal(parent, Signal::STOP);
    kill(pid);
    // Nobody looks after its end; but it serves nothing, and its descriptors are closed.
    let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    eventually("it does not end", || stat().contains(") Z ") || stat().is_empty());
    let done = meanwhile();
    signal(parent, Signal::CONT);
    done
}

#[test]
fn a_vmm_that_comes_while_there_is_no_daemon_waits_and_is_served() {
    let world = kept();
    let a = node(&world, "net");
    let b = node(&world, "net");
    writes(&mut pair(&a, &b), 1);
    b.guest.disconnect();
    eventually("the VMM is not gone", || world.daemon.show_nic(&b.name)["session"] == "absent");
    for round in 2..4 {
        let (first, second, admin) = without_daemon(&world.daemon, || {
            let first = std::thread::spawn({
                let socket = b.socket.clone();
                move || Guest::connect(&socket, GuestConfig::default())
            });
            // In the queue behind it, and so turned away like any second one.
            eventually("nobody is there", || UnixStream::connect(&b.socket).is_ok());
            let second = UnixStream::connect(&b.socket).expect("it is let wait");
            let admin = UnixStream::connect(world.daemon.admin_socket());
            (first, second, admin.expect("so is who asks the daemon"))
        });
        drop((second, admin));
        let guest = match first.join().expect("no panic") {
            Ok(guest) => guest,
            // It came behind one of ours, who has gone.
            Err(_) => Guest::connect(&b.socket, GuestConfig::default()).expect("it gets in"),
        };
        told_that_it_is_lost(&a.guest);
        let (a, b) = (start_anew(&a), Node::start(b.name.clone(), b.socket.clone(), guest, b.gid));
        writes(&mut pair(&a, &b), round);
        b.guest.disconnect();
        eventually("it is not gone", || world.daemon.show_nic(&b.name)["session"] == "absent");
    }
}

#[test]
fn who_asks_while_there_is_no_daemon_gets_an_answer() {
    let world = kept();
    let a = node(&world, "net");
    let asked = without_daemon(&world.daemon, || {
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| world.daemon.cli(&["nic", "show", &a.name]));
            std::thread::sleep(Duration::from_millis(300));
            assert!(!asking.is_finished(), "{:?}", asking.join());
            signal(world.daemon.pid(), Signal::CONT);
            asking.join().expect("no panic")
        })
    });
    assert!(asked.is_ok_and(|text| text.contains(&a.name)));
}

/// Connects to `socket` again and again until told to stop: every time somebody listens.
fn knock(socket: &Path, over: &AtomicBool, count: &AtomicU64) {
    while !over.load(Ordering::Relaxed) {
        let came = UnixStream::connect(socket);
        assert!(came.is_ok(), "{}: {came:?}", socket.display());
        count.fetch_add(1, Ordering::Relaxed);
        // Not so often that the backlog fills while nobody accepts: then who may not wait is told.
        std::thread::sleep(Duration::from_millis(4));
    }
}

#[test]
fn nobody_is_refused_in_an_upgrade() {
    let options =
        DaemonOptions { processes: true, installed: true, kept: true, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(120));
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let mut ends = pair(&a, &b);
    let spare = node(&world, "net");
    spare.guest.disconnect();
    let absent = || world.daemon.show_nic(&spare.name)["session"] == "absent";
    eventually("it is not gone", absent);
    // One that was started by its parent has another's descriptors in its environment.
    replace_supervisor(&world.daemon);
    told_that_it_is_lost(&a.guest);
    told_that_it_is_lost(&b.guest);
    let (a, b) = (start_anew(&a), start_anew(&b));
    drop(std::mem::replace(&mut ends, pair(&a, &b)));
    let program = std::fs::read(virtual_guest::daemon::binary()).expect("the program");
    let (over, knocks, served) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| knock(&world.daemon.admin_socket(), &over, &knocks));
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let guest = Guest::connect(&spare.socket, GuestConfig::default());
                guest.expect("it gets in").disconnect();
                served.fetch_add(1, Ordering::Relaxed);
                eventually("it is not gone", || {
                    let shown = world.daemon.cli(&["--json", "nic", "show", &spare.name]);
                    shown.is_ok_and(|text| text.contains("\"absent\""))
                });
            }
        });
        let _ends = Ends(&over);
        for round in 1..4 {
            world.daemon.install(&program);
            world.daemon.run(&["upgrade"]);
            writes(&mut ends, round);
            let before = served.load(Ordering::Relaxed);
            eventually("nobody gets in", || served.load(Ordering::Relaxed) > before + 2);
        }
    });
    assert!(knocks.load(Ordering::Relaxed) > 20);
    // They are the store's still.
    eventually("it is not gone", absent);
    replace_supervisor(&world.daemon);
    told_that_it_is_lost(&a.guest);
    let a = start_anew(&a);
    writes(&mut pair(&a, &a), 9);
}

#[test]
fn the_socket_of_a_nic_that_was_removed_meanwhile_goes() {
    let world = kept();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    b.guest.disconnect();
    eventually("it is not gone", || world.daemon.show_nic(&b.name)["session"] == "absent");
    let state = world.daemon.dir().join("state.json");
    without_daemon(&world.daemon, || {
        let text = std::fs::read_to_string(&state).expect("its state");
        let mut saved: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let nics = saved["nics"].as_array_mut().expect("NICs");
        nics.retain(|nic| nic["name"] != b.name);
        std::fs::write(&state, saved.to_string()).expect("it is ours");
    });
    eventually("it does not answer", || world.daemon.cli(&["status"]).is_ok());
    assert!(!b.socket.exists(), "its file is there");
    UnixStream::connect(&b.socket).expect_err("nobody listens");
    assert!(world.daemon.log().contains("a listening socket of an earlier daemon is closed"));
    told_that_it_is_lost(&a.guest);
    let a = start_anew(&a);
    writes(&mut pair(&a, &a), 2);
}

#[test]
fn a_socket_whose_file_was_replaced_meanwhile_is_not_gone_on_with() {
    let world = kept();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    b.guest.disconnect();
    eventually("it is not gone", || world.daemon.show_nic(&b.name)["session"] == "absent");
    let theirs = without_daemon(&world.daemon, || {
        let beside = b.socket.with_file_name("other");
        let theirs = std::os::unix::net::UnixListener::bind(&beside).expect("a socket");
        std::fs::rename(&beside, &b.socket).expect("its directory is ours");
        theirs
    });
    eventually("it does not answer", || world.daemon.cli(&["status"]).is_ok());
    let shown = world.daemon.show_nic(&b.name);
    assert_eq!(shown["session"], "failed", "{shown}");
    assert!(shown["error"].as_str().is_some_and(|why| why.contains("in use")), "{shown}");
    drop(theirs);
    told_that_it_is_lost(&a.guest);
    writes(
        &mut {
            let a = start_anew(&a);
            pair(&a, &a)
        },
        2,
    );
}

/// Whoever finds a socket can keep the parent busy, or its descriptors: names are in
/// /proc/net/unix, and an abstract one has no mode.
#[test]
fn the_parent_hears_its_daemon_by_a_socket_without_a_name() {
    let world = kept();
    let parent = world.daemon.pid();
    let listed = std::fs::read_to_string("/proc/net/unix").expect("a list of sockets");
    let files = std::fs::read_dir(format!("/proc/{parent}/fd")).expect("its descriptors");
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    let mut sockets = 0;
    for link in links {
        let link = link.display().to_string();
        let Some(inode) = link.strip_prefix("socket:[").and_then(|l| l.strip_suffix(']')) else {
            continue;
        };
        // Num RefCount Protocol Flags Type St Inode Path: those that it keeps for the daemon have
        // one, which is a file's.
        let of_it = |line: &&str| line.split_whitespace().nth(6) == Some(inode);
        let path = listed.lines().find(of_it).and_then(|line| line.split_whitespace().nth(7));
        assert!(path.is_none_or(|path| path.starts_with('/')), "{path:?}");
        sockets += 1;
    }
    assert!(sockets > 0, "it hears nobody");
}

/// VMMs that are turned away, or go, and have sent what takes as long to close as they like.
#[test]
fn vmms_that_are_slow_to_close_hold_up_nobody() {
    const SOON: Duration = Duration::from_secs(15);
    let world = kept();
    let (a, b) = (node(&world, "net"), node(&world, "net"));
    let other = node(&world, "net");
    let mut kept = Vec::new();
    let mut send = |to: &UnixStream| {
        let (slow, peer) = lingering();
        // Its first bytes make no sense, so a session of its ends.
        let sent = process::send(to, &[0xff; 64], &[slow.as_fd()]).is_ok();
        kept.push(peer);
        let_go(slow);
        sent
    };
    // On a busy machine it may be closed before anything is sent.
    let mut some = |socket: &Path| {
        let (mut tries, mut sent) = (0, 0);
        eventually("nobody is quick enough", || {
            tries += 1;
            sent += u32::from(UnixStream::connect(socket).is_ok_and(|vmm| send(&vmm)));
            tries >= 12 && sent > 0
        });
    };
    // There is one.
    some(&a.socket);
    b.guest.disconnect();
    // There is none.
    some(&b.socket);
    let begin = Instant::now();
    writes(&mut pair(&a, &other), 1);
    for name in [&b.name, &a.name] {
        world.daemon.run(&["nic", "rm", name]);
    }
    world.daemon.run(&["status"]);
    writes(&mut pair(&other, &node(&world, "net")), 2);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    // Nor does the next program wait for it.
    world.daemon.run(&["upgrade"]);
    writes(&mut pair(&other, &node(&world, "net")), 3);
    assert!(begin.elapsed() < 2 * SOON, "{:?}", begin.elapsed());
}
