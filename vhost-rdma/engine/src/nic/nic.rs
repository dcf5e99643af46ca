//! One NIC: what it has, what its backing must do for it ([`Provider`]), and what several of its
//! parts share: completing, raising events, moving a QP to ERR.
//!
//! The two are defined by each other, so they stand in one file. What a backing keeps is below
//! them (`parts`), what a NIC does with its objects is above.

use std::collections::VecDeque;
use std::fmt;

use virtio_rdma_abi::{self as abi, event, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::budget::{Budget, Meter, cost};
use super::change::Change;
use super::chores::Chores;
use super::chunks::Chunks;
use super::contexts::Contexts;
pub(crate) use super::contexts::KERNEL;
use super::cq::{Cq, Fire, Overrun};
use super::doorbell::Owner;
use super::limits::{GID_TABLE_LEN, counters};
use super::objects::{Ah, Pd, Qp, Srq};
use super::outbox::Outbox;
use super::owned_numbers::OwnedNumbers;
use super::parts::Parts;
use super::qp::State;
use super::quota::{Kept, Places};
use super::recent::Recent;
use super::roster::Roster;
use super::shape::Bounds;
use super::table::Table;
use super::timer::{Timers, Waiting};
use super::work::Work;
use super::{
    Counters, DeferredDrop, HeldBack, Nanos, NicSettings, NicSnapshot, Objects, Port, Reply, Status,
};
use crate::link::Gid;
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
    /// The command that waits for what was posted before it.
    pub(crate) held_back: Option<HeldBack>,
    /// What ends as soon as somebody has the time: not the shard.
    pub deferred_drops: Vec<DeferredDrop>,
    /// The shard's.
    pub meter: Meter,
    /// The device's clock, as this round or command was told it: what completions are stamped with.
    pub now: Nanos,
    /// What the backing keeps.
    pub backing: P,
}

/// What a backing must be able to do: the seam below everything that a guest sees. A NIC does
/// whatever is the same on every backing, and asks its provider for the rest. Nothing is called
/// through a table: each backing has a NIC of its own, made by the compiler.
pub trait Provider: Parts {
    /// What places in tables take.
    const PLACES: &'static Places;
    /// Whether a NIC that failed still lets go of memory that is gone.
    const LETS_GO: bool;
    /// What the end of an object counts beside what it counts on every backing.
    const END: Nanos;

    /// What QUERY_DEVICE answers.
    fn device(nic: &mut Nic<Self>) -> abi::QueryDeviceResp;
    /// What QUERY_PORT answers.
    fn port(nic: &mut Nic<Self>) -> abi::QueryPortResp;
    /// What the numbers of new queues may be.
    fn bounds(&self) -> Bounds;

    /// Begins a protection domain.
    fn begin_pd(nic: &mut Nic<Self>) -> Result<Self::Pd, Status>;
    /// Ends one.
    fn end_pd(nic: &mut Nic<Self>, pd: Self::Pd);
    /// Begins a shared receive queue of that number, for which there is room.
    fn begin_srq(
        nic: &mut Nic<Self>,
        srqn: u32,
        req: &abi::SrqCreateReq,
    ) -> Result<Self::Srq, Status>;
    /// Ends one, which is out of the table.
    fn end_srq(nic: &mut Nic<Self>, srq: &Self::Srq);
    /// Bytes that one of so many work requests takes beside its place.
    fn srq_bytes(max_wr: u32) -> usize;
    /// Receives of one that were posted and that nothing has used up.
    fn srq_posted(srq: &Srq<Self>) -> u32;
    /// Receives of one that were used up, free-running.
    fn srq_used(srq: &Srq<Self>) -> u32;
    /// Sets the limit of one, `again` also if it is the present.
    fn set_limit(nic: &mut Nic<Self>, srqn: u32, limit: u32, again: bool) -> Result<(), Status>;
    /// One went over to another ring.
    fn srq_moved(nic: &mut Nic<Self>, srqn: u32);
    /// Bytes that a QP of this request takes beside its place.
    fn qp_bytes(req: &abi::QpCreateReq) -> usize;
    /// Takes a QP that goes away out of what it is in.
    fn leave_groups(nic: &mut Nic<Self>, qpn: u32);
    /// Ends one, which is out of the table.
    fn end_qp(nic: &mut Nic<Self>, qp: &Qp<Self>);
    /// Ends an address handle.
    fn end_ah(nic: &mut Nic<Self>, ah: Self::Ah);
    /// Takes in what has happened and nobody has looked at yet.
    fn catch_up(nic: &mut Nic<Self>);

    /// A command of its own ends without an answer.
    fn abandoned(nic: &mut Nic<Self>, work: Self::Work);
    /// A context begins to end.
    fn begin_end(nic: &Nic<Self>) -> Self::Ending;
    /// Ends what goes before QPs; true: that was all.
    fn end_before_qps(
        nic: &mut Nic<Self>,
        ctx: u32,
        end: &mut Self::Ending,
        budget: &mut Budget,
    ) -> bool;
    /// Ends what goes before this QP of the context; true: that was all.
    fn end_before_qp(
        nic: &mut Nic<Self>,
        qpn: u32,
        end: &mut Self::Ending,
        budget: &mut Budget,
    ) -> bool;
    /// Its QPs are gone; true: nothing is left of them.
    fn end_after_qps(nic: &mut Nic<Self>, end: &mut Self::Ending, budget: &mut Budget) -> bool;
    /// The numbers of its keys.
    fn keys(&self) -> &OwnedNumbers;
    /// Ends what a key names, if that is the context's.
    fn end_key(nic: &mut Nic<Self>, number: u32, ctx: u32);
    /// A context is gone.
    fn context_gone(&mut self, ctx: u32);

    /// Whether something of the provider's own is in a protection domain.
    fn uses_pd(nic: &Nic<Self>, pdn: u32) -> bool;
    /// Whether a NIC has the one queue pair that is not in its table.
    fn has_other_qp(&self) -> bool;
    /// Adds what only the provider counts.
    fn count(&self, objects: &mut Objects);
    /// The guest's name of an address.
    fn gid(address: &Self::Address) -> Gid;

    /// The guest rang for receives of a QP; true: [`Self::run_receives`] has to see to them.
    fn receive_posted(&mut self, qp: &mut Qp<Self>) -> bool;
    /// Goes on with the receives of a QP.
    fn run_receives(nic: &mut Nic<Self>, qpn: u32);
    /// The guest rang for an SRQ; true: [`Self::run_shared`] has to see to it.
    fn shared_posted(&mut self, srq: &mut Srq<Self>) -> bool;
    /// Goes on with an SRQ.
    fn run_shared(nic: &mut Nic<Self>, srqn: u32);
    /// The guest rang for a queue pair that is not in the table.
    fn posted_elsewhere(nic: &mut Nic<Self>, owner: Owner, producer: u32);

    /// A QP moved to ERR.
    fn stopped(nic: &mut Nic<Self>, qpn: u32);
    /// A CQ died; QPs of the table are told by the NIC.
    fn cq_died(nic: &mut Nic<Self>, cqn: u32);
    /// The NIC is to stand still, and `begins` to; true: it does not yet.
    fn stand_still(nic: &mut Nic<Self>, begins: bool) -> bool;
    /// The NIC goes on after a pause.
    fn go_on(nic: &mut Nic<Self>);
    /// The same: one of its QPs.
    fn resumed(nic: &mut Nic<Self>, qpn: u32);
    /// Whether a driver is about to begin, whose memory it follows already.
    fn is_beginning(&self) -> bool;
    /// The backing of a NIC that is empty, in this one's place.
    fn succeed(&mut self, life: NicState) -> Self;
    /// Whether there is something to do, as far as is known without a look at the guest's memory.
    fn has_work(nic: &mut Nic<Self>, now: Nanos) -> bool;
    /// Whether there is something to tell the guest that only the provider knows.
    fn has_news(&self) -> bool;
    /// Tells it.
    fn tell(nic: &mut Nic<Self>);
    /// The NIC cannot go on.
    fn fail(nic: &mut Nic<Self>);
    /// The NIC goes away.
    fn dropped(nic: &mut Nic<Self>);

    /// Begins to look at keys after a change of memory.
    fn walk_keys(nic: &Nic<Self>) -> Self::Keys;
    /// Looks at some of them; true: that was all.
    fn follow_keys(
        nic: &mut Nic<Self>,
        keys: &mut Self::Keys,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool;

    /// Whether objects follow a change of memory in this state.
    fn follows(state: NicState) -> bool {
        match state {
            NicState::Ready | NicState::Paused => true,
            NicState::Failed => Self::LETS_GO,
            NicState::Idle => false,
        }
    }
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
            held_back: None,
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

    /// Flushes what is posted on a QP in ERR or SQE, at most so many in one turn: sends, and
    /// receives of one in ERR, by the backing's functions, which say whether more are left.
    pub fn flush_posted(
        &mut self,
        qpn: u32,
        most: u32,
        sends: impl FnOnce(&mut Self, &mut u32) -> bool,
        receives: impl FnOnce(&mut Self, &mut u32) -> bool,
    ) {
        let mut budget = most;
        let mut more = sends(self, &mut budget);
        if self.qps.get(&qpn).is_some_and(|qp| qp.state == State::Err) {
            more |= receives(self, &mut budget);
        }
        if more {
            self.schedule(qpn);
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

    /// Does some of the chores.
    pub fn do_chores(&mut self, budget: &mut Budget) {
        while let Some(qpn) = self.chores.next_to_resume(&self.qp_numbers) {
            self.meter.charge(cost::WAKE);
            P::resumed(self, qpn);
            if budget.is_over(&self.meter) {
                return;
            }
        }
        self.chores.begin_telling(&self.qp_numbers);
        while let Some(qpn) = self.chores.next_to_tell(&self.qp_numbers) {
            self.meter.charge(cost::VISIT);
            let told = self.qps.get(&qpn).is_some_and(|qp| {
                self.chores.tells_of(qp.send_cqn) || self.chores.tells_of(qp.recv_cqn)
            });
            if told {
                self.qp_fatal(qpn);
            }
            if budget.is_over(&self.meter) {
                return;
            }
        }
    }
}
