//! Contexts: the processes of a guest, its kernel, and the doorbell pages of each.

use std::collections::BTreeMap;

use virtio_rdma_abi::{self as abi, db};
use zerocopy::little_endian::U32;

use super::command::{Reply, Status};
use super::doorbell::{DoorbellPage, Owner, Post};
use super::limits::MAX_DB_PAGES;
use crate::memory::Ring;

/// Doorbell pages that a context may have though it does not need them.
const SPARE_PAGES: usize = 4;
/// The kernel's context.
pub(crate) const KERNEL: u32 = 0;

/// A process of the guest, or its kernel.
#[derive(Debug, Default)]
struct Context {
    pages: Vec<DoorbellPage>,
}

/// All contexts of one NIC.
#[derive(Debug)]
pub(crate) struct Contexts {
    all: BTreeMap<u32, Context>,
    next: u32,
}

impl Default for Contexts {
    fn default() -> Self {
        Self { all: BTreeMap::new(), next: 1 }
    }
}

impl Contexts {
    /// The kernel's context is there from INIT on.
    pub(crate) fn begin(&mut self) {
        self.all.insert(KERNEL, Context::default());
    }

    /// Contexts of processes.
    pub(crate) fn processes(&self) -> usize {
        self.all.len().saturating_sub(1)
    }

    pub(crate) fn contains(&self, ctx: u32) -> bool {
        self.all.contains_key(&ctx)
    }

    pub(crate) fn remove(&mut self, ctx: u32) {
        self.all.remove(&ctx);
    }

    /// CONTEXT_CREATE: `most` processes, `kick_queues` to share among them.
    pub(crate) fn create(
        &mut self,
        db_page: Ring,
        most: u32,
        kick_queues: u32,
    ) -> Result<Reply, Status> {
        if self.all.len() > most as usize {
            return Err(Status::NOMEM);
        }
        // Numbers come back only after four thousand million contexts; a live one is skipped.
        while self.next == KERNEL || self.all.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let ctx = self.next;
        self.next = self.next.wrapping_add(1);
        self.all.insert(ctx, Context { pages: vec![DoorbellPage::new(db_page)] });
        Ok(Reply::Context(abi::ContextCreateResp {
            ctx: U32::new(ctx),
            kick_queue: U32::new(ctx % kick_queues.max(1)),
        }))
    }

    /// DB_PAGE_ADD.
    pub(crate) fn add_page(&mut self, ctx: u32, db_page: Ring) -> Result<Reply, Status> {
        let context = self.all.get_mut(&ctx).ok_or(Status::NOENT)?;
        // Every page is looked at in every round, so only a context that fills its pages gets more of them.
        let needless = context.pages.len() >= SPARE_PAGES
            && context.pages.iter().map(DoorbellPage::room).sum::<u32>() >= db::SLOTS;
        if needless || context.pages.len() >= MAX_DB_PAGES {
            return Err(Status::NOMEM);
        }
        let page = u32::try_from(context.pages.len()).map_err(|_| Status::NOMEM)?;
        context.pages.push(DoorbellPage::new(db_page));
        Ok(Reply::DbPage(abi::DbPageAddResp { page: U32::new(page), reserved: U32::new(0) }))
    }

    /// Every doorbell page.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &Ring> {
        self.all.values().flat_map(|context| &context.pages).map(DoorbellPage::ring)
    }

    /// Appends the queues whose producer index moved.
    pub(crate) fn collect(&mut self, posts: &mut Vec<Post>) {
        for context in self.all.values_mut() {
            for page in &mut context.pages {
                page.collect(posts);
            }
        }
    }

    /// Gives a doorbell slot of a context to a queue; the doorbell number.
    pub(crate) fn take_doorbell(&mut self, ctx: u32, owner: Owner) -> Option<u32> {
        let pages = &mut self.all.get_mut(&ctx)?.pages;
        pages
            .iter_mut()
            .zip(0u32..)
            .find_map(|(page, number)| page.take(owner).map(|slot| number << db::PAGE_SHIFT | slot))
    }

    /// Gives doorbells to the rings (to send from, to receive into) that a QP has; `db::NONE` for one that it has not.
    pub(crate) fn take_doorbells(
        &mut self,
        ctx: u32,
        qpn: u32,
        (sq, rq): (bool, bool),
    ) -> Option<[u32; 2]> {
        let mut doorbells = [db::NONE; 2];
        if sq {
            doorbells[0] = self.take_doorbell(ctx, Owner::Send(qpn))?;
        }
        if rq {
            let Some(doorbell) = self.take_doorbell(ctx, Owner::Receive(qpn)) else {
                if sq {
                    self.free_doorbell(ctx, doorbells[0]);
                }
                return None;
            };
            doorbells[1] = doorbell;
        }
        Some(doorbells)
    }

    /// The page and slot of a doorbell number.
    fn doorbell(&mut self, ctx: u32, number: u32) -> Option<(&mut DoorbellPage, u32)> {
        let page = (number >> db::PAGE_SHIFT) as usize;
        let page = self.all.get_mut(&ctx)?.pages.get_mut(page)?;
        Some((page, number & ((1 << db::PAGE_SHIFT) - 1)))
    }

    pub(crate) fn free_doorbell(&mut self, ctx: u32, number: u32) {
        if let Some((page, slot)) = self.doorbell(ctx, number) {
            page.free(slot);
        }
    }

    /// The queue begins again at index 0. Also for whatever is seen while its QP is in RESET: the driver zeroes the index only when the
    /// command has returned, and a leftover that counted as seen would hide the next life's posts up to the same index.
    pub(crate) fn reset_doorbell(&mut self, ctx: u32, number: u32) {
        if let Some((page, slot)) = self.doorbell(ctx, number) {
            page.reset(slot);
        }
    }
}
