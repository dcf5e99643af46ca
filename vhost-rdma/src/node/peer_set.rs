//! The peers of each network, by who named them.
//!
//! Three name peers: somebody by hand, the configuration file, and the cluster's controller. Each
//! has entries of its own, so that a set that is replaced leaves alone what another named. Where
//! two name the same prefix, the first in that order counts ([`PeerSource`]).
//!
//! A set is shared until it is changed: a copy of the registry costs nothing for networks whose
//! peers stay as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::{Error, Peer, PeerSource};

/// Entries of one network, at most: a bound for whoever sends sets, far above what a cluster needs.
pub const PEERS_MAX: usize = 1 << 16;

type Key = (IpAddr, u8, PeerSource);
type Set = BTreeMap<Key, Peer>;

const fn key(peer: &Peer) -> Key {
    (peer.address, peer.prefix_len, peer.source)
}

/// The peers of all networks that have some.
#[derive(Debug, Clone, Default)]
pub(super) struct PeerSets(BTreeMap<String, Arc<Set>>);

impl PeerSets {
    fn change(&mut self, network: &str) -> &mut Set {
        Arc::make_mut(self.0.entry(network.to_owned()).or_default())
    }

    pub(super) fn forget(&mut self, network: &str) {
        self.0.remove(network);
    }

    /// What outlives the daemon. What the file names it names again.
    pub(super) fn saved(&self) -> Vec<Peer> {
        self.of(None).filter(|peer| peer.source != PeerSource::File).cloned().collect()
    }
}

/// A change of the set that the controller gives a network.
#[derive(Debug, Clone, Default)]
pub struct PeerChange {
    /// Whether `add` is the whole set.
    pub whole: bool,
    /// Peers that are new, or otherwise than before; of this network all.
    pub add: Vec<Peer>,
    /// Prefixes that go. One that is not there is gone already.
    pub remove: Vec<Peer>,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replaced {
    /// Entries that are new or changed.
    pub added: usize,
    /// Entries that are gone.
    pub removed: usize,
}

impl PeerSets {
    /// All peers, or those of one network, whoever named them.
    pub(super) fn of<'a>(&'a self, network: Option<&'a str>) -> impl Iterator<Item = &'a Peer> {
        let of = move |name: &str| network.is_none_or(|wanted| wanted == name);
        self.0.iter().filter(move |(name, _)| of(name)).flat_map(|(_, set)| set.values())
    }

    /// The peers that count: one for each prefix.
    pub(super) fn effective(&self, network: &str) -> Vec<Peer> {
        let mut counting: Vec<Peer> = Vec::new();
        for peer in self.0.get(network).into_iter().flat_map(|set| set.values()) {
            let same =
                |last: &Peer| (last.address, last.prefix_len) == (peer.address, peer.prefix_len);
            if !counting.last().is_some_and(same) {
                counting.push(peer.clone());
            }
        }
        counting
    }

    /// Lets the NICs of a network reach a peer; what the same source said of that prefix before is
    /// replaced.
    ///
    /// # Errors
    /// The network has too many peers.
    pub(super) fn add(&mut self, peer: Peer) -> Result<(), Error> {
        let set = self.change(&peer.network);
        if set.len() >= PEERS_MAX && !set.contains_key(&key(&peer)) {
            let (network, count) = (peer.network, set.len() + 1);
            return Err(Error::TooManyPeers { network, count, most: PEERS_MAX });
        }
        set.insert(key(&peer), peer);
        Ok(())
    }

    /// Forbids it again.
    ///
    /// # Errors
    /// There is no such peer of this source.
    pub(super) fn remove(&mut self, peer: &Peer) -> Result<(), Error> {
        let set = self.0.get(&peer.network);
        let there = |source| {
            set.is_some_and(|set| set.contains_key(&(peer.address, peer.prefix_len, source)))
        };
        if there(peer.source) {
            self.change(&peer.network).remove(&key(peer));
            return Ok(());
        }
        let (shown, network) = (peer.to_string(), peer.network.clone());
        let by = if there(PeerSource::File) {
            "the configuration file names it"
        } else if there(PeerSource::Controller) {
            "the cluster's controller gave it"
        } else {
            return Err(Error::NoSuchPeer { peer: shown, network });
        };
        Err(Error::PeerOfAnother { peer: shown, network, by })
    }

    /// Changes the controller's set of a network as a whole, or not at all.
    ///
    /// # Errors
    /// A prefix is there twice, or there are too many.
    pub(super) fn replace(&mut self, network: &str, change: PeerChange) -> Result<Replaced, Error> {
        let source = PeerSource::Controller;
        let mut add = Set::new();
        for peer in change.add {
            let peer = Peer { network: network.to_owned(), source, ..peer };
            if let Some(twice) = add.insert(key(&peer), peer) {
                return Err(Error::PeerTwice { peer: twice.to_string() });
            }
        }
        let empty = Arc::default();
        let held = self.0.get(network).unwrap_or(&empty);
        let ours = |key: &&Key| key.2 == source;
        let gone: BTreeSet<Key> = if change.whole {
            held.keys().filter(ours).filter(|key| !add.contains_key(key)).copied().collect()
        } else {
            let named = change.remove.iter().map(|peer| (peer.address, peer.prefix_len, source));
            named.filter(|key| held.contains_key(key) && !add.contains_key(key)).collect()
        };
        add.retain(|key, peer| held.get(key) != Some(peer));
        let new = add.keys().filter(|key| !held.contains_key(key)).count();
        let count = held.len() - gone.len() + new;
        if count > PEERS_MAX {
            let network = network.to_owned();
            return Err(Error::TooManyPeers { network, count, most: PEERS_MAX });
        }
        let done = Replaced { added: add.len(), removed: gone.len() };
        if done != Replaced::default() {
            let set = self.change(network);
            gone.iter().for_each(|key| drop(set.remove(key)));
            set.extend(add);
        }
        Ok(done)
    }
}
