//! Fast registration (IBTA 10.6.5, base memory management extensions): regions of the guest's
//! kernel that work requests make valid and invalid again.

use std::sync::Arc;

use virtio_rdma_abi::access;

use super::mr::{Denied, Mr, MrTable, check_access, check_range};
use super::numbers::Random;
use crate::memory::{AddressSpace, PageArray};
use crate::nic::Status;
use crate::nic::limits::MAX_FAST_REG_PAGES;

/// A REG_MR work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct FastRegister {
    pub(super) pdn: u32,
    /// The region's key, with a new low byte.
    pub(super) key: u32,
    pub(super) access: u32,
    pub(super) iova: u64,
    pub(super) len: u64,
    /// The pages; the first byte is at `iova` modulo the page size in the first.
    pub(super) pages: PageArray,
}

impl MrTable {
    /// Makes a region that a REG_MR work request will make valid.
    pub(super) fn allocate_fast(
        &mut self,
        owner: (u32, u32),
        max_pages: u32,
        random: &mut dyn Random,
    ) -> Result<u32, Status> {
        if !(1..=MAX_FAST_REG_PAGES).contains(&max_pages) {
            return Err(Status::INVAL);
        }
        let key = self.new_key(random)?;
        let (ctx, pdn) = owner;
        let mr = Mr {
            ctx,
            pdn,
            key,
            access: 0,
            iova: 0,
            len: 0,
            map: None,
            fast_pages: max_pages,
            windows: 0,
            since: self.change(),
        };
        self.insert(mr);
        Ok(key)
    }

    /// Makes a fast-register region valid.
    pub(super) fn fast_register(
        &mut self,
        request: &FastRegister,
        space: &AddressSpace,
    ) -> Result<(), Denied> {
        let number = request.key >> 8;
        let since = self.change();
        let Some(super::mr::Keyed::Region(mr)) = self.by_number.get_mut(&number) else {
            return Err(Denied);
        };
        let pages_ok = (1..=mr.fast_pages).contains(&request.pages.npages);
        // Memory may have gone under a window that still shows the region under its old key.
        let is_free = mr.map.is_none() && mr.windows == 0;
        // Nobody in a VM would do what the owner of a mirrored region has to.
        let is_plain = request.access & access::MIRRORED == 0;
        if mr.pdn != request.pdn || !is_free || !is_plain || !pages_ok || request.len == 0 {
            return Err(Denied);
        }
        check_access(request.access, 0).map_err(|_| Denied)?;
        let map = request.pages.resolve(space, request.iova, request.len).map_err(|_| Denied)?;
        check_range(request.iova, &map).map_err(|_| Denied)?;
        mr.key = request.key;
        mr.access = request.access;
        mr.iova = request.iova;
        mr.len = request.len;
        mr.map = Some(Arc::new(map));
        mr.since = since;
        Ok(())
    }

    /// Makes a fast-register region, or a type 2 window of `qpn`, invalid.
    pub(super) fn invalidate(&mut self, key: u32, pdn: u32, qpn: u32) -> Result<(), Denied> {
        let Some(mr) = self.get_mut(key) else { return self.invalidate_window(key, qpn) };
        if mr.fast_pages == 0 || mr.pdn != pdn || mr.map.is_none() || mr.windows > 0 {
            return Err(Denied);
        }
        mr.map = None;
        mr.len = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes as _;
    use zerocopy::little_endian::U64;

    use super::*;
    use crate::memory::Ring;
    use crate::shard::testing::driver::Lcg;
    use crate::soft::mr::Keyed;
    use crate::soft::window::{Bind, WindowKind};

    const RIGHTS: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::MW_BIND;
    const CTX: u32 = 0;
    const PDN: u32 = 3;

    /// Memory whose first page names the second.
    fn memory() -> (AddressSpace, PageArray) {
        let space = AddressSpace::anonymous(&[(0, 8192)]).unwrap();
        let page = Ring::page(&space, 0).unwrap();
        let entry = U64::new(4096);
        page.store_u32(0, u32::from_le_bytes(entry.as_bytes()[..4].try_into().unwrap()));
        (space, PageArray { addr: 0, npages: 1, page_shift: 12 })
    }

    fn table() -> (MrTable, u32) {
        let mut table = MrTable::default();
        let key = table.allocate_fast((CTX, PDN), 4, &mut Lcg(1)).unwrap();
        (table, key)
    }

    fn register(table: &mut MrTable, key: u32, rights: u32) -> Result<(), Denied> {
        let (space, pages) = memory();
        let request = FastRegister { pdn: PDN, key, access: rights, iova: 0, len: 64, pages };
        table.fast_register(&request, &space)
    }

    #[test]
    fn no_region_of_a_vm_is_mirrored() {
        let (mut table, key) = table();
        assert!(register(&mut table, key, RIGHTS | access::MIRRORED).is_err());
        assert!(register(&mut table, key, RIGHTS).is_ok());
        table.remove(key);
        assert_eq!(table.mirrors, 0);
    }

    /// What a window shows stays what it is, and can be ended when the window is gone.
    #[test]
    fn a_region_whose_memory_has_gone_under_a_window_is_not_made_anew() {
        let (mut table, key) = table();
        register(&mut table, key, RIGHTS).unwrap();
        let window = table.allocate_window((CTX, PDN), WindowKind::One, &mut Lcg(2)).unwrap();
        let bind = Bind {
            pdn: PDN,
            qpn: 5,
            present: window,
            new: window,
            region: key,
            addr: 0,
            len: 64,
            access: access::REMOTE_WRITE,
        };
        table.bind(&bind).unwrap();
        let Some(Keyed::Region(mr)) = table.by_number.get_mut(&(key >> 8)) else { panic!() };
        // As when its memory is unplugged.
        mr.map = None;
        let other = key ^ 1;
        assert!(register(&mut table, other, RIGHTS).is_err());
        table.bind(&Bind { len: 0, ..bind }).unwrap();
        assert_eq!(table.get(key).unwrap().windows, 0);
        assert!(register(&mut table, other, RIGHTS).is_ok());
    }

    /// A message that takes several turns compares it.
    #[test]
    fn the_stamp_of_a_window_never_comes_back() {
        let (mut table, first) = table();
        register(&mut table, first, RIGHTS).unwrap();
        let window = table.allocate_window((CTX, PDN), WindowKind::One, &mut Lcg(2)).unwrap();
        let second = table.allocate_fast((CTX, PDN), 4, &mut Lcg(3)).unwrap();
        register(&mut table, second, RIGHTS).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for turn in 0..64u64 {
            let region = if turn % 2 == 0 { second } else { first };
            let bind = Bind {
                pdn: PDN,
                qpn: 5,
                present: window,
                new: window,
                region,
                addr: 0,
                len: 1 + turn % 3,
                access: access::REMOTE_WRITE,
            };
            table.bind(&bind).unwrap();
            assert!(seen.insert(table.stamp(window)), "turn {turn}");
        }
    }
}
