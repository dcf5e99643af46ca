//! An answer to one call.

use std::thread;
use std::time::Duration;

use crate::worker::reply::{NoAnswer, reply};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn an_answer_comes_early_late_or_not_at_all() {
    let (reply_now, answer) = reply();
    reply_now.give(1);
    reply_now.give(2);
    assert_eq!(answer.wait(Duration::ZERO), Ok(1));
    let (reply_later, answer) = reply();
    assert_eq!(answer.wait(Duration::from_millis(5)), Err(NoAnswer::Timeout));
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        reply_later.give(3);
    });
    assert_eq!(answer.wait(LONG), Ok(3));
    other.join().expect("it ends");
    let (never, answer) = reply::<u32>();
    let other = thread::spawn(move || drop(never));
    assert_eq!(answer.wait(LONG), Err(NoAnswer::Gone));
    other.join().expect("it ends");
}

#[test]
fn none_is_lost_between_the_look_and_the_sleep() {
    for n in 0..2000u32 {
        let (reply, answer) = reply();
        let other = thread::spawn(move || reply.give(n));
        assert_eq!(answer.wait(LONG), Ok(n));
        other.join().expect("it ends");
    }
}
