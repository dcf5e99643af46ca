//! Results as rows: the same shape in every table and every `--json` file.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// One line of a result table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// The program's or benchmark's name.
    pub name: String,
    /// It ran to its end and everything that was checked held.
    pub ok: bool,
    /// What was measured.
    pub value: Option<f64>,
    /// What `value` is held against.
    pub reference: Option<f64>,
    /// `value / reference`.
    pub ratio: Option<f64>,
    /// Of `value` and `reference`.
    pub unit: String,
    /// The bound that the ratio is measured against, such as `>=10`; empty if there is none.
    pub target: String,
}

impl Row {
    /// A row that has no figure.
    #[must_use]
    pub fn verdict(name: impl Into<String>, ok: bool) -> Self {
        Self {
            name: name.into(),
            ok,
            value: None,
            reference: None,
            ratio: None,
            unit: String::new(),
            target: String::new(),
        }
    }

    /// A row whose figure is how many seconds it took.
    #[must_use]
    pub fn timed(name: impl Into<String>, ok: bool, seconds: f64) -> Self {
        Self { value: Some(seconds), unit: "s".to_owned(), ..Self::verdict(name, ok) }
    }

    /// Whether the ratio keeps the bound; `None` where there is no bound or nothing to hold against
    /// it.
    pub fn met(&self) -> Option<bool> {
        let bound = |s: &str| self.target.strip_prefix(s).and_then(|v| v.parse::<f64>().ok());
        match (self.ratio, bound(">="), bound("<=")) {
            (Some(r), Some(b), _) => Some(r >= b),
            (Some(r), _, Some(b)) => Some(r <= b),
            _ => None,
        }
    }
}

/// One array, whatever the rows are.
pub fn write_json<R: Serialize>(path: &Path, rows: &[R]) -> Result<()> {
    fs::write(path, serde_json::to_string_pretty(rows)? + "\n")
        .with_context(|| format!("cannot write {}", path.display()))
}

fn number(v: Option<f64>) -> String {
    match v {
        None => "-".into(),
        Some(v) if v.abs() >= 1000.0 => format!("{v:.0}"),
        Some(v) if v.abs() >= 10.0 => format!("{v:.1}"),
        Some(v) => format!("{v:.3}"),
    }
}

/// Names of rows that failed, in the tables that were printed since somebody asked.
static FAILED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The rows that failed since this was asked last: what a long log's end tells.
pub fn take_failed() -> Vec<String> {
    std::mem::take(&mut *FAILED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Prints the rows with a closing line.
pub fn print_table(rows: &[Row], ours: &str, reference: &str) {
    println!(
        "\n{:<34} {:>12} {:>12} {:>9} {:<8} {:<7} {:<6} result",
        "program", ours, reference, "ratio", "unit", "target", "met"
    );
    for r in rows {
        let met = r.met().map_or("", |m| if m { "yes" } else { "no" });
        let result = if r.ok { "ok" } else { "FAILED" };
        let ratio = number(r.ratio);
        println!(
            "{:<34} {:>12} {:>12} {ratio:>9} {:<8} {:<7} {met:<6} {result}",
            r.name,
            number(r.value),
            number(r.reference),
            r.unit,
            r.target
        );
    }
    let failed: Vec<String> = rows.iter().filter(|r| !r.ok).map(|r| r.name.clone()).collect();
    let bad = failed.len();
    FAILED.lock().unwrap_or_else(PoisonError::into_inner).extend(failed);
    let bounds = rows.iter().filter_map(Row::met).collect::<Vec<_>>();
    let kept = bounds.iter().filter(|m| **m).count();
    if !bounds.is_empty() {
        println!("targets met: {kept} of {}", bounds.len());
    }
    println!("{} passed, {bad} failed", rows.len() - bad);
}
