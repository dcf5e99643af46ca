//! A process's socket: packets with descriptors, and never a wait.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recv,
    recvmsg, sendmsg, shutdown, socketpair,
};

use super::messages::{FILES_MAX, MESSAGE_MAX};

/// What came in one packet.
#[derive(Debug)]
pub(super) struct Packet {
    bytes: [u8; MESSAGE_MAX],
    len: usize,
    pub(super) files: Vec<OwnedFd>,
    /// It was longer than any message, or had more descriptors than any has.
    pub(super) cut: bool,
}

impl Packet {
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// The next packet; `None` at the end.
///
/// # Errors
/// There is none, or the socket broke.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Packet>> {
    let mut packet = Packet { bytes: [0; MESSAGE_MAX], len: 0, files: Vec::new(), cut: false };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut packet.bytes)], &mut control, flags);
    let got = match got {
        Err(Errno::CONNRESET) => return Ok(None),
        other => other?,
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            packet.files.extend(rights);
        }
    }
    packet.len = got.bytes.min(MESSAGE_MAX);
    packet.cut = got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    // Nobody has anything to say in no bytes: it is the end.
    Ok((got.bytes > 0).then_some(packet))
}

/// Sends a packet.
///
/// # Errors
/// There is no room, or nobody at the other end.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

/// Packets that may wait unread in a socket, and more (`net.unix.max_dgram_qlen`).
const UNREAD_MAX: u32 = 4096;

/// Sends the last packet of a connection, and takes leave so that it arrives. Whoever closes with
/// packets unread has the peer's next read fail, whatever waits there to be read
/// (`unix_release_sock`, net/unix/af_unix.c). Nobody is waited for.
pub(super) fn last_word(socket: BorrowedFd<'_>, bytes: &[u8]) {
    // That the peer does not read is its own affair.
    let _ = send(socket, bytes, &[]);
    // From here on nothing more comes, so what is taken out now is all.
    let _ = shutdown(socket, Shutdown::Both);
    // Without room for descriptors: those that are never ours are let go of, and not flushed
    // (`scm_destroy`, net/core/scm.c). It may take long all the same; see `entry`.
    let mut byte = [0; 1];
    for _ in 0..UNREAD_MAX {
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        if !recv(socket, &mut byte, flags).is_ok_and(|(_, len)| len > 0) {
            return;
        }
    }
}

/// A channel of events: ours to send, and the process's to receive.
///
/// The process gets our end as well: it takes events of an object that it destroys out, and puts
/// the others back. So nothing that it does to the open file may matter here, and nothing does: a
/// packet is sent without waiting whatever the file's flags say.
#[derive(Debug)]
pub(super) struct Channel {
    ours: OwnedFd,
    /// Until it was sent.
    theirs: Option<OwnedFd>,
}

impl Channel {
    pub(super) fn new() -> io::Result<Self> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok(Self { ours, theirs: Some(theirs) })
    }

    /// The ends to be sent: to receive from, to put back at.
    pub(super) fn ends(&self) -> Option<[BorrowedFd<'_>; 2]> {
        Some([self.theirs.as_ref()?.as_fd(), self.ours.as_fd()])
    }

    /// They were sent.
    pub(super) fn given(&mut self) {
        self.theirs = None;
    }

    /// Puts an event in; false: there is no room now.
    pub(super) fn put(&self, event: &[u8]) -> bool {
        match send(self.ours.as_fd(), event, &[]) {
            // Nobody will ever read it: it is gone.
            Ok(()) => true,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ours.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_arrives_though_the_peer_has_spoken() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, peers) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (0..3).for_each(|n| send(peers.as_fd(), &[n + 1], &[]).unwrap());
        last_word(ours.as_fd(), b"no");
        assert!(send(peers.as_fd(), &[4], &[]).is_err(), "nothing more comes");
        drop(ours);
        assert_eq!(receive(peers.as_fd()).unwrap().unwrap().bytes(), b"no");
        assert!(receive(peers.as_fd()).unwrap().is_none(), "and it was the last");
    }
}
