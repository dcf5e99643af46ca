//! One worker thread with a real shard.

use std::fs;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::link::NicId;
use crate::random::SystemRandom;
use crate::shard::Shard;
use crate::worker::carrier::Carrier;
use crate::worker::mailbox::mailbox;
use crate::worker::shard_thread::{Mail, Runner, spawn};
use crate::worker::turn_stats::TurnStats;
use crate::worker::{CallError, Clock, Progress, WorkerConfig, WorkerHandle};

const LONG: Duration = Duration::from_secs(5);

fn worker(index: u32, poll_us: u32) -> (WorkerHandle, JoinHandle<()>) {
    let shard = Shard::new(Box::new(SystemRandom::new().expect("random numbers")));
    let carrier = Carrier::all(1).expect("a waker").remove(0);
    spawn(index, shard, WorkerConfig { poll_us, ..WorkerConfig::default() }, carrier)
        .expect("a thread")
}

/// Voluntary context switches of the thread of that name.
fn sleeps(name: &str) -> u64 {
    let task = fs::read_dir("/proc/self/task")
        .expect("procfs")
        .map(|task| task.expect("a task").path())
        .find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name))
        .expect("the thread runs");
    let status = fs::read_to_string(task.join("status")).expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).expect("a count")
}

#[test]
fn jobs_run_in_order_and_answer() {
    let (handle, thread) = worker(90, 0);
    let (sender, order) = channel();
    for number in 0..100 {
        let sender = sender.clone();
        assert!(handle.post(None, move |_, _| sender.send(number).expect("received")));
    }
    assert_eq!(handle.call(None, LONG, |_, now| now > 0), Ok(true));
    assert_eq!(order.try_iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
    handle.stop();
    thread.join().expect("it ends in order");
    assert!(!handle.post(None, |_, _| ()), "nobody is there any more");
    assert_eq!(handle.call(None, LONG, |_, _| ()), Err(CallError::Failed));
}

#[test]
fn a_job_that_panics_costs_nobody_else() {
    let (handle, thread) = worker(91, 0);
    assert_eq!(
        handle.call(Some(NicId(3)), LONG, |_, _| panic!("on purpose")),
        Err::<(), _>(CallError::Failed)
    );
    assert_eq!(handle.call(None, LONG, |_, _| 7), Ok(7));
    handle.stop();
    thread.join().expect("it ends in order");
}

#[test]
fn a_caller_does_not_wait_for_ever() {
    let (handle, thread) = worker(92, 0);
    handle.post(None, |_, _| thread::sleep(Duration::from_millis(50)));
    assert_eq!(handle.call(None, Duration::from_millis(1), |_, _| ()), Err(CallError::Timeout));
    assert_eq!(handle.call(None, LONG, |_, _| ()), Ok(()));
    handle.stop();
    thread.join().expect("it ends in order");
}

#[test]
fn an_idle_worker_sleeps_and_one_that_has_work_does_not() {
    let (handle, thread) = worker(93, 20_000);
    handle.call(None, LONG, |_, _| ()).expect("an answer");
    // It polls for 20 ms: another job needs no wake-up.
    let begin = Instant::now();
    let before = sleeps("vrdma-shard-93");
    handle.call(None, LONG, |_, _| ()).expect("an answer");
    let during = sleeps("vrdma-shard-93") - before;
    assert!(begin.elapsed() > Duration::from_millis(15) || during == 0, "it slept {during} times");
    // Then it sleeps, and makes no wake-ups of its own.
    let deadline = Instant::now() + LONG;
    while sleeps("vrdma-shard-93") == during + before && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    let before = sleeps("vrdma-shard-93");
    thread::sleep(Duration::from_millis(200));
    assert_eq!(sleeps("vrdma-shard-93"), before);
    handle.kick();
    assert_eq!(handle.call(None, LONG, |_, _| 1), Ok(1));
    handle.stop();
    thread.join().expect("it ends in order");
}

#[test]
fn a_caller_waits_for_as_long_as_the_worker_goes_on_and_others_are_served_between() {
    const PATIENCE: Duration = Duration::from_millis(400);
    let (handle, thread) = worker(94, 0);
    let slow = handle.clone();
    let (begun, wait) = channel();
    let caller = thread::spawn(move || {
        let mut left = 40;
        slow.call_in_steps(None, PATIENCE, move |_, _| {
            let _ = begun.send(());
            thread::sleep(Duration::from_millis(25));
            left -= 1;
            if left == 0 { Progress::Done(7) } else { Progress::More }
        })
    });
    wait.recv().expect("it has begun");
    assert_eq!(handle.call(None, LONG, |_, _| 1), Ok(1));
    assert!(!caller.is_finished(), "this was served between two of its steps");
    assert_eq!(caller.join().expect("a caller"), Ok(7), "a second is more than its patience");
    handle.stop();
    thread.join().expect("it ends in order");
}

#[test]
fn jobs_wait_while_rounds_that_find_work_have_their_time() {
    let shard = Shard::new(Box::new(SystemRandom::new().expect("random numbers")));
    let (sender, mailbox) = mailbox();
    let carrier = Carrier::all(1).expect("descriptors").remove(0);
    let waker = carrier.waker();
    let mut runner = Runner::new(shard, mailbox, carrier, (Clock::new(), 0));
    let handle = WorkerHandle::new(sender, waker, Arc::new(TurnStats::new(runner.clock)));
    let (done, jobs) = channel();
    let post = |time: Duration| {
        let done = done.clone();
        assert!(handle.post(None, move |_, _| {
            let begin = Instant::now();
            while begin.elapsed() < time {}
            done.send(()).expect("received");
        }));
    };
    post(Duration::from_millis(2));
    post(Duration::ZERO);
    assert!(runner.drain() == Mail::Some);
    let end = Instant::now();
    assert_eq!(jobs.try_iter().count(), 1, "it took longer than a turn's jobs may");
    while runner.drain() == Mail::Some && jobs.try_recv().is_err() {}
    // A job that took 2 ms is followed by the most that is owed, a millisecond.
    assert!(end.elapsed() > Duration::from_micros(900), "{:?}", end.elapsed());
    // Rounds that find nothing are owed nothing.
    post(Duration::from_millis(2));
    post(Duration::ZERO);
    runner.job_share.round_was_idle();
    assert!(runner.drain() == Mail::Some);
    runner.job_share.round_was_idle();
    assert!(runner.drain() != Mail::Stop);
    assert_eq!(jobs.try_iter().count(), 2);
}
