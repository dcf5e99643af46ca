//! Peers of networks: one at a time by hand, or the controller's set of a network at once.
//!
//! A set has a version: the run of whoever counts (epoch) and a number. So what comes late, or
//! twice, does no harm, and a change is taken only on the set that it is a change of. The version
//! is of this run of the daemon: after a restart the entries are there, and the next set must be a
//! whole one.
//!
//! However many entries a set has, it is one write of the state and one word to the device layer,
//! about the one network. Both are as long as the network's list, whose length is bounded
//! (`PEERS_MAX`); a set that says what is there already is neither.

use super::{Daemon, Error};
use crate::config;
use crate::node::{self, Backend, Peer, PeerChange, PeerSource, Replaced};

/// Which set it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Numbers of different epochs cannot be compared.
    pub epoch: u64,
    /// Later sets of an epoch have greater ones.
    pub generation: u64,
}

/// A set of peers that the controller gives a network, or a change of it.
#[derive(Debug, Clone)]
pub struct PeersUpdate {
    /// The network's name.
    pub network: String,
    /// None: it is taken whatever is there, and has to be whole.
    pub version: Option<Version>,
    /// The generation that it is a change of; none: it is the whole set.
    pub base: Option<u64>,
    /// What is to be.
    pub add: Vec<Peer>,
    /// What is to go, of a change.
    pub remove: Vec<Peer>,
}

impl PeersUpdate {
    /// Whether there is something to do after the set of version `held`.
    fn is_news(&self, held: Option<Version>) -> Result<bool, node::Error> {
        let unknown = || node::Error::UnknownBase { network: self.network.clone() };
        let Some(new) = self.version else {
            return if self.base.is_none() { Ok(true) } else { Err(unknown()) };
        };
        let held = held.filter(|held| held.epoch == new.epoch);
        match (self.base, held) {
            (_, Some(held)) if new.generation < held.generation => {
                let (held, given) = (held.generation, new.generation);
                Err(node::Error::OldPeers { network: self.network.clone(), held, given })
            }
            (_, Some(held)) if new.generation == held.generation => Ok(false),
            (Some(base), Some(held)) if base == held.generation => Ok(true),
            (Some(_), _) => Err(unknown()),
            (None, _) => Ok(true),
        }
    }
}

impl<B: Backend> Daemon<B> {
    /// Tells the device layer the peers of every network.
    pub(super) fn tell_all_peers(&self) {
        let names: Vec<String> = {
            let registry = &self.known().registry;
            registry.networks().map(|network| network.name.clone()).collect()
        };
        names.iter().for_each(|name| self.tell_peers(name));
    }

    /// Tells it those of one.
    pub(super) fn tell_peers(&self, network: &str) {
        let found = {
            let registry = &self.known().registry;
            let found = registry.network(network);
            found.map(|found| (found.vni, registry.effective_peers(network)))
        };
        if let Ok((vni, peers)) = found {
            self.backend.set_peers(vni, &peers);
        }
    }

    /// Lets NICs of a network reach a peer.
    ///
    /// # Errors
    /// The network does not exist, or the state cannot be kept.
    pub fn add_peer(&self, peer: Peer) -> Result<Peer, Error> {
        self.known().registry.network(&peer.network)?;
        self.change(&peer.network, || {
            self.commit::<_, Error>(|registry| Ok(registry.add_peer(peer.clone())?))?;
            self.tell_peers(&peer.network);
            Ok::<_, Error>(())
        })?;
        tracing::info!(network = peer.network, %peer, "peer added");
        Ok(peer)
    }

    /// Forbids it again; connections to it end.
    ///
    /// # Errors
    /// There is no such peer, or the state cannot be kept.
    pub fn remove_peer(&self, peer: &Peer) -> Result<(), Error> {
        self.known().registry.network(&peer.network)?;
        self.change(&peer.network, || {
            self.commit::<_, Error>(|registry| Ok(registry.remove_peer(peer)?))?;
            self.tell_peers(&peer.network);
            tracing::info!(network = peer.network, %peer, "peer removed");
            Ok(())
        })
    }

    /// Replaces the controller's set of a network, or changes it: the whole of it or nothing.
    /// Connections to what is no longer named end.
    ///
    /// # Errors
    /// There is no such network, the update is older than what is there or a change of something
    /// else, a prefix is there twice, or the state cannot be kept.
    pub fn replace_peers(&self, update: PeersUpdate) -> Result<Replaced, Error> {
        self.known().registry.network(&update.network)?;
        let network = update.network.clone();
        self.change(&network, || self.replace_peers_now(update))
    }

    fn replace_peers_now(&self, update: PeersUpdate) -> Result<Replaced, Error> {
        let held = self.known().versions.get(&update.network).copied();
        if !update.is_news(held)? {
            return Ok(Replaced::default());
        }
        let PeersUpdate { network, version, base, add, remove } = update;
        let change = PeerChange { whole: base.is_none(), add, remove };
        let mut registry = self.known().registry.clone();
        let done = registry.replace_peers(&network, change.clone())?;
        if done != Replaced::default() {
            self.commit::<_, Error>(|registry| Ok(registry.replace_peers(&network, change)?))?;
            self.tell_peers(&network);
            tracing::info!(network, added = done.added, removed = done.removed, "peers replaced");
        }
        let mut known = self.known();
        match version {
            Some(version) => known.versions.insert(network, version),
            None => known.versions.remove(&network),
        };
        Ok(done)
    }

    /// All peers, or those of one network.
    ///
    /// # Errors
    /// The network does not exist.
    pub fn peers(&self, network: Option<&str>) -> Result<Vec<Peer>, Error> {
        let registry = &self.known().registry;
        if let Some(network) = network {
            registry.network(network)?;
        }
        Ok(registry.peers(network).cloned().collect())
    }
}

/// A peer of the configuration file.
pub(super) fn of_file(network: &str, peer: &config::Peer) -> Result<Peer, Error> {
    let made = Peer::parse(network, &peer.address, peer.through.as_deref())?;
    let made = match &peer.daemon {
        Some(daemon) => made.served_by(daemon)?,
        None => made,
    };
    Ok(made.named_by(PeerSource::File))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::path::Path;
    use std::sync::Mutex;
    use std::time::Instant;

    use super::*;
    use crate::node::{AttachError, NicConfig, NicStatus, NullBackend};

    /// Remembers what it was told of peers.
    #[derive(Debug, Default)]
    struct Listening {
        inner: NullBackend,
        told: Mutex<Vec<(u32, Vec<Peer>)>>,
    }

    impl Backend for Listening {
        fn attach(&self, nic: &NicConfig) -> Result<(), AttachError> {
            self.inner.attach(nic)
        }

        fn detach(&self, name: &str) {
            self.inner.detach(name);
        }

        fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
            self.inner.update(nic)
        }

        fn status(&self, name: &str) -> NicStatus {
            self.inner.status(name)
        }

        fn set_peers(&self, vni: u32, peers: &[Peer]) {
            self.told.lock().unwrap().push((vni, peers.to_vec()));
        }
    }

    fn start(dir: &Path) -> Daemon<Listening> {
        let daemon =
            Daemon::start(dir, false, &config::File::default(), Listening::default()).unwrap();
        if daemon.known().registry.network("blue").is_err() {
            daemon.add_network("blue", Some(9)).unwrap();
        }
        daemon.backend.told.lock().unwrap().clear();
        daemon
    }

    fn told(daemon: &Daemon<Listening>) -> Vec<(u32, Vec<String>)> {
        let told = std::mem::take(&mut *daemon.backend.told.lock().unwrap());
        let texts = |peers: Vec<Peer>| peers.iter().map(ToString::to_string).collect();
        told.into_iter().map(|(vni, peers)| (vni, texts(peers))).collect()
    }

    fn peers(texts: &[&str]) -> Vec<Peer> {
        texts.iter().map(|text| Peer::parse("blue", text, None).unwrap()).collect()
    }

    fn update(generation: u64, base: Option<u64>, add: &[&str], remove: &[&str]) -> PeersUpdate {
        let version = Some(Version { epoch: 1, generation });
        let (add, remove) = (peers(add), peers(remove));
        PeersUpdate { network: "blue".to_owned(), version, base, add, remove }
    }

    fn listed(daemon: &Daemon<Listening>) -> Vec<String> {
        daemon.peers(Some("blue")).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_set_is_one_write_and_one_word_to_the_device_layer() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(dir.path());
        let written = || dir.path().join("state.json").metadata().unwrap().ino();
        let all: Vec<String> = (0..200).map(|n| format!("10.{n}.0.0/16")).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let before = written();
        daemon.replace_peers(update(1, None, &all, &[])).unwrap();
        let told_once = told(&daemon);
        assert_eq!((told_once.len(), told_once[0].0, told_once[0].1.len()), (1, 9, 200));
        assert_ne!(written(), before);
        let before = written();
        // The same again, under another name too, is nothing at all.
        daemon.replace_peers(update(1, None, &all, &[])).unwrap();
        daemon.replace_peers(update(2, None, &all, &[])).unwrap();
        daemon.replace_peers(update(3, Some(2), &all[..3], &["10.250.0.0/16"])).unwrap();
        assert_eq!((told(&daemon), written()), (vec![], before));
        // A word about one network is about no other.
        daemon.add_peer(Peer::parse("default", "10.0.0.0/8", None).unwrap()).unwrap();
        assert_eq!(told(&daemon), [(1, vec!["10.0.0.0/8".to_owned()])]);
    }

    #[test]
    fn a_change_is_taken_on_its_base_only_and_a_restart_wants_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(dir.path());
        let unknown = |done: Result<Replaced, Error>| {
            assert!(matches!(done, Err(Error::Node(node::Error::UnknownBase { .. }))), "{done:?}");
        };
        unknown(daemon.replace_peers(update(2, Some(1), &["10.1.0.0/16"], &[])));
        daemon.replace_peers(update(1, None, &["10.0.0.0/16"], &[])).unwrap();
        daemon.replace_peers(update(2, Some(1), &["10.1.0.0/16"], &["10.0.0.0/16"])).unwrap();
        assert_eq!(listed(&daemon), ["10.1.0.0/16"]);
        // Twice is once; what comes late is refused; what is missing in between is noticed.
        daemon.replace_peers(update(2, Some(1), &["10.1.0.0/16"], &["10.0.0.0/16"])).unwrap();
        let late = daemon.replace_peers(update(1, None, &["10.0.0.0/16"], &[]));
        assert!(matches!(late, Err(Error::Node(node::Error::OldPeers { .. }))));
        unknown(daemon.replace_peers(update(9, Some(8), &[], &["10.1.0.0/16"])));
        let no_version = PeersUpdate { version: None, ..update(0, Some(2), &[], &[]) };
        unknown(daemon.replace_peers(no_version));
        assert_eq!(listed(&daemon), ["10.1.0.0/16"]);
        drop(daemon);
        let daemon = start(dir.path());
        assert_eq!(listed(&daemon), ["10.1.0.0/16"]);
        unknown(daemon.replace_peers(update(3, Some(2), &[], &["10.1.0.0/16"])));
        daemon.replace_peers(update(1, None, &[], &[])).unwrap();
        assert_eq!(listed(&daemon).len(), 0);
        // A network that is made again is another.
        daemon.remove_network("blue").unwrap();
        daemon.add_network("blue", None).unwrap();
        unknown(daemon.replace_peers(update(2, Some(1), &["10.1.0.0/16"], &[])));
    }

    #[test]
    fn a_set_that_cannot_be_kept_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(dir.path());
        daemon.replace_peers(update(1, None, &["10.0.0.0/16"], &[])).unwrap();
        told(&daemon);
        // A directory in the place of the new file makes the write fail for root too.
        std::fs::create_dir(dir.path().join("state.json.new")).unwrap();
        let failed = daemon.replace_peers(update(2, Some(1), &["10.1.0.0/16"], &[]));
        assert!(matches!(failed, Err(Error::Store(_))));
        assert_eq!((listed(&daemon), told(&daemon)), (vec!["10.0.0.0/16".to_owned()], vec![]));
        std::fs::remove_dir(dir.path().join("state.json.new")).unwrap();
        daemon.replace_peers(update(2, Some(1), &["10.1.0.0/16"], &[])).unwrap();
        assert_eq!(listed(&daemon).len(), 2);
    }

    #[test]
    fn a_change_of_one_in_ten_thousand_takes_no_time_to_speak_of() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = start(dir.path());
        let block = |n: u32| {
            let [_, a, b, c] = (n << 6).to_be_bytes();
            format!("10.{a}.{b}.{c}/26")
        };
        let all: Vec<String> = (0..10_000).map(block).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        daemon.replace_peers(update(1, None, &all, &[])).unwrap();
        let begin = Instant::now();
        for n in 1..=10 {
            let gone = block(u32::try_from(n).unwrap());
            let new = block(10_000 + u32::try_from(n).unwrap());
            daemon.replace_peers(update(n + 1, Some(n), &[&new], &[&gone])).unwrap();
        }
        let each = begin.elapsed() / 10;
        println!("a change of one entry of 10000: {each:?}");
        assert_eq!((listed(&daemon).len(), told(&daemon).len()), (10_000, 11));
        assert!(each.as_millis() < 1000, "{each:?}");
    }
}
