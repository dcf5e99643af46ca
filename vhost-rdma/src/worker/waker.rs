//! Waking a worker that may or may not be asleep, with a system call only if it is.
//!
//! Dekker's pattern twice, once for jobs and once for doorbells. The worker, before it sleeps:
//! *stores* `asleep`, full fence, *looks* (at the mailbox, and through `prepare_sleep` at the
//! doorbells). The other side: *stores* what is to be found, full fence, *reads* `asleep`. At least
//! one of the two sees the other. For a doorbell the other side's store is the guest's producer
//! index, and what the guest reads is `NEED_KICK`, which the worker sets *after* `asleep` and
//! before its look: so a kick that follows from `NEED_KICK` finds `asleep` set, and any other kick
//! is for a doorbell that the worker's look will see.
//!
//! A kick need not pass a thread of ours: the guest's own kick descriptors can be among what the
//! worker sleeps on ([`Waker::watch`]). All are watched edge-triggered, so nothing is ever read
//! from them. What is to be heard stays with the epoll set until the worker asks for it: when it
//! wakes ([`Waker::sleep`]), or now and then while it is awake ([`Waker::hear`]), since some of its
//! NICs may be parked.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::epoll::{CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};

use crate::link::NicId;
use crate::ordering::{self, Cpu, Flag as _};

/// Descriptors that are looked at in one wake-up; more make it spurious once more.
const EVENTS: usize = 16;
/// Kicks that may wait to be counted; more are not.
const LATE: usize = 256;
/// The token of the waker's own descriptor.
const OWN: u64 = 0;
/// The half of a token that tells of no NIC.
const NOBODY: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct Waker {
    asleep: AtomicBool,
    fd: OwnedFd,
    epoll: OwnedFd,
    kicks: Mutex<Kicks>,
}

/// The kick descriptors that are watched, by token, each with its counter.
#[derive(Debug, Default)]
struct Kicks {
    last: u32,
    counters: BTreeMap<u64, Arc<AtomicU64>>,
}

impl Kicks {
    /// A token that nobody has, for a NIC's descriptor.
    fn token(&mut self, nic: Option<NicId>) -> u64 {
        let whose = u64::from(nic.map_or(NOBODY, |nic| nic.0)) << 32;
        loop {
            self.last = self.last.wrapping_add(1);
            let token = whose | u64::from(self.last);
            if token != OWN && !self.counters.contains_key(&token) {
                return token;
            }
        }
    }
}

/// Kicks that the worker heard of.
#[derive(Debug, Default)]
pub(super) struct Heard {
    nics: Vec<NicId>,
    /// Those that are still to be counted.
    late: Vec<u64>,
}

impl Heard {
    /// A NIC whose guest kicked, once for each kick.
    pub(super) fn next(&mut self) -> Option<NicId> {
        self.nics.pop()
    }

    fn note(&mut self, token: u64) {
        if token == OWN {
            return;
        }
        self.late.push(token);
        let whose = u32::try_from(token >> 32).unwrap_or(NOBODY);
        if whose != NOBODY {
            self.nics.push(NicId(whose));
        }
    }
}

/// A kick descriptor that wakes a worker for as long as this lives.
#[derive(Debug)]
pub struct WatchedKick {
    waker: Arc<Waker>,
    fd: OwnedFd,
    token: u64,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &fd, EventData::new_u64(OWN), EventFlags::IN | EventFlags::ET)?;
        Ok(Self { asleep: AtomicBool::new(false), fd, epoll, kicks: Mutex::default() })
    }

    /// Lets a guest's kicks wake the worker and tell it whose they are, and counts them.
    pub(super) fn watch(
        self: &Arc<Self>,
        nic: Option<NicId>,
        fd: OwnedFd,
        counter: Arc<AtomicU64>,
    ) -> io::Result<WatchedKick> {
        let token = {
            let mut kicks = self.kicks();
            let token = kicks.token(nic);
            kicks.counters.insert(token, counter);
            token
        };
        // Not under the lock, which the worker takes: how long it takes is up to whose descriptor
        // it is.
        let data = EventData::new_u64(token);
        let added = epoll::add(&self.epoll, &fd, data, EventFlags::IN | EventFlags::ET);
        if let Err(error) = added {
            self.kicks().counters.remove(&token);
            return Err(error.into());
        }
        Ok(WatchedKick { waker: self.clone(), fd, token })
    }

    fn kicks(&self) -> MutexGuard<'_, Kicks> {
        self.kicks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the worker look again, if it sleeps or is about to. What it shall find must have been
    /// stored before.
    #[inline]
    pub(super) fn wake(&self) {
        if ordering::must_wake(&self.asleep, &Cpu) {
            // A full counter (EAGAIN) wakes as well; nothing else can go wrong with an eventfd of
            // our own.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Announces the sleep; the worker must look at everything once more before it calls
    /// [`sleep`](Self::sleep).
    pub(super) fn announce(&self) {
        ordering::announce_sleep(&self.asleep, &Cpu);
    }

    /// Takes the announcement back.
    pub(super) fn stay_awake(&self) {
        self.asleep.set(false);
    }

    /// Sleeps until someone wakes us or `timeout` is over. Kicks that could not be counted are left
    /// in `heard`: whoever has the lock of the counters may have lost its processor.
    pub(super) fn sleep(&self, timeout: Option<Duration>, heard: &mut Heard) {
        let mut events = none();
        // An interrupted wait is a wake-up like any other.
        let ready = self.wait(&mut events, timeout).unwrap_or(0);
        self.stay_awake();
        self.take(&events, ready, heard);
    }

    /// Hears kicks without a wait; true: there may be more.
    pub(super) fn hear(&self, heard: &mut Heard) -> bool {
        let mut events = none();
        let ready = epoll::wait(&self.epoll, &mut events, Some(&Timespec::default())).unwrap_or(0);
        self.take(&events, ready, heard);
        ready == EVENTS
    }
}

fn none() -> [Event; EVENTS] {
    [Event { flags: EventFlags::empty(), data: EventData::new_u64(OWN) }; EVENTS]
}

impl Waker {
    fn take(&self, events: &[Event; EVENTS], ready: usize, heard: &mut Heard) {
        for event in events.iter().take(ready) {
            heard.note(event.data.u64());
        }
        if !heard.late.is_empty() {
            self.count(&mut heard.late);
        }
    }

    fn count(&self, kicks: &mut Vec<u64>) {
        let Ok(known) = self.kicks.try_lock() else {
            return kicks.truncate(LATE);
        };
        for token in kicks.drain(..) {
            if let Some(counter) = known.counters.get(&token) {
                counter.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// `epoll_wait` has milliseconds and its successor may not be there, so a timeout is waited for
    /// with `ppoll`, on the epoll set.
    fn wait(&self, events: &mut [Event; EVENTS], timeout: Option<Duration>) -> io::Result<usize> {
        let Some(timeout) = timeout.and_then(|time| Timespec::try_from(time).ok()) else {
            return Ok(epoll::wait(&self.epoll, events, None)?);
        };
        let mut set = [PollFd::from_borrowed_fd(self.epoll.as_fd(), PollFlags::IN)];
        match poll(&mut set, Some(&timeout))? {
            0 => Ok(0),
            _ => Ok(epoll::wait(&self.epoll, events, Some(&Timespec::default()))?),
        }
    }
}

impl Drop for WatchedKick {
    /// Explicitly: the VMM has the same eventfd open, so closing ours would not take it out of the
    /// epoll set.
    fn drop(&mut self) {
        if let Err(error) = epoll::delete(&self.waker.epoll, &self.fd) {
            tracing::warn!(%error, "a kick descriptor stays watched");
        }
        self.waker.kicks().counters.remove(&self.token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

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
        let held = waker.kicks();
        sleep(&mut heard);
        assert_eq!((heard.late.len(), counter.load(Ordering::Relaxed)), (1, 0));
        drop(held);
        sleep(&mut heard);
        assert_eq!((heard.late.len(), counter.load(Ordering::Relaxed)), (0, 2));
    }
}
