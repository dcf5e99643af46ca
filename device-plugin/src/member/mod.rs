//! This node's part in the channel between nodes: what it has of it, and what is known of it.
//!
//! ```text
//!   identity   a key made here, its certificate, the roots that are believed
//!   store      those on the disk, and where the daemon reads them
//!   book       where the addresses of other nodes are, on the disk
//! ```
//!
//! Nothing here speaks with anybody. Who gets certificates and lists, and has the daemon take them,
//! is `channel`; who decides about NICs is `agent`, which has nothing of this file's but
//! [`Channel`] and [`Settings`]. This may touch neither.

pub mod book;
pub mod identity;
pub mod store;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use vhost_rdma_cluster_api::{Channel as Reported, ChannelCertificate, Condition};

use self::identity::{Certificate, since};
use self::store::{Kept, Store};

/// How the node takes part.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The node's name.
    pub node: String,
    /// Where other daemons reach this node's.
    pub endpoint: SocketAddr,
    /// The directory that the daemon reads.
    pub shared: PathBuf,
    /// The namespace of the controller.
    pub namespace: String,
    /// Where the controller is, as `HOST:PORT`.
    pub controller: String,
    /// The name in its certificate.
    pub controller_name: String,
}

/// Why something is not as it should be, for the node's conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// One word for programs.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

impl Trouble {
    pub(crate) fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

/// What people and monitoring see of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct View {
    /// The certificate in use.
    pub certificate: Option<Certificate>,
    /// Why there is none, or no newer one.
    pub certificate_trouble: Option<Trouble>,
    /// The controller's lists are followed.
    pub connected: bool,
    /// Why not.
    pub peers_trouble: Option<Trouble>,
    /// When a list came last.
    pub updated: Option<SystemTime>,
    /// Entries of all lists.
    pub entries: usize,
    /// Why the daemon does not take them.
    pub refused: Option<String>,
}

/// A node's part in the channel.
#[derive(Debug)]
pub struct Channel {
    settings: Settings,
    pub(crate) store: Store,
    pub(crate) kept: watch::Sender<Kept>,
    view: Mutex<View>,
}

impl Channel {
    /// With what was kept on the disk.
    #[must_use]
    pub fn new(settings: Settings, state_dir: &Path) -> Self {
        let store = Store::new(state_dir, &settings.shared);
        let kept = store.read();
        let channel =
            Self { settings, store, kept: watch::Sender::new(kept), view: Mutex::default() };
        let kept = channel.kept.borrow().clone();
        channel.view().certificate = channel.look(&kept).ok();
        channel
    }

    /// How the node takes part.
    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many entries the lists have.
    pub fn count(&self, entries: usize) {
        self.view().entries = entries;
    }

    /// Why the daemon does not take them, if it does not.
    pub fn refused(&self, why: Option<String>) {
        self.view().refused = why;
    }

    /// What people and monitoring see.
    #[must_use]
    pub fn seen(&self) -> View {
        self.view().clone()
    }

    /// The certificate that is kept, if it is one.
    pub(crate) fn look(&self, kept: &Kept) -> Result<Certificate, String> {
        let (Some(pair), Some(roots)) = (&kept.pair, &kept.roots) else {
            return Err("there is none yet".to_owned());
        };
        Certificate::read(pair, roots, &self.settings.node, self.settings.endpoint.ip())
    }

    /// Keeps something new, on the disk first.
    pub(crate) fn keep(&self, change: impl FnOnce(&mut Kept)) -> std::io::Result<()> {
        let before = self.kept.borrow().clone();
        let mut new = before.clone();
        change(&mut new);
        if new != before {
            self.store.write(&new)?;
            self.view().certificate = self.look(&new).ok();
            self.kept.send_replace(new);
        }
        Ok(())
    }

    /// What the node's object says of the channel. Others are told of it once there is a
    /// certificate: before that nobody can be spoken with.
    #[must_use]
    pub fn reported(&self) -> Reported {
        let certificate = self.view().certificate.clone().map(|of| ChannelCertificate {
            not_after: Timestamp::from_second(i64::try_from(of.until).unwrap_or(i64::MAX))
                .map(|time| time.to_string())
                .unwrap_or_default(),
            issuer: of.issuer,
        });
        Reported { endpoint: self.settings.endpoint.to_string(), certificate }
    }

    /// The node's conditions of it.
    #[must_use]
    pub fn conditions(&self) -> [Condition; 2] {
        let view = self.seen();
        let certified = match (&view.certificate, view.certificate_trouble) {
            (Some(of), None) if of.holds(SystemTime::now()) => {
                Condition::new("Certified", true, "Valid", "")
            }
            // The one that is there holds still; why there is no newer one is worth a look.
            (Some(of), Some(why)) if of.holds(SystemTime::now()) => {
                Condition::new("Certified", true, why.reason, why.message)
            }
            (Some(_), None) => Condition::new("Certified", false, "Expired", "it has expired"),
            (_, Some(why)) => Condition::new("Certified", false, why.reason, why.message),
            (None, None) => Condition::new("Certified", false, "Pending", "none was asked for yet"),
        };
        let followed = match (view.connected, view.peers_trouble) {
            _ if view.refused.is_some() => {
                let why = view.refused.unwrap_or_default();
                Condition::new("PeersFollowed", false, "DaemonRefuses", why)
            }
            (true, _) => Condition::new("PeersFollowed", true, "Connected", ""),
            (false, Some(why)) => Condition::new("PeersFollowed", false, why.reason, why.message),
            (false, None) => Condition::new("PeersFollowed", false, "Pending", "not asked yet"),
        };
        [certified, followed]
    }

    /// For `/metrics`: names, explanations and values.
    #[must_use]
    pub fn figures(&self) -> Vec<(&'static str, &'static str, i64)> {
        let view = self.seen();
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let until = view.certificate.map_or(0, |of| number(of.until));
        let updated = view.updated.map_or(0, |time| number(since(time)));
        vec![
            (
                "certificate_not_after_seconds",
                "When the channel's certificate ends, Unix time; 0 without one",
                until,
            ),
            (
                "peers_connected",
                "1 if the controller's lists of peers are followed",
                i64::from(view.connected),
            ),
            (
                "peers_updated_seconds",
                "When a list of peers came last, Unix time; 0 for never since the agent began",
                updated,
            ),
            ("peers", "Entries of the lists of peers", number(view.entries as u64)),
        ]
    }
}
