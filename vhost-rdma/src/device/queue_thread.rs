//! The thread that waits for one connection's kicks and serves its queues.
//!
//! Queues come and go while it waits: their descriptors are in an epoll set, which the connection's
//! thread changes. A queue that was just added is looked at once even if nobody kicks it, since
//! what was kicked before would be lost. The set is edge-triggered: a descriptor whose counter
//! cannot be set back, for whatever its VMM did to it, does not keep the thread busy.
//!
//! Kicks of kick queues wake the worker directly, which saves each the way through here
//! (`Nic::watch`).

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
        let this = Arc::new(Self::new(vrings.len())?);
        let own = this.clone();
        let thread = std::thread::Builder::new()
            .name("vring".to_owned())
            .spawn(move || own.run(|news| serve(&session, &vrings, news)))?;
        *this.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(this)
    }

    /// One that does not run yet, and hears nothing.
    fn new(queues: usize) -> io::Result<Self> {
        let this = Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            poke: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            added: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            heard: Mutex::new((0..queues).map(|_| None).collect()),
            thread: Mutex::default(),
        };
        epoll::add(&this.epoll, &this.poke, EventData::new_u64(POKE), EventFlags::IN)?;
        Ok(this)
    }

    fn heard(&self) -> MutexGuard<'_, Vec<Option<Heard>>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears the kicks of queue `index` by `kick` from now on, and by nothing else. `direct` makes
    /// the worker hear them, if it can.
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
        // Explicitly: the VMM has the same eventfd open, so closing ours would not take it out of
        // the set.
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

    fn run(&self, mut serve: impl FnMut(News)) {
        let mut events = Vec::with_capacity(self.heard().len() + 1);
        // Looked at before each wait: the poke that says so may have been taken with one that said
        // something else.
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
                    POKE => self.look_at_new(&mut serve),
                    index => serve(News::Kicked(index)),
                }
            }
        }
    }

    fn look_at_new(&self, serve: &mut impl FnMut(News)) {
        let _ = rustix::io::read(self.poke.as_fd(), &mut [0; 8]);
        let mut added = self.added.swap(0, Ordering::AcqRel);
        while added != 0 {
            serve(News::Added(added.trailing_zeros().into()));
            added &= added - 1;
        }
    }
}

/// Why a queue is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    /// It was added: what was kicked before would be lost.
    Added(u64),
    /// Its descriptor was signalled.
    Kicked(u64),
}

fn serve(session: &Session, vrings: &[Vring], news: News) {
    match news {
        News::Added(index) => session.handle(index, vrings),
        News::Kicked(index) => {
            if let Some(vring) = usize::try_from(index).ok().and_then(|index| vrings.get(index)) {
                vring.take_kick();
                session.handle(index, vrings);
            }
        }
    }
}

const fn bit(index: u32) -> u64 {
    1 << (index & 63)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn kick() -> Arc<File> {
        Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap().into())
    }

    fn ring(kick: &File) {
        rustix::io::write(kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Runs one until it ends; what it was told, in order.
    fn told(
        queues: &Arc<QueueThread>,
        mut then: impl FnMut(&QueueThread, News) + Send + 'static,
    ) -> Option<Vec<News>> {
        let (own, (told, end)) = (queues.clone(), mpsc::channel());
        let thread = std::thread::spawn(move || {
            let mut all = Vec::new();
            own.run(|news| {
                all.push(news);
                then(&own, news);
            });
            told.send(all).unwrap();
        });
        let all = end.recv_timeout(LONG).ok()?;
        thread.join().unwrap();
        Some(all)
    }

    /// A poke is a counter: one that says that the thread ends is taken together with one that says
    /// that a queue was added, if both came before the read.
    #[test]
    fn the_end_that_was_told_with_something_else_is_the_end() {
        let queues = Arc::new(QueueThread::new(2).unwrap());
        queues.listen(0, Some(kick()), |_| None).unwrap();
        let all = told(&queues, |queues, _| {
            // After the read: the poke that goes with it has been taken.
            queues.ending.store(true, Ordering::Release);
        });
        assert_eq!(all.expect("it ends"), [News::Added(0)]);
    }

    #[test]
    fn a_queue_that_is_added_is_looked_at_and_its_kicks_are_heard_until_it_goes() {
        let queues = Arc::new(QueueThread::new(2).unwrap());
        let (first, second) = (kick(), kick());
        queues.listen(1, Some(second.clone()), |_| None).unwrap();
        ring(&second);
        queues.listen(1, None, |_| None).unwrap();
        ring(&second);
        queues.listen(0, Some(first.clone()), |_| None).unwrap();
        let all = told(&queues, move |queues, news| match news {
            News::Added(_) => ring(&first),
            News::Kicked(_) => {
                queues.ending.store(true, Ordering::Release);
                queues.poke();
            }
        });
        assert_eq!(all.expect("it ends"), [News::Added(0), News::Kicked(0)]);
    }
}
