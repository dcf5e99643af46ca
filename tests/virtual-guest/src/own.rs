//! Memory that a process keeps to itself, and that does what only such memory can: it hangs whoever
//! touches it, or goes under whoever copies. No daemon maps it; what is tried with it is what a
//! process's own part of a mirrored region does then (docs/virtio-rdma-process.md, 4.7).

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags};

use crate::ram::lock;

/// `UFFD_API` and the flag of ranges whose missing pages are asked for (linux/userfaultfd.h).
const API: u64 = 0xaa;
const MISSING: u64 = 1;
/// `UFFDIO_API` and `UFFDIO_REGISTER`: requests of 24 and 32 bytes, both ways.
const AGREE: libc::Ioctl = 0xc018_aa3f;
const REGISTER: libc::Ioctl = 0xc020_aa00;

/// A private mapping of whole pages.
#[derive(Debug)]
struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping lives as long as this, and is accessed by atomic loads and by the kernel.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let (how, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address that the kernel chooses aliases no Rust object.
        let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, how, flags) }?;
        let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mmap gave null"))?;
        Ok(Self { at, len })
    }

    fn address(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.len, "{offset:#x} is outside {self:?}");
        self.at.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length, and nothing else names it.
        let unmapped = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Memory whose pages nobody brings (userfaultfd(2)): a thread that touches it stands still until
/// it is let go.
#[derive(Debug)]
pub struct Hanging {
    memory: Mapping,
    faults: Mutex<Option<OwnedFd>>,
}

impl Hanging {
    /// So many bytes of it.
    ///
    /// # Errors
    /// The kernel has no such memory, or no descriptor for it.
    pub fn new(len: usize) -> io::Result<Self> {
        let memory = Mapping::new(len)?;
        // What any program may do: faults of the kernel in it are not held up, those of the program
        // are.
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(1);
        // SAFETY: it concerns the ranges that are registered below, which are this mapping's.
        let faults = unsafe { rustix::mm::userfaultfd(flags) }?;
        let mut agree = [API, 0, 0];
        let mut range = [memory.at.as_ptr() as u64, len as u64, MISSING, 0];
        for (request, body) in [(AGREE, agree.as_mut_ptr()), (REGISTER, range.as_mut_ptr())] {
            // SAFETY: the body is as long as the request says, and lives through the call.
            if unsafe { libc::ioctl(faults.as_raw_fd(), request, body) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self { memory, faults: Mutex::new(Some(faults)) })
    }

    /// Touches a byte: it hangs until [`Self::let_go`], and finds a zero then.
    pub fn touch(&self, offset: usize) -> u8 {
        let byte = self.memory.address(offset);
        // SAFETY: the byte is in the mapping, which nothing writes to.
        unsafe { AtomicU8::from_ptr(byte) }.load(Ordering::Relaxed)
    }

    /// Whoever hangs goes on, and nobody hangs from now on.
    pub fn let_go(&self) {
        *lock(&self.faults) = None;
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Memory that can go while somebody copies. It is reached as the library of a process reaches its
/// own (process_vm_readv(2)), which fails where nothing is.
#[derive(Debug)]
pub struct Fleeting(Mapping);

impl Fleeting {
    /// So many bytes of it.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn new(len: usize) -> io::Result<Self> {
        Mapping::new(len).map(Self)
    }

    /// It is unmapped. The addresses stay taken, so that nothing else comes to lie there while
    /// somebody still copies.
    ///
    /// # Errors
    /// The kernel has no mapping to spare.
    pub fn take_away(&self) -> io::Result<()> {
        let (at, flags) =
            (self.0.at.as_ptr().cast::<c_void>(), MapFlags::PRIVATE | MapFlags::FIXED);
        let none = ProtFlags::empty();
        // SAFETY: the range is this mapping's own, and no Rust reference to it exists.
        unsafe { rustix::mm::mmap_anonymous(at, self.0.len, none, flags) }?;
        Ok(())
    }

    /// Writes bytes to it.
    ///
    /// # Errors
    /// It is gone.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let ours = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        self.copy((ours, offset), libc::process_vm_writev)
    }

    /// Reads bytes from it.
    ///
    /// # Errors
    /// It is gone.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        let ours = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        self.copy((ours, offset), libc::process_vm_readv)
    }

    fn copy(&self, (ours, offset): (libc::iovec, usize), call: Copy) -> io::Result<()> {
        assert!(offset.checked_add(ours.iov_len).is_some_and(|end| end <= self.0.len));
        let there = libc::iovec { iov_base: self.0.address(offset).cast(), iov_len: ours.iov_len };
        let us = std::process::id() as libc::pid_t;
        // SAFETY: the first vector is a slice that the caller has, to be written where `call`
        // writes it; the second is inside our mapping, and the kernel finds out whether it is
        // there.
        let copied = unsafe { call(us, &raw const ours, 1, &raw const there, 1, 0) };
        match usize::try_from(copied) {
            Ok(copied) if copied == ours.iov_len => Ok(()),
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

type Copy = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> libc::ssize_t;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_touches_what_hangs_stands_still_until_it_is_let_go() {
        let memory = Arc::new(Hanging::new(8192).unwrap());
        let own = Arc::clone(&memory);
        let thread = std::thread::spawn(move || own.touch(4096));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!thread.is_finished(), "it does not hang");
        memory.let_go();
        assert_eq!(thread.join().unwrap(), 0);
        assert_eq!(memory.touch(0), 0);
    }

    #[test]
    fn what_was_taken_away_is_not_there() {
        let memory = Fleeting::new(8192).unwrap();
        let mut back = [0; 100];
        memory.write(4090, &[7; 100]).unwrap();
        memory.read(4090, &mut back).unwrap();
        assert_eq!(back, [7; 100]);
        memory.take_away().unwrap();
        let fault = Some(libc::EFAULT);
        assert_eq!(memory.read(4090, &mut back).unwrap_err().raw_os_error(), fault);
        assert_eq!(memory.write(0, &back).unwrap_err().raw_os_error(), fault);
    }
}
