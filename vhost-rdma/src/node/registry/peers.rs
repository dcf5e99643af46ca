//! Peers of networks that there are: [`PeerSets`](crate::node::peer_set::PeerSets) behind the
//! registry's rule about names.

use super::Registry;
use crate::node::{Error, Peer, PeerChange, Replaced};

impl Registry {
    /// All peers, or those of one network, whoever named them.
    pub fn peers<'a>(&'a self, network: Option<&'a str>) -> impl Iterator<Item = &'a Peer> {
        self.peers.of(network)
    }

    /// The peers that count: one for each prefix.
    #[must_use]
    pub fn effective_peers(&self, network: &str) -> Vec<Peer> {
        self.peers.effective(network)
    }

    /// Lets the NICs of a network reach a peer; what the same source said of that prefix before is
    /// replaced.
    ///
    /// # Errors
    /// The network does not exist, or has too many peers.
    pub fn add_peer(&mut self, peer: Peer) -> Result<(), Error> {
        self.network(&peer.network)?;
        self.peers.add(peer)
    }

    /// Forbids it again.
    ///
    /// # Errors
    /// There is no such network, or no such peer of this source.
    pub fn remove_peer(&mut self, peer: &Peer) -> Result<(), Error> {
        self.network(&peer.network)?;
        self.peers.remove(peer)
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
        self.peers.replace(network, change)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::node::{PEERS_MAX, PeerSource};

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
