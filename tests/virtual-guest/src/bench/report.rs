//! Rows: the JSON that all reports of the project share, and the table for people.

use std::any::Any;

use serde::Serialize;

/// Which way is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// A bandwidth, a rate.
    More,
    /// A time, a count of wake-ups.
    Less,
}

/// What a row should reach: a bound on the ratio or on the value itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Target {
    /// On `ratio`.
    Ratio(f64),
    /// On `value`.
    Value(f64),
}

/// One row of a report.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The benchmark.
    pub name: String,
    /// It ran.
    pub ok: bool,
    /// What was measured, in `unit`.
    pub value: f64,
    /// What the reference did, in `unit`.
    pub reference: f64,
    /// `value` ÷ `reference`.
    pub ratio: f64,
    /// Of `value` and `reference`.
    pub unit: String,
    /// The bound that `ratio` (or `value`, where the unit of the target says so) should keep.
    pub target: Option<f64>,
    /// What the target is a bound of: `ratio` or `value`.
    pub target_of: &'static str,
    /// Was the target reached?
    pub met: bool,
    /// The worst and the best value of all samples ÷ `reference`.
    pub spread: [f64; 2],
    /// Samples.
    pub samples: usize,
    /// Why it did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

pub(super) fn panic_text(cause: &(dyn Any + Send)) -> String {
    cause
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| cause.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "a panic without a message".into())
}

impl Row {
    /// A row from (value, reference) samples: the best value beside the best reference, since what
    /// disturbs a sample on a shared machine disturbs either half of it.
    pub fn best(
        name: &str,
        unit: &str,
        better: Better,
        target: Option<Target>,
        samples: &[(f64, f64)],
    ) -> Self {
        let sorted = |pick: fn(&(f64, f64)) -> f64| {
            let mut all: Vec<f64> = samples.iter().map(pick).collect();
            all.sort_by(f64::total_cmp);
            if better == Better::Less {
                all.reverse();
            }
            all
        };
        let (values, references) = (sorted(|s| s.0), sorted(|s| s.1));
        let last = samples.len() - 1;
        let (value, reference) = (values[last], references[last]);
        let reached = |got: f64, bound: f64| match better {
            Better::More => got >= bound,
            Better::Less => got <= bound,
        };
        let (target, target_of, met) = match target {
            None => (None, "ratio", true),
            Some(Target::Ratio(t)) => (Some(t), "ratio", reached(value / reference, t)),
            Some(Target::Value(t)) => (Some(t), "value", reached(value, t)),
        };
        Self {
            name: name.into(),
            ok: true,
            value,
            reference,
            ratio: value / reference,
            unit: unit.into(),
            target,
            target_of,
            met,
            spread: [values[0] / reference, value / reference],
            samples: samples.len(),
            error: None,
        }
    }

    /// A row for a benchmark that could not run.
    pub fn failed(name: &str, why: &str) -> Self {
        Self {
            name: name.into(),
            ok: false,
            value: 0.0,
            reference: 0.0,
            ratio: 0.0,
            unit: String::new(),
            target: None,
            target_of: "ratio",
            met: false,
            spread: [0.0; 2],
            samples: 0,
            // The daemon's log may follow.
            error: Some(why.lines().next().unwrap_or_default().to_owned()),
        }
    }

    /// The heading of the table.
    pub fn heading() -> String {
        format!(
            "{:<22} {:>12} {:>12} {:<8} {:>8} {:>17}  {}",
            "benchmark", "value", "reference", "unit", "ratio", "worst … best", "target"
        )
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(why) = &self.error {
            let first = why.lines().next().unwrap_or("");
            return write!(f, "{:<22} did not run: {first}", self.name);
        }
        let target = match self.target {
            None => String::from("-"),
            Some(t) => {
                format!("{} {t} {}", self.target_of, if self.met { "met" } else { "MISSED" })
            }
        };
        write!(
            f,
            "{:<22} {:>12.3} {:>12.3} {:<8} {:>8.3} {:>8.3}…{:<8.3}  {target}",
            self.name,
            self.value,
            self.reference,
            self.unit,
            self.ratio,
            self.spread[0],
            self.spread[1]
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_sample_is_the_row_and_a_missed_target_is_not_a_failure() {
        let samples = [(4.0, 8.0), (7.0, 5.0), (6.0, 7.0)];
        let row = Row::best("x", "GB/s", Better::More, Some(Target::Ratio(0.9)), &samples);
        assert!(row.ok && !row.met);
        assert_eq!((row.value, row.ratio, row.spread), (7.0, 0.875, [0.5, 0.875]));
        let row = Row::best("x", "us", Better::Less, Some(Target::Value(4.5)), &samples);
        assert!(row.met);
        assert_eq!((row.value, row.reference, row.spread), (4.0, 5.0, [1.4, 0.8]));
    }

    #[test]
    fn a_row_has_the_keys_that_every_report_has() {
        let json = serde_json::to_value(Row::failed("x", "because\nand the log")).unwrap();
        assert_eq!(json["error"], "because");
        for key in ["name", "ok", "value", "reference", "ratio", "unit", "target"] {
            assert!(json.get(key).is_some(), "{key}");
        }
    }
}
