//! All NICs on RNICs of this host, and the peers of their networks: who holds which address, whose
//! a queue pair is, and who may be reached.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::{ArcSwap, Guard};
use vhost_rdma_engine::cm::Inbox;
use vhost_rdma_engine::link::Gid;

use super::peer_table::{Peer, PeerTable};
use super::ways::{Agreed, Carrier, HostCm, Mac, Uplink};

/// An address of a NIC on an RNIC.
#[derive(Debug, Clone)]
pub(super) struct Holder {
    pub(super) nic: Mac,
    pub(super) host: Gid,
    pub(super) inbox: Arc<Inbox>,
}

/// A NIC of another process that wants an address.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Its MAC address.
    pub nic: Mac,
    /// The host's address that stands for the one it wants.
    pub host: Gid,
    /// Where datagrams for it go.
    pub inbox: Arc<Inbox>,
}

/// An address of a guest: its network, the address, the RNIC.
pub(super) type Held = (u32, Gid, String);

/// What is held for as long as one entry takes, and never while many are looked through: a worker
/// waits for whoever has it.
#[derive(Debug, Default)]
pub(super) struct Known {
    holders: BTreeMap<Held, Holder>,
    /// The same, by the host's address.
    by_host: BTreeSet<(Gid, Held)>,
    /// QPs, by device, QPN and network. Who tells of one is believed for his own network alone: so
    /// nobody takes another's away.
    qps: BTreeSet<(String, u32, u32)>,
    /// What was agreed with QPs of third-party hosts, by device, address and QPN: see `cm`.
    pub(super) agreed: BTreeMap<(String, Gid, u32), Agreed>,
}

impl Known {
    /// Who holds an address.
    pub(super) fn holder(&self, held: &Held) -> Option<&Holder> {
        self.holders.get(held)
    }

    /// All that is held.
    pub(super) fn held(&self) -> Vec<(Mac, Gid)> {
        self.holders.iter().map(|((_, gid, _), holder)| (holder.nic, *gid)).collect()
    }

    /// Who holds an address on whatever RNIC.
    pub(super) fn holder_anywhere(&self, vni: u32, gid: &Gid) -> Option<&Holder> {
        let from = (vni, *gid, String::new());
        let (held, holder) = self.holders.range(from..).next()?;
        (held.0 == vni && held.1 == *gid).then_some(holder)
    }

    /// The guests' addresses for which one of the host's stands, on whatever RNIC.
    pub(super) fn behind(&self, host: &Gid) -> impl Iterator<Item = (&Held, &Holder)> {
        let from = (*host, (0, [0; 16], String::new()));
        let all = self.by_host.range(from..).take_while(move |(at, _)| at == host);
        all.filter_map(|(_, held)| Some((held, self.holders.get(held)?)))
    }

    fn insert(&mut self, held: Held, holder: Holder) {
        self.remove(&held);
        self.by_host.insert((holder.host, held.clone()));
        self.holders.insert(held, holder);
    }

    fn remove(&mut self, held: &Held) {
        if let Some(holder) = self.holders.remove(held) {
            self.by_host.remove(&(holder.host, held.clone()));
        }
    }
}

/// Entries that are forgotten with the lock held.
const STEP: usize = 64;

/// All NICs on RNICs of this host, and the peers of their networks. Looked at by control commands
/// and management datagrams only.
#[derive(Debug, Default)]
pub struct Directory {
    known: Mutex<Known>,
    /// The peers of each network. Who reads them holds nothing up, however many there are.
    peers: ArcSwap<BTreeMap<u32, PeerTable>>,
    /// The way to other daemons, if there is one.
    pub(super) carrier: OnceLock<Arc<dyn Carrier>>,
    /// The way to third-party hosts, likewise.
    pub(super) host_cm: OnceLock<Arc<dyn HostCm>>,
    /// Who knows the other networks, if this one does not.
    pub(super) uplink: OnceLock<Arc<dyn Uplink>>,
}

impl Directory {
    pub(super) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peers of all networks, as they are now.
    pub(super) fn peers(&self) -> Guard<Arc<BTreeMap<u32, PeerTable>>> {
        self.peers.load()
    }

    fn change_peers(&self, vni: u32, peers: Option<&PeerTable>) {
        self.peers.rcu(|old| {
            let mut new = BTreeMap::clone(old);
            match peers {
                Some(peers) => new.insert(vni, peers.clone()),
                None => new.remove(&vni),
            };
            new
        });
    }

    /// Replaces the peers of a network.
    pub fn set_peers(&self, vni: u32, peers: Vec<Peer>) {
        self.change_peers(vni, Some(&PeerTable::new(peers)));
    }

    /// Forgets a network that is gone: its peers, and what its NICs may have left.
    pub fn forget_network(&self, vni: u32) {
        self.change_peers(vni, None);
        self.forget_nics(vni);
    }

    /// Forgets what the NICs of a network have.
    pub fn forget_nics(&self, vni: u32) {
        loop {
            let mut known = self.known();
            let of_it = known.holders.range((vni, [0; 16], String::new())..);
            let held = of_it.take_while(|((of, ..), _)| *of == vni).map(|(held, _)| held.clone());
            let some: Vec<Held> = held.take(STEP).collect();
            some.iter().for_each(|held| known.remove(held));
            if some.len() < STEP {
                break;
            }
        }
        let mut from = (String::new(), 0, 0);
        loop {
            let mut known = self.known();
            let looked: Vec<_> = known.qps.range(from.clone()..).take(STEP).cloned().collect();
            for of_it in looked.iter().filter(|(.., of)| *of == vni) {
                known.qps.remove(of_it);
            }
            match looked.last() {
                Some(last) if looked.len() == STEP => from.clone_from(last),
                _ => break,
            }
        }
    }

    /// A QP of a network's is there; false if that was known.
    pub fn add_qp(&self, device: &str, qpn: u32, vni: u32) -> bool {
        let new = self.known().qps.insert((device.to_owned(), qpn, vni));
        if let Some(uplink) = self.uplink() {
            uplink.queue_pair(device, qpn, true);
        }
        new
    }

    /// It is gone; false if it was not known.
    pub fn remove_qp(&self, device: &str, qpn: u32, vni: u32) -> bool {
        let old = self.known().qps.remove(&(device.to_owned(), qpn, vni));
        if let Some(uplink) = self.uplink() {
            uplink.queue_pair(device, qpn, false);
        }
        old
    }

    /// Whether a QP is one of a network's.
    pub(super) fn has_qp_of(&self, device: &str, qpn: u32, vni: u32) -> bool {
        self.known().qps.contains(&(device.to_owned(), qpn, vni))
    }

    /// Whether a QP of this host is one of another network's, and none of this one's.
    pub fn is_others(&self, device: &str, qpn: u32, vni: u32) -> bool {
        let known = self.known();
        let from = (device.to_owned(), qpn, 0);
        let mut of = known.qps.range(from..).take_while(|(at, n, _)| at == device && *n == qpn);
        of.next().is_some() && !known.qps.contains(&(device.to_owned(), qpn, vni))
    }

    /// Gives an address to a NIC of another process; false if another has it.
    pub fn claim_for(&self, (device, vni, gid): (&str, u32, Gid), claim: Claim) -> bool {
        let Claim { nic, host, inbox } = claim;
        self.claim(device, vni, gid, Holder { nic, host, inbox })
    }

    /// Such a NIC has an address no longer.
    pub fn release_of(&self, (device, vni, gid): (&str, u32, Gid), nic: Mac) {
        self.release(device, vni, gid, nic);
    }

    /// Gives an address to a NIC; false if another has it. A host address that a guest has for its
    /// own (`flat`) is one guest's only, in whatever network.
    pub(super) fn claim(&self, device: &str, vni: u32, gid: Gid, holder: Holder) -> bool {
        let mut known = self.known();
        let key = (vni, gid, device.to_owned());
        let own = known.holder(&key).is_none_or(|held| held.nic == holder.nic);
        let flat = holder.host == gid;
        let others = |known: &Known| {
            let mut same =
                known.behind(&gid).filter(|((_, guest, at), _)| at == device && *guest == gid);
            // Two networks may each have a NIC with this MAC address.
            same.any(|((of, ..), held)| *of != vni || held.nic != holder.nic)
        };
        let free = own && !(flat && others(&known));
        if free {
            known.insert(key, holder);
        }
        free
    }

    /// An address of a device has a holder that is no NIC: a test.
    #[cfg(any(test, feature = "testing"))]
    pub fn add_holder(&self, at: (&str, u32, Gid), host: Gid, inbox: Arc<Inbox>) {
        let key = (at.1, at.2, at.0.to_owned());
        self.known().insert(key, Holder { nic: [2; 6], host, inbox });
    }

    #[cfg(test)]
    pub(super) fn remove_holder(&self, at: (&str, u32, Gid)) {
        self.known().remove(&(at.1, at.2, at.0.to_owned()));
    }

    pub(super) fn release(&self, device: &str, vni: u32, gid: Gid, nic: [u8; 6]) {
        let key = (vni, gid, device.to_owned());
        let mut known = self.known();
        if known.holder(&key).is_some_and(|held| held.nic == nic) {
            known.remove(&key);
            drop(known);
            if let Some(uplink) = self.uplink() {
                uplink.release(nic, gid);
            }
        }
    }

    /// Whether an entry of a network names a group.
    pub(super) fn names_group(&self, vni: u32, group: &Gid) -> bool {
        let peers = self.peers();
        peers.get(&vni).is_some_and(|peers| peers.naming(group).any(|peer| peer.through.is_none()))
    }

    /// The host's address of a destination that NICs of a network may reach.
    pub(super) fn find(&self, device: &str, vni: u32, gid: &Gid) -> Option<Gid> {
        let held = (vni, *gid, device.to_owned());
        if let Some(holder) = self.known().holder(&held) {
            return Some(holder.host);
        }
        Some(self.peers().get(&vni)?.best(gid)?.host_of(gid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_address_is_one_guests_though_two_networks_have_the_same_mac() {
        let directory = Directory::default();
        let gid = [1; 16];
        let claim = |vni, host| {
            let inbox = Arc::new(Inbox::new(Arc::new(|| {})));
            directory.claim("device", vni, gid, Holder { nic: [2, 0, 0, 0, 0, 1], host, inbox })
        };
        assert!(claim(1, gid) && claim(1, gid), "it has it already");
        assert!(!claim(2, gid), "another network's NIC is another NIC");
        assert!(claim(3, [9; 16]), "a network's own address is no host's");
    }
}
