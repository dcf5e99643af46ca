//! Every chore of the project behind one command: `cargo xtask`.
//!
//! Three layers. `exec`, `cache` and `host` know nothing of RDMA: children that cannot outlive us, artefacts that are made once, the
//! machine's package mirror. `roots` and `products` make what a lab needs: a QEMU, guest images, builders, and from them the kernel module
//! and the provider. `vm` boots guests and runs programs in them; each use of it is one file in `vm/scenarios`.
//!
//! For work on the guest side:
//! ```sh
//! cargo xtask vm prepare                                  # QEMU, guest image, builder; prints their paths
//! cargo xtask vm run --share DIR --script FILE            # boot a guest, run FILE in it with DIR as /host/share
//! cargo xtask vm run --guests 2 --script A --script B --vhost-socket S1 --vhost-socket S2
//! cargo xtask vm shell --guests 2                         # commands from standard input, `b: uname -r`
//! ```

mod cache;
mod exec;
mod host;
mod products;
mod roots;
mod rows;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use cache::Cache;

/// Chores of the vhost-rdma project
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// The VM lab
    #[command(subcommand)]
    Vm(vm::scenarios::Scenario),
}

fn run(cli: &Cli) -> Result<bool> {
    exec::catch_signals()?;
    match &cli.chore {
        Chore::Vm(scenario) => scenario.run(&Cache::open()?),
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
