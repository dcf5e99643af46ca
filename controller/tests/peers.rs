//! Lists of peers: whatever changes, and whenever an agent looks, what it is told adds up to what
//! the objects say.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use vhost_rdma_cluster_api::peers::Digest;
use vhost_rdma_cluster_api::{
    Addressing, Channel, Cidr, NodeNetwork, RdmaIPBlock, RdmaIPBlockSpec, RdmaNetwork,
    RdmaNetworkSpec, RdmaNic, RdmaNicSpec, RdmaNicStatus, RdmaNode, RdmaNodeSpec, RdmaNodeStatus,
    Rnic, RnicStatus, block_name,
};
use vhost_rdma_controller::core::{Board, Kind, News, Object, World};

const NODES: [&str; 3] = ["n1", "n2", "n3"];
const NETWORKS: [&str; 2] = ["blue", "red"];

/// The objects, and the copy of the cluster that hears of them.
#[derive(Default)]
struct Cluster {
    networks: BTreeMap<String, RdmaNetwork>,
    nodes: BTreeMap<String, RdmaNode>,
    blocks: BTreeMap<String, RdmaIPBlock>,
    /// Named NICs. The first and the last have one address, and one of them at a time has a pod.
    nics: BTreeMap<usize, RdmaNic>,
    world: World,
    board: Board,
    serial: u32,
}

type Entry = (String, String);
/// What an agent has of each network: generation, entries by range.
type Held = BTreeMap<String, (u64, BTreeMap<String, Entry>)>;

fn cidr(n: usize) -> Cidr {
    format!("10.0.0.{}/30", n * 4).parse().unwrap()
}

impl Cluster {
    /// The board takes changes over; who is woken.
    fn update(&mut self) -> BTreeSet<String> {
        let concerned = self.board.update(&mut self.world);
        let hosts = concerned.lists.iter().flat_map(|uid| self.board.hosts(uid)).cloned();
        hosts.chain(concerned.nodes).collect()
    }

    fn apply(&mut self, object: Object) {
        self.world.apply(object, Duration::ZERO);
    }

    fn network(&mut self, pick: usize) {
        let name = NETWORKS[pick % 2];
        if (pick / 2).is_multiple_of(5) {
            self.networks.remove(name);
            self.world.remove(Kind::Network, name, Duration::ZERO);
            return;
        }
        let flat = name == "red";
        let addressing = if flat { Addressing::Flat } else { Addressing::Translated };
        let spec = RdmaNetworkSpec {
            rnic: Some(Rnic { fabric: "f".to_owned(), addressing }),
            allow: (0..pick / 16 % 3).map(|n| cidr(60 + n)).collect(),
            ..RdmaNetworkSpec::default()
        };
        let mut network = RdmaNetwork::new(name, spec);
        self.serial += 1;
        let serial = self.serial;
        let uid = self.networks.get(name).and_then(|found| found.metadata.uid.clone());
        network.metadata.uid = Some(uid.unwrap_or_else(|| format!("{name}-{serial}")));
        self.networks.insert(name.to_owned(), network.clone());
        self.apply(Object::Network(network));
    }

    fn node(&mut self, pick: usize) {
        let name = NODES[pick % 3];
        let rest = pick / 3;
        if rest.is_multiple_of(7) {
            self.nodes.remove(name);
            self.world.remove(Kind::RdmaNode, name, Duration::ZERO);
            return;
        }
        let hosted = NETWORKS.iter().enumerate().filter(|(n, _)| rest >> n & 1 == 1);
        let networks = hosted
            .filter_map(|(_, network)| self.networks.get(*network))
            .map(|network| NodeNetwork {
                name: network.metadata.name.clone().unwrap(),
                uid: network.metadata.uid.clone().unwrap(),
                ..NodeNetwork::default()
            })
            .collect();
        let mut node = RdmaNode::new(name, RdmaNodeSpec { networks, ..RdmaNodeSpec::default() });
        let address = ["", "rubbish", "10.9.0.1", "10.9.0.2"][rest / 4 % 4];
        let endpoint = ["", "rubbish", "10.8.0.1:4000"][rest / 16 % 3];
        node.status = Some(RdmaNodeStatus {
            rnics: vec![RnicStatus {
                fabric: Some("f".to_owned()),
                host_address: (!address.is_empty()).then(|| address.to_owned()),
                ..RnicStatus::default()
            }],
            channel: (!endpoint.is_empty())
                .then(|| Channel { endpoint: endpoint.to_owned(), certificate: None }),
            ..RdmaNodeStatus::default()
        });
        self.nodes.insert(name.to_owned(), node.clone());
        self.apply(Object::RdmaNode(node));
    }

    fn block(&mut self, pick: usize) {
        let network = NETWORKS[pick % 2];
        let cidr = cidr(pick / 2 % 6);
        let name = block_name(network, &cidr);
        let Some(found) = self.networks.get(network) else { return };
        if self.blocks.remove(&name).is_some() {
            self.world.remove(Kind::Block, &name, Duration::ZERO);
            return;
        }
        let spec = RdmaIPBlockSpec {
            network: network.to_owned(),
            network_uid: found.metadata.uid.clone().unwrap(),
            cidr,
            node: NODES[pick / 12 % 3].to_owned(),
            releasing: false,
        };
        let block = RdmaIPBlock::new(&name, spec);
        self.blocks.insert(name, block.clone());
        self.apply(Object::Block(block));
    }

    /// A pod on some node gets a named NIC, or it is nobody's again.
    fn nic(&mut self, pick: usize) {
        let (which, network) = (pick % 3, NETWORKS[pick / 3 % 2]);
        let place = |which: usize, node: Option<usize>| {
            let spec = RdmaNicSpec {
                network: network.to_owned(),
                address: Some(format!("10.1.0.{}", which % 2)),
                ..RdmaNicSpec::default()
            };
            let mut nic = RdmaNic::new(&format!("nic-{which}"), spec);
            nic.metadata.namespace = Some("ns".to_owned());
            let node = node.map(|node| NODES[node].to_owned());
            nic.status = Some(RdmaNicStatus { node, ..RdmaNicStatus::default() });
            nic
        };
        let mut all = vec![(which, (pick / 6 % 4).checked_sub(1))];
        if which != 1 {
            all.insert(0, (2 - which, None));
        }
        for (which, node) in all {
            let nic = place(which, node);
            self.nics.insert(which, nic.clone());
            self.apply(Object::Nic(nic));
        }
    }

    /// What a node should know, worked out from the objects.
    fn wanted(&self, node: &str) -> BTreeMap<String, BTreeMap<String, Entry>> {
        let mut wanted = BTreeMap::new();
        let Some(own) = self.nodes.get(node) else { return wanted };
        for hosted in &own.spec.networks {
            let found = self.networks.get(&hosted.name);
            let Some(network) = found.filter(|n| n.metadata.uid.as_ref() == Some(&hosted.uid))
            else {
                continue;
            };
            let beyond = network.spec.allow.iter().map(|cidr| (cidr.to_string(), Entry::default()));
            let mut entries: BTreeMap<String, Entry> = beyond.collect();
            let of = self.blocks.values().filter(|b| b.spec.network_uid == hosted.uid);
            let blocks = of.map(|b| (b.spec.node.clone(), b.spec.cidr.to_string()));
            let of = self.nics.values().filter(|nic| nic.spec.network == hosted.name);
            let named = of.filter_map(|nic| {
                let address = nic.spec.address.as_ref()?;
                Some((nic.status.as_ref()?.node.clone()?, format!("{address}/32")))
            });
            for (at, cidr) in blocks.chain(named).filter(|(at, _)| at != node) {
                let status = self.nodes.get(&at).and_then(|n| n.status.clone());
                let Some(status) = status else { continue };
                let address = status.rnics[0].host_address.clone().unwrap_or_default();
                let flat = hosted.name == "red";
                if !flat && !address.starts_with("10.") {
                    continue;
                }
                let through = if flat { String::new() } else { address };
                let daemon = status.channel.map(|channel| channel.endpoint).unwrap_or_default();
                let daemon = if daemon.starts_with("10.") { daemon } else { String::new() };
                entries.insert(cidr, (through, daemon));
            }
            wanted.insert(hosted.uid.clone(), entries);
        }
        wanted
    }

    /// An agent looks.
    fn look(&self, node: &str, held: &mut Held) -> u32 {
        let mut messages = 0;
        let uids: Vec<String> = self.board.hosted(node).map(str::to_owned).collect();
        for uid in uids {
            let has = held.get(&uid).map(|(generation, _)| *generation);
            let Some(news) = self.board.news(node, &uid, has) else { continue };
            messages += 1;
            let News { generation, whole, add, remove, .. } = news;
            assert!(!whole || remove.is_empty());
            assert!(whole || has.is_some(), "a delta on nothing");
            let entry = held.entry(uid).or_default();
            if whole {
                entry.1.clear();
            }
            entry.0 = generation;
            for (cidr, found) in add {
                assert!(found.node.as_deref() != Some(node), "a node is told of its own block");
                let value = (found.through.clone(), found.daemon.clone());
                entry.1.insert(cidr.to_string(), value);
            }
            for cidr in remove {
                entry.1.remove(&cidr.to_string());
            }
        }
        self.digests(node, held);
        messages
    }

    /// The board knows a list by what it says, and takes no other for it.
    fn digests(&self, node: &str, held: &Held) {
        // A network that is gone has no list, whatever an agent still holds of it.
        for uid in self.board.hosted(node).filter(|uid| self.board.name(uid).is_some()) {
            let Some((generation, entries)) = held.get(uid) else { continue };
            let of = entries.iter().map(|(cidr, (through, daemon))| {
                Digest::of(&cidr.parse().unwrap(), through, daemon)
            });
            let digest = of.fold(Digest::default(), Digest::and);
            let same = |digest: Digest| self.board.same(node, uid, &digest.to_bytes());
            assert_eq!(same(digest), Some(*generation), "{node}, {uid}: {entries:?}");
            let more = Digest::of(&cidr(40), "", "");
            assert_eq!(same(digest.and(more)), None);
        }
    }

    fn check(&self, node: &str, held: &Held) -> Result<(), String> {
        for (uid, wanted) in self.wanted(node) {
            let found = held.get(&uid).map(|(_, entries)| entries.clone());
            if found.as_ref() != Some(&wanted) {
                return Err(format!("{node} has of {uid} {found:?}, wanted {wanted:?}"));
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn what_an_agent_is_told_adds_up(
        steps in proptest::collection::vec((0_u8..14, any::<u16>()), 0..200),
    ) {
        let mut cluster = Cluster::default();
        let mut agents: BTreeMap<&str, Held> = NODES.map(|node| (node, Held::new())).into();
        for (op, pick) in steps {
            let pick = usize::from(pick);
            match op {
                0 => cluster.network(pick),
                1..=3 => cluster.node(pick),
                4..=7 => cluster.block(pick),
                12 | 13 => cluster.nic(pick),
                // The hub takes changes over, one or many at a time.
                8 | 9 => drop(cluster.update()),
                // An agent that looks, however late.
                _ => {
                    let node = NODES[pick % 3];
                    cluster.update();
                    let held = agents.get_mut(node).unwrap();
                    cluster.look(node, held);
                    let right = cluster.check(node, held);
                    prop_assert!(right.is_ok(), "{}", right.unwrap_err());
                    prop_assert_eq!(cluster.look(node, held), 0, "told twice");
                }
            }
        }
    }

    #[test]
    fn whoever_is_concerned_is_woken(
        steps in proptest::collection::vec((0_u8..10, any::<u16>()), 0..120),
    ) {
        let mut cluster = Cluster::default();
        let mut agents: BTreeMap<&str, Held> = NODES.map(|node| (node, Held::new())).into();
        for (op, pick) in steps {
            let pick = usize::from(pick);
            match op {
                0 => cluster.network(pick),
                1..=3 => cluster.node(pick),
                8 | 9 => cluster.nic(pick),
                _ => cluster.block(pick),
            }
            let woken = cluster.update();
            for node in NODES {
                let held = agents.get_mut(node).unwrap();
                if woken.contains(node) {
                    cluster.look(node, held);
                }
                let right = cluster.check(node, held);
                prop_assert!(right.is_ok(), "{}", right.unwrap_err());
            }
        }
    }
}

#[test]
fn whoever_lags_too_far_is_told_everything_and_nobody_holds_memory_for_it() {
    let mut cluster = Cluster::default();
    cluster.network(1 + 2); // red, which is flat
    for n in 0..3 {
        cluster.node(n + 3 * 2);
    }
    cluster.update();
    let mut held = Held::new();
    cluster.look("n1", &mut held);
    let uid = cluster.networks["red"].metadata.uid.clone().unwrap();
    let before = held[&uid].0;
    // A block of n2 that comes and goes.
    for round in 1..=3000_u32 {
        cluster.block(1 + 12);
        let woken = cluster.update();
        assert!(woken.contains("n1") && woken.len() == 3, "{woken:?}");
        let news = cluster.board.news("n1", &uid, Some(before)).expect("news");
        assert!(news.add.len() + news.remove.len() <= 1, "a change is told as it is now");
        assert_eq!(news.whole, round > 2048, "round {round}");
    }
}
