//! Where management datagrams go: to a NIC of this daemon, or to the daemon that a peer entry names; and which are let in from there.

use std::fmt;
use std::sync::Arc;

use super::addresses::{Directory, Known, Peer};
use super::mad::{Inbox, Mad};
use crate::transport::Gid;

/// The daemon that serves a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// As `HOST:PORT`.
    pub daemon: Arc<str>,
    /// The host of that: whom its certificate must be for.
    pub host: Arc<str>,
    /// The network's name, which both daemons know it by.
    pub network: Arc<str>,
}

/// Brings datagrams to other daemons.
pub trait Carrier: Send + Sync {
    /// Sends one to `daemon`, without ever waiting; false if it is lost.
    fn carry(&self, daemon: &Arc<str>, network: &str, mad: Mad) -> bool;
}

impl fmt::Debug for dyn Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier").finish_non_exhaustive()
    }
}

/// Why a datagram of another daemon is not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No peer entry of that network names its source, with a daemon that the sender's certificate is for.
    #[error("no peer entry of this network names its source and the daemon that sent it")]
    NotAPeer,
    /// Its source is an address of a NIC of this daemon.
    #[error("its source is an address of a NIC of this host")]
    Ours,
    /// No NIC of the network has the address that it is for.
    #[error("no NIC of this network has the address that it is for")]
    Nobody,
}

/// The entry that decides for an address: of those that name it, the one with the longest prefix.
pub(super) fn best<'a>(peers: &'a [Peer], gid: &Gid) -> Option<&'a Peer> {
    let named = peers.iter().filter(|peer| peer.through(gid).is_some());
    named.max_by_key(|peer| peer.prefix_len)
}

impl Known {
    /// Where datagrams for an address go in, on whatever RNIC.
    fn inbox(&self, vni: u32, gid: &Gid) -> Option<&Arc<Inbox>> {
        let mut holders = self.holders.iter();
        let found = holders.find(|((_, of, address), _)| *of == vni && address == gid);
        found.map(|(_, held)| &held.inbox)
    }
}

impl Directory {
    /// Opens the way to other daemons; there is one at most.
    pub fn set_carrier(&self, carrier: Arc<dyn Carrier>) {
        if self.carrier.set(carrier).is_err() {
            tracing::error!("there is a way to other daemons already");
        }
    }

    /// Brings a datagram of QP 1 to the NIC of the same network that has its destination, here or behind another daemon. What finds
    /// nobody is lost.
    pub(super) fn carry(&self, device: &str, vni: u32, mad: Mad) {
        let known = self.known();
        let key = (device.to_owned(), vni, mad.dest);
        let taken = if let Some(held) = known.holders.get(&key) {
            let inbox = held.inbox.clone();
            drop(known);
            inbox.put(mad)
        } else {
            let peers = known.peers.get(&vni).map(Vec::as_slice).unwrap_or_default();
            let remote = best(peers, &mad.dest).and_then(|peer| peer.remote.clone());
            drop(known);
            remote.zip(self.carrier.get()).is_some_and(|(remote, carrier)| {
                carrier.carry(&remote.daemon, &remote.network, mad)
            })
        };
        if !taken {
            tracing::debug!(device, vni, "a management datagram is lost");
        }
    }

    /// Takes in a datagram of another daemon. `may_be` tells whether that daemon's certificate is for a host.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn accept(
        &self,
        network: &str,
        mad: Mad,
        may_be: impl Fn(&str) -> bool,
    ) -> Result<(), Refusal> {
        let inbox = {
            let known = self.known();
            let mut entries = known.peers.iter().filter_map(|(vni, peers)| {
                let remote = best(peers, &mad.source)?.remote.as_ref();
                let remote = remote.filter(|remote| *remote.network == *network)?;
                Some((*vni, &remote.host))
            });
            let entry = entries.next().filter(|(_, host)| may_be(host));
            let (vni, _) = entry.ok_or(Refusal::NotAPeer)?;
            if known.inbox(vni, &mad.source).is_some() {
                return Err(Refusal::Ours);
            }
            known.inbox(vni, &mad.dest).cloned().ok_or(Refusal::Nobody)?
        };
        // What finds no room is lost, as on a wire.
        inbox.put(mad);
        Ok(())
    }
}
