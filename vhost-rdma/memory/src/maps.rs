//! What the process can still map, and who may have it.
//!
//! Mappings, addresses and descriptors are the process's own: a VMM that used them up would leave
//! none for its neighbours' memory, for a thread's stack or for the allocator, and an allocator
//! that gets none ends the process. So everything that a guest can have mapped is counted before it
//! is mapped. What is left over is also what the SIGBUS handler lives on: `mmap` in the place of a
//! mapping fails once there are more than `vm.max_map_count` of them (mm/mmap.c, `do_mmap`), so
//! there never may be.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// `vm.max_map_count` where it cannot be read: the kernel's default.
const DEFAULT_MAP_COUNT: usize = 65_530;
/// Addresses that all guests' memory together may take: half of what a process has on x86-64.
const ADDRESSES: u64 = 1 << 46;

static MAPPED: AtomicUsize = AtomicUsize::new(0);
static SPAN: AtomicU64 = AtomicU64::new(0);
static FILES: AtomicUsize = AtomicUsize::new(0);

/// A number of mappings, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Maps(usize);

/// For what mappings are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// The memory itself, of which there are a few for each guest.
    Memory,
    /// Second mappings for an RNIC, of which a guest would like any number: they leave a quarter to
    /// the first kind.
    Windows,
}

fn most() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        text.trim().parse().unwrap_or(DEFAULT_MAP_COUNT)
    })
}

/// Asks the host how many there may be.
pub(super) fn prepare() {
    most();
}

impl Maps {
    /// `None` if that many are not left.
    pub(super) fn take(count: usize, of: Use) -> Option<Self> {
        // An eighth is for threads, libraries and the allocator.
        let most = match of {
            Use::Memory => most() / 8 * 7,
            Use::Windows => most() / 8 * 5,
        };
        let add = |used: usize| used.checked_add(count).filter(|&sum| sum <= most);
        MAPPED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Self(count))
    }
}

impl Drop for Maps {
    fn drop(&mut self) {
        MAPPED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// A range of addresses, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Addresses(u64);

impl Addresses {
    /// `None` if there are not so many left.
    pub(super) fn take(bytes: u64) -> Option<Self> {
        let add = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= ADDRESSES);
        SPAN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Self(bytes))
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        SPAN.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// A descriptor that is kept, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Descriptor(());

impl Descriptor {
    /// `None` if half of the descriptors that the process may have are guests' memory already.
    pub(super) fn take() -> Option<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let most = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        let add = |used: usize| Some(used + 1).filter(|&sum| sum <= most / 2);
        FILES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Self(()))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        FILES.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_leave_mappings_for_memory() {
        let windows = Maps::take(most() / 8 * 5 - 2000, Use::Windows).unwrap();
        assert!(Maps::take(2001, Use::Windows).is_none());
        let memory = Maps::take(most() / 4 - 2000, Use::Memory).unwrap();
        assert!(Maps::take(most() / 8, Use::Memory).is_none());
        drop((windows, memory));
        assert!(Maps::take(2001, Use::Windows).is_some());
    }

    #[test]
    fn addresses_come_to_an_end_and_come_back() {
        let all = Addresses::take(ADDRESSES - (1 << 40)).unwrap();
        assert!(Addresses::take((1 << 40) + 1).is_none());
        assert!(Addresses::take(u64::MAX).is_none());
        drop(all);
        assert!(Addresses::take((1 << 40) + 1).is_some());
    }
}
