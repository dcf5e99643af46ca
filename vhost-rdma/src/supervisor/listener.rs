//! The thread of one NIC that waits for VMMs, one connection after the other.
//!
//! A second VMM that connects while one is there is refused: its connection is closed at once, for
//! whoever has a NIC must not be kept waiting behind a stranger, nor a stranger wait for the NIC.
//! One that comes when the first has just gone (a container that starts again) waits in the backlog
//! until the old session is undone, and finds a device without old objects.
//!
//! Where the host has no descriptor left, a VMM is turned away rather than left to wait for an
//! answer: one descriptor is kept for that.

use std::cell::Cell;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::SocketType;

use super::peer::Peer;
use super::seat::Seat;
use crate::node::{AttachError, Connection, Ending, Guests, Heirloom, NicConfig};
use crate::socket;
use crate::store::{Listening, Owner, Sockets};

/// How long the end of a NIC may take before it is left to itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a connection that could not even begin.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A NIC's listening socket; dropping it removes its file.
#[derive(Debug)]
pub(super) struct NicSocket {
    listening: Listening,
}

impl NicSocket {
    /// The socket that `config` asks for: the one that an earlier daemon left, or a new one.
    pub(super) fn open(config: &NicConfig, sockets: &Sockets) -> Result<Self, AttachError> {
        let making =
            |error| AttachError::io(format!("make the socket {}", config.socket.display()), error);
        // Its directory is mounted into containers. A link in its place, or one that comes while
        // the socket is made, must not put the socket (and its owner) elsewhere.
        let dir = socket::own_dir(&config.socket).map_err(making)?;
        // A VMM speaks in a stream, a process in packets.
        let kind = match config.guests {
            Guests::Vm => SocketType::STREAM,
            Guests::Process => SocketType::SEQPACKET,
        };
        let owner = Owner::Nic(config.name.clone());
        let listening = sockets.open(&owner, kind, (&config.socket, &config.access))?;
        socket::check_in(&dir, &config.socket).map_err(making)?;
        Ok(Self { listening })
    }

    pub(super) fn path(&self) -> &Path {
        self.listening.path()
    }

    /// The next connection.
    pub(super) fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listening.listener().accept()?.0)
    }

    /// It, for the next program of this process.
    pub(super) fn hand_down(&self) -> Option<Heirloom> {
        self.listening.hand_down()
    }
}

impl AsFd for NicSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listening.listener().as_fd()
    }
}

/// What the thread and who stops it share.
#[derive(Default)]
struct Shared {
    stopping: AtomicBool,
    connection: Mutex<Option<UnixStream>>,
}

impl Shared {
    fn connection(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread; it ends when this is dropped, and the socket goes with it.
pub(super) struct ListenerThread {
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    done: Receiver<()>,
}

impl ListenerThread {
    /// Serves the NIC behind `seat` at `socket`, and first whoever is there already.
    pub(super) fn start(
        seat: Arc<Seat>,
        socket: Arc<NicSocket>,
        left: Option<(UnixStream, Box<dyn Connection>)>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (finished, done) = sync_channel::<()>(0);
        let spare = Cell::new(Some(wake.try_clone()?));
        // Whoever asks from now on finds that it goes on.
        let left = left.and_then(|(stream, connection)| taken(&seat, stream, connection));
        let thread = Thread { seat, socket, shared: shared.clone(), wake: wake.clone(), spare };
        std::thread::Builder::new().name(format!("nic-{}", thread.seat.name())).spawn(
            move || {
                let work = |thread: &Thread| {
                    if let Some((peer, stream, connection)) = left {
                        thread.attend(&peer, stream, connection);
                    }
                    thread.run();
                };
                finish(thread, work, finished);
            },
        )?;
        Ok(Self { shared, wake, done })
    }
}

impl Drop for ListenerThread {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if let Some(connection) = self.shared.connection().as_ref() {
            let _ = connection.shutdown(Shutdown::Both);
        }
        if self.done.recv_timeout(STOP_TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            tracing::error!("a connection does not end; its thread is left behind");
        }
    }
}

/// Takes in a session that an earlier daemon has begun.
fn taken(
    seat: &Seat,
    stream: UnixStream,
    connection: Box<dyn Connection>,
) -> Option<(Peer, UnixStream, Box<dyn Connection>)> {
    match Peer::of(&stream) {
        Ok(peer) => {
            seat.taken();
            tracing::info!(nic = seat.name(), "the VMM of an earlier daemon is served");
            Some((peer, stream, connection))
        }
        Err(error) => {
            tracing::error!(nic = seat.name(), %error, "a VMM is turned away");
            let _ = stream.shutdown(Shutdown::Both);
            drop(connection.end());
            None
        }
    }
}

/// Works, and lets go of what it worked with (a socket's file) before the other end of `finished`
/// hears of the end: whoever waits there removes the file's directory next.
fn finish<T>(own: T, work: impl FnOnce(&T), finished: SyncSender<()>) {
    work(&own);
    drop(own);
    drop(finished);
}

struct Thread {
    seat: Arc<Seat>,
    socket: Arc<NicSocket>,
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    /// Given up to accept, and close, a connection that there is no other descriptor for.
    spare: Cell<Option<OwnedFd>>,
}

impl Thread {
    fn run(&self) {
        while self.wait(None) {
            if let Err(error) = self.serve() {
                tracing::error!(nic = self.seat.name(), %error, "a VMM is turned away");
                if !self.pause() {
                    return;
                }
            }
        }
    }

    /// Waits for a connection; false when it is time to end.
    fn wait(&self, timeout: Option<&Timespec>) -> bool {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN),
            ];
            let polled = poll(&mut fds, timeout);
            if self.shared.stopping.load(Ordering::SeqCst) {
                return false;
            }
            if polled.is_ok() && !fds[1].revents().is_empty() {
                return true;
            }
        }
    }

    /// Gives whatever is wrong with the host a moment; false when it is time to end.
    fn pause(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
        let _ = poll(&mut fds, Some(&RETRY));
        !self.shared.stopping.load(Ordering::SeqCst)
    }

    /// Accepts a connection. It cannot block: a unix connection stays in the backlog even if its
    /// client is gone.
    fn accept(&self) -> io::Result<UnixStream> {
        // It may have been given up before; there may be room again.
        self.spare.set(self.spare.take().or_else(|| self.wake.try_clone().ok()));
        let error = match self.socket.accept() {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let full = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(|e| e.raw_os_error());
        if error.raw_os_error().is_some_and(|errno| full.contains(&errno)) {
            drop(self.spare.take());
            // Closed at once: the VMM is told.
            drop(self.socket.accept());
            self.spare.set(self.wake.try_clone().ok());
        }
        Err(error)
    }

    /// Serves the connection that waits, to its end.
    fn serve(&self) -> io::Result<()> {
        let entry = self.seat.entry();
        let stream = self.accept()?;
        let peer = Peer::of(&stream)?;
        if !self.lets_in(&peer) {
            return Ok(());
        }
        let connected = stream.try_clone().and_then(|own| self.seat.connect(own));
        let connection = connected.inspect_err(|_| self.seat.left())?;
        drop(entry);
        self.attend(&peer, stream, connection);
        Ok(())
    }

    /// Stays with a session to its end.
    fn attend(&self, peer: &Peer, stream: UnixStream, connection: Box<dyn Connection>) {
        *self.shared.connection() = Some(stream);
        if !self.shared.stopping.load(Ordering::SeqCst) {
            self.watch(peer);
        }
        if self.shared.stopping.load(Ordering::SeqCst) {
            peer.hang_up();
        }
        let ended = connection.end();
        *self.shared.connection() = None;
        // It went by itself, if not because the daemon ends.
        if !self.shared.stopping.load(Ordering::SeqCst) {
            self.seat.left();
        }
        match ended {
            Ending::Closed => tracing::info!(nic = self.seat.name(), "the VMM disconnected"),
            Ending::Broken(error) => {
                tracing::warn!(nic = self.seat.name(), error, "the connection to the VMM broke");
            }
        }
    }
}

impl Thread {
    /// Whether the VMM may be here; it is said.
    fn lets_in(&self, peer: &Peer) -> bool {
        let who = peer.credentials();
        let (nic, pid, uid, gid) = (self.seat.name(), who.pid, who.uid, who.gid);
        let may = peer.may_enter(self.socket.path());
        if may {
            self.seat.taken();
            tracing::info!(nic, pid, uid, gid, "a VMM connected");
        } else {
            tracing::warn!(
                nic,
                pid,
                uid,
                gid,
                "a VMM connected whom the socket's mode does not let in: refused"
            );
        }
        may
    }

    /// Watches over a session: refuses other VMMs until this one is gone, or until the end.
    fn watch(&self, peer: &Peer) {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(peer.as_fd(), PollFlags::RDHUP),
                PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN),
            ];
            let polled = poll(&mut fds, None);
            if self.shared.stopping.load(Ordering::SeqCst) || !fds[1].revents().is_empty() {
                return;
            }
            if polled.is_err() || fds[2].revents().is_empty() {
                continue;
            }
            // The kernel looked at the connection first: a VMM that ended after that look may have
            // its successor there already.
            if peer.has_hung_up() || !self.refuse(peer) {
                return;
            }
        }
    }

    /// Turns a second VMM away; false when it is time to end.
    fn refuse(&self, peer: &Peer) -> bool {
        // Dropped at once: that is the refusal.
        let refused = {
            let _entry = self.seat.entry();
            self.accept()
        };
        let pid = refused.as_ref().ok().and_then(|stream| Peer::of(stream).ok());
        let pid = pid.map_or(0, |second| second.credentials().pid);
        tracing::warn!(
            nic = self.seat.name(),
            pid,
            connected = peer.credentials().pid,
            ended = peer.has_ended(),
            "a second VMM connected while one is there: refused"
        );
        // Where not even that was possible the connection still waits, and would be found again at
        // once.
        refused.is_ok() || self.pause()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::time::Duration;

    use super::finish;

    /// A socket whose file the file system takes its time to remove.
    struct Slow(Arc<AtomicBool>);

    impl Drop for Slow {
        fn drop(&mut self) {
            std::thread::sleep(Duration::from_millis(100));
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn whoever_waits_for_the_end_finds_the_socket_gone() {
        let gone = Arc::new(AtomicBool::new(false));
        let (finished, done) = sync_channel::<()>(0);
        let socket = Slow(gone.clone());
        let thread = std::thread::spawn(move || finish(socket, |_| {}, finished));
        done.recv().unwrap_err();
        assert!(gone.load(Ordering::SeqCst));
        thread.join().unwrap();
    }
}
