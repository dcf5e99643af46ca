//! What is under way behind the work request that is being executed.
//!
//! Where the owner of the memory has a part to do (docs/virtio-rdma-process.md §4), the answer
//! takes the time of several threads. So owners are asked for what comes next before its turn:
//! for some further pieces of the same message, and of the work requests behind it. In its turn
//! each piece is checked and given like any other, and completes in order; all that is known then
//! is that its owner was asked, or has answered. Nothing here decides how a work request ends.

use std::collections::VecDeque;

use virtio_rdma_abi::SqWqe;

use crate::link::Owner;
use crate::nic::receive::SgeList;

/// A work request that was taken out of the ring before its turn.
#[derive(Debug)]
pub(crate) struct Early {
    pub(crate) wqe: SqWqe,
    /// Free-running index.
    pub(crate) index: u32,
    pub(crate) sges: SgeList,
}

/// A piece whose owner was asked before its turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// Bytes.
    pub(crate) len: u32,
    pub(crate) owner: Owner,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    requests: VecDeque<Early>,
    /// In the order of their turns.
    pieces: VecDeque<Asked>,
}

impl Ahead {
    #[inline]
    pub(crate) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether nothing is under way.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.pieces.is_empty()
    }

    pub(crate) fn pieces(&self) -> impl ExactSizeIterator<Item = u32> {
        self.pieces.iter().map(|piece| piece.len)
    }

    /// What was taken early, in order.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Early> {
        self.requests.iter()
    }

    #[inline]
    pub(super) fn take(&mut self) -> Option<Early> {
        self.requests.pop_front()
    }

    pub(super) fn push(&mut self, early: Early) {
        self.requests.push_back(early);
    }

    pub(super) fn request(&self, at: usize) -> Option<&Early> {
        self.requests.get(at)
    }

    #[inline]
    pub(super) fn next_piece(&mut self) -> Option<Asked> {
        self.pieces.pop_front()
    }

    /// The next piece's owner was asked.
    pub(crate) fn asked(&mut self, len: u32, job: u64) {
        self.pieces.push_back(Asked { len, owner: Owner::Asked(job) });
    }

    /// An owner has answered.
    pub(crate) fn answered(&mut self, job: u64, answer: Owner) {
        if let Some(piece) = self.pieces.iter_mut().find(|piece| piece.owner == Owner::Asked(job)) {
            piece.owner = answer;
        }
    }

    /// The work request that is being executed did not go on as it should: whatever was asked is
    /// asked again in its turn.
    #[inline]
    pub(crate) fn forget_pieces(&mut self) {
        self.pieces.clear();
    }
}
