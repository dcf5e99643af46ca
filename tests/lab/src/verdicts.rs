//! What became of the tests of rdma-core's Python suite, and which of them may skip.
//!
//! `tests/guest-programs/pyverbs-run.py` writes a line for each test. The skips are pinned in a
//! file of the repository, each with the reason that the suite gives: any difference is drift.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The runner.
pub(crate) const RUNNER: &str = include_str!("../../guest-programs/pyverbs-run.py");

/// What became of one test, as the runner writes it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Verdict {
    pub(crate) name: String,
    pub(crate) outcome: String,
    #[serde(default)]
    pub(crate) reason: String,
}

impl Verdict {
    pub(crate) fn is(&self, outcome: &str) -> bool {
        self.outcome == outcome
    }
}

pub(crate) fn totals(verdicts: &[Verdict]) -> String {
    let mut text = format!("{} tests", verdicts.len());
    for outcome in ["ok", "skip", "fail", "error", "crash", "timeout"] {
        let count = verdicts.iter().filter(|v| v.is(outcome)).count();
        let _ = write!(text, ", {count} {outcome}");
    }
    text
}

/// The runner's file; an unfinished one is an error.
pub(crate) fn parse(path: &Path) -> Result<Vec<Verdict>> {
    #[derive(Deserialize)]
    struct Head {
        tests: usize,
    }
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lines = text.lines();
    let head: Head = serde_json::from_str(lines.next().unwrap_or_default())
        .context("the results do not begin with the number of tests")?;
    let verdicts = lines.map(serde_json::from_str).collect::<Result<Vec<Verdict>, _>>()?;
    if verdicts.len() != head.tests {
        bail!("{} of {} tests have a result", verdicts.len(), head.tests);
    }
    Ok(verdicts)
}

/// `test name TAB text that the reason contains`, one a line; `#` begins a comment.
pub(crate) fn read_pins(path: &Path) -> Result<BTreeMap<String, String>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut pins = BTreeMap::new();
    for line in text.lines().filter(|l| !l.trim().is_empty() && !l.starts_with('#')) {
        let (name, reason) = line
            .split_once('\t')
            .with_context(|| format!("{}: no reason in `{line}`", path.display()))?;
        pins.insert(name.to_owned(), reason.trim().to_owned());
    }
    Ok(pins)
}

/// Every difference between the skips and the pinned ones, by test.
pub(crate) fn drift(
    verdicts: &[Verdict],
    pins: &BTreeMap<String, String>,
    whole: bool,
) -> BTreeMap<String, String> {
    let mut drift = BTreeMap::new();
    for verdict in verdicts {
        let told = match pins.get(&verdict.name) {
            None if verdict.is("skip") => format!("not pinned: {}", verdict.reason),
            Some(_) if !verdict.is("skip") => format!("pinned, but {}", verdict.outcome),
            Some(pin) if !verdict.reason.contains(pin.as_str()) => {
                format!("skips for another reason than pinned: {}", verdict.reason)
            }
            _ => continue,
        };
        drift.insert(verdict.name.clone(), told);
    }
    if whole {
        for name in pins.keys().filter(|n| !verdicts.iter().any(|v| v.name == **n)) {
            drift.insert(name.clone(), "pinned, but no such test".into());
        }
    }
    drift
}

/// The verdicts on a device, and how its skips differ from the pinned ones.
#[derive(Debug)]
pub(crate) struct Found<'a> {
    pub(crate) of: &'a str,
    pub(crate) verdicts: &'a [Verdict],
    pub(crate) drift: &'a BTreeMap<String, String>,
}

impl Found<'_> {
    /// Says what there is, and whether it is good: `least` tests passed, none is bad, and the skips
    /// are those of the file `pins`.
    pub(crate) fn sum_up(&self, least: Option<usize>, pins: &Path) -> bool {
        for (name, what) in self.drift {
            println!("skips     {name}: {what}");
        }
        println!("{}: {}", self.of, totals(self.verdicts));
        let passed = self.verdicts.iter().filter(|v| v.is("ok")).count();
        let bad = self.verdicts.iter().filter(|v| !v.is("ok") && !v.is("skip")).count();
        let short = least.filter(|least| passed < *least);
        if let Some(least) = short {
            println!("at least {least} tests must pass");
        }
        if !self.drift.is_empty() {
            println!("the skips are not those of {}", pins.display());
        }
        bad == 0 && short.is_none() && self.drift.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(name: &str, outcome: &str, reason: &str) -> Verdict {
        Verdict { name: name.into(), outcome: outcome.into(), reason: reason.into() }
    }

    #[test]
    fn any_difference_from_the_pins_is_drift() {
        let pins: BTreeMap<String, String> =
            ["a", "b", "c", "gone"].map(|n| (n.to_owned(), "no XRC".to_owned())).into();
        let found = drift(
            &[
                verdict("a", "skip", "there is no XRC here"),
                verdict("b", "ok", ""),
                verdict("c", "skip", "something else"),
                verdict("d", "skip", "no XRC"),
                verdict("e", "ok", ""),
            ],
            &pins,
            true,
        );
        assert_eq!(found.keys().collect::<Vec<_>>(), ["b", "c", "d", "gone"]);
    }
}
