//! What ends in its own time.
//!
//! The kernel may take seconds to end a process: it waits for RCU where there is asynchronous I/O
//! (fs/aio.c, exit_aio). Whoever takes a network's last NIC away would wait as long. So the end
//! has a thread of its own, and a moment, in which nearly every one is over, is all that is waited
//! for.

use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long it is waited for.
const MOMENT: Duration = Duration::from_millis(200);
/// More do not end at once: one more waits for the oldest.
const MOST: usize = 16;

/// Those that have not ended yet. Dropping it waits for them.
#[derive(Debug, Default)]
pub(super) struct Leaving(Mutex<Vec<JoinHandle<()>>>);

impl Leaving {
    /// Drops `thing`, which may take long.
    pub(super) fn let_go<T: Send + 'static>(&self, name: &str, thing: T) {
        let threads = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = {
            let mut threads = threads();
            threads.retain(|thread| !thread.is_finished());
            (threads.len() >= MOST).then(|| threads.remove(0))
        };
        // Without the lock: another network may end meanwhile.
        oldest.into_iter().for_each(join);
        let (over, end) = channel::<()>();
        let own = move || {
            drop(thing);
            drop(over);
        };
        // Without a thread it is dropped here and now, with the function that is not run.
        if let Ok(thread) = std::thread::Builder::new().name(format!("end-{name}")).spawn(own) {
            threads().push(thread);
        }
        let _ = end.recv_timeout(MOMENT);
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("the end of a network panicked");
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let threads = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        threads.drain(..).for_each(join);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::*;

    /// Takes a while to end.
    struct Slow(Duration, Arc<AtomicUsize>);

    impl Drop for Slow {
        fn drop(&mut self) {
            std::thread::sleep(self.0);
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn what_takes_long_to_end_holds_nobody_up_and_is_waited_for_at_the_last() {
        let ended = Arc::<AtomicUsize>::default();
        let leaving = Leaving::default();
        let long = Duration::from_secs(3);
        let begin = Instant::now();
        leaving.let_go("slow", Slow(long, ended.clone()));
        assert!(begin.elapsed() < long / 2, "{:?}", begin.elapsed());
        assert_eq!(ended.load(Ordering::SeqCst), 0);
        drop(leaving);
        assert_eq!(ended.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn what_ends_at_once_has_ended_afterwards() {
        let ended = Arc::<AtomicUsize>::default();
        let leaving = Leaving::default();
        leaving.let_go("quick", Slow(Duration::ZERO, ended.clone()));
        assert_eq!(ended.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn only_so_many_end_at_once() {
        let ended = Arc::<AtomicUsize>::default();
        let leaving = Leaving::default();
        for _ in 0..=MOST {
            leaving.let_go("slow", Slow(5 * MOMENT, ended.clone()));
        }
        assert!(ended.load(Ordering::SeqCst) > 0, "the first was waited for");
    }
}
