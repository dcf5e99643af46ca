//! Lets processes in to a NIC for processes, and keeps nobody.
//!
//! A process that ends needs nothing of the supervisor: its socket ends where it is served. So a
//! connection is looked at, handed to the data plane and forgotten; however many come, nothing here
//! grows. The thread that does it is there when somebody comes.
//!
//! Those that come may be slow to be taken in, and their sockets slow to close (`aside`). So the
//! end of a NIC does not wait for the thread for long, and who causes that waits outside.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::listener::{NicSocket, RETRY};
use super::peer::Peer;
use super::seat::Seat;
use crate::aside::{drop_aside, is_crowded};
use crate::watch::{Heard, OnCall, Watch, Watched};

/// How long the end of a NIC waits for the thread before it is left behind.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// See the module. It ends when this is dropped, and the socket goes with it.
pub(super) struct Door {
    at_socket: Arc<Mutex<Option<Watched<Arc<NicSocket>>>>>,
    work: Arc<OnCall>,
}

impl Door {
    /// Lets processes in to the NIC behind `seat`, at `socket`; `watch` says when somebody comes.
    pub(super) fn open(
        seat: Arc<Seat>,
        socket: Arc<NicSocket>,
        watch: &Arc<Watch>,
    ) -> io::Result<Self> {
        let at_socket = Arc::<Mutex<Option<Watched<Arc<NicSocket>>>>>::default();
        let name = format!("nic-{}", seat.name());
        let own = at_socket.clone();
        let work = OnCall::new(name, watch.clone(), move |work, _| {
            let mut slot = own.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(at_socket) = &*slot {
                let_all_in(work, &seat, at_socket);
            }
            // Where this thread was left behind, the socket goes with it.
            if work.is_ending() {
                drop(slot.take());
            }
        });
        let calls = work.clone();
        let mut slot = at_socket.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = Some(watch.add(socket, Heard::Once, move || calls.call(1))?);
        drop(slot);
        Ok(Self { at_socket, work })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if self.work.end_within(STOP_TIMEOUT) {
            drop(self.at_socket.lock().unwrap_or_else(PoisonError::into_inner).take());
        } else {
            tracing::error!("a process that was turned away holds a thread up; it is left behind");
        }
    }
}

fn let_all_in(work: &OnCall, seat: &Seat, at_socket: &Watched<Arc<NicSocket>>) {
    while !work.is_ending() && at_socket.file().has_somebody() {
        // What others of this NIC have sent keeps threads busy that close it.
        if is_crowded(seat.name()) {
            work.pause(RETRY);
            continue;
        }
        if let Err(error) = let_in(work, seat, at_socket.file()) {
            tracing::warn!(nic = seat.name(), %error, "a process is turned away");
            // What is wrong with the host may pass; who is refused again and again is not heard
            // more often either.
            work.pause(RETRY);
        }
    }
    if let Err(error) = at_socket.again() {
        tracing::error!(nic = seat.name(), %error, "nobody hears of processes that come");
    }
}

fn let_in(work: &OnCall, seat: &Seat, socket: &NicSocket) -> io::Result<()> {
    let entry = seat.entry();
    let stream = socket.accept()?;
    let done = welcome(work, seat, (socket, &stream));
    drop(entry);
    drop_aside(seat.name(), stream);
    done
}

fn welcome(
    work: &OnCall,
    seat: &Seat,
    (socket, stream): (&NicSocket, &UnixStream),
) -> io::Result<()> {
    let peer = Peer::of(stream)?;
    let who = peer.credentials();
    let (nic, pid, uid) = (seat.name(), who.pid, who.uid);
    if !peer.may_enter(socket.path()) {
        tracing::warn!(
            nic,
            pid,
            uid,
            "a process connected whom the socket's mode does not let in: refused"
        );
        return Ok(());
    }
    tracing::debug!(nic, pid, uid, "a process connected");
    seat.enter(stream, &|| !work.is_ending())
}
