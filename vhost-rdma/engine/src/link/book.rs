//! Which shard of a process holds an address, and which have members of a group.
//!
//! A GID belongs to one NIC of a network, whatever shard that NIC is on, so the shards of a process
//! claim addresses here. It is the one thing that they share. It changes with control commands; a
//! request looks at it only when its own shard does not hold the address.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustc_hash::FxHashMap;

use super::Gid;

/// Shards of one process, at most: the bits of a set.
pub const MOST_SHARDS: usize = 64;

#[derive(Debug, Default)]
struct Entries {
    holders: FxHashMap<(u32, Gid), usize>,
    /// Sets of shards.
    groups: FxHashMap<(u32, Gid), u64>,
}

/// See the module. Addresses are those of a network (VNI).
#[derive(Debug, Default)]
pub struct AddressBook {
    entries: RwLock<Entries>,
}

impl AddressBook {
    fn read(&self) -> RwLockReadGuard<'_, Entries> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Entries> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shard that holds an address.
    pub fn holder(&self, vni: u32, gid: &Gid) -> Option<usize> {
        self.read().holders.get(&(vni, *gid)).copied()
    }

    /// Gives an address to a shard; false if another has it.
    pub fn claim(&self, vni: u32, gid: Gid, shard: usize) -> bool {
        *self.write().holders.entry((vni, gid)).or_insert(shard) == shard
    }

    /// Takes it back.
    pub fn release(&self, vni: u32, gid: Gid, shard: usize) {
        let mut entries = self.write();
        if entries.holders.get(&(vni, gid)) == Some(&shard) {
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

    /// Takes an address for this shard; false if another has it.
    #[must_use]
    pub fn claim(&self, vni: u32, gid: Gid) -> bool {
        self.book.claim(vni, gid, self.shard)
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

    /// The other shard that holds an address.
    #[must_use]
    pub fn elsewhere(&self, vni: u32, gid: &Gid) -> Option<usize> {
        self.book.holder(vni, gid).filter(|&shard| shard != self.shard)
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
    use super::AddressBook;

    #[test]
    fn an_address_has_one_holder_in_a_network() {
        let (book, gid) = (AddressBook::default(), [7; 16]);
        assert!(book.claim(1, gid, 0) && book.claim(1, gid, 0));
        assert!(!book.claim(1, gid, 1), "another shard's");
        assert!(book.claim(2, gid, 1), "another network's");
        book.release(1, gid, 1);
        assert_eq!(book.holder(1, &gid), Some(0), "who does not hold it cannot give it up");
        book.release(1, gid, 0);
        book.release(2, gid, 1);
        assert!(book.is_empty());
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
