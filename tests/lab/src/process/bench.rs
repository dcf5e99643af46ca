//! `cargo xtask process bench`: perftest between two processes, beside what the same machine does
//! without a device in the same minute.
//!
//! The references are copies by the C library and by the kernel, threads that hand bytes or a word
//! on ([`references`]), TCP over loopback, and UCX over its own shared memory. They take turns
//! with the programs, so that what else the machine does is everybody's. Long messages go for half
//! a second to two: for the first hundredths of one the scheduler may have two threads that poll
//! on one core. A row is the median of its turns; its ratio is the median of the turns' ratios,
//! and its spread stands in the name.

use std::time::Duration;

use anyhow::{Context, Result};

use super::container::Container;
use super::references::{self, MIB};
use crate::attempt::{bandwidth, column, pieces, round_trip};
use crate::rows::Row;

const WAIT: Duration = Duration::from_secs(120);

/// Both ends in one container; the last line with figures is the client's.
const PERFTEST: &str = r#"export $ENV
timeout 60 $PROGRAM -F -x 0 -d vhost_rdma0 > /tmp/server 2>&1 & server=$!
for i in 1 2 3 4 5 6 7 8 9; do
  sleep 0.2
  timeout 60 $PROGRAM -F -x 0 -d vhost_rdma1 127.0.0.1 2> /tmp/client && wait $server && exit 0
done
cat /tmp/server /tmp/client >&2; exit 1
"#;

const UCX: &str = r#"export UCX_TLS=posix,self UCX_LOG_LEVEL=fatal
timeout 60 ucx_perftest -P 0 -t $TEST > /tmp/server 2>&1 &
for i in 1 2 3 4 5 6 7 8 9; do
  sleep 0.2; grep -qi ':3419 [0-9A-F:]* 0A ' /proc/net/tcp* && break
done
timeout 60 ucx_perftest -P 0 -f -t $TEST 127.0.0.1
"#;

/// A program of perftest, and the column of its figure.
struct Program {
    name: &'static str,
    /// What the environment has more.
    env: &'static str,
    command: &'static str,
    column: usize,
    unit: &'static str,
    references: &'static [Reference],
}

/// What a program is held against.
struct Reference {
    name: &'static str,
    measure: fn(&Container) -> Result<f64>,
    target: &'static str,
}

const MEMCPY: fn(&Container) -> Result<f64> = |_| Ok(references::copies());
const KERNEL: fn(&Container) -> Result<f64> = |_| references::copies_by_the_kernel();
const OWN_MEMORY: fn(&Container) -> Result<f64> = |_| references::copies_of_own_memory();
const TWICE: fn(&Container) -> Result<f64> = |_| references::copies_twice();
const THRICE: fn(&Container) -> Result<f64> = |_| Ok(references::copies_thrice());
const PAIR: fn(&Container) -> Result<f64> = |_| references::pair();
const RELAY: fn(&Container) -> Result<f64> = |_| references::relay();
const HAND_OFF: fn(&Container) -> Result<f64> = |_| Ok(references::hand_off());
const TCP_BANDWIDTH: fn(&Container) -> Result<f64> = |_| bandwidth();
const TCP_ONE_WAY: fn(&Container) -> Result<f64> = |_| Ok(round_trip(8)? / 2.0);
/// MB/s, by UCX's own count.
const UCX_BANDWIDTH: fn(&Container) -> Result<f64> =
    |container| Ok(ucx(container, "ucp_put_bw -s 65536 -n 1000000", 4)? * 1e6 / MIB);
/// Millions a second.
const TCP_MESSAGES: fn(&Container) -> Result<f64> = |_| Ok(pieces(8, 200_000)? / 1e6);
/// Millions a second.
const UCX_MESSAGES: fn(&Container) -> Result<f64> =
    |container| Ok(ucx(container, "ucp_put_bw -s 8 -n 2000000", 6)? / 1e6);
const UCX_ONE_WAY: fn(&Container) -> Result<f64> =
    |container| ucx(container, "tag_lat -s 8 -n 20000", 1);

const fn against(
    name: &'static str,
    measure: fn(&Container) -> Result<f64>,
    target: &'static str,
) -> Reference {
    Reference { name, measure, target }
}

const PRIVATE: &str = "VHOST_RDMA_PRIVATE=1";
/// perftest gives half a round trip too.
const HALF_A_HAND_OFF: &str = "half the round trip of a word between two spinning threads";

const PROGRAMS: [Program; 6] = [
    Program {
        name: "write, 64 KiB, shared memory",
        env: "VHOST_RDMA_PRIVATE=0",
        command: "ib_write_bw -n 1000000",
        column: 3,
        unit: "MiB/s",
        references: &[
            against("memcpy", MEMCPY, ">=0.9"),
            against("TCP", TCP_BANDWIDTH, ""),
            against("UCX's shared memory", UCX_BANDWIDTH, ""),
        ],
    },
    Program {
        name: "write, 64 KiB, other memory",
        env: PRIVATE,
        command: "ib_write_bw -n 40000",
        column: 3,
        unit: "MiB/s",
        references: &[
            against("memcpy", MEMCPY, ">=0.35"),
            against("process_vm_readv", KERNEL, ""),
            against("/proc/self/mem", OWN_MEMORY, ""),
            against("one thread that copies twice", TWICE, ""),
            against("two threads that copy", PAIR, ""),
            against("three threads that copy", RELAY, ""),
            against("TCP", TCP_BANDWIDTH, ""),
            against("UCX's shared memory", UCX_BANDWIDTH, ""),
        ],
    },
    Program {
        name: "send, 64 KiB, other memory",
        env: PRIVATE,
        command: "ib_send_bw -n 40000",
        column: 3,
        unit: "MiB/s",
        references: &[
            against("memcpy", MEMCPY, ">=0.35"),
            against("process_vm_readv", KERNEL, ""),
            against("one thread that copies three times", THRICE, ""),
            against("three threads that copy", RELAY, ""),
            against("TCP", TCP_BANDWIDTH, ""),
            against("UCX's shared memory", UCX_BANDWIDTH, ""),
        ],
    },
    Program {
        name: "messages, 8 B, lists of 16",
        env: "VHOST_RDMA_PRIVATE=0",
        command: "ib_write_bw -s 8 -n 2000000 -l 16",
        column: 4,
        unit: "M/s",
        references: &[
            against("5 M/s", |_| Ok(5.0), ">=1.0"),
            against("TCP", TCP_MESSAGES, ""),
            against("UCX's shared memory", UCX_MESSAGES, ""),
        ],
    },
    Program {
        name: "one way, 8 B",
        env: "VHOST_RDMA_PRIVATE=0",
        command: "ib_write_lat -s 8 -n 20000",
        column: 5,
        unit: "us",
        references: &[
            against(HALF_A_HAND_OFF, HAND_OFF, ""),
            against("TCP", TCP_ONE_WAY, ""),
            against("UCX's shared memory", UCX_ONE_WAY, ""),
        ],
    },
    Program {
        name: "one way, 8 B, other memory",
        env: PRIVATE,
        command: "ib_send_lat -s 8 -n 5000",
        column: 5,
        unit: "us",
        references: &[
            against(HALF_A_HAND_OFF, HAND_OFF, ""),
            against("TCP", TCP_ONE_WAY, ""),
            against("UCX's shared memory", UCX_ONE_WAY, ""),
        ],
    },
];

/// A figure of UCX's last line, by its column.
fn ucx(container: &Container, test: &str, at: usize) -> Result<f64> {
    let text = container.run(2, &UCX.replace("$TEST", test), WAIT)?;
    column(&text, at).with_context(|| format!("ucx_perftest printed no figure:\n{text}"))
}

impl Program {
    fn measure(&self, container: &Container) -> Result<f64> {
        let script = PERFTEST.replace("$PROGRAM", self.command).replace("$ENV", self.env);
        let text = container.run(2, &script, WAIT)?;
        column(&text, self.column).with_context(|| format!("no figure in:\n{text}"))
    }

    fn rows(&self, container: &Container, turns: u32) -> Result<Vec<Row>> {
        let mut found: Vec<(f64, Vec<f64>)> = Vec::new();
        for turn in 1..=turns {
            eprintln!("    {}: turn {turn} of {turns}", self.name);
            let value = self.measure(container)?;
            let held = self.references.iter().map(|one| (one.measure)(container));
            found.push((value, held.collect::<Result<_>>()?));
        }
        let row = |(at, reference): (usize, &Reference)| {
            let held = |turn: &(f64, Vec<f64>)| turn.1.get(at).copied().unwrap_or(f64::NAN);
            let ratios = sorted(found.iter().map(|turn| turn.0 / held(turn)));
            let spread = ratios.first().zip(ratios.last());
            let spread = spread.map(|(least, most)| format!(" ({least:.2} to {most:.2})"));
            Row {
                name: format!("{} ÷ {}{}", self.name, reference.name, spread.unwrap_or_default()),
                ok: true,
                value: Some(median(found.iter().map(|turn| turn.0))),
                reference: Some(median(found.iter().map(held))),
                ratio: Some(median(ratios.into_iter())),
                unit: self.unit.to_owned(),
                target: reference.target.to_owned(),
            }
        };
        Ok(self.references.iter().enumerate().map(row).collect())
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The middle one, or halfway between the middle two; of no values, NaN.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let values = sorted(values);
    let upper = values.get(values.len() / 2);
    let lower = values.get(values.len().saturating_sub(1) / 2);
    lower.zip(upper).map_or(f64::NAN, |(lower, upper)| f64::midpoint(*lower, *upper))
}

/// All rows whose program's name has `only` in it.
pub(super) fn run(container: &Container, only: Option<&str>, turns: u32) -> Result<Vec<Row>> {
    let chosen = PROGRAMS.iter().filter(|it| only.is_none_or(|part| it.name.contains(part)));
    let rows = chosen.map(|program| program.rows(container, turns));
    Ok(rows.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        let is = |values: &[f64], wanted: f64| {
            let found = median(values.iter().copied());
            assert!((found - wanted).abs() < f64::EPSILON, "{values:?}: {found}");
        };
        is(&[3.0, 1.0, 2.0], 2.0);
        is(&[8.0, 1.0, 4.0, 2.0], 3.0);
        is(&[5.0, 7.0], 6.0);
        is(&[9.0], 9.0);
        assert!(median(std::iter::empty()).is_nan());
    }

    /// Each row of a program and each reference has a name of its own, and what issue 13 asks is
    /// there: both kinds of memory beside UCX's shared memory, TCP and two threads that spin.
    #[test]
    fn what_is_held_against_what() {
        let mut names = std::collections::BTreeSet::new();
        for program in &PROGRAMS {
            let of = |name| program.references.iter().any(|it| it.name == name);
            assert!(of("TCP") && of("UCX's shared memory"), "{}", program.name);
            assert_eq!(of(HALF_A_HAND_OFF), program.unit == "us", "{}", program.name);
            assert_eq!(of("memcpy"), program.unit == "MiB/s", "{}", program.name);
            for reference in program.references {
                assert!(names.insert((program.name, reference.name)));
            }
        }
        assert!(names.contains(&("one way, 8 B, other memory", HALF_A_HAND_OFF)));
        assert!(names.contains(&("write, 64 KiB, other memory", "UCX's shared memory")));
    }
}
