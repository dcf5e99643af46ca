//! Where a NIC is: the worker that has it, which may change while it runs.
//!
//! A job for a NIC goes to its worker's mailbox and must find the NIC there, also one that goes on
//! for many turns, or whose caller has given up. So a job has a [`Pass`] for as long as it exists,
//! and a move begins only while there is none. Who has a job meanwhile waits for the end of the
//! move, which is a turn of the worker. A worker waits for nobody: the end of a job is an atomic
//! subtraction.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::worker::WorkerHandle;

/// A worker and its number.
pub(crate) type Place = (usize, WorkerHandle);

#[derive(Debug)]
struct State {
    at: Place,
    moving: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Home {
    state: Mutex<State>,
    moved: Condvar,
    /// Jobs that exist. Grows under the lock only.
    jobs: Arc<AtomicUsize>,
}

/// A job's right to find the NIC where it was sent.
#[derive(Debug)]
pub(super) struct Pass(Arc<AtomicUsize>);

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Home {
    pub(super) fn new(at: Place) -> Self {
        let state = Mutex::new(State { at, moving: false });
        Self { state, moved: Condvar::new(), jobs: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it is, or will be in a moment.
    pub(super) fn place(&self) -> Place {
        self.state().at.clone()
    }

    /// Where a job finds it, as long as the pass lives. `None`: it has been on its way for longer
    /// than that.
    pub(super) fn enter(&self, patience: Duration) -> Option<(WorkerHandle, Pass)> {
        let moves = |state: &mut State| state.moving;
        let waited = self.moved.wait_timeout_while(self.state(), patience, moves);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.moving {
            return None;
        }
        self.jobs.fetch_add(1, Ordering::Relaxed);
        Some((state.at.1.clone(), Pass(self.jobs.clone())))
    }

    /// Begins a move; false if a job of it exists, or it moves already.
    pub(super) fn begin_move(&self) -> bool {
        let mut state = self.state();
        // What the last job did has been done.
        let begins = !state.moving && self.jobs.load(Ordering::Acquire) == 0;
        state.moving |= begins;
        begins
    }

    /// The move is over; `to`: it took place.
    pub(super) fn end_move(&self, to: Option<Place>) {
        let mut state = self.state();
        if let Some(to) = to {
            state.at = to;
        }
        state.moving = false;
        drop(state);
        self.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::worker::{WorkerConfig, Workers};

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_move_and_a_job_never_meet() {
        let workers = Workers::start(WorkerConfig { workers: 2, ..WorkerConfig::default() });
        let workers = workers.unwrap();
        let [one, other] = workers.handles() else { panic!("two were asked for") };
        let home = Home::new((0, one.clone()));
        let (_, pass) = home.enter(SHORT).unwrap();
        assert!(!home.begin_move(), "a job exists");
        drop(pass);
        assert!(home.begin_move() && !home.begin_move(), "one at a time");
        assert!(home.enter(SHORT).is_none(), "it is on its way");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let begin = Instant::now();
                let (worker, _pass) = home.enter(LONG).expect("the move ends");
                (worker.is_same(other), begin.elapsed())
            });
            std::thread::sleep(SHORT);
            home.end_move(Some((1, other.clone())));
            let (arrived, waited) = waits.join().unwrap();
            assert!(arrived && waited < LONG / 2, "{waited:?}");
        });
        assert_eq!(home.place().0, 1);
        assert!(home.begin_move());
        home.end_move(None);
        assert!(home.enter(SHORT).is_some_and(|(worker, _)| worker.is_same(other)), "as it was");
    }
}
