//! What all NICs on RNICs of a host share, whoever serves them: who has which address, who may be
//! reached, and the ways to other daemons and to third-party hosts.
//!
//! It is where all networks are known: in a data plane that serves them all, or beside processes
//! that serve one each and ask.

use std::sync::Arc;

use super::cm_bridge::CmBridgeStarter;
use super::neighbours::Neighbours;
use crate::channel::{Channel, ChannelError, GiveIdentity, Opened};
use crate::node::{Peer, host_and_port};
use crate::rnic::{self, Directory, Remote};

/// See the module.
#[derive(Debug, Default)]
pub struct Outside {
    directory: Arc<Directory>,
    /// The way to other daemons.
    channel: Option<Channel>,
    /// The way to third-party hosts.
    cm_bridge: CmBridgeStarter,
    neighbours: Neighbours,
}

impl Outside {
    /// Nobody is known; third-party hosts will reach guests at `ports`.
    #[must_use]
    pub fn new(ports: Vec<u16>) -> Self {
        Self { cm_bridge: CmBridgeStarter::new(ports), ..Self::default() }
    }

    /// Has rdma_cm of guests on RNICs go to other daemons.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn run_channel(&mut self, opened: Opened) -> Result<GiveIdentity, ChannelError> {
        let channel = Channel::start(opened, &self.directory)?;
        let identity = channel.identity();
        self.channel = Some(channel);
        Ok(identity)
    }

    /// There is a NIC on an RNIC.
    pub fn wanted(&self) {
        self.cm_bridge.wanted(&self.directory);
    }

    /// By which neighbours are looked for.
    #[must_use]
    pub const fn neighbours(&self) -> &Neighbours {
        &self.neighbours
    }

    /// Who is known.
    #[must_use]
    pub const fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }
}

/// Peers of a network, as the directory has them.
pub(crate) fn entries(peers: &[Peer]) -> Vec<rnic::Peer> {
    let entries = peers.iter().map(|peer| rnic::Peer {
        address: peer.address,
        prefix_len: peer.prefix_len,
        through: peer.through,
        remote: peer.daemon.as_deref().and_then(|daemon| remote(&peer.network, daemon)),
    });
    entries.collect()
}

/// Where rdma_cm of a peer goes.
fn remote(network: &str, daemon: &str) -> Option<Remote> {
    let (host, _) = host_and_port(daemon)?;
    Some(Remote { daemon: daemon.into(), host: host.into(), network: network.into() })
}
