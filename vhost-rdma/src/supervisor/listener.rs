//! Lets VMMs in to one NIC, one connection after the other, by a thread that is there when somebody
//! comes or goes.
//!
//! A second VMM that connects while one is there is refused: its connection is closed at once, for
//! whoever has a NIC must not be kept waiting behind a stranger, nor a stranger wait for the NIC.
//! One that comes when the first has just gone (a container that starts again) waits in the backlog
//! until the old session is undone, and finds a device without old objects.
//!
//! Where the host has no descriptor left, a VMM is turned away rather than left to wait for an
//! answer: one descriptor is kept for that.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::SocketType;

use super::peer::Peer;
use super::seat::Seat;
use crate::aside::{drop_aside, is_crowded};
use crate::node::{AttachError, Connection, Ending, Guests, Heirloom, NicConfig};
use crate::socket;
use crate::store::{Listening, Owner, Sockets};
use crate::watch::{Heard, OnCall, Watch, Watched};

/// How long the end of a NIC may take before it is left to itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a connection that could not even begin.
pub(super) const RETRY: Duration = Duration::from_millis(200);

/// VMMs that are turned away in one go.
const TURNED_AWAY: u32 = 4;

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

    /// Whether somebody waits to be let in.
    pub(super) fn has_somebody(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
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
    fn connection(&self) -> MutexGuard<'_, Option<UnixStream>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

/// See the module. It ends when this is dropped, and the socket goes with it.
pub(super) struct Listener {
    shared: Arc<Shared>,
    work: Arc<OnCall>,
    done: Receiver<()>,
}

impl Listener {
    /// Serves the NIC behind `seat` at `socket`, and first whoever is there already; `watch` says
    /// when somebody comes.
    pub(super) fn start(
        (seat, socket): (Arc<Seat>, Arc<NicSocket>),
        watch: &Arc<Watch>,
        left: Option<(UnixStream, Box<dyn Connection>)>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let (finished, done) = sync_channel::<()>(0);
        let spare = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let keeper = Keeper {
            name: seat.name().to_owned(),
            seat,
            at_socket: None,
            socket: socket.clone(),
            shared: shared.clone(),
            watch: watch.clone(),
            spare: Some(spare),
            served: None,
        };
        let name = format!("nic-{}", keeper.name);
        let keeper = Arc::new(Mutex::new(Some((keeper, finished))));
        let (own, other) = (keeper.clone(), keeper.clone());
        let run = move |work: &Arc<OnCall>, _| {
            let mut keeper = own.lock().unwrap_or_else(PoisonError::into_inner);
            let goes_on = keeper.as_mut().is_some_and(|(keeper, _)| keeper.run(work));
            if !goes_on {
                finish(keeper.take());
            }
        };
        // Nobody is to wait for a thread that does not come.
        let turn_away = move || {
            if let Ok(mut keeper) = other.try_lock()
                && let Some((keeper, _)) = &mut *keeper
            {
                keeper.turn_away();
            }
        };
        let work = OnCall::or(name, watch.clone(), run, turn_away);
        {
            let mut keeper = keeper.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((keeper, _)) = keeper.as_mut() {
                let calls = work.clone();
                let at_socket = watch.add(socket, Heard::Once, move || calls.call(1))?;
                keeper.at_socket = Some(at_socket);
                // Whoever asks from now on finds that it goes on.
                if let Some((stream, connection)) = left {
                    keeper.go_on(&work, stream, connection);
                }
            }
        }
        Ok(Self { shared, work, done })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        if let Some(connection) = self.shared.connection().as_ref() {
            let _ = connection.shutdown(Shutdown::Both);
        }
        self.work.call(1);
        if self.done.recv_timeout(STOP_TIMEOUT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            tracing::error!("a connection does not end; its thread is left behind");
        } else {
            self.work.end();
        }
    }
}

/// Lets go of what it worked with (a socket's file) before the other end of `finished` hears of the
/// end: whoever waits there removes the file's directory next.
fn finish<T>(own: Option<(T, SyncSender<()>)>) {
    if let Some((keeper, finished)) = own {
        drop(keeper);
        drop(finished);
    }
}

/// A VMM that is there.
struct Served {
    peer: Peer,
    connection: Box<dyn Connection>,
    hangs_up: Option<Watched<UnixStream>>,
}

struct Keeper {
    name: String,
    seat: Arc<Seat>,
    at_socket: Option<Watched<Arc<NicSocket>>>,
    socket: Arc<NicSocket>,
    shared: Arc<Shared>,
    watch: Arc<Watch>,
    /// Given up to accept, and close, a connection that there is no other descriptor for.
    spare: Option<OwnedFd>,
    served: Option<Served>,
}

impl Keeper {
    /// Deals with whoever comes and goes, until nobody does; false when it is time to end.
    fn run(&mut self, work: &Arc<OnCall>) -> bool {
        loop {
            if self.shared.is_stopping() {
                self.undo();
                return false;
            }
            // In this order: who waits while the connection is still up is a second one. The other
            // way round a VMM that goes and comes again between the two looks was refused.
            let somebody = self.socket.has_somebody();
            match &self.served {
                // The kernel looked at the connection first: a VMM that ended after that look may
                // have its successor there already.
                Some(served) if served.peer.has_hung_up() => self.undo(),
                _ if !somebody => break,
                // What others of this NIC have sent keeps threads busy that close it.
                _ if is_crowded(&self.name) => work.pause(RETRY),
                Some(_) => self.refuse(work),
                None => {
                    if let Err(error) = self.serve(work) {
                        tracing::error!(nic = self.name, %error, "a VMM is turned away");
                        work.pause(RETRY);
                    }
                }
            }
        }
        let hangs_up = self.served.as_ref().and_then(|served| served.hangs_up.as_ref());
        let watched = hangs_up.map(Watched::again).into_iter();
        let watched = watched.chain(self.at_socket.as_ref().map(Watched::again));
        if let Err(error) = watched.collect::<io::Result<()>>() {
            tracing::error!(nic = self.name, %error, "nobody hears of VMMs that come");
        }
        true
    }

    /// Accepts a connection. It cannot block: a unix connection stays in the backlog even if its
    /// client is gone.
    fn accept(&mut self) -> io::Result<UnixStream> {
        // It may have been given up before; there may be room again.
        self.spare = self.spare.take().or_else(|| self.socket.as_fd().try_clone_to_owned().ok());
        let error = match self.socket.accept() {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let full = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(|e| e.raw_os_error());
        if error.raw_os_error().is_some_and(|errno| full.contains(&errno)) {
            drop(self.spare.take());
            // Closed at once: the VMM is told.
            drop(self.socket.accept());
            self.spare = self.socket.as_fd().try_clone_to_owned().ok();
        }
        Err(error)
    }

    /// Serves the connection that waits.
    fn serve(&mut self, work: &Arc<OnCall>) -> io::Result<()> {
        let seat = self.seat.clone();
        let entry = seat.entry();
        let stream = self.accept()?;
        let peer = Peer::of(&stream)?;
        let lets_in = self.lets_in(&peer);
        let connected = lets_in.then(|| stream.try_clone().and_then(|own| seat.connect(own)));
        drop(entry);
        let connection = match connected {
            Some(Ok(connection)) => connection,
            refused => {
                drop_aside(&self.name, stream);
                return refused
                    .map_or(Ok(()), |failed| failed.map(drop))
                    .inspect_err(|_| seat.left());
            }
        };
        self.attend(work, (peer, stream), connection);
        Ok(())
    }

    /// Stays with a session that an earlier daemon has begun.
    fn go_on(&mut self, work: &Arc<OnCall>, stream: UnixStream, connection: Box<dyn Connection>) {
        match Peer::of(&stream) {
            Ok(peer) => {
                self.seat.taken();
                tracing::info!(nic = self.name, "the VMM of an earlier daemon is served");
                self.attend(work, (peer, stream), connection);
            }
            Err(error) => {
                tracing::error!(nic = self.name, %error, "a VMM is turned away");
                let _ = stream.shutdown(Shutdown::Both);
                drop(connection.end());
            }
        }
    }

    /// Hears of the session's end.
    fn attend(
        &mut self,
        work: &Arc<OnCall>,
        (peer, stream): (Peer, UnixStream),
        connection: Box<dyn Connection>,
    ) {
        let calls = work.clone();
        let own = stream.try_clone();
        let hangs_up = own.and_then(|own| self.watch.add(own, Heard::End, move || calls.call(1)));
        let hangs_up = hangs_up
            .inspect_err(|error| {
                tracing::error!(nic = self.name, %error, "a VMM is turned away");
                peer.hang_up();
                // It is seen when the socket is looked at next, which is now.
                work.call(1);
            })
            .ok();
        *self.shared.connection() = Some(stream);
        self.served = Some(Served { peer, connection, hangs_up });
    }

    /// The session ends, or has.
    fn undo(&mut self) {
        let Some(Served { peer, connection, hangs_up }) = self.served.take() else { return };
        drop(hangs_up);
        if self.shared.is_stopping() {
            peer.hang_up();
        }
        let ended = connection.end();
        *self.shared.connection() = None;
        // It went by itself, if not because the daemon ends.
        if !self.shared.is_stopping() {
            self.seat.left();
        }
        match ended {
            Ending::Closed => tracing::info!(nic = self.name, "the VMM disconnected"),
            Ending::Broken(error) => {
                tracing::warn!(nic = self.name, error, "the connection to the VMM broke");
            }
        }
    }

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

    /// Turns some of those away that wait, at once: it is on a thread that is everybody's.
    fn turn_away(&mut self) {
        for _ in 0..TURNED_AWAY {
            let turns = self.served.is_none() && self.socket.has_somebody();
            if !turns || self.accept().is_err() {
                return;
            }
            tracing::error!(nic = self.name, "a VMM is turned away: the host has no thread");
        }
    }

    /// Turns a second VMM away.
    fn refuse(&mut self, work: &Arc<OnCall>) {
        let seat = self.seat.clone();
        let refused = {
            let _entry = seat.entry();
            self.accept()
        };
        let pid = refused.as_ref().ok().and_then(|stream| Peer::of(stream).ok());
        let pid = pid.map_or(0, |second| second.credentials().pid);
        if let Some(Served { peer, .. }) = &self.served {
            tracing::warn!(
                nic = self.name,
                pid,
                connected = peer.credentials().pid,
                ended = peer.has_ended(),
                "a second VMM connected while one is there: refused"
            );
        }
        match refused {
            // That is the refusal.
            Ok(stream) => drop_aside(&self.name, stream),
            // Where not even that was possible the connection still waits, and would be found again
            // at once.
            Err(_) => work.pause(RETRY),
        }
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
        let thread = std::thread::spawn(move || finish(Some((socket, finished))));
        done.recv().unwrap_err();
        assert!(gone.load(Ordering::SeqCst));
        thread.join().unwrap();
    }
}
