//! Closing what others have sent, which may take as long as they like.
//!
//! Whoever closes the last descriptor of a TCP socket that lingers waits for its peer (socket(7),
//! `SO_LINGER`), and whoever closes a unix socket closes all that was sent there and not read. Any
//! process can send such a socket and keep none. So what a VMM or a process has sent, and sockets
//! that they may have sent something to, are never closed by a thread that others wait for, nor
//! under a lock: that has a thread of its own here, if there is no thread that is theirs alone.

//!
//! They are counted by who is the cause, a NIC or a network. Whoever lets a NIC's guests in looks
//! at that count first ([`is_crowded`]), so that nobody has any number of threads wait.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Stack of a thread: it does nothing else.
const STACK: usize = 128 << 10;
/// Threads that one cause has wait at most. What is more stays open.
const MOST: usize = 32;
/// From so many on nobody else is let in.
const CROWD: usize = 4;

static WAITING: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

fn waiting() -> MutexGuard<'static, BTreeMap<String, usize>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread of `cause`.
struct Waiting(String);

impl Waiting {
    /// None: it has as many as it may.
    fn begin(cause: &str) -> Option<Self> {
        let mut waiting = waiting();
        let own = waiting.entry(cause.to_owned()).or_default();
        if *own >= MOST {
            return None;
        }
        *own += 1;
        Some(Self(cause.to_owned()))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waiting = waiting();
        if let Some(own) = waiting.get_mut(&self.0) {
            *own -= 1;
            if *own == 0 {
                waiting.remove(&self.0);
            }
        }
    }
}

/// Whether what `cause` has sent takes so many threads that nobody else is to be let in for it.
pub(crate) fn is_crowded(cause: &str) -> bool {
    waiting().get(cause).is_some_and(|own| *own >= CROWD)
}

/// Closes descriptors, and waits for nothing.
pub(crate) fn close_aside(cause: &str, files: Vec<OwnedFd>) {
    if !files.is_empty() {
        drop_aside(cause, files);
    }
}

/// Drops `thing`, and waits for nothing.
pub(crate) fn drop_aside<T: Send + 'static>(cause: &str, thing: T) {
    let kept = Arc::new(Mutex::new(Some(thing)));
    let own = kept.clone();
    let started = Waiting::begin(cause).is_some_and(|waiting| {
        let thread = thread::Builder::new().name("closing".to_owned()).stack_size(STACK);
        let started = thread.spawn(move || {
            let thing = own.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(thing);
            drop(waiting);
        });
        started.is_ok()
    });
    if !started {
        // Rather open for ever than closed here.
        tracing::error!(cause, "what was sent to the daemon is too slow to close; it stays open");
        std::mem::forget(kept);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{ErrorKind, Write as _};
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
    fn a_cause_has_so_many_threads_and_no_more() {
        let (mut far, mut most) = (Vec::new(), 0);
        for n in 0..2 * MOST {
            assert_eq!(is_crowded("many"), n >= CROWD, "{n}");
            let (near, peer) = slow(Duration::from_secs(600));
            far.push(peer);
            drop_aside("many", near);
            most = most.max(waiting()["many"]);
        }
        assert_eq!(most, MOST);
        assert!(!is_crowded("other"));
        // Their peers are gone, and so is what held them up.
        drop(far);
        let begin = Instant::now();
        while waiting().contains_key("many") {
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", waiting().get("many"));
            thread::sleep(Duration::from_millis(10));
        }
    }
}
