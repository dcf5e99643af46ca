//! The thread of a NIC's connection manager, and the way of others to it.
//!
//! Sessions give commands under a lock that is held for one command at a time. The thread takes
//! datagrams in, of each NIC in turn, does what is due, and has the worker send: one job at a time,
//! of a few datagrams, and it waits for that. So however much processes ask for, a worker has one
//! job of their connection manager, and what is too much waits here or is lost.
//!
//! The thread has no descriptor of any process, so none can hold it up.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::fair::Fair;
use super::layout::{Command, Reply};
use super::machine::{Asker, Machine};
use crate::cm::{Inbox, Mad};
use crate::device::nic::{Nic, PATIENCE};
use crate::link::Gid;
use crate::nic::{Nanos, Status};
use crate::panics::contained;
use crate::process::events::Bell;

/// Datagrams that are taken in and sent in one turn.
const TURN: usize = 16;
/// Datagrams that wait here to be taken in.
const HEARD: usize = 512;
/// Stack of the thread.
const STACK: usize = 128 << 10;

/// What thread and sessions share.
struct Shared {
    nic: Arc<Nic>,
    machine: Mutex<Machine>,
    /// Datagrams that were taken in, by the NIC that they came from.
    heard: Mutex<Fair<u64, (u64, Mad)>>,
    inbox: Arc<Inbox>,
    bell: Bell,
    begun: Instant,
    stop: AtomicBool,
}

/// See the module. Dropping it ends the thread.
pub(in crate::process) struct Manager {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager").finish_non_exhaustive()
    }
}

impl Shared {
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Nanos {
        Nanos::try_from(self.begun.elapsed().as_nanos()).unwrap_or(Nanos::MAX)
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            let next = self.turn();
            if self.inbox.is_empty() {
                self.wait(next);
            }
        }
        // What ended with the NIC is said, and nobody is heard any more: a peer that never stops
        // would have this never end.
        loop {
            let sends = self.machine().take_sends(TURN);
            if sends.is_empty() {
                return;
            }
            self.say(sends);
        }
    }

    fn say(&self, sends: Vec<Mad>) {
        // A worker that does not answer loses them, as a wire does.
        let _ = self.nic.call(PATIENCE, move |shard, id, _| {
            for mad in sends {
                shard.send_management(id, &mad);
            }
        });
    }

    /// When the next one is to be.
    fn turn(&self) -> Option<Nanos> {
        self.bell.heard();
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let mut machine = self.machine();
        let now = self.now();
        // All that is there, so that what comes next finds room; then some of each.
        for _ in 0..HEARD {
            let Some((whose, mad)) = self.inbox.take_of() else { break };
            heard.push(whose, (whose, mad));
        }
        for _ in 0..TURN {
            let Some((whose, mad)) = heard.pop() else { break };
            machine.datagram((&mad, whose), now);
        }
        machine.tick(now);
        let sends = machine.take_sends(TURN);
        let at_once = machine.has_sends() || !heard.is_empty();
        let next = if at_once { Some(0) } else { machine.deadline() };
        drop((machine, heard));
        if !sends.is_empty() {
            self.say(sends);
        }
        next
    }

    fn wait(&self, next: Option<Nanos>) {
        let left = next.map(|at| Duration::from_nanos(at.saturating_sub(self.now())));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        let bell: BorrowedFd<'_> = self.bell.as_fd();
        // An interrupted wait is a turn like any other.
        let _ = poll(&mut [PollFd::from_borrowed_fd(bell, PollFlags::IN)], left.as_ref());
    }
}

impl Manager {
    /// That of a NIC with these addresses.
    pub(in crate::process) fn start(
        nic: Arc<Nic>,
        guid: [u8; 8],
        gids: Vec<Gid>,
    ) -> std::io::Result<Self> {
        let bell = Bell::new()?;
        let ring = bell.clone();
        let mut first = [0; 4];
        crate::random::fill(&mut first)?;
        let account = nic.account().clone();
        let machine = Machine::new(guid, gids, account, u32::from_ne_bytes(first));
        let shared = Arc::new(Shared {
            nic,
            machine: Mutex::new(machine),
            heard: Mutex::new(Fair::new(HEARD)),
            inbox: Arc::new(Inbox::new(Arc::new(move || ring.ring()))),
            bell,
            begun: Instant::now(),
            stop: AtomicBool::new(false),
        });
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("process-cm".to_owned()).stack_size(STACK);
        let thread = thread.spawn(move || {
            while contained(|| own.run()).is_err() {
                tracing::error!(nic = own.nic.name, "the connection manager had a fault");
            }
        })?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Where the worker puts datagrams.
    pub(in crate::process) fn inbox(&self) -> Arc<Inbox> {
        self.shared.inbox.clone()
    }

    /// The NIC's addresses changed.
    pub(in crate::process) fn set_addresses(&self, gids: Vec<Gid>) {
        self.shared.machine().gids = gids;
    }

    /// A channel of a session begins.
    pub(in crate::process) fn add_channel(&self, session: u64, bell: Bell) -> u32 {
        self.shared.machine().add_channel(session, bell)
    }

    /// It ends.
    pub(in crate::process) fn remove_channel(
        &self,
        session: u64,
        channel: u32,
    ) -> Result<(), Status> {
        let now = self.shared.now();
        let done = self.shared.machine().remove_channel(Asker { session, channel }, now);
        self.shared.bell.ring();
        done
    }

    /// A session ends.
    pub(in crate::process) fn end_session(&self, session: u64) {
        let now = self.shared.now();
        self.shared.machine().end_session(session, now);
        self.shared.bell.ring();
    }

    /// Which of these channels of events lack tokens, and how many.
    pub(in crate::process) fn untold(
        &self,
        channels: impl ExactSizeIterator<Item = u32>,
    ) -> Vec<(u32, u32)> {
        // The lock is everybody's, and most processes have none.
        if channels.len() == 0 {
            return Vec::new();
        }
        let machine = self.shared.machine();
        let each = channels.map(|number| (number, machine.untold(number)));
        each.filter(|(_, lacks)| *lacks > 0).collect()
    }

    /// So many were put in.
    pub(in crate::process) fn told(&self, channel: u32, count: u32) {
        self.shared.machine().told(channel, count);
    }

    /// Carries a command out.
    pub(in crate::process) fn command(
        &self,
        (session, channel): (u64, u32),
        command: Command,
    ) -> Result<Reply, Status> {
        let asker = Asker { session, channel };
        let reached = match &command {
            Command::Resolve { dest, .. } => {
                let peer = self.shared.machine().peer_at(dest.ip());
                let ask = |gid: Gid| {
                    let answer =
                        self.shared.nic.call(PATIENCE, move |shard, id, _| shard.reaches(id, &gid));
                    answer.unwrap_or(false)
                };
                peer.is_some_and(ask)
            }
            _ => false,
        };
        let mut machine = self.shared.machine();
        let before = machine.deadline();
        let done = machine.command(asker, command, (reached, self.shared.now()));
        if machine.has_sends() || machine.deadline() != before {
            self.shared.bell.ring();
        }
        done
    }
}

impl Manager {
    /// Ends the thread, after it has told peers what there is to tell. Nothing comes or goes any
    /// more.
    pub(in crate::process) fn finish(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.bell.ring();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It panics only if it has a fault, which the log tells.
            let _ = thread.join();
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.finish();
    }
}
