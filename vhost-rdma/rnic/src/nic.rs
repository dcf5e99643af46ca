//! One NIC on an RNIC: its objects, its life, and how a shard drives it.

use std::fmt;
use std::sync::Arc;

use easy_ext::ext;
use vhost_rdma_engine::cm::{Inbox, Wake};
use vhost_rdma_engine::link::Gid;
use vhost_rdma_engine::nic::NicState;
use vhost_rdma_engine::nic::budget::{Budget, Meter, cost};
use vhost_rdma_engine::nic::doorbell::Owner;
use vhost_rdma_engine::nic::provider::Provider;
use vhost_rdma_engine::nic::qp::State;
use vhost_rdma_engine::nic::quota::Places;
use vhost_rdma_engine::nic::roster::Roster;
use vhost_rdma_engine::nic::shape::{self, Bounds};
use vhost_rdma_engine::nic::shards::Shards;
use vhost_rdma_engine::nic::{self, Nanos, NicSettings, Objects, Port, Status};
use vhost_rdma_memory::AddressSpace;
use virtio_rdma_abi::{self as abi, GSI_QPN};

use super::addresses::Addresses as _;
use super::addresses::{Directory, HostAddress, PeerCheck};
use super::control::Control as _;
use super::control::Findings;
use super::cq::CqVerbs as _;
use super::create::Create as _;
use super::ending::Endings as _;
use super::ending::{END, Ending, Stopping};
use super::events::Events as _;
use super::follow::Follow as _;
use super::follow::{Keys, Work};
use super::gone::Gone;
use super::gsi::GsiVerbs as _;
use super::gsi::Services;
use super::limits::Limits as _;
use super::mcast::Groups;
use super::mcast::Mcast as _;
use super::modify::Modify as _;
use super::mr::Mr;
use super::mr::RegionVerbs as _;
use super::mw::WindowVerbs as _;
use super::mw::Windows;
use super::nic_quota::NicQuotas;
use super::quota;
use super::receiver::Receiver as _;
use super::receiver::Receives;
use super::requester::Requester as _;
use super::requester::Sends;
use super::srq::SharedReceives as _;
use super::srq::SrqVerbs as _;
use super::srq::{Held, Srq};
use super::verbs::{HostAh, HostError, HostPd, HostQp, HostVerbs, HostWc, RecvBurst, SendBurst};

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
pub struct Handle {
    pub(super) host: HostAh,
    /// The peer may no longer be reached.
    pub(super) revoked: bool,
}

/// A queue pair's part of the host.
#[derive(Debug)]
pub struct HostSide {
    pub(super) host: HostQp,
    /// Names this life of the QP in `wr_id`s: completions of an earlier one are told by it.
    pub(super) serial: u32,
    /// The hardware has still to be told that it is in ERR.
    pub(super) stopping: bool,
    /// Entries of the host CQ that it may fill.
    pub(super) cost: u32,
}

/// A NIC on an RNIC.
pub type Nic = nic::Nic<Rnic>;
pub(super) type Pd = nic::objects::Pd<HostPd>;
pub(super) type Ah = nic::objects::Ah<Handle>;
pub(super) type Qp = nic::objects::Qp<Rnic>;

/// What a NIC on an RNIC has beside the guest's part.
pub struct Rnic {
    pub(super) place: Place,
    pub(super) host: Box<dyn HostVerbs>,
    /// What blocking jobs of this life found.
    pub(super) findings: Findings,
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
    /// A NIC on an opened device, which waits for INIT.
    #[must_use]
    pub fn nic(
        place: Place,
        settings: NicSettings,
        host: Box<dyn HostVerbs>,
        port: Box<dyn Port>,
    ) -> Nic {
        let inbox = Arc::new(Inbox::new(place.wake.clone()));
        Nic::idle(Self::new(place, host, inbox), settings, port, Meter::default())
    }

    fn new(place: Place, host: Box<dyn HostVerbs>, inbox: Arc<Inbox>) -> Self {
        Self {
            place,
            host,
            findings: Findings::default(),
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

impl Rnic {
    /// The backing of an empty NIC in the place of this one, which keeps what has to end. A device
    /// that nobody used stays open. What blocking jobs still find is nobody's: it ends with this
    /// one, or where it is found.
    fn successor(&mut self, life: NicState) -> Self {
        let gone: Box<dyn HostVerbs> = Box::new(Gone::after(self.host.as_ref()));
        let unused = life == NicState::Idle;
        let host = if unused { std::mem::replace(&mut self.host, gone) } else { gone };
        let mut next = Self::new(self.place.clone(), host, self.inbox.clone());
        next.host_gone = self.host_gone || !unused;
        next.quotas = std::mem::take(&mut self.quotas);
        next
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
    type Ending = Ending;
    type Keys = Keys;

    const PLACES: &'static Places = &quota::RNIC;
    // The hardware lets go of what is gone.
    const LETS_GO: bool = true;
    const END: Nanos = END;

    fn device(nic: &mut Nic) -> abi::QueryDeviceResp {
        nic.device_attributes()
    }

    fn port(nic: &mut Nic) -> abi::QueryPortResp {
        nic.port_attributes()
    }

    fn bounds(&self) -> Bounds {
        self.bounds()
    }

    fn begin_pd(nic: &mut Nic) -> Result<HostPd, Status> {
        nic.backing.host.alloc_pd().map_err(|error| nic.refused(error))
    }

    fn end_pd(nic: &mut Nic, pd: HostPd) {
        nic.forgo(|nic| nic.backing.host.free_pd(pd));
    }

    fn begin_srq(nic: &mut Nic, srqn: u32, req: &abi::SrqCreateReq) -> Result<Held, Status> {
        nic.begin_srq(srqn, req)
    }

    fn end_srq(nic: &mut Nic, srq: &Held) {
        nic.backing.serials.remove(&srq.serial);
        nic.backing.admitted -= srq.cost;
        nic.forgo(|nic| nic.backing.host.destroy_srq(srq.host));
    }

    fn srq_bytes(max_wr: u32) -> usize {
        quota::shared(max_wr)
    }

    fn srq_posted(srq: &Srq) -> u32 {
        srq.posted_in_all()
    }

    fn srq_used(srq: &Srq) -> u32 {
        srq.own.used
    }

    fn set_limit(nic: &mut Nic, srqn: u32, limit: u32, again: bool) -> Result<(), Status> {
        nic.set_limit(srqn, limit, again)
    }

    fn srq_moved(nic: &mut Nic, srqn: u32) {
        nic.backing.run_srqs.push(srqn);
    }

    fn qp_bytes(req: &abi::QpCreateReq) -> usize {
        let depth = (req.max_send_wr.get(), req.max_recv_wr.get());
        quota::queue_pair(depth, shape::sends(req).max_inline)
    }

    fn leave_groups(nic: &mut Nic, qpn: u32) {
        nic.leave_all(qpn);
    }

    fn end_qp(nic: &mut Nic, qp: &Qp) {
        let place = &nic.backing.place;
        place.directory.remove_qp(&place.device, qp.qpn, nic.settings.vni);
        nic.backing.serials.remove(&qp.own.serial);
        nic.backing.admitted -= qp.own.cost;
        nic.forgo(|nic| nic.backing.host.destroy_qp(qp.own.host));
    }

    fn end_ah(nic: &mut Nic, ah: Handle) {
        nic.forgo(|nic| nic.backing.host.destroy_ah(ah.host));
    }

    fn catch_up(nic: &mut Nic) {
        nic.poll_host();
    }

    fn abandoned(nic: &mut Nic, work: Work) {
        nic.abandon(&work);
    }

    fn begin_end(nic: &Nic) -> Ending {
        Ending { windows: nic.backing.windows.walk(), drain: None }
    }

    fn end_before_qps(nic: &mut Nic, ctx: u32, end: &mut Ending, budget: &mut Budget) -> bool {
        nic.end_windows(ctx, &mut end.windows, budget)
    }

    /// Its windows that it bound since the walk over them.
    fn end_before_qp(nic: &mut Nic, qpn: u32, end: &mut Ending, budget: &mut Budget) -> bool {
        end.drain = Some(nic.drain());
        nic.end_windows_of(qpn, budget)
    }

    fn end_after_qps(nic: &mut Nic, end: &mut Ending, budget: &mut Budget) -> bool {
        let done = end.drain.as_mut().is_none_or(|drain| nic.drain_host(drain, budget));
        if done {
            end.drain = None;
        }
        done
    }

    fn keys(&self) -> &Roster {
        &self.mr_keys
    }

    fn end_key(nic: &mut Nic, key: u32, ctx: u32) {
        if nic.backing.mrs.get(&key).is_some_and(|mr| mr.ctx == ctx) {
            // Its end is not the worker's.
            nic.meter.charge(cost::OBJECT);
            nic.remove_mr(key);
        }
    }

    fn context_gone(&mut self, _ctx: u32) {}

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

    fn stand_still(nic: &mut Nic, begins: bool) -> bool {
        nic.stand_still(begins)
    }

    fn go_on(nic: &mut Nic) {
        nic.go_on();
    }

    // Its QPs have ended with the pause.
    fn resumed(_nic: &mut Nic, _qpn: u32) {}

    fn is_beginning(&self) -> bool {
        self.opening
    }

    fn succeed(&mut self, life: NicState) -> Self {
        self.successor(life)
    }

    fn has_work(nic: &mut Nic, _now: Nanos) -> bool {
        nic.has_own_work()
    }

    fn has_news(&self) -> bool {
        false
    }

    fn tell(_nic: &mut Nic) {}

    fn fail(nic: &mut Nic) {
        nic.fail_now();
    }

    fn dropped(nic: &mut Nic) {
        nic.close();
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

#[ext(Upkeep)]
pub(super) impl Nic {
    /// The operator changed the NIC.
    fn change(&mut self, settings: NicSettings) {
        let vni = self.settings.vni;
        self.settings = NicSettings { vni, ..settings };
        self.withdraw_addresses();
        self.check_peers();
    }

    /// One bounded round.
    fn run_round(&mut self, now: Nanos) -> bool {
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

    /// Whether there is something to do. If not, the host has been told to wake the worker.
    fn has_own_work(&mut self) -> bool {
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
