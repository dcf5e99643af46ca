//! The victim: one connection between two guests of a network that has done nothing to anybody.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::control::Mr;
use crate::guest::GuestConfig;
use crate::pages::Buf;
use crate::qp::{Path, QpSpec, SendWr};
use crate::spec::{access, qpt, status};
use crate::trips::{PACE, Queues, Trips};
use crate::world::{End, World};

/// A completion that is not there after this is waited for by sleeping, so that a spin takes
/// nobody's processor for long.
const SPIN: Duration = Duration::from_micros(300);
const NAP: Duration = Duration::from_micros(20);
/// The worker is dead, or as good as that.
const STILL: Duration = Duration::from_secs(60);
const WINDOW: u64 = 4 << 20;
const MESSAGE: u64 = 64 << 10;
const DEPTH: u64 = 32;
/// For so long a worker that polls may leave nothing of its core to others, and what they have
/// then. The scheduler takes the core away from a real-time thread that takes all of a second
/// (`sched_rt_runtime_us`, and the fair server since Linux 6.12, both in kernel/sched).
const SPELL: Duration = Duration::from_millis(500);
pub(super) const REST: Duration = Duration::from_millis(60);
/// A round trip of a worker that has nothing else to do.
const QUIET: Duration = Duration::from_micros(300);

/// The victim and its peer.
#[derive(Debug)]
pub(super) struct Victim {
    a: End,
    _b: End,
    at_a: Mr,
    at_b: Mr,
}

impl Victim {
    pub(super) fn new(world: &World) -> Self {
        let make = || {
            let node = world.node_with("net", &[], GuestConfig::default());
            let spec = QpSpec { sq: 64, send_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
            let end = node.end(&spec);
            let buf = Arc::new(Buf::contiguous(node.guest.ram(), WINDOW));
            buf.view().fill(0, WINDOW, 1);
            let mr = node.ctx.register(node.pdn, buf, access::ALL).expect("MR_REG");
            (end, mr)
        };
        let ((a, at_a), (b, at_b)) = (make(), make());
        a.connect(&b, &Path::default());
        b.connect(&a, &Path::default());
        Self { a, _b: b, at_a, at_b }
    }

    fn post(&mut self, at: u64, bytes: u64) {
        let sge = self.at_a.sge(at, bytes as u32);
        let write = SendWr::write(at, &[sge], self.at_b.addr(at), self.at_b.rkey);
        self.a.qp.queue_send(&write);
    }

    /// From post to completion.
    fn round_trip(&mut self) -> Duration {
        self.post(0, 64);
        let start = Instant::now();
        self.a.qp.ring_sq();
        loop {
            if let Some(cqe) = self.a.scq.poll() {
                assert_eq!(cqe.status, status::SUCCESS, "the victim's connection failed: {cqe:?}");
                return start.elapsed();
            }
            let waited = start.elapsed();
            assert!(waited < STILL, "the victim's round trip has not ended in {waited:?}");
            if waited > SPIN {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Round trips for `slice`, and for as long as `unseen` says; the 99th percentile and the
    /// longest, in microseconds. What the scheduler kept the worker from its core is no part of
    /// them.
    pub(super) fn latency(
        &mut self,
        slice: Duration,
        queue: &Queues,
        unseen: impl Fn() -> bool,
    ) -> (f64, f64) {
        let mut waited = queue.waited();
        let (begin, mut next) = (Instant::now(), Instant::now());
        let mut spell = begin;
        let mut trips = Trips::default();
        while begin.elapsed() < slice || unseen() {
            if spell.elapsed() > SPELL {
                std::thread::sleep(REST);
                (spell, next) = (Instant::now(), Instant::now());
            }
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            let mut took = self.round_trip();
            if took > PACE {
                let before = std::mem::replace(&mut waited, queue.waited());
                took = took.saturating_sub(waited.saturating_sub(before));
            }
            trips.record(took);
            next = (next + PACE).max(Instant::now());
        }
        let (p99, longest) = trips.p99();
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        (micros(p99), micros(longest))
    }

    /// Bytes a second, by writes of 64 KiB.
    pub(super) fn bandwidth(&mut self, slice: Duration) -> f64 {
        let begin = Instant::now();
        let (mut posted, mut done) = (0, 0);
        let mut last = begin;
        loop {
            let over = begin.elapsed() >= slice;
            while !over && posted - done < DEPTH {
                self.post(posted * MESSAGE % WINDOW, MESSAGE);
                posted += 1;
            }
            self.a.qp.ring_sq();
            let before = done;
            while let Some(cqe) = self.a.scq.poll() {
                assert_eq!(cqe.status, status::SUCCESS, "the victim's connection failed: {cqe:?}");
                done += 1;
            }
            if over && done == posted {
                return (done * MESSAGE) as f64 / begin.elapsed().as_secs_f64();
            }
            if done != before {
                last = Instant::now();
            }
            assert!(last.elapsed() < STILL, "the victim's writes have stopped at {done}");
            std::thread::sleep(NAP);
        }
    }

    /// Waits until nothing of an attack that rests is left in the worker's queues; or a while.
    pub(super) fn recover(&mut self) {
        let begin = Instant::now();
        let mut quick = 0;
        while quick < 50 && begin.elapsed() < Duration::from_secs(10) {
            quick = if self.round_trip() < QUIET { quick + 1 } else { 0 };
            std::thread::sleep(NAP);
        }
    }
}
