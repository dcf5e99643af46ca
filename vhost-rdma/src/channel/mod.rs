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
mod places;
#[cfg(test)]
mod rotation;
#[cfg(test)]
mod tests;
mod tls;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::{fmt, io};

use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{oneshot, watch};

pub use tls::{Files, TlsError};

use self::frame::Frame;
use self::link::Outgoing;
use self::tls::Identity;
use crate::cm::Mad;
use crate::rnic::{Carrier, Directory, NicQuota};

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
    /// Who this one is, as far as that is known.
    fn identity(&self) -> Result<Option<Identity>, TlsError> {
        if self.wait && !self.files.cert.exists() {
            return Ok(None);
        }
        Identity::load(&self.files).map(Some)
    }
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

/// Gives the channel other certificates while it runs.
#[derive(Clone)]
pub struct Renewal {
    identity: watch::Sender<Known>,
}

impl fmt::Debug for Renewal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewal").finish_non_exhaustive()
    }
}

/// Certificates that were read and fit each other.
pub struct Renewed {
    to: watch::Sender<Known>,
    identity: Known,
}

impl fmt::Debug for Renewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewed").finish_non_exhaustive()
    }
}

impl Renewal {
    /// Reads the files, and changes nothing yet.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn read(&self, settings: &Settings) -> Result<Renewed, TlsError> {
        // One that went is no reason to forget it.
        let may_wait = settings.wait && self.identity.borrow().is_none();
        let settings = Settings { wait: may_wait, ..settings.clone() };
        Ok(Renewed { to: self.identity.clone(), identity: settings.identity()? })
    }
}

impl Renewed {
    /// Every connection is made anew by them: who is no longer let in is out. False if they are
    /// those that were in use.
    pub fn take_effect(self) -> bool {
        let new = self.identity;
        self.to.send_if_modified(|identity| {
            let held = |identity: &Known| identity.as_ref().map(|known| known.held.clone());
            let differ = held(identity) != held(&new);
            if differ {
                *identity = new;
            }
            differ
        })
    }
}

/// The channel. Dropping it ends all of its connections.
pub struct Channel {
    renewal: Renewal,
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
    /// Opens it for the NICs of `directory`.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn start(settings: &Settings, directory: &Arc<Directory>) -> Result<Self, ChannelError> {
        let identity = settings.identity()?;
        if identity.is_none() {
            let cert = settings.files.cert.display();
            tracing::warn!(%cert, "no certificate yet: nobody is spoken with until it is read");
        }
        let (address, daemons) = (settings.listen, settings.daemons);
        let listening = |source| ChannelError::Listen { address, source };
        let listener = std::net::TcpListener::bind(address).map_err(listening)?;
        listener.set_nonblocking(true).map_err(listening)?;
        let bound = listener.local_addr().map_err(listening)?;
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
        tracing::info!(address = %bound, "other daemons may connect");
        let renewal = Renewal { identity };
        Ok(Self { renewal, stop: Some(stop), thread: Some(thread) })
    }

    /// By which its certificates are renewed.
    #[must_use]
    pub fn renewal(&self) -> Renewal {
        self.renewal.clone()
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
