//! A VMM's connection: a thread that handles its messages, and one that serves its queues.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};
use virtio_rdma_abi::vq;

use super::frontend::Frontend;
use super::journal::{Change, Forgetful, Journal, Kept};
use super::nic::Nic;
use super::queue_thread::QueueThread;
use super::restore::{self, Agreed, Handler};
use super::saved::{self, SavedSession};
use super::session::{QUEUE_SIZE, Session};
use super::vring::Vring;
use crate::node::{self, Ending};

/// Whoever waits for the end of the stream learns that nobody reads it any more.
struct HangUp(UnixStream);

impl Drop for HangUp {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Waits until there is a message, or the end.
fn await_message(stream: &UnixStream) {
    let mut fds = [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
    while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}

/// See the module.
pub(crate) struct Connection {
    nic: Arc<Nic>,
    stream: UnixStream,
    session: Arc<Session>,
    queues: Arc<QueueThread>,
    vrings: Arc<[Vring]>,
    messages: Option<JoinHandle<VhostError>>,
}

impl Connection {
    /// Serves the VMM at `stream` with `nic`, and tells `journal` what it says.
    pub(crate) fn start(
        nic: &Arc<Nic>,
        stream: UnixStream,
        journal: Arc<dyn Journal>,
    ) -> io::Result<Self> {
        let mut connection = Self::quiet(nic, stream)?;
        connection.nic.connected();
        let frontend = connection.frontend(journal.clone());
        let own = connection.stream.try_clone()?;
        connection.listen(BackendReqHandler::from_stream(own, frontend), journal)?;
        Ok(connection)
    }

    /// Goes on with a session whose process has ended, and which `kept` is what is left of. With
    /// what that process has `saved` the guest does not notice; else its device is lost.
    pub(crate) fn take_up(
        nic: &Arc<Nic>,
        stream: UnixStream,
        (mut kept, saved): (Vec<Kept>, Option<SavedSession>),
        journal: Arc<dyn Journal>,
    ) -> io::Result<Self> {
        let mut connection = Self::quiet(nic, stream)?;
        connection.nic.connected();
        let control = u32::from(vq::CONTROL);
        let has = |change: fn(&Change) -> Option<u32>| {
            kept.iter().any(|(kept, _)| change(kept) == Some(control))
        };
        // A VMM that had not come so far has a guest that has lost nothing.
        if has(Change::placed) {
            connection.session.take_up(has(Change::kicked));
        }
        // What is kept needs no second note.
        let frontend = connection.frontend(Arc::new(Forgetful));
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
                connection.load(nic, saved);
            }
            restore(queues)?;
            frontend.tell(journal.clone());
        }
        saved::tell_all(&connection.vrings);
        restore::turn_to(&handler, &connection.stream)?;
        connection.listen(handler, journal)?;
        Ok(connection)
    }

    /// Goes on with what was saved. What does not fit is lost.
    fn load(&self, nic: &Nic, saved: SavedSession) {
        match self.session.go_on_with(nic, saved) {
            Ok(()) => tracing::info!(nic = nic.name, "the guest's objects go on"),
            Err(error) => {
                tracing::error!(nic = nic.name, %error, "the guest's objects are lost");
            }
        }
    }

    /// Whether the guest has lost nothing by the end of an earlier process.
    pub(crate) fn has_kept_all(&self) -> bool {
        !self.session.is_lost()
    }

    /// A connection whose messages nobody reads yet.
    fn quiet(nic: &Arc<Nic>, stream: UnixStream) -> io::Result<Self> {
        let session = Arc::new(Session::new(nic.clone()));
        let vrings = (0..nic.layout.total()).map(|_| Vring::new(QUEUE_SIZE));
        let vrings: Arc<[Vring]> = vrings
            .collect::<Result<_, _>>()
            .map_err(|error| io::Error::other(error.to_string()))?;
        let queues = QueueThread::start(session.clone(), vrings.clone())?;
        nic.serves(&session);
        Ok(Self { nic: nic.clone(), stream, session, queues, vrings, messages: None })
    }

    fn frontend(&self, journal: Arc<dyn Journal>) -> Arc<Mutex<Frontend>> {
        let (session, queues) = (self.session.clone(), self.queues.clone());
        Arc::new(Mutex::new(Frontend::new(session, queues, self.vrings.clone(), journal)))
    }

    /// Starts the thread that handles messages.
    fn listen(&mut self, mut handler: Handler, journal: Arc<dyn Journal>) -> io::Result<()> {
        let end = HangUp(self.stream.try_clone()?);
        let stream = self.stream.try_clone()?;
        let session = self.session.clone();
        let thread = std::thread::Builder::new().name(format!("vhost-{}", self.nic.name));
        self.messages = Some(thread.spawn(move || {
            let _end = end;
            loop {
                // Whoever keeps the session knows which message was never answered.
                await_message(&stream);
                let _alone = session.messages();
                journal.begun();
                if let Err(error) = handler.handle_request() {
                    return error;
                }
                journal.done();
            }
        })?);
        Ok(())
    }

    /// Waits until there are no more messages; why.
    fn wait(&mut self) -> VhostError {
        let ended = self.messages.take().map(JoinHandle::join);
        ended.map_or(VhostError::Disconnected, |ended| {
            ended.unwrap_or(VhostError::BackendInternalError)
        })
    }
}

impl node::Connection for Connection {
    fn end(mut self: Box<Self>) -> Ending {
        match self.wait() {
            VhostError::Disconnected | VhostError::PartialMessage | VhostError::SocketBroken(_) => {
                Ending::Closed
            }
            error => Ending::Broken(error.to_string()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.wait();
        self.queues.hear_nothing();
        self.session.end();
        self.queues.end();
        // Here and not by whoever lets go of the queues last: closing takes as long as the VMM has
        // waiters.
        for vring in self.vrings.iter() {
            vring.set_kick(None);
            vring.set_call(None);
        }
        self.nic.disconnected();
    }
}
