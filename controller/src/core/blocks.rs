//! Blocks of addresses: who needs one, who gives one back.
//!
//! How a block changes hands: `vhost_rdma_cluster_api::RdmaNode`.

use vhost_rdma_cluster_api::{
    Cidr, Ipam, RdmaIPBlock, RdmaIPBlockSpec, RdmaIPBlockStatus, RdmaNetwork, block_name,
};

use super::write::{Guard, Key, Plan, Write};
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
        .filter(|v4| capacity(world, node, &uid, *v4) <= used)
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

/// How many addresses the node's blocks of this family have: each as many as it was made with,
/// whatever a block of the network is now.
fn capacity(world: &World, node: &str, uid: &str, v4: bool) -> u64 {
    world
        .index
        .blocks_of(node)
        .filter_map(|name| world.blocks.get(name))
        .filter(|block| block.spec.network_uid == uid && !block.spec.releasing)
        .filter(|block| block.spec.cidr.first().is_ipv4() == v4)
        .map(|block| block.spec.cidr.blocks(1))
        .fold(0, u64::saturating_add)
}

/// A range of which nobody has anything, from a place that the node's name gives.
fn free(world: &World, node: &str, name: &str, ipam: &Ipam, v4: bool) -> Option<Cidr> {
    // A block that is being given back is one: its node's pods have its addresses still.
    let taken = |range: &Cidr| {
        world.in_blocks.overlapping(name, range).or_else(|| {
            let named = ipam.named.iter().find(|named| named.overlaps(range)).copied();
            named.or_else(|| world.in_nics.overlapping(name, range))
        })
    };
    ipam.cidrs.iter().filter(|cidr| cidr.first().is_ipv4() == v4).find_map(|cidr| {
        let blocks = cidr.blocks(ipam.block_size);
        let mut index = digest(node) % blocks;
        let mut left = blocks;
        // Each turn passes over something that is taken, or is the last.
        while left > 0 {
            let block = cidr.block(ipam.block_size, index)?;
            let Some(larger) = taken(&block) else { return Some(block) };
            // A larger range has all of its blocks; it begins where a block begins.
            let bits = u32::from(block.length().saturating_sub(larger.length()));
            let within = 1_u64.checked_shl(bits).map_or(index, |count| index % count);
            let count = 1_u64.checked_shl(bits).unwrap_or(u64::MAX) - within;
            index = index.checked_add(count).filter(|next| *next < blocks).unwrap_or(0);
            left = left.saturating_sub(count);
        }
        None
    })
}

impl World {
    pub(super) fn set_block(&mut self, name: &str, new: Option<RdmaIPBlock>) {
        let old = match &new {
            Some(block) => self.blocks.insert(name.to_owned(), block.clone()),
            None => self.blocks.remove(name),
        };
        if new.is_none()
            && let Some(block) = &old
        {
            self.mark_waiting_for_blocks(&block.spec.network);
        }
        let moved = old.is_some() != new.is_some();
        let mut at = None;
        for (block, present) in [(old, false), (new, true)] {
            let Some(block) = block else { continue };
            let spec = block.spec;
            self.index.set_block(name, &spec.node, &spec.network, present);
            self.in_blocks.set(&spec.network, spec.cidr, present);
            self.mark([Key::Node(spec.node), Key::Network(spec.network.clone())]);
            at = Some((spec.network, spec.cidr));
        }
        if let Some((network, cidr)) = at.filter(|_| moved) {
            self.judge_nics_in(&network, &cidr);
        }
        self.peers.blocks.insert(name.to_owned());
        self.mark([Key::Block(name.to_owned())]);
    }

    /// A block came or went: if that is in a range of named NICs, they are judged by it.
    fn judge_nics_in(&mut self, network: &str, cidr: &Cidr) {
        let ipam = self.networks.get(network).and_then(|network| network.spec.ipam.as_ref());
        if ipam.is_some_and(|ipam| ipam.named.iter().any(|named| named.overlaps(cidr))) {
            self.judge_nics_of_network(network);
        }
    }

    /// A block of a network becomes free: if there was none, somebody may wait for it.
    fn mark_waiting_for_blocks(&mut self, network: &str) {
        let ipam = self.networks.get(network).and_then(|network| network.spec.ipam.as_ref());
        let Some(ipam) = ipam else { return };
        let size = ipam.block_size;
        let sum = |of: &mut dyn Iterator<Item = u64>| of.fold(0, u64::saturating_add);
        let was_full = |v4: bool| {
            let of_family = || ipam.cidrs.iter().filter(move |cidr| cidr.first().is_ipv4() == v4);
            let all = sum(&mut of_family().map(|cidr| cidr.blocks(size)));
            let blocks = self.in_blocks.of(network).map_or(0, |taken| taken.touching(v4, size));
            let named =
                ipam.named.iter().filter(|named| of_family().any(|cidr| cidr.overlaps(named)));
            let named = sum(&mut named.map(|named| named.blocks(size)));
            let nics = self.in_nics.of(network);
            let nics = sum(&mut of_family().filter_map(|cidr| Some(nics?.inside(cidr))));
            all > 0 && sum(&mut [blocks, named, nics].into_iter()) >= all
        };
        if was_full(true) || was_full(false) {
            self.mark_hosts(network);
        }
    }

    /// A named NIC lets go of its address: if that is in a range of blocks by now, somebody may
    /// wait for it.
    pub(super) fn mark_waiting_for_address(&mut self, network: &str, range: &Cidr) {
        let ipam = self.networks.get(network).and_then(|network| network.spec.ipam.as_ref());
        if ipam.is_some_and(|ipam| ipam.cidrs.iter().any(|cidr| cidr.overlaps(range))) {
            self.mark_hosts(network);
        }
    }

    fn mark_hosts(&mut self, network: &str) {
        let hosts: Vec<Key> =
            self.index.hosts(network).map(|node| Key::Node(node.to_owned())).collect();
        self.mark(hosts);
    }
}

/// Whether the node should have the block. Not its object decides: one that somebody deletes is
/// made again, and its agent goes by its last word until then. That one has forgotten what the node
/// held, so a block that was wanted back meanwhile would be free under the node's pods.
fn needed(world: &World, block: &RdmaIPBlockSpec) -> bool {
    let offered =
        world.nodes.contains_key(&block.node) && world.offered(&block.node, &block.network);
    offered
        && world.networks.get(&block.network).is_some_and(|network| {
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

#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
