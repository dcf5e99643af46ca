//! Where the addresses of each network are, and what has changed in that.
//!
//! A list has one entry for each block of addresses, so it grows with nodes and not with NICs, but
//! for named NICs with an address of their own, each of which has one while a pod has it. It
//! counts its changes, and remembers which block each of the last ones concerned, but not what it
//! was: whoever lags behind is told how those blocks are *now*. So nothing is queued for anybody,
//! however slow, and whoever lags too far is sent the whole list. What a change costs depends on
//! the blocks that it touches and on the nodes that are to hear of it.
//!
//! Addresses of hosts and endpoints come from agents: what is none is left out, so an agent that
//! lies can make its own node's blocks unreachable and nobody else's.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use vhost_rdma_cluster_api::peers::Digest;
use vhost_rdma_cluster_api::{Addressing, Cidr, NetworkBacking, RdmaNetwork, check};

use super::World;
use super::hosted::networks;

/// The changes that a list remembers.
const LOG: usize = 2048;

/// Where a block is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The node, which is not told of its own; nothing for a range beyond the network.
    pub node: Option<String>,
    /// The host's address on the fabric; empty if guests have addresses of the fabric.
    pub through: String,
    /// The endpoint of the daemon's channel; empty if it has none.
    pub daemon: String,
}

/// What a node is to be told of one network, as of one generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    /// The network.
    pub network: String,
    /// Its UID.
    pub uid: String,
    /// The generation that this leads to.
    pub generation: u64,
    /// Whether this is all; otherwise it is what changed.
    pub whole: bool,
    /// Blocks that are there.
    pub add: Vec<(Cidr, Arc<Entry>)>,
    /// Blocks that are not.
    pub remove: Vec<Cidr>,
}

/// Whom a change concerns.
#[derive(Debug, Default)]
pub struct Concerned {
    /// Lists, by the networks' UIDs: all who host them.
    pub lists: BTreeSet<String>,
    /// Nodes that host a network more.
    pub nodes: BTreeSet<String>,
}

#[derive(Debug, Default)]
struct List {
    name: String,
    generation: u64,
    /// Whoever holds an older generation than this is told everything.
    floor: u64,
    blocks: BTreeMap<Cidr, Arc<Entry>>,
    allow: BTreeMap<Cidr, Arc<Entry>>,
    log: VecDeque<(u64, Cidr)>,
    /// That of all entries, and of those of each node, which it is not told.
    digest: Digest,
    own: BTreeMap<String, Digest>,
}

impl List {
    fn changed(&mut self, generation: u64, cidr: Cidr) {
        self.generation = generation;
        self.log.push_back((generation, cidr));
        if self.log.len() > LOG
            && let Some((generation, _)) = self.log.pop_front()
        {
            self.floor = generation;
        }
    }

    /// What the list says of a block.
    fn entry(&self, cidr: &Cidr) -> Option<&Arc<Entry>> {
        self.blocks.get(cidr).or_else(|| self.allow.get(cidr))
    }

    /// What a node sees of a block.
    fn seen_by(&self, node: &str, cidr: &Cidr) -> Option<Arc<Entry>> {
        let found = self.entry(cidr)?;
        (found.node.as_deref() != Some(node)).then(|| Arc::clone(found))
    }

    /// The digest of what a node sees.
    fn digest_for(&self, node: &str) -> Digest {
        self.digest.without(self.own.get(node).copied().unwrap_or_default())
    }

    /// Makes a change that concerns these blocks, and has the digests follow it.
    fn change(&mut self, cidrs: &[Cidr], change: impl FnOnce(&mut Self)) {
        for cidr in cidrs {
            self.weigh(cidr, Digest::without);
        }
        change(self);
        for cidr in cidrs {
            self.weigh(cidr, Digest::and);
        }
    }

    fn weigh(&mut self, cidr: &Cidr, by: fn(Digest, Digest) -> Digest) {
        let Some(entry) = self.entry(cidr).map(Arc::clone) else { return };
        let weight = Digest::of(cidr, &entry.through, &entry.daemon);
        self.digest = by(self.digest, weight);
        if let Some(node) = &entry.node {
            let own = by(self.own.get(node).copied().unwrap_or_default(), weight);
            if own == Digest::default() {
                self.own.remove(node);
            } else {
                self.own.insert(node.clone(), own);
            }
        }
    }
}

/// The lists of all networks.
#[derive(Debug, Default)]
pub struct Board {
    generation: u64,
    lists: BTreeMap<String, List>,
    uids: BTreeMap<String, String>,
    hosted: BTreeMap<String, BTreeSet<String>>,
    hosts: BTreeMap<String, BTreeSet<String>>,
    places: BTreeMap<String, (String, Cidr)>,
}

impl Board {
    /// Takes over what has changed in the copy of the cluster; who is to hear of it.
    pub fn update(&mut self, world: &mut World) -> Concerned {
        let mut changed = world.take_peers();
        let mut concerned = Concerned::default();
        if changed.networks.is_empty() && changed.nodes.is_empty() && changed.blocks.is_empty() {
            return concerned;
        }
        self.generation += 1;
        for name in std::mem::take(&mut changed.networks) {
            concerned.lists.extend(self.set_network(world, &name));
            changed.blocks.extend(world.index.blocks_of_network(&name).map(str::to_owned));
            changed.blocks.extend(world.index.named_of(&name).map(str::to_owned));
        }
        for node in std::mem::take(&mut changed.nodes) {
            if self.set_node(world, &node) {
                concerned.nodes.insert(node.clone());
            }
            changed.blocks.extend(world.index.blocks_of(&node).map(str::to_owned));
            changed.blocks.extend(world.index.claimed_at(&node).map(str::to_owned));
        }
        // What is no longer where it was goes first: the address of a named NIC may be another's by
        // now.
        let places: Vec<_> = changed
            .blocks
            .into_iter()
            .map(|block| {
                let new = entry(world, &block).filter(|(uid, ..)| self.lists.contains_key(uid));
                (block, new)
            })
            .collect();
        for (block, new) in &places {
            let place = new.as_ref().map(|(uid, cidr, _)| (uid.clone(), *cidr));
            concerned.lists.extend(self.clear_block(block, place.as_ref()));
        }
        for (block, new) in places {
            let Some((uid, cidr, entry)) = new else { continue };
            concerned.lists.extend(self.set_block(block, uid, cidr, entry));
        }
        concerned
    }

    /// The nodes that host a network, by its UID.
    #[must_use]
    pub fn hosts(&self, uid: &str) -> &BTreeSet<String> {
        static NONE: BTreeSet<String> = BTreeSet::new();
        self.hosts.get(uid).unwrap_or(&NONE)
    }

    /// A network came, went, or has other ranges beyond it.
    fn set_network(&mut self, world: &World, name: &str) -> Option<String> {
        let found = world.networks.get(name).filter(|network| network.spec.rnic.is_some());
        let uid = found.and_then(|network| network.metadata.uid.clone());
        if let Some(old) = self.uids.get(name)
            && uid.as_ref() != Some(old)
        {
            self.lists.remove(old);
            self.uids.remove(name);
        }
        let (network, uid) = (found?, uid?);
        let generation = self.generation;
        self.uids.insert(name.to_owned(), uid.clone());
        let list = self.lists.entry(uid.clone()).or_insert_with(|| List {
            name: name.to_owned(),
            // A list of a former life of the controller has no generation in common with this one.
            generation,
            floor: generation,
            ..List::default()
        });
        let beyond = Arc::new(Entry { node: None, through: String::new(), daemon: String::new() });
        let wanted: BTreeMap<Cidr, Arc<Entry>> =
            network.spec.allow.iter().map(|cidr| (*cidr, Arc::clone(&beyond))).collect();
        let differing: Vec<Cidr> = wanted
            .keys()
            .filter(|cidr| !list.allow.contains_key(cidr))
            .chain(list.allow.keys().filter(|cidr| !wanted.contains_key(cidr)))
            .copied()
            .collect();
        list.change(&differing, |list| list.allow = wanted);
        for cidr in &differing {
            list.changed(generation, *cidr);
        }
        (!differing.is_empty()).then_some(uid)
    }

    /// Which networks a node hosts; whether it has one more.
    fn set_node(&mut self, world: &World, node: &str) -> bool {
        let new = networks(world.rdma_nodes.get(node));
        let old = self.hosted.remove(node).unwrap_or_default();
        for uid in old.difference(&new) {
            if let Some(hosts) = self.hosts.get_mut(uid) {
                hosts.remove(node);
                if hosts.is_empty() {
                    self.hosts.remove(uid);
                }
            }
        }
        let mut more = false;
        for uid in new.difference(&old) {
            self.hosts.entry(uid.clone()).or_default().insert(node.to_owned());
            more = true;
        }
        if !new.is_empty() {
            self.hosted.insert(node.to_owned(), new);
        }
        more
    }

    /// A block is in this place now and in no other; the list that this changes.
    fn clear_block(&mut self, block: &str, place: Option<&(String, Cidr)>) -> Option<String> {
        let old = self.places.remove(block).filter(|old| Some(old) != place);
        let (uid, cidr) = old?;
        let list = self.lists.get_mut(&uid)?;
        if !list.blocks.contains_key(&cidr) {
            return None;
        }
        list.change(&[cidr], |list| drop(list.blocks.remove(&cidr)));
        list.changed(self.generation, cidr);
        Some(uid)
    }

    /// How a block is reached now; the list that this changes.
    fn set_block(
        &mut self,
        block: String,
        uid: String,
        cidr: Cidr,
        entry: Entry,
    ) -> Option<String> {
        self.places.insert(block, (uid.clone(), cidr));
        let list = self.lists.get_mut(&uid)?;
        if list.blocks.get(&cidr).is_some_and(|found| **found == entry) {
            return None;
        }
        list.change(&[cidr], |list| drop(list.blocks.insert(cidr, Arc::new(entry))));
        list.changed(self.generation, cidr);
        Some(uid)
    }

    /// A network's name.
    #[must_use]
    pub fn name(&self, uid: &str) -> Option<&str> {
        self.lists.get(uid).map(|list| list.name.as_str())
    }

    /// UIDs of networks that a node hosts.
    pub fn hosted(&self, node: &str) -> impl Iterator<Item = &str> {
        self.hosted.get(node).into_iter().flatten().map(String::as_str)
    }

    /// The generation of a list, if a node that holds one of this digest holds it as it is now.
    #[must_use]
    pub fn same(&self, node: &str, uid: &str, digest: &[u8]) -> Option<u64> {
        let list = self.lists.get(uid)?;
        let hosted = self.hosted.get(node).is_some_and(|uids| uids.contains(uid));
        (hosted && list.digest_for(node).to_bytes() == digest).then_some(list.generation)
    }

    /// What a node is to be told of a network, if it holds this generation of it; nothing if it is
    /// told already, or does not host it.
    #[must_use]
    pub fn news(&self, node: &str, uid: &str, held: Option<u64>) -> Option<News> {
        let list = self.lists.get(uid)?;
        if held == Some(list.generation) || !self.hosted.get(node)?.contains(uid) {
            return None;
        }
        let held = held.filter(|held| (list.floor..list.generation).contains(held));
        let mut news = News {
            network: list.name.clone(),
            uid: uid.to_owned(),
            generation: list.generation,
            whole: held.is_none(),
            add: Vec::new(),
            remove: Vec::new(),
        };
        let concerned: BTreeSet<Cidr> = match held {
            Some(held) => {
                let since = list.log.iter().rev().take_while(|(generation, _)| *generation > held);
                since.map(|(_, cidr)| *cidr).collect()
            }
            None => list.blocks.keys().chain(list.allow.keys()).copied().collect(),
        };
        for cidr in concerned {
            match list.seen_by(node, &cidr) {
                Some(entry) => news.add.push((cidr, entry)),
                None if news.whole => {}
                None => news.remove.push(cidr),
            }
        }
        Some(news)
    }
}

/// Where a block is, or the address of a named NIC (`namespace/name`), if others can reach it: the
/// network's UID, the range, the entry.
fn entry(world: &World, name: &str) -> Option<(String, Cidr, Entry)> {
    if let Some((namespace, name)) = name.split_once('/') {
        let nic = world.nics_named.get(&(namespace.to_owned(), name.to_owned()))?;
        let network = world.networks.get(&nic.spec.network)?;
        let address: IpAddr = nic.spec.address.as_ref()?.parse().ok()?;
        // An agent claims only what is accepted; what has become of it since is nobody's address.
        check::nic(&nic.spec, &network.spec).is_empty().then_some(())?;
        let entry = at(world, network, nic.status.as_ref()?.node.as_ref()?)?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        return Some((network.metadata.uid.clone()?, Cidr::holding(address, bits)?, entry));
    }
    let block = world.blocks.get(name)?;
    let network = world.networks.get(&block.spec.network)?;
    if network.metadata.uid.as_ref() != Some(&block.spec.network_uid) {
        return None;
    }
    let entry = at(world, network, &block.spec.node)?;
    Some((block.spec.network_uid.clone(), block.spec.cidr, entry))
}

/// How a node is reached that has addresses of a network.
fn at(world: &World, network: &RdmaNetwork, name: &str) -> Option<Entry> {
    let NetworkBacking::Rnic(rnic) = network.spec.backing()? else { return None };
    let node = world.rdma_nodes.get(name)?;
    let status = node.status.as_ref()?;
    let through = match rnic.addressing {
        Addressing::Flat => String::new(),
        Addressing::Translated => {
            let on_fabric =
                status.rnics.iter().filter(|found| found.fabric.as_ref() == Some(&rnic.fabric));
            let address: IpAddr =
                on_fabric.filter_map(|found| found.host_address.as_ref()?.parse().ok()).next()?;
            address.to_string()
        }
    };
    let endpoint = status.channel.as_ref().map(|channel| channel.endpoint.parse::<SocketAddr>());
    let daemon = endpoint.and_then(Result::ok).map(|at| at.to_string()).unwrap_or_default();
    Some(Entry { node: Some(name.to_owned()), through, daemon })
}
