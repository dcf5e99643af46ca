//! Rows of the isolation benchmark: those of every report, and two figures more.

use serde::Serialize;

use super::Seen;
use crate::vitals::Turns;

/// Long turns under attack that mean nothing where there are some without it.
const CHANCE: f64 = 2.0;

/// What a row may be at worst.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Microseconds that the 99th percentile may be above twice the reference, where the kernel
    /// cannot make one access last.
    pub latency: f64,
    /// Microseconds that it may be where the kernel can. A hole of a gigabyte keeps who touches it
    /// waiting for some tenths of a second, and whoever has it made then rests for longer
    /// (docs/THREAT_MODEL.md, "Pages that are slow to come"): no more than one such wait is in the
    /// 99th percentile.
    pub blocked: f64,
    /// Bandwidth under attack ÷ without, beside one attacker. Beside more it is as much of an equal
    /// share.
    pub bandwidth: f64,
    /// Microseconds of the longest turn, where the kernel cannot make one access last.
    pub turn: f64,
}

impl Bounds {
    /// What the daemon is built for.
    pub const TARGET: Self = Self { latency: 200.0, blocked: 1e6, bandwidth: 0.4, turn: 1000.0 };
    /// What no machine excuses, however busy: a worker that stands still.
    pub const LOOSE: Self =
        Self { latency: 20_000.0, blocked: 3e6, bandwidth: 0.1, turn: 100_000.0 };

    /// Whether the row is within them.
    pub fn hold(&self, row: &Row) -> bool {
        row.ok && !self.late(row) && !self.slow(row) && !self.long_turn(row)
    }

    /// Whether too little bandwidth is left: of what there is without the attack, and of what there
    /// is beside its control.
    fn slow(&self, row: &Row) -> bool {
        let left = row.control.map_or(row.bandwidth, |control| control.max(row.bandwidth));
        left < self.bandwidth_of(row)
    }

    /// What is left of an equal share for each, where one of two has `self.bandwidth`.
    fn bandwidth_of(&self, row: &Row) -> f64 {
        self.bandwidth * 2.0 / (row.villains.max(1) + 1) as f64
    }

    /// The most that the 99th percentile may be, beside that of the reference.
    fn latest(&self, reference: f64, blocks: bool) -> f64 {
        if blocks { self.blocked } else { 2.0 * reference + self.latency }
    }

    /// Whether the 99th percentile is too long.
    fn late(&self, row: &Row) -> bool {
        row.value > self.latest(row.reference, row.blocks)
    }

    /// Whether a turn was too long by the attack's doing.
    fn long_turn(&self, row: &Row) -> bool {
        let [attacked, quiet] = row.long_turns;
        !row.blocks
            && row.longest_turn > self.turn
            && attacked > (2.0 * quiet + CHANCE) * row.longer
    }
}

/// One row.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The attack.
    pub name: String,
    /// It ran.
    pub ok: bool,
    /// The victim's 99th percentile under attack.
    pub value: f64,
    /// The same while the attack rests.
    pub reference: f64,
    /// `value` ÷ `reference`.
    pub ratio: f64,
    /// Of `value` and `reference`.
    pub unit: String,
    /// What `value` may be: twice the reference and 200 us, or what a single access may last.
    pub target: Option<f64>,
    /// What the target is a bound of.
    pub target_of: &'static str,
    /// All targets were reached, those of bandwidth and of the longest turn too.
    pub met: bool,
    /// The longest round trip under attack, in `unit`.
    pub worst: f64,
    /// The victim's bandwidth under attack ÷ without.
    pub bandwidth: f64,
    /// The victim's bandwidth under attack ÷ that beside the attack's control, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<f64>,
    /// The worker's longest turn of its own time, in `unit`.
    pub longest_turn: f64,
    /// Turns that were longer than a millisecond, under attack and without.
    pub long_turns: [f64; 2],
    /// How many times as long there was an attack as there was none, 1 at least.
    pub longer: f64,
    /// The most that a turn was charged, in `unit`.
    pub charged: f64,
    /// How often the attack was carried out.
    pub strikes: u64,
    /// NICs that took part in it.
    pub villains: usize,
    /// A turn may be as long as the kernel holds up one access (docs/THREAT_MODEL.md).
    pub blocks: bool,
    /// Slices of each kind.
    pub samples: usize,
    /// Why it did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Row {
    /// `attack`: how many took part, and whether the kernel can make one access last here.
    pub(super) fn new(
        (name, attack): (&str, Option<(usize, bool)>),
        [quiet, attacked, controlled]: [&Seen; 3],
        turns: Turns,
        strikes: u64,
    ) -> Self {
        let (value, reference) = (median(&attacked.latency), median(&quiet.latency));
        let blocks = attack.is_some_and(|(_, blocks)| blocks);
        let mut row = Self {
            name: name.into(),
            ok: true,
            value,
            reference,
            ratio: value / reference,
            unit: "us".into(),
            target: Some(Bounds::TARGET.latest(reference, blocks)),
            target_of: "value",
            met: false,
            worst: attacked.worst,
            bandwidth: median(&attacked.bandwidth) / median(&quiet.bandwidth),
            control: (!controlled.bandwidth.is_empty())
                .then(|| median(&attacked.bandwidth) / median(&controlled.bandwidth)),
            // The longest is since the start: what sets an attack up is one too.
            longest_turn: turns.longest * 1e6,
            long_turns: [attacked.long_turns, quiet.long_turns],
            longer: (attacked.lasted / quiet.lasted).max(1.0),
            charged: turns.charged * 1e6,
            strikes,
            villains: attack.map_or(0, |(villains, _)| villains),
            blocks,
            samples: attacked.latency.len(),
            error: None,
        };
        row.met = Bounds::TARGET.hold(&row);
        row
    }

    /// A row that could not be measured.
    pub(super) fn failed(name: &str, why: String) -> Self {
        Self {
            name: name.into(),
            ok: false,
            value: 0.0,
            reference: 0.0,
            ratio: 0.0,
            unit: "us".into(),
            target: None,
            target_of: "value",
            met: false,
            worst: 0.0,
            bandwidth: 0.0,
            control: None,
            longest_turn: 0.0,
            long_turns: [0.0; 2],
            longer: 1.0,
            charged: 0.0,
            strikes: 0,
            villains: 0,
            blocks: false,
            samples: 0,
            error: Some(why),
        }
    }

    /// The heading of the table.
    pub fn heading() -> String {
        format!(
            "{:<28} {:>10} {:>9} {:>8} {:>10} {:>9} {:>10} {:>9} {:>9} {:>8}  targets",
            "attack",
            "p99 us",
            "ref us",
            "ratio",
            "worst us",
            "bandwidth",
            "turn us",
            ">1 ms",
            "charged",
            "strikes"
        )
    }

    /// Which targets were missed.
    fn missed(&self) -> String {
        let target = Bounds::TARGET;
        let missed = [
            (target.late(self), "p99"),
            (target.slow(self), "bandwidth"),
            (target.long_turn(self), "turn"),
        ];
        let names: Vec<_> = missed.iter().filter(|(miss, _)| *miss).map(|(_, n)| *n).collect();
        match (names.is_empty(), self.blocks) {
            (true, false) if self.control.is_some() => {
                format!("met; bandwidth beside its control {:.2}", self.control.unwrap_or(f64::NAN))
            }
            (true, false) => "met".into(),
            (true, true) => format!(
                "met, with {} s for p99 and none for turn, since the kernel may hold up one \
                 access; {}_apart has all",
                target.blocked / 1e6,
                self.name
            ),
            (false, _) => format!("MISSED: {}", names.join(", ")),
        }
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(why) = &self.error {
            let first = why.lines().next().unwrap_or("");
            return write!(f, "{:<28} did not run: {first}", self.name);
        }
        write!(
            f,
            "{:<28} {:>10.1} {:>9.1} {:>8.2} {:>10.0} {:>9.2} {:>10.0} {:>9} {:>9.0} {:>8}  {}",
            self.name,
            self.value,
            self.reference,
            self.ratio,
            self.worst,
            self.bandwidth,
            self.longest_turn,
            format!("{}/{}", self.long_turns[0], self.long_turns[1]),
            self.charged,
            self.strikes,
            self.missed()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(latency: f64, bandwidth: f64, long_turns: f64) -> Seen {
        let latency = vec![1e6, latency, 0.0];
        Seen { latency, worst: 1e6, bandwidth: vec![bandwidth; 3], long_turns, lasted: 1.0 }
    }

    fn row(latency: f64, bandwidth: f64, turn: f64) -> Row {
        let turns = Turns { longest: turn, ..Turns::default() };
        let seen = [&seen(10.0, 100.0, 1.0), &seen(latency, bandwidth, 5.0), &Seen::default()];
        Row::new(("x", None), seen, turns, 7)
    }

    #[test]
    fn every_target_counts() {
        assert!(row(219.0, 41.0, 0.0009).met);
        assert!(!row(221.0, 41.0, 0.0009).met, "latency");
        assert!(!row(219.0, 39.0, 0.0009).met, "bandwidth");
        assert!(!row(219.0, 41.0, 0.0011).met, "turn");
        let row = row(30.0, 50.0, 0.0001);
        assert_eq!((row.ratio, row.bandwidth, row.long_turns), (3.0, 0.5, [5.0, 1.0]));
    }

    #[test]
    fn what_the_host_s_memory_costs_is_not_the_device_s() {
        let short = row(30.0, 30.0, 0.0001);
        assert_eq!((short.met, short.control), (false, None));
        assert!(Bounds::TARGET.hold(&Row { control: Some(0.41), ..short.clone() }));
        assert!(!Bounds::TARGET.hold(&Row { control: Some(0.39), ..short }));
    }

    #[test]
    fn beside_many_it_is_a_share_and_one_access_that_lasts_is_nobodys_turn() {
        let mut row = Row { villains: 8, ..row(3000.0, 9.0, 0.002) };
        row.blocks = true;
        assert!(Bounds::TARGET.hold(&row));
        let still = Row { value: 1_000_001.0, ..row.clone() };
        assert!(!Bounds::TARGET.hold(&still) && Bounds::LOOSE.hold(&still), "it stands still");
        assert!(!Bounds::TARGET.hold(&Row { villains: 7, ..row.clone() }), "a tenth");
        row.blocks = false;
        assert!(!Bounds::TARGET.hold(&row), "both");
        row.value = 30.0;
        assert!(!Bounds::TARGET.hold(&row), "turn");
    }

    #[test]
    fn long_turns_that_a_quiet_worker_has_too_are_the_machine_s() {
        let mut seen = row(30.0, 50.0, 0.002);
        assert!(!Bounds::TARGET.hold(&seen));
        seen.long_turns = [5.0, 2.0];
        assert!(Bounds::TARGET.hold(&seen));
        (seen.long_turns, seen.longer) = ([5.0, 0.0], 3.0);
        assert!(Bounds::TARGET.hold(&seen), "chance has three times as long for them");
        seen.longer = 2.0;
        assert!(!Bounds::TARGET.hold(&seen));
    }

    #[test]
    fn a_row_that_did_not_run_holds_no_bound() {
        assert!(!Bounds::LOOSE.hold(&Row::failed("x", "because".into())));
        assert!(Bounds::LOOSE.hold(&row(19_000.0, 11.0, 0.09)));
        assert!(!Bounds::LOOSE.hold(&row(21_000.0, 11.0, 0.09)));
        let json = serde_json::to_value(row(1.0, 1.0, 0.0)).unwrap();
        for key in ["name", "ok", "value", "reference", "ratio", "unit", "target"] {
            assert!(json.get(key).is_some(), "{key}");
        }
    }
}
