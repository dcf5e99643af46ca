//! Guest memory: shared memfd regions, a page allocator over them, and views for reading and
//! writing.
//!
//! The daemon maps the same pages and writes to them at any time, as another CPU would. So nothing
//! here ever makes a Rust reference to guest bytes: every access is an atomic load or store through
//! a pointer that a bounds check produced. This module and `own` are the only ones of the crate
//! that may use `unsafe`.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use vmm_sys_util::eventfd::EventFd;

use crate::spec::PAGE;

/// What every freshly allocated page is filled with: a ring that relies on zeroes which nobody
/// wrote shows itself.
pub const POISON: u8 = 0xa5;

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The descriptor of an eventfd that tells only its number.
pub fn fd_of(eventfd: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the eventfd owns its descriptor, which is open for as long as the borrow lasts.
    unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) }
}

/// One contiguous piece of guest-physical memory with a memfd of its own.
pub struct Region {
    fd: OwnedFd,
    host: NonNull<u8>,
    gpa: u64,
    size: u64,
    /// One flag per page: is it allocated?
    used: Mutex<Vec<bool>>,
}

// SAFETY: the mapping lives as long as the region and is only ever accessed with atomic operations.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}+{:#x})", self.gpa, self.size)
    }
}

impl Region {
    fn new(gpa: u64, size: u64, kind: MemfdFlags) -> std::io::Result<Self> {
        let fd = rustix::fs::memfd_create("virtual-guest", MemfdFlags::CLOEXEC | kind)?;
        rustix::fs::ftruncate(&fd, size)?;
        if kind.contains(MemfdFlags::ALLOW_SEALING) {
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        }
        Self::over(fd, gpa, size)
    }

    fn over(fd: OwnedFd, gpa: u64, size: u64) -> std::io::Result<Self> {
        Self::mapped(fd, (gpa, size), ProtFlags::READ | ProtFlags::WRITE)
    }

    fn mapped(fd: OwnedFd, (gpa, size): (u64, u64), how: ProtFlags) -> std::io::Result<Self> {
        let len = usize::try_from(size).map_err(std::io::Error::other)?;
        // SAFETY: a new shared mapping at an address that the kernel chooses aliases no Rust
        // object.
        let host =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, how, MapFlags::SHARED, &fd, 0) }?;
        let host = NonNull::new(host.cast::<u8>())
            .ok_or_else(|| std::io::Error::other("mmap gave null"))?;
        let pages = usize::try_from(size / PAGE).map_err(std::io::Error::other)?;
        Ok(Self { fd, host, gpa, size, used: Mutex::new(vec![false; pages]) })
    }

    /// First guest-physical address.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The memfd, for the memory table.
    pub fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// The memfd, for what only a hostile monitor does to it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The address at which this process maps the region (what vhost-user calls the user address).
    pub fn host_addr(&self) -> u64 {
        self.host.as_ptr() as u64
    }

    fn contains(&self, gpa: u64) -> bool {
        gpa >= self.gpa && gpa - self.gpa < self.size
    }

    fn ptr(&self, gpa: u64) -> NonNull<u8> {
        assert!(self.contains(gpa), "{gpa:#x} is outside {self:?}");
        // SAFETY: the offset was just checked to lie inside the mapping.
        unsafe { self.host.add((gpa - self.gpa) as usize) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length, and views keep the region
        // alive.
        let unmapped =
            unsafe { rustix::mm::munmap(self.host.as_ptr().cast::<c_void>(), self.size as usize) };
        debug_assert!(unmapped.is_ok());
    }
}

/// All memory of one guest.
#[derive(Debug)]
pub struct Ram {
    /// What its memfds are made of.
    kind: MemfdFlags,
    regions: RwLock<Vec<Arc<Region>>>,
}

impl Ram {
    /// Memory with one region at guest-physical address `gpa`.
    pub fn new(gpa: u64, size: u64) -> std::io::Result<Arc<Self>> {
        Self::of(MemfdFlags::empty(), gpa, size)
    }

    /// The same in huge pages of 2 MiB.
    pub fn in_huge_pages(gpa: u64, size: u64) -> std::io::Result<Arc<Self>> {
        Self::of(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, gpa, size)
    }

    /// The same in files that never shrink, as a process has it: by addresses of its own, where
    /// what is contiguous for it is so for the device.
    pub fn sealed(gpa: u64, size: u64) -> std::io::Result<Arc<Self>> {
        Self::of(MemfdFlags::ALLOW_SEALING, gpa, size)
    }

    fn of(kind: MemfdFlags, gpa: u64, size: u64) -> std::io::Result<Arc<Self>> {
        let ram = Self { kind, regions: RwLock::default() };
        ram.add_region(gpa, size)?;
        Ok(Arc::new(ram))
    }

    /// Adds a region; the caller tells the device.
    pub fn add_region(&self, gpa: u64, size: u64) -> std::io::Result<Arc<Region>> {
        Ok(self.push(Region::new(gpa, size, self.kind)?))
    }

    /// The same over a file of the caller's, which has that many bytes.
    pub fn add_file(&self, gpa: u64, size: u64, file: OwnedFd) -> std::io::Result<Arc<Region>> {
        Ok(self.push(Region::over(file, gpa, size)?))
    }

    fn push(&self, region: Region) -> Arc<Region> {
        let region = Arc::new(region);
        self.regions.write().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&region));
        region
    }

    /// Forgets the region at `gpa`; the mapping goes with its last view.
    pub fn remove_region(&self, gpa: u64) -> Option<Arc<Region>> {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        let at = regions.iter().position(|r| r.gpa == gpa)?;
        Some(regions.remove(at))
    }

    /// The regions, in the order in which they were added.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn region_of(&self, gpa: u64) -> Arc<Region> {
        let found = self.regions().into_iter().find(|r| r.contains(gpa));
        found.unwrap_or_else(|| panic!("{gpa:#x} is not guest memory"))
    }

    /// Allocates `n` contiguous pages whose first address is a multiple of `align` bytes, in the
    /// region at `gpa` if given.
    pub fn alloc_in(self: &Arc<Self>, gpa: Option<u64>, n: usize, align: u64) -> Pages {
        for region in self.regions() {
            if gpa.is_some_and(|g| g != region.gpa) {
                continue;
            }
            let mut used = lock(&region.used);
            let mut run = 0;
            for page in 0..used.len() {
                let at = region.gpa + page as u64 * PAGE;
                run = match (used[page], run) {
                    (true, _) => 0,
                    (false, 0) if !at.is_multiple_of(align) => 0,
                    (false, r) => r + 1,
                };
                if run == n {
                    let first = page + 1 - n;
                    used[first..=page].fill(true);
                    drop(used);
                    let pages = (0..n).map(|i| region.gpa + (first + i) as u64 * PAGE).collect();
                    return Pages::new(self, pages);
                }
            }
        }
        panic!("guest memory is full: {n} contiguous pages");
    }

    /// Allocates `n` contiguous pages.
    pub fn alloc(self: &Arc<Self>, n: usize) -> Pages {
        self.alloc_in(None, n, PAGE)
    }

    /// Allocates `n` pages no two of which are neighbours in ascending order, so that contiguity
    /// can not be relied on.
    pub fn alloc_scattered(self: &Arc<Self>, n: usize) -> Pages {
        if self.kind.contains(MemfdFlags::ALLOW_SEALING) {
            return self.alloc(n);
        }
        let region = &self.regions()[0];
        let mut used = lock(&region.used);
        let mut pages = Vec::with_capacity(n);
        for page in (0..used.len()).rev() {
            if pages.len() == n {
                break;
            }
            if !used[page] {
                used[page] = true;
                pages.push(region.gpa + page as u64 * PAGE);
            }
        }
        drop(used);
        assert!(pages.len() == n, "guest memory is full: {n} scattered pages");
        // Descending addresses are never contiguous; swapping pairs also makes them jump.
        for pair in pages.chunks_exact_mut(2).step_by(2) {
            pair.swap(0, 1);
        }
        if n > 2 {
            pages.rotate_left(n / 3);
        }
        let pairs_ascend = pages.windows(2).filter(|w| w[1] == w[0] + PAGE).count();
        debug_assert!(pairs_ascend <= n / 2);
        Pages::new(self, pages)
    }

    fn free(&self, gpa: u64) {
        for region in self.regions() {
            if region.contains(gpa) {
                lock(&region.used)[((gpa - region.gpa) / PAGE) as usize] = false;
            }
        }
    }

    /// A view of `len` bytes that start at guest-physical address `gpa`, contiguous.
    pub fn view(&self, gpa: u64, len: u64) -> View {
        let region = self.region_of(gpa);
        assert!(gpa - region.gpa + len <= region.size, "view leaves {region:?}");
        let ptr = region.ptr(gpa);
        View { pieces: vec![ptr], shift: 63, offset: 0, len, _keep: vec![region] }
    }
}

/// Allocated pages, given back on drop.
#[derive(Debug)]
pub struct Pages {
    ram: Arc<Ram>,
    gpas: Vec<u64>,
}

impl Pages {
    fn new(ram: &Arc<Ram>, gpas: Vec<u64>) -> Self {
        let pages = Self { ram: Arc::clone(ram), gpas };
        pages.view(0, pages.len()).fill(0, pages.len(), POISON);
        pages
    }

    /// Guest-physical addresses of the pages in order.
    pub fn gpas(&self) -> &[u64] {
        &self.gpas
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.gpas.len() as u64 * PAGE
    }

    /// Never: an allocation has at least a page unless none was asked for.
    pub fn is_empty(&self) -> bool {
        self.gpas.is_empty()
    }

    /// The guest-physical address of byte `offset`.
    pub fn gpa(&self, offset: u64) -> u64 {
        self.gpas[(offset / PAGE) as usize] + offset % PAGE
    }

    /// Do the pages follow each other?
    pub fn contiguous(&self) -> bool {
        self.gpas.windows(2).all(|w| w[1] == w[0] + PAGE)
    }

    /// A view of `len` bytes from `offset` on.
    pub fn view(&self, offset: u64, len: u64) -> View {
        assert!(offset + len <= self.len(), "view leaves its pages");
        let mut keep: Vec<Arc<Region>> = Vec::new();
        for gpa in &self.gpas {
            if !keep.iter().any(|r| r.contains(*gpa)) {
                keep.push(self.ram.region_of(*gpa));
            }
        }
        let find = |gpa: u64| keep.iter().find(|r| r.contains(gpa)).map(|r| r.ptr(gpa));
        if self.contiguous() && keep.len() == 1 {
            let pieces = self.gpas.first().and_then(|g| find(*g)).into_iter().collect();
            View { pieces, shift: 63, offset, len, _keep: keep }
        } else {
            let pieces = self.gpas.iter().filter_map(|g| find(*g)).collect();
            View { pieces, shift: PAGE.trailing_zeros(), offset, len, _keep: keep }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for gpa in &self.gpas {
            self.ram.free(*gpa);
        }
    }
}

/// A window on guest memory whose bytes are contiguous for the reader, though their pages may be
/// scattered.
#[derive(Clone)]
pub struct View {
    pieces: Vec<NonNull<u8>>,
    shift: u32,
    offset: u64,
    len: u64,
    _keep: Vec<Arc<Region>>,
}

// SAFETY: the pointers lead into regions that the view keeps alive, and are used with atomic
// operations only.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({} bytes in {} pieces)", self.len, self.pieces.len())
    }
}

macro_rules! word {
    ($atomic:ty, $int:ty, $load:ident, $store:ident) => {
        /// Loads the word at `at` with `order`.
        #[inline]
        #[track_caller]
        pub fn $load(&self, at: u64, order: Ordering) -> $int {
            let p = self.ptr(at, size_of::<$int>()).cast::<$int>();
            assert!(p.is_aligned(), "misaligned access to guest memory");
            // SAFETY: `ptr` checked the range, the line above the alignment, and the view keeps the
            // mapping alive.
            <$int>::from_le(unsafe { <$atomic>::from_ptr(p.as_ptr()) }.load(order))
        }

        /// Stores a word at `at` with `order`.
        #[inline]
        #[track_caller]
        pub fn $store(&self, at: u64, value: $int, order: Ordering) {
            let p = self.ptr(at, size_of::<$int>()).cast::<$int>();
            assert!(p.is_aligned(), "misaligned access to guest memory");
            // SAFETY: as for loads.
            unsafe { <$atomic>::from_ptr(p.as_ptr()) }.store(value.to_le(), order);
        }
    };
}

/// Takes a descriptor over as an eventfd.
pub fn eventfd_of(fd: OwnedFd) -> EventFd {
    // SAFETY: the descriptor is open and ours, and is given away here.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

impl View {
    /// The first `len` bytes of a file, to be read only.
    pub fn of_file(fd: OwnedFd, len: u64) -> std::io::Result<Self> {
        let region = Region::mapped(fd, (0, len), ProtFlags::READ)?;
        let pieces = vec![region.host];
        Ok(Self { pieces, shift: 63, offset: 0, len, _keep: vec![Arc::new(region)] })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Has it no bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of this view.
    #[track_caller]
    pub fn slice(&self, at: u64, len: u64) -> Self {
        assert!(at + len <= self.len, "slice leaves its view");
        Self { offset: self.offset + at, len, ..self.clone() }
    }

    #[inline]
    #[track_caller]
    fn ptr(&self, at: u64, size: usize) -> NonNull<u8> {
        assert!(at + size as u64 <= self.len, "access at {at} leaves a view of {} bytes", self.len);
        let at = at + self.offset;
        let mask = (1u64 << self.shift) - 1;
        assert!((at & mask) + size as u64 <= mask + 1, "access crosses a page");
        let piece = self.pieces[(at >> self.shift) as usize];
        // SAFETY: a piece has 1 << shift bytes, or all bytes of the view when there is only one;
        // both were checked.
        unsafe { piece.add((at & mask) as usize) }
    }

    word!(AtomicU8, u8, load8, store8);
    word!(AtomicU16, u16, load16, store16);
    word!(AtomicU32, u32, load32, store32);
    word!(AtomicU64, u64, load64, store64);

    /// What a guest CPU does with `lock xadd`.
    pub fn fetch_add64(&self, at: u64, value: u64) -> u64 {
        let p = self.ptr(at, 8).cast::<u64>();
        assert!(p.is_aligned(), "misaligned atomic");
        // SAFETY: as for loads.
        unsafe { AtomicU64::from_ptr(p.as_ptr()) }.fetch_add(value, Ordering::SeqCst)
    }

    /// What a guest CPU does with `lock cmpxchg`; the value that was there.
    pub fn compare_exchange64(&self, at: u64, compare: u64, swap: u64) -> u64 {
        let p = self.ptr(at, 8).cast::<u64>();
        assert!(p.is_aligned(), "misaligned atomic");
        // SAFETY: as for loads.
        let word = unsafe { AtomicU64::from_ptr(p.as_ptr()) };
        word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
            .unwrap_or_else(|found| found)
    }

    /// Copies bytes in, in words where alignment allows it.
    #[inline]
    #[track_caller]
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let mut at = at;
        let mut rest = bytes;
        while let Some((first, tail)) = rest.split_first() {
            if (at + self.offset).is_multiple_of(8)
                && let Some((word, tail)) = rest.split_first_chunk::<8>()
            {
                self.store64(at, u64::from_le_bytes(*word), Ordering::Relaxed);
                (at, rest) = (at + 8, tail);
            } else {
                self.store8(at, *first, Ordering::Relaxed);
                (at, rest) = (at + 1, tail);
            }
        }
    }

    /// Copies bytes out.
    #[inline]
    #[track_caller]
    pub fn read(&self, at: u64, bytes: &mut [u8]) {
        let mut at = at;
        let mut rest = bytes;
        while !rest.is_empty() {
            if (at + self.offset).is_multiple_of(8) && rest.len() >= 8 {
                let (word, tail) = rest.split_at_mut(8);
                word.copy_from_slice(&self.load64(at, Ordering::Relaxed).to_le_bytes());
                (at, rest) = (at + 8, tail);
            } else {
                let (byte, tail) = rest.split_at_mut(1);
                byte[0] = self.load8(at, Ordering::Relaxed);
                (at, rest) = (at + 1, tail);
            }
        }
    }

    /// Bytes as a vector.
    #[track_caller]
    pub fn vec(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.read(at, &mut bytes);
        bytes
    }

    /// Sets bytes.
    #[track_caller]
    pub fn fill(&self, at: u64, len: u64, value: u8) {
        let chunk = [value; 4096];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(4096);
            self.write(at + done, &chunk[..n as usize]);
            done += n;
        }
    }

    /// Copies `len` bytes of `from` as one `memcpy` would, for a benchmark's reference. Both views
    /// must be contiguous.
    #[inline]
    pub fn copy_from(&self, at: u64, from: &Self, from_at: u64, len: usize) {
        let (to, from) = (self.ptr(at, len), from.ptr(from_at, len));
        // SAFETY: both ranges were checked; they may overlap, and a benchmark calls this while no
        // device works on them.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_pages_read_as_one_range() {
        let ram = Ram::new(0x10_0000, 1 << 20).unwrap();
        let pages = ram.alloc_scattered(7);
        assert!(!pages.contiguous());
        let view = pages.view(100, 6 * PAGE);
        let data: Vec<u8> = (0..6 * PAGE).map(|i| (i % 251) as u8).collect();
        view.write(0, &data);
        assert_eq!(view.vec(0, 6 * PAGE), data);
        let second_page = ram.view(pages.gpas()[1], PAGE);
        assert_eq!(second_page.vec(0, 16), data[(PAGE - 100) as usize..][..16]);
    }

    #[test]
    fn pages_come_back_on_drop() {
        let ram = Ram::new(0, 16 * PAGE).unwrap();
        for _ in 0..8 {
            let a = ram.alloc(9);
            let b = ram.alloc_in(None, 4, 4 * PAGE);
            assert_eq!(b.gpas()[0] % (4 * PAGE), 0);
            assert_eq!(a.len(), 9 * PAGE);
        }
    }

    #[test]
    #[should_panic(expected = "leaves a view")]
    fn out_of_range_is_refused() {
        let ram = Ram::new(0, PAGE).unwrap();
        ram.view(0, 64).store32(61, 0, Ordering::Relaxed);
    }
}
