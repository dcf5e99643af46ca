//! Completions and arming (docs/virtio-rdma.md §7.3, §7.4): entries are whole when they are seen,
//! and no event is missed.

use loom::thread;
use virtio_rdma_abi::{Cqe, arm, ctrl};
use zerocopy::FromZeros as _;

use super::guest::{Consumer, control, cq_ring, seq};
use super::memory::{Memory, Signal};
use super::{LOST_WAKE, RACE, Without, fails, holds, holds_within_bound};
use crate::nic::cq::{Cq, Fire, Overrun};
use crate::ordering::{self, Fence};

/// The device's side of a queue.
pub(super) struct Producer {
    cq: Cq<Memory>,
    cpu: Memory,
    event: Signal,
}

impl Producer {
    pub(super) fn new(ring: &Memory, entries: u32, event: &Signal) -> Self {
        Self { cq: Cq::new(0, 0, entries, ring.clone()), cpu: ring.clone(), event: event.clone() }
    }

    pub(super) fn push(&mut self, solicited: bool) -> Result<(), Overrun> {
        self.cq.push(&mut Cqe::new_zeroed(), solicited)
    }

    /// `Shard::publish` and `Nic::fire_completions`. True if there was an event.
    pub(super) fn publish(&mut self) -> bool {
        let visible = ordering::entries_visible(&self.cpu);
        let fired = matches!(self.cq.fire(visible, 0), Fire::Event(_));
        if fired {
            self.event.give();
        }
        fired
    }
}

/// Arms for `what` and sleeps, until `count` entries are taken.
pub(super) fn consume(mut consumer: Consumer, event: &Signal, what: u32, count: u32) {
    loop {
        consumer.poll();
        if consumer.consumer == count {
            return;
        }
        consumer.arm(what);
        if !consumer.poll() && consumer.consumer < count {
            event.wait();
        }
    }
}

/// Two entries, each published alone, to a consumer that sleeps for any.
fn any(without: Without) {
    let (ring, event) = (cq_ring(without, 2), Signal::new());
    let mut producer = Producer::new(&ring, 2, &event);
    let device = thread::spawn(move || {
        for _ in 0..2 {
            producer.push(false).expect("room");
            producer.publish();
        }
    });
    consume(Consumer::new(ring, 2), &event, arm::ANY, 2);
    device.join().expect("device");
}

/// Two entries under one fence.
fn batch(without: Without) {
    let (ring, event) = (cq_ring(without, 2), Signal::new());
    let mut producer = Producer::new(&ring, 2, &event);
    let device = thread::spawn(move || {
        producer.push(false).expect("room");
        producer.push(false).expect("room");
        producer.publish();
    });
    consume(Consumer::new(ring, 2), &event, arm::ANY, 2);
    device.join().expect("device");
}

/// An entry that is not solicited, then one that is, to a consumer that sleeps for solicited ones.
fn solicited(without: Without) {
    let (ring, event) = (cq_ring(without, 2), Signal::new());
    let mut producer = Producer::new(&ring, 2, &event);
    let device = thread::spawn(move || {
        producer.push(false).expect("room");
        assert!(!producer.publish(), "an event that nobody asked for");
        producer.push(true).expect("room");
        producer.publish();
    });
    consume(Consumer::new(ring, 2), &event, arm::SOLICITED, 2);
    device.join().expect("device");
}

/// One entry, not solicited, while the consumer arms for solicited ones and then for any.
fn widened(without: Without) {
    let (ring, event) = (cq_ring(without, 1), Signal::new());
    let mut producer = Producer::new(&ring, 1, &event);
    let device = thread::spawn(move || {
        producer.push(false).expect("room");
        producer.publish();
    });
    let mut consumer = Consumer::new(ring, 1);
    consumer.arm(arm::SOLICITED);
    if !consumer.poll() {
        consumer.arm(arm::ANY);
        if !consumer.poll() {
            event.wait();
            assert!(consumer.poll(), "an event without its entry");
        }
    }
    device.join().expect("device");
}

/// A queue of one entry: the second may overwrite the first only when it is consumed.
fn reused(without: Without) {
    let (ring, event) = (cq_ring(without, 1), Signal::new());
    let mut producer = Producer::new(&ring, 1, &event);
    let device = thread::spawn(move || {
        producer.push(false).expect("room");
        // An overrun if the first is still there: then it must not be touched.
        producer.push(false).is_ok()
    });
    let mut consumer = Consumer::new(ring, 1);
    consumer.poll();
    let second = device.join().expect("device");
    consumer.poll();
    assert_eq!(consumer.consumer, 1 + u32::from(second));
}

#[test]
fn no_event_is_missed() {
    holds_within_bound(any);
    holds(batch);
}

#[test]
fn events_need_both_fences() {
    for model in [any, batch] {
        fails(model, Without::Device(Fence::EntriesBeforeArm), LOST_WAKE);
        fails(model, Without::GuestFence, LOST_WAKE);
    }
}

#[test]
fn only_solicited_entries_wake_who_asked_for_them() {
    holds(solicited);
    fails(solicited, Without::Device(Fence::EntriesBeforeArm), LOST_WAKE);
    fails(solicited, Without::GuestFence, LOST_WAKE);
}

#[test]
fn widening_misses_nothing() {
    holds(widened);
    fails(widened, Without::Device(Fence::EntriesBeforeArm), LOST_WAKE);
    fails(widened, Without::GuestFence, LOST_WAKE);
}

#[test]
fn entries_need_the_order_of_their_sequence_number() {
    fails(any, Without::Release(seq(0)), RACE);
    fails(any, Without::Acquire(seq(0)), RACE);
}

#[test]
fn reuse_needs_the_order_of_the_consumer_index() {
    holds(reused);
    fails(reused, Without::Release(control(1, ctrl::CONSUMER)), RACE);
    fails(reused, Without::Acquire(control(1, ctrl::CONSUMER)), RACE);
}
