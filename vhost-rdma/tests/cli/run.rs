//! `run`: a program with NICs of its own, and nothing left of them.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::daemon::{Said, vhost_rdma};

/// Libraries that a shell does not load, and a place for the daemon.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libibverbs.so.1"), "").unwrap();
        std::fs::create_dir(dir.path().join("run")).unwrap();
        Self { dir }
    }

    fn runtime(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn run(&self, args: &[&str], script: &str) -> Said {
        let mut command = self.command();
        command.args(args).args(["--", "sh", "-c", script]);
        command.output().unwrap().into()
    }

    fn command(&self) -> Command {
        let mut command = vhost_rdma();
        command.env("VHOST_RDMA_LIBRARIES", self.dir.path()).arg("run");
        command.env("XDG_RUNTIME_DIR", self.runtime()).env_remove("LD_PRELOAD");
        command
    }

    /// `run`, started by another program, as its arguments.
    fn by(&self, program: &str, args: &[&str]) -> Command {
        let ours = self.command();
        let mut command = Command::new(program);
        command.args(args).arg(ours.get_program()).args(ours.get_args());
        for (name, value) in ours.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// Directories of daemons that are left.
    fn left(&self) -> usize {
        std::fs::read_dir(self.runtime()).unwrap().count()
    }
}

#[test]
fn a_program_gets_its_nics_and_its_status_is_ours() {
    let place = Place::new();
    let script = "echo $VHOST_RDMA_DEVICES; echo $LD_LIBRARY_PATH; echo $VHOST_RDMA_ADDRESSES
        IFS=:; for socket in $VHOST_RDMA_DEVICES; do test -S $socket || exit 1; done; exit 7";
    let said = place.run(&["--nics", "3", "--network", "blue"], script);
    assert_eq!((said.status, said.err.as_str()), (7, ""), "{said:?}");
    let mut lines = said.out.lines();
    let sockets: Vec<_> = lines.next().unwrap().split(':').map(PathBuf::from).collect();
    assert_eq!(sockets.len(), 3);
    assert!(sockets.iter().all(|socket| !socket.exists()), "they went with the program");
    assert!(lines.next().unwrap().starts_with(place.dir.path().to_str().unwrap()));
    let addresses: Vec<std::net::Ipv4Addr> =
        lines.next().unwrap().split(' ').map(|address| address.parse().unwrap()).collect();
    assert_eq!(addresses.len(), 3);
    assert!(addresses.iter().all(|address| address.octets()[..1] == [198]), "{addresses:?}");
    assert_eq!(place.left(), 0);
    assert_eq!(place.run(&[], "kill -9 $$").status, 128 + 9);
    assert_eq!(place.left(), 0);
}

#[test]
fn sockets_that_are_there_are_used_as_they_are() {
    let place = Place::new();
    let connect = ["--connect", "/a/process.sock", "--connect", "/b/process.sock"];
    let said = place.run(&connect, "echo $VHOST_RDMA_DEVICES");
    assert_eq!(said.ok(), "/a/process.sock:/b/process.sock\n");
    assert_eq!(place.left(), 0);
}

#[test]
fn what_cannot_be_run_is_said_in_a_line() {
    let place = Place::new();
    let fails = |program: &str, status: i32, words: &[&str]| {
        let said: Said = place.command().args(["--", program]).output().unwrap().into();
        said.fails(status, words);
        assert_eq!(said.err.lines().count(), 1, "{said:?}");
    };
    fails("no-such-program", 2, &["no program", "no-such-program"]);
    let suid = place.dir.path().join("suid");
    std::fs::copy("/bin/true", &suid).unwrap();
    std::fs::set_permissions(&suid, std::fs::Permissions::from_mode(0o4755)).unwrap();
    fails(suid.to_str().unwrap(), 2, &["setuid"]);
    std::fs::remove_file(place.dir.path().join("libibverbs.so.1")).unwrap();
    fails("true", 4, &["libraries", "build.sh"]);
    assert_eq!(place.left(), 0);
}

/// What a supervisor tells the process that it started is told to the program; its own end is the
/// end of all, and not the signal.
#[test]
fn signals_are_the_programs() {
    for signal in [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1] {
        let place = Place::new();
        let number = signal.as_raw();
        let script =
            format!("trap 'echo told; exit 7' {number}; echo ready; while :; do sleep 0.02; done");
        // Whoever runs the tests in the background has some ignored (sh(1), asynchronous lists).
        let mut command = place.by("env", &["--default-signal"]);
        // A group of its own: nobody but us signals it.
        command.args(["--", "sh", "-c", &script]).process_group(0);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(out.next().unwrap().unwrap(), "ready");
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(out.next().unwrap().unwrap(), "told");
        assert_eq!(child.wait().unwrap().code(), Some(7), "{signal:?}");
        assert_eq!(place.left(), 0);
    }
}

#[test]
fn what_is_ignored_stays_so() {
    let place = Place::new();
    let mut shell = place.by("sh", &["-c", "trap '' HUP; exec \"$@\"", "sh"]);
    shell.args(["--", "sh", "-c", "kill -HUP $$ $PPID; echo lives"]);
    let said: Said = shell.output().unwrap().into();
    assert_eq!(said.ok(), "lives\n");
    assert_eq!(place.left(), 0);
}

/// Killed with no time to clean up, it takes its daemon along. The program is not its to kill.
#[test]
fn a_run_that_is_killed_leaves_no_daemon() {
    let place = Place::new();
    let mut command = place.command();
    command.args(["--", "sh", "-c", "echo $$; echo $VHOST_RDMA_DEVICES; exec sleep 60"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    let program = Pid::from_raw(out.next().unwrap().unwrap().parse().unwrap()).unwrap();
    let socket = PathBuf::from(out.next().unwrap().unwrap());
    assert!(socket.exists());
    let admin = socket.ancestors().nth(3).unwrap().join("admin.sock");
    child.kill().unwrap();
    child.wait().unwrap();
    let begin = std::time::Instant::now();
    while std::os::unix::net::UnixStream::connect(&admin).is_ok() {
        assert!(begin.elapsed() < std::time::Duration::from_secs(20), "the daemon is there");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    kill_process(program, Signal::KILL).unwrap();
}
