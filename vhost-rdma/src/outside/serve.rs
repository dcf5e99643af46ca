//! The process itself. One thread hears the supervisor and all networks' processes, a message of
//! each in turn; the channel and the connection manager have one each, beneath `dataplane`.
//!
//! It waits for nobody: what does not fit into a network's socket is lost. The end of the
//! supervisor's socket is the end of the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::net::{Shutdown, shutdown};

use super::branch::Branch;
use super::message_quota::MessageQuota;
use super::protocol::{Order, Said, Start, VERSION};
use crate::aside::drop_aside;
use crate::channel::{GiveIdentity, Opened, Pems};
use crate::dataplane::{Outside, entries};
use crate::network_process::{
    Fault, Host, Packet, Told, Wire, decode, encode, ignore_signals, read_all, set_filter,
};
use crate::node::Peer;
use crate::sandbox::{Profile, Sealed};
use crate::{limits, panics, sandbox, telemetry};

/// What is heard at once.
const EVENTS: usize = 64;
/// Marks of what is no network's.
const SUPERVISOR: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;
/// The name in the log.
const NAME: &str = "+outside";

/// Networks for whose NICs something has come.
struct Rung {
    numbers: Mutex<BTreeSet<u64>>,
    bell: OwnedFd,
}

impl Rung {
    fn new() -> io::Result<Arc<Self>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { numbers: Mutex::default(), bell }))
    }

    fn ring(&self, number: u64) {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        // It waits for nobody: it is ours, and not a guest's to fill.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn take(&self) -> BTreeSet<u64> {
        let _ = crate::eventfd::take(self.bell.as_fd());
        std::mem::take(&mut *self.numbers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// To the process of a network.
struct Line {
    wire: Wire,
    quota: MessageQuota,
    /// Never the same twice.
    serial: u64,
}

/// A network.
struct Seat {
    branch: Branch,
    line: Option<Line>,
}

struct Process {
    wire: Wire,
    outside: Arc<Outside>,
    identity: Option<GiveIdentity>,
    seats: BTreeMap<u64, Seat>,
    /// Sockets of networks' processes, so far.
    serial: u64,
    /// Networks that have said too much, and until when they are not heard.
    resting: BTreeMap<u64, Instant>,
    rung: Arc<Rung>,
    epoll: OwnedFd,
}

/// Serves until the supervisor closes the socket, which is standard input.
///
/// # Errors
/// See [`Fault`].
pub fn serve() -> Result<(), Fault> {
    ignore_signals()?;
    let wire = Wire::new(io::stdin().as_fd().try_clone_to_owned()?);
    let (start, files) = first(&wire)?;
    telemetry::start(start.log_format, Some(NAME)).map_err(io::Error::other)?;
    set_filter(start.log.as_deref());
    panics::end_the_process();
    limits::raise_descriptors();
    match shut_in(&start, files) {
        Ok((outside, identity)) => {
            let mut process = Process::new(wire, outside, identity)?;
            process.say(&Said::Started);
            process.run()
        }
        Err(error) => {
            let why = Said::Refused(error.to_string());
            wire.send(&encode(&why)?, &[])?;
            Err(error.into())
        }
    }
}

fn first(wire: &Wire) -> Result<(Start, Vec<OwnedFd>), Fault> {
    let nobody = |why: String| Fault::Supervisor(why);
    let packet = wire.receive().map_err(|error| nobody(error.to_string()))?;
    let packet = packet.ok_or_else(|| nobody("nothing is said".to_owned()))?;
    match decode(&packet.bytes).map_err(|error| nobody(error.to_string()))? {
        Order::Start(start) if start.version == VERSION => Ok((start, packet.files)),
        _ => Err(nobody("it is another build".to_owned())),
    }
}

/// Gives away what it does not take, and begins. All threads come afterwards.
fn shut_in(start: &Start, files: Vec<OwnedFd>) -> io::Result<(Arc<Outside>, Option<GiveIdentity>)> {
    sandbox::close_in()?;
    // What needs a file, for the last time.
    crate::rnic::prepare_cm();
    let landlock = sandbox::forget_names(Profile::Outside)?;
    let sealed = Sealed { landlock, seccomp: sandbox::seal(Profile::Outside)? };
    tracing::info!(pid = std::process::id(), sandbox = %sealed, "serving what NICs on RNICs share");
    let mut outside = Outside::new(start.ports.clone());
    let listener = files.into_iter().next().map(TcpListener::from);
    let identity = match (start.daemons, listener) {
        (Some(daemons), Some(listener)) => {
            let opened = Opened { listener, pems: None, daemons };
            Some(outside.run_channel(opened).map_err(io::Error::other)?)
        }
        (Some(_), None) => return Err(io::Error::other("there is no socket for the channel")),
        (None, _) => None,
    };
    Ok((Arc::new(outside), identity))
}

impl Process {
    fn new(wire: Wire, outside: Arc<Outside>, identity: Option<GiveIdentity>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let rung = Rung::new()?;
        let listen = |fd, mark| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(mark), epoll::EventFlags::IN)
        };
        listen(wire.as_fd(), SUPERVISOR)?;
        listen(rung.bell.as_fd(), BELL)?;
        let (seats, resting) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { wire, outside, identity, seats, serial: 0, resting, rung, epoll })
    }

    fn say(&self, said: &Said) {
        // Who does not listen ends us as well.
        let sent = encode(said).map_err(io::Error::other);
        if let Err(error) = sent.and_then(|bytes| self.wire.send(&bytes, &[])) {
            tracing::debug!(%error, "the supervisor was not told");
        }
    }

    fn run(&mut self) -> Result<(), Fault> {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            events.clear();
            let wait = self.wake_up(Instant::now());
            let room = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, room, wait.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            for event in &events {
                match event.data.u64() {
                    SUPERVISOR => {}
                    BELL => self.deliver(),
                    number => self.hear(number)?,
                }
            }
            if !self.hear_orders()? {
                return Ok(());
            }
        }
    }

    /// Hears those again who have rested; how long until the next is to be.
    fn wake_up(&mut self, now: Instant) -> Option<Timespec> {
        let (epoll, seats) = (&self.epoll, &self.seats);
        self.resting.retain(|number, until| {
            let rests = *until > now;
            if !rests && let Some(line) = seats.get(number).and_then(|seat| seat.line.as_ref()) {
                listen(epoll, &line.wire, *number, epoll::EventFlags::IN);
            }
            rests
        });
        let next = self.resting.values().min()?;
        Timespec::try_from(next.saturating_duration_since(now)).ok()
    }

    /// Carries out all orders that have come; false at their end.
    fn hear_orders(&mut self) -> Result<bool, Fault> {
        loop {
            match self.wire.try_receive() {
                Ok(Some(packet)) => self.take(packet)?,
                Ok(None) => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn take(&mut self, packet: Packet) -> Result<(), Fault> {
        let Packet { bytes, files, files_lost } = packet;
        if files_lost {
            tracing::error!(why = limits::no_descriptor_left(), "an order is not carried out");
            return Ok(());
        }
        let file = files.into_iter().next();
        match decode(&bytes)? {
            Order::Start(_) => {}
            Order::Identity => self.identify(file),
            Order::Peers(vni) => {
                if let Some(peers) = read::<Vec<Peer>>(file, "its peers stay as they were") {
                    self.outside.directory().set_peers(vni, entries(&peers));
                }
            }
            Order::Forget(vni) => self.outside.directory().forget_network(vni),
            Order::Open(number, vni) => {
                let rung = self.rung.clone();
                let ring = Arc::new(move || rung.ring(number));
                let branch = Branch::new(self.outside.clone(), vni, ring);
                self.seats.insert(number, Seat { branch, line: None });
            }
            Order::Put(number, nic) => self.with(number, |seat| seat.branch.put(&nic)),
            Order::TakeAway(number, nic) => self.with(number, |seat| seat.branch.take_away(&nic)),
            Order::Attach(number) => self.attach(number, file),
            Order::Close(number) => {
                self.resting.remove(&number);
                if let Some(seat) = self.seats.remove(&number) {
                    seat.branch.close();
                    self.part(number, seat.line);
                }
            }
            Order::Log(log) => set_filter(log.as_deref()),
            #[cfg(test)]
            Order::Attempt(case) => self.say(&Said::Tried(sandbox::tests::attempt(&case))),
        }
        Ok(())
    }

    fn with(&mut self, number: u64, what: impl FnOnce(&mut Seat)) {
        if let Some(seat) = self.seats.get_mut(&number) {
            what(seat);
        }
    }

    fn identify(&self, file: Option<OwnedFd>) {
        let pems = read::<Pems>(file, "the channel's certificates stay as they were");
        if let (Some(pems), Some(identity)) = (pems, &self.identity)
            && let Err(error) = identity.give(&pems)
        {
            tracing::error!(%error, "the channel's certificates stay as they were");
        }
    }

    /// What an earlier process had told went with its socket.
    fn attach(&mut self, number: u64, file: Option<OwnedFd>) {
        self.silence(number);
        let Some(seat) = self.seats.get_mut(&number) else { return };
        self.resting.remove(&number);
        let wire = file.map(Wire::new);
        seat.line = wire.and_then(|wire| {
            let (data, all) = (epoll::EventData::new_u64(number), epoll::EventFlags::IN);
            let added = epoll::add(&self.epoll, &wire, data, all);
            let added = added.inspect_err(|error| tracing::error!(%error, "it is not heard"));
            added.ok()?;
            self.serial += 1;
            Some(Line { wire, quota: MessageQuota::new(Instant::now()), serial: self.serial })
        });
    }

    /// Hears one message of a network's process.
    fn hear(&mut self, number: u64) -> Result<(), Fault> {
        let Some(line) = self.seats.get(&number).and_then(|seat| seat.line.as_ref()) else {
            return Ok(());
        };
        let serial = line.serial;
        let told = if self.resting.remove(&number).is_some() {
            // All that is heard of who rests is that it hangs up.
            Heard::End
        } else {
            hear(&line.wire)
        };
        // What the supervisor ordered before it was said is done before it is looked at.
        self.hear_orders()?;
        let Some(seat) = self.seats.get_mut(&number) else { return Ok(()) };
        let Some(line) = seat.line.as_mut().filter(|line| line.serial == serial) else {
            return Ok(());
        };
        match told {
            Heard::Nothing => {}
            Heard::Told(told) => {
                if let Some(host) = seat.branch.take(told) {
                    line.tell(&host);
                }
                if let Some(until) = line.quota.take(Instant::now()) {
                    listen(&self.epoll, &line.wire, number, epoll::EventFlags::empty());
                    self.resting.insert(number, until);
                }
            }
            Heard::End => self.silence(number),
            Heard::Nonsense(why) => {
                tracing::error!(why, "a network's process is not to be trusted");
                self.silence(number);
                self.say(&Said::Nonsense(number));
            }
        }
        Ok(())
    }

    /// Hears a network's process no more; what it has told is void.
    fn silence(&mut self, number: u64) {
        let Some(seat) = self.seats.get_mut(&number) else { return };
        seat.branch.mourn();
        let line = seat.line.take();
        self.part(number, line);
    }

    /// Lets go of a line. What is in it may be slow to close (`aside`).
    fn part(&self, number: u64, line: Option<Line>) {
        let Some(line) = line else { return };
        let _ = epoll::delete(&self.epoll, &line.wire);
        let _ = shutdown(&line.wire, Shutdown::Both);
        drop_aside(&number.to_string(), line);
    }

    /// Brings what has come for NICs to their processes, a part of it at a time.
    fn deliver(&mut self) {
        for number in self.rung.take() {
            let Some(seat) = self.seats.get(&number) else { continue };
            let all = seat.branch.deliver(|host| {
                if let Some(line) = &seat.line {
                    line.tell(&host);
                }
            });
            if !all {
                self.rung.ring(number);
            }
        }
    }
}

/// Changes what is heard of a network's process.
fn listen(epoll: &OwnedFd, wire: &Wire, number: u64, what: epoll::EventFlags) {
    let data = epoll::EventData::new_u64(number);
    if let Err(error) = epoll::modify(epoll, wire, data, what) {
        tracing::error!(%error, "a network's process is heard as before");
    }
}

impl Line {
    /// What finds no room is lost.
    fn tell(&self, host: &Host) {
        let sent = encode(host).map_err(io::Error::other);
        if let Err(error) = sent.and_then(|bytes| self.wire.try_send(&bytes, &[])) {
            tracing::debug!(%error, "a network's process does not listen");
        }
    }
}

/// What came from a network's process.
enum Heard {
    Nothing,
    Told(Told),
    Nonsense(String),
    /// It speaks to nobody any more.
    End,
}

fn hear(wire: &Wire) -> Heard {
    match wire.try_hear() {
        Ok(Some(packet)) => understand(&packet).map_or_else(Heard::Nonsense, Heard::Told),
        Ok(None) => Heard::End,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Heard::Nothing,
        Err(error) => Heard::Nonsense(error.to_string()),
    }
}

fn understand(packet: &Packet) -> Result<Told, String> {
    let told: Told = decode(&packet.bytes).map_err(|error| error.to_string())?;
    told.check().map_err(|error| error.to_string())?;
    Ok(told)
}

/// What is in a file that came along.
fn read<T: serde::de::DeserializeOwned>(file: Option<OwnedFd>, otherwise: &str) -> Option<T> {
    let file = file.map(File::from).ok_or_else(|| io::Error::other("there is no file"));
    let bytes = file.and_then(|file| read_all(&file));
    let read = bytes.and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::other));
    read.inspect_err(|error| tracing::error!(%error, "{otherwise}")).ok()
}

#[cfg(test)]
mod tests;
