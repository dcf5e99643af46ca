//! The rules that a schema cannot say, for API servers that do not know CEL and for what CEL cannot
//! know. Each check gives the sentences that say what is wrong and how it is put right.

use std::net::IpAddr;

use crate::network::BLOCK_BITS_MAX;
use crate::{
    Cidr, NetworkBacking, RdmaNetworkSpec, RdmaNicClassSpec, RdmaNicSpec, RdmaNodePolicySpec,
};

/// The longest name of a network: names of blocks and pools are made of it.
pub const NETWORK_NAME_MAX: usize = 40;

/// What is wrong with a network. `vni` is the one that it has already.
#[must_use]
pub fn network(name: &str, spec: &RdmaNetworkSpec, vni: Option<u32>) -> Vec<String> {
    let mut wrong = Vec::new();
    if name.len() > NETWORK_NAME_MAX || name.contains('.') {
        wrong.push(format!("the name must have at most {NETWORK_NAME_MAX} characters and no dot"));
    }
    match spec.backing() {
        None => wrong.push("exactly one of soft and rnic says what carries the network".to_owned()),
        Some(NetworkBacking::Soft) if !spec.allow.is_empty() => wrong.push(
            "allow names peers beyond the node, which only a network on an RNIC reaches".to_owned(),
        ),
        Some(_) => {}
    }
    if let (Some(wanted), Some(had)) = (spec.vni, vni)
        && wanted != had
    {
        wrong.push(format!(
            "the vni of a network cannot be changed from {had} to {wanted}: make a new network"
        ));
    }
    if let Some(ipam) = &spec.ipam {
        if !ipam.block_size.is_power_of_two() || ipam.block_size > 1 << BLOCK_BITS_MAX {
            wrong.push(format!(
                "blockSize {} must be a power of two, at most {}",
                ipam.block_size,
                1 << BLOCK_BITS_MAX
            ));
        }
        if ipam.cidrs.is_empty() {
            wrong.push("ipam needs at least one range in cidrs".to_owned());
        }
        let all: Vec<Cidr> = ipam.cidrs.iter().chain(&ipam.named).copied().collect();
        wrong.extend(overlap(&all));
    }
    wrong
}

fn overlap(ranges: &[Cidr]) -> Option<String> {
    let pairs =
        ranges.iter().enumerate().flat_map(|(n, a)| ranges[..n].iter().map(move |b| (b, a)));
    let (a, b) = pairs.into_iter().find(|(a, b)| a.overlaps(b))?;
    Some(format!("the ranges {a} and {b} overlap"))
}

/// What is wrong with a class.
#[must_use]
pub fn class(spec: &RdmaNicClassSpec) -> Vec<String> {
    let heap = spec.shared_heap && spec.consumer.is_vm();
    let why = "sharedHeap is of programs in the pod itself: it needs the consumer Process";
    heap.then(|| why.to_owned()).into_iter().collect()
}

/// What is wrong with a node policy by itself.
#[must_use]
pub fn policy(spec: &RdmaNodePolicySpec) -> Vec<String> {
    let mut wrong = Vec::new();
    for (n, pool) in spec.pools.iter().enumerate() {
        if spec.pools[..n].iter().any(|other| other.name == pool.name) {
            wrong.push(format!("two pools are called {:?}", pool.name));
        }
        if pool.count == 0 {
            wrong.push(format!("the pool {:?} has no NICs: count must be at least 1", pool.name));
        }
    }
    wrong
}

/// What is wrong with a NIC, of a network that has these ranges.
#[must_use]
pub fn nic(spec: &RdmaNicSpec, network: &RdmaNetworkSpec) -> Vec<String> {
    let mut wrong = Vec::new();
    if spec.mac.as_deref() == Some("00:00:00:00:00:00") {
        wrong.push("00:00:00:00:00:00 is no MAC address of anything".to_owned());
    }
    if let Some(text) = &spec.address {
        match (text.parse::<IpAddr>(), &network.ipam) {
            (Err(_), _) => wrong.push(format!("{text:?} is not an IP address")),
            (Ok(address), Some(ipam)) if !ipam.named.iter().any(|c| c.contains(address)) => {
                wrong.push(format!(
                    "{address} is in no range of ipam.named of the network {:?}",
                    spec.network
                ));
            }
            _ => {}
        }
    }
    wrong
}
