//! Every chore of the project behind one command: `cargo xtask`.
//!
//! Here are the command line, what `cargo xtask test` is made of, and the chores that need no more
//! than cargo and this tree. What boots guests and nodes is the crate `lab`.
//!
//! ```sh
//! cargo xtask try                                    # RDMA between two processes, without root
//! cargo xtask demo                                   # two VMs; the README's figures
//! cargo xtask test [--fast | --full]                 # everything that must hold
//! cargo xtask bench                                  # ratios on the virtual guest
//! cargo xtask bench isolation                        # what attacks cost in another network
//! cargo xtask node-bench                             # ratios of node agent and CNI plugin
//! cargo xtask soak --minutes 30                      # nothing grows
//! cargo xtask fuzz commands --seconds 600            # what guests write, guided by coverage
//! cargo xtask lint
//! cargo xtask nextest                                # a process and a time limit for each test
//! cargo xtask mutate --since main~3                  # changes that no test notices
//! cargo xtask results add ROWS.json --command '…'    # keep a run in docs/results
//! cargo xtask spec                                   # the specification as LaTeX, for virtio TC
//! cargo xtask dashboard                              # manifests/monitoring/dashboard.json
//! cargo xtask chart DIR                              # the Helm chart, from manifests
//! cargo xtask monitoring                             # plays each alert by promtool
//! cargo xtask crds                                   # manifests/crds from controller/api
//! ```
//! For work on the guest side:
//! ```sh
//! cargo xtask vm pair --only ib_write --no-reference # some rows of the demo
//! cargo xtask vm prepare                             # prints paths of QEMU, guest image, builder
//! cargo xtask vm run --share DIR --script FILE       # a guest runs FILE, with DIR as /host/share
//! cargo xtask vm run --guests 2 --script A --script B --vhost-socket S1 --vhost-socket S2
//! cargo xtask vm shell --guests 2                    # commands from standard input, `b: uname -r`
//! ```

mod chores;
mod claims;
mod columns;
mod figures;
mod links;
mod modules;
mod results;
mod spec;
mod steps;
mod test;
mod transcript;
mod twice;
mod wheels;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use lab::cache::Cache;
use lab::{attempt, chart, exec, k8s, monitoring, node_bench, process, scenarios};

/// Chores of the vhost-rdma project
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Set up everything, boot two VMs, run unmodified RDMA programs on our device and on rxe,
    /// print a table
    Demo(scenarios::pair::Args),
    /// RDMA between two processes of this machine, with Debian's programs: no root, no VM, no
    /// kernel module
    Try(attempt::Args),
    /// Programs of Debian 12 and 13 with NICs for processes, in containers
    #[command(subcommand)]
    Process(process::Command),
    /// Everything that must hold before a change goes in
    Test(test::Args),
    /// Benchmarks on the virtual guest, each a ratio in one run
    Bench {
        /// What to measure
        #[arg(value_enum, default_value_t)]
        what: chores::Bench,
        /// Fewer and shorter samples: shows that everything runs
        #[arg(long)]
        quick: bool,
        /// Write the rows here
        #[arg(long)]
        json: Option<PathBuf>,
        /// For the benchmark program: names
        #[arg(last = true)]
        rest: Vec<String>,
    },
    /// Allocations beside fdatasync, a start with many devices beside few, CNI ADD beside the
    /// reference ptp plugin
    NodeBench(node_bench::Args),
    /// Churn, errors and traffic in virtual guests for a long time: the daemon must not grow
    Soak {
        /// How long
        #[arg(long, default_value_t = 1.0, value_name = "N")]
        minutes: f64,
        /// Write the rows here
        #[arg(long)]
        json: Option<PathBuf>,
        /// For the soak program: `--seed N`
        #[arg(last = true)]
        rest: Vec<String>,
    },
    /// Fuzz what guests write, guided by coverage (libFuzzer; needs a C++ compiler). `cargo test`
    /// runs the same targets for a bounded time
    Fuzz {
        /// What to fuzz
        #[arg(value_parser = ["chains", "commands", "rings", "saved"])]
        target: String,
        /// How long
        #[arg(long, default_value_t = 60, value_name = "N")]
        seconds: u64,
    },
    /// rustfmt, clippy, cargo doc, claims, links, modules, results, cargo-deny and typos
    Lint,
    /// The tests of `cargo test` by cargo-nextest: a process and a time limit for each
    Nextest {
        /// For nextest: filters, `-E EXPRESSION`
        #[arg(last = true)]
        rest: Vec<String>,
    },
    /// Change what differs from a revision, one place at a time, and tell what no test notices
    /// (cargo-mutants, which is built once)
    Mutate {
        /// The revision
        #[arg(long, default_value = "HEAD", value_name = "REVISION")]
        since: String,
        /// For cargo-mutants: `--list`, `--file GLOB`, `--shard K/N`
        #[arg(last = true)]
        rest: Vec<String>,
    },
    /// Write manifests/crds and docs/API.md anew from controller/api
    Crds,
    /// Write manifests/monitoring/dashboard.json anew
    Dashboard,
    /// Write the Helm chart, made of manifests
    Chart {
        /// The directory
        dir: PathBuf,
        /// Have Helm render it, from a package of Python's registry, and compare
        #[arg(long)]
        helm: bool,
    },
    /// Play each alert of manifests/monitoring
    Monitoring,
    /// Write the manual page to standard output, or one page per command to a directory
    Man {
        /// The directory
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// Recorded runs, docs/results
    #[command(subcommand)]
    Results(results::Results),
    /// Write docs/virtio-rdma.md as a device section of the virtio specification, in LaTeX
    Spec(spec::Args),
    /// The VM lab
    #[command(subcommand)]
    Vm(scenarios::Scenario),
    /// A real Kubernetes on one node, in namespaces of its own
    #[command(subcommand)]
    K8s(k8s::Command),
}

fn run(cli: &Cli) -> Result<bool> {
    exec::catch_signals()?;
    match &cli.chore {
        Chore::Demo(args) => args.with_figures().run(&Cache::open()?),
        Chore::Try(args) => args.run(&Cache::open()?),
        Chore::Process(command) => command.run(&Cache::open()?),
        Chore::Test(args) => args.run(&Cache::open()?),
        Chore::Bench { what, quick, json, rest } => {
            chores::bench(*what, *quick, json.as_deref(), rest)
        }
        Chore::NodeBench(args) => args.run(&Cache::open()?),
        Chore::Soak { minutes, json, rest } => chores::soak(*minutes, json.as_deref(), rest),
        Chore::Fuzz { target, seconds } => chores::fuzz(&Cache::open()?, target, *seconds),
        Chore::Lint => test::lint(&Cache::open()?),
        Chore::Nextest { rest } => chores::nextest(&Cache::open()?, rest),
        Chore::Mutate { since, rest } => chores::mutate(&Cache::open()?, since, rest),
        Chore::Crds => chores::crds(),
        Chore::Dashboard => monitoring::write_dashboard(),
        Chore::Chart { dir, helm: true } => chart::by_helm(&Cache::open()?, dir),
        Chore::Chart { dir, helm: false } => chart::write(&Cache::open()?, dir),
        Chore::Monitoring => monitoring::run(&Cache::open()?),
        Chore::Man { dir } => chores::man(dir.as_deref()),
        Chore::Results(what) => what.run(),
        Chore::Spec(args) => args.run(),
        Chore::Vm(scenario) => scenario.run(&Cache::open()?),
        Chore::K8s(command) => command.run(&Cache::open()?),
    }
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }

    /// These make things, or are used by hand.
    const NO_ROWS: [&str; 14] = [
        "chart",
        "crds",
        "dashboard",
        "fuzz",
        "lint",
        "man",
        "monitoring",
        "mutate",
        "nextest",
        "prepare",
        "results",
        "run",
        "shell",
        "spec",
    ];

    fn without_json(command: &clap::Command, names: &mut Vec<String>) {
        if NO_ROWS.contains(&command.get_name()) {
            return;
        }
        let json = command.get_arguments().any(|arg| arg.get_long() == Some("json"));
        if !json && !command.has_subcommands() {
            names.push(command.get_name().to_owned());
        }
        command.get_subcommands().for_each(|command| without_json(command, names));
    }

    #[test]
    fn what_has_rows_writes_them() {
        let mut names = Vec::new();
        without_json(&super::Cli::command(), &mut names);
        assert_eq!(names, [""; 0], "these have no --json");
    }
}
