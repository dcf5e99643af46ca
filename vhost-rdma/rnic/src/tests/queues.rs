//! SRQs that are resized, and events of CQs under moderation.

use vhost_rdma_engine::shard::{Limits, NicSettings};
use virtio_rdma_abi::{arm, ctrl, srq_mask};

use super::*;

const US: u64 = 1000;

/// A guest with an SRQ, and two connected QPs of which the second receives from it.
struct Shared {
    bench: Bench,
    guest: Guest,
    srqn: u32,
    doorbell: u32,
    ring: (u64, u32),
    posted: u32,
    a: Qp,
    b: Qp,
}

/// An SRQ: where its ring is, its number, its doorbell.
fn shared_queue(bench: &mut Bench, guest: &mut Guest, entries: u32) -> (u64, u32, u32) {
    let (at, ring) = guest.ring(bytes(entries));
    let req = abi::SrqCreateReq {
        pdn: U32::new(guest.pd),
        entries: U32::new(entries),
        max_wr: U32::new(entries),
        max_sge: U32::new(1),
        log2_stride: driver::RQ_STRIDE,
        ..abi::SrqCreateReq::default()
    };
    let ctx = guest.ctx;
    let Reply::Srq(srq) = bench.world.ok(guest, ctx, Command::SrqCreate { req, ring }) else {
        panic!("an SRQ")
    };
    (at, srq.srqn.get(), srq.db.get())
}

impl Shared {
    fn new(entries: u32) -> Self {
        let mut bench = Bench::new();
        let (mut guest, _) = bench.guest(1, 1);
        let (at, srqn, doorbell) = shared_queue(&mut bench, &mut guest, entries);
        let a = bench.world.qp(&mut guest, qpt::RC, 16, None);
        let b = bench.world.qp(&mut guest, qpt::RC, 16, Some(srqn));
        bench.world.connect(&guest, &a, qpt::RC, (b.qpn, guest.gid));
        bench.world.connect(&guest, &b, qpt::RC, (a.qpn, guest.gid));
        Self { bench, guest, srqn, doorbell, ring: (at, entries), posted: 0, a, b }
    }

    fn post(&mut self, count: u32) {
        let (at, entries) = self.ring;
        for _ in 0..count {
            let shared = (at, entries, self.doorbell);
            self.guest.post_shared(shared, self.posted, self.guest.sge(0, 64));
            self.posted += 1;
        }
    }

    /// Sends, and the receives that were used up by it.
    fn send(&mut self, count: u64) -> Vec<u64> {
        for n in 0..count {
            send(&self.guest, &mut self.a, 0, n);
            self.bench.world.settle();
        }
        self.guest.statuses(&mut self.b.cq).into_iter().map(|(wr_id, _)| wr_id).collect()
    }

    fn resize(&mut self, entries: u32, max_wr: u32) -> Result<(), Status> {
        let (at, ring) = self.guest.ring(bytes(entries));
        let req = abi::SrqModifyReq {
            srqn: U32::new(self.srqn),
            mask: U32::new(srq_mask::MAX_WR),
            max_wr: U32::new(max_wr),
            entries: U32::new(entries),
            ..abi::SrqModifyReq::default()
        };
        let command = Command::SrqModify { req, ring: Some(ring) };
        self.bench.world.execute(&self.guest, self.guest.ctx, command)?;
        self.ring = (at, entries);
        Ok(())
    }

    fn taken(&self) -> u32 {
        let (at, entries) = self.ring;
        let control = at + (u64::from(entries) << driver::RQ_STRIDE);
        let bytes = self.guest.read(control + ctrl::TAKEN as u64, 4);
        u32::from_le_bytes(bytes.try_into().unwrap())
    }

    fn max_wr(&mut self) -> u32 {
        let query = Command::SrqQuery(self.srqn);
        match self.bench.world.ok(&self.guest, self.guest.ctx, query) {
            Reply::SrqAttr(attr) => attr.max_wr.get(),
            other => panic!("{other:?}"),
        }
    }
}

fn bytes(entries: u32) -> u64 {
    (u64::from(entries) << driver::RQ_STRIDE) + 128
}

#[test]
fn a_resized_shared_queue_keeps_what_waits_and_goes_on_counting() {
    let mut s = Shared::new(8);
    s.post(8);
    assert_eq!(s.send(5), [0, 1, 2, 3, 4]);
    assert_eq!(s.resize(2, 2), Err(Status::INVAL), "three receives wait");
    assert_eq!(s.resize(32, 33), Err(Status::INVAL), "more than the ring has");
    assert_eq!(s.resize(24, 24), Err(Status::INVAL), "no power of two");
    // Nobody has looked at these yet.
    s.post(2);
    s.resize(32, 30).unwrap();
    assert_eq!((s.max_wr(), s.taken()), (30, 5));
    s.post(25);
    assert_eq!(s.send(30), (5..35).collect::<Vec<u64>>());
    s.resize(4, 4).unwrap();
    s.post(4);
    assert_eq!(s.send(4), [35, 36, 37, 38]);
    assert_eq!((s.max_wr(), s.taken()), (4, 39));
    assert_eq!(s.guest.asynchronous(), [], "no index was beyond its ring");
}

#[test]
fn the_limit_of_a_queue_that_has_grown_counts_what_waits_in_the_guest() {
    let mut s = Shared::new(8);
    s.resize(32, 32).unwrap();
    s.post(20);
    let limit = abi::SrqModifyReq {
        srqn: U32::new(s.srqn),
        mask: U32::new(srq_mask::LIMIT),
        limit: U32::new(12),
        ..abi::SrqModifyReq::default()
    };
    let command = Command::SrqModify { req: limit, ring: None };
    s.bench.world.ok(&s.guest, s.guest.ctx, command);
    assert_eq!(s.send(8).len(), 8);
    assert_eq!(s.guest.asynchronous(), [], "twelve wait, of which the hardware has eight");
    assert_eq!(s.send(1).len(), 1);
    assert_eq!(s.guest.asynchronous(), [(event::SRQ_LIMIT_REACHED, s.srqn)]);
    assert_eq!(s.send(3).len(), 3);
    assert_eq!(s.guest.asynchronous(), [], "once");
}

/// A receiver whose events wait for `count` entries or `period_us`.
fn moderated(count: u16, period_us: u16) -> (Bench, Guest, Qp, Qp) {
    let mut bench = Bench::new();
    let (mut guest, _) = bench.guest(1, 1);
    let (a, mut b) = bench.pair(&mut guest);
    (0..12).for_each(|n| guest.post_receive(&mut b, n, &[]));
    let command = Command::CqModerate { cqn: b.cq.cqn, count, period_us };
    bench.world.ok(&guest, guest.ctx, command);
    bench.world.settle();
    guest.arm(&b.cq, arm::ANY);
    (bench, guest, a, b)
}

fn send_some(bench: &mut Bench, guest: &Guest, a: &mut Qp, count: u64) {
    (0..count).for_each(|n| send(guest, a, 0, n));
    bench.world.settle();
}

#[test]
fn moderated_events_wait_for_the_count_or_the_period() {
    let (mut bench, guest, mut a, mut b) = moderated(4, 50);
    send_some(&mut bench, &guest, &mut a, 3);
    assert_eq!(guest.completion_events().len(), 0);
    send_some(&mut bench, &guest, &mut a, 1);
    assert_eq!(guest.completion_events().len(), 1, "the count");
    assert_eq!(guest.statuses(&mut b.cq).len(), 4);
    guest.arm(&b.cq, arm::ANY);
    send_some(&mut bench, &guest, &mut a, 1);
    bench.world.advance(49 * US);
    assert_eq!(guest.completion_events().len(), 0);
    bench.world.advance(US);
    assert_eq!(guest.completion_events().len(), 1, "the period");
    assert_eq!(bench.world.shard.next_deadline(), None, "no timer is left behind");
}

#[test]
fn errors_and_new_settings_end_the_wait_and_a_cq_that_goes_takes_it_along() {
    let (mut bench, guest, mut a, b) = moderated(100, u16::MAX);
    send_some(&mut bench, &guest, &mut a, 1);
    assert_eq!(guest.completion_events().len(), 0);
    bench.world.modify(&guest, &b, state_attr(qps::ERR)).unwrap();
    bench.world.settle();
    assert_eq!(guest.completion_events().len(), 1, "a flush is an error");

    let (mut bench, guest, mut a, b) = moderated(100, u16::MAX);
    send_some(&mut bench, &guest, &mut a, 1);
    let off = Command::CqModerate { cqn: b.cq.cqn, count: 0, period_us: 10 };
    bench.world.ok(&guest, guest.ctx, off);
    bench.world.settle();
    assert_eq!(guest.completion_events().len(), 1, "the old wait is over");

    let (mut bench, guest, mut a, b) = moderated(100, 50);
    send_some(&mut bench, &guest, &mut a, 1);
    bench.world.ok(&guest, guest.ctx, Command::QpDestroy(b.qpn));
    bench.world.ok(&guest, guest.ctx, Command::CqDestroy(b.cq.cqn));
    assert_eq!(bench.world.shard.next_deadline(), None);
    let stranger = Command::CqModerate { cqn: a.cq.cqn, count: 1, period_us: 1 };
    assert_eq!(bench.world.execute(&guest, 0, stranger).unwrap_err(), Status::NOENT);
}

/// A guest has queues for tens of thousands of receives and rings for all of them at once: the
/// hardware gets them in rounds that are no longer than any.
#[test]
fn receives_by_the_thousand_do_not_make_a_round_long() {
    const QPS: usize = 4;
    const SRQS: usize = 48;
    const EACH: u32 = 512;
    // A round, and the burst that was begun last.
    const MOST: u64 = 110_000;
    let mut bench = Bench::new();
    bench.world.ram = 16 << 20;
    let (mut guest, faults) = bench.guest(1, 1);
    let settings = NicSettings {
        number: 0,
        vni: 1,
        mac: [2, 0, 0, 0, 0, 1],
        gids: Vec::new(),
        comp_vectors: 4,
        kick_queues: 2,
        limits: Limits { max_srqs: 64, ..driver::limits() },
    };
    bench.world.shard.update_nic(guest.nic, settings);
    let mut queues: Vec<Qp> = (0..QPS)
        .map(|_| {
            let qp = bench.world.qp(&mut guest, qpt::RC, EACH, None);
            bench.world.connect(&guest, &qp, qpt::RC, (qp.qpn, guest.gid));
            qp
        })
        .collect();
    let shared: Vec<(u64, u32, u32)> = (0..SRQS)
        .map(|_| {
            let (at, _, doorbell) = shared_queue(&mut bench, &mut guest, EACH);
            (at, EACH, doorbell)
        })
        .collect();
    bench.world.settle();
    let sge = guest.sge(0, 64);
    for n in 0..EACH {
        queues.iter_mut().for_each(|qp| guest.post_receive(qp, n.into(), &[sge]));
        shared.iter().for_each(|srq| guest.post_shared(*srq, n, sge));
    }
    let (mut most, mut given) = (0, 0);
    let posted = (QPS + SRQS) * EACH as usize;
    for _ in 0..10_000 {
        let before = (bench.world.shard.charged(), faults.receives());
        bench.world.shard.poll(bench.world.now);
        most = most.max(bench.world.shard.charged() - before.0);
        given = given.max(faults.receives() - before.1);
        if faults.receives() == posted {
            break;
        }
    }
    assert_eq!(faults.receives(), posted, "the hardware has them all");
    assert!(most <= MOST, "a round was charged {most} ns");
    assert!(given <= 1024, "a round gave the hardware {given} receives");
}
