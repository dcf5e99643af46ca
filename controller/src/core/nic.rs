//! NICs with a name: may they be, is their identity their own, what of them must the node hear that
//! has them, and has the pod ended that had them.
//!
//! How one is claimed: `vhost_rdma_cluster_api::claim`.

use std::time::Duration;

use vhost_rdma_cluster_api::{NodeNic, RdmaNic, RdmaNicStatus, check, claim};

use super::condition::accepted;
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
            for identity in identities(nic) {
                let identity = (nic.spec.network.clone(), identity);
                let who = (made(&nic.metadata), key.clone());
                self.index.set_identity(identity.clone(), who, present);
                let others: Vec<Key> = self
                    .index
                    .with_identity(&identity)
                    .map(|(ns, name)| Key::Nic(ns.clone(), name.clone()))
                    .collect();
                self.mark(others);
            }
        }
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
        self.mark([Key::Nic(key.0, key.1)]);
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
        text.parse::<std::net::IpAddr>()
            .map_or_else(|_| text.clone(), |address| address.to_string())
    });
    // The one that is made of the UID counts as one that was written.
    [Some(claim::mac(nic)), address].into_iter().flatten().collect()
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
    let mut wrong = Vec::new();
    let tenant = world.index.tenant_of(namespace).and_then(|tenant| world.tenants.get(tenant));
    match (world.networks.get(&nic.spec.network), tenant) {
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
    // Names of another tenant's namespace are not told.
    for identity in identities(nic) {
        if world.first_with(&nic.spec.network, &identity) != Some(&key) {
            wrong.push(format!("another NIC of the network has {identity}"));
        }
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
