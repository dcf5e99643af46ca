//! A VMM's connection: its messages, its queues, and the end of both.
//!
//! Messages are handled one after the other by a thread that is there as long as there are some
//! ([`OnCall`]); between them the process's [`Watch`] waits for the next. The thread that finds the
//! end of the stream is the one that undoes the session, and says so last.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};
use virtio_rdma_abi::vq;

use super::frontend::Frontend;
use super::journal::{Change, Forgetful, Journal, Kept};
use super::kicks::Kicks;
use super::nic::{Nic, Serving};
use super::restore::{self, Agreed, Handler};
use super::saved::{self, SavedSession};
use super::session::{QUEUE_SIZE, Session};
use super::vring::Vring;
use crate::node::{self, Ending};
use crate::panics::contained;
use crate::watch::{Heard, OnCall, Watch, Watched};

/// See the module. Dropping it cuts the VMM off, and waits until nothing is left of the session.
pub(crate) struct Connection {
    stream: UnixStream,
    session: Arc<Session>,
    ended: Receiver<Ending>,
    /// Nobody waits for its end.
    is_left: bool,
}

impl Connection {
    /// Serves the VMM at `stream` with `nic`, and tells `journal` what it says.
    pub(crate) fn start(
        nic: &Arc<Nic>,
        stream: UnixStream,
        (journal, watch): (Arc<dyn Journal>, &Arc<Watch>),
    ) -> io::Result<Self> {
        let served = Served::new(nic, stream, watch)?;
        let frontend = served.frontend(journal.clone());
        let handler = BackendReqHandler::from_stream(served.stream.try_clone()?, frontend);
        served.listen(handler, (journal, watch))
    }

    /// Goes on with a session whose process has ended, and which `kept` is what is left of. With
    /// what that process has `saved` the guest does not notice; else its device is lost.
    pub(crate) fn take_up(
        nic: &Arc<Nic>,
        stream: UnixStream,
        (mut kept, saved): (Vec<Kept>, Option<SavedSession>),
        (journal, watch): (Arc<dyn Journal>, &Arc<Watch>),
    ) -> io::Result<Self> {
        let served = Served::new(nic, stream, watch)?;
        let control = u32::from(vq::CONTROL);
        let has = |change: fn(&Change) -> Option<u32>| {
            kept.iter().any(|(kept, _)| change(kept) == Some(control))
        };
        // A VMM that had not come so far has a guest that has lost nothing.
        if has(Change::placed) {
            served.session.take_up(has(Change::kicked));
        }
        // What is kept needs no second note.
        let frontend = served.frontend(Arc::new(Forgetful));
        let (mut near, far) = UnixStream::pair()?;
        let mut handler = BackendReqHandler::from_stream(far, frontend.clone());
        restore::shake_hands(&mut handler, &mut near, Agreed::take(&mut kept))?;
        {
            let mut frontend = frontend.lock().unwrap_or_else(PoisonError::into_inner);
            let (memory, queues): (Vec<Kept>, Vec<Kept>) =
                kept.into_iter().partition(|(change, _)| matches!(change, Change::Plugged(_)));
            let mut restore = |kept: Vec<Kept>| {
                let mut kept = kept.into_iter();
                kept.try_for_each(|(change, files)| frontend.restore(&change, files))
                    .map_err(io::Error::other)
            };
            restore(memory)?;
            // Its objects lie in that memory, and must be there before a request comes.
            if let Some(saved) = saved {
                served.load(saved);
            }
            restore(queues)?;
            frontend.tell(journal.clone());
        }
        saved::tell_all(&served.vrings);
        restore::turn_to(&handler, &served.stream)?;
        served.listen(handler, (journal, watch))
    }

    /// Whether the guest has lost nothing by the end of an earlier process.
    pub(crate) fn has_kept_all(&self) -> bool {
        !self.session.is_lost()
    }

    /// Leaves it to itself: its end is told to the journal.
    pub(crate) fn let_go(mut self) {
        self.is_left = true;
    }
}

impl node::Connection for Connection {
    fn end(mut self: Box<Self>) -> Ending {
        self.is_left = true;
        self.ended.recv().unwrap_or_else(|_| Ending::Broken("nobody serves it".to_owned()))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.is_left {
            let _ = self.stream.shutdown(Shutdown::Both);
            // The other end goes when nothing is left.
            let _ = self.ended.recv();
        }
    }
}

/// What a connection has. Dropping it undoes all of it.
struct Served {
    nic: Arc<Nic>,
    stream: UnixStream,
    session: Arc<Session>,
    kicks: Arc<Kicks>,
    vrings: Arc<[Vring]>,
}

impl Served {
    /// Nobody reads its messages yet.
    fn new(nic: &Arc<Nic>, stream: UnixStream, watch: &Arc<Watch>) -> io::Result<Self> {
        let session = Arc::new(Session::new(nic.clone(), watch.clone()));
        let vrings = (0..nic.layout.total()).map(|_| Vring::new(QUEUE_SIZE));
        let vrings: Arc<[Vring]> = vrings
            .collect::<Result<_, _>>()
            .map_err(|error| io::Error::other(error.to_string()))?;
        let kicks = Arc::new(Kicks::new(session.clone(), vrings.clone(), watch.clone()));
        let serving: Arc<dyn Serving> = session.clone();
        nic.serves(Arc::downgrade(&serving));
        nic.connected();
        Ok(Self { nic: nic.clone(), stream, session, kicks, vrings })
    }

    fn frontend(&self, journal: Arc<dyn Journal>) -> Arc<Mutex<Frontend>> {
        let (session, kicks) = (self.session.clone(), self.kicks.clone());
        Arc::new(Mutex::new(Frontend::new(session, kicks, self.vrings.clone(), journal)))
    }

    /// Goes on with what was saved. What does not fit is lost.
    fn load(&self, saved: SavedSession) {
        let nic = &self.nic.name;
        match self.session.go_on_with(&self.nic, saved) {
            Ok(()) => tracing::info!(nic, "the guest's objects go on"),
            Err(error) => tracing::error!(nic, %error, "the guest's objects are lost"),
        }
    }

    /// Has messages handled from now on.
    fn listen(
        self,
        handler: Handler,
        (journal, watch): (Arc<dyn Journal>, &Arc<Watch>),
    ) -> io::Result<Connection> {
        let (stream, session) = (self.stream.try_clone()?, self.session.clone());
        let (name, heard) = (format!("vhost-{}", self.nic.name), self.stream.try_clone()?);
        let (told, ended) = sync_channel(1);
        let messages = Messages { state: Mutex::new(Some((handler, self))), journal, told };
        let messages = Arc::new(messages);
        let watched = Arc::new(Mutex::new(None));
        let (own, its) = (messages.clone(), watched.clone());
        let reader = OnCall::new(name, watch.clone(), move |reader, _| own.serve(reader, &its));
        // It may hear of a message at once, and then waits for the lock.
        let mut slot = lock(&watched);
        let calls = reader.clone();
        match watch.add(heard, Heard::Once, move || calls.call(1)) {
            Ok(heard) => *slot = Some(heard),
            Err(error) => {
                drop(slot);
                // A step that undoes what was begun: the reader never runs.
                drop(lock(&messages.state).take());
                return Err(error);
            }
        }
        drop(slot);
        // A VMM that connects has something to say, and is not to wait for a thread that the host
        // does not have.
        if !reader.start() {
            drop(lock(&watched).take());
            drop(lock(&messages.state).take());
            return Err(io::Error::other("the host has no thread for it"));
        }
        Ok(Connection { stream, session, ended, is_left: false })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Whoever waits for the end of the stream learns that nobody reads it any more.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.kicks.hear_nothing();
        self.session.end();
        self.kicks.end();
        self.session.tell_nothing();
        // Here and not by whoever lets go of the queues last: closing takes as long as the VMM has
        // waiters.
        for vring in self.vrings.iter() {
            vring.set_kick(None);
            vring.set_call(None);
        }
        self.nic.disconnected();
    }
}

/// The messages of a VMM, until there are no more.
struct Messages {
    /// `None`: it is over.
    state: Mutex<Option<(Handler, Served)>>,
    journal: Arc<dyn Journal>,
    told: SyncSender<Ending>,
}

/// The stream, in the set of descriptors that are watched.
type Stream = Mutex<Option<Watched<UnixStream>>>;

impl Messages {
    /// Handles all that there are.
    fn serve(&self, reader: &Arc<OnCall>, stream: &Stream) {
        let mut state = lock(&self.state);
        let Some((handler, served)) = state.as_mut() else { return };
        let handled = contained(|| self.handle_all(handler, served));
        let handled = handled.unwrap_or(Err(VhostError::BackendInternalError));
        let goes_on = handled.and_then(|()| {
            let stream = lock(stream);
            let again = stream.as_ref().map_or(Ok(()), Watched::again);
            again.map_err(VhostError::ReqHandlerError)
        });
        let Err(error) = goes_on else { return };
        // From here on nobody hears of it.
        drop(lock(stream).take());
        drop(state.take());
        drop(state);
        let ending = ending(error);
        self.journal.ended(&ending);
        let _ = self.told.try_send(ending);
        reader.end();
    }

    fn handle_all(&self, handler: &mut Handler, served: &Served) -> Result<(), VhostError> {
        while has_message(&served.stream) {
            // Whoever keeps the session knows which message was never answered.
            let _alone = served.session.messages();
            self.journal.begun();
            handler.handle_request()?;
            self.journal.done();
        }
        Ok(())
    }
}

/// Whether there is a message, or the end.
fn has_message(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
    loop {
        match poll(&mut fds, Some(&Timespec::default())) {
            Err(rustix::io::Errno::INTR) => {}
            found => return found.is_ok_and(|ready| ready > 0),
        }
    }
}

fn ending(error: VhostError) -> Ending {
    match error {
        VhostError::Disconnected | VhostError::PartialMessage | VhostError::SocketBroken(_) => {
            Ending::Closed
        }
        error => Ending::Broken(error.to_string()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
