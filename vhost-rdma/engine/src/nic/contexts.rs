//! Contexts: the processes of a guest, its kernel, and the doorbell pages of each.
//!
//! Doorbell pages are polled, and a guest may have thousands, so a round looks at some of them
//! only: those that rang lately, and the rest in turn. A page that is looked at later loses
//! nothing, since its index is still there; and before the worker sleeps every page is looked at
//! after the guest was asked to kick (`Contexts::look_on`, docs/virtio-rdma.md §6.4).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{self as abi, db};
use zerocopy::little_endian::U32;

use super::chunks::Chunks;
use super::command::{Reply, Status};
use super::doorbell::{DoorbellPage, Owner, Post, Slot};
use super::holdings::{Heads, Holding, Objects, Owned};
use super::limits::MAX_DB_PAGES;
use super::quota::{Kept, Kind, entry};
use super::roster::{Roster, Walk};
use super::saved::BadState;
use crate::memory::{AddressSpace, Charge, Ring, SavedMap};

/// What a NIC's account is charged for a doorbell page, without its slots.
pub const DOORBELLS: usize = entry(size_of::<Page>()) + 3 * 8;
/// Doorbell pages that a context may have though it does not need them.
pub(crate) const SPARE_PAGES: usize = 4;
/// Pages that are looked at in turn in one round.
const LOOKS: usize = 16;
/// Of these, pages that are looked at before the lively ones are asked again: a post to one of
/// those is not to wait for pages where nothing happens.
const AT_ONCE: usize = 4;
/// Pages that rang lately, at most; they are looked at in every round.
const LIVELY: usize = 16;
/// Looks in vain after which a page is not lively any more.
const COOLS_AFTER: u32 = 1024;
/// Posts that are taken in by one look; a page may bring a few more.
const POSTS: usize = 256;
/// The kernel's context.
pub const KERNEL: u32 = 0;

/// A process of the guest, or its kernel.
#[derive(Debug, Default)]
struct Context {
    /// Its doorbell pages, by number: where they are.
    pages: Vec<u32>,
    /// What it owns.
    heads: Heads,
}

/// A doorbell page, and how it is looked at.
#[derive(Debug)]
struct Page {
    doorbells: DoorbellPage,
    /// It is among the lively ones.
    lively: bool,
    /// Looks in vain since it rang.
    quiet: u32,
    /// What its slots take.
    kept: Charge,
}

/// All contexts of one NIC.
#[derive(Debug)]
pub struct Contexts {
    all: BTreeMap<u32, Context>,
    next: u32,
    pages: Chunks<Page>,
    /// Where there are pages.
    order: Roster<1>,
    /// Pages that rang lately.
    lively: Vec<u32>,
    /// Whose turn it is, of the order.
    turn: Walk,
    /// What is left of the last look before sleep.
    look: Walk,
}

/// A doorbell page of a context, and its slots in use.
type SavedPage = (SavedMap, Vec<(u32, Slot)>);

/// What is saved of all contexts.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedContexts {
    next: u32,
    all: Vec<(u32, Vec<SavedPage>)>,
}

impl Default for Contexts {
    fn default() -> Self {
        Self {
            all: BTreeMap::new(),
            next: 1,
            pages: Chunks::default(),
            order: Roster::default(),
            lively: Vec::new(),
            turn: Walk::default(),
            look: Walk::default(),
        }
    }
}

impl Contexts {
    /// The kernel's context is there from INIT on.
    pub(crate) fn begin(&mut self) {
        self.all.insert(KERNEL, Context::default());
    }

    /// See [`super::saved`]; `None` if a page is no guest's.
    pub(crate) fn save(&self) -> Option<SavedContexts> {
        let page = |at: &u32| {
            let page = &self.pages.get(*at as usize)?.doorbells;
            Some((page.ring().save()?, page.save()))
        };
        let context = |(ctx, context): (&u32, &Context)| {
            Some((*ctx, context.pages.iter().map(page).collect::<Option<_>>()?))
        };
        let all = self.all.iter().map(context).collect::<Option<_>>()?;
        Some(SavedContexts { next: self.next, all })
    }

    /// What was saved, in this memory.
    pub(crate) fn load(
        saved: SavedContexts,
        space: &AddressSpace,
        kept: &mut Kept,
    ) -> Result<Self, BadState> {
        let mut contexts = Self { next: saved.next, ..Self::default() };
        for (ctx, pages) in saved.all {
            if pages.len() > MAX_DB_PAGES {
                return Err(BadState::Content("so many doorbell pages"));
            }
            kept.place(Kind::Context, contexts.all.len())?;
            let mut context = Context::default();
            for (map, slots) in pages {
                let doorbells = DoorbellPage::load(Ring::load(&map, space)?, &slots);
                let doorbells = doorbells.ok_or(BadState::Content("such a doorbell"))?;
                context.pages.push(contexts.insert(doorbells, kept)?);
            }
            contexts.all.insert(ctx, context);
        }
        if contexts.contains(KERNEL) {
            Ok(contexts)
        } else {
            Err(BadState::Content("a guest without a kernel"))
        }
    }

    /// Contexts of processes.
    pub(crate) fn processes(&self) -> usize {
        self.all.len().saturating_sub(1)
    }

    pub(crate) fn contains(&self, ctx: u32) -> bool {
        self.all.contains_key(&ctx)
    }

    /// One of a context's objects of a kind.
    pub(crate) fn first_of(&self, ctx: u32, kind: Holding) -> Option<u32> {
        self.all.get(&ctx)?.heads.first(kind)
    }

    /// An object is new in its table.
    pub(crate) fn join<T: Owned>(&mut self, table: &mut impl Objects<T>, number: u32) {
        if let Some(context) = table.object(number).and_then(|new| self.all.get_mut(&new.ctx())) {
            context.heads.join(table, number);
        }
    }

    /// An object is about to be taken out of its table.
    pub(crate) fn leave<T: Owned>(&mut self, table: &mut impl Objects<T>, number: u32) {
        if let Some(context) = table.object(number).and_then(|old| self.all.get_mut(&old.ctx())) {
            context.heads.leave(table, number);
        }
    }

    pub(crate) fn remove(&mut self, ctx: u32) {
        for at in self.all.remove(&ctx).into_iter().flat_map(|context| context.pages) {
            if self.pages.try_remove(at as usize).is_some_and(|page| page.lively) {
                self.lively.retain(|&lively| lively != at);
            }
            self.order.remove(at);
        }
    }

    /// Adds a page without slots; where it is.
    fn insert_page(&mut self, ring: Ring, kept: &mut Kept) -> Result<u32, Status> {
        self.insert(DoorbellPage::new(ring), kept)
    }

    fn insert(&mut self, doorbells: DoorbellPage, kept: &mut Kept) -> Result<u32, Status> {
        kept.place(Kind::Page, self.pages.len())?;
        let kept = kept.beside(doorbells.kept())?;
        let page = Page { doorbells, lively: false, quiet: 0, kept };
        let at = u32::try_from(self.pages.insert(page)).map_err(|_| Status::NOMEM)?;
        self.order.insert(at);
        Ok(at)
    }

    /// CONTEXT_CREATE: `most` processes, `kick_queues` to share among them.
    pub(crate) fn create(
        &mut self,
        db_page: Ring,
        (most, kick_queues): (u32, u32),
        kept: &mut Kept,
    ) -> Result<Reply, Status> {
        if self.all.len() > most as usize {
            return Err(Status::NOMEM);
        }
        kept.place(Kind::Context, self.all.len())?;
        // Numbers come back only after four thousand million contexts; a live one is skipped.
        while self.next == KERNEL || self.all.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let ctx = self.next;
        self.next = self.next.wrapping_add(1);
        let at = self.insert_page(db_page, kept)?;
        self.all.insert(ctx, Context { pages: vec![at], ..Context::default() });
        Ok(Reply::Context(abi::ContextCreateResp {
            ctx: U32::new(ctx),
            kick_queue: U32::new(ctx % kick_queues.max(1)),
        }))
    }

    /// DB_PAGE_ADD.
    pub(crate) fn add_page(
        &mut self,
        ctx: u32,
        db_page: Ring,
        kept: &mut Kept,
    ) -> Result<Reply, Status> {
        let context = self.all.get(&ctx).ok_or(Status::NOENT)?;
        // Every page is looked at, so only a context that fills its pages gets more of them.
        let pages = context.pages.iter().filter_map(|&at| self.pages.get(at as usize));
        let needless = context.pages.len() >= SPARE_PAGES
            && pages.map(|page| page.doorbells.room()).sum::<u32>() >= db::SLOTS;
        if needless || context.pages.len() >= MAX_DB_PAGES {
            return Err(Status::NOMEM);
        }
        let page = u32::try_from(context.pages.len()).map_err(|_| Status::NOMEM)?;
        let at = self.insert_page(db_page, kept)?;
        if let Some(context) = self.all.get_mut(&ctx) {
            context.pages.push(at);
        }
        Ok(Reply::DbPage(abi::DbPageAddResp { page: U32::new(page), reserved: U32::new(0) }))
    }

    /// A walk over all doorbell pages.
    pub(crate) fn walk(&self) -> Walk {
        self.order.walk()
    }

    /// The memory of the next doorbell page of a walk.
    pub(crate) fn next_page(&self, walk: &mut Walk) -> Option<&Ring> {
        let at = walk.next(&self.order)?;
        self.pages.get(at as usize).map(|page| page.doorbells.ring())
    }

    /// Appends queues whose producer index moved: those of lively pages, and of some of the others,
    /// of few if work of another NIC waits already (`brief`). How many pages were looked at.
    #[inline]
    pub(crate) fn collect(&mut self, posts: &mut Vec<Post>, brief: bool) -> usize {
        let mut looked = 0;
        let mut left = if brief { AT_ONCE } else { LOOKS }.min(self.order.len());
        loop {
            looked += self.collect_lively(posts);
            // Some of the others in any case, so that none is left out for ever; the rest only as
            // long as the lively ones are silent.
            let some = left.min(AT_ONCE);
            left -= some;
            looked += self.collect_others(some, posts);
            if left == 0 || !posts.is_empty() {
                return looked;
            }
        }
    }

    /// Looks at the lively pages; how many.
    #[inline]
    fn collect_lively(&mut self, posts: &mut Vec<Post>) -> usize {
        let mut looked = 0;
        let mut index = 0;
        while let Some(&at) = self.lively.get(index) {
            if posts.len() >= POSTS {
                break;
            }
            looked += 1;
            if self.collect_page(at, posts) {
                index += 1;
            }
        }
        // Which lively pages come first changes, so that none of them is left out for ever.
        if posts.len() >= POSTS && index > 0 && index < self.lively.len() {
            self.lively.rotate_left(index);
        }
        looked
    }

    /// Looks at so many of the others, in turn; how many were looked at.
    #[inline]
    fn collect_others(&mut self, count: usize, posts: &mut Vec<Post>) -> usize {
        let mut looked = 0;
        for _ in 0..count {
            if posts.len() >= POSTS {
                break;
            }
            let mut next = self.turn.next(&self.order);
            if next.is_none() {
                self.turn = self.order.walk();
                next = self.turn.next(&self.order);
            }
            let Some(at) = next else { break };
            if self.pages.get(at as usize).is_some_and(|page| !page.lively) {
                looked += 1;
                self.collect_page(at, posts);
            }
        }
        looked
    }

    /// Looks at one page; false if it left the lively ones.
    #[inline]
    fn collect_page(&mut self, at: u32, posts: &mut Vec<Post>) -> bool {
        let Some(page) = self.pages.get_mut(at as usize) else { return true };
        let before = posts.len();
        let left = page.doorbells.collect(posts);
        if left || posts.len() > before {
            page.quiet = 0;
            if !page.lively && self.lively.len() < LIVELY {
                page.lively = true;
                self.lively.push(at);
            }
        } else if page.lively {
            page.quiet += 1;
            if page.quiet > COOLS_AFTER {
                page.lively = false;
                self.lively.retain(|&lively| lively != at);
                return false;
            }
        }
        true
    }

    /// How many doorbell pages a context has.
    pub(crate) fn pages_of(&self, ctx: u32) -> usize {
        self.all.get(&ctx).map_or(0, |context| context.pages.len())
    }

    /// Looks at the doorbell page `number` of a context.
    pub(crate) fn collect_of(&mut self, ctx: u32, number: usize, posts: &mut Vec<Post>) {
        if let Some(&at) = self.all.get(&ctx).and_then(|context| context.pages.get(number)) {
            self.collect_page(at, posts);
        }
    }

    /// Begins the last look before sleep: from now on every page has to be looked at.
    pub(crate) fn begin_look(&mut self) {
        self.look = self.order.walk();
    }

    /// Looks at the next page of the last look; `None` if that was all. True: something was rung
    /// there.
    pub(crate) fn look_on(&mut self, posts: &mut Vec<Post>) -> Option<bool> {
        let at = self.look.next(&self.order)?;
        let before = posts.len();
        let page = self.pages.get_mut(at as usize);
        let left = page.is_some_and(|page| page.doorbells.collect(posts));
        Some(left || posts.len() > before)
    }

    /// What was posted to one doorbell, though its page's turn may not have come.
    pub(crate) fn look_at(&mut self, ctx: u32, number: u32) -> Option<Post> {
        let (page, slot) = self.doorbell(ctx, number)?;
        page.look(slot)
    }

    /// Gives a doorbell slot of a context to a queue; the doorbell number.
    pub(crate) fn take_doorbell(&mut self, ctx: u32, owner: Owner) -> Option<u32> {
        let Self { all, pages, .. } = self;
        all.get(&ctx)?.pages.iter().zip(0u32..).find_map(|(&at, number)| {
            let page = pages.get_mut(at as usize)?;
            let bytes = page.doorbells.kept_with_another()?;
            let slot =
                page.kept.settle(bytes as u64).then(|| page.doorbells.take(owner)).flatten()?;
            Some(number << db::PAGE_SHIFT | slot)
        })
    }

    /// Gives doorbells to the rings (to send from, to receive into) that a QP has; `db::NONE` for
    /// one that it has not.
    pub fn take_doorbells(
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
        let at = *self.all.get(&ctx)?.pages.get(page)?;
        let page = &mut self.pages.get_mut(at as usize)?.doorbells;
        Some((page, number & ((1 << db::PAGE_SHIFT) - 1)))
    }

    /// The doorbell `number` of a context is nobody's any more.
    pub fn free_doorbell(&mut self, ctx: u32, number: u32) {
        if let Some((page, slot)) = self.doorbell(ctx, number) {
            page.free(slot);
        }
    }

    /// The queue begins again at index 0. Also for whatever is seen while its QP is in RESET: the
    /// driver zeroes the index only when the command has returned, and a leftover that counted as
    /// seen would hide the next life's posts up to the same index.
    pub fn reset_doorbell(&mut self, ctx: u32, number: u32) {
        if let Some((page, slot)) = self.doorbell(ctx, number) {
            page.reset(slot);
        }
    }
}
