//! The copy of the cluster, and what a change of it concerns.

#![allow(
    clippy::needless_pass_by_value,
    reason = "what changed is handed over: its last copy ends with the change"
)]

use std::collections::{BTreeMap, BTreeSet};

use vhost_rdma_cluster_api::{
    AUTHORITY, Condition, NicStatus, ROOTS, RdmaIPBlock, RdmaNetwork, RdmaNic, RdmaNicClass,
    RdmaNode, RdmaNodePolicy, RdmaTenant,
};

use super::hosted::{self, Changed};
use super::index::Index;
use super::ranges::Ranges;
use super::wishes::Wishes;
use super::{
    Attachment, Authority, Claim, Key, Kind, Mono, NamespaceInfo, NodeInfo, Object, Request, Roots,
};

/// The copy of the cluster.
#[derive(Debug, Clone, Default)]
pub struct World {
    pub(super) tenants: BTreeMap<String, RdmaTenant>,
    pub(super) networks: BTreeMap<String, RdmaNetwork>,
    pub(super) classes: BTreeMap<String, RdmaNicClass>,
    pub(super) policies: BTreeMap<String, RdmaNodePolicy>,
    pub(super) rdma_nodes: BTreeMap<String, RdmaNode>,
    pub(super) blocks: BTreeMap<String, RdmaIPBlock>,
    pub(super) nics_named: BTreeMap<(String, String), RdmaNic>,
    pub(super) nodes: BTreeMap<String, NodeInfo>,
    pub(super) namespaces: BTreeMap<String, NamespaceInfo>,
    pub(super) claims: BTreeMap<u32, Claim>,
    pub(super) attachments: BTreeMap<String, Attachment>,
    pub(super) has_attachments: bool,
    pub(super) index: Index,
    pub(super) wishes: Wishes,
    /// What blocks have of networks.
    pub(super) in_blocks: Ranges,
    /// What named NICs have of networks, by a pod or in prospect.
    pub(super) in_nics: Ranges,
    dirty: BTreeSet<Key>,
    pub(super) gone: BTreeMap<String, Mono>,
    /// Since when networks are being deleted: the UID, since one of the name may follow another.
    pub(super) deleting: BTreeMap<String, (String, Mono)>,
    pub(super) authority: Option<Authority>,
    pub(super) roots: Option<Roots>,
    /// Since when these roots are known to be published.
    pub(super) published_since: Option<Mono>,
    pub(super) requests: BTreeMap<String, Request>,
    /// Since when requests are known: the UID, the time.
    pub(super) asked_since: BTreeMap<String, (String, Mono)>,
    /// What time it was when the process started.
    pub(super) epoch: u64,
    pub(super) peers: Changed,
    /// Since when places in quotas are known, by the pod's UID.
    pub(super) reserved_since: BTreeMap<String, Mono>,
    /// Since when claims of named NICs are known: the NIC, the pod's UID.
    pub(super) claimed_since: BTreeMap<(String, String), (String, Mono)>,
}

impl World {
    /// A cluster of which nothing is known, and whether it knows attachment definitions.
    #[must_use]
    pub fn new(has_attachments: bool) -> Self {
        // An authority that is not there is to be made, and nothing will say so.
        let dirty = BTreeSet::from([Key::Authority]);
        Self { has_attachments, dirty, ..Self::default() }
    }

    /// The keys that changes have marked since the last call.
    pub fn take_dirty(&mut self) -> BTreeSet<Key> {
        std::mem::take(&mut self.dirty)
    }

    /// What changed since the last call in what peers are told.
    pub(super) fn take_peers(&mut self) -> Changed {
        std::mem::take(&mut self.peers)
    }

    /// How many objects of a kind there are.
    #[must_use]
    pub fn count(&self, kind: Kind) -> usize {
        match kind {
            Kind::Tenant => self.tenants.len(),
            Kind::Network => self.networks.len(),
            Kind::Class => self.classes.len(),
            Kind::Policy => self.policies.len(),
            Kind::RdmaNode => self.rdma_nodes.len(),
            Kind::Block => self.blocks.len(),
            Kind::Nic => self.nics_named.len(),
            Kind::Node => self.nodes.len(),
            Kind::Namespace => self.namespaces.len(),
            Kind::Claim => self.claims.len(),
            Kind::Attachment => self.attachments.len(),
            Kind::Authority => self.authority.iter().count(),
            Kind::Roots => self.roots.iter().count(),
            Kind::Request => self.requests.len(),
        }
    }

    /// The names of all objects of a kind.
    #[must_use]
    pub fn names(&self, kind: Kind) -> Vec<String> {
        match kind {
            Kind::Tenant => self.tenants.keys().cloned().collect(),
            Kind::Network => self.networks.keys().cloned().collect(),
            Kind::Class => self.classes.keys().cloned().collect(),
            Kind::Policy => self.policies.keys().cloned().collect(),
            Kind::RdmaNode => self.rdma_nodes.keys().cloned().collect(),
            Kind::Block => self.blocks.keys().cloned().collect(),
            Kind::Nic => self.nics_named.keys().map(|(ns, name)| format!("{ns}/{name}")).collect(),
            Kind::Node => self.nodes.keys().cloned().collect(),
            Kind::Namespace => self.namespaces.keys().cloned().collect(),
            Kind::Claim => self.claims.keys().map(u32::to_string).collect(),
            Kind::Attachment => self.attachments.keys().cloned().collect(),
            Kind::Authority => self.authority.iter().map(|_| AUTHORITY.to_owned()).collect(),
            Kind::Roots => self.roots.iter().map(|_| ROOTS.to_owned()).collect(),
            Kind::Request => self.requests.keys().cloned().collect(),
        }
    }

    /// Whether a key's writes are sums over many objects, which may wait a moment for more of them.
    /// Those of a network without a VNI are not: others wait for its finalizer, its claim, its VNI.
    #[must_use]
    pub fn is_sum(&self, key: &Key) -> bool {
        match key {
            Key::Network(name) => {
                let status = self.networks.get(name).and_then(|found| found.status.as_ref());
                status.is_some_and(|status| status.vni.is_some())
            }
            Key::Tenant(_) | Key::Policy(_) | Key::Class(_) => true,
            _ => false,
        }
    }

    /// The conditions of an object of a kind that the controller judges.
    #[must_use]
    pub fn conditions(&self, kind: Kind, name: &str) -> Vec<Condition> {
        let found = match kind {
            Kind::Network => {
                self.networks.get(name).and_then(|o| o.status.as_ref()).map(|s| &s.conditions)
            }
            Kind::Tenant => {
                self.tenants.get(name).and_then(|o| o.status.as_ref()).map(|s| &s.conditions)
            }
            Kind::Policy => {
                self.policies.get(name).and_then(|o| o.status.as_ref()).map(|s| &s.conditions)
            }
            Kind::Class => {
                self.classes.get(name).and_then(|o| o.status.as_ref()).map(|s| &s.conditions)
            }
            _ => None,
        };
        found.cloned().unwrap_or_default()
    }

    /// An object is there, or is so now.
    pub fn apply(&mut self, object: Object, now: Mono) {
        let name = object.name();
        match object {
            Object::Tenant(new) => self.set_tenant(&name, Some(new), now),
            Object::Network(new) => self.set_network(&name, Some(new), now),
            Object::Class(new) => self.set_class(&name, Some(new)),
            Object::Policy(new) => self.set_policy(&name, Some(new)),
            Object::RdmaNode(new) => self.set_rdma_node(&name, Some(new), now),
            Object::Block(new) => self.set_block(&name, Some(new)),
            Object::Nic(new) => self.set_nic(&name, Some(new), now),
            Object::Node(new) => self.set_node(&name, Some(new), now),
            Object::Namespace(new) => self.set_namespace(&name, Some(new)),
            Object::Claim(new) => self.set_claim(new.vni, Some(new)),
            Object::Attachment(new) => self.set_attachment(&name, Some(new)),
            Object::Authority(new) => self.set_authority(Some(new)),
            Object::Roots(new) => self.set_roots(Some(new), now),
            Object::Request(new) => self.set_request(&name, Some(new), now),
        }
    }

    /// An object is gone.
    pub fn remove(&mut self, kind: Kind, name: &str, now: Mono) {
        match kind {
            Kind::Tenant => self.set_tenant(name, None, now),
            Kind::Network => self.set_network(name, None, now),
            Kind::Class => self.set_class(name, None),
            Kind::Policy => self.set_policy(name, None),
            Kind::RdmaNode => self.set_rdma_node(name, None, now),
            Kind::Block => self.set_block(name, None),
            Kind::Nic => self.set_nic(name, None, now),
            Kind::Node => self.set_node(name, None, now),
            Kind::Namespace => self.set_namespace(name, None),
            Kind::Claim => {
                if let Ok(number) = name.parse() {
                    self.set_claim(number, None);
                }
            }
            Kind::Attachment => self.set_attachment(name, None),
            Kind::Authority => self.set_authority(None),
            Kind::Roots => self.set_roots(None, now),
            Kind::Request => self.set_request(name, None, now),
        }
    }

    pub(super) fn mark(&mut self, keys: impl IntoIterator<Item = Key>) {
        self.dirty.extend(keys);
    }

    /// A node, its blocks, and the named NICs of its pods.
    fn mark_node(&mut self, node: &str) {
        let claimed: Vec<Key> = self.index.claimed_at(node).filter_map(nic_key).collect();
        self.dirty.extend(claimed);
        let blocks = self.index.blocks_of(node).map(|block| Key::Block(block.to_owned()));
        self.dirty.extend(blocks);
        self.dirty.insert(Key::Node(node.to_owned()));
    }

    /// The nodes that offer a network, or would.
    fn mark_nodes_of_network(&mut self, network: &str) {
        let nodes: BTreeSet<String> = self
            .index
            .policies_with_network(network)
            .flat_map(|policy| self.index.matched(policy))
            .map(str::to_owned)
            .collect();
        nodes.iter().for_each(|node| self.mark_node(node));
    }

    fn set_tenant(&mut self, name: &str, new: Option<RdmaTenant>, now: Mono) {
        let old = match &new {
            Some(tenant) => self.tenants.insert(name.to_owned(), tenant.clone()),
            None => self.tenants.remove(name),
        };
        self.mark([Key::Tenant(name.to_owned())]);
        for (tenant, present) in [(&old, false), (&new, true)] {
            let status = tenant.as_ref().and_then(|tenant| tenant.status.as_ref());
            let kept = new.as_ref().and_then(|tenant| tenant.status.as_ref());
            for place in status.into_iter().flat_map(|status| &status.reserved) {
                if present {
                    self.reserved_since.entry(place.pod_uid.clone()).or_insert(now);
                } else if !kept.is_some_and(|kept| kept.reserved.contains(place)) {
                    self.reserved_since.remove(&place.pod_uid);
                }
            }
        }
        // When it was made counts as well: one that was made again comes after others.
        let matters = |t: &RdmaTenant| (t.spec.clone(), made(&t.metadata));
        if old.as_ref().map(matters) == new.as_ref().map(matters) {
            return;
        }
        let mut networks = BTreeSet::new();
        for (tenant, present) in [(&old, false), (&new, true)] {
            if let Some(tenant) = tenant {
                self.index.set_tenant(name, tenant, present);
                networks.extend(tenant.spec.networks.iter().cloned());
            }
        }
        let all: Vec<String> = self.namespaces.keys().cloned().collect();
        all.iter().for_each(|namespace| self.choose_owner(namespace));
        self.judge_nics_of_tenant(name);
        networks.iter().for_each(|network| self.mark_nodes_of_network(network));
    }

    /// Which tenants select a namespace: the one that was made first has it.
    fn choose_owner(&mut self, namespace: &str) {
        let labels = self.namespaces.get(namespace).map(|info| &info.labels);
        let mut tenants: Vec<(String, String)> = self
            .tenants
            .iter()
            .filter(|(_, tenant)| {
                labels.is_some_and(|labels| tenant.spec.namespace_selector.matches(labels))
            })
            .map(|(name, tenant)| (made(&tenant.metadata), name.clone()))
            .collect();
        tenants.sort();
        let new: Vec<String> = tenants.into_iter().map(|(_, name)| name).collect();
        let old = self.index.owners(namespace).to_vec();
        if old == new {
            return;
        }
        let concerned: BTreeSet<String> = old.iter().chain(&new).cloned().collect();
        // Whoever comes second must be told at the nodes that it is not the tenant's.
        let second = |all: &[String]| all.iter().skip(1).cloned().collect::<BTreeSet<String>>();
        let told: Vec<String> = second(&old).symmetric_difference(&second(&new)).cloned().collect();
        self.changing_fullness(&concerned, |world| world.index.set_owners(namespace, new));
        told.iter().for_each(|tenant| self.mark_nodes_of_tenant(tenant));
        self.mark(concerned.into_iter().map(Key::Tenant));
        self.judge_nics_of_namespace(namespace);
    }

    /// Makes a change, and marks the nodes that must hear that a tenant has become full or not.
    fn changing_fullness(&mut self, tenants: &BTreeSet<String>, change: impl FnOnce(&mut Self)) {
        let before: Vec<bool> = tenants.iter().map(|tenant| self.is_full(tenant)).collect();
        change(self);
        for (tenant, before) in tenants.iter().zip(before) {
            if self.is_full(tenant) != before {
                self.mark_nodes_of_tenant(tenant);
            }
        }
    }

    /// The nodes that offer a network of the tenant's.
    fn mark_nodes_of_tenant(&mut self, tenant: &str) {
        let networks =
            self.tenants.get(tenant).map(|t| t.spec.networks.clone()).unwrap_or_default();
        networks.iter().for_each(|network| self.mark_nodes_of_network(network));
    }

    fn set_network(&mut self, name: &str, new: Option<RdmaNetwork>, now: Mono) {
        let is_deleting = new.as_ref().is_some_and(|n| n.metadata.deletion_timestamp.is_some());
        let old = match &new {
            Some(network) => self.networks.insert(name.to_owned(), network.clone()),
            None => self.networks.remove(name),
        };
        let uid = new.as_ref().and_then(|n| n.metadata.uid.clone()).unwrap_or_default();
        if !is_deleting {
            self.deleting.remove(name);
        } else if self.deleting.get(name).is_none_or(|(known, _)| *known != uid) {
            self.deleting.insert(name.to_owned(), (uid, now));
        }
        self.mark([Key::Network(name.to_owned())]);
        let matters = |network: &Option<RdmaNetwork>| {
            network.as_ref().map(|n| {
                let vni = n.status.as_ref().and_then(|status| status.vni);
                let deleting = n.metadata.deletion_timestamp.is_some();
                (n.spec.clone(), n.metadata.uid.clone(), deleting, vni)
            })
        };
        if matters(&old) == matters(&new) {
            return;
        }
        self.peers.networks.insert(name.to_owned());
        self.mark_nodes_of_network(name);
        let uids = [&old, &new].into_iter().flatten().filter_map(|n| n.metadata.uid.as_ref());
        let mut keys: Vec<Key> =
            uids.flat_map(|uid| self.index.claims_of(uid)).map(Key::Claim).collect();
        keys.extend(self.index.pools_of(name).cloned().map(Key::Pool));
        keys.extend(self.index.blocks_of_network(name).map(|b| Key::Block(b.to_owned())));
        keys.extend(self.index.policies_with_network(name).map(|p| Key::Policy(p.to_owned())));
        keys.extend(self.index.tenants_of_network(name).map(|t| Key::Tenant(t.to_owned())));
        self.mark(keys);
        self.judge_nics_of_network(name);
    }

    fn set_class(&mut self, name: &str, new: Option<RdmaNicClass>) {
        let old = match &new {
            Some(class) => self.classes.insert(name.to_owned(), class.clone()),
            None => self.classes.remove(name),
        };
        self.mark([Key::Class(name.to_owned())]);
        if old.as_ref().map(|c| &c.spec) == new.as_ref().map(|c| &c.spec) {
            return;
        }
        let policies: Vec<String> =
            self.index.policies_with_class(name).map(str::to_owned).collect();
        let tenants: Vec<Key> =
            self.index.tenants_with_class(name).map(|t| Key::Tenant(t.to_owned())).collect();
        self.mark(tenants);
        for policy in policies {
            self.mark_matched(&policy);
            self.mark([Key::Policy(policy)]);
        }
    }

    fn mark_matched(&mut self, policy: &str) {
        let nodes: Vec<String> = self.index.matched(policy).map(str::to_owned).collect();
        nodes.iter().for_each(|node| self.mark_node(node));
    }

    fn set_policy(&mut self, name: &str, new: Option<RdmaNodePolicy>) {
        let old = match &new {
            Some(policy) => self.policies.insert(name.to_owned(), policy.clone()),
            None => self.policies.remove(name),
        };
        self.mark([Key::Policy(name.to_owned())]);
        for (policy, present) in [(&old, false), (&new, true)] {
            if let Some(policy) = policy {
                self.index.set_policy(name, policy, present);
            }
        }
        let rolling = |policy: &Option<RdmaNodePolicy>| -> BTreeSet<String> {
            let status = policy.as_ref().and_then(|policy| policy.status.as_ref());
            status.map(|status| status.rolling.iter().cloned().collect()).unwrap_or_default()
        };
        for node in rolling(&old).symmetric_difference(&rolling(&new)) {
            self.mark_node(node);
        }
        if old.as_ref().map(|p| &p.spec) == new.as_ref().map(|p| &p.spec) {
            return;
        }
        let pools = [&old, &new].into_iter().flatten().flat_map(|policy| &policy.spec.pools);
        let keys: Vec<Key> = pools
            .flat_map(|pool| {
                let class = pool.class.clone().map(Key::Class);
                let others = self.index.policies_with_pool(&pool.name);
                let others = others.map(|policy| Key::Policy(policy.to_owned()));
                [Key::Pool(pool.name.clone()), Key::Network(pool.network.clone())]
                    .into_iter()
                    .chain(class)
                    .chain(others)
            })
            .collect();
        self.mark(keys);
        self.mark_matched(name);
        let selector = new.as_ref().map(|policy| &policy.spec.node_selector);
        let now = selector.map(|selector| self.nodes_selected(selector)).unwrap_or_default();
        let before: BTreeSet<String> = self.index.matched(name).map(str::to_owned).collect();
        for node in before.symmetric_difference(&now) {
            self.index.set_match(name, node, now.contains(node));
        }
        self.mark_matched(name);
    }

    fn set_node(&mut self, name: &str, new: Option<NodeInfo>, now: Mono) {
        let old = match &new {
            Some(node) => self.nodes.insert(name.to_owned(), node.clone()),
            None => self.nodes.remove(name),
        };
        if old == new && new.is_some() {
            return;
        }
        for (node, present) in [(&old, false), (&new, true)] {
            if let Some(node) = node {
                self.index.set_kubelet_addresses(name, &node.addresses, present);
                self.index.set_labels(name, &node.labels, present);
            }
        }
        self.mark_requests(name);
        if new.is_some() {
            self.gone.remove(name);
        } else {
            self.gone.entry(name.to_owned()).or_insert(now);
        }
        let mut keys = Vec::new();
        for (policy, object) in &self.policies {
            let matched = self.index.is_match(policy, name);
            let matches =
                new.as_ref().is_some_and(|n| object.spec.node_selector.matches(&n.labels));
            if matched || matches {
                keys.push(Key::Policy(policy.clone()));
                self.index.set_match(policy, name, matches);
            }
        }
        keys.extend(self.index.networks_at(name).into_iter().map(Key::Network));
        self.mark(keys);
        self.mark_node(name);
    }

    fn set_namespace(&mut self, name: &str, new: Option<NamespaceInfo>) {
        match new {
            Some(namespace) => self.namespaces.insert(name.to_owned(), namespace),
            None => self.namespaces.remove(name),
        };
        self.choose_owner(name);
    }

    fn set_rdma_node(&mut self, name: &str, new: Option<RdmaNode>, now: Mono) {
        if new.is_some() && !self.nodes.contains_key(name) {
            self.gone.entry(name.to_owned()).or_insert(now);
        } else {
            self.gone.remove(name);
        }
        if hosted::differs(self.rdma_nodes.get(name), new.as_ref()) {
            self.peers.nodes.insert(name.to_owned());
        }
        let same_nics = nics(self.rdma_nodes.get(name)) == nics(new.as_ref());
        let (before, held) = (self.index.networks_at(name), self.index.held_by(name));
        let hosted = self.index.hosted_by(name);
        let mut namespaces: BTreeSet<String> = BTreeSet::new();
        for node in self.rdma_nodes.get(name).into_iter().chain(&new) {
            let nics = node.status.iter().flat_map(|status| &status.nics);
            namespaces.extend(nics.map(|nic| nic.namespace.clone()));
        }
        let tenants: BTreeSet<String> = namespaces
            .iter()
            .filter_map(|namespace| self.index.tenant_of(namespace))
            .map(str::to_owned)
            .collect();
        let mut changed = BTreeSet::new();
        self.changing_fullness(&tenants, |world| {
            changed = world.index.set_report(name, new.as_ref());
            match new {
                Some(node) => world.rdma_nodes.insert(name.to_owned(), node),
                None => world.rdma_nodes.remove(name),
            };
        });
        self.mark_requests(name);
        // A report repeats what it said of all networks: those that it says something new of count.
        let now = self.index.hosted_by(name);
        let mut networks: BTreeSet<String> = hosted.symmetric_difference(&now).cloned().collect();
        if !same_nics {
            networks.extend(before.into_iter().chain(self.index.networks_at(name)));
        }
        let now = self.index.held_by(name);
        let uids = held.symmetric_difference(&now);
        let mut keys: Vec<Key> =
            self.index.selected(name).map(|policy| Key::Policy(policy.to_owned())).collect();
        keys.extend(networks.into_iter().map(Key::Network));
        keys.extend(uids.flat_map(|uid| self.index.claims_of(uid)).map(Key::Claim));
        keys.extend(
            changed
                .iter()
                .filter_map(|namespace| self.index.tenant_of(namespace))
                .map(|tenant| Key::Tenant(tenant.to_owned())),
        );
        self.mark(keys);
        self.mark_node(name);
    }

    fn set_claim(&mut self, number: u32, new: Option<Claim>) {
        let old = match &new {
            Some(claim) => self.claims.insert(number, claim.clone()),
            None => self.claims.remove(&number),
        };
        for (claim, present) in [(old, false), (new, true)] {
            let Some(claim) = claim else { continue };
            self.index.set_claim(&claim.network_uid, number, present);
            self.mark([Key::Network(claim.network)]);
        }
        self.mark([Key::Claim(number)]);
        // Whoever waits for this number. Networks are few.
        let waiting: Vec<Key> = self
            .networks
            .iter()
            .filter(|(_, network)| network.spec.vni == Some(number))
            .map(|(name, _)| Key::Network(name.clone()))
            .collect();
        self.mark(waiting);
    }

    fn set_attachment(&mut self, name: &str, new: Option<Attachment>) {
        match new {
            Some(attachment) => self.attachments.insert(name.to_owned(), attachment),
            None => self.attachments.remove(name),
        };
        let mut keys = vec![Key::Pool(name.to_owned())];
        for policy in self.index.policies_with_pool(name) {
            let pools = self.policies.get(policy).into_iter().flat_map(|p| &p.spec.pools);
            keys.extend(pools.filter(|p| p.name == name).map(|p| Key::Network(p.network.clone())));
        }
        self.mark(keys);
    }
}

fn nics(node: Option<&RdmaNode>) -> &[NicStatus] {
    let status = node.and_then(|node| node.status.as_ref());
    status.map(|status| status.nics.as_slice()).unwrap_or_default()
}

pub(super) fn nic_key(joined: &str) -> Option<Key> {
    let (namespace, name) = joined.split_once('/')?;
    Some(Key::Nic(namespace.to_owned(), name.to_owned()))
}

/// When an object was made, as the server says it: sorts by time.
pub(super) fn made(meta: &kube::api::ObjectMeta) -> String {
    meta.creation_timestamp.as_ref().map(|time| time.0.to_string()).unwrap_or_default()
}

#[cfg(test)]
#[path = "world_tests.rs"]
mod tests;
