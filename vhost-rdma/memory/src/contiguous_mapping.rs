//! Windows: memory of a guest at *contiguous* addresses of the daemon, for hardware that wants a
//! region in one piece.
//!
//! A region whose pages lie side by side in guest memory is in one piece already. Any other is
//! mapped a second time, run after run of neighbouring pages, into a range reserved for it. Each
//! run is a mapping of its own, and a process may have only so many (`vm.max_map_count`): so runs
//! are counted, for the NIC by the caller and for the daemon here, and a region that would take too
//! many is refused while nothing is mapped yet. Pages of hugetlbfs cannot be mapped in parts: a run
//! must begin and end with its huge pages, except where the region itself begins and ends.
//!
//! The second mapping is never touched by a processor, so what vanishes under it raises no signal;
//! what the hardware has pinned stays what it was.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::maps::{Maps, Use};
use super::{HostPtr, PAGE_SIZE, Translation, host, page_size};

/// Why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContiguousError {
    /// It would take more mappings than there are left.
    #[error("the region lies in {0} pieces, more than may be mapped")]
    Pieces(usize),
    /// Pieces of huge pages.
    #[error("the region has pieces of huge pages")]
    HugePages,
    /// Guest memory without a file, or with no end of kinds of them.
    #[error("the region's memory cannot be mapped again")]
    NoFile,
    /// The host refuses.
    #[error("the host refuses a mapping: {0}")]
    Host(rustix::io::Errno),
}

/// Neighbouring pages of one file.
#[derive(Clone, Copy, Debug)]
struct Run<'a> {
    file: BorrowedFd<'a>,
    offset: u64,
    len: u64,
}

/// A reserved range of addresses, unmapped when this ends.
struct Reservation {
    start: *mut c_void,
    len: usize,
    runs: usize,
    _maps: Maps,
}

// SAFETY: the range belongs to the value alone, and nothing here reads or writes what is mapped in
// it.
unsafe impl Send for Reservation {}
// SAFETY: as above; it has no interior state.
unsafe impl Sync for Reservation {}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range was reserved by us and nobody else maps anything into it; whoever used
        // its addresses held the mapping.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}

/// A region of guest memory in one piece. See the module.
pub struct ContiguousMapping {
    base: HostPtr,
    reservation: Option<Reservation>,
    map: Arc<Translation>,
}

impl fmt::Debug for ContiguousMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContiguousMapping({:#x}+{:#x}, {} runs)", self.addr(), self.len(), self.runs())
    }
}

impl ContiguousMapping {
    /// Maps a region in one piece, with `budget` mappings at most.
    ///
    /// # Errors
    /// See [`ContiguousError`].
    pub fn new(map: Arc<Translation>, budget: usize) -> Result<Self, ContiguousError> {
        let (base, run) = map.run(0, map.len()).ok_or(ContiguousError::NoFile)?;
        if run as u64 >= map.len() {
            return Ok(Self { base, reservation: None, map });
        }
        let runs = map.file_runs().ok_or(ContiguousError::NoFile)?;
        let page = runs.iter().map(|run| page_size(run.file)).max().unwrap_or(PAGE_SIZE);
        if !whole_pages(&runs, page) {
            return Err(ContiguousError::HugePages);
        }
        let pieces = ContiguousError::Pieces(runs.len());
        let maps = Some(runs.len()).filter(|&count| count <= budget);
        let maps = maps.and_then(|count| Maps::take(count, Use::Windows)).ok_or(pieces)?;
        let (base, reservation) = map_runs(&runs, page, maps)?;
        drop(runs);
        Ok(Self { base, reservation: Some(reservation), map })
    }

    /// The address of the first byte.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.base.addr()
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.map.len()
    }

    /// Whether it has no bytes; it never does.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Mappings that it takes.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.reservation.as_ref().map_or(0, |reservation| reservation.runs)
    }

    /// Where its bytes are in guest memory.
    #[must_use]
    pub fn translation(&self) -> &Translation {
        &self.map
    }
}

/// Whether runs meet at boundaries of pages of that size.
fn whole_pages(runs: &[Run<'_>], page: u64) -> bool {
    let last = runs.len().saturating_sub(1);
    runs.iter().enumerate().all(|(index, run)| {
        (index == 0 || run.offset.is_multiple_of(page))
            && (index == last || (run.offset + run.len).is_multiple_of(page))
    })
}

/// Reserves a range and maps the runs into it.
fn map_runs(
    runs: &[Run<'_>],
    page: u64,
    maps: Maps,
) -> Result<(HostPtr, Reservation), ContiguousError> {
    let total: u64 = runs.iter().map(|run| run.len).sum();
    let size = host(total.next_multiple_of(page) + 3 * page);
    // SAFETY: a new mapping where the kernel likes; it replaces nothing.
    let start = unsafe {
        mmap_anonymous(
            ptr::null_mut(),
            size,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }
    .map_err(ContiguousError::Host)?;
    let reservation = Reservation { start, len: size, runs: runs.len(), _maps: maps };
    // The first run begins where its page has it.
    let within = runs.first().map_or(0, |run| run.offset % page);
    let aligned = (start.addr() as u64).next_multiple_of(page);
    let base = HostPtr(start.cast::<u8>()).add(host(aligned - start.addr() as u64 + within));
    let mut at = aligned + within;
    for run in runs {
        let before = run.offset % page;
        let len = (before + run.len).next_multiple_of(page);
        let target = start.wrapping_byte_add(host(at - before - start.addr() as u64));
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range lies in the reservation, which is ours alone and not used by anyone
        // yet.
        unsafe {
            mmap(
                target,
                host(len),
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
                run.file,
                run.offset - before,
            )
        }
        .map_err(ContiguousError::Host)?;
        at += run.len;
    }
    Ok((base, reservation))
}

impl Translation {
    /// The runs of neighbouring pages that make up the region, by file; `None` if some have no
    /// file.
    fn file_runs(&self) -> Option<Vec<Run<'_>>> {
        let mut runs: Vec<Run<'_>> = Vec::new();
        let mut offset = 0;
        while offset < self.len() {
            let (start, len) = self.run(offset, self.len() - offset)?;
            let (file, at) = self.file_of(start)?;
            let joins = runs.last_mut().filter(|last| {
                last.file.as_raw_fd() == file.as_raw_fd() && last.offset + last.len == at
            });
            match joins {
                Some(last) => last.len += len as u64,
                None => runs.push(Run { file, offset: at, len: len as u64 }),
            }
            offset += len as u64;
        }
        Some(runs)
    }
}
