//! `isolation [--json FILE] [--quick] [--loose] [--processes] [FILTER…]`: what each attack costs a
//! victim in another network, a row each.
//!
//! A row that did not run fails the program, and so does one that missed a target. The targets are
//! for a quiet machine: with `--loose` a miss is shown, and only what no machine excuses is a
//! failure.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use virtual_guest::attack::{become_another, is_to_become_another};
use virtual_guest::bench::isolation::{Bounds, Effort, Row, names, names_by_processes, run};

#[derive(Debug, Parser)]
#[command(about = "What attacks by one network cost a victim in another on the same worker")]
struct Args {
    /// Write all rows to this file as one JSON array
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Small attacks and short slices: shows that everything runs
    #[arg(long)]
    quick: bool,
    /// For a busy machine: fail only where a row shows that the worker stood still
    #[arg(long)]
    loose: bool,
    /// The villains are processes
    #[arg(long)]
    processes: bool,
    /// Only attacks whose name contains one of these
    filter: Vec<String>,
}

fn main() -> anyhow::Result<ExitCode> {
    if is_to_become_another() {
        become_another();
        return Ok(ExitCode::SUCCESS);
    }
    let args = Args::parse();
    let wanted =
        |name: &str| args.filter.is_empty() || args.filter.iter().any(|f| name.contains(f));
    let all: Vec<_> =
        if args.processes { names_by_processes().collect() } else { names().collect() };
    let chosen: Vec<_> = all.into_iter().filter(|name| wanted(name)).collect();
    anyhow::ensure!(!chosen.is_empty(), "no attack matches {:?}", args.filter);
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL };
    println!("{}", Row::heading());
    let mut rows = Vec::new();
    for name in chosen {
        let row = run(&name, effort);
        println!("{row}");
        rows.push(row);
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)? + "\n")?;
    }
    let failed = rows.iter().filter(|r| !r.ok).count();
    let missed = rows.iter().filter(|r| r.ok && !r.met).count();
    println!("{} rows, {missed} below target, {failed} did not run", rows.len());
    let stood = rows.iter().filter(|r| r.ok && args.loose && !Bounds::LOOSE.hold(r));
    let stood = stood.inspect(|r| println!("the worker stood still: {r}")).count();
    let fatal = if args.loose { stood } else { missed };
    Ok(if failed + fatal == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
