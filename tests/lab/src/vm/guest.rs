//! One QEMU guest: boot it, run commands in it, take their output, end it.
//!
//! QEMU runs in a chroot (the lab needs a newer QEMU than the host has) and in a mount namespace of
//! its own. The run directory is bound into the chroot *under the same path*, so that socket paths
//! mean the same to the daemon and to QEMU; no mount outlives the process.
//!
//! Commands go through a 9p share as files and are started by one line on the second serial port;
//! see the guest's init in `roots`.

pub(super) mod machine;

use std::collections::HashMap;
use std::fs;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::exec::{self, tail, tied_private_mounts};
use crate::roots::GuestImage;
use crate::vm::qmp::Qmp;

/// From QEMU's start to our init: 4-7 s alone, minutes on a host that is busy with twenty other
/// things.
const BOOT_WAIT: Duration = Duration::from_secs(300);
const QUIT_WAIT: Duration = Duration::from_secs(1);

/// QEMU's 9p server creates files through `/proc/self/fd`, so the chroot has a proc. In the mount
/// namespace: `$1` root, `$2` run directory, `$3` image directory, then directories, each with its
/// place, up to `--`, then QEMU.
const ENTER: &str = r#"
root=$1 run=$2 image=$3; shift 3
mount -t tmpfs tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mkdir -p "$root$run"; mount --bind "$run" "$root$run"
mount --bind "$image" "$root/mnt"
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done
shift
exec chroot "$root" "$@"
"#;

/// What a guest is made of.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) name: String,
    /// Last octet of 10.9.0.x and of the MAC address.
    pub(crate) number: u8,
    pub(crate) cpus: u8,
    pub(crate) memory_mib: u32,
    pub(crate) image: GuestImage,
    /// Socket of a vhost-user backend for our device.
    pub(crate) vhost_socket: Option<PathBuf>,
    /// Name of the guest at the other end of the network cable.
    pub(crate) peer: Option<String>,
    /// Options for machine, memory, RDMA device and netdev as `vhost-rdma nic qemu-args` prints
    /// them, in place of ours.
    pub(crate) nic_args: Vec<String>,
    /// For the kernel's command line, behind the lab's own words.
    pub(crate) words: String,
    /// It starts guests of its own: it gets what they are made of, see `nested`.
    pub(crate) hosts: bool,
    /// Directories of this machine that it has as read-only shares `d0`, `d1`, ….
    pub(crate) directories: Vec<PathBuf>,
    /// QEMU runs in the network namespace of this process: what its user-mode network reaches.
    pub(crate) network_of: Option<u32>,
}

impl Spec {
    pub(crate) fn mac(&self) -> String {
        mac(self.number)
    }
}

/// The MAC address of guest `number`'s network card and of its RDMA NIC.
pub(crate) fn mac(number: u8) -> String {
    format!("52:54:00:00:00:{number:02x}")
}

/// A command that was started in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Job(u32);

/// What became of a command.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    /// Exit status; `None` if it was killed at its deadline.
    pub(crate) status: Option<i32>,
    pub(crate) text: String,
}

impl Output {
    pub(crate) fn ok(&self) -> bool {
        self.status == Some(0)
    }
}

#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) name: String,
    machine: Machine,
    share: PathBuf,
    console: PathBuf,
    qemu_log: PathBuf,
    monitor: PathBuf,
    pending: Vec<u8>,
    ready: bool,
    next: u32,
    done: HashMap<u32, i32>,
}

/// The places of what belongs to a guest in the run directory.
struct Files {
    share: PathBuf,
    console: PathBuf,
    agent: PathBuf,
    monitor: PathBuf,
    log: PathBuf,
}

impl Files {
    /// Also makes the share.
    fn new(run: &Path, name: &str) -> Result<Self> {
        let place = |what: &str| run.join(format!("{name}.{what}"));
        let share = place("share");
        fs::create_dir_all(share.join("cmd"))?;
        let (console, agent, log) = (place("console"), place("agent"), place("qemu"));
        Ok(Self { share, console, agent, monitor: monitor(run, name), log })
    }
}

/// A guest of libvirt: what runs it in the foreground.
#[derive(Debug)]
pub(crate) struct Domain<'a> {
    pub(crate) name: &'a str,
    pub(crate) command: Command,
}

/// Where a guest's QEMU runs, and how its agent is spoken to.
#[derive(Debug)]
enum Machine {
    /// A child of ours and its socket.
    Child { qemu: Child, agent: UnixStream },
    /// In another guest, whose share carries the two files that stand for the agent's line; how
    /// much of the answers has been read.
    Inner { orders: PathBuf, answers: PathBuf, read: u64 },
}

impl Guest {
    /// Starts QEMU and returns while the guest boots.
    pub(crate) fn start(qemu_root: &Path, run: &Path, spec: &Spec) -> Result<Self> {
        let files = Files::new(run, &spec.name)?;
        let mut cmd = tied_private_mounts("nsenter");
        let own = std::process::id();
        cmd.arg(format!("--net=/proc/{}/ns/net", spec.network_of.unwrap_or(own)));
        cmd.args(["sh", "-ec", ENTER, "sh"]).arg(qemu_root).arg(run).arg(&spec.image.dir);
        if let Some(dir) = spec.vhost_socket.as_deref().and_then(Path::parent)
            && !dir.starts_with(run)
        {
            cmd.args([dir, dir]);
        }
        for (n, directory) in spec.directories.iter().enumerate() {
            cmd.arg(directory).arg(shared(n));
        }
        cmd.args(["--", "qemu-system-x86_64"]).args(machine::qemu_args(run, spec, &files));
        Self::spawned(cmd, &spec.name, files)
    }

    /// A guest that libvirt runs, with the lab's console, agent and share at their places; see
    /// `clients/libvirt`.
    pub(crate) fn of_libvirt(run: &Path, domain: Domain) -> Result<Self> {
        Self::spawned(domain.command, domain.name, Files::new(run, domain.name)?)
    }

    /// Starts what runs the machine, and waits for its agent's socket.
    fn spawned(mut cmd: Command, name: &str, files: Files) -> Result<Self> {
        let log = fs::File::create(&files.log)?;
        let mut qemu = cmd
            .stdout(log.try_clone()?)
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start QEMU")?;
        // Nothing the guest says is lost: it needs seconds to get so far, and we connect within
        // milliseconds of the socket's birth.
        let agent = exec::wait_for("QEMU's agent socket", Duration::from_secs(60), || {
            if let Some(status) = qemu.try_wait()? {
                bail!("QEMU of guest {name} ended at once: {status}\n{}", tail(&files.log, 0, 20));
            }
            Ok(UnixStream::connect(&files.agent).ok())
        });
        let agent = match agent {
            Ok(agent) => agent,
            Err(e) => {
                exec::end_group(&mut qemu, QUIT_WAIT);
                return Err(e.context(tail(&files.log, 0, 20)));
            }
        };
        agent.set_nonblocking(true)?;
        Ok(Self {
            name: name.to_owned(),
            machine: Machine::Child { qemu, agent },
            share: files.share,
            console: files.console,
            qemu_log: files.log,
            monitor: files.monitor,
            pending: Vec::new(),
            ready: false,
            next: 0,
            done: HashMap::new(),
        })
    }

    /// A guest whose QEMU was started in another one, with `share` as its share; see `nested`.
    pub(super) fn inner(name: &str, share: &Path) -> Self {
        let place = |file: &str| share.join(file);
        let (orders, answers) = (place("orders"), place("answers"));
        Self {
            name: name.to_owned(),
            machine: Machine::Inner { orders, answers, read: 0 },
            share: share.to_path_buf(),
            console: place("console"),
            qemu_log: place("qemu.log"),
            monitor: place("no-monitor"),
            pending: Vec::new(),
            ready: false,
            next: 0,
            done: HashMap::new(),
        }
    }

    /// Waits until the guest takes commands.
    pub(crate) fn wait_ready(&mut self) -> Result<()> {
        self.wait_ready_for(BOOT_WAIT)
    }

    /// The same with a patience of the caller's.
    pub(crate) fn wait_ready_for(&mut self, patience: Duration) -> Result<()> {
        let mut progress = exec::Progress::new(format!("booting guest {}", self.name));
        let what = format!("guest {} to boot", self.name);
        let result = exec::wait_for(&what, patience, || {
            progress.tick();
            self.poll()?;
            Ok(self.ready.then_some(()))
        });
        match result {
            Ok(()) => {
                progress.done("up");
                Ok(())
            }
            Err(e) => {
                progress.done("FAILED");
                Err(e.context(format!("the end of its console:\n{}", self.console_tail(25))))
            }
        }
    }

    /// The directory that the guest has as `/host`.
    pub(crate) fn share(&self) -> &Path {
        &self.share
    }

    /// Puts files into the guest's `/host/products`.
    pub(crate) fn deliver(&self, files: &[PathBuf]) -> Result<()> {
        let to = self.share.join("products");
        fs::create_dir_all(&to)?;
        for file in files {
            let name =
                file.file_name().with_context(|| format!("{} is no file", file.display()))?;
            fs::copy(file, to.join(name))
                .with_context(|| format!("cannot copy {}", file.display()))?;
        }
        Ok(())
    }

    /// Its QEMU, if that is a process of this machine.
    pub(crate) fn process(&self) -> Option<u32> {
        match &self.machine {
            Machine::Child { qemu, .. } => Some(qemu.id()),
            Machine::Inner { .. } => None,
        }
    }

    /// A connection to QEMU's monitor, which takes one at a time.
    pub(crate) fn monitor(&self) -> Result<Qmp> {
        Qmp::connect(&self.monitor)
    }

    /// The last lines of the guest's console.
    pub(crate) fn console_tail(&self, lines: usize) -> String {
        tail(&self.console, 0, lines)
    }

    /// The last lines of what the monitor itself said.
    pub(crate) fn monitor_tail(&self, lines: usize) -> String {
        tail(&self.qemu_log, 0, lines)
    }

    /// Starts a shell script in the guest.
    pub(crate) fn spawn(&mut self, script: &str) -> Result<Job> {
        let id = self.next;
        self.next += 1;
        fs::write(self.share.join(format!("cmd/{id}.sh")), script)?;
        self.tell(&format!("run {id}\n"))?;
        Ok(Job(id))
    }

    /// The exit status of a job, if it has ended.
    pub(crate) fn finished(&mut self, job: Job) -> Result<Option<i32>> {
        self.poll()?;
        Ok(self.done.get(&job.0).copied())
    }

    /// What a job has written so far.
    pub(crate) fn output(&self, job: Job) -> String {
        let bytes = fs::read(self.share.join(format!("cmd/{}.out", job.0))).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for a job; kills its process group at the deadline.
    pub(crate) fn wait(&mut self, job: Job, timeout: Duration) -> Result<Output> {
        let what = format!("a command in guest {}", self.name);
        let status = exec::wait_for(&what, timeout, || self.finished(job));
        exec::check_interrupt()?;
        match status {
            Ok(status) => Ok(Output { status: Some(status), text: self.output(job) }),
            Err(e) => {
                self.check_alive().with_context(|| format!("{e:#}"))?;
                self.kill(job)?;
                Ok(Output { status: None, text: self.output(job) })
            }
        }
    }

    /// Runs a shell script to its end.
    pub(crate) fn run(&mut self, script: &str, timeout: Duration) -> Result<Output> {
        let job = self.spawn(script)?;
        self.wait(job, timeout)
    }

    /// Runs a shell script that must succeed.
    pub(crate) fn must(&mut self, script: &str, timeout: Duration) -> Result<String> {
        let out = self.run(script, timeout)?;
        if !out.ok() {
            let how = out.status.map_or_else(
                || format!("no end within {} s", timeout.as_secs()),
                |s| format!("exit status {s}"),
            );
            bail!(
                "in guest {}: {how} from\n{script}\n{}\nthe end of its console:\n{}",
                self.name,
                out.text.trim_end(),
                self.console_tail(15)
            );
        }
        Ok(out.text)
    }

    /// Kills a job's process group and waits for its end.
    pub(crate) fn kill(&mut self, job: Job) -> Result<()> {
        self.tell(&format!("kill {}\n", job.0))?;
        let what = format!("a killed command in guest {} to go away", self.name);
        let gone = exec::wait_for(&what, Duration::from_secs(20), || self.finished(job));
        gone.map(|_| ()).with_context(|| {
            // A process that SIGKILL does not end sits in the kernel: say where.
            let look = "for p in /proc/[0-9]*; do grep -q . $p/cmdline || continue; \
                        echo \"${p#/proc/} $(tr '\\0' ' ' < $p/cmdline): $(grep State \
                        $p/status)\"; cat $p/stack; done";
            let seen = self.spawn(look).and_then(|look| {
                exec::wait_for("a list of processes", Duration::from_secs(10), || {
                    self.finished(look)
                })?;
                Ok(self.output(look))
            });
            format!(
                "{}\nthe end of its console:\n{}",
                seen.unwrap_or_else(|e| format!("{e:#}")),
                self.console_tail(15)
            )
        })
    }

    /// SIGKILL to QEMU: what a host does to a VM at its worst moment. An inner guest's QEMU ends
    /// with its host.
    pub(crate) fn crash(&mut self) {
        if let Machine::Child { qemu, .. } = &mut self.machine {
            exec::end_group(qemu, Duration::ZERO);
        }
    }

    /// Resets the machine under its running kernel and waits for it to come up again.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.ready = false;
        // By its monitor: not every kernel has the key that resets it.
        self.monitor()?.execute("system_reset", &json!({}))?;
        self.wait_ready()
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        let told = match &mut self.machine {
            Machine::Child { agent, .. } => agent.write_all(line.as_bytes()),
            Machine::Inner { orders, .. } => fs::File::options()
                .append(true)
                .open(orders)
                .and_then(|mut file| file.write_all(line.as_bytes())),
        };
        told.with_context(|| format!("guest {} does not listen", self.name))
    }

    fn check_alive(&mut self) -> Result<()> {
        if let Machine::Child { qemu, .. } = &mut self.machine
            && let Some(status) = qemu.try_wait()?
        {
            return self.ended(&status.to_string());
        }
        Ok(())
    }

    fn ended(&self, status: &str) -> Result<()> {
        bail!(
            "QEMU of guest {} ended: {status}\n{}the end of the console:\n{}",
            self.name,
            tail(&self.qemu_log, 0, 20),
            self.console_tail(15)
        );
    }

    /// Takes what the agent has said.
    fn listen(&mut self) -> Result<()> {
        let (qemu, agent) = match &mut self.machine {
            Machine::Child { qemu, agent } => (qemu, agent),
            Machine::Inner { answers, read, .. } => {
                let Ok(mut file) = fs::File::open(answers) else { return Ok(()) };
                file.seek(SeekFrom::Start(*read))?;
                *read += u64::try_from(file.read_to_end(&mut self.pending)?)?;
                return Ok(());
            }
        };
        let mut buf = [0; 4096];
        loop {
            match agent.read(&mut buf) {
                Ok(0) => {
                    let _ = exec::wait(qemu, Duration::from_secs(2), || {});
                    self.check_alive()?;
                    bail!("guest {} closed its agent channel", self.name);
                }
                Ok(n) => self.pending.extend_from_slice(buf.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // A QEMU that ends resets the connection if it leaves something unread.
                Err(e) => {
                    let _ = exec::wait(qemu, Duration::from_secs(2), || {});
                    self.check_alive()?;
                    return Err(e.into());
                }
            }
        }
    }

    fn poll(&mut self) -> Result<()> {
        self.listen()?;
        while let Some(end) = self.pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let mut words = line.split_whitespace();
            match (
                words.next(),
                words.next().and_then(|w| w.parse().ok()),
                words.next().and_then(|w| w.parse().ok()),
            ) {
                (Some("ready"), ..) => self.ready = true,
                // What the shell says that started an inner guest's QEMU.
                (Some("gone"), Some(status), _) => self.ended(&format!("exit status {status}"))?,
                (Some("done"), Some(id), Some(status)) => {
                    self.done.insert(id, status);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Machine::Child { qemu, .. } = &mut self.machine {
            exec::end_group(qemu, QUIT_WAIT);
        }
    }
}

/// Where QEMU has directory `n` of this machine, in its root's own `/tmp`.
fn shared(n: usize) -> String {
    format!("/tmp/d{n}")
}

/// The socket of a guest's end of the network cable.
pub(crate) fn cable(run: &Path, name: &str) -> PathBuf {
    run.join(format!("{name}.net"))
}

fn monitor(run: &Path, name: &str) -> PathBuf {
    run.join(format!("{name}.qmp"))
}
