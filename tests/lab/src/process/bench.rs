//! `cargo xtask process bench`: perftest between two processes, beside what the same machine does
//! without a device in the same minute.
//!
//! The references are a copy by the C library and two by the kernel, two threads that hand a word
//! to and fro, TCP over loopback, and UCX over its own shared memory. They take turns with the
//! programs, so that what else the machine does is everybody's. A row is the median of its turns;
//! its ratio is the median of the turns' ratios, and its spread stands in the name.

use std::fs::File;
use std::hint::{black_box, spin_loop};
use std::io::IoSliceMut;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::container::Container;
use crate::attempt::{bandwidth, column, pieces, round_trip};
use crate::rows::Row;

const WAIT: Duration = Duration::from_secs(120);
const SIZE: usize = 64 << 10;
const MIB: f64 = (1 << 20) as f64;

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

const MEMCPY: fn(&Container) -> Result<f64> = |_| Ok(copies());
const KERNEL: fn(&Container) -> Result<f64> = |_| copies_by_the_kernel();
const OWN_MEMORY: fn(&Container) -> Result<f64> = |_| copies_of_own_memory();
const RELAY: fn(&Container) -> Result<f64> = |_| relay();
const HAND_OFF: fn(&Container) -> Result<f64> = |_| Ok(hand_off());
const TCP_BANDWIDTH: fn(&Container) -> Result<f64> = |_| bandwidth();
const TCP_ONE_WAY: fn(&Container) -> Result<f64> = |_| Ok(round_trip(8)? / 2.0);
/// MB/s, by UCX's own count.
const UCX_BANDWIDTH: fn(&Container) -> Result<f64> =
    |container| Ok(ucx(container, "ucp_put_bw -s 65536 -n 20000", 4)? * 1e6 / MIB);
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
        command: "ib_write_bw -n 20000",
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
        command: "ib_write_bw -n 5000",
        column: 3,
        unit: "MiB/s",
        references: &[
            against("memcpy", MEMCPY, ">=0.35"),
            against("process_vm_readv", KERNEL, ""),
            against("/proc/self/mem", OWN_MEMORY, ""),
            against("three threads that copy", RELAY, ""),
            against("TCP", TCP_BANDWIDTH, ""),
            against("UCX's shared memory", UCX_BANDWIDTH, ""),
        ],
    },
    Program {
        name: "send, 64 KiB, other memory",
        env: PRIVATE,
        command: "ib_send_bw -n 10000",
        column: 3,
        unit: "MiB/s",
        references: &[
            against("memcpy", MEMCPY, ">=0.35"),
            against("process_vm_readv", KERNEL, ""),
            against("three threads that copy", RELAY, ""),
            against("TCP", TCP_BANDWIDTH, ""),
            against("UCX's shared memory", UCX_BANDWIDTH, ""),
        ],
    },
    Program {
        name: "messages, 8 B, lists of 16",
        env: "VHOST_RDMA_PRIVATE=0",
        command: "ib_write_bw -s 8 -n 500000 -l 16",
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

/// 64 KiB at the beginning of a page, as the programs' buffers are. Copies between buffers of other
/// places can take sixteen times as long (vhost-rdma/memory/src/copy.rs).
struct Buffer(Vec<u8>);

impl Buffer {
    const PAGE: usize = 4096;

    fn new(byte: u8) -> Self {
        Self(vec![byte; SIZE + Self::PAGE])
    }

    fn start(&self) -> usize {
        self.0.as_ptr().align_offset(Self::PAGE)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0[self.start()..][..SIZE]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.start();
        &mut self.0[start..][..SIZE]
    }
}

/// MiB a second of one thread that copies 64 KiB again and again.
fn copies() -> f64 {
    const TIMES: usize = 40_000;
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let begin = Instant::now();
    for _ in 0..TIMES {
        black_box(&mut to).copy_from_slice(black_box(&from));
    }
    (TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64()
}

/// MiB a second of one thread that has the kernel copy 64 KiB of a process's memory again and
/// again: the least that memory which is not shared takes, and what a process of another's
/// privilege may not ask.
fn copies_by_the_kernel() -> Result<f64> {
    const TIMES: usize = 10_000;
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let remote = [RemoteIoVec { base: black_box(&from).as_ptr() as usize, len: SIZE }];
    let begin = Instant::now();
    for _ in 0..TIMES {
        let local = &mut [IoSliceMut::new(&mut to)];
        let copied = process_vm_readv(Pid::this(), local, &remote).context("process_vm_readv")?;
        ensure!(copied == SIZE, "process_vm_readv copied {copied} bytes");
    }
    ensure!(*to == *from, "process_vm_readv copied something else");
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// The same by a descriptor of the process's memory, which it could hand over.
fn copies_of_own_memory() -> Result<f64> {
    const TIMES: usize = 10_000;
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let memory = File::open("/proc/self/mem").context("/proc/self/mem")?;
    let at = black_box(&from).as_ptr() as u64;
    let begin = Instant::now();
    for _ in 0..TIMES {
        memory.read_exact_at(black_box(&mut to), at).context("/proc/self/mem")?;
    }
    ensure!(*to == *from, "/proc/self/mem has something else");
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// MiB a second that go through three threads, each of which copies what it got: what private
/// memory of two processes takes, without anything that takes care of it.
fn relay() -> Result<f64> {
    const TIMES: usize = 20_000;
    const ROOM: usize = 4;
    let full = || sync_channel::<Buffer>(ROOM);
    let (first, second, spare_first, spare_second) = (full(), full(), full(), full());
    for _ in 0..ROOM {
        spare_first.0.send(Buffer::new(0))?;
        spare_second.0.send(Buffer::new(0))?;
    }
    let (from, mut to) = (Buffer::new(1), Buffer::new(0));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let (out, spare) = (first.0, spare_first.1);
        scope.spawn(move || {
            (0..TIMES).try_for_each(|_| {
                let mut piece = spare.recv().ok()?;
                piece.copy_from_slice(&from);
                out.send(piece).ok()
            })
        });
        let (came, back, out, spare) = (first.1, spare_first.0, second.0, spare_second.1);
        scope.spawn(move || {
            (0..TIMES).try_for_each(|_| {
                let (piece, mut next) = (came.recv().ok()?, spare.recv().ok()?);
                next.copy_from_slice(&piece);
                // The first thread may have ended.
                let _unwanted = back.send(piece);
                out.send(next).ok()
            })
        });
        for _ in 0..TIMES {
            let piece = second.1.recv()?;
            to.copy_from_slice(&piece);
            let _unwanted = spare_second.0.send(piece);
        }
        Ok::<_, RecvError>(())
    })?;
    black_box(&to);
    Ok((TIMES * SIZE) as f64 / MIB / begin.elapsed().as_secs_f64())
}

/// Microseconds that a word takes from one spinning thread to another: half of what it takes there
/// and back.
fn hand_off() -> f64 {
    const TIMES: u32 = 200_000;
    let (ping, pong) = (AtomicU32::new(0), AtomicU32::new(0));
    let await_word = |word: &AtomicU32, value: u32| {
        while word.load(Ordering::Acquire) != value {
            spin_loop();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 1..=TIMES {
                await_word(&ping, turn);
                pong.store(turn, Ordering::Release);
            }
        });
        let begin = Instant::now();
        for turn in 1..=TIMES {
            ping.store(turn, Ordering::Release);
            await_word(&pong, turn);
        }
        begin.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES) / 2.0
    })
}

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

    #[test]
    fn references_have_figures() {
        assert!(copies() > 0.0 && hand_off() > 0.0 && relay().is_ok_and(|speed| speed > 0.0));
        assert!(copies_by_the_kernel().is_ok_and(|speed| speed > 0.0));
        assert!(copies_of_own_memory().is_ok_and(|speed| speed > 0.0));
    }
}
