//! What must be true: always, and when nothing happens any more.
//!
//! Written from the objects alone, with no index and no planner of the controller.

use std::collections::{BTreeMap, BTreeSet};

use vhost_rdma_cluster_api::{
    NodeNic, RdmaIPBlock, RdmaNetwork, RdmaNodePolicy, RdmaTenant, Usage,
};
use vhost_rdma_controller::core::{Kind, NamespaceInfo, NodeInfo, Object};

use crate::agent::Agent;
use crate::api::Api;

macro_rules! all {
    ($name:ident, $kind:ident, $type:ty) => {
        fn $name(api: &Api) -> Vec<&$type> {
            api.list(Kind::$kind)
                .filter_map(|object| match object {
                    Object::$kind(inner) => Some(inner),
                    _ => None,
                })
                .collect()
        }
    };
}

all!(networks, Network, RdmaNetwork);
all!(blocks, Block, RdmaIPBlock);
all!(policies, Policy, RdmaNodePolicy);
all!(tenants, Tenant, RdmaTenant);
all!(nodes, Node, NodeInfo);
all!(namespaces, Namespace, NamespaceInfo);

fn name(meta: &kube::api::ObjectMeta) -> &str {
    meta.name.as_deref().unwrap_or_default()
}

fn uid(meta: &kube::api::ObjectMeta) -> &str {
    meta.uid.as_deref().unwrap_or_default()
}

fn vni(network: &RdmaNetwork) -> Option<u32> {
    network.status.as_ref().and_then(|status| status.vni)
}

/// What holds at every moment. `vnis` remembers what networks had.
pub(crate) fn always(
    api: &Api,
    agents: &BTreeMap<String, Agent>,
    vnis: &mut BTreeMap<String, u32>,
) -> Result<(), String> {
    let mut owners: BTreeMap<u32, &str> = BTreeMap::new();
    for network in networks(api) {
        let Some(number) = vni(network) else { continue };
        if let Some(other) = owners.insert(number, uid(&network.metadata)) {
            return Err(format!("VNI {number} is that of {other} and {:?}", network.metadata.uid));
        }
        let first = *vnis.entry(uid(&network.metadata).to_owned()).or_insert(number);
        if first != number {
            return Err(format!("{:?} had VNI {first}, has {number}", network.metadata.name));
        }
    }
    // A node's daemon must never have two networks of one VNI.
    for node in nodes(api) {
        let Some(object) = api.rdma_node(&node.name) else { continue };
        let mut seen = BTreeMap::new();
        for network in &object.spec.networks {
            if let Some(other) = seen.insert(network.vni, &network.uid) {
                return Err(format!("{} has VNI {} twice: {other}", node.name, network.vni));
            }
        }
    }
    // A certificate names what the node has, and at most two roots are trusted.
    for (node, (addresses, _)) in &api.signed {
        if addresses.iter().any(|address| *address != crate::address(node)) {
            return Err(format!("{node} has a certificate for {addresses:?}"));
        }
    }
    if let Some(authority) = api.authority_now()
        && (authority.current.is_none() || authority.roots().count() > 2)
    {
        return Err(format!("roots: {authority:?}"));
    }
    // A name is that of one live NIC, and its object says of which.
    let mut names: BTreeMap<&str, &str> = BTreeMap::new();
    for (agent_name, agent) in agents {
        for (name, nic) in agent.names() {
            if let Some(other) = names.insert(&name.uid, &nic.pod_uid) {
                return Err(format!(
                    "{name:?} is that of {other} and {} of {agent_name}",
                    nic.pod_uid
                ));
            }
            // An object that was deleted says nothing.
            let Some(Object::Nic(found)) = api.get(Kind::Nic, &name.key) else { continue };
            let holder = found.status.as_ref().and_then(|status| status.pod_uid.as_ref());
            if found.metadata.uid.as_ref() == Some(&name.uid) && holder != Some(&nic.pod_uid) {
                return Err(format!("{name:?} of {} on {agent_name} says {holder:?}", nic.pod_uid));
            }
        }
    }
    let mut used: BTreeMap<(String, String), &str> = BTreeMap::new();
    for (agent_name, agent) in agents {
        for (block_uid, cidr) in agent.in_use() {
            let network = blocks(api)
                .into_iter()
                .find(|block| uid(&block.metadata) == block_uid)
                .map(|block| block.spec.network_uid.clone());
            let Some(network) = network else {
                return Err(format!("{agent_name} uses {cidr} of a block that is gone"));
            };
            if let Some(other) = used.insert((network, cidr.to_string()), agent_name) {
                return Err(format!("{cidr} is used by {other} and {agent_name}"));
            }
        }
    }
    Ok(())
}

/// The pools that a node should offer, each with policy and network.
fn pools(api: &Api, node: &NodeInfo) -> BTreeMap<String, (String, String)> {
    let mut matching: Vec<_> = policies(api)
        .into_iter()
        .filter(|policy| policy.spec.node_selector.matches(&node.labels))
        .collect();
    matching.sort_by_key(|p| (std::cmp::Reverse(p.spec.priority), p.metadata.name.clone()));
    let mut pools = BTreeMap::new();
    for policy in matching {
        for pool in &policy.spec.pools {
            let value = (name(&policy.metadata).to_owned(), pool.network.clone());
            pools.entry(pool.name.clone()).or_insert(value);
        }
    }
    let there: BTreeSet<&str> = networks(api).iter().map(|n| name(&n.metadata)).collect();
    pools.retain(|_, (_, network)| there.contains(network.as_str()));
    pools
}

/// What holds when all has come to rest.
pub(crate) fn at_rest(api: &Api, agents: &BTreeMap<String, Agent>) -> Result<(), String> {
    let must = |ok: bool, what: String| if ok { Ok(()) } else { Err(what) };
    for network in networks(api) {
        must(network.metadata.deletion_timestamp.is_none(), format!("{network:?} stays"))?;
        must(vni(network).is_some(), format!("{:?} has no VNI", network.metadata.name))?;
        let wanted = network.spec.vni;
        must(wanted.is_none() || wanted == vni(network), format!("{network:?}: another VNI"))?;
        let of = agents.values().flat_map(Agent::nics);
        let nics = of.filter(|nic| nic.network == name(&network.metadata)).count();
        let said = network.status.as_ref().map_or(0, |status| status.nics as usize);
        must(nics == said, format!("{:?} has {nics} NICs, says {said}", network.metadata.name))?;
    }
    // The claim of a network that is gone stays as long as a node says that it still has NICs of
    // it.
    let held: BTreeSet<&String> = api
        .list(Kind::RdmaNode)
        .filter_map(|object| match object {
            Object::RdmaNode(node) => node.status.as_ref(),
            _ => None,
        })
        .flat_map(|status| status.networks.iter().map(|network| &network.uid))
        .collect();
    let mut claims = BTreeSet::new();
    for object in api.list(Kind::Claim) {
        let Object::Claim(claim) = object else { continue };
        let orphan = !networks(api).iter().any(|n| uid(&n.metadata) == claim.network_uid);
        if !orphan || !held.contains(&claim.network_uid) {
            claims.insert(claim.vni);
        }
    }
    let numbers: BTreeSet<u32> = networks(api).into_iter().filter_map(vni).collect();
    must(claims == numbers, format!("claimed {claims:?}, used {numbers:?}"))?;
    let objects: BTreeSet<String> = api.list(Kind::RdmaNode).map(Object::name).collect();
    let mut matched = BTreeSet::new();
    let mut offered = BTreeSet::new();
    for node in nodes(api) {
        let selects = |p: &&RdmaNodePolicy| p.spec.node_selector.matches(&node.labels);
        if !policies(api).iter().any(selects) {
            // Its object stays as long as pods have NICs there.
            if agents[&node.name].nics().next().is_some() {
                matched.insert(node.name.clone());
            }
            continue;
        }
        matched.insert(node.name.clone());
        let wanted = pools(api, node);
        let spec = api.rdma_node(&node.name).map(|o| o.spec.clone()).unwrap_or_default();
        let found: BTreeMap<_, _> = spec
            .pools
            .iter()
            .map(|p| (p.name.clone(), (p.policy.clone(), p.network.clone())))
            .collect();
        must(found == wanted, format!("{}: {found:?}, wanted {wanted:?}", node.name))?;
        let hosted: BTreeSet<&String> = spec.networks.iter().map(|n| &n.name).collect();
        let wanted_networks: BTreeSet<&String> = wanted.values().map(|(_, n)| n).collect();
        must(hosted == wanted_networks, format!("{}: networks {hosted:?}", node.name))?;
        for network in &spec.networks {
            let tenants: BTreeSet<&str> = network.tenants.iter().map(|t| t.name.as_str()).collect();
            let may: BTreeSet<&str> = self::tenants(api)
                .into_iter()
                .filter(|t| t.spec.networks.contains(&network.name))
                .map(|t| name(&t.metadata))
                .collect();
            must(tenants == may, format!("{} of {}: {tenants:?}", network.name, node.name))?;
        }
        at_rest_blocks(api, node, &hosted, agents)?;
        at_rest_limits(api, node, &spec.nics)?;
    }
    must(objects == matched, format!("objects of {objects:?}, selected {matched:?}"))?;
    for policy in policies(api) {
        for pool in &policy.spec.pools {
            let known = networks(api).iter().any(|n| name(&n.metadata) == pool.network);
            if known {
                offered.insert(pool.name.clone());
            }
        }
    }
    let attachments: BTreeSet<String> = api.list(Kind::Attachment).map(Object::name).collect();
    must(attachments == offered, format!("definitions {attachments:?}, pools {offered:?}"))?;
    at_rest_trust(api)?;
    at_rest_names(api, agents)?;
    at_rest_tenants(api, agents)
}

/// Whoever has a named NIC is there; of NICs that want one identity one is accepted, and only
/// because of it, or of a pod that has one, another is not.
fn at_rest_names(api: &Api, agents: &BTreeMap<String, Agent>) -> Result<(), String> {
    let mut accepted = BTreeMap::new();
    let mut waiting = Vec::new();
    for object in api.list(Kind::Nic) {
        let Object::Nic(nic) = object else { continue };
        let Some(mac) = nic.spec.mac.clone() else { continue };
        let identity = (nic.spec.network.clone(), mac);
        let status = nic.status.clone().unwrap_or_default();
        let said = status.conditions.iter().find(|c| c.type_ == "Accepted");
        if said.is_some_and(vhost_rdma_cluster_api::Condition::holds)
            && let Some(other) = accepted.insert(identity.clone(), nic.metadata.uid.clone())
        {
            return Err(format!("{nic:?} and {other:?} have {identity:?}"));
        }
        if said.is_some_and(|said| said.message.contains("another NIC")) {
            waiting.push((identity.clone(), nic.metadata.uid.clone()));
        } else if status.pod_uid.is_some() {
            accepted.entry(identity).or_insert(nic.metadata.uid.clone());
        }
    }
    if let Some(one) = waiting.iter().find(|(identity, _)| !accepted.contains_key(identity)) {
        return Err(format!("nobody has what is kept from {one:?}"));
    }
    for object in api.list(Kind::Nic) {
        let Object::Nic(nic) = object else { continue };
        let status = nic.status.clone().unwrap_or_default();
        let judged = status.conditions.iter().any(|c| c.type_ == "Accepted");
        if !judged {
            return Err(format!("nobody looked at {nic:?}"));
        }
        let Some(uid) = &status.pod_uid else { continue };
        let on = status.node.as_ref().and_then(|node| agents.get(node));
        let there = on.is_some_and(|agent| agent.nics().any(|nic| nic.pod_uid == *uid));
        if !there || !api.pods.contains(uid) {
            return Err(format!("{:?} is that of {uid}, which is gone", nic.metadata.name));
        }
    }
    Ok(())
}

/// A node hears what its pods' named NICs say now, of those that have changed since they were made.
fn at_rest_limits(api: &Api, node: &NodeInfo, said: &[NodeNic]) -> Result<(), String> {
    let mut wanted: Vec<NodeNic> = Vec::new();
    for object in api.list(Kind::Nic) {
        let Object::Nic(nic) = object else { continue };
        let on = nic.status.as_ref().and_then(|status| status.node.as_ref());
        let generation = nic.metadata.generation.unwrap_or_default();
        if on == Some(&node.name) && generation != 1 {
            let uid = uid(&nic.metadata).to_owned();
            wanted.push(NodeNic { uid, generation, limits: nic.spec.limits });
        }
    }
    wanted.sort_by(|a, b| a.uid.cmp(&b.uid));
    if said != wanted {
        return Err(format!("{} hears {said:?}, of {wanted:?}", node.name));
    }
    Ok(())
}

/// One root, published; every request of a node that is there has its answer.
fn at_rest_trust(api: &Api) -> Result<(), String> {
    let (Some(authority), Some(roots)) = (api.authority_now(), api.roots_now()) else {
        return Err("there is no authority".to_owned());
    };
    let current = authority.current.as_ref().map(|root| &root.id);
    if authority.next.is_some() || authority.old.is_some() || authority.rotate {
        return Err(format!("a rotation does not end: {authority:?}"));
    }
    if current != Some(&roots.current) || current != Some(&roots.certificates) {
        return Err(format!("published: {roots:?}, {current:?} signs"));
    }
    let open = api.list(Kind::Request).find(|object| match object {
        Object::Request(request) => !request.done,
        _ => false,
    });
    open.map_or(Ok(()), |open| Err(format!("without an answer: {open:?}")))
}

fn at_rest_blocks(
    api: &Api,
    node: &NodeInfo,
    hosted: &BTreeSet<&String>,
    agents: &BTreeMap<String, Agent>,
) -> Result<(), String> {
    let mine: Vec<_> = blocks(api).into_iter().filter(|b| b.spec.node == node.name).collect();
    for block in &mine {
        if block.spec.releasing || !hosted.contains(&block.spec.network) {
            return Err(format!("{:?} is leaked", block.metadata.name));
        }
        if block.status.as_ref().is_none_or(|status| !status.bound) {
            return Err(format!("{:?} does not say that it is bound", block.metadata.name));
        }
    }
    for network in hosted {
        let Some(Object::Network(found)) = api.get(Kind::Network, network) else { continue };
        let Some(ipam) = &found.spec.ipam else { continue };
        let of = mine.iter().filter(|block| block.spec.network == **network);
        let addresses = of.count() * ipam.block_size as usize;
        let nics = agents[&node.name].nics().filter(|nic| nic.network == **network).count();
        let all = blocks(api).into_iter().filter(|b| b.spec.network == **network).count() as u64;
        let total: u64 = ipam.cidrs.iter().map(|cidr| cidr.blocks(ipam.block_size)).sum();
        if addresses <= nics && all < total {
            return Err(format!("{} has {addresses} addresses of {network}", node.name));
        }
    }
    Ok(())
}

fn at_rest_tenants(api: &Api, agents: &BTreeMap<String, Agent>) -> Result<(), String> {
    let mut sums: BTreeMap<String, (u32, Usage)> = BTreeMap::new();
    for namespace in namespaces(api) {
        // All were made at the same time, so the name decides.
        let owner = tenants(api)
            .into_iter()
            .filter(|tenant| tenant.spec.namespace_selector.matches(&namespace.labels))
            .map(|tenant| name(&tenant.metadata).to_owned())
            .min();
        let Some(owner) = owner else { continue };
        let sum = sums.entry(owner).or_default();
        sum.0 += 1;
        for nic in agents.values().flat_map(Agent::nics) {
            if nic.namespace == namespace.name {
                sum.1 = sum.1.plus(nic.usage());
            }
        }
    }
    for tenant in tenants(api) {
        let wanted = sums.get(name(&tenant.metadata)).copied().unwrap_or_default();
        let status = tenant.status.clone().unwrap_or_default();
        if !status.reserved.is_empty() {
            return Err(format!("places of pods that never came: {status:?}"));
        }
        if (status.namespaces, status.used) != wanted {
            return Err(format!("{:?}: {status:?}, wanted {wanted:?}", tenant.metadata.name));
        }
    }
    Ok(())
}
