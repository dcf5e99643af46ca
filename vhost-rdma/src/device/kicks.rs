//! Where the kicks of one connection's queues are heard, and the thread that serves the queues.
//!
//! Queues come and go while others are served. One that was just added is looked at once even if
//! nobody kicks it, since what was kicked before would be lost. Descriptors are watched
//! edge-triggered: one whose counter cannot be set back, for whatever its VMM did to it, keeps
//! nobody busy.
//!
//! Kicks of kick queues wake the worker directly, which saves each the way through here
//! (`Nic::watch_kick`). The others are heard by the process's [`Watch`]. A VMM that has made a set
//! wait (`Nic::timed`) has a watch of its own from then on.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::nic::DirectKick;
use super::session::Session;
use super::vring::Vring;
use crate::watch::{self, OnCall, Watch, Watched};

/// Where the kicks of a queue are heard, with the descriptor that stays open as long.
#[derive(Debug)]
enum Heard {
    Here(Watched<Arc<File>>),
    ByWorker(Arc<File>, #[allow(dead_code, reason = "it is its life that counts")] DirectKick),
}

impl Heard {
    const fn file(&self) -> &Arc<File> {
        match self {
            Self::Here(watched) => watched.file(),
            Self::ByWorker(file, _) => file,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Kicks {
    session: Arc<Session>,
    watch: Arc<Watch>,
    /// For a VMM that is slow to wait for.
    own_watch: OnceLock<Arc<Watch>>,
    /// Bit n: queue n was kicked, or added.
    server: Arc<OnCall>,
    /// By queue; changed by the connection's thread only.
    heard: Mutex<Vec<Option<Heard>>>,
}

impl Kicks {
    /// Those of `vrings` of `session`.
    pub(super) fn new(session: Arc<Session>, vrings: Arc<[Vring]>, watch: Arc<Watch>) -> Self {
        let heard = Mutex::new(vrings.iter().map(|_| None).collect());
        let own = session.clone();
        let serve = move |_: &Arc<OnCall>, mut due: u64| {
            while due != 0 {
                serve(&own, &vrings, due.trailing_zeros());
                due &= due - 1;
            }
        };
        let server = OnCall::new("vring".to_owned(), watch.clone(), serve);
        Self { session, watch, own_watch: OnceLock::new(), server, heard }
    }

    fn heard(&self) -> MutexGuard<'_, Vec<Option<Heard>>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears the kicks of queue `index` by `kick` from now on, and by nothing else.
    pub(super) fn listen(&self, index: u32, kick: Option<Arc<File>>) -> io::Result<()> {
        let mut heard = self.heard();
        let Some(slot) = heard.get_mut(index as usize) else { return Ok(()) };
        let same = match (&slot, &kick) {
            (Some(old), Some(new)) => Arc::ptr_eq(old.file(), new),
            (None, None) => true,
            _ => false,
        };
        if same {
            return Ok(());
        }
        self.let_go(slot.take());
        let Some(file) = kick else { return Ok(()) };
        *slot = Some(match self.session.watch_kick(index, &file) {
            Some(direct) => Heard::ByWorker(file, direct),
            None => Heard::Here(self.hear(index, file)?),
        });
        drop(heard);
        self.server.call(bit(index));
        Ok(())
    }

    fn hear(&self, index: u32, file: Arc<File>) -> io::Result<Watched<Arc<File>>> {
        let nic = self.session.nic();
        let watch = if nic.has_slow_kicks() { self.own_watch()? } else { &self.watch };
        let server = self.server.clone();
        nic.timed(|| watch.add(file, watch::Heard::Each, move || server.call(bit(index))))
    }

    fn own_watch(&self) -> io::Result<&Arc<Watch>> {
        if self.own_watch.get().is_none() {
            // Only the connection's thread comes here.
            let _ = self.own_watch.set(Watch::start()?);
        }
        self.own_watch.get().ok_or_else(|| io::Error::other("there is no watch"))
    }

    fn let_go(&self, heard: Option<Heard>) {
        // A direct kick sees to that itself.
        self.session.nic().timed(|| drop(heard));
    }

    /// Hears nothing any more.
    pub(super) fn hear_nothing(&self) {
        // A statement of its own: the lock must be free again.
        let queues = self.heard().len();
        for index in 0..u32::try_from(queues).unwrap_or(0) {
            let _ = self.listen(index, None);
        }
    }

    /// Serves no queue any more; waits until that is so.
    pub(super) fn end(&self) {
        self.server.end();
    }
}

fn serve(session: &Session, vrings: &[Vring], index: u32) {
    if let Some(vring) = vrings.get(index as usize) {
        // Before the look, so that a kick which comes after it is another one.
        vring.take_kick();
        session.handle(index.into(), vrings);
    }
}

const fn bit(index: u32) -> u64 {
    1 << (index & 63)
}
