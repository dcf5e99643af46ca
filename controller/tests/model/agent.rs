//! A node's agent, as far as the controller can tell: it follows the protocol of `RdmaNode`.

use std::collections::BTreeMap;

use vhost_rdma_cluster_api::claim::{self, Claimant, Verdict};
use vhost_rdma_cluster_api::{
    Cidr, Condition, NicStatus, NodeNetworkStatus, RdmaNic, RdmaNode, RdmaNodeSpec, RdmaNodeStatus,
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
    /// A named NIC that it looked at for a pod's, and has not claimed yet: ID, what it saw.
    reading: Option<(String, RdmaNic)>,
    /// Names that live NICs have: the object, by ID.
    named: BTreeMap<String, Name>,
    /// Names that it owes to others.
    owed: Vec<(Name, Claimant)>,
}

/// A named NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) key: String,
    pub(crate) uid: String,
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
        self.release(api);
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

    pub(crate) fn names(&self) -> impl Iterator<Item = (&Name, &NicStatus)> {
        self.named.iter().filter_map(|(id, name)| Some((name, self.nics.get(id)?)))
    }

    fn claimant(&self, nic: &NicStatus) -> Claimant {
        let (pod, pod_uid) = (nic.pod.clone(), nic.pod_uid.clone());
        Claimant { node: self.name.clone(), pod, pod_uid }
    }

    /// A pod that starts names a NIC. It is looked at now, and claimed another time, on what was
    /// seen now.
    pub(crate) fn name(&mut self, api: &mut Api, pick: usize) {
        let Some((id, seen)) = self.reading.take() else {
            let free = self.nics.iter().filter(|(id, _)| !self.named.contains_key(*id));
            let free: Vec<_> = free.collect();
            let Some((id, nic)) = free.get(pick % free.len().max(1)) else { return };
            let wanted = api.list(Kind::Nic).filter_map(|object| match object {
                Object::Nic(named)
                    if named.spec.network == nic.network
                        && named.metadata.namespace.as_ref() == Some(&nic.namespace) =>
                {
                    Some(named.clone())
                }
                _ => None,
            });
            let wanted: Vec<_> = wanted.collect();
            let seen = wanted.get(pick / 4 % wanted.len().max(1)).cloned();
            self.reading = seen.map(|seen| ((*id).clone(), seen));
            return;
        };
        let Some(nic) = self.nics.get(&id) else { return };
        match claim::claim(&seen, &self.claimant(nic)) {
            Verdict::Held => {}
            Verdict::Free(status) => {
                let new = RdmaNic { status: Some(status), ..seen.clone() };
                if api.replace(Object::Nic(new), true) != Outcome::Done || pick.is_multiple_of(5) {
                    // Somebody was faster; or the agent ends before it knows that it was not.
                    return;
                }
            }
            Verdict::Wait(_) | Verdict::Refused(_) => return,
        }
        // That an object is held says the copy that was seen; whether it is so still, the server.
        let now = api.get(Kind::Nic, &Object::Nic(seen.clone()).name());
        if !matches!(now, Some(Object::Nic(now)) if claim::is_held(now, &self.claimant(nic))) {
            return;
        }
        let key = Object::Nic(seen.clone()).name();
        let uid = seen.metadata.uid.unwrap_or_default();
        self.named.insert(id, Name { key, uid });
    }

    /// Takes back the first of the claims that it owes.
    fn release(&mut self, api: &mut Api) {
        let Some((name, who)) = self.owed.pop() else { return };
        let found = match api.get(Kind::Nic, &name.key) {
            Some(Object::Nic(found)) => found.clone(),
            _ => return,
        };
        if claim::is_held(&found, &who) {
            let status = found.status.as_ref().map(claim::released);
            api.replace(Object::Nic(RdmaNic { status, ..found }), true);
        }
    }

    /// The agent begins anew: what it owed it does not know any more.
    pub(crate) fn forget(&mut self) {
        self.owed.clear();
        self.reading = None;
    }

    /// The NIC of a pod is gone, after its pod.
    fn gone(&mut self, api: &mut Api, id: &str) {
        let Some(nic) = self.nics.remove(id) else { return };
        api.pods.remove(&nic.pod_uid);
        if let Some(name) = self.named.remove(id) {
            self.owed.push((name, self.claimant(&nic)));
        }
    }

    /// The machine goes, with all of its pods.
    pub(crate) fn leave(&mut self, api: &mut Api) {
        for nic in self.nics.values() {
            api.pods.remove(&nic.pod_uid);
        }
        *self = Self::new(&self.name);
    }

    /// A pod gets a NIC of one of the pools.
    pub(crate) fn grant(&mut self, api: &mut Api, pick: usize, namespace: &str) {
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
            pod_uid: format!("{}-{}-{}", self.name, self.serial, api.writes),
            revision: pool.revision.clone(),
            limits: pool.nic.limits,
            ..NicStatus::default()
        };
        api.pods.insert(nic.pod_uid.clone());
        self.nics.insert(id, nic);
    }

    /// A pod ends; at the end of a run all do.
    pub(crate) fn end(&mut self, api: &mut Api, pick: usize) {
        if let Some(id) = self.nics.keys().nth(pick % self.nics.len().max(1)).cloned() {
            self.gone(api, &id);
        }
    }

    pub(crate) fn evicted(&mut self, api: &mut Api, uid: &str) {
        let ids = self.nics.iter().filter(|(_, nic)| nic.pod_uid == uid);
        let ids: Vec<String> = ids.map(|(id, _)| id.clone()).collect();
        ids.iter().for_each(|id| self.gone(api, id));
    }
}
