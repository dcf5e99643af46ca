//! What goes between shards: a request that owns its bytes, and its answer.
//!
//! A request is known by its [`Token`]. An answer settles what it was asked and nothing else: who
//! gets one for a request that it has given up, or asked in another life of its queue pair, lets it
//! lie. A responder executes a request once, however often it arrives, which it knows by the
//! [`Ticket`]: the requester's queue pair gives the same number to a piece until that is done.

use std::cell::RefCell;

use serde::{Deserialize, Serialize};

use super::{Fanout, Flow, Gid, NicId, Operation, Outcome, Owner, Payload, Request, Service};

/// By which a responder knows what it has executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The life of the requester's queue pair: from RESET to RESET. No two have the same; 0 is
    /// none.
    pub life: u64,
    /// The piece, counted in that life.
    pub number: u32,
}

/// The shard of whoever asks over a wire.
pub const OUTSIDE: usize = usize::MAX;

/// Who asked, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The requester's shard; [`OUTSIDE`] of who is in none.
    pub shard: usize,
    /// The requester's NIC, as its shard knows it.
    pub nic: NicId,
    /// The requester's QP.
    pub qpn: u32,
    /// The request.
    pub ticket: Ticket,
    /// Bytes that are under way for it, at most.
    pub size: u32,
}

/// A request on its way to another shard.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Who asked.
    pub token: Token,
    /// The network.
    pub vni: u32,
    /// What its owner was asked, and did.
    pub owner: Owner,
    /// Whom of a group it has reached on the responder's shard.
    pub fanout: Fanout,
    flow: Flow,
    service: Service,
    operation: Operation,
    /// What goes with the request; room for the answer's, else.
    bytes: Vec<u8>,
    total: u32,
    offset: u32,
    message: u32,
    len: u32,
    remote_addr: u64,
    rkey: u32,
    immediate: Option<[u8; 4]>,
    invalidate: Option<u32>,
    solicited: bool,
    operands: [u64; 2],
    qkey: u32,
    ahead: bool,
}

impl Ask {
    /// A request, and the bytes of its piece.
    pub(crate) fn new((token, vni): (Token, u32), request: &Request<'_>, bytes: Vec<u8>) -> Self {
        // The responder's shard has other NICs by the same numbers, and is to take it for none of
        // them.
        let source = NicId::ELSEWHERE;
        Self {
            token,
            vni,
            owner: Owner::Unasked,
            fanout: Fanout::default(),
            flow: Flow { source, ..*request.flow },
            service: request.service,
            operation: request.operation,
            bytes,
            total: request.total,
            offset: request.offset,
            message: request.message,
            len: request.len,
            remote_addr: request.remote_addr,
            rkey: request.rkey,
            immediate: request.immediate,
            invalidate: request.invalidate,
            solicited: request.solicited,
            operands: request.operands,
            qkey: request.qkey,
            ahead: request.ahead,
        }
    }

    /// Where it goes.
    #[must_use]
    pub const fn flow(&self) -> &Flow {
        &self.flow
    }

    /// By which it names memory.
    pub(crate) const fn key(&self) -> u32 {
        self.rkey
    }

    /// Whether its sender waits for what becomes of it.
    #[must_use]
    pub const fn is_reliable(&self) -> bool {
        matches!(self.service, Service::Reliable)
    }

    /// Number of the message that it is a piece of.
    pub(crate) const fn message(&self) -> u32 {
        self.message
    }

    /// Whether it was sent before its turn.
    #[must_use]
    pub const fn is_ahead(&self) -> bool {
        self.ahead
    }

    /// Length of the piece, in bytes.
    #[must_use]
    pub const fn size(&self) -> u32 {
        self.len
    }

    /// Its bytes, which are not needed any more.
    pub fn take_bytes(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// As the responder takes it; what it reads it puts into `reply`.
    #[must_use]
    pub fn request<'a>(&'a self, reply: &'a RefCell<Vec<u8>>) -> Request<'a> {
        let payload = if self.operation.fetches() {
            Payload::Reply(reply)
        } else {
            Payload::Piece(&self.bytes)
        };
        Request {
            flow: &self.flow,
            service: self.service,
            operation: self.operation,
            payload,
            total: self.total,
            offset: self.offset,
            message: self.message,
            len: self.len,
            remote_addr: self.remote_addr,
            rkey: self.rkey,
            immediate: self.immediate,
            invalidate: self.invalidate,
            solicited: self.solicited,
            operands: self.operands,
            qkey: self.qkey,
            fanout: self.fanout,
            owner: self.owner,
            ticket: self.token.ticket,
            crossed: false,
            ahead: self.ahead,
        }
    }
}

/// What became of a request.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Which.
    pub token: Token,
    /// What; `None`: nothing yet, or nobody waits for it.
    pub outcome: Option<Outcome>,
    /// What was read; or the request's bytes, for their allocation.
    pub bytes: Vec<u8>,
    /// The requester may have as much more under way: each request gives that back once.
    pub gives_back: bool,
}

/// What goes between shards.
#[derive(Clone, Debug)]
pub enum Parcel {
    /// To be executed.
    Ask(Ask),
    /// To be settled.
    Answer(Answer),
    /// The same, for a queue pair of a NIC that was on the shard of whoever says so.
    WakeNic {
        /// The NIC.
        nic: NicId,
        /// The QP.
        qpn: u32,
    },
    /// What a queue pair waits for may have come.
    Wake {
        /// The network.
        vni: u32,
        /// The address of its NIC.
        gid: Gid,
        /// The QP.
        qpn: u32,
    },
}

impl Parcel {
    /// Whether it says that a wait is over.
    #[must_use]
    pub const fn is_wake(&self) -> bool {
        matches!(self, Self::Wake { .. } | Self::WakeNic { .. })
    }
}
