//! Signals an eventfd that belongs to somebody hostile, and never waits.
//!
//! The descriptors on which a VMM is told of used buffers come from the VMM. Writing to an eventfd
//! whose counter is full waits until someone reads, unless `O_NONBLOCK` is set; but that flag is
//! not the descriptor's, it is the open file's, which the VMM shares: it can clear the flag a
//! moment after we set it, fill the counter, and hold the thread that serves all guests for ever.
//! There is no write that does not wait for this kind of file (`RWF_NOWAIT` is refused), and no way
//! to an open file of our own.
//!
//! But the kernel signals eventfds itself, at the completion of an asynchronous request
//! (`IOCB_FLAG_RESFD`, io_submit(2)), and that never waits: a full counter stays full. So each
//! signal is a read of nothing from `/dev/null` whose completion signals the eventfd, in one system
//! call like the write that it stands for. Where the host has no asynchronous I/O (a sandbox), the
//! flag is looked at before every write: better than nothing, and said in the log.

use std::cell::OnceCell;
use std::ffi::c_long;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::OFlags;

/// An error, which says what it is, unless it is an eventfd. No file system is asked.
///
/// # Errors
/// As told.
pub(crate) fn check(file: BorrowedFd<'_>) -> io::Result<()> {
    // The kernel's own name for it, which no file of a file system can have: theirs begin with a
    // slash.
    let target = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|error| io::Error::other(format!("what it is cannot be told: {error}")))?;
    if target.as_os_str() == "anon_inode:[eventfd]" {
        Ok(())
    } else {
        Err(io::Error::other(format!("it is {} and not an eventfd", target.display())))
    }
}

/// Completions that the context has room for.
const ROOM: u32 = 1024;
/// Signals after which completions, which nobody is interested in, are taken out.
const SWEEP: u32 = 256;

/// `struct iocb` of <linux/aio_abi.h>, little-endian layout.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Completion([u64; 4]);

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

/// The asynchronous I/O of this process.
struct Aio {
    context: u64,
    null: &'static File,
    /// Signals since the last sweep.
    since: AtomicU32,
}

/// What requests read nothing from: opened once, since a thread may come when no file has a name
/// any more.
static NULL: OnceLock<File> = OnceLock::new();

/// Shared by all threads that serve one NIC each.
static AIO: OnceLock<Option<Aio>> = OnceLock::new();

thread_local! {
    /// That of a thread that serves many: it must not wait for a lock that another holds while it
    /// does not run.
    static OWN: OnceCell<Option<Aio>> = const { OnceCell::new() };
}

/// Gives the calling thread asynchronous I/O of its own.
pub(crate) fn own_context() {
    OWN.with(|own| {
        own.get_or_init(Aio::new);
    });
}

/// Whether the calling thread has asynchronous I/O of its own.
#[cfg(test)]
pub(crate) fn has_own_context() -> bool {
    OWN.with(|own| own.get().is_some_and(Option::is_some))
}

/// Opens now what threads share that may not be opened later.
pub(crate) fn prepare() {
    AIO.get_or_init(Aio::new);
}

/// Adds 1 to the counter of an eventfd; a full one stays as it is. It never waits, but takes as
/// long as it takes to wake everyone who waits for the eventfd.
pub(crate) fn signal(eventfd: BorrowedFd<'_>) {
    let by = |aio: &Option<Aio>| match aio {
        Some(aio) => aio.signal(eventfd.as_raw_fd()),
        None => write(eventfd),
    };
    let done = OWN.with(|own| match own.get() {
        Some(own) => by(own),
        None => by(AIO.get_or_init(Aio::new)),
    });
    if let Err(error) = done {
        tracing::debug!(%error, "a guest was not notified");
    }
}

/// The way without asynchronous I/O.
fn write(eventfd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(eventfd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        rustix::fs::fcntl_setfl(eventfd, flags | OFlags::NONBLOCK)?;
    }
    match rustix::io::write(eventfd, &1u64.to_ne_bytes()) {
        // A full counter has notified already.
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn null() -> io::Result<&'static File> {
    if let Some(null) = NULL.get() {
        return Ok(null);
    }
    let opened = File::open("/dev/null")?;
    Ok(NULL.get_or_init(|| opened))
}

impl Aio {
    fn new() -> Option<Self> {
        let made = null().and_then(|null| {
            let mut context = 0u64;
            // SAFETY: io_setup(2) writes the new context to the variable, which lives.
            let done =
                unsafe { libc::syscall(libc::SYS_io_setup, c_long::from(ROOM), &raw mut context) };
            match done {
                0 => Ok(Self { context, null, since: AtomicU32::new(0) }),
                _ => Err(io::Error::last_os_error()),
            }
        });
        match made {
            Ok(aio) => Some(aio),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "no asynchronous I/O: a VMM that fills its own eventfds may hold others up"
                );
                None
            }
        }
    }

    fn signal(&self, eventfd: RawFd) -> io::Result<()> {
        if self.since.fetch_add(1, Ordering::Relaxed) >= SWEEP {
            self.sweep();
        }
        match self.submit(eventfd) {
            // Others were faster with the last room.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.sweep();
                self.submit(eventfd)
            }
            other => other,
        }
    }

    fn submit(&self, eventfd: RawFd) -> io::Result<()> {
        let mut request = Iocb {
            opcode: IOCB_CMD_PREAD,
            // A descriptor is never negative.
            fd: self.null.as_raw_fd().cast_unsigned(),
            flags: IOCB_FLAG_RESFD,
            resfd: eventfd.cast_unsigned(),
            ..Iocb::default()
        };
        let list = [&raw mut request];
        // SAFETY: one request that the list points to; both live until the call returns, after
        // which the kernel uses neither. The request reads nothing, so it has no buffer.
        let done =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1 as c_long, list.as_ptr()) };
        if done == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn sweep(&self) {
        self.since.store(0, Ordering::Relaxed);
        let mut completions = [Completion::default(); SWEEP as usize];
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            // SAFETY: the array has room for as many completions as are asked for; the timeout
            // lives.
            let got = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    0 as c_long,
                    c_long::from(SWEEP),
                    completions.as_mut_ptr(),
                    &raw const none,
                )
            };
            if got < c_long::from(SWEEP) {
                return;
            }
        }
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the context is ours, and no request of it is under way: each ends before `submit`
        // returns.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// Takes what is in an eventfd's counter and never waits, whatever the VMM did to its flags; false
/// if there was nothing.
pub(crate) fn take(eventfd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut counter = [0; 8];
    let buffers = &mut [io::IoSliceMut::new(&mut counter)];
    // Offset -1: the file has no position.
    let taken =
        rustix::io::preadv2(eventfd.as_fd(), buffers, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT);
    match taken {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Runs on a thread of its own, which a call that waits would keep for ever.
    fn in_time(work: impl FnOnce() + Send + 'static) {
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            work();
            let _ = done.send(());
        });
        wait.recv_timeout(Duration::from_secs(10)).expect("it waits");
    }

    #[test]
    fn a_full_eventfd_that_blocks_does_not_block_us() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        in_time(move || {
            for _ in 0..3 * ROOM {
                signal(fd.as_fd());
            }
            assert!(take(fd.as_fd()).unwrap());
            assert!(!take(fd.as_fd()).unwrap(), "an empty one that blocks does not either");
        });
    }

    #[test]
    fn each_signal_counts() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for _ in 0..2000 {
            signal(fd.as_fd());
        }
        let mut counter = [0; 8];
        rustix::io::read(&fd, &mut counter).unwrap();
        assert_eq!(u64::from_ne_bytes(counter), 2000);
    }

    #[test]
    fn without_asynchronous_io_the_flag_is_set_again() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        in_time(move || write(fd.as_fd()).unwrap());
    }

    #[test]
    fn many_threads_share_it() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..5000).for_each(|_| signal(fd.as_fd())));
            scope.spawn(|| (0..5000).for_each(|_| signal(fd.as_fd())));
            for _ in 0..2 {
                scope.spawn(|| {
                    own_context();
                    (0..5000).for_each(|_| signal(fd.as_fd()));
                });
            }
        });
        let mut counter = [0; 8];
        rustix::io::read(&fd, &mut counter).unwrap();
        assert_eq!(u64::from_ne_bytes(counter), 20_000);
    }
}
