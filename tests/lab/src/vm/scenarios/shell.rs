//! Commands from standard input, one per line: `a: command`, `b: command`, or just `command` for
//! guest a. `console a` shows the end of a's console.
//!
//! Standard input may be a fifo (`mkfifo f; sleep 9999 > f & cargo xtask vm shell < f`), so that
//! another program drives it.

use std::io::{BufRead, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::Result;

use super::run::Boot;
use crate::cache::Cache;
use crate::exec;
use crate::vm::Lab;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    boot: Boot,
    /// Seconds that each command may take
    #[arg(long, default_value_t = 600)]
    timeout: u64,
}

impl Args {
    pub fn run(&self, cache: &Cache) -> Result<bool> {
        let mut lab = self.boot.boot(cache)?;
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        println!(
            "guests are up; a line `b: COMMAND` runs COMMAND in guest b, `console a` shows a \
             console, end of input ends all"
        );
        loop {
            exec::check_interrupt()?;
            print!("> ");
            std::io::stdout().flush()?;
            let line = loop {
                match lines.recv_timeout(Duration::from_millis(200)) {
                    Ok(line) => break line,
                    Err(RecvTimeoutError::Timeout) => exec::check_interrupt()?,
                    Err(RecvTimeoutError::Disconnected) => return Ok(true),
                }
            };
            if let Err(e) = self.one(&mut lab, line.trim()) {
                exec::check_interrupt()?;
                println!("error: {e:#}");
            }
        }
    }

    fn one(&self, lab: &mut Lab, line: &str) -> Result<()> {
        if line.is_empty() {
            return Ok(());
        }
        if let Some(name) = line.strip_prefix("console ") {
            for guest in lab.guests.iter().filter(|g| g.name == name.trim()) {
                println!("{}", guest.console_tail(60));
            }
            return Ok(());
        }
        let target = line.split_once(':').filter(|(n, _)| lab.guests.iter().any(|g| g.name == *n));
        let (name, script) = target.unwrap_or(("a", line));
        for guest in lab.guests.iter_mut().filter(|g| g.name == name) {
            let out = guest.run(script, Duration::from_secs(self.timeout))?;
            print!("{}", out.text);
            println!(
                "[{name}: {}]",
                out.status.map_or_else(
                    || "killed at its deadline".into(),
                    |s| format!("exit status {s}")
                )
            );
        }
        Ok(())
    }
}
