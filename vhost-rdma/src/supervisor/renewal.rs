//! Another process goes on with a network, as planned: its guests notice a pause and nothing else.
//!
//! The process is asked to come to rest and to write what a crash would lose into a file of memory
//! that is the supervisor's (`dataplane::saved`). The supervisor does not look into it: it was
//! written by a process that guests talk to, and is read by one for the same guests. The next
//! process is started by the keeper before the first comes to rest, stands by with the same NICs,
//! and gets the file beside the sessions. What cannot be handed on so is lost as in a crash;
//! nothing else is.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};

use super::calls::{NoAnswer, Shared};
use super::child::hang_up;
use super::estate::Saved;
use super::ledger::Whose;
use super::network::Network;
use super::state::{Legacy, Standby, State};
use crate::eventfd;
use crate::network_process::{Answer, Numbered, Request, Wire, encode};
use crate::node::{AttachError, Backing, Guests, NicConfig, Renewed, Session};
use crate::store::Store;
use crate::worker::Clock;

/// How long a process may take to come to rest and to write: it waits half a second for its guests,
/// and a hundred thousand objects are written in less than one.
const PATIENCE: Duration = Duration::from_secs(10);

/// The same where all networks stand still meanwhile: one that is in the wrong hands holds them up
/// no longer, and loses what it has.
const TOGETHER: Duration = Duration::from_secs(5);

/// How long the end of one that was not at rest is waited for.
const ENDING: Duration = Duration::from_secs(1);

/// How long the next process may take to stand by; without it traffic pauses for as long.
const READY: Duration = Duration::from_secs(5);

impl Network {
    /// Takes in what an earlier daemon's process has saved.
    pub(super) fn load(&self, (file, since): &Saved) {
        match self.shared().ask((Request::Load, &[file.as_fd()])) {
            Ok(()) => self.shared().state().resting = *since,
            Err(why) => {
                tracing::error!(network = self.name(), why, "what was handed down is lost");
            }
        }
    }

    /// All that was handed down is there. How long it stood still, if it did.
    pub(super) fn run(&self) -> Option<Duration> {
        if let Err(why) = self.shared().ask((Request::Run, &[])) {
            tracing::error!(network = self.name(), why, "what was handed down does not run");
            return None;
        }
        let since = self.shared().state().resting.take()?;
        Some(Duration::from_nanos(Clock::new().now().saturating_sub(since)))
    }

    /// NICs that have programs, which nobody hands on, or are on RNICs, whose state is the
    /// hardware's.
    pub(super) fn would_lose(&self) -> Vec<String> {
        let state = self.shared().state();
        let soft = |nic: &NicConfig| nic.guests == Guests::Vm && nic.backing == Backing::Soft;
        let lost = state.nics.values().filter(|known| !soft(&known.config));
        let names: Vec<String> = lost.map(|known| known.config.name.clone()).collect();
        drop(state);
        names.into_iter().filter(|name| self.status(name).session != Session::Absent).collect()
    }

    /// The end of this daemon's part in it: what its process has saved is in `store` afterwards,
    /// and all sessions are, whatever becomes of the process meanwhile.
    pub(super) fn hand_down(&self, store: &Store) -> io::Result<()> {
        let shared = self.shared();
        let since = Clock::new().now();
        // If it ends now, or has just ended, no other goes on with the sessions.
        shared.state().stopping = true;
        let saved =
            memory("vhost-rdma-state").map_err(|error| error.to_string()).and_then(|file| {
                let (wire, id, answered) = shared.take_wire()?;
                let saved = save(&wire, (id, &answered), &file, TOGETHER);
                hang_up(&wire);
                saved.map(|_| file)
            });
        let state_kept = match saved {
            Ok(file) => store.keep(&format!("state.{since}@{}", self.name()), file.as_fd()),
            Err(why) => {
                let network = self.name();
                tracing::error!(network, why, "nothing is handed on: devices are lost");
                // It is not at rest: what it tells of sessions counts until it has ended. One that
                // is being started has some that are not with the others.
                shared.give_up();
                shared.wake();
                shared.wait_until(ENDING, |state| state.over);
                Ok(())
            }
        };
        let mut state = shared.state();
        let configs: BTreeMap<String, NicConfig> =
            state.nics.iter().map(|(name, known)| (name.clone(), known.config.clone())).collect();
        for (id, held) in &mut state.sessions {
            if let Some(config) = configs.get(&held.nic) {
                held.hand_down(store, Whose::of(config, *id));
            }
        }
        let qpns = memory("vhost-rdma-qpns")?;
        let mut file = File::from(qpns.try_clone()?);
        serde_json::to_writer(&file, &state.lent())?;
        file.rewind()?;
        store.keep(&format!("qpns@{}", self.name()), qpns.as_fd())?;
        state_kept
    }

    /// See the module.
    pub(super) fn renew(&self) -> Result<Renewed, AttachError> {
        let shared = self.shared();
        // Before anybody stands by: one that nobody needs then would be there for ever.
        let file = memory("vhost-rdma-state")
            .map_err(|error| AttachError::io("make a file of memory", error))?;
        shared.ready().map_err(|why| trouble(&why))?;
        self.have_one_stand_by()?;
        let begin = Instant::now();
        let lives = shared.state().lives;
        let (wire, names) = match shared.take_wire() {
            Ok((wire, id, answered)) => {
                let names = save(&wire, (id, &answered), &file, PATIENCE);
                (Some(wire), names)
            }
            // Another one is on its way, which is what was asked for.
            Err(why) => (None, Err(why)),
        };
        let served: Vec<String> = {
            let mut state = shared.state();
            match names {
                Ok(names) if state.lives == lives => {
                    let nics = names.into_iter().collect();
                    state.legacy = Some(Legacy { file, nics });
                }
                // The next one may have begun without it.
                Ok(_) => tracing::error!(network = self.name(), "it died: devices are lost"),
                Err(why) => {
                    let network = self.name();
                    tracing::error!(network, why, "nothing is handed on: devices are lost");
                }
            }
            state.kept.clear();
            state.sessions.values().map(|held| held.nic.clone()).collect()
        };
        // The keeper starts the next one as soon as this one has ended.
        wire.iter().for_each(|wire| hang_up(wire));
        shared.ready().map_err(|why| trouble(&why))?;
        let kept = std::mem::take(&mut shared.state().kept);
        let (kept, lost) = served.into_iter().partition(|nic| kept.contains(nic));
        Ok(Renewed { kept, lost, pause: begin.elapsed() })
    }

    /// Has another process be ready, if it can be had soon.
    fn have_one_stand_by(&self) -> Result<(), AttachError> {
        let shared = self.shared();
        {
            let mut state = shared.state();
            if state.wire.is_none() {
                return Ok(());
            }
            state.standby = Standby::Wanted;
        }
        eventfd::signal(shared.bell.as_fd());
        let is_over = |state: &State| state.wire.is_none() || state.standby != Standby::Wanted;
        shared.wait_until(READY, is_over);
        // One that is late is not begun any more.
        match std::mem::take(&mut shared.state().standby) {
            // The one that serves them is not ended for one that could not.
            Standby::Refused(why) => Err(trouble(&format!(
                "the next one would be without a NIC that this one has: {why}"
            ))),
            _ => Ok(()),
        }
    }
}

fn trouble(why: &str) -> AttachError {
    AttachError::Resources(format!("its process: {why}"))
}

fn memory(name: &str) -> io::Result<OwnedFd> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC)?)
}

impl Shared {
    fn ask(&self, asked: (Request, &[BorrowedFd<'_>])) -> Result<(), String> {
        self.ready()?;
        match self.call(asked, PATIENCE, |_| ()) {
            Ok(Answer::Done | Answer::Saved(_)) => Ok(()),
            Ok(Answer::Refused(why)) | Err(NoAnswer::Away(why) | NoAnswer::Lost(why, _)) => {
                Err(why)
            }
            Ok(_) => Err("it answers something else".to_owned()),
        }
    }

    /// The way to the process, for one last question: nobody else finds it from now on, and waits
    /// for the next one.
    fn take_wire(&self) -> Result<(Arc<Wire>, u64, Receiver<Answer>), String> {
        let mut state = self.state();
        let wire = state.wire.take().ok_or("it died")?;
        let (answer, answered) = sync_channel(1);
        let id = state.await_answer(answer);
        Ok((wire, id, answered))
    }
}

/// Has the process save what it has to `file`; of which NICs.
fn save(
    wire: &Wire,
    (id, answered): (u64, &Receiver<Answer>),
    file: &OwnedFd,
    patience: Duration,
) -> Result<Vec<String>, String> {
    let until = Instant::now() + patience;
    let bytes = encode(&Numbered { id, request: Request::Save }).map_err(|e| e.to_string())?;
    let sent = wire.set_patience(patience).and_then(|()| wire.send(&bytes, &[file.as_fd()]));
    sent.map_err(|error| error.to_string())?;
    match answered.recv_timeout(until.saturating_duration_since(Instant::now())) {
        Ok(Answer::Saved(names)) => Ok(names),
        Ok(Answer::Refused(why)) => Err(why),
        Ok(_) => Err("it answers something else".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
