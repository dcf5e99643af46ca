//! The driver's side of a split virtqueue (VIRTIO 1.3, 2.7), without indirect descriptors and
//! without `EVENT_IDX`.
//!
//! Chains stand at fixed places of the descriptor table: whoever adds one names its first
//! descriptor, and gets that number back. What the device says is checked before it is used.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, Result};
use crate::layout::{PAGE_SIZE, Record};
use crate::memory::Memory;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const USED_F_NO_NOTIFY: u16 = 1;

pub(crate) struct Virtqueue {
    memory: Rc<Memory>,
    pub(crate) index: u16,
    pub(crate) size: u16,
    /// Descriptor table, available ring and used ring: a page each.
    pages: u64,
    next_avail: u16,
    next_used: u16,
    kick: OwnedFd,
}

impl Virtqueue {
    /// A queue of `size` entries, a power of two up to 128.
    pub(crate) fn new(memory: &Rc<Memory>, index: u16, size: u16) -> Result<Self> {
        let (memory, pages) = (Rc::clone(memory), memory.alloc(3 * PAGE_SIZE)?);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let kick = eventfd(0, flags).map_err(Error::host("an eventfd"))?;
        Ok(Self { memory, index, size, pages, next_avail: 0, next_used: 0, kick })
    }

    pub(crate) const fn addresses(&self) -> [u64; 3] {
        [self.pages, self.pages + PAGE_SIZE, self.pages + 2 * PAGE_SIZE]
    }

    pub(crate) fn kick_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// Notifies the device, whatever the rings hold (2.2).
    pub(crate) fn notify(&self) -> Result<()> {
        match rustix::io::write(&self.kick, &1_u64.to_ne_bytes()) {
            // A counter that is full has been notified often enough.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(Error::host("a notification")(error)),
        }
    }

    /// Makes a chain of (address, bytes, whether the device writes) available, whose descriptors
    /// stand from `head` on, and notifies if that is wanted.
    pub(crate) fn add(&mut self, head: u16, parts: &[(u64, u32, bool)]) -> Result<()> {
        let [desc, avail, used] = self.addresses();
        for (place, (addr, length, writable)) in (head..).zip(parts) {
            let last = usize::from(place - head) + 1 == parts.len();
            let (follow, next) = if last { (0, 0) } else { (DESC_F_NEXT, place + 1) };
            let flags = follow | if *writable { DESC_F_WRITE } else { 0 };
            let descriptor = Record::<16>::ZERO.u64(0, *addr).u32(8, *length);
            let descriptor = descriptor.u16(12, flags).u16(14, next);
            self.memory.write(desc + 16 * u64::from(place), &descriptor.0)?;
        }
        let slot = u64::from(self.next_avail % self.size);
        self.memory.write(avail + 4 + 2 * slot, &head.to_le_bytes())?;
        self.next_avail = self.next_avail.wrapping_add(1);
        self.memory.store(self.next_avail.to_le(), avail + 2)?;
        // The device looks at the index after it asked for notifications, we the other way round.
        fence(Ordering::SeqCst);
        let flags: u16 = self.memory.load(used, Ordering::Relaxed)?;
        if u16::from_le(flags) & USED_F_NO_NOTIFY == 0 { self.notify() } else { Ok(()) }
    }

    /// Takes a used chain: its first descriptor, and how many bytes were written.
    pub(crate) fn pop(&mut self) -> Result<Option<(u16, u32)>> {
        let [_, _, used] = self.addresses();
        let produced: u16 = self.memory.load(used + 2, Ordering::Acquire)?;
        let waiting = u16::from_le(produced).wrapping_sub(self.next_used);
        if waiting == 0 {
            return Ok(None);
        }
        let mut element = Record::<8>::ZERO;
        self.memory.read(used + 4 + 8 * u64::from(self.next_used % self.size), &mut element.0)?;
        self.next_used = self.next_used.wrapping_add(1);
        match u16::try_from(element.get32(0)) {
            Ok(head) if head < self.size && waiting <= self.size => {
                Ok(Some((head, element.get32(4))))
            }
            _ => Err(Error::Device(format!("the used ring of queue {} is wrong", self.index))),
        }
    }
}

/// A virtqueue that is kept stocked with buffers for events of `N` bytes (7.5).
pub(crate) struct EventQueue<const N: usize> {
    pub(crate) queue: Virtqueue,
    buffers: u64,
}

impl<const N: usize> EventQueue<N> {
    pub(crate) fn new(memory: &Rc<Memory>, index: u16, size: u16) -> Result<Self> {
        let buffers = memory.alloc(u64::from(size) * N as u64)?;
        Ok(Self { queue: Virtqueue::new(memory, index, size)?, buffers })
    }

    /// Gives the device all buffers.
    pub(crate) fn stock(&mut self) -> Result<()> {
        (0..self.queue.size).try_for_each(|place| self.give(place))
    }

    /// Takes an event, and gives its buffer back.
    pub(crate) fn take(&mut self) -> Result<Option<Record<N>>> {
        let Some((place, length)) = self.queue.pop()? else { return Ok(None) };
        let mut event = Record::ZERO;
        self.queue.memory.read(self.buffers + u64::from(place) * N as u64, &mut event.0)?;
        self.give(place)?;
        let whole = length as usize == N;
        if whole { Ok(Some(event)) } else { Err(Error::Device("a part of an event".to_owned())) }
    }

    fn give(&mut self, place: u16) -> Result<()> {
        let addr = self.buffers + u64::from(place) * N as u64;
        self.queue.add(place, &[(addr, u32::try_from(N).unwrap_or(u32::MAX), true)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(size: u16) -> Virtqueue {
        Virtqueue::new(&Rc::new(Memory::new(1 << 20).unwrap()), 5, size).unwrap()
    }

    /// What a device does with the used ring.
    fn put_used(queue: &Virtqueue, index: u16, id: u32, length: u32) {
        let used = queue.addresses()[2];
        let element = Record::<8>::ZERO.u32(0, id).u32(4, length);
        queue.memory.write(used + 4 + 8 * u64::from(index % queue.size), &element.0).unwrap();
        queue.memory.store(index.wrapping_add(1), used + 2).unwrap();
    }

    fn avail(queue: &Virtqueue, offset: u64) -> u16 {
        queue.memory.load(queue.addresses()[1] + offset, Ordering::Relaxed).unwrap()
    }

    #[test]
    fn a_chain_is_linked_and_made_available() {
        let mut queue = queue(8);
        queue.add(4, &[(0x1000, 24, false), (0x2000, 16, true)]).unwrap();
        let mut table = [0; 32];
        queue.memory.read(queue.pages + 64, &mut table).unwrap();
        let first = Record::<16>::ZERO.u64(0, 0x1000).u32(8, 24).u16(12, 1).u16(14, 5);
        let second = Record::<16>::ZERO.u64(0, 0x2000).u32(8, 16).u16(12, 2);
        assert_eq!(table, [first.0, second.0].concat()[..]);
        assert_eq!((avail(&queue, 2), avail(&queue, 4)), (1, 4));
    }

    #[test]
    fn indices_run_over_65536_and_slots_over_the_size() {
        let mut queue = queue(4);
        for round in 0..=u16::MAX {
            let head = round % 3;
            queue.add(head, &[(0, 1, true)]).unwrap();
            assert_eq!(avail(&queue, 4 + 2 * u64::from(round % 4)), head);
            put_used(&queue, round, u32::from(head), u32::from(round));
            assert_eq!(queue.pop().unwrap(), Some((head, u32::from(round))));
            assert_eq!(queue.pop().unwrap(), None);
        }
        assert_eq!(avail(&queue, 2), 0);
    }

    #[test]
    fn a_used_ring_that_lies_is_refused() {
        let (mut wild, mut ahead) = (queue(4), queue(4));
        put_used(&wild, 0, 4, 0);
        assert!(wild.pop().is_err(), "a descriptor that there is not");
        put_used(&ahead, 4, 0, 0);
        assert!(ahead.pop().is_err(), "more used than the queue holds");
    }

    #[test]
    fn an_unwanted_notification_is_not_made() {
        let mut queue = queue(4);
        let mut count = [0; 8];
        queue.memory.store(USED_F_NO_NOTIFY, queue.addresses()[2]).unwrap();
        queue.add(0, &[(0, 1, true)]).unwrap();
        assert!(rustix::io::read(&queue.kick, &mut count[..]).is_err());
        queue.memory.store(0_u16, queue.addresses()[2]).unwrap();
        queue.add(1, &[(0, 1, true)]).unwrap();
        assert_eq!(rustix::io::read(&queue.kick, &mut count[..]), Ok(8));
    }
}
