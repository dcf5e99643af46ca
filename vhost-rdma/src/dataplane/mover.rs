//! Moves NICs of one network to where there is time for them.
//!
//! One thread of each data plane whose network has several workers. It wakes once a second, looks
//! at how busy the workers were, and asks them what each NIC cost only if one was up for a quarter
//! of it. So it is off the data path, and costs an idle daemon one wake-up. What it does with that
//! is decided in `balance`; how a NIC moves, in `device::nic` and `soft::moves`.
//!
//! A NIC's figure is a sliding one, which follows its load within a few seconds. At most one
//! decision is carried out in an interval.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::balance::{Load, Moves, Rests, decide};
use super::{Placed, State};
use crate::device::nic::Nic;
use crate::link::NicId;
use crate::worker::WorkerHandle;

/// How often it looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// After moves it looks again, once figures have followed.
const AFTER_MOVES: Duration = Duration::from_secs(3);
/// How long a worker may be in one turn before its figures are left out.
const PATIENCE: Duration = Duration::from_millis(500);
/// Share of an interval that a worker must have been up to be worth a look: polling counts.
const UP: f64 = 0.25;
/// A NIC is gone from the figures once it takes less than this.
const NOTHING: f64 = 0.001;
/// How often a move is tried before another interval: a command may be under way.
const TRIES: u32 = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(1);

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Mover {
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// Starts it.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub(super) fn start(state: Arc<Mutex<State>>, workers: Vec<WorkerHandle>) -> io::Result<Self> {
        let (stop, stopped) = sync_channel(1);
        let thread =
            std::thread::Builder::new().name("vrdma-mover".to_owned()).spawn(move || {
                let mut watch = Watch::new(state, workers);
                let mut wait = INTERVAL;
                while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                    wait = if watch.look() { AFTER_MOVES } else { INTERVAL };
                }
            })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that moves NICs ended with a panic");
        }
    }
}

/// Sliding figures of a NIC.
#[derive(Debug, Default)]
struct Figures {
    on: usize,
    busy: f64,
    moves: bool,
    talks: BTreeMap<NicId, f64>,
}

struct Watch {
    state: Arc<Mutex<State>>,
    workers: Vec<WorkerHandle>,
    /// Time that each worker was up, at the last look.
    up: Vec<u64>,
    looked: Instant,
    figures: BTreeMap<NicId, Figures>,
    rests: Rests,
}

impl Watch {
    fn new(state: Arc<Mutex<State>>, workers: Vec<WorkerHandle>) -> Self {
        let up = vec![0; workers.len()];
        let (figures, rests) = (BTreeMap::new(), Rests::default());
        Self { state, workers, up, looked: Instant::now(), figures, rests }
    }

    /// Looks, and moves what is to be moved; true if anything was.
    fn look(&mut self) -> bool {
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.looked).as_secs_f64().max(1e-3);
        self.looked = now;
        let mut is_busy = false;
        for (worker, before) in self.workers.iter().zip(&mut self.up) {
            let total = worker.beat().total;
            let up = Duration::from_nanos(total.saturating_sub(*before)).as_secs_f64();
            *before = total;
            is_busy |= up / passed >= UP;
        }
        if !is_busy {
            self.figures.clear();
            return false;
        }
        self.measure(passed);
        let loads: Vec<Load> =
            self.figures.iter().map(|(nic, figures)| self.load(*nic, figures, now)).collect();
        let moves = decide(self.workers.len(), &loads);
        tracing::debug!(?loads, ?moves, "what NICs cost");
        !moves.is_empty() && self.carry_out(&moves, now)
    }

    fn load(&self, nic: NicId, figures: &Figures, now: Instant) -> Load {
        Load {
            nic,
            on: figures.on,
            busy: figures.busy,
            moves: figures.moves && !self.rests.rests(nic, now),
            talks: figures.talks.iter().map(|(peer, share)| (*peer, *share)).collect(),
        }
    }

    /// Takes in what each NIC cost in the time that has passed.
    fn measure(&mut self, passed: f64) {
        for figures in self.figures.values_mut() {
            figures.busy /= 2.0;
            figures.talks.values_mut().for_each(|share| *share /= 2.0);
            figures.talks.retain(|_, share| *share >= NOTHING);
        }
        let share = |nanos: u64| Duration::from_nanos(nanos).as_secs_f64() / passed / 2.0;
        for (on, worker) in self.workers.iter().enumerate() {
            let loads = worker.call(None, PATIENCE, |shard, _| shard.take_loads());
            for load in loads.unwrap_or_default() {
                let figures = self.figures.entry(load.id).or_default();
                (figures.on, figures.moves) = (on, load.moves);
                figures.busy += share(load.spent);
                let mut named = Vec::new();
                for (there, peer, spent) in load.talks {
                    *figures.talks.entry(peer).or_default() += share(spent);
                    named.push((there, peer));
                }
                // Who is only written to and read from costs nothing of its own.
                for (on, peer) in named {
                    let unknown = || Figures { on, moves: true, ..Figures::default() };
                    self.figures.entry(peer).or_insert_with(unknown);
                }
            }
        }
        let named: BTreeSet<NicId> = self
            .figures
            .values()
            .filter(|figures| figures.busy >= NOTHING)
            .flat_map(|figures| figures.talks.keys().copied())
            .collect();
        self.figures.retain(|nic, figures| figures.busy >= NOTHING || named.contains(nic));
    }

    fn carry_out(&mut self, moves: &Moves, now: Instant) -> bool {
        let mut any = false;
        // Who costs least goes first, and where one stays the rest does: who works is not to be
        // parted from whom it works with.
        let mut moves = moves.clone();
        let busy = |nic: &NicId| self.figures.get(nic).map_or(0.0, |figures| figures.busy);
        moves.sort_by(|(a, _), (b, _)| busy(a).total_cmp(&busy(b)));
        for (id, to) in moves {
            let Some((nic, from)) = self.find(id) else { continue };
            let Some(worker) = self.workers.get(to).filter(|_| from != to) else { continue };
            let begin = Instant::now();
            let moved = (0..TRIES).any(|tried| {
                if tried > 0 {
                    std::thread::sleep(BETWEEN_TRIES);
                }
                nic.move_to((to, worker.clone()))
            });
            if !moved {
                tracing::debug!(nic = nic.name, from, to, "it does not move now");
                break;
            }
            any = true;
            self.placed(from, to);
            self.rests.moved(id, now);
            if let Some(figures) = self.figures.get_mut(&id) {
                figures.on = to;
            }
            let took = begin.elapsed();
            tracing::info!(nic = nic.name, from, to, ?took, "moved to another worker");
        }
        any
    }

    fn find(&self, id: NicId) -> Option<(Arc<Nic>, usize)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |placed: &&Placed| placed.nic.id() == id;
        let nic = state.nics.values().find(of).map(|placed| placed.nic.clone())?;
        drop(state);
        let on = nic.worker();
        Some((nic, on))
    }

    fn placed(&self, from: usize, to: usize) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).placement.change(from, to);
    }
}
