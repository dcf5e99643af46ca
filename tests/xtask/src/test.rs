//! `cargo xtask test`: the README's test command, and what CI runs.
//!
//! One list has every step, and docs/TESTING.md has it as a table; a test holds the two together.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use lab::cache::Cache;
use lab::scenarios::fixture::Options;
use lab::scenarios::{
    ages, clients, cluster, cni_rdma, drivers, iommu, life, neighbour, nvme, pair, pods, pyverbs,
    rnic, sriov, stock, stranger, verbs,
};
use lab::{Debian, Kernel, Part, attempt, chart, k8s, node_bench, process};

use crate::steps::Steps;
use crate::{chores, claims, columns, links, modules, results, twice};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// No VM: lint, unit and whole-stack tests
    #[arg(long, conflicts_with = "full")]
    fast: bool,
    /// Also the matrix of guests and kernels that CI has no time for
    #[arg(long)]
    full: bool,
    /// Only the steps whose name contains this; may be given more than once
    #[arg(long)]
    only: Vec<String>,
    /// Write one row per step here
    #[arg(long)]
    json: Option<PathBuf>,
}

/// In which runs a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum When {
    Fast,
    Usual,
    /// In each second run of CI: the commit says which.
    Turns(u32),
    Full,
}

use When::{Fast, Full, Turns, Usual};

/// How many kinds of turns there are.
const TURNS: u32 = 2;

impl When {
    /// As the command line has it.
    #[cfg(test)]
    fn word(self) -> &'static str {
        match self {
            Fast => "`--fast`",
            Usual => "CI",
            Turns(_) => "CI, by turns",
            Full => "`--full`",
        }
    }
}

/// What a step runs; whether the run is a full one.
type Run = fn(&Cache, bool) -> Result<bool>;

/// fmt, clippy, doc, what documents say of the tree, and cargo-deny: none may say a word.
const LINTS: &[(When, &str, Run)] = &[
    (Fast, "rustfmt", |c, _| chores::rustfmt(c)),
    (Fast, "clippy", |c, _| chores::clippy(c)),
    (Fast, "cargo doc", |c, _| chores::doc(c)),
    (Fast, "claims", |_, _| claims::check(&lab::exec::workspace())),
    (Fast, "columns", |_, _| columns::check(&lab::exec::workspace())),
    (Fast, "links", |_, _| links::check(&lab::exec::workspace())),
    (Fast, "modules", |_, _| {
        let root = lab::exec::workspace();
        Ok(modules::check(&root)? & twice::check(&root)?)
    }),
    (Fast, "recorded results", |_, _| results::check(&lab::exec::workspace())),
    (Fast, "cargo-deny", |c, _| chores::deny(c)),
    (Fast, "typos", |c, _| chores::typos(c)),
];

const TESTS: &[(When, &str, Run)] = &[
    (Fast, "tests", |c, _| chores::tests(c)),
    (Usual, "seeded device bugs", chores::mutants),
    (Usual, "soak for a minute", |_, _| chores::soak(1.0, None, &[])),
    (Usual, "attacks on a neighbour's time", |_, _| chores::isolation(&[])),
    (Usual, "processes with RDMA devices", |c, _| attempt::Args::as_nobody().run(c)),
    (Usual, "programs with NICs for processes", |c, full| {
        process::Args::on((!full).then(|| release_in_turn(chores::turn()))).run(c)
    }),
    (Usual, "kernel driver on all kernels", |c, full| {
        drivers::Args { full, ..Default::default() }.run(c)
    }),
    (Usual, "a pair of VMs", |c, _| pair::Args::default().run(c)),
    (Usual, "a stranger's driver and Linux", |c, _| stranger::Args::default().run(c)),
    (Usual, "a process and Linux", |c, _| neighbour::Args::default().run(c)),
    (Usual, "atomics against the guests' CPUs", |c, _| {
        let only = Some("atomic -t".to_owned());
        let options = Options { cpus: 2, only, ..Default::default() };
        pair::Args { options, no_reference: true, ..Default::default() }.run(c)
    }),
    (Usual, "life of drivers, guests and VMs", |c, full| {
        let part = if full { Part::ALL } else { Part::turn(chores::turn(), TURNS) };
        life::Args { full, part, ..Default::default() }.run(c)
    }),
    (Usual, "events, resources, namespaces", |c, _| verbs::Args::default().run(c)),
    (Turns(0), "real clients", |c, full| clients::Args { full, ..Default::default() }.run(c)),
    (Turns(1), "rdma-core's Python suite", |c, full| pyverbs::Args::with_all(full).run(c)),
    (Usual, "pods with NICs in a real Kubernetes", |c, full| {
        k8s::test::Args { full, brief: !full, ..Default::default() }.run(c)
    }),
    (Full, "clippy without host-rnic", |c, _| chores::clippy_plain(c)),
    (Full, "older and newer programs with NICs", |c, _| process::Args::of_other_ages().run(c)),
    (Full, "one process for all networks", |c, _| chores::tests_shaped(c, "one")),
    (Full, "two workers for each network", |c, _| chores::tests_shaped(c, "spread")),
    (Full, "attacks by processes on a neighbour's time", |_, _| {
        chores::isolation(&["--processes"])
    }),
    (Full, "two containers with RDMA devices", |c, _| process::ContainersArgs::default().run(c)),
    (Full, "Helm renders the chart", |c, _| chart::shown(c)),
    (Full, "CNI plugin with RDMA devices", |c, _| cni_rdma::Args::default().run(c)),
    (Full, "stock Debian 12 and 13", |c, _| stock::Args::default().run(c)),
    (Full, "two VMs on stock Debian", |c, _| stock::Args::with_two_vms().run(c)),
    (Full, "the README's demo on stock Debian", |c, _| stock::Args::with_demo().run(c)),
    (Full, "a cluster on stock Debian", |c, _| stock::Args::with_cluster().run(c)),
    (Full, "the README's tests on stock Debian 13", |c, _| {
        stock::Args::in_a_root(Debian::Trixie).run(c)
    }),
    (Full, "driver and device of different ages", |c, _| ages::Args::default().run(c)),
    (Full, "machines with an IOMMU", |c, _| iommu::Args::default().run(c)),
    (Full, "guests on an RNIC", |c, _| rnic::Args::default().run(c)),
    (Full, "a real guest on an RNIC", |c, _| rnic::Args::with_a_real_guest().run(c)),
    (Full, "networks on RNICs across two nodes", |c, _| cluster::Args::default().run(c)),
    (Full, "real guests on RNICs of two nodes", |c, _| cluster::Args::with_real_guests().run(c)),
    (Full, "what an RNIC costs through us", |c, _| rnic::Args::of_costs().run(c)),
    (Full, "virtual functions", |c, _| sriov::Args::default().run(c)),
    (Full, "pods on a node with hardware", |c, _| pods::Args::default().run(c)),
    (Full, "agent and CNI plugin as ratios", |c, _| node_bench::Args::default().run(c)),
    (Full, "kernel storage", |c, _| nvme::Args::default().run(c)),
    (Full, "lives on a kernel that looks for faults", |c, _| {
        life::Args { kernel: Kernel::Debug, ..Default::default() }.run(c)
    }),
    (Full, "events, resources, namespaces on it", |c, _| {
        verbs::Args { kernel: Kernel::Debug, ..Default::default() }.run(c)
    }),
    (Full, "a pair of bookworm VMs", |c, _| a_pair(Debian::Bookworm, 1, c)),
    (Full, "a pair of trixie-backports VMs", |c, _| a_pair(Debian::TrixieBackports, 1, c)),
    (Full, "a pair of VMs with 2 vCPUs", |c, _| a_pair(Debian::default(), 2, c)),
];

/// Whose programs run in containers in this run of CI.
fn release_in_turn(turn: u32) -> Debian {
    if turn.is_multiple_of(2) { Debian::Trixie } else { Debian::Bookworm }
}

fn a_pair(debian: Debian, cpus: u8, cache: &Cache) -> Result<bool> {
    let options = Options { debian, cpus, ..Default::default() };
    pair::Args { options, ..Default::default() }.run(cache)
}

/// What `cargo xtask lint` runs.
pub(crate) fn lint(cache: &Cache) -> Result<bool> {
    let mut steps = Steps::begin()?;
    for (_, name, run) in LINTS {
        steps.step(name, || run(cache, false))?;
    }
    steps.finish(None)
}

impl Args {
    /// Whether the run has steps of this kind.
    fn takes(&self, when: When, turn: u32) -> bool {
        match (self.fast, self.full, when) {
            (true, _, when) => when == Fast,
            (_, true, _) => true,
            // Who names a step gets it.
            (.., Turns(own)) => own == turn || !self.only.is_empty(),
            (.., when) => when <= Usual,
        }
    }

    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        let turn = chores::turn() % TURNS;
        let named = |name: &str| {
            self.only.is_empty() || self.only.iter().any(|o| name.contains(o.as_str()))
        };
        let now = |when: When| self.takes(when, turn);
        let all = LINTS.iter().chain(TESTS).filter(|(when, name, _)| now(*when) && named(name));
        ensure!(all.clone().next().is_some(), "no step of this run is called {:?}", self.only);
        if !self.fast && !self.full {
            eprintln!("    by turns: {}", Part::turn(turn, TURNS));
        }
        let mut steps = Steps::begin()?;
        for (_, name, run) in all {
            steps.step(name, || run(cache, self.full))?;
        }
        steps.finish(self.json.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn who_takes_what_goes_by_turns() {
        let run = |words: &str| {
            #[derive(clap::Parser)]
            struct Line {
                #[command(flatten)]
                args: Args,
            }
            Line::parse_from(words.split(' ')).args
        };
        let taken = |args: &Args, turn| {
            [Fast, Usual, Turns(0), Turns(1), Full].map(|when| args.takes(when, turn))
        };
        for turn in 0..TURNS {
            let taken = |words| taken(&run(words), turn);
            assert_eq!(taken("test --fast"), [true, false, false, false, false]);
            assert_eq!(taken("test"), [true, true, turn == 0, turn == 1, false]);
            assert_eq!(taken("test --only x"), [true, true, true, true, false]);
            assert_eq!(taken("test --full"), [true; 5]);
        }
    }

    #[test]
    fn both_releases_have_their_turn() {
        assert_eq!([6, 7].map(release_in_turn), [Debian::Trixie, Debian::Bookworm]);
    }

    /// Each step, in order, with the run that it comes with and a command that exists.
    #[test]
    fn the_table_of_steps_is_the_list() {
        let text = std::fs::read_to_string(lab::exec::workspace().join("docs/TESTING.md")).unwrap();
        let (_, table) = text.split_once("| step | from | alone |\n|---|---|---|\n").unwrap();
        let rows: Vec<&str> = table.lines().take_while(|line| line.starts_with('|')).collect();
        let mut told = Vec::new();
        for row in &rows {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let [name, when, command] = cells[..] else { panic!("{row}") };
            told.push((when, name));
            let command = command.trim_matches('`');
            // What it sets in its environment is no part of the command line.
            let (command, set) = match command.split_once(' ') {
                Some((first, rest)) if first.contains('=') => (rest, first),
                _ => (command, ""),
            };
            assert!(set.is_empty() || set.starts_with("VHOST_RDMA_"), "{set}");
            if let Some(rest) = command.strip_prefix("cargo xtask ") {
                // As a shell: what is between quotes is one word.
                let parts = command.split('\'').enumerate().flat_map(|(n, part)| match n % 2 {
                    0 => part.split_whitespace().collect::<Vec<_>>(),
                    _ => vec![part],
                });
                let parsed = crate::Cli::try_parse_from(parts.skip(1));
                assert!(parsed.is_ok(), "`{rest}`: {}", parsed.unwrap_err());
            }
        }
        let listed: Vec<(&str, &str)> =
            LINTS.iter().chain(TESTS).map(|(when, name, _)| (when.word(), *name)).collect();
        assert_eq!(told, listed);
    }
}
