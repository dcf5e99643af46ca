//! Completion queues: rings that the device writes and the guest reads (docs/virtio-rdma.md §7.3,
//! §7.4), made of any [`Words`] so that models can try them.

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{Cqe, arm, ctrl, wc_status};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::Nanos;
use super::holdings::{Holding, Links, Owned, owned};
use super::limits::MAX_CQE;
use super::moderation::{Moderation, Verdict};
use super::saved::{BadState, SavedRing};
use crate::memory::{AddressSpace, Ring};
use crate::ordering::{Visible, Words};

const STRIDE: u32 = 64;
/// Offset of `seq` in an entry: what is written last.
const SEQ: usize = 60;
/// A `seq` that the last slot of a ring does not have before index 0xffffffff was written: it is
/// index 0's.
const NEVER: u32 = 1;

/// The ring is full, or the guest's consumer index is nonsense; the CQ is dead from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

/// What a look at the arm word came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fire {
    /// Nobody waits for these entries.
    No,
    /// An event is due, which answers this arm; the CQ is disarmed.
    Event(u32),
    /// The event waits for more entries; `Some`: it begins to, and is to be looked at again at this
    /// time.
    Later(Option<Nanos>),
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq<W = Ring> {
    pub(crate) ctx: u32,
    pub(crate) vector: u32,
    /// Work queues that complete here.
    pub users: u32,
    pub(crate) links: Links,
    ring: W,
    entries: u32,
    /// Offset of the control block.
    control: u64,
    produced: u32,
    /// The arm sequence that last fired; the copy in the control block is the guest's.
    fired: u32,
    /// The guest's consumer index as last seen.
    consumer: u32,
    /// A new entry since the last look at the arm word was solicited or an error.
    solicited: bool,
    /// A new entry since then was an error.
    failed: bool,
    /// Entries produced at the last look.
    looked: u32,
    pub(crate) moderation: Moderation,
    /// There are new entries since the last look at the arm word.
    pub(crate) dirty: bool,
    /// An event waits for a buffer.
    pub(crate) event_pending: bool,
    dead: bool,
}

owned!(Cq, [W], Cq<W>);

/// Offset of the control block behind `bytes` of ring entries (docs/virtio-rdma.md §7), in bytes.
pub const fn control_offset(bytes: u64) -> u64 {
    bytes.next_multiple_of(ctrl::ALIGN as u64)
}

impl<W: Words> Cq<W> {
    pub(crate) fn new(ctx: u32, vector: u32, entries: u32, ring: W) -> Self {
        Self {
            ctx,
            vector,
            users: 0,
            links: Links::default(),
            ring,
            entries,
            control: control_offset(u64::from(entries) * u64::from(STRIDE)),
            produced: 0,
            fired: 0,
            consumer: 0,
            solicited: false,
            failed: false,
            looked: 0,
            moderation: Moderation::default(),
            dirty: false,
            event_pending: false,
            dead: false,
        }
    }

    pub(crate) const fn ring(&self) -> &W {
        &self.ring
    }

    /// The arm that fired last: what a waiting event answers.
    pub(crate) const fn fired(&self) -> u32 {
        self.fired
    }

    /// Produces nothing any more.
    pub(crate) const fn kill(&mut self) {
        self.dead = true;
    }

    /// As if `index` entries had come and gone.
    #[cfg(test)]
    pub(crate) fn begin_at(&mut self, index: u32, fired: u32) {
        (self.produced, self.consumer, self.looked, self.fired) = (index, index, index, fired);
        for lap in 0..self.entries {
            let before = index.wrapping_sub(1).wrapping_sub(lap);
            let at = u64::from(before & (self.entries - 1)) * u64::from(STRIDE);
            self.ring.store_u32(at + SEQ as u64, before.wrapping_add(1));
        }
        self.ring.store_u32(self.control + ctrl::CONSUMER as u64, index);
        self.ring.store_u32(self.control + ctrl::FIRED as u64, fired);
    }

    /// Entries that the guest has not consumed, or `None` if its index is nonsense.
    fn unconsumed(&mut self) -> Option<u32> {
        self.consumer = self.ring.load_u32(self.control + ctrl::CONSUMER as u64);
        let waiting = self.produced.wrapping_sub(self.consumer);
        (waiting <= self.entries).then_some(waiting)
    }

    /// Entries that find a place whatever the guest does meanwhile, as far as is known without a
    /// look at its index.
    #[inline]
    pub(crate) const fn room(&self) -> u32 {
        let taken = self.produced.wrapping_sub(self.consumer);
        if self.dead { 0 } else { self.entries.saturating_sub(taken) }
    }

    /// Writes one entry and makes it visible. A dead CQ swallows it.
    #[inline]
    pub(crate) fn push(&mut self, cqe: &mut Cqe, solicited: bool) -> Result<(), Overrun> {
        if self.dead {
            return Ok(());
        }
        if self.produced.wrapping_sub(self.consumer) >= self.entries
            && self.unconsumed().is_none_or(|waiting| waiting >= self.entries)
        {
            self.dead = true;
            return Err(Overrun);
        }
        let at = u64::from(self.produced & (self.entries - 1)) * u64::from(STRIDE);
        self.produced = self.produced.wrapping_add(1);
        cqe.seq = U32::new(self.produced);
        self.ring.write(at, &cqe.as_bytes()[..SEQ]);
        // Release: the entry, and the payload copied before it, are visible to whoever sees `seq`.
        self.ring.store_u32(at + SEQ as u64, self.produced);
        self.solicited |= solicited;
        self.failed |= cqe.status != wc_status::SUCCESS;
        self.dirty = true;
        Ok(())
    }

    /// Looks at the arm word after a full fence; an event that is due disarms the CQ.
    pub(crate) fn fire(&mut self, _: Visible, now: Nanos) -> Fire {
        let solicited = std::mem::take(&mut self.solicited);
        let failed = std::mem::take(&mut self.failed);
        let fresh = self.produced.wrapping_sub(self.looked);
        self.looked = self.produced;
        let word = self.ring.load_u32(self.control + ctrl::ARM as u64);
        let seq = word >> arm::SEQ_SHIFT;
        if self.dead || seq == self.fired {
            self.moderation.forget();
            return Fire::No;
        }
        // A solicited entry that found the CQ unarmed is over; one that finds it armed for
        // solicited has fired, or its event waits.
        let due = word & arm::ANY != 0 || (word & arm::SOLICITED != 0 && solicited);
        if !due && !self.moderation.is_waiting() {
            return Fire::No;
        }
        if let Verdict::Later(until) = self.moderation.ask(fresh, failed, now) {
            return Fire::Later(until);
        }
        self.fired = seq;
        self.ring.store_u32(self.control + ctrl::FIRED as u64, seq);
        Fire::Event(seq)
    }

    /// Begins to move to another ring, to which [`carry`](Self::carry) brings what the guest has
    /// not consumed; indices go on.
    ///
    /// `requested` is what the application asked for: fewer than are waiting is refused (IBTA
    /// 11.2.8.3).
    pub(crate) fn succeed(
        &mut self,
        entries: u32,
        requested: u32,
        ring: W,
    ) -> Result<Succession<W>, super::Status> {
        let most = requested.min(entries);
        if self.unconsumed().is_none_or(|waiting| waiting > most) {
            return Err(super::Status::INVAL);
        }
        Ok(Succession { ring, entries, most, next: self.consumer })
    }

    /// Copies the next entry; false if the other ring has all there are.
    pub(crate) fn carry(&self, to: &mut Succession<W>) -> bool {
        let index = to.next;
        if index == self.produced {
            return false;
        }
        to.next = index.wrapping_add(1);
        let mut entry = [0; STRIDE as usize];
        self.ring.read(u64::from(index & (self.entries - 1)) * u64::from(STRIDE), &mut entry);
        let at = u64::from(index & (to.entries - 1)) * u64::from(STRIDE);
        to.ring.write(at, &entry[..SEQ]);
        to.ring.store_u32(at + SEQ as u64, index.wrapping_add(1));
        true
    }

    /// Moves, once everything was carried over; the ring that was left. More may have come than the
    /// other ring takes.
    pub(crate) fn take_over(&mut self, to: Succession<W>) -> Result<W, super::Status> {
        let waiting = self.unconsumed().filter(|&waiting| waiting <= to.most);
        let waiting = waiting.ok_or(super::Status::INVAL)?;
        // The last index before the wrap has `seq` 0, which a slot that nobody has written has too:
        // its slot, if this lap comes to it.
        if (waiting..to.entries).contains(&(u32::MAX - self.consumer)) {
            let at = u64::from(to.entries - 1) * u64::from(STRIDE);
            to.ring.store_u32(at + SEQ as u64, NEVER);
        }
        let control = control_offset(u64::from(to.entries) * u64::from(STRIDE));
        to.ring.store_u32(control + ctrl::FIRED as u64, self.fired);
        self.entries = to.entries;
        self.control = control;
        Ok(std::mem::replace(&mut self.ring, to.ring))
    }
}

/// What is saved of a completion queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedCq {
    ctx: u32,
    vector: u32,
    ring: SavedRing,
    produced: u32,
    fired: u32,
    consumer: u32,
    looked: u32,
    /// Solicited or failed entries since the last look at the arm word.
    marks: [bool; 2],
    moderation: Moderation,
    event_pending: bool,
    dead: bool,
}

impl Cq {
    /// See [`super::saved`].
    pub(crate) fn save(&self, space: &AddressSpace) -> SavedCq {
        SavedCq {
            ctx: self.ctx,
            vector: self.vector,
            ring: SavedRing::of(&self.ring, (self.entries, 6), space),
            produced: self.produced,
            fired: self.fired,
            consumer: self.consumer,
            looked: self.looked,
            marks: [self.solicited, self.failed],
            moderation: self.moderation.clone(),
            event_pending: self.event_pending,
            dead: self.dead,
        }
    }

    /// What was saved, in this memory. Its users come afterwards, and its arm word is looked at
    /// anew.
    pub(crate) fn load(saved: SavedCq, space: &AddressSpace) -> Result<Self, BadState> {
        let ring = saved.ring.load(MAX_CQE, space)?;
        let [solicited, failed] = saved.marks;
        Ok(Self {
            produced: saved.produced,
            fired: saved.fired,
            consumer: saved.consumer,
            looked: saved.looked,
            solicited,
            failed,
            moderation: saved.moderation,
            event_pending: saved.event_pending,
            dead: saved.dead,
            ..Self::new(saved.ctx, saved.vector, saved.ring.entries, ring)
        })
    }
}

/// A ring that takes over from another.
#[derive(Debug)]
pub struct Succession<W = Ring> {
    ring: W,
    entries: u32,
    /// Entries that may wait when it takes over.
    most: u32,
    /// Index of the next entry to be carried over.
    next: u32,
}
