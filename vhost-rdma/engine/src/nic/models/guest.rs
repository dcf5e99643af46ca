//! The guest's steps, as its driver and its provider do them in C.

use loom::sync::atomic::{Ordering, fence};
use virtio_rdma_abi::{arm, ctrl, db, status_page};

use super::Without;
use super::memory::Memory;
use crate::nic::cq::control_offset;
use crate::nic::doorbell::index_offset;
use crate::ordering::Words as _;

/// A thread of the guest that posts.
#[derive(Clone)]
pub(crate) struct Guest {
    /// Its doorbell page. Work requests are plain bytes that lie behind it, see [`wqe`].
    pub(crate) page: Memory,
    pub(crate) status: Memory,
}

/// Where the model keeps the work request of an index, counted from 1.
pub(crate) const fn wqe(slot: usize, head: u32) -> u64 {
    0x1000 + 0x100 * slot as u64 + head as u64
}

/// What stands between a store and a later load: `mfence`, `mb()`.
fn full_fence(memory: &Memory) {
    if !memory.without(Without::GuestFence) {
        fence(Ordering::SeqCst);
    }
}

impl Guest {
    /// A page and a status page for posts to `slots`, up to index `heads`.
    pub(crate) fn new(without: Without, slots: &[usize], heads: u32) -> Self {
        let indices: Vec<_> = slots.iter().map(|&slot| index_offset(slot)).collect();
        let wqes: Vec<_> =
            slots.iter().flat_map(|&slot| (1..=heads).map(move |head| wqe(slot, head))).collect();
        Self {
            page: Memory::new(without, &[db::SUMMARY as u64], &indices, &wqes),
            status: Memory::new(without, &[], &[status_page::NEED_KICK as u64], &[]),
        }
    }

    /// Writes a work request and rings: `vrdma_ring` in `guest/provider/doorbell.h`,
    /// `vrdma_doorbell` in `guest/kernel/doorbell.c`. True: it kicks.
    ///
    /// The summary byte is written by both sides. If the device's clear wins over this store, then
    /// the device must see the index that was stored before it. Release order alone does not say so
    /// in C++ (nor on POWER): nobody has *read* the byte. x86 and Armv8 do: their stores are
    /// multi-copy atomic, so the index is visible to everyone when the byte takes its place in the
    /// byte's history. In loom's words that is a fence between the two.
    pub(crate) fn ring(&self, slot: usize, head: u32) -> bool {
        self.page.touch(wqe(slot, head));
        self.page.store_u32(index_offset(slot), head);
        if !self.page.without(Without::MultiCopyAtomicity)
            && !self.page.without(Without::Release(db::SUMMARY as u64))
        {
            fence(Ordering::SeqCst);
        }
        self.page.store_u8(db::SUMMARY as u64, 1);
        full_fence(&self.page);
        self.status.load_relaxed(status_page::NEED_KICK as u64) != 0
    }
}

const STRIDE: u64 = 64;
const SEQ: u64 = 60;

/// The consumer of a completion queue.
pub(crate) struct Consumer {
    ring: Memory,
    entries: u32,
    pub(crate) consumer: u32,
    arm: u32,
}

/// Offset of a word of the control block of a queue.
pub(crate) fn control(entries: u32, offset: usize) -> u64 {
    control_offset(u64::from(entries) * STRIDE) + offset as u64
}

/// Offset of the sequence number of entry `place`.
pub(crate) fn seq(place: u32) -> u64 {
    u64::from(place) * STRIDE + SEQ
}

/// The ring of a completion queue.
pub(crate) fn cq_ring(without: Without, entries: u32) -> Memory {
    let words: Vec<_> = (0..entries)
        .map(seq)
        .chain([ctrl::CONSUMER, ctrl::ARM, ctrl::FIRED].map(|offset| control(entries, offset)))
        .collect();
    let plain: Vec<_> = (0..entries).map(|place| u64::from(place) * STRIDE).collect();
    Memory::new(without, &[], &words, &plain)
}

impl Consumer {
    pub(crate) const fn new(ring: Memory, entries: u32) -> Self {
        Self { ring, entries, consumer: 0, arm: 0 }
    }

    /// Takes what is there: `vrdma_poll_cq` in `guest/provider/cq.c` and `guest/kernel/poll.c`.
    /// True if it was anything.
    pub(crate) fn poll(&mut self) -> bool {
        let first = self.consumer;
        loop {
            let place = self.consumer & (self.entries - 1);
            if self.ring.load_u32(seq(place)) != self.consumer.wrapping_add(1) {
                break;
            }
            self.ring.look(u64::from(place) * STRIDE);
            self.consumer = self.consumer.wrapping_add(1);
        }
        if self.consumer != first {
            self.ring.store_u32(control(self.entries, ctrl::CONSUMER), self.consumer);
        }
        self.consumer != first
    }

    /// Arms: `vrdma_arm_cq` in `guest/provider/cq.c`, `vrdma_req_notify_cq` in
    /// `guest/kernel/poll.c`. The caller polls once more.
    pub(crate) fn arm(&mut self, what: u32) {
        let fired = self.ring.load_u32(control(self.entries, ctrl::FIRED));
        let (seq, old) = (self.arm >> arm::SEQ_SHIFT, self.arm & arm::WHAT_MASK);
        self.arm = if seq == fired {
            (fired + 1) << arm::SEQ_SHIFT | what
        } else {
            seq << arm::SEQ_SHIFT | if old == arm::ANY { old } else { what }
        };
        self.ring.store_u32(control(self.entries, ctrl::ARM), self.arm);
        full_fence(&self.ring);
    }
}
