//! Closing what others have sent, which may take as long as they like.
//!
//! Whoever closes the last descriptor of a TCP socket that lingers waits for its peer (socket(7),
//! `SO_LINGER`), and whoever closes a unix socket closes all that was sent there and not read. Any
//! process can send such a socket and keep none. So what a VMM or a process has sent, and sockets
//! that they may have sent something to, are never closed by a thread that others wait for, nor
//! under a lock: that has a thread of its own here, if there is no thread that is theirs alone.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Its stack: it does nothing else.
const STACK: usize = 128 << 10;

/// Closes descriptors, and waits for nothing.
pub(crate) fn close_aside(files: Vec<OwnedFd>) {
    if !files.is_empty() {
        drop_aside(files);
    }
}

/// Drops `thing`, and waits for nothing.
pub(crate) fn drop_aside<T: Send + 'static>(thing: T) {
    let kept = Arc::new(Mutex::new(Some(thing)));
    let own = kept.clone();
    let started =
        thread::Builder::new().name("closing".to_owned()).stack_size(STACK).spawn(move || {
            let thing = own.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(thing);
        });
    if started.is_err() {
        // The host has no thread. Rather open for ever than closed here.
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
        drop_aside(near);
        assert!(begin.elapsed() < Duration::from_secs(2));
        // Else it would have.
        let (near, farther) = slow(Duration::from_secs(2));
        let begin = Instant::now();
        drop(near);
        assert!(begin.elapsed() > Duration::from_secs(1));
        drop((far, farther));
    }
}
