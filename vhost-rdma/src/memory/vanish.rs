//! Guest memory that vanishes under its mapping.
//!
//! A VMM can truncate the file that it gave us, and the host can lose a page to a memory error: the next access raises
//! SIGBUS, whose default would end the daemon and with it the NICs of every guest. So all guest mappings are listed in a fixed
//! table, and the handler replaces the *whole* mapping that the fault lies in by anonymous zeroes, marks it gone, and lets the
//! access go on. Whoever owns the memory learns it from [`Watch::gone`], after [`vanished`] has changed, and fails its NIC.
//!
//! What a signal handler may do is little: it reads atomics and calls `mmap`. Entries of the table come and go meanwhile, in other
//! threads, so each has a sequence number, odd while it changes; the entry of the mapping that faults cannot change, since the
//! thread that faults holds the mapping. A fault anywhere else goes to the handler that was there before us.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

use super::HostPtr;

/// Mappings of all guests together that can be watched: more than the host lets one process have (`vm.max_map_count`, 65530 by default).
const SLOTS: usize = 1 << 16;

struct Slot {
    taken: AtomicBool,
    /// Odd while `start` and `len` change.
    sequence: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    gone: AtomicBool,
}

impl Slot {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
        }
    }

    /// Changes the range. Only the owner of a taken slot does.
    fn set(&self, start: usize, len: usize) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// The range, if it holds `addr`; an entry that changes right now holds nothing that can fault here.
    fn range_with(&self, addr: usize) -> Option<(usize, usize)> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let stable =
            sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence;
        (stable && addr.wrapping_sub(start) < len).then_some((start, len))
    }
}

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
/// One more than the highest slot that was ever taken.
static USED: AtomicUsize = AtomicUsize::new(0);
static VANISHED: AtomicU64 = AtomicU64::new(0);
/// The handler before ours; `None` if ours could not be installed.
static PREVIOUS: OnceLock<Option<libc::sigaction>> = OnceLock::new();

/// How many mappings have vanished since the process began. It changes before the access that found out returns.
#[inline]
#[must_use]
pub fn vanished() -> u64 {
    VANISHED.load(Ordering::Relaxed)
}

/// The listing of one mapping, for as long as this lives.
#[derive(Debug)]
pub(super) struct Watch {
    slot: usize,
}

impl Watch {
    /// Watches `len` bytes at `start`. `None` without a free slot, or where no handler can be installed: then the memory must not be
    /// used.
    pub(super) fn new(start: HostPtr, len: usize) -> Option<Self> {
        PREVIOUS.get_or_init(install).as_ref()?;
        let free = |slot: &Slot| {
            slot.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let Some(slot) = TABLE.iter().position(free) else {
            tracing::warn!("too many guest mappings: one is not guarded against vanishing");
            return None;
        };
        TABLE[slot].set(start.addr(), len);
        USED.fetch_max(slot + 1, Ordering::AcqRel);
        Some(Self { slot })
    }

    /// Whether the memory has vanished; what is there now are zeroes that nobody else sees.
    pub(super) fn gone(&self) -> bool {
        TABLE[self.slot].gone.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        slot.set(0, 0);
        slot.gone.store(false, Ordering::Release);
        slot.taken.store(false, Ordering::Release);
    }
}

/// Installs the handler; `None` if the system does not let us.
fn install() -> Option<libc::sigaction> {
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zeroes is a valid `sigaction`: no flags, an empty mask, the default handler.
    let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
    action.sa_sigaction = handler as libc::sighandler_t;
    // Not on the stack of the thread that faults, which has one for signals from the standard library.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both point to structures of the right type; the handler does only what a handler may.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, previous.as_mut_ptr()) } != 0 {
        tracing::warn!(error = %std::io::Error::last_os_error(), "guest memory is not guarded against vanishing");
        return None;
    }
    // SAFETY: it was zeroed, and filled by the successful call.
    Some(unsafe { previous.assume_init() })
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands a valid `siginfo_t` to a SA_SIGINFO handler, for the time of the call.
    let fault = unsafe { &*info };
    // SAFETY: for SIGBUS it has an address.
    let addr = unsafe { fault.si_addr() }.addr();
    if !replace(addr) {
        pass_on(signal, info, context);
    }
}

/// Puts zeroes where the mapping around `addr` was; false if it is none of ours.
fn replace(addr: usize) -> bool {
    let slots = &TABLE[..USED.load(Ordering::Acquire).min(SLOTS)];
    let mut replaced = false;
    // One mapping may be listed more than once, by several snapshots of one guest's memory.
    for slot in slots {
        let Some((start, len)) = slot.range_with(addr) else { continue };
        if !replaced {
            let (protection, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            );
            // SAFETY: the range is exactly one mapping of guest memory, alive because this very thread is accessing it. It is only
            // ever accessed as raw bytes that may change at any time, so other contents are nothing new to anyone. `mmap` may
            // be called in a signal handler on Linux: it is a bare system call.
            let mapped = unsafe {
                libc::mmap(ptr::without_provenance_mut(start), len, protection, flags, -1, 0)
            };
            if mapped == libc::MAP_FAILED {
                return false;
            }
            replaced = true;
            VANISHED.fetch_add(1, Ordering::AcqRel);
        }
        slot.gone.store(true, Ordering::Release);
    }
    replaced
}

/// A SIGBUS that is not about guest memory: as if we were not there.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get().and_then(Option::as_ref);
    match previous {
        Some(action)
            if action.sa_sigaction != libc::SIG_DFL
                && action.sa_sigaction != libc::SIG_IGN
                && action.sa_flags & libc::SA_SIGINFO != 0 =>
        {
            // SAFETY: it was installed as a SA_SIGINFO handler, so it is a function of this type.
            let handler = unsafe {
                std::mem::transmute::<
                    libc::sighandler_t,
                    extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void),
                >(action.sa_sigaction)
            };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: setting the default action is allowed anywhere; the access faults again and ends the process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::memory::{AddressSpace, PageList, Ring};

    const LEN: usize = 0x4000;

    fn guest() -> (File, AddressSpace) {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(LEN as u64).unwrap();
        let range = (GuestAddress(0), LEN, Some(FileOffset::new(file.try_clone().unwrap(), 0)));
        let map = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        (file, AddressSpace::new(&map))
    }

    #[test]
    fn memory_that_vanishes_reads_as_zeroes_and_its_owner_learns_it() {
        let (file, space) = guest();
        let (_keep, neighbour) = guest();
        let ring = Ring::page(&space, 0x1000).unwrap();
        let list = PageList { addr: 0, npages: 1, offset: 0, page_shift: 12, levels: 0 };
        let other = Ring::new(Arc::new(list.resolve(&neighbour, 4096).unwrap()));
        ring.store_u32(0, 7);
        other.store_u32(0, 8);
        assert!(!space.vanished());
        let before = vanished();

        file.set_len(0).unwrap();
        assert_eq!(ring.load_u32(0), 0);
        ring.store_u32(8, 9);
        assert_eq!(ring.load_u32(8), 9, "the access itself goes on");
        assert!(vanished() > before);
        assert!(space.vanished());

        assert_eq!(other.load_u32(0), 8);
        assert!(!neighbour.vanished(), "nobody else is touched");
    }

    #[test]
    fn a_slot_is_used_again_without_its_past() {
        let (file, space) = guest();
        let ring = Ring::page(&space, 0).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(ring.load_u32(0), 0);
        assert!(space.vanished());
        drop((ring, space));
        for _ in 0..100 {
            let (_file, fresh) = guest();
            assert!(!fresh.vanished());
        }
    }

    #[test]
    fn several_threads_may_find_out_at_once() {
        for _ in 0..20 {
            let (file, space) = guest();
            file.set_len(0).unwrap();
            std::thread::scope(|scope| {
                for page in 0..4 {
                    let ring = Ring::page(&space, page * 0x1000).unwrap();
                    scope.spawn(move || {
                        for offset in (0..4096).step_by(8) {
                            ring.store_u32(offset, 1);
                        }
                    });
                }
            });
            assert!(space.vanished());
        }
    }
}
