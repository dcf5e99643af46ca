//! Recorded results: runs that CI has no time for, as data.
//!
//! Each file of `docs/results` is one run: what was run, on which commit and machine, and the rows
//! that its `--json` wrote, unchanged. `docs/results/README.md` is made from them and from nothing
//! else; `cargo xtask lint` fails where it is not what they make. No figure is typed in by hand.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::{Args as ClapArgs, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::figures;
use lab::exec::workspace;
use lab::rows::Row;

/// Where runs are kept.
const DIR: &str = "docs/results";
/// Rows that a summary names: those that failed or missed, at most.
const NAMED: usize = 6;

#[derive(Debug, Subcommand)]
pub(crate) enum Results {
    /// Keep a run: the rows that a command wrote with `--json`
    Add(Add),
    /// Make docs/results/README.md anew
    Summary,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Add {
    /// The file that `--json` wrote
    rows: PathBuf,
    /// What was run, such as `cargo xtask bench isolation`
    #[arg(long)]
    command: String,
    /// What else a reader must know: what ran beside it, what was changed since
    #[arg(long, default_value = "")]
    note: String,
    /// The machine, in a few words
    #[arg(long, default_value = "two cores")]
    machine: String,
}

/// One run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Run {
    /// Year, month, day.
    pub(crate) date: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) commit: Option<String>,
    pub(crate) command: String,
    pub(crate) machine: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) note: String,
    /// As the command wrote them. All have a name, and `ok`.
    #[serde(default)]
    pub(crate) rows: Vec<BTreeMap<String, Value>>,
    /// What programs printed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) output: Vec<Value>,
}

impl Results {
    pub(crate) fn run(&self) -> Result<bool> {
        let dir = workspace().join(DIR);
        match self {
            Self::Add(add) => add.run(&dir)?,
            Self::Summary => {}
        }
        let runs = runs(&dir)?;
        fs::write(dir.join("README.md"), summary(&runs))?;
        let readme = workspace().join("README.md");
        let text = fs::read_to_string(&readme)?;
        fs::write(&readme, figures::put(&text, &figures::table(&runs)?)?)?;
        Ok(true)
    }
}

impl Add {
    fn run(&self, dir: &Path) -> Result<()> {
        let text = fs::read_to_string(&self.rows)
            .with_context(|| format!("cannot read {}", self.rows.display()))?;
        let rows: Vec<BTreeMap<String, Value>> =
            serde_json::from_str(&text).context("not the rows of a `--json` file")?;
        ensure!(
            rows.iter().all(|row| row.contains_key("name") && row.contains_key("ok")),
            "each row needs `name` and `ok`"
        );
        let run = Run {
            date: output("date", &["-u", "+%Y-%m-%d"])?,
            commit: Some(output("git", &["rev-parse", "--short=7", "HEAD"])?),
            command: self.command.clone(),
            machine: self.machine.clone(),
            note: self.note.clone(),
            rows,
            output: Vec::new(),
        };
        let path = free_name(dir, &run);
        fs::write(&path, serde_json::to_string_pretty(&run)? + "\n")?;
        println!("{}", path.display());
        Ok(())
    }
}

/// What a program prints.
fn output(program: &str, args: &[&str]) -> Result<String> {
    let out = Command::new(program).args(args).current_dir(workspace()).output();
    let out = out.with_context(|| format!("{program} does not run"))?;
    ensure!(out.status.success(), "{program} {}: {}", args.join(" "), out.status);
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// A name that no other run has: the date and the command.
fn free_name(dir: &Path, run: &Run) -> PathBuf {
    let command = run.command.trim_start_matches("cargo ").trim_start_matches("xtask ");
    let words: Vec<&str> =
        command.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty()).collect();
    let stem = format!("{}-{}", run.date, words.join("-"));
    let names = std::iter::once(format!("{stem}.json"));
    let mut names = names.chain((2..u32::MAX).map(|n| format!("{stem}-{n}.json")));
    dir.join(names.find(|name| !dir.join(name).exists()).unwrap_or(stem))
}

/// All runs, newest first, each with its file's name.
fn runs(dir: &Path) -> Result<Vec<(String, Run)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_none_or(|kind| kind != "json") {
            continue;
        }
        let run: Run = serde_json::from_str(&fs::read_to_string(&path)?)
            .with_context(|| format!("{} is no run", path.display()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.push((name, run));
    }
    all.sort_by(|(a, x), (b, y)| y.date.cmp(&x.date).then_with(|| a.cmp(b)));
    Ok(all)
}

/// Whether a row reached what it was to reach; `None` where there is no bound.
fn met(row: &BTreeMap<String, Value>) -> Option<bool> {
    let said = row.get("met").and_then(Value::as_bool);
    let number = |key: &str| row.get(key).and_then(Value::as_f64);
    let bound = Row {
        name: String::new(),
        ok: true,
        value: number("value"),
        reference: number("reference"),
        ratio: number("ratio"),
        unit: String::new(),
        target: row.get("target").and_then(Value::as_str).unwrap_or_default().to_owned(),
    };
    said.or_else(|| bound.met())
}

fn named<'a>(rows: impl Iterator<Item = &'a BTreeMap<String, Value>>) -> String {
    let names: Vec<&str> =
        rows.filter_map(|row| row.get("name")?.as_str()).take(NAMED + 1).collect();
    let more = if names.len() > NAMED { ", …" } else { "" };
    format!("{}{more}", names[..names.len().min(NAMED)].join(", "))
}

fn summary(runs: &[(String, Run)]) -> String {
    let mut text = String::from(
        "# Recorded results\n\n\
         Made by `cargo xtask results summary` from the files beside it; do not edit. \
         Each file is\n\
         one run: what was run, where, the rows that its `--json` wrote, and what a reader must\n\
         know. `ok` counts rows that ran and whose checks held, \
         `targets` those that reached their\n\
         bound, of all that have one. Newest first.\n\n\
         | date | commit | command | ok | targets | not reached |\n|---|---|---|---:|---:|---|\n",
    );
    for (file, run) in runs {
        let ok = |row: &BTreeMap<String, Value>| row.get("ok") == Some(&Value::Bool(true));
        let bounds: Vec<bool> = run.rows.iter().filter_map(met).collect();
        let targets = match bounds.len() {
            0 => String::new(),
            all => format!("{} of {all}", bounds.iter().filter(|&&met| met).count()),
        };
        let short = named(run.rows.iter().filter(|row| !ok(row) || met(row) == Some(false)));
        let count = match run.rows.len() {
            0 => "–".to_owned(),
            all => format!("{} of {all}", run.rows.iter().filter(|row| ok(row)).count()),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {} | [`{}`]({file}) | {count} | {targets} | {short} |",
            run.date,
            run.commit.as_deref().unwrap_or("–"),
            run.command,
        );
    }
    text
}

/// Whether the summary, and the README's figures, are what the runs make.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let dir = root.join(DIR);
    let runs = runs(&dir)?;
    let readme = fs::read_to_string(root.join("README.md"))?;
    let made = [
        (format!("{DIR}/README.md"), summary(&runs)),
        ("README.md".to_owned(), figures::put(&readme, &figures::table(&runs)?)?),
    ];
    let mut right = true;
    for (name, text) in made {
        if fs::read_to_string(root.join(&name))? != text {
            eprintln!("error: {name} is not what the runs make: `cargo xtask results summary`");
            right = false;
        }
    }
    Ok(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rows: &str) -> Run {
        let rows: Value = serde_json::from_str(rows).unwrap();
        serde_json::from_value(serde_json::json!({
            "date": "2026-01-02", "command": "cargo xtask bench", "machine": "m", "rows": rows,
        }))
        .unwrap()
    }

    #[test]
    fn rows_that_failed_or_missed_are_named() {
        let run = run(r#"[{"name": "a", "ok": true, "ratio": 0.5, "target": ">=0.4"},
                {"name": "b", "ok": true, "met": false},
                {"name": "c", "ok": false},
                {"name": "d", "ok": true}]"#);
        let text = summary(&[("f.json".into(), run)]);
        let line = "| 2026-01-02 | – | [`cargo xtask bench`](f.json) | 3 of 4 | 1 of 2 | b, c |";
        assert!(text.ends_with(&format!("{line}\n")), "{text}");
    }

    #[test]
    fn the_summary_of_the_repository_is_that_of_its_runs() {
        assert!(check(&workspace()).unwrap());
    }

    #[test]
    fn a_name_is_free() {
        let dir = std::env::temp_dir().join(format!("results-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let run = run("[]");
        let first = free_name(&dir, &run);
        assert!(first.ends_with("2026-01-02-bench.json"), "{}", first.display());
        fs::write(&first, "").unwrap();
        assert!(free_name(&dir, &run).ends_with("2026-01-02-bench-2.json"));
        fs::remove_dir_all(&dir).unwrap();
    }
}
