//! A VMM's connection: a thread that handles its messages, and one that serves its queues.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use vhost::vhost_user::{BackendReqHandler, Error as VhostError};

use super::frontend::Frontend;
use super::nic::Nic;
use super::queue_thread::QueueThread;
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

/// See the module.
pub(super) struct Connection {
    nic: Arc<Nic>,
    stream: UnixStream,
    session: Arc<Session>,
    queues: Arc<QueueThread>,
    vrings: Arc<[Vring]>,
    messages: Option<JoinHandle<VhostError>>,
}

impl Connection {
    /// Serves the VMM at `stream` with `nic`.
    pub(super) fn start(nic: &Arc<Nic>, stream: UnixStream) -> io::Result<Self> {
        let session = Arc::new(Session::new(nic.clone()));
        let vrings = (0..nic.layout.total()).map(|_| Vring::new(QUEUE_SIZE));
        let vrings: Arc<[Vring]> = vrings
            .collect::<Result<_, _>>()
            .map_err(|error| io::Error::other(error.to_string()))?;
        let queues = QueueThread::start(session.clone(), vrings.clone())?;
        let nic = nic.clone();
        let mut connection = Self { nic, stream, session, queues, vrings, messages: None };
        connection.nic.connected();
        connection.listen()?;
        Ok(connection)
    }

    /// Starts the thread that handles messages.
    fn listen(&mut self) -> io::Result<()> {
        let frontend =
            Frontend::new(self.session.clone(), self.queues.clone(), self.vrings.clone());
        let stream = self.stream.try_clone()?;
        let mut handler = BackendReqHandler::from_stream(stream, Arc::new(Mutex::new(frontend)));
        let end = HangUp(self.stream.try_clone()?);
        let thread = std::thread::Builder::new().name(format!("vhost-{}", self.nic.name));
        self.messages = Some(thread.spawn(move || {
            let _end = end;
            loop {
                if let Err(error) = handler.handle_request() {
                    return error;
                }
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
        // Here and not by whoever lets go of the queues last: closing takes as long as the VMM has waiters.
        for vring in self.vrings.iter() {
            vring.set_kick(None);
            vring.set_call(None);
        }
        self.nic.disconnected();
    }
}
