//! The answer to one call: a worker gives it, another thread waits for it, and the worker never
//! does.
//!
//! A channel's sender takes a lock that the waiting thread holds for moments, and whoever lost its
//! processor in such a moment keeps the worker. Here the waiting thread touches the lock only once
//! the worker is done with it.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

const OPEN: u8 = 0;
const GIVEN: u8 = 1;
/// The worker's end went without an answer.
const GONE: u8 = 2;

#[derive(Debug)]
struct Shared<R> {
    state: AtomicU8,
    answer: Mutex<Option<R>>,
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
    let shared = Arc::new(Shared { state: AtomicU8::new(OPEN), answer: Mutex::new(None) });
    (Reply { shared: shared.clone(), waiting: thread::current() }, Answer(shared))
}

impl<R> Reply<R> {
    /// Gives the answer; only the first counts. Nobody may want it any more.
    pub(super) fn give(&self, answer: R) {
        if self.shared.state.load(Ordering::Relaxed) != OPEN {
            return;
        }
        // Free: the other side waits for the state.
        *self.shared.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
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
                GIVEN => {
                    let mut answer = self.0.answer.lock().unwrap_or_else(PoisonError::into_inner);
                    return answer.take().ok_or(NoAnswer::Gone);
                }
                GONE => return Err(NoAnswer::Gone),
                _ => {}
            }
            let Some(left) = patience.checked_sub(begin.elapsed()) else {
                return Err(NoAnswer::Timeout);
            };
            // It may return for no reason, or for one that is past.
            thread::park_timeout(left);
        }
    }

    fn shared_state(&self) -> u8 {
        self.0.state.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn an_answer_comes_early_late_or_not_at_all() {
        let (reply_now, answer) = reply();
        reply_now.give(1);
        reply_now.give(2);
        assert_eq!(answer.wait(Duration::ZERO), Ok(1));
        let (reply_later, answer) = reply();
        assert_eq!(answer.wait(Duration::from_millis(5)), Err(NoAnswer::Timeout));
        let other = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            reply_later.give(3);
        });
        assert_eq!(answer.wait(LONG), Ok(3));
        other.join().expect("it ends");
        let (never, answer) = reply::<u32>();
        let other = thread::spawn(move || drop(never));
        assert_eq!(answer.wait(LONG), Err(NoAnswer::Gone));
        other.join().expect("it ends");
    }

    #[test]
    fn none_is_lost_between_the_look_and_the_sleep() {
        for n in 0..2000u32 {
            let (reply, answer) = reply();
            let other = thread::spawn(move || reply.give(n));
            assert_eq!(answer.wait(LONG), Ok(n));
            other.join().expect("it ends");
        }
    }
}
