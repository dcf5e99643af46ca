//! The thread of a NIC for processes: lets in whoever may come, and keeps nobody.
//!
//! A process that ends needs nothing of the supervisor: its socket ends where it is served. So a
//! connection is looked at, handed to the data plane and forgotten; however many come, nothing here
//! grows.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::listener::NicSocket;
use super::peer::Peer;
use super::seat::Seat;

/// Pause where the host could not serve a connection.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// The thread; it ends when this is dropped, and the socket goes with it.
pub(super) struct Door {
    stopping: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Lets processes in to the NIC behind `seat`, at `socket`.
    pub(super) fn open(seat: Arc<Seat>, socket: Arc<NicSocket>) -> io::Result<Self> {
        let stopping = Arc::<AtomicBool>::default();
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let keeper = Keeper { seat, socket, stopping: stopping.clone(), wake: wake.clone() };
        let thread = std::thread::Builder::new().name(format!("nic-{}", keeper.seat.name()));
        let thread = Some(thread.spawn(move || keeper.run())?);
        Ok(Self { stopping, wake, thread })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of a NIC's socket panicked");
        }
    }
}

struct Keeper {
    seat: Arc<Seat>,
    socket: Arc<NicSocket>,
    stopping: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
}

impl Keeper {
    fn run(&self) {
        while self.wait() {
            if let Err(error) = self.let_in() {
                let nic = self.seat.name();
                tracing::warn!(nic, %error, "a process is turned away");
                // What is wrong with the host may pass; who is refused again and again is not heard
                // more often either.
                let mut fds = [PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
                let _ = poll(&mut fds, Some(&RETRY));
            }
        }
    }

    /// Waits for a connection; false when it is time to end.
    fn wait(&self) -> bool {
        let mut fds = [
            PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut fds, None);
        !self.stopping.load(Ordering::SeqCst)
    }

    fn let_in(&self) -> io::Result<()> {
        let _entry = self.seat.entry();
        let stream = self.socket.accept()?;
        let peer = Peer::of(&stream)?;
        let who = peer.credentials();
        if !peer.may_enter(self.socket.path()) {
            let (nic, pid, uid) = (self.seat.name(), who.pid, who.uid);
            tracing::warn!(
                nic,
                pid,
                uid,
                "a process connected whom the socket's mode does not let in: refused"
            );
            return Ok(());
        }
        tracing::debug!(
            nic = self.seat.name(),
            pid = who.pid,
            uid = who.uid,
            "a process connected"
        );
        self.seat.enter(stream)
    }
}
