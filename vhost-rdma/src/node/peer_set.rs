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

use super::{Error, Peer, PeerSource, Registry};

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
    fn all(&self) -> impl Iterator<Item = &Peer> {
        self.0.values().flat_map(|set| set.values())
    }

    fn change(&mut self, network: &str) -> &mut Set {
        Arc::make_mut(self.0.entry(network.to_owned()).or_default())
    }

    pub(super) fn forget(&mut self, network: &str) {
        self.0.remove(network);
    }

    /// What outlives the daemon. What the file names it names again.
    pub(super) fn saved(&self) -> Vec<Peer> {
        self.all().filter(|peer| peer.source != PeerSource::File).cloned().collect()
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

impl Registry {
    /// All peers, or those of one network, whoever named them.
    pub fn peers<'a>(&'a self, network: Option<&'a str>) -> impl Iterator<Item = &'a Peer> {
        let of = move |name: &str| network.is_none_or(|wanted| wanted == name);
        self.peers.0.iter().filter(move |(name, _)| of(name)).flat_map(|(_, set)| set.values())
    }

    /// The peers that count: one for each prefix.
    #[must_use]
    pub fn effective_peers(&self, network: &str) -> Vec<Peer> {
        let mut counting: Vec<Peer> = Vec::new();
        for peer in self.peers.0.get(network).into_iter().flat_map(|set| set.values()) {
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
    /// The network does not exist, or has too many peers.
    pub fn add_peer(&mut self, peer: Peer) -> Result<(), Error> {
        self.network(&peer.network)?;
        let set = self.peers.change(&peer.network);
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
    /// There is no such network, or no such peer of this source.
    pub fn remove_peer(&mut self, peer: &Peer) -> Result<(), Error> {
        self.network(&peer.network)?;
        let set = self.peers.0.get(&peer.network);
        let there = |source| {
            set.is_some_and(|set| set.contains_key(&(peer.address, peer.prefix_len, source)))
        };
        if there(peer.source) {
            self.peers.change(&peer.network).remove(&key(peer));
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
    /// There is no such network, a prefix is there twice, or there are too many.
    pub(crate) fn replace_peers(
        &mut self,
        network: &str,
        change: PeerChange,
    ) -> Result<Replaced, Error> {
        self.network(network)?;
        let source = PeerSource::Controller;
        let mut add = Set::new();
        for peer in change.add {
            let peer = Peer { network: network.to_owned(), source, ..peer };
            if let Some(twice) = add.insert(key(&peer), peer) {
                return Err(Error::PeerTwice { peer: twice.to_string() });
            }
        }
        let empty = Arc::default();
        let held = self.peers.0.get(network).unwrap_or(&empty);
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
            let set = self.peers.change(network);
            gone.iter().for_each(|key| drop(set.remove(key)));
            set.extend(add);
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peer(text: &str, source: PeerSource) -> Peer {
        Peer::parse("default", text, None).expect(text).named_by(source)
    }

    fn whole(texts: &[&str]) -> PeerChange {
        let add = texts.iter().map(|text| peer(text, PeerSource::Hand)).collect();
        PeerChange { whole: true, add, remove: Vec::new() }
    }

    fn shown(registry: &Registry) -> Vec<String> {
        let of = |peer: &Peer| format!("{peer} {}", peer.source.name());
        registry.peers(None).map(of).collect()
    }

    #[test]
    fn a_peer_is_of_its_network_and_goes_with_it() {
        let mut registry = Registry::new("/run".into());
        let peer =
            |network: &str, through| Peer::parse(network, "10.0.0.5", through).expect("good");
        assert!(matches!(registry.add_peer(peer("blue", None)), Err(Error::NoSuchNetwork { .. })));
        registry.add_network("blue", None, false).expect("new");
        registry.add_peer(peer("blue", None)).expect("new");
        registry.add_peer(peer("blue", Some("192.0.2.1"))).expect("replaced");
        registry.add_peer(peer("default", None)).expect("of another network");
        assert_eq!(registry.peers(None).count(), 2);
        assert!(registry.peers(Some("blue")).all(|peer| peer.through.is_some()));
        let saved = registry.save();
        let mut restored = Registry::new("/run".into());
        restored.restore(saved).expect("its own state");
        assert_eq!(
            restored.peers(None).collect::<Vec<_>>(),
            registry.peers(None).collect::<Vec<_>>()
        );
        registry.remove_network("blue").expect("empty");
        assert_eq!(registry.peers(None).count(), 1);
        registry.remove_peer(&peer("default", None)).expect("there");
        assert!(matches!(
            registry.remove_peer(&peer("default", None)),
            Err(Error::NoSuchPeer { .. })
        ));
    }

    #[test]
    fn nobody_takes_anothers_entry_away() {
        let mut registry = Registry::new("/run".into());
        for source in [PeerSource::Hand, PeerSource::File] {
            registry.add_peer(peer("10.0.0.0/24", source)).expect("new");
        }
        registry.replace_peers("default", whole(&["10.0.0.0/24", "10.0.1.0/24"])).expect("good");
        assert_eq!(shown(&registry).len(), 4);
        registry.replace_peers("default", whole(&[])).expect("good");
        assert_eq!(shown(&registry), ["10.0.0.0/24 hand", "10.0.0.0/24 file"]);
        registry.replace_peers("default", whole(&["10.0.0.0/24"])).expect("good");
        let by_hand = peer("10.0.0.0/24", PeerSource::Hand);
        registry.remove_peer(&by_hand).expect("by hand");
        assert_eq!(shown(&registry), ["10.0.0.0/24 file", "10.0.0.0/24 controller"]);
        let refused = registry.remove_peer(&by_hand).unwrap_err().to_string();
        assert!(refused.contains("the configuration file names it"), "{refused}");
        let saved = registry.save().peers;
        assert_eq!(saved.len(), 1, "what the file names it names again: {saved:?}");
    }

    #[test]
    fn of_one_prefix_by_several_the_first_source_counts() {
        let mut registry = Registry::new("/run".into());
        let mut counts = |source| {
            registry.add_peer(peer("10.0.0.0/24", source)).expect("good");
            let all = registry.effective_peers("default");
            assert_eq!(all.len(), 1);
            all[0].source
        };
        assert_eq!(counts(PeerSource::Controller), PeerSource::Controller);
        assert_eq!(counts(PeerSource::File), PeerSource::File);
        assert_eq!(counts(PeerSource::Hand), PeerSource::Hand);
        assert_eq!(counts(PeerSource::Controller), PeerSource::Hand);
    }

    #[test]
    fn a_bad_change_changes_nothing() {
        let mut registry = Registry::new("/run".into());
        registry.replace_peers("default", whole(&["10.0.0.0/24"])).expect("good");
        let twice = registry.replace_peers("default", whole(&["10.1.0.0/24", "10.1.0.0/24"]));
        assert!(matches!(twice, Err(Error::PeerTwice { .. })));
        assert!(registry.replace_peers("none", whole(&[])).is_err());
        let many = (0..=PEERS_MAX).map(|n| {
            let n = u32::try_from(n).expect("few");
            Peer { address: IpAddr::from(n.to_be_bytes()), ..peer("0.0.0.0", PeerSource::Hand) }
        });
        let mut change = PeerChange { whole: true, add: many.collect(), remove: Vec::new() };
        let refused = registry.replace_peers("default", change.clone());
        assert!(matches!(refused, Err(Error::TooManyPeers { .. })));
        assert_eq!(shown(&registry), ["10.0.0.0/24 controller"]);
        change.add.pop();
        registry.replace_peers("default", change).expect("as many as there may be");
        let refused = registry.add_peer(peer("10.9.9.0/24", PeerSource::Hand));
        assert!(matches!(refused, Err(Error::TooManyPeers { .. })));
    }

    proptest! {
        /// Whatever is sent as changes is what a whole set would have brought.
        #[test]
        fn changes_bring_what_the_whole_set_does(
            steps in prop::collection::vec(
                prop::collection::vec((0..12u8, prop::option::of(0..3u8)), 0..8), 1..8),
        ) {
            let mut by_change = Registry::new("/run".into());
            let mut by_whole = by_change.clone();
            let mut wanted: BTreeMap<u8, u8> = BTreeMap::new();
            let entry = |net: u8, through: u8| {
                let through = IpAddr::from([192, 0, 2, through]);
                let peer = peer(&format!("10.{net}.0.0/16"), PeerSource::Hand);
                Peer { through: Some(through), ..peer }
            };
            for step in steps {
                let mut change = PeerChange::default();
                let step: BTreeMap<u8, Option<u8>> = step.into_iter().collect();
                for (net, through) in step {
                    if let Some(through) = through {
                        wanted.insert(net, through);
                        change.add.push(entry(net, through));
                    } else {
                        wanted.remove(&net);
                        change.remove.push(entry(net, 0));
                    }
                }
                by_change.replace_peers("default", change).unwrap();
                let add = wanted.iter().map(|(net, through)| entry(*net, *through)).collect();
                let whole = PeerChange { whole: true, add, remove: Vec::new() };
                by_whole.replace_peers("default", whole.clone()).unwrap();
                let again = by_whole.replace_peers("default", whole).unwrap();
                prop_assert_eq!(again, Replaced::default());
                prop_assert_eq!(by_change.save(), by_whole.save());
            }
        }
    }
}
