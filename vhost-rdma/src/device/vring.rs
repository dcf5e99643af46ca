//! A virtqueue whose file descriptors never block.
//!
//! The framework's own type reads the kick descriptor and writes the call descriptor while it holds the queue's lock. Both
//! descriptors come from the VMM; one that blocks would hold up the worker thread, and with it every other NIC. So they must be
//! eventfds, on which nothing else can block, the framework never gets the call descriptor, and both are used without the
//! queue's lock and by calls that do not wait, whatever the VMM does to the descriptors' flags meanwhile (`signal`).
//!
//! The kick descriptors of kick queues go straight to the worker that sleeps on them, which saves each kick the way through
//! the queue thread; that thread gets a stand-in that is never signalled.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use vhost_user_backend::{VringMutex, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{Error, QueueT};
use vm_memory::GuestMemoryAtomic;

use crate::memory::AddressSpace;
use crate::signal;
use crate::worker::{WatchedKick, WorkerHandle};

/// The memory of one guest, as it is swapped.
pub(super) type Memory = GuestMemoryAtomic<AddressSpace>;

/// See the module.
#[derive(Clone)]
pub(super) struct Vring {
    inner: VringMutex<Memory>,
    route: Option<Arc<KickRoute>>,
    /// Our copies of the VMM's descriptors.
    kick: Slot,
    call: Slot,
}

/// A descriptor that may be replaced at any time.
type Slot = Arc<Mutex<Option<Arc<File>>>>;

fn held(slot: &Slot) -> Option<Arc<File>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn replace(slot: &Slot, file: Option<File>) {
    *slot.lock().unwrap_or_else(PoisonError::into_inner) = file.map(Arc::new);
}

/// How the kicks of one queue reach a worker.
#[derive(Debug)]
pub(super) struct KickRoute {
    worker: WorkerHandle,
    counter: Arc<AtomicU64>,
    watched: Mutex<Option<WatchedKick>>,
}

impl KickRoute {
    /// To `worker`, which counts the kicks.
    pub(super) fn new(worker: WorkerHandle, counter: Arc<AtomicU64>) -> Self {
        Self { worker, counter, watched: Mutex::default() }
    }

    /// Takes a new kick descriptor, or none, and returns what the queue thread gets.
    fn take(&self, file: Option<File>) -> Option<File> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        *watched = None;
        let file = file?;
        let diverted = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(io::Error::from)
            .and_then(|stand_in| {
                let kick = self.worker.watch(file.try_clone()?.into(), self.counter.clone())?;
                Ok((File::from(stand_in), kick))
            });
        match diverted {
            Ok((stand_in, kick)) => {
                *watched = Some(kick);
                Some(stand_in)
            }
            // By the queue thread it works as well, only later.
            Err(_) => Some(file),
        }
    }
}

impl<'a> VringStateGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateGuard<'a, Memory>>::G;
}

impl<'a> VringStateMutGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateMutGuard<'a, Memory>>::G;
}

impl Vring {
    /// A queue of at most `max_queue_size` entries in `memory`, whose kicks go by `route` or to the queue thread.
    pub(super) fn with_route(
        memory: Memory,
        max_queue_size: u16,
        route: Option<Arc<KickRoute>>,
    ) -> Result<Self, Error> {
        Ok(Self { route, ..Self::new(memory, max_queue_size)? })
    }

    /// What the queue thread listens to.
    pub(super) fn kick(&self) -> Option<Arc<File>> {
        held(&self.kick)
    }

    /// Whether the queue is set up and the VMM lets it run.
    pub(super) fn runs(&self) -> bool {
        runs(&self.inner.get_ref())
    }

    /// Tells the VMM that there are used buffers.
    pub(super) fn signal(&self) {
        if let Some(call) = held(&self.call) {
            signal::signal(call.as_fd());
        }
    }
}

/// As [`Vring::runs`], of a queue that is locked already.
pub(super) fn runs(state: &VringState<Memory>) -> bool {
    state.get_queue().ready() && state.is_enabled()
}

/// The descriptor, if it is an eventfd, made non-blocking.
fn tame(file: Option<File>) -> Option<File> {
    let file = file?;
    match check_eventfd(&file) {
        Ok(()) => Some(file),
        Err(error) => {
            tracing::warn!(%error, "ignoring a notification descriptor of the VMM");
            None
        }
    }
}

fn check_eventfd(file: &File) -> io::Result<()> {
    // Where procfs is not to be had (a sandbox), the descriptor is taken as what it should be.
    if let Ok(target) = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        && target.as_os_str() != "anon_inode:[eventfd]"
    {
        return Err(io::Error::other(format!("it is {} and not an eventfd", target.display())));
    }
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK)?;
    Ok(())
}

impl VringT<Memory> for Vring {
    fn new(mem: Memory, max_queue_size: u16) -> Result<Self, Error> {
        let inner = VringMutex::new(mem, max_queue_size)?;
        Ok(Self { inner, route: None, kick: Slot::default(), call: Slot::default() })
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, Memory>>::G {
        self.inner.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, Memory>>::G {
        self.inner.get_mut()
    }

    fn add_used(&self, desc_index: u16, len: u32) -> Result<(), Error> {
        self.inner.add_used(desc_index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.signal();
        Ok(())
    }

    fn enable_notification(&self) -> Result<bool, Error> {
        self.inner.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), Error> {
        self.inner.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, Error> {
        self.inner.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.inner.set_enabled(enabled);
    }

    fn set_queue_info(
        &self,
        desc_table: u64,
        avail_ring: u64,
        used_ring: u64,
    ) -> Result<(), Error> {
        self.inner.set_queue_info(desc_table, avail_ring, used_ring)
    }

    fn queue_next_avail(&self) -> u16 {
        self.inner.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.inner.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, idx: u16) {
        self.inner.set_queue_next_used(idx);
    }

    fn queue_used_idx(&self) -> Result<u16, Error> {
        self.inner.queue_used_idx()
    }

    fn set_queue_size(&self, num: u16) {
        self.inner.set_queue_size(num);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.inner.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.inner.set_queue_ready(ready);
    }

    fn set_kick(&self, file: Option<File>) {
        let file = tame(file);
        let file = match &self.route {
            Some(route) => route.take(file),
            None => file,
        };
        replace(&self.kick, file.as_ref().and_then(|file| file.try_clone().ok()));
        self.inner.set_kick(file);
    }

    /// Without the queue's lock, which the worker takes. An `Err` would end the queue's thread; a counter that someone else has emptied
    /// is not worth that.
    fn read_kick(&self) -> io::Result<bool> {
        if let Some(kick) = held(&self.kick) {
            signal::take(kick.as_fd())?;
        }
        Ok(self.inner.get_ref().is_enabled())
    }

    fn set_call(&self, file: Option<File>) {
        replace(&self.call, tame(file));
    }

    fn set_err(&self, file: Option<File>) {
        self.inner.set_err(file);
    }
}
