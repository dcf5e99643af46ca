//! What goes wrong with null host verbs, as tests and benchmarks ask for it, and what those hold.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::verbs::{HostError, HostEvent, HostGid, HostObjects, Result};

/// A call that can be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are those of the calls")]
pub enum Call {
    AllocPd,
    Register,
    AllocMw,
    CreateAh,
    CreateSrq,
    CreateQp,
    ModifyQp,
    AttachMcast,
    PostSend,
    PostRecv,
}

#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) refused: BTreeMap<Call, i32>,
    /// What may take its time does not return.
    pub(super) holding: bool,
    /// How much of that is under way.
    pub(super) held: usize,
    pub(super) events: VecDeque<HostEvent>,
    pub(super) gone: bool,
    pub(super) failing: Option<u8>,
    pub(super) port_down: bool,
    pub(super) gids: Vec<HostGid>,
    /// Of all contexts that were ever opened with this script.
    pub(super) live: HostObjects,
    pub(super) contexts: usize,
    /// QPs that may send or receive.
    pub(super) running: usize,
    /// Receives that were posted, ever.
    pub(super) receives: usize,
    /// The last key or QPN that was given out.
    pub(super) number: u32,
}

/// What goes wrong with null host verbs, and what they hold. Clones are of the same script.
#[derive(Debug, Clone, Default)]
pub struct Faults(Arc<(Mutex<Script>, Condvar)>);

impl Faults {
    pub(super) fn script(&self) -> MutexGuard<'_, Script> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has what may take its time (registrations, address handles, opening and closing the device)
    /// begin and not end, until that is taken back.
    pub fn hold(&self, hold: bool) {
        self.script().holding = hold;
        self.0.1.notify_all();
    }

    /// Waits until so many are held.
    pub fn await_held(&self, count: usize) {
        let reached = self.0.1.wait_while(self.script(), |script| script.held != count);
        drop(reached.unwrap_or_else(PoisonError::into_inner));
    }

    /// The time that something takes: none, unless it is held.
    pub(super) fn take_time(&self) {
        let mut script = self.script();
        script.held += 1;
        self.0.1.notify_all();
        script = self
            .0
            .1
            .wait_while(script, |script| script.holding)
            .unwrap_or_else(PoisonError::into_inner);
        script.held -= 1;
        self.0.1.notify_all();
    }

    /// Refuses a call with an errno from now on; 0 ends that.
    pub fn refuse(&self, call: Call, errno: i32) {
        let mut script = self.script();
        if errno == 0 {
            script.refused.remove(&call);
        } else {
            script.refused.insert(call, errno);
        }
    }

    pub(super) fn check(&self, call: Call) -> Result<()> {
        let script = self.script();
        if script.gone {
            return Err(HostError(libc::EIO));
        }
        script.refused.get(&call).map_or(Ok(()), |&errno| Err(HostError(errno)))
    }

    /// A key or QPN that no context of the device has had.
    pub(super) fn number(&self) -> u32 {
        let mut script = self.script();
        script.number += 1;
        0x100 + script.number
    }

    /// Raises an asynchronous event.
    pub fn raise(&self, event: HostEvent) {
        self.script().events.push_back(event);
    }

    /// Removes the device: every call fails from now on, until it is put back.
    pub fn remove_device(&self, gone: bool) {
        let mut script = self.script();
        script.gone = gone;
        script.events.clear();
        if gone {
            script.events.push_back(HostEvent::Fatal);
        }
    }

    /// Whether the device is removed.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.script().gone
    }

    /// Takes the port down or up.
    pub fn set_port_down(&self, down: bool) {
        let mut script = self.script();
        script.port_down = down;
        script.events.push_back(HostEvent::Port { active: !down });
    }

    /// Fails the next send with this status.
    pub fn fail_send(&self, status: u8) {
        self.script().failing = Some(status);
    }

    /// The port's addresses.
    pub fn set_gids(&self, gids: Vec<HostGid>) {
        self.script().gids = gids;
    }

    /// QPs of all contexts that may send or receive.
    #[must_use]
    pub fn running(&self) -> usize {
        self.script().running
    }

    /// Receives that all contexts were given.
    #[must_use]
    pub fn receives(&self) -> usize {
        self.script().receives
    }

    /// Host objects of all contexts together, and how many contexts are open.
    #[must_use]
    pub fn live(&self) -> (HostObjects, usize) {
        let script = self.script();
        (script.live, script.contexts)
    }
}
