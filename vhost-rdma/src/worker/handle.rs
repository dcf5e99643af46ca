//! How other threads reach a worker.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{RecvTimeoutError, Sender, sync_channel};
use std::time::Duration;

use super::pulse::{Beat, Pulse};
use super::waker::{Waker, WatchedKick};
use crate::engine::{Nanos, Shard};
use crate::transport::NicId;

pub(super) type Work = Box<dyn FnOnce(&mut Shard, Nanos) + Send>;

/// What a mailbox holds.
pub(super) enum Message {
    /// Run this; if it panics, the NIC fails.
    Job(Option<NicId>, Work),
    /// End the thread.
    Stop,
}

/// Why a call has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The worker did not come to it in time; the job will still run.
    #[error("the worker did not answer in time")]
    Timeout,
    /// The worker is gone, or the job panicked.
    #[error("the worker could not carry out the job")]
    Failed,
}

/// A worker, as others see it. Cheap to clone.
#[derive(Clone)]
pub struct WorkerHandle {
    mailbox: Sender<Message>,
    waker: Arc<Waker>,
    pulse: Arc<Pulse>,
}

impl WorkerHandle {
    pub(super) const fn new(
        mailbox: Sender<Message>,
        waker: Arc<Waker>,
        pulse: Arc<Pulse>,
    ) -> Self {
        Self { mailbox, waker, pulse }
    }

    /// How the worker is.
    #[must_use]
    pub fn beat(&self) -> Beat {
        self.pulse.beat()
    }

    /// Lets the worker look at its doorbells.
    #[inline]
    pub fn kick(&self) {
        self.waker.wake();
    }

    /// Lets the kicks of a guest wake the worker directly, and counts those that did. `fd` is an eventfd of the VMM.
    ///
    /// # Errors
    /// The host refuses.
    pub fn watch(&self, fd: OwnedFd, counter: Arc<AtomicU64>) -> io::Result<WatchedKick> {
        self.waker.watch(fd, counter)
    }

    /// Queues a job for `nic`. Jobs run in the order in which one thread queued them. False if the worker is gone.
    pub fn post(
        &self,
        nic: Option<NicId>,
        job: impl FnOnce(&mut Shard, Nanos) + Send + 'static,
    ) -> bool {
        let sent = self.mailbox.send(Message::Job(nic, Box::new(job))).is_ok();
        self.waker.wake();
        sent
    }

    /// Queues a job for `nic` and waits for its result, `timeout` at most.
    ///
    /// # Errors
    /// See [`CallError`].
    pub fn call<R: Send + 'static>(
        &self,
        nic: Option<NicId>,
        timeout: Duration,
        job: impl FnOnce(&mut Shard, Nanos) -> R + Send + 'static,
    ) -> Result<R, CallError> {
        let (reply, result) = sync_channel(1);
        let run = move |shard: &mut Shard, now| {
            // The caller may have given up; then nobody wants the result.
            let _ = reply.send(job(shard, now));
        };
        if !self.post(nic, run) {
            return Err(CallError::Failed);
        }
        result.recv_timeout(timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => CallError::Timeout,
            RecvTimeoutError::Disconnected => CallError::Failed,
        })
    }

    pub(super) fn stop(&self) {
        let _ = self.mailbox.send(Message::Stop);
        self.waker.wake();
    }
}

impl fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerHandle").finish_non_exhaustive()
    }
}
