//! One connection of a VMM: the vhost-user side of a NIC.
//!
//! Three threads meet here. The *connection's* thread handles vhost-user messages, and the VMM's
//! main loop waits for some of the answers. The *queue* thread (`kicks`) serves kicks: it parses
//! control requests, resolves page lists, and waits for the worker. The *worker* owns the objects
//! and puts events. The first waits for the second and third for a bounded time; the third never
//! waits for anyone.
//!
//! Memory that comes and goes while a command is resolved: each memory table has a generation, and
//! a command that was resolved with an older one is resolved again instead of executed
//! ([`Outcome::Stale`]).

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockResult};
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Error as QueueError, Queue, QueueT};
use virtio_rdma_abi::vq;
use vm_memory::{GuestAddress, GuestAddressSpace};

use super::chain::{self, Chain, Taken};
use super::config;
use super::ctrl::{Controller, Executor, Outcome};
use super::events::{EventPort, NoPort};
use super::gate::Gate;
use super::memory::MemoryError;
use super::nic::{DirectKick, Nic, PATIENCE};
use super::notifier::Notifier;
use super::queues::QueueKind;
use super::vring::{Memory, Vring};
use crate::memory::AddressSpace;
use crate::nic::{Command, Reply, Status, Step};
use crate::panics::contained;
use crate::watch::Watch;
use crate::worker::{CallError, Progress};

/// Entries of a virtqueue, at most.
pub(super) const QUEUE_SIZE: u16 = 1024;
/// How long a KEEPALIVE waits for the worker.
const KEEPALIVE_WAIT: Duration = Duration::from_secs(1);

/// See the module.
pub(crate) struct Session {
    nic: Arc<Nic>,
    gate: Gate,
    /// The guest's memory, for the queues.
    memory: Memory,
    /// The same, for who resolves page lists, under the lock that changes it.
    space: Mutex<AddressSpace>,
    generation: Arc<AtomicU64>,
    controller: Mutex<Controller>,
    /// What tells the VMM of events, since the first kick.
    notifier: OnceLock<Notifier>,
    /// Starts the threads that there are now and then.
    watch: Arc<Watch>,
    /// An offer of event buffers is on its way to the worker.
    offering: Arc<AtomicBool>,
    ring_broken: AtomicBool,
    /// What the guest had was in another process, which has ended; until there is a new driver.
    lost: AtomicBool,
    /// The control queue runs on from there, and is not new.
    continued: AtomicBool,
    /// Held while a message of the VMM is dealt with; for ever, once the session is another's.
    messages: Mutex<()>,
}

impl Session {
    /// A connection to `nic`.
    pub(super) fn new(nic: Arc<Nic>, watch: Arc<Watch>) -> Self {
        let controller = Controller::new(nic.layout.kick_base());
        let space = AddressSpace::of(nic.account().clone());
        Self {
            nic,
            gate: Gate::default(),
            memory: Memory::new(space.clone()),
            space: Mutex::new(space),
            generation: Arc::default(),
            controller: Mutex::new(controller),
            notifier: OnceLock::new(),
            watch,
            offering: Arc::default(),
            ring_broken: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            continued: AtomicBool::new(false),
            messages: Mutex::default(),
        }
    }

    /// Whose it is.
    pub(super) const fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    /// This session was begun by a process that has ended, and took the guest's objects with it.
    /// The control queue may have been running.
    pub(super) fn take_up(&self, running: bool) {
        self.lost.store(true, Ordering::Release);
        self.continued.store(running, Ordering::Release);
    }

    /// No message of the VMM is dealt with while this is held.
    pub(super) fn messages(&self) -> MutexGuard<'_, ()> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, if none is.
    pub(super) fn try_messages(&self) -> TryLockResult<MutexGuard<'_, ()>> {
        self.messages.try_lock()
    }

    /// Serves no request of the guest any more; false if one is not over until then.
    pub(super) fn rest(&self, until: Instant) -> bool {
        self.gate.seal();
        let rests = self.gate.wait_idle(until.saturating_duration_since(Instant::now()));
        if !rests {
            self.gate.leave();
        }
        rests
    }

    /// Whether the guest's device is lost, and it was told or will be.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// What the guest's driver has agreed on.
    pub(super) fn agreed(&self) -> (Option<u64>, u64) {
        self.controller().agreed()
    }

    /// The guest's driver goes on: nothing is lost.
    pub(super) fn continue_as(&self, controller: Controller) {
        *self.controller() = controller;
        self.lost.store(false, Ordering::Release);
    }

    /// The guest's memory.
    pub(super) fn memory(&self) -> AddressSpace {
        self.space().clone()
    }

    /// Ends everything that this connection made: no request is served any more, and the NIC's
    /// objects are gone.
    pub(super) fn end(&self) {
        self.gate.seal();
        if !self.settle() {
            self.gate.leave();
            tracing::warn!(
                nic = self.nic.name,
                "a control request is still under way after the connection"
            );
        }
        let ended = self.nic.call(PATIENCE, |shard, id, _| {
            shard.set_port(id, Box::new(NoPort));
            shard.reset(id);
        });
        if let Err(error) = ended {
            self.nic.failed(format!(
                "the objects of the last connection could not be destroyed: {error}"
            ));
        }
    }

    /// Tells the VMM nothing any more. By whoever undoes the connection, and not by who lets go of
    /// the session last: it takes as long as the VMM has waiters.
    pub(super) fn tell_nothing(&self) {
        if let Some(notifier) = self.notifier.get() {
            notifier.end();
        }
    }

    fn space(&self) -> MutexGuard<'_, AddressSpace> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what touches the guest's memory on a thread of the connection, and has the worker look
    /// if some of it vanished meanwhile: it does so in its next round, which it may be asleep
    /// before.
    pub(super) fn touching<R>(&self, work: impl FnOnce() -> R) -> R {
        let vanished = crate::memory::vanished();
        let result = work();
        if vanished != crate::memory::vanished() {
            self.nic.post(|_, _, _| ());
        }
        result
    }

    fn dispatch(&self, index: u16, vrings: &[Vring]) {
        self.notifier.get_or_init(|| self.connect_events(vrings));
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
    fn connect_events(&self, vrings: &[Vring]) -> Notifier {
        let told = vrings.get(..usize::from(self.nic.layout.kick_base())).unwrap_or_default();
        let queues = told.get(usize::from(vq::EVENT)..).unwrap_or_default();
        let notifier = Notifier::new(told.to_vec(), self.nic.trust.clone(), self.watch.clone());
        self.nic.trust.begin();
        let told = (notifier.bell(), self.nic.trust.clone());
        let port = EventPort::new(queues, self.memory.clone(), told);
        let lost = self.continued.load(Ordering::Acquire) && self.lost.load(Ordering::Acquire);
        self.nic.post(move |shard, id, _| {
            shard.set_port(id, Box::new(port));
            if lost {
                // It waits for the queue of events, which may be taken up later than this one.
                shard.lost(id);
            }
        });
        notifier
    }

    /// Tells the engine of new event buffers; however many kicks there are, one job at a time is on
    /// its way.
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

    /// Serves what the control queue holds. Without the final look after `enable_notification` the
    /// driver's second kick would never come.
    fn serve_control(&self, vring: &Vring) {
        while let Some(pass) = self.gate.enter(|| vring.runs()) {
            if pass.first {
                self.begin(vring);
            }
            let memory = self.memory.memory();
            let taken = chain::take(vring.lock().queue(), &memory, chain::DESCRIPTORS_MAX);
            match taken {
                Taken::Chain(chain) => {
                    let len = self.answer(&chain);
                    // Cut, and found again elsewhere; or stopped in spite of us, and the guest's
                    // memory is no longer ours.
                    if !self.gate.answers() {
                        return;
                    }
                    self.give_back(vring, &memory, (chain.head, len));
                }
                Taken::Malformed(head) => self.give_back(vring, &memory, (head, 0)),
                Taken::Empty => {
                    let more = vring.lock().queue().enable_notification(&*memory);
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

    /// Returns a chain of the control queue to the driver and notifies it if it wants that.
    fn give_back(&self, vring: &Vring, memory: &AddressSpace, (head, len): (u16, u32)) {
        let mut state = vring.lock();
        let queue = state.queue();
        // Refused is only a head that is not in the ring, which the driver cannot get back.
        let wanted = queue.add_used(memory, head, len).is_ok()
            && queue.needs_notification(memory).unwrap_or(true);
        drop(state);
        if wanted {
            self.tell(vring);
        }
    }

    /// Tells the VMM of an answer: at once, unless it is to be left alone for a while (`trust`).
    fn tell(&self, vring: &Vring) {
        match self.notifier.get() {
            Some(notifier) if self.nic.trust.rest().is_some() => {
                notifier.bell().ring(usize::from(vq::CONTROL));
            }
            _ => self.nic.trust.watch(|| vring.signal()).0,
        }
    }

    /// The control queue was started: after a pause, or at index 0, where the first request tells
    /// whether it is by a new driver.
    fn begin(&self, vring: &Vring) {
        let next_avail = vring.lock().queue().next_avail();
        self.ring_broken.store(false, Ordering::Relaxed);
        if self.continued.swap(false, Ordering::AcqRel) {
            return;
        }
        if next_avail == 0 {
            self.lost.store(false, Ordering::Release);
        }
        // A driver whose machine was paused before it was told of its last answer is told now.
        if next_avail != 0 {
            self.tell(vring);
        }
        let begun = if next_avail == 0 {
            self.begin_anew()
        } else {
            self.nic.call(PATIENCE, |shard, id, _| shard.resume(id))
        };
        self.begun(begun);
    }

    /// What has failed is over; what lives stands still, as since the queue was stopped.
    fn begin_anew(&self) -> Result<(), CallError> {
        let has_failed = self.nic.call(PATIENCE, |shard, id, _| {
            let failed = shard.status(id).is_some_and(|nic| nic.failed);
            if failed {
                shard.reset(id);
            }
            failed
        })?;
        if has_failed {
            *self.controller() = Controller::new(self.nic.layout.kick_base());
            return Ok(());
        }
        self.controller().suspend();
        self.stand_still()
    }

    fn stand_still(&self) -> Result<(), CallError> {
        self.nic.call_in_steps(PATIENCE, |shard, id, _| {
            if shard.pause(id) { Progress::More } else { Progress::Done(()) }
        })
    }

    fn begun(&self, begun: Result<(), CallError>) {
        if let Err(error) = begun {
            self.nic.failed(format!("the device could not be started: {error}"));
        }
    }

    /// Waits until no request is under way; false if one still is and neither it nor the worker
    /// goes on.
    fn settle(&self) -> bool {
        loop {
            let turns = self.nic.turns();
            if self.gate.wait_idle(PATIENCE) {
                return true;
            }
            if turns == self.nic.turns() {
                return false;
            }
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
            Some(response) if self.gate.answers() => {
                chain.respond(&self.memory.memory(), response.bytes())
            }
            _ => 0,
        }
    }

    /// How much memory the VMM may share.
    pub(super) fn max_guest_bytes(&self) -> u64 {
        self.nic.max_guest_bytes()
    }

    /// Takes the memory over that follows the present one, in the queues and in the engine. What is
    /// refused changes nothing.
    pub(super) fn change_memory(
        &self,
        follow: impl FnOnce(&AddressSpace) -> Result<AddressSpace, MemoryError>,
    ) -> Result<(), MemoryError> {
        let mut present = self.space();
        let next = follow(&present).inspect_err(|error| self.nic.failed(error.to_string()))?;
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.replace(next.clone());
        // It ends with the last translation that uses it, and not here, where nobody else gets at
        // the memory meanwhile.
        let old = std::mem::replace(&mut *present, next.clone());
        // Before the engine hears of it: a command resolved with the old table that comes later is
        // stale.
        self.generation.fetch_add(1, Ordering::AcqRel);
        drop(present);
        drop(old);
        if let Err(error) = self.follow_memory(next) {
            self.nic.failed(format!("the engine could not take over the guest's memory: {error}"));
        }
        Ok(())
    }

    /// Has the engine take the guest's memory over, in steps between which others are served.
    fn follow_memory(&self, space: AddressSpace) -> Result<(), CallError> {
        let mut space = Some(space);
        self.nic.call_in_steps(PATIENCE, move |shard, id, _| {
            if let Some(space) = space.take() {
                shard.memory_changed(id, space);
            }
            if shard.follow_memory(id) { Progress::More } else { Progress::Done(()) }
        })
    }
}

impl Executor for Session {
    fn space(&self) -> (AddressSpace, u64) {
        let space = Self::space(self);
        (space.clone(), self.generation.load(Ordering::Acquire))
    }

    fn execute(&self, generation: u64, ctx: u32, command: Command) -> Outcome {
        if matches!(command, Command::Init { .. }) {
            self.lost.store(false, Ordering::Release);
        }
        if self.lost.load(Ordering::Acquire) {
            return Outcome::Done(Err(Status::FATAL));
        }
        let (present, request) = (self.generation.clone(), self.gate.under_way());
        // What a blocking job brought must not be lost: the NIC looks at what has become of it.
        let rest = matches!(command, Command::Continue);
        let asks = matches!(command, Command::Keepalive);
        let patience = if asks { KEEPALIVE_WAIT } else { PATIENCE };
        let mut begins = Some(command);
        let outcome = self.nic.call_in_steps(patience, move |shard, id, now| {
            // Also what has begun: it may move what lies in guest memory.
            // What a command brings ends on this thread, however it ends.
            if !rest && request.ends() {
                return Progress::Done((Outcome::Done(Err(Status::STATE)), begins.take()));
            }
            if begins.is_some() && !rest && present.load(Ordering::Acquire) != generation {
                return Progress::Done((Outcome::Stale, begins.take()));
            }
            match shard.execute(id, ctx, begins.take().unwrap_or(Command::Continue), now) {
                Ok(Step::More) => Progress::More,
                result => Progress::Done((Outcome::Done(result), None)),
            }
        });
        match outcome {
            Ok((outcome, _unused)) => outcome,
            // Is the device there? It is, only late, and that is none of this guest's doing. Had
            // the NIC failed, an event says so.
            Err(CallError::Timeout) if asks && self.nic.worker_stalled() < PATIENCE => {
                Outcome::Done(Ok(Step::Done(Reply::Done)))
            }
            Err(_) => Outcome::Done(Err(Status::FATAL)),
        }
    }

    fn decide(&self, goes_on: bool) {
        self.begun(self.nic.call(PATIENCE, move |shard, id, _| match goes_on {
            true => shard.resume(id),
            false => shard.reset(id),
        }));
    }
}

/// What a connection's messages ask for (`frontend`).
impl Session {
    /// Virtio features, with the one bit of vhost-user's own.
    pub(super) const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        | 1 << VIRTIO_RING_F_EVENT_IDX
        | Self::LATER_FEATURES
        | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

    /// Of the bits that are this device's none is defined (docs/virtio-rdma.md §3).
    #[cfg(not(feature = "later-device"))]
    const LATER_FEATURES: u64 = 0;
    #[cfg(feature = "later-device")]
    const LATER_FEATURES: u64 = super::ctrl::later::FEATURE;

    /// Without `CONFIGURE_MEM_SLOTS` the VMM would send the whole table for each change.
    pub(super) const PROTOCOL_FEATURES: VhostUserProtocolFeatures =
        VhostUserProtocolFeatures::CONFIG
            .union(VhostUserProtocolFeatures::MQ)
            .union(VhostUserProtocolFeatures::REPLY_ACK)
            .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

    /// Has the worker hear the kicks of a kick queue; `None` for other queues, or where they come
    /// better by the queue thread.
    pub(super) fn watch_kick(&self, index: u32, kick: &File) -> Option<DirectKick> {
        let kind = u16::try_from(index).ok().and_then(|index| self.nic.layout.kind(index));
        if kind == Some(QueueKind::Kick) { self.nic.watch_kick(kick) } else { None }
    }

    /// How far the used ring at `used` has come: no message tells.
    pub(super) fn used_index(&self, used: u64) -> Result<u16, QueueError> {
        let mut queue = Queue::new(QUEUE_SIZE)?;
        queue.try_set_used_ring_address(GuestAddress(used))?;
        let memory = self.memory.memory();
        self.touching(|| queue.used_idx(&*memory, Ordering::Acquire)).map(|index| index.0)
    }

    /// Bytes of the configuration space.
    pub(super) fn config(&self, offset: u32, size: u32) -> Vec<u8> {
        config::read(&self.nic.config_space, offset, size)
    }

    /// A queue shall not be served any more.
    pub(super) fn stop_vring(&self, queue_index: u32) -> io::Result<()> {
        // Queues of events are locked by the worker for each event and found not ready from now on.
        if queue_index != u32::from(vq::CONTROL) {
            return Ok(());
        }
        // The answer says that the guest's memory is not touched any more. So it waits for as long
        // as the worker goes on; the VMM's main loop stands still meanwhile, which costs its guest
        // less than a NIC.
        self.gate.close();
        self.continued.store(false, Ordering::Release);
        if !self.settle() {
            self.gate.leave();
            let why = "a control request is still under way";
            self.nic.failed(format!("the device could not be stopped: {why}"));
            return Err(io::Error::other(why));
        }
        // However many others the worker has to serve first: a VMM that was told of an error would
        // give the guest up.
        self.stand_still().map_err(|error| {
            self.nic.failed(format!("the device could not be stopped: {error}"));
            io::Error::other(error)
        })
    }

    /// Queue `index` was kicked, or is new.
    pub(super) fn handle(&self, index: u64, vrings: &[Vring]) {
        let Ok(index) = u16::try_from(index) else { return };
        if contained(|| self.touching(|| self.dispatch(index, vrings))).is_err() {
            self.nic.failed("the device had a fault".to_owned());
            self.nic.post(|shard, id, _| shard.fail(id));
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("nic", &self.nic.name).finish_non_exhaustive()
    }
}

mod saved;
#[cfg(test)]
mod tests;
