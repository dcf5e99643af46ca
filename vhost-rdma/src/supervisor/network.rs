//! One network, served by a process of its own: what the rest of the daemon asks, and what it gets.
//!
//! ```text
//!  any thread ── call ──> wire ──> network process
//!                          │              │
//!      answer <── pending ─┴── keeper <───┘   sessions: Record, descriptors
//! ```
//!
//! A call is a message with a number and waits for its answer, or for the end of the process
//! (`calls`). The `keeper` thread reads what the process tells, and starts another one when it
//! dies. What has to outlive a process is in `state`: its NICs, what they had counted, and the
//! sessions of their VMMs (`held`).
//!
//! The process is not believed. It can answer wrongly about its own NICs; it can hold up a call for
//! [`PATIENCE`] and is then killed; it cannot name another network's NIC or session.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;

use super::calls::{Change, GLANCE, NoAnswer, PATIENCE, Shared, Undone};
use super::cgroup::Cgroup;
use super::child::{file_of, hang_up};
use super::estate::Left;
use super::held::Held;
use super::keeper;
use super::ledger::{Ledger, Whose};
use super::lender::Lease;
use super::outside::{Branch, OutsideProcess};
use super::record::Record;
use super::slow::Slow;
use super::state::{Known, State};
use crate::network_process::{Answer, Figures, Request, Start, Wire};
use crate::node::{
    AttachError, Connection, Ending, NicConfig, NicStatus, Peer, ProcessStatus, Session,
};
use crate::store::Store;

/// NICs that are asked for at once. Their requests fit into the socket.
const UNDER_WAY: usize = 32;
/// How often a change of a NIC is told, if processes die meanwhile.
const UPDATES: u32 = 3;
/// How long a NIC that went down with the process waits for the next one.
const AGAIN: Duration = Duration::from_secs(5);
/// Between two attempts.
const MOMENT: Duration = Duration::from_millis(10);
/// How long a process has to say that a session is over whose NIC is about to be removed.
const LAST_WORD: Duration = Duration::from_secs(1);
/// How long who removes a NIC waits for the process to let go of it.
const LET_GO: Duration = Duration::from_secs(2);
/// How often a session whose process is away is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A session that is to be, its number, and where its end is told.
type New = (u64, Held, Receiver<Ending>);

/// See the module. Dropping it ends the process.
pub(super) struct Network {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
    /// What it has not let go of yet.
    slow: Slow,
}

fn trouble(why: String) -> AttachError {
    AttachError::Resources(why)
}

impl Network {
    /// One without a keeper.
    #[cfg(test)]
    pub(super) fn of(shared: Shared) -> Self {
        Self { shared: Arc::new(shared), keeper: Mutex::default(), slow: Slow::default() }
    }

    /// Starts the network's process and waits until it is ready.
    pub(super) fn start(
        start: Start,
        (store, cgroup): (Store, Cgroup),
        (lease, outside): (Lease, Option<(u32, Arc<OutsideProcess>)>),
    ) -> Result<Self, AttachError> {
        let state = State { lease: Some(lease), ..State::default() };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| AttachError::io("make an eventfd", error.into()))?;
        let bell = Arc::new(bell);
        let branch = outside.map(|(vni, outside)| Branch::new(outside, vni));
        let shared = Arc::new(Shared { start, store, cgroup, state, changed, bell, branch });
        if let Some(branch) = &shared.branch {
            let network: Weak<Shared> = Arc::downgrade(&shared);
            branch.of(network);
        }
        let own = shared.clone();
        // The process dies with the thread that made it (PR_SET_PDEATHSIG): it is this one.
        let thread = std::thread::Builder::new().name(format!("net-{}", shared.start.network));
        let keeper = thread
            .spawn(move || keeper::run(&own))
            .map_err(|error| AttachError::io("start a thread", error))?;
        let network = Self { shared, keeper: Mutex::new(Some(keeper)), slow: Slow::default() };
        match network.shared.ready() {
            Ok(()) => Ok(network),
            Err(why) => Err(trouble(format!("the network's process: {why}"))),
        }
    }

    /// Adds NICs, some of which are under way at once: between two of them the process would wait
    /// for us, and we for it.
    pub(super) fn add_all(&self, nics: &[&NicConfig]) -> Vec<Result<(), AttachError>> {
        let mut asked = VecDeque::with_capacity(UNDER_WAY);
        let mut results = Vec::with_capacity(nics.len());
        let added = |(nic, mut change): (&NicConfig, Result<Change, Undone>)| {
            let (deadline, mut times) = (Instant::now() + AGAIN, 0);
            let done = loop {
                let done = change.and_then(|change| {
                    times += 1;
                    self.added(nic, change)
                });
                // It went down with the process, for which another may have been to blame, and the
                // next one starts without it. Once: if it is to blame itself, its network has lost
                // enough.
                match done {
                    Err(Undone::Lost(_)) if times < 2 && Instant::now() < deadline => {
                        self.shared.pause(MOMENT);
                        change = self.shared.begin(Request::Add(nic.clone()));
                    }
                    done => break done,
                }
            };
            done.map_err(|undone| trouble(undone.why()))
        };
        for nic in nics {
            if asked.len() == UNDER_WAY {
                results.extend(asked.pop_front().map(added));
            }
            asked.push_back((*nic, self.shared.begin(Request::Add((*nic).clone()))));
        }
        results.extend(asked.into_iter().map(added));
        results
    }

    /// A NIC is known once the process has it, if that is still the process that there is: another
    /// one is started with those that are known.
    fn added(&self, nic: &NicConfig, change: Change) -> Result<(), Undone> {
        let asked = self.shared.carried_out(change)?;
        let known = Known::of(nic);
        let mut state = self.shared.state();
        if !state.wire.as_ref().is_some_and(|wire| Arc::ptr_eq(wire, &asked)) {
            return Err(Undone::Lost("it died".to_owned()));
        }
        state.nics.insert(nic.name.clone(), known);
        drop(state);
        self.put(nic);
        Ok(())
    }

    fn put(&self, nic: &NicConfig) {
        if let Some(branch) = &self.shared.branch {
            branch.put(nic);
        }
    }

    /// Has NICs on RNICs reach these peers of network `vni`.
    pub(super) fn set_peers(&self, vni: u32, peers: &[Peer]) -> io::Result<()> {
        let file = file_of("vhost-rdma-peers", peers)?;
        let copy = file.try_clone()?;
        // One that is away, or stands by, is told when it begins.
        let wire = {
            let mut state = self.shared.state();
            state.peers = Some((vni, file));
            state.wire.is_some()
        };
        let asked = (Request::Peers(vni), &[copy.as_fd()][..]);
        match wire.then(|| self.shared.call(asked, PATIENCE, |_| ())) {
            Some(Ok(Answer::Done) | Err(NoAnswer::Away(_) | NoAnswer::Lost(..))) | None => Ok(()),
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

    /// A NIC is about to be removed: nobody waits there for the process any more, and for what that
    /// says of a session only a moment longer.
    pub(super) fn leaves(&self, name: &str) {
        self.shared.state().leaving.insert(name.to_owned(), Instant::now());
        self.shared.wake();
    }

    /// Ends a NIC; whether there are others left.
    pub(super) fn remove(&self, name: &str) -> bool {
        let (last, goes, hardware) = {
            let mut state = self.shared.state();
            let known = state.nics.remove(name);
            state.leaving.remove(name);
            if let (Some(branch), Some(known)) = (&self.shared.branch, known) {
                branch.take_away(&known.config);
            }
            // With the last one goes the process, and what it was served by. One that is away comes
            // back without this NIC.
            let last = state.nics.is_empty();
            let is_there = state.wire.is_some();
            let hardware = self.shared.branch.is_some() && is_there;
            (last, last || state.stopping || !is_there, hardware && !state.stopping)
        };
        if !goes {
            self.let_go(name);
        } else if last && hardware {
            // It has to let go of the memory before. A process that does not see to it is ended,
            // and the kernel does: nobody else's changes wait for long.
            let asked = (Request::Remove(name.to_owned()), &[][..]);
            let done = self.shared.call(asked, GLANCE, |_| ());
            if !matches!(done, Ok(Answer::Done)) {
                tracing::warn!(nic = name, "the hardware lets go of it with the process");
            }
        }
        !last
    }

    /// Has the process let go of a NIC, and waits a moment for that.
    fn let_go(&self, name: &str) {
        let shared = &self.shared;
        let done = shared.begin(Request::Remove(name.to_owned())).and_then(|change| {
            match shared.carried_out_within(&change, LET_GO) {
                Some(done) => done.map(drop),
                None => {
                    self.slow.wait(shared, name, change);
                    Ok(())
                }
            }
        });
        if let Err(undone) = done {
            let why = undone.why();
            tracing::error!(nic = name, why, "the NIC was not let go of in time");
        }
    }

    pub(super) fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        for _ in 0..UPDATES {
            let before = self.shared.state().pid;
            self.shared.change(Request::Update(nic.clone())).map_err(trouble)?;
            let mut state = self.shared.state();
            if let Some(known) = state.nics.get_mut(&nic.name) {
                known.config = nic.clone();
            }
            // A process that began meanwhile has the NIC as it was.
            if state.pid == before {
                break;
            }
        }
        self.put(nic);
        Ok(())
    }

    /// Once the process was asked, the session is kept: if that process dies it is its successor's.
    pub(super) fn connect(&self, name: &str, vmm: &UnixStream) -> io::Result<Box<dyn Connection>> {
        self.shared.ready_for(name).map_err(io::Error::other)?;
        let (id, held, end) = self.held(name, (vmm.try_clone()?, None), Record::default())?;
        let request = Request::Connect(name.to_owned(), id);
        let hold = |state: &mut State| drop(state.sessions.insert(id, held));
        match self.shared.call_for(name, (request, &[vmm.as_fd()]), hold) {
            Ok(Answer::Done) => {}
            Ok(Answer::Refused(why)) => {
                self.shared.state().sessions.remove(&id);
                return Err(io::Error::other(why));
            }
            Err(NoAnswer::Away(why)) => {
                // The process may begin it yet, and finds its end.
                let held = self.shared.state().sessions.remove(&id);
                held.into_iter().for_each(|held| held.end(Ending::Closed));
                return Err(io::Error::other(why));
            }
            Ok(_) => self.shared.give_up(),
            Err(NoAnswer::Lost(_, wire)) => hang_up(&wire),
        }
        Ok(Box::new(Far { shared: self.shared.clone(), id, end }))
    }

    /// Hands a process in. Nothing of it is kept here: when the network's process dies its socket
    /// ends, and it begins anew. How long its NIC takes is the affair of whoever `waits` there.
    pub(super) fn enter(
        &self,
        name: &str,
        process: &UnixStream,
        waits: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        self.shared.ready_for(name).map_err(io::Error::other)?;
        let request = Request::Enter(name.to_owned());
        match self.shared.call_while((request, &[process.as_fd()]), waits) {
            Ok(Answer::Done) => Ok(()),
            Ok(Answer::Refused(why)) | Err(NoAnswer::Away(why) | NoAnswer::Lost(why, _)) => {
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

    /// Goes on with a session that an earlier supervisor had. As any other it outlives the process:
    /// if that dies while it is told of it, it is its successor's.
    pub(super) fn resume(&self, name: &str, left: Left) -> io::Result<Box<dyn Connection>> {
        let Left { stream, record, names, serial, .. } = left;
        let (id, held, end) = self.held(name, (stream, Some(serial)), record)?;
        let old = names.iter().filter(|name| !held.ledger.is_of(name));
        old.for_each(|name| self.shared.store.forget(name));
        let (mut own, mut times) = (Some(held), 0);
        while own.is_some() {
            let lives = self.shared.state().lives;
            times += 1;
            let (answer, asked) = self.go_on(id, &mut own);
            let gone = match answer {
                Ok(Answer::Done) => None,
                Ok(Answer::Refused(why)) => {
                    let mut state = self.shared.state();
                    if asked.is_some_and(|asked| asked != state.lives) {
                        // Who refused has died, and the session is its successor's.
                        break;
                    }
                    own = state.sessions.remove(&id).or(own);
                    // Another one may have been told of it than was asked to go on.
                    if state.lives == lives || times == UPDATES {
                        return Err(io::Error::other(why));
                    }
                    continue;
                }
                Ok(_) => {
                    self.shared.give_up();
                    None
                }
                Err(NoAnswer::Away(_)) => None,
                Err(NoAnswer::Lost(_, wire)) => {
                    hang_up(&wire);
                    Some(wire)
                }
            };
            own = self.leave(id, own, gone.as_ref())?;
        }
        Ok(Box::new(Far { shared: self.shared.clone(), id, end }))
    }

    /// Tells the process of a session and has it go on. Who is asked for the latter has the session
    /// from then on, and `own` is empty: the answer, and in which life of the process that was.
    fn go_on(&self, id: u64, own: &mut Option<Held>) -> (Result<Answer, NoAnswer>, Option<u64>) {
        // For all of it: a process must not hold up a daemon's start by each message.
        let until = Instant::now() + PATIENCE;
        if let Some(held) = &*own {
            match self.tell((id, held), until) {
                Ok(Answer::Done) => {}
                other => return (other, None),
            }
        }
        let mut asked = None;
        let hold = |state: &mut State| {
            asked = Some(state.lives);
            own.take().into_iter().for_each(|held| drop(state.sessions.insert(id, held)));
        };
        let left = until.saturating_duration_since(Instant::now());
        let answer = self.shared.call((Request::GoOn(id), &[]), left, hold);
        (answer, asked)
    }

    /// A session that no process has been told of is for the next one, if the one at `gone`, or
    /// none, is there now. Else it is given back.
    fn leave(
        &self,
        id: u64,
        own: Option<Held>,
        gone: Option<&Arc<Wire>>,
    ) -> io::Result<Option<Held>> {
        let Some(held) = own else { return Ok(None) };
        let mut state = self.shared.state();
        if state.stopping {
            return Err(io::Error::other("the network is about to end"));
        }
        let serves = state.wire.as_ref();
        if serves.is_some_and(|wire| !gone.is_some_and(|gone| Arc::ptr_eq(gone, wire))) {
            return Ok(Some(held));
        }
        state.sessions.insert(id, held);
        Ok(None)
    }

    /// Tells the process what is left of a session; the first answer that is another than that it
    /// is done.
    fn tell(&self, (id, held): (u64, &Held), until: Instant) -> Result<Answer, NoAnswer> {
        let call = |request, files: &[BorrowedFd<'_>]| {
            let left = until.saturating_duration_since(Instant::now());
            self.shared.call((request, files), left, |_| ())
        };
        let mut told = call(Request::TakeUp(held.nic.clone(), id), &[held.stream.as_fd()])?;
        for (change, files) in held.record.changes() {
            if !matches!(told, Answer::Done) {
                break;
            }
            told = call(Request::Kept(id, change), &files)?;
        }
        Ok(told)
    }

    pub(super) fn status(&self, name: &str) -> NicStatus {
        let answer = self.shared.glance(Request::Status(name.to_owned()));
        let mut state = self.shared.state();
        let silent = answer.is_none() && state.wire.is_some();
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
        status.silent = silent;
        known.now = status.counters;
        status.counters = known.before.plus(&known.now);
        let refused = known.refused.as_ref().map(|why| {
            format!("{why}; `vhost-rdma network restart {}` tries again", known.config.network)
        });
        if let Some(why) = trouble.or(refused) {
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
    /// Whether it was told to end.
    pub(super) fn is_ending(&self) -> bool {
        self.shared.state().stopping
    }

    /// Has the process ended, without waiting for it. The kernel may take seconds: it waits for
    /// RCU where a process has asynchronous I/O (fs/aio.c, exit_aio). All sessions are over.
    pub(super) fn ending(&self) {
        let sessions = {
            let mut state = self.shared.state();
            state.stopping = true;
            std::mem::take(&mut state.sessions)
        };
        // Their names in the store are free before there can be another network of this name.
        sessions.into_values().for_each(|held| held.end(Ending::Closed));
        if let Some(branch) = &self.shared.branch {
            branch.close();
        }
        self.shared.give_up();
        self.shared.wake();
    }

    /// Waits for its end, if nobody else does.
    pub(super) fn join(&self) {
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if keeper.is_some_and(|keeper| keeper.join().is_err()) {
            tracing::error!("the keeper of a network's process panicked");
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.ending();
        self.join();
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
    /// A VMM that goes while there is no process is noticed here, and so is a process that does not
    /// say that a session is over whose NIC goes.
    fn look(&self) {
        let mut state = self.shared.state();
        let away = state.wire.is_none();
        let Some(held) = state.sessions.get(&self.id) else { return };
        let late = |since: &Instant| since.elapsed() > LAST_WORD;
        let gone = away && held.has_hung_up() || state.leaving.get(&held.nic).is_some_and(late);
        let held = if gone { state.sessions.remove(&self.id) } else { None };
        drop(state);
        if let Some(held) = held {
            held.end(Ending::Closed);
        }
    }
}
