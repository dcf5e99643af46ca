//! The conversation that rdma_cm programs have by the connection manager (IBTA 12.6, annex A11)
//! before they use a queue pair, and what rdma-core's `ucmatose` plays then: the server sends its
//! messages, the client answers with as many, the server hangs up.
//!
//! The datagrams are written and read here by the tables of IBTA 12.6 and not by the code under
//! test.

use std::net::Ipv4Addr;
use std::time::Duration;

use crate::qp::{Attr, Av, Path, SendWr};
use crate::spec::{GSI_QKEY, status};
use crate::world::End;

const MAD: usize = 256;
const MAD_BYTES: u64 = 256;
const GRH: u64 = 40;
/// Where messages begin behind the MAD header.
const BODY: usize = 24;
/// What the guest chooses: other than what the host does.
const PSN: u32 = 0x00_4321;
const OUR_ID: u32 = 0x0102_0304;
/// How long a peer may be silent.
const PATIENCE: Duration = Duration::from_secs(60);

const REQ: u8 = 0x10;
const REP: u8 = 0x13;
const RTU: u8 = 0x14;
const DREQ: u8 = 0x15;
const DREP: u8 = 0x16;

/// Which side we are.
#[derive(Debug, Clone, Copy)]
pub enum CmSide {
    /// Whoever asks for a connection at this address is served.
    Server(Ipv4Addr),
    /// Connect to this address and port.
    Client(Ipv4Addr, u16),
}

/// A guest's connection manager: QP 1, and the peer.
struct Manager {
    gsi: End,
    ah: u32,
    receives: crate::control::Mr,
    data: crate::control::Mr,
}

fn gid_of(address: Ipv4Addr) -> [u8; 16] {
    address.to_ipv6_mapped().octets()
}

fn be32(mad: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(mad[BODY + at..BODY + at + 4].try_into().expect("four bytes"))
}

fn be24(mad: &[u8], at: usize) -> u32 {
    be32(mad, at) >> 8
}

/// A message with the communication IDs of both sides.
fn message(kind: u8, local: u32, remote: u32) -> Vec<u8> {
    let mut mad = vec![0; MAD];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[15] = 1;
    mad[17] = kind;
    put(&mut mad, 0, &local.to_be_bytes());
    put(&mut mad, 4, &remote.to_be_bytes());
    mad
}

fn put(mad: &mut [u8], at: usize, bytes: &[u8]) {
    mad[BODY + at..BODY + at + bytes.len()].copy_from_slice(bytes);
}

impl Manager {
    fn new(mut gsi: End, peer: [u8; 16]) -> Self {
        const DEPTH: u32 = 16;
        let ah = gsi.node.ctx.create_ah(gsi.node.pdn, &Av::to(peer)).expect("AH_CREATE");
        let receives = gsi.node.mr(u64::from(DEPTH) * 512);
        let data = gsi.node.mr(4096);
        for n in 0..DEPTH {
            gsi.qp.post_recv(u64::from(n), &[receives.sge(u64::from(n) * 512, 512)]);
        }
        Self { gsi, ah, receives, data }
    }

    fn say(&mut self, mad: &[u8]) {
        self.data.view().write(0, mad);
        let len = u32::try_from(MAD).expect("a small number");
        let sge = self.data.sge(0, len);
        self.gsi.run_ok(&SendWr::datagram(1, &[sge], self.ah, 1, GSI_QKEY));
    }

    /// The next message of one of these kinds; others are told and forgotten. While there is none,
    /// `again` is said once more.
    fn hear(&mut self, kinds: &[u8], again: Option<&[u8]>) -> Vec<u8> {
        for _ in 0..30 {
            let Some(cqe) = self.gsi.rcq.wait(PATIENCE / 30) else {
                if let Some(mad) = again {
                    self.say(mad);
                }
                continue;
            };
            assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
            let slot = cqe.wr_id * 512;
            let mad = self.receives.view().vec(slot + GRH, MAD_BYTES);
            self.gsi.qp.post_recv(cqe.wr_id, &[self.receives.sge(slot, 512)]);
            if kinds.contains(&mad[17]) {
                return mad;
            }
            println!(
                "message {:#x} of the connection manager, reason {}",
                mad[17],
                be32(&mad, 8) & 0xffff
            );
        }
        panic!("the peer's connection manager is silent: none of {kinds:x?}");
    }
}

/// What a side tells of its queue pair.
fn offer(mad: &mut [u8], qpn: u32, psn: u32, at: [usize; 2]) {
    put(mad, at[0], &qpn.to_be_bytes()[1..]);
    put(mad, at[1], &psn.to_be_bytes()[1..]);
}

fn connect(end: &End, peer: [u8; 16], qpn: u32, psn: u32) {
    let path = Path { min_rnr_timer: 12, rd_atomic: 1, ..Path::default() };
    let mut rtr = end.qp.rtr_attr((peer, qpn), &path);
    rtr.rq_psn = PSN;
    rtr.path_mtu = 3;
    end.qp.modify(&rtr).expect("RTR");
    end.qp.modify(&Attr { sq_psn: psn, ..end.qp.rts_attr(&path) }).expect("RTS");
}

/// The REQ of a connection to a port of RDMA_PS_TCP.
fn request(end: &End, peer: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut req = message(REQ, OUR_ID, 0);
    let [high, low] = port.to_be_bytes();
    put(&mut req, 8, &[0, 0, 0, 0, 1, 6, high, low]);
    offer(&mut req, end.qp.qpn, PSN, [32, 44]);
    // One READ each way; response timeouts of four seconds, five retries.
    put(&mut req, 35, &[1]);
    put(&mut req, 39, &[1]);
    put(&mut req, 43, &[20 << 3]);
    put(&mut req, 47, &[20 << 3 | 5, 0xff, 0xff, 3 << 4 | 7, 15 << 4]);
    put(&mut req, 52, &[0xff; 4]);
    put(&mut req, 56, &end.node.gid);
    put(&mut req, 72, &gid_of(peer));
    put(&mut req, 93, &[64, 0, 18 << 3]);
    // The IP addressing service's header: IPv4, the source's port, both addresses.
    put(&mut req, 141, &[0x40, 0x30, 0x39]);
    put(&mut req, 156, &end.node.gid[12..]);
    put(&mut req, 172, &peer.octets());
    req
}

/// Plays `ucmatose` with `count` messages of `size` bytes each way, as many as the receive queue
/// takes at most.
pub fn cmatose(end: &mut End, side: CmSide, count: u32, size: u32) {
    let receive = end.node.mr(u64::from(size));
    end.qp.to_init(&Path::default()).expect("INIT");
    for n in 0..count {
        end.qp.post_recv(u64::from(n), &[receive.sge(0, size)]);
    }
    let (CmSide::Server(peer) | CmSide::Client(peer, _)) = side;
    let mut manager = Manager::new(end.node.gsi(), gid_of(peer));
    let their_id = match side {
        CmSide::Client(_, port) => {
            let req = request(end, peer, port);
            manager.say(&req);
            let rep = manager.hear(&[REP], Some(&req));
            assert_eq!(be32(&rep, 4), OUR_ID);
            connect(end, gid_of(peer), be24(&rep, 12), be24(&rep, 20));
            manager.say(&message(RTU, OUR_ID, be32(&rep, 0)));
            take(end, count, size);
            give(end, count, size);
            be32(&rep, 0)
        }
        CmSide::Server(_) => {
            println!("waiting for a connection");
            let req = manager.hear(&[REQ], None);
            assert_eq!(req[BODY + 72..BODY + 88], end.node.gid, "it is for this guest's address");
            connect(end, gid_of(peer), be24(&req, 32), be24(&req, 44));
            let mut rep = message(REP, OUR_ID, be32(&req, 0));
            offer(&mut rep, end.qp.qpn, PSN, [12, 20]);
            put(&mut rep, 24, &[1, 1]);
            put(&mut rep, 27, &[7 << 5]);
            manager.say(&rep);
            manager.hear(&[RTU], Some(&rep));
            give(end, count, size);
            take(end, count, size);
            be32(&req, 0)
        }
    };
    let mut dreq = message(DREQ, OUR_ID, their_id);
    put(&mut dreq, 8, &[0; 3]);
    if matches!(side, CmSide::Server(_)) {
        manager.say(&dreq);
        manager.hear(&[DREP], Some(&dreq));
    } else {
        // The server hangs up.
        manager.hear(&[DREQ], None);
        manager.say(&message(DREP, OUR_ID, their_id));
    }
    println!("{count} messages of {size} bytes each way");
}

fn take(end: &mut End, count: u32, size: u32) {
    for _ in 0..count {
        let cqe = end.rcq.wait(PATIENCE).expect("a message of the peer");
        assert_eq!((cqe.status, cqe.byte_len), (status::SUCCESS, size), "{cqe:?}");
    }
}

fn give(end: &mut End, count: u32, size: u32) {
    let send = end.node.mr(u64::from(size));
    for n in 0..count {
        end.run_ok(&SendWr::send(u64::from(n), &[send.sge(0, size)]));
    }
}
