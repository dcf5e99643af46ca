//! `soak [--minutes N] [--json FILE] [--seed N]`: churn, errors and traffic for a long time, and
//! nothing grows.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use virtual_guest::soak;

#[derive(Debug, Parser)]
#[command(about = "Churn, errors and traffic in virtual guests; the daemon must not grow")]
struct Args {
    /// How long
    #[arg(long, default_value_t = 1.0, value_name = "N")]
    minutes: f64,
    /// Write all rows to this file as one JSON array
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the choices begin; the same number makes the same choices
    #[arg(long, default_value_t = 0x5eed, value_name = "N")]
    seed: u64,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    anyhow::ensure!(args.minutes > 0.0, "--minutes must be more than 0");
    let report = soak::run(Duration::from_secs_f64(args.minutes * 60.0), args.seed);
    println!("{report}");
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&report.rows)? + "\n")?;
    }
    Ok(if report.ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
