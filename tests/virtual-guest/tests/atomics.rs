//! Atomics: results, alignment, and that they are atomic against a CPU of the guest that owns the
//! memory.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::sync::atomic::{AtomicBool, Ordering};

use virtual_guest::backing::rules;
use virtual_guest::qp::{Path, SendWr};
use virtual_guest::spec::{cap, event, qps, status, wc};
use virtual_guest::world::World;

#[test]
fn fetch_and_add_adds_and_returns_the_old_value() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (result, word) = (a.node.area(8), b.node.area(24));
    word.set_word(8, u64::MAX - 2);
    let at = (word.addr(8), word.rkey());
    for (add, old) in [(1, u64::MAX - 2), (5, u64::MAX - 1), (u64::MAX, 3)] {
        let done = a.run_ok(&SendWr::faa(1, result.sge(), at, add));
        assert_eq!((done.opcode, done.byte_len), (wc::FETCH_ADD, 8));
        result.bytes();
        assert_eq!(result.word(0), old);
    }
    assert_eq!((word.word(0), word.word(8), word.word(16)), (0, 2, 0));
}

#[test]
fn compare_and_swap_swaps_only_what_it_expects() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (result, word) = (a.node.area(8), b.node.area(24));
    word.set_word(8, 0x0123_4567_89ab_cdef);
    let at = (word.addr(8), word.rkey());
    let done = a.run_ok(&SendWr::cas(1, result.sge(), at, 1, 2));
    assert_eq!((done.opcode, done.byte_len), (wc::COMP_SWAP, 8));
    assert_eq!(result.word(0), 0x0123_4567_89ab_cdef);
    assert_eq!(word.word(8), 0x0123_4567_89ab_cdef);
    a.run_ok(&SendWr::cas(2, result.sge(), at, 0x0123_4567_89ab_cdef, 77));
    assert_eq!(result.word(0), 0x0123_4567_89ab_cdef);
    assert_eq!((word.word(0), word.word(8), word.word(16)), (0, 77, 0));
}

#[test]
fn a_misaligned_atomic_is_an_invalid_request() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (result, word) = (a.node.area(8), b.node.area(24));
    let failed = a.run(&SendWr::faa(1, result.sge(), (word.addr(4), word.rkey()), 1));
    assert_eq!(failed.status, status::REM_INV_REQ_ERR);
    assert_eq!(word.bytes(), [0; 24]);
    assert_eq!(a.qp.state().unwrap(), qps::ERR);
    if !rules().misaligned_atomic_is_sent {
        assert_eq!(b.qp.state().unwrap(), qps::RTS);
        return;
    }
    let guest = &b.node.guest;
    let second = std::time::Duration::from_secs(1);
    guest.await_async(event::QP_REQ_ERR, b.qp.qpn, second).expect("QP_REQ_ERR at the responder");
    assert_eq!(b.qp.state().unwrap(), qps::ERR);
}

#[test]
fn an_atomic_needs_one_element_of_eight_bytes() {
    let world = World::new();
    for parts in [1u64, 2] {
        let (mut a, b) = world.rc_pair();
        let (result, word) = (a.node.area(16), b.node.area(8));
        let sges = if parts == 1 {
            vec![result.sge()]
        } else {
            vec![result.part(0, 4), result.part(4, 4)]
        };
        let mut wr = SendWr::faa(1, result.part(0, 8), (word.addr(0), word.rkey()), 1);
        wr.sges = sges;
        let failed = a.run(&wr);
        assert_ne!(failed.status, status::SUCCESS);
        assert!(
            [status::LOC_QP_OP_ERR, status::LOC_LEN_ERR].contains(&failed.status),
            "{failed:?}"
        );
        assert_eq!(word.word(0), 0);
    }
}

#[test]
fn the_device_says_that_its_atomics_hold_against_cpus_and_they_do() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let caps = a.node.guest.query_device().unwrap().caps & (cap::ATOMIC | cap::ATOMIC_GLOB);
    if !rules().atomic_against_cpus {
        assert_eq!(caps, cap::ATOMIC, "a claim that nobody keeps");
        return;
    }
    assert_eq!(caps, cap::ATOMIC | cap::ATOMIC_GLOB);
    let (results, word) = (a.node.area(64 * 8), b.node.area(8));
    let stop = AtomicBool::new(false);
    // Enough that an operation in two halves is seen also where the cores are shared with others.
    let total = 200_000u64;
    let by_cpu = std::thread::scope(|scope| {
        let cpu = scope.spawn(|| {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                word.fetch_add(0, 1 << 32);
                n += 1;
            }
            n
        });
        let (mut posted, mut done) = (0, 0);
        while done < total {
            while posted < total && posted - done < 64 {
                let slot = results.part((posted % 64) * 8, 8);
                a.qp.queue_send(&SendWr::faa(posted, slot, (word.addr(0), word.rkey()), 1));
                posted += 1;
            }
            a.qp.ring_sq();
            a.scq.ok();
            done += 1;
        }
        stop.store(true, Ordering::Relaxed);
        cpu.join().expect("the CPU thread")
    });
    assert_eq!(word.word(0) & 0xffff_ffff, total, "an RDMA add was lost");
    assert_eq!(word.word(0) >> 32, by_cpu, "an add of the guest's CPU was lost");
}

#[test]
fn atomics_of_two_guests_on_one_word_lose_nothing() {
    let world = World::new();
    let (a, owner) = world.rc_pair();
    let (c, again) = (world.node().rc(), owner.node.rc());
    c.connect(&again, &Path::default());
    again.connect(&c, &Path::default());
    let word = owner.node.area(8);
    let at = (word.addr(0), word.rkey());
    let adds = 500u64;
    std::thread::scope(|scope| {
        for mut end in [a, c] {
            scope.spawn(move || {
                let results = end.node.area(8 * 8);
                for round in 0..adds / 8 {
                    for i in 0..8 {
                        let slot = results.part(i * 8, 8);
                        end.qp.queue_send(&SendWr::faa(round * 8 + i, slot, at, 1));
                    }
                    end.qp.ring_sq();
                    for _ in 0..8 {
                        end.scq.ok();
                    }
                }
            });
        }
    });
    assert_eq!(word.word(0), 2 * (adds / 8 * 8));
}

#[test]
fn compare_and_swap_is_atomic_against_a_cpu_that_also_swaps() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    if !rules().atomic_against_cpus {
        let caps = a.node.guest.query_device().unwrap().caps;
        assert_eq!(caps & cap::ATOMIC_GLOB, 0, "a claim that nobody keeps");
        return;
    }
    let (result, word) = (a.node.area(8), b.node.area(8));
    let stop = AtomicBool::new(false);
    let mut by_rdma = 0u64;
    let by_cpu = std::thread::scope(|scope| {
        let cpu = scope.spawn(|| {
            let mut won = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let old = word.word(0);
                let view = word.mr.view();
                let at = virtual_guest::world::GUARD;
                won += u64::from(view.compare_exchange64(at, old, old + 1) == old);
            }
            won
        });
        for i in 0..4000 {
            let old = word.word(0);
            a.run_ok(&SendWr::cas(i, result.sge(), (word.addr(0), word.rkey()), old, old + 1));
            by_rdma += u64::from(result.word(0) == old);
        }
        stop.store(true, Ordering::Relaxed);
        cpu.join().expect("the CPU thread")
    });
    assert_eq!(word.word(0), by_cpu + by_rdma, "two winners for one value");
    assert!(by_cpu > 0);
}
