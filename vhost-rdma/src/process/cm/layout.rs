//! The commands, answers and events of rdma_cm as they stand in `rdma/rdma_user_cm.h`,
//! little-endian and without pointers: `response` and `fd` fields are ignored, an option's value
//! follows it.
//!
//! A command has exactly its length; so reading it is total. Offsets are those of the header.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use super::id::{Event, Said, Space, Way};
use crate::cm::message::Offer;
use crate::link::Gid;
use crate::nic::Status;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
/// Bytes of private data in commands and events.
const PRIVATE: usize = 256;
/// The longest value of an option that there is.
const VALUE: usize = 8;

/// What a connection is to be, or a datagram service (`struct rdma_ucm_conn_param`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::process) struct Param {
    pub(super) offer: Offer,
    pub(super) qkey: u32,
    pub(super) private: Vec<u8>,
}

/// A command. `id` is how the connection manager calls an identifier.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are the header's")]
pub(in crate::process) enum Command {
    Create { uid: u64, space: Space },
    Destroy { id: u32 },
    Bind { id: u32, address: SocketAddr },
    Resolve { id: u32, source: Option<SocketAddr>, dest: SocketAddr },
    Route { id: u32 },
    Query { id: u32 },
    Connect { id: u32, param: Param },
    Listen { id: u32, backlog: u32 },
    Accept { id: u32, uid: u64, param: Option<Param> },
    Reject { id: u32, reason: u8, private: Vec<u8> },
    Disconnect { id: u32 },
    QpAttr { id: u32, state: u32 },
    GetEvent,
    SetOption { id: u32, level: u32, name: u32, value: Vec<u8> },
    Notify { id: u32, event: u32 },
    Join { id: u32, uid: u64, address: SocketAddr },
    Leave { id: u32 },
    Migrate { id: u32 },
}

/// What a program gets with a command that was carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::process) enum Reply {
    /// Nothing.
    Done,
    /// A number.
    Number(u32),
    /// Events that were reported, and events that were withdrawn.
    Counts(u32, u32),
    /// Where an identifier is, and its way.
    Route(Box<Route>),
    /// What a queue pair is to become.
    Attributes(Box<Attributes>),
    /// What happened.
    Event(Box<Event>),
}

/// The answer to QUERY_ROUTE.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::process) struct Route {
    /// Zero: it has no device.
    pub(super) guid: u64,
    pub(super) own: Option<SocketAddr>,
    pub(super) dest: Option<SocketAddr>,
    /// From where to where, once that is known.
    pub(super) path: Option<(Gid, Gid)>,
    pub(super) traffic_class: u8,
}

/// The answer to INIT_QP_ATTR (`struct ib_uverbs_qp_attr`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::process) struct Attributes {
    pub(super) mask: u32,
    pub(super) state: u32,
    pub(super) mtu: u32,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qpn: u32,
    pub(super) access: u32,
    pub(super) way: Option<Way>,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
}

/// Fields of a command by offset; what is not there is zero.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().unwrap_or([0; N])
    }

    fn byte(&self, at: usize) -> u8 {
        self.bytes::<1>(at)[0]
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes(at))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes(at))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    /// A `struct sockaddr_in6`, or a `sockaddr_in` in its place.
    fn address(&self, at: usize) -> Option<SocketAddr> {
        let port = u16::from_be_bytes(self.bytes(at + 2));
        match self.u16(at) {
            AF_INET => Some((Ipv4Addr::from(self.bytes::<4>(at + 4)), port).into()),
            AF_INET6 => {
                let ip = Ipv6Addr::from(self.bytes::<16>(at + 8));
                let flow = u32::from_be_bytes(self.bytes(at + 4));
                Some(SocketAddrV6::new(ip, port, flow, self.u32(at + 24)).into())
            }
            _ => None,
        }
    }

    fn private(&self, at: usize, len: u8) -> Vec<u8> {
        self.0.get(at..).and_then(|rest| rest.get(..len.into())).unwrap_or_default().to_vec()
    }

    /// A `struct rdma_ucm_conn_param`, if it is a valid one.
    fn param(&self, at: usize) -> Option<Param> {
        (self.byte(at + 271) != 0).then(|| Param {
            offer: Offer {
                qpn: self.u32(at) & 0xff_ffff,
                responder_resources: self.byte(at + 266),
                initiator_depth: self.byte(at + 267),
                flow_control: self.byte(at + 268) != 0,
                retry_count: self.byte(at + 269).min(7),
                rnr_retry_count: self.byte(at + 270).min(7),
                srq: self.byte(at + 265) != 0,
                ..Offer::default()
            },
            qkey: self.u32(at + 4),
            private: self.private(at + 8, self.byte(at + 264)),
        })
    }
}

/// Bytes of each command, by its number; 0: there is none of it here.
const LENGTHS: [usize; 19] =
    [24, 16, 40, 64, 8, 16, 288, 8, 296, 264, 4, 16, 8, 0, 24, 8, 48, 16, 16];

/// Reads a command and its header (`struct rdma_ucm_cmd_hdr`).
///
/// # Errors
/// What such a command is answered with.
pub(in crate::process) fn parse(bytes: &[u8]) -> Result<Command, Status> {
    let (header, body) = bytes.split_at_checked(8).ok_or(Status::INVAL)?;
    let number = Fields(header).u32(0) as usize;
    let f = Fields(body);
    let wanted = LENGTHS.get(number).copied().filter(|len| *len > 0).ok_or(Status::NOTSUPP)?;
    let value = body.len().checked_sub(wanted).ok_or(Status::INVAL)?;
    let options = if number == 14 { f.u32(20) as usize } else { 0 };
    if value != options || value > VALUE {
        return Err(Status::INVAL);
    }
    let address = |at| f.address(at).ok_or(Status::INVAL);
    let command = match number {
        0 => {
            let space = Space::of(f.u16(16)).ok_or(Status::NOTSUPP)?;
            Command::Create { uid: f.u64(0), space }
        }
        1 => Command::Destroy { id: f.u32(8) },
        2 => Command::Bind { id: f.u32(36), address: address(8)? },
        3 => Command::Resolve { id: f.u32(56), source: f.address(0), dest: address(28)? },
        4 => Command::Route { id: f.u32(0) },
        5 => Command::Query { id: f.u32(8) },
        6 => Command::Connect { id: f.u32(272), param: f.param(0).ok_or(Status::INVAL)? },
        7 => Command::Listen { id: f.u32(0), backlog: f.u32(4) },
        8 => Command::Accept { id: f.u32(280), uid: f.u64(0), param: f.param(8) },
        9 => {
            let private = f.private(8, f.byte(4));
            Command::Reject { id: f.u32(0), reason: f.byte(5), private }
        }
        10 => Command::Disconnect { id: f.u32(0) },
        11 => Command::QpAttr { id: f.u32(8), state: f.u32(12) },
        12 => Command::GetEvent,
        14 => {
            let value = body.get(wanted..).unwrap_or_default().to_vec();
            Command::SetOption { id: f.u32(8), level: f.u32(12), name: f.u32(16), value }
        }
        15 => Command::Notify { id: f.u32(0), event: f.u32(4) },
        16 => Command::Join { id: f.u32(44), uid: f.u64(8), address: address(16)? },
        17 => Command::Leave { id: f.u32(8) },
        _ => Command::Migrate { id: f.u32(8) },
    };
    Ok(command)
}

/// An answer under construction.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn u32s(&mut self, values: &[u32]) {
        values.iter().for_each(|value| self.bytes(&value.to_le_bytes()));
    }

    /// Zeroes up to a length.
    fn fill(&mut self, len: usize) {
        self.0.resize(len.max(self.0.len()), 0);
    }

    fn address(&mut self, address: Option<SocketAddr>) {
        let end = self.0.len() + 28;
        if let Some(address) = address {
            let family = if address.is_ipv4() { AF_INET } else { AF_INET6 };
            self.bytes(&family.to_le_bytes());
            self.bytes(&address.port().to_be_bytes());
            match address {
                SocketAddr::V4(v4) => self.bytes(&v4.ip().octets()),
                SocketAddr::V6(v6) => {
                    self.bytes(&v6.flowinfo().to_be_bytes());
                    self.bytes(&v6.ip().octets());
                    self.u32s(&[v6.scope_id()]);
                }
            }
        }
        self.fill(end);
    }

    /// A `struct ib_uverbs_ah_attr`.
    fn way(&mut self, way: Option<Way>) {
        let end = self.0.len() + 32;
        if let Some(way) = way {
            self.bytes(&way.dest);
            self.u32s(&[0]);
            self.bytes(&[way.index, 64, way.traffic_class, 0]);
            // Of RoCE, which has no LIDs: a global route, by port 1.
            self.bytes(&[0, 0, 0, 0, 0, 1, 1, 0]);
        }
        self.fill(end);
    }

    fn private(&mut self, private: &[u8]) {
        let end = self.0.len() + PRIVATE;
        self.bytes(private.get(..private.len().min(PRIVATE)).unwrap_or_default());
        self.fill(end);
    }

    fn event(&mut self, event: &Event) {
        self.bytes(&event.uid.to_le_bytes());
        self.u32s(&[event.id, event.kind as u32]);
        self.bytes(&event.status.to_le_bytes());
        let length = |private: &[u8]| u8::try_from(private.len()).unwrap_or(u8::MAX);
        match &event.said {
            Said::Nothing => {}
            Said::Connection(offer, private) => {
                self.u32s(&[offer.qpn, 0]);
                self.private(private);
                self.bytes(&[
                    length(private),
                    offer.srq.into(),
                    offer.responder_resources,
                    offer.initiator_depth,
                    offer.flow_control.into(),
                    offer.retry_count,
                    offer.rnr_retry_count,
                    1,
                ]);
            }
            Said::Datagram(qpn, qkey, way, private) => {
                self.u32s(&[*qpn, *qkey]);
                self.way(Some(*way));
                self.private(private);
                self.bytes(&[length(private)]);
            }
        }
        self.fill(336);
    }

    fn route(&mut self, route: &Route) {
        self.bytes(&route.guid.to_be_bytes());
        if let Some((from, to)) = route.path {
            self.bytes(&to);
            self.bytes(&from);
            // Flow label 0, reversible, MTU 4096, every partition; exactly this MTU and rate.
            self.u32s(&[0, 0, 0, 1, 5]);
            self.bytes(&[0xff, 0xff, 64, route.traffic_class, 1, 0, 2, 2, 3, 2, 16, 0]);
        }
        self.fill(8 + 128);
        self.address(route.own);
        self.address(route.dest);
        self.u32s(&[route.path.is_some().into()]);
        self.bytes(&[u8::from(route.guid != 0), 0, 0, 0]);
        self.u32s(&[0, 0]);
    }

    fn attributes(&mut self, it: &Attributes) {
        self.u32s(&[it.mask, it.state, 0, it.mtu, 0, it.qkey, it.rq_psn, it.sq_psn]);
        self.u32s(&[it.dest_qpn, it.access]);
        self.way(it.way);
        self.way(None);
        self.fill(40 + 64 + 20 + 4);
        // Events of SQD, draining; min_rnr_timer 0; port 1.
        self.bytes(&[0, 0, it.max_rd_atomic, it.max_dest_rd_atomic, 0, 1]);
        self.bytes(&[it.timeout, it.retry_count, it.rnr_retry]);
        self.fill(144);
    }
}

/// Writes an answer's body.
pub(in crate::process) fn write(reply: &Reply) -> Vec<u8> {
    let mut out = Out::default();
    match reply {
        Reply::Done => {}
        Reply::Number(number) => out.u32s(&[*number]),
        Reply::Counts(reported, withdrawn) => out.u32s(&[*reported, *withdrawn]),
        Reply::Route(route) => out.route(route),
        Reply::Attributes(attributes) => out.attributes(attributes),
        Reply::Event(event) => out.event(event),
    }
    out.0
}

/// The address that a GID stands for, with a port.
pub(super) fn socket_address(gid: &Gid, port: u16) -> SocketAddr {
    (IpAddr::from(*gid).to_canonical(), port).into()
}
