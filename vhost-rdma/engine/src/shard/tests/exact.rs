//! What is counted: time to the nanosecond, retries, bytes. A link that delays or repeats makes
//! other numbers of it, so these run over the others alone.

use virtio_rdma_abi::{arm, opcode, qps, qpt, send_flags, wc_status};
use zerocopy::little_endian::{U32, U64};

use super::connected::{Moderated, US};
use super::failures::{pair, rdma};
use super::rules::{Scene, scene};
use crate::shard::testing::driver::{init_attr, rtr_attr, state_attr, wqe};
use crate::shard::{Command, Reply};

const SIGNALED: u8 = send_flags::SIGNALED;

#[test]
fn bytes_are_counted_where_they_leave_and_where_they_arrive() {
    let Scene { mut world, mut a, mut b, mut qa, .. } = scene(qpt::RC);
    let (from, _) = a.pattern(1 << 20, 5);
    let to = b.alloc(1 << 20);
    for code in [opcode::RDMA_WRITE, opcode::RDMA_READ] {
        let mut request = wqe(code, SIGNALED, 1);
        (request.remote_addr, request.rkey) = (U64::new(to), U32::new(b.key));
        a.post_send(&mut qa, request, &[a.sge(from, 1 << 20)]);
    }
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, 0); 2]);
    for guest in [&a, &b] {
        let counters = world.status(guest).counters;
        assert_eq!((counters.tx_bytes, counters.rx_bytes), (1 << 20, 1 << 20));
    }
}

#[test]
fn moderated_events_wait_no_longer_than_the_period() {
    let mut m = Moderated::new(100, 50);
    for _ in 0..3 {
        m.send(1);
        m.world.advance(49 * US);
        assert_eq!(m.events(), 0);
        m.world.advance(US);
        assert_eq!(m.events(), 1);
        m.b.arm(&m.qb.cq, arm::ANY);
    }
    m.world.advance(1_000 * US);
    assert_eq!(m.events(), 0, "no entry since the arm, no event");
}

#[test]
fn completions_tell_the_device_clock() {
    let Scene { mut world, a, b, mut qa, mut qb } = scene(qpt::RC);
    world.now = 5_000_000_000;
    let mut last = 0;
    for n in 0..10u64 {
        world.now += 1_000 * n + 1;
        b.post_receive(&mut qb, n, &[]);
        a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, n), &[]);
        world.settle();
        for (guest, cq) in [(&a, &mut qa.cq), (&b, &mut qb.cq)] {
            let done = guest.drain(cq);
            assert_eq!(done.len(), 1);
            assert_eq!(done[0].timestamp.get(), world.now, "nanoseconds");
        }
        assert!(world.now > last);
        last = world.now;
    }
    let Reply::Device(device) = world.ok(&a, a.ctx, Command::QueryDevice) else { panic!() };
    assert_eq!(device.clock_khz.get(), 1_000_000, "which are a gigahertz");
}

#[test]
fn no_receive_waits_and_counts() {
    let mut p = pair(qpt::RC);
    p.a.post_send(&mut p.qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    p.world.advance(3 * 640_000 - 1);
    assert!(p.a.drain(&mut p.qa.cq).is_empty(), "three waits of 0.64 ms are allowed");
    p.world.advance(2);
    assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, wc_status::RNR_RETRY_EXC_ERR)]);
    assert_eq!(p.world.status(&p.b).counters.rnr_naks_sent, 4);
}

/// What waits is sent again, and would be stored again.
#[test]
fn a_write_with_immediate_stores_nothing_before_there_is_a_receive() {
    for kind in [qpt::RC, qpt::UC] {
        let mut p = pair(kind);
        let (from, bytes) = p.a.pattern(64, 1);
        let to = p.b.alloc(64);
        let write = rdma(opcode::RDMA_WRITE_WITH_IMM, to, p.b.key);
        p.a.post_send(&mut p.qa, write, &[p.a.sge(from, 64)]);
        p.world.advance(1_000_000);
        assert_eq!(p.b.read(to, 64), [0; 64]);
        p.b.post_receive(&mut p.qb, 7, &[]);
        p.world.settle();
        assert_eq!(p.a.statuses(&mut p.qa.cq), [(1, wc_status::SUCCESS)]);
        let came = if kind == qpt::RC { bytes } else { vec![0; 64] };
        assert_eq!(p.b.read(to, 64), came, "nobody sends an unreliable one again");
    }
}

#[test]
fn a_silent_peer_times_out_and_an_appearing_one_is_noticed() {
    let mut world = super::world();
    let (mut a, mut b) = (world.guest(1, 1), world.guest(1, 2));
    let (mut qa, mut qb) =
        (world.qp(&mut a, qpt::RC, 16, None), world.qp(&mut b, qpt::RC, 16, None));
    world.connect(&a, &qa, qpt::RC, (qb.qpn, b.gid));
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 1), &[]);
    world.advance(100_000_000);
    world.modify(&b, &qb, init_attr(qpt::RC)).unwrap();
    b.post_receive(&mut qb, 3, &[]);
    world.settle();
    world.modify(&b, &qb, rtr_attr(qpt::RC, (qa.qpn, a.gid))).unwrap();
    world.settle();
    assert_eq!(a.statuses(&mut qa.cq), [(1, wc_status::SUCCESS)]);
    world.modify(&b, &qb, state_attr(qps::RESET)).unwrap();
    a.post_send(&mut qa, wqe(opcode::SEND, SIGNALED, 2), &[]);
    // retry_cnt 2: three waits of 4.096 µs · 2^14.
    world.advance(3 * (4096 << 14) - 1);
    assert!(a.drain(&mut qa.cq).is_empty());
    world.advance(2);
    assert_eq!(a.statuses(&mut qa.cq), [(2, wc_status::RETRY_EXC_ERR)]);
}
