//! The soak: hours of what guests do in a day, and nothing grows.
//!
//! Two guests share objects of all kinds that are made, used and destroyed without end, in every
//! order that is allowed and with every error that is not (`churn`), a third one comes and goes as
//! VMs do (`lives`), and a connection of long standing moves verified data all the while
//! (`traffic`). The daemon is sampled once a second, while nothing comes or goes. After a warm-up,
//! in which allocators and tables reach their size, its memory, descriptors, threads and mappings
//! must not grow; at the end it must know of no object, and no worker may have kept others waiting.

mod churn;
mod lives;
mod report;
mod traffic;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

pub use report::{Report, Row};

use crate::daemon::DaemonOptions;
use crate::guest::GuestConfig;
use crate::vitals::Vitals;
use crate::world::World;

/// Time between samples.
const SAMPLE: Duration = Duration::from_secs(1);
/// How many readings make one, and the time between them.
///
/// A connection that is up has some forty descriptors and as many mappings, and the third guest's
/// comes and goes thirty times a second. What a moment happens to show of that differed by eight in
/// one run of twenty. So for a sample nobody begins another round, and the daemon has a while to
/// let go of the last ones: what counts is the least of these readings.
const READINGS: u32 = 12;
const READING: Duration = Duration::from_millis(5);
/// Time between lines of progress.
const PROGRESS: Duration = Duration::from_secs(10);
/// The part of the time that is warm-up, and the least that it is.
const WARM_UP: (u32, Duration) = (10, Duration::from_secs(20));

/// Time after which what is left of the last connection is left for good.
const SETTLED: Duration = Duration::from_secs(10);

/// What each thread waits between rounds: a soak of half an hour is no load test, and its machine
/// has others to serve.
const PAUSE: Duration = Duration::from_millis(4);
/// How long a command may take on a machine that is busy with others.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the threads share.
#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    rounds: AtomicU64,
    lives: AtomicU64,
    messages: AtomicU64,
    /// Whoever makes objects and connections holds it for a round; for a sample nobody does.
    rounds_go_on: RwLock<()>,
}

impl Shared {
    /// After a pause: shall there be another round?
    fn goes_on(&self) -> bool {
        std::thread::sleep(PAUSE);
        !self.stop.load(Ordering::Relaxed)
    }

    /// Does a round, when nothing is sampled.
    fn round(&self, work: impl FnOnce()) {
        let _goes_on = self.rounds_go_on.read().unwrap_or_else(PoisonError::into_inner);
        work();
    }
}

/// A source of choices that repeats with its seed.
#[derive(Debug)]
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % sides
    }

    fn coin(&mut self) -> bool {
        self.roll(2) == 0
    }
}

/// The daemon at one moment of the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) at: Duration,
    pub(crate) vitals: Vitals,
}

/// Runs for `time`.
pub fn run(time: Duration, seed: u64) -> Report {
    let world = World::with(&DaemonOptions::default(), time + Duration::from_secs(180));
    let guest = || GuestConfig { timeout: PATIENCE, ..GuestConfig::default() };
    let (a, b) = (world.node_with("net", &[], guest()), world.node_with("net", &[], guest()));
    let c = world.vacancy();
    let shared = Arc::new(Shared::default());
    let begin = Instant::now();
    let mut samples = Vec::new();
    std::thread::scope(|scope| {
        let spawn = |work: Box<dyn FnOnce() + Send>| {
            let shared = Arc::clone(&shared);
            scope.spawn(move || {
                // A failure of one ends all.
                let _guard = StopOnPanic(shared);
                work();
            })
        };
        let (x, y, s) = (a.clone(), b.clone(), Arc::clone(&shared));
        let threads = [
            spawn(Box::new(move || churn::run(&x, &y, &s, Dice(seed | 1)))),
            spawn({
                let s = Arc::clone(&shared);
                Box::new(move || lives::run(&c, &s, Dice(seed.rotate_left(17) | 1)))
            }),
            spawn({
                let (x, y, s) = (a.clone(), b.clone(), Arc::clone(&shared));
                Box::new(move || traffic::run(&x, &y, &s))
            }),
        ];
        let mut told = begin;
        while begin.elapsed() < time && !shared.stop.load(Ordering::Relaxed) {
            let vitals = sample(&world, time.saturating_sub(begin.elapsed()), &shared);
            samples.push(Sample { at: begin.elapsed(), vitals });
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                tell(&world, &shared, begin.elapsed(), time);
            }
        }
        shared.stop.store(true, Ordering::Relaxed);
        for thread in threads {
            if let Err(cause) = thread.join() {
                std::panic::resume_unwind(cause);
            }
        }
    });
    for node in [&a, &b] {
        node.ctx.destroy().expect("CONTEXT_DESTROY");
    }
    let left = left(&world);
    for node in [&a, &b] {
        node.guest.disconnect();
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Report::new(
        &samples,
        (time / WARM_UP.0).max(WARM_UP.1).min(time / 2),
        left,
        world.daemon.turns(),
        [count(&shared.rounds), count(&shared.lives), count(&shared.messages)],
    )
}

/// Objects that are left. The daemon is given a while for the third guest's: it hears of the end of
/// a connection later than whoever ended it goes on.
fn left(world: &World) -> BTreeMap<&'static str, u64> {
    let until = Instant::now() + SETTLED;
    loop {
        let left = world.daemon.objects();
        if left.values().all(|count| *count == 0) || Instant::now() > until {
            return left;
        }
        std::thread::sleep(READING);
    }
}

/// What is there while nothing comes or goes, and then a pause.
fn sample(world: &World, left: Duration, shared: &Shared) -> Vitals {
    let began = Instant::now();
    let quiet = shared.rounds_go_on.write().unwrap_or_else(PoisonError::into_inner);
    let mut least = world.daemon.vitals();
    for _ in 1..READINGS {
        std::thread::sleep(READING);
        least = least.least(world.daemon.vitals());
    }
    drop(quiet);
    let pause = SAMPLE.saturating_sub(began.elapsed()).min(left);
    if !shared.stop.load(Ordering::Relaxed) {
        std::thread::sleep(pause);
    }
    least
}

struct StopOnPanic(Arc<Shared>);

impl Drop for StopOnPanic {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

fn tell(world: &World, shared: &Shared, at: Duration, time: Duration) {
    let vitals = world.daemon.vitals();
    let turns = world.daemon.turns();
    eprintln!(
        "{:>5.1} of {:.0} min: {} rounds, {} lives, {} messages; {:.1} MiB, {} descriptors, {} \
         threads, {} mappings; longest turn {:.2} ms",
        at.as_secs_f64() / 60.0,
        time.as_secs_f64() / 60.0,
        shared.rounds.load(Ordering::Relaxed),
        shared.lives.load(Ordering::Relaxed),
        shared.messages.load(Ordering::Relaxed),
        vitals.memory as f64 / f64::from(1 << 20),
        vitals.files,
        vitals.threads,
        vitals.mappings + vitals.anonymous,
        turns.longest * 1e3,
    );
}
