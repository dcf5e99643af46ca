//! The thread that keeps one network served: starts its process, listens to it, starts it again.
//!
//! A process that comes after another is told all that has to outlive one: the NICs, and of each
//! session that was not in the middle of a message its stream, its memory and its queues. Only then
//! do others get at it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::fcntl_get_seals;

use super::calls::Shared;
use super::child::{ending, hang_up, spawn};
use super::held::Held;
use super::outside::Speaker as _;
use super::state::{Legacy, Standby, State};
use crate::aside::{close_aside, drop_aside};
use crate::device::Change;
use crate::eventfd;
use crate::network_process::{
    Answer, Numbered, Packet, Report, Request, Wire, decode, encode, plain,
};
use crate::node::Ending;
use crate::store::Store;

/// The program's hidden command.
const COMMAND: &str = "network-process";
/// Whose descriptors are closed that such a process has sent. No NIC has such a name.
const PROCESSES: &str = "network processes";
/// How long a process may take for each step of its start.
const START: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 20 });
/// How long a message may wait for a process that does not read.
const SEND: Duration = Duration::from_secs(5);
/// Requests whose answers may be on their way.
const UNANSWERED: usize = 64;
/// Messages of one process in a second: far more than VMMs cause, and little work.
const PACE: u32 = 20_000;
/// What the service manager may be told of a network's sessions in a second, beyond what it may be
/// told at once: some hundred VMs start with less. It is everybody's, and each word costs it a look
/// at all that it keeps.
const TURNS: u32 = 20;
const TURNS_AT_ONCE: u32 = 1000;

/// Serves the network until it is time to end.
pub(super) fn run(shared: &Shared) {
    let (mut next, mut last) = (None, None);
    loop {
        let begin = Instant::now();
        let kills = kills(shared);
        let started = Process::start(shared, next.take());
        // One that has handed on what it had is at rest; its end may take a while, and nobody waits
        // for it.
        drop(last.take());
        let mut handed_on = false;
        let mut why = match started {
            Ok(mut process) => {
                let why = process.live(shared, &mut next);
                handed_on = shared.state().legacy.is_some();
                last = Some(process).filter(|_| handed_on);
                why
            }
            // What an earlier one has left is for the first that can be started.
            Err(error) => format!("cannot be started: {error}"),
        };
        let wait = {
            let mut state = shared.state();
            if state.stopping {
                return over(shared, state);
            }
            if handed_on {
                // As it was asked to.
                mourn(state);
                continue;
            }
            if kills != self::kills(shared) {
                why.push_str(" (the memory killer: it had all that its cgroup may have)");
            }
            let wait = state.restarts.died(Instant::now(), begin.elapsed());
            let failing = state.restarts.failing(Instant::now());
            state.trouble = Some(tell(&why, failing, wait));
            mourn(state);
            wait
        };
        let (network, wait_ms) = (&shared.start.network, wait.as_millis());
        tracing::error!(network, why, wait_ms, "the network's process ended; it is started again");
        shared.wake();
        shared.pause(wait);
    }
}

/// The process has died: what others knew of it goes, and then it can be started again.
fn mourn(mut state: MutexGuard<'_, State>) {
    let over = state.mourn();
    drop(state);
    over.into_iter().for_each(|(held, ending)| held.end(ending));
}

/// There will be no other process. Whoever wants to know what the last one told finds all of it.
fn over(shared: &Shared, mut state: MutexGuard<'_, State>) {
    state.over = true;
    mourn(state);
    shared.wake();
}

/// How often the memory killer has ended a process of this network.
fn kills(shared: &Shared) -> u64 {
    shared.cgroup.memory().map_or(0, |memory| memory.kills)
}

/// For people. What the process has said is in it.
fn tell(why: &str, failing: bool, wait: Duration) -> String {
    let why = plain(why);
    let again = if failing { "it fails again and again" } else { "it is started again" };
    format!("the network's process {why}; {again}, next in {wait:?}")
}

/// A process that was started. Dropping it kills it.
struct Process {
    child: Child,
    wire: Arc<Wire>,
    /// In the store, under this name: what it tells is not lost with the supervisor.
    kept: (Store, String),
    /// NICs that it was told of.
    told: BTreeSet<String>,
    /// NICs that it has refused, and why.
    refused: BTreeMap<String, String>,
    /// Sessions that it was told of before others found it.
    handed: BTreeSet<u64>,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kept.0.forget(&self.kept.1);
        hang_up(&self.wire);
        // What it has told and nobody has taken may be slow to close.
        if let Ok((other, _)) = Wire::pair() {
            drop_aside(PROCESSES, std::mem::replace(&mut self.wire, Arc::new(other)));
        }
        // One that has ended already is not hit.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    /// A process that knows all that it has to know: the one that stands by, or a new one.
    fn start(shared: &Shared, standby: Option<Self>) -> io::Result<Self> {
        let mut ready = None;
        if let Some(mut process) = standby {
            process.can_be_reached(shared)?;
            // NICs may have changed since; one that died meanwhile is of no use.
            let told = process.lend(shared).and_then(|()| process.update_nics(shared));
            let told = told.and_then(|()| process.tell_peers(shared));
            ready = told.is_ok().then_some(process);
        }
        let mut process = match ready {
            Some(process) => process,
            None => Self::begin(shared)?,
        };
        match process.take_over(shared) {
            Ok(()) => Ok(process),
            Err(error) => {
                process.hear_out(shared);
                Err(error)
            }
        }
    }

    /// Gives it what it goes on with.
    fn take_over(&mut self, shared: &Shared) -> io::Result<()> {
        self.connect(shared)?;
        self.hand_on(shared)?;
        if shared.state().lent { self.lend(shared) } else { Ok(()) }
    }

    /// Ends the process, and takes what it has told by then: some sessions may have gone on, and
    /// whoever comes next must not go on with one that is in the middle of a message.
    fn hear_out(&mut self, shared: &Shared) {
        self.end();
        // Nobody adds to it any more.
        while let Ok(Some(packet)) = self.wire.receive() {
            let Ok((report, rest)) = understand(packet) else { return };
            shared.take(report, rest);
        }
    }

    /// Whoever wants the network's end reaches it from now on; an error if that is wanted already.
    fn can_be_reached(&self, shared: &Shared) -> io::Result<()> {
        let mut state = shared.state();
        if state.stopping {
            return Err(io::Error::other("nobody wants it any more"));
        }
        state.starting = Some(self.wire.clone());
        Ok(())
    }

    /// Starts a process with the network's NICs.
    fn begin(shared: &Shared) -> io::Result<Self> {
        let (wire, far) = Wire::pair()?;
        wire.set_patience(SEND)?;
        let child = spawn(&[COMMAND, &shared.start.network], far)?;
        let kept = (shared.store.clone(), format!("wire.{}@{}", child.id(), shared.start.network));
        let (told, refused, handed) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
        let mut process = Self { child, wire: Arc::new(wire), kept, told, refused, handed };
        // It waits for its first request.
        shared.cgroup.enter(process.child.id())?;
        process.can_be_reached(shared)?;
        if let Err(error) = shared.store.keep(&process.kept.1, process.wire.as_fd()) {
            let network = &shared.start.network;
            tracing::warn!(network, %error, "its sessions may not survive the daemon's end");
        }
        process.ask(shared, Request::Start(shared.start.clone()), &[])?;
        process.lend(shared)?;
        process.tell_peers(shared)?;
        process.add_nics(shared)?;
        Ok(process)
    }

    /// Adds all NICs. One that cannot be had any more (its device has gone) is missed by its own
    /// guest, and the others are served.
    fn add_nics(&mut self, shared: &Shared) -> io::Result<()> {
        let nics = shared.state().configs();
        for nic in nics {
            let name = nic.name.clone();
            self.told.insert(name.clone());
            match self.ask(shared, Request::Add(nic), &[]) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let why = error.to_string();
                    tracing::error!(nic = name, why, "the network goes on without this NIC");
                    self.refused.insert(name, why);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Has it speak to who knows all networks on RNICs.
    fn connect(&self, shared: &Shared) -> io::Result<()> {
        let Some(branch) = &shared.branch else { return Ok(()) };
        branch.connect(|far| self.say(shared, Request::Outside, &[far]).map(drop))
    }

    /// Tells which QPNs are the network's.
    fn lend(&mut self, shared: &Shared) -> io::Result<()> {
        let blocks = {
            let mut state = shared.state();
            state.lent = false;
            state.blocks()
        };
        self.ask(shared, Request::Lend(blocks), &[])
    }

    /// Tells whom NICs on RNICs may reach.
    fn tell_peers(&mut self, shared: &Shared) -> io::Result<()> {
        let copy = {
            let state = shared.state();
            state.peers.as_ref().map(|(vni, file)| file.try_clone().map(|file| (*vni, file)))
        };
        let Some((vni, file)) = copy.transpose()? else { return Ok(()) };
        self.ask(shared, Request::Peers(vni), &[file.as_fd()])
    }

    /// Takes NICs away that were removed since it was told of them, and tells of sessions that came
    /// since; an error if it cannot be told. Then it is the process that others find.
    fn be_found(&mut self, shared: &Shared) -> io::Result<bool> {
        loop {
            let mut state = shared.state();
            if state.stopping {
                return Ok(false);
            }
            let late = state.sessions.keys().find(|id| !self.handed.contains(id)).copied();
            if let Some(late) = late {
                drop(state);
                self.hand_over(shared, late)?;
                continue;
            }
            let gone = self.told.iter().find(|name| !state.nics.contains_key(*name)).cloned();
            let Some(gone) = gone else {
                state.wire = Some(self.wire.clone());
                state.starting = None;
                state.pid = Some(self.child.id());
                state.trouble = None;
                for (name, known) in &mut state.nics {
                    known.refused = self.refused.get(name).cloned();
                }
                return Ok(true);
            };
            drop(state);
            self.told.remove(&gone);
            self.ask(shared, Request::Remove(gone), &[])?;
        }
    }

    fn update_nics(&mut self, shared: &Shared) -> io::Result<()> {
        let mut nics = shared.state().configs();
        nics.retain(|nic| !self.refused.contains_key(&nic.name));
        nics.into_iter().try_for_each(|nic| self.ask(shared, Request::Update(nic), &[]))
    }

    /// Waits for the process, or for somebody who wants another to stand by; false: the latter.
    fn hear(&self, shared: &Shared) -> io::Result<bool> {
        loop {
            let mut fds = [
                PollFd::new(&*self.wire, PollFlags::IN),
                PollFd::new(&*shared.bell, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(true),
                Ok(_) => {
                    let _ = eventfd::take(shared.bell.as_fd());
                    return Ok(false);
                }
            }
        }
    }

    /// Has another process stand by, if one is wanted.
    fn stand_by(shared: &Shared, next: &mut Option<Self>) {
        if shared.state().standby != Standby::Wanted {
            return;
        }
        let mut standby = Standby::Tried;
        match Self::begin(shared) {
            Ok(process) => match process.loses(shared) {
                None => *next = Some(process),
                Some(why) => standby = Standby::Refused(why),
            },
            Err(error) => {
                let network = &shared.start.network;
                tracing::warn!(network, %error, "no process stands by: the pause is a longer one");
            }
        }
        shared.state().standby = standby;
        shared.wake();
    }

    /// A NIC that it has refused and the present process has.
    fn loses(&self, shared: &Shared) -> Option<String> {
        let state = shared.state();
        let has = |name: &str| state.nics.get(name).is_some_and(|known| known.refused.is_none());
        let lost = self.refused.iter().find(|(name, _)| has(name));
        lost.map(|(name, why)| format!("NIC {name}: {why}"))
    }

    /// Has the process go on with all sessions, and with what an earlier one has left of them.
    fn hand_on(&mut self, shared: &Shared) -> io::Result<()> {
        let legacy = shared.state().legacy.take();
        if let Some(Legacy { file, .. }) = &legacy {
            match self.ask(shared, Request::Load, &[file.as_fd()]) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let network = &shared.start.network;
                    tracing::error!(network, %error, "what was handed on is lost");
                }
                Err(error) => return Err(error),
            }
        }
        let sessions: Vec<u64> = shared.state().sessions.keys().copied().collect();
        for session in sessions {
            self.hand_over(shared, session)?;
        }
        if legacy.is_some() { self.ask(shared, Request::Run, &[]) } else { Ok(()) }
    }

    /// Has the process go on with a session; one that it refuses is over.
    fn hand_over(&mut self, shared: &Shared, session: u64) -> io::Result<()> {
        self.handed.insert(session);
        let Some(mut held) = shared.state().sessions.remove(&session) else { return Ok(()) };
        let told = self.tell(shared, session, &held);
        // From now on the process is the one that has it.
        held.set_busy(false);
        let nic = held.nic.clone();
        shared.state().sessions.insert(session, held);
        let taken = told.and_then(|()| self.ask(shared, Request::GoOn(session), &[]));
        match taken {
            Ok(()) => tracing::info!(nic, "the session of the VMM goes on"),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let held = shared.state().sessions.remove(&session);
                if let Some(held) = held {
                    held.end(Ending::Broken(format!("the session cannot go on: {error}")));
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Few of the answers are waited for: what does not fit is refused when the session is to go
    /// on. But neither side is to wait for room while the other does.
    fn tell(&mut self, shared: &Shared, session: u64, held: &Held) -> io::Result<()> {
        let begin = Request::TakeUp(held.nic.clone(), session);
        self.say(shared, begin, &[held.stream.as_fd()])?;
        for (n, (change, files)) in held.record.changes().into_iter().enumerate() {
            let kept = Request::Kept(session, change);
            if n % UNANSWERED == UNANSWERED - 1 {
                self.ask(shared, kept, &files)?;
            } else {
                self.say(shared, kept, &files)?;
            }
        }
        Ok(())
    }

    /// Sends a request; its number.
    fn say(&self, shared: &Shared, request: Request, files: &[BorrowedFd<'_>]) -> io::Result<u64> {
        let id = shared.state().number();
        let bytes = encode(&Numbered { id, request }).map_err(io::Error::other)?;
        self.wire.send(&bytes, files)?;
        Ok(id)
    }

    /// Asks and waits for the answer, while the keeper is the only one who speaks to the process.
    /// A refusal is [`io::ErrorKind::InvalidData`].
    fn ask(
        &mut self,
        shared: &Shared,
        request: Request,
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let id = self.say(shared, request, files)?;
        // For all that it tells meanwhile.
        let until = Instant::now() + START;
        let mut pace = Pace::new(Instant::now());
        loop {
            let mut fds = [PollFd::new(&*self.wire, PollFlags::IN)];
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            if until <= Instant::now() || poll(&mut fds, Some(&left))? == 0 {
                return Err(io::Error::other("it does not answer"));
            }
            let Some(packet) = self.wire.receive()? else {
                return Err(io::Error::other(self.end()));
            };
            let (report, rest) = understand(packet).map_err(io::Error::other)?;
            match report {
                Report::Answer(of, Answer::Done) if of == id => return Ok(()),
                Report::Answer(of, Answer::Saved(nics)) if of == id => {
                    shared.state().kept = nics.into_iter().collect();
                    return Ok(());
                }
                Report::Answer(of, Answer::Refused(why)) if of == id => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
                report => {
                    let turns = shared.take(report, rest);
                    std::thread::sleep(pace.next(Instant::now(), turns));
                }
            }
        }
    }

    /// Listens to the process until it ends or talks nonsense; why.
    fn live(&mut self, shared: &Shared, next: &mut Option<Self>) -> String {
        match self.be_found(shared) {
            Ok(true) => {}
            Ok(false) => {
                self.hear_out(shared);
                return String::new();
            }
            Err(error) => {
                self.hear_out(shared);
                return format!("does not let go of a NIC: {error}");
            }
        }
        // Who it was to speak to may have died since.
        if shared.branch.as_ref().is_some_and(|branch| branch.is_stale()) {
            shared.reconnect();
        }
        shared.wake();
        let mut pace = Pace::new(Instant::now());
        loop {
            match self.hear(shared) {
                Ok(true) => {}
                Ok(false) => {
                    Self::stand_by(shared, next);
                    continue;
                }
                Err(error) => return format!("cannot be listened to: {error}"),
            }
            let packet = match self.wire.receive() {
                Ok(Some(packet)) => packet,
                Ok(None) if shared.state().legacy.is_some() => return String::new(),
                Ok(None) => return self.end(),
                Err(error) => return format!("cannot be listened to: {error}"),
            };
            let turns = match understand(packet) {
                Ok((report, rest)) => shared.take(report, rest),
                Err(error) => return format!("is not to be trusted: {error}"),
            };
            std::thread::sleep(pace.next(Instant::now(), turns));
        }
    }

    /// Ends the process, if it has not ended; how it did.
    fn end(&mut self) -> String {
        hang_up(&self.wire);
        // One that has ended keeps the status that it ended with.
        let _ = self.child.kill();
        self.child.wait().map_or_else(|error| error.to_string(), ending)
    }
}

type Rest = (Vec<OwnedFd>, bool);

fn understand(packet: Packet) -> io::Result<(Report, Rest)> {
    let Packet { bytes, files, files_lost } = packet;
    let sane = || {
        let mut report: Report = decode(&bytes).map_err(io::Error::other)?;
        // Of descriptors that there was no room for, nobody knows how many there were.
        if !files_lost {
            report.check(files.len()).map_err(io::Error::other)?;
        }
        check_kinds(&report, &files)?;
        Ok(report)
    };
    match sane() {
        Ok(report) => Ok((report, (files, files_lost))),
        Err(error) => {
            close_aside(PROCESSES, files);
            Err(error)
        }
    }
}

/// An error unless descriptors are of the kinds that a guest's memory and its notifications have:
/// to close another one, or to go on to the next program with it, may take long. A process checks
/// its VMMs'; one that tells of others is not itself any more. No file system is asked.
pub(super) fn check_kinds(report: &Report, files: &[OwnedFd]) -> io::Result<()> {
    let Report::Changed(_, change) = report else { return Ok(()) };
    for file in files {
        match change {
            Change::Memory(_) | Change::Plugged(_) => {
                // Of memory files alone (mm/memfd.c, memfd_file_seals_ptr).
                fcntl_get_seals(file).map_err(|_| io::Error::other("memory that is no memory"))?;
            }
            _ => eventfd::check(file.as_fd())?,
        }
    }
    Ok(())
}

/// Holds back whoever talks without end.
struct Pace {
    since: Instant,
    count: u32,
    /// What the service manager may still be told.
    turns: u32,
}

impl Pace {
    const fn new(now: Instant) -> Self {
        Self { since: now, count: 0, turns: TURNS_AT_ONCE }
    }

    /// How long the next message has to wait, after one of which the service manager was told so
    /// often.
    fn next(&mut self, now: Instant, turns: u32) -> Duration {
        let passed = now.saturating_duration_since(self.since);
        if passed >= Duration::from_secs(1) {
            let more = u32::try_from(passed.as_secs()).unwrap_or(u32::MAX).saturating_mul(TURNS);
            let turns = self.turns.saturating_add(more).min(TURNS_AT_ONCE);
            *self = Self { since: now, count: 0, turns };
        }
        self.count += 1;
        let spent = self.turns < turns;
        self.turns = self.turns.saturating_sub(turns);
        if spent || self.count >= PACE {
            Duration::from_secs(1).saturating_sub(now.saturating_duration_since(self.since))
        } else {
            Duration::ZERO
        }
    }
}

#[cfg(test)]
mod tests;
