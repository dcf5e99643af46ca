//! Whom NICs of a network may reach beyond this host's own NICs, and by which address of which
//! host.
//!
//! The entry with the longest prefix decides. Entries are found by prefix: one look for each length
//! that occurs, so that a connection costs the same in a table of ten entries as in one of ten
//! thousand. A table never changes; a new one takes its place, and who reads the old one goes on.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vhost_rdma_engine::link::Gid;

/// The GID of an address: IPv4 is mapped to IPv6 (RoCE v2, IBTA annex A17).
pub(super) fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The daemon that serves a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// As `HOST:PORT`.
    pub daemon: Arc<str>,
    /// The host of that: whom its certificate must be for.
    pub host: Arc<str>,
    /// The network's name, which both daemons know it by.
    pub network: Arc<str>,
}

/// Whom NICs of a network may reach beyond this host's own NICs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The address as guests name it: one, or the first of `prefix_len` bits' worth.
    pub address: IpAddr,
    /// Bits of the address that count.
    pub prefix_len: u8,
    /// The host that has it, where that is another address.
    pub through: Option<IpAddr>,
    /// The daemon that serves it, if one of ours does.
    pub remote: Option<Remote>,
}

impl Peer {
    /// The host's address of `gid`, which this entry names.
    pub(super) fn host_of(&self, gid: &Gid) -> Gid {
        self.through.map_or(*gid, gid_of)
    }
}

/// A prefix: whether it is IPv6's, its length in bits, and the address without the other bits.
type Prefix = (bool, u8, u128);

/// The prefix of that length of an address.
fn prefix(address: IpAddr, len: u8) -> Prefix {
    let (v6, bits, all) = match address {
        IpAddr::V4(v4) => (false, u128::from(u32::from(v4)), 32),
        IpAddr::V6(v6) => (true, u128::from(v6), 128),
    };
    // A length of none leaves nothing.
    let cut = u32::from(all - len.min(all));
    (v6, len, bits.checked_shr(cut).unwrap_or(0))
}

/// The peers of one network.
#[derive(Debug, Clone, Default)]
pub(super) struct PeerTable {
    entries: Arc<BTreeMap<Prefix, Peer>>,
    /// The lengths that occur, the longest first.
    lengths: Arc<[u8]>,
}

impl PeerTable {
    /// Of two entries with the same prefix the later one counts.
    pub(super) fn new(peers: Vec<Peer>) -> Self {
        let mut lengths: Vec<u8> = peers.iter().map(|peer| peer.prefix_len).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths.reverse();
        let entry = |peer: Peer| (prefix(peer.address, peer.prefix_len), peer);
        let entries = peers.into_iter().map(entry).collect();
        Self { entries: Arc::new(entries), lengths: lengths.into() }
    }

    /// The entries that name an address, the longest prefix first.
    pub(super) fn naming(&self, gid: &Gid) -> impl Iterator<Item = &Peer> {
        let address = IpAddr::from(*gid).to_canonical();
        self.lengths.iter().filter_map(move |len| self.entries.get(&prefix(address, *len)))
    }

    /// The entry that decides for an address.
    pub(super) fn best(&self, gid: &Gid) -> Option<&Peer> {
        self.naming(gid).next()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peer(address: IpAddr, prefix_len: u8, through: Option<IpAddr>) -> Peer {
        Peer { address, prefix_len, through, remote: None }
    }

    /// What a prefix means, said in the other way.
    fn names(peer: &Peer, gid: &Gid) -> bool {
        let len = u32::from(peer.prefix_len);
        match (peer.address, IpAddr::from(*gid).to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u32::from(a) ^ u32::from(b)).leading_zeros() >= len,
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                (u128::from(a) ^ u128::from(b)).leading_zeros() >= len
            }
            _ => false,
        }
    }

    /// Addresses that have much in common.
    fn address() -> impl Strategy<Value = IpAddr> {
        let v4 = (0..4u8, 0..4u8).prop_map(|(a, b)| IpAddr::from([10, a, 0, b]));
        let v6 = (0..4u16, 0..4u16).prop_map(|(a, b)| IpAddr::from([0xfd00, a, 0, 0, 0, 0, 0, b]));
        prop_oneof![v4, v6]
    }

    proptest! {
        #[test]
        fn the_longest_prefix_decides_as_if_all_entries_were_looked_at(
            entries in prop::collection::vec((address(), 0..=128u8), 0..12),
            wanted in address(),
        ) {
            let most = |address: IpAddr| if address.is_ipv4() { 32 } else { 128 };
            let peers: Vec<Peer> = (0u8..)
                .zip(entries)
                .map(|(n, (at, len))| peer(at, len.min(most(at)), Some(IpAddr::from([n; 4]))))
                .collect();
            let gid = gid_of(wanted);
            let named = peers.iter().filter(|peer| names(peer, &gid));
            let right = named.max_by_key(|peer| peer.prefix_len).cloned();
            let table = PeerTable::new(peers);
            prop_assert_eq!(table.best(&gid).cloned(), right);
        }
    }
}
