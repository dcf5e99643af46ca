//! The answer to one call: a worker gives it, another thread waits for it, and the worker never
//! does.
//!
//! A channel's sender takes a lock that the waiting thread holds for moments, and whoever lost its
//! processor in such a moment keeps the worker. Here the waiting thread touches the lock only once
//! the worker is done with it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::sync::{AtomicU8, Instant, Slot, Thread, current, park};

const OPEN: u8 = 0;
const GIVEN: u8 = 1;
/// The worker's end went without an answer.
const GONE: u8 = 2;

#[derive(Debug)]
struct Shared<R> {
    state: AtomicU8,
    answer: Slot<R>,
}

/// The worker's end.
#[derive(Debug)]
pub(super) struct Reply<R> {
    shared: Arc<Shared<R>>,
    waiting: Thread,
}

/// The end of the thread that made it, which is the one to wait.
#[derive(Debug)]
pub(super) struct Answer<R>(Arc<Shared<R>>);

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// Not yet.
    Timeout,
    /// There will be none.
    Gone,
}

/// For one call by this thread.
pub(super) fn reply<R>() -> (Reply<R>, Answer<R>) {
    let shared = Arc::new(Shared { state: AtomicU8::new(OPEN), answer: Slot::new() });
    (Reply { shared: shared.clone(), waiting: current() }, Answer(shared))
}

impl<R> Reply<R> {
    /// Gives the answer; only the first counts. Nobody may want it any more.
    pub(super) fn give(&self, answer: R) {
        if self.shared.state.load(Ordering::Relaxed) != OPEN {
            return;
        }
        // Its lock is free: the other side waits for the state.
        self.shared.answer.put(answer);
        self.end(GIVEN);
    }

    fn end(&self, state: u8) {
        self.shared.state.store(state, Ordering::Release);
        // No system call unless it sleeps, and no lock.
        self.waiting.unpark();
    }
}

impl<R> Drop for Reply<R> {
    fn drop(&mut self) {
        if self.shared.state.load(Ordering::Relaxed) == OPEN {
            self.end(GONE);
        }
    }
}

impl<R> Answer<R> {
    /// Waits for the answer.
    pub(super) fn wait(&self, patience: Duration) -> Result<R, NoAnswer> {
        let begin = Instant::now();
        loop {
            match self.shared_state() {
                GIVEN => return self.0.answer.take().ok_or(NoAnswer::Gone),
                GONE => return Err(NoAnswer::Gone),
                _ => {}
            }
            let Some(left) = patience.checked_sub(begin.elapsed()) else {
                return Err(NoAnswer::Timeout);
            };
            // It may return for no reason, or for one that is past.
            park(left);
        }
    }

    fn shared_state(&self) -> u8 {
        self.0.state.load(Ordering::Acquire)
    }
}
