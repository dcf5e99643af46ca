//! Management datagrams on their way between QPs 1: what is carried, and where each NIC takes in its own.
//!
//! libibverbs gives QP 1 to nobody, so the daemon carries these datagrams itself: to a NIC of its own by putting them into that
//! NIC's [`Inbox`], from wherever they come. An inbox is bounded and what finds it full is dropped, as on a wire: the
//! connection manager sends again (IBTA 12.9.8).

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::transport::{self, Gid};

/// Length of every datagram of QP 1 (IBTA 13.4.2).
pub const MAD_LEN: usize = transport::MAD_LEN as usize;
/// Datagrams that wait for one NIC.
pub(super) const ROOM: usize = 128;

/// A datagram from one QP 1 to another, with addresses as the guests name them.
#[derive(Clone, PartialEq, Eq)]
pub struct Mad {
    /// Who sent it.
    pub source: Gid,
    /// To whom.
    pub dest: Gid,
    /// Traffic class of the packet that it stands for.
    pub traffic_class: u8,
    /// Service level.
    pub sl: u8,
    /// What it says.
    pub bytes: [u8; MAD_LEN],
}

impl fmt::Debug for Mad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mad")
            .field("source", &std::net::IpAddr::from(self.source).to_canonical())
            .field("dest", &std::net::IpAddr::from(self.dest).to_canonical())
            .finish_non_exhaustive()
    }
}

/// Lets a worker look at its NICs again.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Datagrams that wait for one NIC; any thread puts them in, the NIC's worker takes them out.
pub struct Inbox {
    waiting: Mutex<VecDeque<Mad>>,
    /// How many those are: looked at in every round of a worker.
    len: AtomicUsize,
    wake: Wake,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").finish_non_exhaustive()
    }
}

impl Inbox {
    /// An empty one, whose reader `wake` wakes.
    #[must_use]
    pub fn new(wake: Wake) -> Self {
        Self { waiting: Mutex::default(), len: AtomicUsize::new(0), wake }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Mad>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a datagram in; false if it found no room.
    pub fn put(&self, mad: Mad) -> bool {
        let mut waiting = self.waiting();
        if waiting.len() >= ROOM {
            return false;
        }
        waiting.push_back(mad);
        self.len.store(waiting.len(), Ordering::Release);
        drop(waiting);
        (self.wake)();
        true
    }

    /// The oldest.
    #[must_use]
    pub fn take(&self) -> Option<Mad> {
        if self.is_empty() {
            return None;
        }
        let mut waiting = self.waiting();
        let oldest = waiting.pop_front();
        self.len.store(waiting.len(), Ordering::Release);
        oldest
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Forgets all.
    pub fn clear(&self) {
        let mut waiting = self.waiting();
        waiting.clear();
        self.len.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mad(first: u8) -> Mad {
        let mut bytes = [0; MAD_LEN];
        bytes[0] = first;
        Mad { source: [1; 16], dest: [2; 16], traffic_class: 0, sl: 0, bytes }
    }

    #[test]
    fn an_inbox_is_bounded_and_wakes_its_reader_for_what_it_took() {
        let woken = Arc::new(AtomicUsize::new(0));
        let count = woken.clone();
        let inbox = Inbox::new(Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let taken = (0..=255).filter(|&n| inbox.put(mad(n))).count();
        assert_eq!((taken, woken.load(Ordering::Relaxed)), (ROOM, ROOM));
        assert_eq!(inbox.take().map(|mad| mad.bytes[0]), Some(0), "the oldest first");
        assert!(inbox.put(mad(9)));
        inbox.clear();
        assert!(inbox.is_empty() && inbox.take().is_none());
    }
}
