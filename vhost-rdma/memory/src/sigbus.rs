//! Guest memory that vanishes under its mapping.
//!
//! A VMM can truncate the file that it gave us or give huge pages that the host does not have, and
//! the host can lose a page to a memory error: the next access raises SIGBUS, whose default would
//! end the daemon and with it the NICs of every guest. So all guest mappings are listed in a fixed
//! table, and the handler replaces the *whole* mapping that the fault lies in by zeroes, marks it
//! gone, and lets the access go on. Whoever owns the memory learns it from [`Watch::gone`], after
//! [`vanished`] has changed, and fails its NIC.
//!
//! To replace a mapping takes time in proportion to what was touched of it, on the thread that
//! faults. Whose NIC fails does that once. A process may do it again and again (`Mapping::loose`):
//! of its memory only the *window* goes that the fault lies in, and each window is counted as a
//! mapping from the beginning.
//!
//! **The replacement must not be refused**, since there is no other way out: the access can neither
//! be finished nor given up. `mmap` over a whole mapping takes nothing that may be used up. It
//! splits no mapping and there are never too many (`maps`); and it commits no memory, which under
//! `vm.overcommit_memory=2` a private writable mapping does, whatever its flags (mm/vma.c,
//! `accountable_mapping`). So what takes the place of guest memory is a shared mapping of one
//! sparse file of ours, the grave, which is made before the first guest's memory is mapped. Each
//! address has its own offset there: what one guest's neighbours still write into memory that is
//! gone is read by no other guest, and is freed with the mapping. Only a page that is touched after
//! that takes memory. Where the host has none, not even for that page, the thread waits for it as
//! any would: the access faults again.
//!
//! What a signal handler may do is little: it reads atomics and calls `mmap`. Entries of the table
//! come and go meanwhile, in other threads, so each has a sequence number, odd while it changes;
//! the entry of the mapping that faults cannot change, since the thread that faults holds the
//! mapping. A fault anywhere else goes to the handler that was there before us.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

use super::HostPtr;

/// Mappings of all guests together that can be watched: more than the host lets one process have
/// (`vm.max_map_count`, 65530 by default).
const SLOTS: usize = 1 << 16;
/// The file's name in `/proc/self/maps`.
pub(super) const GRAVE: &str = "vanished-guest-memory";
/// Its size: an offset for each address that there can be. It is a number only.
const GRAVE_SIZE: u64 = 1 << 48;
/// How long a thread rests before it tries again what the host refused.
static PAUSE: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };

struct Slot {
    /// Odd while `start` and `len` change.
    sequence: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    /// What is replaced at once, from `start` on; the last may be shorter.
    window: AtomicUsize,
    gone: AtomicBool,
    /// Windows that were replaced: bit n for the n-th, modulo 64.
    buried: AtomicU64,
}

impl Slot {
    const fn new() -> Self {
        Self {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            window: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
            buried: AtomicU64::new(0),
        }
    }

    /// Changes the range. Only the owner of a taken slot does.
    fn set(&self, start: usize, len: usize, window: usize) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.window.store(window, Ordering::Relaxed);
        self.buried.store(0, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// The window that holds `addr`; an entry that changes right now holds nothing that can fault
    /// here.
    fn window_with(&self, addr: usize) -> Option<Window> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        let window = self.window.load(Ordering::Relaxed).max(1);
        fence(Ordering::Acquire);
        let stable =
            sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence;
        let within = addr.wrapping_sub(start);
        (stable && within < len).then(|| {
            let number = within / window;
            let before = number * window;
            let alone = window >= len;
            Window { number, alone, start: start + before, len: window.min(len - before) }
        })
    }
}

/// A part of a mapping that is replaced at once.
#[derive(Clone, Copy)]
struct Window {
    number: usize,
    /// It is the whole mapping.
    alone: bool,
    start: usize,
    len: usize,
}

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
/// One more than the highest slot that was ever taken.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Slots below that which are free. The handler does not look at it.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static VANISHED: AtomicU64 = AtomicU64::new(0);
static GUARD: OnceLock<Option<Guard>> = OnceLock::new();

/// What the handler needs; there before anything is listed.
struct Guard {
    grave: OwnedFd,
    /// The handler before ours.
    previous: libc::sigaction,
}

/// How many mappings have vanished since the process began. It changes before the access that found
/// out returns.
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
    /// Watches `len` bytes at `start`, which are one whole mapping, and are replaced by `window`s.
    /// `None` without a free slot, or where no handler can be installed: then the memory must not
    /// be used.
    pub(super) fn new(start: HostPtr, len: usize, window: usize) -> Option<Self> {
        GUARD.get_or_init(Guard::install).as_ref()?;
        if (start.addr() as u64).checked_add(len as u64)? > GRAVE_SIZE {
            return None;
        }
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = match free.pop() {
            Some(slot) => slot,
            None => {
                let next = USED.load(Ordering::Relaxed);
                TABLE.get(next)?;
                USED.store(next + 1, Ordering::Release);
                next
            }
        };
        drop(free);
        TABLE[slot].set(start.addr(), len, window);
        Some(Self { slot })
    }

    /// Whether the memory has vanished; what is there now are zeroes that nobody else sees.
    pub(super) fn gone(&self) -> bool {
        self.mark().load(Ordering::Acquire)
    }

    /// What tells so: this listing's, for as long as it lives.
    pub(super) fn mark(&self) -> &'static AtomicBool {
        &TABLE[self.slot].gone
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        if slot.gone.swap(false, Ordering::AcqRel)
            && let Some(Some(guard)) = GUARD.get()
        {
            let start = slot.start.load(Ordering::Relaxed) as u64;
            let len = slot.len.load(Ordering::Relaxed) as u64;
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(error) = fallocate(&guard.grave, punch, start, len) {
                tracing::error!(%error, len, "what took the place of guest memory is not freed");
            }
        }
        slot.set(0, 0, 0);
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.slot);
    }
}

impl Guard {
    /// Makes the grave and installs the handler; `None` if the system does not let us.
    fn install() -> Option<Self> {
        Self::try_install()
            .inspect_err(
                |error| tracing::warn!(%error, "guest memory is not guarded against vanishing"),
            )
            .ok()
    }

    fn try_install() -> std::io::Result<Self> {
        let grave = memfd_create(GRAVE, MemfdFlags::CLOEXEC)?;
        ftruncate(&grave, GRAVE_SIZE)?;
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zeroes is a valid `sigaction`: no flags, an empty mask, the default handler.
        let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
        action.sa_sigaction = handler as libc::sighandler_t;
        // Not on the stack of the thread that faults, which has one for signals from the standard
        // library.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: both point to structures of the right type; the handler does only what a handler
        // may.
        let set =
            unsafe { libc::sigaction(libc::SIGBUS, &raw const action, previous.as_mut_ptr()) };
        if set != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: it was zeroed, and filled by the successful call.
        Ok(Self { grave, previous: unsafe { previous.assume_init() } })
    }
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands a valid `siginfo_t` to a SA_SIGINFO handler, for the time of the
    // call.
    let fault = unsafe { &*info };
    // SAFETY: for SIGBUS it has an address.
    let addr = unsafe { fault.si_addr() }.addr();
    if !replace(addr) {
        pass_on(signal, info, context);
    }
}

/// Puts zeroes where the window around `addr` was; false if it is none of ours.
fn replace(addr: usize) -> bool {
    let Some(Some(guard)) = GUARD.get() else { return false };
    let used = USED.load(Ordering::Acquire).min(SLOTS);
    let found = TABLE[..used].iter().find_map(|slot| Some((slot, slot.window_with(addr)?)));
    let Some((slot, window)) = found else { return false };
    let bit = 1 << (window.number % 64);
    let again = slot.buried.load(Ordering::Acquire) & bit != 0;
    // SAFETY: the address of the calling thread's own number, which the interrupted code may be
    // about to read.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: nobody but this thread reads or writes it.
    let before = unsafe { errno.read() };
    // Once more after that is another thread's access, or one for which the host has no page now;
    // or, of a mapping of many windows, another one's first.
    if again {
        pause();
    }
    if !again || !window.alone {
        while !bury(window, guard) {
            pause();
        }
    }
    // SAFETY: as above.
    unsafe { errno.write(before) };
    slot.buried.fetch_or(bit, Ordering::AcqRel);
    if !slot.gone.swap(true, Ordering::AcqRel) {
        VANISHED.fetch_add(1, Ordering::AcqRel);
    }
    true
}

fn pause() {
    // SAFETY: a bare system call, allowed in a handler.
    unsafe { libc::nanosleep(&raw const PAUSE, ptr::null_mut()) };
}

/// Maps the grave over one window. What was written to it there before stays.
fn bury(Window { start, len, .. }: Window, guard: &Guard) -> bool {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // Below `GRAVE_SIZE`, so no sign is lost.
    #[allow(clippy::cast_possible_wrap)]
    let offset = start as libc::off_t;
    // `mmap` may be called in a signal handler on Linux: it is a bare system call.
    // SAFETY: the range is a mapping of guest memory or a window of it, alive because this thread
    // is accessing it, and only ever as raw bytes that may change at any time: so other contents
    // are nothing new to anyone.
    let mapped = unsafe {
        let at = ptr::without_provenance_mut(start);
        libc::mmap(at, len, rights, flags, guard.grave.as_raw_fd(), offset)
    };
    mapped != libc::MAP_FAILED
}

/// A SIGBUS that is not about guest memory: as if we were not there.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = GUARD.get().and_then(Option::as_ref).map(|guard| &guard.previous);
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
            // SAFETY: setting the default action is allowed anywhere; the access faults again and
            // ends the process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;
    use std::sync::{Arc, RwLock, RwLockReadGuard};

    use super::*;
    use crate::{AddressSpace, Mapping, PageList, Region, Ring};

    const LEN: u64 = 0x4000;
    /// Graves side by side are one mapping: who counts them has no other test beside him.
    static GRAVES: RwLock<()> = RwLock::new(());

    /// Held by a test whose memory vanishes.
    pub(crate) fn beside_others() -> RwLockReadGuard<'static, ()> {
        GRAVES.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn guest() -> (File, AddressSpace) {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(LEN).unwrap();
        let map = Mapping::of_file(file.try_clone().unwrap(), 0, LEN).unwrap();
        let region = Region::new(0, Arc::new(map)).unwrap();
        (file, AddressSpace::default().with(vec![region]).unwrap())
    }

    /// What the kernel says of the mapping at an address.
    fn smaps(addr: usize, key: &str) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let head = format!("{addr:x}-");
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&head));
        let line = lines.find_map(|line| line.strip_prefix(key));
        line.unwrap_or_else(|| panic!("no mapping begins at {addr:#x}")).trim().to_owned()
    }

    #[test]
    fn memory_that_vanishes_reads_as_zeroes_and_its_owner_learns_it() {
        let _graves = beside_others();
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
    fn what_takes_its_place_is_one_mapping_that_commits_no_memory() {
        let _graves = GRAVES.write().unwrap_or_else(PoisonError::into_inner);
        let (file, space) = guest();
        let start = space.regions()[0].host(0).unwrap().addr();
        file.set_len(0).unwrap();
        Ring::page(&space, 0x2000).unwrap().store_u32(0, 7);
        let flags = smaps(start, "VmFlags:");
        assert!(flags.split(' ').any(|flag| flag == "sh"), "shared: {flags}");
        assert!(!flags.split(' ').any(|flag| flag == "ac"), "accounted: {flags}");
        assert_eq!(smaps(start, "Size:"), "16 kB", "in one piece");
        assert_eq!(smaps(start, "Rss:"), "4 kB", "what was touched");
    }

    #[test]
    fn what_was_written_to_memory_that_is_gone_is_gone_with_it() {
        let _graves = beside_others();
        let grave_blocks = || {
            let Some(Some(guard)) = GUARD.get() else { panic!("installed") };
            rustix::fs::fstat(&guard.grave).unwrap().st_blocks
        };
        let (file, space) = guest();
        let ring = Ring::page(&space, 0).unwrap();
        file.set_len(0).unwrap();
        ring.store_u32(0, 0x5ec2e7);
        assert!(grave_blocks() > 0);
        drop((ring, space));
        // Other tests have theirs for a moment.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while grave_blocks() > 0 {
            assert!(std::time::Instant::now() < deadline, "pages are kept for nobody");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_slot_is_used_again_without_its_past() {
        let _graves = beside_others();
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
        let _graves = beside_others();
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

    /// What a process makes vanish of its memory is one window, however long the piece; what was
    /// touched elsewhere in it stays as it is.
    #[test]
    fn of_memory_that_may_vanish_one_window_goes() {
        let _graves = beside_others();
        const WINDOWS: u64 = 67;
        let window = 64u64 << 20;
        let file = File::from(memfd_create("loose", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(WINDOWS * window).unwrap();
        let map = Mapping::of_loose_file(file.try_clone().unwrap(), 0, WINDOWS * window).unwrap();
        let region = Region::new(0, Arc::new(map)).unwrap();
        let space = AddressSpace::default().with(vec![region]).unwrap();
        let ring = |window_number: u64| Ring::page(&space, window_number * window).unwrap();
        ring(0).store_u32(0, 7);
        ring(1).store_u32(0, 8);
        file.set_len(window).unwrap();
        // The last first: its number is another's, as far as what was replaced is kept.
        for number in (1..WINDOWS).rev() {
            assert_eq!(ring(number).load_u32(0), 0, "{number}");
            ring(number).store_u32(4, u32::try_from(number).unwrap());
        }
        for number in 1..WINDOWS {
            assert_eq!(ring(number).load_u32(4), u32::try_from(number).unwrap(), "kept");
        }
        assert_eq!(ring(0).load_u32(0), 7, "it is there");
        assert!(!space.vanished(), "it might go");
        assert_eq!(space.lost().count(), 1);
        assert!(space.steady().regions().is_empty());
        let start = space.regions()[0].host(0).unwrap().addr();
        let end = start + usize::try_from(WINDOWS * window).unwrap();
        drop(space);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let left = maps.lines().filter(|line| {
            let at = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
            (start..end).contains(&at) && line.contains(GRAVE)
        });
        assert_eq!(left.count(), 0, "all of it is unmapped");
    }
}
