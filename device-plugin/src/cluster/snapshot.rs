//! The last copy of the node's object on the disk, and what the agent owes for it.
//!
//! It is replaced as a whole (`sealed`), before what it says is done: so a
//! node that boots without a control plane offers what it offered, and a network whose VNI the
//! controller may only give to others when this node is rid of it is never forgotten. A damaged one
//! is not believed: the ledger knows what pods have, and the controller says the rest again.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use vhost_rdma_cluster_api::{Cidr, NodeBlock, RdmaNodeSpec};

use crate::sealed::Sealed;

const HEADER: &str = "vhost-rdma-agent-node 1\n";
/// Its name in the state directory.
const FILE: &str = "node";
/// A longer one was not written by us: an object of the API server has at most 1.5 MiB.
const SIZE_MAX: u64 = 8 << 20;

/// What the agent keeps of the controller.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Standing {
    /// The object's UID.
    pub uid: String,
    /// The generation of its specification.
    pub generation: i64,
    /// What the node shall offer.
    pub spec: RdmaNodeSpec,
    /// Networks that the daemon may have for it, by UID: also those that the specification no
    /// longer names, until they are gone from the daemon.
    pub hosted: BTreeMap<String, DaemonNetwork>,
    /// Blocks that this node has made its own (`RdmaNode`): also those that the specification no
    /// longer names, until their last address has come back.
    #[serde(default)]
    pub held: Vec<NodeBlock>,
}

/// A network that the daemon may have.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DaemonNetwork {
    /// Its name.
    pub name: String,
    /// Its virtual network identifier.
    pub vni: u32,
}

impl Standing {
    /// What holds when the controller says this: what is hosted already stays so.
    #[must_use]
    pub fn taking(&self, uid: &str, generation: i64, spec: &RdmaNodeSpec) -> Self {
        let mut hosted = self.hosted.clone();
        for network in &spec.networks {
            let new = DaemonNetwork { name: network.name.clone(), vni: network.vni };
            hosted.insert(network.uid.clone(), new);
        }
        // Another object of the name: nobody knows any more that the node held anything.
        let held = if self.uid == uid { self.held.clone() } else { Vec::new() };
        Self { uid: uid.to_owned(), generation, spec: spec.clone(), hosted, held }
    }

    /// Ranges out of which addresses of a network may be given.
    pub fn givable<'a>(&'a self, network: &'a str) -> impl Iterator<Item = &'a Cidr> {
        let named = |uid: &String| self.spec.blocks.iter().any(|block| block.uid == *uid);
        let held = self.held.iter().filter(move |block| block.network == network);
        held.filter(move |block| named(&block.uid)).map(|block| &block.cidr)
    }

    /// Blocks that the controller names and the node has not made its own yet.
    pub fn offered(&self) -> impl Iterator<Item = &NodeBlock> {
        let held = |uid: &String| self.held.iter().any(|block| block.uid == *uid);
        self.spec.blocks.iter().filter(move |block| !held(&block.uid))
    }

    /// Networks that are only hosted because they are not gone yet: UID and what they are.
    pub fn leaving(&self) -> impl Iterator<Item = (&String, &DaemonNetwork)> {
        self.hosted.iter().filter(|(uid, _)| !self.spec.networks.iter().any(|n| n.uid == **uid))
    }
}

/// The file.
#[derive(Debug)]
pub struct Snapshot {
    file: Sealed,
}

impl Snapshot {
    /// The snapshot in a state directory.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { file: Sealed::new(dir, FILE, HEADER, SIZE_MAX) }
    }

    /// What it says, if there is one.
    ///
    /// # Errors
    /// It cannot be read, or is damaged.
    pub fn read(&self) -> io::Result<Option<Standing>> {
        self.file.read()
    }

    /// Replaces it; when this returns it is on the disk.
    ///
    /// # Errors
    /// The disk is full or broken; the old one stays.
    pub fn write(&self, standing: &Standing) -> io::Result<()> {
        self.file.write(standing)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{FILE, Snapshot, Standing};

    fn standing(vni: u32) -> Standing {
        let networks = json!([{"name": "blue", "uid": "u", "vni": vni}]);
        let spec = serde_json::from_value(json!({ "networks": networks })).unwrap();
        Standing::default().taking("node-uid", 3, &spec)
    }

    #[test]
    fn what_was_written_is_read_and_the_last_one_counts() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = Snapshot::new(&dir.path().join("deep"));
        assert_eq!(snapshot.read().unwrap(), None);
        snapshot.write(&standing(7)).unwrap();
        snapshot.write(&standing(8)).unwrap();
        assert_eq!(snapshot.read().unwrap(), Some(standing(8)));
        assert_eq!(std::fs::read_dir(dir.path().join("deep")).unwrap().count(), 1);
    }

    #[test]
    fn no_byte_of_it_can_be_wrong_or_absent() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = Snapshot::new(dir.path());
        snapshot.write(&standing(7)).unwrap();
        let good = std::fs::read(dir.path().join(FILE)).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(dir.path().join(FILE), &bad).unwrap();
            assert!(snapshot.read().is_err(), "byte {at}");
            std::fs::write(dir.path().join(FILE), &good[..at]).unwrap();
            assert!(snapshot.read().is_err(), "{at} bytes");
        }
    }

    #[test]
    fn blocks_are_held_by_the_word_of_one_object() {
        let block = json!({"network": "blue", "cidr": "10.9.0.0/28", "uid": "b"});
        let spec = serde_json::from_value(json!({ "blocks": [block] })).unwrap();
        let mut first = Standing::default().taking("one", 1, &spec);
        assert_eq!((first.offered().count(), first.givable("blue").count()), (1, 0));
        first.held.clone_from(&first.spec.blocks);
        assert_eq!((first.offered().count(), first.givable("blue").count()), (0, 1));
        assert_eq!(first.givable("red").count(), 0);
        assert_eq!(first.taking("one", 2, &spec).givable("blue").count(), 1);
        // The object was deleted and made again: the API server is told and asked again.
        let again = first.taking("two", 1, &spec);
        assert_eq!((again.offered().count(), again.givable("blue").count()), (1, 0));
    }

    #[test]
    fn a_network_that_is_no_longer_named_is_owed_until_it_is_gone() {
        let first = standing(7);
        let then = first.taking("node-uid", 4, &vhost_rdma_cluster_api::RdmaNodeSpec::default());
        assert_eq!(first.leaving().count(), 0);
        let leaving: Vec<_> = then.leaving().map(|(uid, n)| (uid.as_str(), n.vni)).collect();
        assert_eq!(leaving, [("u", 7)]);
    }
}
