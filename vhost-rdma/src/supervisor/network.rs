//! One network, served by a process of its own: what the rest of the daemon asks, and what it gets.
//!
//! ```text
//!  any thread ── call ──> wire ──> network process
//!                          │              │
//!      answer <── pending ─┴── keeper <───┘   sessions: Record, descriptors
//! ```
//!
//! A call is a message with a number and waits for its answer, or for the end of the process. The
//! `keeper` thread reads what the process tells, and starts another one when it dies. What has to
//! outlive a process is here: its NICs, what they had counted, and the sessions of their VMMs.
//!
//! The process is not believed. It can answer wrongly about its own NICs; it can hold up a call for
//! [`PATIENCE`] and is then killed; it cannot name another network's NIC or session.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use super::cgroup::Cgroup;
use super::estate::Left;
use super::exchange::Branch;
use super::keeper;
use super::ledger::{Entry, Ledger, Whose};
use super::lender::{Handed, Lease};
use super::record::Record;
use super::renewal::{Legacy, Standby};
use super::restarts::Restarts;
use crate::dataplane::Outside;
use crate::device::Change;
use crate::network_process::{
    Answer, Figures, Host, Numbered, Report, Request, Start, Wire, encode,
};
use crate::node::{
    AttachError, Connection, Counters, Ending, NicConfig, NicStatus, Peer, ProcessStatus, Session,
};
use crate::store::Store;

/// How long the process may take for a change; longer than a worker may (`device::nic`).
const PATIENCE: Duration = Duration::from_secs(65);
/// How long it may take to say how it is.
const GLANCE: Duration = Duration::from_secs(1);
/// How long a call waits for a process that is being started.
const START: Duration = Duration::from_secs(10);
/// How often a session whose process is away is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A NIC of the network.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) config: NicConfig,
    /// What earlier processes had counted.
    before: Counters,
    /// What the present one has, as of the last look.
    now: Counters,
}

/// A VMM's session.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) nic: String,
    pub(super) stream: UnixStream,
    pub(super) record: Record,
    ledger: Ledger,
    ended: Sender<Ending>,
}

impl Held {
    /// A message of the VMM was begun, or answered.
    pub(super) fn set_busy(&mut self, busy: bool) {
        self.record.set_busy(busy);
        let noted = self.ledger.note(if busy { &Entry::Begun } else { &Entry::Done }, &[]);
        self.ledger.settle(noted, &self.record);
    }

    /// Something has changed; descriptors may have been lost on the way.
    fn take(&mut self, change: Change, files: Vec<OwnedFd>, lost: bool) {
        let entry = Entry::Changes(vec![change.clone()]);
        let own: Vec<BorrowedFd<'_>> = files.iter().map(OwnedFd::as_fd).collect();
        let noted = !lost && self.ledger.note(&entry, &own);
        drop(own);
        self.record.apply(change, files);
        if lost {
            self.record.lose();
        }
        self.ledger.settle(noted, &self.record);
    }

    /// Has the session be in `store` alone, for the next daemon.
    pub(super) fn hand_down(&mut self, store: &Store, whose: Whose) {
        let mut ledger = Ledger::new(store, whose, None);
        ledger.begin(&self.stream, &self.record);
        // The old one's descriptors are let go of; those that are handed down live on.
        self.ledger = ledger;
    }

    fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
    }

    /// Tells whoever waits for the end.
    pub(super) fn end(self, ending: Ending) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = self.ended.send(ending);
    }
}

/// What outlives a process.
#[derive(Debug, Default)]
pub(super) struct State {
    /// To the process that serves now.
    pub(super) wire: Option<Arc<Wire>>,
    pub(super) pid: Option<u32>,
    pub(super) stopping: bool,
    pub(super) nics: BTreeMap<String, Known>,
    pub(super) sessions: BTreeMap<u64, Held>,
    pub(super) restarts: Restarts,
    /// Why there is no process.
    pub(super) trouble: Option<String>,
    /// By the numbers of their requests.
    pending: BTreeMap<u64, SyncSender<Answer>>,
    /// The last number that was given away.
    last: u64,
    /// It was late with an answer; it is not asked for what is only to be shown until then.
    late_until: Option<Instant>,
    /// Whether another process is to stand by.
    pub(super) standby: Standby,
    /// What the process that is ending has left for the next one.
    pub(super) legacy: Option<Legacy>,
    /// NICs that the present process goes on with as if nothing had happened.
    pub(super) kept: BTreeSet<String>,
    /// The network's QPNs.
    lease: Option<Lease>,
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

    /// Whoever asks with this number gets the answer there.
    pub(super) fn await_answer(&mut self, answer: SyncSender<Answer>) -> u64 {
        let id = self.number();
        self.pending.insert(id, answer);
        id
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
    fn lend(&mut self) -> Option<Numbered> {
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
    pub(super) fn mourn(&mut self) {
        self.wire = None;
        self.pid = None;
        self.pending.clear();
        self.late_until = None;
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
        for held in ended.iter().filter_map(|id| self.sessions.remove(id)) {
            let why = "the network's process died in the middle of a message";
            let hung_up = held.has_hung_up();
            held.end(if hung_up { Ending::Closed } else { Ending::Broken(why.to_owned()) });
        }
    }
}

/// A request, and the descriptors that go with it.
type Asked<'a> = (Request, &'a [BorrowedFd<'a>]);

/// A session that is to be, its number, and where its end is told.
type New = (u64, Held, Receiver<Ending>);

/// Why a request has no answer.
pub(super) enum NoAnswer {
    /// There was nobody to ask.
    Away(String),
    /// It was asked, and nobody knows how far it came.
    Lost(String),
}

/// What the keeper and everybody else share.
pub(super) struct Shared {
    pub(super) start: Start,
    pub(super) store: Store,
    pub(super) cgroup: Cgroup,
    state: Mutex<State>,
    changed: Condvar,
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
        let away = |state: &mut State| state.wire.is_none() && !state.stopping;
        let waited = self.changed.wait_timeout_while(self.state(), START, away);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let trouble = || state.trouble.clone().unwrap_or_else(|| "it does not start".to_owned());
        if state.wire.is_some() { Ok(()) } else { Err(trouble()) }
    }

    /// Asks the process, and waits for its answer. `noting` happens once there is one to ask, and
    /// before it, or its successor, can know of the request.
    pub(super) fn call(
        &self,
        (request, files): Asked<'_>,
        patience: Duration,
        noting: impl FnOnce(&mut State),
    ) -> Result<Answer, NoAnswer> {
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
        let got = sent.and_then(|()| {
            answered.recv_timeout(patience).map_err(|error| match error {
                RecvTimeoutError::Timeout => "it does not answer".to_owned(),
                RecvTimeoutError::Disconnected => "it died".to_owned(),
            })
        });
        self.state().pending.remove(&id);
        got.map_err(NoAnswer::Lost)
    }

    /// As [`Self::call`], for what is a change; a process that does not carry it out is ended.
    fn change(&self, request: Request) -> Result<(), String> {
        self.ready()?;
        match self.call((request, &[]), PATIENCE, |_| ()) {
            Ok(Answer::Done) => Ok(()),
            Ok(Answer::Refused(why)) => Err(why),
            Ok(_) => {
                self.give_up();
                Err("the network's process answered something else".to_owned())
            }
            Err(NoAnswer::Away(why)) => Err(why),
            Err(NoAnswer::Lost(why)) => {
                self.give_up();
                Err(format!("the network's process: {why}"))
            }
        }
    }

    /// Has the keeper end the process that there is.
    fn give_up(&self) {
        if let Some(wire) = &self.state().wire {
            hang_up(wire);
        }
    }

    /// As [`Self::call`], for what is only shown.
    fn glance(&self, request: Request) -> Option<Answer> {
        {
            let mut state = self.state();
            state.wire.as_ref()?;
            let now = Instant::now();
            if state.late_until.is_some_and(|until| until > now) {
                return None;
            }
            state.late_until = None;
        }
        let got = self.call((request, &[]), GLANCE, |_| ());
        if got.is_err() {
            self.state().late_until = Some(Instant::now() + GLANCE);
        }
        got.ok()
    }

    /// Takes what the process tells, which was checked.
    pub(super) fn take(&self, report: Report, packet: (Vec<OwnedFd>, bool)) {
        let (files, lost) = packet;
        let mut state = self.state();
        match report {
            Report::Answer(id, answer) => {
                if let Some(waiting) = state.pending.remove(&id) {
                    // There is room for one, and one comes.
                    let _ = waiting.try_send(answer);
                }
            }
            Report::Begun(id) => state.held(id, |held| held.set_busy(true)),
            Report::Done(id) => state.held(id, |held| held.set_busy(false)),
            Report::Changed(id, change) => state.held(id, |held| held.take(change, files, lost)),
            Report::Ended(id, ending) => {
                if let Some(held) = state.sessions.remove(&id) {
                    held.end(ending);
                }
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
            }
            Report::Told(told) => {
                let wire = state.wire.clone();
                drop(state);
                let answer = self.branch.as_ref().and_then(|branch| branch.take(told));
                if let (Some(answer), Some(wire)) = (answer, wire) {
                    self.post(&wire, answer);
                }
            }
        }
    }

    /// Tells the process something that may be lost: nobody waits for room.
    fn post(&self, wire: &Wire, host: Host) {
        // Nobody waits for the answer.
        let id = self.state().number();
        let sent = encode(&Numbered { id, request: Request::Host(host) });
        let sent = sent.map_err(io::Error::other).and_then(|bytes| wire.try_send(&bytes));
        if let Err(error) = sent {
            tracing::debug!(network = self.start.network, %error, "it does not listen");
        }
    }

    /// Brings what has come for NICs on RNICs to their process.
    pub(super) fn deliver(&self, wire: &Wire) {
        if let Some(branch) = &self.branch
            && !branch.deliver(|host| self.post(wire, host))
        {
            crate::eventfd::signal(self.bell.as_fd());
        }
    }
}

impl State {
    fn held(&mut self, id: u64, with: impl FnOnce(&mut Held)) {
        if let Some(held) = self.sessions.get_mut(&id) {
            with(held);
        }
    }
}

/// Nobody speaks by this wire any more; whoever waits for a message finds the end.
pub(super) fn hang_up(wire: &Wire) {
    let _ = rustix::net::shutdown(wire.as_fd(), rustix::net::Shutdown::Both);
}

/// See the module. Dropping it ends the process.
pub(super) struct Network {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

fn trouble(why: String) -> AttachError {
    AttachError::Resources(why)
}

impl Network {
    /// Starts the network's process and waits until it is ready.
    pub(super) fn start(
        start: Start,
        (store, cgroup): (Store, Cgroup),
        (lease, outside): (Lease, Option<(u32, Arc<Outside>)>),
    ) -> Result<Self, AttachError> {
        let state = State { lease: Some(lease), ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| AttachError::io("make an eventfd", error.into()))?;
        let bell = Arc::new(bell);
        let branch = outside.map(|(vni, outside)| Branch::new(outside, vni, bell.clone()));
        let shared = Arc::new(Shared { start, store, cgroup, state, changed, bell, branch });
        let own = shared.clone();
        // The process dies with the thread that made it (PR_SET_PDEATHSIG): it is this one.
        let thread = std::thread::Builder::new().name(format!("net-{}", shared.start.network));
        let keeper = thread
            .spawn(move || keeper::run(&own))
            .map_err(|error| AttachError::io("start a thread", error))?;
        let network = Self { shared, keeper: Mutex::new(Some(keeper)) };
        match network.shared.ready() {
            Ok(()) => Ok(network),
            Err(why) => Err(trouble(format!("the network's process: {why}"))),
        }
    }

    pub(super) fn add(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.shared.change(Request::Add(nic.clone())).map_err(trouble)?;
        self.put(nic);
        let known =
            Known { config: nic.clone(), before: Counters::default(), now: Counters::default() };
        self.shared.state().nics.insert(nic.name.clone(), known);
        Ok(())
    }

    fn put(&self, nic: &NicConfig) {
        if let Some(branch) = &self.shared.branch {
            branch.put(nic);
        }
    }

    /// Has NICs on RNICs reach these peers of network `vni`.
    pub(super) fn set_peers(&self, vni: u32, peers: &[Peer]) -> io::Result<()> {
        let file = memfd_create("vhost-rdma-peers", MemfdFlags::CLOEXEC)?;
        let file = File::from(file);
        let mut writer = BufWriter::new(&file);
        serde_json::to_writer(&mut writer, peers)?;
        writer.flush()?;
        drop(writer);
        let file = OwnedFd::from(file);
        let copy = file.try_clone()?;
        // One that is away, or stands by, is told when it begins.
        let wire = {
            let mut state = self.shared.state();
            state.peers = Some((vni, file));
            state.wire.is_some()
        };
        let asked = (Request::Host(Host::Peers(vni)), &[copy.as_fd()][..]);
        match wire.then(|| self.shared.call(asked, PATIENCE, |_| ())) {
            Some(Ok(Answer::Done) | Err(NoAnswer::Away(_) | NoAnswer::Lost(_))) | None => Ok(()),
            Some(Ok(_)) => Err(io::Error::other("it does not take them")),
        }
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(super) fn name(&self) -> &str {
        &self.shared.start.network
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shared.state().nics.is_empty()
    }

    /// Ends a NIC; whether there are others left.
    pub(super) fn remove(&self, name: &str) -> bool {
        let last = {
            let mut state = self.shared.state();
            let known = state.nics.remove(name);
            if let (Some(branch), Some(known)) = (&self.shared.branch, known) {
                branch.take_away(&known.config);
            }
            state.nics.is_empty()
        };
        let ends = last || self.shared.state().stopping;
        // With the last one goes the process. One that is away comes back without this one.
        if !ends && let Err(why) = self.shared.change(Request::Remove(name.to_owned())) {
            tracing::error!(nic = name, why, "the NIC was not let go of in time");
        }
        !last
    }

    pub(super) fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.shared.change(Request::Update(nic.clone())).map_err(trouble)?;
        self.put(nic);
        if let Some(known) = self.shared.state().nics.get_mut(&nic.name) {
            known.config = nic.clone();
        }
        Ok(())
    }

    /// Once the process was asked, the session is kept: if that process dies it is its successor's.
    pub(super) fn connect(&self, name: &str, vmm: &UnixStream) -> io::Result<Box<dyn Connection>> {
        self.shared.ready().map_err(io::Error::other)?;
        let (id, held, end) = self.held(name, (vmm.try_clone()?, None), Record::default())?;
        let request = Request::Connect(name.to_owned(), id);
        let hold = |state: &mut State| drop(state.sessions.insert(id, held));
        match self.shared.call((request, &[vmm.as_fd()]), PATIENCE, hold) {
            Ok(Answer::Done) => {}
            Ok(Answer::Refused(why)) => {
                self.shared.state().sessions.remove(&id);
                return Err(io::Error::other(why));
            }
            Err(NoAnswer::Away(why)) => return Err(io::Error::other(why)),
            Ok(_) | Err(NoAnswer::Lost(_)) => self.shared.give_up(),
        }
        Ok(Box::new(Far { shared: self.shared.clone(), id, end }))
    }

    /// Hands a process in. Nothing of it is kept here: when the network's process dies its socket
    /// ends, and it begins anew.
    pub(super) fn enter(&self, name: &str, process: &UnixStream) -> io::Result<()> {
        self.shared.ready().map_err(io::Error::other)?;
        let request = Request::Enter(name.to_owned());
        match self.shared.call((request, &[process.as_fd()]), PATIENCE, |_| ()) {
            Ok(Answer::Done) => Ok(()),
            Ok(Answer::Refused(why)) | Err(NoAnswer::Away(why) | NoAnswer::Lost(why)) => {
                Err(io::Error::other(why))
            }
            Ok(_) => Err(io::Error::other("the network's process answered something else")),
        }
    }

    /// A session of a VMM, kept from now on, and where its end is told.
    fn held(
        &self,
        name: &str,
        (stream, serial): (UnixStream, Option<u64>),
        record: Record,
    ) -> io::Result<New> {
        let (ended, end) = channel();
        let mut state = self.shared.state();
        let id = state.number();
        let known = state.nics.get(name).map(|known| known.config.clone());
        drop(state);
        let config = known.ok_or_else(|| io::Error::other("there is no such NIC"))?;
        let mut ledger = Ledger::new(&self.shared.store, Whose::of(&config, id), serial);
        ledger.begin(&stream, &record);
        Ok((id, Held { nic: name.to_owned(), stream, record, ledger, ended }, end))
    }

    /// Goes on with a session that an earlier supervisor had.
    pub(super) fn resume(&self, name: &str, left: Left) -> io::Result<Box<dyn Connection>> {
        self.shared.ready().map_err(io::Error::other)?;
        let Left { stream, record, names, serial, .. } = left;
        let (id, held, end) = self.held(name, (stream, Some(serial)), record)?;
        let old = names.iter().filter(|name| !held.ledger.is_of(name));
        old.for_each(|name| self.shared.store.forget(name));
        let told = self.tell(id, &held);
        let hold = |state: &mut State| drop(state.sessions.insert(id, held));
        let taken = told.and_then(|()| self.shared.call((Request::GoOn(id), &[]), PATIENCE, hold));
        match taken {
            Ok(Answer::Done) => {}
            Ok(Answer::Refused(why)) => {
                self.shared.state().sessions.remove(&id);
                return Err(io::Error::other(why));
            }
            Err(NoAnswer::Away(why)) => return Err(io::Error::other(why)),
            Ok(_) | Err(NoAnswer::Lost(_)) => self.shared.give_up(),
        }
        Ok(Box::new(Far { shared: self.shared.clone(), id, end }))
    }

    /// Tells the process what is left of a session.
    fn tell(&self, id: u64, held: &Held) -> Result<(), NoAnswer> {
        let call = |request, files: &[BorrowedFd<'_>]| match self.shared.call(
            (request, files),
            PATIENCE,
            |_| (),
        )? {
            Answer::Done => Ok(()),
            _ => Err(NoAnswer::Away("the process does not take the session".to_owned())),
        };
        call(Request::TakeUp(held.nic.clone(), id), &[held.stream.as_fd()])?;
        for (change, files) in held.record.changes() {
            call(Request::Kept(id, change), &files)?;
        }
        Ok(())
    }

    pub(super) fn status(&self, name: &str) -> NicStatus {
        let answer = self.shared.glance(Request::Status(name.to_owned()));
        let mut state = self.shared.state();
        let trouble = match (&state.wire, &answer) {
            (None, _) => state.trouble.clone(),
            (Some(_), Some(Answer::Status(_))) => None,
            _ => Some("the network's process does not say how the NIC is".to_owned()),
        };
        let Some(known) = state.nics.get_mut(name) else { return NicStatus::default() };
        let mut status = match answer {
            Some(Answer::Status(status)) => *status,
            _ => NicStatus { counters: known.now, ..NicStatus::default() },
        };
        known.now = status.counters;
        status.counters = known.before.plus(&known.now);
        if let Some(why) = trouble {
            status.session = Session::Failed;
            status.error = Some(why);
        }
        status
    }

    /// How the worker is; nothing while there is no process.
    pub(super) fn figures(&self) -> Option<Figures> {
        match self.shared.glance(Request::Figures) {
            Some(Answer::Figures(figures)) => Some(*figures),
            _ => None,
        }
    }

    pub(super) fn log(&self, filter: Option<&str>) {
        let request = Request::Log(filter.map(str::to_owned));
        if self.shared.call((request, &[]), GLANCE, |_| ()).is_err() {
            let network = &self.shared.start.network;
            tracing::warn!(network, "what the network's process logs stays as it was");
        }
    }

    pub(super) fn process(&self) -> ProcessStatus {
        let state = self.shared.state();
        ProcessStatus {
            network: self.shared.start.network.clone(),
            pid: state.pid,
            deaths: state.restarts.deaths(),
            failing: state.restarts.failing(Instant::now()),
            memory: self.shared.cgroup.memory(),
        }
    }
}

impl Network {
    /// Has the process ended, without waiting for it. The kernel may take seconds: it waits for
    /// RCU where a process has asynchronous I/O (fs/aio.c, exit_aio).
    pub(super) fn ending(&self) {
        self.shared.state().stopping = true;
        self.shared.give_up();
        self.shared.wake();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.ending();
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if keeper.is_some_and(|keeper| keeper.join().is_err()) {
            tracing::error!("the keeper of a network's process panicked");
        }
    }
}

/// A connection that another process serves.
struct Far {
    shared: Arc<Shared>,
    id: u64,
    end: Receiver<Ending>,
}

impl Connection for Far {
    fn end(self: Box<Self>) -> Ending {
        loop {
            match self.end.recv_timeout(LOOK) {
                Ok(ending) => return ending,
                Err(RecvTimeoutError::Disconnected) => return Ending::Closed,
                Err(RecvTimeoutError::Timeout) => self.look(),
            }
        }
    }
}

impl Far {
    /// A VMM that goes while there is no process is noticed here.
    fn look(&self) {
        let mut state = self.shared.state();
        let gone =
            state.wire.is_none() && state.sessions.get(&self.id).is_some_and(Held::has_hung_up);
        let held = if gone { state.sessions.remove(&self.id) } else { None };
        drop(state);
        if let Some(held) = held {
            held.end(Ending::Closed);
        }
    }
}

#[cfg(test)]
mod tests;
