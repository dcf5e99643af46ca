//! `vrdma-check` (tests/guest-programs) as a virtual guest speaks it: the same exchange over TCP,
//! the same patterns, every byte looked at.
//!
//! The C program on plain rxe is a third-party host; two virtual guests can speak it with each
//! other as well. Structures on the wire are those of `vrdma-check.c`, in the byte order of the
//! machine. Of its operations we know WRITE, READ and SEND, as client and as server.

mod image;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use self::image::{Layout, SHAPES, layout, mix};
use crate::control::Mr;
use crate::qp::{Attr, Path, QpSpec, SendWr};
use crate::spec::{qpt, status};
use crate::world::{End, Node};

/// Lengths at which implementations break, as far as [`Terms::most`] goes.
const LENGTHS: [u32; 25] = [
    0, 1, 3, 7, 8, 63, 64, 65, 255, 1023, 1024, 1025, 2049, 4095, 4096, 4097, 8191, 12_289, 65_535,
    65_536, 65_537, 262_145, 1_048_575, 1_048_576, 1_048_577,
];
/// Elements of a work request.
const ELEMENTS: u16 = 4;
/// Work requests under way in a stream: perftest's own depth.
const DEPTH: u32 = 128;
const PSN: u32 = 0x00_4321;
const PATIENCE: Duration = Duration::from_secs(120);

/// An operation; the numbers are those of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[allow(missing_docs)]
pub enum Op {
    Write = 0,
    Read = 2,
    Send = 3,
}

/// What one end needs to know beside the other's address.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// The address that the peer is told: ours as the peer must name it.
    pub tell: IpAddr,
    /// How we name the peer, if not by the address that it tells.
    pub call: Option<IpAddr>,
    /// The longest message.
    pub most: u32,
}

/// What was moved and verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Messages.
    pub messages: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// The GID of an address.
pub fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// `struct peer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Peer {
    qpn: u32,
    psn: u32,
    rkey: u32,
    mtu: u32,
    max_sge: u32,
    addr: u64,
    gid: [u8; 16],
}

impl Peer {
    const BYTES: usize = 48;

    fn bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (n, word) in [self.qpn, self.psn, self.rkey, self.mtu, self.max_sge].iter().enumerate()
        {
            bytes[4 * n..4 * n + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes[24..32].copy_from_slice(&self.addr.to_ne_bytes());
        bytes[32..].copy_from_slice(&self.gid);
        bytes
    }

    fn parse(bytes: &[u8; Self::BYTES]) -> Self {
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[32..]);
        let [qpn, psn, rkey, mtu, max_sge] = std::array::from_fn(|n| word(bytes, 4 * n));
        Self { qpn, psn, rkey, mtu, max_sge, addr: long(bytes, 24), gid }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// `struct step`.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    end: bool,
    op: u32,
    len: u32,
    shape: u32,
    seed: u64,
}

impl Step {
    const BYTES: usize = 32;

    fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [u32::from(self.end), self.op, self.len, self.shape];
        for (n, word) in words.iter().enumerate() {
            bytes[4 * n..4 * n + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes[24..].copy_from_slice(&self.seed.to_ne_bytes());
        bytes
    }

    fn parse(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            end: word(bytes, 0) == 1,
            op: word(bytes, 4),
            len: word(bytes, 8),
            shape: word(bytes, 12),
            seed: long(bytes, 24),
        }
    }

    /// Where the server's memory takes or gives the message: one piece for RDMA, scattered for
    /// receives.
    fn there(&self, pieces: u32) -> Layout {
        let shape = if self.op == Op::Send as u32 { (self.shape + 1) % SHAPES } else { 0 };
        layout(self.len, shape, self.seed.wrapping_add(7), pieces)
    }
}

/// A conversation: the connection, and what both sides know.
#[derive(Debug)]
struct Talk {
    stream: TcpStream,
    node: Node,
    region: Mr,
    terms: Terms,
}

/// A talk's queue pair, connected.
#[derive(Debug)]
struct Link {
    end: End,
    remote: Peer,
    pieces: u32,
}

impl Talk {
    fn new(stream: TcpStream, node: &Node, terms: Terms, most: u32) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("a TCP socket");
        let region = node.mr(image::region_len(most));
        Self { stream, node: node.clone(), region, terms }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the other side is gone");
    }

    fn get<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("the other side is gone, or silent");
        bytes
    }

    fn put_bool(&mut self, ok: bool) {
        self.put(&u32::from(ok).to_ne_bytes());
    }

    fn get_bool(&mut self) -> bool {
        self.get::<4>() == 1u32.to_ne_bytes()
    }

    /// A new queue pair, told to the peer and connected to its.
    fn connect(&mut self) -> Link {
        const MTU: u32 = 5;
        let spec = QpSpec {
            sq: DEPTH,
            send_sge: ELEMENTS,
            recv_sge: ELEMENTS,
            inline: 0,
            ..QpSpec::new(qpt::RC)
        };
        let path = Path { min_rnr_timer: 12, timeout: 20, ..Path::default() };
        let end = self.node.end(&spec);
        end.qp.to_init(&path).expect("INIT");
        let own = Peer {
            qpn: end.qp.qpn,
            psn: PSN,
            rkey: self.region.rkey,
            mtu: MTU,
            max_sge: ELEMENTS.into(),
            addr: self.region.addr(0),
            gid: gid_of(self.terms.tell),
        };
        self.put(&own.bytes());
        let remote = Peer::parse(&self.get());
        let gid = self.terms.call.map_or(remote.gid, gid_of);
        let mut rtr = end.qp.rtr_attr((gid, remote.qpn), &path);
        rtr.rq_psn = remote.psn;
        rtr.path_mtu = remote.mtu.min(MTU) as u8;
        end.qp.modify(&rtr).expect("RTR");
        end.qp.modify(&Attr { sq_psn: PSN, ..end.qp.rts_attr(&path) }).expect("RTS");
        self.put_bool(true);
        assert!(self.get_bool(), "the peer cannot connect");
        Link { end, pieces: remote.max_sge.min(ELEMENTS.into()), remote }
    }

    /// The region as it is before a step, and as it shall be: with a message in `layout`.
    fn prepare(&mut self, layout: &Layout, seeds: (u64, u64)) -> Vec<u8> {
        let mut image = vec![0; layout.span as usize];
        image::background(&mut image, seeds.0);
        self.region.view().write(0, &image);
        layout.place(&mut image, seeds.1);
        image
    }

    fn look(&self, image: &[u8], what: &Step) {
        let found = self.region.view().vec(0, image.len() as u64);
        let differs = found.iter().zip(image).position(|(found, wanted)| found != wanted);
        assert_eq!(differs, None, "the first wrong byte of {what:?}");
    }

    fn client_step(&mut self, link: &mut Link, step: &Step) {
        let (here, there) =
            (layout(step.len, step.shape, step.seed, link.pieces), step.there(link.pieces));
        let image = self.prepare(&here, (step.seed, step.seed));
        let reads = step.op == Op::Read as u32;
        if !reads {
            self.region.view().write(0, &image);
        }
        self.put(&step.bytes());
        assert!(self.get_bool(), "the peer is not ready for {step:?}");
        let sges: Vec<_> =
            here.pieces.iter().map(|&(at, len)| self.region.sge(at.into(), len)).collect();
        let at = (link.remote.addr + u64::from(there.first()), link.remote.rkey);
        let request = match step.op {
            op if op == Op::Send as u32 => SendWr::send(step.seed, &sges),
            _ if reads => SendWr::read(step.seed, &sges, at.0, at.1),
            _ => SendWr::write(step.seed, &sges, at.0, at.1),
        };
        link.end.qp.post_send(&request);
        let cqe = link.end.scq.wait(PATIENCE).expect("a completion");
        assert_eq!((cqe.status, cqe.wr_id), (status::SUCCESS, step.seed), "{step:?}: {cqe:?}");
        self.look(&image, step);
        self.put_bool(true);
        assert!(self.get_bool(), "the peer found wrong bytes after {step:?}");
    }

    fn server_step(&mut self, link: &mut Link, step: &Step) {
        let here = step.there(link.pieces);
        let image = self.prepare(&here, (step.seed.wrapping_add(1), step.seed));
        let (sends, reads) = (step.op == Op::Send as u32, step.op == Op::Read as u32);
        assert!(
            sends || reads || step.op == Op::Write as u32,
            "not an operation of ours: {step:?}"
        );
        if reads {
            self.region.view().write(0, &image);
        }
        if sends {
            let sges: Vec<_> =
                here.pieces.iter().map(|&(at, len)| self.region.sge(at.into(), len)).collect();
            link.end.qp.post_recv(step.seed, &sges);
        }
        self.put_bool(true);
        assert!(self.get_bool(), "the peer could not do {step:?}");
        if sends {
            let cqe = link.end.rcq.wait(PATIENCE).expect("a message");
            let seen = (cqe.status, cqe.wr_id, cqe.byte_len);
            assert_eq!(seen, (status::SUCCESS, step.seed, step.len), "{step:?}: {cqe:?}");
        }
        self.look(&image, step);
        self.put_bool(true);
    }
}

/// `struct plan`.
fn plan(ops: &[Op], most: u32) -> [u8; 36] {
    let mut bytes = [0; 36];
    let words = [0, most, 0, ops.len() as u32].into_iter().chain(ops.iter().map(|op| *op as u32));
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

fn call(server: &str, node: &Node, terms: Terms, ops: &[Op]) -> Talk {
    let mut stream = TcpStream::connect(server).expect("the server listens");
    stream.write_all(&plan(ops, terms.most)).expect("the server takes our plan");
    Talk::new(stream, node, terms, terms.most)
}

/// Operations in all lengths and shapes, as the client; what each moved.
pub fn client(server: &str, node: &Node, terms: Terms, ops: &[Op]) -> Vec<Moved> {
    let mut talk = call(server, node, terms, ops);
    ops.iter().map(|op| talk.operation(*op)).collect()
}

impl Talk {
    fn operation(&mut self, op: Op) -> Moved {
        let (op, most) = (op as u32, self.terms.most);
        let mut link = self.connect();
        let mut step = Step { op, seed: mix(u64::from(op) + 1), ..Step::default() };
        let mut moved = Moved { messages: 0, bytes: 0 };
        for len in LENGTHS.into_iter().filter(|len| *len <= most) {
            for shape in 0..SHAPES {
                step = Step { len, shape, seed: mix(step.seed.wrapping_add(shape.into())), ..step };
                self.client_step(&mut link, &step);
                moved.messages += 1;
                moved.bytes += u64::from(len);
            }
        }
        self.put(&Step { end: true, ..step }.bytes());
        moved
    }
}

/// `count` writes of `size` bytes, a burst of them under way at a time as perftest has them; the
/// time that they took. The server is passive.
pub fn stream(server: &str, node: &Node, terms: Terms, (size, count): (u32, u32)) -> Duration {
    let mut talk = call(server, node, terms, &[Op::Write]);
    let mut link = talk.connect();
    assert!(size <= terms.most, "the server has no such memory");
    let request = |n: u32| {
        let local = talk.region.sge(0, size);
        SendWr::write(n.into(), &[local], link.remote.addr, link.remote.rkey)
    };
    let (mut posted, mut done) = (0, 0);
    let start = Instant::now();
    let mut progress = start;
    while done < count {
        let room = (DEPTH - (posted - done)).min(count - posted);
        for n in 0..room {
            link.end.qp.queue_send(&request(posted + n));
        }
        if room > 0 {
            posted += room;
            link.end.qp.ring_sq();
        }
        while let Some(cqe) = link.end.scq.poll() {
            assert_eq!(cqe.status, status::SUCCESS, "{cqe:?}");
            done += 1;
            progress = Instant::now();
        }
        assert!(progress.elapsed() < PATIENCE, "completions stopped at {done} of {count}");
        std::thread::yield_now();
    }
    let took = start.elapsed();
    talk.put(&Step { end: true, ..Step::default() }.bytes());
    took
}

/// Serves one client, and returns what it moved.
pub fn serve(listener: &TcpListener, node: &Node, terms: Terms) -> Moved {
    let (mut stream, _) = listener.accept().expect("a client");
    let mut plan = [0; 36];
    stream.read_exact(&mut plan).expect("a plan");
    let most = word(&plan, 4);
    assert_eq!((word(&plan, 0), word(&plan, 8)), (0, 0), "neither events nor threads are ours");
    let mut talk = Talk::new(stream, node, terms, most);
    let mut moved = Moved { messages: 0, bytes: 0 };
    for _ in 0..word(&plan, 12) {
        let mut link = talk.connect();
        loop {
            let step = Step::parse(&talk.get());
            if step.end {
                break;
            }
            talk.server_step(&mut link, &step);
            moved.messages += 1;
            moved.bytes += u64::from(step.len);
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_form_of_the_program_in_c() {
        let gid = gid_of([10, 0, 0, 1].into());
        let peer = Peer { qpn: 1, psn: 2, rkey: 3, mtu: 4, max_sge: 5, addr: 6 << 40, gid };
        let bytes = peer.bytes();
        assert_eq!(Peer::parse(&bytes), peer);
        assert_eq!((word(&bytes, 16), long(&bytes, 24), &bytes[42..]), (5, 6 << 40, &gid[10..]));
        let step = Step { end: true, op: 3, len: 9, shape: 2, seed: 77 };
        assert_eq!(format!("{:?}", Step::parse(&step.bytes())), format!("{step:?}"));
        assert_eq!(word(&plan(&[Op::Send], 65_537), 16), 3);
    }
}
