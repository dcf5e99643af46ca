//! Who can find whom: the addresses of each network.
//!
//! A GID belongs to one NIC of a network at a time. A lookup begins at the asking NIC's own network
//! and there is no other, so NICs of different networks cannot meet, whatever numbers they know of
//! each other.

use std::cell::Cell;

use indexmap::IndexSet;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::nic::{NicState, SoftNic};
use super::nics::Nics;
use crate::link::{Fabric, Flow, Gid, NicId, Responder, ShardBook};
use crate::nic::qp::Kind;

/// The addresses of all networks of a shard, by VNI.
#[derive(Debug, Default)]
pub(super) struct Networks {
    holders: FxHashMap<(u32, Gid), NicId>,
    /// The one that was found last: most requests of a turn go where the one before went.
    last: Cell<Option<(u32, Gid, NicId)>>,
    /// NICs with QPs in a multicast group.
    groups: FxHashMap<(u32, Gid), IndexSet<NicId, FxBuildHasher>>,
    /// What other shards hold, if there are any.
    pub(super) book: Option<ShardBook>,
}

impl Networks {
    #[inline]
    pub(super) fn holder(&self, vni: u32, gid: &Gid) -> Option<NicId> {
        match self.last.get() {
            Some((net, address, nic)) if address == *gid && net == vni => Some(nic),
            _ => self.find(vni, gid),
        }
    }

    #[inline(never)]
    fn find(&self, vni: u32, gid: &Gid) -> Option<NicId> {
        let nic = *self.holders.get(&(vni, *gid))?;
        self.last.set(Some((vni, *gid, nic)));
        Some(nic)
    }

    /// The NIC that a connection leads to, if it is another one of this shard.
    pub(super) fn neighbour(&self, vni: u32, (kind, flow): (Kind, &Flow)) -> Option<NicId> {
        let direct = kind.is_connected() && flow.source_gid != [0; 16];
        let peer = direct.then(|| self.holder(vni, &flow.dest_gid)).flatten();
        peer.filter(|peer| *peer != flow.source)
    }

    /// Whether a NIC of this shard or another holds it.
    pub(super) fn reaches(&self, vni: u32, gid: &Gid) -> bool {
        let elsewhere = |book: &ShardBook| book.elsewhere(vni, gid).is_some();
        self.holder(vni, gid).is_some() || self.book.as_ref().is_some_and(elsewhere)
    }

    /// Gives an address to a NIC; false if another has it.
    pub(super) fn claim(&mut self, vni: u32, gid: Gid, nic: NicId) -> bool {
        if let Some(holder) = self.holder(vni, &gid) {
            return holder == nic;
        }
        let free = self.book.as_ref().is_none_or(|book| book.claim(vni, gid, nic));
        if free {
            self.holders.insert((vni, gid), nic);
        }
        free
    }

    pub(super) fn release(&mut self, vni: u32, gid: Gid, nic: NicId) {
        if self.holder(vni, &gid) == Some(nic) {
            self.last.set(None);
            self.holders.remove(&(vni, gid));
            if let Some(book) = &self.book {
                book.release(vni, gid);
            }
        }
    }

    pub(super) fn join(&mut self, vni: u32, mgid: Gid, nic: NicId) {
        self.groups.entry((vni, mgid)).or_default().insert(nic);
        if let Some(book) = &self.book {
            book.join(vni, mgid);
        }
    }

    pub(super) fn leave(&mut self, vni: u32, mgid: Gid, nic: NicId) {
        if let Some(members) = self.groups.get_mut(&(vni, mgid)) {
            members.swap_remove(&nic);
            if members.is_empty() {
                self.groups.remove(&(vni, mgid));
                if let Some(book) = &self.book {
                    book.leave(vni, mgid);
                }
            }
        }
    }

    /// The number of a new NIC, where shards share them.
    pub(super) fn enter(&self) -> Option<NicId> {
        self.book.as_ref().map(ShardBook::enter)
    }

    /// A NIC is gone.
    pub(super) fn vacate(&self, nic: NicId) {
        if let Some(book) = &self.book {
            book.vacate(nic);
        }
    }

    /// A NIC goes to another shard, with its addresses and groups. The others know it there before
    /// this shard forgets it.
    pub(super) fn send_off(&mut self, nic: &SoftNic, to: usize) {
        let (id, vni) = (nic.backing.id, nic.settings.vni);
        let gids: Vec<Gid> = nic.gids.iter().flatten().copied().collect();
        let groups: Vec<Gid> = nic.backing.groups.keys().copied().collect();
        if let Some(book) = &self.book {
            book.send_off(id, to, (vni, &gids), &groups);
        }
        // It releases what is this shard's, and that is none of it by now.
        gids.iter().for_each(|gid| self.release(vni, *gid, id));
        groups.iter().for_each(|mgid| self.leave(vni, *mgid, id));
    }

    /// A NIC has come from another shard.
    pub(super) fn take_in(&mut self, nic: &SoftNic) {
        let (id, vni) = (nic.backing.id, nic.settings.vni);
        for gid in nic.gids.iter().flatten() {
            self.claim(vni, *gid, id);
        }
        nic.backing.groups.keys().for_each(|mgid| self.join(vni, *mgid, id));
    }

    /// An address of a NIC, on whatever shard.
    pub(super) fn address_of(&self, vni: u32, nic: NicId) -> Option<Gid> {
        self.book.as_ref()?.address_of(vni, nic)
    }

    /// Where an address is, if this shard is not where: the shard that holds it, or that its NIC is
    /// on the way to.
    pub(super) fn elsewhere(&self, vni: u32, gid: &Gid) -> Option<usize> {
        Some(self.anywhere(vni, gid)?.0)
    }

    /// The shard and the NIC that hold an address, where shards share them.
    pub(super) fn anywhere(&self, vni: u32, gid: &Gid) -> Option<(usize, NicId)> {
        self.book.as_ref()?.holder(vni, gid)
    }

    #[cfg(test)]
    pub(crate) fn group_count(&self) -> usize {
        self.groups.len()
    }

    fn member(&self, vni: u32, mgid: &Gid, index: usize) -> Option<NicId> {
        self.groups.get(&(vni, *mgid))?.get_index(index).copied()
    }
}

/// What a link sees of a shard.
pub(super) struct View<'a, N> {
    pub(super) nics: &'a mut N,
    pub(super) networks: &'a Networks,
}

impl<N: Nics> Fabric for View<'_, N> {
    fn network(&self, nic: NicId) -> Option<u32> {
        self.vni(nic)
    }

    fn holds(&self, vni: u32, gid: &Gid) -> bool {
        self.networks.holder(vni, gid).is_some()
    }

    fn responder(&mut self, from: NicId, gid: &Gid) -> Option<&mut dyn Responder> {
        let peer = self.networks.holder(self.vni(from)?, gid)?;
        self.ready(peer)
    }

    fn member(
        &mut self,
        from: NicId,
        mgid: &Gid,
        index: usize,
    ) -> Option<Option<&mut dyn Responder>> {
        let member = self.networks.member(self.vni(from)?, mgid, index)?;
        Some(self.ready(member))
    }
}

impl<N: Nics> View<'_, N> {
    fn vni(&self, nic: NicId) -> Option<u32> {
        self.nics.seen(nic).map(|nic| nic.settings.vni)
    }

    /// A NIC, if it is there and runs.
    #[inline]
    pub(super) fn ready_nic(&mut self, nic: Option<NicId>) -> Option<&mut SoftNic> {
        self.nics.nic(nic?).filter(|nic| nic.life == NicState::Ready)
    }

    /// Whether a NIC was saved while it ran, here or by the process before, and stands still until
    /// all of its network go on.
    pub(super) fn goes_on(&self, nic: Option<NicId>) -> bool {
        let seen = nic.and_then(|nic| self.nics.seen(nic));
        seen.is_some_and(|nic| nic.backing.goes_on && nic.life == NicState::Paused)
    }

    fn ready(&mut self, nic: NicId) -> Option<&mut dyn Responder> {
        self.ready_nic(Some(nic)).map(|nic| nic as &mut dyn Responder)
    }
}

/// What a request from another shard sees of this one: its own network.
pub(super) struct Arrivals<'a, N> {
    pub(super) view: View<'a, N>,
    pub(super) vni: u32,
}

impl<N: Nics> Fabric for Arrivals<'_, N> {
    fn network(&self, _: NicId) -> Option<u32> {
        Some(self.vni)
    }

    fn holds(&self, vni: u32, gid: &Gid) -> bool {
        self.view.holds(vni, gid)
    }

    fn responder(&mut self, _: NicId, gid: &Gid) -> Option<&mut dyn Responder> {
        let peer = self.view.networks.holder(self.vni, gid)?;
        self.view.ready(peer)
    }

    fn member(&mut self, _: NicId, mgid: &Gid, index: usize) -> Option<Option<&mut dyn Responder>> {
        let member = self.view.networks.member(self.vni, mgid, index)?;
        Some(self.view.ready(member))
    }
}

/// The link-local address that a network interface with this MAC address gives itself (RFC 4291,
/// appendix A).
pub(super) fn link_local(mac: [u8; 6]) -> Gid {
    let [a, b, c, d, e, f] = mac;
    [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}
