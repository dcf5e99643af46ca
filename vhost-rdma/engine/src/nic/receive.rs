//! Receive queues and SRQs: rings of receives, and one receive taken out of them.

use std::ops::Range;

use arrayvec::ArrayVec;
use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{RqWqe, Sge, ctrl, wqe_shape};
use zerocopy::FromBytes;

use super::command::Status;
use super::cq::control_offset;
use super::limits::MAX_SGE;
use super::saved::{AbiBytes, BadState, SavedRing};
use crate::memory::{AddressSpace, Ring};

/// Scatter-gather elements, copied out of a ring.
pub(crate) type SgeList = ArrayVec<Sge, { MAX_SGE as usize }>;

/// The least stride, which has room for one element.
const LEAST: usize = 1 << wqe_shape::RQ_WQE_MIN_LOG2_STRIDE;
const _: () = assert!(LEAST == wqe_shape::RQ_WQE_DATA + size_of::<Sge>());

/// A ring of receive work requests.
#[derive(Debug)]
pub struct ReceiveRing {
    ring: Ring,
    entries: u32,
    log2_stride: u8,
    max_sge: u32,
    producer: u32,
    taken: u32,
}

/// A ring that takes over from another.
#[derive(Debug)]
pub struct Moving {
    ring: Ring,
    entries: u32,
    /// Receives that may wait when it takes over.
    most: u32,
    /// Offset of its control block.
    control: u64,
    /// Index of the next receive to be carried over.
    next: u32,
    /// The one on its way.
    entry: Vec<u8>,
}

/// A receive that was taken out of its ring; the slot is never read again.
#[derive(Clone, Debug, Default)]
pub struct Receive {
    /// The guest's name for it.
    pub wr_id: u64,
    /// Its free-running index.
    pub index: u32,
    /// Where the message goes.
    pub sges: SgeList,
    /// It names more elements than its queue allows.
    pub malformed: bool,
}

/// A receive of one element, as it stands in its ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Single {
    pub(crate) wr_id: u64,
    pub(crate) index: u32,
    pub(crate) sge: Sge,
}

impl Receive {
    /// Bytes that it can take.
    pub(crate) fn capacity(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.length.get())).sum()
    }

    /// Whether a message of `needed` bytes is too long for it, which is no fault of whoever posted
    /// it.
    pub fn is_short_of(&self, needed: u64) -> bool {
        !self.malformed && self.capacity() < needed
    }
}

/// What is saved of a receive queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedReceives {
    ring: SavedRing,
    max_sge: u32,
    producer: u32,
    taken: u32,
}

/// What is saved of a receive that was taken.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedReceive {
    wr_id: u64,
    index: u32,
    sges: AbiBytes,
    malformed: bool,
}

impl Receive {
    /// See [`super::saved`].
    pub(crate) fn save(&self) -> SavedReceive {
        let sges = AbiBytes::of(&self.sges[..]);
        SavedReceive { wr_id: self.wr_id, index: self.index, sges, malformed: self.malformed }
    }

    /// What was saved.
    pub(crate) fn load(saved: &SavedReceive) -> Result<Self, BadState> {
        let SavedReceive { wr_id, index, malformed, ref sges } = *saved;
        Ok(Self { wr_id, index, sges: load_sges(sges)?, malformed })
    }
}

/// Elements that were saved.
pub(crate) fn load_sges(saved: &AbiBytes) -> Result<SgeList, BadState> {
    let mut sges = SgeList::new();
    for sge in saved.read_all() {
        sges.try_push(sge?).map_err(|_| BadState::Content("so many elements"))?;
    }
    Ok(sges)
}

/// The guest's producer index cannot be true.
#[derive(Clone, Copy, Debug)]
pub struct BadIndex;

impl ReceiveRing {
    /// The queue in a guest's ring.
    pub const fn new(ring: Ring, entries: u32, log2_stride: u8, max_sge: u32) -> Self {
        Self { ring, entries, log2_stride, max_sge, producer: 0, taken: 0 }
    }

    /// See [`super::saved`].
    pub(crate) fn save(&self, space: &AddressSpace) -> SavedReceives {
        SavedReceives {
            ring: SavedRing::of(&self.ring, (self.entries, self.log2_stride), space),
            max_sge: self.max_sge,
            producer: self.producer,
            taken: self.taken,
        }
    }

    /// What was saved, in this memory.
    pub(crate) fn load(saved: &SavedReceives, space: &AddressSpace) -> Result<Self, BadState> {
        let SavedReceives { max_sge, producer, taken, ref ring } = *saved;
        let (entries, log2_stride) = (ring.entries, ring.log2_stride);
        let ring = ring.load_work((producer, taken), space)?;
        Ok(Self { ring, entries, log2_stride, max_sge, producer, taken })
    }

    /// The guest's ring.
    pub const fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Bytes of its entries.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.entries) << self.log2_stride
    }

    pub(crate) const fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// The free-running number of receives taken.
    pub const fn taken(&self) -> u32 {
        self.taken
    }

    /// Receives posted and not taken.
    pub const fn waiting(&self) -> u32 {
        self.producer.wrapping_sub(self.taken)
    }

    /// Forgets all that was posted.
    pub const fn reset(&mut self) {
        self.producer = 0;
        self.taken = 0;
    }

    /// As if `index` receives had come and gone.
    #[cfg(test)]
    pub(crate) const fn begin_at(&mut self, index: u32) {
        (self.producer, self.taken) = (index, index);
    }

    /// Begins to move to another ring, to which [`carry`](Self::carry) brings the receives that
    /// wait, at their indices.
    pub(crate) fn succeed(&self, entries: u32, max_wr: u32, ring: Ring) -> Result<Moving, Status> {
        let control = control_offset(u64::from(entries) << self.log2_stride);
        // No entry crosses a page (docs/virtio-rdma.md §7).
        let fits =
            ring.len() >= control + ctrl::SIZE as u64 && ring.is_aligned(1 << self.log2_stride);
        let most = max_wr.min(entries);
        if self.waiting() > most || !fits {
            return Err(Status::INVAL);
        }
        let entry = vec![0; 1 << self.log2_stride];
        Ok(Moving { ring, entries, most, control, next: self.taken, entry })
    }

    /// Copies the next receive; its length, or `None` if the other ring has all there are.
    pub(crate) fn carry(&self, to: &mut Moving) -> Option<u64> {
        // Those taken meanwhile need not go.
        if self.producer.wrapping_sub(to.next) > self.waiting() {
            to.next = self.taken;
        }
        let index = to.next;
        if index == self.producer {
            return None;
        }
        to.next = index.wrapping_add(1);
        let slot = |entries: u32| u64::from(index & (entries - 1)) << self.log2_stride;
        self.ring.read(slot(self.entries), &mut to.entry);
        to.ring.write(slot(to.entries), &to.entry);
        Some(to.entry.len() as u64)
    }

    /// Moves, once everything was carried over: the offset of the new control block, and the ring
    /// that was left.
    pub(crate) fn take_over(&mut self, to: Moving) -> Result<(u64, Ring), Status> {
        if self.waiting() > to.most {
            return Err(Status::INVAL);
        }
        self.entries = to.entries;
        Ok((to.control, std::mem::replace(&mut self.ring, to.ring)))
    }

    /// Takes note of a new producer index.
    pub const fn posted(&mut self, producer: u32) -> Result<(), BadIndex> {
        let waiting = producer.wrapping_sub(self.taken);
        // Backwards looks like far ahead: both are beyond the ring.
        if waiting > self.entries || waiting < self.waiting() {
            return Err(BadIndex);
        }
        self.producer = producer;
        Ok(())
    }

    /// Takes the oldest receive, copying it once.
    pub fn take(&mut self, into: &mut Receive) -> bool {
        let found = self.peek(into);
        if found {
            self.advance();
        }
        found
    }

    /// Copies the oldest receive, which stays where it is.
    pub fn peek(&self, into: &mut Receive) -> bool {
        if self.waiting() == 0 {
            return false;
        }
        let at = self.slot(self.taken);
        let mut header = [0; size_of::<RqWqe>()];
        self.ring.read(at, &mut header);
        let wqe = RqWqe::read_from_bytes(&header).unwrap_or_default();
        let count = u32::from(wqe.num_sge.get());
        into.wr_id = wqe.wr_id.get();
        into.index = self.taken;
        into.malformed = count > self.max_sge;
        let count = if into.malformed { 0 } else { count };
        read_sges(&self.ring, at + wqe_shape::RQ_WQE_DATA as u64, count, &mut into.sges);
        true
    }

    /// Takes the receive that [`Self::peek`] copied; its slot is not read again.
    pub const fn advance(&mut self) {
        self.pass(1);
    }
}

impl ReceiveRing {
    /// The receive that has so many before it, if it has one element: all of it is read at once.
    #[inline]
    pub(crate) fn peek_single(&self, before: u32) -> Option<Single> {
        if self.waiting() <= before || self.max_sge == 0 {
            return None;
        }
        let index = self.taken.wrapping_add(before);
        let bytes: [u8; LEAST] = self.ring.read_array(self.slot(index));
        let (wqe, data) = RqWqe::read_from_prefix(&bytes).ok()?;
        let sge = Sge::read_from_prefix(data).ok()?.0;
        (wqe.num_sge.get() == 1).then_some(Single { wr_id: wqe.wr_id.get(), index, sge })
    }

    /// Has the processor fetch the receives that have so many before them, as far as there
    /// are some: another processor wrote them.
    #[inline]
    pub(crate) fn fetch(&self, before: Range<u32>) {
        for before in before.start..before.end.min(self.waiting()) {
            self.ring.fetch(self.slot(self.taken.wrapping_add(before)));
        }
    }

    /// Takes so many that were peeked at; their slots are not read again.
    #[inline]
    pub(crate) const fn pass(&mut self, receives: u32) {
        self.taken = self.taken.wrapping_add(receives);
    }

    #[inline]
    const fn slot(&self, index: u32) -> u64 {
        ((index & (self.entries - 1)) as u64) << self.log2_stride
    }
}

/// Copies `count` elements at `at`; the caller has bounded `count` by the queue's limit, hence by
/// the stride.
pub(crate) fn read_sges(ring: &Ring, at: u64, count: u32, into: &mut SgeList) {
    into.clear();
    for n in 0..count.min(MAX_SGE) {
        let mut bytes = [0; size_of::<Sge>()];
        ring.read(at + u64::from(n) * size_of::<Sge>() as u64, &mut bytes);
        into.push(Sge::read_from_bytes(&bytes).unwrap_or_default());
    }
}
