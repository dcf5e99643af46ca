//! A queue pair's pieces that are under way to another shard together: each is executed once, and
//! in order, whatever the link does and whatever happens meanwhile to either end.

use virtio_rdma_abi::{self as abi, opcode, qps, qpt, wc_status};
use zerocopy::little_endian::U32;

use super::apart::{BAD, Meanwhile, apart, patient_pair, remote};
use super::mirror::{AT, SIGNALED, region, request};
use crate::link::PIECE;
use crate::shard::testing::air::{Air, Faults};
use crate::shard::testing::driver::{
    Guest, Lcg, Qp, World, init_attr, rtr_attr, rts_attr, state_attr, wqe,
};
use crate::shard::{Command, Random as _};

const SECOND: u64 = 1_000_000_000;
const LAG: u32 = 1_000_000;
/// The most that a NIC has under way (`link/bus.rs`): requests, and bytes below which one more may
/// begin.
const BUDGET: [u64; 2] = [64, (1 << 20) + PIECE as u64 - 1];

fn slow() -> Air {
    Air::new(Faults { lag: LAG, ..Faults::default() }, 1)
}

/// Sends that carry their numbers, to receives that lie side by side, and behind each a write of
/// the same number to one place. What arrived shows what was executed, and in which order.
struct Scene {
    world: World,
    a: Guest,
    b: Guest,
    qa: Qp,
    qb: Qp,
    from: u64,
    log: u64,
    place: u64,
    posted: u64,
    /// The number in the place when it was looked at last.
    seen: u64,
}

impl Scene {
    fn new(air: Air) -> Self {
        let (mut world, mut a, mut b) = apart(air);
        let (qa, qb) = patient_pair(&mut world, &mut a, &mut b);
        let (from, log, place) = (a.alloc(1 << 16), b.alloc(1 << 16), b.alloc(8));
        Self { world, a, b, qa, qb, from, log, place, posted: 0, seen: 0 }
    }

    fn receives(&mut self, count: u64) {
        for n in self.posted..self.posted + count {
            let sge = self.b.sge(self.log + 8 * n, 8);
            self.b.post_receive(&mut self.qb, n, &[sge]);
        }
    }

    fn requests(&mut self, count: u64) {
        for n in self.posted..self.posted + count {
            self.a.write(self.from + 8 * n, &n.to_le_bytes());
            let sge = [self.a.sge(self.from + 8 * n, 8)];
            self.a.post_send(&mut self.qa, wqe(opcode::SEND, SIGNALED, n), &sge);
            let write = remote(opcode::RDMA_WRITE, n, (&self.b, self.place));
            self.a.post_send(&mut self.qa, write, &sge);
        }
        self.posted += count;
    }

    /// Seven of each, as many as the queues take.
    fn post(&mut self) {
        self.receives(7);
        self.requests(7);
    }

    fn written(&self) -> u64 {
        u64::from_le_bytes(self.b.read(self.place, 8).try_into().unwrap())
    }

    /// Time passes, and no write is overtaken meanwhile.
    fn advance(&mut self, by: u64, case: &str) {
        for _ in 0..20 {
            self.world.advance(by / 20);
            let written = self.written();
            assert!(written >= self.seen, "{case}: {written} behind {}", self.seen);
            self.seen = written;
        }
    }

    /// All that was posted since the last time is done, each once and in order.
    fn all_done(&mut self, since: u64, case: &str) {
        let of = |id| [(id, 0), (id, 0)];
        let statuses = self.a.statuses(&mut self.qa.cq);
        assert_eq!(statuses, (since..self.posted).flat_map(of).collect::<Vec<_>>(), "{case}");
        self.all_received(since, case);
    }

    fn all_received(&mut self, since: u64, case: &str) {
        let received = self.b.statuses(&mut self.qb.cq);
        assert_eq!(received, (since..self.posted).map(|id| (id, 0)).collect::<Vec<_>>(), "{case}");
        for n in 0..self.posted {
            assert_eq!(self.b.read(self.log + 8 * n, 8), n.to_le_bytes(), "{case}: receive {n}");
        }
        assert_eq!(self.written(), self.posted - 1, "{case}");
        let counters = self.world.at(self.b.on).status(self.b.nic).unwrap().counters;
        assert_eq!(counters.rx_messages, 2 * self.posted, "{case}: each once");
    }

    fn flights(&mut self) -> usize {
        self.world.at(self.a.on).flights(self.a.nic)
    }

    fn air(&self) -> &Air {
        &self.world.beside.as_ref().unwrap().1
    }

    fn timeouts(&mut self) -> u64 {
        let Self { world, a, .. } = self;
        world.at(a.on).status(a.nic).unwrap().counters.ack_timeouts
    }

    /// RESET of both, and a new connection.
    fn connect_anew(&mut self) {
        for (guest, qp) in [(&self.a, &mut self.qa), (&self.b, &mut self.qb)] {
            self.world.modify(guest, qp, state_attr(qps::RESET)).unwrap();
            qp.posted = [0; 2];
            guest.raw_reset(qp);
        }
        // What was under way has arrived by then: a connection manager waits for it (TimeWait).
        self.world.advance(SECOND);
        let ends = [(&self.a, &self.qa, &self.b, &self.qb), (&self.b, &self.qb, &self.a, &self.qa)];
        for (guest, qp, peer, other) in ends {
            let rts = abi::QpAttr { retry_cnt: 7, ..rts_attr(qpt::RC) };
            for attr in [init_attr(qpt::RC), rtr_attr(qpt::RC, (other.qpn, peer.gid)), rts] {
                self.world.modify(guest, qp, attr).unwrap();
            }
        }
    }
}

/// What a program posts at once is under way at once: it costs one way there and back, and not one
/// for each piece. It is executed in order all the same.
#[test]
fn pieces_of_a_queue_pair_are_under_way_together() {
    for (len, count) in [(64u32, 15u64), (64 << 10, 15), (1 << 20, 1)] {
        let (mut world, mut a, mut b) = apart(slow());
        let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        let to = b.alloc(len.into());
        for round in 0..count {
            let (from, _) = a.pattern(len as usize, round as u8);
            let sge = [a.sge(from, len)];
            // Every other one tells the peer.
            if round % 2 == 1 {
                b.post_receive(&mut qb, round, &[b.sge(to, len)]);
                a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, round), &sge);
            } else {
                a.post_send(&mut qa, remote(opcode::RDMA_WRITE, round, (&b, to)), &sge);
            }
        }
        let (begin, lag) = (world.now, u64::from(LAG));
        let mut statuses = Vec::new();
        while statuses.len() < count as usize {
            world.advance(lag / 10);
            statuses.extend(a.statuses(&mut qa.cq));
            assert!(world.now - begin < 100 * lag, "it never ends");
        }
        let pieces = u64::from(len.div_ceil(PIECE)) * count;
        let took = (world.now - begin) / lag;
        assert!(took <= 5 && took < pieces, "{len}: {took} ms for {pieces} pieces");
        assert!(statuses.iter().enumerate().all(|(n, got)| *got == (n as u64, 0)), "{statuses:?}");
        let received: Vec<u64> = b.statuses(&mut qb.cq).iter().map(|(id, _)| *id).collect();
        assert!(received.iter().copied().eq((0..count).filter(|round| round % 2 == 1)));
        let last = a.pattern(len as usize, (count - 1) as u8).1;
        assert!(b.read(to, len as usize) == last, "in order: the last is what is there");
    }
}

/// However many queue pairs it has, a NIC has no more under way than its budget, and each of them
/// gets on.
#[test]
fn a_nic_has_no_more_under_way_than_before() {
    for (len, count) in [(64u32, 15u64), (PIECE, 6)] {
        let (mut world, mut a, mut b) = apart(slow());
        let mut pairs: Vec<(Qp, Qp)> =
            (0..8).map(|_| world.pair(&mut a, &mut b, qpt::RC)).collect();
        let (from, _) = a.pattern(len as usize, 1);
        let to = b.alloc(len.into());
        for round in 0..count {
            for (qa, _) in &mut pairs {
                let write = remote(opcode::RDMA_WRITE, round, (&b, to));
                a.post_send(qa, write, &[a.sge(from, len)]);
            }
        }
        world.advance(3 * u64::from(LAG));
        let begun = pairs.iter_mut().map(|(qa, _)| a.statuses(&mut qa.cq).len());
        let begun = begun.filter(|done| *done > 0).count();
        assert!(begun > 3, "{begun} queue pairs have got on");
        world.advance(SECOND);
        let [requests, bytes] = world.beside.as_ref().unwrap().1.most;
        assert!(requests <= BUDGET[0] && bytes <= BUDGET[1], "{requests} requests, {bytes} bytes");
        for (qa, _) in &mut pairs {
            let last = a.statuses(&mut qa.cq).last().copied();
            assert!(last.is_none_or(|last| last == (count - 1, 0)), "{last:?}");
        }
        let counters = world.at(1).status(b.nic).unwrap().counters;
        assert_eq!(counters.rx_messages, 8 * count);
    }
}

/// A receive that is not there stops what is behind it, and what went ahead is executed once.
#[test]
fn what_goes_ahead_waits_for_a_receive_before_it() {
    for receives in 0..4u64 {
        let lag = Faults { lag: 100_000, ..Faults::default() };
        let mut scene = Scene::new(Air::new(lag, 1));
        scene.receives(receives);
        scene.requests(4);
        scene.world.advance(2_000_000);
        let done = scene.a.statuses(&mut scene.qa.cq).len() as u64;
        assert_eq!(done, 2 * receives, "nothing passes a send that finds none");
        for n in receives..4 {
            let sge = scene.b.sge(scene.log + 8 * n, 8);
            scene.b.post_receive(&mut scene.qb, n, &[sge]);
        }
        // The first is woken, and who came too early goes one at a time.
        scene.advance(3_000_000, "woken");
        assert_eq!(scene.a.statuses(&mut scene.qa.cq).len() as u64, 8 - done);
        scene.all_received(0, "in the end");
    }
}

#[test]
fn over_a_bad_link_each_is_executed_once_and_in_order() {
    let (mut met, mut ahead) = ([0; 3], [0; 3]);
    for seed in 0..60u64 {
        let at = seed as usize % 3;
        let how = [Meanwhile::Nothing, Meanwhile::HandOver, Meanwhile::Moves][at];
        let mut chance = Lcg(seed);
        let mut scene = Scene::new(Air::new(Faults { lag: 50_000, ..BAD }, seed));
        let case = format!("seed {seed}, {how:?}");
        for round in 0..6 {
            scene.post();
            for _ in 0..if how == Meanwhile::Moves { 12 } else { 1 } {
                (0..chance.next_u32() % 6).for_each(|_| _ = scene.world.round());
                scene.world.advance(u64::from(chance.next_u32() % 300_000));
                met[at] += scene.flights();
                let Scene { world, a, b, .. } = &mut scene;
                match how {
                    Meanwhile::Nothing => {}
                    Meanwhile::HandOver => world.hand_over(&mut [a, b]),
                    Meanwhile::Moves => {
                        let guest = if chance.next_u32().is_multiple_of(2) { a } else { b };
                        assert!(world.change_shard(guest));
                    }
                }
            }
            scene.advance(20 * SECOND, &case);
            scene.all_done(7 * round, &case);
        }
        ahead[at] += scene.air().ahead;
    }
    assert!(met.iter().all(|&met| met > 100), "flights when it happened: {met:?}");
    assert!(ahead.iter().all(|&ahead| ahead > 500), "flights: {ahead:?}");
}

/// Each end moves, or both, there or there and back, while flights are on their way there or their
/// answers are on their way back. Nobody has to wait for a timer.
#[test]
fn flights_find_a_peer_that_moves_and_their_answers_find_home() {
    for (moves, at) in (0..8).flat_map(|moves: u32| (0..5).map(move |at| (moves, at))) {
        let case = format!("moves {moves:b}, after {at} half ways");
        let mut scene = Scene::new(slow());
        scene.post();
        scene.world.advance(at * u64::from(LAG) / 2 + 1);
        assert!(at > 3 || scene.flights() > 0, "{case}");
        let Scene { world, a, b, .. } = &mut scene;
        for bit in (0..3).filter(|bit| moves >> bit & 1 == 1) {
            let guest = if bit == 1 { &mut *b } else { &mut *a };
            assert!(world.change_shard(guest), "{case}");
        }
        scene.advance(20 * u64::from(LAG), &case);
        scene.all_done(0, &case);
        assert_eq!(scene.timeouts(), 0, "{case}");
        // Who is a neighbour by now sends nothing more over the bus.
        let asked = scene.air().asked;
        scene.post();
        scene.advance(20 * u64::from(LAG), &case);
        scene.all_done(7, &case);
        let crossed = scene.air().asked > asked;
        assert_eq!(crossed, scene.a.on != scene.b.on, "{case}");
    }
}

/// What is busy when its peer comes to its shard ends crossing, and not only when it rests.
#[test]
fn a_busy_queue_pair_goes_plainly_once_its_peer_is_near() {
    let mut scene = Scene::new(slow());
    let mut crossed = 0;
    for n in 0..40 {
        scene.receives(1);
        scene.requests(1);
        // Before the answers to those that were posted last are there.
        scene.world.advance(u64::from(LAG) / 2);
        if n == 12 {
            assert!(scene.flights() > 3);
            assert!(scene.world.change_shard(&mut scene.b));
            crossed = scene.air().asked;
        }
    }
    // What was on its way to where the peer was follows it.
    let more = scene.air().asked - crossed;
    assert!(more <= 4, "{more} more have crossed");
    scene.world.advance(SECOND);
    scene.all_done(0, "in the end");
}

/// Saved with some under way, at every moment, and once more at once.
#[test]
fn flights_are_saved_and_go_on() {
    let mut saved = 0;
    for (at, missing) in (0..12u64).flat_map(|at| [0, 3, 7].map(|missing| (at, missing))) {
        let case = format!("at {at}, {missing} receives missing");
        let mut scene = Scene::new(slow());
        scene.receives(7 - missing);
        scene.requests(7);
        scene.world.advance(at * u64::from(LAG) / 3 + 1);
        for _ in 0..2 {
            let Scene { world, a, b, .. } = &mut scene;
            world.hand_over(&mut [a, b]);
            saved += scene.flights();
        }
        for n in 7 - missing..7 {
            let sge = scene.b.sge(scene.log + 8 * n, 8);
            scene.b.post_receive(&mut scene.qb, n, &[sge]);
        }
        scene.advance(5 * SECOND, &case);
        scene.all_done(0, &case);
        scene.post();
        scene.advance(SECOND, &case);
        scene.all_done(7, &case);
    }
    assert!(saved > 100, "{saved} flights were saved");
}

/// ERR while some are under way: all that is not done is flushed, nothing comes later, and the next
/// connection has nothing of this one.
#[test]
fn an_error_and_a_reset_leave_nothing_of_what_was_under_way() {
    for (faults, seed) in [(Faults { lag: LAG, ..Faults::default() }, 1), (BAD, 2), (BAD, 3)] {
        for at in 0..8u64 {
            let case = format!("{faults:?}, {seed}, {at}");
            let mut scene = Scene::new(Air::new(faults, seed));
            scene.post();
            scene.world.advance(at * 400_000 + 1);
            let met = scene.flights();
            assert!(at > 0 || met > 3, "{case}: {met} flights");
            scene.world.modify(&scene.a, &scene.qa, state_attr(qps::ERR)).unwrap();
            scene.world.settle();
            let statuses: Vec<u8> =
                scene.a.statuses(&mut scene.qa.cq).iter().map(|(_, status)| *status).collect();
            let done = statuses.iter().take_while(|status| **status == 0).count();
            assert_eq!(statuses.len(), 14, "{case}: each completes at once");
            assert!(statuses[done..].iter().all(|status| *status == wc_status::WR_FLUSH_ERR));
            assert_eq!(scene.flights(), 0, "{case}");
            scene.world.advance(SECOND);
            assert!(scene.a.statuses(&mut scene.qa.cq).is_empty(), "{case}: each once");
            scene.b.statuses(&mut scene.qb.cq);
            scene.connect_anew();
            let before = scene.world.at(1).status(scene.b.nic).unwrap().counters.rx_messages;
            let since = scene.posted;
            scene.post();
            scene.advance(20 * SECOND, &case);
            let of = |id| [(id, 0), (id, 0)];
            let all: Vec<(u64, u8)> = (since..scene.posted).flat_map(of).collect();
            assert_eq!(scene.a.statuses(&mut scene.qa.cq), all, "{case}");
            let received = scene.b.statuses(&mut scene.qb.cq);
            assert!(received.iter().map(|(id, _)| *id).eq(since..scene.posted), "{case}");
            let after = scene.world.at(1).status(scene.b.nic).unwrap().counters.rx_messages;
            assert_eq!(after - before, 14, "{case}: each once");
        }
    }
}

/// The peer's ERR: the first that was not executed fails, all behind it are flushed.
#[test]
fn a_peer_that_fails_ends_what_is_under_way() {
    for at in 0..8u64 {
        let mut scene = Scene::new(slow());
        scene.post();
        scene.world.advance(at * 400_000 + 1);
        scene.world.modify(&scene.b, &scene.qb, state_attr(qps::ERR)).unwrap();
        scene.world.advance(100 * SECOND);
        let statuses: Vec<u8> =
            scene.a.statuses(&mut scene.qa.cq).iter().map(|(_, status)| *status).collect();
        assert_eq!(statuses.len(), 14, "at {at}");
        let done = statuses.iter().take_while(|status| **status == 0).count();
        let executed = scene.world.at(1).status(scene.b.nic).unwrap().counters.rx_messages;
        assert_eq!(done as u64, executed, "at {at}: what was executed is said to be");
        if let Some((failed, flushed)) = statuses[done..].split_first() {
            assert_eq!(*failed, wc_status::RETRY_EXC_ERR, "at {at}");
            assert!(flushed.iter().all(|status| *status == wc_status::WR_FLUSH_ERR), "at {at}");
        }
    }
}

/// A queue pair that ends with flights gives back what it had of the NIC's budget.
#[test]
fn what_a_queue_pair_had_under_way_is_given_back_when_it_ends() {
    let mut scene = Scene::new(slow());
    for round in 0..12u64 {
        let (a, b) = (&mut scene.a, &mut scene.b);
        let (mut qa, qb) = scene.world.pair(a, b, qpt::RC);
        for n in 0..15 {
            let write = remote(opcode::RDMA_WRITE, n, (b, scene.place));
            a.post_send(&mut qa, write, &[a.sge(scene.from, 8)]);
        }
        scene.world.advance(1);
        assert!(scene.world.at(0).flights(a.nic) > 10, "round {round}");
        scene.world.ok(a, a.ctx, Command::QpDestroy(qa.qpn));
        scene.world.ok(b, b.ctx, Command::QpDestroy(qb.qpn));
        assert_eq!(scene.world.at(0).flights(a.nic), 0);
        scene.world.advance(3 * u64::from(LAG));
    }
    let before = scene.world.at(1).status(scene.b.nic).unwrap().counters.rx_messages;
    assert_eq!(before, 0, "nobody was there for them");
    scene.post();
    scene.world.advance(SECOND);
    scene.all_done(0, "afterwards");
}

/// A queue pair that is to come to rest ends what has gone ahead, and tells then.
#[test]
fn what_went_ahead_ends_before_the_queue_pair_rests() {
    let (mut world, mut a, mut b) = apart(slow());
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (from, _) = a.pattern(8, 1);
    let to = b.alloc(4096);
    for n in 0..6u64 {
        a.post_send(&mut qa, remote(opcode::RDMA_WRITE, n, (&b, to)), &[a.sge(from, 8)]);
    }
    world.settle();
    let mut attr = state_attr(qps::SQD);
    attr.mask = U32::new(abi::attr_mask::STATE | abi::attr_mask::EN_SQD_ASYNC_NOTIFY);
    attr.en_sqd_async_notify = 1;
    world.modify(&a, &qa, attr).unwrap();
    assert!(a.asynchronous().is_empty(), "they are under way");
    a.post_send(&mut qa, remote(opcode::RDMA_WRITE, 6, (&b, to)), &[a.sge(from, 8)]);
    world.advance(SECOND);
    assert_eq!(a.asynchronous(), [(abi::event::SQ_DRAINED, qa.qpn)]);
    let done: Vec<u64> = a.statuses(&mut qa.cq).iter().map(|(id, _)| *id).collect();
    assert_eq!(done, [0, 1, 2, 3, 4, 5], "not what was posted afterwards");
    world.modify(&a, &qa, state_attr(qps::RTS)).unwrap();
    world.advance(SECOND);
    assert_eq!(a.statuses(&mut qa.cq), [(6, 0)]);
}

/// Work requests that were taken before their turn are charged to the NIC's account while there are
/// any. Where it pays for none, none is taken, and all go one at a time.
#[test]
fn what_goes_ahead_is_charged_to_the_account() {
    let mut scene = Scene::new(slow());
    let account = scene.a.space.account().clone();
    let before = account.used();
    scene.post();
    scene.world.advance(1);
    assert!(scene.flights() > 3 && account.used() > before);
    scene.world.advance(SECOND);
    assert_eq!(account.used(), before);
    scene.all_done(0, "charged");
    account.allow(before + 1000);
    scene.post();
    scene.world.advance(1);
    assert_eq!((scene.flights(), account.used()), (0, before));
    scene.world.advance(SECOND);
    scene.all_done(7, "one at a time");
}

/// Under an address that was withdrawn nothing leaves, also not behind what left before.
#[test]
fn nothing_goes_ahead_without_an_address() {
    let mut scene = Scene::new(slow());
    scene.receives(4);
    scene.requests(2);
    scene.world.advance(1);
    assert!(scene.flights() > 0);
    scene.world.ok(&scene.a, 0, Command::GidSet { index: 1, gid: None });
    let asked = scene.air().asked;
    scene.requests(2);
    scene.world.advance(u64::from(LAG));
    assert_eq!(scene.air().asked, asked);
}

/// What came back has not begun: it stays for RTS.
#[test]
fn what_came_back_rests_with_its_queue_pair() {
    let mut scene = Scene::new(slow());
    scene.receives(1);
    scene.requests(4);
    scene.world.advance(10 * u64::from(LAG));
    assert_eq!(scene.a.statuses(&mut scene.qa.cq), [(0, 0), (0, 0)], "the second waits");
    assert!(scene.flights() > 0, "and those behind it came back");
    scene.world.modify(&scene.a, &scene.qa, state_attr(qps::SQD)).unwrap();
    for n in 1..4 {
        let sge = scene.b.sge(scene.log + 8 * n, 8);
        scene.b.post_receive(&mut scene.qb, n, &[sge]);
    }
    scene.world.advance(SECOND);
    assert_eq!(scene.a.statuses(&mut scene.qa.cq), [(1, 0)], "it had begun");
    scene.world.modify(&scene.a, &scene.qa, state_attr(qps::RTS)).unwrap();
    scene.world.advance(SECOND);
    let rest = [(1, 0), (2, 0), (2, 0), (3, 0), (3, 0)];
    assert_eq!(scene.a.statuses(&mut scene.qa.cq), rest);
    scene.all_received(0, "in the end");
}

/// A NIC that stands still takes answers in when it goes on, and sends nothing meanwhile.
#[test]
fn answers_that_find_the_nic_paused_are_not_forgotten() {
    for at in 0..6u64 {
        let case = format!("at {at}");
        let mut scene = Scene::new(slow());
        scene.post();
        scene.world.advance(at * u64::from(LAG) / 2 + 1);
        while scene.world.at(0).pause(scene.a.nic) {}
        let asked = scene.air().asked;
        scene.world.advance(10 * u64::from(LAG));
        assert_eq!(scene.air().asked, asked, "{case}");
        scene.world.at(0).resume(scene.a.nic);
        scene.advance(SECOND, &case);
        scene.all_done(0, &case);
    }
}

/// An owner of mirrored memory takes pieces one at a time, and so they are sent, but for a few.
#[test]
fn what_an_owner_has_a_part_in_costs_few_copies_more() {
    const COUNT: u64 = 60;
    let (mut world, mut a, mut b) = apart(slow());
    let (mut qa, _qb) = patient_pair(&mut world, &mut a, &mut b);
    let (nic, ctx) = (b.nic, b.ctx);
    world.at(1).serve_mirrors(nic, ctx);
    let (shadow, key) = region(&mut world, &mut b);
    let from = a.alloc(8 * COUNT);
    let (mut posted, mut jobs, mut done) = (0u64, 0u64, 0);
    for _ in 0..200 {
        while posted < COUNT && posted - done < 15 {
            let at = from + 8 * posted;
            a.write(at, &posted.to_le_bytes());
            a.post_send(&mut qa, request(opcode::RDMA_WRITE, key, AT), &[a.sge(at, 8)]);
            posted += 1;
        }
        world.advance(u64::from(LAG));
        for job in b.jobs() {
            assert_eq!(b.read(shadow, 8), jobs.to_le_bytes(), "in order, and each once");
            jobs += 1;
            world.at(1).owner_answered(nic, ctx, &[(job.number, Some(0))]);
        }
        done += a.statuses(&mut qa.cq).len() as u64;
    }
    assert_eq!((jobs, done), (COUNT, COUNT));
    let asked = world.beside.as_ref().unwrap().1.asked;
    assert!(asked < COUNT + COUNT / 2, "{asked} pieces were sent for {COUNT}");
}

/// A responder keeps the order, so its answer to a later piece is one to all before it. Losses are
/// not rare here, and yet nobody waits for a timer whose answer alone was lost.
#[test]
fn an_answer_stands_for_all_before_it() {
    let (mut timeouts, mut lost) = (0, 0);
    for seed in 0..20 {
        let faults = Faults { lost: 3, lag: LAG, ..Faults::default() };
        let mut scene = Scene::new(Air::new(faults, seed));
        scene.post();
        scene.advance(20 * SECOND, "answers");
        scene.all_done(0, "answers");
        (timeouts, lost) = (timeouts + scene.timeouts(), lost + scene.air().lost);
    }
    assert!(lost > 10 && timeouts < lost, "{lost} lost, {timeouts} timeouts");
}
