//! Guests with our NIC, driver and provider in them: what every scenario about our device begins
//! with.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::cache::Cache;
use crate::debug_kernel::{self, Kernel};
use crate::exec;
use crate::roots::{self, Debian, GuestImage};
use crate::rows;
use crate::vm::daemon::{self, Daemon};
use crate::vm::guest::{self, Guest};
use crate::vm::peers;
use crate::vm::{Lab, NAMES, Nic, Plan};

/// What every scenario with guests can be told.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct Options {
    /// Release of the guests
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    pub debian: Debian,
    /// vCPUs of each guest
    #[arg(long, default_value_t = 1)]
    pub cpus: u8,
    /// Only the programs, parts or steps whose name contains this
    #[arg(long)]
    pub only: Option<String>,
    /// Keep consoles and logs when done
    #[arg(long)]
    pub keep: bool,
    /// Write the rows here
    #[arg(long)]
    pub json: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { debian: Debian::default(), cpus: 1, only: None, keep: false, json: None }
    }
}

impl Options {
    pub(super) fn wish(&self, guests: usize) -> Wish {
        Wish { debian: self.debian, guests, cpus: self.cpus, keep: self.keep, ..Wish::default() }
    }

    pub(super) fn chosen(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    /// Writes the rows where they are wanted.
    pub(super) fn write<T: Serialize>(&self, table: &[T]) -> Result<()> {
        self.json.as_ref().map_or(Ok(()), |path| rows::write_json(path, table))
    }
}

/// What to start.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wish {
    pub(super) debian: Debian,
    pub(super) kernel: Kernel,
    pub(super) guests: usize,
    pub(super) cpus: u8,
    /// Consoles and logs stay when done.
    pub(super) keep: bool,
    /// What the daemon is built with.
    pub(super) features: &'static [&'static str],
    /// There is another build of the daemon, to upgrade to.
    pub(super) upgrades: bool,
}

/// A running daemon and the guests on it; the driver is not loaded yet.
#[derive(Debug)]
pub(super) struct Fixture {
    pub(super) daemon: Daemon,
    /// What the daemon was started from, and another build of it where there shall be one.
    pub(super) builds: Vec<PathBuf>,
    pub(super) lab: Lab,
    /// What was put into the guests; a new guest needs it again.
    pub(super) products: Vec<PathBuf>,
}

/// The name of guest `n`'s NIC, counted from 0.
pub(super) fn nic(n: usize) -> String {
    format!("vm{n}")
}

impl Fixture {
    pub(super) fn start(cache: &Cache, wish: Wish) -> Result<Self> {
        Self::start_as(cache, wish, |options| options)
    }

    /// The same with other options for machine and NIC than the daemon prints.
    pub(super) fn start_as(
        cache: &Cache,
        wish: Wish,
        change: impl Fn(Vec<String>) -> Vec<String>,
    ) -> Result<Self> {
        let mut lab = Lab::prepare(cache)?;
        if wish.keep {
            lab.run.keep();
            eprintln!("    consoles and logs stay in {}", lab.run.path().display());
        }
        // First the other: what stays in the target directory is today's.
        let another = wish.upgrades.then(|| daemon::build_another(cache, lab.run.path()));
        let another = another.transpose()?;
        let binary = daemon::build_with(cache, wish.features)?;
        let (products, image) = parts(cache, wish)?;
        let daemon = Daemon::start(&binary, lab.run.path())?;
        daemon.cli(&["network", "add", "red"])?;
        let mut nics = Vec::new();
        for n in 0..wish.guests {
            daemon.add_nic(&nic(n), "red", u8::try_from(n + 1)?)?;
            let here = guest::cable(lab.run.path(), NAMES[n]);
            // A lone guest's cable leads nowhere.
            let there = guest::cable(lab.run.path(), NAMES[n ^ 1]);
            nics.push(Nic::Options(change(daemon.qemu_args(&nic(n), &here, &there)?)));
        }
        lab.boot(&Plan { image, cpus: wish.cpus, nics })?;
        lab.deliver(&products)?;
        let builds = [Some(binary), another].into_iter().flatten().collect();
        Ok(Self { daemon, builds, lab, products })
    }

    /// Loads the driver everywhere; the device of each guest and the index of its IPv4 GID.
    pub(super) fn attach(&mut self) -> Result<Vec<(String, String)>> {
        self.lab.guests.iter_mut().map(peers::attach_ours_to).collect()
    }

    /// Puts the build that the daemon does not run in its place: `turn` counts these.
    pub(super) fn install_other(&self, turn: usize) -> Result<()> {
        ensure!(self.builds.len() == 2, "there is no other build of the daemon");
        self.daemon.install(&self.builds[(turn + 1) % self.builds.len()])
    }

    /// False if a guest's kernel complained, the daemon is gone, or a process of it is outside of
    /// its sandbox; says which.
    pub(super) fn clean(&mut self) -> bool {
        let mut clean = true;
        for guest in &mut self.lab.guests {
            clean &= kernel_leaks_nothing(guest);
            clean &= kernel_is_clean(guest);
        }
        if let Err(e) = self.daemon.check_alive().and_then(|()| self.daemon.check_sandbox()) {
            eprintln!("{e:#}");
            clean = false;
        }
        clean
    }
}

/// What goes into the guests, and what they boot.
fn parts(cache: &Cache, wish: Wish) -> Result<(Vec<PathBuf>, GuestImage)> {
    match wish.kernel {
        Kernel::Release => {
            let products = crate::products::for_guest(cache, wish.debian)?;
            Ok((products, roots::guest(cache, wish.debian)?))
        }
        Kernel::Debug => {
            ensure!(wish.debian == Debian::Trixie, "the debug kernel is Debian 13's");
            let products = crate::products::for_debug_kernel(cache)?;
            let image = debug_kernel::guest(cache)?;
            exec::be_patient(debug_kernel::PATIENCE);
            Ok((products, image))
        }
    }
}

/// What kmemleak finds: nothing where the kernel has none. An object is suspected only when it is
/// some seconds old and a second look finds no pointer to it either.
///
/// Tasks and their credentials do not count. The verbs core loses the task of whoever opens a
/// device when the driver cannot make the context: UVERBS_METHOD_GET_CONTEXT frees it without
/// rdma_restrack_put() (drivers/infiniband/core/uverbs_std_types_device.c, 6.12 and later),
/// whatever the device is. Our driver takes no reference to a task.
const LEAKS: &str = "
leaks=/sys/kernel/debug/kmemleak
mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
[ -e $leaks ] || exit 0
for turn in 1 2; do sleep 6; echo scan > $leaks; done
awk 'BEGIN { RS = \"unreferenced object \" }
  NR > 1 && !/copy_process[+]|prepare_creds[+]/ { print \"unreferenced object \" $0 }' $leaks
";

/// A leak of anything in a guest whose kernel looks for them fails the run.
pub(super) fn kernel_leaks_nothing(guest: &mut Guest) -> bool {
    match guest.run(LEAKS, Duration::from_secs(120)) {
        Ok(out) if out.ok() && out.text.trim().is_empty() => true,
        Ok(out) => {
            eprintln!("the kernel of guest {} leaks ({:?}):\n{}", guest.name, out.status, out.text);
            false
        }
        Err(e) => {
            eprintln!("the kernel of guest {} cannot be asked for leaks: {e:#}", guest.name);
            false
        }
    }
}

/// What a kernel says when something is wrong with it, for `grep -E`; lockdep's reports begin with
/// `WARNING:` or `BUG:`, KASAN's with `BUG:`.
const COMPLAINTS: &str = "WARNING:|BUG:|Oops|Call Trace|UBSAN|ODEBUG|INFO: |\
hung_task|blocked for more|DEBUG_LOCKS_WARN";

/// Leaves out what the kernel says when a cgroup has all the memory that it may have: a test has it
/// do that.
const LIMITS_AT_WORK: &str = r#"awk '/invoked oom-killer/ { hold = 1 }
hold { said = said $0 "\n" }
hold && /Memory cgroup out of memory/ { hold = 0; said = ""; next }
hold && /Out of memory/ { printf "%s", said; hold = 0; said = ""; next }
!hold { print }
END { printf "%s", said }'"#;

/// A warning or oops in a guest's kernel fails the run, whatever the programs said.
pub(super) fn kernel_is_clean(guest: &mut Guest) -> bool {
    let script = format!("dmesg | {LIMITS_AT_WORK} | grep -nE -A40 '{COMPLAINTS}' | head -150");
    let found = guest.run(&script, Duration::from_secs(30));
    match found {
        Ok(out) if out.text.trim().is_empty() => true,
        Ok(out) => {
            eprintln!("the kernel of guest {} complained:\n{}", guest.name, out.text);
            false
        }
        Err(e) => {
            eprintln!("the kernel log of guest {} cannot be read: {e:#}", guest.name);
            false
        }
    }
}
