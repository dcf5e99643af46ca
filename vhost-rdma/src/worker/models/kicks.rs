//! What a worker of a model sleeps on, in place of its eventfd. No guest kicks.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use loom::sync::{Condvar, Mutex};

use crate::link::NicId;

/// Kicks that the worker heard of: none.
#[derive(Debug, Default)]
pub(super) struct Heard(());

impl Heard {
    pub(super) const fn next(&mut self) -> Option<NicId> {
        None
    }
}

/// See the module. It remembers who woke it while nobody slept, as an eventfd does.
#[derive(Debug)]
pub(super) struct Kicks(Mutex<bool>, Condvar);

/// A guest's.
#[derive(Debug)]
pub struct WatchedKick;

impl Kicks {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(Mutex::new(false), Condvar::new()))
    }

    pub(super) fn watch(
        self: &Arc<Self>,
        _: Option<NicId>,
        _: OwnedFd,
        _: Arc<AtomicU64>,
    ) -> io::Result<WatchedKick> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn wake(&self) {
        *self.0.lock().expect("a lock of the model") = true;
        self.1.notify_one();
    }

    /// There is no time, so only a wake-up ends it.
    pub(super) fn sleep(&self, _: Option<Duration>, _: &mut Heard, woken: impl FnOnce()) {
        let mut given = self.0.lock().expect("a lock of the model");
        while !*given {
            given = self.1.wait(given).expect("a lock of the model");
        }
        *given = false;
        drop(given);
        woken();
    }

    pub(super) const fn hear(&self, _: &mut Heard) -> bool {
        false
    }
}
