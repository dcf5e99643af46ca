//! When the control queue may be served.
//!
//! A VMM stops the control queue to reset, pause or migrate the guest, and afterwards the device
//! may touch none of its memory. The queue's own thread serves requests and the connection's thread
//! stops the queue; the gate lies between them: each request passes it, and closing it waits until
//! the request that is under way is done.
//!
//! That request goes on to its end and is answered: the VMM is told that the queue stands behind
//! it, so nobody would serve it again, and its driver would give the device up. Where the session
//! itself ends, the request ends with its next step: its queue is taken up elsewhere, and it is
//! found there again ([`Gate::seal`]).
//!
//! The framework marks a queue not ready *before* it asks us to stop it, and requests look at that
//! mark inside the gate, so a late kick cannot open a gate that was closed for good reason.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Debug, Default)]
struct State {
    busy: bool,
    /// The queue was served since it was started.
    open: bool,
    sealed: bool,
}

/// How a request under way and whoever stops it talk.
#[derive(Debug, Default)]
struct Cut {
    /// It is to end with its next step, and not to be answered.
    asked: AtomicBool,
    /// It did.
    done: AtomicBool,
    /// Requests that are over.
    over: AtomicU64,
}

/// The request under way, for the steps that a worker takes for it.
#[derive(Debug, Clone)]
pub(super) struct UnderWay {
    cut: Arc<Cut>,
    /// Requests before it.
    number: u64,
}

impl UnderWay {
    /// Whether it ends here, with no effect or a part of it: it was cut, or a step comes so late
    /// that nobody waits for it.
    pub(super) fn ends(&self) -> bool {
        if self.cut.over.load(Ordering::Acquire) != self.number {
            return true;
        }
        let asked = self.cut.asked.load(Ordering::Acquire);
        self.cut.done.fetch_or(asked, Ordering::AcqRel);
        asked
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    idle: Condvar,
    cut: Arc<Cut>,
    /// Whoever stopped the queue has not waited for the request that is under way.
    left: AtomicBool,
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
        let first = !std::mem::replace(&mut state.open, true);
        Some(Pass { gate: self, first })
    }

    /// Closes the gate. A request may be under way, and goes on.
    pub(super) fn close(&self) {
        self.lock().open = false;
    }

    /// Closes the gate for ever. A request that is under way ends with its next step.
    pub(super) fn seal(&self) {
        let mut state = self.lock();
        (state.sealed, state.open) = (true, false);
        self.cut.asked.store(true, Ordering::Release);
    }

    /// The request that is under way takes too long: it is not answered any more.
    pub(super) fn leave(&self) {
        let state = self.lock();
        self.left.store(state.busy, Ordering::Release);
    }

    /// Waits until no request is under way; false if one still is after `timeout`.
    pub(super) fn wait_idle(&self, timeout: Duration) -> bool {
        let waited = self.idle.wait_timeout_while(self.lock(), timeout, |state| state.busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// The request under way.
    pub(super) fn under_way(&self) -> UnderWay {
        UnderWay { cut: self.cut.clone(), number: self.cut.over.load(Ordering::Acquire) }
    }

    /// Whether the request under way is to be answered.
    pub(super) fn answers(&self) -> bool {
        !self.cut.done.load(Ordering::Acquire) && !self.left.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.busy = false;
        self.gate.cut.over.fetch_add(1, Ordering::AcqRel);
        self.gate.left.store(false, Ordering::Release);
        drop(state);
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

    #[test]
    fn what_is_under_way_when_a_queue_stops_goes_on_and_is_answered() {
        let gate = Gate::default();
        let pass = gate.enter(|| true).expect("open");
        gate.close();
        let request = gate.under_way();
        assert!(!request.ends() && gate.answers());
        gate.leave();
        assert!(!gate.answers(), "whoever stopped it does not wait any more");
        drop(pass);
        assert!(request.ends(), "a step that comes late");
        let pass = gate.enter(|| true).expect("started again");
        assert!(gate.answers());
        drop(pass);
        gate.leave();
        assert!(gate.answers(), "nothing was under way");
    }

    #[test]
    fn what_is_under_way_when_a_session_ends_is_cut_or_answered() {
        let gate = Gate::default();
        let pass = gate.enter(|| true).expect("open");
        gate.seal();
        assert!(gate.answers(), "it may be over already");
        assert!(gate.under_way().ends());
        assert!(!gate.answers());
        drop(pass);
    }
}
