//! RC and UC: every operation, with its data.

use virtio_rdma_abi::{arm, cqe_flags, opcode, qps, qpt, send_flags, wc_opcode, wc_status};
use zerocopy::little_endian::{U16, U32, U64};

use crate::shard::testing::driver::{Guest, Qp, World, state_attr, wqe};
use crate::shard::{Command, Status};

const SIGNALED: u8 = send_flags::SIGNALED;

#[test]
fn send_fills_the_oldest_receive() {
    for kind in [qpt::RC, qpt::UC] {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (mut qa, mut qb) = world.pair(&mut a, &mut b, kind);
        let (from, bytes) = a.pattern(5000, 3);
        let to = b.alloc(8192);
        b.post_receive(
            &mut qb,
            71,
            &[b.sge(to, 100), b.sge(to + 4096, 4096), b.sge(to + 200, 3000)],
        );
        let mut send = wqe(opcode::SEND_WITH_IMM, SIGNALED | send_flags::SOLICITED, 9);
        send.imm = U32::from_bytes([1, 2, 3, 4]);
        a.post_send(&mut qa, send, &[a.sge(from, 1), a.sge(from + 1, 4999)]);
        world.settle();
        let sent = a.drain(&mut qa.cq);
        assert_eq!(
            (sent.len(), sent[0].status, sent[0].opcode),
            (1, wc_status::SUCCESS, wc_opcode::SEND)
        );
        let received = b.drain(&mut qb.cq);
        assert_eq!((received[0].wr_id.get(), received[0].byte_len.get()), (71, 5000));
        assert_eq!(received[0].imm.to_bytes(), [1, 2, 3, 4]);
        assert_eq!(received[0].src_qp.get(), qa.qpn);
        let flags = received[0].flags.get();
        assert_eq!(flags & (cqe_flags::RECV | cqe_flags::IMM), cqe_flags::RECV | cqe_flags::IMM);
        assert_eq!(b.read(to, 100), bytes[..100]);
        assert_eq!(b.read(to + 4096, 4096), bytes[100..4196]);
        assert_eq!(b.read(to + 200, 804), bytes[4196..]);
        assert_eq!(b.read(to + 1004, 8), [0; 8]);
    }
}

#[test]
fn write_and_read_move_megabytes_in_pieces() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (from, bytes) = a.pattern(1 << 20, 5);
    let to = b.alloc(1 << 20);
    let back = a.alloc(1 << 20);
    for (code, local) in [(opcode::RDMA_WRITE, from), (opcode::RDMA_READ, back)] {
        let mut request = wqe(code, SIGNALED, u64::from(code));
        request.remote_addr = U64::new(to);
        request.rkey = U32::new(b.key);
        a.post_send(&mut qa, request, &[a.sge(local, 1 << 20)]);
    }
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(0, 0), (u64::from(opcode::RDMA_READ), 0)]);
    assert!(b.read(to, 1 << 20) == bytes && a.read(back, 1 << 20) == bytes);
}

#[test]
fn write_with_immediate_takes_a_receive() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let (from, bytes) = a.pattern(64, 1);
    let to = b.alloc(64);
    b.post_receive(&mut qb, 5, &[]);
    let mut request = wqe(opcode::RDMA_WRITE_WITH_IMM, SIGNALED, 1);
    (request.remote_addr, request.rkey) = (U64::new(to), U32::new(b.key));
    a.post_send(&mut qa, request, &[a.sge(from, 64)]);
    world.settle();
    let received = b.drain(&mut qb.cq);
    assert_eq!(
        (received[0].opcode, received[0].byte_len.get()),
        (wc_opcode::RECV_RDMA_WITH_IMM, 64)
    );
    assert_eq!(b.read(to, 64), bytes);
}

#[test]
fn atomics_return_what_was_there() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, _qb) = world.pair(&mut a, &mut b, qpt::RC);
    let word = b.alloc(8);
    b.write(word, &40u64.to_le_bytes());
    let result = a.alloc(64);
    for (n, code, first, second) in [
        (0, opcode::ATOMIC_FETCH_AND_ADD, 2, 0),
        (1, opcode::ATOMIC_CMP_AND_SWP, 42, 7),
        (2, opcode::ATOMIC_CMP_AND_SWP, 42, 9),
    ] {
        let mut request = wqe(code, SIGNALED, n);
        (request.remote_addr, request.rkey) = (U64::new(word), U32::new(b.key));
        (request.arg0, request.arg1) = (U64::new(first), U64::new(second));
        a.post_send(&mut qa, request, &[a.sge(result + 8 * n, 8)]);
    }
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(0, 0), (1, 0), (2, 0)]);
    let results: Vec<u8> = [40u64, 42, 7].iter().flat_map(|n| n.to_le_bytes()).collect();
    assert_eq!(a.read(result, 24), results);
    assert_eq!(b.read(word, 8), 7u64.to_le_bytes());
}

#[test]
fn inline_bytes_need_no_key_and_unsignaled_sends_are_silent() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let to = b.alloc(64);
    b.post_receive(&mut qb, 1, &[b.sge(to, 64)]);
    let mut request = wqe(opcode::SEND, send_flags::INLINE, 1);
    request.num_sge = U16::new(5);
    a.post_raw(&mut qa, request, b"hello");
    world.settle();
    assert!(a.drain(&mut qa.cq).is_empty());
    assert_eq!(b.drain(&mut qb.cq)[0].byte_len.get(), 5);
    assert_eq!(b.read(to, 5), b"hello");
}

#[test]
fn empty_messages_check_no_key() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    b.post_receive(&mut qb, 1, &[]);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    for (n, code) in [(2, opcode::RDMA_WRITE), (3, opcode::RDMA_READ)] {
        let mut request = wqe(code, SIGNALED, n);
        (request.remote_addr, request.rkey) = (U64::new(0xdead), U32::new(0xdead));
        a.post_send(&mut qa, request, &[]);
    }
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0), (2, 0), (3, 0)]);
    assert_eq!(b.drain(&mut qb.cq)[0].byte_len.get(), 0);
}

#[test]
fn a_guest_can_talk_to_itself() {
    let mut world = super::world();
    let mut a = world.guest(1, 1);
    let mut qa = world.qp(&mut a, qpt::RC, 16, None);
    world.connect(&a, &qa, qpt::RC, (qa.qpn, a.gid));
    let (from, bytes) = a.pattern(300_000, 8);
    let to = a.alloc(300_000);
    a.post_receive(&mut qa, 1, &[a.sge(to, 300_000)]);
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 2), &[a.sge(from, 300_000)]);
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0), (2, 0)]);
    assert!(a.read(to, 300_000) == bytes);
}

#[test]
fn solicited_arming_ignores_what_is_not_solicited() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    let to = b.alloc(64);
    for n in 0..3 {
        b.post_receive(&mut qb, n, &[b.sge(to, 64)]);
    }
    b.arm(&qb.cq, arm::SOLICITED);
    a.post_send(&mut qa, wqe(opcode::SEND, 0, 1), &[]);
    world.settle();
    assert!(b.completion_events().is_empty());
    a.post_send(&mut qa, wqe(opcode::SEND, send_flags::SOLICITED, 2), &[]);
    world.settle();
    assert_eq!(b.completion_events(), [(1, qb.cq.cqn)]);
    a.post_send(&mut qa, wqe(opcode::SEND, send_flags::SOLICITED, 3), &[]);
    world.settle();
    assert!(b.completion_events().is_empty(), "an event disarms");
    b.arm(&qb.cq, arm::ANY);
    world.settle();
    assert!(b.completion_events().is_empty(), "what was there before arming raises nothing");
}

/// A receiver under moderation: `count` entries or `period_us`.
pub(super) struct Moderated {
    pub(super) world: World,
    a: Guest,
    pub(super) b: Guest,
    qa: Qp,
    pub(super) qb: Qp,
}

pub(super) const US: u64 = 1000;

impl Moderated {
    pub(super) fn new(count: u16, period_us: u16) -> Self {
        let mut world = super::world();
        let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
        let (qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
        (0..12).for_each(|n| b.post_receive(&mut qb, n, &[]));
        let mut m = Self { world, a, b, qa, qb };
        m.moderate(count, period_us);
        m.b.arm(&m.qb.cq, arm::ANY);
        m
    }

    fn moderate(&mut self, count: u16, period_us: u16) {
        let cqn = self.qb.cq.cqn;
        self.world.ok(&self.b, self.b.ctx, Command::CqModerate { cqn, count, period_us });
        self.world.settle();
    }

    pub(super) fn send(&mut self, count: u64) {
        (0..count).for_each(|n| self.a.post_send(&mut self.qa, wqe(opcode::SEND, 0, n), &[]));
        self.world.settle();
    }

    /// Events since the last question.
    pub(super) fn events(&self) -> usize {
        self.b.completion_events().len()
    }
}

#[test]
fn moderated_events_wait_for_the_count() {
    let mut m = Moderated::new(4, u16::MAX);
    m.send(3);
    m.world.advance(60_000 * US);
    assert_eq!(m.events(), 0);
    m.send(1);
    assert_eq!(m.events(), 1);
    // Without a new arm nothing is due, however many come.
    m.send(5);
    m.world.advance(200_000 * US);
    assert_eq!(m.events(), 0);
    assert_eq!(m.b.statuses(&mut m.qb.cq).len(), 9, "entries never wait");
}

#[test]
fn errors_and_new_settings_end_the_wait() {
    let mut m = Moderated::new(100, u16::MAX);
    m.send(1);
    assert_eq!(m.events(), 0);
    m.world.modify(&m.b, &m.qb, state_attr(qps::ERR)).unwrap();
    m.world.settle();
    assert_eq!(m.events(), 1, "a flush is an error");

    let mut m = Moderated::new(100, u16::MAX);
    m.send(1);
    m.moderate(100, u16::MAX);
    assert_eq!(m.events(), 1, "the old wait is over");
    m.moderate(0, 10);
    m.b.arm(&m.qb.cq, arm::ANY);
    m.send(1);
    assert_eq!(m.events(), 1, "off");
    let stranger =
        m.world.execute(&m.b, 0, Command::CqModerate { cqn: m.qb.cq.cqn, count: 1, period_us: 1 });
    assert_eq!(stranger.unwrap_err(), Status::NOENT);
}

#[test]
fn moderation_outlives_its_cq_by_no_event() {
    let mut m = Moderated::new(100, 50);
    m.send(1);
    let bigger = m.world.resize(&mut m.b, &m.qb.cq.clone(), 512);
    m.qb.cq = bigger;
    m.world.settle();
    m.world.advance(100 * US);
    let armed_again = m.events();
    assert!(armed_again <= 1);
    m.b.arm(&m.qb.cq, arm::ANY);
    m.send(1);
    m.world.ok(&m.b, m.b.ctx, Command::QpDestroy(m.qb.qpn));
    m.world.ok(&m.b, m.b.ctx, Command::CqDestroy(m.qb.cq.cqn));
    m.world.advance(100 * US);
    assert_eq!(m.events(), 0);
}

#[test]
fn events_wait_for_buffers_one_per_cq() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    b.events.lock().unwrap().buffers = 0;
    for n in 0..2 {
        b.arm(&qb.cq, arm::ANY);
        b.post_receive(&mut qb, n, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, 0, n), &[]);
        world.settle();
    }
    assert!(b.completion_events().is_empty());
    b.events.lock().unwrap().buffers = 10;
    world.at(b.on).events_wanted(b.nic);
    world.settle();
    assert_eq!(b.completion_events(), [(1, qb.cq.cqn)]);
}

#[test]
fn events_that_find_their_queue_taken_come_again_without_being_asked() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) = world.pair(&mut a, &mut b, qpt::RC);
    for taken in 1..4 {
        b.arm(&qb.cq, arm::ANY);
        b.post_receive(&mut qb, 0, &[]);
        b.events.lock().unwrap().taken = taken;
        a.post_send(&mut qa, wqe(opcode::SEND, 0, 0), &[]);
        world.settle();
        assert_eq!(b.events.lock().unwrap().taken, 0, "tried until nobody has it");
        assert_eq!(b.completion_events(), [(1, qb.cq.cqn)], "and told once");
        b.events.lock().unwrap().completions.clear();
    }
}
