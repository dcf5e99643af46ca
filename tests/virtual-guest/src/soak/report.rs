//! What a soak found.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::Sample;
use crate::vitals::{Turns, Vitals};

/// Growth of memory that is none: fragments, and a sample that fell into a round.
const MEMORY_SLACK: f64 = 1.5 * 1024.0 * 1024.0;
/// Descriptors, threads and mappings come and go with connections: this many more or less mean
/// nothing.
const COUNT_SLACK: f64 = 8.0;
/// Mappings of no file, more or less. The C library keeps the stacks of threads that are gone, of
/// Rust's 2 MiB up to twenty in a process (40 MiB, glibc's `glibc.pthread.stack_cache_size`), and
/// makes up to eight arenas for each CPU (`glibc.malloc.arena_max`). Each has a guard beside it.
/// There are as many as threads were once busy at the same time, so a machine that is busy with
/// others for half of a run has twenty more in that half. The third guest alone lives a thousand
/// times a minute: one mapping that each life left is far more than this.
const ANONYMOUS_SLACK: f64 = 96.0;
/// No worker may keep others waiting for longer, in seconds of its own time: half an hour on a
/// machine that others use has moments in which a lock's holder does not run, so this is a bound on
/// being stuck. The hostile guest suite has the bound on turns.
const LONGEST_TURN: f64 = 1.0;

/// A row of the report.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Row {
    pub name: String,
    pub ok: bool,
    pub value: f64,
    pub reference: Option<f64>,
    pub ratio: Option<f64>,
    pub unit: String,
    pub target: String,
}

/// All rows.
#[derive(Debug)]
pub struct Report {
    /// The rows.
    pub rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(
        samples: &[Sample],
        warm_up: Duration,
        left: BTreeMap<&'static str, u64>,
        turns: Turns,
        done: [u64; 3],
    ) -> Self {
        let warm: Vec<&Sample> = samples.iter().filter(|sample| sample.at >= warm_up).collect();
        let mut rows = Vec::new();
        for (name, value) in ["rounds", "lives", "verified messages"].into_iter().zip(done) {
            rows.push(row(name, value as f64, None, "", (value > 0, ">0")));
        }
        let growth = |read: fn(&Vitals) -> f64| Growth::of(&warm, read);
        rows.push(growth(|v| v.memory as f64).row("memory", "B", MEMORY_SLACK));
        rows.push(growth(|v| v.files as f64).row("descriptors", "", COUNT_SLACK));
        rows.push(growth(|v| v.threads as f64).row("threads", "", COUNT_SLACK));
        rows.push(growth(|v| v.mappings as f64).row("mappings of files", "", COUNT_SLACK));
        let anonymous = growth(|v| v.anonymous as f64);
        rows.push(anonymous.row("anonymous mappings", "", ANONYMOUS_SLACK));
        for (kind, count) in left {
            rows.push(row(&format!("{kind} left"), count as f64, None, "", (count == 0, "=0")));
        }
        let longest = turns.longest * 1e3;
        let short = turns.longest <= LONGEST_TURN;
        rows.push(row("longest turn of a worker", longest, None, "ms", (short, "<=1000")));
        Self { rows }
    }

    /// Whether everything is as it should be.
    pub fn ok(&self) -> bool {
        self.rows.iter().all(|row| row.ok)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<26} {:>14} {:>14} {:>5}  target", "row", "value", "reference", "unit")?;
        for row in &self.rows {
            let reference = row.reference.map_or_else(|| "–".to_owned(), |r| format!("{r:.0}"));
            writeln!(
                f,
                "{:<26} {:>14.2} {reference:>14} {:>5}  {:<10} {}",
                row.name,
                row.value,
                row.unit,
                row.target,
                if row.ok { "" } else { "FAILED" }
            )?;
        }
        let bad = self.rows.iter().filter(|row| !row.ok).count();
        write!(f, "{} passed, {bad} failed", self.rows.len() - bad)
    }
}

fn row(
    name: &str,
    value: f64,
    reference: Option<f64>,
    unit: &str,
    (ok, target): (bool, &str),
) -> Row {
    Row {
        name: name.into(),
        ok,
        value,
        reference,
        ratio: reference.filter(|r| *r > 0.0).map(|r| value / r),
        unit: unit.into(),
        target: target.into(),
    }
}

/// How a quantity went after the warm-up.
struct Growth {
    /// The least of the first and of the last quarter.
    first: f64,
    last: f64,
    /// What the line of least squares through all samples gains from the first to the last.
    slope: f64,
}

impl Growth {
    fn of(samples: &[&Sample], read: fn(&Vitals) -> f64) -> Self {
        let points: Vec<(f64, f64)> =
            samples.iter().map(|s| (s.at.as_secs_f64(), read(&s.vitals))).collect();
        let quarter = (points.len() / 4).max(1).min(points.len());
        let least =
            |part: &[(f64, f64)]| part.iter().map(|p| p.1).reduce(f64::min).unwrap_or(f64::NAN);
        let n = points.len() as f64;
        let (mx, my) = points.iter().fold((0.0, 0.0), |(x, y), p| (x + p.0 / n, y + p.1 / n));
        let (sxy, sxx) = points.iter().fold((0.0, 0.0), |(xy, xx), p| {
            (xy + (p.0 - mx) * (p.1 - my), xx + (p.0 - mx) * (p.0 - mx))
        });
        let span = points.last().map_or(0.0, |l| l.0) - points.first().map_or(0.0, |f| f.0);
        Self {
            first: least(&points[..quarter]),
            last: least(&points[points.len() - quarter..]),
            slope: if sxx > 0.0 { sxy / sxx * span } else { 0.0 },
        }
    }

    /// Growth is what both measures call so: one quarter above another may be chance, and a line
    /// may be bent by a single sample.
    fn row(&self, name: &str, unit: &str, slack: f64) -> Row {
        let grown = (self.last - self.first).min(self.slope);
        // Nothing measured is no proof.
        let ok = self.first > 0.0 && self.last > 0.0 && grown <= slack;
        row(name, self.last, Some(self.first), unit, (ok, &format!("+{slack:.0}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VITALS: Vitals =
        Vitals { memory: 1 << 20, files: 40, threads: 9, mappings: 90, anonymous: 110 };

    fn samples(memory: impl Fn(u64) -> u64) -> Vec<Sample> {
        let sample = |s| Sample {
            at: Duration::from_secs(s),
            vitals: Vitals { memory: memory(s), ..VITALS },
        };
        (0..100).map(sample).collect()
    }

    fn verdict(memory: impl Fn(u64) -> u64) -> bool {
        let turns = Turns { count: 1.0, longest: 0.001, ..Turns::default() };
        let warm = Duration::from_secs(20);
        Report::new(&samples(memory), warm, BTreeMap::new(), turns, [1; 3]).ok()
    }

    #[test]
    fn a_leak_is_seen_and_noise_is_not() {
        const MIB: u64 = 1 << 20;
        assert!(verdict(|_| 20 * MIB));
        assert!(verdict(|s| if s < 20 { s * MIB } else { 20 * MIB }), "the warm-up may grow");
        assert!(verdict(|s| 20 * MIB + s * 7919 % (3 * MIB)), "noise");
        assert!(!verdict(|s| 20 * MIB + s * 40 * 1024), "40 KiB a second");
        assert!(!verdict(|s| 20 * MIB + s * 40 * 1024 + s * 7919 % (3 * MIB)), "and noise");
        assert!(!verdict(|_| 0), "nothing was measured");
    }

    /// A guest that comes and goes has its descriptors at some readings and not at others.
    #[test]
    fn a_guest_that_comes_and_goes_is_no_leak() {
        let files = |files: fn(u64) -> usize| {
            let sample = |s| Sample {
                at: Duration::from_secs(s),
                vitals: Vitals { files: files(s), ..VITALS },
            };
            let samples: Vec<Sample> = (0..40).map(sample).collect();
            let turns = Turns { count: 1.0, longest: 0.001, ..Turns::default() };
            Report::new(&samples, Duration::ZERO, BTreeMap::new(), turns, [1; 3]).ok()
        };
        assert!(files(|s| if s < 20 && s % 3 > 0 || s % 7 == 0 { 126 } else { 174 }));
        assert!(!files(|s| (if s % 3 > 0 { 126 } else { 174 }) + s as usize));
    }

    /// Stacks that the C library keeps are no leak; one that each life leaves is.
    #[test]
    fn kept_stacks_are_no_leak() {
        let verdict = |anonymous: fn(u64) -> usize, mappings: fn(u64) -> usize| {
            let sample = |s| Sample {
                at: Duration::from_secs(s),
                vitals: Vitals { anonymous: anonymous(s), mappings: mappings(s), ..VITALS },
            };
            let samples: Vec<Sample> = (0..40).map(sample).collect();
            let turns = Turns { count: 1.0, longest: 0.001, ..Turns::default() };
            Report::new(&samples, Duration::ZERO, BTreeMap::new(), turns, [1; 3]).ok()
        };
        let busy = |s| if s < 20 { 110 } else { 150 };
        assert!(verdict(busy, |_| 90));
        assert!(!verdict(|s| 110 + 10 * s as usize, |_| 90), "ten lives a second");
        assert!(!verdict(|_| 110, busy), "mappings of files are nobody's to keep");
    }

    #[test]
    fn objects_and_long_turns_fail() {
        let turns = |longest| Turns { count: 1.0, longest, ..Turns::default() };
        let warm = Duration::ZERO;
        let flat = samples(|_| 1 << 20);
        let left = BTreeMap::from([("qps", 1)]);
        assert!(!Report::new(&flat, warm, left, turns(0.001), [1; 3]).ok());
        assert!(!Report::new(&flat, warm, BTreeMap::new(), turns(1.1), [1; 3]).ok());
        assert!(!Report::new(&flat, warm, BTreeMap::new(), turns(0.001), [1, 0, 1]).ok());
    }
}
