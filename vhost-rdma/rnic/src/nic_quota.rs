//! Places in queues that all NICs of a daemon share, counted for each NIC: those of management
//! datagrams towards other daemons and towards the host's connection manager.
//!
//! Such a queue has no bound that NICs could take from each other, but one for each of them: a NIC
//! that has [`PER_NIC`] datagrams waiting in it loses the next, and every other finds the same room
//! as if it were alone, however many flood. So the memory of all queues is bounded by the number of
//! NICs and of the daemons that peer entries name, both the operator's.
//!
//! Who takes datagrams out does so in the order in which they came. So one waits for at most a
//! share of each NIC that has something to say to the same place: for the time of 64 datagrams,
//! milliseconds, for a neighbour that floods a daemon that takes them, where the connection manager
//! sends again after seconds. It is longer the more NICs flood.
//!
//! A place is a count up and down without a lock: workers take places, other threads give them
//! back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Datagrams of one NIC that may wait in one queue: as many connections as a guest may well open at
/// once to hosts that have yet to be reached, for a datagram that is lost holds its connection up
/// for seconds.
pub const PER_NIC: usize = 64;

/// What one NIC has waiting in one queue.
#[derive(Debug, Clone, Default)]
pub struct NicQuota(Arc<AtomicUsize>);

impl NicQuota {
    /// A place for one more, unless all are taken.
    pub fn take(&self) -> Option<QuotaPermit> {
        // Only the number counts: the queue itself orders what is in it.
        let more = |taken| (taken < PER_NIC).then_some(taken + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(QuotaPermit(self.clone()))
    }
}

/// A place in a queue, given back when this is dropped.
#[derive(Debug)]
pub struct QuotaPermit(NicQuota);

impl QuotaPermit {
    /// What tells NICs that have something waiting apart.
    pub fn whose(&self) -> usize {
        Arc::as_ptr(&self.0.0).addr()
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The shares of a NIC in the queues that workers fill.
#[derive(Debug, Default)]
pub struct NicQuotas {
    /// Towards other daemons.
    pub(super) daemons: NicQuota,
    /// Towards the host's connection manager.
    pub(super) host_cm: NicQuota,
}

/// The shares of all NICs in a queue that one thread fills from another queue.
#[derive(Debug, Default)]
pub struct ForwardQuota {
    /// A NIC's share there, which tells whose it is, and its share here.
    quotas: Vec<(NicQuota, NicQuota)>,
}

impl ForwardQuota {
    /// A place here for the NIC that has `permit` there, unless all of its places are taken.
    pub fn take(&mut self, permit: &QuotaPermit) -> Option<QuotaPermit> {
        // Those who have nothing here are forgotten, so this is never longer than NICs have
        // something waiting.
        self.quotas.retain(|(_, here)| here.0.load(Ordering::Relaxed) > 0);
        let theirs = |(there, _): &&(NicQuota, NicQuota)| Arc::ptr_eq(&there.0, &permit.0.0);
        if let Some((_, here)) = self.quotas.iter().find(theirs) {
            return here.take();
        }
        let here = NicQuota::default();
        let place = here.take();
        self.quotas.push((permit.0.clone(), here));
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_has_its_share_and_takes_nobody_elses() {
        let (one, other) = (NicQuota::default(), NicQuota::default());
        let mut held: Vec<QuotaPermit> =
            std::iter::from_fn(|| one.take()).take(PER_NIC + 9).collect();
        assert_eq!(held.len(), PER_NIC);
        assert!(other.take().is_some());
        held.pop();
        assert!(one.take().is_some(), "what is given back can be taken again");
    }

    #[test]
    fn shares_further_on_are_the_same_nics_and_are_forgotten_when_they_are_empty() {
        let (one, other) = (NicQuota::default(), NicQuota::default());
        let mut onward = ForwardQuota::default();
        let mut held = Vec::new();
        // As the thread between the two queues does it: the place in the first is given back, that
        // in the second is kept.
        while let Some(place) = one.take().and_then(|permit| onward.take(&permit)) {
            held.push(place);
            assert!(held.len() <= PER_NIC);
        }
        assert_eq!(held.len(), PER_NIC);
        let others = other.take().and_then(|permit| onward.take(&permit));
        assert!(others.is_some());
        assert_eq!(onward.quotas.len(), 2);
        drop(held);
        let again = one.take().and_then(|permit| onward.take(&permit));
        assert!(again.is_some());
        drop((others, again));
        assert!(other.take().and_then(|permit| onward.take(&permit)).is_some());
        assert_eq!(onward.quotas.len(), 1);
    }
}
