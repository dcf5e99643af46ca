//! A mailbox of a worker.

use std::collections::VecDeque;
use std::thread;

use crate::worker::mailbox::{Found, mailbox};

#[test]
fn messages_come_in_order_from_each_sender() {
    const EACH: u32 = 20_000;
    let (sender, mailbox) = mailbox();
    let threads = [0u32, 1, 2].map(|who| {
        let sender = sender.clone();
        thread::spawn(move || (0..EACH).for_each(|n| sender.send((who, n)).expect("there")))
    });
    drop(sender);
    let mut next = [0; 3];
    loop {
        match mailbox.take() {
            Found::One((who, n)) => {
                assert_eq!(next[who as usize], n);
                next[who as usize] += 1;
            }
            Found::Later | Found::None => thread::yield_now(),
            Found::Closed => break,
        }
    }
    assert_eq!(next, [EACH; 3]);
    for thread in threads {
        thread.join().expect("it ends");
    }
}

#[test]
fn all_go_and_come_at_once_and_nobody_waits() {
    let (sender, inbox) = mailbox();
    let (mut messages, mut into) = (VecDeque::from([1, 2, 3]), VecDeque::new());
    assert!(!sender.hold(|| sender.try_send_all(&mut messages)), "somebody has it");
    assert!(sender.try_send_all(&mut messages) && messages.is_empty());
    assert!(!sender.hold(|| inbox.take_all(&mut into)), "there are some");
    assert!(inbox.take_all(&mut into) && inbox.take_all(&mut into));
    assert_eq!(into, [1, 2, 3]);
    drop(inbox);
    assert!(sender.try_send_all(&mut into) && into.is_empty(), "to nobody");
}

#[test]
fn the_worker_does_not_wait_for_who_holds_the_lock() {
    let (sender, mailbox) = mailbox();
    sender.send(1).expect("there");
    assert_eq!(sender.hold(|| mailbox.take()), Found::Later);
    assert_eq!(mailbox.take(), Found::One(1));
    assert_eq!(mailbox.take(), Found::None);
}

#[test]
fn a_message_to_nobody_comes_back_and_nobody_to_send_is_seen() {
    let (sender, inbox) = mailbox();
    let other = sender.clone();
    sender.send(7).expect("there");
    drop((sender, other));
    assert_eq!((inbox.take(), inbox.take()), (Found::One(7), Found::Closed));
    let (sender, inbox) = mailbox();
    drop(inbox);
    assert_eq!(sender.send(7), Err(7));
}
