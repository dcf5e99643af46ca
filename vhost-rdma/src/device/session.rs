//! One connection of a VMM: the vhost-user side of a NIC.
//!
//! Three threads meet here. The *connection's* thread handles vhost-user messages, and the VMM's main loop waits for some of
//! the answers. The *queue* thread serves kicks: it parses control requests, resolves page lists, and waits for the worker.
//! The *worker* owns the objects and puts events. The first waits for the second and third for a bounded time; the third
//! never waits for anyone.
//!
//! Memory that comes and goes while a command is resolved: each memory table has a generation, and a command that was
//! resolved with an older one is resolved again instead of executed ([`Outcome::Stale`]).

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{VhostUserBackend, VringT};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::QueueT;
use virtio_rdma_abi::vq;
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use super::chain::{self, Chain, Taken};
use super::config;
use super::ctrl::{Controller, Executor, Outcome};
use super::events::{EventPort, NoPort};
use super::gate::Gate;
use super::memory::{self, MemoryError};
use super::nic::{JOB_TIMEOUT, Nic};
use super::queues::QueueKind;
use super::vring::{Memory, Vring};
use crate::engine::{Command, Status};
use crate::memory::AddressSpace;
use crate::worker::CallError;

/// The event that ends the queue thread. Above every queue index, as the framework requires.
pub(super) const EXIT_EVENT: u16 = u16::MAX;
/// Entries of a virtqueue, at most.
const QUEUE_SIZE: usize = 1024;
/// How long the stop of a queue may wait for a request or the worker: the VMM's main loop stands still meanwhile.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a command may take. A driver gives up after 5 seconds.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(4);

/// The guest's memory as the engine sees it.
#[derive(Debug, Default)]
struct Table {
    map: GuestMemoryMmap<()>,
    space: AddressSpace,
}

/// See the module.
pub(super) struct Session {
    nic: Arc<Nic>,
    exit: OwnedFd,
    gate: Gate,
    /// What the framework writes: a new table before we have seen it. Nothing is read through it.
    memory: Memory,
    /// What was found to be shared memory in whole: other files could hold whoever touches them up for ever.
    vetted: Memory,
    table: Mutex<Table>,
    generation: Arc<AtomicU64>,
    controller: Mutex<Controller>,
    /// The queues, known since the first event.
    vrings: OnceLock<()>,
    /// An offer of event buffers is on its way to the worker.
    offering: Arc<AtomicBool>,
    ring_broken: AtomicBool,
}

impl Session {
    /// A connection to `nic`.
    pub(super) fn new(nic: Arc<Nic>) -> io::Result<Self> {
        let exit = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let controller = Controller::new(nic.layout.kick_base());
        Ok(Self {
            nic,
            exit,
            gate: Gate::default(),
            memory: Memory::new(GuestMemoryMmap::new()),
            vetted: Memory::new(GuestMemoryMmap::new()),
            table: Mutex::default(),
            generation: Arc::default(),
            controller: Mutex::new(controller),
            vrings: OnceLock::new(),
            offering: Arc::default(),
            ring_broken: AtomicBool::new(false),
        })
    }

    /// Readable once the queue thread shall end.
    pub(super) const fn exit(&self) -> &OwnedFd {
        &self.exit
    }

    pub(super) fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// Ends everything that this connection made: no request is served any more, the NIC's objects are gone, and the queue thread
    /// ends.
    pub(super) fn end(&self) {
        if !self.gate.seal(STOP_TIMEOUT) {
            tracing::warn!(
                nic = self.nic.name,
                "a control request is still under way after the connection"
            );
        }
        let ended = self.nic.call(JOB_TIMEOUT, |shard, id, _| {
            shard.set_port(id, Box::new(NoPort));
            shard.reset(id);
        });
        if let Err(error) = ended {
            self.nic.failed(format!(
                "the objects of the last connection could not be destroyed: {error}"
            ));
        }
        // Nothing can go wrong with an eventfd of our own.
        let _ = rustix::io::write(&self.exit, &1u64.to_ne_bytes());
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_event(&self, index: u16, vrings: &[Vring]) {
        let vanished = crate::memory::vanished();
        self.dispatch(index, vrings);
        if vanished != crate::memory::vanished() {
            // The worker looks at the memory of its NICs in its next round, which it may be asleep before.
            self.nic.post(|_, _, _| ());
        }
    }

    fn dispatch(&self, index: u16, vrings: &[Vring]) {
        self.vrings.get_or_init(|| self.connect_events(vrings));
        match self.nic.layout.kind(index) {
            Some(QueueKind::Control) => {
                if let Some(vring) = vrings.get(usize::from(index)) {
                    self.serve_control(vring);
                }
            }
            Some(QueueKind::AsyncEvents | QueueKind::CompEvents) => self.offer_buffers(),
            Some(QueueKind::Kick) => self.nic.kick(),
            None => {}
        }
    }

    /// Gives the worker the event queues. They are not known before the first event.
    fn connect_events(&self, vrings: &[Vring]) {
        let queues = vrings.get(usize::from(vq::EVENT)..usize::from(self.nic.layout.kick_base()));
        let port = EventPort::new(
            queues.unwrap_or_default(),
            self.vetted.clone(),
            self.nic.stats.events.clone(),
        );
        self.nic.post(move |shard, id, _| shard.set_port(id, Box::new(port)));
    }

    /// Tells the engine of new event buffers; however many kicks there are, one job at a time is on its way.
    fn offer_buffers(&self) {
        if self.offering.swap(true, Ordering::AcqRel) {
            return;
        }
        let offering = self.offering.clone();
        self.nic.post(move |shard, id, _| {
            offering.store(false, Ordering::Release);
            shard.events_wanted(id);
        });
    }

    /// Serves what the control queue holds. Without the final look after `enable_notification` the driver's second kick
    /// would never come.
    fn serve_control(&self, vring: &Vring) {
        while let Some(pass) = self.gate.enter(|| vring.runs()) {
            if pass.first {
                self.begin(vring.queue_next_avail());
            }
            let memory = self.vetted.memory();
            let taken =
                chain::take(vring.get_mut().get_queue_mut(), &memory, chain::DESCRIPTORS_MAX);
            match taken {
                Taken::Chain(chain) => {
                    let len = self.answer(&chain);
                    // Stopped in spite of us: the guest's memory is no longer ours.
                    if !self.gate.is_open() {
                        return;
                    }
                    give_back(vring, &memory, chain.head, len);
                }
                Taken::Malformed(head) => give_back(vring, &memory, head, 0),
                Taken::Empty => {
                    let more = vring.get_mut().get_queue_mut().enable_notification(&*memory);
                    if !more.unwrap_or(false) {
                        return;
                    }
                }
                Taken::Broken => {
                    if !self.ring_broken.swap(true, Ordering::Relaxed) {
                        tracing::warn!(
                            nic = self.nic.name,
                            "the control ring makes no sense; waiting for a reset"
                        );
                    }
                    return;
                }
            }
        }
    }

    /// The control queue was started: at index 0 by a new driver, else after a pause.
    fn begin(&self, next_avail: u16) {
        self.ring_broken.store(false, Ordering::Relaxed);
        let begun = if next_avail == 0 {
            *self.controller() = Controller::new(self.nic.layout.kick_base());
            self.nic.call(COMMAND_TIMEOUT, |shard, id, _| shard.reset(id))
        } else {
            self.nic.call(COMMAND_TIMEOUT, |shard, id, _| shard.resume(id))
        };
        if let Err(error) = begun {
            self.nic.failed(format!("the device could not be started: {error}"));
        }
    }

    fn controller(&self) -> MutexGuard<'_, Controller> {
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one request and returns the length for the used ring.
    fn answer(&self, chain: &Chain) -> u32 {
        self.nic.stats.control_commands.fetch_add(1, Ordering::Relaxed);
        let max_mr_bytes = self.nic.max_mr_bytes();
        let response = self.controller().serve(self, chain.request(), chain.room(), max_mr_bytes);
        match response {
            Some(response) if self.gate.is_open() => {
                chain.respond(&self.vetted.memory(), response.bytes())
            }
            _ => 0,
        }
    }

    /// Takes a new memory table over, in the framework and in the engine.
    fn change_memory(&self, offered: &Memory) -> Result<(), MemoryError> {
        let mut table = self.table();
        let adopted = memory::adopt(&table.map, &offered.memory());
        let guarded = adopted.and_then(|map| {
            let space = table.space.successor(&map);
            if space.guarded() { Ok((map, space)) } else { Err(MemoryError::Unguarded) }
        });
        // What is refused is not touched either: the queues lose their memory as well.
        let (map, space, refusal) = match guarded {
            Ok((map, space)) => (map, space, None),
            Err(error) => (GuestMemoryMmap::new(), AddressSpace::default(), Some(error)),
        };
        for memory in [offered, &self.vetted] {
            memory.lock().unwrap_or_else(PoisonError::into_inner).replace(map.clone());
        }
        *table = Table { map, space: space.clone() };
        // Before the engine hears of it: a command resolved with the old table that comes later is stale.
        self.generation.fetch_add(1, Ordering::AcqRel);
        drop(table);
        if let Err(error) = self.follow_memory(space) {
            self.nic.failed(format!("the engine could not take over the guest's memory: {error}"));
        }
        refusal.map_or(Ok(()), Err)
    }

    /// Has the engine take the guest's memory over, in steps between which others are served.
    fn follow_memory(&self, space: AddressSpace) -> Result<(), CallError> {
        let mut change =
            self.nic.call(JOB_TIMEOUT, |shard, id, _| shard.memory_changed(id, space))?;
        loop {
            let (rest, more) = self.nic.call(JOB_TIMEOUT, move |shard, id, _| {
                let more = shard.follow_memory(id, &mut change);
                (change, more)
            })?;
            if !more {
                return Ok(());
            }
            change = rest;
        }
    }
}

/// Returns a chain to the driver and notifies it if it wants that.
fn give_back(vring: &Vring, memory: &GuestMemoryMmap<()>, head: u16, len: u32) {
    let mut state = vring.get_mut();
    let queue = state.get_queue_mut();
    // Refused is only a head that is not in the ring, which the driver cannot get back.
    let wanted = queue.add_used(memory, head, len).is_ok()
        && queue.needs_notification(memory).unwrap_or(true);
    drop(state);
    if wanted {
        vring.signal();
    }
}

impl Executor for Session {
    fn space(&self) -> (AddressSpace, u64) {
        let table = self.table();
        (table.space.clone(), self.generation.load(Ordering::Acquire))
    }

    fn execute(&self, generation: u64, ctx: u32, command: Command) -> Outcome {
        let (present, open) = (self.generation.clone(), self.gate.open_flag());
        // What an errand brought must not be lost: the NIC looks at what has become of it.
        let rest = matches!(command, Command::Finish(_));
        let outcome = self.nic.call(COMMAND_TIMEOUT, move |shard, id, now| {
            if !rest && !open.load(Ordering::Acquire) {
                return Outcome::Done(Err(Status::STATE));
            }
            if !rest && present.load(Ordering::Acquire) != generation {
                return Outcome::Stale;
            }
            Outcome::Done(shard.execute(id, ctx, command, now))
        });
        outcome.unwrap_or(Outcome::Done(Err(Status::FATAL)))
    }
}

impl VhostUserBackend for Session {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        self.nic.layout.total().into()
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    /// Without `CONFIGURE_MEM_SLOTS` the VMM would send the whole table for each change.
    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    /// One thread for all queues.
    fn queues_per_thread(&self) -> Vec<u64> {
        vec![u64::MAX]
    }

    /// The framework tells each queue itself.
    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        config::read(&self.nic.config_space, offset, size)
    }

    fn update_memory(&self, memory: Memory) -> io::Result<()> {
        self.change_memory(&memory).map_err(|error| {
            self.nic.failed(error.to_string());
            io::Error::other(error)
        })
    }

    fn stop_vring(&self, queue_index: u32) -> io::Result<()> {
        // Queues of events are locked by the worker for each event and found not ready from now on.
        if queue_index != u32::from(vq::CONTROL) {
            return Ok(());
        }
        if !self.gate.close(STOP_TIMEOUT) {
            tracing::warn!(
                nic = self.nic.name,
                "a control request is still under way while its queue is stopped"
            );
        }
        let pause = || self.nic.call(STOP_TIMEOUT, |shard, id, _| shard.pause(id));
        loop {
            match pause() {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    self.nic.failed(format!("the device could not be stopped: {error}"));
                    return Err(io::Error::other(error));
                }
            }
        }
    }

    /// Only [`EXIT_EVENT`] returns an error, which ends the calling thread.
    fn handle_event(
        &self,
        device_event: u16,
        _evset: EventSet,
        vrings: &[Vring],
        _thread_id: usize,
    ) -> io::Result<()> {
        if device_event == EXIT_EVENT {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if catch_unwind(AssertUnwindSafe(|| self.on_event(device_event, vrings))).is_err() {
            self.nic.failed("the device had a fault".to_owned());
            self.nic.post(|shard, id, _| shard.fail(id));
        }
        Ok(())
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("nic", &self.nic.name).finish_non_exhaustive()
    }
}
