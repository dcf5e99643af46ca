//! Where management datagrams go: to a NIC of this daemon, or to the daemon that a peer entry
//! names; and which are let in from there.

use std::sync::Arc;

use vhost_rdma_engine::cm::Mad;
use vhost_rdma_engine::link::Gid;

use super::directory::Directory;
use super::nic_quota::NicQuotas;
use super::peer_table::Peer;
use super::ways::{Agreed, Carrier, HostCm, Mac, Sent, Station};

/// Why a datagram of another daemon is not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No peer entry of that network names its source, with a daemon that the sender's certificate
    /// is for.
    #[error("no peer entry of this network names its source and the daemon that sent it")]
    NotAPeer,
    /// Its source is an address of a NIC of this daemon.
    #[error("its source is an address of a NIC of this host")]
    Ours,
    /// No NIC of the network has the address that it is for.
    #[error("no NIC of this network has the address that it is for")]
    Nobody,
}

impl Directory {
    /// Opens the way to other daemons; there is one at most.
    pub fn set_carrier(&self, carrier: Arc<dyn Carrier>) {
        if self.carrier.set(carrier).is_err() {
            tracing::error!("there is a way to other daemons already");
        }
    }

    /// Brings a datagram of QP 1 to the NIC of the same network that has its destination, here or
    /// behind another daemon. What finds nobody, or has no place left in a queue for those of
    /// `quotas`, is lost.
    pub fn carry(&self, device: &str, vni: u32, (nic, quotas): (Mac, &NicQuotas), mad: Mad) {
        let inbox_of = |gid| {
            let held = (vni, gid, device.to_owned());
            self.known().holder(&held).map(|holder| (holder.inbox.clone(), holder.host))
        };
        let taken = if let Some((inbox, _)) = inbox_of(mad.dest) {
            inbox.put(mad)
        } else if let Some(uplink) = self.uplink() {
            // Who knows the way looks at the peers again; what it would drop is dropped here.
            let named = self.peers().get(&vni).is_some_and(|peers| peers.best(&mad.dest).is_some());
            named && uplink.carry(&quotas.daemons, nic, mad)
        } else {
            let peers = self.peers();
            match peers.get(&vni).and_then(|peers| peers.best(&mad.dest)) {
                Some(Peer { remote: Some(remote), .. }) => {
                    let carrier = self.carrier.get();
                    let (quota, daemon, network) =
                        (&quotas.daemons, &remote.daemon, &*remote.network);
                    carrier.is_some_and(|way| way.carry(quota, daemon, network, mad))
                }
                Some(peer) => {
                    let from = inbox_of(mad.source);
                    let sent = from.map(|(inbox, host)| {
                        let to = peer.host_of(&mad.dest);
                        let (gid, device) = (mad.source, device.to_owned());
                        Sent { station: Station { device, vni, gid, inbox }, host, to, mad }
                    });
                    let way = self.host_cm.get().zip(sent);
                    way.is_some_and(|(host_cm, sent)| host_cm.carry(&quotas.host_cm, sent))
                }
                None => false,
            }
        };
        if !taken {
            tracing::debug!(device, vni, "a management datagram is lost");
        }
    }

    /// Takes in a datagram of another daemon. `may_be` tells whether that daemon's certificate is
    /// for a host.
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
            let peers = self.peers();
            let mut entries = peers.iter().filter_map(|(vni, peers)| {
                let remote = peers.best(&mad.source)?.remote.as_ref();
                let remote = remote.filter(|remote| *remote.network == *network)?;
                Some((*vni, &remote.host))
            });
            let entry = entries.next().filter(|(_, host)| may_be(host));
            let (vni, _) = entry.ok_or(Refusal::NotAPeer)?;
            let known = self.known();
            if known.holder_anywhere(vni, &mad.source).is_some() {
                return Err(Refusal::Ours);
            }
            let dest = known.holder_anywhere(vni, &mad.dest).ok_or(Refusal::Nobody)?;
            dest.inbox.clone()
        };
        // What finds no room is lost, as on a wire.
        inbox.put(mad);
        Ok(())
    }
}

/// Whether an address is IPv4's.
fn is_v4(gid: &Gid) -> bool {
    gid[..10] == [0; 10] && gid[10..12] == [0xff, 0xff]
}

#[cfg_attr(not(feature = "host-rnic"), allow(dead_code, reason = "librdmacm is for RNICs"))]
impl Directory {
    /// Opens the way to third-party hosts; there is one at most.
    pub(super) fn set_host_cm(&self, host_cm: Arc<dyn HostCm>) {
        if self.host_cm.set(host_cm).is_err() {
            tracing::error!("there is a way to third-party hosts already");
        }
    }

    /// The guest that a third-party host means by an address of the host, if it is told by that
    /// alone and may be reached by the peer.
    pub(super) fn station(&self, host: &Gid, peer: &Gid) -> Option<Station> {
        let station = self.station_of(host)?;
        let peers = self.peers();
        let entry = peers.get(&station.vni)?.best(peer)?;
        let ours = entry.remote.is_none() && entry.host_of(peer) == *peer;
        ours.then_some(station)
    }

    /// The one guest that an address of the host stands for.
    fn station_of(&self, host: &Gid) -> Option<Station> {
        let known = self.known();
        let mut found: Option<Station> = None;
        for ((vni, gid, device), held) in known.behind(host) {
            if found.as_ref().is_some_and(|other| !Arc::ptr_eq(&other.inbox, &held.inbox)) {
                return None;
            }
            if is_v4(gid) == is_v4(host) {
                let (device, inbox) = (device.clone(), held.inbox.clone());
                found = Some(Station { device, vni: *vni, gid: *gid, inbox });
            }
        }
        found
    }

    /// Whether a guest is still where it was.
    pub(super) fn is_at(&self, station: &Station) -> bool {
        let held = (station.vni, station.gid, station.device.clone());
        self.known().holder(&held).is_some_and(|held| Arc::ptr_eq(&held.inbox, &station.inbox))
    }

    /// Whether a QP is one of the guest's network.
    pub(super) fn has_qp(&self, station: &Station, qpn: u32) -> bool {
        self.has_qp_of(&station.device, qpn, station.vni)
    }

    /// The host's connection manager has agreed with a QP of a peer.
    pub(super) fn set_agreed(&self, device: &str, end: (Gid, u32), agreed: Agreed) {
        self.known().agreed.insert((device.to_owned(), end.0, end.1), agreed);
    }

    pub(super) fn forget_agreed(&self, device: &str, end: (Gid, u32)) {
        self.known().agreed.remove(&(device.to_owned(), end.0, end.1));
    }

    /// What was agreed with the QP `end.1` at `end.0`, if that was not the guest's to choose.
    pub(super) fn agreed(&self, device: &str, end: (Gid, u32)) -> Option<Agreed> {
        self.known().agreed.get(&(device.to_owned(), end.0, end.1)).copied()
    }
}
