//! Who is concerned by whom: what makes the cost of a change that of what it touches.

#![allow(
    clippy::needless_pass_by_value,
    reason = "what changed is handed over: its last copy ends with the change"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use vhost_rdma_cluster_api::{
    NicStatus, RdmaNode, RdmaNodePolicy, RdmaNodeSpec, RdmaNodeStatus, RdmaTenant, Usage,
};

/// Whether the NIC is not what the node should make now.
pub(super) fn is_outdated(spec: &RdmaNodeSpec, nic: &NicStatus) -> bool {
    !spec.pools.iter().any(|pool| pool.name == nic.pool && pool.revision == nic.revision)
}

/// A set of values for each key; a key without values is not there.
#[derive(Debug, Clone)]
pub(super) struct Multi<K, V>(BTreeMap<K, BTreeSet<V>>);

impl<K, V> Default for Multi<K, V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V: Ord> Multi<String, V> {
    fn insert(&mut self, key: &str, value: V) {
        if let Some(values) = self.0.get_mut(key) {
            values.insert(value);
        } else {
            self.0.insert(key.to_owned(), BTreeSet::from([value]));
        }
    }

    fn remove<Q: Ord + ?Sized>(&mut self, key: &str, value: &Q)
    where
        V: std::borrow::Borrow<Q>,
    {
        if let Some(values) = self.0.get_mut(key) {
            values.remove(value);
            if values.is_empty() {
                self.0.remove(key);
            }
        }
    }

    fn set(&mut self, key: &str, value: V, present: bool)
    where
        V: Clone,
    {
        if present { self.insert(key, value) } else { self.remove(key, &value) }
    }

    fn of(&self, key: &str) -> impl Iterator<Item = &V> {
        self.0.get(key).into_iter().flatten()
    }

    fn count(&self, key: &str) -> usize {
        self.0.get(key).map_or(0, BTreeSet::len)
    }

    fn has<Q: Ord + ?Sized>(&self, key: &str, value: &Q) -> bool
    where
        V: std::borrow::Borrow<Q>,
    {
        self.0.get(key).is_some_and(|values| values.contains(value))
    }
}

type Names = Multi<String, String>;

fn names<'a>(multi: &'a Names, key: &str) -> impl Iterator<Item = &'a str> {
    multi.of(key).map(String::as_str)
}

/// An exact sum, from which what was added can be taken away again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sum([u128; 4]);

impl Sum {
    fn of(usage: Usage) -> Self {
        Self([
            usage.nics.into(),
            usage.qps.0.into(),
            usage.mr_bytes.0.into(),
            usage.bandwidth.0.into(),
        ])
    }

    fn change(&mut self, other: Self, add: bool) {
        for (mine, its) in self.0.iter_mut().zip(other.0) {
            *mine = if add { mine.saturating_add(its) } else { mine.saturating_sub(its) };
        }
    }

    fn usage(self) -> Usage {
        use vhost_rdma_cluster_api::Quantity;
        let number = |n: u128| Quantity(u64::try_from(n).unwrap_or(u64::MAX).min(i64::MAX as u64));
        Usage {
            nics: u32::try_from(self.0[0]).unwrap_or(u32::MAX),
            qps: number(self.0[1]),
            mr_bytes: number(self.0[2]),
            bandwidth: number(self.0[3]),
        }
    }
}

/// What an agent's report adds up to, kept so that it can be taken away again.
#[derive(Debug, Clone, Default)]
struct Report {
    addresses: BTreeSet<IpAddr>,
    by_namespace: BTreeMap<String, Sum>,
    by_network: BTreeMap<String, u32>,
    by_pod: BTreeMap<String, u32>,
    held: BTreeSet<String>,
    hosted: BTreeSet<String>,
    outdated: BTreeSet<String>,
}

impl Report {
    fn of(node: &RdmaNode) -> Self {
        let mut report = Self {
            hosted: node.spec.networks.iter().map(|n| n.name.clone()).collect(),
            ..Self::default()
        };
        let Some(status) = &node.status else { return report };
        let addresses = status.rnics.iter().filter_map(|rnic| rnic.host_address.as_ref());
        report.addresses = addresses.filter_map(|address| address.parse().ok()).collect();
        report.held = status.networks.iter().map(|network| network.uid.clone()).collect();
        for nic in &status.nics {
            report
                .by_namespace
                .entry(nic.namespace.clone())
                .or_default()
                .change(Sum::of(nic.usage()), true);
            *report.by_pod.entry(nic.pod_uid.clone()).or_default() += 1;
            *report.by_network.entry(nic.network.clone()).or_default() += 1;
            if is_outdated(&node.spec, nic) {
                // A pool that is gone concerns every policy of the node; the empty name stands for
                // that.
                let pool = node.spec.pools.iter().find(|pool| pool.name == nic.pool);
                report.outdated.insert(pool.map(|p| p.policy.clone()).unwrap_or_default());
            }
        }
        report
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Index {
    /// Nodes by `LABEL=VALUE`.
    labelled: Names,
    matched: Names,
    selected: Names,
    /// Of the nodes that a policy selects, those that serve it.
    ready: Names,
    pool_policies: Names,
    network_policies: Names,
    network_pools: BTreeMap<String, BTreeMap<String, u32>>,
    class_policies: Names,
    rolling: Names,
    network_tenants: Names,
    named_networks: Names,
    /// Named NICs that pods of a node have.
    claimed: Names,
    class_tenants: Names,
    hosts: Names,
    holders: Names,
    blocks_by_node: Names,
    blocks_by_network: Names,
    claims: Multi<String, u32>,
    nics: BTreeMap<String, BTreeMap<String, u32>>,
    /// The sums of these.
    nics_in: BTreeMap<String, u32>,
    reports: BTreeMap<String, Report>,
    serving: BTreeSet<String>,
    outdated: Names,
    used: BTreeMap<String, Sum>,
    owners: BTreeMap<String, Vec<String>>,
    owned: Names,
    contested: Names,
    kubelet_addresses: BTreeMap<IpAddr, BTreeSet<String>>,
    rnic_addresses: BTreeMap<IpAddr, BTreeSet<String>>,
    requests: Names,
    pods: BTreeMap<String, u32>,
}

/// Who has an address changed.
fn set_address(
    all: &mut BTreeMap<IpAddr, BTreeSet<String>>,
    address: IpAddr,
    node: &str,
    present: bool,
) {
    let nodes = all.entry(address).or_default();
    if present {
        nodes.insert(node.to_owned());
    } else {
        nodes.remove(node);
    }
    if nodes.is_empty() {
        all.remove(&address);
    }
}

impl Index {
    /// Policies that select a node changed.
    pub(super) fn set_match(&mut self, policy: &str, node: &str, matches: bool) {
        if self.is_match(policy, node) == matches {
            return;
        }
        self.matched.set(policy, node.to_owned(), matches);
        self.selected.set(node, policy.to_owned(), matches);
        self.ready.set(policy, node.to_owned(), matches && self.serving.contains(node));
    }

    pub(super) fn is_match(&self, policy: &str, node: &str) -> bool {
        self.matched.has(policy, node)
    }

    pub(super) fn matched_count(&self, policy: &str) -> usize {
        self.matched.count(policy)
    }

    /// How many of the nodes that a policy selects serve what they were told.
    pub(super) fn ready_count(&self, policy: &str) -> usize {
        self.ready.count(policy)
    }

    pub(super) fn matched(&self, policy: &str) -> impl Iterator<Item = &str> {
        names(&self.matched, policy)
    }

    pub(super) fn selected(&self, node: &str) -> impl Iterator<Item = &str> {
        names(&self.selected, node)
    }

    pub(super) fn set_policy(&mut self, name: &str, policy: &RdmaNodePolicy, present: bool) {
        for pool in &policy.spec.pools {
            self.pool_policies.set(&pool.name, name.to_owned(), present);
            self.network_policies.set(&pool.network, name.to_owned(), present);
            if let Some(class) = &pool.class {
                self.class_policies.set(class, name.to_owned(), present);
            }
            let pools = self.network_pools.entry(pool.network.clone()).or_default();
            let uses = pools.entry(pool.name.clone()).or_default();
            *uses = if present { *uses + 1 } else { uses.saturating_sub(1) };
            if *uses == 0 {
                pools.remove(&pool.name);
            }
            if pools.is_empty() {
                self.network_pools.remove(&pool.network);
            }
        }
        for node in policy.status.iter().flat_map(|status| &status.rolling) {
            self.rolling.set(node, name.to_owned(), present);
        }
    }

    pub(super) fn is_rolling(&self, node: &str) -> bool {
        self.rolling.of(node).next().is_some()
    }

    /// Whether a policy's rollout has come to a node.
    pub(super) fn rolls(&self, policy: &str, node: &str) -> bool {
        self.rolling.has(node, policy)
    }

    pub(super) fn policies_with_pool(&self, pool: &str) -> impl Iterator<Item = &str> {
        names(&self.pool_policies, pool)
    }

    pub(super) fn policies_with_network(&self, network: &str) -> impl Iterator<Item = &str> {
        names(&self.network_policies, network)
    }

    pub(super) fn policies_with_class(&self, class: &str) -> impl Iterator<Item = &str> {
        names(&self.class_policies, class)
    }

    pub(super) fn pools_of(&self, network: &str) -> impl Iterator<Item = &String> {
        self.network_pools.get(network).into_iter().flat_map(BTreeMap::keys)
    }

    pub(super) fn set_tenant(&mut self, name: &str, tenant: &RdmaTenant, present: bool) {
        for network in &tenant.spec.networks {
            self.network_tenants.set(network, name.to_owned(), present);
        }
        for class in &tenant.spec.classes {
            self.class_tenants.set(class, name.to_owned(), present);
        }
    }

    pub(super) fn tenants_of_network(&self, network: &str) -> impl Iterator<Item = &str> {
        names(&self.network_tenants, network)
    }

    pub(super) fn tenants_with_class(&self, class: &str) -> impl Iterator<Item = &str> {
        names(&self.class_tenants, class)
    }

    /// The tenants whose selectors match a namespace, the one that it belongs to first.
    pub(super) fn set_owners(&mut self, namespace: &str, tenants: Vec<String>) {
        for (n, tenant) in self.owners.remove(namespace).unwrap_or_default().iter().enumerate() {
            let side = if n == 0 { &mut self.owned } else { &mut self.contested };
            side.remove(tenant, namespace);
        }
        for (n, tenant) in tenants.iter().enumerate() {
            let side = if n == 0 { &mut self.owned } else { &mut self.contested };
            side.insert(tenant, namespace.to_owned());
        }
        if !tenants.is_empty() {
            self.owners.insert(namespace.to_owned(), tenants);
        }
    }

    pub(super) fn owners(&self, namespace: &str) -> &[String] {
        self.owners.get(namespace).map(Vec::as_slice).unwrap_or_default()
    }

    pub(super) fn tenant_of(&self, namespace: &str) -> Option<&str> {
        self.owners(namespace).first().map(String::as_str)
    }

    pub(super) fn namespaces_of(&self, tenant: &str) -> impl Iterator<Item = &str> {
        names(&self.owned, tenant)
    }

    /// Namespaces that the tenant selects and another one has: namespace, who has it.
    pub(super) fn contested(&self, tenant: &str) -> impl Iterator<Item = (&str, &str)> {
        names(&self.contested, tenant)
            .filter_map(|namespace| Some((namespace, self.tenant_of(namespace)?)))
    }

    /// What a node's object says, in the place of what it said. The namespaces whose sums changed.
    pub(super) fn set_report(&mut self, name: &str, node: Option<&RdmaNode>) -> BTreeSet<String> {
        let old = self.reports.remove(name).unwrap_or_default();
        let new = node.map(Report::of).unwrap_or_default();
        let mut changed = BTreeSet::new();
        for (report, add) in [(&old, false), (&new, true)] {
            for (namespace, sum) in &report.by_namespace {
                self.used.entry(namespace.clone()).or_default().change(*sum, add);
            }
            for (network, count) in &report.by_network {
                let sum = self.nics_in.entry(network.clone()).or_default();
                *sum = if add { sum.saturating_add(*count) } else { sum.saturating_sub(*count) };
                if *sum == 0 {
                    self.nics_in.remove(network);
                }
                let nodes = self.nics.entry(network.clone()).or_default();
                if add {
                    nodes.insert(name.to_owned(), *count)
                } else {
                    nodes.remove(name)
                };
                if nodes.is_empty() {
                    self.nics.remove(network);
                }
            }
            for (pod, count) in &report.by_pod {
                let all = self.pods.entry(pod.clone()).or_default();
                *all = if add { *all + count } else { all.saturating_sub(*count) };
                if *all == 0 {
                    self.pods.remove(pod);
                }
            }
            for uid in &report.held {
                self.holders.set(uid, name.to_owned(), add);
            }
            for address in &report.addresses {
                set_address(&mut self.rnic_addresses, *address, name, add);
            }
            for network in &report.hosted {
                self.hosts.set(network, name.to_owned(), add);
            }
            for policy in &report.outdated {
                self.outdated.set(policy, name.to_owned(), add);
            }
            changed.extend(report.by_namespace.keys().cloned());
        }
        changed
            .retain(|namespace| old.by_namespace.get(namespace) != new.by_namespace.get(namespace));
        for namespace in &changed {
            if self.used.get(namespace) == Some(&Sum::default()) {
                self.used.remove(namespace);
            }
        }
        let serves =
            |status: &RdmaNodeStatus, node: &RdmaNode| status.serves(node.metadata.generation);
        let now = node
            .is_some_and(|node| node.status.as_ref().is_some_and(|status| serves(status, node)));
        self.set_serving(name, now);
        if node.is_some() {
            self.reports.insert(name.to_owned(), new);
        }
        changed
    }

    fn set_serving(&mut self, node: &str, now: bool) {
        if self.serving.contains(node) == now {
            return;
        }
        if now {
            self.serving.insert(node.to_owned());
        } else {
            self.serving.remove(node);
        }
        for policy in names(&self.selected, node) {
            self.ready.set(policy, node.to_owned(), now);
        }
    }

    /// How many NICs nodes report of a pod.
    pub(super) fn nics_of_pod(&self, uid: &str) -> u32 {
        self.pods.get(uid).copied().unwrap_or(0)
    }

    /// Nodes on which a pod has a NIC that is not what this policy, or none any more, says.
    pub(super) fn outdated(&self, policy: &str) -> impl Iterator<Item = &str> {
        let orphaned = names(&self.outdated, "").filter(move |node| self.is_match(policy, node));
        names(&self.outdated, policy).chain(orphaned)
    }

    pub(super) fn used(&self, namespace: &str) -> Usage {
        self.used.get(namespace).copied().unwrap_or_default().usage()
    }

    pub(super) fn nics_of(&self, network: &str) -> u32 {
        self.nics_in.get(network).copied().unwrap_or(0)
    }

    pub(super) fn nodes_with_nics(&self, network: &str) -> impl Iterator<Item = &str> {
        self.nics.get(network).into_iter().flat_map(BTreeMap::keys).map(String::as_str)
    }

    /// Nodes whose agents still have the network of this UID.
    pub(super) fn holders(&self, uid: &str) -> impl Iterator<Item = &str> {
        names(&self.holders, uid)
    }

    /// UIDs of networks that a node's agent still has.
    pub(super) fn held_by(&self, node: &str) -> BTreeSet<String> {
        self.reports.get(node).map(|report| report.held.clone()).unwrap_or_default()
    }

    /// Networks that a node's object says it shall host.
    pub(super) fn hosted_by(&self, node: &str) -> BTreeSet<String> {
        self.reports.get(node).map(|report| report.hosted.clone()).unwrap_or_default()
    }

    /// Networks that a node's object names: those that it shall host and those of its NICs.
    pub(super) fn networks_at(&self, node: &str) -> BTreeSet<String> {
        let report = self.reports.get(node);
        report
            .into_iter()
            .flat_map(|r| r.hosted.iter().chain(r.by_network.keys()))
            .cloned()
            .collect()
    }

    pub(super) fn hosts(&self, network: &str) -> impl Iterator<Item = &str> {
        names(&self.hosts, network)
    }

    pub(super) fn hosts_count(&self, network: &str) -> usize {
        self.hosts.count(network)
    }

    pub(super) fn set_block(&mut self, name: &str, node: &str, network: &str, present: bool) {
        self.blocks_by_node.set(node, name.to_owned(), present);
        self.blocks_by_network.set(network, name.to_owned(), present);
    }

    pub(super) fn blocks_of(&self, node: &str) -> impl Iterator<Item = &str> {
        names(&self.blocks_by_node, node)
    }

    pub(super) fn blocks_of_network(&self, network: &str) -> impl Iterator<Item = &str> {
        names(&self.blocks_by_network, network)
    }

    pub(super) fn set_claim(&mut self, uid: &str, vni: u32, present: bool) {
        self.claims.set(uid, vni, present);
    }

    pub(super) fn claims_of(&self, uid: &str) -> impl Iterator<Item = u32> {
        self.claims.of(uid).copied()
    }

    pub(super) fn set_labels(
        &mut self,
        node: &str,
        labels: &BTreeMap<String, String>,
        present: bool,
    ) {
        for (key, value) in labels {
            self.labelled.set(&format!("{key}={value}"), node.to_owned(), present);
        }
    }

    /// Among which nodes those are that have all of these labels; nothing if it could be any.
    pub(super) fn candidates(&self, labels: &BTreeMap<String, String>) -> Option<Vec<&str>> {
        let of = labels.iter().map(|(key, value)| format!("{key}={value}"));
        let fewest = of.min_by_key(|label| self.labelled.count(label))?;
        Some(names(&self.labelled, &fewest).collect())
    }

    pub(super) fn set_kubelet_addresses(
        &mut self,
        node: &str,
        addresses: &BTreeSet<IpAddr>,
        present: bool,
    ) {
        for address in addresses {
            set_address(&mut self.kubelet_addresses, *address, node, present);
        }
    }

    /// Nodes whose kubelets say that they have an address.
    pub(super) fn said_by_kubelets(&self, address: &IpAddr) -> Option<&BTreeSet<String>> {
        self.kubelet_addresses.get(address)
    }

    /// Nodes whose agents say that an RNIC has an address.
    pub(super) fn found_on_rnics(&self, address: &IpAddr) -> Option<&BTreeSet<String>> {
        self.rnic_addresses.get(address)
    }

    pub(super) fn set_request(&mut self, node: &str, request: String, present: bool) {
        self.requests.set(node, request, present);
    }

    /// Requests for a certificate of a node.
    pub(super) fn requests_of(&self, node: &str) -> impl Iterator<Item = &str> {
        names(&self.requests, node)
    }

    pub(super) fn set_named(&mut self, network: &str, nic: String, present: bool) {
        self.named_networks.set(network, nic, present);
    }

    pub(super) fn named_of(&self, network: &str) -> impl Iterator<Item = &str> {
        names(&self.named_networks, network)
    }

    pub(super) fn set_claimed(&mut self, node: &str, nic: String, present: bool) {
        self.claimed.set(node, nic, present);
    }

    pub(super) fn claimed_at(&self, node: &str) -> impl Iterator<Item = &str> {
        names(&self.claimed, node)
    }
}
