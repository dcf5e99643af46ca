//! What a backing does in its own way.
//!
//! A command that is the same on every backing is carried out by [`super::dispatch`]. The rest is
//! handed to the provider as a [`Verb`], of which it has an arm for each and none for all others.

use std::sync::Arc;

use virtio_rdma_abi::{self as abi, rereg};

use super::Status;
use super::qp::Kind;
use crate::link::Gid;
use crate::memory::{Ring, Translation};

/// A provider's part of a command.
#[derive(Debug)]
#[allow(
    missing_docs,
    reason = "the variants are commands of docs/virtio-rdma.md §12, the fields their requests"
)]
pub enum Verb {
    GidSet {
        index: u16,
        gid: Option<Gid>,
    },
    MrReg {
        pdn: u32,
        access: u32,
        iova: u64,
        map: Arc<Translation>,
    },
    /// By the kernel.
    MrDma {
        pdn: u32,
        access: u32,
    },
    MrAlloc {
        pdn: u32,
        max_pages: u32,
    },
    MrRereg {
        key: u32,
        change: Rereg,
    },
    MrDereg(u32),
    MwAlloc {
        pdn: u32,
        kind: u32,
    },
    MwDealloc(u32),
    /// Of a CQ that is the context's.
    CqResize(CqResize),
    /// Checked, except for what the provider has to have for it.
    QpCreate(NewQp),
    QpDestroy(u32),
    QpModify {
        qpn: u32,
        attr: Box<abi::QpAttr>,
    },
    QpQuery(u32),
    /// Checked: an address of a domain of the context, for which there is room.
    AhCreate {
        pdn: u32,
        av: abi::Av,
    },
    McastAttach {
        qpn: u32,
        mgid: Gid,
    },
    McastDetach {
        qpn: u32,
        mgid: Gid,
    },
}

/// What a re-registration changes.
#[derive(Debug, Default)]
pub struct Rereg {
    /// New rights.
    pub access: Option<u32>,
    /// Another protection domain.
    pub pdn: Option<u32>,
    /// Another address, and memory.
    pub memory: Option<(u64, Arc<Translation>)>,
}

impl Rereg {
    /// What the flags of a request say, whose memory was resolved if it brings any.
    pub(crate) fn of(req: &abi::MrReregReq, map: Option<Arc<Translation>>) -> Result<Self, Status> {
        let flags = req.flags.get();
        if flags == 0 || flags & !(rereg::TRANSLATION | rereg::PD | rereg::ACCESS) != 0 {
            return Err(Status::INVAL);
        }
        let memory = match (flags & rereg::TRANSLATION != 0, map) {
            (true, Some(map)) => Some((req.iova.get(), map)),
            (true, None) => return Err(Status::INVAL),
            (false, _) => None,
        };
        Ok(Self {
            access: (flags & rereg::ACCESS != 0).then(|| req.access.get()),
            pdn: (flags & rereg::PD != 0).then(|| req.pdn.get()),
            memory,
        })
    }
}

/// Another ring for a CQ.
#[derive(Debug)]
pub struct CqResize {
    pub(crate) cqn: u32,
    pub(crate) entries: u32,
    pub(crate) requested: u32,
    pub(crate) ring: Ring,
}

/// What QP_CREATE brings: the request and the resolved rings.
#[derive(Debug)]
pub struct NewQp {
    /// Its type.
    pub kind: Kind,
    /// As the guest sent it.
    pub req: Box<abi::QpCreateReq>,
    /// The ring of its send queue.
    pub sq: Option<Ring>,
    /// The ring of its receive queue.
    pub rq: Option<Ring>,
}
