//! A deregistration beside what another shard asks for (`soft/crossing.rs`, `worker/reply.rs`).
//!
//! The requester's shard touches no memory of another's guests. What it asks for is executed by the
//! owner's worker, between two of the owner's jobs, so a deregistration comes before a copy or
//! after it. What is left is the order against whoever gets the memory back: once the answer is
//! there, no copy may still be under way. That order is the answer's own, a state that is stored
//! with release and loaded with acquire (`Reply::give`, `Answer::wait`).
//!
//! The model also tries what was not built: the requester's shard looks whether the region is
//! there, and copies. That its word is stored with release and loaded with acquire does not make
//! it safe; it would take a deregistration that waits for all shards.

use std::rc::Rc;

use loom::thread;

use super::memory::Memory;
use super::moves::Mailbox;
use super::workers::Waker;
use super::{RACE, Without, fails, holds_within_bound};
use crate::ordering::{self, Flag as _, Words as _};

/// The state of the answer: 0 until it is given.
const ANSWER: u64 = 0x8000;
/// Whether the region is there, for a shard that copies by itself.
const VALID: u64 = 0x8010;
/// The region's bytes.
const REGION: u64 = 0x8100;

/// The owner's worker: parcels from the requester's shard, and one job of a session's thread.
struct Owner {
    memory: Memory,
    waker: Rc<Waker>,
    parcels: Rc<Mailbox<()>>,
    jobs: Rc<Mailbox<()>>,
}

impl Owner {
    /// `Runner::run`, until the region is gone and `parcels` have been executed.
    fn run(&self, mut parcels: u32) {
        let mut valid = true;
        while valid || parcels > 0 {
            if self.jobs.take().is_some() {
                valid = false;
                self.memory.store_u32(VALID, 0);
                self.memory.store_u32(ANSWER, 1);
                continue;
            }
            if self.parcels.take().is_some() {
                parcels -= 1;
                if valid {
                    self.memory.touch(REGION);
                }
                continue;
            }
            ordering::announce_sleep(&self.waker.asleep, &self.waker.cpu);
            if self.jobs.has_any() || self.parcels.has_any() {
                self.waker.asleep.set(false);
            } else {
                self.waker.sleep();
            }
        }
    }
}

/// A write of another shard, and a deregistration after which the guest uses its memory again.
fn deregistration(without: Without) {
    let memory = Memory::new(without, &[], &[ANSWER, VALID], &[REGION]);
    let (waker, by_owner) = (Waker::new(without), without != Without::CopiesByTheOwner);
    let (parcels, jobs) = (Mailbox::new(without), Mailbox::new(without));
    memory.store_u32(VALID, 1);
    let owner = Owner { memory: memory.clone(), waker, parcels, jobs };

    let (region, waker, parcels) = (memory.clone(), owner.waker.clone(), owner.parcels.clone());
    let requester = thread::spawn(move || {
        if by_owner {
            parcels.put(());
            waker.wake();
        } else if region.load_u32(VALID) == 1 {
            region.touch(REGION);
        }
    });
    let (waker, jobs) = (owner.waker.clone(), owner.jobs.clone());
    let session = thread::spawn(move || {
        jobs.put(());
        waker.wake();
        while memory.load_u32(ANSWER) == 0 {
            thread::yield_now();
        }
        memory.touch(REGION);
    });
    owner.run(u32::from(by_owner));
    requester.join().expect("the requester's worker");
    session.join().expect("the session's thread");
}

#[test]
fn nobody_copies_when_a_deregistration_is_answered() {
    holds_within_bound(deregistration);
}

#[test]
fn deregistration_needs_the_order_of_its_answer_and_copies_by_the_owner() {
    fails(deregistration, Without::Release(ANSWER), RACE);
    fails(deregistration, Without::Acquire(ANSWER), RACE);
    fails(deregistration, Without::CopiesByTheOwner, RACE);
}
