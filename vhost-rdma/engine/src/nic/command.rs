//! Control commands as the engine takes them: parsed, sized, and with every guest address already
//! resolved.
//!
//! The front end (virtio today, others later) owns the byte layout of commands and the resolving of
//! page lists; it does both on its own thread, so that a huge registration costs the shard nothing.
//! Requests whose fields need no resolving are the ABI's own structures.

use std::fmt;
use std::sync::Arc;

use virtio_rdma_abi::{self as abi, attr_mask, qps};

use crate::memory::{AddressSpace, Ring, Translation};

/// A status of the ABI's `cmd_status` group, never `OK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// Malformed or contradictory arguments.
    pub const INVAL: Self = Self(abi::cmd_status::INVAL);
    /// A limit is reached.
    pub const NOMEM: Self = Self(abi::cmd_status::NOMEM);
    /// Not offered by this device.
    pub const NOTSUPP: Self = Self(abi::cmd_status::NOTSUPP);
    /// No such object in this context.
    pub const NOENT: Self = Self(abi::cmd_status::NOENT);
    /// The object is in use.
    pub const BUSY: Self = Self(abi::cmd_status::BUSY);
    /// Not allowed to this NIC.
    pub const PERM: Self = Self(abi::cmd_status::PERM);
    /// An address outside guest memory.
    pub const FAULT: Self = Self(abi::cmd_status::FAULT);
    /// Taken by another.
    pub const EXIST: Self = Self(abi::cmd_status::EXIST);
    /// INIT has not been accepted.
    pub const STATE: Self = Self(abi::cmd_status::STATE);
    /// The NIC failed.
    pub const FATAL: Self = Self(abi::cmd_status::FATAL);
    /// The peer may not be reached.
    pub const UNREACH: Self = Self(abi::cmd_status::UNREACH);
}

/// A control command.
#[derive(Debug)]
#[allow(
    missing_docs,
    reason = "the variants are the commands of docs/virtio-rdma.md §12, the fields their requests"
)]
pub enum Command {
    Init {
        space: AddressSpace,
        status_page: Ring,
    },
    Shutdown,
    Keepalive,
    QueryDevice,
    QueryPort,
    GidSet {
        index: u16,
        gid: Option<[u8; 16]>,
    },
    QueryCounters,
    ContextCreate {
        db_page: Ring,
    },
    ContextDestroy,
    DbPageAdd {
        db_page: Ring,
    },
    PdCreate,
    PdDestroy(u32),
    MrReg {
        pdn: u32,
        access: u32,
        iova: u64,
        map: Arc<Translation>,
    },
    MrDma {
        pdn: u32,
        access: u32,
    },
    MrAlloc {
        pdn: u32,
        max_pages: u32,
    },
    MrRereg {
        req: abi::MrReregReq,
        map: Option<Arc<Translation>>,
    },
    MrDereg(u32),
    MwAlloc {
        pdn: u32,
        kind: u32,
    },
    MwDealloc(u32),
    CqCreate {
        entries: u32,
        vector: u32,
        ring: Ring,
    },
    CqDestroy(u32),
    CqResize {
        cqn: u32,
        entries: u32,
        requested: u32,
        ring: Ring,
    },
    CqModerate {
        cqn: u32,
        count: u16,
        period_us: u16,
    },
    SrqCreate {
        req: abi::SrqCreateReq,
        ring: Ring,
    },
    SrqDestroy(u32),
    SrqModify {
        req: abi::SrqModifyReq,
        ring: Option<Ring>,
    },
    SrqQuery(u32),
    QpCreate {
        req: Box<abi::QpCreateReq>,
        sq: Option<Ring>,
        rq: Option<Ring>,
    },
    QpDestroy(u32),
    QpModify {
        qpn: u32,
        attr: Box<abi::QpAttr>,
    },
    QpQuery(u32),
    AhCreate {
        pdn: u32,
        av: abi::Av,
    },
    AhDestroy(u32),
    McastAttach {
        qpn: u32,
        mgid: [u8; 16],
    },
    McastDetach {
        qpn: u32,
        mgid: [u8; 16],
    },
    /// Goes on with the command that came to [`Step::More`] or [`Step::Blocking`].
    Continue,
}

impl Command {
    /// Whether it ends an object that work requests name, or the sends of a queue pair.
    pub(crate) fn ends_something(&self) -> bool {
        match self {
            Self::AhDestroy(_)
            | Self::ContextDestroy
            | Self::MrDereg(_)
            | Self::MwDealloc(_)
            | Self::QpDestroy(_) => true,
            Self::QpModify { attr, .. } => {
                attr.mask.get() & attr_mask::STATE != 0 && attr.qp_state == qps::ERR
            }
            _ => false,
        }
    }

    /// The queue pair whose sends it ends.
    pub(crate) const fn queue_pair(&self) -> Option<u32> {
        match self {
            Self::QpDestroy(qpn) | Self::QpModify { qpn, .. } => Some(*qpn),
            _ => None,
        }
    }

    /// What it brings of the guest's memory, with a part in that. The tables of a page list are
    /// large, and their end takes its time: whoever holds this lets go of them last.
    pub(crate) fn memory(&self) -> Option<[Option<Ring>; 2]> {
        let ring = |ring: &Ring| Some([Some(ring.clone()), None]);
        match self {
            Self::MrReg { map, .. } | Self::MrRereg { map: Some(map), .. } => {
                ring(&Ring::new(Arc::clone(map)))
            }
            Self::CqCreate { ring: new, .. }
            | Self::CqResize { ring: new, .. }
            | Self::SrqCreate { ring: new, .. }
            | Self::SrqModify { ring: Some(new), .. } => ring(new),
            Self::QpCreate { sq, rq, .. } => Some([sq.clone(), rq.clone()]),
            _ => None,
        }
    }
}

/// A command that has not begun: what was posted before it comes first.
#[derive(Debug)]
pub struct HeldBack {
    /// The command.
    pub command: Command,
    /// How often it was held back.
    pub times: u32,
}

/// What a command came to, or a step of one.
#[derive(Debug)]
pub enum Step {
    /// It is carried out, and this is the answer.
    Done(Reply),
    /// It was carried out in part, and goes on with [`Command::Continue`].
    More,
    /// To be carried out first.
    Blocking(BlockingJob),
}

/// The part of a command that may block, for the thread that gave the command: a shard waits for
/// nobody.
pub struct BlockingJob(Box<dyn FnOnce() + Send>);

impl BlockingJob {
    /// A blocking job. What it finds it leaves where its NIC looks for it.
    pub fn new(work: impl FnOnce() + Send + 'static) -> Self {
        Self(Box::new(work))
    }

    /// Carries it out; the command that is returned has to be given to the same NIC, whatever
    /// became of that meanwhile.
    #[must_use]
    pub fn run(self) -> Command {
        (self.0)();
        Command::Continue
    }
}

impl fmt::Debug for BlockingJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockingJob")
    }
}

/// What a successful command answers; the front end lays it out.
#[derive(Debug)]
#[allow(missing_docs, reason = "the variants are the responses of docs/virtio-rdma.md §12")]
pub enum Reply {
    Done,
    Init(abi::InitResp),
    Device(Box<abi::QueryDeviceResp>),
    Port(abi::QueryPortResp),
    Counters(Box<abi::QueryCountersResp>),
    Context(abi::ContextCreateResp),
    DbPage(abi::DbPageAddResp),
    Object(u32),
    Mr(abi::MrResp),
    Srq(abi::SrqCreateResp),
    SrqAttr(abi::SrqQueryResp),
    Qp(abi::QpCreateResp),
    QpAttr(Box<abi::QpQueryResp>),
}
