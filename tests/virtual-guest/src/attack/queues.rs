//! Completion queues and shared receive queues that are moved, filled and overrun.

use super::{Attack, Ground, Pump, Pumps, Strike, alone, breathe, rc, take_events, with_ram};
use crate::pages::{Buf, PageList};
use crate::qp::{Av, Path, Qp, QpSpec, SendWr};
use crate::ram::Pages;
use crate::rings::{Cq, ring_with_control};
use crate::spec::{self, Put, Take, cmd, qpt};
use crate::world::{Node, Vacancy};

pub(super) const ALL: &[Attack] = &[
    Attack::new("srq_modify", "an SRQ whose 64 MiB of receives move to another ring", srq_modify),
    Attack::new("cq_resize", "CQ_RESIZE of 262 144 entries, 1024 QPs with work beside it", resize)
        .within(32),
    Attack::new("cq_overrun", "a CQ under 4000 QPs that 256 datagrams overrun at once", overrun)
        .within(48),
];

/// Bytes of a receive as it is laid out: the most that a guest may choose for one with 32 elements.
const LOG2_STRIDE: u8 = 12;

/// A ring of receives in pages that follow each other, as creation and as modification name it.
struct Receives {
    _pages: Pages,
    whole: PageList,
    exact: PageList,
}

impl Receives {
    fn new(node: &Node, entries: u32) -> Self {
        // A modification may name no page more than the largest ring has bytes: it begins so that
        // it ends with its last page.
        let offset = (spec::PAGE - spec::CTRL_SIZE) as u32;
        let bytes = u64::from(offset) + ring_with_control(entries, LOG2_STRIDE).0;
        let pages = node.guest.ram().alloc(bytes.div_ceil(spec::PAGE) as usize);
        pages.view(0, pages.len()).fill(0, pages.len(), 0);
        let npages = pages.gpas().len() as u32;
        let list = |offset| PageList::contiguous(pages.gpa(0), npages, offset, 12);
        Self { whole: list(0), exact: list(offset), _pages: pages }
    }
}

fn srq_modify(ground: &Ground<'_>) -> Box<dyn Strike> {
    let entries: u32 = ground.sized(16 << 10, 1 << 10);
    let node = ground.villain(with_ram(ground.sized(144, 24)));
    let device = node.guest.query_device().expect("QUERY_DEVICE");
    let entries = entries.min(1 << device.max_srq_wr.ilog2());
    let rings = [Receives::new(&node, entries), Receives::new(&node, entries)];
    let create = Put::new()
        .u32(node.pdn)
        .u32(entries)
        .u32(entries)
        .u32(device.max_srq_sge.min(32))
        .u32(0)
        .u8(LOG2_STRIDE)
        .zero(3)
        .bytes(&rings[0].whole.bytes())
        .done(48);
    let made = node.ctx.command(cmd::SRQ_CREATE, &create, 8).expect("SRQ_CREATE");
    let srqn = made.u32_at(0);
    let doorbell = node.ctx.doorbell(made.u32_at(4)).expect("a doorbell").expect("of its own");
    doorbell.ring(entries);
    let mut turn = 0;
    Box::new(move || {
        turn ^= 1;
        let ring: &Receives = &rings[turn];
        let body = Put::new()
            .u32(srqn)
            .u32(spec::SRQ_MAX_WR)
            .u32(entries)
            .u32(entries)
            .u32(0)
            .u32(0)
            .bytes(&ring.exact.bytes())
            .done(48);
        let _answer = node.ctx.command(cmd::SRQ_MODIFY, &body, 0);
    })
}

fn resize(ground: &Ground<'_>) -> Box<dyn Strike> {
    let entries: u32 = ground.sized(256 << 10, 4 << 10);
    let node = ground.villain(with_ram(ground.sized(128, 48)));
    let word = node.mr(64);
    let write = SendWr::write(1, &[word.sge(0, 8)], word.addr(8), word.rkey);
    // Queue pairs that always have work, on a CQ of their own.
    let busy: Vec<Pump> = (0..ground.sized(256, 64))
        .map(|_| Pump::new(alone(&node, &rc(64, 1), 128), 64, |_| write.clone()))
        .collect();
    // And a queue full of what nobody takes, from one to another ring and back.
    let mut source = alone(&node, &rc(1024, 1), entries);
    let full = entries - 1024;
    let mut posted = 0;
    while posted < full {
        for _ in 0..512 {
            source.qp.queue_send(&write);
        }
        source.qp.ring_sq();
        posted += 512;
        while !seen(&source.scq, posted) {
            breathe();
        }
    }
    let bytes = ring_with_control(entries, 6).0;
    let rings = [0; 2].map(|_| {
        let ring = Buf::contiguous(node.guest.ram(), bytes);
        // The consumer index of its control block is the guest's to write, and nothing was
        // consumed.
        ring.view().fill(0, bytes, 0);
        ring
    });
    let mut pumps = Pumps(busy);
    let mut turn = 0;
    Box::new(move || {
        pumps.strike();
        for _ in 0..16 {
            turn ^= 1;
            let list = PageList::of(node.guest.ram(), rings[turn].pages(), 0);
            let body = source.scq.resize_request(entries, entries, &list);
            let _answer = node.ctx.command(cmd::CQ_RESIZE, &body, 0);
        }
    })
}

/// Whether the queue holds `n` completions.
fn seen(cq: &Cq, n: u32) -> bool {
    let at = u64::from((n - 1) & (cq.entries - 1)) * spec::CQE_SIZE as u64 + spec::CQE_SEQ;
    cq.view().load32(at, std::sync::atomic::Ordering::Acquire) == n
}

/// A CQ, all that complete to it, and what overruns it.
struct Crowd {
    place: Vacancy,
    node: Node,
    size: usize,
    burst: u32,
}

impl Strike for Crowd {
    fn strike(&mut self) {
        let node = self.place.another(&self.node, with_ram(64)).expect("a context");
        // A device that refuses some of it has its reasons.
        if let Some(mut sender) = self.gather(&node) {
            sender.ring_sq();
            for _ in 0..200 {
                breathe();
                take_events(&node);
            }
        }
        let _gone = self.place.leave(&node);
    }
}

impl Crowd {
    fn gather(&self, node: &Node) -> Option<Qp> {
        let (small, other) = (node.cq(64), node.cq(64));
        let spec =
            QpSpec { sq: 2, rq: 2, send_sge: 1, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) };
        for i in 0..self.size {
            if i % 400 == 399 {
                node.ctx.add_doorbell_page().ok()?;
            }
            // The device keeps it; what this driver keeps of each is a descriptor.
            let qp = Qp::create(&node.ctx, node.pdn, &small, &small, &spec).ok()?;
            qp.to_init(&Path::default()).ok()?;
        }
        let ud = QpSpec { sq: 256, rq: 256, ..QpSpec::new(qpt::UD) };
        let mut from = Qp::create(&node.ctx, node.pdn, &other, &other, &ud).ok()?;
        let mut to = Qp::create(&node.ctx, node.pdn, &small, &small, &ud).ok()?;
        from.start_datagrams(5).ok()?;
        to.start_datagrams(5).ok()?;
        let inbox = node.mr(64);
        let ah = node.ctx.create_ah(node.pdn, &Av::to(node.gid)).ok()?;
        let datagram = SendWr::datagram(1, &[inbox.sge(0, 1)], ah, to.qpn, 5).unsignaled();
        for n in 0..self.burst {
            to.queue_recv(u64::from(n), &[inbox.sge(0, 64)]);
            from.queue_send(&datagram);
        }
        to.ring_rq();
        Some(from)
    }
}

fn overrun(ground: &Ground<'_>) -> Box<dyn Strike> {
    let (place, node) = (ground.places[0].clone(), ground.villain(with_ram(64)));
    Box::new(Crowd { place, node, size: ground.sized(4000, 300), burst: 256 })
}
