//! `run`: a program with NICs of its own, and nothing left of them.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use crate::daemon::{Daemon, Said, vhost_rdma};

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

/// As it is installed: nothing in the environment names the libraries, and the program is told.
#[test]
fn libraries_beside_the_program_are_found_and_told() {
    let place = Place::new();
    let (bin, lib) = (place.dir.path().join("bin"), place.dir.path().join("lib/vhost-rdma"));
    std::fs::create_dir(&bin).unwrap();
    std::fs::create_dir_all(&lib).unwrap();
    std::fs::write(lib.join("libibverbs.so.1"), "").unwrap();
    let program = bin.join("vhost-rdma");
    std::fs::copy(env!("CARGO_BIN_EXE_vhost-rdma"), &program).unwrap();
    let mut command = Command::new(&program);
    command.env_remove("VHOST_RDMA_LIBRARIES").env_remove("LD_LIBRARY_PATH");
    command.env_remove("VHOST_RDMA_SOCKET").env("XDG_RUNTIME_DIR", place.runtime());
    command.args(["run", "--connect", "a.sock", "--", "sh", "-c"]);
    command
        .arg("cd /; echo $VHOST_RDMA_LIBRARIES; echo $LD_LIBRARY_PATH; echo $VHOST_RDMA_DEVICES");
    let said: Said = command.current_dir(place.dir.path()).output().unwrap().into();
    let (lib, socket) = (lib.display(), place.dir.path().join("a.sock"));
    assert_eq!(said.ok(), format!("{lib}\n{lib}\n{}\n", socket.display()));
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

/// A program that says so when it runs.
const SPEAKS: &str =
    "#include <stdio.h>\nint main(void) { return puts(\"it ran\") < 0 ? 1 : 7; }\n";

/// What a compiler makes of [`SPEAKS`], in this place; nothing where there is no such compiler.
fn compile(place: &Place, name: &str, compiler: &str, options: &[&str]) -> Option<String> {
    let [source, program] = ["speaks.c", name].map(|name| place.dir.path().join(name));
    std::fs::write(&source, SPEAKS).unwrap();
    let made = Command::new(compiler).args(options).arg("-o").args([&program, &source]).output();
    let made = match made {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        made => made.unwrap(),
    };
    assert!(made.status.success(), "{name}: {}", String::from_utf8_lossy(&made.stderr));
    Some(program.into_os_string().into_string().unwrap())
}

/// Real programs, as compilers make them. Where musl's compiler is not there (Debian's musl-tools),
/// one of the C library's is told to name musl's loader: that is what `run` goes by.
#[test]
fn static_and_musl_programs_are_refused_and_not_started() {
    let place = Place::new();
    // As musl-gcc.specs has it.
    let loader = format!("-Wl,--dynamic-linker=/lib/ld-musl-{}.so.1", std::env::consts::ARCH);
    let cc = |name: &str, options: &[&str]| compile(&place, name, "cc", options).unwrap();
    let musl = |name: &str, options: &[&str]| compile(&place, name, "musl-gcc", options);
    let mut refused = vec![
        (cc("static", &["-static"]), "static"),
        (cc("static-pie", &["-static-pie"]), "static"),
        (musl("musl", &[]).unwrap_or_else(|| cc("musl", &[&loader])), "musl"),
    ];
    refused.extend(musl("musl-static", &["-static"]).map(|program| (program, "static")));
    for (program, why) in &refused {
        let said: Said = place.command().args(["--", program]).output().unwrap().into();
        said.fails(2, &[program, why, "libibverbs"]);
        assert_eq!((said.err.lines().count(), said.out.as_str()), (1, ""), "{said:?}");
        assert_eq!(place.left(), 0);
    }
    // What is neither of them runs.
    let usual: Said = place.command().args(["--", &cc("usual", &[])]).output().unwrap().into();
    assert_eq!((usual.status, usual.out.as_str(), usual.err.as_str()), (7, "it ran\n", ""));
}

/// The runtime of a sanitizer wants to be the first library of a program, and ours are preloaded.
#[test]
fn programs_with_a_sanitizer_run_with_its_runtime_first() {
    let place = Place::new();
    let process = Path::new(env!("CARGO_MANIFEST_DIR")).join("process");
    let library = |name: &str, sources: &[&str]| {
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-builtin", "-o"]);
        cc.arg(place.dir.path().join(name)).args(sources.iter().map(|name| process.join(name)));
        assert!(cc.args(["-lpthread", "-ldl"]).status().unwrap().success());
    };
    library("libvhost_rdma_heap.so", &["heap/heap.c", "heap/pages.c"]);
    library("libvhost_rdma_files.so", &["files/files.c"]);
    for options in [&[][..], &["-fsanitize=address"], &["-fsanitize=address", "-static-libasan"]] {
        let program = compile(&place, "checked", "cc", options).unwrap();
        let said: Said = place.command().args(["--", &program]).output().unwrap().into();
        assert_eq!((said.status, said.out.as_str(), said.err.as_str()), (7, "it ran\n", ""));
    }
}

/// What a shell starts is its own affair, and is not looked at: such a program runs as it would
/// without us, and finds no device.
#[test]
fn a_static_program_of_a_shell_runs_as_it_is() {
    let place = Place::new();
    let program = compile(&place, "static", "cc", &["-static"]).unwrap();
    let said = place.run(&[], &format!("{program}; echo $?; test -n \"$VHOST_RDMA_DEVICES\""));
    assert_eq!((said.ok(), place.left()), ("it ran\n7\n".to_owned(), 0));
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
    let is_there = || std::os::unix::net::UnixStream::connect(&admin).is_ok();
    eventually("the daemon is there", || !is_there());
    kill_process(program, Signal::KILL).unwrap();
}

/// NICs of a daemon, by name.
fn nics(daemon: &Daemon) -> Vec<String> {
    let list = daemon.cli(&["nic", "list", "--json"]).json();
    let names = list.as_array().unwrap().iter().map(|nic| nic["name"].as_str().unwrap().into());
    names.collect()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A `run` with two NICs of a daemon that runs already, whose program sleeps.
struct Running {
    run: Child,
    program: Pid,
    sockets: Vec<PathBuf>,
}

impl Running {
    fn with(place: &Place, daemon: &Daemon) -> Self {
        let mut command = place.command();
        command.env("VHOST_RDMA_SOCKET", daemon.socket()).args(["--nics", "2", "--"]);
        command.args(["sh", "-c", "echo $$; echo $VHOST_RDMA_DEVICES; exec sleep 60"]);
        let mut run = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(run.stdout.take().unwrap()).lines();
        let program = Pid::from_raw(out.next().unwrap().unwrap().parse().unwrap()).unwrap();
        let sockets = out.next().unwrap().unwrap().split(':').map(PathBuf::from).collect();
        Self { run, program, sockets }
    }

    fn kill(&mut self) {
        self.run.kill().unwrap();
        self.run.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.run.kill();
        let _ = self.run.wait();
        let _ = kill_process(self.program, Signal::KILL);
    }
}

/// Processes that hold NICs for these, by what their command line names.
fn holders(daemon: &Daemon) -> Vec<Pid> {
    let socket = daemon.socket();
    let is_holder = |pid: &Path| {
        let line = std::fs::read(pid.join("cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|byte| *byte == 0).collect();
        words.contains(&b"run-nics".as_slice())
            && words.contains(&socket.as_os_str().as_encoded_bytes())
    };
    let all = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let pids = all.filter(|path| is_holder(path)).map(|path| {
        Pid::from_raw(path.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap()
    });
    pids.collect()
}

#[test]
fn a_daemon_that_runs_is_used_and_keeps_nothing() {
    let (place, daemon) = (Place::new(), Daemon::start());
    daemon.cli(&["nic", "add", "other"]).ok();
    daemon.cli(&["network", "add", "blue"]).ok();
    let cli = env!("CARGO_BIN_EXE_vhost-rdma");
    let script = format!("echo $VHOST_RDMA_DEVICES; {cli} nic list --network blue --json; exit 7");
    let mut command = place.command();
    command.env("VHOST_RDMA_SOCKET", daemon.socket());
    command.args(["--nics", "2", "--network", "blue", "--", "sh", "-c", &script]);
    let said: Said = command.output().unwrap().into();
    assert_eq!((said.status, said.err.as_str()), (7, ""), "{said:?}");
    let (devices, list) = said.out.split_once('\n').unwrap();
    let listed: serde_json::Value = serde_json::from_str(list).unwrap();
    let listed: Vec<_> = listed.as_array().unwrap().iter().map(|nic| &nic["socket"]).collect();
    let mut devices: Vec<_> = devices.split(':').map(|socket| json!(socket)).collect();
    devices.sort_by_key(ToString::to_string);
    let mut found: Vec<_> = listed.into_iter().cloned().collect();
    found.sort_by_key(ToString::to_string);
    assert_eq!((devices.len(), devices), (2, found));
    assert_eq!(nics(&daemon), ["other"]);
    assert_eq!(place.left(), 0, "no daemon of its own");
    // What it refuses is said, and nothing waited for.
    let mut command = place.command();
    command.env("VHOST_RDMA_SOCKET", daemon.socket());
    command.args(["--network", "none", "--", "true"]);
    Said::from(command.output().unwrap()).fails(5, &["none"]);
    let mut command = place.command();
    command.env("VHOST_RDMA_SOCKET", place.dir.path().join("nobody")).args(["--", "true"]);
    let begin = Instant::now();
    Said::from(command.output().unwrap()).fails(5, &["nobody", "not running"]);
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(nics(&daemon), ["other"]);
}

/// Killed with no time to clean up, it leaves nothing in a daemon that others use.
#[test]
fn a_run_that_is_killed_leaves_no_nics() {
    let (place, daemon) = (Place::new(), Daemon::start());
    let mut running = Running::with(&place, &daemon);
    assert!(running.sockets.iter().all(|socket| socket.exists()));
    assert_eq!(nics(&daemon).len(), 2);
    running.kill();
    eventually("its NICs are there", || nics(&daemon).is_empty());
    assert!(!running.sockets.iter().any(|socket| socket.exists()));
    eventually("who held them is there", || holders(&daemon).is_empty());
}

#[test]
fn nics_of_a_run_are_kept_by_a_daemon_that_begins_again_and_go_with_the_run() {
    let (place, mut daemon) = (Place::new(), Daemon::start());
    let mut running = Running::with(&place, &daemon);
    daemon.kill();
    let mut daemon = Daemon::start_in(daemon.into_dir(), &[]);
    assert_eq!(nics(&daemon).len(), 2);
    // The run is killed while nobody can be told.
    daemon.kill();
    running.kill();
    let daemon = Daemon::start_in(daemon.into_dir(), &[]);
    eventually("its NICs are there", || nics(&daemon).is_empty());
    eventually("who held them is there", || holders(&daemon).is_empty());
}

#[test]
fn a_run_whose_holder_is_killed_removes_its_nics_itself() {
    let (place, daemon) = (Place::new(), Daemon::start());
    let mut running = Running::with(&place, &daemon);
    let holders = holders(&daemon);
    assert_eq!(holders.len(), 1);
    // What is for all of a service is not for the holder.
    kill_process(holders[0], Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(nics(&daemon).len(), 2);
    kill_process(holders[0], Signal::KILL).unwrap();
    kill_process(running.program, Signal::TERM).unwrap();
    assert_eq!(running.run.wait().unwrap().code(), Some(128 + 15));
    assert!(nics(&daemon).is_empty());
}

/// The program of the next test: a session with each NIC that it was told of
/// (docs/virtio-rdma-process.md, HELLO).
#[test]
#[ignore = "what another test runs"]
fn greets_its_nics() {
    let sockets = std::env::var("VHOST_RDMA_DEVICES").unwrap();
    for path in sockets.split(':') {
        let session = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&session, &SocketAddrUnix::new(path).unwrap()).unwrap();
        let hello = [1_u32, 0, 1, 0].map(u32::to_le_bytes).concat();
        send(&session, &hello, SendFlags::NOSIGNAL).unwrap();
        let mut answer = [0_u8; 64];
        let (length, _) = recv(&session, &mut answer, RecvFlags::empty()).unwrap();
        assert_eq!((length, &answer[..4]), (32, [0; 4].as_slice()), "{answer:?}");
        let mac = answer[22..28].iter().map(|byte| format!("{byte:02x}"));
        println!("\ngreeted by {}", mac.collect::<Vec<_>>().join(":"));
    }
}

#[test]
fn a_nic_that_is_there_is_connected_to_and_stays() {
    let (place, daemon) = (Place::new(), Daemon::start());
    let added: Vec<_> = ["a", "b"]
        .map(|name| daemon.cli(&["nic", "add", name, "--for", "process", "--json"]).json())
        .into();
    let mut command = place.command();
    for nic in &added {
        command.args(["--connect", nic["socket"].as_str().unwrap()]);
    }
    command.arg("--").arg(std::env::current_exe().unwrap());
    command.args(["--exact", "run::greets_its_nics", "--ignored", "--nocapture"]);
    let said: Said = command.output().unwrap().into();
    let out = said.ok();
    for nic in &added {
        let greeted = format!("greeted by {}", nic["mac"].as_str().unwrap());
        assert!(out.contains(&greeted), "{greeted}: {out}");
    }
    assert_eq!(nics(&daemon), ["a", "b"]);
    assert_eq!(place.left(), 0);
}
