//! The driver's half of a split virtqueue (VIRTIO 1.2, section 2.7), built by hand in guest memory.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::ram::{Pages, Ram, View};
use crate::spec::PAGE;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const AVAIL_NO_INTERRUPT: u16 = 1;

/// A split virtqueue with its two eventfds.
#[derive(Debug)]
pub struct Virtq {
    size: u16,
    pages: Pages,
    view: View,
    avail: u64,
    used: u64,
    free: Vec<u16>,
    avail_idx: u16,
    last_used: u16,
    kicked_at: u16,
    event_idx: bool,
    waiter: Epoll,
    /// The device signals this one.
    pub call: EventFd,
    /// The driver signals this one.
    pub kick: EventFd,
}

/// Waits for an eventfd of one queue.
fn watch(fd: &EventFd) -> io::Result<Epoll> {
    let epoll = Epoll::new()?;
    epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
    Ok(epoll)
}

impl Virtq {
    /// A queue of `size` (a power of two) entries in freshly allocated memory.
    pub fn new(ram: &Arc<Ram>, size: u16, event_idx: bool) -> io::Result<Self> {
        let n = u64::from(size);
        let avail = 16 * n;
        let used = (avail + 6 + 2 * n).next_multiple_of(4);
        let bytes = used + 6 + 8 * n;
        let pages = ram.alloc(bytes.div_ceil(PAGE) as usize);
        let view = pages.view(0, pages.len());
        let call = EventFd::new(EFD_NONBLOCK)?;
        let mut queue = Self {
            size,
            pages,
            view,
            avail,
            used,
            free: Vec::new(),
            avail_idx: 0,
            last_used: 0,
            kicked_at: 0,
            event_idx,
            waiter: watch(&call)?,
            call,
            kick: EventFd::new(EFD_NONBLOCK)?,
        };
        queue.reset();
        Ok(queue)
    }

    /// Empties the queue and starts again at index 0, as a new driver would.
    pub fn reset(&mut self) {
        self.view.fill(0, self.view.len(), 0);
        self.free = (0..self.size).rev().collect();
        self.avail_idx = 0;
        self.last_used = 0;
        self.kicked_at = 0;
        // A call that belonged to the former life must not be taken for one of this.
        let _stale = self.call.read();
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Descriptors that are free.
    pub fn free_descriptors(&self) -> usize {
        self.free.len()
    }

    /// The descriptor that the next chain will start with, if it has one part.
    pub fn next_free(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Guest-physical addresses of the descriptor table, the available ring and the used ring.
    pub fn addresses(&self) -> (u64, u64, u64) {
        (self.pages.gpa(0), self.pages.gpa(self.avail), self.pages.gpa(self.used))
    }

    /// The queue's memory, for tests that misbehave: descriptors at 0, then the available ring.
    pub fn raw(&self) -> (&View, u64, u64) {
        (&self.view, self.avail, self.used)
    }

    /// The next available index to be used.
    pub fn avail_idx(&self) -> u16 {
        self.avail_idx
    }

    /// Makes a chain available: readable parts first, then writable ones, each (address, length).
    /// Returns its head.
    pub fn add(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Option<u16> {
        let total = readable.len() + writable.len();
        if total == 0 || self.free.len() < total {
            return None;
        }
        let parts = readable.iter().map(|p| (p, 0)).chain(writable.iter().map(|p| (p, DESC_WRITE)));
        let ids = self.free.split_off(self.free.len() - total);
        for (i, ((addr, len), flag)) in parts.enumerate() {
            let at = u64::from(ids[i]) * 16;
            let next = ids.get(i + 1);
            self.view.store64(at, *addr, Ordering::Relaxed);
            self.view.store32(at + 8, *len, Ordering::Relaxed);
            let flags = flag | if next.is_some() { DESC_NEXT } else { 0 };
            self.view.store16(at + 12, flags, Ordering::Relaxed);
            self.view.store16(at + 14, next.copied().unwrap_or(0), Ordering::Relaxed);
        }
        self.publish(ids[0]);
        Some(ids[0])
    }

    /// Makes `head` available without looking at what it is.
    pub fn publish(&mut self, head: u16) {
        let slot = u64::from(self.avail_idx % self.size);
        self.view.store16(self.avail + 4 + 2 * slot, head, Ordering::Relaxed);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.view.store16(self.avail + 2, self.avail_idx, Ordering::Release);
    }

    /// Notifies the device unless it said that it needs none.
    pub fn kick(&mut self) -> io::Result<()> {
        fence(Ordering::SeqCst);
        let needed = if self.event_idx {
            let event =
                self.view.load16(self.used + 4 + 8 * u64::from(self.size), Ordering::Relaxed);
            // VIRTIO 2.7.10: notify if the index just crossed avail_event.
            self.avail_idx.wrapping_sub(event).wrapping_sub(1)
                < self.avail_idx.wrapping_sub(self.kicked_at)
        } else {
            self.view.load16(self.used, Ordering::Relaxed) & 1 == 0
        };
        self.kicked_at = self.avail_idx;
        if needed { self.kick.write(1) } else { Ok(()) }
    }

    /// The next used chain: its head and the bytes that the device says it wrote.
    pub fn poll(&mut self) -> Option<(u16, u32)> {
        if self.view.load16(self.used + 2, Ordering::Acquire) == self.last_used {
            return None;
        }
        let at = self.used + 4 + 8 * u64::from(self.last_used % self.size);
        let head = self.view.load32(at, Ordering::Relaxed);
        let len = self.view.load32(at + 4, Ordering::Relaxed);
        self.last_used = self.last_used.wrapping_add(1);
        let head = u16::try_from(head).ok().filter(|h| *h < self.size)?;
        let mut id = head;
        loop {
            self.free.push(id);
            let at = u64::from(id) * 16;
            if self.view.load16(at + 12, Ordering::Relaxed) & DESC_NEXT == 0 {
                break;
            }
            id = self.view.load16(at + 14, Ordering::Relaxed);
        }
        Some((head, len))
    }

    /// As [`Self::poll`], but waits for the device's call up to `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<Option<(u16, u32)>> {
        let deadline = Instant::now() + timeout;
        loop {
            if self.event_idx {
                let at = self.avail + 4 + 2 * u64::from(self.size);
                self.view.store16(at, self.last_used, Ordering::Relaxed);
            } else {
                self.view.store16(self.avail, 0, Ordering::Relaxed);
            }
            fence(Ordering::SeqCst);
            if let Some(used) = self.poll() {
                return Ok(Some(used));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let millis = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
            let mut ready = [EpollEvent::default()];
            let signalled = match self.waiter.wait(millis, &mut ready) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            if left.is_zero() || signalled == 0 {
                // A used entry that came without a call is not looked for: a driver that sleeps
                // would not find it either.
                return Ok(None);
            }
            // Another thread may have taken it; the eventfd does not block.
            let _taken = self.call.read();
        }
    }

    /// Tells the device that no call is wanted (only a hint), for a driver that polls.
    pub fn suppress_calls(&self) {
        self.view.store16(self.avail, AVAIL_NO_INTERRUPT, Ordering::Relaxed);
    }
}
