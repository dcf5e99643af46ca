//! One network on two workers: two pairs of guests, each pair on a worker of its own, beside the
//! same two pairs on one worker.
//!
//! Nothing crosses, so what is measured is whether workers keep out of each other's way. It is
//! counted per second on the wall, since processor time would hide a wait for each other. Work
//! requests are written once, and the one thread of all guests sleeps most of the time: the second
//! worker has its core.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Effort;
use super::cores::Cores;
use super::data::{BATCH, Stream};
use super::report::{Better, Row, Target};
use crate::control::Mr;
use crate::daemon::DaemonOptions;
use crate::guest::GuestConfig;
use crate::pages::Buf;
use crate::qp::{Path, QpSpec, SendWr};
use crate::spec::{access, qps, qpt};
use crate::world::{End, World};

/// Of each ring, the most that a NIC allows: work for a worker while the guests sleep, and while
/// their thread waits for one of two cores that are both busy.
const ENTRIES: u32 = 16_384;
/// How long they do.
const NAP: Duration = Duration::from_micros(200);
/// Work requests of a sample, at least.
const LEAST: u64 = 2 * ENTRIES as u64;
/// Bytes that each pair walks over: what a core's own cache has room for, or memory is measured.
const WINDOW: u64 = 256 << 10;

struct Pair {
    near: End,
    stream: Stream,
    // They stay registered.
    _far: End,
    _regions: [Mr; 2],
}

struct Scene {
    pairs: [Pair; 2],
    world: World,
}

/// Two pairs that write `size` bytes each time, in a network of so many workers.
fn scene(workers: u32, size: u64) -> Scene {
    let args = ["--network-workers".to_owned(), workers.to_string()].to_vec();
    let options = DaemonOptions { processes: true, args, ..DaemonOptions::default() };
    let world = World::with(&options, Duration::from_secs(600));
    let config = GuestConfig { ram_bytes: 64 << 20, ..GuestConfig::default() };
    let spec =
        QpSpec { sq: ENTRIES, rq: 0, send_sge: 1, recv_sge: 0, inline: 0, ..QpSpec::new(qpt::RC) };
    // NICs go to the workers in turn, so every other one is on the same.
    let ends = [(); 4].map(|()| {
        let node = world.node_with("net", &["--backing", "soft"], config.clone());
        let cqs = (node.cq(ENTRIES), node.cq(64));
        let end = node.end_with(&spec, cqs.0, cqs.1);
        let buf = Arc::new(Buf::contiguous(node.guest.ram(), WINDOW));
        let mr = node.ctx.register(node.pdn, buf, access::ALL).expect("MR_REG");
        (end, mr)
    });
    let pid = world.daemon.pid_of("net").expect("the network's process");
    Cores::get().worker_each(pid);
    let [a, b, c, d] = ends;
    let pairs = [(a, c), (b, d)].map(|((mut near, from), (far, to))| {
        near.connect(&far, &Path::default());
        far.connect(&near, &Path::default());
        for i in 0..ENTRIES {
            let at = u64::from(i) * size.max(64) % WINDOW;
            let sge = from.sge(at, size as u32);
            let mut request = SendWr::write(u64::from(i), &[sge], to.addr(at), to.rkey);
            if i % BATCH != BATCH - 1 {
                request = request.unsignaled();
            }
            let (ring, at, _) = near.qp.raw_sq(i);
            request.encode(&ring, at);
        }
        let stream = Stream::of(&mut near, ENTRIES, BATCH);
        Pair { near, stream, _far: far, _regions: [from, to] }
    });
    Scene { pairs, world }
}

impl Scene {
    /// Work requests of both in a second.
    fn run(&mut self, slice: Duration) -> f64 {
        let start = Instant::now();
        let mut done = 0u64;
        let mut last = start;
        loop {
            let taken: u32 = self.pairs.iter_mut().map(|p| p.stream.turn(&mut p.near)).sum();
            done += u64::from(taken);
            let now = Instant::now();
            if taken > 0 {
                last = now;
            }
            assert!(now - last < Duration::from_secs(10), "completions stopped at {done}");
            if now - start >= slice && done >= LEAST {
                return done as f64 / (now - start).as_secs_f64();
            }
            std::thread::sleep(NAP);
        }
    }

    /// Takes what is under way, so that it costs the other scene nothing.
    fn finish(&mut self) {
        let mut quiet = 0;
        while quiet < 20 {
            std::thread::sleep(NAP);
            let taken: u32 = self.pairs.iter_mut().map(|p| p.stream.take(&mut p.near)).sum();
            quiet = if taken == 0 { quiet + 1 } else { 0 };
        }
    }
}

/// Two workers beside one.
pub(super) fn two_by_one(name: &str, size: u64, effort: Effort) -> Row {
    let mut scenes = [2, 1].map(|workers| scene(workers, size));
    let unit = if size > 4096 { ("GB/s", size as f64 / 1e9) } else { ("M/s", 1e-6) };
    let mut measure = |at: usize| {
        let scene = &mut scenes[at];
        scene.run(effort.slice / 4);
        let rate = scene.run(effort.slice * 2) * unit.1;
        scene.finish();
        rate
    };
    let samples: Vec<_> = (0..effort.samples).map(|_| (measure(0), measure(1))).collect();
    for end in scenes.iter().flat_map(|scene| &scene.pairs) {
        let state = end.near.qp.state().expect("QP_QUERY");
        assert_eq!(state, qps::RTS, "a queue pair failed during the run");
    }
    drop(scenes.map(|scene| scene.world));
    Row::best(name, unit.0, Better::More, Some(Target::Ratio(1.6)), &samples)
}
