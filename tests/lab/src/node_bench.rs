//! What the node's programs cost, as ratios of things measured in turn in one run: the agent beside
//! the bare disk and beside itself with few devices, the CNI plugin beside Debian's `ptp`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec::{run_logged, tied, workspace};
use crate::k8s::parts::node_root;
use crate::products::{Profile, static_programs};
use crate::rows::{self, Row};

const WAIT: Duration = Duration::from_secs(2400);

/// What it can be told
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

fn cargo() -> Command {
    let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cmd.current_dir(workspace());
    cmd
}

impl Args {
    /// True if the ratios keep their bounds.
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut table = agent(cache)?;
        table.extend(cni(cache)?);
        rows::print_table(&table, "ours", "reference");
        if let Some(path) = &self.json {
            rows::write_json(path, &table)?;
        }
        Ok(table.iter().all(|row| row.ok))
    }
}

/// A benchmark program that writes its rows to the file that `ROWS` names.
fn rows_of(cmd: &mut Command, what: &str, log: &Path) -> Result<Vec<Row>> {
    let rows = log.with_extension("json");
    let _ = std::fs::remove_file(&rows);
    run_logged(cmd.env("ROWS", &rows), what, log, WAIT)?;
    let text = std::fs::read_to_string(&rows).with_context(|| rows.display().to_string())?;
    serde_json::from_str(&text).with_context(|| format!("{what} gave no rows"))
}

/// All optimised: the agent's own time is a part of what is measured.
fn agent(cache: &Cache) -> Result<Vec<Row>> {
    let log = cache.log("agent-bench");
    let mut build = cargo();
    build.args(["build", "--release", "--locked", "-p", "vhost-rdma"]);
    run_logged(&mut build, "building the daemon", &log, WAIT)?;
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    let daemon = target.join("release/vhost-rdma").canonicalize()?;
    let mut cmd = cargo();
    cmd.args(["bench", "--quiet", "--locked", "-p", "vhost-rdma-agent", "--bench", "agent"]);
    rows_of(cmd.env("DAEMON", daemon), "allocations beside fdatasync", &log)
}

/// The plugin is the release build; who calls it and looks at the clock need not be.
fn cni(cache: &Cache) -> Result<Vec<Row>> {
    let plugin =
        static_programs(cache, Profile::Release, &["vhost-rdma-cni"], &["vhost-rdma-cni"])?;
    let plugin = plugin.first().context("one program was asked for")?;
    let reference = node_root(cache)?.join("usr/lib/cni");
    let mut cmd = cargo();
    let bench = ["bench", "--quiet", "--profile", "dev", "-p", "vhost-rdma-cni", "--bench", "add"];
    cmd.args(bench).env("PLUGIN", plugin).env("REFERENCE", reference);
    rows_of(&mut cmd, "CNI ADD beside ptp", &cache.log("cni-bench"))
}
