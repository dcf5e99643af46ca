//! What the hand-over of work between threads stands on.
//!
//! `mailbox`, `reply`, `waker`, `carrier`, `handle` and `shard_thread` take their atomics, locks
//! and parking from here. So the models (`models`) run the same files on loom's, where every
//! interleaving and every stale value is tried, with and without each order.

use std::sync::PoisonError;
use std::thread;
use std::time::Duration;

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::Mutex;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize};
pub(super) use std::thread::{Thread, current};
pub(super) use std::time::Instant;

pub(super) use crate::ordering::Cpu;

/// Sleeps until somebody unparks this thread, for this long at most, or for no reason.
pub(super) fn park(patience: Duration) {
    thread::park_timeout(patience);
}

/// A place for one value, which one thread puts in and another takes out. Whose turn it is they
/// know from elsewhere, so neither waits.
#[derive(Debug)]
pub(super) struct Slot<T>(Mutex<Option<T>>);

impl<T> Slot<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(super) fn put(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    pub(super) fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
