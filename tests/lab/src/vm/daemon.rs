//! Our daemon, built from the workspace and started beside the guests.
//!
//! The harness talks to it as a user does, through the command line, and believes its counters only
//! as differences around a program.

use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use crate::cache::Cache;
use crate::exec::{self, capture, run_logged, tail, tied, workspace};
use crate::vm::guest;

const BUILD_WAIT: Duration = Duration::from_secs(900);
const CLI_WAIT: Duration = Duration::from_secs(20);
/// How long a process that has just begun may take to shut itself in.
const SEAL_WAIT: Duration = Duration::from_secs(10);

/// The part of a NIC's counters that a program's claim is held against.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Counters {
    pub(crate) tx_bytes: u64,
    pub(crate) rx_bytes: u64,
    pub(crate) tx_messages: u64,
    pub(crate) rx_messages: u64,
}

impl Counters {
    pub(crate) fn bytes(&self) -> u64 {
        self.tx_bytes + self.rx_bytes
    }

    pub(crate) fn messages(&self) -> u64 {
        self.tx_messages + self.rx_messages
    }

    /// What was added since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            tx_bytes: self.tx_bytes.saturating_sub(before.tx_bytes),
            rx_bytes: self.rx_bytes.saturating_sub(before.rx_bytes),
            tx_messages: self.tx_messages.saturating_sub(before.tx_messages),
            rx_messages: self.rx_messages.saturating_sub(before.rx_messages),
        }
    }
}

/// What a guest holds in the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Objects {
    pub(crate) contexts: u32,
    pub(crate) pds: u32,
    pub(crate) mrs: u32,
    pub(crate) mr_bytes: u64,
    pub(crate) cqs: u32,
    pub(crate) srqs: u32,
    pub(crate) qps: u32,
    pub(crate) ahs: u32,
}

/// The part of `nic show` that the lab looks at.
#[derive(Debug, Deserialize)]
pub(crate) struct NicView {
    pub(crate) counters: Counters,
    pub(crate) objects: Objects,
    pub(crate) session: String,
    /// The addresses that its driver has set.
    pub(crate) gids: Vec<IpAddr>,
    pub(crate) error: Option<String>,
}

/// The program that it runs from, beside its directory.
const PROGRAM: &str = "vhost-rdma";

#[derive(Debug)]
pub(crate) struct Daemon {
    /// The daemon, or the parent that keeps it.
    child: Child,
    kept: bool,
    binary: PathBuf,
    dir: PathBuf,
}

/// `cargo build --release -p vhost-rdma`; the path of the program.
pub(crate) fn build(cache: &Cache) -> Result<PathBuf> {
    build_with(cache, &[])
}

/// Another build, left in a run's directory: a device with one feature more than there are.
pub(crate) fn build_another(cache: &Cache, run: &Path) -> Result<PathBuf> {
    let another = run.join("vhost-rdma.another");
    std::fs::copy(build_with(cache, &["later-device"])?, &another)?;
    Ok(another)
}

/// The same with features.
pub(crate) fn build_with(cache: &Cache, features: &[&str]) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cmd = tied(cargo);
    cmd.current_dir(workspace()).args(["build", "--release", "--locked", "-p", "vhost-rdma"]);
    cmd.arg("--features").arg(features.join(","));
    run_logged(&mut cmd, "building the daemon", &cache.log("daemon-build"), BUILD_WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    let binary = target.join("release/vhost-rdma");
    binary.canonicalize().with_context(|| format!("cargo left no {}", binary.display()))
}

/// Puts `program` at `own`: of one that was killed a process may still be there, and what it runs
/// cannot be written.
fn install(program: &Path, own: &Path) -> Result<()> {
    let new = own.with_extension("new");
    std::fs::copy(program, &new)?;
    Ok(std::fs::rename(&new, own)?)
}

impl Daemon {
    pub(crate) fn start(binary: &Path, run: &Path) -> Result<Self> {
        Self::start_as(binary, run, false)
    }

    /// With a parent that keeps its sessions, or without one.
    fn start_as(binary: &Path, run: &Path, kept: bool) -> Result<Self> {
        let dir = run.join("d");
        std::fs::create_dir_all(&dir)?;
        // One that follows another in the same run writes after it.
        let log = File::options().create(true).append(true).open(run.join("daemon.log"))?;
        let own = dir.with_file_name(PROGRAM);
        install(binary, &own)?;
        let child = tied(own)
            .args(if kept { &["keep", "--", "serve"][..] } else { &["serve"] })
            .arg("--runtime-dir")
            .arg(&dir)
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn();
        let child = child.with_context(|| format!("cannot start {}", binary.display()))?;
        let mut daemon = Self { child, kept, binary: binary.to_path_buf(), dir };
        exec::wait_for("the daemon's admin socket", CLI_WAIT, || {
            daemon.check_alive()?;
            Ok(std::os::unix::net::UnixStream::connect(daemon.admin()).ok())
        })?;
        Ok(daemon)
    }

    /// Puts a program in the place of that which it was started from.
    pub(crate) fn install(&self, program: &Path) -> Result<()> {
        install(program, &self.dir.with_file_name(PROGRAM))
    }

    fn admin(&self) -> PathBuf {
        self.dir.join("admin.sock")
    }

    fn log(&self) -> PathBuf {
        self.dir.with_file_name("daemon.log")
    }

    pub(crate) fn log_tail(&self, lines: usize) -> String {
        tail(&self.log(), 0, lines)
    }

    pub(crate) fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon ended: {status}\n{}", self.log_tail(25));
        }
        Ok(())
    }

    /// While there are NICs a process serves them, and each such process is in its sandbox.
    pub(crate) fn check_sandbox(&self) -> Result<()> {
        let nics = self.cli(&["nic", "list", "--json"])?;
        if serde_json::from_str::<Vec<serde_json::Value>>(&nics)?.is_empty() {
            return Ok(());
        }
        let inside = || self.outside().is_ok_and(|outside| outside.is_empty());
        exec::wait_for("network processes in a sandbox", SEAL_WAIT, || Ok(inside().then_some(())))
            .with_context(|| match self.outside() {
                Ok(networks) => format!("not in a sandbox: the process of {}", networks.join(", ")),
                Err(error) => error.to_string(),
            })
    }

    /// The networks whose process is not in its sandbox; an error if there is no process.
    fn outside(&self) -> Result<Vec<String>> {
        let serving = self.network_processes()?;
        ensure!(!serving.is_empty(), "no process serves a network");
        let is_outside = |(_, pid): &(String, Pid)| {
            let path = format!("/proc/{}/status", pid.as_raw_nonzero());
            // One that has ended meanwhile does no harm.
            std::fs::read_to_string(path).is_ok_and(|status| !is_shut_in(&status))
        };
        Ok(serving.into_iter().filter(is_outside).map(|(network, _)| network).collect())
    }

    /// SIGKILL: no destructor runs, nothing is said to anyone.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// A daemon in the place of one that is gone, with the NICs that it had.
    pub(crate) fn replace(&mut self) -> Result<()> {
        self.replace_by(false)
    }

    /// The same with a parent that keeps its sessions.
    pub(crate) fn replace_by_kept(&mut self) -> Result<()> {
        self.replace_by(true)
    }

    fn replace_by(&mut self, kept: bool) -> Result<()> {
        let run = self.dir.parent().context("the daemon's directory has no parent")?.to_path_buf();
        *self = Self::start_as(&self.binary, &run, kept)?;
        Ok(())
    }

    /// SIGKILL for the supervisor alone, whose parent has kept what it had; waits for the next one.
    pub(crate) fn kill_supervisor(&self) -> Result<()> {
        let old = self.supervisor()?;
        let pid = i32::try_from(old).ok().and_then(Pid::from_raw);
        kill_process(pid.context("the supervisor has no process id")?, Signal::KILL)?;
        exec::wait_for("another supervisor", CLI_WAIT, || {
            let is_new = self.supervisor().is_ok_and(|pid| pid != old);
            Ok((is_new && self.cli(&["status"]).is_ok()).then_some(()))
        })
    }

    /// The process that is the daemon.
    fn supervisor(&self) -> Result<u32> {
        if !self.kept {
            return Ok(self.child.id());
        }
        let parent = self.child.id().to_string();
        let own = capture(Command::new("pgrep").args(["-P", &parent]), CLI_WAIT)?;
        own.trim().parse().with_context(|| format!("the children of the parent are {own:?}"))
    }

    /// SIGSTOP or SIGCONT: a daemon that hangs, and no longer does.
    pub(crate) fn hang(&self, hang: bool) -> Result<()> {
        let signal = if hang { Signal::STOP } else { Signal::CONT };
        for pid in self.processes()? {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            kill_process(pid.context("the daemon has no process id")?, signal)?;
        }
        Ok(())
    }

    /// The daemon, and those of its processes that serve a network each.
    pub(crate) fn processes(&self) -> Result<Vec<u32>> {
        let parent = self.supervisor()?.to_string();
        let own = capture(Command::new("pgrep").args(["-P", &parent]), CLI_WAIT)?;
        let pids = std::iter::once(parent.as_str()).chain(own.split_whitespace());
        Ok(pids.filter_map(|pid| pid.parse().ok()).collect())
    }

    /// SIGKILL for the process that serves a network.
    pub(crate) fn kill_network(&self, network: &str) -> Result<()> {
        let pid = self.network_process(network)?;
        let pid = pid.with_context(|| format!("no process serves {network}"))?;
        kill_process(pid, Signal::KILL)?;
        Ok(())
    }

    fn network_process(&self, network: &str) -> Result<Option<Pid>> {
        let found = self.network_processes()?.into_iter().find(|(name, _)| name == network);
        Ok(found.map(|(_, pid)| pid))
    }

    /// The processes that serve a network each, and which.
    fn network_processes(&self) -> Result<Vec<(String, Pid)>> {
        let serves = |pid: u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            let mut words = line.trim_end_matches('\0').rsplit('\0');
            let network = words.next()?.to_owned();
            let is_one = words.next() == Some("network-process");
            Some((network, Pid::from_raw(pid.cast_signed())?)).filter(|_| is_one)
        };
        Ok(self.processes()?.into_iter().filter_map(serves).collect())
    }

    /// Where a NIC's VMM connects.
    pub(crate) fn socket(&self, nic: &str) -> PathBuf {
        self.dir.join("nics").join(nic).join("vhost.sock")
    }

    /// One command of the daemon's own command line.
    pub(crate) fn cli(&self, args: &[&str]) -> Result<String> {
        capture(Command::new(&self.binary).arg("--socket").arg(self.admin()).args(args), CLI_WAIT)
    }

    /// A NIC for guest `number`.
    pub(crate) fn add_nic(&self, name: &str, network: &str, number: u8) -> Result<()> {
        self.cli(&["nic", "add", name, "--network", network, "--mac", &guest::mac(number)])
            .map(|_| ())
    }

    /// The QEMU options that the daemon tells its users to take, with a network cable between two
    /// sockets.
    pub(crate) fn qemu_args(&self, name: &str, here: &Path, there: &Path) -> Result<Vec<String>> {
        let netdev = format!("dgram:{},{}", here.display(), there.display());
        let memory = format!("{}M", crate::vm::MEMORY_MIB);
        let text = self.cli(&[
            "nic",
            "qemu-args",
            name,
            "--netdev",
            &netdev,
            "--memory",
            &memory,
            "--json",
        ])?;
        serde_json::from_str(&text).with_context(|| {
            format!("`nic qemu-args {name} --json` is not a list of options:\n{text}")
        })
    }

    /// What the daemon says of a NIC.
    pub(crate) fn nic(&self, name: &str) -> Result<NicView> {
        let text = self.cli(&["nic", "show", name, "--json"])?;
        serde_json::from_str(&text)
            .with_context(|| format!("`nic show {name} --json` is not what it should be:\n{text}"))
    }

    pub(crate) fn counters(&self, name: &str) -> Result<Counters> {
        Ok(self.nic(name)?.counters)
    }
}

/// Whether a process, by its `/proc/PID/status`, has no capability, and a filter for its calls.
fn is_shut_in(status: &str) -> bool {
    let says = |key: &str, value: u64| {
        let said = status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        said.is_some_and(|said| u64::from_str_radix(said, 16) == Ok(value))
    };
    says("CapEff:", 0) && says("Seccomp:", 2)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        exec::end_group(&mut self.child, Duration::from_secs(3));
    }
}

#[cfg(test)]
mod tests {
    use super::is_shut_in;

    #[test]
    fn who_has_a_capability_or_no_filter_is_outside() {
        let status = |caps: &str, seccomp: u8| {
            format!("Name:\tvhost-rdma\nCapEff:\t{caps}\nSeccomp:\t{seccomp}\n")
        };
        assert!(is_shut_in(&status("0000000000000000", 2)));
        assert!(!is_shut_in(&status("0000000000001000", 2)));
        assert!(!is_shut_in(&status("0000000000000000", 0)));
        assert!(!is_shut_in("Name:\tvhost-rdma\n"));
    }
}
