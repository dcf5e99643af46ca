//! The threads that run the engine.
//!
//! A *worker* is one thread with one [`shard::Shard`](crate::shard::Shard): the only thread that
//! ever touches the objects of the NICs on it, so the data path has no locks. Everyone else sends
//! it jobs, closures that run between two rounds of polling, and may wait for what they return.
//! There are as many workers as configured, however many NICs there are (`placement`). What one
//! shard has for another the `carrier` brings.
//!
//! ```text
//!   jobs ──> mailbox ─┐
//!   kicks ─> eventfd ─┴─> drain ─> poll ─┬─ work done ──────────────> again
//!                          ^             ├─ idle, not for long ─────> again (busy polling)
//!                          └── sleep <───┴─ idle for a while
//! ```
//!
//! A worker that sleeps makes no wake-ups of its own, but for the engine's next deadline. How none
//! is lost: `waker`. One that is awake asks for kicks every few microseconds as long as some of its
//! NICs are parked (`shard/parking.rs`).
//!
//! Nothing here knows virtio, sockets, or what a job does. A job that panics costs the NIC that it
//! was for; where there is none, a network's process (`panics`).

mod carrier;
mod clock;
mod handle;
mod job_share;
mod kicks;
mod mailbox;
#[cfg(test)]
mod models;
mod placement;
mod reply;
mod shard_thread;
mod sync;
#[cfg(test)]
mod tests;
mod turn_stats;
mod waker;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

pub use clock::Clock;
pub(crate) use clock::thread_time;
pub use handle::{CallError, Progress, WorkerHandle};
pub use kicks::WatchedKick;
pub use placement::Placement;
pub use turn_stats::{BOUNDS as TURN_BOUNDS, Beat, TurnStats};

use self::carrier::Carrier;
use crate::link::{AddressBook, Bus, MOST_SHARDS};
use crate::qpn::Pool;
use crate::random::{SystemRandom, qpn_key};
use crate::shard::Shard;

/// How the engine is run.
#[derive(Debug, Clone, Copy)]
pub struct WorkerConfig {
    /// Threads; at least one is started.
    pub workers: u32,
    /// Microseconds that a worker polls on after its last work before it sleeps. More buys latency
    /// with CPU time.
    pub poll_us: u32,
    /// NICs of one network are on different workers, and requests cross between them.
    pub spread: bool,
    /// What each worker's thread does once it has all that it needs of the host.
    pub seal: Option<Seal>,
}

/// Gives away what a thread does not need.
pub type Seal = fn() -> io::Result<()>;

impl Default for WorkerConfig {
    fn default() -> Self {
        Self { workers: 1, poll_us: 50, spread: false, seal: None }
    }
}

/// The threads. They end when this is dropped.
#[derive(Debug)]
pub struct Workers {
    handles: Vec<WorkerHandle>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts the threads `vrdma-shard-0` and on. No other process of this host has QPNs.
    ///
    /// # Errors
    /// See [`Self::start_beside`].
    pub fn start(config: WorkerConfig) -> io::Result<Self> {
        Self::start_beside(config, &Arc::new(Pool::whole(qpn_key()?)))
    }

    /// As [`Self::start`], with these QPNs.
    ///
    /// # Errors
    /// The host refuses a thread, an eventfd, or random numbers; or a thread could not be sealed.
    pub fn start_beside(config: WorkerConfig, qpns: &Arc<Pool>) -> io::Result<Self> {
        let mut workers = Self { handles: Vec::new(), threads: Vec::new() };
        let count = (config.workers.max(1) as usize).min(MOST_SHARDS);
        let book = Arc::new(AddressBook::default());
        for (index, carrier) in (0..).zip(Carrier::all(count)?) {
            let random = Box::new(SystemRandom::new()?);
            let mut shard = Shard::new(random).with_qpns(qpns.clone());
            if config.spread && count > 1 {
                shard = shard.with_bus(Bus::new(index as usize, count, book.clone()));
            }
            let (handle, thread) = shard_thread::spawn(index, shard, config, carrier)?;
            workers.handles.push(handle);
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// How to reach each worker.
    #[must_use]
    pub fn handles(&self) -> &[WorkerHandle] {
        &self.handles
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for handle in &self.handles {
            handle.stop();
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker thread ended with a panic");
            }
        }
    }
}
