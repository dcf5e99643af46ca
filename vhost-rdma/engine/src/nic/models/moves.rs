//! A NIC that moves to another worker (`device/nic.rs`, `shard/moves.rs`): one worker takes it out
//! between two turns and puts it into the other's mailbox.
//!
//! The mailbox is a lock, which is all the order that there is between the two. It is weaker here:
//! a word that is stored with release and loaded with acquire. With it, what the one has seen and
//! written is the other's past: the doorbells that it has taken, and the entries that it has put
//! into a CQ, which the other publishes behind its own fence. Kicks are heard by the new worker
//! from before the move on, and it looks at all doorbells itself before it sleeps.

use std::cell::RefCell;
use std::rc::Rc;

use loom::thread;
use virtio_rdma_abi::arm;

use super::completions::{Producer, consume};
use super::doorbells::Scanner;
use super::guest::{Consumer, Guest, cq_ring};
use super::memory::{Memory, Signal};
use super::workers::Waker;
use super::{LOST_WAKE, RACE, Without, fails, holds_within_bound};
use crate::ordering::{self, Fence, Flag as _, Words as _};

/// The word that says that there is something, and the plain bytes that it is.
const THERE: u64 = 0x7000;
const VALUE: u64 = 0x7100;

/// What `Sender::send` and `Mailbox::take` make sure of, and no more.
pub(super) struct Mailbox<T> {
    memory: Memory,
    value: RefCell<Option<T>>,
}

impl<T> Mailbox<T> {
    pub(super) fn new(without: Without) -> Rc<Self> {
        let memory = Memory::new(without, &[], &[THERE], &[VALUE]);
        Rc::new(Self { memory, value: RefCell::new(None) })
    }

    pub(super) fn put(&self, value: T) {
        self.memory.touch(VALUE);
        *self.value.borrow_mut() = Some(value);
        self.memory.store_u32(THERE, 1);
    }

    pub(super) fn has_any(&self) -> bool {
        self.memory.load_relaxed(THERE) == 1 && self.value.borrow().is_some()
    }

    pub(super) fn take(&self) -> Option<T> {
        if self.memory.load_u32(THERE) == 0 {
            return None;
        }
        self.memory.touch(VALUE);
        self.value.borrow_mut().take()
    }
}

/// A guest posts while its NIC, which was parked, moves to a worker that sleeps.
fn posts(without: Without) {
    let (waker, mailbox) = (Waker::new(without), Mailbox::new(without));
    let guest = Guest::new(without, &[0], 1);
    let mut scanner = Scanner::new(&guest, 1);
    let status = guest.status.clone();
    ordering::need_kick(&status, true);
    let heard = waker.clone();
    let poster = thread::spawn(move || {
        if guest.ring(0, 1) {
            heard.wake();
        }
    });
    let (theirs, sent, page) = (waker.clone(), mailbox.clone(), status.clone());
    let from = thread::spawn(move || {
        // Whoever reaches for it makes it awake: `Slots::any_mut`.
        ordering::need_kick(&page, false);
        scanner.scan();
        sent.put(scanner);
        theirs.wake();
    });
    let mut present: Option<Scanner> = None;
    loop {
        if present.is_none()
            && let Some(scanner) = mailbox.take()
        {
            ordering::need_kick(&status, false);
            present = Some(scanner);
        }
        if let Some(scanner) = &mut present {
            scanner.scan();
            if scanner.posts() == 1 {
                break;
            }
        }
        ordering::announce_sleep(&waker.asleep, &waker.cpu);
        let found = present.as_mut().is_some_and(|scanner| {
            let ask = |_: &mut Scanner| ordering::need_kick(&status, true);
            ordering::last_look(&waker.cpu, scanner, ask, Scanner::scan)
        });
        if found || (present.is_none() && mailbox.has_any()) {
            waker.asleep.set(false);
        } else {
            waker.sleep();
        }
        if present.is_some() {
            ordering::need_kick(&status, false);
        }
    }
    poster.join().expect("poster");
    from.join().expect("the worker that had it");
}

/// One worker writes an entry, and the one that has the NIC afterwards publishes it.
fn entries(without: Without) {
    let (ring, event) = (cq_ring(without, 1), Signal::new());
    let mut producer = Producer::new(&ring, 1, &event);
    let mailbox = Mailbox::new(without);
    let sent = mailbox.clone();
    let from = thread::spawn(move || {
        producer.push(false).expect("room");
        sent.put(producer);
    });
    let to = thread::spawn(move || {
        loop {
            if let Some(mut producer) = mailbox.take() {
                producer.publish();
                return;
            }
            thread::yield_now();
        }
    });
    consume(Consumer::new(ring, 1), &event, arm::ANY, 1);
    from.join().expect("the worker that had it");
    to.join().expect("the worker that has it");
}

#[test]
fn a_post_is_found_by_the_new_worker() {
    holds_within_bound(posts);
}

#[test]
fn a_post_needs_the_fences_of_both_sleeps() {
    fails(posts, Without::Device(Fence::WorkBeforeAsleep), LOST_WAKE);
    fails(posts, Without::Device(Fence::AskBeforeLook), LOST_WAKE);
    fails(posts, Without::GuestFence, LOST_WAKE);
}

#[test]
fn an_entry_of_the_old_worker_is_told_by_the_new() {
    holds_within_bound(entries);
    fails(entries, Without::Device(Fence::EntriesBeforeArm), LOST_WAKE);
    fails(entries, Without::GuestFence, LOST_WAKE);
}

#[test]
fn a_nic_needs_the_order_of_its_mailbox() {
    fails(entries, Without::Release(THERE), RACE);
    fails(entries, Without::Acquire(THERE), RACE);
}
