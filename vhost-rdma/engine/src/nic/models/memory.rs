//! Memory of a model: the words that matter, each an atomic of loom's, and an eventfd.

use std::collections::BTreeMap;
use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use loom::sync::{Condvar, Mutex};

use super::Without;
use crate::ordering::{Fence, Fences, Flag, Words};

/// A page or a ring. Loom's threads are coroutines of one thread, so `Rc` shares it.
#[derive(Clone)]
pub(crate) struct Memory(Rc<Shared>);

struct Shared {
    bytes: BTreeMap<u64, AtomicU8>,
    words: BTreeMap<u64, AtomicU32>,
    /// Plain bytes, by where they begin: nobody may write them while another may access them.
    plain: BTreeMap<u64, UnsafeCell<()>>,
    without: Without,
}

impl Memory {
    /// Zeroed memory with bytes, words and blocks of plain bytes at these offsets.
    pub(crate) fn new(without: Without, bytes: &[u64], words: &[u64], plain: &[u64]) -> Self {
        Self(Rc::new(Shared {
            bytes: bytes.iter().map(|&at| (at, AtomicU8::new(0))).collect(),
            words: words.iter().map(|&at| (at, AtomicU32::new(0))).collect(),
            plain: plain.iter().map(|&at| (at, UnsafeCell::new(()))).collect(),
            without,
        }))
    }

    pub(crate) fn without(&self, what: Without) -> bool {
        self.0.without == what
    }

    fn acquire(&self, at: u64) -> Ordering {
        if self.without(Without::Acquire(at)) { Ordering::Relaxed } else { Ordering::Acquire }
    }

    fn release(&self, at: u64) -> Ordering {
        if self.without(Without::Release(at)) { Ordering::Relaxed } else { Ordering::Release }
    }

    /// A load without order.
    pub(crate) fn load_relaxed(&self, at: u64) -> u32 {
        self.0.words[&at].load(Ordering::Relaxed)
    }

    /// Reads the plain bytes at an offset, if the model has them.
    pub(crate) fn look(&self, at: u64) {
        if let Some(cell) = self.0.plain.get(&at) {
            cell.with(|_| ());
        }
    }

    /// Writes the plain bytes at an offset, if the model has them.
    pub(crate) fn touch(&self, at: u64) {
        if let Some(cell) = self.0.plain.get(&at) {
            cell.with_mut(|_| ());
        }
    }
}

impl Fences for Memory {
    fn full(&self, which: Fence) {
        if !self.without(Without::Device(which)) {
            fence(Ordering::SeqCst);
        }
    }
}

impl Words for Memory {
    fn read(&self, at: u64, _: &mut [u8]) {
        self.look(at);
    }

    fn write(&self, at: u64, _: &[u8]) {
        self.touch(at);
    }

    fn load_u32(&self, at: u64) -> u32 {
        self.0.words[&at].load(self.acquire(at))
    }

    fn load_u64(&self, at: u64) -> u64 {
        let byte =
            |offset| self.0.bytes.get(&(at + offset)).map_or(0, |b| b.load(self.acquire(at)));
        (0..8).rev().fold(0, |word, offset| word << 8 | u64::from(byte(offset)))
    }

    fn store_u8(&self, at: u64, value: u8) {
        self.0.bytes[&at].store(value, self.release(at));
    }

    fn store_u32(&self, at: u64, value: u32) {
        self.0.words[&at].store(value, self.release(at));
    }
}

/// A flag of the daemon in loom's memory.
pub(crate) struct Asleep(AtomicBool);

impl Asleep {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }
}

impl Flag for Asleep {
    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: bool) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn lower(&self) -> bool {
        self.0.compare_exchange(true, false, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// What a sleeper waits for: an eventfd, or an interrupt. It remembers a signal that nobody waits
/// for.
#[derive(Clone)]
pub(crate) struct Signal(Rc<(Mutex<bool>, Condvar)>);

impl Signal {
    pub(crate) fn new() -> Self {
        Self(Rc::new((Mutex::new(false), Condvar::new())))
    }

    pub(crate) fn give(&self) {
        *self.0.0.lock().expect("a lock of the model") = true;
        self.0.1.notify_one();
    }

    /// Takes it back if it was given; whether it was.
    pub(crate) fn take(&self) -> bool {
        std::mem::take(&mut *self.0.0.lock().expect("a lock of the model"))
    }

    pub(crate) fn wait(&self) {
        let mut given = self.0.0.lock().expect("a lock of the model");
        while !*given {
            given = self.0.1.wait(given).expect("a lock of the model");
        }
        *given = false;
    }
}
