//! One process at a NIC: its messages, its events, its end.
//!
//! A session has a thread of its own, which waits for the worker and for nobody else. It knows the
//! numbers of what the process made, and how the process calls them, as a kernel's uverbs does; the
//! engine checks with each command that they are of the session's context. When the process ends,
//! by whatever way, its socket does, and the context with all that is in it goes before the memory
//! under it.

mod channels;
mod pieces;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use virtio_rdma_abi::{CmdHdr, cmd, cmd_status, event};
use zerocopy::{FromBytes as _, IntoBytes as _};

use super::cm;
use super::commands::{self, Runner};
use super::events::Bell;
use super::house::{ChannelPlace, House};
use super::memory::Window;
use super::messages::{
    Address, Answer, Completed, Given, Happened, Head, Hello, Number, VERSION, Welcome, exactly, op,
};
use super::mirror::{self, Mirrors, NoAnswer};
use super::socket::{self, Channel, Packet};
use crate::device::ctrl::{Controller, RESPONSE_MAX, Request};
use crate::device::nic::{DirectKick, PATIENCE};
use crate::eventfd;
use crate::memory::{AddressSpace, Charge};
use crate::nic::objects::QP_EVENTS;
use crate::nic::{Command, MEMORY_LOST, Status};
use crate::panics::contained;

/// Regions of memory of one process.
const REGIONS: usize = 64;
/// Completion channels, and channels of the connection manager: a connection of librdmacm's has two
/// of the first, one of rsockets' one of each. All of a NIC's processes have fewer together than a
/// few of them might (`house`), since each is a descriptor of a process that serves others too.
const CHANNELS: usize = 1024;
/// What says in such a channel that an event waits.
const TOKEN: &[u8] = &[1, 0, 0, 0, 0, 0, 0, 0];
/// What is kept for a region, a channel, and an object that has a name.
const REGION: u64 = 1024;
const CHANNEL: u64 = 2048;
const NAMED: u64 = 128;
/// What is kept for the channel of jobs, and those that wait.
const MIRRORS: u64 = 32 << 10;
/// What is kept for the session itself: a thread, its stack and its part of the allocator.
const SELF: u64 = 104 << 10;

/// A completion channel.
#[derive(Debug)]
struct Completions {
    channel: Channel,
    /// CQs that use it.
    users: u32,
    _place: ChannelPlace,
}

/// A channel of the connection manager.
#[derive(Debug)]
struct Tokens {
    channel: Channel,
    _place: ChannelPlace,
}

/// A CQ as the process knows it.
#[derive(Debug, Clone, Copy)]
struct Cq {
    cookie: u64,
    /// 0: none.
    channel: u32,
    /// Events that there was no room for.
    waiting: u32,
}

/// See the module.
pub(super) struct Session {
    house: Arc<House>,
    socket: UnixStream,
    window: Window,
    bell: Bell,
    kick: File,
    /// The worker hears the kicks itself.
    direct: Option<DirectKick>,
    controller: Controller,
    /// The process's memory, and nothing else.
    space: AddressSpace,
    greeted: bool,
    /// 0: it has none yet.
    ctx: u32,
    /// Doorbell pages, as the process names them: memory that may not go before the context.
    pages: Vec<u64>,
    happenings: Channel,
    /// Asynchronous events that there was no room for: element and kind.
    happened: Vec<(u64, u32)>,
    /// Jobs for mirrored regions, once the process has asked for them.
    mirrors: Option<Mirrors>,
    channels: BTreeMap<u32, Completions>,
    cm: BTreeMap<u32, Tokens>,
    /// Of those, whose tokens found no room.
    lacking: Vec<u32>,
    last_channel: u32,
    cqs: BTreeMap<u32, Cq>,
    /// How the process calls its QPs and SRQs.
    qps: BTreeMap<u32, u64>,
    srqs: BTreeMap<u32, u64>,
    kept: Charge,
}

/// What a session has of its own from the beginning.
struct Parts {
    kept: Charge,
    kick: File,
    bell: Bell,
    happenings: Channel,
}

impl Parts {
    fn new(house: &House) -> io::Result<Self> {
        let kept = house.nic.account().charge(SELF);
        Ok(Self {
            kept: kept.ok_or_else(|| io::Error::other("the NIC keeps as much as it may"))?,
            kick: File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            bell: Bell::new()?,
            happenings: Channel::new()?,
        })
    }
}

/// Whether a session goes on.
type GoesOn = bool;

impl Session {
    /// A process that has said nothing yet.
    ///
    /// # Errors
    /// The NIC keeps as much as it may, or the host lacks something; the socket is given back.
    pub(super) fn new(
        house: Arc<House>,
        socket: UnixStream,
        window: Window,
    ) -> Result<Self, (UnixStream, io::Error)> {
        let parts = Parts::new(&house);
        let Parts { kept, kick, bell, happenings } = match parts {
            Ok(parts) => parts,
            Err(error) => return Err((socket, error)),
        };
        let nic = &house.nic;
        Ok(Self {
            direct: nic.watch_kick(&kick),
            controller: Controller::begun(nic.layout.kick_base()),
            space: AddressSpace::of(nic.account().clone()),
            bell,
            happenings,
            house,
            socket,
            window,
            kick,
            greeted: false,
            ctx: 0,
            pages: Vec::new(),
            happened: Vec::new(),
            mirrors: None,
            channels: BTreeMap::new(),
            cm: BTreeMap::new(),
            lacking: Vec::new(),
            last_channel: 0,
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            srqs: BTreeMap::new(),
            kept,
        })
    }

    /// Serves the process to its end, and leaves nothing of it but its sockets: to close them may
    /// take long, and whoever has the place should have given it back before.
    pub(super) fn run(&mut self) {
        let ended = contained(|| while self.turn() {});
        if ended.is_err() {
            tracing::error!(nic = self.house.nic.name, "a process's session had a fault");
        }
        self.end();
        // Not before: who knows of the end takes back the memory that objects write to.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// What wakes it.
    pub(super) fn bell(&self) -> Bell {
        self.bell.clone()
    }

    fn end(&mut self) {
        self.direct = None;
        // Peers are told before the queue pairs go.
        self.house.cm.end_session(self.window.number());
        if self.ctx != 0 {
            let ctx = self.ctx;
            match self.house.execute(ctx, Command::ContextDestroy) {
                // A NIC that failed has no contexts that anybody could use.
                Ok(_) | Err(Status::FATAL | Status::NOENT) => {}
                // Its objects would be in memory that is forgotten next.
                Err(status) => self.house.nic.failed(format!(
                    "the context of a process that ended cannot be destroyed: {}",
                    status.0
                )),
            }
            self.house.routes.end(ctx);
        }
        self.house.forget(&self.space);
    }

    /// Waits until there is something to do, and does it.
    fn turn(&mut self) -> GoesOn {
        let Some([message, bell, kick, mirror]) = self.wait() else { return false };
        if kick && eventfd::take(self.kick.as_fd()).unwrap_or(false) {
            self.house.nic.kick();
        }
        // After the bell was heard, or what it was rung for might not be seen.
        if bell && (!self.collect() || self.house.is_closing()) {
            return false;
        }
        self.deliver();
        if mirror && !self.pass_answers() {
            return false;
        }
        !message || self.hear()
    }

    /// What there is: a message or the end, events, a kick, something with the channel of jobs.
    fn wait(&self) -> Option<[bool; 4]> {
        let mut fds = vec![
            PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP),
            PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
        ];
        let kick = self.direct.is_none().then_some(fds.len());
        fds.extend(kick.map(|_| PollFd::new(&self.kick, PollFlags::IN)));
        let mirror = self.mirrors.as_ref().map(|_| fds.len());
        fds.extend(self.mirrors.as_ref().map(Mirrors::poll_fd));
        let waiting = self.cqs.values().filter(|cq| cq.waiting > 0).map(|cq| cq.channel);
        let full = waiting.collect::<BTreeSet<_>>().into_iter();
        let full = full.filter_map(|id| Some(&self.channels.get(&id)?.channel));
        let lacking = self.lacking.iter().filter_map(|id| Some(&self.cm.get(id)?.channel));
        fds.extend(full.chain(lacking).map(|channel| PollFd::new(channel, PollFlags::OUT)));
        if !self.happened.is_empty() {
            fds.push(PollFd::new(&self.happenings, PollFlags::OUT));
        }
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Some([false; 4]),
            Err(_) => return None,
        }
        let ready = |at: Option<usize>| {
            at.and_then(|at| fds.get(at)).is_some_and(|fd| !fd.revents().is_empty())
        };
        Some([ready(Some(0)), ready(Some(1)), ready(kick), ready(mirror)])
    }

    /// Takes over what the worker has noted.
    fn collect(&mut self) -> GoesOn {
        self.bell.heard();
        let found = self.house.routes.take(self.ctx);
        if let Some(mirrors) = &mut self.mirrors {
            mirrors.give(found.jobs);
        }
        for (cqn, count) in found.completions {
            if let Some(cq) = self.cqs.get_mut(&cqn) {
                cq.waiting = cq.waiting.saturating_add(count);
            }
        }
        for (kind, object) in found.events {
            let element = match kind {
                // The process finds its socket closed: that is how it learns of a loss.
                event::DEVICE_FATAL => return false,
                MEMORY_LOST => {
                    self.lose_memory();
                    None
                }
                event::CQ_ERR => self.cqs.get(&object).map(|cq| cq.cookie),
                event::SRQ_ERR | event::SRQ_LIMIT_REACHED => self.srqs.get(&object).copied(),
                event::GID_CHANGE | event::PORT_ACTIVE | event::PORT_ERR => Some(object.into()),
                _ => self.qps.get(&object).copied(),
            };
            let known = |element: &u64| !self.happened.contains(&(*element, kind));
            self.happened.extend(element.filter(known).map(|element| (element, kind)));
        }
        true
    }

    /// Tells the worker what the process has done of its jobs.
    fn pass_answers(&mut self) -> GoesOn {
        let Some(mirrors) = &mut self.mirrors else { return true };
        mirrors.give(Vec::new());
        let done = match mirrors.take() {
            Ok(done) => done,
            // The process had no room for the descriptor: it may ask again.
            Err(NoAnswer::Closed) if !mirrors.are_used() => {
                self.mirrors = None;
                // Less than before: this is not refused.
                let _ = self.keep(0);
                return true;
            }
            Err(_) => return false,
        };
        if !done.is_empty() {
            let ctx = self.ctx;
            self.house.nic.post(move |shard, id, _| shard.owner_answered(id, ctx, &done));
        }
        true
    }

    /// Gives events to the process, as far as its channels have room.
    fn deliver(&mut self) {
        for cq in self.cqs.values_mut().filter(|cq| cq.waiting > 0) {
            let Some(completions) = self.channels.get(&cq.channel) else {
                cq.waiting = 0;
                continue;
            };
            let event = Completed { cookie: cq.cookie.into() };
            while cq.waiting > 0 && completions.channel.put(event.as_bytes()) {
                cq.waiting -= 1;
            }
        }
        // Who rings the bell has added to these; nobody else has.
        self.lacking.clear();
        for (number, most) in self.house.cm.untold(self.cm.keys().copied()) {
            let Some(tokens) = self.cm.get(&number) else { continue };
            let put = (0..most).take_while(|_| tokens.channel.put(TOKEN)).count();
            let put = u32::try_from(put).unwrap_or(most);
            self.house.cm.told(number, put);
            self.lacking.extend((put < most).then_some(number));
        }
        let happenings = &self.happenings;
        let mut full = false;
        self.happened.retain(|&(element, kind)| {
            let event = Happened { element: element.into(), kind: kind.into(), reserved: 0.into() };
            full = full || !happenings.put(event.as_bytes());
            full
        });
    }

    /// Serves the next message.
    fn hear(&mut self) -> GoesOn {
        match socket::receive(self.socket.as_fd()) {
            Ok(Some(packet)) => self.answer(packet),
            Ok(None) => false,
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    /// Who does not read an answer has no other.
    fn say(&self, answer: &Answer) -> GoesOn {
        socket::send(self.socket.as_fd(), answer.bytes(), &[]).is_ok()
    }

    fn answer(&mut self, packet: Packet) -> GoesOn {
        let Ok((head, body)) = Head::read_from_prefix(packet.bytes()) else { return false };
        // Nobody can tell what such a message was to say.
        if packet.cut {
            return false;
        }
        let body = body.to_vec();
        let asked = head.op.get();
        if head.reserved.get() != 0 || (asked == op::HELLO) == self.greeted {
            return self.say(&Answer::of(Status::STATE));
        }
        let wanted = usize::from(asked == op::MEMORY_ADD);
        if packet.files.len() != wanted {
            return self.say(&Answer::of(Status::INVAL));
        }
        let answer = match asked {
            op::HELLO => return self.welcome(&body),
            op::CHANNEL_ADD => return self.add_channel(&body),
            op::MIRROR_ADD => return self.add_mirrors(&body),
            op::CM_ADD => return self.add_cm(&body),
            op::MEMORY_ADD => {
                let file = packet.files.into_iter().next().map(File::from);
                self.plug(&body, file)
            }
            op::MEMORY_REMOVE => self.unplug(&body),
            op::CHANNEL_REMOVE => self.remove_channel(&body),
            op::ADDRESS => self.address(&body),
            op::COMMAND => self.command(&body),
            op::CM_REMOVE => self.remove_cm(&body),
            op::CM_COMMAND => self.manage(&body),
            _ => Err(Status::NOTSUPP),
        };
        self.say(&answer.unwrap_or_else(Answer::of))
    }

    fn welcome(&mut self, body: &[u8]) -> GoesOn {
        let hello = match exactly::<Hello>(body) {
            Ok(hello) if hello.version.get() >= VERSION && hello.reserved.get() == 0 => hello,
            Ok(_) => return self.say(&Answer::of(Status::NOTSUPP)),
            Err(status) => return self.say(&Answer::of(status)),
        };
        let Some((status, alive)) = self.house.status() else { return false };
        let Some([take, put]) = self.happenings.ends() else { return false };
        let welcome = Welcome {
            version: hello.version.get().min(VERSION).into(),
            alive: alive.into(),
            comp_vectors: u32::from(self.house.nic.layout.comp_vectors()).into(),
            addresses: u16::try_from(self.house.gids().len()).unwrap_or(u16::MAX).into(),
            mac: self.house.mac(),
            reserved: 0.into(),
        };
        let files = [status.as_fd(), self.kick.as_fd(), take, put];
        let answer = Answer::ok(welcome.as_bytes());
        self.greeted = socket::send(self.socket.as_fd(), answer.bytes(), &files).is_ok();
        self.happenings.given();
        self.greeted
    }

    /// Charges one thing more, or fewer.
    fn keep(&mut self, more: u64) -> Result<(), Status> {
        let named = self.cqs.len() + self.qps.len() + self.srqs.len();
        let bytes = SELF
            + more
            + MIRRORS * u64::from(self.mirrors.is_some())
            + NAMED * named as u64
            + CHANNEL * (self.channels.len() + self.cm.len()) as u64
            + REGION * self.space.regions().len() as u64;
        if self.kept.settle(bytes) { Ok(()) } else { Err(Status::NOMEM) }
    }

    fn add_mirrors(&mut self, body: &[u8]) -> GoesOn {
        let made = if body.is_empty() { self.new_mirrors() } else { Err(Status::INVAL) };
        if let Err(status) = made {
            return self.say(&Answer::of(status));
        }
        let Some(mirrors) = &mut self.mirrors else { return false };
        let Some([theirs, _]) = mirrors.channel.ends() else { return false };
        let sent = socket::send(self.socket.as_fd(), Answer::ok(&[]).bytes(), &[theirs]).is_ok();
        mirrors.channel.given();
        sent
    }

    fn new_mirrors(&mut self) -> Result<(), Status> {
        if self.ctx == 0 {
            return Err(Status::STATE);
        }
        if self.mirrors.is_some() {
            return Err(Status::EXIST);
        }
        self.keep(MIRRORS)?;
        let mirrors = Mirrors::new().map_err(|_| Status::NOMEM)?;
        let ctx = self.ctx;
        let served = self.house.nic.call(PATIENCE, move |shard, id, _| {
            shard.serve_mirrors(id, ctx);
        });
        served.map_err(|_| Status::FATAL)?;
        self.mirrors = Some(mirrors);
        Ok(())
    }

    /// A command of the connection manager.
    fn manage(&self, body: &[u8]) -> Result<Answer, Status> {
        let (of, command) = Number::read_from_prefix(body).map_err(|_| Status::INVAL)?;
        let command = cm::parse(command)?;
        let asker = (self.window.number(), of.number.get());
        Ok(Answer::ok(&cm::write(&self.house.cm.command(asker, command)?)))
    }

    fn address(&self, body: &[u8]) -> Result<Answer, Status> {
        let index = exactly::<Number>(body)?.number.get() as usize;
        let gid = *self.house.gids().get(index).ok_or(Status::NOENT)?;
        Ok(Answer::ok(Address { gid }.as_bytes()))
    }

    /// A command of the device, as a driver gives it, by a process.
    fn command(&mut self, body: &[u8]) -> Result<Answer, Status> {
        let (given, request) = Given::read_from_prefix(body).map_err(|_| Status::INVAL)?;
        let (header, rest) = CmdHdr::read_from_prefix(request).map_err(|_| Status::INVAL)?;
        let opcode = header.opcode.get();
        commands::check(opcode, self.ctx)?;
        let channel = given.channel.get();
        if channel != 0 && (opcode != cmd::CQ_CREATE || !self.channels.contains_key(&channel)) {
            return Err(Status::NOENT);
        }
        // The engine remembers that jobs were asked for; their channel may not have arrived.
        if opcode == cmd::MR_REG && mirror::is_mirrored(rest) {
            self.mirrors.as_mut().ok_or(Status::INVAL)?.use_them();
        }
        // Whoever fills the account, what is there can be used and ended.
        if matches!(opcode, cmd::CQ_CREATE | cmd::QP_CREATE | cmd::SRQ_CREATE) {
            self.keep(NAMED)?;
        }
        let done = self.carry_out((opcode, &given), request, rest);
        // No more than before: this is not refused.
        let _ = self.keep(0);
        done
    }

    fn carry_out(
        &mut self,
        (opcode, given): (u16, &Given),
        request: &[u8],
        named: &[u8],
    ) -> Result<Answer, Status> {
        let mut request = request.to_vec();
        if let Some(body) = request.get_mut(size_of::<CmdHdr>()..) {
            self.window.translate(opcode, body)?;
        }
        let nic = self.house.nic.clone();
        nic.stats.control_commands.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // Regions may be in memory that vanishes. What the device rests on may not.
        let space = match opcode {
            cmd::MR_REG | cmd::MR_REREG => self.space.clone(),
            _ => self.space.steady(),
        };
        let runner = Runner { house: &self.house, space: &space, ctx: self.ctx };
        let request = Request { bytes: &request, whole: true };
        let room = RESPONSE_MAX;
        let response = self.controller.serve(&runner, request, room, nic.max_mr_bytes());
        let response = response.ok_or(Status::INVAL)?;
        let (status, answer) = commands::split(response.bytes());
        if status != cmd_status::OK {
            return Err(Status(status));
        }
        self.note(opcode, (named, answer), given);
        Ok(Answer::ok(answer))
    }

    /// A command was carried out: what there is now, or no more.
    fn note(&mut self, opcode: u16, (asked, answer): (&[u8], &[u8]), given: &Given) {
        let word = |bytes: &[u8]| {
            bytes.first_chunk::<4>().map(|word| u32::from_le_bytes(*word)).unwrap_or_default()
        };
        let page = || asked.first_chunk::<8>().map(|page| u64::from_le_bytes(*page));
        let (object, made, cookie) = (word(asked), word(answer), given.cookie.get());
        match opcode {
            cmd::CONTEXT_CREATE => {
                self.ctx = made;
                self.pages.extend(page());
                self.house.routes.begin(made, self.bell.clone());
            }
            cmd::DB_PAGE_ADD => self.pages.extend(page()),
            cmd::CQ_CREATE => {
                let channel = given.channel.get();
                if let Some(completions) = self.channels.get_mut(&channel) {
                    completions.users += 1;
                    self.house.routes.begin_cq(self.ctx, made);
                }
                self.cqs.insert(made, Cq { cookie, channel, waiting: 0 });
            }
            cmd::CQ_DESTROY => {
                self.house.routes.end_cq(self.ctx, object);
                let cq = self.cqs.remove(&object);
                self.forget_events(cq.map(|cq| cq.cookie), &[event::CQ_ERR]);
                if let Some(it) = cq.and_then(|cq| self.channels.get_mut(&cq.channel)) {
                    it.users = it.users.saturating_sub(1);
                }
            }
            cmd::QP_CREATE => drop(self.qps.insert(made, cookie)),
            cmd::QP_DESTROY => {
                let cookie = self.qps.remove(&object);
                self.forget_events(cookie, &QP_EVENTS);
            }
            cmd::SRQ_CREATE => drop(self.srqs.insert(made, cookie)),
            cmd::SRQ_DESTROY => {
                let cookie = self.srqs.remove(&object);
                self.forget_events(cookie, &[event::SRQ_ERR, event::SRQ_LIMIT_REACHED]);
            }
            _ => {}
        }
    }

    /// An object is gone: what has happened to it is nobody's.
    fn forget_events(&mut self, cookie: Option<u64>, kinds: &[u32]) {
        self.happened.retain(|(element, kind)| Some(*element) != cookie || !kinds.contains(kind));
    }
}
