//! Blocks of addresses: who needs one, who gives one back.
//!
//! How a block changes hands: `vhost_rdma_cluster_api::RdmaNode`.

use vhost_rdma_cluster_api::{
    Cidr, Ipam, RdmaIPBlock, RdmaIPBlockSpec, RdmaIPBlockStatus, RdmaNetwork, block_name,
};

use super::write::{Guard, Plan, Write};
use super::{World, digest};

/// The blocks that `node` needs of `network` and does not have: at most one of each family at a
/// time.
pub(super) fn lacking(world: &World, node: &str, name: &str, network: &RdmaNetwork) -> Vec<Write> {
    let Some(ipam) = &network.spec.ipam else { return Vec::new() };
    let uid = network.metadata.uid.clone().unwrap_or_default();
    let used = u64::from(world.addresses(node, &uid));
    [true, false]
        .into_iter()
        .filter(|v4| ipam.cidrs.iter().any(|cidr| cidr.first().is_ipv4() == *v4))
        .filter(|v4| capacity(world, node, &uid, ipam, *v4) <= used)
        .filter_map(|v4| free(world, node, name, ipam, v4))
        .map(|cidr| {
            let spec = RdmaIPBlockSpec {
                network: name.to_owned(),
                network_uid: uid.clone(),
                cidr,
                node: node.to_owned(),
                releasing: false,
            };
            Write::CreateBlock(RdmaIPBlock::new(&block_name(name, &cidr), spec))
        })
        .collect()
}

/// How many addresses the node's blocks of this family have.
fn capacity(world: &World, node: &str, uid: &str, ipam: &Ipam, v4: bool) -> u64 {
    world
        .index
        .blocks_of(node)
        .filter_map(|name| world.blocks.get(name))
        .filter(|block| block.spec.network_uid == uid && !block.spec.releasing)
        .filter(|block| block.spec.cidr.first().is_ipv4() == v4)
        .map(|_| u64::from(ipam.block_size))
        .sum()
}

/// A range that no block has, from a place that the node's name gives.
fn free(world: &World, node: &str, name: &str, ipam: &Ipam, v4: bool) -> Option<Cidr> {
    ipam.cidrs.iter().filter(|cidr| cidr.first().is_ipv4() == v4).find_map(|cidr| {
        let blocks = cidr.blocks(ipam.block_size);
        let start = digest(node) % blocks;
        // One more than there are blocks cannot all be taken.
        let tries = blocks.min(u64::try_from(world.index.blocks_in(name)).unwrap_or(0) + 1);
        (0..tries)
            .filter_map(|step| cidr.block(ipam.block_size, start.wrapping_add(step) % blocks))
            .find(|block| !world.blocks.contains_key(&block_name(name, block)))
    })
}

/// Whether the node should have the block.
fn needed(world: &World, block: &RdmaIPBlockSpec) -> bool {
    world.rdma_nodes.get(&block.node).is_some_and(|node| {
        node.metadata.deletion_timestamp.is_none()
            && world.nodes.contains_key(&block.node)
            && world.offered(&block.node, &block.network)
    }) && world.networks.get(&block.network).is_some_and(|network| {
        network.metadata.uid.as_deref() == Some(&block.network_uid)
            && network.metadata.deletion_timestamp.is_none()
            && network
                .spec
                .ipam
                .as_ref()
                .is_some_and(|ipam| ipam.cidrs.iter().any(|cidr| cidr.covers(&block.cidr)))
    })
}

/// Takes a block back that its node does not need, as soon as the node lets go of it.
pub(super) fn plan(world: &World, name: &str) -> Plan {
    let Some(block) = world.blocks.get(name) else { return Plan::default() };
    let uid = block.metadata.uid.clone().unwrap_or_default();
    let held = world.holds_block(&block.spec.node, &uid);
    if block.spec.releasing {
        if held {
            return Plan::default();
        }
        let guard = Guard::NodeHoldsNot { node: block.spec.node.clone(), uid };
        return vec![Write::DeleteBlock(block.clone(), guard)].into();
    }
    // A node that is only away for a moment has its object still; so it keeps its blocks.
    let away = !world.nodes.contains_key(&block.spec.node)
        && world.rdma_nodes.contains_key(&block.spec.node);
    if !away && !needed(world, &block.spec) {
        let mut wanted = block.clone();
        wanted.spec.releasing = true;
        return vec![Write::ReplaceBlock(wanted)].into();
    }
    let status = RdmaIPBlockStatus { bound: held };
    if block.status.as_ref().unwrap_or(&RdmaIPBlockStatus::default()) == &status {
        return Plan::default();
    }
    vec![Write::BlockStatus(RdmaIPBlock { status: Some(status), ..block.clone() })].into()
}
