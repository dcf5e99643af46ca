//! Whom a NIC has most to do with: a few addresses, and what was charged on their account.
//!
//! Only where NICs are spread over shards, for whoever decides which belong together
//! (`dataplane/balance.rs`). A NIC may have thousands of peers, so this keeps the heaviest of them
//! in the way of Metwally, Agrawal and El Abbadi (Efficient Computation of Frequent and Top-k
//! Elements in Data Streams, ICDT 2005): who is new takes the place of the least, with its weight.
//! So a figure is never too small, and whoever has more than a quarter of the sum is found.

use super::Nanos;
use crate::link::Gid;

/// Peers that are kept.
const TALKS: usize = 4;

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Talks {
    peers: [(Gid, Nanos); TALKS],
    all: Nanos,
}

impl Talks {
    /// Counts work with a peer.
    #[inline]
    pub(super) fn note(&mut self, gid: &Gid, spent: Nanos) {
        self.all = self.all.saturating_add(spent);
        match self.peers.iter_mut().find(|(known, _)| known == gid) {
            Some((_, sum)) => *sum = sum.saturating_add(spent),
            None => self.note_new(gid, spent),
        }
    }

    fn note_new(&mut self, gid: &Gid, spent: Nanos) {
        if let Some(least) = self.peers.iter_mut().min_by_key(|(_, sum)| *sum) {
            *least = (*gid, least.1.saturating_add(spent));
        }
    }

    /// Whose `spent` was, of all that it was since the last time: each peer's part is as what was
    /// charged.
    pub(super) fn take(&mut self, spent: Nanos) -> impl Iterator<Item = (Gid, Nanos)> + use<> {
        let Self { peers, all } = std::mem::take(self);
        let part = move |sum| u128::from(spent) * u128::from(sum) / u128::from(all.max(1));
        let known = peers.into_iter().filter(|(_, sum)| *sum > 0);
        known.map(move |(gid, sum): (Gid, Nanos)| {
            (gid, u64::try_from(part(sum)).unwrap_or(spent).min(spent))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heaviest_are_found_among_many() {
        let mut talks = Talks::default();
        for n in (0..250u8).cycle().take(1000) {
            talks.note(&[n; 16], 1);
            talks.note(&[254; 16], 2);
            talks.note(&[255; 16], 3);
        }
        let found: Vec<_> = talks.take(6000).collect();
        let of = |who: u8| found.iter().find(|(gid, _)| *gid == [who; 16]).map(|(_, sum)| *sum);
        assert!(of(255) >= Some(3000) && of(254) >= Some(2000), "{found:?}");
        assert!(of(255) < Some(4000), "not much too large: {found:?}");
        assert_eq!(talks.take(6000).count(), 0, "it begins anew");
    }
}
