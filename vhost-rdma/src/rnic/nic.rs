//! One NIC on an RNIC: its objects, its life, and how a shard drives it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use slab::Slab;
use virtio_rdma_abi::{Av, GSI_QPN, event};

use super::addresses::{Directory, HostAddress};
use super::ending::Stopping;
use super::follow::{Change, Chores, Work};
use super::gsi::Services;
use super::mad::{Inbox, Wake};
use super::mcast::Groups;
use super::mr::Mr;
use super::mw::Windows;
use super::nic_quota::NicQuotas;
use super::quota;
use super::receiver::Receives;
use super::requester::Sends;
use super::srq::Srq;
use super::verbs::{HostAh, HostError, HostPd, HostQp, HostVerbs, HostWc, RecvBurst, SendBurst};
use crate::engine::{Provider, Visible};
use crate::memory::{AddressSpace, Charge, Ring};
use crate::nic::budget::{Budget, Meter, cost};
use crate::nic::contexts::Contexts;
use crate::nic::cq::Cq;
use crate::nic::doorbell::{Owner, Post};
use crate::nic::limits::{Counters, GID_TABLE_LEN, Objects};
use crate::nic::outbox::Outbox;
use crate::nic::qp::{Attrs, Kind, State};
use crate::nic::quota::Kept;
use crate::nic::roster::Roster;
use crate::nic::shards::Shards;
use crate::nic::table::Table;
use crate::nic::timer::Timers;
use crate::nic::{Command, DeferredDrop, Nanos, NicSettings, NicSnapshot, Port, Reply, Status};
use crate::ordering;
use crate::transport::Gid;

/// QPs that run in one round.
const ROUND_QPS: usize = 16;

/// Time for one round, beside what a burst takes.
const RUN: Nanos = 50_000;
/// Time for one piece of the last look before sleep.
const LOOK: Nanos = 50_000;

/// Opens the device again, after it was gone.
pub type Opener = Arc<dyn Fn() -> Result<Box<dyn HostVerbs>, HostError> + Send + Sync>;

/// Where a NIC is carried, and in whose company.
#[derive(Clone)]
pub struct Place {
    /// The name of the RNIC's RDMA device.
    pub device: String,
    /// The host's address that stands for all of the guest's (`mapped`), or none if the guest's are the host's own (`flat`).
    pub through: Option<Gid>,
    /// Who else is on this host's RNICs, and who may be reached.
    pub directory: Arc<Directory>,
    /// How the device is opened.
    pub opener: Opener,
    /// Lets the NIC's worker look at it.
    pub wake: Wake,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Where a NIC is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NicState {
    /// Before INIT.
    Idle,
    /// After INIT.
    Ready,
    /// Its control queue is stopped: guest memory is not touched, by the hardware neither.
    Paused,
    /// It failed; only a reset helps.
    Failed,
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Pd {
    pub(super) ctx: u32,
    /// Objects in it, but for those of QP 1.
    pub(super) users: u32,
    pub(super) host: HostPd,
}

/// An address handle.
#[derive(Debug)]
pub(super) struct Ah {
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) host: HostAh,
    /// The address as the guest named it: looked up again when peers change, and QP 1 goes by it.
    pub(super) av: Av,
    /// The peer may no longer be reached.
    pub(super) revoked: bool,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    pub(super) qpn: u32,
    pub(super) ctx: u32,
    pub(super) pdn: u32,
    pub(super) kind: Kind,
    pub(super) state: State,
    pub(super) attrs: Attrs,
    pub(super) signal_all: bool,
    pub(super) send_cqn: u32,
    pub(super) recv_cqn: u32,
    pub(super) srqn: Option<u32>,
    pub(super) host: HostQp,
    /// Names this life of the QP in `wr_id`s: completions of an earlier one are told by it.
    pub(super) serial: u32,
    pub(super) send: Option<Sends>,
    pub(super) receive: Option<Receives>,
    /// Doorbell numbers of the two queues.
    pub(super) doorbells: [u32; 2],
    /// In the NIC's run queue.
    pub(super) scheduled: bool,
    /// The hardware has still to be told that it is in ERR.
    pub(super) stopping: bool,
    /// Entries of the host CQ that it may fill.
    pub(super) cost: u32,
    pub(super) _kept: Charge,
}

/// One NIC. See the module.
pub struct Nic {
    pub(super) place: Place,
    pub(super) settings: NicSettings,
    pub(super) host: Box<dyn HostVerbs>,
    pub(super) life: NicState,
    /// How often it was reset: a blocking job that comes back to another life is nobody's.
    pub(super) lives: u64,
    /// What ends as soon as somebody has the time.
    pub(super) deferred_drops: Vec<DeferredDrop>,
    pub(super) stopping: Stopping,
    /// An INIT waits for the device.
    pub(super) opening: bool,
    pub(super) space: AddressSpace,
    /// What its objects take.
    pub(super) kept: Kept,
    pub(super) status_page: Option<Ring>,
    pub(super) contexts: Contexts,
    pub(super) outbox: Outbox,
    pub(super) counters: Counters,
    /// Where they stood when the driver that lives now began.
    pub(super) counters_at_init: Counters,
    /// The device's clock, as this round or command was told it: what completions are stamped with.
    pub(super) now: Nanos,
    pub(super) pds: Slab<Pd>,
    /// By lkey.
    pub(super) mrs: Shards<Mr>,
    /// The same, in an order that can be walked.
    pub(super) mr_keys: Roster,
    pub(super) mr_bytes: u64,
    /// Mappings that their windows take.
    pub(super) mr_runs: usize,
    pub(super) windows: Windows,
    pub(super) cqs: Table<Cq>,
    pub(super) srqs: Table<Srq>,
    pub(super) qps: FxHashMap<u32, Box<Qp>>,
    pub(super) qp_numbers: Roster,
    /// QPNs and SRQNs by serial.
    pub(super) serials: Shards<u32>,
    pub(super) next_serial: u32,
    pub(super) ahs: Slab<Ah>,
    pub(super) groups: Groups,
    pub(super) gids: Vec<Option<HostAddress>>,
    /// QP 1 and what belongs to it.
    pub(super) services: Services,
    /// Datagrams for it.
    pub(super) inbox: Arc<Inbox>,
    /// Places for its own, where all NICs' wait.
    pub(super) quotas: NicQuotas,
    /// Entries of the host CQ that are spoken for.
    pub(super) admitted: u32,
    pub(super) run: VecDeque<u32>,
    pub(super) run_srqs: Vec<u32>,
    pub(super) dirty: Vec<u32>,
    /// CQs whose event waits under moderation.
    pub(super) moderated: Timers,
    posts: Vec<Post>,
    pub(super) wcs: Vec<HostWc>,
    pub(super) sends: SendBurst,
    pub(super) receives: RecvBurst,
    /// The host may have something to say: its descriptors became readable, or nobody has looked yet.
    pub(super) ask_host: bool,
    /// When it was last asked.
    pub(super) asked_at: Nanos,
    /// It was told to wake the worker.
    armed: bool,
    /// There is no device context, or none that can be used.
    pub(super) host_gone: bool,
    /// What is left of a change of the memory map.
    pub(super) change: Change,
    pub(super) chores: Chores,
    /// The command that has begun, if it goes in steps.
    pub(super) work: Option<Work>,
    /// The shard's.
    pub(super) meter: Meter,
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("rnic::Nic")
            .field("place", &self.place)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

impl Nic {
    /// A NIC on an opened device, which waits for INIT.
    #[must_use]
    pub fn new(
        place: Place,
        settings: NicSettings,
        host: Box<dyn HostVerbs>,
        port: Box<dyn Port>,
    ) -> Self {
        let inbox = Arc::new(Inbox::new(place.wake.clone()));
        Self {
            place,
            settings,
            host,
            life: NicState::Idle,
            lives: 0,
            deferred_drops: Vec::new(),
            stopping: Stopping::default(),
            opening: false,
            space: AddressSpace::default(),
            kept: Kept::begin(&AddressSpace::default(), &quota::RNIC),
            status_page: None,
            contexts: Contexts::default(),
            outbox: Outbox::new(port),
            counters: Counters::default(),
            counters_at_init: Counters::default(),
            now: 0,
            pds: Slab::new(),
            mrs: Shards::default(),
            mr_keys: Roster::default(),
            mr_bytes: 0,
            mr_runs: 0,
            windows: Windows::default(),
            cqs: Table::default(),
            srqs: Table::default(),
            qps: FxHashMap::default(),
            qp_numbers: Roster::default(),
            serials: Shards::default(),
            next_serial: 0,
            ahs: Slab::new(),
            groups: Groups::default(),
            gids: vec![None; usize::from(GID_TABLE_LEN)],
            services: Services::default(),
            inbox,
            quotas: NicQuotas::default(),
            admitted: 0,
            run: VecDeque::new(),
            run_srqs: Vec::new(),
            dirty: Vec::new(),
            moderated: Timers::default(),
            posts: Vec::new(),
            wcs: Vec::new(),
            sends: SendBurst::default(),
            receives: RecvBurst::default(),
            ask_host: true,
            asked_at: 0,
            armed: false,
            host_gone: false,
            change: Change::default(),
            chores: Chores::default(),
            work: None,
            meter: Meter::default(),
        }
    }

    /// Puts a QP on the run queue, once.
    pub(super) fn schedule(&mut self, qpn: u32) {
        if let Some(qp) = self.qps.get_mut(&qpn)
            && !std::mem::replace(&mut qp.scheduled, true)
        {
            self.run.push_back(qpn);
        }
    }

    /// Raises an asynchronous event; at most one of a type waits per object.
    pub(super) fn raise(&mut self, kind: u32, object: u32, ctx: u32) {
        self.outbox.raise((kind, object, ctx), &mut self.counters);
    }

    /// A QP cannot go on for a reason of its own.
    pub(super) fn qp_fatal(&mut self, qpn: u32) {
        if qpn == GSI_QPN {
            return self.gsi_fatal();
        }
        let Some(qp) = self.qps.get(&qpn) else { return };
        let ctx = qp.ctx;
        self.raise(event::QP_FATAL, qpn, ctx);
        self.enter_error(qpn);
    }

    fn take_posts(&mut self, posts: &[Post]) -> bool {
        self.meter.charge_each(cost::POST, posts.len());
        for post in posts {
            self.posted(*post);
        }
        !posts.is_empty()
    }

    pub(super) fn posted(&mut self, post: Post) {
        match post.owner {
            Owner::Send(GSI_QPN) | Owner::Receive(GSI_QPN) => {
                self.gsi_posted(post.owner, post.producer);
            }
            Owner::Send(qpn) => {
                let Some(qp) = self.qps.get_mut(&qpn) else { return };
                if qp.state == State::Reset {
                    return self.contexts.reset_doorbell(qp.ctx, qp.doorbells[0]);
                }
                let Some(send) = &mut qp.send else { return };
                match send.queue.posted(post.producer) {
                    Ok(()) => self.schedule(qpn),
                    Err(_) => self.qp_fatal(qpn),
                }
            }
            Owner::Receive(qpn) => {
                let Some(qp) = self.qps.get_mut(&qpn) else { return };
                if qp.state == State::Reset {
                    return self.contexts.reset_doorbell(qp.ctx, qp.doorbells[1]);
                }
                let Some(receive) = &mut qp.receive else { return };
                // At once: a guest that rang for a receive and then had its peer send, both on this worker, must not see the message
                // overtake the receive on its way to the hardware. All doorbells are looked at before any send is posted.
                match receive.ring.posted(post.producer) {
                    Ok(()) if qp.state == State::Err => self.schedule(qpn),
                    Ok(()) => self.post_receives(qpn),
                    Err(_) => self.qp_fatal(qpn),
                }
            }
            Owner::Shared(srqn) => {
                let Some(srq) = self.srqs.get_mut(srqn as usize) else { return };
                match srq.ring.posted(post.producer) {
                    Ok(()) => self.post_shared(srqn),
                    Err(_) => self.srq_failed(srqn),
                }
            }
        }
    }

    fn run_queues(&mut self, budget: &mut Budget) -> bool {
        let mut busy = false;
        while let Some(srqn) = self.run_srqs.pop() {
            self.post_shared(srqn);
            busy = true;
            if budget.is_over(&self.meter) {
                return true;
            }
        }
        // What is on the queue now; QPs that go back to its end wait for the next round.
        for _ in 0..self.run.len().min(ROUND_QPS) {
            let Some(qpn) = self.run.pop_front() else { break };
            self.run_qp(qpn);
            busy = true;
            if budget.is_over(&self.meter) {
                break;
            }
        }
        busy
    }

    fn run_qp(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.scheduled = false;
        match qp.state {
            State::Reset => {}
            State::Err => self.flush(qpn),
            State::Sqe => {
                self.post_receives(qpn);
                self.flush(qpn);
            }
            State::Rts => {
                self.post_receives(qpn);
                self.post_sends(qpn);
            }
            State::Init | State::Rtr | State::Sqd => self.post_receives(qpn),
        }
    }
}

impl Provider for Nic {
    fn set_port(&mut self, port: Box<dyn Port>) {
        self.outbox.set_port(port);
    }

    fn update(&mut self, settings: NicSettings) {
        let vni = self.settings.vni;
        self.settings = NicSettings { vni, ..settings };
        self.withdraw_addresses();
        self.check_peers();
    }

    fn reset(&mut self) {
        self.opening = false;
        self.forget_all();
    }

    fn pause(&mut self) -> bool {
        self.stand_still()
    }

    fn resume(&mut self) {
        self.go_on();
    }

    fn memory_changed(&mut self, space: AddressSpace) {
        match self.life {
            NicState::Ready | NicState::Paused => self.begin_to_follow(space),
            NicState::Idle if self.opening => self.space = space,
            NicState::Idle | NicState::Failed => {}
        }
    }

    fn follow_memory(&mut self) -> bool {
        // Also when the NIC failed by it: the hardware lets go of what is gone.
        self.life != NicState::Idle && self.follow_some()
    }

    fn set_meter(&mut self, meter: Meter) {
        self.meter = meter;
    }

    fn memory_vanished(&mut self) {
        if matches!(self.life, NicState::Ready | NicState::Paused) && self.space.vanished() {
            self.fail_now();
        }
    }

    fn fail(&mut self) {
        self.fail_now();
    }

    fn peers_changed(&mut self) {
        self.check_peers();
    }

    fn events_wanted(&mut self) {
        self.outbox.wanted();
    }

    fn status(&self) -> NicSnapshot {
        NicSnapshot {
            ready: self.life == NicState::Ready,
            failed: self.life == NicState::Failed,
            counters: self.counters,
            objects: if self.life == NicState::Paused {
                Objects::default()
            } else {
                self.objects()
            },
            gids: self.gids.iter().flatten().map(|entry| entry.guest).collect(),
        }
    }

    fn take_deferred_drops(&mut self) -> Option<DeferredDrop> {
        let dropped = std::mem::take(&mut self.deferred_drops);
        (!dropped.is_empty()).then(|| DeferredDrop::new(dropped))
    }

    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Reply, Status> {
        self.now = now;
        self.counters.commands += 1;
        self.command(ctx, command)
    }

    fn scan(&mut self) -> bool {
        if self.life != NicState::Ready {
            return false;
        }
        let mut posts = std::mem::take(&mut self.posts);
        posts.clear();
        let looked = self.contexts.collect(&mut posts);
        self.meter.charge_each(cost::DOORBELL_PAGE, looked);
        let found = self.take_posts(&posts);
        self.posts = posts;
        found
    }

    fn begin_look(&mut self) {
        self.contexts.begin_look();
    }

    fn look_on(&mut self) -> Option<bool> {
        if self.life != NicState::Ready {
            return Some(false);
        }
        let mut budget = self.meter.budget(LOOK);
        let mut posts = std::mem::take(&mut self.posts);
        let found = loop {
            posts.clear();
            let rung = self.contexts.look_on(&mut posts);
            self.meter.charge(cost::DOORBELL_PAGE);
            self.take_posts(&posts);
            match rung {
                None => break Some(false),
                Some(true) => break Some(true),
                Some(false) if budget.is_over(&self.meter) => break None,
                Some(false) => {}
            }
        };
        self.posts = posts;
        found
    }

    fn run(&mut self, now: Nanos) -> bool {
        self.now = now;
        if std::mem::take(&mut self.armed) {
            self.ask_host = true;
        }
        let mut budget = self.meter.budget_at(now, RUN);
        let mut busy = self.take_events(now) | self.end_waits(now) | self.stop_some();
        if self.life != NicState::Ready {
            return busy;
        }
        if !self.stopping.has_told_all() {
            self.tell_some(&mut budget);
            busy = true;
        }
        if !self.chores.is_empty() {
            self.do_chores(&mut budget);
            busy = true;
        }
        busy |= self.poll_host() > 0;
        busy |= self.run_queues(&mut budget);
        busy |= self.run_gsi();
        busy
    }

    fn has_news(&self) -> bool {
        self.life != NicState::Paused && (!self.dirty.is_empty() || self.outbox.has_work())
    }

    fn deadline(&self) -> Option<Nanos> {
        self.moderated.next()
    }

    fn publish(&mut self, visible: Visible, now: Nanos) {
        if self.life == NicState::Paused {
            return;
        }
        self.fire_completions(visible, now);
        let offered = self.outbox.deliver(&mut self.cqs, &mut self.counters);
        self.meter.charge_each(cost::EVENT, offered);
    }

    fn set_need_kick(&self, need: bool) {
        if let (Some(page), NicState::Ready) = (&self.status_page, self.life) {
            ordering::need_kick(page, need);
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        if !self.stopping.is_over() {
            return true;
        }
        if self.host_gone {
            return false;
        }
        self.armed = true;
        if self.host.arm().is_err() {
            return false;
        }
        // A completion between the last poll and the arm raises no event.
        let waiting = self.life == NicState::Ready && self.services.has_work(&self.inbox);
        waiting
            || !(self.run.is_empty() && self.run_srqs.is_empty())
            || !(self.chores.is_empty() && self.stopping.has_told_all())
            || self.peek_host()
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.forget_all();
    }
}
