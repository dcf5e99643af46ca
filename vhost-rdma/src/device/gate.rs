//! When the control queue may be served.
//!
//! A VMM stops the control queue to reset, pause or migrate the guest, and afterwards the device
//! may touch none of its memory. The queue's own thread serves requests and the connection's thread
//! stops the queue; the gate lies between them: each request passes it, and closing it waits until
//! the request that is under way is done.
//!
//! The framework marks a queue not ready *before* it asks us to stop it, and requests look at that
//! mark inside the gate, so a late kick cannot open a gate that was closed for good reason.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Debug, Default)]
struct State {
    busy: bool,
    sealed: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    idle: Condvar,
    open: Arc<AtomicBool>,
}

/// One request under way.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    /// The first since the queue was started.
    pub(super) first: bool,
}

impl Gate {
    /// Begins a request if `ready` says that the queue runs.
    pub(super) fn enter(&self, ready: impl FnOnce() -> bool) -> Option<Pass<'_>> {
        let mut state = self.lock();
        if state.sealed || state.busy || !ready() {
            return None;
        }
        state.busy = true;
        let first = !self.open.swap(true, Ordering::AcqRel);
        Some(Pass { gate: self, first })
    }

    /// Closes the gate. A request may be under way.
    pub(super) fn close(&self) {
        let _state = self.lock();
        self.open.store(false, Ordering::Release);
    }

    /// Closes the gate for ever.
    pub(super) fn seal(&self) {
        self.lock().sealed = true;
        self.close();
    }

    /// Waits until no request is under way; false if one still is after `timeout`.
    pub(super) fn wait_idle(&self, timeout: Duration) -> bool {
        let waited = self.idle.wait_timeout_while(self.lock(), timeout, |state| state.busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Whether requests are served, for a job that is about to run for one.
    pub(super) fn open_flag(&self) -> Arc<AtomicBool> {
        self.open.clone()
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.lock().busy = false;
        self.gate.idle.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const SOON: Duration = Duration::from_millis(10);

    #[test]
    fn the_first_request_after_a_stop_is_told_apart() {
        let gate = Gate::default();
        assert!(gate.enter(|| true).expect("open").first);
        assert!(!gate.enter(|| true).expect("open").first);
        assert!(gate.enter(|| false).is_none());
        gate.close();
        assert!(gate.wait_idle(SOON));
        assert!(gate.enter(|| false).is_none(), "a late kick");
        assert!(!gate.is_open());
        assert!(gate.enter(|| true).expect("started again").first);
        gate.seal();
        assert!(gate.wait_idle(SOON));
        assert!(gate.enter(|| true).is_none());
    }

    #[test]
    fn closing_waits_for_the_request_under_way() {
        let gate = Gate::default();
        std::thread::scope(|scope| {
            let pass = gate.enter(|| true).expect("open");
            gate.close();
            assert!(!gate.wait_idle(SOON), "it is still under way");
            let begin = Instant::now();
            scope.spawn(move || {
                std::thread::sleep(SOON);
                drop(pass);
            });
            assert!(gate.wait_idle(Duration::from_secs(5)));
            assert!(begin.elapsed() >= SOON);
        });
    }
}
