//! Doorbells and NEED_KICK (docs/virtio-rdma.md §6.4): no post is lost, and what is found is there.

use loom::thread;
use virtio_rdma_abi::db;

use super::guest::{Guest, wqe};
use super::memory::{Memory, Signal};
use super::{LOST_WAKE, RACE, Without, fails, holds, holds_within_bound};
use crate::nic::doorbell::{DoorbellPage, Owner, index_offset};
use crate::ordering::{self, Fence};

const LOST_POST: &str = "a post is lost";

/// The device's side of a page: what it found of each slot.
pub(crate) struct Scanner {
    page: DoorbellPage<Memory>,
    memory: Memory,
    found: Vec<u32>,
}

impl Scanner {
    /// Gives the first `slots` slots of the guest's page to queues.
    pub(crate) fn new(guest: &Guest, slots: usize) -> Self {
        let mut page = DoorbellPage::new(guest.page.clone());
        for slot in 0..slots {
            let qpn = u32::try_from(slot).expect("a slot");
            assert_eq!(page.take(Owner::Send(qpn)), Some(qpn));
        }
        Self { page, memory: guest.page.clone(), found: vec![0; slots] }
    }

    /// Looks at the page and reads the new work requests.
    pub(crate) fn scan(&mut self) -> bool {
        let mut posts = Vec::new();
        self.page.collect(&mut posts);
        for post in &posts {
            let Owner::Send(qpn) = post.owner else { panic!("a post of nobody") };
            let slot = qpn as usize;
            for head in self.found[slot] + 1..=post.producer {
                self.memory.look(wqe(slot, head));
            }
            self.found[slot] = post.producer;
        }
        !posts.is_empty()
    }

    pub(crate) fn posts(&self) -> u32 {
        self.found.iter().sum()
    }
}

/// A queue is posted to twice while the device polls.
fn one_queue(without: Without) {
    let guest = Guest::new(without, &[0], 2);
    let mut scanner = Scanner::new(&guest, 1);
    let poster = thread::spawn(move || {
        guest.ring(0, 1);
        guest.ring(0, 2);
    });
    scanner.scan();
    scanner.scan();
    poster.join().expect("poster");
    scanner.scan();
    assert_eq!(scanner.posts(), 2, "{LOST_POST}");
}

/// Two threads of the guest post to two queues of one group, without a lock.
fn two_queues(without: Without) {
    let guest = Guest::new(without, &[0, 1], 1);
    let mut scanner = Scanner::new(&guest, 2);
    let posters = [0, 1].map(|slot| {
        let guest = guest.clone();
        thread::spawn(move || guest.ring(slot, 1))
    });
    scanner.scan();
    for poster in posters {
        poster.join().expect("poster");
    }
    scanner.scan();
    assert_eq!(scanner.posts(), 2, "{LOST_POST}");
}

/// The device sleeps whenever it finds nothing: `Runner::sleep` of the worker, without its other
/// work.
fn sleeper(without: Without) {
    let guest = Guest::new(without, &[0], 2);
    let mut scanner = Scanner::new(&guest, 1);
    let (status, cpu) = (guest.status.clone(), guest.page.clone());
    let kick = Signal::new();
    let kicked = kick.clone();
    let poster = thread::spawn(move || {
        for head in 1..=2 {
            if guest.ring(0, head) {
                kick.give();
            }
        }
    });
    while scanner.posts() < 2 {
        if scanner.scan() {
            continue;
        }
        let ask = |_: &mut Scanner| ordering::need_kick(&status, true);
        if !ordering::last_look(&cpu, &mut scanner, ask, Scanner::scan) {
            kicked.wait();
        }
        ordering::need_kick(&status, false);
    }
    poster.join().expect("poster");
}

/// A NIC of two doorbell pages is parked in two pieces by a worker that is awake and hears kicks
/// between them: `Shard::park_quiet`, `Slots::kicked` and `Runner::run`, without their other work.
/// Whether it heeds a kick that comes in the middle.
fn parker(without: Without, heeds: bool) {
    let guest = Guest::new(without, &[0], 1);
    let other = Guest { status: guest.status.clone(), ..Guest::new(without, &[0], 1) };
    let mut pages = [Scanner::new(&guest, 1), Scanner::new(&other, 1)];
    let (status, cpu) = (guest.status.clone(), guest.page.clone());
    let kick = Signal::new();
    let kicked = kick.clone();
    let poster = thread::spawn(move || {
        if guest.ring(0, 1) {
            kick.give();
        }
    });
    loop {
        // Of a NIC that is awake no kick is kept.
        kicked.take();
        let found = pages.each_mut().map(Scanner::scan);
        if pages[0].posts() == 1 {
            break;
        }
        if found.contains(&true) {
            continue;
        }
        let [first, second] = &mut pages;
        let ask = |_: &mut Scanner| ordering::need_kick(&status, true);
        let found = ordering::last_look(&cpu, first, ask, Scanner::scan);
        let kicks = kicked.take() && heeds;
        if !(found || kicks || second.scan()) {
            // Parked. The worker goes on with other work.
            kicked.wait();
        }
        ordering::need_kick(&status, false);
    }
    poster.join().expect("poster");
}

fn parked(without: Without) {
    parker(without, true);
}

fn forgetful(without: Without) {
    parker(without, false);
}

#[test]
fn a_parked_nic_is_heard() {
    holds_within_bound(parked);
}

#[test]
fn parking_heeds_a_kick_during_the_look() {
    fails(forgetful, Without::Nothing, LOST_WAKE);
}

#[test]
fn parking_needs_its_fences() {
    fails(parked, Without::Device(Fence::AskBeforeLook), LOST_WAKE);
    fails(parked, Without::GuestFence, LOST_WAKE);
}

#[test]
fn posts_are_found() {
    holds(one_queue);
    holds(two_queues);
}

#[test]
fn posts_need_the_fence_after_the_clear() {
    fails(one_queue, Without::Device(Fence::ClearBeforeIndex), LOST_POST);
    fails(two_queues, Without::Device(Fence::ClearBeforeIndex), LOST_POST);
}

#[test]
fn posts_need_the_order_of_index_and_summary() {
    fails(one_queue, Without::Release(db::SUMMARY as u64), LOST_POST);
    fails(two_queues, Without::Release(db::SUMMARY as u64), LOST_POST);
}

#[test]
fn posts_need_stores_that_all_see_at_once() {
    fails(one_queue, Without::MultiCopyAtomicity, LOST_POST);
    fails(two_queues, Without::MultiCopyAtomicity, LOST_POST);
}

#[test]
fn work_requests_need_the_order_of_the_index() {
    fails(one_queue, Without::Release(index_offset(0)), RACE);
    fails(one_queue, Without::Acquire(index_offset(0)), RACE);
}

#[test]
fn a_sleeper_is_woken() {
    holds_within_bound(sleeper);
}

#[test]
fn a_sleeper_needs_the_guests_fence() {
    fails(sleeper, Without::GuestFence, LOST_WAKE);
}

#[test]
fn a_sleeper_needs_the_fence_before_the_last_look() {
    fails(sleeper, Without::Device(Fence::AskBeforeLook), LOST_WAKE);
}

#[test]
fn a_sleeper_needs_the_fence_after_the_clear() {
    fails(sleeper, Without::Device(Fence::ClearBeforeIndex), LOST_WAKE);
}
