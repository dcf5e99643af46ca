//! The configuration that is read again while the daemon runs: on SIGHUP, or when it is asked to.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinError;

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
    admin: Mutex<config::Access>,
    /// One at a time; the others wait without a thread.
    alone: Arc<Semaphore>,
}

impl std::fmt::Debug for Reloading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reloading").finish_non_exhaustive()
    }
}

impl Reloading {
    /// Of a daemon with this admin socket, which `admin` may open now.
    pub(super) fn new(read: Reload, admin_socket: PathBuf, admin: config::Access) -> Self {
        let (admin, alone) = (Mutex::new(admin), Arc::new(Semaphore::new(1)));
        Self { read, admin_socket, admin, alone }
    }

    /// Does all of it when nobody else does. Who hangs up while it is done does not end it.
    pub(super) async fn run<B: Backend>(
        self: &Arc<Self>,
        daemon: &Arc<Daemon<B>>,
    ) -> Result<Result<Reloaded, String>, JoinError> {
        // It is never closed.
        let alone: Option<OwnedSemaphorePermit> = self.alone.clone().acquire_owned().await.ok();
        let (own, daemon) = (Arc::clone(self), Arc::clone(daemon));
        let work = move || {
            let _alone = alone;
            own.run_now(&daemon)
        };
        tokio::task::spawn_blocking(work).await
    }

    /// Reads everything, checks everything, and only then changes anything. What happened is in the
    /// log, too.
    fn run_now<B: Backend>(&self, daemon: &Arc<Daemon<B>>) -> Result<Reloaded, String> {
        let mut admin = self.admin.lock().unwrap_or_else(PoisonError::into_inner);
        let done = self.apply(daemon, &mut admin);
        match &done {
            Ok(done) => done.tell(),
            Err(why) => {
                tracing::error!(%why, "the configuration was not taken over; nothing has changed");
            }
        }
        done
    }

    fn apply<B: Backend>(
        &self,
        daemon: &Arc<Daemon<B>>,
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
