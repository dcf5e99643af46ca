//! One script per guest, side by side.
//!
//! The script runs under `sh` with the share as `/host`; `--share DIR` makes a copy of DIR there
//! (as `/host/share`), the way to bring a module or a program in. Guests are 10.9.0.1 (a), 10.9.0.2
//! (b), …; two guests may meet by files in no common place, only by network.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::exec;
use crate::roots::Debian;
use crate::vm::{Lab, Nic, Plan};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) boot: Boot,
    /// Script for guest a; given twice, the second is for guest b, and so on. One script for all if
    /// there are more guests than scripts
    #[arg(long, required = true)]
    script: Vec<PathBuf>,
    /// Seconds that each script may take
    #[arg(long, default_value_t = 120)]
    timeout: u64,
}

/// How to boot, for the scenarios that let one choose.
#[derive(Debug, clap::Args)]
pub(crate) struct Boot {
    /// Number of guests
    #[arg(long, default_value_t = 1)]
    guests: u8,
    /// vCPUs of each
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// Release of the guests
    #[arg(long, value_enum, default_value_t = Debian::Trixie)]
    debian: Debian,
    /// vhost-user socket of the first guest's RDMA device (something must listen on it); given
    /// twice, the second guest's
    #[arg(long = "vhost-socket")]
    sockets: Vec<PathBuf>,
    /// Directory to copy into every guest's share, as /host/share
    #[arg(long)]
    share: Option<PathBuf>,
    /// Keep consoles and logs when done
    #[arg(long)]
    keep: bool,
}

impl Boot {
    pub(super) fn boot(&self, cache: &Cache) -> Result<Lab> {
        let mut lab = Lab::prepare(cache)?;
        let mut nics = Vec::new();
        for n in 0..usize::from(self.guests) {
            nics.push(match self.sockets.get(n) {
                Some(p) => Nic::Socket(p.canonicalize().with_context(|| {
                    format!("no socket {}: start the backend first", p.display())
                })?),
                None => Nic::None,
            });
        }
        if self.keep {
            lab.run.keep();
            eprintln!("    consoles and logs stay in {}", lab.run.path().display());
        }
        let plan = Plan { image: lab.image(self.debian)?, cpus: self.cpus, nics };
        lab.boot(&plan)?;
        if let Some(dir) = &self.share {
            for guest in &lab.guests {
                copy_tree(dir, &guest.share().join("share"))?;
            }
        }
        Ok(lab)
    }
}

pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let out = exec::capture(
        exec::tied("cp").arg("-rL").arg("--").arg(from).arg(to),
        Duration::from_secs(60),
    );
    out.map(|_| ()).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

impl Args {
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut scripts = Vec::new();
        for path in &self.script {
            scripts.push(
                fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?,
            );
        }
        let Some(last) = scripts.last().cloned() else { bail!("no script") };
        let mut lab = self.boot.boot(cache)?;
        let mut jobs = Vec::new();
        for (n, guest) in lab.guests.iter_mut().enumerate() {
            jobs.push(guest.spawn(scripts.get(n).unwrap_or(&last))?);
        }
        let mut all_ok = true;
        for (guest, job) in lab.guests.iter_mut().zip(jobs) {
            let out = guest.wait(job, Duration::from_secs(self.timeout))?;
            println!(
                "== guest {}: {}",
                guest.name,
                out.status.map_or_else(
                    || "killed at its deadline".into(),
                    |s| format!("exit status {s}")
                )
            );
            print!("{}", out.text);
            if !out.ok() {
                all_ok = false;
                println!("== console of guest {}\n{}", guest.name, guest.console_tail(40));
            }
        }
        Ok(all_ok)
    }
}
