//! What a VMM gives us as guest memory.
//!
//! The descriptors are not trusted: a file on a slow or remote file system would block whoever touches it, one shorter than
//! its mapping would kill the process. So only shared memory (tmpfs, which memfds are on) and huge pages are taken, and only
//! whole.
//!
//! A VMM without memory slots sends its whole table again and the framework maps all of it anew. A region that is the same
//! piece of the same file keeps its old mapping here, so that objects over it live on.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::{FileType, fstat, fstatfs};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

/// `f_type` of tmpfs, hugetlbfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Why memory was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error("guest memory at {0:#x} has no file")]
    NoFile(u64),
    #[error("guest memory at {start:#x} cannot be examined: {source}")]
    Examine { start: u64, source: io::Error },
    #[error(
        "guest memory at {0:#x} is neither on tmpfs (a memfd) nor on hugetlbfs; start the VMM with shared memory (QEMU: memory-backend-memfd,share=on)"
    )]
    FileSystem(u64),
    #[error("guest memory at {0:#x} is longer than its file")]
    TooShort(u64),
    #[error(
        "there are more mappings of guest memory than can be guarded; give VMs fewer memory regions, or serve some from another daemon"
    )]
    Unguarded,
    #[error("the memory table makes no sense: {0}")]
    Table(vm_memory::GuestRegionCollectionError),
}

/// Checks a memory table, and returns it with the mappings of `old` wherever they are the same.
pub(super) fn adopt(
    old: &GuestMemoryMmap<()>,
    new: &GuestMemoryMmap<()>,
) -> Result<GuestMemoryMmap<()>, MemoryError> {
    let mut regions = Vec::new();
    for region in new.iter() {
        check(region)?;
        let kept = old.iter().find(|mine| same(mine, region)).unwrap_or(region);
        // A region is a guest address and a counted reference to its mapping.
        let copy = GuestRegionMmap::with_arc(kept.get_mmap(), kept.start_addr());
        regions.extend(copy.map(Arc::new));
    }
    GuestMemoryMmap::from_arc_regions(regions).map_err(MemoryError::Table)
}

fn check(region: &GuestRegionMmap<()>) -> Result<(), MemoryError> {
    let start = region.start_addr().0;
    let mapped = region.file_offset().ok_or(MemoryError::NoFile(start))?;
    let examine = |source: rustix::io::Errno| MemoryError::Examine { start, source: source.into() };
    let stat = fstat(mapped.file()).map_err(examine)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
        || !file_system(mapped.file()).map_err(examine)?
    {
        return Err(MemoryError::FileSystem(start));
    }
    let end = mapped.start().checked_add(region.len());
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if end.is_none_or(|end| end > size) { Err(MemoryError::TooShort(start)) } else { Ok(()) }
}

fn file_system(file: &File) -> rustix::io::Result<bool> {
    // The field's type differs between architectures; the magic numbers are 32 bits.
    #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
    let kind = fstatfs(file.as_fd())?.f_type as u64 & 0xffff_ffff;
    Ok(matches!(kind, TMPFS_MAGIC | HUGETLBFS_MAGIC))
}

/// Whether both are the same piece of the same file at the same guest address.
fn same(a: &GuestRegionMmap<()>, b: &GuestRegionMmap<()>) -> bool {
    let identity = |region: &GuestRegionMmap<()>| {
        let mapped = region.file_offset()?;
        let stat = fstat(mapped.file()).ok()?;
        Some((stat.st_dev, stat.st_ino, mapped.start(), region.start_addr(), region.len()))
    };
    identity(a).is_some_and(|id| identity(b) == Some(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{FileOffset, GuestAddress};

    const LEN: usize = 0x4000;

    fn table(files: &[(u64, File)]) -> GuestMemoryMmap<()> {
        let ranges = files.iter().map(|(start, file)| {
            let file = file.try_clone().expect("dup");
            (GuestAddress(*start), LEN, Some(FileOffset::new(file, 0)))
        });
        GuestMemoryMmap::from_ranges_with_files(ranges.collect::<Vec<_>>()).expect("mappable")
    }

    fn memfd(len: usize) -> File {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd"));
        file.set_len(len as u64).expect("room");
        file
    }

    fn mappings(map: &GuestMemoryMmap<()>) -> Vec<*mut u8> {
        map.iter().map(|region| region.get_mmap().as_ptr()).collect()
    }

    #[test]
    fn the_same_memory_keeps_its_mapping() {
        let (a, b, c) = (memfd(LEN), memfd(LEN), memfd(LEN));
        let old = table(&[(0, a.try_clone().expect("dup")), (0x10000, b)]);
        let new = table(&[(0, a), (0x10000, c)]);
        let adopted = adopt(&old, &new).expect("memfds are fine");
        assert_eq!(mappings(&adopted)[0], mappings(&old)[0]);
        assert_eq!(mappings(&adopted)[1], mappings(&new)[1], "another file at the same address");
    }

    #[test]
    fn memory_that_could_vanish_is_refused() {
        let none = GuestMemoryMmap::new();
        let short = table(&[(0x1000, memfd(LEN - 1))]);
        assert!(matches!(adopt(&none, &short), Err(MemoryError::TooShort(0x1000))));
        let anonymous = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), LEN)]).expect("mappable");
        assert!(matches!(adopt(&none, &anonymous), Err(MemoryError::NoFile(0))));
        // The test's own program is on whatever disk the tests run on, which is not shared memory.
        let disk = File::open(std::env::current_exe().expect("a path")).expect("readable");
        if !file_system(&disk).expect("a file system") {
            let region = vm_memory::mmap::MmapRegionBuilder::new(LEN)
                .with_mmap_prot(libc::PROT_READ)
                .with_mmap_flags(libc::MAP_SHARED)
                .with_file_offset(FileOffset::new(disk, 0))
                .build()
                .expect("mappable");
            let region = GuestRegionMmap::new(region, GuestAddress(0)).expect("in range");
            let map = GuestMemoryMmap::from_regions(vec![region]).expect("one region");
            assert!(matches!(adopt(&none, &map), Err(MemoryError::FileSystem(0))));
        }
    }
}
