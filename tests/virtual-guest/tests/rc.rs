//! Reliable connections: every verb with its data, guard bytes on both sides, element lists,
//! ordering and ring wrap.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::time::Duration;

use virtual_guest::backing::rules;
use virtual_guest::check::{self, Moved, Op, Terms};
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::{cqe, event, qpt, send, status, wc};
use virtual_guest::world::{End, Node, World, pattern};

/// Sizes around every boundary that a copy can get wrong: words, cache lines, pages, the copy's
/// pieces.
const SIZES: [u64; 17] =
    [0, 1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 12_345, 65_535, 65_536, 65_537, 262_145, 1 << 20];

fn each_size(a: &mut End, b: &mut End, mut f: impl FnMut(&mut End, &mut End, u64, u64)) {
    for (i, size) in SIZES.into_iter().enumerate() {
        f(a, b, size, i as u64);
    }
}

#[test]
fn send_delivers_every_size_through_element_lists() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    each_size(&mut a, &mut b, |a, b, size, i| {
        let data = pattern(i, size as usize);
        let (from, to) = (a.node.area_of(&data), b.node.area(size));
        b.qp.post_recv(1000 + i, &to.parts(3));
        let sent = a.run_ok(&SendWr::send(i, &from.parts(4)));
        assert_eq!(sent.opcode, wc::SEND);
        let received = b.rcq.ok();
        assert_eq!((received.wr_id, received.qpn), (1000 + i, b.qp.qpn));
        assert_eq!(received.opcode, wc::RECV);
        assert_eq!(received.flags & (cqe::RECV | cqe::IMM | cqe::SRQ), cqe::RECV);
        assert_eq!(u64::from(received.byte_len), size);
        assert_eq!(to.bytes(), data);
        assert_eq!(from.bytes(), data);
    });
}

#[test]
fn send_carries_an_immediate() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let to = b.node.area(64);
    b.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::send(2, &[a.node.area_of(&[9; 10]).sge()]).imm(0xdead_beef));
    let received = b.rcq.ok();
    assert_eq!(received.imm, 0xdead_beef);
    assert_eq!(received.flags & cqe::IMM, cqe::IMM);
    assert_eq!((received.opcode, received.byte_len), (wc::RECV, 10));
    assert_eq!(to.bytes()[..10], [9; 10]);
    assert_eq!(to.bytes()[10..], [0; 54]);
}

#[test]
fn a_receive_may_be_larger_than_the_message() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let data = pattern(5, 5000);
    let to = b.node.area(9000);
    b.qp.post_recv(1, &to.parts(4));
    a.run_ok(&SendWr::send(1, &[a.node.area_of(&data).sge()]));
    assert_eq!(b.rcq.ok().byte_len, 5000);
    let bytes = to.bytes();
    assert_eq!(bytes[..5000], data);
    assert!(bytes[5000..].iter().all(|b| *b == 0));
}

#[test]
fn write_delivers_every_size_and_is_silent_at_the_target() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    each_size(&mut a, &mut b, |a, b, size, i| {
        let data = pattern(i, size as usize);
        let (from, to) = (a.node.area_of(&data), b.node.area(size));
        let done = a.run_ok(&SendWr::write(i, &from.parts(4), to.addr(0), to.rkey()));
        assert_eq!(done.opcode, wc::RDMA_WRITE);
        assert_eq!(to.bytes(), data);
    });
    b.rcq.silent(Duration::from_millis(20));
}

#[test]
fn write_with_immediate_takes_a_receive() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    each_size(&mut a, &mut b, |a, b, size, i| {
        let data = pattern(i, size as usize);
        let (from, to, other) = (a.node.area_of(&data), b.node.area(size), b.node.area(16));
        b.qp.post_recv(i, &[other.sge()]);
        let write = SendWr::write(i, &from.parts(2), to.addr(0), to.rkey()).imm(0x0102_0304);
        assert_eq!(a.run_ok(&write).opcode, wc::RDMA_WRITE);
        let received = b.rcq.ok();
        assert_eq!(received.opcode, wc::RECV_RDMA_WITH_IMM);
        assert_eq!(received.imm, 0x0102_0304);
        assert_eq!(received.flags & cqe::IMM, cqe::IMM);
        assert_eq!(u64::from(received.byte_len), size);
        assert_eq!(to.bytes(), data);
        assert_eq!(other.bytes(), [0; 16], "the receive's own buffer is not touched");
    });
}

#[test]
fn read_fetches_every_size_into_element_lists() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    each_size(&mut a, &mut b, |a, b, size, i| {
        let data = pattern(i, size as usize);
        let (to, from) = (a.node.area(size), b.node.area_of(&data));
        let done = a.run_ok(&SendWr::read(i, &to.parts(4), from.addr(0), from.rkey()));
        assert_eq!(done.opcode, wc::RDMA_READ);
        assert_eq!(u64::from(done.byte_len), size);
        assert_eq!(to.bytes(), data);
        assert_eq!(from.bytes(), data);
    });
}

#[test]
fn inline_data_needs_no_key() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    for size in [0usize, 1, 8, 31, 64] {
        let data = pattern(size as u64, size);
        let to = b.node.area(64);
        b.qp.post_recv(1, &[to.sge()]);
        a.run_ok(&SendWr::send(1, &[]).inline(&data));
        assert_eq!(b.rcq.ok().byte_len as usize, size);
        assert_eq!(to.bytes()[..size], data);
        let target = b.node.area(64);
        a.run_ok(
            &SendWr::write(2, &[], target.addr(3), target.rkey()).inline(&data[..size.min(61)]),
        );
        assert_eq!(target.bytes()[3..3 + size.min(61)], data[..size.min(61)]);
    }
}

#[test]
fn unsignaled_requests_complete_silently_and_in_order() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (from, to) = (a.node.area(8), b.node.area(8));
    for round in 0..100u64 {
        for i in 0..7 {
            from.set_word(0, round * 8 + i);
            let mut write = SendWr::write(i, &[from.sge()], to.addr(0), to.rkey());
            write = if i < 6 { write.unsignaled() } else { write };
            a.qp.queue_send(&write);
        }
        a.qp.ring_sq();
        let done = a.scq.ok();
        assert_eq!(done.wr_id, 6);
        assert_eq!(done.wqe_index, a.qp.sq_producer() - 1);
        assert_eq!(to.word(0), round * 8 + 6);
    }
    a.scq.silent(Duration::from_millis(20));
}

#[test]
fn sig_all_makes_every_send_signaled() {
    let world = World::new();
    let spec = QpSpec { sig_all: true, ..QpSpec::new(qpt::RC) };
    let (mut a, b) = world.pair(&spec, &Path::default());
    let (from, to) = (a.node.area(8), b.node.area(8));
    for i in 0..5 {
        a.run_ok(&SendWr::write(i, &[from.sge()], to.addr(0), to.rkey()).unsignaled());
    }
}

#[test]
fn completions_come_in_posting_order_over_mixed_verbs() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let (local, remote) = (a.node.area(1 << 18), b.node.area(1 << 18));
    let inbox = b.node.area(1 << 18);
    for round in 0..20u64 {
        b.qp.post_recv(round * 2, &[inbox.sge()]);
        b.qp.post_recv(round * 2 + 1, &[inbox.sge()]);
        let (at, key) = (remote.addr(0), remote.rkey());
        let word = local.part(0, 8);
        let batch = [
            SendWr::read(0, &[local.sge()], at, key),
            SendWr::send(1, &[local.part(0, 1)]),
            SendWr::faa(2, word, (at, key), 1),
            SendWr::write(3, &[local.sge()], at, key).flag(send::FENCE),
            SendWr::cas(4, word, (at, key), 0, 0),
            SendWr::send(5, &[local.sge()]),
        ];
        for request in &batch {
            a.qp.queue_send(request);
        }
        a.qp.ring_sq();
        for i in 0..6 {
            assert_eq!(a.scq.ok().wr_id, i);
        }
        assert_eq!(b.rcq.ok().wr_id, round * 2);
        assert_eq!(b.rcq.ok().wr_id, round * 2 + 1);
    }
}

#[test]
fn a_fenced_send_sees_what_the_read_before_it_brought() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let size = 1 << 16;
    let (local, remote, inbox) = (a.node.area(size), b.node.area(size), b.node.area(size));
    for round in 0..30 {
        let data = pattern(round, size as usize);
        remote.set(&data);
        b.qp.post_recv(round, &[inbox.sge()]);
        a.qp.queue_send(
            &SendWr::read(1, &[local.sge()], remote.addr(0), remote.rkey()).unsignaled(),
        );
        a.qp.queue_send(&SendWr::send(2, &[local.sge()]).flag(send::FENCE));
        a.qp.ring_sq();
        assert_eq!(a.scq.ok().wr_id, 2);
        b.rcq.ok();
        assert_eq!(inbox.bytes(), data);
    }
}

#[test]
fn a_read_sees_what_the_write_before_it_left() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let size = 70_000;
    let (from, back, remote) = (a.node.area(size), a.node.area(size), b.node.area(size));
    for round in 0..30 {
        let data = pattern(round, size as usize);
        from.set(&data);
        let (at, key) = (remote.addr(0), remote.rkey());
        a.qp.queue_send(&SendWr::write(1, &[from.sge()], at, key).unsignaled());
        a.qp.queue_send(&SendWr::read(2, &[back.sge()], at, key));
        a.qp.ring_sq();
        a.scq.ok();
        assert_eq!(back.bytes(), data);
    }
}

#[test]
fn rings_wrap_many_times() {
    let world = World::new();
    let spec = QpSpec { sq: 8, rq: 4, ..QpSpec::new(qpt::RC) };
    let (mut a, mut b) = world.pair(&spec, &Path::default());
    let (from, to) = (a.node.area(64), b.node.area(256));
    for i in 0..1000u64 {
        from.set_word(0, i);
        let slot = (i % 4) * 64;
        b.qp.post_recv(i, &[to.part(slot, 64)]);
        a.run_ok(&SendWr::send(i, &[from.sge()]));
        let received = b.rcq.ok();
        assert_eq!((received.wr_id, received.wqe_index), (i, i as u32));
        assert_eq!(to.word(slot), i);
    }
}

#[test]
fn a_full_ring_is_carried_out_whole() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let inbox = b.node.area(64 * 16);
    for round in 0..10u64 {
        for i in 0..64 {
            b.qp.queue_recv(i, &[inbox.part(i * 16, 16)]);
        }
        b.qp.ring_rq();
        for i in 0..64u64 {
            a.qp.queue_send(&SendWr::send(i, &[]).inline(&(round * 64 + i).to_le_bytes()));
        }
        a.qp.ring_sq();
        for i in 0..64 {
            assert_eq!(a.scq.ok().wr_id, i);
            assert_eq!(b.rcq.ok().wr_id, i);
            assert_eq!(inbox.word(i * 16), round * 64 + i);
        }
    }
}

#[test]
fn both_directions_at_once() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let (at_a, at_b) = (a.node.area(1 << 16), b.node.area(1 << 16));
    let (from_a, from_b) =
        (a.node.area_of(&pattern(1, 1 << 16)), b.node.area_of(&pattern(2, 1 << 16)));
    for _ in 0..20 {
        a.qp.post_recv(1, &[at_a.sge()]);
        b.qp.post_recv(1, &[at_b.sge()]);
        a.qp.post_send(&SendWr::send(2, &[from_a.sge()]));
        b.qp.post_send(&SendWr::send(2, &[from_b.sge()]));
        a.scq.ok();
        b.scq.ok();
        a.rcq.ok();
        b.rcq.ok();
        assert_eq!(at_a.bytes(), pattern(2, 1 << 16));
        assert_eq!(at_b.bytes(), pattern(1, 1 << 16));
    }
}

#[test]
fn loopback_between_two_queue_pairs_of_one_nic() {
    let world = World::new();
    let node = world.node();
    let (mut a, mut b) = (node.rc(), node.rc());
    a.connect(&b, &Path::default());
    b.connect(&a, &Path::default());
    let data = pattern(3, 10_000);
    let (from, to) = (node.area_of(&data), node.area(10_000));
    b.qp.post_recv(1, &to.parts(2));
    a.run_ok(&SendWr::send(2, &from.parts(3)));
    b.rcq.ok();
    assert_eq!(to.bytes(), data);
}

#[test]
fn a_queue_pair_may_be_connected_to_itself() {
    let world = World::new();
    let node = world.node();
    let mut a = node.rc();
    a.qp.connect(a.address(), &Path::default()).unwrap();
    let data = pattern(4, 3000);
    let (from, to, back) = (node.area_of(&data), node.area(3000), node.area(3000));
    a.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::send(2, &[from.sge()]));
    a.rcq.ok();
    assert_eq!(to.bytes(), data);
    a.run_ok(&SendWr::read(3, &[back.sge()], from.addr(0), from.rkey()));
    assert_eq!(back.bytes(), data);
    let (word, result) = (node.area(8), node.area(8));
    word.set_word(0, 41);
    a.run_ok(&SendWr::faa(4, result.sge(), (word.addr(0), word.rkey()), 1));
    assert_eq!((word.word(0), result.word(0)), (42, 41));
}

#[test]
fn many_queue_pairs_share_completion_queues() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (scq, rcq) = (na.cq(1024), nb.cq(1024));
    let (unused_a, unused_b) = (na.cq(16), nb.cq(16));
    let mut first = na.end_with(&QpSpec::new(qpt::RC), scq, unused_a);
    let mut second = nb.end_with(&QpSpec::new(qpt::RC), unused_b, rcq);
    let spec = QpSpec::new(qpt::RC);
    let mut others = Vec::new();
    for _ in 0..20 {
        let a =
            virtual_guest::qp::Qp::create(&na.ctx, na.pdn, &first.scq, &first.rcq, &spec).unwrap();
        let b = virtual_guest::qp::Qp::create(&nb.ctx, nb.pdn, &second.scq, &second.rcq, &spec)
            .unwrap();
        a.connect((nb.gid, b.qpn), &Path::default()).unwrap();
        b.connect((na.gid, a.qpn), &Path::default()).unwrap();
        others.push((a, b));
    }
    let inbox = nb.area(20 * 8);
    for (i, (a, b)) in others.iter_mut().enumerate() {
        b.post_recv(i as u64, &[inbox.part(i as u64 * 8, 8)]);
        a.post_send(&SendWr::send(i as u64, &[]).inline(&(i as u64 + 7).to_le_bytes()));
    }
    let mut sent = [false; 20];
    let mut received = [false; 20];
    for _ in 0..20 {
        let (s, r) = (first.scq.ok(), second.rcq.ok());
        assert_eq!(s.qpn, others[s.wr_id as usize].0.qpn);
        assert_eq!(r.qpn, others[r.wr_id as usize].1.qpn);
        sent[s.wr_id as usize] = true;
        received[r.wr_id as usize] = true;
    }
    assert!(sent.iter().chain(&received).all(|x| *x));
    for i in 0..20u64 {
        assert_eq!(inbox.word(i * 8), i + 7);
    }
}

#[test]
fn the_first_message_in_rtr_raises_comm_est_and_is_received() {
    let world = World::new();
    let (na, nb) = (world.node(), world.node());
    let (mut a, mut b) = (na.rc(), nb.rc());
    b.qp.to_init(&Path::default()).unwrap();
    b.qp.to_rtr(a.address(), &Path::default()).unwrap();
    a.connect(&b, &Path::default());
    let to = nb.area(8);
    b.qp.post_recv(1, &[to.sge()]);
    a.run_ok(&SendWr::send(1, &[]).inline(&[1; 8]));
    assert_eq!(b.rcq.ok().byte_len, 8);
    let told = nb.guest.await_async(event::COMM_EST, b.qp.qpn, Duration::from_secs(2));
    assert_eq!(told.is_ok(), rules().comm_est, "COMM_EST");
}

#[test]
fn counters_grow_by_the_bytes_that_moved() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (from, to) = (a.node.area(100_000), b.node.area(100_000));
    let before = (a.node.guest.query_counters().unwrap(), b.node.guest.query_counters().unwrap());
    for i in 0..10 {
        a.run_ok(&SendWr::write(i, &[from.sge()], to.addr(0), to.rkey()));
    }
    let after = (a.node.guest.query_counters().unwrap(), b.node.guest.query_counters().unwrap());
    assert_eq!(after.0.tx_bytes - before.0.tx_bytes, 1_000_000);
    assert_eq!(after.0.tx_messages - before.0.tx_messages, 10);
    let inbound = u64::from(rules().inbound_is_counted);
    assert_eq!(after.1.rx_bytes - before.1.rx_bytes, inbound * 1_000_000);
    assert_eq!(after.1.rx_messages - before.1.rx_messages, inbound * 10);
}

#[test]
fn bursts_complete_in_order() {
    let world = World::new();
    let (mut a, mut b) = world.rc_pair();
    let inbox = b.node.area(16);
    let mut seen = 0;
    for i in 0..500u64 {
        b.qp.post_recv(i, &[inbox.sge()]);
        a.qp.post_send(&SendWr::send(i, &[]).inline(&[0; 16]));
        if i % 50 == 49 {
            for _ in 0..50 {
                assert_eq!(a.scq.ok().status, status::SUCCESS);
                assert_eq!(b.rcq.ok().wr_id, seen);
                seen += 1;
            }
        }
    }
}

#[test]
fn two_guests_verify_each_other_as_vrdma_check_does() {
    let world = World::new();
    let (a, b) = (world.node(), world.node());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let server = listener.local_addr().unwrap().to_string();
    let terms = |node: &Node| Terms {
        tell: std::net::Ipv6Addr::from(node.gid).to_canonical(),
        call: None,
        most: 4097,
    };
    let moved = std::thread::scope(|scope| {
        let served = scope.spawn(|| check::serve(&listener, &b, terms(&b)));
        let moved = check::client(&server, &a, terms(&a), &[Op::Write, Op::Read, Op::Send]);
        let served = served.join().expect("the server found wrong bytes");
        assert_eq!(served.bytes, moved.iter().map(|moved| moved.bytes).sum::<u64>());
        moved
    });
    assert_eq!(moved, [Moved { messages: 64, bytes: 4 * 17_875 }; 3]);
}
