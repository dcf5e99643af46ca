//! rdma_cm between guests on RNICs and third-party hosts: the daemon ends the connection set-up of
//! each side and joins the two.
//!
//! `vhost_rdma_engine::cm::message` reads and writes what the guest's connection manager says,
//! `terminate` is the rule of the game, `library` is the host's connection manager (librdmacm,
//! feature `host-rnic`). All of it runs on one thread, since setting up connections is rare and
//! slow, and calls of librdmacm are system calls: no worker makes one, or waits for one that does.

#[cfg(feature = "host-rnic")]
mod library;
mod terminate;

#[cfg(feature = "host-rnic")]
pub(crate) use library::prepare;
#[cfg(feature = "host-rnic")]
pub use thread::CmBridge;

#[cfg(feature = "host-rnic")]
mod thread {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::JoinHandle;
    use std::time::{Duration, Instant};
    use std::{fmt, io};

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

    use super::library::{HostLibrary, LibraryError};
    use super::terminate::Terminator;
    use crate::directory::Directory;
    use crate::nic_quota::{NicQuota, QuotaPermit};
    use crate::ways::{HostCm, Sent};

    /// Datagrams and events of one turn.
    const TURN: usize = 64;
    const SWEEP: Duration = Duration::from_secs(1);

    /// The thread that joins guests and third-party hosts. Dropping it ends their connections'
    /// set-up, not the connections.
    pub struct CmBridge {
        out: Arc<Out>,
        thread: Option<JoinHandle<()>>,
    }

    impl fmt::Debug for CmBridge {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("CmBridge").finish_non_exhaustive()
        }
    }

    /// A datagram and its NIC's place in the queue.
    type Waiting = (Sent, QuotaPermit);

    /// The end that workers have. What waits in the queue has a place of its NIC's share there,
    /// which is what bounds it. A worker waits neither for the thread nor for others that send,
    /// which std's channel would have it do.
    struct Out {
        queue: UnboundedSender<Waiting>,
        wake: OwnedFd,
        stop: AtomicBool,
    }

    impl Out {
        fn new() -> io::Result<(Arc<Self>, UnboundedReceiver<Waiting>)> {
            let (queue, waiting) = unbounded_channel();
            let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            Ok((Arc::new(Self { queue, wake, stop: AtomicBool::new(false) }), waiting))
        }

        fn wake(&self) {
            // A full counter wakes as well; nothing else can go wrong with an eventfd of our own.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    impl HostCm for Out {
        fn carry(&self, quota: &NicQuota, sent: Sent) -> bool {
            let Some(permit) = quota.take() else { return false };
            let taken = self.queue.send((sent, permit)).is_ok();
            self.wake();
            taken
        }
    }

    impl CmBridge {
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
            let (out, waiting) = Out::new().map_err(system)?;
            let turn = Turn {
                terminator: Terminator::new(host, directory.clone()),
                waiting,
                out: out.clone(),
                begun: Instant::now(),
            };
            let thread = std::thread::Builder::new().name("cm-bridge".to_owned());
            let thread = thread.spawn(move || turn.run()).map_err(system)?;
            directory.set_host_cm(out.clone());
            Ok(Self { out, thread: Some(thread) })
        }
    }

    impl Drop for CmBridge {
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
        waiting: UnboundedReceiver<Waiting>,
        out: Arc<Out>,
        begun: Instant,
    }

    /// Takes the datagrams of one turn; if more may be left, the next one is not waited for.
    fn turn(waiting: &mut UnboundedReceiver<Waiting>, out: &Out, mut take: impl FnMut(Sent)) {
        for _ in 0..TURN {
            // The place is given back once the datagram is out of the queue.
            let Ok((sent, _)) = waiting.try_recv() else { return };
            take(sent);
        }
        out.wake();
    }

    impl Turn {
        fn run(mut self) {
            let mut swept = Duration::ZERO;
            while !self.out.stop.load(Ordering::Acquire) {
                self.wait();
                turn(&mut self.waiting, &self.out, |sent| {
                    self.terminator.sent(sent, self.begun.elapsed());
                });
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

        /// Waits for something to do, a second at most. The eventfd is emptied before the queue is
        /// looked at, so nothing is missed.
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

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::nic_quota::PER_NIC;
        use crate::ways::Station;
        use vhost_rdma_engine::cm::{Inbox, MAD_LEN, Mad};

        fn sent(first: u8) -> Sent {
            let (gid, inbox) = ([first; 16], Arc::new(Inbox::new(Arc::new(|| {}))));
            let station = Station { device: "rxe0".to_owned(), vni: 7, gid, inbox };
            let mad =
                Mad { source: gid, dest: [9; 16], traffic_class: 0, sl: 0, bytes: [0; MAD_LEN] };
            Sent { station, host: [8; 16], to: [9; 16], mad }
        }

        /// Whether the thread would wake up.
        fn woken(out: &Out) -> bool {
            rustix::io::read(&out.wake, &mut [0; 8]).is_ok()
        }

        #[test]
        fn a_flood_for_third_party_hosts_takes_no_other_nics_place() {
            let (out, mut waiting) = Out::new().unwrap();
            let flooders: [NicQuota; 5] = std::array::from_fn(|_| NicQuota::default());
            let bystander = NicQuota::default();
            for _ in 0..1000 {
                for quota in &flooders {
                    out.carry(quota, sent(1));
                }
            }
            assert!(out.carry(&bystander, sent(2)), "there is room for who floods not");
            assert!(woken(&out));
            assert!(!out.carry(&flooders[0], sent(1)) && !woken(&out), "nobody wakes for a loss");
            // Each turn brings the next about, until the bystander's turn has come. All the while
            // they flood.
            let mut order = Vec::new();
            while !order.contains(&2) {
                turn(&mut waiting, &out, |sent| order.push(sent.station.gid[0]));
                flooders.iter().for_each(|quota| while out.carry(quota, sent(1)) {});
            }
            let ahead = order.iter().position(|first| *first == 2);
            assert_eq!(ahead, Some(5 * PER_NIC), "it waits for a share of each, no more");
        }

        #[test]
        fn what_a_turn_leaves_waits_for_nobody() {
            let (out, mut waiting) = Out::new().unwrap();
            let quotas = [NicQuota::default(), NicQuota::default()];
            quotas.iter().for_each(|quota| while out.carry(quota, sent(1)) {});
            let mut taken = 0;
            let mut turns = 0;
            while woken(&out) {
                turn(&mut waiting, &out, |_| taken += 1);
                turns += 1;
            }
            assert_eq!((taken, turns), (2 * PER_NIC, 2 * PER_NIC / TURN + 1));
        }
    }
}
