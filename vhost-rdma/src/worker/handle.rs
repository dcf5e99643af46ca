//! How other threads reach a worker.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::kicks::WatchedKick;
use super::mailbox::Sender;
use super::reply::{NoAnswer, reply};
use super::turn_stats::{Beat, TurnStats};
use super::waker::Waker;
use crate::link::NicId;
use crate::shard::{Nanos, Shard};

/// What came of a step of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress<R = ()> {
    /// The job is done, and this is its result.
    Done(R),
    /// It goes on in the worker's next turn: others are served between.
    More,
}

pub(super) type Work = Box<dyn FnMut(&mut Shard, Nanos) -> Progress + Send>;

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
    /// The worker has been in one and the same turn all the while; the job will still run.
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
    turn_stats: Arc<TurnStats>,
}

impl WorkerHandle {
    pub(super) const fn new(
        mailbox: Sender<Message>,
        waker: Arc<Waker>,
        turn_stats: Arc<TurnStats>,
    ) -> Self {
        Self { mailbox, waker, turn_stats }
    }

    /// Whether both are the same worker.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.turn_stats, &other.turn_stats)
    }

    /// How the worker is.
    #[must_use]
    pub fn beat(&self) -> Beat {
        self.turn_stats.beat()
    }

    /// Wakes the worker for what no NIC has to be named for.
    #[inline]
    pub fn kick(&self) {
        self.waker.wake();
    }

    /// Has the worker hear the kicks of a NIC's guest directly, asleep or awake, and counts them.
    /// `fd` is an eventfd of the VMM; or of something else that wakes the worker, if there is no
    /// NIC.
    ///
    /// # Errors
    /// The host refuses.
    pub fn watch(
        &self,
        nic: Option<NicId>,
        fd: OwnedFd,
        counter: Arc<AtomicU64>,
    ) -> io::Result<WatchedKick> {
        self.waker.watch(nic, fd, counter)
    }

    /// Queues a job for `nic`. Jobs begin in the order in which one thread queued them. False if
    /// the worker is gone.
    pub fn post(
        &self,
        nic: Option<NicId>,
        job: impl FnOnce(&mut Shard, Nanos) + Send + 'static,
    ) -> bool {
        let mut job = Some(job);
        self.send(
            nic,
            Box::new(move |shard, now| {
                if let Some(job) = job.take() {
                    job(shard, now);
                }
                Progress::Done(())
            }),
        )
    }

    fn send(&self, nic: Option<NicId>, work: Work) -> bool {
        let sent = self.mailbox.send(Message::Job(nic, work)).is_ok();
        self.waker.wake();
        sent
    }

    /// Queues a job for `nic` and waits for its result: for as long as the worker goes on, since a
    /// job that comes late because others were served is late by our doing. `patience` is how long
    /// the worker may be in one turn.
    ///
    /// # Errors
    /// See [`CallError`].
    pub fn call<R: Send + 'static>(
        &self,
        nic: Option<NicId>,
        patience: Duration,
        job: impl FnOnce(&mut Shard, Nanos) -> R + Send + 'static,
    ) -> Result<R, CallError> {
        let mut job = Some(job);
        self.call_in_steps(nic, patience, move |shard, now| match job.take() {
            Some(job) => Progress::Done(job(shard, now)),
            None => Progress::More,
        })
    }

    /// As [`Self::call`], for a job that is called again, once in each turn of the worker, until it
    /// is done.
    ///
    /// # Errors
    /// See [`CallError`].
    pub fn call_in_steps<R: Send + 'static>(
        &self,
        nic: Option<NicId>,
        patience: Duration,
        mut job: impl FnMut(&mut Shard, Nanos) -> Progress<R> + Send + 'static,
    ) -> Result<R, CallError> {
        let (reply, answer) = reply();
        let run = move |shard: &mut Shard, now| match job(shard, now) {
            Progress::Done(done) => {
                reply.give(done);
                Progress::Done(())
            }
            Progress::More => Progress::More,
        };
        if !self.send(nic, Box::new(run)) {
            return Err(CallError::Failed);
        }
        let mut turn = self.turn_stats.turn();
        loop {
            match answer.wait(patience) {
                Ok(result) => return Ok(result),
                Err(NoAnswer::Gone) => return Err(CallError::Failed),
                Err(NoAnswer::Timeout) => {
                    let present = self.turn_stats.turn();
                    if std::mem::replace(&mut turn, present) == present {
                        return Err(CallError::Timeout);
                    }
                }
            }
        }
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
