//! Waking a worker that may or may not be asleep, with a system call only if it is.
//!
//! Dekker's pattern twice, once for jobs and once for doorbells. The worker, before it sleeps: *stores* `asleep`, full fence, *looks* (at the
//! mailbox, and through `prepare_sleep` at the doorbells). The other side: *stores* what is to be found, full fence, *reads* `asleep`. At
//! least one of the two sees the other. For a doorbell the other side's store is the guest's producer index, and what the guest
//! reads is `NEED_KICK`, which the worker sets *after* `asleep` and before its look: so a kick that follows from `NEED_KICK` finds `asleep` set,
//! and any other kick is for a doorbell that the worker's look will see.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::protocol::{self, Cpu, Flag as _};

#[derive(Debug)]
pub(super) struct Waker {
    asleep: AtomicBool,
    fd: OwnedFd,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { asleep: AtomicBool::new(false), fd })
    }

    /// Makes the worker look again, if it sleeps or is about to. What it shall find must have been stored before.
    #[inline]
    pub(super) fn wake(&self) {
        if protocol::must_wake(&self.asleep, &Cpu) {
            // A full counter (EAGAIN) wakes as well; nothing else can go wrong with an eventfd of our own.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Announces the sleep; the worker must look at everything once more before it calls [`sleep`](Self::sleep).
    pub(super) fn announce(&self) {
        protocol::announce_sleep(&self.asleep, &Cpu);
    }

    /// Takes the announcement back.
    pub(super) fn stay_awake(&self) {
        self.asleep.set(false);
    }

    /// Sleeps until someone wakes us or `timeout` is over.
    pub(super) fn sleep(&self, timeout: Option<Duration>) {
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)];
        // An interrupted wait is a wake-up like any other.
        if poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0) {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.fd, &mut count);
        }
        self.stay_awake();
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
            waker.sleep(Some(Duration::from_secs(5)));
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
        waker.sleep(Some(Duration::from_millis(20)));
        assert!(
            begin.elapsed() >= Duration::from_millis(20),
            "the eventfd was written though nobody slept"
        );
    }
}
