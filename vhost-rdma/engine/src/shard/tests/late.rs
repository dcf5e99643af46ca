//! Owners of mirrored memory that are late: a process that was stopped for a while goes on and does
//! all that it was asked. So it is asked for each request once, however often its peer tries again:
//! a sum would be added twice, and bytes stored again under a program that has changed them.

use std::collections::VecDeque;

use virtio_rdma_abi::{opcode, qpt};
use zerocopy::little_endian::U64;

use super::apart::{BAD, apart, patient_pair};
use super::mirror::{AT, SECOND, region, request, scene};
use crate::shard::testing::air::{Air, Faults};
use crate::shard::testing::driver::{Guest, World};
use crate::shard::{Command, Job, JobKind};

const MILLISECOND: u64 = 1_000_000;

/// An owner that does each job so long after it came.
struct Owner {
    late: u64,
    waiting: VecDeque<(u64, Job)>,
    /// Its word, which peers add to.
    word: u64,
    /// How often it stored what had arrived.
    stored: u32,
}

impl Owner {
    fn new(late: u64) -> Self {
        Self { late, waiting: VecDeque::new(), word: 0, stored: 0 }
    }

    fn does(&mut self, job: &Job) -> u64 {
        let before = self.word;
        match job.kind {
            JobKind::FetchAdd => self.word += job.operands[0],
            _ => self.stored += 1,
        }
        before
    }

    fn serve(&mut self, world: &mut World, guest: &Guest) {
        let due = world.now + self.late;
        self.waiting.extend(guest.jobs().into_iter().map(|job| (due, job)));
        while let Some((_, job)) = self.waiting.pop_front_if(|(due, _)| *due <= world.now) {
            let before = self.does(&job);
            let done = [(job.number, Some(before))];
            world.at(guest.on).owner_answered(guest.nic, guest.ctx, &done);
        }
    }
}

#[test]
fn an_owner_on_another_shard_is_asked_once_however_late_it_is() {
    for faults in [Faults::default(), BAD] {
        for late in [100, 700, 1600] {
            let case = format!("{late} ms late, {faults:?}");
            let (mut world, mut a, mut b) = apart(Air::new(faults, 5));
            let (mut qa, _qb) = patient_pair(&mut world, &mut a, &mut b);
            world.at(1).serve_mirrors(b.nic, b.ctx);
            let (shadow, key) = region(&mut world, &mut b);
            let (from, bytes) = a.pattern(100, 3);
            let found = a.alloc(8);
            a.write(found, &[0xff; 8]);
            a.post_send(&mut qa, request(opcode::RDMA_WRITE, key, AT + 8), &[a.sge(from, 100)]);
            let mut add = request(opcode::ATOMIC_FETCH_AND_ADD, key, AT + 256);
            add.arg0 = U64::new(1);
            a.post_send(&mut qa, add, &[a.sge(found, 8)]);
            let mut owner = Owner::new(late * MILLISECOND);
            for _ in 0..100 {
                world.advance(100 * MILLISECOND);
                owner.serve(&mut world, &b);
            }
            assert_eq!(a.statuses(&mut qa.cq), [(9, 0), (9, 0)], "{case}");
            assert_eq!((owner.stored, owner.word), (1, 1), "{case}: each once");
            assert_eq!(a.read(found, 8), 0u64.to_le_bytes(), "{case}");
            assert_eq!(b.read(shadow + 8, 100), bytes, "{case}");
        }
    }
}

/// The requester's port is down for a moment, and its time runs out meanwhile. The second of two is
/// asked for before its turn.
#[test]
fn an_owner_that_was_out_of_reach_for_a_moment_is_not_asked_again() {
    let mut s = scene(qpt::RC);
    let (from, found) = (s.a.alloc(64), s.a.alloc(8));
    let writes = vec![(opcode::RDMA_WRITE, (from, 64)); 2];
    for requests in [writes, vec![(opcode::ATOMIC_FETCH_AND_ADD, (found, 8))]] {
        for &(code, local) in &requests {
            s.post(code, 0, local);
        }
        let jobs = s.jobs();
        assert_eq!(jobs.len(), requests.len());
        let gid = s.a.gid;
        for gid in [None, Some(gid)] {
            s.world.ok(&s.a, 0, Command::GidSet { index: 1, gid });
            s.world.advance(520 * MILLISECOND);
        }
        assert!(s.b.jobs().is_empty(), "{requests:?}: it is asked again");
        jobs.iter().for_each(|job| s.answer(job, Some(5)));
        assert!(s.b.jobs().is_empty(), "{requests:?}: it is asked again");
        assert_eq!(s.statuses(), vec![0; requests.len()]);
    }
    assert_eq!(s.a.read(found, 8), 5u64.to_le_bytes());
}

/// A requester that has its owner's answer, and has not looked at it, moves to another shard.
#[test]
fn a_requester_that_moves_takes_its_owners_answer_along() {
    let mut world = World::beside(Air::still());
    let (mut a, mut b) = (world.guest_on(0, 1, 1), world.guest_on(0, 1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    world.at(0).serve_mirrors(b.nic, b.ctx);
    let (_, key) = region(&mut world, &mut b);
    let found = a.alloc(8);
    let mut add = request(opcode::ATOMIC_FETCH_AND_ADD, key, AT);
    add.arg0 = U64::new(1);
    a.post_send(&mut qa, add, &[a.sge(found, 8)]);
    world.settle();
    let mut owner = Owner::new(0);
    owner.serve(&mut world, &b);
    let moved = world.change_shard(&mut a);
    for _ in 0..10 {
        world.advance(SECOND / 10);
        owner.serve(&mut world, &b);
    }
    assert_eq!(a.statuses(&mut qa.cq), [(9, 0)], "moved: {moved}");
    assert_eq!(owner.word, 1, "moved: {moved}: added once");
    assert_eq!(a.read(found, 8), 0u64.to_le_bytes(), "moved: {moved}");
}

/// Another peer's word has come into the place of an atomic write that its owner has done, and
/// whose requester has not gone on.
#[test]
fn an_atomic_write_that_is_done_is_not_stored_again() {
    let mut s = scene(qpt::RC);
    let mut c = s.world.guest(1, 3);
    let (mut qc, _qd) = s.world.pair(&mut c, &mut s.b, qpt::RC);
    let (mine, theirs) = (s.a.alloc(8), c.alloc(8));
    s.a.write(mine, &[1; 8]);
    c.write(theirs, &[2; 8]);
    s.post(opcode::ATOMIC_WRITE, 16, (mine, 8));
    let first = s.job();
    let sge = c.sge(theirs, 8);
    c.post_send(&mut qc, request(opcode::RDMA_WRITE, s.key, AT + 16), &[sge]);
    let second = s.job();
    s.answer(&first, Some(0));
    assert_eq!(s.statuses(), [0]);
    assert_eq!(s.b.read(s.shadow + 16, 8), [2; 8], "the owner finds what came last");
    s.answer(&second, Some(0));
    assert_eq!(c.statuses(&mut qc.cq), [(9, 0)]);
}
