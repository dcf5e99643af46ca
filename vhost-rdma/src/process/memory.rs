//! A process's memory: a window of its NIC's memory map.
//!
//! A process names memory by its own addresses. In the NIC's map they stand at the same place in a
//! window that is the process's alone, so that a page list needs no table, and the engine sees one
//! guest's memory as ever.
//!
//! Memory of a VM may go away under the device, and takes the VM's NIC along. Here a NIC has other
//! processes. So what the device itself rests on (doorbell pages, rings) has to be in files that
//! can never shrink (memfd_create(2), sealed), whose pages are there whenever they are touched. A
//! program's own files are *loose*: shared memory and huge pages that it may cut off at any time.
//! Regions may lie there, and if it goes they do, as where memory is unplugged.

use std::fs::File;

use rustix::fs::{SealFlags, fcntl_get_seals, fstatfs};
use virtio_rdma_abi::PageList;
use zerocopy::FromBytes as _;
use zerocopy::little_endian::U64;

use crate::device::ctrl::{Names, names};
use crate::nic::Status;

/// Bits of an address of a process: more need a process that asks for them (Linux, 5-level paging).
const ADDRESS_BITS: u32 = 47;
/// Windows that there are; the first is the device's own.
pub(super) const WINDOWS: u64 = 1 << (u64::BITS - ADDRESS_BITS);
/// `f_type` of tmpfs, hugetlbfs (statfs(2)).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A process's part of a NIC's memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window(u64);

impl Window {
    /// The window of this number.
    pub(super) const fn new(number: u64) -> Self {
        Self(number << ADDRESS_BITS)
    }

    /// Its number, which no other session has at the same time.
    pub(super) const fn number(self) -> u64 {
        self.0 >> ADDRESS_BITS
    }

    /// Where `len` bytes at a process's address stand in the NIC's map.
    pub(super) fn place(self, address: u64, len: u64) -> Result<u64, Status> {
        let end = address.checked_add(len).ok_or(Status::FAULT)?;
        if end > 1 << ADDRESS_BITS { Err(Status::FAULT) } else { Ok(self.0 | address) }
    }

    /// Turns the addresses in a command's body into those of the NIC's map. A list of pages is the
    /// front end's to make: a process's is always of one piece of its addresses.
    pub(super) fn translate(self, opcode: u16, body: &mut [u8]) -> Result<(), Status> {
        for (at, kind) in names(opcode) {
            let field = body.get_mut(at..).unwrap_or_default();
            if kind == Names::List {
                let (list, _) = PageList::read_from_prefix(field).map_err(|_| Status::INVAL)?;
                if list.levels != 0 {
                    return Err(Status::INVAL);
                }
            }
            // The address is the first field of a list.
            let Some(address) = field.first_chunk_mut::<8>() else { return Err(Status::INVAL) };
            let there = self.place(U64::from_bytes(*address).get(), 1)?;
            *address = there.to_le_bytes();
        }
        Ok(())
    }
}

/// What memory of a file is to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// There whenever it is touched.
    Steady,
    /// Its owner may cut it off; of huge pages the host may have none when one is touched.
    Loose,
}

/// What memory of this file is, which a process has chosen.
///
/// Seals are asked for first: only files of shared memory and of huge pages have any
/// (mm/memfd.c, `memfd_file_seals_ptr`), and the kernel answers by itself. A file system that
/// somebody serves (FUSE, NFS) is never asked what it is, since it need not answer.
pub(super) fn kind(file: &File) -> Result<Kind, Status> {
    let wanted = SealFlags::SHRINK | SealFlags::GROW;
    let seals = fcntl_get_seals(file).map_err(|_| Status::PERM)?;
    // The field's type differs between architectures; the magic numbers are 32 bits.
    #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
    let system = fstatfs(file).map_err(|_| Status::PERM)?.f_type as u64 & 0xffff_ffff;
    match system {
        TMPFS_MAGIC if seals.contains(wanted) => Ok(Kind::Steady),
        TMPFS_MAGIC | HUGETLBFS_MAGIC => Ok(Kind::Loose),
        _ => Err(Status::PERM),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};
    use virtio_rdma_abi::{ContextCreateReq, MrRegReq, QpCreateReq, cmd};
    use zerocopy::IntoBytes as _;

    use super::*;

    fn memfd(flags: MemfdFlags, seals: SealFlags) -> Option<File> {
        let file = File::from(memfd_create("process", flags | MemfdFlags::ALLOW_SEALING).ok()?);
        fcntl_add_seals(&file, seals).ok()?;
        Some(file)
    }

    #[test]
    fn only_files_that_never_shrink_are_steady() {
        let both = SealFlags::SHRINK | SealFlags::GROW;
        assert_eq!(kind(&memfd(MemfdFlags::empty(), both).unwrap()), Ok(Kind::Steady));
        for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::SHRINK] {
            let file = memfd(MemfdFlags::empty(), seals).unwrap();
            assert_eq!(kind(&file), Ok(Kind::Loose), "{seals:?}");
        }
        // Huge pages may be missing when they are touched.
        if let Some(huge) = memfd(MemfdFlags::HUGETLB, both) {
            assert_eq!(kind(&huge), Ok(Kind::Loose));
        }
        for path in ["/dev/null", "/dev/zero", "/proc/self/mem", "/proc/self/exe", "/"] {
            assert_eq!(kind(&File::open(path).unwrap()), Err(Status::PERM), "{path}");
        }
    }

    #[test]
    fn windows_do_not_touch_each_other() {
        let (first, second) = (Window::new(1), Window::new(2));
        assert_eq!(first.place(0, 1), Ok(1 << 47));
        assert_eq!(first.place((1 << 47) - 1, 1), Ok((2 << 47) - 1));
        assert_eq!(second.place(0, 1), Ok(2 << 47));
        for (address, len) in [(1 << 47, 1), ((1 << 47) - 1, 2), (u64::MAX, 1), (1, u64::MAX)] {
            assert_eq!(first.place(address, len), Err(Status::FAULT));
        }
        assert!(Window::new(WINDOWS - 1).place((1 << 47) - 1, 1).is_ok());
    }

    #[test]
    fn every_address_in_a_command_is_the_processs_own() {
        let window = Window::new(3);
        let mut page = ContextCreateReq { db_page: 0x7000.into() };
        window.translate(cmd::CONTEXT_CREATE, page.as_mut_bytes()).unwrap();
        assert_eq!(page.db_page.get(), 3 << 47 | 0x7000);
        let mut region = MrRegReq { iova: 0x5000.into(), ..MrRegReq::default() };
        region.pages.addr = 0x5000.into();
        window.translate(cmd::MR_REG, region.as_mut_bytes()).unwrap();
        assert_eq!((region.iova.get(), region.pages.addr.get()), (0x5000, 3 << 47 | 0x5000));
        let mut queues = QpCreateReq::default();
        queues.sq.addr = 0x1000.into();
        queues.rq.addr = 0x2000.into();
        window.translate(cmd::QP_CREATE, queues.as_mut_bytes()).unwrap();
        assert_eq!(queues.sq.addr.get(), 3 << 47 | 0x1000);
        assert_eq!(queues.rq.addr.get(), 3 << 47 | 0x2000);
        region.pages.addr = (1 << 47).into();
        assert_eq!(window.translate(cmd::MR_REG, region.as_mut_bytes()), Err(Status::FAULT));
        region.pages.addr = 0x5000.into();
        region.pages.levels = 1;
        assert_eq!(window.translate(cmd::MR_REG, region.as_mut_bytes()), Err(Status::INVAL));
        assert_eq!(window.translate(cmd::MR_REG, &mut [0; 7]), Err(Status::INVAL));
    }
}
