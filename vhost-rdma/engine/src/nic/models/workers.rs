//! The worker's sleep: its own flag for those who wake it, and NEED_KICK for the guests
//! (`worker/waker.rs`, `worker/shard_thread.rs`). What it is without guests is modelled beside it
//! (`worker/models`).

use std::rc::Rc;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use super::doorbells::Scanner;
use super::guest::Guest;
use super::memory::{Asleep, Memory, Signal};
use super::{LOST_WAKE, Without, fails, holds_within_bound};
use crate::ordering::{self, Fence, Flag as _};

/// A `Waker` and a mailbox. The mailbox is weaker than the channel that ships: it is one relaxed
/// counter.
pub(super) struct Waker {
    pub(super) cpu: Memory,
    pub(super) asleep: Asleep,
    eventfd: Signal,
    jobs: AtomicU32,
}

impl Waker {
    pub(super) fn new(without: Without) -> Rc<Self> {
        Rc::new(Self {
            cpu: Memory::new(without, &[], &[], &[]),
            asleep: Asleep::new(),
            eventfd: Signal::new(),
            jobs: AtomicU32::new(0),
        })
    }

    /// `Waker::wake`.
    pub(super) fn wake(&self) {
        if ordering::must_wake(&self.asleep, &self.cpu) {
            self.eventfd.give();
        }
    }

    /// `Waker::sleep`.
    pub(super) fn sleep(&self) {
        self.eventfd.wait();
        self.asleep.set(false);
    }

    /// `WorkerHandle::post`.
    fn post(&self) {
        self.jobs.fetch_add(1, Ordering::Relaxed);
        self.wake();
    }

    fn drain(&self, done: &mut u32) -> bool {
        let jobs = self.jobs.load(Ordering::Relaxed);
        std::mem::replace(done, jobs) != jobs
    }
}

/// A guest posts and kicks, and a job comes, while the worker goes to sleep as `Runner::run` and
/// `Runner::sleep` do.
fn doorbells_and_jobs(without: Without) {
    let waker = Waker::new(without);
    let guest = Guest::new(without, &[0], 1);
    let mut scanner = Scanner::new(&guest, 1);
    let status = guest.status.clone();
    let theirs = waker.clone();
    let poster = thread::spawn(move || {
        // The kick arrives in a thread of the daemon; nothing but the wake-up itself is between the
        // two.
        if guest.ring(0, 1) {
            theirs.wake();
        }
    });
    let theirs = waker.clone();
    let caller = thread::spawn(move || theirs.post());
    let mut done = 0;
    loop {
        let mailed = waker.drain(&mut done);
        let found = scanner.scan();
        if done == 1 && scanner.posts() == 1 {
            break;
        }
        if mailed || found {
            continue;
        }
        ordering::announce_sleep(&waker.asleep, &waker.cpu);
        let ask = |_: &mut Scanner| ordering::need_kick(&status, true);
        let found = ordering::last_look(&waker.cpu, &mut scanner, ask, Scanner::scan);
        if waker.drain(&mut done) || found {
            waker.asleep.set(false);
        } else {
            waker.sleep();
        }
        ordering::need_kick(&status, false);
    }
    poster.join().expect("poster");
    caller.join().expect("caller");
}

#[test]
fn doorbells_and_jobs_wake() {
    holds_within_bound(doorbells_and_jobs);
}

#[test]
fn doorbells_and_jobs_need_their_fences() {
    // Not the one of the announcement: the fence before the last look at the doorbells comes after
    // it. Jobs alone need it (`worker/models`).
    fails(doorbells_and_jobs, Without::Device(Fence::WorkBeforeAsleep), LOST_WAKE);
    fails(doorbells_and_jobs, Without::Device(Fence::AskBeforeLook), LOST_WAKE);
    fails(doorbells_and_jobs, Without::GuestFence, LOST_WAKE);
}
