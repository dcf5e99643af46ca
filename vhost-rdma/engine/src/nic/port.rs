//! The engine's way out: where a NIC's events go.

use virtio_rdma_abi as abi;

use crate::link::{Flow, MAD_LEN};

/// What the owner of a mirrored region is asked to do (docs/virtio-rdma-process.md §4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// What its answer names.
    pub number: u64,
    /// What to do.
    pub kind: JobKind,
    /// Key of the region.
    pub key: u32,
    /// Address of the first byte, as keys name it.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Those of an atomic.
    pub operands: [u64; 2],
}

/// The kinds of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Bytes of a peer arrived in the shadow: to be copied to the memory.
    Arrived,
    /// A peer reads: bytes of the memory are to be copied to the shadow.
    Wanted,
    /// Compare with the first operand, store the second if equal.
    CompareSwap,
    /// Add the first operand.
    FetchAdd,
}

/// A kind of event that no guest sees: memory vanished that its owner might take away. The front
/// end takes it out of the NIC's map.
pub const MEMORY_LOST: u32 = u32::MAX;

/// The event queues of one NIC, implemented by its front end.
///
/// Calls are made on the shard's thread, after the completions that they announce are visible in
/// guest memory. They must not block. A call that returns `false` found no buffer; the engine keeps
/// the event (at most one per CQ, one per object and cause) and offers it again after
/// [`crate::shard::Shard::events_wanted`].
pub trait Port: Send {
    /// Puts a completion event on the queue of completion vector `vector`.
    fn completion_event(&mut self, vector: u32, event: abi::CompEvent) -> bool;
    /// Puts an asynchronous event.
    fn async_event(&mut self, event: abi::AsyncEvent) -> bool;
    /// Asks the owner of a mirrored region, a context's, for a job; false: not now. Whoever is not
    /// there loses it.
    fn owner_job(&mut self, _ctx: u32, _job: Job) -> bool {
        true
    }
    /// Takes a management datagram for QP 1 of a NIC whose driver has none (`soft::management`);
    /// false if nobody wants it, or there is no room: it is lost, as on a wire.
    fn management(&mut self, _flow: &Flow, _mad: &[u8; MAD_LEN as usize]) -> bool {
        false
    }
    /// Notifies the guest of what was put since the last call, once per queue at most.
    fn flush(&mut self);
    /// Whether a call since the last one of this could not do its work without waiting for another
    /// thread: it is to be made again soon, whether the guest has new buffers or not.
    fn was_busy(&mut self) -> bool {
        false
    }
}

/// A port without queues: a NIC that nobody listens to.
#[derive(Debug)]
pub(crate) struct Nowhere;

impl Port for Nowhere {
    fn completion_event(&mut self, _vector: u32, _event: abi::CompEvent) -> bool {
        false
    }

    fn async_event(&mut self, _event: abi::AsyncEvent) -> bool {
        false
    }

    fn flush(&mut self) {}
}
