//! The tables of a guest's page lists, and a bound on them by what the guest has.
//!
//! A page list may name the same page of the guest a million times, and a guest may have a hundred
//! thousand objects with a list each: so what the lists cost the daemon has nothing to do with what
//! they cost the guest. All tables of a guest together are therefore bounded by the memory that the
//! guest has, and charged to the NIC's account like everything else ([`Account`]). The bound is
//! generous: the whole guest eight times over in pages of 4 KiB, and rings in any number; memory in
//! one piece needs no table at all. A list also counts for the regions of guest memory that its
//! pages lie in, which it holds on to: a VMM may have made hundreds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::account::{Account, Charge};

/// Bytes of tables that every guest may have.
const BASE: u64 = 32 << 20;
/// Bytes of guest memory for each further byte of tables: 8 bytes for each page, eight times.
const PER_BYTE: u64 = 4096 / 8 / 8;

/// The tables of one guest.
#[derive(Debug)]
pub(super) struct Tables {
    used: AtomicU64,
    most: AtomicU64,
    account: Account,
}

impl Default for Tables {
    fn default() -> Self {
        Self::of(Account::default())
    }
}

impl Tables {
    /// The tables of a guest that this account pays for.
    pub(super) const fn of(account: Account) -> Self {
        Self { used: AtomicU64::new(0), most: AtomicU64::new(BASE), account }
    }

    pub(super) const fn account(&self) -> &Account {
        &self.account
    }

    /// What a guest with so much memory may have from now on.
    pub(super) fn allow(&self, guest: u64) {
        self.most.store(BASE + guest / PER_BYTE, Ordering::Relaxed);
    }

    fn take(&self, bytes: u64) -> bool {
        let most = self.most.load(Ordering::Relaxed);
        let add = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A part of a guest's tables, given back when it is dropped.
#[derive(Debug)]
pub(super) struct TableCharge {
    tables: Arc<Tables>,
    bytes: u64,
    charge: Charge,
}

impl TableCharge {
    /// `None` if the guest has too much already.
    pub(super) fn take(tables: &Arc<Tables>, bytes: u64) -> Option<Self> {
        let charge = tables.account.charge(bytes)?;
        tables.take(bytes).then(|| Self { tables: Arc::clone(tables), bytes, charge })
    }

    /// Becomes one of so many bytes; false if the guest has too much already, and this one stays as
    /// it is.
    pub(super) fn settle(&mut self, bytes: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        if !self.tables.take(more) {
            return false;
        }
        if !self.charge.settle(bytes) {
            self.tables.give(more);
            return false;
        }
        self.tables.give(self.bytes.saturating_sub(bytes));
        self.bytes = bytes;
        true
    }
}

impl Drop for TableCharge {
    fn drop(&mut self) {
        self.tables.give(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use crate::{AddressSpace, Fault, PageList};

    #[test]
    fn tables_are_bounded_by_the_guests_memory_and_come_back() {
        let space = AddressSpace::anonymous(&[(0, 1 << 20)]).unwrap();
        let ring = crate::Ring::page(&space, 0x1000).unwrap();
        // 512 times the same page.
        (0..512).for_each(|n| ring.store_u32(n * 8, 0x2000));
        let list = PageList { addr: 0x1000, npages: 512, offset: 0, page_shift: 12, levels: 1 };
        let mut held = Vec::new();
        let fault = loop {
            match list.resolve(&space, 512 * 4096) {
                Ok(map) => held.push(map),
                Err(fault) => break fault,
            }
        };
        assert_eq!(fault, Fault::Room);
        let most = ((32 << 20) + (1 << 20) / 64) / 4096;
        assert_eq!(held.len(), most, "4 KiB each");
        held.pop();
        assert!(list.resolve(&space, 512 * 4096).is_ok());
        let one = PageList { addr: 0, npages: 256, offset: 0, page_shift: 12, levels: 0 };
        let flat: Vec<_> = (0..1000).map(|_| one.resolve(&space, 1 << 20)).collect();
        assert!(flat.iter().all(Result::is_ok), "memory in one piece needs no table");
    }

    #[test]
    fn the_regions_that_a_list_lies_in_count_too() {
        // A page of each of 500 regions, which no table has to name more than once.
        let pieces: Vec<_> = (0..500u64).map(|n| (n << 20, 4096)).collect();
        let space = AddressSpace::anonymous(&pieces).unwrap();
        let ring = crate::Ring::page(&space, 0).unwrap();
        (0..500u32).for_each(|n| ring.store_u32(u64::from(n) * 8, n << 20));
        let list = PageList { addr: 0, npages: 500, offset: 0, page_shift: 12, levels: 1 };
        let mut held = Vec::new();
        let fault = loop {
            match list.resolve(&space, 500 * 4096) {
                Ok(map) => held.push(map),
                Err(fault) => break fault,
            }
        };
        assert_eq!(fault, Fault::Room);
        let each = 500 * 8 + 499 * size_of::<crate::space::Region>();
        assert_eq!(held.len(), ((32 << 20) + 500 * 4096 / 64) / each);
        drop(held);
        assert!(list.resolve(&space, 500 * 4096).is_ok(), "and all of it comes back");
    }
}
