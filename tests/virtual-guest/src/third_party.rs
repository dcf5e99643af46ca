//! The conversation that the pingpong examples of rdma-core have over TCP before they use a queue
//! pair.
//!
//! `ibv_rc_pingpong` on any RDMA device is a third-party host: it shares neither code nor host with
//! the NIC under test. Both ends tell each other a line of fixed length, `lid:qpn:psn:gid` in
//! hexadecimal with its final zero; the client speaks first, and says when it is ready.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::control::Mr;
use crate::qp::{Attr, Path, SendWr};
use crate::spec::{attr, qps, status};
use crate::world::End;

/// The packet sequence number that we begin with.
const PSN: u32 = 0x00_1234;
/// `0000:000000:000000:` and 32 digits and a zero.
const LINE: usize = 52;
/// How long a peer may be silent.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a pingpong needs to know of the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// Its queue pair.
    pub qpn: u32,
    /// Its first packet sequence number.
    pub psn: u32,
    /// Its address.
    pub gid: [u8; 16],
}

impl Destination {
    fn line(&self) -> [u8; LINE] {
        let gid: String = self.gid.iter().map(|b| format!("{b:02x}")).collect();
        let text = format!("{:04x}:{:06x}:{:06x}:{gid}\0", 0, self.qpn, self.psn);
        text.into_bytes().try_into().expect("the format has a fixed length")
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(line).ok()?.trim_end_matches('\0');
        let mut fields = text.split(':').skip(1);
        let mut number = || u32::from_str_radix(fields.next()?, 16).ok();
        let (qpn, psn) = (number()?, number()?);
        let digits = fields.next()?;
        let mut gid = [0; 16];
        for (byte, at) in gid.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
        }
        Some(Self { qpn, psn, gid })
    }
}

/// Which side we are.
#[derive(Debug, Clone)]
pub enum Side {
    /// Listen on this TCP port.
    Server(u16),
    /// Connect to this address.
    Client(String),
}

/// What is played.
#[derive(Debug, Clone, Copy)]
pub struct Game {
    /// Bytes of a message.
    pub size: u32,
    /// Messages each way.
    pub iterations: u32,
    /// Path MTU, in verbs' encoding; the examples use 1024 bytes (3).
    pub mtu: u8,
}

/// How the examples connect.
fn path() -> Path {
    Path { min_rnr_timer: 12, rd_atomic: 1, ..Path::default() }
}

fn connect(end: &End, peer: &Destination, mtu: u8) {
    let path = path();
    let mut rtr = end.qp.rtr_attr((peer.gid, peer.qpn), &path);
    rtr.rq_psn = peer.psn;
    rtr.path_mtu = mtu;
    end.qp.modify(&rtr).expect("RTR");
    let rts = Attr { sq_psn: PSN, ..end.qp.rts_attr(&path) };
    assert!(rts.mask & attr::SQ_PSN != 0 && rts.state == qps::RTS);
    end.qp.modify(&rts).expect("RTS");
}

/// Tells the other side of our queue pair, learns of theirs, and connects.
fn meet(end: &End, side: &Side, mtu: u8) -> TcpStream {
    let ours = Destination { qpn: end.qp.qpn, psn: PSN, gid: end.node.gid };
    let mut line = [0; LINE];
    match side {
        Side::Client(address) => {
            let mut stream = TcpStream::connect(address).expect("the peer listens");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            stream.write_all(&ours.line()).expect("the peer takes our line");
            stream.read_exact(&mut line).expect("the peer's line");
            connect(end, &Destination::parse(&line).expect("a line of the examples"), mtu);
            stream.write_all(b"done\0").expect("the peer waits for us");
            stream
        }
        Side::Server(port) => {
            let listener = TcpListener::bind(("0.0.0.0", *port)).expect("a free port");
            println!("listening on port {port}");
            let (mut stream, _) = listener.accept().expect("a peer");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            stream.read_exact(&mut line).expect("the peer's line");
            connect(end, &Destination::parse(&line).expect("a line of the examples"), mtu);
            stream.write_all(&ours.line()).expect("the peer takes our line");
            stream.read_exact(&mut line[..5]).expect("the peer is ready");
            stream
        }
    }
}

/// Plays a game and returns the time that it took. The example checks what we send (`-c`): the
/// first byte of each of its pages is zero.
pub fn rc_pingpong(end: &mut End, side: &Side, game: Game) -> Duration {
    const DEPTH: u32 = 32;
    let receive: Mr = end.node.mr(u64::from(game.size));
    let send = end.node.mr(u64::from(game.size));
    end.qp.to_init(&path()).expect("INIT");
    // Not before INIT, which is when a queue pair begins to take them.
    for n in 0..DEPTH.min(game.iterations) {
        end.qp.post_recv(u64::from(n), &[receive.sge(0, game.size)]);
    }
    let _held = meet(end, side, game.mtu);
    let start = Instant::now();
    let serving = matches!(side, Side::Server(_));
    let mut posted = DEPTH.min(game.iterations);
    for n in 0..game.iterations {
        if !serving {
            play(end, &send, game.size, n);
        }
        let cqe = end.rcq.wait(PATIENCE).expect("a message of the peer");
        assert_eq!((cqe.status, cqe.byte_len), (status::SUCCESS, game.size), "{cqe:?}");
        if posted < game.iterations {
            end.qp.post_recv(u64::from(posted), &[receive.sge(0, game.size)]);
            posted += 1;
        }
        if serving {
            play(end, &send, game.size, n);
        }
    }
    start.elapsed()
}

fn play(end: &mut End, send: &Mr, size: u32, n: u32) {
    end.qp.post_send(&SendWr::send(u64::from(n), &[send.sge(0, size)]));
    let cqe = end.scq.wait(PATIENCE).expect("the completion of a send");
    assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_examples() {
        let there = Destination { qpn: 0x11, psn: 0xabcdef, gid: crate::world::ipv4_gid(9, 2) };
        let line = there.line();
        assert_eq!(&line[..], b"0000:000011:abcdef:00000000000000000000ffff0a000902\0");
        assert_eq!(Destination::parse(&line), Some(there));
        assert_eq!(Destination::parse(b"nonsense"), None);
    }
}
