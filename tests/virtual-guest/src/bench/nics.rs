//! What a NIC costs that nobody uses: its memory, its threads, its descriptors, and what the others
//! that there are cost `nic add`, a VM that comes, and the start of the daemon.

use std::time::{Duration, Instant};

use super::Effort;
use super::report::{Better, Row, Target};
use super::scale::busy;
use crate::daemon::DaemonOptions;
use crate::guest::GuestConfig;
use crate::world::{Node, Vacancy, World};

/// NICs whose memory and threads are counted.
const COUNTED: u32 = 64;
/// The most that an idle NIC may take, in KiB.
const MEMORY: Target = Target::Value(256.0);
/// NICs have no thread of their own.
const THREADS: Target = Target::Value(0.0);
/// Its VMM's connection, its memory, and a descriptor for each kick and call; before networks had
/// processes a NIC took 37.
const DESCRIPTORS: Target = Target::Value(37.0);
/// What hundreds of NICs may cost a VM that comes: 0.8 of the speed beside ten.
const COMING: Target = Target::Ratio(1.25);
/// What a thousand other NICs may cost.
const AMONG: Target = Target::Ratio(2.0);

fn small() -> GuestConfig {
    GuestConfig { ram_bytes: 4 << 20, ..GuestConfig::default() }
}

/// So many idle NICs, each with a driver and a process.
fn idle(world: &World, count: u32) -> Vec<Node> {
    (0..count).map(|_| world.node_with("net", &[], small())).collect()
}

/// What each NIC adds to a count of the daemon's, beside the count without them.
fn each(name: &str, unit: &str, target: Target, count: impl Fn(&World) -> f64) -> Row {
    let world = World::with(&DaemonOptions::default(), Duration::from_secs(600));
    // The first NICs bring what all share.
    let _first: [Node; 2] = std::array::from_fn(|_| world.node());
    let before = count(&world);
    let _nics = idle(&world, COUNTED);
    // What was used to add them is gone.
    std::thread::sleep(Duration::from_secs(2));
    let grown = (count(&world) - before).max(0.0) / f64::from(COUNTED);
    Row::best(name, unit, Better::Less, Some(target), &[(grown, before)])
}

/// Anonymous memory of the daemon's processes that each idle NIC adds.
pub(super) fn memory(name: &str, _: Effort) -> Row {
    each(name, "KiB", MEMORY, |world| world.daemon.own_memory() as f64 / 1024.0)
}

/// Threads that each idle NIC adds.
pub(super) fn threads(name: &str, _: Effort) -> Row {
    each(name, "threads", THREADS, |world| world.daemon.threads() as f64)
}

/// Descriptors that each idle NIC adds to the process that has most of them.
pub(super) fn descriptors(name: &str, _: Effort) -> Row {
    each(name, "fds", DESCRIPTORS, |world| world.daemon.descriptors() as f64)
}

fn milliseconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64() * 1e3
}

fn vacant(world: &World, count: u32) -> Vec<Vacancy> {
    (0..count).map(|_| world.vacancy()).collect()
}

/// `nic add` in a daemon with `count` NICs, two of which send as fast as they can, beside one with
/// only these two.
pub(super) fn add(name: &str, count: u32, effort: Effort) -> Row {
    let make = |count| {
        let world = World::with(&DaemonOptions::default(), Duration::from_secs(600));
        let nics = vacant(&world, count);
        let busy = busy(&world);
        (world, nics, busy)
    };
    let ((many, _nics, _busy), (few, _none, _too)) = (make(count), make(0));
    let mut next = 0u32;
    let mut sample = |world: &World| {
        next += 1;
        let name = format!("late{next}");
        milliseconds(|| drop(world.daemon.run(&["nic", "add", &name, "--network", "net"])))
    };
    let samples: Vec<_> = (0..effort.samples).map(|_| (sample(&many), sample(&few))).collect();
    Row::best(name, "ms", Better::Less, Some(AMONG), &samples)
}

/// From a VM's connect until its driver is ready, in a daemon with `count` guests beside one with
/// ten.
pub(super) fn connect(name: &str, count: u32, effort: Effort) -> Row {
    let make = |count| {
        let world = World::with(&DaemonOptions::default(), Duration::from_secs(600));
        let guests = idle(&world, count);
        let places = vacant(&world, effort.samples as u32).into_iter();
        (world, guests, places)
    };
    let ((_many, _guests, mut late), (_few, _ten, mut early)) = (make(count), make(10));
    let sample = |places: &mut std::vec::IntoIter<Vacancy>| {
        let place = places.next().expect("a NIC for each sample");
        let mut node = None;
        let took = milliseconds(|| node = Some(place.enter(small()).expect("a guest")));
        drop(node);
        took
    };
    let samples: Vec<_> =
        (0..effort.samples).map(|_| (sample(&mut late), sample(&mut early))).collect();
    Row::best(name, "ms", Better::Less, Some(COMING), &samples)
}

/// From the end of a daemon until the next one knows all of its `count` NICs, beside a daemon with
/// one.
pub(super) fn start(name: &str, count: u32, effort: Effort) -> Row {
    let make = |count| {
        let options = DaemonOptions { kept: true, processes: true, ..DaemonOptions::default() };
        let world = World::with(&options, Duration::from_secs(600));
        let nics = vacant(&world, count);
        (world, nics)
    };
    let ((many, all), (few, one)) = (make(count), make(1));
    let sample = |world: &World, nics: &[Vacancy]| {
        // A daemon that ends again and again is started again later each time.
        std::thread::sleep(Duration::from_secs(12));
        let pid = world.daemon.supervisor().expect("the daemon runs");
        let last = nics.last().map_or("", |nic| nic.name.as_str());
        milliseconds(|| {
            let killed = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
            assert!(killed.is_ok_and(|status| status.success()), "the daemon is killed");
            let deadline = Instant::now() + Duration::from_secs(60);
            while world.daemon.cli(&["nic", "show", last, "--json"]).is_err() {
                assert!(Instant::now() < deadline, "it does not come back");
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    };
    // Each takes as long as the daemon waits.
    let samples: Vec<_> =
        (0..effort.samples.min(3)).map(|_| (sample(&many, &all), sample(&few, &one))).collect();
    Row::best(name, "ms", Better::Less, Some(AMONG), &samples)
}
