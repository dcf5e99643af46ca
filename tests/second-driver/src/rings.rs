//! Work queues and completion queues in guest memory: 6.4 and 7 of the text.
//!
//! Indices run free over 32 bits. Nothing here waits or makes a command. What an entry claims is
//! checked against what was posted (section 11).

use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use crate::error::{Error, Result};
use crate::layout::{
    ARM_ANY, ARM_SEQ_SHIFT, CTRL_ARM, CTRL_CONSUMER, CTRL_FIRED, CTRL_SIZE, DB_GROUP_SLOTS,
    DB_INDEX, DB_SLOTS, PAGE_SIZE, Record, STATUS_NEED_KICK, page_list,
};
use crate::memory::Memory;

/// A send queue or a receive queue.
pub(crate) struct WorkQueue {
    memory: Rc<Memory>,
    ring: u64,
    pub(crate) entries: u32,
    pub(crate) log2_stride: u8,
    posted: u32,
    freed: u32,
}

impl WorkQueue {
    /// A ring of `entries`, a power of two.
    pub(crate) fn new(memory: &Rc<Memory>, entries: u32, log2_stride: u8) -> Result<Self> {
        let ring = memory.alloc(u64::from(entries) << log2_stride)?;
        Ok(Self { memory: Rc::clone(memory), ring, entries, log2_stride, posted: 0, freed: 0 })
    }

    pub(crate) fn list(&self) -> [u8; 24] {
        page_list(self.ring, (u64::from(self.entries) << self.log2_stride).div_ceil(PAGE_SIZE), 0)
    }

    /// Writes a work request and rings; true if the device has to be kicked.
    pub(crate) fn post(&mut self, request: &[u8], doorbell: &Doorbell) -> Result<bool> {
        let waiting = self.posted.wrapping_sub(self.freed);
        if waiting >= self.entries || request.len() > 1 << self.log2_stride {
            return Err(Error::Argument("no room for a work request".to_owned()));
        }
        let slot = u64::from(self.posted % self.entries);
        self.memory.write(self.ring + (slot << self.log2_stride), request)?;
        self.posted = self.posted.wrapping_add(1);
        doorbell.ring(&self.memory, self.posted)
    }

    /// Frees all requests up to that of a completion's `wqe_index`.
    pub(crate) fn complete(&mut self, index: u32) -> Result<()> {
        if index.wrapping_sub(self.freed) >= self.posted.wrapping_sub(self.freed) {
            return Err(Error::Device(format!("a completion of request {index}, which is none")));
        }
        self.freed = index.wrapping_add(1);
        Ok(())
    }
}

/// A slot of a doorbell page, and what goes with it.
pub(crate) struct Doorbell {
    index: u64,
    summary: u64,
    need_kick: u64,
}

impl Doorbell {
    /// The doorbell of a number that the device gave, in page 0 of a context.
    pub(crate) fn new(number: u32, page: u64, status_page: u64) -> Result<Self> {
        // The context has one page: the upper half of the number is 0.
        if number >= DB_SLOTS {
            return Err(Error::Device(format!("doorbell {number:#x} is in no page that it has")));
        }
        let (index, group) = (DB_INDEX + 4 * u64::from(number), u64::from(number) / DB_GROUP_SLOTS);
        let need_kick = status_page + STATUS_NEED_KICK;
        Ok(Self { index: page + index, summary: page + group, need_kick })
    }

    /// Steps 2 to 5 of posting (6.4): true if the device sleeps.
    fn ring(&self, memory: &Memory, producer: u32) -> Result<bool> {
        memory.store(producer.to_le(), self.index)?;
        memory.store(1_u8, self.summary)?;
        fence(Ordering::SeqCst);
        Ok(memory.load::<u32>(self.need_kick, Ordering::Relaxed)? != 0)
    }
}

pub(crate) struct CompletionQueue {
    memory: Rc<Memory>,
    ring: u64,
    pub(crate) entries: u32,
    consumed: u32,
}

impl CompletionQueue {
    /// A queue of `entries`, a power of two, at least 2: the control block follows aligned.
    pub(crate) fn new(memory: &Rc<Memory>, entries: u32) -> Result<Self> {
        let ring = memory.alloc(u64::from(entries) * 64 + CTRL_SIZE)?;
        Ok(Self { memory: Rc::clone(memory), ring, entries, consumed: 0 })
    }

    pub(crate) fn list(&self) -> [u8; 24] {
        page_list(self.ring, (self.control(CTRL_SIZE) - self.ring).div_ceil(PAGE_SIZE), 0)
    }

    /// Takes an entry, if there is one, and gives its place back.
    pub(crate) fn poll(&mut self) -> Result<Option<Record<64>>> {
        let addr = self.ring + u64::from(self.consumed % self.entries) * 64;
        let seq: u32 = self.memory.load(addr + 60, Ordering::Acquire)?;
        let next = self.consumed.wrapping_add(1);
        if u32::from_le(seq) != next {
            return Ok(None);
        }
        let mut entry = Record::ZERO;
        self.memory.read(addr, &mut entry.0)?;
        self.consumed = next;
        self.memory.store(next.to_le(), self.control(CTRL_CONSUMER))?;
        Ok(Some(entry))
    }

    /// Asks for an event at the next entry (7.4). The caller looks once more afterwards.
    pub(crate) fn arm(&self) -> Result<()> {
        let fired: u32 = self.memory.load(self.control(CTRL_FIRED), Ordering::Acquire)?;
        // Where it is armed already this is the same word: this driver never arms for less than
        // ANY.
        let seq = u32::from_le(fired).wrapping_add(1);
        self.memory.store((seq << ARM_SEQ_SHIFT | ARM_ANY).to_le(), self.control(CTRL_ARM))?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn control(&self, offset: u64) -> u64 {
        self.ring + u64::from(self.entries) * 64 + offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Rc<Memory> {
        Rc::new(Memory::new(1 << 20).unwrap())
    }

    fn word(memory: &Memory, addr: u64) -> u32 {
        memory.load(addr, Ordering::Relaxed).unwrap()
    }

    #[test]
    fn the_doorbell_of_the_texts_example_is_where_it_says() {
        let memory = memory();
        let (page, status) = (memory.alloc(4096).unwrap(), memory.alloc(4096).unwrap());
        let doorbell = Doorbell::new(0x47, page, status).unwrap();
        assert!(!doorbell.ring(&memory, 5).unwrap());
        assert_eq!(word(&memory, page + 540), 5);
        assert_eq!(memory.load::<u8>(page + 1, Ordering::Relaxed).unwrap(), 1);
        memory.store(1_u32, status).unwrap();
        assert!(doorbell.ring(&memory, 6).unwrap(), "the device sleeps");
        assert!([960, 0x1_0000, u32::MAX].map(|n| Doorbell::new(n, page, 0).is_err()) == [true; 3]);
    }

    #[test]
    fn a_work_queue_wraps_and_is_never_more_than_full() {
        let memory = memory();
        let page = memory.alloc(4096).unwrap();
        let doorbell = Doorbell::new(0, page, page + 2048).unwrap();
        let mut queue = WorkQueue::new(&memory, 4, 5).unwrap();
        (queue.posted, queue.freed) = (u32::MAX - 1, u32::MAX - 1);
        (1..=4).for_each(|value| assert!(!queue.post(&[value; 32], &doorbell).unwrap()));
        assert!(queue.post(&[9; 32], &doorbell).is_err(), "full");
        assert_eq!(word(&memory, page + DB_INDEX), 2);
        let mut ring = [0; 128];
        memory.read(queue.ring, &mut ring).unwrap();
        assert_eq!((ring[64], ring[96], ring[0], ring[32]), (1, 2, 3, 4));
        assert!(queue.complete(2).is_err(), "not posted");
        queue.complete(u32::MAX).unwrap();
        assert!(queue.complete(u32::MAX).is_err(), "free already");
        (5..=6).for_each(|value| assert!(!queue.post(&[value; 32], &doorbell).unwrap()));
        assert!(queue.post(&[7; 32], &doorbell).is_err(), "full again");
    }

    #[test]
    fn entries_come_once_and_in_order_over_the_wrap() {
        let mut cq = CompletionQueue::new(&memory(), 4).unwrap();
        cq.consumed = u32::MAX - 5;
        for index in (0..12).map(|turn| (u32::MAX - 5).wrapping_add(turn)) {
            assert_eq!(cq.poll().unwrap(), None, "before {index} is written");
            let entry = Record::<64>::ZERO.u32(28, index).u32(60, index.wrapping_add(1));
            cq.memory.write(cq.ring + u64::from(index % 4) * 64, &entry.0).unwrap();
            assert_eq!(cq.poll().unwrap().unwrap().get32(28), index);
            assert_eq!(word(&cq.memory, cq.ring + 256), index.wrapping_add(1));
        }
    }

    #[test]
    fn arming_follows_the_texts_example() {
        let cq = CompletionQueue::new(&memory(), 4).unwrap();
        let (arm, fired) = (cq.control(CTRL_ARM), cq.control(CTRL_FIRED));
        // Of the example steps 2 and 4, then 7; at last the 30 bits wrap.
        for (fired_before, after) in [(3, 0x12), (4, 0x16), (u32::MAX >> 2, ARM_ANY)] {
            cq.memory.store(fired_before, fired).unwrap();
            cq.arm().unwrap();
            assert_eq!(word(&cq.memory, arm), after);
        }
    }
}
