//! Addresses: which of the host's GIDs stands for which of a guest's, and who may be reached.
//!
//! *Flat*: a guest's address is one of the host port's own. *Mapped*: one host address stands for
//! all addresses of a NIC, and peers are found in a table. In both, a connection is checked where
//! it is made (INIT→RTR, AH creation): the destination must be an address of a NIC of the same
//! network on this RNIC, or be named by a peer entry of the network. The hardware looks at QPNs
//! only, so the QPN that a guest wants to connect to is checked as well, as far as it is one of
//! this host's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::{ArcSwap, Guard};
use easy_ext::ext;
use vhost_rdma_engine::cm::Inbox;
use vhost_rdma_engine::link::{Gid, is_multicast};
use vhost_rdma_engine::nic::NicState;
use vhost_rdma_engine::nic::budget::Budget;
use vhost_rdma_engine::nic::contexts::KERNEL;
use vhost_rdma_engine::nic::dispatch::Begun;
use vhost_rdma_engine::nic::qp::State;
use vhost_rdma_engine::nic::roster::{Slots, Walk};
use vhost_rdma_engine::nic::{Nanos, Reply, Status};
use virtio_rdma_abi::{self as abi, attr_mask, event};
use zerocopy::little_endian::U16;

use super::control::{Control as _, Finding};
use super::follow::HOST_CALL;
use super::mcast::Mcast as _;
use super::nic::{Nic, Rnic};
use super::peer_table::{Peer, PeerTable};
use super::peers::{Agreed, Carrier, HostCm};
use super::uplink::{Mac, Uplink};

/// The GID of an address: IPv4 is mapped to IPv6 (RoCE v2, IBTA annex A17).
pub(super) fn gid_of(address: IpAddr) -> Gid {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// An address of a NIC on an RNIC.
#[derive(Debug, Clone)]
pub(super) struct Holder {
    nic: [u8; 6],
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
    fn claim(&self, device: &str, vni: u32, gid: Gid, holder: Holder) -> bool {
        let mut known = self.known();
        let key = (vni, gid, device.to_owned());
        let own = known.holder(&key).is_none_or(|held| held.nic == holder.nic);
        let flat = holder.host == gid;
        let others = |known: &Known| {
            let mut same =
                known.behind(&gid).filter(|((_, guest, at), _)| at == device && *guest == gid);
            same.any(|(_, held)| held.nic != holder.nic)
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

    fn release(&self, device: &str, vni: u32, gid: Gid, nic: [u8; 6]) {
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
    fn find(&self, device: &str, vni: u32, gid: &Gid) -> Option<Gid> {
        let held = (vni, *gid, device.to_owned());
        if let Some(holder) = self.known().holder(&held) {
            return Some(holder.host);
        }
        Some(self.peers().get(&vni)?.best(gid)?.host_of(gid))
    }
}

/// An entry of a NIC's GID table.
#[derive(Debug, Clone, Copy)]
pub struct HostAddress {
    pub(super) guest: Gid,
    /// The host's index and address; none if the host has no such address (a link-local one, say),
    /// and nothing can be sent from it.
    host: Option<(u16, Gid)>,
}

#[ext(Addresses)]
pub(super) impl Nic {
    fn holds(&self, index: u16) -> bool {
        self.gids.get(usize::from(index)).is_some_and(Option::is_some)
    }

    /// Whether datagrams that arrive have an IPv4 header: all of a port's peers speak the version
    /// that its own address has.
    fn is_ipv4(&self) -> bool {
        let host = self.gids.iter().flatten().find_map(|entry| entry.host);
        host.is_some_and(|(_, gid)| gid[..10] == [0; 10] && gid[10..12] == [0xff, 0xff])
    }

    fn holder(&self, host: Gid) -> Holder {
        Holder { nic: self.settings.mac, host, inbox: self.backing.inbox.clone() }
    }

    /// The guest's own address at an index of its table.
    fn guest_address(&self, index: u16) -> Option<Gid> {
        self.gids.get(usize::from(index)).copied().flatten().map(|entry| entry.guest)
    }

    fn may_use(&self, gid: &Gid) -> bool {
        let [a, b, c, d, e, f] = self.settings.mac;
        let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f];
        self.settings.gids.is_empty() || self.settings.gids.contains(gid) || *gid == link_local
    }

    /// The host's entry that stands for an address of the guest.
    fn host_entry(&mut self, gid: &Gid) -> Option<(u16, Gid)> {
        let wanted = self.backing.place.through.unwrap_or(*gid);
        let table = self.backing.host.gids().unwrap_or_default();
        table.iter().find(|entry| entry.gid == wanted).map(|entry| (entry.index, entry.gid))
    }

    /// Sets an entry of the table, once whoever knows the other networks agrees.
    fn begin_gid(&mut self, index: u16, gid: Option<Gid>) -> Result<Begun<Rnic>, Status> {
        let Some(wanted) = gid else { return self.set_gid(index, None).map(Begun::Done) };
        let uplink = self.backing.place.directory.uplink().cloned();
        let mac = self.settings.mac;
        match uplink.filter(|_| self.may_claim(index, &wanted)) {
            Some(uplink) => Ok(self.aside(move || {
                let granted = uplink.claim(mac, wanted);
                Finding::Address { index, gid: wanted, granted }
            })),
            None => self.set_gid(index, gid).map(Begun::Done),
        }
    }

    /// Whether there is anything to ask: what is wrong by itself is refused without.
    fn may_claim(&mut self, index: u16, gid: &Gid) -> bool {
        let sane = usize::from(index) < self.gids.len() && *gid != [0; 16] && !is_multicast(gid);
        sane && self.may_use(gid) && self.host_entry(gid).is_some()
    }

    /// The rest of the command.
    fn claimed(
        &mut self,
        (index, gid): (u16, Gid),
        granted: Option<bool>,
    ) -> Result<Begun<Rnic>, Status> {
        let state = match self.life {
            NicState::Ready | NicState::Paused => Ok(()),
            NicState::Failed => Err(Status::FATAL),
            NicState::Idle => Err(Status::STATE),
        };
        let set = state.and_then(|()| match granted {
            Some(true) => self.set_gid(index, Some(gid)),
            Some(false) => Err(Status::EXIST),
            None => Err(Status::BUSY),
        });
        // Another entry may have it all the same.
        let held = self.gids.iter().flatten().any(|entry| entry.guest == gid);
        if granted != Some(false)
            && !held
            && let Some(uplink) = self.backing.place.directory.uplink()
        {
            uplink.release(self.settings.mac, gid);
        }
        set.map(Begun::Done)
    }

    fn set_gid(&mut self, index: u16, gid: Option<Gid>) -> Result<Reply, Status> {
        let slot = usize::from(index);
        let old = *self.gids.get(slot).ok_or(Status::INVAL)?;
        let new = match gid {
            None => None,
            Some(gid) if gid == [0; 16] || is_multicast(&gid) => return Err(Status::INVAL),
            Some(gid) if !self.may_use(&gid) => return Err(Status::PERM),
            Some(gid) => {
                let host = self.host_entry(&gid);
                if let Some((_, address)) = host {
                    let holder = self.holder(address);
                    let place = &self.backing.place;
                    if !place.directory.claim(&place.device, self.settings.vni, gid, holder) {
                        return Err(Status::EXIST);
                    }
                }
                Some(HostAddress { guest: gid, host })
            }
        };
        self.gids[slot] = new;
        if let Some(old) = old {
            self.release(old.guest);
        }
        Ok(Reply::Done)
    }

    /// Gives an address back, unless another entry of the table has it too.
    fn release(&self, gid: Gid) {
        if !self.gids.iter().flatten().any(|entry| entry.guest == gid) {
            let place = &self.backing.place;
            place.directory.release(&place.device, self.settings.vni, gid, self.settings.mac);
        }
    }

    fn release_addresses(&mut self) {
        for slot in 0..self.gids.len() {
            if let Some(old) = self.gids[slot].take() {
                self.release(old.guest);
            }
        }
    }

    /// Takes back addresses that the operator gives no longer.
    fn withdraw_addresses(&mut self) {
        for slot in 0..self.gids.len() {
            if let Some(old) = self.gids[slot].filter(|entry| !self.may_use(&entry.guest)) {
                self.gids[slot] = None;
                self.release(old.guest);
                self.raise(event::GID_CHANGE, 1, KERNEL);
            }
        }
    }

    /// The host port's table changed: indices are looked up again.
    fn host_addresses_changed(&mut self) {
        for slot in 0..self.gids.len() {
            let Some(entry) = self.gids[slot] else { continue };
            let host = self.host_entry(&entry.guest);
            if let Some((_, address)) = host {
                let holder = self.holder(address);
                let place = &self.backing.place;
                place.directory.claim(&place.device, self.settings.vni, entry.guest, holder);
                if let Some(uplink) = place.directory.uplink() {
                    uplink.repeat_claim(self.settings.mac, entry.guest);
                }
            }
            self.gids[slot] = Some(HostAddress { host, ..entry });
        }
    }

    /// The host's index for one of the guest's table.
    fn host_index(&self, index: u16) -> Option<u16> {
        let entry = self.gids.get(usize::from(index)).copied().flatten()?;
        entry.host.map(|(index, _)| index)
    }

    /// An address that this NIC has on the host, of the same version as `gid`.
    fn host_address_like(&self, gid: &Gid) -> Option<Gid> {
        let version = |gid: &Gid| IpAddr::from(*gid).to_canonical().is_ipv4();
        let hosts = self.gids.iter().flatten().filter_map(|entry| entry.host);
        hosts.map(|(_, own)| own).find(|own| version(own) == version(gid))
    }

    /// The address vector that the hardware is given for one of the guest's.
    fn resolve(&self, av: &abi::Av) -> Result<abi::Av, Status> {
        let index = self.host_index(av.sgid_index.get()).ok_or(Status::UNREACH)?;
        // Connections have one peer.
        if is_multicast(&av.dgid) {
            return Err(Status::INVAL);
        }
        let dgid = self.reach(&av.dgid).ok_or(Status::UNREACH)?;
        Ok(abi::Av { dgid, sgid_index: U16::new(index), dmac: [0; 6], ..*av })
    }

    fn reach(&self, gid: &Gid) -> Option<Gid> {
        self.backing.place.directory.find(&self.backing.place.device, self.settings.vni, gid)
    }

    /// A QP of this host must be one of the same network; whether `dgid` is of this host is asked
    /// of the port's table, and returned.
    fn check_peer_qp(&mut self, dgid: &Gid, qpn: u32, mask: u32) -> Result<bool, Status> {
        let here =
            self.backing.host.gids().unwrap_or_default().iter().any(|entry| entry.gid == *dgid);
        if !here || mask & attr_mask::DEST_QPN == 0 {
            return Ok(false);
        }
        let place = &self.backing.place;
        let others = place.directory.is_others(&place.device, qpn, self.settings.vni);
        if others { Err(Status::UNREACH) } else { Ok(true) }
    }

    /// Has the connections to peers that may not be reached any more end: a guest has as many as it
    /// likes, so in steps. What is made from now on is checked where it is made.
    fn check_peers(&mut self) {
        let (qps, ahs) = (self.qp_numbers.walk(), Slots::of(&self.ahs));
        // From the beginning, if it had begun already.
        self.backing.peer_check = PeerCheck { qps, ahs, groups: true };
    }

    /// Goes on with it.
    fn check_peers_on(&mut self, budget: &mut Budget) {
        let mut check = std::mem::take(&mut self.backing.peer_check);
        self.check_some_peers(&mut check, budget);
        self.backing.peer_check = check;
    }

    fn check_some_peers(&mut self, check: &mut PeerCheck, budget: &mut Budget) {
        while let Some(qpn) = check.qps.next(&self.qp_numbers) {
            self.meter.charge(CHECK);
            if self.qps.get(&qpn).is_some_and(|qp| self.is_cut_off(qp)) {
                self.meter.charge(HOST_CALL);
                self.qp_fatal(qpn);
            }
            if budget.is_over(&self.meter) {
                return;
            }
        }
        while let Some(number) = check.ahs.sweep(&self.ahs, (&self.meter, budget), |_| true) {
            self.meter.charge(CHECK);
            let Some(dgid) = self.ahs.get(number as usize).map(|ah| ah.av.dgid) else { continue };
            let revoked = if is_multicast(&dgid) {
                self.group(&dgid).is_err()
            } else {
                self.reach(&dgid).is_none()
            };
            if let Some(ah) = self.ahs.get_mut(number as usize) {
                ah.own.revoked = revoked;
            }
        }
        if !budget.is_over(&self.meter) && std::mem::take(&mut check.groups) {
            self.leave_forbidden();
        }
    }

    /// Whether a QP is connected to a peer that may not be reached.
    fn is_cut_off(&self, qp: &super::nic::Qp) -> bool {
        qp.kind.is_connected()
            && !matches!(qp.state, State::Reset | State::Init | State::Err)
            && self.reach(&qp.attrs.av().dgid).is_none()
    }
}

/// What one look at who may be reached takes.
const CHECK: Nanos = 500;

/// Connections that are still to be looked at after a change of peers or addresses.
#[derive(Debug, Default)]
pub(super) struct PeerCheck {
    qps: Walk,
    ahs: Slots,
    groups: bool,
}

impl PeerCheck {
    pub(super) const fn is_over(&self) -> bool {
        !self.groups
    }
}
