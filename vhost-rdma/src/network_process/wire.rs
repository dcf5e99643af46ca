//! A socket pair that keeps messages apart and carries descriptors (`SOCK_SEQPACKET`,
//! `SCM_RIGHTS`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
    recvmsg, sendmsg, shutdown, socketpair,
};

use super::bad_message::MESSAGE_MAX;
use super::protocol::FILES_MAX;

/// One end.
#[derive(Debug)]
pub struct Wire {
    socket: OwnedFd,
    /// Room for the longest message; one thread receives.
    room: Mutex<Vec<u8>>,
}

/// What came in one piece.
#[derive(Debug)]
pub struct Packet {
    /// The message.
    pub bytes: Vec<u8>,
    /// Its descriptors.
    pub files: Vec<OwnedFd>,
    /// There were more, for which this process had no room.
    pub files_lost: bool,
}

impl Wire {
    /// Both ends.
    ///
    /// # Errors
    /// The host refuses.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self::new(near), far))
    }

    /// The end that is open as `socket`.
    #[must_use]
    pub const fn new(socket: OwnedFd) -> Self {
        Self { socket, room: Mutex::new(Vec::new()) }
    }

    /// How long a message may wait for room at the other end.
    ///
    /// # Errors
    /// The host refuses.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        Ok(set_socket_timeout(&self.socket, Timeout::Send, Some(patience))?)
    }

    /// How long to wait for a message that does not come, which is an error then.
    ///
    /// # Errors
    /// The host refuses, or it is no socket.
    pub fn set_hearing(&self, patience: Duration) -> io::Result<()> {
        Ok(set_socket_timeout(&self.socket, Timeout::Recv, Some(patience))?)
    }

    /// Nobody speaks by this wire any more: whoever waits for a message finds the end, and whoever
    /// waits for room an error.
    pub fn hang_up(&self) {
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Sends a message. It waits while the other end has not read earlier ones.
    ///
    /// # Errors
    /// The other end is gone, or does not read.
    pub fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, files, SendFlags::NOSIGNAL)
    }

    /// Sends a message if there is room for it at once.
    ///
    /// # Errors
    /// As [`Self::send`], or there is none.
    pub fn try_send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, files, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_with(
        &self,
        bytes: &[u8],
        files: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = files.len() <= FILES_MAX
            && (files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
        if !fits {
            return Err(io::Error::other("too many descriptors for one message"));
        }
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for a message; `None` at the end.
    ///
    /// # Errors
    /// The socket broke, or the message is longer than any may be.
    pub fn receive(&self) -> io::Result<Option<Packet>> {
        self.receive_with(RecvFlags::empty(), true)
    }

    /// As [`Self::receive`], but does not wait.
    ///
    /// # Errors
    /// As there; [`io::ErrorKind::WouldBlock`]: there is none.
    pub fn try_receive(&self) -> io::Result<Option<Packet>> {
        self.receive_with(RecvFlags::DONTWAIT, true)
    }

    /// As [`Self::try_receive`], from who has no descriptor to send. A message that brings one all
    /// the same stays where it is: to take it out is to close what nobody else has, which may take
    /// as long as whoever made it likes (`aside`).
    ///
    /// # Errors
    /// As there; [`io::ErrorKind::InvalidData`]: there is such a message, and nothing behind it is
    /// heard any more.
    pub fn try_hear(&self) -> io::Result<Option<Packet>> {
        if self.brings_files()? {
            let why = "descriptors with a message that has none";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        self.receive_with(RecvFlags::DONTWAIT, false)
    }

    /// Whether the next message has descriptors. Who only looks has them as well for a moment, and
    /// never last (`unix_peek_fds`, net/unix/af_unix.c).
    fn brings_files(&self) -> io::Result<bool> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let mut byte = [0; 1];
        loop {
            let mut control = RecvAncillaryBuffer::default();
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags) {
                Ok(got) => return Ok(got.flags.contains(ReturnFlags::CTRUNC)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn receive_with(&self, flags: RecvFlags, takes_files: bool) -> io::Result<Option<Packet>> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        room.resize(MESSAGE_MAX, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let room_for_files = if takes_files { &mut space[..] } else { &mut [] };
        let mut control = RecvAncillaryBuffer::new(room_for_files);
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let got = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut room)], &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::CONNRESET) => return Ok(None),
                other => break other?,
            }
        };
        let mut files = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
        if got.flags.contains(ReturnFlags::TRUNC) {
            return Err(io::Error::other("a message that is too long"));
        }
        if got.bytes == 0 {
            return Ok(None);
        }
        let bytes = room.get(..got.bytes).unwrap_or_default().to_vec();
        Ok(Some(Packet { bytes, files, files_lost: got.flags.contains(ReturnFlags::CTRUNC) }))
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Instant;

    use super::*;

    #[test]
    fn messages_stay_apart_and_bring_their_descriptors() {
        let (near, far) = Wire::pair().unwrap();
        let far = Wire::new(far);
        let null = File::open("/dev/null").unwrap();
        near.send(b"one", &[]).unwrap();
        near.send(b"two", &[null.as_fd(); FILES_MAX]).unwrap();
        let packet = far.receive().unwrap().unwrap();
        assert_eq!((packet.bytes.as_slice(), packet.files.len()), (b"one".as_slice(), 0));
        let packet = far.receive().unwrap().unwrap();
        assert_eq!((packet.bytes.as_slice(), packet.files.len()), (b"two".as_slice(), FILES_MAX));
        assert!(!packet.files_lost);
        assert!(near.send(b"three", &[null.as_fd(); FILES_MAX + 1]).is_err());
        drop(near);
        assert!(far.receive().unwrap().is_none());
    }

    #[test]
    fn who_takes_no_descriptor_gets_none_and_is_told() {
        let (near, far) = Wire::pair().unwrap();
        let far = Wire::new(far);
        assert_eq!(far.try_hear().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        near.send(b"none", &[]).unwrap();
        assert_eq!(far.try_hear().unwrap().unwrap().bytes, b"none");
        let (reader, writer) = io::pipe().unwrap();
        near.send(b"one", &[writer.as_fd()]).unwrap();
        drop(writer);
        near.send(b"two", &[]).unwrap();
        // Again and again: it stays where it is.
        for _ in 0..3 {
            assert_eq!(far.try_hear().unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        drop(far);
        // Nobody has it any more.
        assert_eq!(io::read_to_string(reader).unwrap(), "");
    }

    #[test]
    fn a_message_that_is_too_long_is_an_error() {
        let (near, far) = Wire::pair().unwrap();
        near.send(&vec![7; MESSAGE_MAX + 1], &[]).unwrap();
        assert!(Wire::new(far).receive().is_err());
    }

    #[test]
    fn whoever_does_not_read_holds_nobody_up_for_long() {
        let (near, _far) = Wire::pair().unwrap();
        near.set_patience(Duration::from_millis(50)).unwrap();
        let begin = Instant::now();
        let mut sent = 0;
        while near.send(&[1; 4096], &[]).is_ok() {
            sent += 1;
            assert!(sent < 10_000, "there is no end to the room");
        }
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}
