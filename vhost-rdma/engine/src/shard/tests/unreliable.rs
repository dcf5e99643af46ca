//! UC messages of several pieces, some of which get lost: IBTA 9.8.2.2 has no message completed of
//! which a part is missing.

use virtio_rdma_abi::{access, attr_mask as m, opcode, qps, qpt, send_flags, wc_opcode, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::apart::apart;
use super::mirror;
use crate::link::PIECE;
use crate::nic::budget::Looked;
use crate::shard::testing::air::Air;
use crate::shard::testing::driver::{Guest, Qp, World, state_attr, wqe};

/// Bytes of a message.
const LEN: u32 = 8 * PIECE;
/// Messages of a test.
const MESSAGES: u8 = 4;
/// Rounds that a message takes, and some more.
const ROUNDS: usize = 12;

struct Scene {
    world: World,
    a: Guest,
    b: Guest,
    qa: Qp,
    qb: Qp,
    /// Where messages go, and what they are, by number.
    all: Vec<(u64, Vec<u8>)>,
}

/// Four messages are posted, whose number is their immediate.
fn scene(mut world: World, code: u8) -> Scene {
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::UC);
    let mut all = Vec::new();
    for n in 0..MESSAGES {
        let (from, bytes) = a.pattern(LEN as usize, n);
        let to = b.alloc(LEN.into());
        b.post_receive(&mut qb, n.into(), &[b.sge(to, LEN)]);
        let mut request = wqe(code, send_flags::SIGNALED, n.into());
        (request.remote_addr, request.rkey) = (U64::new(to), U32::new(b.key));
        request.imm = U32::new(n.into());
        a.post_send(&mut qa, request, &[a.sge(from, LEN)]);
        all.push((to, bytes));
    }
    Scene { world, a, b, qa, qb, all }
}

impl Scene {
    /// Everything goes on. The numbers of the messages that the receiver is told of, each of which
    /// is there as it was sent.
    fn told(&mut self, what: &str) -> Vec<u32> {
        self.world.settle();
        let sent = self.a.statuses(&mut self.qa.cq);
        assert_eq!(sent.len(), usize::from(MESSAGES), "{what}: the sender hears of nothing");
        assert!(sent.iter().all(|(_, status)| *status == wc_status::SUCCESS), "{what}");
        let mut told = Vec::new();
        for cqe in self.b.drain(&mut self.qb.cq) {
            assert_eq!((cqe.status, cqe.byte_len.get()), (wc_status::SUCCESS, LEN), "{what}");
            let n = cqe.imm.get();
            let (mut to, ref bytes) = self.all[n as usize];
            if cqe.opcode == wc_opcode::RECV {
                to = self.all[cqe.wr_id.get() as usize].0;
            }
            assert!(self.b.read(to, LEN as usize) == *bytes, "{what}: {n} is not all there");
            told.push(n);
        }
        told
    }
}

/// A receiver that stands still for so many rounds after so many, as a machine that is stopped and
/// goes on, gets each message whole or not at all.
fn stands_still(new: impl Fn() -> World) {
    for code in [opcode::SEND_WITH_IMM, opcode::RDMA_WRITE_WITH_IMM] {
        let mut broken = 0;
        for before in 1..4 {
            for lost in 1..ROUNDS {
                let what = format!("opcode {code}, {lost} rounds after {before}");
                let mut s = scene(new(), code);
                (0..before).for_each(|_| _ = s.world.round());
                s.world.at(s.b.on).pause(s.b.nic);
                (0..lost).for_each(|_| _ = s.world.round());
                s.world.at(s.b.on).resume(s.b.nic);
                let told = s.told(&what);
                broken += u32::from(told.len() < usize::from(MESSAGES) && !told.is_empty());
            }
        }
        assert!(broken > 3, "some are lost and some are not: {broken}");
    }
}

#[test]
fn a_receiver_that_stood_still_is_told_of_whole_messages_alone() {
    stands_still(World::new);
}

#[test]
fn one_on_another_shard_as_well() {
    stands_still(|| World::over(Air::still()));
}

#[test]
fn a_right_that_comes_in_the_middle_of_a_write_does_not_complete_it() {
    let mut s = scene(World::new(), opcode::RDMA_WRITE_WITH_IMM);
    let rights = |s: &mut Scene, given: u32| {
        let mut attr = state_attr(qps::RTS);
        attr.mask = U32::new(m::STATE | m::ACCESS_FLAGS);
        attr.qp_access_flags = U32::new(given);
        s.world.modify(&s.b, &s.qb, attr).unwrap();
    };
    rights(&mut s, access::REMOTE_READ);
    s.world.round();
    assert_eq!(s.b.read(s.all[0].0, 8), [0; 8], "it was refused");
    rights(&mut s, access::REMOTE_WRITE);
    assert_eq!(s.told("write"), [1, 2, 3]);
    assert_eq!(s.world.status(&s.b).counters.receive_drops, 1, "one message");
}

/// The owner of mirrored memory that does not do its part of a piece in time.
#[test]
fn a_write_whose_owner_was_late_is_not_completed() {
    for late in 0..2usize {
        let mut s = mirror::scene(qpt::UC);
        s.b.post_receive(&mut s.qb, 5, &[]);
        let len = 3 * PIECE;
        let (from, _) = s.a.pattern(len as usize, 3);
        let write = mirror::request(opcode::RDMA_WRITE_WITH_IMM, s.key, mirror::AT);
        s.a.post_send(&mut s.qa, write, &[s.a.sge(from, len)]);
        s.a.post_send(
            &mut s.qa,
            mirror::request(opcode::RDMA_WRITE, s.key, mirror::AT),
            &[s.a.sge(from, 8)],
        );
        for _ in 0..late {
            let job = s.job();
            s.answer(&job, Some(0));
        }
        let missed = s.jobs();
        assert_eq!(missed.len(), 1);
        s.world.advance(mirror::SECOND);
        // It answers all that it is asked from now on.
        for _ in 0..8 {
            for job in s.jobs() {
                s.answer(&job, Some(0));
            }
        }
        assert_eq!(s.statuses(), [wc_status::SUCCESS; 2]);
        assert_eq!(s.b.drain(&mut s.qb.cq).len(), 0, "piece {late} is missing");
    }
}

/// An owner that has too much to do already takes no more.
#[test]
fn a_write_of_which_its_owner_took_a_part_is_not_completed() {
    let mut s = mirror::scene(qpt::UC);
    let (mut reader, other) = s.world.pair(&mut s.a, &mut s.b, qpt::RC);
    let (to, peer) = (s.a.alloc(8), (other.qpn, s.b.gid));
    let mut jobs = Vec::new();
    for _ in 0..256 {
        s.world.modify(&s.a, &reader, state_attr(qps::RESET)).unwrap();
        s.a.raw_reset(&reader);
        reader.posted = [0; 2];
        s.world.connect(&s.a, &reader, qpt::RC, peer);
        let read = mirror::request(opcode::RDMA_READ, s.key, mirror::AT);
        s.a.post_send(&mut reader, read, &[s.a.sge(to, 8)]);
        jobs.extend(s.jobs());
    }
    assert_eq!(jobs.len(), 256);
    // It takes more than a round.
    let nic = s.world.shard.nic_mut(s.a.nic).unwrap();
    let slow = Looked { charged: 1_000, lasted: mirror::SECOND };
    (0..5).for_each(|_| nic.backing.pace.judge(slow));
    s.b.post_receive(&mut s.qb, 5, &[]);
    let len = 4 * PIECE;
    let (from, _) = s.a.pattern(len as usize, 3);
    let write = mirror::request(opcode::RDMA_WRITE_WITH_IMM, s.key, mirror::AT);
    s.a.post_send(&mut s.qa, write, &[s.a.sge(from, len)]);
    s.world.round();
    assert_eq!(s.a.drain(&mut s.qa.cq).len(), 0, "some of it is left");
    while let Some(job) = jobs.pop() {
        s.answer(&job, Some(0));
        jobs.extend(s.jobs());
    }
    assert_eq!(s.statuses(), [wc_status::SUCCESS]);
    assert_eq!(s.b.drain(&mut s.qb.cq).len(), 0, "nobody has asked for all of it");
}

/// What follows a message that was cut short is whole.
#[test]
fn a_sender_that_begins_anew_is_heard() {
    let mut s = scene(World::new(), opcode::SEND_WITH_IMM);
    s.world.round();
    s.world.modify(&s.a, &s.qa, state_attr(qps::RESET)).unwrap();
    (s.qa.posted[0], s.qa.posted[1]) = (0, 0);
    s.a.raw_reset(&s.qa);
    let peer = (s.qb.qpn, s.b.gid);
    s.world.connect(&s.a, &s.qa, qpt::UC, peer);
    let (from, bytes) = s.a.pattern(LEN as usize, 77);
    s.a.post_send(&mut s.qa, wqe(opcode::SEND, 0, 1), &[s.a.sge(from, LEN)]);
    s.world.settle();
    assert_eq!(s.b.statuses(&mut s.qb.cq), [(0, wc_status::SUCCESS)]);
    assert!(s.b.read(s.all[0].0, LEN as usize) == bytes);
}

/// A connection keeps its order (IBTA 9.8.1), also where a NIC moves to the shard of its peer while
/// some of what it sent is on its way there: what comes too late is lost.
#[test]
fn no_message_overtakes_another_where_a_nic_moves() {
    const COUNT: u32 = 16;
    for (who, rounds) in (0..2).flat_map(|who| (0..8).map(move |rounds| (who, rounds))) {
        let (mut world, a, b) = apart(Air::still());
        let mut guests = [a, b];
        let [a, b] = &mut guests;
        let (mut qa, mut qb) = world.pair(a, b, qpt::UC);
        let (from, to) = (a.alloc(PIECE.into()), b.alloc(PIECE.into()));
        for n in 0..COUNT {
            b.post_receive(&mut qb, n.into(), &[b.sge(to, PIECE)]);
            let mut request = wqe(opcode::SEND_WITH_IMM, send_flags::SIGNALED, n.into());
            request.imm = U32::new(n);
            // Short ones go another way.
            let len = if n % 4 == 3 { 8 } else { PIECE };
            a.post_send(&mut qa, request, &[a.sge(from, len)]);
        }
        (0..rounds).for_each(|_| _ = world.round());
        assert!(world.change_shard(&mut guests[who]));
        world.settle_all();
        let [a, b] = &mut guests;
        assert_eq!(a.drain(&mut qa.cq).len(), COUNT as usize);
        let told: Vec<u32> = b.drain(&mut qb.cq).iter().map(|cqe| cqe.imm.get()).collect();
        assert!(told.is_sorted_by(|one, next| one < next), "{who} after {rounds}: {told:?}");
        assert!(told.len() > 6, "{who} after {rounds}: {told:?}");
    }
}
