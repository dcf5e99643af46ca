//! What of a network outlives its process: NICs and what they had counted, sessions, QPNs, and why
//! there is no process at present. Nothing here waits or speaks to anybody.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::Instant;

use super::held::Held;
use super::lender::{Handed, Lease};
use super::restarts::Restarts;
use crate::network_process::{Answer, Numbered, Request, Wire};
use crate::nic::Nanos;
use crate::node::{Counters, Ending, NicConfig};

/// A NIC of the network.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) config: NicConfig,
    /// What earlier processes had counted.
    pub(super) before: Counters,
    /// What the present one has, as of the last look.
    pub(super) now: Counters,
    /// Why the present one does not have the NIC.
    pub(super) refused: Option<String>,
}

impl Known {
    /// One that nothing is known of yet.
    pub(super) fn of(config: &NicConfig) -> Self {
        let (before, now) = (Counters::default(), Counters::default());
        Self { config: config.clone(), before, now, refused: None }
    }
}

/// Whether another process stands by: to start one takes longer than all the rest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Standby {
    /// Nobody wants one.
    #[default]
    No,
    /// The keeper is to start one.
    Wanted,
    /// It did, or there was no process to be had: then the next one is not there sooner, and no
    /// other harm is done.
    Tried,
    /// It did, and the process does not take all NICs: why.
    Refused(String),
}

/// What a process has left for the next one.
#[derive(Debug)]
pub(super) struct Legacy {
    pub(super) file: OwnedFd,
    /// The NICs that it has something of.
    pub(super) nics: BTreeSet<String>,
}

/// A request that was sent, and whom it was sent to.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) id: u64,
    pub(super) wire: Arc<Wire>,
    pub(super) answered: Receiver<Answer>,
}

impl Pending {
    /// There is no answer yet, and there may be one.
    fn is_open(&self) -> bool {
        matches!(self.answered.try_recv(), Err(TryRecvError::Empty))
    }
}

/// What outlives a process.
#[derive(Debug, Default)]
pub(super) struct State {
    /// To the process that serves now.
    pub(super) wire: Option<Arc<Wire>>,
    /// To one that is being started.
    pub(super) starting: Option<Arc<Wire>>,
    pub(super) pid: Option<u32>,
    /// It is to end, and no other is to be started.
    pub(super) stopping: bool,
    /// It has ended, and what it told is known.
    pub(super) over: bool,
    /// How many processes there were.
    pub(super) lives: u64,
    pub(super) nics: BTreeMap<String, Known>,
    /// NICs that are about to be removed, and since when.
    pub(super) leaving: BTreeMap<String, Instant>,
    pub(super) sessions: BTreeMap<u64, Held>,
    pub(super) restarts: Restarts,
    /// Why there is no process.
    pub(super) trouble: Option<String>,
    /// By the numbers of their requests.
    pub(super) pending: BTreeMap<u64, SyncSender<Answer>>,
    /// The last number that was given away.
    pub(super) last: u64,
    /// What was asked that is only to be shown, and is not answered yet.
    pub(super) late: Option<Pending>,
    /// Whether another process is to stand by.
    pub(super) standby: Standby,
    /// What the process that is ending has left for the next one.
    pub(super) legacy: Option<Legacy>,
    /// Since when NICs stand still that an earlier daemon handed down.
    pub(super) resting: Option<Nanos>,
    /// NICs that the present process goes on with as if nothing had happened.
    pub(super) kept: BTreeSet<String>,
    /// The network's QPNs.
    pub(super) lease: Option<Lease>,
    /// Some were lent while nobody could be told.
    pub(super) lent: bool,
    /// Whom NICs on RNICs may reach, in a file.
    pub(super) peers: Option<(u32, OwnedFd)>,
}

impl State {
    pub(super) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Whether the process owes an answer that it had time for.
    pub(super) fn is_late(&mut self) -> bool {
        if !self.late.as_ref().is_some_and(Pending::is_open) {
            self.late = None;
        }
        self.late.is_some()
    }

    /// Whoever asks with this number gets the answer there.
    pub(super) fn await_answer(&mut self, answer: SyncSender<Answer>) -> u64 {
        let id = self.number();
        self.pending.insert(id, answer);
        id
    }

    /// The NICs as they are wanted.
    pub(super) fn configs(&self) -> Vec<NicConfig> {
        self.nics.values().map(|known| known.config.clone()).collect()
    }

    /// The blocks of QPNs that the network's processes have.
    pub(super) fn blocks(&self) -> Vec<u32> {
        self.lease.as_ref().map_or_else(Vec::new, |lease| lease.blocks().to_vec())
    }

    /// They are handed down so.
    pub(super) fn lent(&self) -> Handed {
        self.lease.as_ref().map(Lease::hand_down).unwrap_or_default()
    }

    /// The process will run short of QPNs; a request that is to be sent.
    pub(super) fn lend(&mut self) -> Option<Numbered> {
        let qps = self.nics.values().map(|known| u64::from(known.config.limits.max_qps)).sum();
        let blocks = self.lease.as_mut()?.extend(qps);
        if blocks.is_empty() {
            return None;
        }
        self.lent |= self.wire.is_none();
        // Nobody waits for the answer.
        Some(Numbered { id: self.number(), request: Request::Lend(blocks) })
    }

    /// The process has died: nobody waits for it any more, and nothing that it counted is lost.
    /// Sessions that are over with it, which are for the caller to end, and how.
    #[must_use]
    pub(super) fn mourn(&mut self) -> Vec<(Held, Ending)> {
        self.wire = None;
        self.starting = None;
        self.pid = None;
        self.lives += 1;
        // Nobody stands by for one that is not there.
        if self.standby == Standby::Wanted {
            self.standby = Standby::No;
        }
        self.pending.clear();
        self.late = None;
        for (name, nic) in &mut self.nics {
            let now = std::mem::take(&mut nic.now);
            // What is handed on goes on counting where it was.
            if !self.legacy.as_ref().is_some_and(|legacy| legacy.nics.contains(name)) {
                nic.before = nic.before.plus(&now);
            }
        }
        let over = |held: &Held| !held.record.is_whole() || held.has_hung_up();
        let ended: Vec<u64> =
            self.sessions.iter().filter(|(_, held)| over(held)).map(|(id, _)| *id).collect();
        let ended = ended.iter().filter_map(|id| self.sessions.remove(id));
        let how = |held: Held| {
            let why = "the network's process died in the middle of a message";
            let hung_up = held.has_hung_up();
            (held, if hung_up { Ending::Closed } else { Ending::Broken(why.to_owned()) })
        };
        ended.map(how).collect()
    }

    pub(super) fn held(&mut self, id: u64, with: impl FnOnce(&mut Held)) {
        if let Some(held) = self.sessions.get_mut(&id) {
            with(held);
        }
    }

    /// How often the store was told of sessions since the last time that this was asked.
    pub(super) fn turns(&mut self, id: u64) -> u32 {
        self.sessions.get_mut(&id).map_or(0, |held| held.ledger.take_turns())
    }
}
