//! What goes between shards (`worker/carrier.rs`, `worker/mailbox.rs`): two workers send each other
//! parcels, and neither waits for the other's lock.
//!
//! So there are two things that may go wrong beside the wake-up itself: a parcel that could not be
//! sent stays with a worker that sleeps, and one that could not be taken stays with a worker that
//! does. A deregistration beside what another shard asks for is `deregistration`.

use std::rc::Rc;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use super::workers::Waker;
use super::{LOST_WAKE, Without, fails, holds_within_bound};
use crate::ordering::{self, Fence, Flag as _};

/// Parcels that the one sends.
const PARCELS: u32 = 2;

/// A worker's end: its mailbox for parcels, and its waker. The count is weaker than the one that
/// ships: it is stored and loaded in no order.
struct End {
    waker: Rc<Waker>,
    count: AtomicU32,
    queue: Mutex<u32>,
}

impl End {
    fn new(without: Without) -> Rc<Self> {
        let (waker, count) = (Waker::new(without), AtomicU32::new(0));
        Rc::new(Self { waker, count, queue: Mutex::new(0) })
    }

    /// `Sender::try_send_all` and the wake-up behind it, for one parcel.
    fn send(&self, unsent: &mut u32) -> bool {
        let Ok(mut queue) = self.queue.try_lock() else { return false };
        *unsent -= 1;
        *queue += 1;
        self.count.store(*queue, Ordering::Relaxed);
        drop(queue);
        self.waker.wake();
        true
    }

    /// `Mailbox::has_any`.
    fn has_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// `Mailbox::take_all`.
    fn take(&self) -> u32 {
        if !self.has_any() {
            return 0;
        }
        let Ok(mut queue) = self.queue.try_lock() else { return 0 };
        self.count.store(0, Ordering::Relaxed);
        std::mem::take(&mut *queue)
    }

    /// `Runner::run`, for a worker that has `unsent` for `other` and waits for `wanted` from it; an
    /// answer to all of it, if it `answers`.
    fn run(&self, other: &Self, (mut unsent, wanted): (u32, u32), answers: bool, without: Without) {
        let mut arrived = 0;
        while arrived < wanted || unsent > 0 {
            let came = self.take();
            arrived += came;
            unsent += u32::from(answers && came > 0 && arrived == wanted);
            let sent = unsent > 0 && other.send(&mut unsent);
            if came > 0 || sent {
                continue;
            }
            ordering::announce_sleep(&self.waker.asleep, &self.waker.cpu);
            let looks = without != Without::LookAtUnsent;
            if self.has_any() || (looks && unsent > 0) {
                self.waker.asleep.set(false);
                // Whoever holds the lock goes on.
                thread::yield_now();
            } else {
                self.waker.sleep();
            }
        }
    }
}

/// One sends parcels one by one; the other answers when it has all.
fn parcels(without: Without) {
    let ends = [End::new(without), End::new(without)];
    let [near, far] = ends.clone();
    let there = thread::spawn(move || far.run(&near, (0, PARCELS), true, without));
    let [near, far] = ends;
    near.run(&far, (PARCELS, 1), false, without);
    there.join().expect("the other worker");
}

#[test]
fn parcels_arrive() {
    holds_within_bound(parcels);
}

#[test]
fn parcels_need_both_fences_and_a_look_at_what_is_unsent() {
    fails(parcels, Without::Device(Fence::AsleepBeforeLook), LOST_WAKE);
    fails(parcels, Without::Device(Fence::WorkBeforeAsleep), LOST_WAKE);
    fails(parcels, Without::LookAtUnsent, LOST_WAKE);
}
