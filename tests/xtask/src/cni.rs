//! The CNI plugin's benchmark: our static program beside Debian's `ptp`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::exec::{run_logged, tail, tied, workspace};
use crate::k8s::parts::node_root;
use crate::products::static_programs;

const WAIT: Duration = Duration::from_secs(1200);

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Write the rows here
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Args {
    /// True if the ratios keep their bounds.
    pub(crate) fn run(&self, cache: &Cache) -> Result<bool> {
        let plugin = static_programs(cache, &["vhost-rdma-cni"], &["vhost-rdma-cni"])?;
        let plugin = plugin.first().context("one program was asked for")?;
        let reference = node_root(cache)?.join("usr/lib/cni");
        let log = cache.log("cni-bench");
        let rows = log.with_extension("json");
        let mut cmd = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // The plugin is the release build; who calls it and looks at the clock need not be.
        let bench =
            ["bench", "--quiet", "--profile", "dev", "-p", "vhost-rdma-cni", "--bench", "add"];
        cmd.current_dir(workspace()).args(bench);
        cmd.env("PLUGIN", plugin).env("REFERENCE", reference).env("ROWS", &rows);
        run_logged(&mut cmd, "CNI ADD beside ptp", &log, WAIT)?;
        println!("{}", tail(&log, 0, 4));
        let text = std::fs::read_to_string(&rows)?;
        if let Some(path) = &self.json {
            std::fs::write(path, &text)?;
        }
        let rows: Vec<serde_json::Value> = serde_json::from_str(&text)?;
        Ok(rows.iter().all(|row| row["ok"] == true))
    }
}
