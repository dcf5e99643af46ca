//! A descriptor that takes as long to close as somebody else likes.
//!
//! A TCP socket that lingers, with bytes that its peer does not read, holds whoever closes the last
//! descriptor of it (socket(7), `SO_LINGER`).

use std::io::{ErrorKind, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// Longer than any wait of the daemon's.
const LONG: Duration = Duration::from_secs(600);

/// A socket that lingers, and its peer, which reads nothing.
///
/// # Panics
/// The host has no socket for it.
#[must_use]
pub fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("its address");
    let mut ours = TcpStream::connect(address).expect("a connection");
    let (peer, _) = listener.accept().expect("its other end");
    ours.set_nonblocking(true).expect("no wait");
    let bytes = [0; 1 << 16];
    loop {
        match ours.write(&bytes) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    set_socket_linger(&ours, Some(LONG)).expect("SO_LINGER");
    (ours, peer)
}

/// Closes it here, where it may be the last as well: if nobody has taken it, or is done with it.
pub fn let_go(slow: TcpStream) {
    std::thread::spawn(move || drop(slow));
}
