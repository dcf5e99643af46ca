//! One NIC: its objects, and what several of its parts share: completing, raising events, moving a QP to ERR.

use std::collections::VecDeque;
use std::fmt;

use rustc_hash::FxHashMap;
use slab::Slab;
use virtio_rdma_abi::{self as abi, event};
use zerocopy::little_endian::U64;

use super::chores::Chores;
use super::mr::MrTable;
use super::pace::Pace;
use super::qp::{Qp, Waiter};
use super::quota;
use super::srq::Srq;
use super::steps::Work;
use crate::memory::{AddressSpace, Ring};
use crate::nic::Port;
use crate::nic::budget::{Budget, Meter, cost};
use crate::nic::contexts::Contexts;
pub(super) use crate::nic::contexts::KERNEL;
use crate::nic::cq::{Cq, Fire};
use crate::nic::doorbell::{Owner, Post};
use crate::nic::limits::{Counters, GID_TABLE_LEN, Objects};
use crate::nic::outbox::Outbox;
use crate::nic::qp::State;
use crate::nic::quota::Kept;
use crate::nic::roster::Roster;
use crate::nic::table::Table;
use crate::nic::timer::{Timers, Waiting};
use crate::nic::{DeferredDrop, Nanos, NicSettings};
use crate::ordering::{self, Visible};
use crate::transport::{Gid, NicId};

/// QPs of one NIC that run in one round.
const ROUND_QPS: u32 = 16;

/// Where a NIC is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NicState {
    /// Before INIT.
    Idle,
    /// After INIT.
    Ready,
    /// Its control queue is stopped: guest memory is not touched.
    Paused,
    /// It failed; only a reset helps.
    Failed,
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Pd {
    pub(super) ctx: u32,
    /// Queue pairs, SRQs and address handles in it; the table of keys counts its own.
    pub(super) users: u32,
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
    pub(super) outbox: Outbox,
    pub(super) life: NicState,
    pub(super) space: AddressSpace,
    /// What its objects take.
    pub(super) kept: Kept,
    pub(super) status_page: Option<Ring>,
    pub(super) contexts: Contexts,
    pub(super) pds: Slab<Pd>,
    pub(super) mrs: MrTable,
    pub(super) cqs: Table<Cq>,
    pub(super) srqs: Table<Srq>,
    pub(super) qps: FxHashMap<u32, Box<Qp>>,
    /// The same, in an order that can be walked.
    pub(super) qp_numbers: Roster,
    pub(super) ahs: Slab<Ah>,
    pub(super) gids: Vec<Option<Gid>>,
    pub(super) counters: Counters,
    /// Where they stood when the driver that lives now began.
    pub(super) counters_at_init: Counters,
    pub(super) groups: super::mcast::Groups,
    /// Groups that no QP is in any more and that the network still lists this NIC for.
    pub(super) left: Vec<Gid>,
    /// QPs with something to execute or flush.
    pub(super) run: VecDeque<u32>,
    /// CQs with new entries.
    pub(super) dirty: Vec<u32>,
    /// Requesters elsewhere to try again, because this NIC posted a receive or became reachable.
    pub(super) wakes: Vec<Waiter>,
    /// Deadlines of its QPs and CQs.
    pub(super) timers: Timers,
    /// What it has still to do to many QPs.
    pub(super) chores: Chores,
    /// The command that has begun, if it goes in steps.
    pub(super) work: Option<Work>,
    /// What ends as soon as somebody has the time: not the shard.
    pub(super) deferred_drops: Vec<DeferredDrop>,
    /// QPs that may still run in this round.
    pub(super) turns: u32,
    /// How much it moves in one piece.
    pub(super) pace: Pace,
    /// The shard's.
    pub(super) meter: Meter,
    /// The device's clock, as this round or command was told it: what completions are stamped with.
    pub(super) now: Nanos,
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic")
            .field("id", &self.id)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

impl Nic {
    pub(super) fn new(id: NicId, settings: NicSettings, port: Box<dyn Port>, meter: Meter) -> Self {
        Self {
            id,
            settings,
            outbox: Outbox::new(port),
            life: NicState::Idle,
            space: AddressSpace::default(),
            // Before INIT there is nothing.
            kept: Kept::begin(&AddressSpace::default(), &quota::ENGINE),
            status_page: None,
            contexts: Contexts::default(),
            pds: Slab::new(),
            mrs: MrTable::default(),
            cqs: Table::default(),
            srqs: Table::default(),
            qps: FxHashMap::default(),
            qp_numbers: Roster::default(),
            ahs: Slab::new(),
            gids: vec![None; usize::from(GID_TABLE_LEN)],
            counters: Counters::default(),
            counters_at_init: Counters::default(),
            groups: super::mcast::Groups::default(),
            left: Vec::new(),
            run: VecDeque::new(),
            dirty: Vec::new(),
            wakes: Vec::new(),
            timers: Timers::default(),
            chores: Chores::default(),
            work: None,
            deferred_drops: Vec::new(),
            turns: 0,
            pace: Pace::default(),
            meter,
            now: 0,
        }
    }

    /// Forgets every object and every guest address; what is returned holds the objects.
    pub(super) fn clear(&mut self) -> Self {
        let nowhere = Box::new(crate::nic::Nowhere);
        let fresh = Self::new(self.id, self.settings.clone(), nowhere, self.meter.clone());
        let mut old = std::mem::replace(self, fresh);
        self.outbox = old.outbox.succeed();
        self.counters = old.counters;
        self.now = old.now;
        old
    }

    pub(super) fn objects(&self) -> Objects {
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        Objects {
            contexts: count(self.contexts.processes()),
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
        cqe.timestamp = U64::new(self.now);
        match cq.push(cqe, solicited) {
            Ok(()) => {
                self.counters.completions += 1;
                if cq.dirty && !was_dirty {
                    self.dirty.push(cqn);
                }
            }
            Err(crate::nic::cq::Overrun) => {
                self.cq_failed(cqn);
                // The one at hand goes no further; the others are told in turn.
                self.enter_error(cqe.qpn.get());
            }
        }
    }

    /// A CQ cannot go on (IBTA 10.2.6.3): it and the QPs that use it are told.
    pub(super) fn cq_failed(&mut self, cqn: u32) {
        let Some(cq) = self.cqs.get_mut(cqn as usize) else { return };
        // Its users are told in the NIC's own turn: they may be thousands.
        cq.kill();
        let ctx = cq.ctx;
        self.raise(event::CQ_ERR, cqn, ctx);
        self.chores.cq_died(cqn);
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
        self.meter.charge(cost::OBJECT);
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
        self.outbox.raise((kind, object, ctx), &mut self.counters);
    }

    /// Drops the waiting events of an object that goes away: `kinds` are those of its class.
    pub(super) fn forget_events(&mut self, kinds: &[u32], object: u32) {
        self.outbox.forget(kinds, object);
    }

    /// Has the arm word of a CQ looked at in this round.
    pub(super) fn look_at(&mut self, cqn: u32) {
        if let Some(cq) = self.cqs.get_mut(cqn as usize)
            && !std::mem::replace(&mut cq.dirty, true)
        {
            self.dirty.push(cqn);
        }
    }

    /// The event of a CQ has waited long enough, if it still waits.
    pub(super) fn event_timer_fired(&mut self, cqn: u32, now: Nanos) {
        if self.cqs.get(cqn as usize).is_some_and(|cq| cq.moderation.is_over(now)) {
            self.look_at(cqn);
        }
    }

    /// Drops the waiting event of a CQ that goes away.
    pub(super) fn forget_completion(&mut self, cqn: u32) {
        self.outbox.forget_completion(cqn);
    }

    /// Looks at the arm words of CQs with new entries, until the budget is over.
    pub(super) fn fire_completions(&mut self, visible: Visible, now: Nanos, budget: &mut Budget) {
        while !budget.is_over(&self.meter)
            && let Some(cqn) = self.dirty.pop()
        {
            self.meter.charge(cost::WAKE);
            let Some(cq) = self.cqs.get_mut(cqn as usize) else { continue };
            cq.dirty = false;
            match cq.fire(visible, now) {
                Fire::No | Fire::Later(None) => {}
                Fire::Later(Some(until)) => self.timers.set(until, Waiting::Event(cqn)),
                Fire::Event(seq) => {
                    self.meter.charge(cost::EVENT);
                    self.outbox.complete(cqn, cq, seq, &mut self.counters);
                }
            }
        }
    }

    /// Whether there are completions or events that the guest has not been told of.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.life != NicState::Paused && (!self.dirty.is_empty() || self.outbox.has_work())
    }

    /// Offers waiting events to the port and lets it notify the guest.
    pub(super) fn deliver_events(&mut self) {
        let offered = self.outbox.deliver(&mut self.cqs, &mut self.counters);
        self.meter.charge_each(cost::EVENT, offered);
    }

    /// Whether there is anything for it to do in this round.
    #[inline]
    pub(super) fn begin_round(&mut self, now: Nanos) -> bool {
        self.turns = 0;
        self.now = now;
        if self.life == NicState::Ready {
            self.turns = u32::try_from(self.run.len()).unwrap_or(u32::MAX).min(ROUND_QPS);
        }
        self.turns > 0 || self.has_other_work(now)
    }

    /// Another turn in this round, if a QP has something to do.
    #[inline]
    pub(super) fn take_turn(&mut self) -> bool {
        self.turns = u32::from(self.life == NicState::Ready && !self.run.is_empty());
        self.turns > 0
    }

    /// Deadlines that have come, and chores. Of a NIC that stands still none comes: its memory may
    /// be another driver's by now, and its waits begin anew (docs/virtio-rdma.md §5.3).
    #[inline]
    pub(super) fn has_other_work(&self, now: Nanos) -> bool {
        self.life == NicState::Ready && (self.timers.is_due(now) || !self.chores.is_empty())
    }

    /// The next deadline, if it can come.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.timers.next().filter(|_| self.life == NicState::Ready)
    }

    /// Tells the guest whether posts need a kick.
    pub(super) fn set_need_kick(&self, need: bool) {
        if let (Some(page), NicState::Ready) = (&self.status_page, self.life) {
            ordering::need_kick(page, need);
        }
    }

    /// Looks at doorbell pages; true if anything was posted.
    #[inline]
    pub(super) fn scan(&mut self, posts: &mut Vec<Post>) -> bool {
        if self.life != NicState::Ready {
            return false;
        }
        posts.clear();
        let looked = self.contexts.collect(posts);
        self.meter.charge_each(cost::DOORBELL_PAGE, looked);
        self.take_posts(posts)
    }

    fn take_posts(&mut self, posts: &[Post]) -> bool {
        self.meter.charge_each(cost::POST, posts.len());
        for post in posts {
            self.posted(*post);
        }
        !posts.is_empty()
    }

    /// Goes on with the last look before sleep, at every doorbell page: whether anything was rung,
    /// or `None` if there are pages left.
    pub(super) fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool> {
        if self.life != NicState::Ready {
            return Some(false);
        }
        loop {
            posts.clear();
            let rung = self.contexts.look_on(posts);
            self.meter.charge(cost::DOORBELL_PAGE);
            self.take_posts(posts);
            match rung {
                None => return Some(false),
                Some(true) => return Some(true),
                Some(false) if budget.is_over(&self.meter) => return None,
                Some(false) => {}
            }
        }
    }

    pub(super) fn posted(&mut self, post: Post) {
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
            return self.contexts.reset_doorbell(ctx, doorbell);
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
            return self.contexts.reset_doorbell(ctx, doorbell);
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
}
