//! Control requests: from bytes to an engine command, and from its reply to bytes (docs/virtio-rdma.md §5).
//!
//! Sans-I/O and without threads: the caller hands in the bytes and an [`Executor`], and gets the bytes of the response.
//! Checks come in this order: the header, the sizes of the request and of the room for the response, the fields, the guest's
//! memory, and only then the engine sees the command. So a refused request has had no effect.

mod parse;
mod reply;
mod resources;

use virtio_rdma_abi::{ABI_VERSION, CmdHdr, InitReq, KeepaliveReq, RespHdr, cmd};
use zerocopy::FromBytes;

use crate::engine::{Command, Reply, Status};
use crate::memory::AddressSpace;

use self::parse::Parser;
pub(super) use self::reply::Response;

/// What a command came to.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The engine's answer.
    Done(Result<Reply, Status>),
    /// The guest's memory changed after the command was resolved; nothing happened.
    Stale,
}

/// Carries commands out.
pub(super) trait Executor {
    /// The guest's memory, and its generation.
    fn space(&self) -> (AddressSpace, u64);

    /// Executes a command that was resolved with memory of that generation; the rest of one ([`Command::Finish`]) whatever has changed since.
    fn execute(&self, generation: u64, ctx: u32, command: Command) -> Outcome;
}

/// The control side of one NIC's connection.
#[derive(Debug)]
pub(super) struct Controller {
    kick_base: u32,
    /// The nonce of the last INIT that was accepted.
    nonce: Option<u64>,
}

/// How often a command is resolved again because memory was plugged meanwhile.
const STALE_RETRIES: usize = 4;

impl Controller {
    /// Kick queues begin at virtqueue `kick_base`.
    pub(super) const fn new(kick_base: u16) -> Self {
        Self { kick_base: kick_base as u32, nonce: None }
    }

    /// Serves one request; `room` is what the guest left for the response, and `max_mr_bytes` the NIC's present limit.
    /// `None` if not even the response's header fits.
    pub(super) fn serve(
        &mut self,
        executor: &impl Executor,
        request: &[u8],
        room: usize,
        max_mr_bytes: u64,
    ) -> Option<Response> {
        if room < size_of::<RespHdr>() {
            return None;
        }
        let result = self.dispatch(executor, request, room, max_mr_bytes);
        Some(match result {
            Ok(reply) => Response::ok(&reply, self.kick_base),
            Err(status) => Response::error(status),
        })
    }

    fn dispatch(
        &mut self,
        executor: &impl Executor,
        request: &[u8],
        room: usize,
        max_mr_bytes: u64,
    ) -> Result<Reply, Status> {
        let (header, body) = CmdHdr::read_from_prefix(request).map_err(|_| Status::INVAL)?;
        let opcode = header.opcode.get();
        let (request_len, response_len) = parse::sizes(opcode).ok_or(Status::NOTSUPP)?;
        let sized = body.len() >= request_len && room >= size_of::<RespHdr>() + response_len;
        let ctx = header.ctx.get();
        if self.nonce.is_none() && opcode != cmd::INIT {
            // Not even parsed: to resolve a page list may take a while, and there is nothing that it could be for.
            let (_, generation) = executor.space();
            return Err(Self::refuse(executor, generation, opcode, Status::STATE));
        }
        for _ in 0..STALE_RETRIES {
            let (space, generation) = executor.space();
            let parser = Parser { space: &space, max_mr_bytes };
            let parsed = if sized { self.parse(&parser, opcode, body) } else { Err(Status::INVAL) };
            let command = match parsed {
                Ok(command) => command,
                Err(status) => return Err(Self::refuse(executor, generation, opcode, status)),
            };
            let Outcome::Done(mut result) = executor.execute(generation, ctx, command) else {
                continue;
            };
            loop {
                let next = match result {
                    Ok(Reply::More) => Command::Continue,
                    // Here, on the thread of this NIC alone.
                    Ok(Reply::Errand(errand)) => errand.run(),
                    _ => return self.conclude(opcode, body, result),
                };
                let (_, generation) = executor.space();
                result = match executor.execute(generation, ctx, next) {
                    Outcome::Done(next) => next,
                    // The memory changed between the two lines above; what has begun goes on all the same.
                    Outcome::Stale => Ok(Reply::More),
                };
            }
        }
        Err(Status::FAULT)
    }

    /// Fields that the engine does not see are checked here.
    fn parse(&self, parser: &Parser<'_>, opcode: u16, body: &[u8]) -> Result<Command, Status> {
        match opcode {
            cmd::INIT => {
                let (req, _) = InitReq::read_from_prefix(body).map_err(|_| Status::INVAL)?;
                if low(req.nonce.get()) == 0 {
                    return Err(Status::INVAL);
                }
                if req.abi_version.get() < ABI_VERSION {
                    return Err(Status::NOTSUPP);
                }
            }
            cmd::KEEPALIVE => {
                let (req, _) = KeepaliveReq::read_from_prefix(body).map_err(|_| Status::INVAL)?;
                if self.nonce != Some(req.nonce.get()) {
                    return Err(Status::STATE);
                }
            }
            _ => {}
        }
        parser.command(opcode, body)
    }

    /// Before INIT and after a failure the answer to everything is that, also to what would have been refused for another reason.
    fn refuse(executor: &impl Executor, generation: u64, opcode: u16, status: Status) -> Status {
        if opcode == cmd::INIT {
            return status;
        }
        match executor.execute(generation, 0, Command::Keepalive) {
            Outcome::Done(Err(state @ (Status::STATE | Status::FATAL))) => state,
            _ => status,
        }
    }

    fn conclude(
        &mut self,
        opcode: u16,
        body: &[u8],
        result: Result<Reply, Status>,
    ) -> Result<Reply, Status> {
        if result.is_ok() {
            match opcode {
                cmd::INIT => {
                    self.nonce =
                        InitReq::read_from_prefix(body).ok().map(|(req, _)| req.nonce.get());
                }
                cmd::SHUTDOWN => self.nonce = None,
                _ => {}
            }
        }
        result
    }
}

/// The low half of a nonce: what stands in the status page.
const fn low(nonce: u64) -> u32 {
    // Truncation is the point.
    #[allow(clippy::cast_possible_truncation)]
    {
        nonce as u32
    }
}

#[cfg(test)]
mod tests;
