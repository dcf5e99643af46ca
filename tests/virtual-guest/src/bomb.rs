//! A fork bomb at a NIC's door.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process_group};

use crate::daemon::let_in;

/// All of its processes come to the door, say HELLO and stay, the first of them with a socket that
/// all share, again and again while they have time. Who is sent away goes on (SIGPIPE), and who
/// cannot fork tries again: those of a bomb before count until all of them are waited for.
const BOMB: &str = r"
use Socket;
my ($path, $left, $until) = (@ARGV[0, 1], time + $ARGV[2]);
$SIG{CHLD} = $SIG{PIPE} = 'IGNORE';
my @held;
while (time < $until) {
    $left-- while @held && $left > 0 && defined(fork);
    socket(my $own, AF_UNIX, SOCK_SEQPACKET, 0) or next;
    connect($own, pack_sockaddr_un($path)) or next;
    send($own, pack('V4', 1, 0, 1, 0), 0);
    recv($own, my $answer, 64, 0);
    push @held, $own;
    shift @held if @held > 4;
}
";
/// How many processes there may be (`RLIMIT_NPROC`), and how often each is doubled: beyond that
/// where there is a limit, up to it where there can be none.
const PIDS: usize = 256;
const DOUBLINGS: [&str; 2] = ["8", "16"];
/// Seconds that it lasts if nobody ends it.
const LASTS: &str = "180";
/// Users that a host has not, each the bomb's of one process of ours. The limit counts all
/// processes of a user, and does not bind root (fork(2), EAGAIN).
const USERS: u32 = 1 << 30;
/// How long its processes may take to end.
const SOON: Duration = Duration::from_secs(20);
/// How long they may take to come, with what others leave them of the processors.
const GROWTH: Duration = Duration::from_secs(60);

/// Its processes; they end with it.
#[derive(Debug)]
pub struct Bomb(Child);

/// Processes of a group that run.
fn processes_of(group: Pid) -> usize {
    let group = group.as_raw_nonzero().to_string();
    let stats = std::fs::read_dir("/proc").expect("/proc").flatten();
    let stats = stats.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    // Behind the name, which ends with the last parenthesis: state, parent, group (proc(5)).
    let runs = |stat: &String| {
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        fields.next() != Some("Z") && fields.nth(1) == Some(&group)
    };
    stats.filter(runs).count()
}

impl Bomb {
    /// Lights one, at the least priority: what is measured beside it is what it makes of the
    /// daemon, not of the processors.
    #[must_use]
    pub fn at(door: &Path) -> Self {
        let mut bomb = Command::new("nice");
        bomb.args(["-n", "19"]);
        let is_root = geteuid().is_root();
        if is_root {
            let user = USERS + std::process::id();
            let_in(door, user);
            bomb.arg("setpriv").args(["--reuid", "--regid"].map(|it| format!("{it}={user}")));
            bomb.args(["--clear-groups", "prlimit", &format!("--nproc={PIDS}:{PIDS}")]);
        }
        bomb.args(["perl", "-e", BOMB]).arg(door);
        bomb.args([DOUBLINGS[usize::from(is_root)], LASTS]).process_group(0);
        Self(bomb.spawn().expect("nice (coreutils), setpriv and prlimit (util-linux), perl"))
    }

    /// How many there are.
    pub fn processes(&self) -> usize {
        processes_of(Pid::from_child(&self.0))
    }

    /// Waits until there are more than half of what there may be.
    #[track_caller]
    pub fn grows(&self) {
        let (begin, wait) = (Instant::now(), GROWTH * crate::daemon::patience());
        while self.processes() <= PIDS / 2 {
            assert!(begin.elapsed() < wait, "{} processes", self.processes());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(self.processes() <= PIDS, "nothing limits it");
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        let begin = Instant::now();
        // Some may fork while others are killed.
        while self.processes() > 0 && begin.elapsed() < SOON {
            let _gone = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        }
        let _reaped = self.0.wait();
    }
}
