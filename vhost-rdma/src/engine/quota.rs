//! What the daemon keeps for one NIC because its guest asked for it, and the bound of each: nothing here grows by what a
//! guest writes, posts or sends, only by what a limit counts or a byte budget pays for.
//!
//! | kept | grows with | bound |
//! |---|---|---|
//! | contexts, PDs, regions, windows, CQs, SRQs, QPs, AHs | creations | the NIC's [`Limits`]; a window for each region |
//! | tables of page lists, and the regions of memory that they lie in | registrations, rings | 32 MiB and a 64th of the guest's memory (`memory::tables`) |
//! | the map behind keys for all of memory | – | one (`mr::WholeGuest`) |
//! | doorbell pages and their slots | DB_PAGE_ADD | four for each context, and as many as its queues fill |
//! | elements and inline bytes of the request under way | posts | those of one request of a QP, made with it |
//! | requesters to be woken by a receive | peers | one of a QP, 256 of an SRQ |
//! | events that wait for a buffer | errors | one of a kind and object |
//! | timers | waits | one of a QP, one of a CQ |
//! | numbers that rest | destroys | 4096 keys; two bytes of each slot of a table |
//! | GIDs, groups and their members | GID_SET, MCAST_ATTACH | 128, 128 and 64 of each |
//! | what an RNIC has under way | posts | as many as the host CQ has entries, in all QPs (`rnic::create`) |
//! | datagrams for QP 1 on an RNIC | peers | 128 |
//!
//! Counts are what drivers are told (QUERY_DEVICE) and may rely on, so they are what refuses; [`Limits::most_kept`] says what
//! they come to in bytes. Whoever adds something that is kept adds a line here, and its size below.

use super::contexts::SPARE_PAGES;
use super::cq::Cq;
use super::doorbell::{DoorbellPage, SLOT};
use super::limits::{
    GID_TABLE_LEN, Limits, MAX_INLINE, MAX_MCAST_GROUPS, MAX_MCAST_QPS, WINDOWS_PER_MR,
};
use super::mr::Keyed;
use super::nic::{Ah, Nic, Pd};
use super::qp::{Qp, Waiter};
use super::srq::{MAX_WAITERS, Srq};
use crate::memory::{Ring, Translation};
use crate::transport::Gid;

/// An entry of a table or map, which may be half empty, with its bookkeeping.
const fn entry(bytes: usize) -> usize {
    2 * (bytes + 16)
}

/// An event or a timer that waits: its place, and where it is found.
const WAITING: usize = entry(48);
/// A translation in one piece behind its counter, with its one region.
const MAP: usize = size_of::<Translation>() + 16 + 64;
/// A page of doorbells with all its slots.
const PAGE: usize = size_of::<DoorbellPage<Ring>>() + virtio_rdma_abi::db::SLOTS as usize * SLOT;

const CONTEXT: usize = entry(64) + SPARE_PAGES * (PAGE + MAP);
const PD: usize = entry(size_of::<Pd>());
const REGION: usize = entry(size_of::<Keyed>()) + MAP + 8;
const WINDOW: usize = entry(size_of::<Keyed>()) + 8;
const CQ: usize = entry(size_of::<Cq>()) + MAP + 3 * WAITING;
const SRQ: usize = entry(size_of::<Srq>()) + MAP + MAX_WAITERS * size_of::<Waiter>() + 2 * WAITING;
const QP: usize = size_of::<Qp>() + entry(16) + 2 * MAP + MAX_INLINE as usize + 7 * WAITING;
const AH: usize = entry(size_of::<Ah>());
const ALWAYS: usize = size_of::<Nic>()
    + GID_TABLE_LEN as usize * (size_of::<Gid>() + 16)
    + MAX_MCAST_GROUPS as usize * (entry(64) + MAX_MCAST_QPS as usize * 4)
    + 4096 * entry(8);

impl Limits {
    /// Bytes that the daemon keeps at most for a NIC with these limits, beside the tables of page lists.
    #[must_use]
    pub fn most_kept(&self) -> u64 {
        let queues = u64::from(self.max_qps) * 2 + u64::from(self.max_srqs);
        let pages = queues.div_ceil(virtio_rdma_abi::db::SLOTS.into());
        let objects = [
            (self.max_contexts, CONTEXT),
            (self.max_pds, PD),
            (self.max_mrs, REGION),
            (self.max_mrs.saturating_mul(WINDOWS_PER_MR), WINDOW),
            (self.max_cqs, CQ),
            (self.max_srqs, SRQ),
            (self.max_qps, QP),
            (self.max_ahs, AH),
            (1, ALWAYS),
        ];
        let sum = |all: u64, (count, each): &(u32, usize)| {
            all.saturating_add(u64::from(*count).saturating_mul(*each as u64))
        };
        objects.iter().fold(pages.saturating_mul((PAGE + MAP) as u64), sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limits that a NIC has if nobody says otherwise.
    const DEFAULT: Limits = Limits {
        max_contexts: 1024,
        max_pds: 4096,
        max_mrs: 65_536,
        max_mr_bytes: 1 << 40,
        max_cqs: 16_384,
        max_srqs: 4096,
        max_qps: 16_384,
        max_ahs: 65_536,
    };

    #[test]
    fn what_a_nic_can_make_the_daemon_keep_is_known() {
        let most = DEFAULT.most_kept();
        assert!((64 << 20..256 << 20).contains(&most), "{most} bytes: tell docs/THREAT_MODEL.md");
        // What grows is what there are many of.
        for (what, bytes, least) in [
            ("a region", REGION, 512),
            ("a QP", QP, 5120),
            ("an SRQ", SRQ, 4096),
            ("a CQ", CQ, 1024),
        ] {
            assert!(bytes <= least, "{what} is {bytes} bytes");
        }
    }
}
