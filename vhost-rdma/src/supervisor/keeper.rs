//! The thread that keeps one network served: starts its process, listens to it, starts it again.
//!
//! A process that comes after another is told all that has to outlive one: the NICs, and of each
//! session that was not in the middle of a message its stream, its memory and its queues. Only then
//! do others get at it.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::calls::Shared;
use super::child::{ending, hang_up, spawn};
use super::held::Held;
use super::outside::Speaker as _;
use super::state::{Legacy, Standby, State};
use crate::eventfd;
use crate::network_process::{Answer, Numbered, Packet, Report, Request, Wire, decode, encode};
use crate::node::{Ending, NicConfig};
use crate::store::Store;

/// The program's hidden command.
const COMMAND: &str = "network-process";
/// How long a process may take for each step of its start.
const START: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };
/// How long a message may wait for a process that does not read.
const SEND: Duration = Duration::from_secs(5);
/// Requests whose answers may be on their way.
const UNANSWERED: usize = 64;
/// Messages of one process in a second: far more than VMMs cause, and little work.
const PACE: u32 = 20_000;

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
        let mut why = match started {
            Ok(mut process) => {
                let why = process.live(shared, &mut next);
                last = Some(process).filter(|_| shared.state().legacy.is_some());
                why
            }
            Err(error) => format!("cannot be started: {error}"),
        };
        let wait = {
            let mut state = shared.state();
            if state.stopping {
                return mourn(state);
            }
            if state.legacy.is_some() {
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
    state.mourn();
}

/// How often the memory killer has ended a process of this network.
fn kills(shared: &Shared) -> u64 {
    shared.cgroup.memory().map_or(0, |memory| memory.kills)
}

/// For people.
fn tell(why: &str, failing: bool, wait: Duration) -> String {
    let again = if failing { "it fails again and again" } else { "it is started again" };
    format!("the network's process {why}; {again}, next in {wait:?}")
}

/// A process that was started. Dropping it kills it.
struct Process {
    child: Child,
    wire: Arc<Wire>,
    /// In the store, under this name: what it tells is not lost with the supervisor.
    kept: (Store, String),
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kept.0.forget(&self.kept.1);
        hang_up(&self.wire);
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
            // NICs may have changed since; one that died meanwhile is of no use.
            let told =
                process.lend(shared).and_then(|()| process.tell_nics(shared, Request::Update));
            let told = told.and_then(|()| process.tell_peers(shared));
            ready = told.is_ok().then_some(process);
        }
        let mut process = match ready {
            Some(process) => process,
            None => Self::begin(shared)?,
        };
        process.connect(shared)?;
        process.hand_on(shared)?;
        if shared.state().lent {
            process.lend(shared)?;
        }
        Ok(process)
    }

    /// Starts a process with the network's NICs.
    fn begin(shared: &Shared) -> io::Result<Self> {
        let (wire, far) = Wire::pair()?;
        wire.set_patience(SEND)?;
        let child = spawn(&[COMMAND, &shared.start.network], far)?;
        // It waits for its first request.
        shared.cgroup.enter(child.id());
        let kept = (shared.store.clone(), format!("wire.{}@{}", child.id(), shared.start.network));
        let mut process = Self { child, wire: Arc::new(wire), kept };
        if let Err(error) = shared.store.keep(&process.kept.1, process.wire.as_fd()) {
            let network = &shared.start.network;
            tracing::warn!(network, %error, "its sessions may not survive the daemon's end");
        }
        process.ask(shared, Request::Start(shared.start.clone()), &[])?;
        process.lend(shared)?;
        process.tell_peers(shared)?;
        process.tell_nics(shared, Request::Add)?;
        Ok(process)
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

    fn tell_nics(&mut self, shared: &Shared, request: fn(NicConfig) -> Request) -> io::Result<()> {
        let nics: Vec<_> = shared.state().nics.values().map(|known| known.config.clone()).collect();
        nics.into_iter().try_for_each(|nic| self.ask(shared, request(nic), &[]))
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
        match Self::begin(shared) {
            Ok(process) => *next = Some(process),
            Err(error) => {
                let network = &shared.start.network;
                tracing::warn!(network, %error, "no process stands by: the pause is a longer one");
            }
        }
        shared.state().standby = Standby::Tried;
        shared.wake();
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
        loop {
            let mut fds = [PollFd::new(&*self.wire, PollFlags::IN)];
            if poll(&mut fds, Some(&START))? == 0 {
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
                report => shared.take(report, rest),
            }
        }
    }

    /// Listens to the process until it ends or talks nonsense; why.
    fn live(&mut self, shared: &Shared, next: &mut Option<Self>) -> String {
        {
            let mut state = shared.state();
            if state.stopping {
                return String::new();
            }
            state.wire = Some(self.wire.clone());
            state.pid = Some(self.child.id());
            state.trouble = None;
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
            match understand(packet) {
                Ok((report, rest)) => shared.take(report, rest),
                Err(error) => return format!("is not to be trusted: {error}"),
            }
            std::thread::sleep(pace.next(Instant::now()));
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

fn understand(packet: Packet) -> Result<(Report, Rest), crate::network_process::BadMessage> {
    let Packet { bytes, files, files_lost } = packet;
    let mut report: Report = decode(&bytes)?;
    // Of descriptors that there was no room for, nobody knows how many there were.
    if !files_lost {
        report.check(files.len())?;
    }
    Ok((report, (files, files_lost)))
}

/// Holds back whoever talks without end.
struct Pace {
    since: Instant,
    count: u32,
}

impl Pace {
    const fn new(now: Instant) -> Self {
        Self { since: now, count: 0 }
    }

    /// How long the next message has to wait.
    fn next(&mut self, now: Instant) -> Duration {
        let passed = now.saturating_duration_since(self.since);
        if passed >= Duration::from_secs(1) {
            *self = Self::new(now);
        }
        self.count += 1;
        if self.count < PACE {
            Duration::ZERO
        } else {
            Duration::from_secs(1).saturating_sub(passed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_talks_without_end_waits() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        for _ in 1..PACE {
            assert_eq!(pace.next(begin), Duration::ZERO);
        }
        assert_eq!(pace.next(begin), Duration::from_secs(1));
        assert_eq!(pace.next(begin + Duration::from_secs(1)), Duration::ZERO);
    }
}
