//! Steps in order, each with its time, and a table at the end. A step that fails does not stop the
//! others: one run tells all that is wrong.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::exec::check_interrupt;
use crate::rows::{self, Row};

#[derive(Debug, Default)]
pub(crate) struct Steps {
    done: Vec<(String, bool, Duration)>,
}

impl Steps {
    /// Runs one step; an error or `false` is its failure. Only an interrupt ends everything.
    pub(crate) fn step(&mut self, name: &str, run: impl FnOnce() -> Result<bool>) -> Result<()> {
        check_interrupt()?;
        eprintln!("==> {name}");
        let start = Instant::now();
        let result = run();
        let took = start.elapsed();
        check_interrupt()?;
        let ok = match result {
            Ok(ok) => ok,
            Err(e) => {
                eprintln!("error: {e:#}");
                false
            }
        };
        self.done.push((name.to_owned(), ok, took));
        Ok(())
    }

    /// Prints the table and the closing line, writes the rows; true if all is well.
    pub(crate) fn finish(&self, json: Option<&Path>) -> Result<bool> {
        println!("\n{:<34} {:>9}  result", "step", "seconds");
        for (name, ok, took) in &self.done {
            println!(
                "{name:<34} {:>9.1}  {}",
                took.as_secs_f64(),
                if *ok { "ok" } else { "FAILED" }
            );
        }
        let bad = self.done.iter().filter(|(_, ok, _)| !ok).count();
        let total: Duration = self.done.iter().map(|(.., took)| *took).sum();
        println!("{:<34} {:>9.1}", "all", total.as_secs_f64());
        println!("{} passed, {bad} failed", self.done.len() - bad);
        if let Some(path) = json {
            let rows: Vec<Row> = self
                .done
                .iter()
                .map(|(name, ok, took)| Row {
                    name: name.clone(),
                    ok: *ok,
                    value: Some(took.as_secs_f64()),
                    reference: None,
                    ratio: None,
                    unit: "s".into(),
                    target: String::new(),
                })
                .collect();
            rows::write_json(path, &rows)?;
        }
        Ok(bad == 0)
    }
}
