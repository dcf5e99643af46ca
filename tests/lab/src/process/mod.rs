//! `cargo xtask process test`: programs of Debian 12 and 13, or of releases before and after these,
//! unmodified, with NICs for processes.
//!
//! The programs run in containers whose file system is that of the lab's guests, so that a
//! release's own programs, linker and C library meet libraries that were built on this machine. No
//! VM, no kernel module. The suite is rdma-core's own, with the skips pinned; the programs are all
//! of perftest's and libibverbs' examples that need neither XRC nor raw packets, those of rdma_cm
//! (`connections`), UCX and Open MPI over it, and programs of another distribution (`strangers`).

mod action;
mod bench;
mod clients;
mod connections;
mod container;
mod engine;
pub(crate) mod products;
mod programs;
mod references;
mod release;
mod strangers;
mod suite;
mod symbols;

pub(crate) use symbols::newest_glibc;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::cache::Cache;
use crate::host;
use crate::roots::Debian;
use crate::rows::{self, Row};
use crate::vm::scenarios::clients::UCX_BATCH;
use container::Container;
use release::Release;

const WAIT: Duration = Duration::from_secs(180);

/// Of `tests/guest-programs`, those that are for processes.
const OURS: [&str; 4] = ["process-private", "process-calls", "process-channels", "process-heap"];

/// What the programs find in `/host`.
const FILES: &[(&str, &str)] = &[
    ("fork.py", include_str!("../../../guest-programs/process-fork.py")),
    ("reloads.py", include_str!("../../../guest-programs/process-reloads.py")),
    ("nccl-looks.py", include_str!("../../../guest-programs/nccl-looks.py")),
    ("mooncake-check.py", include_str!("../../../guest-programs/process-mooncake.py")),
    ("mpi-check.py", include_str!("../../../guest-programs/mpi-check.py")),
    ("mpi-train.py", include_str!("../../../guest-programs/mpi-train.py")),
    ("ucx.batch", UCX_BATCH),
];

/// See the module
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Programs and suites in containers
    Test(Args),
    /// perftest between two processes, beside memcpy, TCP and UCX's shared memory
    Bench(BenchArgs),
    /// The example for CI runners: two containers of podman's
    Containers(ContainersArgs),
}

/// What the containers can be told
#[derive(Debug, Default, clap::Args)]
pub struct ContainersArgs {
    /// With a daemon that is not optimised, which is built sooner
    #[arg(long)]
    debug: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

/// What the benchmark can be told
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// Only rows whose name has this in it
    #[arg(long)]
    only: Option<String>,
    /// How often each is measured
    #[arg(long, default_value_t = 5)]
    turns: u32,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Only programs whose name has this in it, and tests of the suite whose name matches it as a
    /// regular expression
    #[arg(long)]
    only: Option<String>,
    /// Only this release
    #[arg(long, value_enum)]
    debian: Option<Debian>,
    /// Programs of Ubuntu 24.04, from this mirror of its archive
    #[arg(long, value_name = "MIRROR")]
    ubuntu: Option<String>,
    /// Programs of Debian's next release, with libraries of its rdma-core
    #[arg(long)]
    next: bool,
    /// Programs of Debian 11, as far as they take no private symbols, with libraries built there
    #[arg(long)]
    old: bool,
    /// With a daemon that is not optimised, which is built sooner
    #[arg(long)]
    debug: bool,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Command {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        match self {
            Self::Test(args) => args.run(cache),
            Self::Bench(args) => args.run(cache),
            Self::Containers(args) => args.run(cache),
        }
    }
}

impl ContainersArgs {
    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        host::ensure_tools(cache)?;
        let table = engine::run(cache, self.debug)?;
        rows::print_table(&table, "vhost-rdma", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }
}

impl BenchArgs {
    fn run(&self, cache: &Cache) -> Result<bool> {
        host::ensure_tools(cache)?;
        let (daemon, libraries) = (products::daemon(cache, false)?, products::libraries(cache)?);
        let release = Release::Debian(Debian::Trixie);
        let root = release.root(cache, None)?;
        let container = Container::new(release, root, (&daemon, &libraries))?;
        let table = bench::run(&container, self.only.as_deref(), self.turns.max(1))?;
        ensure!(!table.is_empty(), "nothing matches {:?}", self.only);
        rows::print_table(&table, "vhost-rdma", "reference");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }
}

impl Args {
    /// Everything, on this release, or on all.
    pub fn on(debian: Option<Debian>) -> Self {
        Self { debian, ..Self::default() }
    }

    /// Of an older release and of the next one.
    pub fn of_other_ages() -> Self {
        Self { old: true, next: true, ..Self::default() }
    }

    /// Runs it; true if everything held.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        host::ensure_tools(cache)?;
        let daemon = products::daemon(cache, self.debug)?;
        let debians = match self.debian {
            Some(one) => vec![one],
            None if self.ubuntu.is_some() || self.next || self.old => Vec::new(),
            None => vec![Debian::Bookworm, Debian::Trixie],
        };
        let mut releases: Vec<_> = debians.into_iter().map(Release::Debian).collect();
        releases.extend(self.ubuntu.as_ref().map(|_| Release::Ubuntu));
        releases.extend(self.next.then_some(Release::Next));
        releases.extend(self.old.then_some(Release::Old));
        let (mut table, mut good) = (Vec::new(), true);
        for release in releases {
            let root = release.root(cache, self.ubuntu.as_deref())?;
            let libraries = release.libraries(cache)?;
            let container = Container::new(release, root, (&daemon, &libraries))?;
            if self.only.as_ref().is_none_or(|part| "symbols of the libraries".contains(part)) {
                table.push(symbols::run(&container));
            }
            table.extend(self.programs(cache, &container)?);
            if matches!(release, Release::Debian(Debian::Bookworm)) {
                table.extend(self.strangers(cache, (&daemon, &libraries))?);
            }
            let (row, held) = suite::run(&container, self.only.as_deref())?;
            table.extend(row);
            good &= held;
        }
        ensure!(!table.is_empty(), "nothing matches {:?}", self.only);
        rows::print_table(&table, "vhost-rdma", "-");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(good && table.iter().all(|row| row.ok))
    }
}

impl Args {
    /// All programs that were asked for, one after the other.
    fn programs(&self, cache: &Cache, container: &Container) -> Result<Vec<Row>> {
        // What is built for an older C library runs with a newer one.
        let built = match container.release {
            Release::Debian(debian) => crate::products::programs(cache, debian)?,
            Release::Ubuntu => crate::products::programs(cache, Debian::Bookworm)?,
            Release::Next => crate::products::programs(cache, Debian::Trixie)?,
            Release::Old => products::old_programs(cache)?,
        };
        for program in built {
            let ours = |name: &&OsStr| OURS.iter().any(|it| *name == *it);
            if let Some(name) = program.file_name().filter(ours) {
                fs::copy(&program, container.share().join(name))?;
            }
        }
        for (name, text) in FILES {
            fs::write(container.share().join(name), text)?;
        }
        let mut rows = Vec::new();
        let pairs = programs::all().into_iter().chain(clients::all(container.release));
        let pairs = pairs.map(|(program, script)| (2, program, script));
        let more = connections::all(container.release).into_iter();
        let more = more.map(|(program, script)| (connections::NICS, program, script));
        for (nics, program, script) in pairs.chain(more) {
            let named = self.only.as_ref().is_none_or(|part| program.contains(part));
            if !named || !container.release.runs(&program) {
                continue;
            }
            rows.push(run(container, &program, (nics, &script)));
        }
        Ok(rows)
    }

    /// Programs of another distribution.
    fn strangers(&self, cache: &Cache, ours: (&Path, &Path)) -> Result<Vec<Row>> {
        let named = |name: &str| self.only.as_ref().is_none_or(|part| name.contains(part));
        let all: Vec<_> = strangers::all().into_iter().filter(|(name, _)| named(name)).collect();
        if all.is_empty() {
            return Ok(Vec::new());
        }
        let release = Release::Debian(Debian::Bookworm);
        let container = Container::new(release, strangers::root(cache)?, ours)?;
        for (name, text) in FILES {
            fs::write(container.share().join(name), text)?;
        }
        Ok(all.iter().map(|(name, script)| run(&container, name, (2, script))).collect())
    }
}

fn run(container: &Container, program: &str, (nics, script): (u32, &str)) -> Row {
    let begin = Instant::now();
    let done = container.run(nics, script, WAIT);
    let name = format!("{}: {program}", container.release.name());
    match &done {
        Ok(_) => eprintln!("    {name}: ok"),
        Err(error) => eprintln!("    {name}: {error:#}"),
    }
    Row::timed(name, done.is_ok(), begin.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::exec::workspace;

    /// The numbers of requirements that a text names.
    fn numbers(text: &str) -> BTreeSet<&str> {
        let of = |part: &'static str| {
            text.match_indices(part).filter_map(|(at, _)| {
                let rest = text.get(at..)?;
                let end = rest
                    .find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-'))
                    .unwrap_or(rest.len());
                rest.get(..end)
            })
        };
        of("PDEV-").chain(of("PDRV-")).collect()
    }

    #[test]
    fn the_profile_says_what_shows_each_requirement() {
        let text = workspace().join("docs/virtio-rdma-process.md");
        let text = std::fs::read_to_string(text).unwrap();
        let (rules, table) = text.split_once("\n## 9. What shows it").unwrap();
        let shown: BTreeSet<&str> = table
            .lines()
            .filter_map(|line| line.strip_prefix("| ")?.split_once(" | "))
            .flat_map(|(first, _)| numbers(first))
            .collect();
        assert!(shown.len() > 25 && shown.contains("PDEV-CM-1"), "{shown:?}");
        assert_eq!(numbers(rules), shown);
    }
}
