//! Waking a worker, by jobs and by kicks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::link::NicId;
use crate::worker::kicks::Heard;
use crate::worker::waker::Waker;

#[test]
fn no_wake_is_lost() {
    const ROUNDS: u32 = 20_000;
    let waker = Arc::new(Waker::new().expect("eventfd"));
    let posted = Arc::new(AtomicU32::new(0));
    let (theirs, count) = (waker.clone(), posted.clone());
    let poster = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            count.fetch_add(1, Ordering::Relaxed);
            theirs.wake();
            if round % 64 == 0 {
                std::thread::yield_now();
            }
        }
    });
    let begin = Instant::now();
    let mut seen = 0;
    while seen < ROUNDS {
        waker.announce();
        let now = posted.load(Ordering::Relaxed);
        if now != seen {
            seen = now;
            waker.stay_awake();
            continue;
        }
        waker.sleep(Some(Duration::from_secs(5)), &mut Heard::default());
    }
    poster.join().expect("poster");
    assert!(begin.elapsed() < Duration::from_secs(5), "a lost wake-up costs the whole timeout");
}

#[test]
fn waking_the_waking_costs_nothing() {
    let waker = Waker::new().expect("eventfd");
    waker.wake();
    let begin = Instant::now();
    waker.announce();
    waker.sleep(Some(Duration::from_millis(20)), &mut Heard::default());
    assert!(
        begin.elapsed() >= Duration::from_millis(20),
        "the eventfd was written though nobody slept"
    );
}

#[test]
fn a_watched_kick_wakes_and_is_counted_until_it_is_let_go() {
    let long = Some(Duration::from_secs(5));
    let waker = Arc::new(Waker::new().expect("epoll"));
    // The VMM's own descriptor of the same eventfd.
    let vmm = eventfd(0, EventfdFlags::NONBLOCK).expect("eventfd");
    let counter = Arc::new(AtomicU64::new(0));
    let ours = vmm.try_clone().expect("dup");
    let kick = waker.watch(Some(NicId(0)), ours, counter.clone()).expect("watched");
    for round in 1..=3 {
        // Never read, and yet each new kick wakes.
        rustix::io::write(&vmm, &1u64.to_ne_bytes()).expect("room");
        let begin = Instant::now();
        waker.announce();
        waker.sleep(if round == 2 { None } else { long }, &mut Heard::default());
        assert!(begin.elapsed() < Duration::from_secs(4));
        assert_eq!(counter.load(Ordering::Relaxed), round);
    }
    drop(kick);
    rustix::io::write(&vmm, &1u64.to_ne_bytes()).expect("room");
    let begin = Instant::now();
    waker.announce();
    waker.sleep(Some(Duration::from_millis(20)), &mut Heard::default());
    assert!(begin.elapsed() >= Duration::from_millis(20), "it was let go");
    assert_eq!(counter.load(Ordering::Relaxed), 3);
}

#[test]
fn who_is_awake_hears_whose_kick_it_was_once() {
    let waker = Arc::new(Waker::new().expect("epoll"));
    let vmms = [(); 3].map(|()| eventfd(0, EventfdFlags::NONBLOCK).expect("eventfd"));
    let counter = Arc::new(AtomicU64::new(0));
    let nics = [Some(NicId(0)), Some(NicId(7)), None];
    let _kicks: Vec<_> = (vmms.iter().zip(nics))
        .map(|(vmm, nic)| waker.watch(nic, vmm.try_clone().expect("dup"), counter.clone()))
        .collect();
    let hear = || {
        let mut heard = Heard::default();
        assert!(!waker.hear(&mut heard));
        let mut nics: Vec<_> = std::iter::from_fn(|| heard.next()).collect();
        nics.sort();
        nics
    };
    assert_eq!(hear(), []);
    for vmm in &vmms {
        rustix::io::write(vmm, &1u64.to_ne_bytes()).expect("room");
    }
    assert_eq!(hear(), [NicId(0), NicId(7)]);
    assert_eq!((hear(), counter.load(Ordering::Relaxed)), (vec![], 3));
    rustix::io::write(&vmms[1], &1u64.to_ne_bytes()).expect("room");
    assert_eq!(hear(), [NicId(7)], "a kick more, though nobody read the first");
}

#[test]
fn a_worker_does_not_wait_for_who_counts_and_nothing_is_lost() {
    let waker = Arc::new(Waker::new().expect("epoll"));
    let vmm = eventfd(0, EventfdFlags::NONBLOCK).expect("eventfd");
    let counter = Arc::new(AtomicU64::new(0));
    let ours = vmm.try_clone().expect("dup");
    let _kick = waker.watch(Some(NicId(0)), ours, counter.clone()).expect("watched");
    let mut heard = Heard::default();
    let sleep = |heard: &mut Heard| {
        rustix::io::write(&vmm, &1u64.to_ne_bytes()).expect("room");
        waker.announce();
        waker.sleep(Some(Duration::from_secs(5)), heard);
    };
    let held = waker.kicks().counters();
    sleep(&mut heard);
    assert_eq!((heard.late.len(), counter.load(Ordering::Relaxed)), (1, 0));
    drop(held);
    sleep(&mut heard);
    assert_eq!((heard.late.len(), counter.load(Ordering::Relaxed)), (0, 2));
}
