//! Control requests: from bytes to an engine command, and from its reply to bytes
//! (docs/virtio-rdma.md §5).
//!
//! Sans-I/O and without threads: the caller hands in the bytes and an [`Executor`], and gets the
//! bytes of the response. Checks come in this order: the header, the sizes of the request and of
//! the room for the response, the fields, the guest's memory, and only then the engine sees the
//! command. So a refused request has had no effect.

#[cfg(any(test, feature = "later-device"))]
pub(super) mod later;
mod lengths;
mod parse;
mod reply;
mod resources;

use virtio_rdma_abi::{ABI_VERSION, CmdHdr, InitReq, KeepaliveReq, RespHdr, cmd};
use zerocopy::FromBytes;

use crate::memory::AddressSpace;
use crate::shard::{Command, Reply, Status, Step};

use self::lengths::Lengths;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) use self::lengths::clear_reserved;
pub(crate) use self::lengths::{Names, names};
use self::parse::Parser;
pub(crate) use self::reply::Response;

/// Bytes of a request that are kept: the longest that there may be (docs/virtio-rdma.md §5.9).
pub(super) const REQUEST_MAX: usize = 256;
/// Bytes of a response that there may be.
pub(crate) const RESPONSE_MAX: usize = 256;

/// What a command came to.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// What the engine made of it.
    Done(Result<Step, Status>),
    /// The guest's memory changed after the command was resolved; nothing happened.
    Stale,
}

/// Carries commands out.
pub(crate) trait Executor {
    /// The guest's memory, and its generation.
    fn space(&self) -> (AddressSpace, u64);

    /// Executes a command that was resolved with memory of that generation; the rest of one
    /// ([`Command::Continue`]) whatever has changed since.
    fn execute(&self, generation: u64, ctx: u32, command: Command) -> Outcome;

    /// The life that stood still goes on, for its driver; or ends.
    fn decide(&self, goes_on: bool);
}

/// The readable bytes of a control chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    /// The first [`REQUEST_MAX`] of them.
    pub(crate) bytes: &'a [u8],
    /// There are no others.
    pub(crate) whole: bool,
}

/// What a driver can ask of this device.
#[derive(Clone, Copy, Debug)]
struct Revision {
    /// The lengths of an opcode's bodies while these capabilities are in effect.
    lengths: fn(u16, u64) -> Option<Lengths>,
    /// Capabilities beyond [`cap::BASE`] that it has.
    caps: u64,
}

/// This one: no capability was added yet.
#[cfg(not(feature = "later-device"))]
const PRESENT: Revision = Revision { lengths: |opcode, _| lengths::of(opcode), caps: 0 };
#[cfg(feature = "later-device")]
const PRESENT: Revision = later::REVISION;

/// The control side of one NIC's connection.
#[derive(Debug)]
pub(crate) struct Controller {
    revision: Revision,
    kick_base: u32,
    /// The nonce of the last INIT that was accepted.
    nonce: Option<u64>,
    /// The capabilities beyond [`cap::BASE`] that are in effect.
    agreed: u64,
    /// The queue began anew, and nobody has said yet whether this life's driver is still there.
    suspended: bool,
}

/// How often a command is resolved again because memory was plugged meanwhile.
const STALE_RETRIES: usize = 4;

impl Controller {
    /// That of a life that has begun already, by somebody else.
    pub(crate) const fn begun(kick_base: u16) -> Self {
        Self { nonce: Some(1), ..Self::new(kick_base) }
    }

    /// What a life has agreed on, for whoever goes on with it: nonce and capabilities.
    pub(crate) const fn agreed(&self) -> (Option<u64>, u64) {
        (self.nonce, self.agreed)
    }

    /// That of a life that an earlier process has saved.
    pub(crate) const fn of((nonce, agreed): (Option<u64>, u64), kick_base: u16) -> Self {
        Self { nonce, agreed, ..Self::new(kick_base) }
    }

    /// Kick queues begin at virtqueue `kick_base`.
    pub(crate) const fn new(kick_base: u16) -> Self {
        let kick_base = kick_base as u32;
        Self { revision: PRESENT, kick_base, nonce: None, agreed: 0, suspended: false }
    }

    /// The queue begins at index 0: by a new driver, or by one of this life whose index wrapped
    /// while its machine was paused. The next request tells (docs/virtio-rdma.md §5.3).
    pub(crate) const fn suspend(&mut self) {
        self.suspended = self.nonce.is_some();
    }

    /// Serves one request; `room` is what the guest left for the response, and `max_mr_bytes` the
    /// NIC's present limit. `None` if not even the response's header fits.
    pub(crate) fn serve(
        &mut self,
        executor: &impl Executor,
        request: Request<'_>,
        room: usize,
        max_mr_bytes: u64,
    ) -> Option<Response> {
        if std::mem::take(&mut self.suspended) {
            let goes_on = self.is_own_keepalive(request.bytes);
            self.nonce = self.nonce.filter(|_| goes_on);
            executor.decide(goes_on);
        }
        let room = room.checked_sub(size_of::<RespHdr>())?;
        let answer = self.answer(executor, request, room, max_mr_bytes);
        Some(answer.unwrap_or_else(Response::error))
    }

    /// Whether a request is this life's driver saying so.
    ///
    /// Only asked while there is a life, so that a missing nonce is not taken for none.
    fn is_own_keepalive(&self, bytes: &[u8]) -> bool {
        let Ok((header, body)) = CmdHdr::read_from_prefix(bytes) else { return false };
        let nonce = KeepaliveReq::read_from_prefix(body).map(|(req, _)| req.nonce.get());
        header.opcode.get() == cmd::KEEPALIVE && nonce.ok() == self.nonce
    }

    /// As [`Self::serve`]; `room` is that behind the header of the response.
    fn answer(
        &mut self,
        executor: &impl Executor,
        request: Request<'_>,
        room: usize,
        max_mr_bytes: u64,
    ) -> Result<Response, Status> {
        let (header, body) = CmdHdr::read_from_prefix(request.bytes).map_err(|_| Status::INVAL)?;
        let (opcode, ctx) = (header.opcode.get(), header.ctx.get());
        let Some(lengths) = (self.revision.lengths)(opcode, self.agreed) else {
            return Err(self.unknown(executor, opcode));
        };
        let clear = lengths::reserved_is_zero(&CmdHdr::LAYOUT, request.bytes);
        let checked = match clear {
            true => lengths.check(body, request.whole, room),
            false => Err(Status::NOTSUPP),
        };
        // What the driver does not know is zero (docs/virtio-rdma.md §5.9).
        let mut known = [0; REQUEST_MAX];
        let (had, _) = body.split_at(body.len().min(lengths.request()));
        known[..had.len()].copy_from_slice(had);
        let body = checked.map(|()| &known[..]);
        let reply = self.dispatch(executor, (opcode, ctx), body, max_mr_bytes)?;
        Ok(Response::ok(&reply, self.kick_base, room.min(lengths.response)))
    }

    /// The status of an opcode that there is not: what the NIC is comes first.
    fn unknown(&self, executor: &impl Executor, opcode: u16) -> Status {
        let (_, generation) = executor.space();
        let status = if self.nonce.is_none() { Status::STATE } else { Status::NOTSUPP };
        Self::refuse(executor, generation, opcode, status)
    }

    fn dispatch(
        &mut self,
        executor: &impl Executor,
        (opcode, ctx): (u16, u32),
        body: Result<&[u8], Status>,
        max_mr_bytes: u64,
    ) -> Result<Reply, Status> {
        if self.nonce.is_none() && opcode != cmd::INIT {
            // Not even parsed: to resolve a page list may take a while, and there is nothing that
            // it could be for.
            let (_, generation) = executor.space();
            return Err(Self::refuse(executor, generation, opcode, Status::STATE));
        }
        for _ in 0..STALE_RETRIES {
            let (space, generation) = executor.space();
            let parser = Parser { space: &space, max_mr_bytes };
            let parsed = body.and_then(|body| Ok((body, self.parse(&parser, opcode, body)?)));
            let (body, command) = match parsed {
                Ok(parsed) => parsed,
                Err(status) => return Err(Self::refuse(executor, generation, opcode, status)),
            };
            let Outcome::Done(mut result) = executor.execute(generation, ctx, command) else {
                continue;
            };
            loop {
                let next = match result? {
                    Step::More => Command::Continue,
                    // Here, on the thread of this NIC alone.
                    Step::Blocking(job) => job.run(),
                    Step::Done(reply) => return self.conclude(opcode, body, reply),
                };
                let (_, generation) = executor.space();
                result = match executor.execute(generation, ctx, next) {
                    Outcome::Done(next) => next,
                    // The memory changed between the two lines above; what has begun goes on all
                    // the same.
                    Outcome::Stale => Ok(Step::More),
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

    /// Before INIT and after a failure the answer to everything is that, also to what would have
    /// been refused for another reason.
    fn refuse(executor: &impl Executor, generation: u64, opcode: u16, status: Status) -> Status {
        match executor.execute(generation, 0, Command::Keepalive) {
            Outcome::Done(Err(Status::FATAL)) => Status::FATAL,
            Outcome::Done(Err(Status::STATE)) if opcode != cmd::INIT => Status::STATE,
            _ => status,
        }
    }

    fn conclude(&mut self, opcode: u16, body: &[u8], mut reply: Reply) -> Result<Reply, Status> {
        match &mut reply {
            Reply::Init(answer) => {
                let (request, _) = InitReq::read_from_prefix(body).map_err(|_| Status::INVAL)?;
                self.nonce = Some(request.nonce.get());
                self.agreed = request.caps.get() & self.revision.caps;
                answer.caps = self.agreed.into();
            }
            Reply::Device(answer) => {
                answer.caps = (answer.caps.get() | self.revision.caps).into();
            }
            _ if opcode == cmd::SHUTDOWN => self.nonce = None,
            _ => {}
        }
        Ok(reply)
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
