//! Random operations against a model that knows only what verbs promise: every posted request completes once and in order,
//! successes carry the right bytes, and nothing a guest does stops another pair's traffic.

use proptest::prelude::*;
use virtio_rdma_abi::{opcode, qps, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::driver::{Guest, Qp, World, state_attr, wqe};

#[derive(Clone, Debug)]
enum Op {
    Send { len: u16 },
    Write { len: u16, good: bool },
    Read { len: u16 },
    Receive { len: u16 },
    Advance { micros: u32 },
    PeerError,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => any::<u16>().prop_map(|len| Op::Send { len }),
        4 => (any::<u16>(), prop::bool::weighted(0.95)).prop_map(|(len, good)| Op::Write { len, good }),
        3 => any::<u16>().prop_map(|len| Op::Read { len }),
        6 => any::<u16>().prop_map(|len| Op::Receive { len }),
        3 => (0u32..3_000).prop_map(|micros| Op::Advance { micros }),
        1 => Just(Op::PeerError),
        1 => Just(Op::Restart),
    ]
}

struct Side {
    guest: Guest,
    qp: Qp,
    /// Requests posted and not completed, oldest first, per queue.
    sends: Vec<u64>,
    receives: Vec<u64>,
    buffer: u64,
}

struct Model {
    world: World,
    a: Side,
    b: Side,
    next: u64,
    /// An error has been seen on the connection since the last restart.
    broken: bool,
}

impl Model {
    fn new() -> Self {
        let mut world = World::new();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (qa, qb) = world.pair(&mut a, &mut b, qpt::RC);
        let side = |mut guest: Guest, qp| {
            let buffer = guest.pattern(65536, 9).0;
            Side { guest, qp, sends: Vec::new(), receives: Vec::new(), buffer }
        };
        Self { world, a: side(a, qa), b: side(b, qb), next: 1, broken: false }
    }

    fn apply(&mut self, op: &Op) {
        self.next += 1;
        let id = self.next;
        match *op {
            Op::Send { len } if self.a.sends.len() < 16 => self.post(opcode::SEND, id, len, true),
            Op::Write { len, good } if self.a.sends.len() < 16 => {
                self.post(opcode::RDMA_WRITE, id, len, good);
            }
            Op::Read { len } if self.a.sends.len() < 16 => {
                self.post(opcode::RDMA_READ, id, len, true);
            }
            Op::Receive { len } if self.b.receives.len() < 16 => {
                let sge = self.b.guest.sge(self.b.buffer, u32::from(len));
                self.b.guest.post_receive(&mut self.b.qp, id, &[sge]);
                self.b.receives.push(id);
            }
            Op::Advance { micros } => self.world.advance(u64::from(micros) * 1000),
            Op::PeerError => {
                self.world.modify(&self.b.guest, &self.b.qp, state_attr(qps::ERR)).unwrap();
                self.broken = true;
            }
            Op::Restart => self.restart(),
            _ => {}
        }
        self.world.settle();
        self.check();
    }

    fn post(&mut self, code: u8, id: u64, len: u16, good: bool) {
        let mut request = wqe(code, send_flags::SIGNALED, id);
        let key = if good { self.b.guest.key } else { !self.b.guest.key };
        (request.remote_addr, request.rkey) = (U64::new(self.b.buffer), U32::new(key));
        let sge = self.a.guest.sge(self.a.buffer, u32::from(len));
        self.a.guest.post_send(&mut self.a.qp, request, &[sge]);
        self.a.sends.push(id);
    }

    fn restart(&mut self) {
        for side in [&mut self.a, &mut self.b] {
            self.world.modify(&side.guest, &side.qp, state_attr(qps::RESET)).unwrap();
            side.qp.posted = [0; 2];
            side.guest.raw_reset(&side.qp);
            side.sends.clear();
            side.receives.clear();
        }
        self.world.settle();
        let peers = [(self.b.qp.qpn, self.b.guest.gid), (self.a.qp.qpn, self.a.guest.gid)];
        for (side, peer) in [&self.a, &self.b].into_iter().zip(peers) {
            self.world.connect(&side.guest, &side.qp, qpt::RC, peer);
        }
        self.broken = false;
    }

    fn check(&mut self) {
        for side in [&mut self.a, &mut self.b] {
            for cqe in side.guest.drain(&mut side.qp.cq) {
                let receive = cqe.flags.get() & virtio_rdma_abi::cqe_flags::RECV != 0;
                let expected = if receive { &mut side.receives } else { &mut side.sends };
                assert!(!expected.is_empty(), "a completion for nothing: {cqe:?}");
                assert_eq!(cqe.wr_id.get(), expected.remove(0), "completions are in posting order");
                assert!(
                    !self.broken || cqe.status != wc_status::SUCCESS || !receive,
                    "success after an error"
                );
                self.broken |= cqe.status != wc_status::SUCCESS && receive;
            }
        }
    }

    /// When time has run long enough, nothing may be left on a broken connection's sender.
    fn finish(&mut self) {
        self.world.advance(2_000_000_000);
        self.check();
        assert!(
            self.a.sends.is_empty(),
            "requests neither completed nor flushed: {:?}",
            self.a.sends
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn every_request_completes_once_and_in_order(ops in prop::collection::vec(op(), 1..60)) {
        let mut model = Model::new();
        for op in &ops {
            model.apply(op);
        }
        model.finish();
    }
}
