//! Doorbell pages: how posts are found without a system call (docs/virtio-rdma.md §6.4).
//!
//! The order of clear, fence and load in `DoorbellPage::collect` is the device's half of the
//! protocol; the specification shows why no post is lost, and the models try it: a page is made of
//! any [`Words`].

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::db;

use crate::memory::Ring;
use crate::ordering::{Fence, Words};

const GROUPS: usize = db::GROUPS as usize;
const GROUP_SLOTS: usize = db::GROUP_SLOTS as usize;
/// Groups of one page that are looked into in one look: a page of busy queues is as much work as a
/// hundred quiet ones.
const LOOK_GROUPS: usize = 4;

/// The queue that owns a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owner {
    /// The send queue of a QP, by QPN.
    Send(u32),
    /// The receive queue of a QP, by QPN.
    Receive(u32),
    /// An SRQ, by SRQN.
    Shared(u32),
}

/// A producer index that moved.
#[derive(Clone, Copy, Debug)]
pub struct Post {
    pub(crate) owner: Owner,
    pub(crate) producer: u32,
}

/// One doorbell page of a context.
#[derive(Debug)]
pub(crate) struct DoorbellPage<W = Ring> {
    ring: W,
    /// One bit per slot in use, one word per group.
    used: [u64; GROUPS],
    /// The group that the next look begins with.
    from: usize,
    /// As far as slots were ever used: pages cost a guest nothing, and should cost us little.
    slots: Vec<Slot>,
}

/// Bytes of what is kept for a slot.
pub(crate) const SLOT: usize = size_of::<Slot>();

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Slot {
    owner: Owner,
    seen: u32,
}

impl<W: Words> DoorbellPage<W> {
    pub(crate) fn new(ring: W) -> Self {
        Self { ring, used: [0; GROUPS], from: 0, slots: Vec::new() }
    }

    pub(crate) const fn ring(&self) -> &W {
        &self.ring
    }

    /// Bytes that its slots take once there is another owner: whole groups.
    pub(crate) fn kept_with_another(&self) -> Option<usize> {
        let group = self.used.iter().position(|&used| used != u64::MAX)?;
        Some(((group + 1) * GROUP_SLOTS * SLOT).max(self.slots.capacity() * SLOT))
    }

    /// Gives a free slot to `owner`, with index 0.
    pub(crate) fn take(&mut self, owner: Owner) -> Option<u32> {
        let group = self.used.iter().position(|&used| used != u64::MAX)?;
        let bit = self.used[group].trailing_ones();
        self.used[group] |= 1 << bit;
        let slot = group * GROUP_SLOTS + bit as usize;
        let taken = Slot { owner, seen: 0 };
        if self.slots.len() <= slot {
            let group = (slot + 1).next_multiple_of(GROUP_SLOTS);
            self.slots.reserve_exact(group - self.slots.len());
            self.slots.resize(slot + 1, taken);
        }
        self.slots[slot] = taken;
        // The index of an earlier owner must not look like a post of this one.
        self.ring.store_u32(index_offset(slot), 0);
        u32::try_from(slot).ok()
    }

    pub(crate) fn free(&mut self, slot: u32) {
        let slot = slot as usize;
        if let Some(used) = self.used.get_mut(slot / GROUP_SLOTS) {
            *used &= !(1 << (slot % GROUP_SLOTS));
        }
    }

    /// Free slots.
    pub(crate) fn room(&self) -> u32 {
        self.used.iter().map(|used| used.count_zeros()).sum()
    }

    /// Forgets what was posted: the queue begins again at index 0.
    pub(crate) fn reset(&mut self, slot: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize) {
            slot.seen = 0;
        }
    }

    /// The producer index of one slot, if it moved, whether or not its group was rung. A look that
    /// comes too early finds nothing, and the group's own look finds it later.
    pub(crate) fn look(&mut self, slot: u32) -> Option<Post> {
        let producer = self.ring.load_u32(index_offset(slot as usize));
        let slot = self.slots.get_mut(slot as usize)?;
        let moved = std::mem::replace(&mut slot.seen, producer) != producer;
        moved.then_some(Post { owner: slot.owner, producer })
    }

    /// Appends slots whose index moved; true if there are groups left that were rung, for another
    /// look.
    #[inline]
    pub(crate) fn collect(&mut self, posts: &mut Vec<Post>) -> bool {
        let low = self.ring.load_u64(db::SUMMARY as u64).to_le_bytes();
        let high = self.ring.load_u64(db::SUMMARY as u64 + 8).to_le_bytes();
        if low == [0; 8] && high[..GROUPS - 8] == [0; GROUPS - 8] {
            return false;
        }
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&low);
        bytes[8..].copy_from_slice(&high);
        let (mut rung, mut count, mut left) = ([0; LOOK_GROUPS], 0, false);
        for group in (self.from..GROUPS).chain(0..self.from) {
            if bytes[group] == 0 {
                continue;
            }
            if count == LOOK_GROUPS {
                // It stays rung. The next look begins here, so that no group is left out for ever.
                self.from = group;
                left = true;
                break;
            }
            self.ring.store_u8((db::SUMMARY + group) as u64, 0);
            rung[count] = group;
            count += 1;
        }
        self.ring.full(Fence::ClearBeforeIndex);
        for &group in &rung[..count] {
            self.collect_group(group, posts);
        }
        left
    }

    fn collect_group(&mut self, group: usize, posts: &mut Vec<Post>) {
        let mut bits = self.used[group];
        while bits != 0 {
            let index = group * GROUP_SLOTS + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let producer = self.ring.load_u32(index_offset(index));
            let Some(slot) = self.slots.get_mut(index) else { continue };
            if producer != slot.seen {
                slot.seen = producer;
                posts.push(Post { owner: slot.owner, producer });
            }
        }
    }
}

impl<W> DoorbellPage<W> {
    /// Its slots that are in use, by number.
    pub(crate) fn save(&self) -> Vec<(u32, Slot)> {
        let used = |slot: &usize| {
            let group = self.used.get(slot / GROUP_SLOTS).copied().unwrap_or_default();
            group & 1 << (slot % GROUP_SLOTS) != 0
        };
        let slots = self.slots.iter().enumerate().filter(|(number, _)| used(number));
        slots.filter_map(|(number, slot)| Some((u32::try_from(number).ok()?, *slot))).collect()
    }

    /// The page at `ring` with these slots in use.
    pub(crate) fn load(ring: W, slots: &[(u32, Slot)]) -> Option<Self> {
        let mut page = Self { ring, used: [0; GROUPS], from: 0, slots: Vec::new() };
        for &(number, slot) in slots {
            let number = number as usize;
            let used = page.used.get_mut(number / GROUP_SLOTS)?;
            *used |= 1 << (number % GROUP_SLOTS);
            if page.slots.len() <= number {
                let group = (number + 1).next_multiple_of(GROUP_SLOTS);
                page.slots.reserve_exact(group - page.slots.len());
                page.slots.resize(number + 1, slot);
            }
            *page.slots.get_mut(number)? = slot;
        }
        Some(page)
    }

    /// Bytes that its slots take.
    pub(crate) fn kept(&self) -> usize {
        self.slots.capacity() * SLOT
    }
}

pub(crate) const fn index_offset(slot: usize) -> u64 {
    (db::INDEX + 4 * slot) as u64
}
