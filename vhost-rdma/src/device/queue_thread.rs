//! The thread that waits for one connection's kicks and serves its queues.
//!
//! Queues come and go while it waits: their descriptors are in an epoll set, which the connection's thread changes. A queue that was
//! just added is looked at once even if nobody kicks it, since what was kicked before would be lost.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use vhost_user_backend::VringT;

use super::session::Session;
use super::vring::Vring;

/// What the epoll set says where it is not a queue's index.
const POKE: u64 = u64::MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct QueueThread {
    epoll: OwnedFd,
    /// Readable when there is something to look at other than kicks.
    poke: OwnedFd,
    /// Bit n: queue n was added and not looked at yet.
    added: AtomicU64,
    ending: AtomicBool,
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

    /// Listens to queue `index`'s descriptor from now on, or no more.
    pub(super) fn listen(&self, kick: BorrowedFd<'_>, index: u32, listen: bool) -> io::Result<()> {
        if !listen {
            self.forget(kick, index);
            return Ok(());
        }
        let data = EventData::new_u64(index.into());
        match epoll::add(&self.epoll, kick, data, EventFlags::IN) {
            Ok(()) => {
                self.added.fetch_or(bit(index), Ordering::AcqRel);
                self.poke();
                Ok(())
            }
            // A VMM may enable a queue twice.
            Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Listens to queue `index`'s descriptor no more, if it did.
    pub(super) fn forget(&self, kick: BorrowedFd<'_>, index: u32) {
        self.added.fetch_and(!bit(index), Ordering::AcqRel);
        let _ = epoll::delete(&self.epoll, kick);
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
        loop {
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

/// A queue's descriptor is readable.
fn kicked(session: &Session, vrings: &[Vring], index: u64) {
    let vring = usize::try_from(index).ok().and_then(|index| vrings.get(index));
    // An error is of one who emptied the counter before us.
    if vring.is_some_and(|vring| vring.read_kick().unwrap_or(true)) {
        session.handle(index, vrings);
    }
}

const fn bit(index: u32) -> u64 {
    1 << (index & 63)
}
