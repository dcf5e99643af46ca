//! What a VMM has said, for whoever keeps it: enough to go on with the session in another process.
//!
//! vhost-user has no message that repeats a session, and QEMU's generic device does not connect
//! again. So each message that was taken over is told to a [`Journal`], with the descriptors that
//! came with it, before the VMM is answered. What a session is at the end of that,
//! [`restore`](super::restore) takes up.

use std::fs::File;
use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};

use crate::node::Ending;

/// A region of a guest's memory. Its file goes beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// Guest physical address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Where the VMM itself has it.
    pub vmm: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

/// Where a VMM says that a queue is, by its own addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Descriptor table.
    pub descriptors: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub available: u64,
}

/// One change of a session, as the VMM made it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Change {
    /// Virtio features were chosen.
    Features(u64),
    /// Features of vhost-user were chosen.
    ProtocolFeatures(u64),
    /// All features are forgotten and all queues disabled.
    Reset,
    /// This is all of the guest's memory; a file for each piece.
    Memory(Vec<Piece>),
    /// One more piece, and its file.
    Plugged(Piece),
    /// The piece that starts here is gone.
    Unplugged(u64),
    /// A queue has so many entries.
    Size(u32, u32),
    /// A queue lies there.
    Place(u32, Place),
    /// A queue goes on at this index.
    Base(u32, u32),
    /// A queue may run, or may not.
    Enabled(u32, bool),
    /// A queue is kicked by this descriptor, or by none.
    Kick(u32),
    /// This descriptor tells of a queue's used buffers, or none does.
    Call(u32),
    /// A queue was stopped at this index.
    Stopped(u32, u32),
}

impl Change {
    /// The queue that this says the place of.
    pub(super) const fn placed(&self) -> Option<u32> {
        if let Self::Place(queue, _) = self { Some(*queue) } else { None }
    }

    /// The queue that this lets run.
    pub(super) const fn kicked(&self) -> Option<u32> {
        if let Self::Kick(queue) = self { Some(*queue) } else { None }
    }
}

/// A change, and the descriptors that came with it.
pub type Kept = (Change, Vec<File>);

/// Keeps what a VMM says. Calls come from the connection's own thread, and may wait.
pub trait Journal: Send + Sync {
    /// A message is about to be taken from the stream.
    fn begun(&self) {}

    /// Something has changed.
    fn changed(&self, _change: Change, _files: &[BorrowedFd<'_>]) {}

    /// The message was answered.
    fn done(&self) {}

    /// There are no more, and nothing is left of the session.
    fn ended(&self, _ending: &Ending) {}
}

/// Keeps nothing: where the session ends with the process.
#[derive(Debug)]
pub struct Forgetful;

impl Journal for Forgetful {}
