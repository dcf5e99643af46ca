//! One NIC: what it has, and what several of its parts share: completing, raising events, moving a
//! QP to ERR, looking at doorbells.

use std::collections::VecDeque;
use std::fmt;

use virtio_rdma_abi::{self as abi, event, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::budget::{Budget, Meter, cost};
use super::chores::Chores;
use super::chunks::Chunks;
use super::contexts::Contexts;
pub(crate) use super::contexts::KERNEL;
use super::cq::{Cq, Fire, Overrun};
use super::dispatch::Work;
use super::doorbell::{Owner, Post};
use super::follow::Change;
use super::limits::{GID_TABLE_LEN, counters};
use super::objects::{Ah, Pd, Qp, Srq};
use super::outbox::Outbox;
use super::provider::{Provider, ReceiveSide, SendSide};
use super::qp::State;
use super::quota::Kept;
use super::recent::Recent;
use super::roster::Roster;
use super::table::Table;
use super::timer::{Timers, Waiting};
use super::{Counters, DeferredDrop, Nanos, NicSettings, NicSnapshot, Objects, Port, Reply};
use crate::memory::{AddressSpace, Ring};
use crate::ordering::{self, Visible};

/// Time for one step of what is many.
pub const STEP: Nanos = 40_000;

/// Where a NIC is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicState {
    /// Before INIT.
    Idle,
    /// After INIT.
    Ready,
    /// Its control queue is stopped: guest memory is not touched.
    Paused,
    /// It failed; only a reset helps.
    Failed,
}

/// One NIC.
pub struct Nic<P: Provider> {
    /// What the operator gave it.
    pub settings: NicSettings,
    /// Events and completions on their way to the guest.
    pub outbox: Outbox,
    /// What may be asked of it.
    pub life: NicState,
    /// The guest's memory.
    pub space: AddressSpace,
    /// What its objects take.
    pub kept: Kept,
    pub(crate) status_page: Option<Ring>,
    /// The contexts of its guest, with their doorbell pages.
    pub contexts: Contexts,
    /// Protection domains, by number.
    pub pds: Chunks<Pd<P::Pd>>,
    /// CQs, by number.
    pub cqs: Table<Cq>,
    /// SRQs, by number.
    pub srqs: Table<Srq<P>>,
    /// QPs, by QPN.
    pub qps: Recent<Box<Qp<P>>>,
    /// The same, in an order that can be walked.
    pub qp_numbers: Roster,
    /// Address handles, by number.
    pub ahs: Chunks<Ah<P::Ah>>,
    /// Its addresses, by index.
    pub gids: Vec<Option<P::Address>>,
    /// What it has done since it was made.
    pub counters: Counters,
    /// Where they stood when the driver that lives now began.
    pub(crate) counters_at_init: Counters,
    /// QPs with something to execute or flush.
    pub run: VecDeque<u32>,
    /// CQs with new entries.
    pub(crate) dirty: Vec<u32>,
    /// Deadlines of its QPs and CQs.
    pub timers: Timers,
    /// What it has still to do to many QPs.
    pub chores: Chores,
    /// What is left of a change of the memory map.
    pub(crate) change: Change<P::Keys>,
    /// The command that has begun, if it goes in steps.
    pub(crate) work: Option<Work<P>>,
    /// What ends as soon as somebody has the time: not the shard.
    pub deferred_drops: Vec<DeferredDrop>,
    /// The shard's.
    pub meter: Meter,
    /// The device's clock, as this round or command was told it: what completions are stamped with.
    pub now: Nanos,
    /// What the backing keeps.
    pub backing: P,
}

impl<P: Provider> fmt::Debug for Nic<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic")
            .field("life", &self.life)
            .field("backing", &self.backing)
            .finish_non_exhaustive()
    }
}

impl<P: Provider> Drop for Nic<P> {
    fn drop(&mut self) {
        P::dropped(self);
    }
}

impl<P: Provider> Nic<P> {
    /// A NIC that waits for INIT.
    pub fn idle(backing: P, settings: NicSettings, port: Box<dyn Port>, meter: Meter) -> Self {
        Self {
            settings,
            outbox: Outbox::new(port),
            life: NicState::Idle,
            space: AddressSpace::default(),
            // Before INIT there is nothing.
            kept: Kept::begin(&AddressSpace::default(), P::PLACES),
            status_page: None,
            contexts: Contexts::default(),
            pds: Chunks::default(),
            cqs: Table::default(),
            srqs: Table::default(),
            qps: Recent::default(),
            qp_numbers: Roster::default(),
            ahs: Chunks::default(),
            gids: vec![None; usize::from(GID_TABLE_LEN)],
            counters: Counters::default(),
            counters_at_init: Counters::default(),
            run: VecDeque::new(),
            dirty: Vec::new(),
            timers: Timers::default(),
            chores: Chores::default(),
            change: Change::default(),
            work: None,
            deferred_drops: Vec::new(),
            meter,
            now: 0,
            backing,
        }
    }

    /// A driver begins, with this memory.
    pub fn begin(&mut self, status_page: Ring) -> Reply {
        self.counters_at_init = self.counters;
        self.status_page = Some(status_page);
        self.contexts.begin();
        self.life = NicState::Ready;
        Reply::Init(abi::InitResp {
            abi_version: U32::new(abi::ABI_VERSION),
            ..abi::InitResp::default()
        })
    }

    /// What is seen of it from outside.
    pub(crate) fn snapshot(&self) -> NicSnapshot {
        let paused = self.life == NicState::Paused;
        NicSnapshot {
            ready: self.life == NicState::Ready,
            failed: self.life == NicState::Failed,
            counters: self.counters,
            objects: if paused { Objects::default() } else { self.objects() },
            gids: self.gids.iter().flatten().map(P::gid).collect(),
        }
    }

    fn objects(&self) -> Objects {
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let mut objects = Objects {
            contexts: count(self.contexts.processes()),
            pds: count(self.pds.len()),
            cqs: count(self.cqs.len()),
            srqs: count(self.srqs.len()),
            qps: count(self.qps.len() + usize::from(self.backing.has_other_qp())),
            ahs: count(self.ahs.len()),
            ..Objects::default()
        };
        self.backing.count(&mut objects);
        objects
    }

    pub(crate) fn counters_response(&self) -> abi::QueryCountersResp {
        counters(&self.counters, &self.counters_at_init)
    }

    /// Puts a QP on the run queue, once.
    pub fn schedule(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(&qpn)
            && !std::mem::replace(&mut qp.scheduled, true)
        {
            self.run.push_back(qpn);
        }
    }

    /// Writes a completion. An overrun kills the CQ and every QP on it.
    #[inline]
    pub fn complete(&mut self, cqn: u32, cqe: &mut abi::Cqe, solicited: bool) {
        if cqe.status != wc_status::SUCCESS && cqe.status != wc_status::WR_FLUSH_ERR {
            self.counters.completion_errors += 1;
        }
        // The memory of one that stands still may be another driver's.
        if self.life != NicState::Ready {
            return;
        }
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
            Err(Overrun) => {
                self.cq_failed(cqn);
                // The one at hand goes no further; the others are told in turn.
                self.enter_error(cqe.qpn.get());
            }
        }
    }

    /// A CQ cannot go on (IBTA 10.2.6.3): it and the QPs that use it are told.
    pub(crate) fn cq_failed(&mut self, cqn: u32) {
        let Some(cq) = self.cqs.get_mut(cqn as usize) else { return };
        // Its users are told in the NIC's own turn: they may be thousands.
        cq.kill();
        let ctx = cq.ctx;
        self.raise(event::CQ_ERR, cqn, ctx);
        self.chores.cq_died(cqn);
        P::cq_died(self, cqn);
    }

    /// An SRQ cannot go on.
    pub fn srq_failed(&mut self, srqn: u32) {
        let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
        if !std::mem::replace(&mut srq.dead, true) {
            let ctx = srq.ctx;
            self.raise(event::SRQ_ERR, srqn, ctx);
        }
    }

    /// A QP cannot go on for a reason of its own: its rings are gone or their indices are nonsense.
    pub fn qp_fatal(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get(&qpn) else { return };
        self.meter.charge(cost::OBJECT);
        let ctx = qp.ctx;
        self.raise(event::QP_FATAL, qpn, ctx);
        self.enter_error(qpn);
    }

    /// Moves a QP to ERR; what is posted is flushed.
    pub fn enter_error(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if qp.state != State::Reset {
            qp.state = State::Err;
            P::stopped(self, qpn);
        }
    }

    /// Raises an asynchronous event; at most one of a type waits per object.
    pub fn raise(&mut self, kind: u32, object: u32, ctx: u32) {
        self.outbox.raise((kind, object, ctx), &mut self.counters);
    }

    /// Has the arm word of a CQ looked at in this round.
    pub(crate) fn look_at(&mut self, cqn: u32) {
        if let Some(cq) = self.cqs.get_mut(cqn as usize)
            && !std::mem::replace(&mut cq.dirty, true)
        {
            self.dirty.push(cqn);
        }
    }

    /// The event of a CQ has waited long enough, if it still waits.
    pub fn event_timer_fired(&mut self, cqn: u32, now: Nanos) {
        if self.cqs.get(cqn as usize).is_some_and(|cq| cq.moderation.is_over(now)) {
            self.look_at(cqn);
        }
    }

    /// Looks at the arm words of CQs with new entries, until the budget is over.
    pub(crate) fn fire_completions(&mut self, visible: Visible, now: Nanos, budget: &mut Budget) {
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
    pub(crate) fn has_news(&self) -> bool {
        self.life != NicState::Paused && (!self.dirty.is_empty() || self.outbox.has_work())
    }

    /// Offers waiting events to the port and lets it notify the guest.
    pub(crate) fn deliver_events(&mut self) {
        let offered = self.outbox.deliver(&mut self.cqs, &mut self.counters);
        self.meter.charge_each(cost::EVENT, offered);
    }

    /// The next deadline, if it can come.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next().filter(|_| self.life == NicState::Ready)
    }

    /// Tells the guest whether posts need a kick.
    pub(crate) fn tell_need_kick(&self, need: bool) {
        if let (Some(page), NicState::Ready) = (&self.status_page, self.life) {
            ordering::need_kick(page, need);
        }
    }

    /// Looks at doorbell pages; true if anything was posted.
    #[inline]
    pub(crate) fn scan(&mut self, posts: &mut Vec<Post>) -> bool {
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
    pub(crate) fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool> {
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

    pub(crate) fn posted(&mut self, post: Post) {
        match post.owner {
            Owner::Send(qpn) => self.posted_send(qpn, post),
            Owner::Receive(qpn) => self.posted_receive(qpn, post),
            Owner::Shared(srqn) => {
                let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
                match srq.ring.posted(post.producer) {
                    Ok(()) => {
                        if self.backing.shared_posted(srq) {
                            P::run_shared(self, srqn);
                        }
                    }
                    Err(_) => self.srq_failed(srqn),
                }
            }
        }
    }

    fn posted_send(&mut self, qpn: u32, post: Post) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return P::posted_elsewhere(self, post.owner, post.producer);
        };
        if qp.state == State::Reset {
            let (ctx, [doorbell, _]) = (qp.ctx, qp.doorbells);
            return self.contexts.reset_doorbell(ctx, doorbell);
        }
        let Some(send) = &mut qp.send else { return };
        match send.queue_mut().posted(post.producer) {
            Ok(()) => self.schedule(qpn),
            Err(_) => self.qp_fatal(qpn),
        }
    }

    fn posted_receive(&mut self, qpn: u32, post: Post) {
        let Some(qp) = self.qps.get_mut(&qpn) else {
            return P::posted_elsewhere(self, post.owner, post.producer);
        };
        if qp.state == State::Reset {
            let (ctx, [_, doorbell]) = (qp.ctx, qp.doorbells);
            return self.contexts.reset_doorbell(ctx, doorbell);
        }
        let Some(receive) = &mut qp.receive else { return };
        match receive.ring_mut().posted(post.producer) {
            Ok(()) => {
                let more = self.backing.receive_posted(qp);
                if qp.state == State::Err {
                    self.schedule(qpn);
                } else if more {
                    P::run_receives(self, qpn);
                }
            }
            Err(_) => self.qp_fatal(qpn),
        }
    }
}
