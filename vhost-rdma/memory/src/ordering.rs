//! Who sees what: the words of the lock-free protocols between threads, and between guest and
//! device, as the shipped code uses them.
//!
//! A guest's driver and a worker share words of memory and no lock (docs/virtio-rdma.md §6.4, §7.3,
//! §7.4), and so do a worker and those who wake it. Each of these protocols stands on a few
//! orderings, and a missing one loses a wake-up once in a million times, in someone's production.
//! So the code of the protocols is written over [`Words`] and [`Fences`]: what runs in the daemon
//! are plain atomics ([`Cpu`], and [`Ring`](crate::Ring) for guest memory), and the models
//! of `nic::models` run the *same* code on loom's, where every interleaving and every stale value
//! is tried, with and without each of the fences.
//!
//! A fence has a name, so that a model can leave that one out. Nothing here knows what the words
//! mean to verbs.

use std::sync::atomic::{AtomicBool, Ordering, fence};

use virtio_rdma_abi::status_page;

/// The full (store-load) fences of the device's side, by what they put before what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Summary bytes are cleared before producer indices are read (§6.4).
    ClearBeforeIndex,
    /// NEED_KICK is set before the last look at the doorbells (§6.4).
    AskBeforeLook,
    /// Completions are visible before the arm words are read (§7.4).
    EntriesBeforeArm,
    /// A worker says that it sleeps before it looks for work.
    AsleepBeforeLook,
    /// Work is visible before its poster asks whether the worker sleeps.
    WorkBeforeAsleep,
}

/// Who executes full fences.
pub trait Fences {
    /// A sequentially consistent fence.
    fn full(&self, fence: Fence);
}

/// Memory that a guest and the device access word by word. Words are little-endian; an offset
/// outside reads as zero and drops what is stored.
pub trait Words: Fences {
    /// Copies bytes out, in no order.
    fn read(&self, at: u64, out: &mut [u8]);
    /// Copies bytes in, in no order.
    fn write(&self, at: u64, bytes: &[u8]);
    /// Loads with acquire order.
    fn load_u32(&self, at: u64) -> u32;
    /// Loads with acquire order.
    fn load_u64(&self, at: u64) -> u64;
    /// Stores with release order.
    fn store_u8(&self, at: u64, value: u8);
    /// Stores with release order.
    fn store_u32(&self, at: u64, value: u32);
}

/// A flag between threads of the daemon, accessed in no order of its own.
pub trait Flag {
    /// Its value.
    fn get(&self) -> bool;
    /// Changes it.
    fn set(&self, value: bool);
    /// Lowers it if it is raised, in one step; whether it was. A flag that is down is not written.
    fn lower(&self) -> bool;
}

/// The processor that we run on.
#[derive(Clone, Copy, Debug)]
pub struct Cpu;

impl Fences for Cpu {
    #[inline]
    fn full(&self, _: Fence) {
        fence(Ordering::SeqCst);
    }
}

impl Flag for AtomicBool {
    #[inline]
    fn get(&self) -> bool {
        self.load(Ordering::Relaxed)
    }

    #[inline]
    fn set(&self, value: bool) {
        self.store(value, Ordering::Relaxed);
    }

    #[inline]
    fn lower(&self) -> bool {
        self.compare_exchange(true, false, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// Tells a guest whether its posts need a kick (§6.4).
pub fn need_kick(status: &impl Words, need: bool) {
    status.store_u32(status_page::NEED_KICK as u64, u32::from(need));
}

/// Before sleep (§6.4): asks the guests to kick, then looks once more; what the look found.
pub fn last_look<S, R>(
    cpu: &impl Fences,
    state: &mut S,
    ask: impl FnOnce(&mut S),
    look: impl FnOnce(&mut S) -> R,
) -> R {
    ask(state);
    cpu.full(Fence::AskBeforeLook);
    look(state)
}

/// That the completions written so far are visible to the guests. Whoever reads an arm word must
/// hold it.
#[derive(Clone, Copy, Debug)]
pub struct Visible(());

/// Makes written completions visible before arm words are read (§7.4); one call may serve many.
#[inline]
pub fn entries_visible(cpu: &impl Fences) -> Visible {
    cpu.full(Fence::EntriesBeforeArm);
    Visible(())
}

/// Says that the caller is about to sleep; it must look for work once more before it does.
pub fn announce_sleep(asleep: &impl Flag, cpu: &impl Fences) {
    asleep.set(true);
    cpu.full(Fence::AsleepBeforeLook);
}

/// Whether whoever has just stored work must wake the worker; true for one of several callers.
#[inline]
pub fn must_wake(asleep: &impl Flag, cpu: &impl Fences) -> bool {
    cpu.full(Fence::WorkBeforeAsleep);
    asleep.get() && asleep.lower()
}
