//! One NIC's processes: who is there, the memory map that their windows make, and the life of the
//! device that they share.
//!
//! To the engine the house is a driver: it begins a life when the first process comes, sets the
//! NIC's addresses, and owns the status page. A process gets that page to read: the file is sealed
//! so that nobody maps it for writing any more once the house has.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use virtio_rdma_abi::status_page;

use super::cm::Manager;
use super::events::{Bell, ProcessPort, Routes};
use super::memory::WINDOWS;
use crate::device::memory::{self, MemoryError, Offer};
use crate::device::nic::{self, Nic, PATIENCE};
use crate::link::Gid;
use crate::memory::{AddressSpace, Mapping, MappingError, PAGE_SIZE, Region, Ring};
use crate::nic::{Command, Reply, Status, Step};
use crate::node::{AttachError, NicConfig};
use crate::worker::Progress;

/// Regions of memory that all processes of a NIC have together.
const REGIONS: usize = 4096;
/// Completion channels and channels of the connection manager that they have together: each is a
/// descriptor of this process, which serves all NICs of a network.
const CHANNELS: u32 = 4096;
/// How long sessions may take to end with their NIC. Who asks for that serves all others as well,
/// and a session's thread may be in the middle of closing what its process has sent.
const ENDING: Duration = Duration::from_secs(2);

/// Why a process is not let in.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotIn {
    /// There are as many as there may be.
    #[error("the NIC has as many processes as it may (max_contexts)")]
    Full,
    #[error("the NIC ends")]
    Ending,
    /// The host lacks something.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// One of the channels that all processes of a NIC may have. It is given back with it.
#[derive(Debug)]
pub(super) struct ChannelPlace(Arc<AtomicU32>);

impl Drop for ChannelPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The status page, from INIT on.
#[derive(Debug)]
struct StatusPage {
    file: File,
    /// What `ALIVE` is in it.
    alive: u32,
}

#[derive(Debug, Default)]
struct State {
    status_page: Option<StatusPage>,
    /// By window.
    sessions: BTreeMap<u64, Visitor>,
    /// The window that was given last.
    last: u64,
    max_contexts: u32,
    gids: Vec<Gid>,
    closing: bool,
}

/// A process that has a place.
#[derive(Debug)]
struct Visitor {
    stream: UnixStream,
    /// What wakes its session, as soon as there is one.
    bell: Option<Bell>,
}

/// See the module.
pub(crate) struct House {
    pub(super) nic: Arc<Nic>,
    pub(super) routes: Arc<Routes>,
    mac: [u8; 6],
    /// The connection manager.
    pub(super) cm: Manager,
    state: Mutex<State>,
    left: Condvar,
    /// Threads that part with processes which were turned away.
    partings: Arc<AtomicU32>,
    /// Processes that were turned away while the host had no thread.
    left_over: Mutex<Vec<UnixStream>>,
    /// Held while a command is carried out: the engine has one of a NIC under way, as a driver's
    /// queue has, and some go in steps.
    commands: Mutex<()>,
    /// What all windows are together.
    space: Mutex<AddressSpace>,
    /// Channels that there are.
    channels: Arc<AtomicU32>,
}

/// The link-local address that a MAC address makes (RFC 4291, appendix A).
fn link_local(mac: [u8; 6]) -> Gid {
    let [a, b, c, d, e, f] = mac;
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

/// The table of addresses: those that the NIC was given, and its link's own.
fn gids(config: &NicConfig) -> Vec<Gid> {
    let own = link_local(config.mac.octets());
    let given = config.addresses.iter().map(|address| nic::gid(*address));
    given.filter(|gid| *gid != own).chain([own]).collect()
}

/// A page that its makers write and everybody else reads.
fn status_memory() -> io::Result<(File, Mapping)> {
    let file = File::from(memfd_create(
        "vhost-rdma-status",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.set_len(PAGE_SIZE)?;
    let mapping = Mapping::of_file(file.try_clone()?, 0, PAGE_SIZE).map_err(io::Error::other)?;
    // Mappings that exist stay writable; no other will be (memfd_create(2), F_SEAL_FUTURE_WRITE).
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    fcntl_add_seals(&file, all)?;
    Ok((file, mapping))
}

impl House {
    /// That of a NIC without processes.
    pub(crate) fn new(config: &NicConfig, nic: Arc<Nic>) -> Result<Self, AttachError> {
        let state = State {
            max_contexts: config.limits.max_contexts,
            gids: gids(config),
            ..State::default()
        };
        let space = AddressSpace::of(nic.account().clone());
        let [.., a, b, c, d, e, f, g, h] = link_local(config.mac.octets());
        let cm = Manager::start(nic.clone(), [a, b, c, d, e, f, g, h], state.gids.clone());
        let cm = cm.map_err(|source| AttachError::Io {
            action: "start a connection manager".to_owned(),
            source,
        })?;
        Ok(Self {
            nic,
            cm,
            routes: Arc::default(),
            mac: config.mac.octets(),
            state: Mutex::new(state),
            left: Condvar::new(),
            partings: Arc::default(),
            left_over: Mutex::default(),
            commands: Mutex::default(),
            space: Mutex::new(space),
            channels: Arc::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn space(&self) -> MutexGuard<'_, AddressSpace> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) const fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// The status page's file, and what `ALIVE` is in it.
    pub(super) fn status(&self) -> Option<(File, u32)> {
        let state = self.state();
        let page = state.status_page.as_ref()?;
        Some((page.file.try_clone().ok()?, page.alive))
    }

    /// Entries of the table of addresses.
    pub(super) fn gids(&self) -> Vec<Gid> {
        self.state().gids.clone()
    }

    /// Threads that part with processes which were turned away.
    pub(super) const fn partings(&self) -> &Arc<AtomicU32> {
        &self.partings
    }

    /// Room for one channel more, if there is any.
    pub(super) fn channel_place(&self) -> Option<ChannelPlace> {
        let more = |count: u32| (count < CHANNELS).then_some(count + 1);
        self.channels.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(ChannelPlace(self.channels.clone()))
    }

    /// Keeps a process that was turned away for a thread that has the time to close its socket.
    pub(super) fn leave_to_others(&self, process: UnixStream) {
        self.left_over.lock().unwrap_or_else(PoisonError::into_inner).push(process);
    }

    /// Takes those.
    pub(super) fn left_over(&self) -> Vec<UnixStream> {
        std::mem::take(&mut *self.left_over.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A place for a process: its window. Whoever serves it there gives it back ([`Self::leave`]).
    ///
    /// # Errors
    /// See [`NotIn`].
    pub(super) fn admit(&self, process: &UnixStream) -> Result<u64, NotIn> {
        let mut state = self.state();
        if state.closing {
            return Err(NotIn::Ending);
        }
        if state.sessions.len() >= state.max_contexts as usize {
            return Err(NotIn::Full);
        }
        let own = process.try_clone()?;
        if state.sessions.is_empty() {
            self.begin(&mut state)?;
        }
        // A window rests before it comes back; a live one is skipped.
        let mut window = state.last;
        loop {
            window = window % (WINDOWS - 1) + 1;
            if !state.sessions.contains_key(&window) {
                break;
            }
        }
        state.last = window;
        state.sessions.insert(window, Visitor { stream: own, bell: None });
        Ok(window)
    }

    /// The process is served, if it is still there; `bell` wakes its session.
    pub(super) fn entered(&self, window: u64, bell: Bell) {
        let mut state = self.state();
        let closing = state.closing;
        if let Some(visitor) = state.sessions.get_mut(&window) {
            if closing {
                bell.ring();
            }
            visitor.bell = Some(bell);
            self.nic.connected();
        }
    }

    /// Whether all sessions are to end.
    pub(super) fn is_closing(&self) -> bool {
        self.state().closing
    }

    /// A process is gone, and nothing of it is left.
    pub(super) fn leave(&self, window: u64) {
        let mut state = self.state();
        // Closed when nobody waits for the state any more.
        let visitor = state.sessions.remove(&window);
        if state.sessions.is_empty() {
            self.nic.disconnected();
        }
        drop(state);
        self.left.notify_all();
        drop(visitor);
    }

    /// Has the worker carry a command of a context out, and waits for it.
    pub(super) fn execute(&self, ctx: u32, command: Command) -> Result<Reply, Status> {
        let _turn = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        let mut command = command;
        loop {
            let mut begins = Some(command);
            let done = self.nic.call_in_steps(PATIENCE, move |shard, id, now| {
                match shard.execute(id, ctx, begins.take().unwrap_or(Command::Continue), now) {
                    Ok(Step::More) => Progress::More,
                    step => Progress::Done(step),
                }
            });
            let step = done.unwrap_or_else(|error| {
                self.nic.failed(format!("a command of a process was not carried out: {error}"));
                Err(Status::FATAL)
            })?;
            command = match step {
                Step::Done(reply) => return Ok(reply),
                Step::Blocking(job) => job.run(),
                Step::More => Command::Continue,
            };
        }
    }

    /// The first process comes: a new life, in which nothing is left of an earlier one.
    fn begin(&self, state: &mut State) -> io::Result<()> {
        let (status, mapping) = status_memory()?;
        let mut nonce = [0; 8];
        crate::random::fill(&mut nonce)?;
        // Not zero, as that would say that the device is lost.
        let alive = u32::from_le_bytes([nonce[0], nonce[1], nonce[2], nonce[3]]) | 1;
        let mut space = self.space();
        let page = Region::new(0, Arc::new(mapping)).map_err(io::Error::other)?;
        let begun = AddressSpace::of(self.nic.account().clone())
            .with(vec![page])
            .map_err(io::Error::other)?;
        let fault = |_| io::Error::other("the status page cannot be had");
        let ring = Ring::page(&begun, 0).map_err(fault)?;
        ring.store_u32(status_page::ALIVE as u64, alive);
        *space = begun.clone();
        drop(space);
        let port = ProcessPort::new(self.routes.clone(), self.cm.inbox());
        let gids = state.gids.clone();
        let done = self.nic.call(PATIENCE, move |shard, id, now| {
            // Also a NIC that failed begins anew so.
            shard.reset(id);
            shard.set_port(id, Box::new(port));
            let init = Command::Init { space: begun, status_page: ring };
            // A NIC in software has nothing that blocks.
            let Step::Done(_) = shard.execute(id, 0, init, now)? else {
                return Err(Status::NOTSUPP);
            };
            for (index, gid) in (0u16..).zip(gids) {
                // One that another NIC holds meanwhile is not there.
                let _ = shard.set_gid(id, index, Some(gid));
            }
            Ok::<(), Status>(())
        });
        match done {
            Ok(Ok(())) => {}
            Ok(Err(status)) => {
                return Err(io::Error::other(format!("the device does not begin: {}", status.0)));
            }
            Err(error) => return Err(io::Error::other(error)),
        }
        state.status_page = Some(StatusPage { file: status, alive });
        Ok(())
    }

    /// Takes changed limits and addresses over.
    pub(crate) fn update(&self, config: &NicConfig) {
        let mut state = self.state();
        state.max_contexts = config.limits.max_contexts;
        let before = std::mem::replace(&mut state.gids, gids(config));
        if before == state.gids {
            return;
        }
        self.cm.set_addresses(state.gids.clone());
        let (after, most) = (state.gids.clone(), before.len().max(state.gids.len()));
        let idle = state.sessions.is_empty();
        drop(state);
        if idle {
            return;
        }
        // No command, since a process may have one under way.
        self.nic.post(move |shard, id, _| {
            for (index, entry) in (0u16..).zip(0..most) {
                let _ = shard.set_gid(id, index, after.get(entry).copied());
            }
        });
    }

    /// Ends all sessions, and takes no other in. A process hears of it when its objects are gone:
    /// it takes its memory back as soon as it knows.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closing = true;
        for visitor in state.sessions.values() {
            match &visitor.bell {
                Some(bell) => bell.ring(),
                // It has no objects yet.
                None => drop(visitor.stream.shutdown(Shutdown::Both)),
            }
        }
        let there = |state: &mut State| !state.sessions.is_empty();
        let waited = self.left.wait_timeout_while(state, ENDING, there);
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            tracing::error!(nic = self.nic.name, "a process's session does not end");
        }
        self.cm.finish();
    }

    /// Tells those whose sessions did not end in time. The NIC's objects are gone by now.
    pub(crate) fn hang_up(&self) {
        for visitor in self.state().sessions.values() {
            let _ = visitor.stream.shutdown(Shutdown::Both);
        }
    }

    /// Plugs a process's memory in; its own map that follows `own`.
    pub(super) fn plug(&self, own: &AddressSpace, offer: Offer) -> Result<AddressSpace, Status> {
        let mut space = self.space();
        if space.regions().len() >= REGIONS {
            return Err(Status::NOMEM);
        }
        let others = space.bytes().saturating_sub(own.bytes());
        let most = self.nic.max_guest_bytes().saturating_sub(others);
        let start = offer.start;
        let next = memory::plug(own, offer, most).map_err(|error| {
            tracing::debug!(nic = self.nic.name, %error, "memory of a process is refused");
            match error {
                MemoryError::FileSystem(_) => Status::PERM,
                // Of a descriptor that is only read, or a file that is sealed against writing.
                MemoryError::Mapping {
                    source: MappingError::Host(Errno::ACCESS | Errno::PERM),
                    ..
                } => Status::PERM,
                MemoryError::Slots | MemoryError::TooMuch(_) => Status::NOMEM,
                MemoryError::Table(_) => Status::EXIST,
                _ => Status::INVAL,
            }
        })?;
        let region = next.region_at(start).cloned().ok_or(Status::FAULT)?;
        // After the process's own: what all may keep goes by this one.
        *space = space.plug(region).map_err(|_| Status::EXIST)?;
        self.follow(space.clone());
        Ok(next)
    }

    /// Takes a region of a process out of the map.
    pub(super) fn unplug(
        &self,
        own: &AddressSpace,
        (start, len): (u64, u64),
    ) -> Result<AddressSpace, Status> {
        let mut space = self.space();
        let next = own.unplug(start, len).map_err(|_| Status::NOENT)?;
        *space = space.unplug(start, len).map_err(|_| Status::NOENT)?;
        self.follow(space.clone());
        Ok(next)
    }

    /// Takes all that a process has out of the map.
    pub(super) fn forget(&self, own: &AddressSpace) {
        if own.regions().is_empty() {
            return;
        }
        let mut space = self.space();
        let rest = space.regions().iter().filter(|region| !own.contains(region)).cloned();
        match space.with(rest.collect()) {
            Ok(next) => *space = next,
            Err(error) => tracing::error!(%error, "the memory map cannot shrink"),
        }
        self.follow(space.clone());
    }

    /// Has the engine take the map over, in steps between which others are served.
    fn follow(&self, space: AddressSpace) {
        let mut space = Some(space);
        let done = self.nic.call_in_steps(PATIENCE, move |shard, id, _| {
            if let Some(space) = space.take() {
                shard.memory_changed(id, space);
            }
            if shard.follow_memory(id) { Progress::More } else { Progress::Done(()) }
        });
        if let Err(error) = done {
            self.nic.failed(format!("the engine could not take over the memory map: {error}"));
        }
    }
}

impl std::fmt::Debug for House {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("House").field("nic", &self.nic.name).finish_non_exhaustive()
    }
}
