//! `cargo xtask test`: the README's test command, and what CI runs.

use std::path::PathBuf;

use anyhow::Result;

use lab::cache::Cache;
use lab::scenarios::fixture::Options;
use lab::scenarios::{
    ages, clients, cluster, cni_rdma, drivers, iommu, life, neighbour, nvme, pair, pods, pyverbs,
    rnic, sriov, stranger, verbs,
};
use lab::{Debian, Kernel, attempt, chart, k8s, node_bench, process};

use crate::chores;
use crate::steps::Steps;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// No VM: lint, unit and whole-stack tests
    #[arg(long, conflicts_with = "full")]
    fast: bool,
    /// Also the matrix of guests and kernels that CI has no time for
    #[arg(long)]
    full: bool,
    /// Write one row per step here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Args {
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        let mut steps = Steps::default();
        chores::lint(cache, &mut steps)?;
        chores::tests(cache, &mut steps)?;
        if !self.fast {
            steps.step("clippy with host-rnic", || chores::lint_rnic(cache))?;
            chores::mutants(cache, &mut steps, self.full)?;
            steps.step("soak for a minute", || chores::soak(1.0, None, &[]))?;
            steps.step("attacks on a neighbour's time", chores::isolation)?;
            steps.step("processes with RDMA devices", || attempt::Args::as_nobody().run(cache))?;
            steps.step("programs with NICs for processes", || {
                let debian = (!self.full).then_some(Debian::Trixie);
                process::Args::on(debian).run(cache)
            })?;
            steps.step("kernel driver on all kernels", || {
                drivers::Args { full: self.full, ..Default::default() }.run(cache)
            })?;
            steps.step("a pair of VMs", || pair::Args::default().run(cache))?;
            steps.step("a stranger's driver and Linux", || stranger::Args::default().run(cache))?;
            steps.step("a process and Linux", || neighbour::Args::default().run(cache))?;
            steps.step("atomics against the guests' CPUs", || {
                let only = Some("atomic -t".to_owned());
                let options = Options { cpus: 2, only, ..Default::default() };
                pair::Args { options, no_reference: true, ..Default::default() }.run(cache)
            })?;
            steps.step("life of drivers, guests and VMs", || {
                life::Args { full: self.full, ..Default::default() }.run(cache)
            })?;
            steps.step("events, resources, namespaces", || verbs::Args::default().run(cache))?;
            steps.step("real clients", || {
                clients::Args { full: self.full, ..Default::default() }.run(cache)
            })?;
            steps.step("rdma-core's Python suite", || {
                pyverbs::Args::with_all(self.full).run(cache)
            })?;
            steps.step("pods with NICs in a real Kubernetes", || {
                let (full, brief) = (self.full, !self.full);
                k8s::test::Args { full, brief, ..Default::default() }.run(cache)
            })?;
        }
        if self.full {
            steps.step("typos", || chores::typos(cache))?;
            steps.step("two containers with RDMA devices", || {
                process::ContainersArgs::default().run(cache)
            })?;
            steps.step("Helm renders the chart", || chart::shown(cache))?;
            steps.step("CNI plugin with RDMA devices", || cni_rdma::Args::default().run(cache))?;
            steps
                .step("driver and device of different ages", || ages::Args::default().run(cache))?;
            steps.step("machines with an IOMMU", || iommu::Args::default().run(cache))?;
            steps.step("guests on an RNIC", || rnic::Args::default().run(cache))?;
            steps.step("a real guest on an RNIC", || rnic::Args::with_a_real_guest().run(cache))?;
            steps.step("networks on RNICs across two nodes", || {
                cluster::Args::default().run(cache)
            })?;
            steps.step("real guests on RNICs of two nodes", || {
                cluster::Args::with_real_guests().run(cache)
            })?;
            steps.step("what an RNIC costs through us", || rnic::Args::of_costs().run(cache))?;
            steps.step("virtual functions", || sriov::Args::default().run(cache))?;
            steps.step("pods on a node with hardware", || pods::Args::default().run(cache))?;
            steps.step("agent and CNI plugin as ratios", || {
                node_bench::Args::default().run(cache)
            })?;
            steps.step("kernel storage", || nvme::Args::default().run(cache))?;
            steps.step("lives on a kernel that looks for faults", || {
                life::Args { kernel: Kernel::Debug, ..Default::default() }.run(cache)
            })?;
            steps.step("events, resources, namespaces on it", || {
                verbs::Args { kernel: Kernel::Debug, ..Default::default() }.run(cache)
            })?;
            for debian in [Debian::Bookworm, Debian::TrixieBackports] {
                steps.step(&format!("a pair of {} VMs", debian.name()), || {
                    let options = Options { debian, ..Default::default() };
                    pair::Args { options, ..Default::default() }.run(cache)
                })?;
            }
            steps.step("a pair of VMs with 2 vCPUs", || {
                let options = Options { cpus: 2, ..Default::default() };
                pair::Args { options, ..Default::default() }.run(cache)
            })?;
        }
        steps.finish(self.json.as_deref())
    }
}
