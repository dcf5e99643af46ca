//! NICs with a name: may they be, is their identity their own, what of them must the node hear that
//! has them, and has the pod ended that had them.
//!
//! Anybody who may write in some namespace can make a NIC that names any network and any address.
//! So a NIC counts for an identity only if nothing else is wrong with it: what its namespace's
//! tenant may not have, it keeps from nobody. Whoever has an identity keeps it ([`Rank`]): a NIC
//! that a pod has, or that was accepted, comes before those that were not, however old they are.
//!
//! How one is claimed: `vhost_rdma_cluster_api::claim`.

use std::net::IpAddr;
use std::time::Duration;

use vhost_rdma_cluster_api::{Cidr, NodeNic, RdmaNic, RdmaNicStatus, check, claim};

use super::condition::{accepted, is_accepted};
use super::wishes::{Rank, Wish};
use super::world::{made, nic_key};
use super::write::{Guard, Key, Plan, Write};
use super::{Mono, Settings, World};

/// How long a claim is left alone that no node reports: the pod is starting, or has just ended.
const SETTLE: Duration = Duration::from_secs(10);
/// How often it is asked then whether the pod is there still.
const LOOK: Duration = Duration::from_secs(15);

impl World {
    #[allow(
        clippy::needless_pass_by_value,
        reason = "what changed is handed over: its last copy ends with the change"
    )]
    pub(super) fn set_nic(&mut self, joined: &str, new: Option<RdmaNic>, now: Mono) {
        let Some(Key::Nic(namespace, name)) = nic_key(joined) else { return };
        let key = (namespace, name);
        let old = match &new {
            Some(nic) => self.nics_named.insert(key.clone(), nic.clone()),
            None => self.nics_named.remove(&key),
        };
        for (nic, present) in [(&old, false), (&new, true)] {
            let Some(nic) = nic else { continue };
            self.index.set_named(&nic.spec.network, joined.to_owned(), present);
            if let Some(node) = nic.status.as_ref().and_then(|status| status.node.as_ref()) {
                self.index.set_claimed(node, joined.to_owned(), present);
            }
        }
        let has = |nic: &Option<RdmaNic>| {
            let nic = nic.as_ref().filter(|nic| keeps(nic))?;
            Some((nic.spec.network.clone(), range(nic)?))
        };
        let (had, has) = (has(&old), has(&new));
        for (place, present) in [(&had, false), (&has, true)] {
            let Some((network, range)) = place else { continue };
            self.in_nics.set(network, *range, present);
        }
        if let Some((network, range)) = had.filter(|had| has.as_ref() != Some(had)) {
            self.mark_waiting_for_address(&network, &range);
        }
        self.judge_again(&key);
        let claimed =
            |nic: &Option<RdmaNic>| nic.as_ref().and_then(|nic| nic.status.clone()?.pod_uid);
        match claimed(&new) {
            Some(uid) if claimed(&old).as_ref() == Some(&uid) => {}
            Some(uid) => drop(self.claimed_since.insert(key.clone(), (uid, now))),
            None => drop(self.claimed_since.remove(&key)),
        }
        // Each node that has it, or had it, hears of what changed.
        let told = |nic: &Option<RdmaNic>| {
            let nic = nic.as_ref()?;
            Some((nic.status.as_ref()?.node.clone()?, news(nic)?))
        };
        let (before, now) = (told(&old), told(&new));
        if before != now {
            let nodes = [before, now].into_iter().flatten();
            self.mark(nodes.map(|(node, _)| Key::Node(node)).collect::<Vec<_>>());
        }
        self.peers.blocks.insert(joined.to_owned());
    }

    /// What is wrong with a NIC, whatever others have.
    fn wrong_with(&self, namespace: &str, nic: &RdmaNic) -> Vec<String> {
        let mut wrong = Vec::new();
        let tenant = self.index.tenant_of(namespace).and_then(|tenant| self.tenants.get(tenant));
        match (self.networks.get(&nic.spec.network), tenant) {
            (None, _) => wrong.push(format!("there is no network {:?}", nic.spec.network)),
            (_, None) => wrong.push(format!("the namespace {namespace:?} belongs to no tenant")),
            (Some(network), Some(tenant)) => {
                if !tenant.spec.networks.contains(&nic.spec.network) {
                    wrong.push(format!(
                        "the network {:?} is not one of the tenant's: {}",
                        nic.spec.network,
                        tenant.spec.networks.join(", ")
                    ));
                }
                if let Some(class) = &nic.spec.class
                    && !tenant.spec.classes.contains(class)
                {
                    wrong.push(format!(
                        "the class {class:?} is not one of the tenant's: {}",
                        tenant.spec.classes.join(", ")
                    ));
                }
                wrong.extend(check::nic(&nic.spec, &network.spec));
            }
        }
        // The range was one of blocks before. Whoever may not have the NIC hears nothing of that.
        if wrong.is_empty()
            && let Some(range) = range(nic)
            && let Some(block) = self.in_blocks.overlapping(&nic.spec.network, &range)
        {
            wrong.push(format!(
                "{} is in the block {block}, which a node has still: it is free when the node's \
                 pods have ended that have addresses of it",
                range.first()
            ));
        }
        wrong
    }

    /// Which identities a NIC wants, and how much it is heard; nothing if it is not.
    fn wish(&self, key: &(String, String)) -> Option<Wish> {
        let nic = self.nics_named.get(key)?;
        let status = nic.status.as_ref();
        let is_used = status.is_some_and(|status| status.pod_uid.is_some());
        let was_accepted = status.is_some_and(|status| is_accepted(&status.conditions));
        let rank = match (self.wrong_with(&key.0, nic).is_empty(), is_used, was_accepted) {
            (true, true, _) => Rank::Used,
            (true, false, true) => Rank::Accepted,
            (true, false, false) => Rank::New,
            (false, true, _) => Rank::Left,
            (false, false, _) => return None,
        };
        let network = &nic.spec.network;
        let identities = identities(nic).into_iter().map(|one| (network.clone(), one)).collect();
        Some(Wish { rank, made: made(&nic.metadata), identities })
    }

    /// Something that decides about a NIC has changed.
    fn judge_again(&mut self, key: &(String, String)) {
        let wish = self.wish(key);
        let others = self.wishes.set(key, wish.as_ref());
        self.mark(others.into_iter().map(|(namespace, name)| Key::Nic(namespace, name)));
        self.mark([Key::Nic(key.0.clone(), key.1.clone())]);
    }

    /// Whose a namespace is, or what its tenant may have, has changed.
    pub(super) fn judge_nics_of_namespace(&mut self, namespace: &str) {
        let all: Vec<(String, String)> = self
            .nics_named
            .range((namespace.to_owned(), String::new())..)
            .map(|(key, _)| key.clone())
            .take_while(|(ns, _)| ns == namespace)
            .collect();
        all.iter().for_each(|key| self.judge_again(key));
    }

    /// What a tenant may have has changed.
    pub(super) fn judge_nics_of_tenant(&mut self, tenant: &str) {
        let all: Vec<String> = self.index.namespaces_of(tenant).map(str::to_owned).collect();
        all.iter().for_each(|namespace| self.judge_nics_of_namespace(namespace));
    }

    /// What a network may be used for has changed.
    pub(super) fn judge_nics_of_network(&mut self, network: &str) {
        let all: Vec<Key> = self.index.named_of(network).filter_map(nic_key).collect();
        for key in all {
            let Key::Nic(namespace, name) = key else { continue };
            self.judge_again(&(namespace, name));
        }
    }

    /// What a node must hear of named NICs that its pods have.
    pub(super) fn news_of_nics(&self, node: &str) -> Vec<NodeNic> {
        let found = |joined: &str| match nic_key(joined)? {
            Key::Nic(namespace, name) => news(self.nics_named.get(&(namespace, name))?),
            _ => None,
        };
        let mut all: Vec<NodeNic> = self.index.claimed_at(node).filter_map(found).collect();
        all.sort_by(|a, b| a.uid.cmp(&b.uid));
        all
    }
}

/// What must be a NIC's alone in its network. One address can be written in many ways.
fn identities(nic: &RdmaNic) -> Vec<String> {
    let address = nic.spec.address.as_ref().map(|text| {
        text.parse::<IpAddr>().map_or_else(|_| text.clone(), |address| address.to_string())
    });
    // The one that is made of the UID counts as one that was written.
    [Some(claim::mac(nic)), address].into_iter().flatten().collect()
}

/// The address that a NIC wants.
fn range(nic: &RdmaNic) -> Option<Cidr> {
    let address: IpAddr = nic.spec.address.as_ref()?.parse().ok()?;
    Cidr::holding(address, if address.is_ipv4() { 32 } else { 128 })
}

/// Whether a NIC has its address, or an agent may claim it as things stand: what an agent reads is
/// the status, and the claim fails if that has changed.
fn keeps(nic: &RdmaNic) -> bool {
    let status = nic.status.as_ref();
    status.is_some_and(|status| status.pod_uid.is_some() || is_accepted(&status.conditions))
}

/// What a node must hear of a named NIC that one of its pods has: nothing as long as the object is
/// as it was made, since the agent has read the same when it claimed it.
fn news(nic: &RdmaNic) -> Option<NodeNic> {
    let generation = nic.metadata.generation.filter(|generation| *generation > 1)?;
    let uid = nic.metadata.uid.clone()?;
    Some(NodeNic { uid, generation, limits: nic.spec.limits })
}

pub(super) fn plan(
    world: &World,
    namespace: &str,
    name: &str,
    now: Mono,
    settings: &Settings,
) -> Plan {
    let key = (namespace.to_owned(), name.to_owned());
    let Some(nic) = world.nics_named.get(&key) else { return Plan::default() };
    let mut wrong = world.wrong_with(namespace, nic);
    // Whoever may not have it learns nothing of what others have; names of another tenant's
    // namespace are told nobody.
    if wrong.is_empty() {
        let taken = |identity: &String| {
            let first = world.wishes.first_with(&(nic.spec.network.clone(), identity.clone()));
            first.is_some_and(|first| *first != key)
        };
        let taken = identities(nic).into_iter().filter(taken);
        wrong.extend(taken.map(|identity| format!("another NIC of the network has {identity}")));
    }
    let mut status = nic.status.clone().unwrap_or_default();
    status.observed_generation = nic.metadata.generation;
    accepted(&mut status.conditions, &wrong, nic.metadata.generation);
    if nic.status.as_ref() != Some(&status) {
        return vec![Write::NicStatus(RdmaNic { status: Some(status), ..nic.clone() })].into();
    }
    match left(world, &key, &status, now, settings) {
        Left::No => Plan::default(),
        Left::Ask(guard, again) => {
            let free = Some(claim::released(&status));
            let write = Write::ReleaseNic(RdmaNic { status: free, ..nic.clone() }, guard);
            Plan { writes: vec![write], again: Some(again) }
        }
        Left::Later(again) => Plan { writes: Vec::new(), again: Some(again) },
    }
}

/// Whether a claim may be one that nobody will take back.
enum Left {
    No,
    /// If that is so.
    Ask(Guard, Duration),
    Later(Duration),
}

fn left(
    world: &World,
    key: &(String, String),
    status: &RdmaNicStatus,
    now: Mono,
    settings: &Settings,
) -> Left {
    let (Some(node), Some(uid)) = (&status.node, &status.pod_uid) else { return Left::No };
    let claimed = world.claimed_since.get(key).map_or(now, |(_, since)| *since);
    let wait = |since: Mono, long: Duration| long.saturating_sub(now.saturating_sub(since));
    let Some(info) = world.nodes.get(node) else {
        // It may come back, and its pods may run on until then.
        let gone = world.gone_since(node).unwrap_or(claimed);
        let left = wait(gone, settings.node_grace);
        if !left.is_zero() {
            return Left::Later(left);
        }
        return Left::Ask(Guard::NodeIsGone { node: node.clone() }, LOOK);
    };
    if info.ready && world.index.nics_of_pod(uid) > 0 {
        // Its agent has it, and takes the claim back.
        return Left::No;
    }
    let left = wait(claimed, SETTLE);
    if !left.is_zero() {
        return Left::Later(left);
    }
    let pod = status.pod.clone().unwrap_or_default();
    let guard = Guard::PodIsGone { namespace: key.0.clone(), pod, uid: uid.clone() };
    Left::Ask(guard, LOOK)
}

#[cfg(test)]
#[path = "nic_tests.rs"]
mod tests;
