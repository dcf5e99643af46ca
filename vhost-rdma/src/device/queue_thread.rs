//! The thread that waits for one connection's kicks and serves its queues.
//!
//! Queues come and go while it waits: their descriptors are in an epoll set, which the connection's thread changes. A queue that was
//! just added is looked at once even if nobody kicks it, since what was kicked before would be lost. The set is edge-triggered: a
//! descriptor whose counter cannot be set back, for whatever its VMM did to it, does not keep the thread busy.
//!
//! Kicks of kick queues wake the worker directly, which saves each the way through here (`Nic::watch`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::nic::DirectKick;
use super::session::Session;
use super::vring::Vring;

/// What the epoll set says where it is not a queue's index.
const POKE: u64 = u64::MAX;

/// Where the kicks of a queue are heard, with the descriptor that stays open as long.
#[derive(Debug)]
enum Heard {
    Here(Arc<File>),
    ByWorker(Arc<File>, #[allow(dead_code, reason = "it is its life that counts")] DirectKick),
}

impl Heard {
    const fn file(&self) -> &Arc<File> {
        match self {
            Self::Here(file) | Self::ByWorker(file, _) => file,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct QueueThread {
    epoll: OwnedFd,
    /// Readable when there is something to look at other than kicks.
    poke: OwnedFd,
    /// Bit n: queue n was added and not looked at yet.
    added: AtomicU64,
    ending: AtomicBool,
    /// By queue; changed by the connection's thread only.
    heard: Mutex<Vec<Option<Heard>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl QueueThread {
    /// A thread that serves `vrings` of `session`.
    pub(super) fn start(session: Arc<Session>, vrings: Arc<[Vring]>) -> io::Result<Arc<Self>> {
        let this = Arc::new(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            poke: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            added: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            heard: Mutex::new(vrings.iter().map(|_| None).collect()),
            thread: Mutex::default(),
        });
        epoll::add(&this.epoll, &this.poke, EventData::new_u64(POKE), EventFlags::IN)?;
        let own = this.clone();
        let thread = std::thread::Builder::new()
            .name("vring".to_owned())
            .spawn(move || own.run(&session, &vrings))?;
        *this.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(this)
    }

    fn heard(&self) -> MutexGuard<'_, Vec<Option<Heard>>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears the kicks of queue `index` by `kick` from now on, and by nothing else. `direct` makes the worker hear them, if it can.
    pub(super) fn listen(
        &self,
        index: u32,
        kick: Option<Arc<File>>,
        direct: impl FnOnce(&File) -> Option<DirectKick>,
    ) -> io::Result<()> {
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
        // Explicitly: the VMM has the same eventfd open, so closing ours would not take it out of the set.
        if let Some(Heard::Here(old)) = slot.take() {
            self.added.fetch_and(!bit(index), Ordering::AcqRel);
            let _ = epoll::delete(&self.epoll, &old);
        }
        let Some(file) = kick else { return Ok(()) };
        *slot = Some(match direct(&file) {
            Some(direct) => Heard::ByWorker(file, direct),
            None => {
                let (data, flags) = (EventData::new_u64(index.into()), EventFlags::IN);
                epoll::add(&self.epoll, &file, data, flags | EventFlags::ET)?;
                Heard::Here(file)
            }
        });
        drop(heard);
        self.added.fetch_or(bit(index), Ordering::AcqRel);
        self.poke();
        Ok(())
    }

    /// Hears nothing any more.
    pub(super) fn hear_nothing(&self) {
        // A statement of its own: the lock must be free again.
        let queues = self.heard().len();
        for index in 0..u32::try_from(queues).unwrap_or(0) {
            let _ = self.listen(index, None, |_| None);
        }
    }

    /// Ends the thread and waits for it.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
        self.poke();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a queue thread panicked");
        }
    }

    fn poke(&self) {
        // Nothing can go wrong with an eventfd of our own.
        let _ = rustix::io::write(&self.poke, &1u64.to_ne_bytes());
    }

    fn run(&self, session: &Session, vrings: &[Vring]) {
        let mut events = Vec::with_capacity(vrings.len() + 1);
        // Looked at before each wait: the poke that says so may have been taken with one that said something else.
        while !self.ending.load(Ordering::Acquire) {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "a connection's queues cannot be waited for");
                    return;
                }
            }
            for event in &events {
                if self.ending.load(Ordering::Acquire) {
                    return;
                }
                match event.data.u64() {
                    POKE => self.look_at_new(session, vrings),
                    index => kicked(session, vrings, index),
                }
            }
        }
    }

    fn look_at_new(&self, session: &Session, vrings: &[Vring]) {
        let _ = rustix::io::read(self.poke.as_fd(), &mut [0; 8]);
        let mut added = self.added.swap(0, Ordering::AcqRel);
        while added != 0 {
            session.handle(added.trailing_zeros().into(), vrings);
            added &= added - 1;
        }
    }
}

/// A queue's descriptor was signalled.
fn kicked(session: &Session, vrings: &[Vring], index: u64) {
    if let Some(vring) = usize::try_from(index).ok().and_then(|index| vrings.get(index)) {
        vring.take_kick();
        session.handle(index, vrings);
    }
}

const fn bit(index: u32) -> u64 {
    1 << (index & 63)
}
