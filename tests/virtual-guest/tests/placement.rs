//! How the bytes of a peer come to memory, for a program that looks at them before it is told.

#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test on a 64-bit host"
)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use virtual_guest::qp::SendWr;
use virtual_guest::world::{Area, World};

/// In so much time a worker that copied by `memcpy` was caught in four runs of eleven, on two
/// processors. Where it is found each time is `in_order/stepped.rs` of the memory's crate.
const TIME: Duration = Duration::from_secs(4);
/// Messages at least, however busy the machine is.
const LEAST: u64 = 100;
/// Words of the messages: one register of 16 bytes, one and a half, two.
const WORDS: [u64; 3] = [2, 3, 4];

/// Has the other thread end with this one, however that is.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits for the last word of each message and takes all of them away, as a sender of rsockets
/// takes from the room that its peer has told it of.
fn take_away(area: &Area, (told, taken): (&AtomicU64, &AtomicU64), stop: &AtomicBool) {
    let _ends = Ends(stop);
    while !stop.load(Ordering::Relaxed) {
        let message = told.load(Ordering::Acquire);
        if message == taken.load(Ordering::Relaxed) {
            std::hint::spin_loop();
            continue;
        }
        let words = WORDS[message as usize % WORDS.len()];
        while area.word(8 * (words - 1)) != message {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            std::hint::spin_loop();
        }
        for word in 0..words {
            assert_eq!(area.word(8 * word), message, "the last word came first");
            area.set_word(8 * word, 0);
        }
        taken.store(message, Ordering::Release);
    }
}

#[test]
fn a_byte_that_a_program_has_changed_is_not_stored_again() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (source, target) = (a.node.area(32), b.node.area(32));
    let (told, taken) = (AtomicU64::new(0), AtomicU64::new(0));
    let stop = AtomicBool::new(false);
    let mut messages = 0;
    thread::scope(|scope| {
        let _ends = Ends(&stop);
        scope.spawn(|| take_away(&target, (&told, &taken), &stop));
        let until = Instant::now() + TIME;
        while messages <= LEAST || Instant::now() < until {
            messages += 1;
            let words = WORDS[messages as usize % WORDS.len()];
            (0..words).for_each(|word| source.set_word(8 * word, messages));
            told.store(messages, Ordering::Release);
            let (to, key) = (target.addr(0), target.rkey());
            a.run_ok(&SendWr::write(messages, &[source.part(0, 8 * words)], to, key));
            while taken.load(Ordering::Acquire) != messages {
                assert!(!stop.load(Ordering::Relaxed), "message {messages} came otherwise");
                std::hint::spin_loop();
            }
            let left: Vec<u64> = (0..words).map(|word| target.word(8 * word)).collect();
            assert!(left.iter().all(|&word| word == 0), "message {messages} came again: {left:x?}");
        }
    });
    assert!(messages > LEAST, "{messages} messages");
}

/// Whether all bytes of a word's first `len` are the same.
fn is_whole(word: u64, len: u64) -> bool {
    let all = 0x0101_0101_0101_0101 * (word & 0xff);
    (word ^ all) << (64 - 8 * len) == 0
}

/// Messages that are a word, and that end with one.
#[test]
fn a_word_is_stored_at_once() {
    let world = World::new();
    let (mut a, b) = world.rc_pair();
    let (source, target) = (a.node.area(64), b.node.area(64));
    for (before, len) in [(0, 2), (0, 4), (0, 8), (16, 2), (16, 4), (16, 8)] {
        let stop = AtomicBool::new(false);
        let (mut messages, mut looks) = (0u64, 0u64);
        thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut looks = 0;
                while !stop.load(Ordering::Relaxed) {
                    let word = target.word(before);
                    assert!(is_whole(word, len), "{before} bytes and {len}: {word:x}");
                    looks += 1;
                }
                looks
            });
            let ends = Ends(&stop);
            let until = Instant::now() + TIME / 8;
            let goes_on = |messages| messages <= LEAST || Instant::now() < until;
            while goes_on(messages) && !watcher.is_finished() {
                messages += 1;
                source.set(&vec![messages as u8; (before + len) as usize]);
                let (to, key) = (target.addr(0), target.rkey());
                a.run_ok(&SendWr::write(messages, &[source.part(0, before + len)], to, key));
            }
            drop(ends);
            looks = watcher.join().expect("no part of a word");
        });
        assert!(messages > LEAST && looks > messages, "{messages} messages, {looks} looks");
        target.set(&[0; 64]);
    }
}
