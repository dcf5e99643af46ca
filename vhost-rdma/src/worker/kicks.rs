//! What a worker sleeps on: an eventfd of its own, and the kick descriptors of guests.
//!
//! A kick need not pass a thread of ours: the guest's own kick descriptors can be among what the
//! worker sleeps on ([`Kicks::watch`]). All are watched edge-triggered, so nothing is ever read
//! from them. What is to be heard stays with the epoll set until the worker asks for it: when it
//! wakes ([`Kicks::sleep`]), or now and then while it is awake ([`Kicks::hear`]), since some of its
//! NICs may be parked.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::epoll::{CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};

use crate::link::NicId;

/// Descriptors that are looked at in one wake-up; more make it spurious once more.
const EVENTS: usize = 16;
/// Kicks that may wait to be counted; more are not.
const LATE: usize = 256;
/// The token of the waker's own descriptor.
const OWN: u64 = 0;
/// The half of a token that tells of no NIC.
const NOBODY: u32 = u32::MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct Kicks {
    fd: OwnedFd,
    epoll: OwnedFd,
    counters: Mutex<Counters>,
}

/// The kick descriptors that are watched, by token, each with its counter.
#[derive(Debug, Default)]
pub(super) struct Counters {
    last: u32,
    by_token: BTreeMap<u64, Arc<AtomicU64>>,
}

impl Counters {
    /// A token that nobody has, for a NIC's descriptor.
    fn token(&mut self, nic: Option<NicId>) -> u64 {
        let whose = u64::from(nic.map_or(NOBODY, |nic| nic.0)) << 32;
        loop {
            self.last = self.last.wrapping_add(1);
            let token = whose | u64::from(self.last);
            if token != OWN && !self.by_token.contains_key(&token) {
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
    pub(super) late: Vec<u64>,
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
    kicks: Arc<Kicks>,
    fd: OwnedFd,
    token: u64,
}

impl Kicks {
    pub(super) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &fd, EventData::new_u64(OWN), EventFlags::IN | EventFlags::ET)?;
        Ok(Self { fd, epoll, counters: Mutex::default() })
    }

    /// Lets a guest's kicks wake the worker and tell it whose they are, and counts them.
    pub(super) fn watch(
        self: &Arc<Self>,
        nic: Option<NicId>,
        fd: OwnedFd,
        counter: Arc<AtomicU64>,
    ) -> io::Result<WatchedKick> {
        let token = {
            let mut counters = self.counters();
            let token = counters.token(nic);
            counters.by_token.insert(token, counter);
            token
        };
        // Not under the lock, which the worker takes: how long it takes is up to whose descriptor
        // it is.
        let data = EventData::new_u64(token);
        let added = epoll::add(&self.epoll, &fd, data, EventFlags::IN | EventFlags::ET);
        if let Err(error) = added {
            self.counters().by_token.remove(&token);
            return Err(error.into());
        }
        Ok(WatchedKick { kicks: self.clone(), fd, token })
    }

    pub(super) fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the worker's sleep, or the next one.
    pub(super) fn wake(&self) {
        // A full counter (EAGAIN) wakes as well; nothing else can go wrong with an eventfd of our
        // own.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Sleeps until something wakes us or `timeout` is over; `woken` is done before all else.
    pub(super) fn sleep(&self, timeout: Option<Duration>, heard: &mut Heard, woken: impl FnOnce()) {
        let mut events = none();
        // An interrupted wait is a wake-up like any other.
        let ready = self.wait(&mut events, timeout).unwrap_or(0);
        woken();
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

impl Kicks {
    fn take(&self, events: &[Event; EVENTS], ready: usize, heard: &mut Heard) {
        for event in events.iter().take(ready) {
            heard.note(event.data.u64());
        }
        if !heard.late.is_empty() {
            self.count(&mut heard.late);
        }
    }

    fn count(&self, kicks: &mut Vec<u64>) {
        let Ok(known) = self.counters.try_lock() else {
            return kicks.truncate(LATE);
        };
        for token in kicks.drain(..) {
            if let Some(counter) = known.by_token.get(&token) {
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
        if let Err(error) = epoll::delete(&self.kicks.epoll, &self.fd) {
            tracing::warn!(%error, "a kick descriptor stays watched");
        }
        self.kicks.counters().by_token.remove(&self.token);
    }
}
