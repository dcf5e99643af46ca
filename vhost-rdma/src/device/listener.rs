//! The thread of one NIC that waits for VMMs, one connection after the other.
//!
//! A second VMM that connects while one is there is refused: its connection is closed at once, for whoever has a NIC must not be kept
//! waiting behind a stranger, nor a stranger wait for the NIC. One that comes when the first has just gone (a container that starts
//! again) waits in the backlog until the old session is undone, and finds a device without old objects. The framework's daemon object
//! serves a single connection (it refuses a second `SET_OWNER`), so each gets a new one; the listening socket stays.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vhost::vhost_user::{Error as VhostError, Listener};
use vhost_user_backend::{Error, ShutdownHandle, VhostUserDaemon};
use vmm_sys_util::epoll::EventSet;

use super::nic::Nic;
use super::peer::Peer;
use super::queues::QueueKind;
use super::session::{EXIT_EVENT, Session};
use super::vring::with_routes;
use crate::node::{AttachError, NicConfig};
use crate::socket;

/// How long the end of a NIC may take before it is left to itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a connection that could not even begin.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A NIC's listening socket; dropping it removes its file.
#[derive(Debug)]
pub(super) struct NicSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl NicSocket {
    /// The socket that `config` asks for.
    pub(super) fn open(config: &NicConfig) -> Result<Self, AttachError> {
        let making =
            |error| AttachError::io(format!("make the socket {}", config.socket.display()), error);
        // Its directory is mounted into containers. A link in its place, or one that comes while the socket is made, must not put
        // the socket (and its owner) elsewhere.
        let dir = socket::own_dir(&config.socket).map_err(making)?;
        let opened = Self {
            listener: socket::bind(&config.socket, &config.access)?,
            path: config.socket.clone(),
        };
        socket::check_in(&dir, &config.socket).map_err(making)?;
        Ok(opened)
    }
}

impl Drop for NicSocket {
    fn drop(&mut self) {
        socket::remove(&self.path);
    }
}

/// What the thread and who stops it share.
#[derive(Default)]
struct Shared {
    stopping: AtomicBool,
    connection: Mutex<Option<ShutdownHandle>>,
}

impl Shared {
    fn connection(&self) -> std::sync::MutexGuard<'_, Option<ShutdownHandle>> {
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
    /// Serves `nic` at `socket`.
    pub(super) fn start(nic: Arc<Nic>, socket: NicSocket) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (finished, done) = sync_channel::<()>(0);
        let thread = Thread { nic, socket, shared: shared.clone(), wake: wake.clone() };
        std::thread::Builder::new().name(format!("nic-{}", thread.nic.name)).spawn(move || {
            finish(thread, Thread::run, finished);
        })?;
        Ok(Self { shared, wake, done })
    }
}

impl Drop for ListenerThread {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        if let Some(connection) = self.shared.connection().as_ref() {
            connection.shutdown();
        }
        if self.done.recv_timeout(STOP_TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            tracing::error!("a connection does not end; its thread is left behind");
        }
    }
}

/// Works, and lets go of what it worked with (a socket's file) before the other end of `finished` hears of the end: whoever waits
/// there removes the file's directory next.
fn finish<T>(own: T, work: impl FnOnce(&T), finished: SyncSender<()>) {
    work(&own);
    drop(own);
    drop(finished);
}

struct Thread {
    nic: Arc<Nic>,
    socket: NicSocket,
    shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
}

impl Thread {
    fn run(&self) {
        while self.wait(None) {
            if let Err(error) = self.serve() {
                tracing::warn!(nic = self.nic.name, %error, "a connection could not be served");
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
                PollFd::from_borrowed_fd(self.socket.listener.as_fd(), PollFlags::IN),
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

    /// Serves the connection that waits, to its end. The accept cannot block: a unix connection stays in the backlog even if
    /// its client is gone.
    fn serve(&self) -> io::Result<()> {
        let session = Arc::new(Session::new(self.nic.clone())?);
        let mut connection = Connection::new(&self.nic, session)?;
        let mut listener = Listener::from(self.socket.listener.try_clone()?);
        connection.daemon.start(&mut listener).map_err(framework)?;
        self.nic.connected();
        *self.shared.connection() = connection.daemon.shutdown_handle();
        if self.shared.stopping.load(Ordering::SeqCst) {
            connection.daemon.request_shutdown();
        }
        if !self.watch() {
            connection.daemon.request_shutdown();
        }
        let ended = connection.daemon.wait();
        *self.shared.connection() = None;
        drop(connection);
        self.nic.disconnected(!self.shared.stopping.load(Ordering::SeqCst));
        match ended {
            Ok(())
            | Err(Error::HandleRequest(VhostError::Disconnected | VhostError::PartialMessage)) => {
                tracing::info!(nic = self.nic.name, "the VMM disconnected");
            }
            Err(error) => {
                tracing::warn!(nic = self.nic.name, %error, "the connection to the VMM broke");
            }
        }
        Ok(())
    }
}

impl Thread {
    /// Watches over a session: refuses other VMMs until this one is gone, or until the end. False if it may not be here itself.
    fn watch(&self) -> bool {
        let path = &self.socket.path;
        let Some(peer) = Peer::of(path) else {
            self.nic.welcomed();
            return true;
        };
        let who = peer.credentials();
        let (pid, uid, gid) = (who.pid, who.uid, who.gid);
        if !peer.may_enter(path) {
            tracing::warn!(
                nic = self.nic.name,
                pid,
                uid,
                gid,
                "a VMM connected whom the socket's mode does not let in: refused"
            );
            return false;
        }
        self.nic.welcomed();
        tracing::info!(nic = self.nic.name, pid, uid, gid, "a VMM connected");
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(peer.as_fd(), PollFlags::RDHUP),
                PollFd::from_borrowed_fd(self.socket.listener.as_fd(), PollFlags::IN),
            ];
            let polled = poll(&mut fds, None);
            if self.shared.stopping.load(Ordering::SeqCst) || !fds[1].revents().is_empty() {
                return true;
            }
            if polled.is_ok() && !fds[2].revents().is_empty() {
                // Dropped at once: that is the refusal.
                let refused = self.socket.listener.accept().is_ok();
                tracing::warn!(
                    nic = self.nic.name,
                    refused,
                    "a second VMM connected while one is there"
                );
            }
        }
    }
}

/// The framework's object with our end of it. Its drop waits for the queue thread, so that thread is told to end first.
///
/// The framework has an exit event of its own, but leaks one of its two descriptors with each connection.
struct Connection {
    daemon: VhostUserDaemon<Arc<Session>>,
    session: Arc<Session>,
}

impl Connection {
    fn new(nic: &Nic, session: Arc<Session>) -> io::Result<Self> {
        let routes = (0..nic.layout.total()).map(|index| {
            (nic.layout.kind(index) == Some(QueueKind::Kick)).then(|| nic.kick_route())
        });
        let daemon = with_routes(routes, || {
            VhostUserDaemon::new(format!("vhost-{}", nic.name), session.clone(), session.memory())
        })
        .map_err(framework)?;
        let exit = session.exit().as_raw_fd();
        let handlers = daemon.get_epoll_handlers();
        let registered = handlers.iter().try_for_each(|handler| {
            handler.register_listener(exit, EventSet::IN, EXIT_EVENT.into())
        });
        drop(handlers);
        match registered {
            Ok(()) => Ok(Self { daemon, session }),
            Err(error) => {
                // Dropping it would wait for a thread that nothing can end. The host is out of resources; a thread is the price.
                std::mem::forget(daemon);
                Err(error)
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.session.end();
    }
}

/// The framework's errors are neither `Error` nor `Sync`.
#[allow(clippy::needless_pass_by_value, reason = "it is used with map_err")]
fn framework(error: Error) -> io::Error {
    io::Error::other(error.to_string())
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
