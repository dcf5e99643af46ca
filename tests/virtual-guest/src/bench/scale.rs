//! What it costs to be among many: NICs, idle contexts, queue pairs, regions, elements.
//!
//! Every row is the cost with many ÷ the cost with one, of pairs of guests in two networks of one
//! daemon that take turns: the crowd is in one of the networks, and the other has its pair alone. A
//! NIC of the crowd has a driver and a process with a doorbell page, and posts nothing, but in
//! [`beside_posts`]. Queue pairs and regions are all in use, in turn, so that their rows also have
//! what the processor's caches cost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Effort;
use super::data::{BATCH, RING, Stream};
use super::latency::{median, poll_one, post_and_poll};
use super::report::{Better, Row, Target};
use crate::control::{Ctx, Doorbell, Mr};
use crate::daemon::DaemonOptions;
use crate::guest::GuestConfig;
use crate::pages::{Buf, PageList};
use crate::qp::{Path, Qp, QpSpec, SendWr};
use crate::rings::Cq;
use crate::spec::{PAGE, access, qps, qpt};
use crate::world::{End, Node, World};

/// The network of the pair that is alone.
const ALONE: &str = "alone";
/// The network of the crowd.
const CROWD: &str = "net";
/// What many may cost: 0.8 of the speed of one.
const TARGET: Target = Target::Ratio(1.25);
/// Bytes of each message.
const SIZE: u32 = 8;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cost {
    /// Microseconds from post to completion, both sides polling.
    RoundTrip,
    /// Processor time of the worker for each of many work requests.
    Request,
}

/// A daemon with two networks.
fn world() -> World {
    let world = World::with(&DaemonOptions::default(), Duration::from_secs(600));
    world.daemon.add_network(ALONE, 101);
    super::cores::Cores::get().device_process(&world.daemon.pids());
    world
}

fn node(world: &World, network: &str, ram_bytes: u64) -> Node {
    let limits = ["--max-mrs", "200000", "--max-qps", "16384", "--max-kept-bytes", "4294967296"];
    world.node_with(network, &limits, GuestConfig { ram_bytes, ..GuestConfig::default() })
}

/// One of the crowd. With one vector it has so few descriptors that a thousand fit in a process
/// which may have 20 000.
fn idle(world: &World) -> Node {
    let config = GuestConfig { ram_bytes: 4 << 20, ..GuestConfig::default() };
    world.node_with(CROWD, &["--vectors", "1"], config)
}

fn connected(a: &Node, b: &Node, entries: u32) -> (End, End) {
    let spec =
        QpSpec { sq: entries, rq: 16, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
    let end = |node: &Node| node.end_with(&spec, node.cq(2 * entries), node.cq(16));
    let (a, b) = (end(a), end(b));
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    (a, b)
}

/// Writes small writes to all entries of a send ring, once for all; each `burst`th has a
/// completion.
fn fill(qp: &mut Qp, (entries, burst): (u32, u32), mut write: impl FnMut(u32) -> SendWr) {
    for i in 0..entries {
        let request = write(i);
        let request = if i % burst == burst - 1 { request } else { request.unsignaled() };
        let (ring, at, _) = qp.raw_sq(i);
        request.encode(&ring, at);
    }
}

/// Two guests with a queue pair for round trips and one for a stream.
#[derive(Debug)]
struct Pair {
    single: End,
    many: End,
    peers: [End; 2],
    stream: Stream,
    request: SendWr,
}

impl Pair {
    fn new(world: &World, network: &str) -> Self {
        let (a, b) = (node(world, network, 64 << 20), node(world, network, 64 << 20));
        let (from, to) = (a.mr(PAGE), b.mr(PAGE));
        let request = SendWr::write(1, &[from.sge(0, SIZE)], to.addr(0), to.rkey);
        let (single, first) = connected(&a, &b, 16);
        let (mut many, second) = connected(&a, &b, RING);
        fill(&mut many.qp, (RING, BATCH), |_| request.clone());
        let stream = Stream::new(&mut many, BATCH);
        Self { single, many, peers: [first, second], stream, request }
    }

    fn cost(&mut self, world: &World, cost: Cost, slice: Duration) -> f64 {
        match cost {
            Cost::RoundTrip => median(slice, || post_and_poll(&mut self.single, &self.request)),
            Cost::Request => self.stream.run(&mut self.many, world, slice) * 1e9,
        }
    }
}

/// Something that goes on until it is dropped.
#[derive(Debug)]
pub(super) struct Background {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts a thread that ends when the flag is set.
    fn begin(goes_on: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&over);
        let thread = std::thread::spawn(move || goes_on(&until));
        Self { over, thread: Some(thread) }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.into_iter().for_each(|ended| ended.expect("what goes on meanwhile"));
        }
    }
}

/// Two guests that send as fast as they can.
pub(super) fn busy(world: &World) -> Background {
    let (a, b) = (node(world, CROWD, 64 << 20), node(world, CROWD, 64 << 20));
    let (from, to) = (a.mr(PAGE), b.mr(PAGE));
    let request = SendWr::write(1, &[from.sge(0, SIZE)], to.addr(0), to.rkey);
    let (mut many, peer) = connected(&a, &b, RING);
    fill(&mut many.qp, (RING, BATCH), |_| request.clone());
    let mut stream = Stream::new(&mut many, BATCH);
    Background::begin(move |over| {
        let _kept = (from, to, peer);
        stream.go_on(&mut many, over);
    })
}

/// How often each NIC of a crowd that posts does so.
const PERIOD: Duration = Duration::from_millis(10);
/// Parts of such a crowd that post one after the other, so that they do not all come at once.
const PARTS: u32 = 10;

/// NICs that each write eight bytes to themselves every [`PERIOD`]. A ring holds ten seconds of it;
/// a queue pair that fell behind so far has failed at the end, which is looked for.
fn posts(world: &World, count: u32) -> Background {
    let one = |_| {
        let node = idle(world);
        let page = node.mr(PAGE);
        let request = SendWr::write(1, &[page.sge(0, SIZE)], page.addr(0), page.rkey);
        let (mut end, peer) = connected(&node, &node, RING);
        fill(&mut end.qp, (RING, 1), |_| request.clone());
        (end.qp.raw_sq(0).2, end, (page, peer))
    };
    let mut ends: Vec<_> = (0..count).map(one).collect();
    Background::begin(move |over| {
        let part = ends.len().div_ceil(PARTS as usize);
        let (mut next, mut posted) = (Instant::now(), 0u32);
        while !over.load(Ordering::Relaxed) {
            posted = posted.wrapping_add(1);
            for some in ends.chunks_mut(part) {
                for (doorbell, end, _) in some {
                    end.scq.drain();
                    doorbell.ring(posted);
                }
                next += PERIOD / PARTS;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
        }
        let alive = |end: &End| end.qp.state().expect("QP_QUERY") == qps::RTS;
        let alive = ends.iter().filter(|(_, end, _)| alive(end)).count();
        assert_eq!(alive, ends.len(), "queue pairs of NICs that post now and then have failed");
    })
}

/// Many beside one, sample by sample.
fn row(
    name: &str,
    cost: Cost,
    effort: Effort,
    mut sample: impl FnMut(Duration) -> (f64, f64),
) -> Row {
    sample(effort.slice / 4);
    let samples: Vec<_> = (0..effort.samples).map(|_| sample(effort.slice)).collect();
    let unit = if cost == Cost::RoundTrip { "us" } else { "ns/WR" };
    Row::best(name, unit, Better::Less, Some(TARGET), &samples)
}

/// A pair among idle NICs.
pub(super) fn beside_nics(name: &str, (count, cost): (u32, Cost), effort: Effort) -> Row {
    let world = world();
    let (mut alone, mut among) = (Pair::new(&world, ALONE), Pair::new(&world, CROWD));
    let _idle: Vec<Node> = (0..count).map(|_| idle(&world)).collect();
    row(name, cost, effort, |slice| {
        let reference = alone.cost(&world, cost, slice);
        (among.cost(&world, cost, slice), reference)
    })
}

/// A pair among NICs that each post every now and then.
pub(super) fn beside_posts(name: &str, count: u32, effort: Effort) -> Row {
    let world = world();
    let (mut alone, mut among) = (Pair::new(&world, ALONE), Pair::new(&world, CROWD));
    let _posts = posts(&world, count);
    row(name, Cost::RoundTrip, effort, |slice| {
        let reference = alone.cost(&world, Cost::RoundTrip, slice);
        (among.cost(&world, Cost::RoundTrip, slice), reference)
    })
}

/// A pair whose guests have more processes, which are idle.
pub(super) fn contexts(name: &str, (count, cost): (u32, Cost), effort: Effort) -> Row {
    let world = world();
    let (mut alone, mut among) = (Pair::new(&world, ALONE), Pair::new(&world, CROWD));
    let nodes = [&among.single.node, &among.peers[0].node];
    let open = |node: &Node| node.guest.open().expect("CONTEXT_CREATE");
    let _idle: Vec<Ctx> = nodes.iter().flat_map(|node| (1..count).map(|_| open(node))).collect();
    row(name, cost, effort, |slice| {
        let reference = alone.cost(&world, cost, slice);
        (among.cost(&world, cost, slice), reference)
    })
}

/// Bursts of queue pairs in turn, each with a ring of its own that is posted to once and goes
/// round.
#[derive(Debug)]
struct Bursts {
    /// Requests of a burst; the last has a completion.
    burst: u32,
    scq: Cq,
    doorbells: Vec<(Doorbell, u32)>,
    next: usize,
    under_way: u32,
    _cqs: [Cq; 3],
    _qps: Vec<[Qp; 2]>,
}

/// Bursts that are under way: what fits in one ring of the pair that is alone.
const WINDOW: u32 = RING / BATCH;

impl Bursts {
    fn new(world: &World, network: &str, (count, burst): (u32, u32)) -> Self {
        let (a, b) = (node(world, network, 256 << 20), node(world, network, 256 << 20));
        let (scq, rcq, their_scq, their_rcq) = (a.cq(RING), a.cq(16), b.cq(16), b.cq(16));
        let (from, to) = (a.mr(PAGE), b.mr(PAGE));
        let request = SendWr::write(1, &[from.sge(0, SIZE)], to.addr(0), to.rkey);
        let ours = QpSpec { sq: BATCH, rq: 0, send_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
        let theirs = QpSpec { sq: 16, rq: 0, send_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
        let (mut doorbells, mut keep) = (Vec::new(), Vec::new());
        for n in 0..count {
            if n % 400 == 399 {
                // Refused where there is room left.
                let _full = (a.ctx.add_doorbell_page(), b.ctx.add_doorbell_page());
            }
            let qp = Qp::create(&a.ctx, a.pdn, &scq, &rcq, &ours);
            let peer = Qp::create(&b.ctx, b.pdn, &their_scq, &their_rcq, &theirs);
            let (mut qp, peer) = (qp.expect("QP_CREATE"), peer.expect("QP_CREATE"));
            qp.connect((b.gid, peer.qpn), &Path::default()).expect("RESET to RTS");
            peer.connect((a.gid, qp.qpn), &Path::default()).expect("RESET to RTS");
            fill(&mut qp, (BATCH, burst), |_| request.clone());
            doorbells.push((qp.raw_sq(0).2, 0));
            keep.push([qp, peer]);
        }
        let cqs = [rcq, their_scq, their_rcq];
        Self { burst, scq, doorbells, next: 0, under_way: 0, _cqs: cqs, _qps: keep }
    }

    /// One burst of the next queue pair.
    fn post(&mut self) {
        let count = self.doorbells.len();
        let (doorbell, posted) = &mut self.doorbells[self.next];
        *posted = posted.wrapping_add(self.burst);
        doorbell.ring(*posted);
        self.next = (self.next + 1) % count;
    }

    /// A request of the next queue pair from post to completion, in microseconds.
    fn round_trip(&mut self, slice: Duration) -> f64 {
        median(slice, || {
            self.post();
            poll_one(&mut self.scq);
        })
    }

    /// Processor time of the worker for each work request, in nanoseconds.
    fn run(&mut self, world: &World, slice: Duration) -> f64 {
        let (start, cpu, mut done) = (Instant::now(), world.daemon.worker_cpu(), 0u32);
        let mut last_progress = start;
        loop {
            let most = WINDOW.min(u32::try_from(self.doorbells.len()).unwrap_or(WINDOW));
            while self.under_way < most {
                self.post();
                self.under_way += 1;
            }
            let taken = self.scq.drain();
            self.under_way -= taken;
            done += taken * self.burst;
            let now = Instant::now();
            if taken > 0 {
                last_progress = now;
            }
            assert!(now - last_progress < Duration::from_secs(10), "completions stopped");
            if now - start >= slice && done >= 256 * RING {
                return (world.daemon.worker_cpu() - cpu) / f64::from(done) * 1e9;
            }
        }
    }
}

/// Many queue pairs of one guest, which all send.
pub(super) fn queue_pairs(name: &str, count: u32, effort: Effort) -> Row {
    let world = world();
    let mut alone = Pair::new(&world, ALONE);
    let mut among = Bursts::new(&world, CROWD, (count, BATCH));
    row(name, Cost::Request, effort, |slice| {
        let reference = alone.cost(&world, Cost::Request, slice);
        (among.run(&world, slice), reference)
    })
}

/// Round trips of many queue pairs in turn, beside those of one.
pub(super) fn queue_pair_trips(name: &str, count: u32, effort: Effort) -> Row {
    let world = world();
    let mut one = Bursts::new(&world, ALONE, (1, 1));
    let mut many = Bursts::new(&world, CROWD, (count, 1));
    row(name, Cost::RoundTrip, effort, |slice| {
        let reference = one.round_trip(slice);
        (many.round_trip(slice), reference)
    })
}

/// Entries of the ring whose requests name regions.
const WIDE: u32 = 16 << 10;

/// Two guests, and writes between `count` regions of one page on either side.
fn between_regions(world: &World, network: &str, count: u32) -> (End, End, Vec<SendWr>) {
    let (a, b) = (node(world, network, 64 << 20), node(world, network, 64 << 20));
    let (end, peer) = connected(&a, &b, WIDE);
    let page = |node: &Node| Arc::new(Buf::contiguous(node.guest.ram(), PAGE));
    let (from, to) = (page(&a), page(&b));
    let register = |node: &Node, buf: &Arc<Buf>, n: u32| {
        let iova = (1 << 40) + u64::from(n) * PAGE;
        let list = PageList::of(node.guest.ram(), buf.pages(), 0);
        let keys = node.ctx.mr_reg(node.pdn, access::ALL, (iova, PAGE), &list);
        let (lkey, rkey) = keys.expect("MR_REG");
        Mr { lkey, rkey, iova, buf: Arc::clone(buf) }
    };
    let regions: Vec<_> =
        (0..count).map(|n| (register(&a, &from, n), register(&b, &to, n))).collect();
    let write = |i: u32| {
        // Neighbours in the ring are no neighbours in the table.
        let at = u64::from(i) * 7919 % u64::from(count);
        let (from, to) = &regions[at as usize];
        SendWr::write(u64::from(i), &[from.sge(0, SIZE)], to.addr(0), to.rkey)
    };
    (end, peer, (0..WIDE).map(write).collect())
}

/// Round trips of requests that name another region each.
pub(super) fn region_trips(name: &str, count: u32, effort: Effort) -> Row {
    let world = world();
    let pair = |network, count| {
        let (mut end, peer, writes) = between_regions(&world, network, count);
        let mut next = 0;
        move |slice| {
            let _both = &peer;
            median(slice, || {
                post_and_poll(&mut end, &writes[next]);
                next = (next + 1) % writes.len();
            })
        }
    };
    let (mut one, mut many) = (pair(ALONE, 1), pair(CROWD, count));
    row(name, Cost::RoundTrip, effort, |slice| {
        let reference = one(slice);
        (many(slice), reference)
    })
}

/// Requests that name another region each.
pub(super) fn regions(name: &str, count: u32, effort: Effort) -> Row {
    let world = world();
    let stream = |network, count| {
        let (mut end, peer, writes) = between_regions(&world, network, count);
        fill(&mut end.qp, (WIDE, BATCH), |i| writes[i as usize].clone());
        (Stream::of(&mut end, WIDE, BATCH), end, peer)
    };
    let (mut one, mut alone, _peer) = stream(ALONE, 1);
    let (mut many, mut among, _other) = stream(CROWD, count);
    row(name, Cost::Request, effort, |slice| {
        let reference = one.run(&mut alone, &world, slice) * 1e9;
        (many.run(&mut among, &world, slice) * 1e9, reference)
    })
}

/// Elements of a request that has many.
const ELEMENTS: u16 = 16;
/// What each further element may cost, in nanoseconds: it was so much once.
const ELEMENT: Target = Target::Value(55.0);

/// Each further element of a request beside a request with one.
pub(super) fn elements(name: &str, effort: Effort) -> Row {
    let world = world();
    let stream = |network, count: u16| {
        let (a, b) = (node(&world, network, 64 << 20), node(&world, network, 64 << 20));
        let (from, to) = (a.mr(PAGE), b.mr(PAGE));
        let spec = QpSpec { sq: RING, send_sge: ELEMENTS, inline: 0, ..QpSpec::new(qpt::RC) };
        let end = |node: &Node| node.end_with(&spec, node.cq(2 * RING), node.cq(256));
        let (mut many, peer) = (end(&a), end(&b));
        many.connect(&peer, &Path::default());
        peer.connect(&many, &Path::default());
        let elements: Vec<_> = (0..u64::from(count)).map(|n| from.sge(n * 64, SIZE)).collect();
        let request = SendWr::write(1, &elements, to.addr(0), to.rkey);
        fill(&mut many.qp, (RING, BATCH), |_| request.clone());
        (Stream::new(&mut many, BATCH), many, peer)
    };
    let (mut one, mut alone, _peer) = stream(ALONE, 1);
    let (mut all, mut among, _other) = stream(CROWD, ELEMENTS);
    let mut sample = |slice| {
        let reference = one.run(&mut alone, &world, slice) * 1e9;
        let whole = all.run(&mut among, &world, slice) * 1e9;
        ((whole - reference) / f64::from(ELEMENTS - 1), reference)
    };
    sample(effort.slice / 4);
    let samples: Vec<_> = (0..effort.samples).map(|_| sample(effort.slice)).collect();
    Row::best(name, "ns", Better::Less, Some(ELEMENT), &samples)
}
