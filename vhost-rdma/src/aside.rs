//! Closing what others have sent, which may take as long as they like.
//!
//! Whoever closes the last descriptor of a TCP socket that lingers waits for its peer (socket(7),
//! `SO_LINGER`), and whoever closes a unix socket closes all that was sent there and not read. Any
//! process can send such a socket and keep none. So what a VMM or a process has sent, and sockets
//! that they may have sent something to, are never closed by a thread that others wait for, nor
//! under a lock: that has a thread of its own here, if there is no thread that is theirs alone.

//!
//! One thread does it for each cause, a NIC or a network, in turn, as long as there is something.
//! What is quick to close (eventfds of a VMM that stops its queues) never waits for long, however
//! much of it there is. Whoever lets a NIC's guests in looks first whether much waits
//! ([`is_crowded`]), so that nobody has any number of things wait.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

/// Stack of a thread: it does nothing else.
const STACK: usize = 128 << 10;
/// What waits for one cause at most. What is more stays open.
const MOST: usize = 4096;
/// From so many on nobody else is let in.
const CROWD: usize = 4;

type Things = VecDeque<Box<dyn Send>>;

/// By cause, as long as there is a thread for it.
static WAITING: Mutex<BTreeMap<String, Things>> = Mutex::new(BTreeMap::new());

fn waiting() -> MutexGuard<'static, BTreeMap<String, Things>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the next one out; none: the thread is not needed any more.
fn next(cause: &str) -> Option<Box<dyn Send>> {
    let mut waiting = waiting();
    let next = waiting.get_mut(cause)?.pop_front();
    if next.is_none() {
        waiting.remove(cause);
    }
    next
}

/// Whether so much that `cause` has sent waits that nobody else is to be let in for it.
pub(crate) fn is_crowded(cause: &str) -> bool {
    waiting().get(cause).is_some_and(|things| things.len() >= CROWD)
}

/// Closes descriptors, and waits for nothing.
pub(crate) fn close_aside(cause: &str, files: Vec<OwnedFd>) {
    if !files.is_empty() {
        drop_aside(cause, files);
    }
}

/// Drops `thing`, and waits for nothing.
pub(crate) fn drop_aside<T: Send + 'static>(cause: &str, thing: T) {
    let mut waiting = waiting();
    if let Some(things) = waiting.get_mut(cause) {
        if things.len() < MOST {
            things.push_back(Box::new(thing));
        } else {
            stays_open(cause, thing);
        }
        return;
    }
    waiting.insert(cause.to_owned(), Things::from([Box::new(thing) as Box<dyn Send>]));
    let own = cause.to_owned();
    let thread = thread::Builder::new().name("closing".to_owned()).stack_size(STACK);
    let started = thread.spawn(move || {
        while let Some(thing) = next(&own) {
            drop(thing);
        }
    });
    // It waits for the lock until here.
    if started.is_err()
        && let Some(things) = waiting.remove(cause)
    {
        stays_open(cause, things);
    }
}

/// Rather open for ever than closed here.
fn stays_open<T>(cause: &str, thing: T) {
    tracing::error!(cause, "what was sent to the daemon cannot be closed; it stays open");
    std::mem::forget(thing);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use rustix::net::sockopt::set_socket_linger;

    use super::*;

    /// A socket whose last descriptor takes `time` to close, and what to keep meanwhile.
    pub(crate) fn slow(time: Duration) -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        loop {
            match near.write(&[0; 1 << 16]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        set_socket_linger(&near, Some(time)).unwrap();
        (near.into(), far)
    }

    #[test]
    fn who_has_it_closed_does_not_wait() {
        let (near, far) = slow(Duration::from_secs(4));
        let begin = Instant::now();
        drop_aside("one", near);
        assert!(begin.elapsed() < Duration::from_secs(2));
        // Else it would have.
        let (near, farther) = slow(Duration::from_secs(2));
        let begin = Instant::now();
        drop(near);
        assert!(begin.elapsed() > Duration::from_secs(1));
        drop((far, farther));
    }

    #[test]
    fn much_that_is_quick_is_closed_and_what_is_slow_keeps_its_cause_out() {
        let eventually = |what: &str, is_so: &dyn Fn() -> bool| {
            let begin = Instant::now();
            while !is_so() {
                assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
                thread::sleep(Duration::from_millis(10));
            }
        };
        // As when a hundred VMs stop all their queues.
        let (mut reader, writer) = std::io::pipe().unwrap();
        for _ in 0..3000 {
            drop_aside("quick", writer.try_clone().unwrap());
        }
        drop(writer);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "all of them were closed");
        let mut far = Vec::new();
        for _ in 0..3 * CROWD {
            let (near, peer) = slow(Duration::from_secs(600));
            far.push(peer);
            drop_aside("slow", near);
        }
        assert!(is_crowded("slow") && !is_crowded("quick"));
        // Their peers are gone, and so is what held them up.
        drop(far);
        eventually("they are not closed", &|| !waiting().contains_key("slow"));
    }
}
