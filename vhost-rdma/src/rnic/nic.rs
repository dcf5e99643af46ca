//! One NIC on an RNIC: its objects, its life, and how a shard drives it.

use std::fmt;
use std::sync::Arc;

use virtio_rdma_abi::GSI_QPN;

use super::addresses::{Directory, HostAddress, PeerCheck};
use super::ending::Stopping;
use super::follow::{Keys, Work};
use super::gsi::Services;
use super::mcast::Groups;
use super::mr::Mr;
use super::mw::Windows;
use super::nic_quota::NicQuotas;
use super::quota;
use super::receiver::Receives;
use super::requester::Sends;
use super::srq::{Held, Srq};
use super::verbs::{HostAh, HostError, HostPd, HostQp, HostVerbs, HostWc, RecvBurst, SendBurst};
use crate::cm::{Inbox, Wake};
use crate::link::Gid;
use crate::memory::AddressSpace;
use crate::nic::budget::{Budget, Meter};
use crate::nic::doorbell::{Owner, Post};
use crate::nic::nic::NicState;
use crate::nic::on_shard::{OnShard, Provided};
use crate::nic::provider::Provider;
use crate::nic::qp::State;
use crate::nic::quota::Places;
use crate::nic::roster::Roster;
use crate::nic::shards::Shards;
use crate::nic::{
    self, Command, DeferredDrop, Nanos, NicSettings, NicSnapshot, Objects, Port, Reply, Status,
};
use crate::ordering::Visible;

/// QPs that run in one round.
const ROUND_QPS: usize = 16;

/// Time for one round, beside what a burst takes.
const RUN: Nanos = 50_000;

/// Opens the device again, after it was gone.
pub type Opener = Arc<dyn Fn() -> Result<Box<dyn HostVerbs>, HostError> + Send + Sync>;

/// Where a NIC is carried, and in whose company.
#[derive(Clone)]
pub struct Place {
    /// The name of the RNIC's RDMA device.
    pub device: String,
    /// The host's address that stands for all of the guest's (`mapped`), or none if the guest's are
    /// the host's own (`flat`).
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
/// An address handle's part of the host.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(super) host: HostAh,
    /// The peer may no longer be reached.
    pub(super) revoked: bool,
}

/// A queue pair's part of the host.
#[derive(Debug)]
pub(crate) struct HostSide {
    pub(super) host: HostQp,
    /// Names this life of the QP in `wr_id`s: completions of an earlier one are told by it.
    pub(super) serial: u32,
    /// The hardware has still to be told that it is in ERR.
    pub(super) stopping: bool,
    /// Entries of the host CQ that it may fill.
    pub(super) cost: u32,
}

/// A NIC on an RNIC.
pub(crate) type Nic = nic::nic::Nic<Rnic>;
pub(super) type Pd = nic::objects::Pd<HostPd>;
pub(super) type Ah = nic::objects::Ah<Handle>;
pub(super) type Qp = nic::objects::Qp<Rnic>;

/// What a NIC on an RNIC has beside the guest's part.
pub(crate) struct Rnic {
    pub(super) place: Place,
    pub(super) host: Box<dyn HostVerbs>,
    /// How often it was reset: a blocking job that comes back to another life is nobody's.
    pub(super) lives: u64,
    pub(super) stopping: Stopping,
    /// An INIT waits for the device.
    pub(super) opening: bool,
    /// By lkey.
    pub(super) mrs: Shards<Mr>,
    /// The same, in an order that can be walked.
    pub(super) mr_keys: Roster,
    pub(super) mr_bytes: u64,
    /// Mappings that their windows take.
    pub(super) mr_runs: usize,
    pub(super) windows: Windows,
    /// QPNs and SRQNs by serial.
    pub(super) serials: Shards<u32>,
    pub(super) next_serial: u32,
    pub(super) groups: Groups,
    /// QP 1 and what belongs to it.
    pub(super) services: Services,
    /// Datagrams for it.
    pub(super) inbox: Arc<Inbox>,
    /// Places for its own, where all NICs' wait.
    pub(super) quotas: NicQuotas,
    /// Entries of the host CQ that are spoken for.
    pub(super) admitted: u32,
    pub(super) run_srqs: Vec<u32>,
    pub(super) wcs: Vec<HostWc>,
    pub(super) sends: SendBurst,
    pub(super) receives: RecvBurst,
    /// The host may have something to say: its descriptors became readable, or nobody has looked
    /// yet.
    pub(super) ask_host: bool,
    /// When it was last asked.
    pub(super) asked_at: Nanos,
    /// It was told to wake the worker.
    armed: bool,
    /// Connections to be looked at, since who may be reached changed.
    pub(super) peer_check: PeerCheck,
    /// There is no device context, or none that can be used.
    pub(super) host_gone: bool,
}

impl fmt::Debug for Rnic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rnic").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Rnic {
    fn new(place: Place, host: Box<dyn HostVerbs>) -> Self {
        let inbox = Arc::new(Inbox::new(place.wake.clone()));
        Self {
            place,
            host,
            lives: 0,
            stopping: Stopping::default(),
            opening: false,
            mrs: Shards::default(),
            mr_keys: Roster::default(),
            mr_bytes: 0,
            mr_runs: 0,
            windows: Windows::default(),
            serials: Shards::default(),
            next_serial: 0,
            groups: Groups::default(),
            services: Services::default(),
            inbox,
            quotas: NicQuotas::default(),
            admitted: 0,
            run_srqs: Vec::new(),
            wcs: Vec::new(),
            sends: SendBurst::default(),
            receives: RecvBurst::default(),
            ask_host: true,
            asked_at: 0,
            armed: false,
            peer_check: PeerCheck::default(),
            host_gone: false,
        }
    }
}

impl Provider for Rnic {
    type Pd = HostPd;
    type Ah = Handle;
    type Srq = Held;
    type Qp = HostSide;
    type Send = Sends;
    type Receive = Receives;
    type Address = HostAddress;
    type Work = Work;
    type Keys = Keys;

    const PLACES: &'static Places = &quota::RNIC;
    // The hardware lets go of what is gone.
    const LETS_GO: bool = true;

    fn begin_pd(nic: &mut Nic) -> Result<HostPd, Status> {
        nic.backing.host.alloc_pd().map_err(|error| nic.refused(error))
    }

    fn end_pd(nic: &mut Nic, pd: HostPd) {
        nic.forgo(|nic| nic.backing.host.free_pd(pd));
    }

    fn uses_pd(nic: &Nic, pdn: u32) -> bool {
        nic.backing.services.uses_pd(pdn)
    }

    fn has_other_qp(&self) -> bool {
        self.services.exists()
    }

    fn count(&self, objects: &mut Objects) {
        let regions = self.mrs.len() + self.services.keys();
        objects.mrs = u32::try_from(regions).unwrap_or(u32::MAX);
        objects.mr_bytes = self.mr_bytes;
    }

    fn gid(address: &HostAddress) -> Gid {
        address.guest
    }

    /// At once: a guest that rang for a receive and then had its peer send, both on this worker,
    /// must not see the message overtake the receive on its way to the hardware. All doorbells are
    /// looked at before any send is posted.
    fn receive_posted(&mut self, _qp: &mut Qp) -> bool {
        true
    }

    fn run_receives(nic: &mut Nic, qpn: u32) {
        nic.post_receives(qpn);
    }

    fn shared_posted(&mut self, _srq: &mut Srq) -> bool {
        true
    }

    fn run_shared(nic: &mut Nic, srqn: u32) {
        nic.post_shared(srqn);
    }

    fn posted_elsewhere(nic: &mut Nic, owner: Owner, producer: u32) {
        if matches!(owner, Owner::Send(GSI_QPN) | Owner::Receive(GSI_QPN)) {
            nic.gsi_posted(owner, producer);
        }
    }

    fn stopped(nic: &mut Nic, qpn: u32) {
        nic.stop_soon(qpn);
    }

    fn cq_died(nic: &mut Nic, cqn: u32) {
        if nic.backing.services.uses_cq(cqn) {
            nic.gsi_fatal();
        }
    }

    // Its QPs have ended with the pause.
    fn resumed(_nic: &mut Nic, _qpn: u32) {}

    fn fail(nic: &mut Nic) {
        nic.fail_now();
    }

    fn dropped(nic: &mut Nic) {
        nic.forget_all();
    }

    fn walk_keys(nic: &Nic) -> Keys {
        nic.walk_keys()
    }

    fn follow_keys(
        nic: &mut Nic,
        keys: &mut Keys,
        space: &AddressSpace,
        budget: &mut Budget,
    ) -> bool {
        nic.follow_keys(keys, space, budget)
    }
}

impl Nic {
    /// A NIC on an opened device, which waits for INIT.
    #[must_use]
    pub(crate) fn new(
        place: Place,
        settings: NicSettings,
        host: Box<dyn HostVerbs>,
        port: Box<dyn Port>,
    ) -> Self {
        Self::idle(Rnic::new(place, host), settings, port, Meter::default())
    }

    fn run_queues(&mut self, budget: &mut Budget) -> bool {
        let mut busy = false;
        while let Some(srqn) = self.backing.run_srqs.pop() {
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

impl OnShard for Nic {
    fn set_port(&mut self, port: Box<dyn Port>) {
        self.outbox.set_port(port);
    }

    fn pause(&mut self) -> bool {
        self.stand_still()
    }

    fn resume(&mut self) {
        self.go_on();
    }

    fn memory_changed(&mut self, space: AddressSpace) {
        if self.life == NicState::Idle && self.backing.opening {
            self.space = space;
        } else {
            Self::memory_changed(self, space);
        }
    }

    fn follow_memory(&mut self) -> bool {
        Self::follow_memory(self)
    }

    fn memory_vanished(&mut self) {
        if matches!(self.life, NicState::Ready | NicState::Paused) && self.space.vanished() {
            self.fail_now();
        }
    }

    fn fail(&mut self) {
        self.fail_now();
    }

    fn events_wanted(&mut self) {
        self.outbox.wanted();
    }

    fn status(&self) -> NicSnapshot {
        self.snapshot()
    }

    fn take_deferred_drops(&mut self) -> Option<DeferredDrop> {
        let dropped = std::mem::take(&mut self.deferred_drops);
        (!dropped.is_empty()).then(|| DeferredDrop::new(dropped))
    }

    fn scan(&mut self, posts: &mut Vec<Post>) -> bool {
        Self::scan(self, posts)
    }

    fn begin_look(&mut self) {
        self.contexts.begin_look();
    }

    fn look_on(&mut self, posts: &mut Vec<Post>, budget: &mut Budget) -> Option<bool> {
        Self::look_on(self, posts, budget)
    }

    fn has_news(&self) -> bool {
        Self::has_news(self)
    }

    fn deadline(&self) -> Option<Nanos> {
        self.next_deadline()
    }

    fn publish(&mut self, visible: Visible, now: Nanos, budget: &mut Budget) {
        self.fire_completions(visible, now, budget);
        self.deliver_events();
    }

    fn set_need_kick(&self, need: bool) {
        self.tell_need_kick(need);
    }

    fn has_work(&mut self, _now: Nanos) -> bool {
        if Self::has_news(self) {
            return true;
        }
        if !self.backing.stopping.is_over() {
            return true;
        }
        if self.backing.host_gone {
            return false;
        }
        self.backing.armed = true;
        if self.backing.host.arm().is_err() {
            return false;
        }
        // A completion between the last poll and the arm raises no event.
        let waiting =
            self.life == NicState::Ready && self.backing.services.has_work(&self.backing.inbox);
        let rests = self.run.is_empty()
            && self.backing.run_srqs.is_empty()
            && self.chores.is_empty()
            && self.backing.stopping.has_told_all()
            && self.backing.peer_check.is_over();
        waiting || !rests || self.peek_host()
    }
}

impl Provided for Nic {
    fn update(&mut self, settings: NicSettings) {
        let vni = self.settings.vni;
        self.settings = NicSettings { vni, ..settings };
        self.withdraw_addresses();
        self.check_peers();
    }

    fn reset(&mut self) {
        self.backing.opening = false;
        self.forget_all();
    }

    fn set_meter(&mut self, meter: Meter) {
        self.meter = meter;
    }

    fn peers_changed(&mut self) {
        self.check_peers();
    }

    fn execute(&mut self, ctx: u32, command: Command, now: Nanos) -> Result<Reply, Status> {
        self.now = now;
        self.counters.commands += 1;
        self.command(ctx, command)
    }

    fn run(&mut self, now: Nanos) -> bool {
        self.now = now;
        if std::mem::take(&mut self.backing.armed) {
            self.backing.ask_host = true;
        }
        let mut budget = self.meter.budget_at(now, RUN);
        let mut busy = self.take_events(now) | self.end_waits(now) | self.stop_some();
        if self.life != NicState::Ready {
            return busy;
        }
        if !self.backing.stopping.has_told_all() {
            self.tell_some(&mut budget);
            busy = true;
        }
        if !self.backing.peer_check.is_over() {
            self.check_peers_on(&mut budget);
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
}
