//! What the connection manager keeps: identifiers (the kernel's `rdma_cm_id`), and events.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::cm::message::{Message, Offer};
use crate::link::Gid;
use crate::memory::Charge;
use crate::nic::Nanos;

/// Q_Key of datagram services (RDMA_UDP_QKEY).
pub(super) const UDP_QKEY: u32 = 0x0123_4567;

/// What a port number is of (annex A11.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::process) enum Space {
    /// RC connections.
    Tcp,
    /// UD services.
    Udp,
    /// The same, of IPoIB's groups.
    Ipoib,
}

impl Space {
    pub(super) const fn of(number: u16) -> Option<Self> {
        match number {
            0x0106 => Some(Self::Tcp),
            0x0111 => Some(Self::Udp),
            0x0002 => Some(Self::Ipoib),
            _ => None,
        }
    }

    pub(super) const fn number(self) -> u16 {
        match self {
            Self::Tcp => 0x0106,
            Self::Udp => 0x0111,
            Self::Ipoib => 0x0002,
        }
    }

    pub(super) const fn is_datagram(self) -> bool {
        !matches!(self, Self::Tcp)
    }
}

/// Where an identifier is in its life (IBTA 12.9.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// New, or bound.
    Idle,
    Resolved,
    Routed,
    Listening,
    /// A request was sent.
    Asked,
    /// A request has come; its program decides.
    Wanted,
    /// A REP was sent.
    Answered,
    /// A REP has come; its program moves its queue pair.
    Heard,
    Up,
    /// A DREQ was sent.
    Leaving,
    /// TIMEWAIT.
    Waiting,
    /// Nothing more comes of it.
    Over,
}

/// A message that is sent again until its answer comes.
#[derive(Debug)]
pub(super) struct Again {
    pub(super) message: Message,
    pub(super) wait: Nanos,
    pub(super) left: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Id {
    /// The channel that its events go to; `None`: its program is gone, and its peer is being told.
    pub(super) channel: Option<u32>,
    /// How its program calls it; 0: not yet, so that no event can be told.
    pub(super) uid: u64,
    pub(super) space: Space,
    pub(super) state: State,
    pub(super) reuse: bool,
    pub(super) v6only: bool,
    pub(super) traffic_class: u8,
    /// The timeout of acknowledgements that its program has chosen.
    pub(super) ack_timeout: Option<u8>,
    /// What it is bound to, and whom it resolved or was asked by.
    pub(super) own: Option<SocketAddr>,
    pub(super) dest: Option<SocketAddr>,
    pub(super) local: Gid,
    pub(super) peer: Gid,
    /// How the peer calls it.
    pub(super) remote: u32,
    pub(super) mine: Offer,
    pub(super) theirs: Offer,
    pub(super) mtu: u8,
    pub(super) again: Option<Again>,
    pub(super) deadline: Option<Nanos>,
    /// What the peer gets once more if it asks once more.
    pub(super) last: Option<Message>,
    pub(super) backlog: u32,
    /// Requests that its program has not answered.
    pub(super) unanswered: u32,
    /// Which it came by.
    pub(super) listener: Option<u32>,
    /// Events that its program has taken.
    pub(super) reported: u32,
    /// Events of its own that wait in its channel.
    pub(super) waiting: u32,
    /// Groups that it joined, and how many events of each its program has taken.
    pub(super) groups: BTreeMap<u32, u32>,
    /// The peer's NIC, of who was asked.
    pub(super) whose: u64,
    /// It was asked and is not up: the session that it counts for.
    pub(super) half_open: Option<u64>,
    /// The session that its queue pair is claimed by.
    pub(super) claimed: bool,
    pub(super) _kept: Charge,
}

impl Id {
    pub(super) fn new(space: Space, kept: Charge) -> Self {
        Self {
            channel: None,
            uid: 0,
            space,
            state: State::Idle,
            reuse: false,
            v6only: false,
            traffic_class: 0,
            ack_timeout: None,
            own: None,
            dest: None,
            local: [0; 16],
            peer: [0; 16],
            remote: 0,
            mine: Offer::default(),
            theirs: Offer::default(),
            mtu: 0,
            again: None,
            deadline: None,
            last: None,
            backlog: 0,
            unanswered: 0,
            listener: None,
            reported: 0,
            waiting: 0,
            groups: BTreeMap::new(),
            whose: 0,
            half_open: None,
            claimed: false,
            _kept: kept,
        }
    }

    /// It has no address yet.
    pub(super) const fn is_unbound(&self) -> bool {
        matches!(self.state, State::Idle) && self.own.is_none()
    }
}

/// What happened (`enum rdma_cm_event_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(in crate::process) enum Kind {
    AddressResolved = 0,
    RouteResolved = 2,
    Request = 4,
    Response = 5,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    MulticastJoin = 12,
    TimewaitExit = 15,
}

/// What an event says beside that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::process) enum Said {
    Nothing,
    /// Of a connection: what the peer offers, as seen from here, and its words.
    Connection(Offer, Vec<u8>),
    /// Of a datagram service: queue pair, Q_Key, the way there, words.
    Datagram(u32, u32, Way, Vec<u8>),
}

/// The way to a peer or a group (`struct ib_uverbs_ah_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::process) struct Way {
    pub(super) dest: Gid,
    pub(super) index: u8,
    pub(super) traffic_class: u8,
}

/// An event on its way to a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::process) struct Event {
    pub(super) kind: Kind,
    pub(super) status: i32,
    /// Which it is of; of a request, the new one.
    pub(super) id: u32,
    /// Whose it is to count: of a request, the listener.
    pub(super) of: u32,
    pub(super) uid: u64,
    pub(super) group: Option<u32>,
    pub(super) said: Said,
}
