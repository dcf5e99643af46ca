//! What the daemon keeps for one NIC because its guest asked for it: all of it is charged to the
//! NIC's account ([`Account`], `max_kept_bytes`), and a command that would make the daemon keep more
//! is refused with NOMEM. Nothing grows by what a guest writes, posts or sends.
//!
//! | kept | grows with | bound |
//! |---|---|---|
//! | contexts, PDs, regions, windows, CQs, SRQs, QPs, AHs | creations | the account, and the NIC's [`Limits`]; a window for each region |
//! | translations of page lists and rings, and their tables | registrations, rings | the account; tables also 32 MiB and a 64th of the guest's memory (`memory::tables`) |
//! | the map behind keys for all of memory | – | one (`mr::WholeGuest`) |
//! | doorbell pages and their slots | DB_PAGE_ADD | the account; four for each context, and as many as its queues fill |
//! | elements and inline bytes of the request under way | posts | those of one request of a QP, made with it |
//! | requesters to be woken by a receive | peers | one of a QP, 256 of an SRQ |
//! | events that wait for a buffer | errors | one of a kind and object |
//! | timers | waits | one of a QP, one of a CQ |
//! | numbers that rest | destroys | 4096 keys; two bytes of each slot of a table |
//! | GIDs, groups and their members | GID_SET, MCAST_ATTACH | 128, 128 and 64 of each |
//! | what an RNIC has under way | posts | as many as the host CQ has entries, in all QPs (`rnic::create`), charged with the QP |
//! | datagrams for QP 1 on an RNIC | peers | 128 |
//!
//! An object is charged in two parts. Its *place* is what it takes in tables, and in queues of
//! waiting events and deadlines: those never shrink, so places that were once needed stay charged
//! until the driver begins anew. What lies *beside* the tables is charged in the object, and given
//! back where that ends. Whoever adds something that is kept adds a line here, and its size below.

use super::command::Status;
use super::contexts::{PAGE, SPARE_PAGES};
use super::cq::Cq;
use super::doorbell::SLOT;
use super::limits::{
    GID_TABLE_LEN, Limits, MAX_INLINE, MAX_MCAST_GROUPS, MAX_MCAST_QPS, WINDOWS_PER_MR,
};
use super::mr::Keyed;
use super::nic::{Ah, Nic, Pd};
use super::qp::{Qp, SendQueue, Waiter};
use super::srq::{MAX_WAITERS, Srq};
use crate::memory::{Account, AddressSpace, Charge, Region, Translation};
use crate::transport::Gid;

/// An entry of a table or map, which may be half empty, with its bookkeeping.
pub(crate) const fn entry(bytes: usize) -> usize {
    2 * (bytes + 16)
}

/// An event or a timer that waits: its place, and where it is found.
pub(crate) const WAITING: usize = entry(48);

/// What has places.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Context,
    Page,
    Pd,
    Region,
    Window,
    Cq,
    Srq,
    Qp,
    Ah,
}

const KINDS: usize = 9;

/// Bytes of a place of each kind, and of what a NIC has in any case.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) each: [usize; KINDS],
    pub(crate) always: usize,
}

/// Those of every backing: addresses, groups, numbers that rest, and regions of memory twice, in
/// the space and in the map of all of it.
pub(crate) const ALWAYS: usize = GID_TABLE_LEN as usize * (size_of::<Gid>() + 16)
    + MAX_MCAST_GROUPS as usize * (entry(64) + MAX_MCAST_QPS as usize * 4)
    + 4096 * entry(8)
    + 512 * (2 * size_of::<Region>() + 256);
/// A context and the numbers of its pages.
pub(crate) const CONTEXT: usize = entry(64) + 64;
/// A doorbell page, without its slots.
pub(crate) const DOORBELLS: usize = entry(PAGE) + 3 * 8;

/// The engine's own.
pub(super) static ENGINE: Places = Places {
    each: [
        CONTEXT,
        DOORBELLS,
        entry(size_of::<Pd>()),
        entry(size_of::<Keyed>()) + 8 + entry(8),
        entry(size_of::<Keyed>()) + 8 + entry(8),
        entry(size_of::<Cq>()) + 3 * WAITING,
        entry(size_of::<Srq>()) + 2 * WAITING,
        entry(16) + entry(4) + 7 * WAITING,
        entry(size_of::<Ah>()),
    ],
    always: size_of::<Nic>() + ALWAYS,
};

/// What one NIC's objects take of its account. See the module.
#[derive(Debug)]
pub(crate) struct Kept {
    account: Account,
    places: &'static Places,
    /// Places that were ever needed at one time.
    most: [usize; KINDS],
    held: Charge,
}

impl Kept {
    /// A driver begins, whose memory this is.
    pub(crate) fn begin(space: &AddressSpace, places: &'static Places) -> Self {
        let account = space.account().clone();
        let held = account.hold(places.always as u64);
        Self { account, places, most: [0; KINDS], held }
    }

    /// Room for another object beside so many.
    pub(crate) fn place(&mut self, kind: Kind, present: usize) -> Result<(), Status> {
        let (Some(most), Some(&bytes)) =
            (self.most.get_mut(kind as usize), self.places.each.get(kind as usize))
        else {
            return Err(Status::NOMEM);
        };
        if present >= *most {
            if !self.held.grow(bytes as u64) {
                return Err(Status::NOMEM);
            }
            *most = present.saturating_add(1);
        }
        Ok(())
    }

    /// What an object takes beside its place, to be kept in it.
    pub(crate) fn beside(&self, bytes: usize) -> Result<Charge, Status> {
        self.account.charge(bytes as u64).ok_or(Status::NOMEM)
    }
}

/// What a QP takes beside its place: its own structure, and the inline bytes of a request.
pub(super) const fn queue_pair(max_inline: u32) -> usize {
    size_of::<Qp>() + size_of::<SendQueue>() + 48 + max_inline as usize
}

/// What an SRQ takes beside its place: who waits for it.
pub(super) const SHARED: usize = MAX_WAITERS * size_of::<Waiter>();

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
    use crate::node::NicLimits;

    #[test]
    fn a_nic_with_the_limits_that_nobody_changed_fits_into_its_account() {
        let limits = NicLimits::default();
        let engine = Limits {
            max_contexts: limits.max_contexts,
            max_pds: limits.max_pds,
            max_mrs: limits.max_mrs,
            max_mr_bytes: limits.max_mr_bytes,
            max_cqs: limits.max_cqs,
            max_srqs: limits.max_srqs,
            max_qps: limits.max_qps,
            max_ahs: limits.max_ahs,
        };
        let most = engine.most_kept();
        // And there is as much again for tables: a quarter of a gibibyte names 128 GiB in pages.
        assert!(most <= limits.max_kept_bytes / 2, "{most} bytes: tell docs/OPERATIONS.md");
        assert!(most >= 64 << 20, "{most} bytes");
        // What grows is what there are many of.
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
