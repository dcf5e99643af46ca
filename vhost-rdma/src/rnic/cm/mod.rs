//! rdma_cm between guests on RNICs and peers that are not ours: the daemon ends the connection set-up of each side and joins the two.
//!
//! `message` reads and writes what the guest's connection manager says, `terminate` is the rule of the game, `library` is the host's
//! connection manager (librdmacm, feature `host-rnic`). All of it runs on one thread, since setting up connections is rare and slow, and
//! calls of librdmacm are system calls: no worker makes one, or waits for one that does.

#[cfg(feature = "host-rnic")]
mod library;
mod message;
mod terminate;

#[cfg(feature = "host-rnic")]
pub use thread::Foreigners;

#[cfg(feature = "host-rnic")]
mod thread {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::thread::JoinHandle;
    use std::time::{Duration, Instant};
    use std::{fmt, io};

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    use super::library::{HostLibrary, LibraryError};
    use super::terminate::Terminator;
    use crate::rnic::addresses::Directory;
    use crate::rnic::peers::{Foreign, Sent};

    /// Datagrams on their way from workers.
    const ROOM: usize = 256;
    /// Datagrams and events of one turn.
    const TURN: usize = 64;
    const SWEEP: Duration = Duration::from_secs(1);

    /// The thread that joins guests and peers that are not ours. Dropping it ends their connections' set-up, not the connections.
    pub struct Foreigners {
        out: Arc<Out>,
        thread: Option<JoinHandle<()>>,
    }

    impl fmt::Debug for Foreigners {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Foreigners").finish_non_exhaustive()
        }
    }

    /// The end that workers have.
    struct Out {
        queue: SyncSender<Sent>,
        wake: OwnedFd,
        stop: AtomicBool,
    }

    impl Out {
        fn wake(&self) {
            // A full counter wakes as well; nothing else can go wrong with an eventfd of our own.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    impl Foreign for Out {
        fn carry(&self, sent: Sent) -> bool {
            let taken = self.queue.try_send(sent).is_ok();
            self.wake();
            taken
        }
    }

    impl Foreigners {
        /// Loads librdmacm and takes connections at `ports` of the host's addresses.
        ///
        /// # Errors
        /// There is no librdmacm, or the host refuses.
        pub fn start(ports: &[u16], directory: &Arc<Directory>) -> Result<Self, String> {
            let told = |error: LibraryError| error.to_string();
            let system = |error: io::Error| error.to_string();
            let mut host = HostLibrary::open().map_err(told)?;
            for &port in ports {
                host.listen(port).map_err(told)?;
            }
            let (queue, waiting) = sync_channel(ROOM);
            let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let wake = wake.map_err(|error| system(error.into()))?;
            let out = Arc::new(Out { queue, wake, stop: AtomicBool::new(false) });
            let turn = Turn {
                terminator: Terminator::new(host, directory.clone()),
                waiting,
                out: out.clone(),
                begun: Instant::now(),
            };
            let thread = std::thread::Builder::new().name("cm-foreign".to_owned());
            let thread = thread.spawn(move || turn.run()).map_err(system)?;
            directory.set_foreign(out.clone());
            Ok(Self { out, thread: Some(thread) })
        }
    }

    impl Drop for Foreigners {
        fn drop(&mut self) {
            self.out.stop.store(true, Ordering::Release);
            self.out.wake();
            if let Some(thread) = self.thread.take() {
                // It panics only if it has a fault, which the log tells.
                let _ = thread.join();
            }
        }
    }

    struct Turn {
        terminator: Terminator<HostLibrary>,
        waiting: Receiver<Sent>,
        out: Arc<Out>,
        begun: Instant,
    }

    impl Turn {
        fn run(mut self) {
            let mut swept = Duration::ZERO;
            while !self.out.stop.load(Ordering::Acquire) {
                self.wait();
                for _ in 0..TURN {
                    let Ok(sent) = self.waiting.try_recv() else { break };
                    self.terminator.sent(sent, self.begun.elapsed());
                }
                for _ in 0..TURN {
                    let key = self.terminator.next_key();
                    let Some(event) = self.terminator.host.next_event(key) else { break };
                    self.terminator.happened(event, self.begun.elapsed());
                }
                let now = self.begun.elapsed();
                if now >= swept + SWEEP {
                    swept = now;
                    self.terminator.sweep(now);
                }
            }
        }

        /// Waits for something to do, a second at most. The eventfd is emptied before the queue is looked at, so nothing is missed; what
        /// a turn leaves in the queue waits for the next datagram or second.
        fn wait(&self) {
            // SAFETY: the channel is open as long as the terminator's host.
            let channel = unsafe { BorrowedFd::borrow_raw(self.terminator.host.fd()) };
            let mut set = [
                PollFd::from_borrowed_fd(channel, PollFlags::IN),
                PollFd::from_borrowed_fd(self.out.wake.as_fd(), PollFlags::IN),
            ];
            let second = Timespec { tv_sec: 1, tv_nsec: 0 };
            // An interrupted wait is a turn like any other.
            let _ = poll(&mut set, Some(&second));
            let mut counter = [0; 8];
            let _ = rustix::io::read(&self.out.wake, &mut counter);
        }
    }
}
