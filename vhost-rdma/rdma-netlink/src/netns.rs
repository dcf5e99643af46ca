//! Network namespaces as handles.
//!
//! The namespace of a thread decides where a socket lives for ever, and a thread that fails to
//! return to its own is a trap for all code after it. So nothing here moves the caller: work in
//! another namespace runs on a thread of its own, which then ends.

use std::ffi::c_void;
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::{Error, Result};

/// A network namespace, kept alive by an open file.
pub struct Netns {
    fd: OwnedFd,
    /// Device and inode of the file: the identity of the namespace.
    id: (u64, u64),
}

impl Netns {
    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn current() -> Result<Self> {
        Self::from_path("/proc/thread-self/ns/net")
    }

    /// The namespace behind a path such as `/run/netns/blue` or `/proc/17/ns/net`.
    ///
    /// # Errors
    /// The path does not exist, or is no network namespace.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| {
            Error::io(format!("open the network namespace {}", path.display()), source)
        })?;
        Self::from_fd(file.into()).map_err(|error| match error {
            Error::Invalid(_) => {
                Error::Invalid(format!("{} is no network namespace", path.display()))
            }
            other => other,
        })
    }

    /// The namespace of a process.
    ///
    /// # Errors
    /// The process is gone or belongs to someone else.
    pub fn from_pid(pid: u32) -> Result<Self> {
        Self::from_path(format!("/proc/{pid}/ns/net"))
    }

    /// An open file of a namespace.
    ///
    /// # Errors
    /// The file is something else.
    pub fn from_fd(fd: OwnedFd) -> Result<Self> {
        let look = |source: rustix::io::Errno| Error::io("look at a network namespace", source);
        // A plain file at that path (a namespace that was unmounted, or never one) is found out
        // here and not at the first setns.
        let kind = rustix::fs::fstatfs(&fd).map_err(look)?.f_type;
        if kind != NSFS_MAGIC || namespace_type(&fd).map_err(look)? != UnshareFlags::NEWNET.bits() {
            return Err(Error::Invalid("the file is no network namespace".to_owned()));
        }
        let stat = rustix::fs::fstat(&fd).map_err(look)?;
        Ok(Self { fd, id: (stat.st_dev, stat.st_ino) })
    }

    /// A new, empty namespace; it lives as long as the handle or what was moved into it is held by
    /// others.
    ///
    /// # Errors
    /// The caller lacks `CAP_SYS_ADMIN`.
    pub fn create() -> Result<Self> {
        on_a_thread(|| {
            // SAFETY: only the network namespace of this new thread changes; no file table is
            // unshared.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
                .map_err(|source| Error::io("make a network namespace", source))?;
            Self::current()
        })
    }

    /// Runs `work` on a new thread inside the namespace.
    ///
    /// # Errors
    /// What `work` returns, or that the namespace cannot be entered (`CAP_SYS_ADMIN`).
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        on_a_thread(|| {
            move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(|source| Error::io("enter a network namespace", source))?;
            work()
        })
    }

    /// A number that no other living namespace of this host has.
    #[must_use]
    pub const fn inode(&self) -> u64 {
        self.id.1
    }

    /// A second handle of the same namespace.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn try_clone(&self) -> Result<Self> {
        let fd = self
            .fd
            .try_clone()
            .map_err(|source| Error::io("duplicate a network namespace's handle", source))?;
        Ok(Self { fd, id: self.id })
    }
}

/// `NSFS_MAGIC` of `linux/magic.h`: "nsfs".
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// The `CLONE_…` flag that makes a namespace of this kind.
fn namespace_type(fd: &OwnedFd) -> rustix::io::Result<u32> {
    // SAFETY: NS_GET_NSTYPE takes no argument.
    unsafe { ioctl(fd, NsGetNsType) }
}

/// `NS_GET_NSTYPE` of `linux/nsfs.h`, which answers by its return value.
struct NsGetNsType;

// SAFETY: the request has no argument and writes no memory.
unsafe impl Ioctl for NsGetNsType {
    type Output = u32;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        rustix::ioctl::opcode::none(0xb7, 3)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    // SAFETY: the answer is the return value; the pointer, which is null, is not looked at.
    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<u32> {
        Ok(out.cast_unsigned())
    }
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("netns".to_owned())
            .spawn_scoped(scope, work)
            .map_err(|source| Error::io("start a thread", source))?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

impl PartialEq for Netns {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Netns {}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for Netns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Netns({})", self.inode())
    }
}
