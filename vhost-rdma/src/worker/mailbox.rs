//! A worker's mailbox: many put messages in, one worker takes them out, and the worker never waits.
//!
//! Whoever puts one in may lose its processor at any moment, also while it holds the lock, and a
//! worker that waited for it would make all its guests wait as long as the scheduler likes; queues
//! without locks only hide the same wait in a loop. So the worker only tries the lock: if somebody
//! has it, there is nothing to take *yet*, and the worker goes on with its round. All it must not
//! do then is sleep, which [`Found::Later`] tells it.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, TryLockError};

use super::sync::{AtomicUsize, Mutex, spin_loop};

/// What the worker finds.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found<T> {
    /// The oldest message.
    One(T),
    /// There is one, or will be in a moment; do not wait for it, and do not sleep.
    Later,
    /// None.
    None,
    /// None, and nobody is left who could send one.
    Closed,
}

#[derive(Debug)]
struct Shared<T> {
    /// Messages in `queue`, so that looking costs a load. Stored under the lock, in no order of its
    /// own: who finds some takes the lock, and who sleeps has the fences of `waker`.
    count: AtomicUsize,
    senders: AtomicUsize,
    /// `None`: the worker is gone.
    queue: Mutex<Option<VecDeque<T>>>,
}

/// An end to put messages in.
#[derive(Debug)]
pub(super) struct Sender<T>(Arc<Shared<T>>);

/// The worker's end.
#[derive(Debug)]
pub(super) struct Mailbox<T>(Arc<Shared<T>>);

/// A new mailbox.
pub(super) fn mailbox<T>() -> (Sender<T>, Mailbox<T>) {
    let shared = Arc::new(Shared {
        count: AtomicUsize::new(0),
        senders: AtomicUsize::new(1),
        queue: Mutex::new(Some(VecDeque::new())),
    });
    (Sender(shared.clone()), Mailbox(shared))
}

impl<T> Sender<T> {
    /// Puts a message in; it comes back if the worker is gone.
    pub(super) fn send(&self, message: T) -> Result<(), T> {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = queue.as_mut() else { return Err(message) };
        queue.push_back(message);
        self.0.count.store(queue.len(), Ordering::Relaxed);
        Ok(())
    }
}

impl<T> Sender<T> {
    /// Puts all messages in, if that needs no wait; false if it does. If the worker is gone, they
    /// go too.
    pub(super) fn try_send_all(&self, messages: &mut VecDeque<T>) -> bool {
        let mut queue = match self.0.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        match queue.as_mut() {
            Some(queue) => {
                queue.append(messages);
                self.0.count.store(queue.len(), Ordering::Relaxed);
            }
            None => messages.clear(),
        }
        true
    }
}

impl<T> Sender<T> {
    /// Does something while nobody else has the lock.
    #[cfg(test)]
    pub(super) fn hold<R>(&self, work: impl FnOnce() -> R) -> R {
        let _held = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        work()
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.senders.fetch_sub(1, Ordering::Release);
    }
}

impl<T> Mailbox<T> {
    /// Takes the oldest message, if that needs no wait.
    #[inline]
    pub(super) fn take(&self) -> Found<T> {
        if self.0.count.load(Ordering::Relaxed) == 0 {
            return self.empty();
        }
        let mut queue = match self.0.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                spin_loop();
                return Found::Later;
            }
        };
        let Some(queue) = queue.as_mut() else { return Found::Closed };
        let message = queue.pop_front();
        self.0.count.store(queue.len(), Ordering::Relaxed);
        message.map_or(Found::None, Found::One)
    }

    /// Whether there are any.
    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.0.count.load(Ordering::Relaxed) > 0
    }

    /// Takes all messages, the oldest first, if that needs no wait. False: there are some, or will
    /// be in a moment.
    #[inline]
    pub(super) fn take_all(&self, into: &mut VecDeque<T>) -> bool {
        if self.0.count.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut queue = match self.0.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if let Some(queue) = queue.as_mut() {
            into.append(queue);
            self.0.count.store(0, Ordering::Relaxed);
        }
        true
    }

    /// Nothing was counted. Who has left has counted what it sent before.
    #[cold]
    fn empty(&self) -> Found<T> {
        let left = self.0.senders.load(Ordering::Acquire) == 0;
        match (left, self.0.count.load(Ordering::Relaxed)) {
            (_, 1..) => Found::Later,
            (true, 0) => Found::Closed,
            (false, 0) => Found::None,
        }
    }
}

impl<T> Drop for Mailbox<T> {
    /// What was not taken goes with it, outside the lock.
    fn drop(&mut self) {
        let left = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(left);
    }
}
