//! The primitives of `worker/sync.rs`, of loom's, and what may be left out of them.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::sync::{self, LockResult, TryLockError, TryLockResult};
use std::thread::panicking;
use std::time::Duration;

use loom::sync::atomic::{self, fence};

pub(super) use loom::hint::spin_loop;

use crate::ordering::{Fence, Fences, Flag};

/// What is left out of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Without {
    Nothing,
    /// A full fence.
    Full(Fence),
    /// The release order of all stores.
    Release,
    /// The acquire order of all loads.
    Acquire,
    /// That whoever gives an answer unparks who waits for it.
    Unpark,
    /// The rule that whoever owns memory copies to it: the requester's shard does.
    CopiesByTheOwner,
}

thread_local! {
    /// Loom's threads are coroutines of one thread, which runs one model.
    static WITHOUT: Cell<Without> = const { Cell::new(Without::Nothing) };
}

/// For what this thread runs from now on.
pub(super) fn leave_out(what: Without) {
    WITHOUT.set(what);
}

pub(super) fn is_without(what: Without) -> bool {
    WITHOUT.get() == what
}

// A model that failed takes its threads down, and with them what they hold: none of loom's may be
// touched then.

/// The order that is left of one.
fn left(order: Ordering) -> Ordering {
    match (order, WITHOUT.get()) {
        (Ordering::Release, Without::Release) | (Ordering::Acquire, Without::Acquire) => {
            Ordering::Relaxed
        }
        _ => order,
    }
}

/// The processor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cpu;

impl Fences for Cpu {
    fn full(&self, which: Fence) {
        if !is_without(Without::Full(which)) {
            fence(Ordering::SeqCst);
        }
    }
}

#[derive(Debug)]
pub(super) struct AtomicBool(atomic::AtomicBool);

impl AtomicBool {
    pub(super) fn new(value: bool) -> Self {
        Self(atomic::AtomicBool::new(value))
    }
}

impl Flag for AtomicBool {
    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: bool) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn lower(&self) -> bool {
        self.0.compare_exchange(true, false, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[derive(Debug)]
pub(super) struct AtomicU8(atomic::AtomicU8);

impl AtomicU8 {
    pub(super) fn new(value: u8) -> Self {
        Self(atomic::AtomicU8::new(value))
    }

    pub(super) fn load(&self, order: Ordering) -> u8 {
        if panicking() { 0 } else { self.0.load(left(order)) }
    }

    pub(super) fn store(&self, value: u8, order: Ordering) {
        if !panicking() {
            self.0.store(value, left(order));
            // To unpark is no step of loom's that others may come before: this is one.
            self.0.fetch_or(0, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
pub(super) struct AtomicUsize(atomic::AtomicUsize);

impl AtomicUsize {
    pub(super) fn new(value: usize) -> Self {
        Self(atomic::AtomicUsize::new(value))
    }

    pub(super) fn load(&self, order: Ordering) -> usize {
        self.0.load(left(order))
    }

    pub(super) fn store(&self, value: usize, order: Ordering) {
        self.0.store(value, left(order));
    }

    pub(super) fn fetch_add(&self, value: usize, order: Ordering) -> usize {
        self.0.fetch_add(value, left(order))
    }

    pub(super) fn fetch_sub(&self, value: usize, order: Ordering) -> usize {
        if panicking() { 0 } else { self.0.fetch_sub(value, left(order)) }
    }
}

/// A lock. What it holds is beside it, for the same reason.
#[derive(Debug)]
pub(super) struct Mutex<T> {
    lock: loom::sync::Mutex<()>,
    value: sync::Mutex<T>,
}

/// What has it.
pub(super) struct Guard<'a, T> {
    value: sync::MutexGuard<'a, T>,
    _lock: Option<loom::sync::MutexGuard<'a, ()>>,
}

impl<T> Mutex<T> {
    pub(super) fn new(value: T) -> Self {
        Self { lock: loom::sync::Mutex::new(()), value: sync::Mutex::new(value) }
    }

    fn guard<'a>(&'a self, lock: Option<loom::sync::MutexGuard<'a, ()>>) -> Guard<'a, T> {
        let value = self.value.try_lock().expect("whoever has the lock");
        Guard { value, _lock: lock }
    }

    pub(super) fn lock(&self) -> LockResult<Guard<'_, T>> {
        let lock = (!panicking()).then(|| self.lock.lock().expect("a lock of the model"));
        Ok(self.guard(lock))
    }

    pub(super) fn try_lock(&self) -> TryLockResult<Guard<'_, T>> {
        match self.lock.try_lock() {
            Ok(lock) => Ok(self.guard(Some(lock))),
            Err(_) => Err(TryLockError::WouldBlock),
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// A thread that may be parked.
#[derive(Debug)]
pub(super) struct Thread(loom::thread::Thread);

impl Thread {
    pub(super) fn unpark(&self) {
        if !is_without(Without::Unpark) && !panicking() {
            self.0.unpark();
        }
    }
}

pub(super) fn current() -> Thread {
    Thread(loom::thread::current())
}

/// There is no time: whoever waits does so until it is unparked.
pub(super) fn park(_: Duration) {
    loom::thread::park();
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Instant;

impl Instant {
    pub(super) const fn now() -> Self {
        Self
    }

    pub(super) const fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
}

/// Weaker than the one that ships, whose lock is an order of its own: what was put in is seen only
/// by whom it is known to from elsewhere.
#[derive(Debug)]
pub(super) struct Slot<T> {
    there: Word,
    value: sync::Mutex<Option<T>>,
}

impl<T> Slot<T> {
    pub(super) fn new() -> Self {
        Self { there: Word::new(), value: sync::Mutex::new(None) }
    }

    pub(super) fn put(&self, value: T) {
        *self.value.lock().expect("a lock of the model") = Some(value);
        self.there.write(1);
    }

    pub(super) fn take(&self) -> Option<T> {
        self.there.reads(1);
        self.value.lock().expect("a lock of the model").take()
    }
}

/// A word of plain memory: whoever reads it in no order may see what it was before.
#[derive(Debug)]
pub(super) struct Word(atomic::AtomicU32);

/// How a missing order shows.
pub(super) const STALE: &str = "what was written before is not seen";

impl Word {
    pub(super) fn new() -> Self {
        Self(atomic::AtomicU32::new(0))
    }

    pub(super) fn write(&self, value: u32) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(super) fn reads(&self, value: u32) {
        assert_eq!(self.0.load(Ordering::Relaxed), value, "{STALE}");
    }
}
