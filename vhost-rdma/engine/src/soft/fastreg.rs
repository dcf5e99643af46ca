//! Fast registration (IBTA 10.6.5, base memory management extensions): regions of the guest's
//! kernel that work requests make valid and invalid again.

use std::sync::Arc;

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
        if mr.pdn != request.pdn || mr.map.is_some() || !pages_ok || request.len == 0 {
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
