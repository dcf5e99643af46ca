//! The virtqueues of a NIC (docs/virtio-rdma.md §2).

use virtio_rdma_abi::vq;

/// The most queues that there may be: sets of them are 64-bit words.
const MAX_QUEUES: u16 = 64;

/// How many queues of each kind a NIC has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueLayout {
    comp_vectors: u16,
    kick_queues: u16,
}

/// What a queue is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueKind {
    Control,
    AsyncEvents,
    CompEvents,
    Kick,
}

impl QueueLayout {
    /// A layout with at least one queue of each kind and no more than can be served; `None` if that
    /// is not so.
    #[must_use]
    pub(crate) fn new(comp_vectors: u16, kick_queues: u16) -> Option<Self> {
        let total = u32::from(vq::COMP_BASE) + u32::from(comp_vectors) + u32::from(kick_queues);
        (comp_vectors > 0 && kick_queues > 0 && total <= u32::from(MAX_QUEUES))
            .then_some(Self { comp_vectors, kick_queues })
    }

    /// Completion vectors.
    #[must_use]
    pub(crate) const fn comp_vectors(self) -> u16 {
        self.comp_vectors
    }

    /// Kick queues.
    #[must_use]
    pub(crate) const fn kick_queues(self) -> u16 {
        self.kick_queues
    }

    /// Index of the first kick queue.
    #[must_use]
    pub(crate) const fn kick_base(self) -> u16 {
        vq::COMP_BASE + self.comp_vectors
    }

    /// All queues together: what a VMM must be told.
    #[must_use]
    pub(crate) const fn total(self) -> u16 {
        self.kick_base() + self.kick_queues
    }

    pub(crate) fn kind(self, index: u16) -> Option<QueueKind> {
        match index {
            vq::CONTROL => Some(QueueKind::Control),
            vq::EVENT => Some(QueueKind::AsyncEvents),
            _ if index < self.kick_base() => Some(QueueKind::CompEvents),
            _ if index < self.total() => Some(QueueKind::Kick),
            _ => None,
        }
    }
}

#[cfg(test)]
impl Default for QueueLayout {
    fn default() -> Self {
        Self { comp_vectors: 4, kick_queues: 2 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_queues_by_default() {
        let layout = QueueLayout::default();
        assert_eq!(layout.total(), 8);
        let kinds: Vec<_> = (0..9).map(|index| layout.kind(index)).collect();
        let (c, k) = (Some(QueueKind::CompEvents), Some(QueueKind::Kick));
        assert_eq!(
            kinds,
            [Some(QueueKind::Control), Some(QueueKind::AsyncEvents), c, c, c, c, k, k, None]
        );
    }

    #[test]
    fn never_more_than_a_word_has_bits() {
        assert!(QueueLayout::new(60, 2).is_some());
        assert_eq!(QueueLayout::new(60, 3), None);
        assert_eq!(QueueLayout::new(0, 1), None);
        assert_eq!(QueueLayout::new(1, 0), None);
        assert_eq!(QueueLayout::new(u16::MAX, u16::MAX), None);
    }
}
