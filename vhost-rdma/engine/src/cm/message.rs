//! Messages of the connection manager (IBTA 12.6, 12.11), of RC connections and UD services by the
//! IP addressing service (annex A11): what rdma_cm sends.
//!
//! What a peer sends is hostile. Every message has 256 bytes, every field a fixed place in them,
//! so reading is total: a message is understood or it is none. The offsets are those of the tables
//! of IBTA 12.6, as counted behind the 24 bytes of the MAD header.

use super::MAD_LEN;
use crate::link::Gid;

/// Management class of the connection manager, and its version (IBTA 13.4.4, 16.7).
const CLASS: u8 = 7;
const CLASS_VERSION: u8 = 2;
const SEND: u8 = 3;
const HEADER: usize = 24;
/// RDMA_PS_TCP in the service ID of the IP addressing service (annex A11.2.2).
const TCP_SERVICE: u64 = 0x0106;
/// The services that datagrams are for: RDMA_PS_UDP, and RDMA_PS_IPOIB.
const DATAGRAM_SERVICES: [u16; 2] = [0x0111, 0x0002];
/// Length of the header that the IP addressing service has in front of a request's private data.
const IP_HEADER: usize = 36;

/// Attribute IDs of the messages.
mod attribute {
    pub(crate) const REQ: u16 = 0x10;
    pub(crate) const MRA: u16 = 0x11;
    pub(crate) const REJ: u16 = 0x12;
    pub(crate) const REP: u16 = 0x13;
    pub(crate) const RTU: u16 = 0x14;
    pub(crate) const DREQ: u16 = 0x15;
    pub(crate) const DREP: u16 = 0x16;
    pub(crate) const SIDR_REQ: u16 = 0x17;
    pub(crate) const SIDR_REP: u16 = 0x18;
}

/// Reasons of a REJ (IBTA 12.6.7.2).
#[allow(missing_docs, reason = "they are called as in IBTA 12.6.7.2")]
pub mod reason {
    pub const NO_RESOURCES: u16 = 3;
    pub const TIMEOUT: u16 = 4;
    pub const INVALID_ID: u16 = 6;
    pub const INVALID_SERVICE: u16 = 8;
    pub const STALE: u16 = 10;
    pub const INVALID_GID: u16 = 12;
    pub const CONSUMER: u16 = 28;
}

/// What both sides say of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "they are called as in IBTA 12.6")]
pub struct Offer {
    pub qpn: u32,
    /// The PSN that the peer shall begin with.
    pub psn: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub flow_control: bool,
    pub srq: bool,
    /// Of the sender's node: by it and its communication IDs others tell connections apart.
    pub guid: [u8; 8],
}

/// Both ends of a connection that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are called as in IBTA 12.6")]
pub struct Ends {
    pub source: Gid,
    pub source_port: u16,
    pub dest: Gid,
    pub dest_port: u16,
}

/// A message. `local` and `remote` are communication IDs as its sender has them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are called as in IBTA 12.6")]
pub enum Message {
    Req {
        local: u32,
        ends: Ends,
        offer: Offer,
        mtu: u8,
        private: Vec<u8>,
    },
    Rep {
        local: u32,
        remote: u32,
        offer: Offer,
        private: Vec<u8>,
    },
    Rtu {
        local: u32,
        remote: u32,
    },
    Rej {
        local: u32,
        remote: u32,
        of_rep: bool,
        reason: u16,
        private: Vec<u8>,
    },
    Dreq {
        local: u32,
        remote: u32,
        qpn: u32,
    },
    Drep {
        local: u32,
        remote: u32,
    },
    /// The answer to a REQ (`of` is 0) or a REP (1) takes as long as 4.096 us << `timeout`.
    Mra {
        local: u32,
        remote: u32,
        of: u8,
        timeout: u8,
    },
    /// Who serves a port with datagrams? `space` is the kind of service.
    SidrReq {
        id: u32,
        space: u16,
        ends: Ends,
        private: Vec<u8>,
    },
    SidrRep {
        id: u32,
        status: u8,
        qpn: u32,
        qkey: u32,
        private: Vec<u8>,
    },
}

/// Why a REQ cannot be served; who sent it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are called as in IBTA 12.6")]
pub struct Unserved {
    pub local: u32,
}

/// What a datagram says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are called as in IBTA 12.6")]
pub enum Parsed {
    Message(Message),
    /// A REQ of another kind: UC, XRC, a native service.
    Unserved(Unserved),
    /// Another message, or none.
    Other,
}

/// Bytes behind the MAD header, by offset.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().unwrap_or([0; N])
    }

    fn byte(&self, at: usize) -> u8 {
        self.bytes::<1>(at)[0]
    }

    fn be16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.bytes(at))
    }

    fn be24(&self, at: usize) -> u32 {
        let [a, b, c] = self.bytes(at);
        u32::from_be_bytes([0, a, b, c])
    }

    fn be32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }

    fn rest(&self, at: usize) -> Vec<u8> {
        self.0.get(at..).unwrap_or_default().to_vec()
    }
}

/// Reads a datagram.
pub fn parse(mad: &[u8; MAD_LEN]) -> Parsed {
    let [base, class, version, method, ..] = mad;
    if (*base, *class, *version, *method) != (1, CLASS, CLASS_VERSION, SEND) {
        return Parsed::Other;
    }
    let kind = u16::from_be_bytes([mad[16], mad[17]]);
    let fields = Fields(mad.get(HEADER..).unwrap_or_default());
    let (local, remote) = (fields.be32(0), fields.be32(4));
    let message = match kind {
        attribute::REQ => return request(&fields),
        attribute::SIDR_REQ => return service_request(&fields),
        attribute::REP => Message::Rep {
            local,
            remote,
            offer: Offer {
                qpn: fields.be24(12),
                psn: fields.be24(20),
                responder_resources: fields.byte(24),
                initiator_depth: fields.byte(25),
                retry_count: 0,
                rnr_retry_count: fields.byte(27) >> 5,
                flow_control: fields.byte(26) & 1 != 0,
                srq: fields.byte(27) & 0x10 != 0,
                guid: fields.bytes(28),
            },
            private: fields.rest(36),
        },
        attribute::RTU => Message::Rtu { local, remote },
        attribute::REJ => Message::Rej {
            local,
            remote,
            of_rep: fields.byte(8) >> 6 == 1,
            reason: fields.be16(10),
            private: fields.rest(84),
        },
        attribute::DREQ => Message::Dreq { local, remote, qpn: fields.be24(8) },
        attribute::DREP => Message::Drep { local, remote },
        attribute::MRA => {
            Message::Mra { local, remote, of: fields.byte(8) >> 6, timeout: fields.byte(9) >> 3 }
        }
        attribute::SIDR_REP => Message::SidrRep {
            id: local,
            status: fields.byte(4),
            qpn: fields.be24(8),
            qkey: fields.be32(20),
            private: fields.rest(96),
        },
        _ => return Parsed::Other,
    };
    Parsed::Message(message)
}

/// The ends that the IP addressing service names at `at`; `port` is of the service ID.
fn ends(fields: &Fields<'_>, at: usize, dest_port: u16) -> Option<Ends> {
    // Version 0, IPv4 or IPv6.
    let (version, family) = (fields.byte(at), fields.byte(at + 1) >> 4);
    let ip = match (version, family) {
        (0, 4) => mapped as fn([u8; 16]) -> Gid,
        (0, 6) => std::convert::identity as fn([u8; 16]) -> Gid,
        _ => return None,
    };
    Some(Ends {
        source: ip(fields.bytes(at + 4)),
        source_port: fields.be16(at + 2),
        dest: ip(fields.bytes(at + 20)),
        dest_port,
    })
}

fn request(fields: &Fields<'_>) -> Parsed {
    let local = fields.be32(0);
    let service = u64::from_be_bytes(fields.bytes(8));
    let transport = fields.byte(43) >> 1 & 3;
    let extended = fields.byte(51) & 7;
    let served = service >> 16 == TCP_SERVICE && transport == 0 && extended == 0;
    let (Some(ends), true) = (ends(fields, 140, fields.be16(14)), served) else {
        return Parsed::Unserved(Unserved { local });
    };
    let offer = Offer {
        qpn: fields.be24(32),
        psn: fields.be24(44),
        responder_resources: fields.byte(35),
        initiator_depth: fields.byte(39),
        retry_count: fields.byte(47) & 7,
        rnr_retry_count: fields.byte(50) & 7,
        flow_control: fields.byte(43) & 1 != 0,
        srq: fields.byte(51) & 8 != 0,
        guid: fields.bytes(16),
    };
    let (mtu, private) = (fields.byte(50) >> 4, fields.rest(140 + IP_HEADER));
    Parsed::Message(Message::Req { local, ends, offer, mtu, private })
}

/// Of another service: none that anybody here could answer.
fn service_request(fields: &Fields<'_>) -> Parsed {
    let [a, b, c, d, e, f, _, _] = fields.bytes(8);
    let space = u16::from_be_bytes([e, f]);
    let served = [a, b, c, d] == [0; 4] && DATAGRAM_SERVICES.contains(&space);
    let (Some(ends), true) = (ends(fields, 16, fields.be16(14)), served) else {
        return Parsed::Other;
    };
    let private = fields.rest(16 + IP_HEADER);
    Parsed::Message(Message::SidrReq { id: fields.be32(0), space, ends, private })
}

/// The IPv4 address in the last four of sixteen bytes, as a GID.
fn mapped(bytes: [u8; 16]) -> Gid {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&bytes[12..]);
    gid
}

/// A datagram under construction.
struct Builder {
    mad: [u8; MAD_LEN],
}

impl Builder {
    fn new(attribute: u16, tid: u32, local: u32, remote: u32) -> Self {
        let mut builder = Self { mad: [0; MAD_LEN] };
        builder.mad[..4].copy_from_slice(&[1, CLASS, CLASS_VERSION, SEND]);
        builder.mad[12..16].copy_from_slice(&tid.to_be_bytes());
        builder.mad[16..18].copy_from_slice(&attribute.to_be_bytes());
        builder.put(0, &local.to_be_bytes());
        builder.put(4, &remote.to_be_bytes());
        builder
    }

    /// Puts bytes at an offset behind the header; what does not fit is cut off.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let room = self.mad.get_mut(HEADER + at..).unwrap_or_default();
        for (to, from) in room.iter_mut().zip(bytes) {
            *to = *from;
        }
    }

    fn put24(&mut self, at: usize, value: u32) {
        let [_, bytes @ ..] = value.to_be_bytes();
        self.put(at, &bytes);
    }
}

/// Response timeouts of the connection manager: 4.096 µs · 2^20, some four seconds.
const RESPONSE_TIMEOUT: u8 = 20;
/// Local ACK timeout that is proposed to the guest: 4.096 µs · 2^18, about a second.
const ACK_TIMEOUT: u8 = 18;

/// The datagram of a message; `tid` tells transactions apart.
pub fn build(message: &Message, tid: u32) -> [u8; MAD_LEN] {
    match message {
        Message::Req { local, ends, offer, mtu, private } => {
            let mut to = Builder::new(attribute::REQ, tid, *local, 0);
            let service = TCP_SERVICE << 16 | u64::from(ends.dest_port);
            to.put(8, &service.to_be_bytes());
            to.put(16, &offer.guid);
            to.put24(32, offer.qpn);
            to.put(35, &[offer.responder_resources]);
            to.put(39, &[offer.initiator_depth]);
            to.put(43, &[RESPONSE_TIMEOUT << 3 | u8::from(offer.flow_control)]);
            to.put24(44, offer.psn);
            to.put(47, &[RESPONSE_TIMEOUT << 3 | (offer.retry_count & 7)]);
            to.put(48, &[0xff, 0xff, mtu << 4 | (offer.rnr_retry_count & 7)]);
            to.put(51, &[15 << 4 | u8::from(offer.srq) << 3]);
            // LIDs: permissive, as RoCE has none (drivers/infiniband/core/cm.c, cm_format_req).
            to.put(52, &[0xff; 4]);
            to.put(56, &ends.source);
            to.put(72, &ends.dest);
            to.put(93, &[64, 0, ACK_TIMEOUT << 3]);
            to.put(140, &ip_header(ends));
            to.put(140 + IP_HEADER, private);
            to.mad
        }
        Message::Rep { local, remote, offer, private } => {
            let mut to = Builder::new(attribute::REP, tid, *local, *remote);
            to.put24(12, offer.qpn);
            to.put24(20, offer.psn);
            to.put(24, &[offer.responder_resources, offer.initiator_depth]);
            to.put(26, &[u8::from(offer.flow_control)]);
            to.put(27, &[(offer.rnr_retry_count & 7) << 5 | u8::from(offer.srq) << 4]);
            to.put(28, &offer.guid);
            to.put(36, private);
            to.mad
        }
        Message::Rtu { local, remote } => Builder::new(attribute::RTU, tid, *local, *remote).mad,
        Message::Rej { local, remote, of_rep, reason, private } => {
            let mut to = Builder::new(attribute::REJ, tid, *local, *remote);
            to.put(8, &[u8::from(*of_rep) << 6]);
            to.put(10, &reason.to_be_bytes());
            to.put(84, private);
            to.mad
        }
        Message::Dreq { local, remote, qpn } => {
            let mut to = Builder::new(attribute::DREQ, tid, *local, *remote);
            to.put24(8, *qpn);
            to.mad
        }
        Message::Drep { local, remote } => Builder::new(attribute::DREP, tid, *local, *remote).mad,
        Message::Mra { local, remote, of, timeout } => {
            let mut to = Builder::new(attribute::MRA, tid, *local, *remote);
            to.put(8, &[of << 6, timeout << 3]);
            to.mad
        }
        Message::SidrReq { id, space, ends, private } => {
            let mut to = Builder::new(attribute::SIDR_REQ, tid, *id, 0);
            to.put(4, &[0xff, 0xff]);
            to.put(12, &space.to_be_bytes());
            to.put(14, &ends.dest_port.to_be_bytes());
            to.put(16, &ip_header(ends));
            to.put(16 + IP_HEADER, private);
            to.mad
        }
        Message::SidrRep { id, status, qpn, qkey, private } => {
            let mut to = Builder::new(attribute::SIDR_REP, tid, *id, 0);
            to.put(4, &[*status]);
            to.put24(8, *qpn);
            to.put(20, &qkey.to_be_bytes());
            to.put(96, private);
            to.mad
        }
    }
}

/// What the IP addressing service puts in front of a request's private data.
fn ip_header(ends: &Ends) -> [u8; IP_HEADER] {
    let is_v4 = |gid: &Gid| gid[..10] == [0; 10] && gid[10..12] == [0xff, 0xff];
    let v4 = is_v4(&ends.source) && is_v4(&ends.dest);
    let mut header = [0; IP_HEADER];
    header[1] = if v4 { 0x40 } else { 0x60 };
    header[2..4].copy_from_slice(&ends.source_port.to_be_bytes());
    for (at, gid) in [(4, &ends.source), (20, &ends.dest)] {
        // Of an IPv4 address the last four bytes, behind zeroes.
        let from = if v4 { 12 } else { 0 };
        header[at + from..at + 16].copy_from_slice(&gid[from..]);
    }
    header
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn offer() -> Offer {
        Offer {
            qpn: 0x12_3456,
            psn: 0xab_cdef,
            responder_resources: 5,
            initiator_depth: 6,
            retry_count: 0,
            rnr_retry_count: 7,
            flow_control: true,
            srq: true,
            guid: [1, 2, 3, 4, 5, 6, 7, 8],
        }
    }

    fn gid(host: u8) -> Gid {
        mapped([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, host])
    }

    /// Private data as it comes back: filled up with zeroes.
    fn padded(bytes: &[u8], len: usize) -> Vec<u8> {
        let mut all = bytes.to_vec();
        all.resize(len, 0);
        all
    }

    fn ends() -> Ends {
        Ends { source: gid(1), source_port: 5, dest: gid(2), dest_port: 7471 }
    }

    fn requests() -> Message {
        let ends = ends();
        let offer = Offer { retry_count: 6, ..offer() };
        Message::Req { local: 77, ends, offer, mtu: 3, private: padded(b"hello", 56) }
    }

    #[test]
    fn what_is_written_is_read() {
        let (local, remote) = (1, 0xffff_fffe);
        for message in [
            requests(),
            Message::Rep { local, remote, offer: offer(), private: padded(b"rep", 196) },
            Message::Rtu { local, remote },
            Message::Rej {
                local,
                remote,
                of_rep: true,
                reason: reason::CONSUMER,
                private: padded(b"no", 148),
            },
            Message::Dreq { local, remote, qpn: 0xff_fffe },
            Message::Drep { local, remote },
            Message::Mra { local, remote, of: 1, timeout: 24 },
            Message::SidrReq { id: 7, space: 0x0111, ends: ends(), private: padded(b"who", 180) },
            Message::SidrRep {
                id: 7,
                status: 1,
                qpn: 0x12_3456,
                qkey: 0x0123_4567,
                private: padded(b"me", 136),
            },
        ] {
            assert_eq!(parse(&build(&message, 9)), Parsed::Message(message));
        }
        let six = |last| Gid::from([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        let ends = Ends { source: six(1), source_port: 5, dest: six(2), dest_port: 1 };
        let private = vec![0; 56];
        let message = Message::Req { local, ends, offer: Offer::default(), mtu: 5, private };
        assert_eq!(parse(&build(&message, 9)), Parsed::Message(message));
    }

    /// The places are those of include/rdma/ibta_vol1_c12.h in Linux.
    #[test]
    fn fields_stand_where_linux_has_them() {
        let mad = build(&requests(), 9);
        let body = &mad[HEADER..];
        assert_eq!(mad[..4], [1, 7, 2, 3], "base version, class, class version, method");
        assert_eq!(mad[16..18], [0, 0x10]);
        assert_eq!(body[8..16], [0, 0, 0, 0, 0x01, 0x06, 0x1d, 0x2f], "service ID");
        assert_eq!(body[32..36], [0x12, 0x34, 0x56, 5], "QPN, responder resources");
        assert_eq!(body[44..47], [0xab, 0xcd, 0xef], "starting PSN");
        assert_eq!(body[48..50], [0xff, 0xff], "P_Key");
        assert_eq!(body[56..72], gid(1));
        assert_eq!(body[140..144], [0, 0x40, 0, 5], "IP header: version, family, port");
        assert_eq!(body[156..160], [10, 0, 0, 1]);
        assert_eq!(body[172..176], [10, 0, 0, 2]);
    }

    #[test]
    fn what_is_not_served_is_told_from_what_is_no_message() {
        let good = build(&requests(), 9);
        let change = |at: usize, byte: u8| {
            let mut mad = good;
            mad[at] = byte;
            parse(&mad)
        };
        for at in 0..4 {
            assert_eq!(change(at, 0xee), Parsed::Other, "header byte {at}");
        }
        assert_eq!(change(17, 0x17), Parsed::Other, "SIDR_REQ of RDMA_PS_TCP");
        assert_eq!(change(17, 0x19), Parsed::Other, "LAP");
        let unserved = Parsed::Unserved(Unserved { local: 77 });
        assert_eq!(change(HEADER + 43, 2), unserved, "UC");
        assert_eq!(change(HEADER + 51, 1), unserved, "extended transport");
        assert_eq!(change(HEADER + 8, 1), unserved, "another service");
        assert_eq!(change(HEADER + 13, 0x11), unserved, "RDMA_PS_UDP");
        assert_eq!(change(HEADER + 140, 1), unserved, "another version of the IP header");
        assert_eq!(change(HEADER + 141, 0x50), unserved, "no IP version");
    }

    proptest! {
        #[test]
        fn anything_is_read_and_what_is_read_is_written(
            mut bytes in prop::array::uniform32(any::<[u8; 8]>()),
            kind in 0x10u8..0x1b
        ) {
            bytes[0][..4].copy_from_slice(&[1, CLASS, CLASS_VERSION, SEND]);
            bytes[2][..2].copy_from_slice(&[0, kind]);
            let mad: [u8; MAD_LEN] = bytes.concat().try_into().unwrap();
            if let Parsed::Message(message) = parse(&mad) {
                prop_assert_eq!(parse(&build(&message, 0)), Parsed::Message(message));
            }
        }
    }
}
