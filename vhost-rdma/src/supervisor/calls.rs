//! How a network's process is asked, and how what it tells is taken.
//!
//! A call is a message with a number and waits for its answer, or for the end of the process, and
//! for no longer than its patience. What the process tells on its own changes what is known of it;
//! it was checked before ([`Report::check`]).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::cgroup::Cgroup;
use super::child::hang_up;
use super::outside::{Branch, Speaker};
use super::state::{Pending, State};
use crate::aside::close_aside;
use crate::network_process::{Answer, Numbered, Report, Request, Start, Wire, encode};
use crate::store::Store;

/// How long the process may take for a change; longer than a worker may (`device::nic`).
pub(super) const PATIENCE: Duration = Duration::from_secs(65);
/// How long it may take to say how it is.
pub(super) const GLANCE: Duration = Duration::from_secs(1);
/// Between two looks whether somebody still waits.
const LOOK: Duration = Duration::from_millis(100);
/// Why nobody waits at a NIC any more.
const GOES: &str = "the NIC is about to be removed";
/// How long a call waits for a process that is being started.
const START: Duration = Duration::from_secs(10);

/// A request, and the descriptors that go with it.
pub(super) type Asked<'a> = (Request, &'a [BorrowedFd<'a>]);

/// Why a request has no answer.
pub(super) enum NoAnswer {
    /// There was nobody to ask.
    Away(String),
    /// It was asked, and nobody knows how far it came; who was.
    Lost(String, Arc<Wire>),
}

/// A change that the process was asked for.
pub(super) struct Change(Pending);

/// Why a change was not carried out.
pub(super) enum Undone {
    /// The process does not do it.
    Refused(String),
    /// It was not there, or died, or was ended for not doing it.
    Lost(String),
}

impl Undone {
    pub(super) fn why(self) -> String {
        let (Self::Refused(why) | Self::Lost(why)) = self;
        why
    }
}

/// What the keeper and everybody else share.
pub(super) struct Shared {
    pub(super) start: Start,
    pub(super) store: Store,
    pub(super) cgroup: Cgroup,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    /// Has the keeper look at what is wanted of it, while it listens to the process.
    pub(super) bell: Arc<OwnedFd>,
    /// Where its NICs, if they are on RNICs, meet those of other networks.
    pub(super) branch: Option<Branch>,
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something that others wait for has happened.
    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Waits, unless it is time to end.
    pub(super) fn pause(&self, time: Duration) {
        let going = |state: &mut State| !state.stopping;
        let _ = self.changed.wait_timeout_while(self.state(), time, going);
    }

    /// Waits until something is so, but not for ever.
    pub(super) fn wait_until(&self, time: Duration, is_so: impl Fn(&State) -> bool) {
        let _ = self.changed.wait_timeout_while(self.state(), time, |state| !is_so(state));
    }

    /// Waits for a process that is being started.
    pub(super) fn ready(&self) -> Result<(), String> {
        self.ready_unless(|_| false)
    }

    /// The same, for whoever comes to a NIC: not once that is about to be removed.
    pub(super) fn ready_for(&self, nic: &str) -> Result<(), String> {
        self.ready_unless(|state| state.leaving.contains_key(nic))
    }

    fn ready_unless(&self, is_vain: impl Fn(&State) -> bool) -> Result<(), String> {
        let away = |state: &mut State| state.wire.is_none() && !state.stopping && !is_vain(state);
        let waited = self.changed.wait_timeout_while(self.state(), START, away);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if is_vain(&state) {
            return Err(GOES.to_owned());
        }
        let trouble = || state.trouble.clone().unwrap_or_else(|| "it does not start".to_owned());
        if state.wire.is_some() { Ok(()) } else { Err(trouble()) }
    }

    /// Asks the process, and waits for its answer. `noting` happens once there is one to ask, and
    /// before it, or its successor, can know of the request.
    pub(super) fn call(
        &self,
        asked: Asked<'_>,
        patience: Duration,
        noting: impl FnOnce(&mut State),
    ) -> Result<Answer, NoAnswer> {
        let pending = self.send(asked, noting)?;
        self.answer(&pending, patience)
    }

    /// As [`Self::call`], for what may take as long as somebody `waits`, or the process lives.
    pub(super) fn call_while(
        &self,
        asked: Asked<'_>,
        waits: &dyn Fn() -> bool,
    ) -> Result<Answer, NoAnswer> {
        let pending = self.send(asked, |_| ())?;
        loop {
            match pending.answered.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) if waits() => {}
                // It is there, or will not come.
                Ok(answer) => return Ok(answer),
                Err(_) => return self.answer(&pending, Duration::ZERO),
            }
        }
    }

    /// As [`Self::call`], for whoever comes to a NIC. Who asked when that is about to be removed is
    /// away, and the process not to blame.
    pub(super) fn call_for(
        &self,
        nic: &str,
        asked: Asked<'_>,
        noting: impl FnOnce(&mut State),
    ) -> Result<Answer, NoAnswer> {
        let pending = self.send(asked, noting)?;
        let until = Instant::now() + PATIENCE;
        loop {
            match pending.answered.recv_timeout(LOOK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => return self.answer(&pending, Duration::ZERO),
            }
            let mut state = self.state();
            if state.leaving.contains_key(nic) {
                state.pending.remove(&pending.id);
                return Err(NoAnswer::Away(GOES.to_owned()));
            }
        }
    }

    /// The first half of [`Self::call`].
    fn send(
        &self,
        (request, files): Asked<'_>,
        noting: impl FnOnce(&mut State),
    ) -> Result<Pending, NoAnswer> {
        let (answer, answered) = sync_channel(1);
        let (id, wire) = {
            let mut state = self.state();
            let away = || NoAnswer::Away("it died".to_owned());
            let wire = state.wire.clone().ok_or_else(away)?;
            let id = state.await_answer(answer);
            noting(&mut state);
            (id, wire)
        };
        let message = encode(&Numbered { id, request }).map_err(|error| error.to_string());
        let sent = message.and_then(|bytes| {
            wire.send(&bytes, files).map_err(|error| format!("it does not listen: {error}"))
        });
        match sent {
            Ok(()) => Ok(Pending { id, wire, answered }),
            Err(why) => {
                self.state().pending.remove(&id);
                Err(NoAnswer::Lost(why, wire))
            }
        }
    }

    /// The second half.
    fn answer(&self, pending: &Pending, patience: Duration) -> Result<Answer, NoAnswer> {
        let got = pending.answered.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => "it does not answer".to_owned(),
            RecvTimeoutError::Disconnected => "it died".to_owned(),
        });
        self.state().pending.remove(&pending.id);
        got.map_err(|why| NoAnswer::Lost(why, pending.wire.clone()))
    }

    /// As [`Self::call`], for what is a change; a process that does not carry it out is ended.
    pub(super) fn change(&self, request: Request) -> Result<(), String> {
        let done = self.begin(request).and_then(|change| self.carried_out(change));
        done.map(drop).map_err(Undone::why)
    }

    /// The first half of [`Self::change`].
    pub(super) fn begin(&self, request: Request) -> Result<Change, Undone> {
        self.ready().map_err(Undone::Lost)?;
        self.send((request, &[]), |_| ()).map(Change).map_err(undone)
    }

    /// The second half: who carried it out.
    pub(super) fn carried_out(&self, change: Change) -> Result<Arc<Wire>, Undone> {
        let Change(pending) = change;
        let answer = self.answer(&pending, PATIENCE);
        self.outcome(answer, pending.wire)
    }

    /// The same for who waits no longer than this; nothing if that is not enough.
    pub(super) fn carried_out_within(
        &self,
        Change(pending): &Change,
        time: Duration,
    ) -> Option<Result<Arc<Wire>, Undone>> {
        let wire = pending.wire.clone();
        let answer = match pending.answered.recv_timeout(time) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => {
                Err(NoAnswer::Lost("it died".to_owned(), wire.clone()))
            }
        };
        Some(self.outcome(answer, wire))
    }

    /// Nobody waits for a change any more: who was asked for it is ended.
    pub(super) fn give_up_on(&self, Change(pending): Change) -> Undone {
        self.state().pending.remove(&pending.id);
        undone(NoAnswer::Lost("it does not answer".to_owned(), pending.wire))
    }

    fn outcome(
        &self,
        answer: Result<Answer, NoAnswer>,
        wire: Arc<Wire>,
    ) -> Result<Arc<Wire>, Undone> {
        match answer {
            Ok(Answer::Done) => Ok(wire),
            Ok(Answer::Refused(why)) => Err(Undone::Refused(why)),
            Ok(_) => {
                self.give_up();
                Err(Undone::Lost("the network's process answered something else".to_owned()))
            }
            Err(none) => Err(undone(none)),
        }
    }

    /// Has the keeper end the process that there is.
    pub(super) fn give_up(&self) {
        let state = self.state();
        state.wire.iter().chain(&state.starting).for_each(|wire| hang_up(wire));
    }

    /// As [`Self::call`], for what is only shown. A process that has not answered one such question
    /// is not waited for again until it has.
    pub(super) fn glance(&self, request: Request) -> Option<Answer> {
        {
            let mut state = self.state();
            state.wire.as_ref()?;
            if state.is_late() {
                return None;
            }
        }
        let pending = self.send((request, &[]), |_| ()).ok()?;
        let got = pending.answered.recv_timeout(GLANCE);
        let mut state = self.state();
        let is_there = state.wire.as_ref().is_some_and(|wire| Arc::ptr_eq(wire, &pending.wire));
        if matches!(got, Err(RecvTimeoutError::Timeout)) && is_there && !state.is_late() {
            state.late = Some(pending);
        } else {
            state.pending.remove(&pending.id);
        }
        got.ok()
    }

    /// Takes what the process tells, which was checked; how often the store was told of it. Nothing
    /// that came from a VMM is closed while others wait for the state.
    pub(super) fn take(&self, report: Report, packet: (Vec<OwnedFd>, bool)) -> u32 {
        let (mut files, lost) = packet;
        let mut state = self.state();
        let (mut turns, mut over) = (0, None);
        match report {
            Report::Answer(id, answer) => {
                if let Some(waiting) = state.pending.remove(&id) {
                    // There is room for one, and one comes.
                    let _ = waiting.try_send(answer);
                }
            }
            Report::Begun(id) => {
                state.held(id, |held| held.set_busy(true));
                turns = state.turns(id);
            }
            Report::Done(id) => {
                state.held(id, |held| held.set_busy(false));
                turns = state.turns(id);
            }
            Report::Changed(id, change) => {
                let new = std::mem::take(&mut files);
                match state.sessions.get_mut(&id) {
                    Some(held) => files = held.take(change, new, lost),
                    None => files = new,
                }
                turns = state.turns(id);
            }
            Report::Ended(id, ending) => {
                turns = state.turns(id);
                over = state.sessions.remove(&id).map(|held| (held, ending));
            }
            Report::Short => {
                let request = state.lend();
                let wire = state.wire.clone();
                drop(state);
                if let (Some(request), Some(wire)) = (request, wire) {
                    let sent = encode(&request).map_err(io::Error::other);
                    if let Err(error) = sent.and_then(|bytes| wire.send(&bytes, &[])) {
                        let network = &self.start.network;
                        tracing::warn!(network, %error, "it runs short of QPNs");
                    }
                }
                return 0;
            }
        }
        drop(state);
        if let Some((held, ending)) = over {
            held.end(ending);
        }
        close_aside(&format!("network {}", self.start.network), files);
        turns
    }
}

impl Speaker for Shared {
    /// A process that does not listen is ended.
    fn reconnect(&self) {
        let Some(branch) = &self.branch else { return };
        let (wire, id) = {
            let mut state = self.state();
            let Some(wire) = state.wire.clone() else { return };
            (wire, state.number())
        };
        let told = branch.connect(|far| {
            // Nobody waits for the answer.
            let bytes = encode(&Numbered { id, request: Request::Outside });
            wire.try_send(&bytes.map_err(io::Error::other)?, &[far])
        });
        if let Err(error) = told {
            tracing::error!(network = self.start.network, %error, "it does not listen");
            hang_up(&wire);
        }
    }

    fn give_up(&self) {
        Self::give_up(self);
    }

    fn name(&self) -> &str {
        &self.start.network
    }
}

/// Who was asked for a change and does not answer is ended. By now there may be another one, which
/// has nothing to do with it.
fn undone(none: NoAnswer) -> Undone {
    match none {
        NoAnswer::Away(why) => Undone::Lost(why),
        NoAnswer::Lost(why, wire) => {
            hang_up(&wire);
            Undone::Lost(format!("the network's process: {why}"))
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
