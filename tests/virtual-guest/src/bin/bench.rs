//! `bench [--json FILE] [--quick] [FILTER…]`: the whole stack's benchmarks, one ratio a row.
//!
//! A row that did not run fails the program; a target that was missed is shown and no failure,
//! since it tells of the machine as much as of the code.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use virtual_guest::bench::{ALL, Effort, Row, allow_descriptors, serve_echo};

#[derive(Debug, Parser)]
#[command(
    about = "Benchmarks of the whole stack without a VM: each row is a ratio measured in one run"
)]
struct Args {
    /// Write all rows to this file as one JSON array
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fewer and shorter samples: shows that everything runs
    #[arg(long)]
    quick: bool,
    /// Only benchmarks whose name contains one of these
    filter: Vec<String>,
    /// Be the null device on this socket
    #[arg(long, hide = true, value_name = "SOCKET")]
    echo_device: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    if let Some(socket) = &args.echo_device {
        serve_echo(socket).map_err(|e| anyhow::anyhow!("the null device: {e}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let wanted =
        |name: &str| args.filter.is_empty() || args.filter.iter().any(|f| name.contains(f));
    let chosen: Vec<_> = ALL.iter().filter(|b| wanted(b.name)).collect();
    anyhow::ensure!(!chosen.is_empty(), "no benchmark matches {:?}", args.filter);
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    allow_descriptors();
    println!("{}", Row::heading());
    let mut rows = Vec::new();
    for benchmark in chosen {
        let row = benchmark.run(effort);
        println!("{row}");
        rows.push(row);
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)? + "\n")?;
    }
    let missed = rows.iter().filter(|r| r.ok && !r.met).count();
    let failed = rows.iter().filter(|r| !r.ok).count();
    println!("{} rows, {missed} below target, {failed} did not run", rows.len());
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
