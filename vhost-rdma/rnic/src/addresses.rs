//! Addresses: which of the host's GIDs stands for which of a guest's, and who may be reached.
//!
//! *Flat*: a guest's address is one of the host port's own. *Mapped*: one host address stands for
//! all addresses of a NIC, and peers are found in a table. In both, a connection is checked where
//! it is made (INIT→RTR, AH creation): the destination must be an address of a NIC of the same
//! network on this RNIC, or be named by a peer entry of the network. The hardware looks at QPNs
//! only, so the QPN that a guest wants to connect to is checked as well, as far as it is one of
//! this host's.

use std::net::IpAddr;

use easy_ext::ext;
use vhost_rdma_engine::link::{Gid, is_multicast};
use vhost_rdma_engine::nic::NicState;
use vhost_rdma_engine::nic::contexts::KERNEL;
use vhost_rdma_engine::nic::work::Begun;
use vhost_rdma_engine::nic::{Reply, Status};
use virtio_rdma_abi::{self as abi, attr_mask, event};
use zerocopy::little_endian::U16;

use super::directory::Holder;
use super::findings::Finding;
use super::nic::{HostAddress, Nic, Rnic};
use super::refusal::Control as _;

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
}
