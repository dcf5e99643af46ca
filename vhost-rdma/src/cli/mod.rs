//! The command line: what a person or a script says to the daemon.
//!
//! Everything but `serve`, `vf`, `man` and `completions` is one call of the admin API; `vf` works
//! on the host itself, with or without a daemon. Output is for people, or with `--json` for
//! programs: field names are stable, one document on standard output. Mistakes go to standard
//! error, as a sentence that says what to do next or with `--json` as
//! `{"error":{"code","message"}}`, and the exit status tells the kinds apart.

#![forbid(unsafe_code)]

mod args;
mod client;
mod commands;
mod error;
mod peer_set;
mod vf;
mod view;

pub use args::{Cli, Command, ServeArgs};
pub use commands::run;
pub use error::{Failure, exit_code};
