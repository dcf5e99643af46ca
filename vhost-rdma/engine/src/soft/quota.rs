//! What the engine keeps for each object of a guest, in bytes: see [`crate::nic::quota`].

use super::mr::Keyed;
use super::nic::{Ah, Pd, Qp, SoftNic, Srq};
use super::srq::MAX_WAITERS;
use super::waiter::Waiter;
use crate::memory::Translation;
use crate::nic::Limits;
use crate::nic::contexts::{DOORBELLS, SPARE_PAGES};
use crate::nic::cq::Cq;
use crate::nic::doorbell::SLOT;
use crate::nic::limits::{MAX_INLINE, WINDOWS_PER_MR};
use crate::nic::owned_numbers::LINKS;
use crate::nic::qp::{PIECES, SendQueue};
use crate::nic::quota::{ALWAYS, CONTEXT, Kind, Places, WAITING, entry};

/// The engine's own.
pub(super) static ENGINE: Places = Places {
    each: [
        CONTEXT,
        DOORBELLS,
        entry(size_of::<Pd>()),
        entry(size_of::<Keyed>()) + 8 + entry(8) + entry(LINKS),
        entry(size_of::<Keyed>()) + 8 + entry(8) + entry(LINKS),
        entry(size_of::<Cq>()) + 3 * WAITING,
        entry(size_of::<Srq>()) + 2 * WAITING,
        entry(16) + entry(4) + 7 * WAITING,
        entry(size_of::<Ah>()),
    ],
    always: size_of::<SoftNic>() + ALWAYS,
};

/// What a QP takes beside its place: its own structure, the inline bytes of a request, and what
/// pieces are under way.
pub(crate) const fn queue_pair(max_inline: u32) -> usize {
    size_of::<Qp>() + size_of::<SendQueue>() + 48 + PIECES + max_inline as usize
}

/// What an SRQ takes beside its place: who waits for it.
pub(crate) const SHARED: usize = MAX_WAITERS * size_of::<Waiter>();

impl Limits {
    /// Bytes that objects take at most with these limits, beside the tables of page lists. What
    /// the account allows may be less.
    #[must_use]
    pub fn most_kept(&self) -> u64 {
        /// A translation in one piece behind its counter, with its one region.
        const MAP: usize = size_of::<Translation>() + 128;
        let queues = u64::from(self.max_qps) * 2 + u64::from(self.max_srqs);
        let slots = queues.next_multiple_of(virtio_rdma_abi::db::SLOTS.into());
        let place = |kind: Kind| ENGINE.each.get(kind as usize).copied().unwrap_or_default();
        let spare = place(Kind::Page) + 64 * SLOT + MAP;
        let objects = [
            (self.max_contexts, place(Kind::Context) + SPARE_PAGES * spare),
            (self.max_pds, place(Kind::Pd)),
            (self.max_mrs, place(Kind::Region) + MAP),
            (self.max_mrs.saturating_mul(WINDOWS_PER_MR), place(Kind::Window)),
            (self.max_cqs, place(Kind::Cq) + MAP),
            (self.max_srqs, place(Kind::Srq) + SHARED + MAP),
            (self.max_qps, place(Kind::Qp) + queue_pair(MAX_INLINE) + 2 * MAP),
            (self.max_ahs, place(Kind::Ah)),
            (1, ENGINE.always),
        ];
        let sum = |all: u64, (count, each): &(u32, usize)| {
            all.saturating_add(u64::from(*count).saturating_mul(*each as u64))
        };
        objects.iter().fold(slots.saturating_mul(SLOT as u64), sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Account, AddressSpace};
    use crate::nic::Status;
    use crate::nic::quota::Kept;

    #[test]
    fn what_there_are_many_of_is_small() {
        for (what, bytes, least) in [
            ("a region", ENGINE.each[Kind::Region as usize], 512),
            ("a QP", ENGINE.each[Kind::Qp as usize] + queue_pair(MAX_INLINE), 5120),
            ("an SRQ", ENGINE.each[Kind::Srq as usize] + SHARED, 4096),
            ("a CQ", ENGINE.each[Kind::Cq as usize], 1024),
        ] {
            assert!(bytes <= least, "{what} is {bytes} bytes");
        }
    }

    #[test]
    fn places_stay_charged_and_what_is_beside_them_comes_back() {
        let account = Account::new(u64::MAX);
        let space = AddressSpace::of(account.clone());
        let mut kept = Kept::begin(&space, &ENGINE);
        let none = account.used();
        assert_eq!(none, ENGINE.always as u64);
        let place = ENGINE.each[Kind::Ah as usize] as u64;
        (0..10).for_each(|n| kept.place(Kind::Ah, n).unwrap());
        assert_eq!(account.used(), none + 10 * place);
        (0..10).for_each(|n| kept.place(Kind::Ah, n).unwrap());
        assert_eq!(account.used(), none + 10 * place, "the places were there");
        let beside = kept.beside(1000).unwrap();
        assert_eq!(account.used(), none + 10 * place + 1000);
        account.allow(account.used());
        assert_eq!(kept.place(Kind::Ah, 10), Err(Status::NOMEM));
        assert!(kept.place(Kind::Ah, 9).is_ok() && kept.beside(1).is_err());
        drop(beside);
        assert!(kept.place(Kind::Ah, 10).is_ok());
        drop(kept);
        assert_eq!(account.used(), 0);
    }
}
