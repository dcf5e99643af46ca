//! One mapping of guest memory, with all that must live exactly as long.
//!
//! A [`Mapping`] is made here and nowhere else, and owns what makes it safe to touch: the
//! addresses, its place in the SIGBUS handler's table (`sigbus`), and its share of what the process
//! can map (`maps`). Whoever can reach the bytes holds the mapping, so there is no way to hold one
//! without the other.
//!
//! What is mapped is always whole pages *of the file*. A mapping of hugetlbfs that is shorter than
//! its page is rounded up by the kernel, and can then be neither replaced nor unmapped at the
//! length that was asked for (mm/hugetlb.c, `hugetlb_vm_op_split`); so such a mapping is refused
//! before it is made.
//!
//! The last holder of a mapping unmaps it, which takes time in proportion to what was touched, and
//! frees the file's pages where the VMM has let go of them. On a thread that serves several guests
//! ([`super::unmap_elsewhere`]) `reaper` does it instead.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use super::maps::{Addresses, Descriptor, Maps, Use};
use super::reaper::Reaper;
use super::sigbus::Watch;
use super::{HostPtr, PAGE_SIZE, host};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// `f_type` of hugetlbfs (statfs(2)).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// What vanishes at once of memory that may vanish ([`Mapping::loose`]): as long as replacing it
/// takes, a thread stands still that serves others as well.
const WINDOW: u64 = 64 << 20;

/// Why memory was not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// Offset or length are not whole pages of the file.
    #[error("its offset and length are not multiples of {0}, the size of its file's pages")]
    Pages(u64),
    /// It cannot be put into the signal handler's table.
    #[error("it cannot be guarded against vanishing")]
    Unguarded,
    /// There are too many mappings.
    #[error("all guests together have as many memory regions as one daemon can map")]
    Count,
    /// There are too few descriptors.
    #[error(
        "all guests together have as many memory regions as half of the daemon's open files \
         (LimitNOFILE)"
    )]
    Descriptors,
    /// There are too few addresses.
    #[error("all guests together have as much memory as one daemon can map")]
    Addresses,
    /// The host refuses.
    #[error("the host refuses to map it: {0}")]
    Host(Errno),
}

/// The size of the pages that a file's memory has.
#[must_use]
pub fn page_size(file: BorrowedFd<'_>) -> u64 {
    // The fields' types differ between architectures.
    #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
    match rustix::fs::fstatfs(file) {
        Ok(stat) if stat.f_type as u64 & 0xffff_ffff == HUGETLBFS_MAGIC => {
            (stat.f_bsize as u64).max(PAGE_SIZE)
        }
        _ => PAGE_SIZE,
    }
}

thread_local! {
    /// Whether this thread gives its mappings away.
    static ELSEWHERE: Cell<bool> = const { Cell::new(false) };
}

/// What takes them.
static REAPER: OnceLock<Option<Reaper<Parts>>> = OnceLock::new();

/// From now on this thread does not wait for guest memory to be unmapped.
pub fn unmap_elsewhere() {
    ELSEWHERE.set(true);
    // Not when it is needed: making a thread takes time as well.
    REAPER.get_or_init(Reaper::start);
}

/// The file behind a mapping.
struct Backing {
    file: File,
    offset: u64,
    _descriptor: Descriptor,
}

/// What a mapping owns; it goes in [`Parts::drop`].
pub(super) struct Parts {
    start: HostPtr,
    len: usize,
    /// Listed until just before the addresses are given back.
    watch: Option<Watch>,
    backing: Option<Backing>,
    _maps: Maps,
    _addresses: Addresses,
}

impl Drop for Parts {
    fn drop(&mut self) {
        // Whoever maps something at these addresses next must not find them listed.
        self.watch = None;
        // SAFETY: the range is one whole mapping that `Mapping::new` made; nobody can reach its
        // bytes any more.
        let unmapped = unsafe { munmap(self.start.0.cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!(%error, len = self.len, "guest memory cannot be unmapped");
        }
    }
}

/// See the module.
pub struct Mapping {
    /// There until this is dropped.
    parts: Option<Parts>,
    start: HostPtr,
    len: u64,
    /// How much of the file comes with the first touch of a byte.
    grain: u64,
    /// See [`Mapping::loose`].
    loose: bool,
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({:#x}+{:#x})", self.start.addr(), self.len)
    }
}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` on, shared.
    ///
    /// # Errors
    /// See [`MappingError`].
    pub fn of_file(file: File, offset: u64, len: u64) -> Result<Self, MappingError> {
        Self::backed(file, offset, len, false)
    }

    /// As [`Self::of_file`], of a file that its owner may make shorter and goes on: that costs only
    /// what lies in it ([`super::AddressSpace::lost`]).
    ///
    /// # Errors
    /// See [`MappingError`].
    pub fn of_loose_file(file: File, offset: u64, len: u64) -> Result<Self, MappingError> {
        Self::backed(file, offset, len, true)
    }

    fn backed(file: File, offset: u64, len: u64, loose: bool) -> Result<Self, MappingError> {
        let page = page_size(file.as_fd());
        if len == 0 || !offset.is_multiple_of(page) || !len.is_multiple_of(page) {
            return Err(MappingError::Pages(page));
        }
        let descriptor = Descriptor::take().ok_or(MappingError::Descriptors)?;
        // Also tmpfs has huge pages, and says so here only (mm/shmem.c, `shmem_getattr`).
        let stat = rustix::fs::fstat(&file).map_err(MappingError::Host)?;
        let grain = u64::try_from(stat.st_blksize).unwrap_or(0).max(page);
        let backing = Backing { file, offset, _descriptor: descriptor };
        let window = if loose { WINDOW.next_multiple_of(page) } else { len };
        let mut mapping = Self::new((len, grain, window), Some(backing))?;
        mapping.loose = loose;
        Ok(mapping)
    }

    /// Maps anonymous memory, for tests and tools.
    ///
    /// # Errors
    /// See [`MappingError`].
    pub fn anonymous(len: u64) -> Result<Self, MappingError> {
        if len == 0 || !len.is_multiple_of(PAGE_SIZE) {
            return Err(MappingError::Pages(PAGE_SIZE));
        }
        Self::new((len, PAGE_SIZE, len), None)
    }

    fn new(
        (len, grain, window): (u64, u64, u64),
        backing: Option<Backing>,
    ) -> Result<Self, MappingError> {
        let maps = Maps::take(host(len.div_ceil(window)), Use::Memory);
        let maps = maps.ok_or(MappingError::Count)?;
        let addresses = Addresses::take(len).ok_or(MappingError::Addresses)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let any = std::ptr::null_mut();
        let mapped = match &backing {
            // SAFETY: a new mapping where the kernel likes; it replaces nothing.
            Some(Backing { file, offset, .. }) => unsafe {
                let flags = MapFlags::SHARED | MapFlags::NORESERVE;
                mmap(any, host(len), rights, flags, file, *offset)
            },
            // SAFETY: as above.
            None => unsafe {
                mmap_anonymous(any, host(len), rights, MapFlags::PRIVATE | MapFlags::NORESERVE)
            },
        };
        let start = HostPtr(mapped.map_err(MappingError::Host)?.cast());
        let mut parts = Parts {
            start,
            len: host(len),
            watch: None,
            backing,
            _maps: maps,
            _addresses: addresses,
        };
        let watch = Watch::new(start, host(len), host(window));
        parts.watch = Some(watch.ok_or(MappingError::Unguarded)?);
        Ok(Self { parts: Some(parts), start, len, grain, loose: false })
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes; it never does.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the memory has vanished (see [`super::vanished`]).
    #[must_use]
    pub fn gone(&self) -> bool {
        self.parts.as_ref().and_then(|parts| parts.watch.as_ref()).is_some_and(Watch::gone)
    }

    /// What tells whether the memory has vanished, for as long as this lives.
    pub(super) fn mark(&self) -> Option<&'static AtomicBool> {
        self.parts.as_ref()?.watch.as_ref().map(Watch::mark)
    }

    /// Whether its owner may make it vanish and goes on.
    #[must_use]
    pub const fn loose(&self) -> bool {
        self.loose
    }

    /// How much of the file comes with the first touch of a byte: more than [`PAGE_SIZE`] if it is
    /// on huge pages.
    pub(super) const fn grain(&self) -> u64 {
        self.grain
    }

    /// Has the page around an address of this mapping come, as a store to it would; the address
    /// that follows it. Takes as long as the host takes to find and clear the page.
    pub(super) fn populate(&self, at: usize) -> Result<usize, Errno> {
        let grain = host(self.grain);
        let within = at - self.start.addr();
        // Grains begin where the file's do, which for a file that is mapped from the middle is not
        // the mapping's begin.
        let skew = self.file().map_or(0, |(_, offset)| host(offset % self.grain));
        let first = ((within + skew) / grain * grain).saturating_sub(skew);
        let end = ((within + skew) / grain * grain + grain - skew).min(host(self.len));
        let page = self.start.0.wrapping_add(first).cast();
        // SAFETY: the range lies in this mapping, whose pages may come at any time.
        match unsafe { madvise(page, end - first, Advice::LinuxPopulateWrite) } {
            // Before Linux 5.14 there is no such advice, and pages come with the first touch.
            Ok(()) | Err(Errno::INVAL) => Ok(self.start.addr() + end),
            Err(error) => Err(error),
        }
    }

    /// The address of the first byte.
    pub(super) const fn start(&self) -> HostPtr {
        self.start
    }

    /// The file behind it, and the offset of its first byte there.
    pub(super) fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        let backing = self.parts.as_ref()?.backing.as_ref()?;
        Some((backing.file.as_fd(), backing.offset))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        // What the reaper does not take goes here.
        if ELSEWHERE.get()
            && let Some(reaper) = REAPER.get_or_init(Reaper::start)
        {
            drop(reaper.take(parts));
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memfd(flags: MemfdFlags, len: u64) -> File {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC | flags).unwrap();
        ftruncate(&file, len).unwrap();
        file.into()
    }

    /// Lines of this process's maps that name that memfd.
    fn lines(name: &str) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(name)).count()
    }

    #[test]
    fn only_whole_pages_of_the_file_are_mapped() {
        let small =
            |offset, len| Mapping::of_file(memfd(MemfdFlags::empty(), 1 << 20), offset, len);
        assert!(small(0x1000, 0x3000).is_ok());
        for (offset, len) in [(0, 0), (0, 0x1001), (1, 0x1000), (0x1000, 1)] {
            assert_eq!(small(offset, len).unwrap_err(), MappingError::Pages(4096));
        }
        let huge = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        for (offset, len) in [(0, 0x1000), (0x1000, 2 << 20), (2 << 20, (2 << 20) - 0x1000)] {
            let refused = Mapping::of_file(memfd(huge, 8 << 20), offset, len);
            assert_eq!(refused.unwrap_err(), MappingError::Pages(2 << 20));
        }
        assert!(Mapping::of_file(memfd(huge, 8 << 20), 2 << 20, 4 << 20).is_ok());
    }

    /// Huge pages of 2 MiB that the host can give at most.
    fn huge_pages() -> u64 {
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!(
                "/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"
            ));
            text.map_or(0, |text| text.trim().parse().unwrap())
        };
        read("nr_hugepages") + read("nr_overcommit_hugepages")
    }

    #[test]
    fn huge_pages_that_the_host_does_not_have_vanish_and_are_unmapped() {
        let _graves = super::super::sigbus::tests::beside_others();
        let pages = huge_pages() + 1;
        let file = memfd_create("no-such-page", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
        let file = File::from(file.unwrap());
        ftruncate(&file, pages << 21).unwrap();
        let map = Mapping::of_file(file, 0, pages << 21).unwrap();
        assert_eq!(lines("no-such-page"), 1);
        for page in 0..host(pages) {
            // SAFETY: the byte is mapped; that of the last page vanishes.
            unsafe { map.start().0.wrapping_add((page << 21) + 12345).write_volatile(7) };
        }
        assert!(map.gone());
        assert_eq!(lines("no-such-page"), 0, "it was replaced as a whole");
        let (first, last) = (map.start().addr(), map.start().addr() + host(map.len()) - 1);
        drop(map);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let grave = maps.lines().filter(|line| line.contains(super::super::sigbus::GRAVE));
        let inside = grave.filter(|line| {
            let at = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
            (first..=last).contains(&at)
        });
        assert_eq!(inside.count(), 0, "what took its place is unmapped too");
    }

    #[test]
    fn pages_come_where_they_are_asked_for() {
        let (size, offset) = (64 << 12, 5 << 12);
        let file = memfd(MemfdFlags::empty(), size);
        let mut map = Mapping::of_file(file.try_clone().unwrap(), offset, size - offset).unwrap();
        assert_eq!(map.grain(), PAGE_SIZE);
        let blocks = || rustix::fs::fstat(&file).unwrap().st_blocks / 8;
        let start = map.start().addr();
        assert_eq!(map.populate(start + 0x1234), Ok(start + 0x2000));
        assert_eq!(blocks(), 1);
        // As if its pages were of 64 KiB: the first begins eleven pages before the mapping's
        // sixteenth.
        map.grain = 1 << 16;
        assert_eq!(map.populate(start + 0x3000), Ok(start + (11 << 12)));
        assert_eq!(blocks(), 11);
        assert_eq!(map.populate(start + (11 << 12)), Ok(start + (27 << 12)));
        assert_eq!(blocks(), 27);
        assert_eq!(map.populate(start + (59 << 12) - 1), Ok(start + (59 << 12)));
    }

    #[test]
    fn pages_that_the_host_does_not_have_are_refused_where_they_are_asked_for() {
        let pages = huge_pages() + 1;
        let file = memfd(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, pages << 21);
        let map = Mapping::of_file(file, 0, pages << 21).unwrap();
        assert_eq!(map.grain(), 2 << 20);
        let all = (0..pages).map(|page| map.populate(map.start().addr() + host(page << 21)));
        assert_eq!(all.collect::<Result<Vec<_>, _>>(), Err(Errno::FAULT));
        assert!(!map.gone());
    }

    #[test]
    fn a_shared_thread_does_not_unmap() {
        let file = memfd_create("unmapped-elsewhere", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 20).unwrap();
        let map = Mapping::of_file(file.into(), 0, 1 << 20).unwrap();
        assert_eq!(lines("unmapped-elsewhere"), 1);
        std::thread::spawn(move || {
            unmap_elsewhere();
            drop(map);
        })
        .join()
        .unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while lines("unmapped-elsewhere") > 0 {
            assert!(std::time::Instant::now() < deadline, "it stays mapped");
            std::thread::yield_now();
        }
    }
}
