//! Closing what others have sent, which may take as long as they like.
//!
//! Whoever closes the last descriptor of a TCP socket that lingers waits for its peer (socket(7),
//! `SO_LINGER`), and whoever closes a unix socket closes all that was sent there and not read. Any
//! process can send such a socket and keep none. So what a VMM or a process has sent, and sockets
//! that they may have sent something to, are never closed by a thread that others wait for, nor
//! under a lock: that has a thread of its own here, if there is no thread that is theirs alone.
//!
//! Threads are counted by who is the cause, a NIC or a network. Whoever lets a NIC's guests in
//! looks at that count first ([`is_crowded`]), so that nobody has any number of threads wait. What
//! comes while all threads of a cause are busy waits for one of them. So nothing that is quick to
//! close (the eventfds of a hundred VMs that stop their queues) stays open, however much of it
//! there is. There is no single thread for a cause: it would wait for the slowest, and the program
//! that takes over by exec closes what has not been closed yet, and waits in its turn.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Stack of a thread: it does nothing else.
const STACK: usize = 128 << 10;
/// Threads of one cause at most.
const MOST: usize = 32;
/// What waits for them at most. What is more stays open.
const QUEUE: usize = 4096;
/// From so many threads on nobody else is let in.
const CROWD: usize = 4;

type Thing = Box<dyn Send>;

/// How long a thread stays that has nothing to do: what comes often takes no thread each time.
const LINGER: Duration = Duration::from_millis(100);

/// What one cause has closed.
#[derive(Default)]
struct Cause {
    threads: usize,
    /// Of these, those that have nothing to do.
    idle: usize,
    /// What no thread has begun with.
    queue: VecDeque<Thing>,
}

/// Those that have a thread.
static CAUSES: Mutex<BTreeMap<String, Cause>> = Mutex::new(BTreeMap::new());
/// Something has come for a thread that is idle.
static COME: Condvar = Condvar::new();

fn causes() -> MutexGuard<'static, BTreeMap<String, Cause>> {
    CAUSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread of `cause` closes next. If nothing comes for a while, it is no thread of the cause
/// any more.
fn next(cause: &str) -> Option<Thing> {
    let mut all = causes();
    let until = Instant::now() + LINGER;
    loop {
        let own = all.get_mut(cause)?;
        if let Some(next) = own.queue.pop_front() {
            return Some(next);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            own.threads -= 1;
            if own.threads == 0 {
                all.remove(cause);
            }
            return None;
        }
        own.idle += 1;
        all = COME.wait_timeout(all, left).unwrap_or_else(PoisonError::into_inner).0;
        if let Some(own) = all.get_mut(cause) {
            own.idle -= 1;
        }
    }
}

/// Whether what `cause` has sent takes so many threads that nobody else is to be let in for it.
pub(crate) fn is_crowded(cause: &str) -> bool {
    causes().get(cause).is_some_and(|own| own.threads - own.idle >= CROWD)
}

/// Closes descriptors, and waits for nothing.
pub(crate) fn close_aside(cause: &str, files: Vec<OwnedFd>) {
    if !files.is_empty() {
        drop_aside(cause, files);
    }
}

/// Drops `thing`, and waits for nothing.
pub(crate) fn drop_aside<T: Send + 'static>(cause: &str, thing: T) {
    let mut causes = causes();
    let own = causes.entry(cause.to_owned()).or_default();
    if own.queue.len() == QUEUE {
        return stays_open(cause, thing);
    }
    own.queue.push_back(Box::new(thing));
    if own.idle >= own.queue.len() {
        COME.notify_all();
        return;
    }
    if own.threads == MOST {
        return;
    }
    let name = cause.to_owned();
    let thread = thread::Builder::new().name("closing".to_owned()).stack_size(STACK);
    let started = thread.spawn(move || {
        while let Some(thing) = next(&name) {
            drop(thing);
        }
    });
    // It waits for the lock until here.
    if started.is_ok() {
        own.threads += 1;
    } else if own.threads == 0
        && let Some(own) = causes.remove(cause)
    {
        stays_open(cause, own.queue);
    }
}

/// Rather open for ever than closed here.
fn stays_open<T>(cause: &str, thing: T) {
    tracing::error!(cause, "what was sent to the daemon is too slow to close; it stays open");
    std::mem::forget(thing);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

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

    fn eventually(what: &str, is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_cause_has_so_many_threads_and_no_more() {
        let (mut far, mut most) = (Vec::new(), 0);
        for n in 0..2 * MOST {
            // A thread begins in its own time.
            eventually("threads are busy", || is_crowded("many") == (n >= CROWD));
            let (near, peer) = slow(Duration::from_secs(600));
            far.push(peer);
            drop_aside("many", near);
            most = most.max(causes()["many"].threads);
        }
        assert_eq!(most, MOST);
        assert!(!is_crowded("other"));
        // What waits behind them is closed too, once their peers are gone.
        let (mut reader, writer) = std::io::pipe().unwrap();
        drop_aside("many", writer);
        drop(far);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        eventually("their threads are there", || !causes().contains_key("many"));
    }

    #[test]
    fn what_is_quick_to_close_does_not_stay_open_however_much_it_is() {
        // As when a hundred VMs stop all their queues, and some of it is slow.
        let mut far = Vec::new();
        for _ in 0..CROWD {
            let (near, peer) = slow(Duration::from_secs(600));
            far.push(peer);
            drop_aside("quick", near);
        }
        let (mut reader, writer) = std::io::pipe().unwrap();
        for _ in 0..3000 {
            drop_aside("quick", writer.try_clone().unwrap());
        }
        drop(writer);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "all of them were closed");
        drop(far);
        eventually("their threads are there", || !causes().contains_key("quick"));
    }
}
