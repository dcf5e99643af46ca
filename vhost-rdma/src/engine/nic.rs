//! One NIC: its objects, and what several of its parts share: completing, raising events, moving a QP to ERR.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use rustc_hash::{FxHashMap, FxHashSet};
use slab::Slab;
use virtio_rdma_abi::{self as abi, event};
use zerocopy::little_endian::U32;

use super::cq::Cq;
use super::doorbell::{DoorbellPage, Owner, Post};
use super::limits::{Counters, GID_TABLE_LEN, Limits, Objects};
use super::mr::MrTable;
use super::port::Port;
use super::qp::{Qp, State, Waiter};
use super::srq::Srq;
use crate::memory::{AddressSpace, Ring, Segment};
use crate::protocol::{self, Visible};
use crate::transport::{Gid, NicId};

/// What an operator gives a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicSettings {
    /// The network. NICs of different networks never find each other.
    pub vni: u32,
    /// The MAC address of the NIC and of its companion network interface.
    pub mac: [u8; 6],
    /// Addresses that the guest may use; none: any that no other NIC of the network holds.
    pub gids: Vec<Gid>,
    /// Completion vectors of the device.
    pub comp_vectors: u32,
    /// Kick queues of the device.
    pub kick_queues: u32,
    /// Limits.
    pub limits: Limits,
}

/// Where a NIC is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// Before INIT.
    Idle,
    /// After INIT.
    Ready,
    /// Its control queue is stopped: guest memory is not touched.
    Paused,
    /// It failed; only a reset helps.
    Failed,
}

/// A process of the guest, or its kernel.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) pages: Vec<DoorbellPage>,
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Pd {
    pub(super) ctx: u32,
}

/// An address handle.
#[derive(Debug)]
pub(super) struct Ah {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) av: abi::Av,
}

/// One NIC.
pub(super) struct Nic {
    pub(super) id: NicId,
    pub(super) settings: NicSettings,
    pub(super) port: Box<dyn Port>,
    pub(super) life: Life,
    pub(super) space: AddressSpace,
    pub(super) status_page: Option<Ring>,
    pub(super) contexts: BTreeMap<u32, Context>,
    pub(super) next_ctx: u32,
    pub(super) pds: Slab<Pd>,
    pub(super) mrs: MrTable,
    pub(super) cqs: Slab<Cq>,
    pub(super) srqs: Slab<Srq>,
    pub(super) qps: FxHashMap<u32, Box<Qp>>,
    pub(super) ahs: Slab<Ah>,
    pub(super) gids: Vec<Option<Gid>>,
    pub(super) counters: Counters,
    pub(super) groups: super::mcast::Groups,
    /// Groups that no QP is in any more and that the network still lists this NIC for.
    pub(super) left: Vec<Gid>,
    /// QPs with something to execute or flush.
    pub(super) run: VecDeque<u32>,
    /// CQs with new entries.
    pub(super) dirty: Vec<u32>,
    /// Requesters elsewhere to try again, because this NIC posted a receive or became reachable.
    pub(super) wakes: Vec<Waiter>,
    /// CQs whose completion event waits for a buffer.
    pending_completions: VecDeque<u32>,
    pending_events: VecDeque<(u32, u32, u32)>,
    pending_set: FxHashSet<(u32, u32)>,
    pub(super) offer_events: bool,
    /// Segment list of the receive in progress, kept for its allocation.
    pub(super) scratch: Vec<Segment>,
    put_events: bool,
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic")
            .field("id", &self.id)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

/// The kernel's context.
pub(super) const KERNEL: u32 = 0;

impl Nic {
    pub(super) fn new(id: NicId, settings: NicSettings, port: Box<dyn Port>) -> Self {
        Self {
            id,
            settings,
            port,
            life: Life::Idle,
            space: AddressSpace::default(),
            status_page: None,
            contexts: BTreeMap::new(),
            next_ctx: 1,
            pds: Slab::new(),
            mrs: MrTable::default(),
            cqs: Slab::new(),
            srqs: Slab::new(),
            qps: FxHashMap::default(),
            ahs: Slab::new(),
            gids: vec![None; usize::from(GID_TABLE_LEN)],
            counters: Counters::default(),
            groups: super::mcast::Groups::default(),
            left: Vec::new(),
            run: VecDeque::new(),
            dirty: Vec::new(),
            wakes: Vec::new(),
            pending_completions: VecDeque::new(),
            pending_events: VecDeque::new(),
            pending_set: FxHashSet::default(),
            offer_events: false,
            scratch: Vec::new(),
            put_events: false,
        }
    }

    /// Forgets every object and every guest address. QPNs go back through `freed`.
    pub(super) fn clear(&mut self, freed: &mut Vec<u32>) {
        freed.extend(self.qps.keys());
        let fresh = Self::new(self.id, self.settings.clone(), Box::new(super::port::Nowhere));
        let old = std::mem::replace(self, fresh);
        self.port = old.port;
        self.counters = old.counters;
    }

    pub(super) fn objects(&self) -> Objects {
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        Objects {
            contexts: count(self.contexts.len().saturating_sub(1)),
            pds: count(self.pds.len()),
            mrs: count(self.mrs.len()),
            mr_bytes: self.mrs.bytes(),
            cqs: count(self.cqs.len()),
            srqs: count(self.srqs.len()),
            qps: count(self.qps.len()),
            ahs: count(self.ahs.len()),
        }
    }

    /// The address at an index of the port's table.
    pub(super) fn gid(&self, index: u16) -> Option<Gid> {
        self.gids.get(usize::from(index)).copied().flatten()
    }

    /// Puts a QP on the run queue, once.
    pub(super) fn schedule(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(&qpn)
            && !qp.scheduled
        {
            qp.scheduled = true;
            self.run.push_back(qpn);
        }
    }

    /// Writes a completion. An overrun kills the CQ and every QP on it.
    #[inline]
    pub(super) fn complete(&mut self, cqn: u32, cqe: &mut abi::Cqe, solicited: bool) {
        let Some(cq) = self.cqs.get_mut(cqn as usize) else { return };
        let was_dirty = cq.dirty;
        match cq.push(cqe, solicited) {
            Ok(()) => {
                self.counters.completions += 1;
                if cq.dirty && !was_dirty {
                    self.dirty.push(cqn);
                }
            }
            Err(super::cq::Overrun) => self.cq_failed(cqn),
        }
    }

    /// A CQ cannot go on (IBTA 10.2.6.3): it and the QPs that use it are told.
    pub(super) fn cq_failed(&mut self, cqn: u32) {
        let Some(cq) = self.cqs.get_mut(cqn as usize) else { return };
        cq.kill();
        let ctx = cq.ctx;
        self.raise(event::CQ_ERR, cqn, ctx);
        let users: Vec<u32> = self
            .qps
            .values()
            .filter(|qp| qp.send_cqn == cqn || qp.recv_cqn == cqn)
            .map(|qp| qp.qpn)
            .collect();
        users.into_iter().for_each(|qpn| self.qp_fatal(qpn));
    }

    /// An SRQ cannot go on.
    pub(super) fn srq_failed(&mut self, srqn: u32) {
        let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
        if !std::mem::replace(&mut srq.dead, true) {
            let ctx = srq.ctx;
            self.raise(event::SRQ_ERR, srqn, ctx);
        }
    }

    /// A QP cannot go on for a reason of its own: its rings are gone or their indices are nonsense.
    pub(super) fn qp_fatal(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get(&qpn) else { return };
        let ctx = qp.ctx;
        self.raise(event::QP_FATAL, qpn, ctx);
        self.enter_error(qpn);
    }

    /// Moves a QP to ERR; what is posted is flushed by the run queue.
    pub(super) fn enter_error(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if qp.state == State::Reset {
            return;
        }
        qp.state = State::Err;
        qp.waiter = None;
        qp.draining = false;
        self.schedule(qpn);
    }

    /// Raises an asynchronous event; at most one of a type waits per object.
    pub(super) fn raise(&mut self, kind: u32, object: u32, ctx: u32) {
        if self.pending_set.insert((kind, object)) {
            self.pending_events.push_back((kind, object, ctx));
            self.offer_events = true;
        } else {
            self.counters.events_coalesced += 1;
        }
    }

    /// Drops the waiting events of an object that goes away: `kinds` are those of its class.
    pub(super) fn forget_events(&mut self, kinds: &[u32], object: u32) {
        for &kind in kinds {
            if self.pending_set.remove(&(kind, object)) {
                self.pending_events.retain(|&(k, o, _)| (k, o) != (kind, object));
            }
        }
    }

    /// Looks at the arm words of the CQs with new entries.
    pub(super) fn fire_completions(&mut self, visible: Visible) {
        while let Some(cqn) = self.dirty.pop() {
            let Some(cq) = self.cqs.get_mut(cqn as usize) else { continue };
            cq.dirty = false;
            let Some(seq) = cq.fire(visible) else { continue };
            if cq.event_pending {
                self.counters.events_coalesced += 1;
                continue;
            }
            let vector = cq.vector;
            if self.port.completion_event(
                vector,
                abi::CompEvent { cqn: U32::new(cqn), arm_seq: U32::new(seq) },
            ) {
                self.counters.events += 1;
                self.put_events = true;
            } else {
                cq.event_pending = true;
                self.pending_completions.push_back(cqn);
            }
        }
    }

    /// Offers waiting events to the port and lets it notify the guest.
    pub(super) fn deliver_events(&mut self) {
        if std::mem::take(&mut self.offer_events) {
            self.offer_completions();
            self.offer_async();
        }
        if std::mem::take(&mut self.put_events) {
            self.port.flush();
        }
    }

    fn offer_completions(&mut self) {
        // Vectors run dry one by one, so every waiting CQ is offered once.
        for _ in 0..self.pending_completions.len() {
            let Some(cqn) = self.pending_completions.pop_front() else { return };
            let Some(cq) = self.cqs.get_mut(cqn as usize).filter(|cq| cq.event_pending) else {
                continue;
            };
            let event = abi::CompEvent { cqn: U32::new(cqn), arm_seq: U32::new(cq.fired()) };
            if self.port.completion_event(cq.vector, event) {
                cq.event_pending = false;
                self.counters.events += 1;
                self.put_events = true;
            } else {
                self.pending_completions.push_back(cqn);
            }
        }
    }

    fn offer_async(&mut self) {
        while let Some(&(kind, object, ctx)) = self.pending_events.front() {
            let event = abi::AsyncEvent {
                r#type: U32::new(kind),
                object: U32::new(object),
                ctx: U32::new(ctx),
                reserved: U32::new(0),
            };
            if !self.port.async_event(event) {
                return;
            }
            self.pending_events.pop_front();
            self.pending_set.remove(&(kind, object));
            self.counters.events += 1;
            self.put_events = true;
        }
    }

    /// Tells the guest whether posts need a kick.
    pub(super) fn set_need_kick(&self, need: bool) {
        if let (Some(page), Life::Ready) = (&self.status_page, self.life) {
            protocol::need_kick(page, need);
        }
    }

    /// Looks at every doorbell page; true if anything was posted.
    pub(super) fn scan(&mut self, posts: &mut Vec<Post>) -> bool {
        if self.life != Life::Ready {
            return false;
        }
        posts.clear();
        for context in self.contexts.values_mut() {
            for page in &mut context.pages {
                page.collect(posts);
            }
        }
        for post in posts.iter() {
            self.posted(*post);
        }
        !posts.is_empty()
    }

    fn posted(&mut self, post: Post) {
        match post.owner {
            Owner::Send(qpn) => self.posted_send(qpn, post.producer),
            Owner::Receive(qpn) => self.posted_receive(qpn, post.producer),
            Owner::Shared(srqn) => {
                let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
                match srq.ring.posted(post.producer) {
                    Ok(()) => self.wakes.append(&mut srq.waiters),
                    Err(_) => self.srq_failed(srqn),
                }
            }
        }
    }

    fn posted_send(&mut self, qpn: u32, producer: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if qp.state == State::Reset {
            let (ctx, [doorbell, _]) = (qp.ctx, qp.doorbells);
            return self.reset_doorbell(ctx, doorbell);
        }
        let Some(send) = &mut qp.send else { return };
        match send.posted(producer) {
            Ok(()) => self.schedule(qpn),
            Err(_) => self.qp_fatal(qpn),
        }
    }

    fn posted_receive(&mut self, qpn: u32, producer: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if qp.state == State::Reset {
            let (ctx, [_, doorbell]) = (qp.ctx, qp.doorbells);
            return self.reset_doorbell(ctx, doorbell);
        }
        let Some(receive) = &mut qp.receive else { return };
        match receive.posted(producer) {
            Ok(()) => {
                self.wakes.extend(qp.waiter.take());
                if qp.state == State::Err {
                    self.schedule(qpn);
                }
            }
            Err(_) => self.qp_fatal(qpn),
        }
    }

    /// Gives a doorbell slot of a context to a queue; the doorbell number.
    pub(super) fn take_doorbell(&mut self, ctx: u32, owner: Owner) -> Option<u32> {
        let pages = &mut self.contexts.get_mut(&ctx)?.pages;
        pages.iter_mut().zip(0u32..).find_map(|(page, number)| {
            page.take(owner).map(|slot| number << abi::db::PAGE_SHIFT | slot)
        })
    }

    /// The page and slot of a doorbell number.
    fn doorbell(&mut self, ctx: u32, number: u32) -> Option<(&mut DoorbellPage, u32)> {
        let page = (number >> abi::db::PAGE_SHIFT) as usize;
        let page = self.contexts.get_mut(&ctx)?.pages.get_mut(page)?;
        Some((page, number & ((1 << abi::db::PAGE_SHIFT) - 1)))
    }

    pub(super) fn free_doorbell(&mut self, ctx: u32, number: u32) {
        if let Some((page, slot)) = self.doorbell(ctx, number) {
            page.free(slot);
        }
    }

    /// The queue begins again at index 0. Also for whatever is seen while its QP is in RESET: the driver zeroes the index only when the
    /// command has returned, and a leftover that counted as seen would hide the next life's posts up to the same index.
    pub(super) fn reset_doorbell(&mut self, ctx: u32, number: u32) {
        if let Some((page, slot)) = self.doorbell(ctx, number) {
            page.reset(slot);
        }
    }
}
