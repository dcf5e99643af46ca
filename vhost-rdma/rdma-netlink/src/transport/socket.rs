//! One netlink socket and one exchange at a time on it.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST};
use netlink_sys::{Socket, SocketAddr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::frame::{self, Kind};
use crate::{Error, Result};

/// The kernel answers within the call that asks; this is for the case that it does not.
const ANSWER: Duration = Duration::from_secs(30);
/// The kernel builds parts of a list of at most 32 KiB; one link with very many VFs can be larger.
const BUFFER: usize = 256 << 10;
/// A list that always changes while it is read is given up.
const DUMP_TRIES: u32 = 8;

/// A connected netlink socket.
pub(crate) struct Channel {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

/// What one call asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) message_type: u16,
    /// Besides `NLM_F_REQUEST`, `NLM_F_ACK` and `NLM_F_DUMP`.
    pub(crate) flags: u16,
    pub(crate) payload: &'a [u8],
    /// Completes "cannot …".
    pub(crate) what: &'a str,
}

impl Channel {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open(protocol: isize, name: &str) -> Result<Self> {
        let fault = |source| Error::io(format!("open a {name} netlink socket"), source);
        let mut socket = Socket::new(protocol).map_err(fault)?;
        socket.bind_auto().map_err(fault)?;
        socket.connect(&SocketAddr::new(0, 0)).map_err(fault)?;
        // Kernels before 4.12 have no extended acknowledgements, and errors are as good as before.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        set_socket_timeout(socket.as_fd(), Timeout::Recv, Some(ANSWER))
            .map_err(|errno| fault(errno.into()))?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(BUFFER) })
    }

    /// Joins a multicast group; receives without end from then on.
    pub(crate) fn subscribe(&mut self, group: u32, what: &str) -> Result<()> {
        self.socket.add_membership(group).map_err(|source| Error::io(what, source))?;
        set_socket_timeout(self.socket.as_fd(), Timeout::Recv, None)
            .map_err(|source| Error::io(what, source))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Lets the kernel check dump requests, so that a filter which it does not know is refused
    /// instead of ignored.
    pub(crate) fn strict(&mut self) {
        let _ = self.socket.set_netlink_get_strict_chk(true);
    }

    /// Sends a request and gives each answer to `take` until the kernel acknowledges or refuses.
    pub(crate) fn call(
        &mut self,
        request: Request<'_>,
        mut take: impl FnMut(u16, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.send(request, NLM_F_ACK)?;
        self.collect(request.what, &mut take).map(|_| ())
    }

    /// Asks for a list; starts again if it changed while it was made.
    pub(crate) fn dump<T>(
        &mut self,
        request: Request<'_>,
        mut decode: impl FnMut(&[u8]) -> Result<Option<T>>,
    ) -> Result<Vec<T>> {
        for _ in 0..DUMP_TRIES {
            self.send(request, NLM_F_DUMP)?;
            let mut list = Vec::new();
            let whole = self.collect(request.what, &mut |_, payload| {
                list.extend(decode(payload)?);
                Ok(())
            })?;
            if whole {
                return Ok(list);
            }
        }
        Err(Error::decode(request.what, "the list changes faster than it can be read"))
    }

    /// Waits for the next message that nobody asked for.
    pub(crate) fn event<T>(
        &mut self,
        what: &str,
        mut decode: impl FnMut(u16, &[u8]) -> Result<Option<T>>,
    ) -> Result<Vec<T>> {
        let datagram = receive(&self.socket, &mut self.buffer, what)?;
        let mut list = Vec::new();
        for frame in frame::frames(datagram) {
            let frame = frame.map_err(|reason| Error::decode(what, reason))?;
            if let Kind::Data { message_type, payload, .. } = frame.kind {
                list.extend(decode(message_type, payload)?);
            }
        }
        Ok(list)
    }

    fn send(&mut self, request: Request<'_>, flags: u16) -> Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let flags = request.flags | flags | NLM_F_REQUEST;
        let bytes = frame::request(request.message_type, flags, self.sequence, request.payload);
        loop {
            match self.socket.send(&bytes, 0) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(Error::io(request.what, source)),
            }
        }
    }

    /// Reads until the end of the answer; false if it is inconsistent. An error of `take` is kept
    /// until then, so that the next exchange begins with an empty socket.
    fn collect(
        &mut self,
        what: &str,
        take: &mut dyn FnMut(u16, &[u8]) -> Result<()>,
    ) -> Result<bool> {
        let mut whole = true;
        let mut outcome = Ok(());
        loop {
            let datagram = receive(&self.socket, &mut self.buffer, what)?;
            for frame in frame::frames(datagram) {
                let frame = frame.map_err(|reason| Error::decode(what, reason))?;
                // The rest of an exchange that was given up.
                if frame.sequence != self.sequence {
                    continue;
                }
                match frame.kind {
                    Kind::Noop => {}
                    Kind::Data { message_type, interrupted, payload } => {
                        whole &= !interrupted;
                        if outcome.is_ok() {
                            outcome = take(message_type, payload);
                        }
                    }
                    Kind::End { errno: 0, .. } => return outcome.map(|()| whole),
                    Kind::End { errno, message } => {
                        return Err(Error::Kernel { what: what.to_owned(), errno, message });
                    }
                }
            }
        }
    }
}

fn receive<'a>(socket: &Socket, buffer: &'a mut Vec<u8>, what: &str) -> Result<&'a [u8]> {
    loop {
        buffer.clear();
        match socket.recv(buffer, TRUNC) {
            Ok(length) if length > buffer.len() => {
                return Err(Error::decode(what, format!("a message of {length} bytes")));
            }
            Ok(_) => return Ok(buffer),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(Error::io(
                    what,
                    io::Error::new(io::ErrorKind::TimedOut, "the kernel did not answer"),
                ));
            }
            Err(source) => return Err(Error::io(what, source)),
        }
    }
}

/// Reports the true length of a message that did not fit.
const TRUNC: i32 = rustix::net::RecvFlags::TRUNC.bits().cast_signed();
