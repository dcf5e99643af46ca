//! Goes on with a session that another process has begun.
//!
//! The descriptors of a session outlive the process that served it, and so does the session: the
//! VMM is never told. What it agreed on with that process is first said again to the parser of
//! messages, over a socket pair, and then the VMM's stream takes that socket's place. Memory and
//! queues come as [`Change`]s.
//!
//! The guest is told that its device is lost: its objects were in the process that ended. Each
//! queue goes on where its used ring ends, since what was taken from it is given back in order; a
//! request that was not answered is found again, and refused like all others.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use vhost::vhost_user::message::{VhostUserSingleMemoryRegion, VhostUserVringAddrFlags};
use vhost::vhost_user::{BackendReqHandler, Error, Result, VhostUserBackendReqHandlerMut as _};
use virtio_queue::QueueT as _;

use super::frontend::Frontend;
use super::journal::{Change, Kept, Piece, Place};
use crate::socket;

/// Requests of the handshake (vhost-user, "Front-end message types").
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
/// Version 1 of the protocol.
const VERSION: u32 = 1;
/// Bytes of an answer with a number.
const ANSWER: usize = 20;

/// What a session has agreed on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) features: Option<u64>,
    pub(super) protocol: Option<u64>,
}

impl Agreed {
    /// Takes out of `changes` what the handshake repeats.
    pub(super) fn take(changes: &mut Vec<Kept>) -> Self {
        let mut agreed = Self::default();
        changes.retain(|(change, _)| {
            match change {
                Change::Features(features) => agreed.features = Some(*features),
                Change::ProtocolFeatures(features) => agreed.protocol = Some(*features),
                _ => return true,
            }
            false
        });
        agreed
    }
}

/// The parser of messages.
pub(super) type Handler = BackendReqHandler<Mutex<Frontend>>;

fn message(request: u32, payload: Option<u64>) -> Vec<u8> {
    let size: u32 = if payload.is_some() { 8 } else { 0 };
    let mut bytes = [request, VERSION, size].map(u32::to_le_bytes).concat();
    bytes.extend(payload.into_iter().flat_map(u64::to_le_bytes));
    bytes
}

/// Says to `handler`, at whose other end `near` is, what was agreed on.
pub(super) fn shake_hands(
    handler: &mut Handler,
    near: &mut UnixStream,
    agreed: Agreed,
) -> io::Result<()> {
    let mut say = |request, payload: Option<u64>, answered: bool| {
        near.write_all(&message(request, payload))?;
        handler.handle_request().map_err(io::Error::other)?;
        if answered { near.read_exact(&mut [0; ANSWER]) } else { Ok(()) }
    };
    say(SET_OWNER, None, false)?;
    say(GET_FEATURES, None, true)?;
    if let Some(features) = agreed.features {
        say(SET_FEATURES, Some(features), false)?;
    }
    say(GET_PROTOCOL_FEATURES, None, true)?;
    if let Some(features) = agreed.protocol {
        say(SET_PROTOCOL_FEATURES, Some(features), false)?;
    }
    Ok(())
}

/// Has `handler` read from `stream` from now on, and from nothing else.
pub(super) fn turn_to(handler: &Handler, stream: &UnixStream) -> io::Result<()> {
    socket::replace(handler.as_raw_fd(), stream.as_fd())
}

fn region(piece: &Piece) -> VhostUserSingleMemoryRegion {
    VhostUserSingleMemoryRegion::new(piece.start, piece.len, piece.vmm, piece.offset)
}

impl Frontend {
    /// Takes a change over that another process has taken over before.
    pub(super) fn restore(&mut self, change: &Change, mut files: Vec<File>) -> Result<()> {
        match *change {
            Change::Plugged(piece) => {
                let file = files.pop().ok_or(Error::InvalidParam)?;
                // It was within the limit once. One that was lowered since takes nothing away.
                self.plug(&region(&piece), file, u64::MAX)
            }
            Change::Size(queue, size) => self.set_vring_num(queue, size),
            Change::Place(queue, place) => {
                self.restore_place(queue, place)?;
                self.go_on(queue)
            }
            Change::Base(queue, base) => self.set_vring_base(queue, base),
            Change::Enabled(queue, enabled) => self.restore_enabled(queue, enabled),
            Change::Kick(queue) => self.set_vring_kick(index(queue)?, files.pop()),
            Change::Call(queue) => self.set_vring_call(index(queue)?, files.pop()),
            // The handshake's, and those that a kept session has no longer.
            Change::Features(_)
            | Change::ProtocolFeatures(_)
            | Change::Reset
            | Change::Memory(_)
            | Change::Unplugged(_)
            | Change::Stopped(..) => Ok(()),
        }
    }

    fn restore_place(&mut self, queue: u32, place: Place) -> Result<()> {
        let flags = VhostUserVringAddrFlags::empty();
        self.set_vring_addr(queue, flags, place.descriptors, place.used, place.available, 0)
    }

    /// Without asking which features there are: they were asked for when the VMM said it.
    fn restore_enabled(&mut self, queue: u32, enabled: bool) -> Result<()> {
        self.vring(queue)?.lock().set_enabled(enabled);
        self.listen(queue)
    }

    /// What a queue that ran has not given back it is to find again.
    fn go_on(&self, queue: u32) -> Result<()> {
        let vring = self.vring(queue)?;
        let mut state = vring.lock();
        let used = state.queue().next_used();
        state.queue().set_next_avail(used);
        drop(state);
        Ok(())
    }
}

fn index(queue: u32) -> Result<u8> {
    u8::try_from(queue).map_err(|_| Error::InvalidParam)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handshake_is_taken_out_and_the_rest_is_left() {
        let mut changes = vec![
            (Change::Features(7), Vec::new()),
            (Change::ProtocolFeatures(9), Vec::new()),
            (Change::Size(0, 64), Vec::new()),
        ];
        let agreed = Agreed::take(&mut changes);
        assert_eq!(agreed, Agreed { features: Some(7), protocol: Some(9) });
        assert_eq!(changes.len(), 1);
        assert_eq!(message(SET_FEATURES, Some(1)).len(), ANSWER);
        assert_eq!(message(SET_OWNER, None).len(), 12);
    }
}
