//! What a process and its session say to each other (docs/virtio-rdma-process.md, 3).
//!
//! A message is one packet. Requests begin with an [`Op`], answers with a status; what follows is
//! of a fixed length, but for device commands. Whatever has another length is refused.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::nic::{Job, JobKind, Status};

/// The version of the profile.
pub(super) const VERSION: u32 = 1;
/// Bytes of a message, each way.
pub(super) const MESSAGE_MAX: usize = 512;
/// Descriptors of a message.
pub(super) const FILES_MAX: usize = 4;

/// What a request asks for.
pub(super) mod op {
    /// Begin.
    pub(crate) const HELLO: u32 = 1;
    /// Let the device reach memory.
    pub(crate) const MEMORY_ADD: u32 = 2;
    /// Take it away.
    pub(crate) const MEMORY_REMOVE: u32 = 3;
    /// Make a completion channel.
    pub(crate) const CHANNEL_ADD: u32 = 4;
    /// End one.
    pub(crate) const CHANNEL_REMOVE: u32 = 5;
    /// An entry of the table of addresses.
    pub(crate) const ADDRESS: u32 = 6;
    /// A command of the device.
    pub(crate) const COMMAND: u32 = 7;
    /// Make the channel of jobs for mirrored regions.
    pub(crate) const MIRROR_ADD: u32 = 8;
    /// Make a channel of the connection manager.
    pub(crate) const CM_ADD: u32 = 16;
    /// End one.
    pub(crate) const CM_REMOVE: u32 = 17;
    /// A command of the connection manager, in a channel.
    pub(crate) const CM_COMMAND: u32 = 18;
}

/// The beginning of a request.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Head {
    pub(super) op: U32,
    pub(super) reserved: U32,
}

/// HELLO.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Hello {
    pub(super) version: U32,
    pub(super) reserved: U32,
}

/// Its answer; the status page, the kick descriptor and both ends of the channel of asynchronous
/// events come along.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Welcome {
    pub(super) version: U32,
    /// What `ALIVE` is in this life.
    pub(super) alive: U32,
    pub(super) comp_vectors: U32,
    /// Entries of the table of addresses.
    pub(super) addresses: U16,
    pub(super) mac: [u8; 6],
    pub(super) reserved: U32,
}

/// MEMORY_ADD (a descriptor comes along) and MEMORY_REMOVE.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Piece {
    /// Where the process has it.
    pub(super) address: U64,
    pub(super) length: U64,
    /// Where it begins in the file.
    pub(super) offset: U64,
}

/// CHANNEL_REMOVE, ADDRESS, CM_REMOVE, the beginning of CM_COMMAND (the command follows), and the
/// answers to CHANNEL_ADD and CM_ADD (both ends of the channel come along, or one).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Number {
    pub(super) number: U32,
    pub(super) reserved: U32,
}

/// The answer to ADDRESS.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Address {
    pub(super) gid: [u8; 16],
}

/// The beginning of COMMAND; the request of the device follows.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Given {
    /// How the process calls the object that is made.
    pub(super) cookie: U64,
    /// The completion channel of a CQ; 0: none.
    pub(super) channel: U32,
    pub(super) reserved: U32,
}

/// A completion event, as `struct ib_uverbs_comp_event_desc` (rdma/ib_user_verbs.h).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Completed {
    pub(super) cookie: U64,
}

/// An asynchronous event, as `struct ib_uverbs_async_event_desc` (rdma/ib_user_verbs.h).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Happened {
    pub(super) element: U64,
    pub(super) kind: U32,
    pub(super) reserved: U32,
}

/// What the owner of a mirrored region is to do.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct MirrorJob {
    pub(super) number: U64,
    pub(super) kind: U32,
    pub(super) key: U32,
    pub(super) address: U64,
    pub(super) length: U32,
    pub(super) reserved: U32,
    pub(super) operands: [U64; 2],
}

impl From<&Job> for MirrorJob {
    fn from(job: &Job) -> Self {
        let kind: u32 = match job.kind {
            JobKind::Arrived => 1,
            JobKind::Wanted => 2,
            JobKind::CompareSwap => 3,
            JobKind::FetchAdd => 4,
        };
        Self {
            number: job.number.into(),
            kind: kind.into(),
            key: job.key.into(),
            address: job.address.into(),
            length: job.length.into(),
            reserved: 0.into(),
            operands: job.operands.map(U64::new),
        }
    }
}

/// Its answer.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct MirrorDone {
    pub(super) number: U64,
    /// 0: done.
    pub(super) status: U32,
    pub(super) reserved: U32,
    /// What stood where an atomic changed a word.
    pub(super) value: U64,
}

/// A body of exactly this form.
pub(super) fn exactly<T: FromBytes>(body: &[u8]) -> Result<T, Status> {
    T::read_from_bytes(body).map_err(|_| Status::INVAL)
}

/// An answer: its status, and what follows with `OK`.
#[derive(Debug)]
pub(super) struct Answer {
    bytes: [u8; MESSAGE_MAX],
    len: usize,
}

impl Answer {
    /// One of this status, and nothing else.
    pub(super) fn of(status: Status) -> Self {
        let mut answer = Self { bytes: [0; MESSAGE_MAX], len: 0 };
        answer.push(&[status.0.to_le_bytes(), [0; 4]].concat());
        answer
    }

    /// It is done.
    pub(super) fn ok(body: &[u8]) -> Self {
        let mut answer = Self::of(Status(virtio_rdma_abi::cmd_status::OK));
        answer.push(body);
        answer
    }

    /// All bodies are shorter than the room (a test says so).
    fn push(&mut self, part: &[u8]) {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + part.len()) {
            room.copy_from_slice(part);
            self.len += part.len();
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}
