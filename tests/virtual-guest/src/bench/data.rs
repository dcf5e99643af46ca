//! Bandwidth and message rate.
//!
//! Bandwidth: both sides walk the same 4 MiB windows of the two guests' memory in the same order,
//! once with `memcpy` in this process and once through the device; it is the same memory, with the
//! same pages. Message rate: the work requests are written once, so that what is timed is the
//! engine and not this program; the reference copies the same work requests, payloads and
//! completions in a bare loop on one core.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Effort;
use super::report::{Better, Row, Target};
use crate::control::{Doorbell, Mr};
use crate::guest::GuestConfig;
use crate::pages::Buf;
use crate::qp::{Path, QpSpec, SendWr};
use crate::spec::{access, qpt, status, wr};
use crate::world::{End, World};

/// What carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// SEND into posted receives.
    Send,
}

const WINDOW: u64 = 4 << 20;

/// Two connected guests with a window of contiguous memory each.
#[derive(Debug)]
struct Scene {
    a: End,
    b: End,
    at_a: Mr,
    at_b: Mr,
    world: World,
}

/// Processor time of the calling thread, in seconds.
pub(super) fn own_cpu() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

fn scene(entries: u32) -> Scene {
    let world = super::world();
    let config = GuestConfig { ram_bytes: 64 << 20, ..GuestConfig::default() };
    let make = || {
        let node = world.node_with("net", &[], config.clone());
        let cqs = (node.cq(2 * entries), node.cq(2 * entries));
        let spec = QpSpec {
            sq: entries,
            rq: entries,
            send_sge: 1,
            recv_sge: 1,
            inline: 0,
            ..QpSpec::new(qpt::RC)
        };
        let end = node.end_with(&spec, cqs.0, cqs.1);
        let buf = Arc::new(Buf::contiguous(node.guest.ram(), WINDOW));
        let mr = node.ctx.register(node.pdn, buf, access::ALL).expect("MR_REG");
        (end, mr)
    };
    let ((a, at_a), (b, at_b)) = (make(), make());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    Scene { a, b, at_a, at_b, world }
}

fn memcpy(s: &Scene, verb: Verb, size: u64, slice: Duration) -> f64 {
    let (to, from) = match verb {
        Verb::Read => (s.at_a.view(), s.at_b.view()),
        _ => (s.at_b.view(), s.at_a.view()),
    };
    let (start, cpu, mut bytes, mut at) = (Instant::now(), own_cpu(), 0, 0);
    loop {
        for _ in 0..16 {
            to.copy_from(at, from, at, size as usize);
            bytes += size;
            at = (at + size) % WINDOW;
        }
        if start.elapsed() >= slice {
            return bytes as f64 / (own_cpu() - cpu) / 1e9;
        }
    }
}

fn transfer(s: &mut Scene, verb: Verb, size: u64, depth: u64, slice: Duration) -> f64 {
    let (start, cpu) = (Instant::now(), s.world.daemon.worker_cpu());
    let (mut posted, mut done, mut received) = (0u64, 0u64, 0u64);
    let mut stop = false;
    loop {
        while !stop && posted - done < depth && (verb != Verb::Send || posted - received < depth) {
            let at = posted * size % WINDOW;
            let (local, remote) = (s.at_a.sge(at, size as u32), s.at_b.addr(at));
            let request = match verb {
                Verb::Write => SendWr::write(posted, &[local], remote, s.at_b.rkey),
                Verb::Read => SendWr::read(posted, &[local], remote, s.at_b.rkey),
                Verb::Send => {
                    s.b.qp.queue_recv(posted, &[s.at_b.sge(at, size as u32)]);
                    SendWr::send(posted, &[local])
                }
            };
            s.a.qp.queue_send(&request);
            posted += 1;
        }
        if verb == Verb::Send {
            s.b.qp.ring_rq();
        }
        s.a.qp.ring_sq();
        let before = done;
        while let Some(cqe) = s.a.scq.poll() {
            assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
            done += 1;
        }
        while verb == Verb::Send
            && let Some(cqe) = s.b.rcq.poll()
        {
            assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
            received += 1;
        }
        let took = start.elapsed();
        stop |= took >= slice;
        if stop && done == posted && (verb != Verb::Send || received == posted) {
            return (done * size) as f64 / (s.world.daemon.worker_cpu() - cpu) / 1e9;
        }
        assert!(
            took < slice + Duration::from_secs(20),
            "completions stopped at {done} of {posted}"
        );
        if done == before {
            std::hint::spin_loop();
        }
    }
}

/// The bandwidth of `verb` beside memcpy.
pub(super) fn bandwidth(name: &str, verb: Verb, size: u64, effort: Effort) -> Row {
    // perftest's own depth; small messages need more for the same time of work in the queue.
    let depth = if size > 16 << 10 { 128 } else { 512 };
    let mut s = scene(512);
    s.at_a.view().fill(0, WINDOW, 1);
    s.at_b.view().fill(0, WINDOW, 2);
    transfer(&mut s, verb, size, depth, effort.slice / 4);
    let samples: Vec<_> = (0..effort.samples)
        .map(|_| {
            let reference = memcpy(&s, verb, size, effort.slice);
            (transfer(&mut s, verb, size, depth, effort.slice), reference)
        })
        .collect();
    let target = if size > 4 << 10 { 0.92 } else { 0.75 };
    Row::best(name, "GB/s", Better::More, Some(Target::Ratio(target)), &samples)
}

pub(super) const RING: u32 = 1024;
/// One signaled work request in so many.
pub(super) const BATCH: u32 = 32;

fn bare_loop(s: &mut Scene, size: u64, slice: Duration) -> f64 {
    let (ring, ..) = s.a.qp.raw_sq(0);
    let scratch = Buf::contiguous(s.a.node.guest.ram(), 4096);
    let (start, cpu, mut n) = (Instant::now(), own_cpu(), 0u64);
    // The rings are scattered over pages; the copies stay within one entry.
    let (mut wqe, mut cqe) = ([0; 64], [0; 64]);
    loop {
        for _ in 0..1024 {
            ring.read(n % u64::from(RING) * 64, &mut wqe);
            std::hint::black_box(&wqe);
            s.at_b.view().copy_from(n % 4096 * 64, s.at_a.view(), n % 4096 * 64, size as usize);
            n += 1;
            if n.is_multiple_of(u64::from(BATCH)) {
                cqe[0] = n as u8;
                scratch.view().write(n / u64::from(BATCH) % 64 * 64, &cqe);
            }
        }
        if start.elapsed() >= slice {
            return n as f64 / (own_cpu() - cpu) / 1e6;
        }
    }
}

/// Small writes per second through one engine core beside a bare loop over the same bytes.
pub(super) fn rate(name: &str, size: u64, effort: Effort) -> Row {
    let mut s = scene(RING);
    for i in 0..RING {
        let at = u64::from(i) % 4096 * 64;
        let sge = s.at_a.sge(at, size as u32);
        let mut request = SendWr::write(u64::from(i), &[sge], s.at_b.addr(at), s.at_b.rkey);
        assert_eq!(request.opcode, wr::RDMA_WRITE);
        if i % BATCH != BATCH - 1 {
            request = request.unsignaled();
        }
        let (ring, at, _) = s.a.qp.raw_sq(i);
        request.encode(&ring, at);
    }
    let mut stream = Stream::new(&mut s.a, BATCH);
    let rate =
        |s: &mut Scene, stream: &mut Stream, slice| 1e-6 / stream.run(&mut s.a, &s.world, slice);
    rate(&mut s, &mut stream, effort.slice / 4);
    let samples: Vec<_> = (0..effort.samples)
        .map(|_| {
            let reference = bare_loop(&mut s, size, effort.slice);
            (rate(&mut s, &mut stream, effort.slice), reference)
        })
        .collect();
    let state = s.a.qp.state().expect("QP_QUERY");
    assert_eq!(state, crate::spec::qps::RTS, "the queue pair failed during the run");
    Row::best(name, "M/s", Better::More, Some(Target::Value(10.0)), &samples)
}

/// Work requests of a sample at least: processor time is known to a tick only.
const LEAST: u32 = 512 * RING;

/// Work requests that were written to a full ring once and go round in it.
#[derive(Debug)]
pub(super) struct Stream {
    doorbell: Doorbell,
    /// Of the ring.
    entries: u32,
    posted: u32,
    done: u32,
    /// One of so many is signaled.
    batch: u32,
}

impl Stream {
    pub(super) fn new(end: &mut End, batch: u32) -> Self {
        Self::of(end, RING, batch)
    }

    /// As [`Self::new`], for a ring of so many entries.
    pub(super) fn of(end: &mut End, entries: u32, batch: u32) -> Self {
        let (_, _, doorbell) = end.qp.raw_sq(0);
        Self { doorbell, entries, posted: 0, done: 0, batch }
    }

    /// Keeps the ring full until it is over.
    pub(super) fn go_on(&mut self, end: &mut End, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            self.turn(end);
        }
    }

    /// Fills the ring and takes completions; of how many work requests.
    pub(super) fn turn(&mut self, end: &mut End) -> u32 {
        let free = (self.entries - self.posted.wrapping_sub(self.done)) / BATCH * BATCH;
        if free >= 4 * BATCH {
            self.posted = self.posted.wrapping_add(free);
            self.doorbell.ring(self.posted);
        }
        self.take(end)
    }

    /// Takes completions; of how many work requests.
    pub(super) fn take(&mut self, end: &mut End) -> u32 {
        let taken = end.scq.drain() * self.batch;
        self.done = self.done.wrapping_add(taken);
        taken
    }

    /// Keeps the ring full for a while; processor time of the worker for each work request, in
    /// seconds.
    pub(super) fn run(&mut self, end: &mut End, world: &World, slice: Duration) -> f64 {
        let (start, cpu) = (Instant::now(), world.daemon.worker_cpu());
        let first = self.done;
        let mut last_progress = start;
        loop {
            let taken = self.turn(end);
            let now = Instant::now();
            if taken > 0 {
                last_progress = now;
            }
            let patience = Duration::from_secs(10);
            assert!(now - last_progress < patience, "completions stopped at {}", self.done);
            let done = self.done.wrapping_sub(first);
            if now - start >= slice && done >= LEAST {
                return (world.daemon.worker_cpu() - cpu) / f64::from(done);
            }
        }
    }
}
