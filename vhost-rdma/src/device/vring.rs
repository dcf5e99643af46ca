//! One virtqueue of a connection, and the descriptors that the VMM gave for it.
//!
//! They must be eventfds, on which nothing blocks but a full counter, and they are used without the
//! queue's lock and by calls that do not wait, whatever the VMM does to their flags meanwhile
//! (`signal`). That is not all that a VMM can do with an eventfd of its own: signalling one takes
//! as long as there are waiters, and so does closing it. So whether a worker signals one is a
//! matter of trust (`trust`), and none is closed under a lock.
//!
//! The worker wants the queue's lock for each event, and comes again where somebody has it. So
//! nothing is done under it that touches the guest's memory on behalf of the connection: a page of
//! it may take as long to come as the VMM likes.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::fs::OFlags;
use virtio_queue::{Error, Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryAtomic};

use crate::eventfd;
use crate::memory::AddressSpace;

/// The memory of one guest, as it is swapped.
pub(super) type Memory = GuestMemoryAtomic<AddressSpace>;

/// Where a queue lies in the guest's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
}

/// What the lock is over.
#[derive(Debug)]
pub(super) struct State {
    queue: Queue,
    enabled: bool,
}

impl State {
    pub(super) const fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    pub(super) const fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// The queue is at these places now, and has used up to `used`.
    pub(super) fn set_parts(&mut self, parts: Parts, used: u16) -> Result<(), Error> {
        self.queue.try_set_desc_table_address(GuestAddress(parts.descriptors))?;
        self.queue.try_set_avail_ring_address(GuestAddress(parts.available))?;
        self.queue.try_set_used_ring_address(GuestAddress(parts.used))?;
        self.queue.set_next_used(used);
        Ok(())
    }

    /// Whether the queue is set up and the VMM lets it run.
    pub(super) fn runs(&self) -> bool {
        self.queue.ready() && self.enabled
    }
}

/// See the module. Clones are the same queue.
#[derive(Debug, Clone)]
pub(super) struct Vring(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    kick: Slot,
    call: Slot,
}

/// A descriptor that may be replaced at any time.
type Slot = Mutex<Option<Arc<File>>>;

fn held(slot: &Slot) -> Option<Arc<File>> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The old descriptor is closed once the lock is free: closing, too, takes as long as there are
/// waiters.
fn replace(slot: &Slot, file: Option<File>) {
    let mut file = file.map(Arc::new);
    std::mem::swap(&mut *slot.lock().unwrap_or_else(PoisonError::into_inner), &mut file);
}

impl Vring {
    /// A queue of at most `size` entries that is nowhere yet.
    pub(super) fn new(size: u16) -> Result<Self, Error> {
        let state = Mutex::new(State { queue: Queue::new(size)?, enabled: false });
        Ok(Self(Arc::new(Inner { state, kick: Slot::default(), call: Slot::default() })))
    }

    /// The queue, for a moment, unless somebody has it. For workers: whoever has it may have lost
    /// its processor, and its VMM chooses how often it takes it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.0.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The queue, for a moment.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the queue is set up and the VMM lets it run.
    pub(super) fn runs(&self) -> bool {
        self.lock().runs()
    }

    /// What the guest kicks, or none.
    pub(super) fn set_kick(&self, file: Option<File>) {
        replace(&self.0.kick, file.and_then(tame));
    }

    pub(super) fn kick(&self) -> Option<Arc<File>> {
        held(&self.0.kick)
    }

    /// Sets the kick's counter back. One that somebody else has emptied is no fault.
    pub(super) fn take_kick(&self) {
        if let Some(kick) = self.kick() {
            let _ = eventfd::take(kick.as_fd());
        }
    }

    /// What tells the VMM of used buffers, or none.
    pub(super) fn set_call(&self, file: Option<File>) {
        replace(&self.0.call, file.and_then(tame));
    }

    pub(super) fn call(&self) -> Option<Arc<File>> {
        held(&self.0.call)
    }

    /// Tells the VMM that there are used buffers. For threads that serve this connection alone.
    pub(super) fn signal(&self) {
        if let Some(call) = held(&self.0.call) {
            eventfd::signal(call.as_fd());
        }
    }

    /// As [`Self::signal`], for workers that trust the VMM; false if the descriptor is being
    /// replaced.
    pub(super) fn try_signal(&self) -> bool {
        let call = match self.0.call.try_lock() {
            Ok(call) => call.clone(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().clone(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if let Some(call) = call {
            eventfd::signal(call.as_fd());
        }
        true
    }
}

/// The descriptor, if it is an eventfd, made non-blocking. Another is closed, as if none had come.
fn tame(file: File) -> Option<File> {
    match check_eventfd(&file) {
        Ok(()) => Some(file),
        Err(error) => {
            tracing::warn!(%error, "a notification descriptor of the VMM is not used");
            None
        }
    }
}

fn check_eventfd(file: &File) -> io::Result<()> {
    eventfd::check(file.as_fd())?;
    let flags = rustix::fs::fcntl_getfl(file.as_fd())?;
    rustix::fs::fcntl_setfl(file.as_fd(), flags | OFlags::NONBLOCK)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_worker_does_not_wait_for_who_has_the_queue_or_its_descriptor() {
        let vring = Vring::new(16).unwrap();
        let vmm = File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        vring.set_call(Some(vmm.try_clone().unwrap()));
        let state = vring.lock();
        assert!(vring.try_lock().is_none());
        assert!(vring.try_signal(), "the descriptor has a lock of its own");
        drop(state);
        assert!(vring.try_lock().is_some());
        assert!(eventfd::take(vmm.as_fd()).unwrap());
        let call = vring.0.call.lock().unwrap();
        assert!(!vring.try_signal());
        drop(call);
        assert!(!eventfd::take(vmm.as_fd()).unwrap());
    }
}
