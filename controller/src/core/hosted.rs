//! What of a node's object concerns lists of peers, and what has changed in that.

use std::collections::BTreeSet;

use vhost_rdma_cluster_api::RdmaNode;

/// What concerns lists of peers and has changed in the copy of the cluster.
#[derive(Debug, Clone, Default)]
pub(super) struct Changed {
    pub(super) networks: BTreeSet<String>,
    pub(super) nodes: BTreeSet<String>,
    pub(super) blocks: BTreeSet<String>,
}

/// Whether two states of a node's object differ in what peers are told.
pub(super) fn differs(old: Option<&RdmaNode>, new: Option<&RdmaNode>) -> bool {
    let said = |node: Option<&RdmaNode>| {
        let status = node.and_then(|node| node.status.as_ref());
        let rnics: Vec<_> = status
            .iter()
            .flat_map(|status| &status.rnics)
            .map(|rnic| (rnic.fabric.clone(), rnic.host_address.clone()))
            .collect();
        let channel = status.and_then(|status| status.channel.as_ref());
        (networks(node), rnics, channel.map(|channel| channel.endpoint.clone()))
    };
    said(old) != said(new)
}

/// UIDs of networks that a node hosts: those that it shall, and those that it still has.
pub(super) fn networks(node: Option<&RdmaNode>) -> BTreeSet<String> {
    let Some(node) = node else { return BTreeSet::new() };
    let shall = node.spec.networks.iter().map(|network| &network.uid);
    let has = node.status.iter().flat_map(|status| &status.networks).map(|network| &network.uid);
    shall.chain(has).cloned().collect()
}
