//! Processes that become others, and more of them than there may be.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::unistd::{Gid, Uid, getuid, setgroups, setresgid, setresuid};
use rustix::process::{Pid, Signal, kill_process_group};
use virtual_guest::bomb::Bomb;
use virtual_guest::daemon::{let_in, patience};
use virtual_guest::guest::Guest;
use virtual_guest::qp::{Path as Route, SendWr};
use virtual_guest::spec::status as wc;
use virtual_guest::trips::{Queues, Trips, most};
use virtual_guest::world::{Ends, Node, ipv4_gid};

use crate::scene::Scene;

const SOCKET: &str = "VHOST_RDMA_TEST_PROCESS";
const PEER: &str = "VHOST_RDMA_TEST_PEER";
const LIMIT: Duration = Duration::from_secs(20);
/// A program that gets the rights of another user (su(1)); it waits for a password.
const SETUID: &str = "/usr/bin/su";
/// Who has no rights.
const NOBODY: u32 = 65534;

/// What a child does: as a user without rights it has objects that a peer reaches, and becomes a
/// program with more rights. A second process that does so is the subject: what becomes another
/// program cannot look at what comes of it.
#[test]
#[ignore = "run by the test below, as a process of its own"]
fn become_a_setuid_program() {
    if getuid().is_root() {
        let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        setgroups(&[]).unwrap();
        setresgid(group, group, group).unwrap();
        setresuid(user, user, user).unwrap();
    }
    let socket = std::env::var_os(SOCKET).expect("the socket of a NIC");
    let peer = std::env::var(PEER).expect("a queue pair").parse().unwrap();
    let node = Node::process("blue", socket.as_ref(), ipv4_gid(9, 1));
    let (end, area) = (node.rc(), node.area(1 << 20));
    end.qp.connect((ipv4_gid(9, 2), peer), &Route::default()).unwrap();
    println!("\nthere {} {} {}", end.qp.qpn, area.addr(0), area.rkey());
    BufReader::new(std::io::stdin()).lines().next();
    // It asks for a password there.
    let error = Command::new(SETUID).stderr(Stdio::null()).exec();
    panic!("{SETUID}: {error}");
}

/// The real and the effective user of a process.
fn users(pid: u32) -> (u32, u32) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    let mut ids = line.split_whitespace().map(|id| id.parse().unwrap());
    (ids.next().unwrap(), ids.next().unwrap())
}

/// How often the daemon has memory of virtual guests mapped.
fn guest_memory(scene: &Scene) -> usize {
    let mappings = scene.world.daemon.mappings();
    mappings.iter().filter(|(name, _)| name.contains("virtual-guest")).map(|(_, count)| count).sum()
}

/// The program goes on with the process's ID and with another's rights, and with nothing of the
/// NIC; nobody reaches what was its memory, and the daemon has it no more.
#[test]
fn exec_of_a_setuid_program_ends_the_session() {
    let scene = Scene::new();
    let stays = scene.blue();
    let mut peer = scene.red().rc();
    let from = peer.node.area_of(&[7; 64]);
    let (before, mapped) = (scene.objects("blue"), guest_memory(&scene));
    if getuid().is_root() {
        let_in(scene.blue_socket(), NOBODY);
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crowds::become_a_setuid_program", "--ignored", "--nocapture"])
        .env(SOCKET, scene.blue_socket())
        .env(PEER, peer.qp.qpn.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let said = lines.find(|line| line.starts_with("there")).expect("it comes");
    let numbers: Vec<u64> = said.split(' ').skip(1).map(|number| number.parse().unwrap()).collect();
    let [qpn, address, rkey] = numbers[..] else { panic!("{said}") };
    peer.qp
        .connect((ipv4_gid(9, 1), qpn as u32), &Route { timeout: 6, ..Route::default() })
        .unwrap();
    peer.run_ok(&SendWr::write(1, &[from.sge()], address, rkey as u32));
    assert_eq!(scene.objects("blue")["contexts"], 2);
    assert!(guest_memory(&scene) > mapped, "the daemon has its memory");
    let (user, _) = users(child.id());
    assert_ne!(user, 0, "it has no rights");
    // Its standard input stays open: the program waits there.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"\n").unwrap();
    let begin = Instant::now();
    while scene.objects("blue")["contexts"] != 1 {
        assert!(begin.elapsed() < LIMIT, "the session is there: {}", scene.objects("blue"));
        std::thread::sleep(Duration::from_millis(10));
    }
    let name = std::fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap();
    assert_eq!((name.trim(), child.try_wait().unwrap()), ("su", None));
    assert_eq!(users(child.id()), (user, 0), "exec gave it no rights (nosuid, no_new_privs?)");
    let reached = peer.run(&SendWr::write(2, &[from.sge()], address, rkey as u32));
    assert_eq!(reached.status, wc::RETRY_EXC_ERR);
    while guest_memory(&scene) > mapped {
        assert!(begin.elapsed() < LIMIT, "the daemon has its memory");
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process_group(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    assert_eq!(scene.objects("blue")["qps"], before["qps"]);
    stays.mr(4096);
}

/// How long a test looks at what nobody disturbs.
const QUIET: Duration = Duration::from_millis(500);

/// A pair of the two NICs at work for a while beside what `meanwhile` makes of it: the 99th
/// percentile of what its writes took must be that without, or little more.
#[track_caller]
fn writes_go_on(scene: &Scene, lasts: Duration, meanwhile: impl FnOnce()) {
    let (mut a, b) = (scene.blue().rc(), scene.red().rc());
    a.connect(&b, &Route::default());
    b.connect(&a, &Route::default());
    let (from, to) = (a.node.area(4096), b.node.area(4096));
    let write = SendWr::write(1, &[from.sge()], to.addr(0), to.rkey());
    let queues = Queues::of_network(&scene.world.daemon, "net").and_mine();
    let mut p99 = |lasts: Duration| {
        let (begin, mut trips) = (Instant::now(), Trips::default());
        while begin.elapsed() < lasts {
            trips.record(queues.time(|| _ = a.run_ok(&write)));
        }
        trips.p99()
    };
    let (alone, _) = p99(QUIET);
    meanwhile();
    let (p99, longest) = p99(lasts);
    println!("99 of 100 writes: {alone:?} alone, {p99:?} beside it; the longest {longest:?}");
    assert!(p99 <= most(alone), "{alone:?} alone, {p99:?} beside it");
}

/// As many as may come in, and the rest is refused; who is there already does not notice.
#[test]
fn a_crowd_at_the_door_keeps_nobody_from_working() {
    const CROWD: u32 = 12;
    let scene = Scene::with(&["--max-contexts", "24"]);
    let (ends, came, refused) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    let come = || {
        let mut mine = Vec::new();
        while !ends.load(Ordering::Relaxed) {
            match Guest::of_process(scene.blue_socket()).and_then(|guest| {
                guest.open()?;
                Ok(guest)
            }) {
                Ok(guest) => mine.push(guest),
                Err(_) => drop(refused.fetch_add(1, Ordering::Relaxed)),
            }
            came.fetch_add(1, Ordering::Relaxed);
            if mine.len() > 2 {
                mine.clear();
            }
        }
    };
    std::thread::scope(|scope| {
        // The crowd ends also where a write fails.
        let _ends = Ends(&ends);
        let crowd = || (0..CROWD).for_each(|_| drop(scope.spawn(come)));
        writes_go_on(&scene, Duration::from_millis(1500), crowd);
    });
    let (came, refused) = (came.into_inner(), refused.into_inner());
    assert!(refused > 0 && came > refused, "{came} came, {refused} were refused");
    scene.awaits_nothing("blue");
}

/// 256 processes that come again and again. The door is full, and who is in works on.
#[test]
fn a_fork_bomb_at_the_door_keeps_nobody_from_working() {
    const ROOM: u32 = 24;
    let scene = Scene::with(&["--max-contexts", &ROOM.to_string()]);
    let mut bomb = None;
    writes_go_on(&scene, Duration::from_secs(4) * patience(), || {
        let lit = Bomb::at(scene.blue_socket());
        lit.grows();
        bomb = Some(lit);
    });
    let refused = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        Guest::of_process(scene.blue_socket()).and_then(|guest| guest.open()).is_err()
    });
    assert!(refused, "the door was never full");
    drop(bomb);
    scene.awaits_nothing("blue");
    scene.blue().mr(4096);
}
