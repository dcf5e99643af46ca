//! The models.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use loom::thread;

use super::carrier::Carrier;
use super::clock::Clock;
use super::handle::{CallError, WorkerHandle};
use super::kicks::Heard;
use super::mailbox::{Found, mailbox};
use super::reply::{NoAnswer, reply};
use super::shard_thread::Runner;
use super::sync::{STALE, Without, Word, is_without, leave_out};
use super::turn_stats::{Counter, TurnStats};
use crate::link::{
    AddressBook, Bus, Fabric, Flow, Gid, Link as _, NicId, Operation, Owner, Parcel, Payload,
    Request, Responder, Service, Ticket,
};
use crate::ordering::Fence;
use crate::shard::{Random, Shard};

/// How a wake-up that is lost shows: everyone waits.
const LOST_WAKE: &str = "deadlock";
/// How a message that is lost shows.
const LOST: &str = "a message is lost";
/// Preemptions of an execution, at most. Loom's authors find hardly a bug that needs more.
const PREEMPTIONS: usize = 2;
const LONG: Duration = Duration::from_secs(5);

/// What is done, and how many preemptions an execution has at most, if not all are tried.
type Model = (fn(), Option<usize>);

const ANSWERS: Model = (answers, None);
const LAST_WORDS: Model = (last_words, None);
const JOBS: Model = (jobs, Some(PREEMPTIONS));
const PARCELS: Model = (parcels, Some(PREEMPTIONS));
const DEREGISTRATION: Model = (deregistration, Some(PREEMPTIONS));

fn check((model, preemptions): Model, without: Without) {
    leave_out(without);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// The protocol works, in every execution.
fn holds(model: Model) {
    check(model, Without::Nothing);
}

/// The protocol does not work `without` something, and this is how it ends.
#[track_caller]
fn fails(model: Model, without: Without, how: &str) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(model, without))) else {
        panic!("the model does not notice what is missing: {without:?}");
    };
    let message = panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_default();
    assert!(message.contains(how), "{without:?}: fails, but by {message:?}");
}

/// Chance is nobody's in a model.
struct Same;

impl Random for Same {
    fn next_u32(&mut self) -> u32 {
        7
    }
}

/// Three carriers, and a worker that runs on the first.
fn worker(shard: Shard) -> (WorkerHandle, Runner, Counter, [Carrier; 2]) {
    let mut carriers = Carrier::all(3).expect("no descriptor is needed");
    let mut next = || carriers.pop().expect("three");
    let (third, other, carrier) = (next(), next(), next());
    let (sender, mailbox) = mailbox();
    let stats = Arc::new(TurnStats::new(Clock));
    let counter = Counter::new(stats.clone());
    let handle = WorkerHandle::new(sender, carrier.waker(), stats);
    (handle, Runner::new(shard, mailbox, carrier, (Clock, 0)), counter, [other, third])
}

fn shard() -> Shard {
    Shard::new(Box::new(Same))
}

/// A thread posts two jobs, and the worker goes on until both are done.
fn jobs() {
    let (handle, runner, counter, _other) = worker(shard());
    let done = Arc::new(AtomicU32::new(0));
    let count = done.clone();
    let poster = thread::spawn(move || {
        for _ in 0..2 {
            let (again, done) = (handle.clone(), count.clone());
            handle.post(None, move |_, _| {
                if done.fetch_add(1, Ordering::Relaxed) == 1 {
                    again.stop();
                }
            });
        }
    });
    runner.run(counter);
    poster.join().expect("a poster");
    assert_eq!(done.load(Ordering::Relaxed), 2, "{LOST}");
}

#[test]
fn jobs_wake() {
    holds(JOBS);
    fails(JOBS, Without::Full(Fence::AsleepBeforeLook), LOST_WAKE);
    fails(JOBS, Without::Full(Fence::WorkBeforeAsleep), LOST_WAKE);
}

/// An answer, and one that never comes.
fn answers() {
    let ((given, answer), (gone, none)) = (reply(), reply::<u32>());
    // It is not joined: who unparks late would end that wait too, in loom.
    thread::spawn(move || {
        given.give(7);
        drop(gone);
    });
    assert_eq!(answer.wait(LONG), Ok(7));
    assert_eq!(none.wait(LONG), Err(NoAnswer::Gone));
}

#[test]
fn answers_wake() {
    holds(ANSWERS);
    // What order an answer takes: `deregistration`.
    fails(ANSWERS, Without::Unpark, LOST_WAKE);
}

/// Who leaves has sent something before.
fn last_words() {
    let (sender, mailbox) = mailbox();
    let leaver = thread::spawn(move || sender.send(1).expect("it is there"));
    let mut came = 0;
    loop {
        match mailbox.take() {
            Found::One(_) => came += 1,
            Found::Closed => break,
            Found::Later | Found::None => thread::yield_now(),
        }
    }
    assert_eq!(came, 1, "{LOST}");
    leaver.join().expect("a sender");
}

#[test]
fn nothing_is_lost_of_who_leaves() {
    holds(LAST_WORDS);
    fails(LAST_WORDS, Without::Release, LOST);
    fails(LAST_WORDS, Without::Acquire, LOST);
}

/// A network in which everything is on the first shard.
struct Elsewhere;

impl Fabric for Elsewhere {
    fn responder(&mut self, _: NicId, _: &Gid) -> Option<&mut dyn Responder> {
        None
    }

    fn network(&self, _: NicId) -> Option<u32> {
        Some(1)
    }

    fn holds(&self, _: u32, _: &Gid) -> bool {
        false
    }

    fn member(&mut self, _: NicId, _: &Gid, _: usize) -> Option<Option<&mut dyn Responder>> {
        None
    }
}

const GID: Gid = [9; 16];

/// Requests of the second shard to an address that the first had.
fn ask(bus: &mut Bus, book: &AddressBook) {
    assert!(book.claim(1, GID, (0, NicId(0))));
    let flow = Flow {
        source: NicId(1),
        source_qpn: 5,
        source_gid: [8; 16],
        source_mac: [0; 6],
        dest_gid: GID,
        dest_qpn: 6,
        traffic_class: 0,
        hop_limit: 1,
        sl: 0,
    };
    let request = Request {
        flow: &flow,
        service: Service::Reliable,
        operation: Operation::Send,
        payload: Payload::Inline(&[]),
        total: 0,
        offset: 0,
        message: 0,
        len: 0,
        remote_addr: 0,
        rkey: 0,
        immediate: None,
        invalidate: None,
        solicited: false,
        operands: [0; 2],
        qkey: 0,
        fanout: Default::default(),
        owner: Owner::Unasked,
        ticket: Ticket::default(),
        crossed: false,
        ahead: false,
    };
    bus.submit(&mut Elsewhere, &request);
    book.release(1, GID, 0);
}

/// Another shard asks for something, and a worker's real shard answers; neither waits for the
/// other's lock. The other shard's own loop is short, and its steps are the worker's.
fn parcels() {
    let book = Arc::new(AddressBook::default());
    let shard = shard().with_bus(Bus::new(0, 3, book.clone()));
    let (handle, runner, counter, [mut other, third]) = worker(shard);
    let peer = thread::spawn(move || {
        let mut bus = Bus::new(1, 3, book.clone());
        ask(&mut bus, &book);
        let (waker, mut answers) = (other.waker(), 0);
        loop {
            other.take(|parcel| answers += u32::from(matches!(parcel, Parcel::Answer(_))));
            if answers == 1 {
                break;
            }
            other.send(bus.outgoing());
            waker.announce();
            if other.has_any() || bus.outgoing().iter().any(|way| !way.is_empty()) {
                waker.stay_awake();
                thread::yield_now();
            } else {
                waker.sleep(None, &mut Heard::default());
            }
        }
        handle.stop();
    });
    // Another has a word for the same mailbox, and its lock meanwhile.
    let stranger = thread::spawn(move || {
        let wake = Parcel::Wake { vni: 1, gid: GID, qpn: 3 };
        let mut leaves = [VecDeque::new(), VecDeque::from([wake]), VecDeque::new()];
        while !leaves[1].is_empty() {
            third.send(&mut leaves);
            thread::yield_now();
        }
    });
    runner.run(counter);
    stranger.join().expect("a third worker");
    peer.join().expect("the other worker");
}

#[test]
fn parcels_arrive() {
    holds(PARCELS);
    fails(PARCELS, Without::Full(Fence::AsleepBeforeLook), LOST_WAKE);
    fails(PARCELS, Without::Full(Fence::WorkBeforeAsleep), LOST_WAKE);
}

/// A copy that another shard asks for, and a deregistration after which the guest uses its memory
/// again: once that is answered, no copy may still be under way.
fn deregistration() {
    let (handle, runner, counter, _other) = worker(shard());
    let region = Arc::new(Word::new());
    let (valid, copied) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
    let copy = {
        let (region, valid, copied) = (region.clone(), valid.clone(), copied.clone());
        move || {
            let there = valid.load(Ordering::Relaxed);
            // Another may come between the look and the copy.
            thread::yield_now();
            if there {
                region.write(1);
                copied.store(true, Ordering::Relaxed);
            }
        }
    };
    let requester = is_without(Without::CopiesByTheOwner).then(|| thread::spawn(copy.clone()));
    if requester.is_none() {
        handle.post(None, move |_, _| copy());
    }
    let memory = region.clone();
    let session = thread::spawn(move || {
        let job = move |_: &mut Shard, _| {
            valid.store(false, Ordering::Relaxed);
            copied.load(Ordering::Relaxed)
        };
        let before: Result<bool, CallError> = handle.call(None, LONG, job);
        memory.reads(u32::from(before == Ok(true)));
        memory.write(2);
        if let Some(requester) = requester {
            requester.join().expect("the requester's worker");
        }
        handle.stop();
    });
    runner.run(counter);
    session.join().expect("the session's thread");
    region.reads(2);
}

#[test]
fn nobody_copies_when_a_deregistration_is_answered() {
    holds(DEREGISTRATION);
    fails(DEREGISTRATION, Without::Release, STALE);
    fails(DEREGISTRATION, Without::Acquire, STALE);
    fails(DEREGISTRATION, Without::CopiesByTheOwner, STALE);
}
