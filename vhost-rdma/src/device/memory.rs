//! What a VMM gives us as guest memory.
//!
//! The descriptors are not trusted: a file on a slow or remote file system would block whoever
//! touches it. So only shared memory (tmpfs, which memfds are on) and huge pages are taken, in
//! whole pages of the file. All of that is decided *before* the file is mapped, and what becomes of
//! the memory after it is the mapping's own affair (`memory::Mapping`).
//!
//! A VMM without memory slots sends its whole table again. A region that is the same piece of the
//! same file keeps its old mapping here, so that objects over it live on.
//!
//! What is kept for a table is bounded by [`SLOTS`] and, where the bytes do not matter but the
//! addresses do, by [`most_bytes`]: files are sparse, and a file of a hundred terabytes costs its
//! owner nothing.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::{FileType, fstat, fstatfs};

use crate::memory::{AddressSpace, Mapping, MappingError, Region, SpaceError, page_size};

/// `f_type` of tmpfs, hugetlbfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Memory regions of one guest: as many as vhost in the kernel takes by default, which VMMs count
/// on.
pub(crate) const SLOTS: usize = 509;

/// Why memory was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("guest memory at {start:#x} cannot be examined: {source}")]
    Examine { start: u64, source: io::Error },
    #[error(
        "guest memory at {0:#x} is neither on tmpfs (a memfd) nor on hugetlbfs; start the VMM with \
         shared memory (QEMU: memory-backend-memfd,share=on)"
    )]
    FileSystem(u64),
    #[error("guest memory at {0:#x} is longer than its file")]
    TooShort(u64),
    #[error("guest memory at {start:#x}: {source}")]
    Mapping { start: u64, source: MappingError },
    #[error("the memory table makes no sense: {0}")]
    Table(#[from] SpaceError),
    #[error("more than {SLOTS} memory regions, which is how many there may be")]
    Slots,
    #[error(
        "more than {0} bytes of guest memory, which is what this guest may have: max_guest_bytes, \
         and at most 16 times the host's memory"
    )]
    TooMuch(u64),
}

/// A region as a VMM describes it.
#[derive(Debug)]
pub(crate) struct Offer {
    /// Guest physical address.
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) file: File,
    /// Where it begins in the file.
    pub(crate) offset: u64,
    /// Its owner may make it vanish, and goes on: a process, with a file that is not sealed.
    pub(crate) loose: bool,
}

/// How much memory any guest may have: far more than any does, and far less than the daemon has
/// addresses for.
fn most_bytes() -> u64 {
    crate::limits::host_memory().saturating_mul(16).clamp(1 << 40, 1 << 44)
}

/// Asks the host what it has.
pub(super) fn prepare() {
    most_bytes();
}

/// The memory that follows `old` when the VMM sends its whole table.
/// `most`: the bytes that the NIC's limits allow.
pub(crate) fn table(
    old: &AddressSpace,
    offers: Vec<Offer>,
    most: u64,
) -> Result<AddressSpace, MemoryError> {
    let mut left = within(offers.len(), 0, most)?;
    let regions = offers.into_iter().map(|offer| {
        left = left.checked_sub(offer.len).ok_or_else(|| too_much(most))?;
        region(old, offer)
    });
    let regions = regions.collect::<Result<_, _>>()?;
    Ok(old.with(regions)?)
}

/// The memory that follows `old` when one region is plugged in.
pub(crate) fn plug(
    old: &AddressSpace,
    offer: Offer,
    most: u64,
) -> Result<AddressSpace, MemoryError> {
    let left = within(old.regions().len() + 1, old.bytes(), most)?;
    left.checked_sub(offer.len).ok_or_else(|| too_much(most))?;
    Ok(old.plug(region(&AddressSpace::default(), offer)?)?)
}

/// How many bytes more there may be in a table of so many regions.
fn within(regions: usize, bytes: u64, most: u64) -> Result<u64, MemoryError> {
    if regions > SLOTS {
        return Err(MemoryError::Slots);
    }
    Ok(most_bytes().min(most).saturating_sub(bytes))
}

fn too_much(most: u64) -> MemoryError {
    MemoryError::TooMuch(most_bytes().min(most))
}

/// The region that is offered, with its mapping in `old` if it is there.
fn region(old: &AddressSpace, offer: Offer) -> Result<Region, MemoryError> {
    let Offer { start, len, file, offset, loose } = offer;
    check(&file, start, offset.checked_add(len), loose)?;
    let same = |region: &&Region| {
        region.bytes() == len
            && region.file().is_some_and(|(kept, at)| at == offset && same_file(kept, file.as_fd()))
    };
    if let Some(kept) = old.region_at(start).filter(same) {
        return Ok(kept.clone());
    }
    let map = if loose { Mapping::of_loose_file } else { Mapping::of_file };
    let mapping = map(file, offset, len);
    let mapping = mapping.map_err(|source| MemoryError::Mapping { start, source })?;
    Ok(Region::new(start, Arc::new(mapping))?)
}

/// `whole`: the last page of a file is taken, though it ends in the middle of it. All of it is
/// there (mmap(2)), and programs rarely choose lengths by the page.
fn check(file: &File, start: u64, end: Option<u64>, whole: bool) -> Result<(), MemoryError> {
    let examine = |source: rustix::io::Errno| MemoryError::Examine { start, source: source.into() };
    let stat = fstat(file).map_err(examine)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
        || !file_system(file).map_err(examine)?
    {
        return Err(MemoryError::FileSystem(start));
    }
    let mut size = u64::try_from(stat.st_size).unwrap_or(0);
    if whole {
        size = size.checked_next_multiple_of(page_size(file.as_fd())).unwrap_or(size);
    }
    if end.is_none_or(|end| end > size) { Err(MemoryError::TooShort(start)) } else { Ok(()) }
}

fn file_system(file: &File) -> rustix::io::Result<bool> {
    // The field's type differs between architectures; the magic numbers are 32 bits.
    #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
    let kind = fstatfs(file.as_fd())?.f_type as u64 & 0xffff_ffff;
    Ok(matches!(kind, TMPFS_MAGIC | HUGETLBFS_MAGIC))
}

fn same_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
    let identity = |file| fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino));
    identity(a).is_some_and(|id| identity(b) == Some(id))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const LEN: u64 = 0x4000;

    fn memfd(len: u64) -> File {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd"));
        file.set_len(len).expect("room");
        file
    }

    fn offer(start: u64, file: &File) -> Offer {
        Offer { start, len: LEN, file: file.try_clone().expect("dup"), offset: 0, loose: false }
    }

    fn table(old: &AddressSpace, offers: Vec<Offer>) -> Result<AddressSpace, MemoryError> {
        super::table(old, offers, u64::MAX)
    }

    fn plug(old: &AddressSpace, offer: Offer) -> Result<AddressSpace, MemoryError> {
        super::plug(old, offer, u64::MAX)
    }

    #[test]
    fn a_nic_has_no_more_memory_than_it_may() {
        let (a, b) = (memfd(LEN), memfd(LEN));
        let none = AddressSpace::default();
        let both = || vec![offer(0, &a), offer(0x10000, &b)];
        let refused = super::table(&none, both(), 2 * LEN - 1);
        assert!(matches!(refused, Err(MemoryError::TooMuch(most)) if most == 2 * LEN - 1));
        assert!(super::table(&none, both(), 2 * LEN).is_ok());
        let one = super::plug(&none, offer(0, &a), LEN).expect("as much as it may");
        assert!(super::plug(&one, offer(0x10000, &b), 2 * LEN - 1).is_err());
        assert!(super::plug(&one, offer(0x10000, &b), 2 * LEN).is_ok());
    }

    #[test]
    fn the_same_memory_keeps_its_mapping() {
        let (a, b, c) = (memfd(LEN), memfd(LEN), memfd(LEN));
        let old = table(&AddressSpace::default(), vec![offer(0x10000, &b), offer(0, &a)]);
        let old = old.expect("memfds are fine");
        let new = table(&old, vec![offer(0, &a), offer(0x10000, &c)]).expect("memfds are fine");
        assert!(new.regions()[0].same_mapping(&old.regions()[0]));
        assert!(!new.regions()[1].same_mapping(&old.regions()[1]), "another file");
        let mut moved = offer(0x20000, &a);
        moved.len = 0x1000;
        let new = table(&old, vec![moved]).expect("memfds are fine");
        assert!(!old.contains(&new.regions()[0]), "another address");
    }

    #[test]
    fn memory_that_could_hold_somebody_up_is_refused() {
        let none = AddressSpace::default();
        let short = plug(&none, offer(0x1000, &memfd(LEN - 1)));
        assert!(matches!(short, Err(MemoryError::TooShort(0x1000))));
        let wraps = Offer { offset: u64::MAX - 0xfff, ..offer(0, &memfd(LEN)) };
        assert!(matches!(plug(&none, wraps), Err(MemoryError::TooShort(0))));
        // The test's own program is on whatever disk the tests run on, which is not shared memory.
        let disk = File::open(std::env::current_exe().expect("a path")).expect("readable");
        if !file_system(&disk).expect("a file system") {
            assert!(matches!(plug(&none, offer(0, &disk)), Err(MemoryError::FileSystem(0))));
        }
    }

    #[test]
    fn a_table_has_as_many_regions_as_there_are_slots() {
        let file = memfd(LEN);
        let mut space = AddressSpace::default();
        for n in 0..SLOTS as u64 {
            space = plug(&space, offer(n * LEN, &file)).expect("a slot");
        }
        assert_eq!(space.bytes(), SLOTS as u64 * LEN);
        assert!(matches!(plug(&space, offer(1 << 40, &file)), Err(MemoryError::Slots)));
        let space = space.unplug(7 * LEN, LEN).expect("it is there");
        assert!(matches!(space.unplug(7 * LEN, LEN), Err(SpaceError::NotThere(_))));
        let again = plug(&space, offer(7 * LEN, &file)).expect("a slot again");
        assert!(matches!(
            plug(&space, Offer { start: 8 * LEN - 0x1000, ..offer(0, &file) }),
            Err(MemoryError::Table(SpaceError::Overlap(_)))
        ));
        let offers = (0..=SLOTS as u64).map(|n| offer(n * LEN, &file)).collect();
        assert!(matches!(table(&again, offers), Err(MemoryError::Slots)));
    }

    #[test]
    fn sparse_files_take_no_addresses_without_end() {
        let endless = memfd(1 << 46);
        let most = most_bytes();
        let huge = |start, len| Offer { start, len, offset: 0, ..offer(0, &endless) };
        let none = AddressSpace::default();
        assert!(matches!(plug(&none, huge(0, most + 0x1000)), Err(MemoryError::TooMuch(_))));
        let half = plug(&none, huge(0, most / 2)).expect("half of it");
        let rest = huge(1 << 45, most / 2 + 0x1000);
        assert!(matches!(plug(&half, rest), Err(MemoryError::TooMuch(_))));
        let both = vec![huge(0, most / 2), huge(1 << 45, most / 2 + 0x1000)];
        assert!(matches!(table(&none, both), Err(MemoryError::TooMuch(_))));
    }
}
