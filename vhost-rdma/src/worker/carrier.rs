//! Carries parcels between the shards of this process.
//!
//! Each worker has a mailbox for what others send its shard, beside the one for jobs, and never
//! waits: if somebody else has the lock of a mailbox, parcels stay where they are for a round.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::mailbox::{Mailbox, Sender, mailbox};
use super::waker::Waker;
use crate::link::Parcel;
use crate::shard::Shard;

/// One worker's.
pub(super) struct Carrier {
    waker: Arc<Waker>,
    inbox: Mailbox<Parcel>,
    /// To all workers, this one too; none if it is alone.
    ways: Vec<(Sender<Parcel>, Arc<Waker>)>,
    /// Kept for its allocation.
    arrived: VecDeque<Parcel>,
}

impl Carrier {
    /// Those of `count` workers.
    pub(super) fn all(count: usize) -> io::Result<Vec<Self>> {
        let mut ways = Vec::with_capacity(count);
        let mut carriers = Vec::with_capacity(count);
        for _ in 0..count {
            let waker = Arc::new(Waker::new()?);
            let (sender, inbox) = mailbox();
            ways.push((sender, waker.clone()));
            carriers.push(Self { waker, inbox, ways: Vec::new(), arrived: VecDeque::new() });
        }
        if count > 1 {
            carriers.iter_mut().for_each(|carrier| carrier.ways.clone_from(&ways));
        }
        Ok(carriers)
    }

    /// Wakes this worker.
    pub(super) fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }

    /// Whether anything has come.
    pub(super) fn has_any(&self) -> bool {
        self.inbox.has_any()
    }

    /// Gives the shard what has come.
    #[inline]
    pub(super) fn bring(&mut self, shard: &mut Shard) {
        self.take(|parcel| shard.arrive(parcel));
    }

    /// Takes what has come, if that needs no wait.
    #[inline]
    pub(super) fn take(&mut self, arrives: impl FnMut(Parcel)) {
        if !self.inbox.has_any() {
            return;
        }
        self.inbox.take_all(&mut self.arrived);
        self.arrived.drain(..).for_each(arrives);
    }

    /// Takes from the shard what leaves it.
    #[inline]
    pub(super) fn take_away(&self, shard: &mut Shard) {
        self.send(shard.outgoing());
    }

    /// Sends what needs no wait.
    #[inline]
    pub(super) fn send(&self, leaves: &mut [VecDeque<Parcel>]) {
        for (parcels, (sender, waker)) in leaves.iter_mut().zip(&self.ways) {
            if !parcels.is_empty() && sender.try_send_all(parcels) {
                waker.wake();
            }
        }
    }
}
