//! A virtqueue whose file descriptors never block.
//!
//! The framework's own type reads the kick descriptor and writes the call descriptor while it holds the queue's lock. Both descriptors come from the VMM; one
//! that blocks would hold up the worker thread, and with it every other NIC. So they are made non-blocking when they
//! arrive, and must be eventfds, on which nothing else can block.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::OFlags;
use vhost_user_backend::{VringMutex, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{Error, QueueT};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

/// The memory of one guest, as the framework swaps it.
pub(super) type Memory = GuestMemoryAtomic<GuestMemoryMmap<()>>;

/// See the module.
#[derive(Clone)]
pub(super) struct Vring(VringMutex<Memory>);

impl<'a> VringStateGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateGuard<'a, Memory>>::G;
}

impl<'a> VringStateMutGuard<'a, Memory> for Vring {
    type G = <VringMutex<Memory> as VringStateMutGuard<'a, Memory>>::G;
}

impl Vring {
    /// Whether the queue is set up and the VMM lets it run.
    pub(super) fn runs(&self) -> bool {
        runs(&self.0.get_ref())
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
        VringMutex::new(mem, max_queue_size).map(Self)
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, Memory>>::G {
        self.0.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, Memory>>::G {
        self.0.get_mut()
    }

    fn add_used(&self, desc_index: u16, len: u32) -> Result<(), Error> {
        self.0.add_used(desc_index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        self.0.signal_used_queue()
    }

    fn enable_notification(&self) -> Result<bool, Error> {
        self.0.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), Error> {
        self.0.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, Error> {
        self.0.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.0.set_enabled(enabled);
    }

    fn set_queue_info(
        &self,
        desc_table: u64,
        avail_ring: u64,
        used_ring: u64,
    ) -> Result<(), Error> {
        self.0.set_queue_info(desc_table, avail_ring, used_ring)
    }

    fn queue_next_avail(&self) -> u16 {
        self.0.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.0.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, idx: u16) {
        self.0.set_queue_next_used(idx);
    }

    fn queue_used_idx(&self) -> Result<u16, Error> {
        self.0.queue_used_idx()
    }

    fn set_queue_size(&self, num: u16) {
        self.0.set_queue_size(num);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.0.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        self.0.set_queue_ready(ready);
    }

    fn set_kick(&self, file: Option<File>) {
        self.0.set_kick(tame(file));
    }

    /// An `Err` would end the queue's thread; a counter that someone else has emptied is not worth that.
    fn read_kick(&self) -> io::Result<bool> {
        self.0.read_kick().or_else(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => {
                Ok(self.0.get_ref().is_enabled())
            }
            _ => Err(error),
        })
    }

    fn set_call(&self, file: Option<File>) {
        self.0.set_call(tame(file));
    }

    fn set_err(&self, file: Option<File>) {
        self.0.set_err(file);
    }
}
