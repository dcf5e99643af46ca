//! All sessions of this data plane, for another process to go on with.
//!
//! First every session comes to rest, then every NIC stands still, then what ends a wait and is on
//! its way between workers comes there, and only then is anything written: so no NIC sees a peer
//! that is gone already, and none waits for what was said. In the other process it is the same in
//! reverse, and NICs run again when all are there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::LocalDataplane;
use crate::device::nic::{Nic, PATIENCE};
use crate::device::saved::SavedSession;
use crate::link::NicId;
use crate::nic::saved::{BadState, open, seal};
use crate::shard::{Shard, Wakes};
use crate::worker::{Progress, WorkerHandle};

/// How long all sessions together may take to come to rest. Who is busy for longer is lost.
const REST: Duration = Duration::from_millis(500);

#[derive(Debug, Default, Serialize, Deserialize)]
struct SavedNetwork {
    /// QPNs that rest.
    resting: Vec<u32>,
    /// By NIC.
    sessions: BTreeMap<String, SavedSession>,
}

impl LocalDataplane {
    /// Has every session come to rest for good and says what is to be handed on, and of which NICs.
    /// Nothing here goes on afterwards: what is left for this process is to end.
    ///
    /// # Errors
    /// See [`BadState`].
    pub fn save(&self) -> Result<(Vec<u8>, Vec<String>), BadState> {
        self.stop_moving();
        let nics: Vec<Arc<Nic>> =
            self.state().nics.values().map(|placed| placed.nic.clone()).collect();
        let until = Instant::now() + REST;
        self.close_bus();
        let mut saved = SavedNetwork::default();
        let sessions = nics.iter().filter_map(|nic| Some((nic, nic.session()?)));
        let (resting, busy): (Vec<_>, Vec<_>) =
            sessions.partition(|(_, session)| session.come_to_rest(until));
        for (nic, _) in busy {
            tracing::warn!(
                nic = nic.name,
                "its VMM or guest does not come to rest; it is not saved"
            );
        }
        self.on_all(&nics, |shard, ids| ids.iter().for_each(|&id| shard.halt(id)));
        self.hear_wakes();
        for (nic, session) in resting {
            if let Some(session) = session.save() {
                saved.sessions.insert(nic.name.clone(), session);
            }
        }
        for worker in self.workers.handles() {
            let resting = worker.call(None, PATIENCE, |shard, _| shard.resting());
            saved.resting.extend(resting.unwrap_or_default());
        }
        let names = saved.sessions.keys().cloned().collect();
        Ok((seal(&saved)?, names))
    }

    /// Takes in what an earlier process saved; its sessions find it when they go on.
    ///
    /// # Errors
    /// See [`BadState`].
    pub fn load(&self, bytes: &[u8]) -> Result<(), BadState> {
        let SavedNetwork { resting, sessions } = open(bytes)?;
        for worker in self.workers.handles() {
            let resting = resting.clone();
            worker.post(None, move |shard, _| shard.rest(&resting));
        }
        self.state().saved = sessions;
        Ok(())
    }

    /// Has all NICs run that were loaded; which.
    pub fn run_loaded(&self) -> Vec<String> {
        let nics: Vec<Arc<Nic>> =
            self.state().nics.values().map(|placed| placed.nic.clone()).collect();
        self.on_all(&nics, Shard::go_on_with);
        std::mem::take(&mut self.state().loaded)
    }

    /// Has nothing more cross between workers, and waits until nothing is under way: NICs still
    /// run, so all of it is answered.
    fn close_bus(&self) {
        for worker in self.workers.handles() {
            let until = Instant::now() + PATIENCE;
            let closed = worker.call_in_steps(None, PATIENCE, move |shard, _| {
                let done = shard.close_bus() || Instant::now() >= until;
                if done { Progress::Done(()) } else { Progress::More }
            });
            if let Err(error) = closed {
                tracing::error!(%error, "a worker does not do what it is told");
            }
        }
    }

    /// Waits until all workers have heard of waits that are over; their NICs stand still.
    fn hear_wakes(&self) {
        let until = Instant::now() + PATIENCE;
        let mut wakes = Wakes::default();
        let hear =
            |worker: &WorkerHandle| worker.call(None, PATIENCE, |shard, _| shard.wakes_heard());
        while !wakes.are_heard(self.workers.handles().iter().map(|worker| hear(worker).ok()?)) {
            if Instant::now() >= until {
                tracing::error!("a worker does not do what it is told");
                return;
            }
        }
    }

    /// Does something to all these NICs, in one turn of each worker.
    fn on_all(&self, nics: &[Arc<Nic>], each: fn(&mut Shard, &[NicId])) {
        for worker in self.workers.handles() {
            let ids: Vec<NicId> =
                nics.iter().filter(|nic| nic.is_on(worker)).map(|nic| nic.id()).collect();
            let done = worker.call(None, PATIENCE, move |shard, _| each(shard, &ids));
            if let Err(error) = done {
                tracing::error!(%error, "a worker does not do what it is told");
            }
        }
    }
}
