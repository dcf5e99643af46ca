//! The engine's way out: events as used buffers of the guest's event queues (docs/virtio-rdma.md
//! §7.5).
//!
//! All of this runs on a worker and must not wait for a guest or a VMM: a queue that another thread
//! has at that moment is for later, a VMM that makes the system call that tells it a long one is
//! told by another thread (`trust`), and only a few buffers that are too short or too long are
//! looked at.

use std::sync::Arc;

use virtio_queue::QueueT;
use virtio_rdma_abi::{AsyncEvent, CompEvent, vq};
use vm_memory::GuestAddressSpace;
use zerocopy::IntoBytes;

use super::chain::{self, Taken};
use super::notifier::Bell;
use super::trust::Trust;
use super::vring::{Memory, State, Vring};
use crate::memory::AddressSpace;
use crate::shard::Port;

/// Buffers that are looked at for one event. A driver's first fits; who fills the ring with others
/// waits for its next kick.
const BUFFERS: usize = 16;
/// Descriptors of one buffer.
const PIECES: usize = 16;

/// The event queues of one connection.
pub(super) struct EventPort {
    /// Queue 1 and the completion-event queues, in the order of their indices.
    queues: Vec<Vring>,
    memory: Memory,
    /// Bit n: queue n holds events that the guest was not told of.
    dirty: u64,
    /// A queue was somebody else's.
    busy: bool,
    bell: Bell,
    trust: Arc<Trust>,
}

impl EventPort {
    /// `vrings` are those of events, from index 1 on.
    pub(super) fn new(vrings: &[Vring], memory: Memory, (bell, trust): (Bell, Arc<Trust>)) -> Self {
        Self { queues: vrings.to_vec(), memory, dirty: 0, busy: false, bell, trust }
    }

    /// Tells the VMM of queue `index`.
    fn tell(&self, index: usize, vring: &Vring) {
        let queue = usize::from(vq::EVENT) + index;
        if !self.trust.is_given() {
            return self.bell.ring(queue);
        }
        let (told, lost) = self.trust.watch(|| vring.try_signal());
        if !told {
            self.bell.ring(queue);
        }
        if lost {
            tracing::warn!(
                "a VMM's notification descriptor is slow to signal; another thread does it for a \
                 while"
            );
        }
    }

    fn put(&mut self, index: usize, event: &[u8]) -> bool {
        let Some(vring) = self.queues.get(index) else { return false };
        let memory = self.memory.memory();
        let Some(mut state) = vring.try_lock() else {
            self.busy = true;
            return false;
        };
        let put = state.runs() && put(&mut state, &memory, event);
        if put {
            self.dirty |= 1 << index;
        }
        put
    }
}

/// Uses up buffers until one can take the event.
fn put(state: &mut State, memory: &AddressSpace, event: &[u8]) -> bool {
    let queue = state.queue();
    for _ in 0..BUFFERS {
        let (head, len) = match chain::take(queue, memory, PIECES) {
            Taken::Chain(chain) if chain.room() >= event.len() => {
                (chain.head, chain.respond(memory, event))
            }
            Taken::Chain(chain) => (chain.head, 0),
            Taken::Malformed(head) => (head, 0),
            // Ask for a kick when there are buffers again, and look once more for those that came
            // before the guest saw that.
            Taken::Empty => match queue.enable_notification(memory) {
                Ok(true) => continue,
                _ => return false,
            },
            Taken::Broken => return false,
        };
        if queue.add_used(memory, head, len).is_ok() && len as usize == event.len() {
            return true;
        }
    }
    false
}

impl Port for EventPort {
    fn was_busy(&mut self) -> bool {
        std::mem::take(&mut self.busy)
    }

    fn completion_event(&mut self, vector: u32, event: CompEvent) -> bool {
        let index = (vector as usize).saturating_add(usize::from(vq::COMP_BASE - vq::EVENT));
        self.put(index, event.as_bytes())
    }

    fn async_event(&mut self, event: AsyncEvent) -> bool {
        self.put(0, event.as_bytes())
    }

    fn flush(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        while dirty != 0 {
            let index = dirty.trailing_zeros() as usize;
            dirty &= dirty - 1;
            let Some(vring) = self.queues.get(index) else { continue };
            let memory = self.memory.memory();
            let Some(mut state) = vring.try_lock() else {
                self.dirty |= 1 << index;
                self.busy = true;
                continue;
            };
            let wanted = state.runs() && state.queue().needs_notification(&*memory).unwrap_or(true);
            drop(state);
            if wanted {
                self.tell(index, vring);
            }
        }
    }
}

/// The port of a NIC that no VMM is connected to.
#[derive(Debug)]
pub(crate) struct NoPort;

impl Port for NoPort {
    fn completion_event(&mut self, _vector: u32, _event: CompEvent) -> bool {
        false
    }

    fn async_event(&mut self, _event: AsyncEvent) -> bool {
        false
    }

    fn flush(&mut self) {}
}
