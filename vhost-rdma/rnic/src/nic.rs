//! One NIC on an RNIC: what it has beside the guest's part.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use vhost_rdma_engine::cm::{Inbox, Wake};
use vhost_rdma_engine::link::Gid;
use vhost_rdma_engine::nic::budget::Meter;
use vhost_rdma_engine::nic::owned_numbers::OwnedNumbers;
use vhost_rdma_engine::nic::roster::{Slots, Walk};
use vhost_rdma_engine::nic::shards::Shards;
use vhost_rdma_engine::nic::{self, Nanos, NicSettings, NicState, Parts, Port};

use super::directory::Directory;
use super::findings::Findings;
use super::gone::Gone;
use super::held::Held;
use super::nic_quota::NicQuotas;
use super::receives::Receives;
use super::region::Mr;
use super::sends::Sends;
use super::services::Services;
use super::stopping::Stopping;
use super::verbs::{HostAh, HostError, HostPd, HostQp, HostVerbs, HostWc, RecvBurst, SendBurst};
use super::windows::Windows;
use super::work::{Ending, Keys, Work};

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
/// A shared receive queue that an RNIC takes receives from.
pub(super) type Srq = nic::objects::Srq<Rnic>;
/// The QPs of groups, by the group's address on the wire.
type Groups = FxHashMap<Gid, Vec<u32>>;

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
    pub(super) mr_keys: OwnedNumbers,
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
    /// SRQs with receives for the hardware, each once.
    pub(super) run_srqs: VecDeque<u32>,
    /// What the receives were charged that went to the hardware as soon as they were rung for,
    /// since the last round.
    pub(super) at_once: Nanos,
    pub(super) wcs: Vec<HostWc>,
    pub(super) sends: SendBurst,
    pub(super) receives: RecvBurst,
    /// The host may have something to say: its descriptors became readable, or nobody has looked
    /// yet.
    pub(super) ask_host: bool,
    /// When it was last asked.
    pub(super) asked_at: Nanos,
    /// It was told to wake the worker.
    pub(super) armed: bool,
    /// Connections to be looked at, since who may be reached changed.
    pub(super) peer_check: PeerCheck,
    /// There is no device context, or none that can be used.
    pub(super) host_gone: bool,
}

/// An entry of a NIC's GID table.
#[derive(Debug, Clone, Copy)]
pub struct HostAddress {
    pub(super) guest: Gid,
    /// The host's index and address; none if the host has no such address (a link-local one, say),
    /// and nothing can be sent from it.
    pub(super) host: Option<(u16, Gid)>,
}

/// Connections that are still to be looked at after a change of peers or addresses.
#[derive(Debug, Default)]
pub(super) struct PeerCheck {
    pub(super) qps: Walk,
    pub(super) ahs: Slots,
    pub(super) groups: bool,
}

impl PeerCheck {
    pub(super) const fn is_over(&self) -> bool {
        !self.groups
    }
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
            mr_keys: OwnedNumbers::default(),
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
            run_srqs: VecDeque::new(),
            at_once: 0,
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
    pub(super) fn successor(&mut self, life: NicState) -> Self {
        let gone: Box<dyn HostVerbs> = Box::new(Gone::after(self.host.as_ref()));
        let unused = life == NicState::Idle;
        let host = if unused { std::mem::replace(&mut self.host, gone) } else { gone };
        let mut next = Self::new(self.place.clone(), host, self.inbox.clone());
        next.host_gone = self.host_gone || !unused;
        next.quotas = std::mem::take(&mut self.quotas);
        next
    }
}

impl Parts for Rnic {
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
}
