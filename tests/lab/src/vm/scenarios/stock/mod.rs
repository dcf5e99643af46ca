//! The daemon on stock Debian 12 and 13: their kernels, and cgroups of version 2.
//!
//! Rows, and what is looked at:
//!
//! - `RELEASE: SUITE::TEST`: unit tests of the supervisor and the sandbox, the command line, and
//!   processes of networks: what depends on the host's kernel and cgroups
//! - `RELEASE: a program, by run`: a pingpong of the release's own programs, as nobody: what the
//!   README tries first
//! - `RELEASE: a program, beside a kernel's device`: the same libraries with rdma_rxe beside our
//!   NICs; see `beside`
//! - `RELEASE: two VMs: PROGRAM`: with `--nested`, and then alone: two VMs in the VM, RDMA between
//!   them; see `nested`
//! - `RELEASE: cargo xtask demo: ROW`: with `--xtask`, and then alone: the README's command, typed
//!   in the VM; see `readme`
//! - `RELEASE, a root: cargo xtask test: STEP`: with `--root`, and then alone: the README's second
//!   command, typed in a root of the release on this machine's kernel; see `root`
//!
//! A VM is the host here. Programs are built outside, since an emulated compiler would take hours.
//! A cluster of one node is started inside with `--xtask 'k8s test --brief'`, and only then.
//! Elsewhere it runs on the machine of the lab, which chooses the version of cgroups:
//! `tests/lab/src/k8s/cgroups.rs` takes both.

mod beside;
mod nested;
mod readme;
mod root;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::fixture::kernel_is_clean;
use super::run::copy_tree;
use crate::cache::Cache;
use crate::process::products::libraries;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::daemon;
use crate::vm::guest::Guest;
use crate::vm::suite::{self, Program, Suites};
use crate::vm::{Lab, Nic, Plan};

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// This release alone
    #[arg(long, value_enum)]
    debian: Option<Debian>,
    /// Only the rows whose name contains this, or one of these with commas between
    #[arg(long)]
    only: Option<String>,
    /// Two VMs in the VM instead, and RDMA between them
    #[arg(long)]
    nested: bool,
    /// The README's command in the VM instead, `cargo xtask demo`, or another one
    #[arg(long, value_name = "WORDS", num_args = 0..=1, default_missing_value = readme::DEMO)]
    xtask: Option<String>,
    /// A root of the release instead of a VM, on this machine's kernel, with a clone of what was
    /// committed: for the README's second command, `cargo xtask test`, or what `--xtask` says
    #[arg(long)]
    root: bool,
    /// With --root: make anew what is made once
    #[arg(long, requires = "root")]
    cold: bool,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

/// The stock releases that the README names.
const RELEASES: [Debian; 2] = [Debian::Bookworm, Debian::Trixie];
/// Packages whose tests are run, to cargo.
const TESTS: &[&str] = &["test", "-p", "vhost-rdma", "-p", "virtual-guest", "--no-run"];
/// Their programs, and the tests that depend on the host.
const WHAT: [(&str, &[&str]); 3] = [
    ("vhost_rdma", &["supervisor::", "sandbox::", "store::", "socket::", "network_process::"]),
    // But for `readme::`, which reads the source.
    ("cli", &["json::", "mistakes::", "peers::", "reload::", "run::", "running::", "vf::"]),
    ("processes", &[""]),
];
/// Not of the host: with guests and workers on the VM's one processor no worker is busy enough for
/// a NIC to move (`dataplane/balance.rs`, `BUSY`).
const TWO_PROCESSORS: &str =
    "processes::spread::busy_pairs_come_together_and_nothing_fails_meanwhile";
/// The program itself, as cargo's tests look for it.
const DAEMON: &str = "vhost-rdma";
const PROGRAM_END: Duration = Duration::from_secs(300);

/// Tests of the command line look for the program where it was built. There is no service manager.
const PRELUDE: &str = "mkdir -p @TARGET@ && ln -sf /tmp/vhost-rdma @TARGET@/vhost-rdma
export VHOST_RDMA_PATIENCE=8 VHOST_RDMA_DISK=/host VHOST_RDMA_WITHOUT=systemd";

/// Neither root nor configuration. The second program waits for the first one's port.
const BY_RUN: &str = "set -e
cp -u /host/products/vhost-rdma /tmp; cp -r /host/libraries /tmp; chmod -R a+rX /tmp/libraries
cat > /tmp/pingpong <<'END'
set -e
ibv_devinfo -d \"$(ibv_devices | awk 'NR > 2 { print $1; exit }')\" | grep -q PORT_ACTIVE
ibv_rc_pingpong -c -g 0 > /tmp/served 2>&1 &
n=0
until ibv_rc_pingpong -c -g 0 127.0.0.1; do n=$((n+1)); [ $n -lt 50 ]; sleep 0.2; done
wait $!
END
exec setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs env XDG_RUNTIME_DIR= \\
  VHOST_RDMA_LIBRARIES=/tmp/libraries /tmp/vhost-rdma run --nics 2 -- sh /tmp/pingpong
";

/// The programs of tests, and the daemon.
fn programs(cache: &Cache) -> Result<(Vec<Program>, PathBuf)> {
    let (mut tests, mut daemon) = (Vec::new(), None);
    for artifact in suite::build(cache, "tests of a stock system", &[TESTS])? {
        if artifact.name == DAEMON && artifact.kind == "bin" && !artifact.tests {
            daemon = Some(artifact.path);
        } else if artifact.tests && WHAT.iter().any(|(name, _)| *name == artifact.name) {
            tests.push(artifact.program()?);
        }
    }
    Ok((tests, daemon.context("cargo left no daemon")?))
}

/// Whether a test, by its full name, is of those that depend on the host.
fn is_of_the_host(test: &str) -> bool {
    let Some((suite, name)) = test.split_once("::") else { return false };
    let parts = WHAT.iter().find(|(program, _)| *program == suite).map(|(_, parts)| *parts);
    let is_part = parts.unwrap_or_default().iter().any(|part| name.starts_with(part));
    is_part && test != TWO_PROCESSORS
}

impl Args {
    /// The form with two VMs in the VM.
    pub fn with_two_vms() -> Self {
        Self { nested: true, ..Self::default() }
    }

    /// The form in which the README's command is typed in the VM.
    pub fn with_demo() -> Self {
        Self { xtask: Some(readme::DEMO.to_owned()), ..Self::default() }
    }

    /// The form in which the cluster's tests are typed in the VM.
    pub fn with_cluster() -> Self {
        Self { xtask: Some(readme::CLUSTER.to_owned()), ..Self::default() }
    }

    /// The form in which the README's test command is typed in a root of this release.
    pub fn in_a_root(debian: Debian) -> Self {
        Self { root: true, debian: Some(debian), ..Self::default() }
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut table = Vec::new();
        if self.root {
            self.in_roots(cache, &mut table)?;
        } else {
            self.in_vms(cache, &mut table)?;
        }
        rows::print_table(&table, "stock", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }

    fn in_vms(&self, cache: &Cache, table: &mut Vec<Row>) -> Result<()> {
        let mut lab = Lab::prepare(cache)?;
        if self.keep {
            lab.run.keep();
        }
        if let Some(words) = &self.xtask {
            self.command(words, &mut lab, table)
        } else if self.nested {
            self.hosts(&mut lab, table)
        } else {
            self.suites(&mut lab, table)
        }
    }

    fn releases(&self) -> impl Iterator<Item = Debian> + '_ {
        RELEASES.into_iter().filter(|one| self.debian.is_none_or(|d| d == *one))
    }

    /// One VM of each release after the other, with two in it.
    fn hosts(&self, lab: &mut Lab, table: &mut Vec<Row>) -> Result<()> {
        let binary = daemon::build(&lab.cache)?;
        for debian in self.releases() {
            let of = format!("{}: ", debian.name());
            let products = crate::products::for_guest(&lab.cache, debian)?;
            let image = lab.image(debian)?;
            lab.boot(&Plan { image, cpus: 2, nics: vec![Nic::Host(Vec::new())] })?;
            lab.deliver(std::slice::from_ref(&binary))?;
            let host = lab.guests.first_mut().context("no guest")?;
            self.two_vms(host, &products, &of, table)?;
            kernels(lab, &of, table);
            lab.shut_down();
        }
        Ok(())
    }

    /// Tests of what depends on the host.
    fn suites(&self, lab: &mut Lab, table: &mut Vec<Row>) -> Result<()> {
        let (tests, daemon) = programs(&lab.cache)?;
        let target = daemon.parent().context("a program has a folder")?.display().to_string();
        let prelude = PRELUDE.replace("@TARGET@", &target);
        let libraries = libraries(&lab.cache)?;
        let mut products = vec![daemon];
        products.extend(tests.iter().map(|program| program.path.clone()));
        for debian in self.releases() {
            let of = format!("{}: ", debian.name());
            let image = lab.image(debian)?;
            lab.boot(&Plan { image, cpus: 1, nics: vec![Nic::None, Nic::None] })?;
            lab.deliver(&products)?;
            let guest = lab.pair()?.0;
            copy_tree(&libraries, &guest.share().join("libraries"))?;
            let by_run: [(&str, &str); 2] =
                [("a program, by run", BY_RUN), (beside::NAME, beside::SCRIPT)];
            for (name, script) in by_run {
                let name = format!("{of}{name}");
                if self.wanted(&name) {
                    table.push(Row::verdict(name, holds(guest, script)?));
                }
            }
            let suites = Suites { prelude: &prelude, known: &[], of: &of };
            let wanted = |test: &str| is_of_the_host(test) && self.wanted(&format!("{of}{test}"));
            suites.run(&mut lab.guests, &tests, table, wanted)?;
            kernels(lab, &of, table);
            lab.shut_down();
        }
        Ok(())
    }

    fn wanted(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.split(',').any(|part| name.contains(part)))
    }
}

/// What each kernel said.
fn kernels(lab: &mut Lab, of: &str, table: &mut Vec<Row>) {
    for guest in &mut lab.guests {
        let clean = kernel_is_clean(guest);
        table.push(Row::verdict(format!("{of}kernel of {}", guest.name), clean));
    }
}

fn holds(guest: &mut Guest, script: &str) -> Result<bool> {
    let out = guest.run(script, PROGRAM_END)?;
    if !out.ok() {
        eprintln!("{}", out.text.trim_end());
    }
    Ok(out.ok())
}
