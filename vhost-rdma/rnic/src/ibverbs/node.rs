//! The removal of a device whose driver cannot take it from under its users.
//!
//! A driver without `disassociate_ucontext` (rdma_rxe up to Linux 6.12) raises no event when its
//! device is removed: the kernel takes the device's node away (`ib_uverbs_remove_one`,
//! drivers/infiniband/core/uverbs_main.c) and waits until whoever has it open closes it. So the
//! node is watched, and when it is gone the device is.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ibverbs_sys as ffi;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

/// The node of an opened device.
#[derive(Debug)]
pub(super) struct Node {
    inotify: OwnedFd,
    /// The opened node itself.
    opened: OwnedFd,
}

impl Node {
    /// `None` where it cannot be watched: such a removal waits until the NIC is removed or reset.
    ///
    /// # Safety
    /// The context is open.
    pub(super) unsafe fn of(context: *mut ffi::ibv_context) -> Option<Self> {
        // SAFETY: an open context has its device.
        let device = unsafe { (*context).device };
        // SAFETY: and its descriptor.
        let fd = unsafe { (*context).cmd_fd };
        // SAFETY: a device lives as long as a context of it.
        let name = unsafe { &raw const (*device).dev_name };
        // SAFETY: its name is a string.
        let name = unsafe { CStr::from_ptr(name.cast()) };
        let path = format!("/dev/infiniband/{}", name.to_str().ok()?);
        // SAFETY: the descriptor is open as long as the context.
        let opened = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().ok()?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
        // A name that is taken away changes the count of links; the node itself lives on while it
        // is open.
        inotify::add_watch(&inotify, path, WatchFlags::ATTRIB).ok()?;
        Some(Self { inotify, opened })
    }

    /// Whether it was taken away since the last look.
    pub(super) fn is_gone(&self) -> bool {
        let mut events = [0; 1024];
        let touched = rustix::io::read(&self.inotify, &mut events).is_ok_and(|len| len > 0);
        touched && rustix::fs::fstat(&self.opened).is_ok_and(|stat| stat.st_nlink == 0)
    }

    /// Becomes readable when something happened to it.
    pub(super) fn wake_fd(&self) -> io::Result<OwnedFd> {
        self.inotify.as_fd().try_clone_to_owned()
    }
}
