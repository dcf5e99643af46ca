//! A node's agent, as far as the controller can tell: it follows the protocol of `RdmaNode`.

use std::collections::BTreeMap;

use vhost_rdma_cluster_api::{
    Cidr, Condition, NicStatus, NodeNetworkStatus, RdmaNode, RdmaNodeSpec, RdmaNodeStatus,
};
use vhost_rdma_controller::core::{Kind, Object};

use crate::api::{Api, Outcome};

#[derive(Debug, Clone, Default)]
pub(crate) struct Agent {
    name: String,
    /// It has told that it began anew, so that nothing of a former life counts.
    began: bool,
    /// The node's object as the agent saw it last; may be old.
    seen: Option<RdmaNode>,
    /// Blocks that it told of: UID, and the range once it has seen that the block is its own.
    held: BTreeMap<String, Option<Cidr>>,
    nics: BTreeMap<String, NicStatus>,
    networks: BTreeMap<String, NodeNetworkStatus>,
    serial: u32,
}

impl Agent {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Ranges that it gives addresses out of, by network.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = (&str, Cidr)> {
        self.held.iter().filter_map(|(uid, cidr)| Some((uid.as_str(), (*cidr)?)))
    }

    pub(crate) fn nics(&self) -> impl Iterator<Item = &NicStatus> {
        self.nics.values()
    }

    /// Looks at its object.
    pub(crate) fn look(&mut self, api: &Api) {
        self.seen = api.rdma_node(&self.name).cloned();
        if self.seen.is_none() {
            self.held.clear();
            self.began = false;
        }
    }

    fn spec(&self) -> RdmaNodeSpec {
        self.seen.as_ref().map(|node| node.spec.clone()).unwrap_or_default()
    }

    fn status(&self) -> RdmaNodeStatus {
        RdmaNodeStatus {
            observed_generation: self.seen.as_ref().and_then(|node| node.metadata.generation),
            granted: u32::try_from(self.nics.len()).unwrap(),
            networks: self.networks.values().cloned().collect(),
            blocks: self.held.keys().cloned().collect(),
            nics: self.nics.values().cloned().collect(),
            conditions: vec![Condition::new("Ready", true, "Serving", "")],
            ..RdmaNodeStatus::default()
        }
    }

    /// Writes its status on what it saw last. What a conflict left unsaid was never begun.
    fn tell(&mut self, api: &mut Api) -> bool {
        let Some(seen) = &self.seen else { return false };
        let status = Some(self.status());
        if seen.status == status && self.began {
            return true;
        }
        let told = api.replace(Object::RdmaNode(RdmaNode { status, ..seen.clone() }), true);
        self.look(api);
        told == Outcome::Done
    }

    /// One step of what it does on its own.
    pub(crate) fn work(&mut self, api: &mut Api) {
        if self.seen.is_none() {
            self.look(api);
            return;
        }
        if !self.began {
            self.held.clear();
            self.began = self.tell(api);
            return;
        }
        let spec = self.spec();
        // A block that it told of and has not looked at since.
        if let Some(uid) = self.held.iter().find(|(_, c)| c.is_none()).map(|(uid, _)| uid.clone()) {
            let mine = api.list(Kind::Block).find_map(|object| match object {
                Object::Block(block)
                    if block.metadata.uid.as_ref() == Some(&uid)
                        && block.spec.node == self.name
                        && !block.spec.releasing =>
                {
                    Some(block.spec.cidr)
                }
                _ => None,
            });
            match mine {
                Some(cidr) => self.held.insert(uid, Some(cidr)),
                None => self.held.remove(&uid),
            };
            return;
        }
        let wanted: Vec<String> = spec.blocks.iter().map(|block| block.uid.clone()).collect();
        self.held.retain(|uid, _| wanted.contains(uid));
        let hosted = &spec.networks;
        let nics = &self.nics;
        self.networks.retain(|uid, network| {
            hosted.iter().any(|n| n.uid == *uid) || nics.values().any(|n| n.network == network.name)
        });
        for network in &spec.networks {
            let addresses = nics.values().filter(|n| n.network == network.name).count();
            let status = NodeNetworkStatus {
                name: network.name.clone(),
                uid: network.uid.clone(),
                addresses: u32::try_from(addresses).unwrap(),
            };
            self.networks.insert(network.uid.clone(), status);
        }
        let new: Vec<String> =
            wanted.into_iter().filter(|uid| !self.held.contains_key(uid)).collect();
        self.held.extend(new.iter().map(|uid| (uid.clone(), None)));
        if !self.tell(api) {
            self.held.retain(|uid, _| !new.contains(uid));
        }
    }

    /// A pod gets a NIC of one of the pools.
    pub(crate) fn grant(&mut self, pick: usize, namespace: &str) {
        let spec = self.spec();
        if spec.pools.is_empty() || self.nics.len() >= 4 || !self.began {
            return;
        }
        let pool = &spec.pools[pick % spec.pools.len()];
        self.serial += 1;
        let id = format!("{}-{}", pool.name, self.serial);
        let nic = NicStatus {
            id: id.clone(),
            pool: pool.name.clone(),
            network: pool.network.clone(),
            namespace: namespace.to_owned(),
            pod: format!("pod-{}", self.serial),
            pod_uid: format!("{}-{}", self.name, self.serial),
            revision: pool.revision.clone(),
            limits: pool.nic.limits,
            ..NicStatus::default()
        };
        self.nics.insert(id, nic);
    }

    /// A pod ends; at the end of a run all do.
    pub(crate) fn end(&mut self, pick: usize) {
        if let Some(id) = self.nics.keys().nth(pick % self.nics.len().max(1)).cloned() {
            self.nics.remove(&id);
        }
    }

    pub(crate) fn evicted(&mut self, uid: &str) {
        self.nics.retain(|_, nic| nic.pod_uid != uid);
    }
}
