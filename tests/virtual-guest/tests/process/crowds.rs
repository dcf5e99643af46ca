//! Processes that become others, and more of them than there may be.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use virtual_guest::daemon::patience;
use virtual_guest::guest::Guest;
use virtual_guest::qp::{Path as Route, SendWr};
use virtual_guest::world::{Ends, Node, ipv4_gid};

use crate::scene::Scene;

const SOCKET: &str = "VHOST_RDMA_TEST_PROCESS";
const LIMIT: Duration = Duration::from_secs(20);
/// A program that gets the rights of another user (su(1)).
const SETUID: &str = "/usr/bin/su";

/// What a child does: it has objects, and becomes a program with more rights. A second process that
/// does so is the subject: what becomes another program cannot look at what comes of it.
#[test]
#[ignore = "run by the test below, as a process of its own"]
fn become_a_setuid_program() {
    let socket = std::env::var_os(SOCKET).expect("the socket of a NIC");
    let node = Node::process("blue", socket.as_ref(), ipv4_gid(9, 1));
    let _kept = (node.rc(), node.area(1 << 20));
    println!("there");
    BufReader::new(std::io::stdin()).lines().next();
    let error = Command::new(SETUID).args(["-s", "/bin/sh", "-c", "sleep 60"]).exec();
    panic!("{SETUID}: {error}");
}

/// The program goes on with the process's ID, and with nothing of the NIC.
#[test]
fn exec_of_a_setuid_program_ends_the_session() {
    let scene = Scene::new();
    let stays = scene.blue();
    let before = scene.objects("blue");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crowds::become_a_setuid_program", "--ignored", "--nocapture"])
        .env(SOCKET, scene.blue_socket())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("there")));
    assert_eq!(scene.objects("blue")["contexts"], 2);
    drop(child.stdin.take());
    let begin = Instant::now();
    while scene.objects("blue")["contexts"] != 1 {
        assert!(begin.elapsed() < LIMIT, "the session is there: {}", scene.objects("blue"));
        std::thread::sleep(Duration::from_millis(10));
    }
    let name = std::fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap();
    assert_eq!((name.trim(), child.try_wait().unwrap()), ("su", None));
    kill_process_group(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    assert_eq!(scene.objects("blue")["qps"], before["qps"]);
    stays.mr(4096);
}

/// A pair of the two NICs at work for a while beside what `meanwhile` makes of it: the longest that
/// one write took.
fn slowest_write(scene: &Scene, lasts: Duration, meanwhile: impl FnOnce()) -> Duration {
    let (mut a, b) = (scene.blue().rc(), scene.red().rc());
    a.connect(&b, &Route::default());
    b.connect(&a, &Route::default());
    let (from, to) = (a.node.area(4096), b.node.area(4096));
    meanwhile();
    let (begin, mut slowest) = (Instant::now(), Duration::ZERO);
    while begin.elapsed() < lasts {
        let once = Instant::now();
        a.run_ok(&SendWr::write(1, &[from.sge()], to.addr(0), to.rkey()));
        slowest = slowest.max(once.elapsed());
    }
    slowest
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
    let slowest = std::thread::scope(|scope| {
        // The crowd ends also where a write fails.
        let _ends = Ends(&ends);
        let crowd = || (0..CROWD).for_each(|_| drop(scope.spawn(come)));
        slowest_write(&scene, Duration::from_millis(1500), crowd)
    });
    let (came, refused) = (came.into_inner(), refused.into_inner());
    assert!(refused > 0 && came > refused, "{came} came, {refused} were refused");
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    scene.awaits_nothing("blue");
}

/// A fork bomb: all of its processes come to the door, say HELLO and stay, the first of them with a
/// socket that all share, again and again while they have time.
const BOMB: &str = r"
use Socket;
my ($path, $left, $until) = (@ARGV[0, 1], time + $ARGV[2]);
$SIG{CHLD} = 'IGNORE';
my @held;
while (time < $until) {
    fork while @held && $left-- > 0;
    socket(my $own, AF_UNIX, SOCK_SEQPACKET, 0) or next;
    connect($own, pack_sockaddr_un($path)) or next;
    send($own, pack('V4', 1, 0, 1, 0), 0);
    recv($own, my $answer, 64, 0);
    push @held, $own;
    shift @held if @held > 4;
}
";
/// How often it doubles.
const DOUBLINGS: u32 = 8;

/// Processes of a group that run.
fn processes_of(group: Pid) -> usize {
    let group = group.as_raw_nonzero().to_string();
    let stats = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = stats.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    // Behind the name, which ends with the last parenthesis: state, parent, group (proc(5)).
    let runs = |stat: &String| {
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        fields.next() != Some("Z") && fields.nth(1) == Some(&group)
    };
    stats.filter(runs).count()
}

/// The processes of a bomb; they end with it.
struct Bomb(Child);

impl Bomb {
    fn new(door: &Path) -> Self {
        let mut bomb = Command::new("nice");
        bomb.args(["-n", "19", "perl", "-e", BOMB]).arg(door);
        bomb.args([&DOUBLINGS.to_string(), "120"]).process_group(0);
        Self(bomb.spawn().expect("nice (coreutils) and perl"))
    }

    fn processes(&self) -> usize {
        processes_of(Pid::from_child(&self.0))
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        let begin = Instant::now();
        // Some may fork while others are killed.
        while self.processes() > 0 && begin.elapsed() < LIMIT {
            let _gone = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        }
        let _reaped = self.0.wait();
    }
}

/// 256 processes that come again and again, at the least priority: what is measured is what they
/// make of the daemon, not of the processors. The door is full, and who is in works on.
#[test]
fn a_fork_bomb_at_the_door_keeps_nobody_from_working() {
    const ROOM: u32 = 24;
    let scene = Scene::with(&["--max-contexts", &ROOM.to_string()]);
    let mut bomb = None;
    let slowest = slowest_write(&scene, Duration::from_secs(4) * patience(), || {
        let lit = Bomb::new(scene.blue_socket());
        let begin = Instant::now();
        while lit.processes() <= 1 << (DOUBLINGS - 1) {
            assert!(begin.elapsed() < LIMIT * patience(), "{} processes", lit.processes());
            std::thread::sleep(Duration::from_millis(10));
        }
        bomb = Some(lit);
    });
    let refused = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        Guest::of_process(scene.blue_socket()).and_then(|guest| guest.open()).is_err()
    });
    assert!(refused, "the door was never full");
    drop(bomb);
    assert!(slowest < Duration::from_millis(500) * patience(), "{slowest:?}");
    scene.awaits_nothing("blue");
    scene.blue().mr(4096);
}
