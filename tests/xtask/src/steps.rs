//! Steps in order, each with its time, and a table at the end. A step that fails does not stop the
//! others: one run tells all that is wrong. Why a step failed is said where it failed, and again
//! below the table, with the lines that told it, for those who are shown only the end of a long
//! log.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use lab::exec::check_interrupt;
use lab::rows::{self, Row};

use crate::transcript::{Transcript, reasons};

#[derive(Debug)]
pub(crate) struct Steps {
    done: Vec<Done>,
    /// `None` once the table is printed.
    printed: Option<Transcript>,
}

/// A step that has been run.
#[derive(Debug)]
struct Done {
    name: String,
    took: Duration,
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Failure {
    why: String,
    /// Of what it printed.
    lines: Vec<String>,
}

/// Why a step failed that had no error.
fn told(failed: &[String]) -> String {
    match failed {
        [] => "what it printed above says why".to_owned(),
        rows => format!("{}; what it printed above says why", rows.join(", ")),
    }
}

impl Steps {
    pub(crate) fn begin() -> Result<Self> {
        Ok(Self { done: Vec::new(), printed: Some(Transcript::start()?) })
    }

    /// Runs one step; an error or `false` is its failure. Only an interrupt ends everything.
    pub(crate) fn step(&mut self, name: &str, run: impl FnOnce() -> Result<bool>) -> Result<()> {
        check_interrupt()?;
        eprintln!("==> {name}");
        rows::take_failed();
        self.take_printed();
        let start = Instant::now();
        let result = run();
        let took = start.elapsed();
        check_interrupt()?;
        let why = match result {
            Ok(true) => None,
            Ok(false) => Some(told(&rows::take_failed())),
            Err(e) => {
                eprintln!("error: {e:#}");
                Some(format!("{e:#}"))
            }
        };
        let failure = why.map(|why| Failure { why, lines: self.take_reasons() });
        self.done.push(Done { name: name.to_owned(), took, failure });
        Ok(())
    }

    fn take_printed(&self) -> Vec<String> {
        self.printed.as_ref().map(Transcript::take).unwrap_or_default()
    }

    fn take_reasons(&self) -> Vec<String> {
        reasons(&self.take_printed()).into_iter().map(Into::into).collect()
    }

    /// Prints the table, the failures and the closing line, writes the rows; true if all is well.
    pub(crate) fn finish(mut self, json: Option<&Path>) -> Result<bool> {
        self.printed = None;
        println!("\n{:<34} {:>9}  result", "step", "seconds");
        for Done { name, took, failure } in &self.done {
            let result = if failure.is_none() { "ok" } else { "FAILED" };
            println!("{name:<34} {:>9.1}  {result}", took.as_secs_f64());
        }
        let total: Duration = self.done.iter().map(|step| step.took).sum();
        println!("{:<34} {:>9.1}", "all", total.as_secs_f64());
        let failures =
            self.done.iter().filter_map(|step| Some((&step.name, step.failure.as_ref()?)));
        for (name, failure) in failures.clone() {
            println!("\n{name} FAILED: {}", failure.why);
            for line in &failure.lines {
                println!("    | {line}");
            }
        }
        let bad = failures.count();
        println!("{} passed, {bad} failed", self.done.len() - bad);
        if let Some(path) = json {
            let row = |step: &Done| {
                Row::timed(step.name.clone(), step.failure.is_none(), step.took.as_secs_f64())
            };
            rows::write_json(path, &self.done.iter().map(row).collect::<Vec<_>>())?;
        }
        Ok(bad == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_names_the_rows_that_failed() {
        let row = |name: &str, ok| Row::verdict(name, ok);
        // Nothing of other tests is kept: what a step prints is transcript.rs's to test.
        let mut steps = Steps { done: Vec::new(), printed: None };
        let table = || {
            rows::print_table(&[row("rping", false), row("udaddy", true)], "", "");
            Ok(false)
        };
        steps.step("a step", table).unwrap();
        steps.step("another", || Ok(false)).unwrap();
        let failure = |at: usize| &steps.done[at].failure.as_ref().unwrap().why;
        assert!(failure(0).starts_with("rping; "), "{}", failure(0));
        assert!(!failure(1).contains("rping"), "{}", failure(1));
    }
}
