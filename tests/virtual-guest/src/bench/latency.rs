//! Round trips, control commands, and the silence of an idle daemon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Effort;
use super::cores::Cores;
use super::echo::Echo;
use super::report::{Better, Row, Target};
use crate::daemon::processor_of;
use crate::qp::{Path, Qp, QpSpec, SendWr};
use crate::rings::Cq;
use crate::spec::{ARM_ANY, qpt, status};
use crate::world::{End, Node, World};

/// The median time of a call, in microseconds: a mean would be that of the few during which a
/// neighbour had the core.
pub(super) fn median(slice: Duration, mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut times = Vec::with_capacity(1 << 16);
    let mut before = start;
    loop {
        f();
        let now = Instant::now();
        times.push(now - before);
        before = now;
        if now - start >= slice {
            let middle = times.len() / 2;
            return times.select_nth_unstable(middle).1.as_secs_f64() * 1e6;
        }
    }
}

fn echo() -> Echo {
    Echo::start().unwrap_or_else(|e| panic!("the null device: {e}"))
}

/// A word that two threads hand to each other: the least that any two sides that poll can take.
fn hand_off(slice: Duration) -> f64 {
    let word = Arc::new((AtomicU64::new(0), AtomicBool::new(false)));
    let other = Arc::clone(&word);
    let partner = std::thread::spawn(move || {
        Cores::get().device();
        while !other.1.load(Ordering::Relaxed) {
            let seen = other.0.load(Ordering::Acquire);
            if seen % 2 == 1 {
                other.0.store(seen + 1, Ordering::Release);
            }
        }
    });
    let mut next = 0;
    let took = median(slice, || {
        word.0.store(next + 1, Ordering::Release);
        while word.0.load(Ordering::Acquire) != next + 2 {
            std::hint::spin_loop();
        }
        next += 2;
    });
    word.1.store(true, Ordering::Relaxed);
    partner.join().expect("the partner");
    took
}

/// Posts a work request and polls until it is complete.
pub(super) fn post_and_poll(end: &mut End, request: &SendWr) {
    end.qp.post_send(request);
    poll_one(&mut end.scq);
}

/// Polls for a completion, which tells of success.
pub(super) fn poll_one(cq: &mut Cq) {
    let start = Instant::now();
    let cqe = loop {
        if let Some(cqe) = cq.poll() {
            break cqe;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "no completion");
    };
    assert_eq!(cqe.status, status::SUCCESS);
}

/// An 8-byte write from post to completion, both sides polling.
pub(super) fn polled(name: &str, effort: Effort) -> Row {
    let world = super::world();
    let (mut a, b) = world.rc_pair();
    let word = b.node.mr(8);
    let request = SendWr::write(1, &[], word.addr(0), word.rkey).inline(&[1; 8]);
    let samples: Vec<_> = (0..effort.samples)
        .map(|_| {
            let reference = hand_off(effort.slice);
            (median(effort.slice, || post_and_poll(&mut a, &request)), reference)
        })
        .collect();
    Row::best(name, "us", Better::Less, Some(Target::Ratio(4.0)), &samples)
}

/// Sleeps until `end` received something, as a program with a completion channel does.
fn sleep_for_receive(end: &mut End) -> bool {
    loop {
        end.rcq.arm(ARM_ANY);
        if let Some(cqe) = end.rcq.poll() {
            assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
            return true;
        }
        match end.node.guest.comp_event(0, Duration::from_secs(5)) {
            Ok(Some(_)) => {}
            _ => return false,
        }
    }
}

/// Ping and pong between two guests that sleep: a sample is made of a round, which brings each of
/// them an event.
fn ping_pong(
    world: &World,
    effort: Effort,
    mut sample: impl FnMut(&mut dyn FnMut()) -> (f64, f64),
) -> Vec<(f64, f64)> {
    let (mut a, mut b) = world.rc_pair();
    let (inbox_a, inbox_b) = (a.node.mr(64), b.node.mr(64));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let partner = scope.spawn(|| {
            b.qp.post_recv(0, &[inbox_b.sge(0, 64)]);
            while sleep_for_receive(&mut b) && !stop.load(Ordering::SeqCst) {
                b.qp.post_recv(0, &[inbox_b.sge(0, 64)]);
                b.qp.post_send(&SendWr::send(1, &[]).inline(&[2; 8]));
                while b.scq.poll().is_some() {}
            }
        });
        let mut round = || {
            a.qp.post_recv(0, &[inbox_a.sge(0, 64)]);
            a.qp.post_send(&SendWr::send(1, &[]).inline(&[1; 8]));
            assert!(sleep_for_receive(&mut a), "no answer");
            while a.scq.poll().is_some() {}
        };
        let samples = (0..effort.samples).map(|_| sample(&mut round)).collect();
        stop.store(true, Ordering::SeqCst);
        a.qp.post_send(&SendWr::send(1, &[]).inline(&[1; 8]));
        partner.join().expect("the partner");
        samples
    })
}

/// The time of a round of [`ping_pong`], beside two trips through the null device.
pub(super) fn event(name: &str, effort: Effort) -> Row {
    let (world, mut null) = (super::world(), echo());
    let samples = ping_pong(&world, effort, |round| {
        let reference = 2.0 * null.trip(effort.slice);
        (median(effort.slice, round), reference)
    });
    Row::best(name, "us", Better::Less, Some(Target::Ratio(1.25)), &samples)
}

/// What an event may cost, in microseconds: it was so much once, at the least.
const EVENT: Target = Target::Value(46.0);
/// Events of a sample at least: processor time is known to a tick only.
const EVENTS: u32 = 2048;

/// Processor time of `process` in each of the calls that fit into a slice, in microseconds.
fn processor_time(process: impl Fn() -> f64, slice: Duration, f: &mut dyn FnMut()) -> f64 {
    let (start, cpu, mut calls) = (Instant::now(), process(), 0u32);
    while calls < EVENTS || start.elapsed() < slice {
        f();
        calls += 1;
    }
    (process() - cpu) / f64::from(calls) * 1e6
}

/// Processor time of all threads of the daemon for a completion event that was armed and is
/// delivered, beside a trip through the null device, which tells its driver as well.
///
/// Each event is of a message to a guest that sleeps, and finds the daemon asleep: its time is that
/// of the kick, the message, the event, and of the looks before it sleeps again.
pub(super) fn event_cpu(name: &str, effort: Effort) -> Row {
    let (world, mut null) = (super::world(), echo());
    let samples = ping_pong(&world, effort, |round| {
        let pid = null.pid();
        let reference =
            processor_time(|| processor_of(&[pid]), effort.slice, &mut || null.round_trip());
        let daemon = world.daemon.pids();
        // Two events a round.
        (processor_time(|| processor_of(&daemon), effort.slice, round) / 2.0, reference)
    });
    Row::best(name, "us/event", Better::Less, Some(EVENT), &samples)
}

/// Control commands, `commands` in each call of `f`, beside as many trips through the null device.
fn control(name: &str, effort: Effort, commands: u32, mut f: impl FnMut(&Node)) -> Row {
    let world = super::world();
    let node = world.node();
    let mut null = echo();
    f(&node);
    let samples: Vec<_> = (0..effort.samples)
        .map(|_| {
            let reference = f64::from(commands) * null.trip(effort.slice);
            (median(effort.slice, || f(&node)), reference)
        })
        .collect();
    Row::best(name, "us", Better::Less, Some(Target::Ratio(2.0)), &samples)
}

/// PD_CREATE and PD_DESTROY.
pub(super) fn control_pd(name: &str, effort: Effort) -> Row {
    control(name, effort, 2, |node| {
        let pdn = node.ctx.create_pd().expect("PD_CREATE");
        node.ctx.destroy_pd(pdn).expect("PD_DESTROY");
    })
}

/// MR_REG of a page and MR_DEREG.
pub(super) fn control_mr(name: &str, effort: Effort) -> Row {
    let mut kept = None;
    control(name, effort, 2, move |node| {
        let page = kept.get_or_insert_with(|| node.guest.ram().alloc(1));
        let list = crate::pages::PageList::contiguous(page.gpa(0), 1, 0, 12);
        let flags = crate::spec::access::ALL;
        let (lkey, _) = node.ctx.mr_reg(node.pdn, flags, (0x1000, 4096), &list).expect("MR_REG");
        node.ctx.dereg(lkey).expect("MR_DEREG");
    })
}

/// A queue pair from its creation to RTS and its destruction: five commands.
pub(super) fn control_qp(name: &str, effort: Effort) -> Row {
    let mut kept = None;
    control(name, effort, 5, move |node| {
        let (scq, rcq) = kept.get_or_insert_with(|| (node.cq(64), node.cq(64)));
        let qp =
            Qp::create(&node.ctx, node.pdn, scq, rcq, &QpSpec::new(qpt::RC)).expect("QP_CREATE");
        qp.connect((node.gid, qp.qpn), &Path::default()).expect("RESET to RTS");
        qp.destroy().expect("QP_DESTROY");
    })
}

/// Context switches of all threads of a daemon whose guests have nothing to do.
pub(super) fn idle(name: &str, effort: Effort) -> Row {
    let world = super::world();
    let (mut a, b) = world.rc_pair();
    let word = b.node.mr(8);
    a.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey).inline(&[1; 8]));
    // Longer than the daemon's runtime keeps a helper thread of its start-up (10 s), so that its
    // end is no wake-up of an idle daemon.
    std::thread::sleep(Duration::from_secs(12));
    let before = world.daemon.context_switches().expect("/proc");
    std::thread::sleep(effort.idle);
    let after = world.daemon.context_switches().expect("/proc");
    let grown = after.iter().map(|(thread, n)| n - before.get(thread).copied().unwrap_or(0));
    // A thread that ended meanwhile woke up to do so.
    let ended = before.keys().filter(|thread| !after.contains_key(*thread)).count() as u64;
    let switches = grown.sum::<u64>() + ended;
    // The reference is the time watched: the ratio is switches per second.
    let sample = (switches as f64, effort.idle.as_secs_f64());
    Row::best(name, "switches", Better::Less, Some(Target::Value(0.0)), &[sample])
}
