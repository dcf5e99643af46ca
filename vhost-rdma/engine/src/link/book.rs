//! Where everybody is: which shard of a process has a NIC, which holds an address, and which have
//! members of a group.
//!
//! A GID belongs to one NIC of a network, whatever shard that NIC is on, so the shards of a process
//! claim addresses here. NICs have their numbers from here too, so that one keeps its number when
//! it moves. It is the one thing that shards share. It changes with control commands and moves; a
//! request looks at it only when its own shard does not hold the address.
//!
//! A NIC that moves is at its new place as soon as it has left the old one, though it may be there
//! a moment later. So there is no time at which nobody has it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustc_hash::FxHashMap;

use super::{Gid, NicId};

/// Shards of one process, at most: the bits of a set.
pub const MOST_SHARDS: usize = 64;

#[derive(Debug, Default)]
struct Entries {
    holders: FxHashMap<(u32, Gid), (usize, NicId)>,
    /// The shard of each NIC, by its number.
    seats: Vec<Option<usize>>,
    /// Sets of shards.
    groups: FxHashMap<(u32, Gid), u64>,
}

/// See the module. Addresses are those of a network (VNI).
#[derive(Debug, Default)]
pub struct AddressBook {
    entries: RwLock<Entries>,
    /// Lives of queue pairs that earlier processes counted on any shard.
    former_lives: AtomicU64,
}

impl AddressBook {
    fn read(&self) -> RwLockReadGuard<'_, Entries> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Entries> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a new NIC of this shard.
    pub fn enter(&self, shard: usize) -> NicId {
        let seats = &mut self.write().seats;
        let place = seats.iter().position(Option::is_none).unwrap_or_else(|| {
            seats.push(None);
            seats.len() - 1
        });
        seats[place] = Some(shard);
        // Four thousand million NICs do not fit in memory.
        NicId(u32::try_from(place).unwrap_or(u32::MAX))
    }

    /// A NIC is gone, and its number free.
    pub fn vacate(&self, nic: NicId) {
        if let Some(seat) = self.write().seats.get_mut(nic.0 as usize) {
            *seat = None;
        }
    }

    /// The shard of a NIC.
    pub fn seat(&self, nic: NicId) -> Option<usize> {
        self.read().seats.get(nic.0 as usize).copied().flatten()
    }

    /// A NIC is on another shard from now on, with its addresses and groups.
    pub fn change(&self, nic: NicId, to: usize, (vni, gids): (u32, &[Gid]), groups: &[Gid]) {
        let mut entries = self.write();
        if let Some(seat) = entries.seats.get_mut(nic.0 as usize) {
            *seat = Some(to);
        }
        for gid in gids {
            if let Some(holder) = entries.holders.get_mut(&(vni, *gid)) {
                *holder = (to, nic);
            }
        }
        for mgid in groups {
            *entries.groups.entry((vni, *mgid)).or_default() |= bit(to);
        }
    }

    /// The shard that holds an address, and the NIC.
    pub fn holder(&self, vni: u32, gid: &Gid) -> Option<(usize, NicId)> {
        self.read().holders.get(&(vni, *gid)).copied()
    }

    /// An address of a NIC. It looks at all there are: not for the data path.
    pub fn address_of(&self, vni: u32, nic: NicId) -> Option<Gid> {
        let entries = self.read();
        let held = |&(&(net, _), &(_, holder)): &(&(u32, Gid), &(usize, NicId))| {
            net == vni && holder == nic
        };
        entries.holders.iter().find(held).map(|((_, gid), _)| *gid)
    }

    /// Gives an address to a NIC of a shard; false if another has it.
    pub fn claim(&self, vni: u32, gid: Gid, holder: (usize, NicId)) -> bool {
        *self.write().holders.entry((vni, gid)).or_insert(holder) == holder
    }

    /// Takes it back.
    pub fn release(&self, vni: u32, gid: Gid, shard: usize) {
        let mut entries = self.write();
        if entries.holders.get(&(vni, gid)).is_some_and(|(holder, _)| *holder == shard) {
            entries.holders.remove(&(vni, gid));
        }
    }

    /// The shards with members of a group, as a set of bits.
    pub fn members(&self, vni: u32, mgid: &Gid) -> u64 {
        self.read().groups.get(&(vni, *mgid)).copied().unwrap_or(0)
    }

    /// A shard has its first member of a group.
    pub fn join(&self, vni: u32, mgid: Gid, shard: usize) {
        *self.write().groups.entry((vni, mgid)).or_default() |= bit(shard);
    }

    /// Its last has left.
    pub fn leave(&self, vni: u32, mgid: Gid, shard: usize) {
        let mut entries = self.write();
        if let Some(set) = entries.groups.get_mut(&(vni, mgid)) {
            *set &= !bit(shard);
            if *set == 0 {
                entries.groups.remove(&(vni, mgid));
            }
        }
    }

    /// Earlier processes counted so many lives of queue pairs.
    pub fn had_lives(&self, lives: u64) {
        self.former_lives.fetch_max(lives, Ordering::Relaxed);
    }

    /// So many are not to be begun again. All are known before a NIC that was saved runs; one that
    /// was not may begin lives before, which meet none of the queue pairs that were.
    pub fn former_lives(&self) -> u64 {
        self.former_lives.load(Ordering::Relaxed)
    }

    /// Whether nothing is left in it.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let entries = self.read();
        entries.holders.is_empty() && entries.groups.is_empty()
    }
}

/// What one shard has in the book, and sees of the others.
#[derive(Clone, Debug)]
pub struct ShardBook {
    book: Arc<AddressBook>,
    shard: usize,
}

impl ShardBook {
    /// That of this shard.
    #[must_use]
    pub const fn new(book: Arc<AddressBook>, shard: usize) -> Self {
        Self { book, shard }
    }

    /// The number of a new NIC.
    #[must_use]
    pub fn enter(&self) -> NicId {
        self.book.enter(self.shard)
    }

    /// A NIC of this shard is gone.
    pub fn vacate(&self, nic: NicId) {
        self.book.vacate(nic);
    }

    /// The shard of a NIC, which may be this one.
    #[must_use]
    pub fn seat(&self, nic: NicId) -> Option<usize> {
        self.book.seat(nic)
    }

    /// A NIC of this shard is on another from now on, with its addresses and groups.
    pub fn send_off(&self, nic: NicId, to: usize, gids: (u32, &[Gid]), groups: &[Gid]) {
        self.book.change(nic, to, gids, groups);
    }

    /// Takes an address for a NIC of this shard; false if another has it.
    #[must_use]
    pub fn claim(&self, vni: u32, gid: Gid, nic: NicId) -> bool {
        self.book.claim(vni, gid, (self.shard, nic))
    }

    /// Gives it up.
    pub fn release(&self, vni: u32, gid: Gid) {
        self.book.release(vni, gid, self.shard);
    }

    /// This shard has a member of a group.
    pub fn join(&self, vni: u32, mgid: Gid) {
        self.book.join(vni, mgid, self.shard);
    }

    /// It has none any more.
    pub fn leave(&self, vni: u32, mgid: Gid) {
        self.book.leave(vni, mgid, self.shard);
    }

    /// An address of a NIC, on whatever shard. It looks at all there are.
    #[must_use]
    pub fn address_of(&self, vni: u32, nic: NicId) -> Option<Gid> {
        self.book.address_of(vni, nic)
    }

    /// The shard that holds an address, which may be this one, and the NIC.
    #[must_use]
    pub fn holder(&self, vni: u32, gid: &Gid) -> Option<(usize, NicId)> {
        self.book.holder(vni, gid)
    }

    /// The other shard that holds an address.
    #[must_use]
    pub fn elsewhere(&self, vni: u32, gid: &Gid) -> Option<usize> {
        self.holder(vni, gid).map(|(shard, _)| shard).filter(|&shard| shard != self.shard)
    }

    /// Earlier processes counted so many lives of queue pairs, on whatever shard.
    pub fn had_lives(&self, lives: u64) {
        self.book.had_lives(lives);
    }

    /// So many are not to be begun again.
    #[must_use]
    pub fn former_lives(&self) -> u64 {
        self.book.former_lives()
    }

    /// The other shards with members of a group, as a set of bits.
    #[must_use]
    pub fn others(&self, vni: u32, mgid: &Gid) -> u64 {
        self.book.members(vni, mgid) & !bit(self.shard)
    }
}

const fn bit(shard: usize) -> u64 {
    1 << (shard % MOST_SHARDS)
}

#[cfg(test)]
mod tests {
    use super::{AddressBook, NicId};

    #[test]
    fn an_address_has_one_holder_in_a_network() {
        let (book, gid) = (AddressBook::default(), [7; 16]);
        let (here, there) = ((0, NicId(0)), (1, NicId(1)));
        assert!(book.claim(1, gid, here) && book.claim(1, gid, here));
        assert!(!book.claim(1, gid, there), "another shard's");
        assert!(book.claim(2, gid, there), "another network's");
        book.release(1, gid, 1);
        assert_eq!(book.holder(1, &gid), Some(here), "who does not hold it cannot give it up");
        book.release(1, gid, 0);
        book.release(2, gid, 1);
        assert!(book.is_empty());
    }

    #[test]
    fn a_nic_keeps_its_number_and_its_addresses_when_it_moves() {
        let (book, gid, group) = (AddressBook::default(), [7; 16], [0xff; 16]);
        let (a, b) = (book.enter(0), book.enter(1));
        assert_eq!((a, b), (NicId(0), NicId(1)), "no two have the same, on whatever shard");
        assert!(book.claim(1, gid, (0, a)));
        book.join(1, group, 0);
        book.change(a, 1, (1, &[gid]), &[group]);
        assert_eq!((book.seat(a), book.holder(1, &gid)), (Some(1), Some((1, a))));
        assert_eq!(book.members(1, &group), 0b11, "the shard that it leaves says so itself");
        book.release(1, gid, 0);
        assert_eq!(book.holder(1, &gid), Some((1, a)), "the old shard has no say any more");
        book.vacate(b);
        assert_eq!((book.seat(b), book.enter(0)), (None, b));
    }

    #[test]
    fn a_group_is_where_its_members_are() {
        let (book, group) = (AddressBook::default(), [0xff; 16]);
        book.join(1, group, 0);
        book.join(1, group, 3);
        assert_eq!((book.members(1, &group), book.members(2, &group)), (0b1001, 0));
        book.leave(1, group, 0);
        assert_eq!(book.members(1, &group), 0b1000);
        book.leave(1, group, 3);
        assert!(book.is_empty());
    }
}
