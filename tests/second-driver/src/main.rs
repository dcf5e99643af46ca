//! `second-driver`: an `ibv_rc_pingpong` that is guest, driver and monitor in one process.

use std::process::ExitCode;

use clap::Parser;
use second_driver::pingpong::{Options, run};

fn main() -> ExitCode {
    if run(&Options::parse()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
