//! The command line against a real daemon: every command, every mistake, and what survives a
//! restart.
//!
//! Each test runs the shipped binary with a runtime directory of its own, so tests do not disturb
//! each other or a daemon of the machine.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "cli/daemon.rs"]
mod daemon;
#[path = "cli/json.rs"]
mod json;
#[path = "cli/mistakes.rs"]
mod mistakes;
#[path = "cli/numbers.rs"]
mod numbers;
#[path = "cli/peers.rs"]
mod peers;
#[path = "cli/readme.rs"]
mod readme;
#[path = "cli/reload.rs"]
mod reload;
#[path = "cli/run.rs"]
mod run;
#[path = "cli/running.rs"]
mod running;
#[path = "cli/vf.rs"]
mod vf;
