//! Waking a worker that may or may not be asleep, with a system call only if it is.
//!
//! Dekker's pattern twice, once for jobs and once for doorbells. The worker, before it sleeps:
//! *stores* `asleep`, full fence, *looks* (at the mailbox, and through `prepare_sleep` at the
//! doorbells). The other side: *stores* what is to be found, full fence, *reads* `asleep`. At least
//! one of the two sees the other. For a doorbell the other side's store is the guest's producer
//! index, and what the guest reads is `NEED_KICK`, which the worker sets *after* `asleep` and
//! before its look: so a kick that follows from `NEED_KICK` finds `asleep` set, and any other kick
//! is for a doorbell that the worker's look will see.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::kicks::{Heard, Kicks, WatchedKick};
use super::sync::{AtomicBool, Cpu};
use crate::link::NicId;
use crate::ordering::{self, Flag as _};

#[derive(Debug)]
pub(super) struct Waker {
    asleep: AtomicBool,
    kicks: Arc<Kicks>,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { asleep: AtomicBool::new(false), kicks: Arc::new(Kicks::new()?) })
    }

    /// Lets a guest's kicks wake the worker and tell it whose they are, and counts them.
    pub(super) fn watch(
        &self,
        nic: Option<NicId>,
        fd: OwnedFd,
        counter: Arc<AtomicU64>,
    ) -> io::Result<WatchedKick> {
        self.kicks.watch(nic, fd, counter)
    }

    /// Makes the worker look again, if it sleeps or is about to. What it shall find must have been
    /// stored before.
    #[inline]
    pub(super) fn wake(&self) {
        if ordering::must_wake(&self.asleep, &Cpu) {
            self.kicks.wake();
        }
    }

    /// Announces the sleep; the worker must look at everything once more before it calls
    /// [`sleep`](Self::sleep).
    pub(super) fn announce(&self) {
        ordering::announce_sleep(&self.asleep, &Cpu);
    }

    /// Takes the announcement back.
    pub(super) fn stay_awake(&self) {
        self.asleep.set(false);
    }

    /// Sleeps until someone wakes us or `timeout` is over. Kicks that could not be counted are left
    /// in `heard`: whoever has the lock of the counters may have lost its processor.
    pub(super) fn sleep(&self, timeout: Option<Duration>, heard: &mut Heard) {
        self.kicks.sleep(timeout, heard, || self.stay_awake());
    }

    /// Hears kicks without a wait; true: there may be more.
    pub(super) fn hear(&self, heard: &mut Heard) -> bool {
        self.kicks.hear(heard)
    }

    /// The kicks that wake it.
    #[cfg(test)]
    pub(super) fn kicks(&self) -> &Kicks {
        &self.kicks
    }
}
