//! The configuration that is read again while the daemon runs: on SIGHUP, or when it is asked to.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::daemon::reload::admin_access;
use super::daemon::{Daemon, Reloaded};
use crate::config;
use crate::node::Backend;
use crate::socket;

/// What a configuration that was read again asks for. Nothing of it has happened yet.
pub struct Next {
    /// Networks and NICs.
    pub file: config::File,
    /// Who may open the admin socket.
    pub admin: config::Access,
    /// What is different and takes a restart.
    pub kept: Vec<String>,
    /// The rest, which cannot fail; returns what it changed.
    pub commit: Box<dyn FnOnce() -> Vec<String> + Send>,
}

impl std::fmt::Debug for Next {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Next").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Reads the configuration again; the error says what is wrong with it.
pub type Reload = Box<dyn Fn() -> Result<Next, String> + Send + Sync>;

/// The configuration as it is in effect, and how it is read again.
pub(super) struct Reloading {
    read: Reload,
    admin_socket: PathBuf,
    /// Held over a whole reload: one at a time.
    admin: Mutex<config::Access>,
}

impl std::fmt::Debug for Reloading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reloading").finish_non_exhaustive()
    }
}

impl Reloading {
    /// Of a daemon with this admin socket, which `admin` may open now.
    pub(super) fn new(read: Reload, admin_socket: PathBuf, admin: config::Access) -> Self {
        Self { read, admin_socket, admin: Mutex::new(admin) }
    }

    /// Reads everything, checks everything, and only then changes anything. What happened is in the
    /// log, too.
    pub(super) fn run<B: Backend>(&self, daemon: &Daemon<B>) -> Result<Reloaded, String> {
        let mut admin = self.admin.lock().unwrap_or_else(PoisonError::into_inner);
        let done = self.apply(daemon, &mut admin);
        match &done {
            Ok(done) => tell(done),
            Err(why) => {
                tracing::error!(%why, "the configuration was not taken over; nothing has changed");
            }
        }
        done
    }

    fn apply<B: Backend>(
        &self,
        daemon: &Daemon<B>,
        admin: &mut config::Access,
    ) -> Result<Reloaded, String> {
        let next = (self.read)()?;
        let access = admin_access(&next.admin).map_err(|error| format!("admin socket: {error}"))?;
        let mut done = daemon.reload(&next.file).map_err(|error| error.to_string())?;
        done.kept.extend(next.kept);
        done.changed.extend((next.commit)());
        if next.admin != *admin {
            match socket::set_access(&self.admin_socket, &access) {
                Ok(()) => {
                    done.changed.push("who may open the admin socket".to_owned());
                    *admin = next.admin;
                }
                Err(error) => done.failed.push(format!("admin socket: {error}")),
            }
        }
        Ok(done)
    }
}

/// What reading the configuration again has done, for the log.
fn tell(done: &Reloaded) {
    let changed = |what| tracing::info!(%what, "configuration read again: changed");
    let kept = |what| tracing::warn!(%what, "configuration read again: not changed");
    let failed = |why| tracing::error!(%why, "configuration read again: failed");
    done.changed.iter().for_each(changed);
    done.kept.iter().for_each(kept);
    done.failed.iter().for_each(failed);
    if *done == Reloaded::default() {
        tracing::info!("configuration read again: nothing has changed");
    }
}
