//! More of what honest guests do too: bytes, timers, events, kicks, flushes.

use std::sync::atomic::Ordering;

use super::{Attack, Ground, Pump, Pumps, Strike, alone, breathe, rc, take_events, with_ram};
use crate::guest::GuestConfig;
use crate::qp::{Path, Qp, QpSpec, SendWr};
use crate::rings::Cq;
use crate::spec::{ARM_ANY, PAGE, Put, Take, access, cmd, qpt, wr};
use crate::world::{End, Node};

pub(super) const ALL: &[Attack] = &[
    Attack::new("writes_1m", "16 QPs, 16 writes of 1 MiB each", large),
    Attack::new("writes_1m_by_8", "the same by eight NICs", large).by(8).within(48),
    Attack::new("small_writes", "64 QPs whose rings are full of writes of 8 bytes", small)
        .within(24),
    Attack::new("fast_registrations", "16 QPs that register 512 pages by each request", fastreg)
        .by_monitors(),
    Attack::new("flush", "rings of 16 384 requests that go to ERR", flush),
    Attack::new("rnr_timers", "1024 senders without a receiver, each again after 10 us", rnr)
        .within(24),
    Attack::new("ack_timers", "256 senders to nobody, each again after 8 us", silence).within(24),
    Attack::new("arms", "256 CQs, armed and completed again and again", arms)
        .by_monitors()
        .within(24),
    Attack::new("kicks", "every kick descriptor, written to without end", kicks),
    Attack::new("doorbells", "summary bytes that say of 960 queues that they changed", doorbells)
        .within(24),
];

fn large(ground: &Ground<'_>) -> Box<dyn Strike> {
    let mut all = Vec::new();
    for node in ground.villains(&with_ram(48)) {
        let source = node.mr(1 << 20);
        for _ in 0..16 {
            // Each to a place of its own, which no cache has.
            let target = node.mr(1 << 20);
            let end = alone(&node, &rc(16, 1), 64);
            all.push(Pump::new(end, 16, |i| {
                SendWr::write(u64::from(i), &[source.sge(0, 1 << 20)], target.addr(0), target.rkey)
            }));
        }
    }
    Box::new(Pumps(all))
}

fn small(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(48));
    let word = node.mr(64);
    let pump = |_| {
        Pump::new(alone(&node, &rc(256, 1), 64), 256, |i| {
            SendWr::write(u64::from(i), &[word.sge(0, 8)], word.addr(8), word.rkey)
        })
    };
    Box::new(Pumps((0..64).map(pump).collect()))
}

fn fastreg(ground: &Ground<'_>) -> Box<dyn Strike> {
    const PAGES: u64 = 512;
    let node = ground.villain(with_ram(32));
    let kernel = node.guest.kernel().expect("the kernel's context");
    let pdn = kernel.create_pd().expect("PD_CREATE");
    let kernel = Node { ctx: kernel, pdn, ..node };
    let list = kernel.guest.ram().alloc(1);
    let page = kernel.guest.ram().alloc(1).gpa(0);
    (0..PAGES).for_each(|n| list.view(0, PAGE).store64(8 * n, page, Ordering::Relaxed));
    let mut pumps = Vec::new();
    for _ in 0..16 {
        let end = alone(&kernel, &rc(64, 1), 64);
        let alloc = Put::new().u32(kernel.pdn).u32(PAGES as u32).done(8);
        let Ok(key) = kernel.ctx.command(cmd::MR_ALLOC, &alloc, 8) else {
            // Not offered: then it is commands that are refused.
            return Box::new(move || drop(kernel.ctx.command(cmd::MR_ALLOC, &alloc, 8)));
        };
        let key = key.u32_at(0);
        pumps.push(Pump::new(end, 64, |i| {
            if i % 2 == 1 {
                return SendWr { imm: key, ..SendWr::new(2, wr::LOCAL_INV, &[]) };
            }
            SendWr {
                rkey: key,
                imm: access::ALL,
                remote_addr: 0,
                arg0: PAGES * PAGE,
                arg1: list.gpa(0) | 12 << 56,
                aux: PAGES as u32,
                ..SendWr::new(1, wr::REG_MR, &[])
            }
        }));
    }
    let mut pumps = Pumps(pumps);
    Box::new(move || {
        let _list = &list;
        pumps.strike();
    })
}

fn flush(ground: &Ground<'_>) -> Box<dyn Strike> {
    let entries = ground.sized(16_384, 1024);
    let node = ground.villain(with_ram(32));
    let mut ends: Vec<End> = (0..4)
        .map(|_| {
            let mut end = node.end_with(&rc(entries, 1), node.cq(2 * entries), node.cq(16));
            let (ring, ..) = end.qp.raw_sq(0);
            // Every entry is a SEND of nothing; what counts is that each one ends.
            for i in 0..entries {
                SendWr::send(u64::from(i), &[]).encode(&ring, u64::from(i) * 64);
            }
            end
        })
        .collect();
    Box::new(move || {
        for end in &mut ends {
            let _state = end.qp.reset(&[]);
            let _state = end.qp.to_init(&Path::default());
            let _state = end.qp.fail();
            end.qp.raw_sq(0).2.ring(entries);
        }
        for end in &mut ends {
            let mut flushed = 0;
            for _ in 0..400 {
                flushed += end.scq.drain();
                if flushed >= entries {
                    break;
                }
                breathe();
            }
        }
    })
}

/// Queue pairs on one pair of CQs, connected to themselves.
fn many(node: &Node, n: usize, sq: u32) -> (Vec<Qp>, Cq) {
    let spec = QpSpec { sq, rq: 4, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
    let cqes = (n as u32 * 2 * sq).next_power_of_two();
    let (scq, rcq) = (node.cq(cqes), node.cq(cqes));
    let mut qps = Vec::new();
    for i in 0..n {
        if i % 400 == 399 {
            node.ctx.add_doorbell_page().expect("DB_PAGE_ADD");
        }
        let qp = Qp::create(&node.ctx, node.pdn, &scq, &rcq, &spec);
        qps.push(qp.expect("QP_CREATE"));
    }
    (qps, scq)
}

/// Senders that ask again and again whether there is a receive.
struct Unready {
    qps: Vec<Qp>,
    scq: Cq,
    waiting: bool,
}

fn rnr(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(32));
    let (qps, scq) = many(&node, ground.sized(1024, 200), 2);
    // Code 1 is 10 us, and seven retries have no end (IBTA 9.7.5.2.8).
    let path = Path { min_rnr_timer: 1, rnr_retry: 7, ..Path::default() };
    for qp in &qps {
        qp.connect((node.gid, qp.qpn), &path).expect("to itself");
    }
    Box::new(Unready { qps, scq, waiting: false })
}

impl Strike for Unready {
    fn strike(&mut self) {
        if !self.waiting {
            self.qps.iter_mut().for_each(|qp| qp.post_send(&SendWr::send(1, &[])));
            self.waiting = true;
        }
        breathe();
    }

    fn rest(&mut self) {
        self.waiting = false;
        self.qps.iter_mut().for_each(|qp| qp.post_recv(1, &[]));
        let mut done = 0;
        for _ in 0..20_000 {
            done += self.scq.drain() as usize;
            if done >= self.qps.len() {
                break;
            }
            breathe();
        }
    }
}

fn silence(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(32));
    let (mut qps, mut scq) = many(&node, ground.sized(256, 64), 2);
    let path = Path { timeout: 1, retry_cnt: 7, ..Path::default() };
    let nobody = (node.gid, 0x00ab_cdef);
    Box::new(move || {
        for qp in &mut qps {
            let _state = qp.reset(&[]);
            if qp.connect(nobody, &path).is_ok() {
                qp.post_send(&SendWr::send(1, &[]));
            }
        }
        scq.drain();
    })
}

fn arms(ground: &Ground<'_>) -> Box<dyn Strike> {
    let config = GuestConfig { queue_size: 256, event_buffers: 250, ..with_ram(48) };
    let node = ground.villain(config);
    let word = node.mr(64);
    let count = ground.sized(256, 64);
    let mut ends: Vec<End> = (0..count).map(|_| alone(&node, &rc(16, 1), 64)).collect();
    let write = SendWr::write(1, &[word.sge(0, 8)], word.addr(8), word.rkey);
    Box::new(move || {
        for end in &mut ends {
            end.scq.arm(ARM_ANY);
            end.qp.post_send(&write);
        }
        for _ in 0..40 {
            breathe();
            take_events(&node);
        }
        ends.iter_mut().for_each(|end| {
            end.scq.drain();
        });
    })
}

fn kicks(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(16));
    let all = node.guest.kick_fds().expect("descriptors");
    Box::new(move || {
        for _ in 0..100 {
            all.iter().for_each(|kick| drop(kick.write(1)));
        }
    })
}

fn doorbells(ground: &Ground<'_>) -> Box<dyn Strike> {
    let node = ground.villain(with_ram(32));
    let (qps, scq) = many(&node, 380, 2);
    for qp in &qps {
        qp.connect((node.gid, qp.qpn), &Path::default()).expect("to itself");
    }
    let page = node.ctx.doorbell_page(0);
    Box::new(move || {
        let _held = (&qps, &scq);
        for _ in 0..1000 {
            (0..15).for_each(|n| page.store8(n, 1, Ordering::Release));
        }
    })
}
