//! The end of things, which takes a real RNIC its time: each QP that is stopped or destroyed is a
//! command to its firmware, or a system call at least.
//!
//! The worker has other guests to serve, so it does a few of these in a turn. QPs that go to ERR
//! wait in a queue for the hardware to be told; a guest's command to destroy a context is carried
//! out piece by piece; and a NIC that is reset gives its whole device context away, to be closed by
//! the thread that serves this NIC alone, before the guest gets its answer. The next INIT opens
//! another, on the same thread.

use std::collections::VecDeque;
use std::mem;

use virtio_rdma_abi::{attr_mask, event, qps};
use zerocopy::little_endian::U32;

use super::addresses::PeerCheck;
use super::follow::{HOST_CALL, Work};
use super::gone::Gone;
use super::modify::Drain;
use super::nic::Nic;
use super::quota;
use super::verbs::{HostError, HostVerbs};
use crate::memory::{AddressSpace, Ring};
use crate::nic::budget::{Budget, cost};
use crate::nic::chores::Chores;
use crate::nic::contexts::KERNEL;
use crate::nic::follow::Change;
use crate::nic::nic::NicState;
use crate::nic::nic::STEP;
use crate::nic::qp::State;
use crate::nic::quota::Kept;
use crate::nic::roster::{Roster, Slots, Walk};
use crate::nic::timer::Timers;
use crate::nic::{BlockingJob, DeferredDrop, Nanos, Reply, Status};

/// Host objects that are stopped in one turn.
const AT_ONCE: usize = 8;
/// What the end of a host object counts: a few to a step, since it is a command to firmware.
const END: Nanos = 8 * HOST_CALL;

/// QPs that are in ERR as far as the guest is concerned, and that the hardware has still to be told
/// about.
#[derive(Debug, Default)]
pub(super) struct Stopping {
    /// QPNs and serials.
    waiting: VecDeque<(u32, u32)>,
    /// QPs that have not been looked at since the NIC stands still.
    all: Walk,
    /// QPs that were stopped by a pause: their guest is told when it goes on.
    paused: Vec<(u32, u32)>,
    /// Of these the guest is being told.
    tell: Vec<(u32, u32)>,
    /// The guest of a NIC that failed is told when its hardware stands still.
    fatal: bool,
}

impl Stopping {
    /// Whether the hardware may still be at work for a QP that is in ERR.
    pub(super) fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.all.is_over()
    }

    /// Whether a guest that goes on has been told of all QPs that ended.
    pub(super) fn has_told_all(&self) -> bool {
        self.tell.is_empty()
    }
}

/// A device that was opened for an INIT.
pub(super) struct Opened {
    life: u64,
    status_page: Ring,
    host: Result<Box<dyn HostVerbs>, HostError>,
}

impl Nic {
    /// A QP moved to ERR: the hardware is told soon, and flushes first.
    pub(super) fn stop_soon(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if !mem::replace(&mut qp.own.stopping, true) {
            self.backing.stopping.waiting.push_back((qpn, qp.own.serial));
        }
    }

    /// Tells the hardware about some QPs in ERR; true if there were any.
    pub(super) fn stop_some(&mut self) -> bool {
        let found = !self.backing.stopping.is_over();
        self.find_running();
        for _ in 0..AT_ONCE {
            let Some((qpn, serial)) = self.backing.stopping.waiting.pop_front() else { break };
            let Some(qp) = self.qps.get_mut(&qpn).filter(|qp| qp.own.serial == serial) else {
                continue;
            };
            qp.own.stopping = false;
            // It is on its way to a new life.
            if qp.state != State::Err {
                continue;
            }
            let host = qp.own.host;
            let to_error = virtio_rdma_abi::QpAttr {
                mask: U32::new(attr_mask::STATE),
                qp_state: qps::ERR,
                ..virtio_rdma_abi::QpAttr::default()
            };
            // Also where it is there already: rdma_rxe flushes receives that were posted to a QP in
            // ERR only when it is told again (rxe_qp.c, rxe_qp_error), since a post of receives is
            // no system call.
            self.meter.charge(HOST_CALL);
            self.forgo(|nic| nic.backing.host.modify_qp(host, &to_error));
            self.schedule(qpn);
        }
        if self.backing.stopping.is_over() && mem::take(&mut self.backing.stopping.fatal) {
            self.tell_fatal();
        }
        found
    }

    /// Ends all that the hardware could do to guest memory: QPs in ERR neither send nor receive.
    fn stop_hardware(&mut self) {
        self.backing.stopping.all = self.qp_numbers.walk();
        self.stop_some();
    }

    /// Moves some of the QPs to ERR that still run though the NIC stands still.
    fn find_running(&mut self) {
        let mut budget = self.meter.budget(STEP);
        while !self.backing.stopping.all.is_over() && !budget.is_over(&self.meter) {
            let Some(qpn) = self.backing.stopping.all.next(&self.qp_numbers) else { break };
            self.meter.charge(cost::VISIT);
            let Some(qp) = self.qps.get(&qpn) else { continue };
            let (serial, state) = (qp.own.serial, qp.state);
            if !matches!(state, State::Reset | State::Err) {
                self.enter_error(qpn);
                self.backing.stopping.paused.push((qpn, serial));
            }
        }
    }

    /// Hardware cannot be told to wait: a QP that could still write to guest memory ends here, and
    /// its guest finds it in ERR. True: not all have ended yet.
    pub(super) fn stand_still(&mut self) -> bool {
        if self.life == NicState::Ready {
            self.life = NicState::Paused;
            self.stop_hardware();
        } else {
            self.stop_some();
        }
        !self.backing.stopping.is_over()
    }

    /// Goes on; QPs that ended meanwhile are told so.
    pub(super) fn go_on(&mut self) {
        if self.life != NicState::Paused {
            return;
        }
        self.life = NicState::Ready;
        self.outbox.wanted();
        self.backing.stopping.tell.append(&mut self.backing.stopping.paused);
        self.backing.ask_host = true;
    }

    /// Tells a guest that goes on of some of the QPs that ended meanwhile.
    pub(super) fn tell_some(&mut self, budget: &mut Budget) {
        while !budget.is_over(&self.meter)
            && let Some((qpn, serial)) = self.backing.stopping.tell.pop()
        {
            self.meter.charge(cost::OBJECT);
            let Some(qp) = self.qps.get(&qpn).filter(|qp| qp.own.serial == serial) else {
                continue;
            };
            let ctx = qp.ctx;
            self.raise(event::QP_FATAL, qpn, ctx);
            self.schedule(qpn);
        }
    }

    /// The whole NIC cannot go on.
    pub(super) fn fail_now(&mut self) {
        if matches!(self.life, NicState::Ready | NicState::Paused) {
            self.life = NicState::Failed;
            // The hardware must not touch the memory of a guest that is told so.
            self.backing.stopping.fatal = true;
            self.stop_hardware();
        }
    }

    fn tell_fatal(&mut self) {
        self.raise(event::DEVICE_FATAL, 0, KERNEL);
        self.outbox.deliver(&mut self.cqs, &mut self.counters);
    }

    /// The device context is of no use any more: the guest is told, and an INIT opens the device
    /// anew.
    pub(super) fn lost(&mut self) {
        if mem::replace(&mut self.backing.host_gone, true) {
            return;
        }
        tracing::warn!(device = self.backing.place.device, "the RNIC is gone or failed");
        // Its QPs end with it.
        self.backing.stopping.waiting.clear();
        self.backing.stopping.all = Walk::default();
        let alive = matches!(self.life, NicState::Ready | NicState::Paused);
        if alive {
            self.life = NicState::Failed;
        }
        if mem::take(&mut self.backing.stopping.fatal) || alive {
            self.tell_fatal();
        }
        // A removal may wait until the last one closes the device.
        let gone = Box::new(Gone::after(self.backing.host.as_ref()));
        let context = mem::replace(&mut self.backing.host, gone);
        super::events::end_aside((context, mem::take(&mut self.deferred_drops)));
    }

    /// Forgets every object and every guest address. From here on nothing is written to the guest's
    /// memory by this thread; the hardware stops when the remains are dropped.
    pub(super) fn forget_all(&mut self) {
        let used = self.life != NicState::Idle;
        self.life = NicState::Idle;
        self.backing.lives += 1;
        self.release_addresses();
        // Before the host can give the numbers again, but not here: they may be thousands.
        let qpns = mem::take(&mut self.qp_numbers);
        let leaving = Leaving { place: self.backing.place.clone(), qpns };
        self.backing.inbox.clear();
        self.outbox = self.outbox.succeed();
        self.backing.admitted = 0;
        self.backing.mr_bytes = 0;
        self.backing.mr_runs = 0;
        self.change = Change::default();
        self.chores = Chores::default();
        self.backing.peer_check = PeerCheck::default();
        self.work = None;
        self.run.clear();
        self.backing.run_srqs.clear();
        self.dirty.clear();
        self.timers = Timers::default();
        self.backing.stopping = Stopping::default();
        let queues =
            (mem::take(&mut self.cqs), mem::take(&mut self.srqs), mem::take(&mut self.qps));
        let rosters = (mem::take(&mut self.backing.mr_keys), mem::take(&mut self.backing.serials));
        let others =
            (mem::take(&mut self.pds), mem::take(&mut self.backing.mrs), mem::take(&mut self.ahs));
        let more = (
            mem::take(&mut self.backing.windows),
            mem::take(&mut self.backing.groups),
            mem::take(&mut self.backing.services),
        );
        let memory =
            (mem::take(&mut self.contexts), mem::take(&mut self.space), self.status_page.take());
        let none = Kept::begin(&self.space, &quota::RNIC);
        let kept = mem::replace(&mut self.kept, none);
        if !used {
            return;
        }
        // First of all the device context: nothing that it writes to may go before.
        let gone: Box<dyn HostVerbs> = Box::new(Gone::after(self.backing.host.as_ref()));
        let host = mem::replace(&mut self.backing.host, gone);
        self.backing.host_gone = true;
        self.deferred_drops.insert(
            0,
            DeferredDrop::new((leaving, host, queues, others, more, memory, (rosters, kept))),
        );
    }

    /// A driver begins: anew, and on a device that is open.
    pub(super) fn init(&mut self, space: AddressSpace, status_page: Ring) -> Result<Reply, Status> {
        self.forget_all();
        self.kept = Kept::begin(&space, &quota::RNIC);
        self.space = space;
        if !self.backing.host_gone {
            return Ok(self.begin_on_host(status_page));
        }
        self.backing.opening = true;
        let (life, opener) = (self.backing.lives, self.backing.place.opener.clone());
        Ok(Reply::Blocking(BlockingJob::new(move || Opened { life, status_page, host: opener() })))
    }

    /// The rest of an INIT.
    pub(super) fn opened(&mut self, opened: Opened) -> Result<Reply, Status> {
        let Opened { life, status_page, host } = opened;
        if life != self.backing.lives || !mem::take(&mut self.backing.opening) {
            self.deferred_drops.push(DeferredDrop::new(host));
            return Err(Status::STATE);
        }
        self.backing.host = host.map_err(|error| {
            tracing::warn!(device = self.backing.place.device, %error, "the RNIC cannot be opened again");
            Status::FATAL
        })?;
        self.backing.host_gone = false;
        // Unplugged meanwhile.
        if status_page.lives_in(&self.space) {
            Ok(self.begin_on_host(status_page))
        } else {
            Err(Status::FAULT)
        }
    }

    fn begin_on_host(&mut self, status_page: Ring) -> Reply {
        self.backing.ask_host = true;
        self.begin(status_page)
    }

    /// Destroys what a context has, users before what they use.
    pub(super) fn destroy_context(&mut self, ctx: u32) -> Result<Reply, Status> {
        if ctx == KERNEL {
            return Err(Status::INVAL);
        }
        if !self.contexts.contains(ctx) {
            return Err(Status::NOENT);
        }
        let end = End {
            ctx,
            windows: self.backing.windows.walk(),
            qps: self.qp_numbers.walk(),
            closing: None,
            drain: None,
            keys: self.backing.mr_keys.walk(),
            srqs: Slots::of(&self.srqs),
            ahs: Slots::of(&self.ahs),
            pds: Slots::of(&self.pds),
            cqs: Slots::of(&self.cqs),
        };
        self.work_on(Work::EndContext(end))
    }

    /// Destroys some of what a context has; true: that was all.
    pub(super) fn end_some(&mut self, end: &mut End, budget: &mut Budget) -> bool {
        let ctx = end.ctx;
        while let Some(number) = self.backing.windows.next(&mut end.windows) {
            self.meter.charge(cost::VISIT);
            if self.backing.windows.context(number) == Some(ctx) {
                self.meter.charge(END);
                self.remove_window(number);
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        while let Some(qpn) = end.closing.take().or_else(|| end.qps.next(&self.qp_numbers)) {
            self.meter.charge(cost::VISIT);
            if self.qps.get(&qpn).is_some_and(|qp| qp.ctx == ctx) {
                // Those that it bound since the walk over windows.
                if !self.end_windows_of(qpn, budget) {
                    end.closing = Some(qpn);
                    return false;
                }
                self.meter.charge(END);
                self.remove_qp(qpn);
                end.drain = Some(self.drain());
            }
            if budget.is_over(&self.meter) {
                return false;
            }
        }
        if let Some(drain) = &mut end.drain {
            if !self.drain_host(drain, budget) {
                return false;
            }
            end.drain = None;
        }
        while let Some(srqn) =
            end.srqs.sweep(&self.srqs, (&self.meter, budget), |srq| srq.ctx == ctx)
        {
            self.meter.charge(END);
            self.remove_srq(srqn);
        }
        while let Some(ah) = end.ahs.sweep(&self.ahs, (&self.meter, budget), |ah| ah.ctx == ctx) {
            self.meter.charge(END);
            self.remove_ah(ah);
        }
        while !budget.is_over(&self.meter)
            && let Some(key) = end.keys.next(&self.backing.mr_keys)
        {
            self.meter.charge(cost::VISIT);
            if self.backing.mrs.get(&key).is_some_and(|mr| mr.ctx == ctx) {
                // Its end is not the worker's.
                self.meter.charge(cost::OBJECT);
                self.remove_mr(key);
            }
        }
        while let Some(pdn) = end.pds.sweep(&self.pds, (&self.meter, budget), |pd| pd.ctx == ctx) {
            self.meter.charge(END);
            let pd = self.pds.remove(pdn as usize);
            self.forgo(|nic| nic.backing.host.free_pd(pd.own));
        }
        while let Some(cqn) = end.cqs.sweep(&self.cqs, (&self.meter, budget), |cq| cq.ctx == ctx) {
            self.meter.charge(cost::OBJECT);
            self.remove_cq(cqn);
        }
        if budget.is_over(&self.meter) {
            return false;
        }
        self.contexts.remove(ctx);
        true
    }
}

/// The end of a context, users before what they use.
#[derive(Debug)]
pub(crate) struct End {
    ctx: u32,
    windows: Walk,
    qps: Walk,
    /// A QP some of whose windows are left.
    closing: Option<u32>,
    /// What the host CQ has of QPs that are gone.
    drain: Option<Drain>,
    keys: Walk,
    srqs: Slots,
    ahs: Slots,
    pds: Slots,
    cqs: Slots,
}

/// QPNs of a NIC that was reset, on their way out of the directory.
#[derive(Debug)]
struct Leaving {
    place: super::nic::Place,
    qpns: Roster,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut all = self.qpns.walk();
        while let Some(qpn) = all.next(&self.qpns) {
            self.place.directory.remove_qp(&self.place.device, qpn);
        }
    }
}
