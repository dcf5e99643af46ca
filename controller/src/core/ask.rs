//! What planners ask of the copy. Nothing here changes it.

use std::collections::BTreeSet;

use vhost_rdma_cluster_api::{LabelSelector, NicStatus, Usage};

use super::node::effective_pools;
use super::{Mono, NodeInfo, World};

impl World {
    pub(super) fn claims_of(&self, uid: &str) -> impl Iterator<Item = u32> {
        self.index.claims_of(uid)
    }

    /// The policies that select a node, the one that counts first first.
    pub(super) fn policies_of(&self, node: &str) -> impl Iterator<Item = &str> {
        let mut all: Vec<&str> = self.index.selected(node).collect();
        all.sort_by_key(|name| (-self.policies[*name].spec.priority, *name));
        all.into_iter()
    }

    /// The policies that have a pool, the one that counts first first.
    pub(super) fn policies_with_pool(&self, pool: &str) -> impl Iterator<Item = &str> {
        let mut all: Vec<&str> = self.index.policies_with_pool(pool).collect();
        all.sort_by_key(|name| (-self.policies[*name].spec.priority, *name));
        all.into_iter()
    }

    pub(super) fn tenants_of_network(&self, network: &str) -> impl Iterator<Item = &str> {
        self.index.tenants_of_network(network)
    }

    /// Namespaces that the tenant's selector means and that belong to one that was made before.
    pub(super) fn lost_namespaces(&self, tenant: &str) -> Vec<String> {
        self.index.contested(tenant).map(|(namespace, _)| namespace.to_owned()).collect()
    }

    /// Whether the node offers NICs of the network, or would if all else were there.
    pub(super) fn offered(&self, node: &str, network: &str) -> bool {
        effective_pools(self, node).0.iter().any(|effective| effective.pool.network == network)
    }

    pub(super) fn is_rolling(&self, node: &str) -> bool {
        self.index.is_rolling(node)
    }

    pub(super) fn nics(&self, node: &str) -> &[NicStatus] {
        let status = self.rdma_nodes.get(node).and_then(|node| node.status.as_ref());
        status.map(|status| status.nics.as_slice()).unwrap_or_default()
    }

    pub(super) fn used(&self, tenant: &str) -> Usage {
        let namespaces = self.index.namespaces_of(tenant);
        namespaces.map(|namespace| self.index.used(namespace)).fold(Usage::default(), Usage::plus)
    }

    /// Whether a tenant may have no NIC more.
    pub(super) fn is_full(&self, tenant: &str) -> bool {
        let quota = self.tenants.get(tenant).and_then(|tenant| tenant.spec.quota);
        quota.is_some_and(|quota| {
            let used = self.used(tenant);
            quota.nics.is_some_and(|most| used.nics >= most) || !used.over(&quota).is_empty()
        })
    }

    pub(super) fn addresses(&self, node: &str, network_uid: &str) -> u32 {
        let status = self.rdma_nodes.get(node).and_then(|node| node.status.as_ref());
        let mut networks = status.into_iter().flat_map(|status| &status.networks);
        networks.find(|network| network.uid == network_uid).map_or(0, |network| network.addresses)
    }

    pub(super) fn holds_block(&self, node: &str, uid: &str) -> bool {
        let status = self.rdma_nodes.get(node).and_then(|node| node.status.as_ref());
        status.is_some_and(|status| status.blocks.iter().any(|block| block == uid))
    }

    /// The nodes that a selector selects. Those with the rarest of its labels are looked at.
    pub(super) fn nodes_selected(&self, selector: &LabelSelector) -> BTreeSet<String> {
        let fits = |info: &NodeInfo| selector.matches(&info.labels);
        match self.index.candidates(&selector.match_labels) {
            Some(some) => some
                .into_iter()
                .filter(|name| self.nodes.get(*name).is_some_and(fits))
                .map(str::to_owned)
                .collect(),
            None => {
                let all = self.nodes.iter().filter(|(_, info)| fits(info));
                all.map(|(name, _)| name.clone()).collect()
            }
        }
    }

    /// Pods with NICs of a network: as many as anybody wants to read.
    pub(super) fn users(&self, network: &str) -> BTreeSet<String> {
        let nics = self.index.nodes_with_nics(network).flat_map(|node| self.nics(node));
        let of = nics.filter(|nic| nic.network == network);
        of.map(|nic| format!("{}/{}", nic.namespace, nic.pod)).take(16).collect()
    }

    pub(super) fn gone_since(&self, node: &str) -> Option<Mono> {
        self.gone.get(node).copied()
    }

    pub(super) fn deleting_since(&self, network: &str) -> Option<Mono> {
        self.deleting.get(network).map(|(_, since)| *since)
    }
}
