//! A NIC as its socket knows it: who serves it, and whether a VMM sits there.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::mark::Mark;
use crate::node::{Connection, Dataplane, NicConfig, NicStatus};

/// See the module.
pub(super) struct Seat {
    name: String,
    dataplane: Arc<dyn Dataplane>,
    mark: Mark,
    /// Held while somebody is let in.
    entry: Mutex<()>,
}

/// Between looks whether somebody is being let in.
const LOOK: Duration = Duration::from_millis(1);

impl Seat {
    /// That of a NIC which `dataplane` has.
    pub(super) fn new(nic: &NicConfig, dataplane: Arc<dyn Dataplane>) -> Self {
        Self {
            name: nic.name.clone(),
            dataplane,
            mark: Mark::beside(&nic.socket),
            entry: Mutex::default(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// To be held from before a connection is accepted until it is served.
    pub(super) fn entry(&self) -> MutexGuard<'_, ()> {
        self.entry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody is let in any more: whoever connects waits at the socket. False if somebody was still
    /// being let in at `deadline`.
    pub(super) fn shut(&self, deadline: Instant) -> bool {
        loop {
            match self.entry.try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return false,
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
                Ok(guard) => {
                    std::mem::forget(guard);
                    return true;
                }
                Err(TryLockError::Poisoned(guard)) => {
                    std::mem::forget(guard);
                    return true;
                }
            }
        }
    }

    /// The VMM that connected may be here.
    pub(super) fn taken(&self) {
        self.mark.set();
    }

    /// It is gone, by itself.
    pub(super) fn left(&self) {
        self.mark.clear();
    }

    /// Serves it.
    pub(super) fn connect(&self, vmm: UnixStream) -> io::Result<Box<dyn Connection>> {
        self.dataplane.connect(&self.name, vmm)
    }

    /// Takes a process in, while the caller `waits`.
    pub(super) fn enter(&self, process: &UnixStream, waits: &dyn Fn() -> bool) -> io::Result<()> {
        self.dataplane.enter(&self.name, process, waits)
    }

    /// What the NIC does now.
    pub(super) fn status(&self) -> NicStatus {
        let status = self.dataplane.status(&self.name);
        NicStatus { interrupted: self.mark.interrupted(), ..status }
    }
}
