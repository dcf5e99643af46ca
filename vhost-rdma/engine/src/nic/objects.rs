//! Objects of a guest: domains, address handles, shared receive queues, queue pairs. What a backing
//! keeps of each is beside the guest's part (`own`).

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{self as abi, event};

use super::Status;
use super::cq::control_offset;
use super::holdings::{Holding, Links, Owned, owned};
use super::parts::Parts;
use super::qp::{Attrs, Kind, State};
use super::receive::{Moving, ReceiveRing, SavedReceives};
use super::saved::BadState;
use crate::memory::{AddressSpace, Charge, Ring};

/// Events whose object is a QP.
pub const QP_EVENTS: [u32; 6] = [
    event::QP_FATAL,
    event::QP_REQ_ERR,
    event::QP_ACCESS_ERR,
    event::COMM_EST,
    event::SQ_DRAINED,
    event::QP_LAST_WQE_REACHED,
];

/// A protection domain.
#[derive(Debug)]
pub struct Pd<T> {
    pub(crate) ctx: u32,
    /// Objects in it; those that only the provider knows are not counted.
    pub(crate) users: u32,
    pub(crate) links: Links,
    /// The provider's part.
    pub own: T,
}

/// An address handle.
#[derive(Debug)]
pub struct Ah<T> {
    pub(crate) ctx: u32,
    /// Its protection domain.
    pub pdn: u32,
    /// The address as the guest named it.
    pub av: abi::Av,
    pub(crate) links: Links,
    /// The provider's part.
    pub own: T,
}

/// A shared receive queue. Its receives are checked against its own protection domain (IBTA
/// 10.2.9.1).
#[derive(Debug)]
pub struct Srq<P: Parts> {
    /// The context that it belongs to.
    pub ctx: u32,
    pub(crate) pdn: u32,
    /// Receives that it may hold.
    pub max_wr: u32,
    /// Fires once when fewer receives wait; 0 when not armed.
    pub limit: u32,
    /// The guest's ring.
    pub ring: ReceiveRing,
    pub(crate) doorbell: u32,
    /// QPs that receive from here.
    pub(crate) users: u32,
    pub(crate) links: Links,
    control: u64,
    /// It failed: nothing is taken from it any more.
    pub dead: bool,
    /// The provider's part.
    pub own: P::Srq,
    _kept: Charge,
}

/// What is saved of a shared receive queue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedSrq {
    ctx: u32,
    pub(crate) pdn: u32,
    max_wr: u32,
    limit: u32,
    doorbell: u32,
    dead: bool,
    receives: SavedReceives,
}

impl<P: Parts> Srq<P> {
    /// A new one, as `req` asks for.
    pub(crate) fn new(
        (ctx, req): (u32, &abi::SrqCreateReq),
        ring: Ring,
        (doorbell, kept): (u32, Charge),
        own: P::Srq,
    ) -> Self {
        let entries = req.entries.get();
        Self {
            ctx,
            pdn: req.pdn.get(),
            max_wr: req.max_wr.get(),
            limit: req.limit.get(),
            ring: ReceiveRing::new(ring, entries, req.log2_stride, req.max_sge.get()),
            doorbell,
            users: 0,
            links: Links::default(),
            control: control_offset(u64::from(entries) << req.log2_stride),
            dead: false,
            own,
            _kept: kept,
        }
    }

    /// See [`super::saved`].
    pub(crate) fn save(&self, space: &AddressSpace) -> SavedSrq {
        let Self { ctx, pdn, max_wr, limit, doorbell, dead, .. } = *self;
        SavedSrq { ctx, pdn, max_wr, limit, doorbell, dead, receives: self.ring.save(space) }
    }

    /// What was saved, in this memory. Its users come afterwards.
    pub(crate) fn load(
        saved: &SavedSrq,
        space: &AddressSpace,
        (kept, own): (Charge, P::Srq),
    ) -> Result<Self, BadState> {
        let SavedSrq { ctx, pdn, max_wr, limit, doorbell, dead, ref receives } = *saved;
        let ring = ReceiveRing::load(receives, space)?;
        let control = control_offset(ring.bytes());
        let (users, links, _kept) = (0, Links::default(), kept);
        Ok(Self {
            ctx,
            pdn,
            max_wr,
            limit,
            ring,
            doorbell,
            users,
            links,
            control,
            dead,
            own,
            _kept,
        })
    }

    /// Tells the guest how many receives are used up.
    pub fn tell_used(&self, used: u32) {
        self.ring.ring().store_u32(self.control + abi::ctrl::TAKEN as u64, used);
    }

    /// Moves to another ring, which has all that waits; indices go on (IBTA 11.2.9.3). The ring
    /// that was left.
    pub(crate) fn take_over(&mut self, max_wr: u32, to: Moving, used: u32) -> Result<Ring, Status> {
        let (control, old) = self.ring.take_over(to)?;
        self.control = control;
        self.max_wr = max_wr;
        self.tell_used(used);
        Ok(old)
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp<P: Parts> {
    /// Its number on the network.
    pub qpn: u32,
    /// The context that it belongs to.
    pub ctx: u32,
    /// Its protection domain.
    pub pdn: u32,
    /// Its type.
    pub kind: Kind,
    /// Where it stands (IBTA 10.3.1).
    pub state: State,
    /// What the guest has set.
    pub attrs: Attrs,
    /// Every work request completes, whatever its flags.
    pub signal_all: bool,
    /// The CQ of work requests.
    pub send_cqn: u32,
    /// The CQ of receives.
    pub recv_cqn: u32,
    pub(crate) srqn: Option<u32>,
    /// Beside the rest: a turn may take it out and put it back.
    pub send: Option<P::Send>,
    /// Where receives are taken from, unless it has an SRQ.
    pub receive: Option<P::Receive>,
    /// Doorbell numbers of the two queues.
    pub(crate) doorbells: [u32; 2],
    /// In the NIC's run queue.
    pub scheduled: bool,
    pub(crate) links: Links,
    /// The provider's part.
    pub own: P::Qp,
    pub(crate) _kept: Charge,
}

owned!(Pd, [T], Pd<T>);
owned!(Ah, [T], Ah<T>);
owned!(Srq, [P: Parts], Srq<P>);
owned!(Qp, [P: Parts], Qp<P>);

/// The number of a new object.
pub(crate) fn number(index: usize) -> Result<u32, Status> {
    u32::try_from(index).map_err(|_| Status::NOMEM)
}
