//! Owners of mirrored memory that are asked before a request's turn: what peers and programs may
//! not notice of it.

use virtio_rdma_abi::{opcode, qps, qpt, send_flags, wc_status};

use super::mirror::{AT, HALF, SECOND, SIGNALED, Scene, request, scene};
use crate::shard::testing::driver::{SQ_STRIDE, state_attr};
use crate::shard::{Job, JobKind};

/// Pieces that are asked ahead, and the one whose turn it is.
const WINDOW: usize = 17;

/// With rings that are longer than the window.
fn wide() -> Scene {
    let mut s = scene(qpt::RC);
    s.qa = s.world.qp(&mut s.a, qpt::RC, 64, None);
    s.qb = s.world.qp(&mut s.b, qpt::RC, 64, None);
    s.world.connect(&s.a, &s.qa, qpt::RC, (s.qb.qpn, s.b.gid));
    s.world.connect(&s.b, &s.qb, qpt::RC, (s.qa.qpn, s.a.gid));
    s
}

impl Scene {
    /// Posts writes of 8 bytes, one behind the other, and numbers them.
    fn post_writes(&mut self, count: u64) -> Vec<Vec<u8>> {
        (0..count)
            .map(|i| {
                let (from, bytes) = self.a.pattern(8, i as u8 + 1);
                let sge = self.a.sge(from, 8);
                let mut wanted = request(opcode::RDMA_WRITE, self.key, AT + 8 * i);
                wanted.wr_id = i.into();
                self.a.post_send(&mut self.qa, wanted, &[sge]);
                bytes
            })
            .collect()
    }

    /// Numbers and statuses of completions.
    fn completed(&mut self) -> Vec<(u64, u8)> {
        self.world.settle();
        self.a.statuses(&mut self.qa.cq)
    }

    fn answer_all(&mut self, jobs: &[Job]) {
        for job in jobs {
            self.answer(job, Some(0));
        }
    }
}

#[test]
fn what_is_asked_ahead_completes_in_order() {
    let mut s = scene(qpt::RC);
    let written = s.post_writes(4);
    let jobs = s.jobs();
    let asked: Vec<u64> = jobs.iter().map(|job| job.address).collect();
    assert_eq!(asked, [AT, AT + 8, AT + 16, AT + 24]);
    assert_eq!(s.b.read(s.shadow, 32), written.concat());
    s.answer(&jobs[2], Some(0));
    s.answer(&jobs[1], Some(0));
    assert!(s.completed().is_empty(), "the first is not done");
    s.answer(&jobs[0], Some(0));
    let ok = wc_status::SUCCESS;
    assert_eq!(s.completed(), [(0, ok), (1, ok), (2, ok)]);
    s.answer(&jobs[3], Some(0));
    assert_eq!(s.completed(), [(3, ok)]);
    assert!(s.jobs().is_empty(), "something was asked twice");
}

#[test]
fn a_window_moves_on_with_the_answers() {
    let mut s = wide();
    s.post_writes(24);
    let first = s.jobs();
    assert_eq!(first.len(), WINDOW);
    s.answer_all(&first[..3]);
    let more = s.jobs();
    assert_eq!((more.len(), s.completed().len()), (3, 3));
    s.answer_all(&first[3..]);
    s.answer_all(&more);
    loop {
        let more = s.jobs();
        if more.is_empty() {
            break;
        }
        s.answer_all(&more);
    }
    assert_eq!(s.completed().len(), 21);
}

/// Whoever is told of earlier writes finds them done: nothing that tells goes ahead.
#[test]
fn what_tells_the_peer_waits_for_all_before_it() {
    let mut s = scene(qpt::RC);
    let room = s.b.alloc(64);
    let plain = (s.b.alloc(64), s.b.key);
    for code in [opcode::SEND, opcode::RDMA_WRITE_WITH_IMM, opcode::RDMA_WRITE] {
        s.post_writes(2);
        let sge = s.b.sge(room, 64);
        if code != opcode::RDMA_WRITE {
            s.b.post_receive(&mut s.qb, 7, &[sge]);
        }
        s.b.write(plain.0, &[0; 8]);
        let (from, bytes) = s.a.pattern(8, 9);
        let sge = s.a.sge(from, 8);
        s.a.post_send(&mut s.qa, request(code, plain.1, plain.0), &[sge]);
        let jobs = s.jobs();
        assert_eq!(jobs.len(), 2, "{code}");
        s.answer(&jobs[0], Some(0));
        assert!(s.b.statuses(&mut s.qb.cq).is_empty(), "{code}");
        assert_eq!(s.b.read(plain.0, 8), [0; 8], "{code}: written before its turn");
        s.answer(&jobs[1], Some(0));
        assert_eq!(s.completed().len(), 3);
        if code == opcode::RDMA_WRITE {
            assert_eq!(s.b.read(plain.0, 8), bytes);
        } else {
            assert_eq!(s.b.statuses(&mut s.qb.cq), [(7, wc_status::SUCCESS)]);
        }
    }
}

#[test]
fn reads_are_asked_ahead_and_bring_what_the_owner_put_there() {
    let mut s = scene(qpt::RC);
    let to = s.a.alloc(32);
    for i in 0..4u64 {
        s.post(opcode::RDMA_READ, 8 * i, (to + 8 * i, 8));
    }
    let jobs = s.jobs();
    assert!(jobs.len() == 4 && jobs.iter().all(|job| job.kind == JobKind::Wanted));
    s.b.write(s.shadow + HALF, &[7; 32]);
    s.answer_all(&jobs);
    assert_eq!(s.statuses(), [wc_status::SUCCESS; 4]);
    assert_eq!(s.a.read(to, 32), [7; 32]);
}

#[test]
fn a_fence_and_bytes_of_the_request_itself_wait() {
    let mut s = scene(qpt::RC);
    let (from, _) = s.a.pattern(8, 1);
    let to = s.a.alloc(8);
    s.post(opcode::RDMA_READ, 0, (to, 8));
    let mut fenced = request(opcode::RDMA_WRITE, s.key, AT + 8);
    fenced.flags = SIGNALED | send_flags::FENCE;
    let sge = s.a.sge(from, 8);
    s.a.post_send(&mut s.qa, fenced, &[sge]);
    let first = s.job();
    s.answer(&first, Some(0));
    let second = s.job();
    s.answer(&second, Some(0));
    assert_eq!(s.statuses(), [wc_status::SUCCESS; 2]);
}

/// Each work request ends once, in its order, however the first of them ends.
#[test]
fn a_failure_ends_what_was_asked_behind_it() {
    for case in 0..3 {
        let mut s = wide();
        s.post_writes(20);
        let jobs = s.jobs();
        assert_eq!(jobs.len(), WINDOW);
        let first = match case {
            0 => {
                s.answer(&jobs[0], None);
                wc_status::REM_OP_ERR
            }
            1 => {
                s.world.advance(10 * SECOND);
                wc_status::RETRY_EXC_ERR
            }
            _ => {
                let qa = s.qa.clone();
                s.world.modify(&s.a, &qa, state_attr(qps::ERR)).unwrap();
                wc_status::WR_FLUSH_ERR
            }
        };
        let ended = s.completed();
        let mut wanted = vec![(0, first)];
        wanted.extend((1..20).map(|i| (i, wc_status::WR_FLUSH_ERR)));
        assert_eq!(ended, wanted, "case {case}");
        // What comes late is nobody's.
        s.answer_all(&jobs);
        assert!(s.completed().is_empty() && s.jobs().is_empty(), "case {case}");
    }
}

/// What was looked at is what is executed, whatever the program does to the ring meanwhile.
#[test]
fn the_ring_is_read_once() {
    let mut s = scene(qpt::RC);
    s.post_writes(3);
    let jobs = s.jobs();
    assert_eq!(jobs.len(), 3);
    // Slots of three work requests.
    s.a.write(s.qa.send_ring(), &[0xff; 3 << SQ_STRIDE]);
    s.answer_all(&jobs);
    let ok = wc_status::SUCCESS;
    assert_eq!(s.completed(), [(0, ok), (1, ok), (2, ok)]);
}

/// An answer between a requester's timer and its next turn is the answer: an owner that is asked
/// again could find what a later write of the same queue pair has put there.
#[test]
fn an_answer_behind_the_timer_is_not_asked_for_again() {
    let mut s = scene(qpt::RC);
    s.post_writes(2);
    let jobs = s.jobs();
    assert_eq!(jobs.len(), 2);
    let deadline = s.world.shard.next_deadline().unwrap();
    s.world.now = deadline;
    s.world.shard.soft().timer_fired(s.a.nic, s.qa.qpn, deadline);
    s.answer(&jobs[0], Some(0));
    assert!(s.jobs().is_empty(), "the owner is asked again");
    assert_eq!(s.completed(), [(0, wc_status::SUCCESS)]);
    s.answer(&jobs[1], Some(0));
    assert_eq!(s.completed(), [(1, wc_status::SUCCESS)]);
}

/// A region that goes while a write to it is under way is missed in the write's turn.
#[test]
fn every_check_is_made_again_in_its_turn() {
    let mut s = scene(qpt::RC);
    s.post_writes(3);
    let jobs = s.jobs();
    let command = crate::shard::Command::MrDereg(s.key);
    s.world.ok(&s.b, s.b.ctx, command);
    s.answer_all(&jobs);
    let flushed = wc_status::WR_FLUSH_ERR;
    assert_eq!(s.completed(), [(0, wc_status::REM_ACCESS_ERR), (1, flushed), (2, flushed)]);
}
