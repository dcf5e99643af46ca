//! The one thread of a process that waits for VMMs while nothing happens.
//!
//! Sockets and descriptors of all NICs are in one epoll set, and what comes is handed on at once:
//! to a thread of that connection ([`OnCall`]), which this one starts if there is none. So nothing
//! that a VMM can make long happens here, and a NIC whose guest is idle has no thread.
//!
//! But for one thing: to put an eventfd into the set, or to take it out, waits for whoever signals
//! it, with the set's own lock held. Whoever does that sees how long it takes, and gives such a VMM
//! a set and a thread of its own (`device/kicks`).

mod on_call;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

pub(crate) use self::on_call::OnCall;

/// What the epoll set says where it is nobody's descriptor.
const OWN: u64 = 0;
/// Descriptors that are looked at in one go.
const EVENTS: usize = 32;
/// When a thread is tried again that the host did not have.
const AGAIN: Duration = Duration::from_millis(100);

/// What is done when a descriptor says something. It waits for nobody.
type Hears = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Known {
    last: u64,
    all: BTreeMap<u64, Hears>,
}

struct Shared {
    epoll: OwnedFd,
    /// Readable when a thread is wanted, or the end is.
    bell: OwnedFd,
    known: Mutex<Known>,
    ending: AtomicBool,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // Nothing can go wrong with an eventfd of our own.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// See the module. The thread ends when this is dropped.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    wanted: Sender<Arc<OnCall>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// How a descriptor is watched.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Heard {
    /// Each time that it says something.
    Each,
    /// As long as it is readable: once, and then when that is asked for again.
    Once,
    /// When its other end is gone: once, and then again when asked for.
    End,
}

impl Heard {
    fn flags(self) -> EventFlags {
        match self {
            Self::Each => EventFlags::IN | EventFlags::ET,
            Self::Once => EventFlags::IN | EventFlags::RDHUP | EventFlags::ONESHOT,
            Self::End => EventFlags::RDHUP | EventFlags::ONESHOT,
        }
    }
}

/// A descriptor that is watched for as long as this lives.
pub(crate) struct Watched<F: AsFd> {
    shared: Arc<Shared>,
    file: F,
    heard: Heard,
    token: u64,
}

impl<F: AsFd> fmt::Debug for Watched<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("token", &self.token).finish_non_exhaustive()
    }
}

impl Watch {
    /// Starts the thread, which is as free as whoever calls this.
    ///
    /// # Errors
    /// The host refuses a thread or a descriptor.
    pub(crate) fn start() -> io::Result<Arc<Self>> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &bell, EventData::new_u64(OWN), EventFlags::IN | EventFlags::ET)?;
        let (known, ending) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { epoll, bell, known, ending });
        let (wanted, calls) = channel();
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("watch".to_owned());
        let thread = thread.spawn(move || run(&own, &calls))?;
        Ok(Arc::new(Self { shared, wanted, thread: Some(thread) }))
    }

    /// Does `hears` whenever `file` says something.
    pub(crate) fn add<F: AsFd>(
        &self,
        file: F,
        heard: Heard,
        hears: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Watched<F>> {
        let token = {
            let mut known = self.shared.known();
            known.last += 1;
            let token = known.last;
            known.all.insert(token, Arc::new(hears));
            token
        };
        // Not under the lock: how long it takes may be up to whose descriptor it is.
        let added = epoll::add(&self.shared.epoll, &file, EventData::new_u64(token), heard.flags());
        if let Err(error) = added {
            self.shared.known().all.remove(&token);
            return Err(error.into());
        }
        Ok(Watched { shared: self.shared.clone(), file, heard, token })
    }

    /// Has the thread of this work started.
    pub(crate) fn start_thread(&self, work: Arc<OnCall>) {
        if self.wanted.send(work).is_ok() {
            self.shared.ring();
        }
    }
}

/// One that is started when somebody wants it: its thread is as free as whoever is the first.
#[derive(Debug, Default)]
pub(crate) struct LateWatch(Mutex<Option<Arc<Watch>>>);

impl LateWatch {
    /// The watch.
    ///
    /// # Errors
    /// As [`Watch::start`].
    pub(crate) fn get(&self) -> io::Result<Arc<Watch>> {
        let mut watch = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let started = watch.take().map_or_else(Watch::start, Ok)?;
        Ok(watch.insert(started).clone())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        self.shared.ring();
        let thread = self.thread.take();
        // What it heard last may have been the last that needed it.
        let other = thread.filter(|thread| thread.thread().id() != std::thread::current().id());
        if other.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that waits for VMMs panicked");
        }
    }
}

impl<F: AsFd> Watched<F> {
    /// Hears of it once more, at once if there is something.
    pub(crate) fn again(&self) -> io::Result<()> {
        let (data, flags) = (EventData::new_u64(self.token), self.heard.flags());
        Ok(epoll::modify(&self.shared.epoll, &self.file, data, flags)?)
    }

    pub(crate) const fn file(&self) -> &F {
        &self.file
    }
}

impl<F: AsFd> Drop for Watched<F> {
    fn drop(&mut self) {
        // Explicitly: others have the same file open, so closing ours would not take it out.
        let _ = epoll::delete(&self.shared.epoll, &self.file);
        self.shared.known().all.remove(&self.token);
    }
}

fn run(shared: &Shared, calls: &Receiver<Arc<OnCall>>) {
    let mut events = Vec::with_capacity(EVENTS);
    let mut late: Vec<Arc<OnCall>> = Vec::new();
    while !shared.ending.load(Ordering::SeqCst) {
        events.clear();
        let again = (!late.is_empty()).then(|| Timespec::try_from(AGAIN).ok()).flatten();
        match epoll::wait(&shared.epoll, spare_capacity(&mut events), again.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "VMMs cannot be waited for");
                return;
            }
        }
        for event in &events {
            let token = event.data.u64();
            if token == OWN {
                let _ = rustix::io::read(&shared.bell, &mut [0; 8]);
                continue;
            }
            let hears = shared.known().all.get(&token).cloned();
            if let Some(hears) = hears {
                hears();
            }
        }
        late.retain(|work| !work.start_or_do_without(false));
        late.extend(calls.try_iter().filter(|work| !work.start_or_do_without(true)));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const MOMENT: Duration = Duration::from_millis(50);

    #[test]
    fn a_stream_is_heard_once_and_again_when_that_is_asked_for() {
        let watch = Watch::start().unwrap();
        let (near, mut far) = UnixStream::pair().unwrap();
        let (told, tells) = channel();
        let watched = watch.add(near, Heard::Once, move || told.send(()).unwrap()).unwrap();
        assert!(tells.recv_timeout(MOMENT).is_err());
        io::Write::write_all(&mut far, &[1]).unwrap();
        tells.recv_timeout(LONG).unwrap();
        io::Write::write_all(&mut far, &[1]).unwrap();
        assert!(tells.recv_timeout(MOMENT).is_err(), "nobody asked");
        watched.again().unwrap();
        tells.recv_timeout(LONG).unwrap();
        io::Read::read_exact(&mut watched.file(), &mut [0; 2]).unwrap();
        watched.again().unwrap();
        assert!(tells.recv_timeout(MOMENT).is_err(), "there is nothing");
        drop(far);
        tells.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn each_signal_of_an_eventfd_is_heard_until_it_goes() {
        let watch = Watch::start().unwrap();
        let file = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (told, tells) = channel();
        let watched = watch.add(file.clone(), Heard::Each, move || told.send(()).unwrap()).unwrap();
        for _ in 0..3 {
            rustix::io::write(&*file, &1u64.to_ne_bytes()).unwrap();
            tells.recv_timeout(LONG).unwrap();
        }
        drop(watched);
        rustix::io::write(&*file, &1u64.to_ne_bytes()).unwrap();
        assert!(tells.recv_timeout(MOMENT).is_err());
    }
}
