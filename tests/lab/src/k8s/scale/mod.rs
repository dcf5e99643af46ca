//! `cargo xtask k8s scale`: the controller at five thousand nodes and a hundred thousand NICs.
//!
//! The API server, etcd and the controller are real, and so are accounts and rights; the agents are
//! played by one program (`tests/played-agents`), since five thousand kubelets fit on no machine of
//! ours. All is measured twice, at a tenth of the size and at the whole, in one run: what a change
//! touches is the same in both, so what it costs must be too. Seconds and memory depend on the
//! machine and are figures; the quotients are what is claimed.
//!
//! Writes are those that the API server counts of our kinds, without the agents' and our own.
//! Processor time is the controller's by the kernel's clock, less what it takes when nothing
//! happens.

mod lab;
mod player;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::cache::Cache;
use crate::host;
use crate::k8s::node::{Life, Node};
use crate::k8s::parts::Parts;
use crate::k8s::test::Bench;
use crate::rows::{self, Row};
use lab::{Cost, Lab, Restart, Steady};

/// What is changed, and what that is in words.
const CHANGES: [(&str, &str); 5] = [
    ("block", "a block for a node"),
    ("class", "a limit of 10 nodes"),
    ("network", "a network on 10 nodes"),
    ("policy", "a policy for 10 nodes, and gone"),
    ("host", "a node's address on the fabric"),
];
/// How long a change may take until all have it; a real agent reports 200 ms after it heard.
const CONVERGES: f64 = 2.0;
/// What `manifests/controller` lets the controller have, MiB.
const LIMIT: f64 = 1024.0;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Nodes of the cluster
    #[arg(
        long,
        default_value_t = 5000,
        value_parser = clap::value_parser!(u32).range(200..=20_000)
    )]
    nodes: u32,
    /// NICs of all of them together
    #[arg(long, default_value_t = 100_000)]
    nics: u32,
    /// Changes of each kind
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=15))]
    times: u32,
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

/// How large, and how thoroughly.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub(super) nodes: u32,
    pub(super) nics: u32,
    pub(super) group: u32,
    pub(super) peers: u32,
    times: u32,
    steady: Duration,
    pub(super) release: bool,
}

/// What was seen at one size.
#[derive(Debug)]
struct Seen {
    nodes: u32,
    filled: f64,
    rate: f64,
    steady: Steady,
    costs: Vec<Cost>,
    rss: f64,
}

impl Args {
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        host::ensure_tools(cache)?;
        let parts = Parts::prepare(cache)?;
        let size = Size {
            nodes: self.nodes,
            nics: self.nics,
            group: (self.nodes / 10).min(100),
            peers: (self.nodes / 10 - 10).min(50),
            times: self.times,
            steady: Duration::from_secs(20),
            release: true,
        };
        let name = format!("{}-scale", std::process::id());
        let rows = measured(cache, &parts, &name, size)?;
        rows::print_table(&rows, "at full size", "reference");
        if let Some(path) = &self.json {
            rows::write_json(path, &rows)?;
        }
        Ok(rows.iter().all(|row| row.ok && row.met() != Some(false)))
    }
}

/// The small form, a step of `k8s test --full`: nothing is written when nothing changes or when the
/// controller begins anew, and a change's writes do not grow with the cluster. What takes longer to
/// tell apart from noise is in the large form.
pub(crate) fn small(bench: &mut Bench<'_>) -> Result<()> {
    let size = Size {
        nodes: 200,
        nics: 2000,
        group: 20,
        peers: 5,
        times: 2,
        steady: Duration::from_secs(3),
        release: false,
    };
    let name = format!("{}-scale", std::process::id());
    let rows = measured(bench.cache, bench.parts, &name, size)?;
    let kept = |row: &&Row| row.name.starts_with("writes");
    let missed: Vec<String> = rows
        .iter()
        .filter(kept)
        .filter(|row| row.met() == Some(false))
        .map(|row| format!("{}: {:?} to {:?}", row.name, row.value, row.reference))
        .collect();
    ensure!(missed.is_empty(), "{}", missed.join("; "));
    ensure!(rows.iter().filter(kept).count() > CHANGES.len(), "too few rows: {rows:?}");
    Ok(())
}

fn measured(cache: &Cache, parts: &Parts, name: &str, size: Size) -> Result<Vec<Row>> {
    let programs = lab::build(cache, size.release)?;
    let node = Node::start(name, &parts.root, Life::Ours)?;
    let result = play(&node, parts, &programs, size);
    let shown = if result.is_err() { super::keep_logs(&node) } else { String::new() };
    let ended = node.end();
    let rows = result.map_err(|error| error.context(shown))?;
    ended?;
    Ok(rows)
}

fn play(node: &Node, parts: &Parts, programs: &std::path::Path, size: Size) -> Result<Vec<Row>> {
    let mut lab = Lab::start(node, parts, programs, size)?;
    let tenth = look(&mut lab, size.nodes / 10, size)?;
    let full = look(&mut lab, size.nodes, size)?;
    let nics = lab.nics()?;
    ensure!(nics >= u64::from(size.nics), "agents report {nics} NICs only");
    let restart = lab.restart()?;
    Ok(table(&tenth, &full, &restart, size))
}

fn look(lab: &mut Lab<'_>, nodes: u32, size: Size) -> Result<Seen> {
    let (filled, rate) = lab.fill(nodes)?;
    let steady = lab.steady(size.steady)?;
    let mut costs = Vec::new();
    for (kind, words) in CHANGES {
        let cost = lab.change(kind, size.times, &steady)?;
        eprintln!(
            "    {nodes} nodes, {words}: {:.2} s, {:.1} writes, {:.2} ms of processor",
            cost.seconds,
            cost.writes,
            cost.cpu * 1e3
        );
        costs.push(cost);
    }
    lab.tidy()?;
    Ok(Seen { nodes, filled, rate, steady, costs, rss: lab.memory("VmRSS")? })
}

/// A value, what it is held against, and the bound of the quotient.
fn row(name: String, values: (f64, Option<f64>), unit: &str, target: &str) -> Row {
    let (value, reference) = values;
    Row {
        name,
        ok: true,
        value: Some(value),
        reference,
        ratio: reference.map(|reference| value / reference),
        unit: unit.into(),
        target: target.into(),
    }
}

fn table(tenth: &Seen, full: &Seen, restart: &Restart, size: Size) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut add = |name: &str, values, unit: &str, target: &str| {
        rows.push(row(name.to_owned(), values, unit, target));
    };
    let times = f64::from(full.nodes) / f64::from(tenth.nodes);
    add("memory, of what manifests allow", (full.rss, Some(LIMIT)), "MiB", "<=0.5");
    add("memory, most, of what manifests allow", (restart.most, Some(LIMIT)), "MiB", "<=0.75");
    add("memory ÷ that of a tenth", (full.rss, Some(tenth.rss)), "MiB", &format!("<={times}"));
    add("filled", (full.filled, Some(tenth.filled)), "s", "");
    add("writes per second while it fills", (full.rate, Some(tenth.rate)), "1/s", "");
    add("writes when nothing changes, of 1", (full.steady.writes, Some(1.0)), "", "<=0");
    let idle = full.steady.cpu * 1e3;
    add("processor when nothing changes", (idle, Some(tenth.steady.cpu * 1e3)), "ms/s", "");
    for (n, (_, words)) in CHANGES.iter().enumerate() {
        let (Some(a), Some(b)) = (tenth.costs.get(n), full.costs.get(n)) else { continue };
        // Where there are none at a tenth there is to be less than one and a fifth.
        add(&format!("writes, {words}"), (b.writes, Some(a.writes.max(1.0))), "", "<=1.2");
        add(&format!("processor, {words}"), (b.cpu * 1e3, Some(a.cpu * 1e3)), "ms", "<=2");
        let target = if *words == CHANGES[3].1 { 2.0 * CONVERGES } else { CONVERGES };
        add(&format!("converged, {words}"), (b.seconds, Some(target)), "s", "<=1");
    }
    add("writes at a new start, of 1", (restart.writes, Some(1.0)), "", "<=0");
    add("whole lists sent at a new start, of 1", (restart.whole, Some(1.0)), "", "<=0");
    let peers = f64::from(size.peers);
    add("lists known by their digest, of followers'", (restart.same, Some(peers)), "", ">=1");
    add("new start: all looked at", (restart.planned, Some(30.0)), "s", "<=1");
    add("new start: peers told", (restart.told, Some(30.0)), "s", "<=1");
    add("new start: processor", (restart.cpu, None), "s", "");
    rows
}
