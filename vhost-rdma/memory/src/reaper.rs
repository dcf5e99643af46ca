//! The thread that unmaps guest memory in the place of threads that serve several guests.
//!
//! Unmapping takes time in proportion to what was touched (see `mapping`). A worker gives the parts
//! of a mapping away instead, and must wait for nobody while it does so: not for the reaper, and
//! not for another worker that lost its processor in the middle of the same. Channels have such
//! waits, as locks or as loops. So there are many [`Reaper::piles`], each with a lock that whoever
//! gives only tries: a thread is at one of them at a time, so the next is free, and with more
//! threads than piles at it at one moment the worker unmaps by itself. `Thread::unpark` takes no
//! lock (a futex, library/std/src/sys/sync/thread_parking/futex.rs).
//!
//! It may touch nothing but what it is given.

use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{self, Thread};

/// More than there are workers on a host.
const PILES: usize = 64;

/// See the module.
pub(super) struct Reaper<T> {
    piles: Arc<[Mutex<Vec<T>>]>,
    thread: Thread,
}

impl<T: Send + 'static> Reaper<T> {
    /// `None`: the host gives no thread.
    pub(super) fn start() -> Option<Self> {
        let piles: Arc<[Mutex<Vec<T>>]> = (0..PILES).map(|_| Mutex::default()).collect();
        let own = piles.clone();
        let thread = thread::Builder::new().name("unmap".to_owned());
        match thread.spawn(move || {
            loop {
                own.iter().for_each(clear);
                thread::park();
            }
        }) {
            Ok(handle) => Some(Self { piles, thread: handle.thread().clone() }),
            Err(error) => {
                tracing::warn!(%error, "no thread to unmap guest memory: workers will do it");
                None
            }
        }
    }

    /// Takes `what`, to drop it in a moment; it comes back if that would need a wait.
    pub(super) fn take(&self, what: T) -> Option<T> {
        for pile in &*self.piles {
            let mut pile = match pile.try_lock() {
                Ok(pile) => pile,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            pile.push(what);
            drop(pile);
            self.thread.unpark();
            return None;
        }
        Some(what)
    }
}

/// Drops a pile's content, with its lock free.
fn clear<T>(pile: &Mutex<Vec<T>>) {
    let taken = std::mem::take(&mut *pile.lock().unwrap_or_else(PoisonError::into_inner));
    drop(taken);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use super::*;

    struct Told(u32, Sender<u32>);

    impl Drop for Told {
        fn drop(&mut self) {
            self.1.send(self.0).unwrap();
        }
    }

    #[test]
    fn who_gives_waits_for_nobody() {
        let (send, dropped) = channel();
        let reaper = Reaper::start().unwrap();
        let held = reaper.piles[0].lock().unwrap();
        assert!(reaper.take(Told(1, send.clone())).is_none(), "the next pile takes it");
        drop(held);
        assert_eq!(dropped.recv_timeout(Duration::from_secs(20)), Ok(1));
        let held: Vec<_> = reaper.piles.iter().map(|pile| pile.lock().unwrap()).collect();
        let back = reaper.take(Told(2, send));
        assert_eq!(back.as_ref().map(|told| told.0), Some(2), "it comes back");
        drop(held);
    }
}
