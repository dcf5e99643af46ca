//! Links: how a work request reaches the QP that it names.
//!
//! A requester hands its link one [`Request`] at a time, a piece of a message of at most [`PIECE`]
//! bytes whose local memory is already resolved; the link brings it to the [`Responder`] of the
//! peer's NIC and answers an [`Outcome`]. A link never sees an address that a guest wrote in a
//! ring, never writes a completion, and owns no verbs state: what it may know is in this module.
//!
//! - `local`: between NICs of one shard. The responder is called at once and moves the bytes with
//!   one copy.
//! - `bus`: between shards of one network. A request becomes a [`Parcel`] that owns its bytes, is
//!   answered [`Awaited::Answer`], and its answer comes back as another parcel. It is made of
//!   queues only; who carries parcels from end to end is not its matter. So the same parcels go
//!   through the simulated link of the tests, which loses, repeats, reorders and delays them.
//!
//! - A wire: to peers that are no NICs of this process at all. None ships; the tests have one
//!   ([`Ways::set_wire`]).
//!
//! - `ways`: chooses between them. It is the one link that a requester knows.
//!
//! What comes in from peers that are no NICs of this shard, the link hands out one by one
//! ([`Link::poll`]), and says when it wants to be asked though nothing came ([`Link::deadline`]).
//! What cannot be executed at once waits in `ways` (`held`), whichever link brought it.
//!
//! The arrow points one way: the engine knows this module, this module knows nothing of the engine.

mod book;
mod bus;
mod held;
mod local;
mod parcel;
mod ways;

use std::cell::RefCell;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Nanos;
use crate::memory::Segment;

pub use book::{AddressBook, MOST_SHARDS, ShardBook};
pub use bus::Bus;
pub use held::Waiting;
pub use local::Local;
pub use parcel::{Answer, Ask, OUTSIDE, Parcel, Ticket, Token};
pub use ways::{Arrived, Ways};

/// The largest piece of a message that is moved in one go, in bytes: what one guest can make
/// another wait for.
pub const PIECE: u32 = 128 << 10;

/// Queue pairs of a group that get a datagram in one go: each is a copy and a completion.
pub const DELIVERIES: u32 = 16;

/// Length of the GRH area at the start of every UD receive, in bytes (IBTA 11.4.1.2).
pub const GRH_LEN: u32 = 40;

/// Length of every datagram of QP 1, in bytes (IBTA 13.4.2).
pub const MAD_LEN: u32 = 256;

/// A NIC of this daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NicId(pub u32);

impl NicId {
    /// The NIC of another shard, which is none of this shard's: it is known by its address only.
    pub const ELSEWHERE: Self = Self(u32::MAX);
}

/// A 128-bit port address; IPv4 addresses are mapped (`::ffff:a.b.c.d`).
pub type Gid = [u8; 16];

/// Whether an address names a group: IPv6 `ff00::/8`, or a mapped IPv4 address of `224.0.0.0/4`.
#[must_use]
pub fn is_multicast(gid: &Gid) -> bool {
    gid[0] == 0xff
        || (gid[..10] == [0; 10] && gid[10..12] == [0xff, 0xff] && gid[12] & 0xf0 == 0xe0)
}

/// The QPN that stands for every member of a group (IBTA 3.5.10).
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// What the responder shall do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Deliver to a receive work request.
    Send,
    /// Write to `remote_addr`.
    Write,
    /// Read from `remote_addr`.
    Read,
    /// Compare with `operands[0]`, store `operands[1]` if equal.
    CompareSwap,
    /// Add `operands[0]`.
    FetchAdd,
    /// Write 8 bytes at once.
    AtomicWrite,
    /// Make earlier writes visible: `operands[0]` bytes, kinds in `operands[1]`.
    Flush,
}

impl Operation {
    /// Whether bytes come back.
    #[must_use]
    pub const fn fetches(self) -> bool {
        matches!(self, Self::Read | Self::CompareSwap | Self::FetchAdd)
    }
}

/// The service that carries a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// RC: answered, retried, in order.
    Reliable,
    /// UC: in order, never answered.
    Unreliable,
    /// UD and GSI: single packets to anyone.
    Datagram,
}

/// Where a request comes from and goes to.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// The requester's NIC.
    pub source: NicId,
    /// The requester's QP.
    pub source_qpn: u32,
    /// The requester's address.
    pub source_gid: Gid,
    /// The requester's MAC address.
    pub source_mac: [u8; 6],
    /// The responder's address, in the requester's network.
    pub dest_gid: Gid,
    /// The responder's QP.
    pub dest_qpn: u32,
    /// Traffic class of the packets that this stands for.
    pub traffic_class: u8,
    /// Hop limit of the packets that this stands for.
    pub hop_limit: u8,
    /// Service level.
    pub sl: u8,
}

/// The requester's local data.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Bytes of the work request itself.
    Inline(&'a [u8]),
    /// Guest memory; the segments cover the whole message.
    Memory(&'a [Segment]),
    /// Bytes of this piece alone, which came from elsewhere.
    Piece(&'a [u8]),
    /// Where the bytes of this piece are to be put, which go elsewhere.
    Reply(&'a RefCell<Vec<u8>>),
}

/// How far a datagram to a group has come: a NIC of the group, and a queue pair of its.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fanout {
    /// Number of the NIC in the group.
    pub member: u32,
    /// Number of the queue pair among the NIC's in the group.
    pub queue: u32,
}

/// What the owner of the memory that a request names has to do with it: of most memory nothing, as
/// the responder reaches it itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    /// Nobody has asked it.
    #[default]
    Unasked,
    /// It was asked for the job of this number ([`Awaited::Owner`]).
    Asked(u64),
    /// It has done its part, and found this value.
    Did(u64),
    /// It could not.
    Failed,
}

impl Payload<'_> {
    /// The word that an atomic found; 0 of all else.
    #[must_use]
    pub fn word(&self) -> [u8; 8] {
        match self {
            Payload::Reply(bytes) => bytes.borrow().first_chunk().copied().unwrap_or_default(),
            _ => [0; 8],
        }
    }
}

/// One piece of one message.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Both ends.
    pub flow: &'a Flow,
    /// The service.
    pub service: Service,
    /// What to do.
    pub operation: Operation,
    /// The requester's data: source of sends and writes, destination of reads and atomics.
    pub payload: Payload<'a>,
    /// Length of the whole message, in bytes.
    pub total: u32,
    /// Where this piece begins.
    pub offset: u32,
    /// Number of the message, the same in all pieces of one on an unreliable connection, where
    /// pieces get lost.
    pub message: u32,
    /// Length of this piece.
    pub len: u32,
    /// Address at the responder, of the whole message.
    pub remote_addr: u64,
    /// Key at the responder.
    pub rkey: u32,
    /// Immediate data, as opaque bytes.
    pub immediate: Option<[u8; 4]>,
    /// Key that the responder invalidates (SEND_WITH_INV).
    pub invalidate: Option<u32>,
    /// The receiver asked to be told of this message's completion.
    pub solicited: bool,
    /// Operands of an atomic.
    pub operands: [u64; 2],
    /// Q_Key of a datagram.
    pub qkey: u32,
    /// To whom of a group a datagram goes next.
    pub fanout: Fanout,
    /// What the owner of the memory did for this piece.
    pub owner: Owner,
    /// By which a responder elsewhere knows a request that it has executed.
    pub ticket: Ticket,
    /// It was sent to another shard before, and may have been executed there.
    pub crossed: bool,
    /// It was sent before its turn: pieces before it may not have been executed yet.
    pub ahead: bool,
}

impl Request<'_> {
    /// Whether this piece begins its message.
    #[must_use]
    pub const fn is_first(&self) -> bool {
        self.offset == 0
    }

    /// Whether this piece ends its message.
    #[must_use]
    pub const fn is_last(&self) -> bool {
        self.offset as u64 + self.len as u64 >= self.total as u64
    }
}

/// A responder's refusal (IBTA 9.7.5.2.8, the NAK codes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Nak {
    /// The request is malformed or its receive too small.
    InvalidRequest,
    /// Key, range or right.
    RemoteAccess,
    /// The responder's own fault.
    RemoteOperation,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Executed (or, for unreliable services, sent).
    Done,
    /// No receive was posted; try again after this RNR timer code.
    NotReady(u8),
    /// Refused.
    Refused(Nak),
    /// The requester's own memory faulted while it was accessed.
    LocalFault,
    /// Nobody answered.
    NoAnswer,
    /// Some of a group have it; the request is to be given again for those from here on.
    Partly(Fanout),
    /// It is under way: somebody has a part to do. When that is done, or time is up, the request is
    /// settled, or given again.
    Later(Awaited),
    /// The link takes no more now, or the responder waits for others before it; the request is to
    /// be given again soon.
    Full,
}

/// What a request that is under way waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// The owner of the memory, which has a job of this number to do. Then the request is to be
    /// given again with [`Request::owner`].
    Owner(u64),
    /// An [`Answer`] that comes from elsewhere.
    Answer,
}

/// The receiving side of one NIC.
pub trait Responder {
    /// Executes an inbound request on the QP that it names, after every check that the QP and its
    /// memory demand.
    fn receive(&mut self, request: &Request<'_>) -> Outcome;

    /// Asks the owner of the memory for its part of a piece whose turn has not come: the job's
    /// number. `None`, and nothing has changed: there is no such owner, or the piece is not good.
    fn ask_ahead(&mut self, request: &Request<'_>) -> Option<u64>;

    /// Gives a datagram to those of its group here from number `first` on, to `most` at the most:
    /// how many that were, and whether the requester's own memory faulted. Fewer than `most`: there
    /// are no more.
    fn receive_group(&mut self, request: &Request<'_>, first: u32, most: u32) -> (u32, bool);
}

/// The NICs that a link can reach at once.
pub trait Fabric {
    /// The NIC that holds `gid` in the network of NIC `from`.
    fn responder(&mut self, from: NicId, gid: &Gid) -> Option<&mut dyn Responder>;

    /// The network of a NIC that is here.
    fn network(&self, nic: NicId) -> Option<u32>;

    /// Whether a NIC that is here holds `gid` in this network.
    fn holds(&self, vni: u32, gid: &Gid) -> bool;

    /// The member number `index` of a multicast group in the network of NIC `from`: `None` behind
    /// the last, `Some(None)` for one that does not listen now.
    fn member(
        &mut self,
        from: NicId,
        mgid: &Gid,
        index: usize,
    ) -> Option<Option<&mut dyn Responder>>;
}

/// What a link brings in.
#[derive(Debug)]
pub enum Inbound {
    /// A request of a NIC that is here was answered.
    Answer(Answer),
    /// A peer that is no NIC here asks for something.
    Ask(Ask),
}

/// A way to a peer. It has no thread and no clock: whoever drives it asks it.
pub trait Link: fmt::Debug + Send {
    /// Brings one request to its responder.
    fn submit(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Outcome;

    /// Asks ahead, as [`Responder::ask_ahead`] does, where the link can.
    fn ask_ahead(&mut self, _: &mut dyn Fabric, _: &Request<'_>) -> Option<u64> {
        None
    }

    /// The next of what came in: answers first, then requests, the oldest of each. One at a time,
    /// since the caller's budget is time.
    fn poll(&mut self, now: Nanos) -> Option<Inbound>;

    /// Whether there is anything to do: something came in, or is to leave.
    fn has_work(&self) -> bool;

    /// When it is to be polled although nothing comes.
    fn deadline(&self) -> Option<Nanos>;

    /// Answers a request that [`poll`](Self::poll) gave, and lets its sender have as much more
    /// under way, if it may not already (`given.1`). `given.0` are the answer's bytes.
    fn answer(&mut self, token: Token, outcome: Option<Outcome>, given: (Vec<u8>, bool));
}
