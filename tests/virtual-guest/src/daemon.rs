//! The real daemon as a child process, driven through its own command line.
//!
//! `VHOST_RDMA_BIN` names the binary to be tested; without it the workspace's own is built first,
//! with the profile of the program that runs this code. The daemon keeps everything in a temporary
//! directory, so any number of them run at one time. It is started with a parent-death signal: a
//! test that dies takes its daemon with it. A daemon that ended early, that panicked, or that does
//! not end when it is asked to fails the test that used it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// How a daemon is started.
#[derive(Debug, Clone, Default)]
pub struct DaemonOptions {
    /// More arguments of `serve`.
    pub args: Vec<String>,
    /// Bytes that it may lock, as a daemon without CAP_IPC_LOCK.
    pub memlock: Option<u64>,
    /// Each network has a process, whatever the environment says.
    pub processes: bool,
    /// A parent starts it again (`vhost-rdma keep`), and it keeps its NICs.
    pub kept: bool,
    /// It runs from a file of its own ([`Daemon::install`]), and keeps its NICs.
    pub installed: bool,
}

/// Where a daemon's own copy of the program is, in its directory.
const PROGRAM: &str = "vhost-rdma";

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    binary: PathBuf,
    dir: tempfile::TempDir,
    killed: bool,
}

fn profile_dir() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let dir = program.parent().map(Path::to_path_buf).unwrap_or_default();
    // Test programs lie in `deps`, binaries beside it.
    Ok(if dir.ends_with("deps") {
        dir.parent().map(Path::to_path_buf).unwrap_or_default()
    } else {
        dir
    })
}

/// Cargo, which must not know of what package we are: build scripts that read that would run again,
/// and all that needs them.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_MANIFEST_") || text.starts_with("CARGO_PKG_") {
            cargo.env_remove(&name);
        }
    }
    cargo
}

fn build() -> Result<PathBuf, String> {
    let dir = profile_dir().map_err(|e| e.to_string())?;
    let target = dir.parent().ok_or("the target directory has no name")?;
    let mut cargo = cargo();
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args(["build", "--quiet", "--package", "vhost-rdma", "--bin", "vhost-rdma"]);
    cargo.arg("--target-dir").arg(target);
    if dir.ends_with("release") {
        cargo.arg("--release");
    }
    cargo.stdin(Stdio::null());
    let output = cargo.output().map_err(|e| format!("cargo: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(dir.join("vhost-rdma"))
}

static BACKING: OnceLock<&str> = OnceLock::new();

/// Has this program's NICs carried by `device`, whatever the environment says; once for all.
pub fn carry_by(device: &'static str) {
    let chosen = BACKING.get_or_init(|| device);
    assert_eq!(*chosen, device, "a program has one backing");
}

/// What shall carry the NICs under test: what this program chose, `$VHOST_RDMA_BACKING`, or the
/// daemon's own engine.
pub fn backing() -> String {
    let chosen = BACKING.get().map(|device| (*device).to_owned());
    chosen.or_else(|| std::env::var("VHOST_RDMA_BACKING").ok()).unwrap_or_else(|| "soft".to_owned())
}

/// How many times longer than usual things may take, where a machine is emulated:
/// `$VHOST_RDMA_PATIENCE`, or 1.
pub fn patience() -> u32 {
    let told = std::env::var("VHOST_RDMA_PATIENCE").ok();
    told.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Lets another user in by the socket of a NIC, as `nic add --owner` would, and on the way there:
/// the directory of a daemon of ours is its own (tempfile(3)).
///
/// # Panics
/// Who is not root cannot.
pub fn let_in(socket: &Path, user: u32) {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let dir = socket.ancestors().nth(3).expect("DIR/nics/NIC/process.sock");
    let open = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(dir, open).expect("it is ours");
    chown(socket, Some(user), None).expect("root gives files away");
}

/// How often a race is tried: `usual` times, or less where a machine is emulated and each try takes
/// longer by as much.
pub fn tries(usual: u64) -> u64 {
    usual / u64::from(patience().max(1))
}

/// The daemon's binary, built if need be.
pub fn binary() -> PathBuf {
    static BINARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = BINARY.get_or_init(|| match std::env::var_os("VHOST_RDMA_BIN") {
        Some(path) => Ok(path.into()),
        None => build(),
    });
    made.clone().unwrap_or_else(|e| panic!("the daemon can not be built: {e}"))
}

/// Copies a program, by another process. A child of another thread's, which is just being started,
/// has a copy of each descriptor of ours: while it has one that the file is written to, nobody can
/// execute it (execve(2), ETXTBSY).
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").args([from, to]).status().expect("cp (coreutils)");
    assert!(copied.success(), "{} cannot be copied to {}", from.display(), to.display());
}

impl Daemon {
    /// Starts a daemon and waits until its admin socket answers.
    pub fn spawn(options: &DaemonOptions) -> Self {
        crate::witness::begins();
        let binary = binary();
        let dir =
            tempfile::Builder::new().prefix("vrdma-").tempdir().expect("a temporary directory");
        let log = File::create(dir.path().join("daemon.log")).expect("a log file");
        let errors = log.try_clone().expect("a second handle to the log");
        let mut command = match options.memlock {
            None => Command::new("setpriv"),
            Some(bytes) => {
                let mut command = Command::new("prlimit");
                command.arg(format!("--memlock={bytes}:{bytes}")).arg("setpriv");
                command.args(["--bounding-set", "-ipc_lock"]);
                command
            }
        };
        command.args(["--pdeathsig", "KILL"]);
        if options.installed {
            let program = dir.path().join(PROGRAM);
            copy_program(&binary, &program);
            command.arg(program);
        } else {
            command.arg(&binary);
        }
        command.args(if options.kept { &["keep", "--", "serve"][..] } else { &["serve"] });
        command.arg("--runtime-dir").arg(dir.path()).args(&options.args);
        if !options.kept && !options.installed {
            command.arg("--ephemeral");
        }
        // All shapes of the daemon are to pass the same tests.
        match std::env::var("VHOST_RDMA_SHAPE").as_deref() {
            Ok("one") if !options.processes => {
                command.arg("--one-process");
            }
            // The NICs of a network are on two workers in turn.
            Ok("spread") if !options.args.iter().any(|arg| arg == "--network-workers") => {
                command.args(["--network-workers", "2"]);
            }
            _ => {}
        }
        command.arg("--metrics").arg(format!("unix:{}", dir.path().join("metrics.sock").display()));
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = command.spawn().expect("setpriv (util-linux) starts the daemon");
        let mut daemon = Self { child, binary, dir, killed: false };
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::os::unix::net::UnixStream::connect(daemon.admin_socket()).is_err() {
            assert!(daemon.alive(), "the daemon ended at start:\n{}", daemon.log());
            assert!(Instant::now() < deadline, "the daemon does not listen:\n{}", daemon.log());
            std::thread::sleep(Duration::from_millis(2));
        }
        daemon
    }

    /// Installs another program in the place of the one that runs, as a package does.
    pub fn install(&self, program: &[u8]) {
        use std::os::unix::fs::PermissionsExt as _;
        let [bytes, new] = ["bytes", "new"].map(|name| self.dir.path().join(name));
        std::fs::write(&bytes, program).expect("room for a program");
        copy_program(&bytes, &new);
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&new, mode).expect("it is ours");
        std::fs::rename(&new, self.dir.path().join(PROGRAM)).expect("it takes the old one's place");
    }

    /// The socket of the admin API.
    pub fn admin_socket(&self) -> PathBuf {
        self.dir.path().join("admin.sock")
    }

    /// The runtime directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Is the process there?
    pub fn alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What the daemon wrote.
    pub fn log(&self) -> String {
        let mut text = String::new();
        let read = File::open(self.dir.path().join("daemon.log"))
            .and_then(|mut f| f.read_to_string(&mut text));
        match read {
            Ok(_) => text,
            Err(e) => format!("(no log: {e})"),
        }
    }

    /// Runs the command line with `args`; its standard output, or its standard error.
    pub fn cli(&self, args: &[&str]) -> Result<String, String> {
        self.cli_by(&self.admin_socket(), args)
    }

    /// The same by another socket, which somebody has put before the daemon's.
    pub fn cli_by(&self, socket: &Path, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.binary);
        command.arg("--socket").arg(socket).args(args).stdin(Stdio::null());
        let output = command.output().map_err(|e| e.to_string())?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// As [`Self::cli`], for what must succeed.
    #[track_caller]
    pub fn run(&self, args: &[&str]) -> String {
        self.cli(args)
            .unwrap_or_else(|e| panic!("vhost-rdma {}: {e}\n{}", args.join(" "), self.log()))
    }

    /// Adds a network.
    #[track_caller]
    pub fn add_network(&self, name: &str, vni: u32) {
        self.run(&["network", "add", name, "--vni", &vni.to_string()]);
    }

    /// Lets the NICs of a network on an RNIC reach an address, or a group.
    #[track_caller]
    pub fn add_peer(&self, address: &str, network: &str) {
        self.run(&["peer", "add", address, "--network", network]);
    }

    /// Adds a NIC on the backing under test, with more options; its socket.
    #[track_caller]
    pub fn add_nic(&self, name: &str, network: &str, options: &[&str]) -> PathBuf {
        let backing = backing();
        let usual: &[&str] =
            if options.contains(&"--backing") { &[] } else { &["--backing", &backing] };
        self.run(&[&["nic", "add", name, "--network", network], usual, options].concat());
        self.nic_socket(name)
    }

    /// The socket of a NIC.
    pub fn nic_socket(&self, name: &str) -> PathBuf {
        self.dir.path().join("nics").join(name).join("vhost.sock")
    }

    /// Adds a NIC for processes, of these addresses; its socket.
    #[track_caller]
    pub fn add_process_nic(&self, name: &str, network: &str, options: &[&str]) -> PathBuf {
        let usual = ["nic", "add", name, "--network", network, "--for", "process"];
        self.run(&[&usual[..], options].concat());
        self.dir.path().join("nics").join(name).join("process.sock")
    }

    /// What the daemon says of a NIC.
    #[track_caller]
    pub fn show_nic(&self, name: &str) -> serde_json::Value {
        let text = self.run(&["nic", "show", name, "--json"]);
        let value: serde_json::Value =
            serde_json::from_str(&text).expect("nic show --json is JSON");
        match value {
            serde_json::Value::Array(mut rows) if rows.len() == 1 => rows.remove(0),
            other => other,
        }
    }

    /// The daemon's processes: the one that was started, and those that came of it.
    pub fn pids(&self) -> Vec<u32> {
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let parent = |pid: u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // "pid (name) state parent"; a name may hold anything.
            let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
            Some((pid, rest.split_whitespace().nth(1)?.parse::<u32>().ok()?))
        };
        let parents: Vec<(u32, u32)> = pids.filter_map(parent).collect();
        let mut found = vec![self.pid()];
        let mut next = 0;
        while let Some(&of) = found.get(next) {
            found.extend(parents.iter().filter(|(_, parent)| *parent == of).map(|(pid, _)| *pid));
            next += 1;
        }
        found
    }

    /// The process that is the daemon itself, also where a parent keeps it.
    pub fn supervisor(&self) -> Option<u32> {
        let serves = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).nth(1) == Some(b"serve")
        };
        self.pids().into_iter().find(serves)
    }

    /// The process that serves a network, if it has one of its own.
    pub fn pid_of(&self, network: &str) -> Option<u32> {
        let serves = |pid: &u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.trim_end_matches('\0').rsplit('\0');
            words.next() == Some(network) && words.next() == Some("network-process")
        };
        self.pids().into_iter().find(serves)
    }

    /// The process of what NICs on RNICs share.
    pub fn outside(&self) -> Option<u32> {
        let serves = |pid: &u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.trim_end_matches('\0').ends_with("\0outside-process")
        };
        self.pids().into_iter().find(serves)
    }

    /// What `/proc` has of each of its processes in a directory.
    fn entries(&self, directory: &str) -> Vec<std::fs::DirEntry> {
        let dirs = self.pids().into_iter().map(|pid| format!("/proc/{pid}/{directory}"));
        dirs.filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten().collect()
    }

    /// Open file descriptors of its processes.
    pub fn open_files(&self) -> usize {
        self.entries("fd").len()
    }

    /// Threads of its processes.
    pub fn threads(&self) -> usize {
        self.entries("task").len()
    }

    /// Descriptors of the process of it that has most: each has a limit of its own.
    pub fn descriptors(&self) -> usize {
        let of = |pid| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        self.pids().into_iter().map(of).max().unwrap_or(0)
    }

    /// Anonymous memory of its processes, in bytes: theirs alone, not what guests share with them.
    pub fn own_memory(&self) -> u64 {
        let own = |pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
            line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0)
        };
        self.pids().into_iter().map(own).sum::<u64>() * 1024
    }

    /// The name of what is mapped from no file, in [`Self::mappings`].
    pub const ANONYMOUS: &'static str = "anonymous";

    /// Memory mappings of its processes: how many of each name.
    pub fn mappings(&self) -> BTreeMap<String, usize> {
        let mut names = BTreeMap::new();
        for pid in self.pids() {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
            for line in maps.unwrap_or_default().lines() {
                let name = line.split_whitespace().nth(5).unwrap_or(Self::ANONYMOUS);
                *names.entry(name.to_owned()).or_default() += 1;
            }
        }
        names
    }

    /// Context switches of each thread since it started, by thread.
    pub fn context_switches(&self) -> io::Result<BTreeMap<String, u64>> {
        let mut threads = BTreeMap::new();
        for task in self.entries("task") {
            let text = std::fs::read_to_string(task.path().join("status"))?;
            let counts = text.lines().filter_map(|line| line.split_once(':'));
            let sum = counts
                .filter(|(key, _)| key.ends_with("ctxt_switches"))
                .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
                .sum();
            threads.insert(task.file_name().to_string_lossy().into_owned(), sum);
        }
        Ok(threads)
    }

    /// Processor time of the engine's workers, in seconds.
    ///
    /// The scheduler's own count (`/proc/PID/task/TID/schedstat`): exact, but as of the last tick
    /// while the thread runs, so that it should be read some hundred milliseconds apart.
    pub fn worker_cpu(&self) -> f64 {
        seconds(&self.pids(), |name| name.starts_with("vrdma-shard"))
    }

    /// Kills the process that was started, as the memory killer would.
    pub fn kill(&mut self) {
        self.killed = true;
        self.child.kill().expect("it is there");
        self.child.wait().expect("it ends");
    }

    fn end(&mut self) -> Result<(), String> {
        if self.killed {
            return Ok(());
        }
        if !self.alive() {
            return Err("the daemon ended on its own".into());
        }
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let asked = pid.is_some_and(|p| rustix::process::kill_process(p, Signal::TERM).is_ok());
        // Its processes end together, each when the kernel has waited for RCU (fs/aio.c, exit_aio):
        // seconds, where the kernel's own threads get little time.
        let deadline = Instant::now() + Duration::from_secs(30);
        let late = deadline - Duration::from_secs(20);
        let mut stacks = String::new();
        while asked && self.alive() {
            if stacks.is_empty() && Instant::now() > late {
                stacks = self::stacks(self.child.id());
            }
            if Instant::now() > deadline {
                return Err(format!("the daemon does not end when asked; it is at\n{stacks}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let log = self.log();
        if log.contains("panicked at") {
            return Err("the daemon panicked".into());
        }
        Ok(())
    }
}

/// Where the threads of a process and of its children are, as far as this machine tells: by gdb
/// where there is one, else by the kernel.
fn stacks(pid: u32) -> String {
    let tasks =
        |pid: &str| std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let read = |task: &Path, what| std::fs::read_to_string(task.join(what)).unwrap_or_default();
    let of = |pid: &str| {
        let gdb = Command::new("gdb")
            .args(["-p", pid, "-batch", "-nx", "-ex", "thread apply all bt 14"])
            .stdin(Stdio::null())
            .output();
        let told = gdb.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let threads = || {
            let waits =
                |task: &Path| format!("{} in {}\n", read(task, "comm").trim(), read(task, "wchan"));
            tasks(pid).map(|task| waits(&task.path())).collect()
        };
        format!("process {pid}:\n{}", told.unwrap_or_else(|_| threads()))
    };
    // Each thread has children of its own.
    let pid = pid.to_string();
    let children: String = tasks(&pid).map(|task| read(&task.path(), "children")).collect();
    std::iter::once(&*pid).chain(children.split_whitespace()).map(of).collect()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let ended = self.end();
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
        if std::thread::panicking() {
            eprintln!("---- daemon log ({ended:?}) ----\n{}", self.log());
        } else if let Err(why) = ended {
            panic!("{why}; its log:\n{}", self.log());
        }
    }
}

/// Processor time of all threads of these processes, in seconds, as in [`Daemon::worker_cpu`]. What
/// a thread had that has ended is not in it.
pub fn processor_of(pids: &[u32]) -> f64 {
    seconds(pids, |_| true)
}

/// Processor time of the threads of these processes whose names are wanted.
fn seconds(pids: &[u32], wanted: impl Fn(&str) -> bool) -> f64 {
    let dirs = pids.iter().filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).ok());
    let of = |task: std::fs::DirEntry| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let nanos = || read("schedstat").split(' ').next().and_then(|n| n.parse::<u64>().ok());
        wanted(&read("comm")).then(nanos).flatten().unwrap_or(0)
    };
    dirs.flatten().flatten().map(of).sum::<u64>() as f64 / 1e9
}
