//! What the controller says of this node, taken up: on the disk first, then in force.
//!
//! Nothing that a pod has is taken away by it. Pools that are no longer said are offered to nobody;
//! limits reach NICs that run in the next round, which begins at once; a network that is no longer
//! said goes from the daemon when its last NIC has, and is reported until then, since the
//! controller gives its VNI to nobody else before.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use kube::Client;
use vhost_rdma_cluster_api::{NodeBlock, RdmaNode};

use super::{Agent, Server, State};
use crate::cluster::addresses::free;
use crate::cluster::{Snapshot, Standing};
use crate::config::PoolConfig;
use crate::daemon::{Daemon, DaemonError};
use crate::holders::Kubelet;
use crate::ledger::{Grant, Slot};

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Takes what the controller says now. An object that is gone says nothing: what was said last
    /// holds, as it does without a control plane.
    ///
    /// # Errors
    /// It cannot be written down; nothing has changed.
    pub async fn follow(&self, node: &RdmaNode) -> io::Result<()> {
        let uid = node.metadata.uid.as_deref().unwrap_or_default();
        let generation = node.metadata.generation.unwrap_or_default();
        let mut state = self.state.lock().await;
        let new = state.standing.taking(uid, generation, &node.spec);
        if new == state.standing {
            return Ok(());
        }
        self.keep(&new).await?;
        let other = new.spec != state.standing.spec;
        state.standing = new;
        if other {
            tracing::info!(generation, "the controller's word for this node is in force");
            let inventory = Arc::clone(&state.inventory);
            self.offer(&mut state, inventory);
        }
        self.note(&state);
        drop(state);
        self.wake.notify_one();
        Ok(())
    }

    /// Whether a controller says what the node offers: then the kubelet asks before a container
    /// starts.
    #[must_use]
    pub const fn is_led(&self) -> bool {
        self.settings.cluster
    }

    /// There is an API server, in which this node has this name: namespaces can be asked for, and
    /// NICs claimed.
    pub fn meet(&self, client: Client, node: &str) {
        // A second one is as good as the first.
        let _ = self.server.set(Server { client, node: node.to_owned() });
    }

    async fn keep(&self, standing: &Standing) -> io::Result<()> {
        let (snapshot, standing) = (Snapshot::new(&self.state_dir), standing.clone());
        tokio::task::spawn_blocking(move || snapshot.write(&standing))
            .await
            .map_err(io::Error::other)?
    }

    /// Removes networks from the daemon that the controller no longer names and no NIC is in.
    pub(super) async fn leave_networks(&self, state: &mut State) {
        if state.daemon.view.is_none() {
            return;
        }
        let used = |uid: &str| {
            let mut grants = state.ledger.iter().filter_map(|(_, slot)| slot.grant.as_ref());
            grants.any(|grant| grant.cluster.as_ref().is_some_and(|of| of.network_uid == uid))
        };
        let leaving: Vec<(String, String, u32)> = state
            .standing
            .leaving()
            .filter(|(uid, _)| !used(uid))
            .map(|(uid, network)| (uid.clone(), network.name.clone(), network.vni))
            .collect();
        if leaving.is_empty() {
            return;
        }
        // Whoever gives the daemon peers of these is waited for: it makes networks.
        let _telling = self.teller.lock().await;
        for (uid, name, vni) in leaving {
            match self.daemon.remove_network(&name, vni).await {
                Ok(()) => self.be_rid_of(state, &uid, &name).await,
                // NICs that are not the agent's: it is tried again.
                Err(DaemonError::Refused(why)) => tracing::debug!(name, why, "the network stays"),
                Err(error) => {
                    tracing::warn!(name, %error, "cannot remove a network; it is tried again");
                }
            }
        }
    }

    async fn be_rid_of(&self, state: &mut State, uid: &str, name: &str) {
        let mut rid = state.standing.clone();
        rid.hosted.remove(uid);
        match self.keep(&rid).await {
            Ok(()) => state.standing = rid,
            Err(error) => tracing::error!(%error, "cannot write down that a network is gone"),
        }
        state.networks.remove(name);
    }

    /// Blocks that the controller names and that are not the node's own yet.
    pub async fn offered_blocks(&self) -> Vec<NodeBlock> {
        self.state.lock().await.standing.offered().cloned().collect()
    }

    /// A block is the node's own: the API server knew that the node holds it before it said so.
    ///
    /// # Errors
    /// It cannot be written down; nothing has changed.
    pub async fn own(&self, block: &NodeBlock) -> io::Result<()> {
        let mut state = self.state.lock().await;
        let mut new = state.standing.clone();
        if new.held.contains(block) {
            return Ok(());
        }
        new.held.push(block.clone());
        self.keep(&new).await?;
        tracing::info!(
            network = block.network,
            cidr = %block.cidr,
            "the node gives out these addresses"
        );
        state.standing = new;
        self.publish(&mut state);
        Ok(())
    }

    /// Blocks that the controller wants back and none of whose addresses a NIC has.
    pub(super) async fn let_blocks_go(&self, state: &mut State) {
        let taken = |block: &NodeBlock| {
            let grants = state.ledger.iter().filter_map(|(_, slot)| slot.grant.as_ref());
            let mut of = grants.filter(|g| g.cluster.is_some() && g.network == block.network);
            of.any(|grant| grant.addresses().any(|address| block.cidr.contains(address)))
        };
        let named =
            |block: &NodeBlock| state.standing.spec.blocks.iter().any(|b| b.uid == block.uid);
        let held = &state.standing.held;
        let kept: Vec<NodeBlock> =
            held.iter().filter(|block| named(block) || taken(block)).cloned().collect();
        if kept.len() == held.len() {
            return;
        }
        let new = Standing { held: kept, ..state.standing.clone() };
        match self.keep(&new).await {
            Ok(()) => state.standing = new,
            Err(error) => tracing::error!(%error, "cannot write down that a block is given back"),
        }
    }
}

/// Addresses for a NIC of this pool: one of each family that the node has blocks of.
///
/// # Errors
/// There is none left, or none yet.
pub(super) fn addresses(
    state: &State,
    pool: &PoolConfig,
    promised: &BTreeMap<String, Slot>,
) -> Result<Vec<String>, String> {
    let Some(of) = pool.cluster.as_ref().filter(|of| of.ipam) else { return Ok(Vec::new()) };
    let slots = state.ledger.iter().map(|(_, slot)| slot).chain(promised.values());
    let taken: BTreeSet<IpAddr> = slots
        .filter_map(|slot| slot.grant.as_ref())
        .filter(|grant| grant.cluster.as_ref().is_some_and(|c| c.network_uid == of.network_uid))
        .flat_map(Grant::addresses)
        .collect();
    let network = pool.network();
    let mut given = Vec::new();
    for v4 in [true, false] {
        if !state.standing.givable(network).any(|block| block.first().is_ipv4() == v4) {
            continue;
        }
        let address = free(state.standing.givable(network), &taken, v4);
        let address = address.ok_or_else(|| {
            format!("every address that this node has of the network {network:?} is given out")
        })?;
        given.push(address.to_string());
    }
    if given.is_empty() {
        return Err(format!("this node has no addresses of the network {network:?} yet"));
    }
    Ok(given)
}
