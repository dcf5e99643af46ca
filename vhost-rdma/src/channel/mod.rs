//! The channel between daemons: it carries the connection managers' datagrams of guests on RNICs to
//! guests behind other daemons.
//!
//! libibverbs gives QP 1 to nobody, so these datagrams cannot take the RNICs' way; what they set up
//! does. A daemon connects to another when one of its guests has something to say to an address
//! whose peer entry names that daemon, and sends only: answers come over the other's own
//! connection. Both sides show a certificate of one authority. A datagram is taken in only if a
//! peer entry of its network names its source, and the daemon of that entry is who the sender's
//! certificate says: so no daemon speaks for another's guests, and an entry that is removed ends
//! what it allowed.
//!
//! ```text
//!  worker ──Carrier──> queue ──> queue of a link ──> TLS ──> another daemon
//!                      a share for each NIC, never waits: the excess is lost
//!  another daemon ──> TLS ──inbound──> Directory ──> Inbox of a NIC
//! ```
//!
//! It has a thread of its own: nothing that a peer does or leaves undone is felt by a worker or by
//! the admin API.

mod frame;
mod inbound;
mod link;
#[cfg(test)]
mod rotation;
#[cfg(test)]
mod tests;
mod tls;

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io};

use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{oneshot, watch};

pub use tls::{Files, Pems, TlsError};

use self::frame::Frame;
use self::link::Outgoing;
use self::tls::Identity;
use crate::cm::Mad;
use crate::rnic::{Carrier, Directory, NicQuota};

/// How long the place may be taken, and between two attempts.
const TAKEN: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(50);

/// Who this daemon is, once that is known.
type Known = Option<Identity>;

/// How the channel runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where other daemons connect.
    pub listen: SocketAddr,
    /// Who this one is.
    pub files: Files,
    /// Connections with daemons, in each direction, at most.
    pub daemons: usize,
    /// The certificate may come later: until then nobody is spoken with.
    pub wait: bool,
}

impl Settings {
    /// Who this one is, as far as that is known: the files, which were looked at.
    fn pems(&self) -> Result<Option<Pems>, TlsError> {
        if self.wait && !self.files.cert.exists() {
            return Ok(None);
        }
        let pems = Pems::read(&self.files)?;
        Identity::of(&pems)?;
        Ok(Some(pems))
    }

    /// Does what takes the host's files and ports: the rest can be done where there are none.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn open(&self) -> Result<Opened, ChannelError> {
        let pems = self.pems()?;
        if pems.is_none() {
            let cert = self.files.cert.display();
            tracing::warn!(%cert, "no certificate yet: nobody is spoken with until it is read");
        }
        let address = self.listen;
        let listening = |source| ChannelError::Listen { address, source };
        let listener = bind(address).map_err(listening)?;
        let bound = listener.local_addr().map_err(listening)?;
        tracing::info!(address = %bound, "other daemons may connect");
        Ok(Opened { listener, pems, daemons: self.daemons })
    }
}

/// A daemon that comes after another finds the place taken for a moment, where that one's process
/// is still ending.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let begin = Instant::now();
    loop {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && begin.elapsed() < TAKEN => {
                std::thread::sleep(AGAIN);
            }
            done => return done,
        }
    }
}

/// What a channel is made of.
#[derive(Debug)]
pub struct Opened {
    /// Where other daemons connect.
    pub listener: TcpListener,
    /// Who this one is, if that is known.
    pub pems: Option<Pems>,
    /// As in [`Settings`].
    pub daemons: usize,
}

/// Why there is no channel.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Certificates.
    #[error("the channel between daemons cannot be opened: {0}")]
    Tls(#[from] TlsError),
    /// The address.
    #[error(
        "cannot listen on {address} for other daemons: {source}; choose another with --cm-listen"
    )]
    Listen {
        /// As asked for.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// A thread, a runtime.
    #[error("cannot {action} of the channel between daemons: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// Gives the channel other certificates while it runs, wherever that is.
#[derive(Clone)]
pub struct Renewal {
    /// Those that it has.
    pems: Arc<Mutex<Option<Pems>>>,
    give: Arc<dyn Fn(Pems) + Send + Sync>,
}

impl fmt::Debug for Renewal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewal").finish_non_exhaustive()
    }
}

/// Certificates that were read and fit each other.
#[derive(Debug)]
pub struct Renewed {
    to: Renewal,
    pems: Option<Pems>,
}

impl Renewal {
    /// For a channel that has these, and is given others by `give`.
    pub fn new(pems: Option<Pems>, give: impl Fn(Pems) + Send + Sync + 'static) -> Self {
        Self { pems: Arc::new(Mutex::new(pems)), give: Arc::new(give) }
    }

    /// Reads the files, and changes nothing yet.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn read(&self, settings: &Settings) -> Result<Renewed, TlsError> {
        // One that went is no reason to forget it.
        let is_known = self.pems.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let settings = Settings { wait: settings.wait && !is_known, ..settings.clone() };
        Ok(Renewed { to: self.clone(), pems: settings.pems()? })
    }
}

impl Renewed {
    /// Every connection is made anew by them: who is no longer let in is out. False if they are
    /// those that were in use.
    #[must_use]
    pub fn take_effect(self) -> bool {
        let mut held = self.to.pems.lock().unwrap_or_else(PoisonError::into_inner);
        let differ = *held != self.pems;
        if differ && let Some(pems) = &self.pems {
            (self.to.give)(pems.clone());
        }
        *held = self.pems;
        differ
    }
}

/// The channel. Dropping it ends all of its connections.
pub struct Channel {
    identity: watch::Sender<Known>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").finish_non_exhaustive()
    }
}

/// The end that workers have of it. What waits in the queue has a place of its NIC's share there,
/// which is what bounds it.
struct Out {
    queue: UnboundedSender<Outgoing>,
}

impl Carrier for Out {
    fn carry(&self, quota: &NicQuota, daemon: &Arc<str>, network: &str, mad: Mad) -> bool {
        let Some(permit) = quota.take() else { return false };
        let frame = Frame { network: network.to_owned(), mad };
        self.queue.send(Outgoing { daemon: daemon.clone(), frame, permit }).is_ok()
    }
}

impl Channel {
    /// Runs it for the NICs of `directory`.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn start(opened: Opened, directory: &Arc<Directory>) -> Result<Self, ChannelError> {
        let Opened { listener, pems, daemons } = opened;
        let identity = pems.as_ref().map(Identity::of).transpose()?;
        listener
            .set_nonblocking(true)
            .map_err(|source| ChannelError::Io { action: "set up the socket", source })?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(4)
            .build()
            .map_err(|source| ChannelError::Io { action: "start the runtime", source })?;
        let (queue, waiting) = mpsc::unbounded_channel();
        let (identity, known_as) = watch::channel(identity);
        let (stop, stopped) = oneshot::channel::<()>();
        let theirs = directory.clone();
        let run = move || {
            runtime.block_on(async move {
                match tokio::net::TcpListener::from_std(listener) {
                    Ok(listener) => {
                        tokio::spawn(inbound::listen(listener, known_as.clone(), theirs, daemons));
                    }
                    Err(error) => tracing::error!(%error, "other daemons cannot connect"),
                }
                tokio::spawn(link::dispatch(waiting, known_as, daemons));
                // Either way, sent or dropped, it is time to stop.
                let _ = stopped.await;
            });
            // A name that is being looked up must not hold the end up.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("cm-channel".to_owned()).spawn(run);
        let thread =
            thread.map_err(|source| ChannelError::Io { action: "start the thread", source })?;
        directory.set_carrier(Arc::new(Out { queue }));
        Ok(Self { identity, stop: Some(stop), thread: Some(thread) })
    }

    /// By which it is given other certificates.
    #[must_use]
    pub fn identity(&self) -> GiveIdentity {
        GiveIdentity(self.identity.clone())
    }
}

/// Gives a channel of this process other certificates.
#[derive(Clone)]
pub struct GiveIdentity(watch::Sender<Known>);

impl fmt::Debug for GiveIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GiveIdentity").finish_non_exhaustive()
    }
}

impl GiveIdentity {
    /// From now on the channel is known by these.
    ///
    /// # Errors
    /// They cannot be used; it stays known as before.
    pub fn give(&self, pems: &Pems) -> Result<(), TlsError> {
        self.0.send_replace(Some(Identity::of(pems)?));
        Ok(())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It panics only if it has a fault, which the log tells.
            let _ = thread.join();
        }
    }
}
