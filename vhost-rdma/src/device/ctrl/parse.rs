//! From a request's bytes to an engine command.
//!
//! Sizes are checked against the device's constants *before* a page list is resolved, and a region
//! cannot be longer than the guest has memory: so a guest cannot make the daemon allocate or loop
//! beyond what its own memory is worth.

use virtio_rdma_abi as abi;
use virtio_rdma_abi::{cmd, gid_type};
use zerocopy::FromBytes;

use crate::memory::AddressSpace;
use crate::shard::{Command, Status};

/// What parsing needs to know of the NIC.
pub(super) struct Parser<'a> {
    pub(super) space: &'a AddressSpace,
    /// Registered bytes that the NIC may have.
    pub(super) max_mr_bytes: u64,
}

fn read<T: FromBytes>(body: &[u8]) -> Result<T, Status> {
    T::read_from_prefix(body).map(|(value, _)| value).map_err(|_| Status::INVAL)
}

impl Parser<'_> {
    /// The command in `body`, which has the size of its opcode at least.
    pub(super) fn command(&self, opcode: u16, body: &[u8]) -> Result<Command, Status> {
        let object = || read::<abi::ObjectReq>(body).map(|req| req.object.get());
        Ok(match opcode {
            cmd::INIT => self.init(&read(body)?)?,
            cmd::SHUTDOWN => Command::Shutdown,
            cmd::KEEPALIVE => Command::Keepalive,
            cmd::QUERY_DEVICE => Command::QueryDevice,
            cmd::QUERY_PORT => Command::QueryPort,
            cmd::GID_SET => gid_set(&read(body)?)?,
            cmd::QUERY_COUNTERS => Command::QueryCounters,
            cmd::CONTEXT_CREATE => Command::ContextCreate {
                db_page: self.page(read::<abi::ContextCreateReq>(body)?.db_page.get())?,
            },
            cmd::CONTEXT_DESTROY => Command::ContextDestroy,
            cmd::DB_PAGE_ADD => Command::DbPageAdd {
                db_page: self.page(read::<abi::DbPageAddReq>(body)?.db_page.get())?,
            },
            cmd::PD_CREATE => Command::PdCreate,
            cmd::PD_DESTROY => Command::PdDestroy(object()?),
            cmd::MR_REG => self.mr_reg(&read(body)?)?,
            cmd::MR_DMA => {
                let req: abi::MrDmaReq = read(body)?;
                Command::MrDma { pdn: req.pdn.get(), access: req.access.get() }
            }
            cmd::MR_ALLOC => {
                let req: abi::MrAllocReq = read(body)?;
                Command::MrAlloc { pdn: req.pdn.get(), max_pages: req.max_pages.get() }
            }
            cmd::MR_REREG => self.mr_rereg(read(body)?)?,
            cmd::MR_DEREG => Command::MrDereg(object()?),
            cmd::MW_ALLOC => {
                let req: abi::MwAllocReq = read(body)?;
                Command::MwAlloc { pdn: req.pdn.get(), kind: req.r#type.get() }
            }
            cmd::MW_DEALLOC => Command::MwDealloc(object()?),
            cmd::CQ_CREATE..=cmd::CQ_MODERATE => self.cq(opcode, body)?,
            cmd::SRQ_CREATE..=cmd::SRQ_QUERY => self.srq(opcode, body)?,
            cmd::QP_CREATE => self.qp_create(Box::new(read(body)?))?,
            cmd::QP_DESTROY => Command::QpDestroy(object()?),
            cmd::QP_MODIFY => {
                let req: abi::QpModifyReq = read(body)?;
                Command::QpModify { qpn: req.qpn.get(), attr: Box::new(req.attr) }
            }
            cmd::QP_QUERY => Command::QpQuery(object()?),
            cmd::AH_CREATE => {
                let req: abi::AhCreateReq = read(body)?;
                Command::AhCreate { pdn: req.pdn.get(), av: req.av }
            }
            cmd::AH_DESTROY => Command::AhDestroy(object()?),
            cmd::MCAST_ATTACH => {
                let req: abi::McastReq = read(body)?;
                Command::McastAttach { qpn: req.qpn.get(), mgid: req.mgid }
            }
            cmd::MCAST_DETACH => {
                let req: abi::McastReq = read(body)?;
                Command::McastDetach { qpn: req.qpn.get(), mgid: req.mgid }
            }
            _ => return Err(Status::NOTSUPP),
        })
    }

    fn init(&self, req: &abi::InitReq) -> Result<Command, Status> {
        Ok(Command::Init {
            space: self.space.clone(),
            status_page: self.page(req.status_page.get())?,
        })
    }

    fn cq(&self, opcode: u16, body: &[u8]) -> Result<Command, Status> {
        Ok(match opcode {
            cmd::CQ_CREATE => {
                let req: abi::CqCreateReq = read(body)?;
                let entries = req.entries.get();
                Command::CqCreate {
                    entries,
                    vector: req.vector.get(),
                    ring: self.cq_ring(entries, &req.ring)?,
                }
            }
            cmd::CQ_DESTROY => Command::CqDestroy(read::<abi::ObjectReq>(body)?.object.get()),
            cmd::CQ_RESIZE => {
                let req: abi::CqResizeReq = read(body)?;
                let entries = req.entries.get();
                Command::CqResize {
                    cqn: req.cqn.get(),
                    entries,
                    requested: req.requested.get(),
                    ring: self.cq_ring(entries, &req.ring)?,
                }
            }
            cmd::CQ_MODERATE => {
                let req: abi::CqModerateReq = read(body)?;
                Command::CqModerate {
                    cqn: req.cqn.get(),
                    count: req.count.get(),
                    period_us: req.period_us.get(),
                }
            }
            _ => return Err(Status::NOTSUPP),
        })
    }

    fn srq(&self, opcode: u16, body: &[u8]) -> Result<Command, Status> {
        Ok(match opcode {
            cmd::SRQ_CREATE => self.srq_create(read(body)?)?,
            cmd::SRQ_DESTROY => Command::SrqDestroy(read::<abi::ObjectReq>(body)?.object.get()),
            cmd::SRQ_MODIFY => self.srq_modify(read(body)?)?,
            cmd::SRQ_QUERY => Command::SrqQuery(read::<abi::ObjectReq>(body)?.object.get()),
            _ => return Err(Status::NOTSUPP),
        })
    }
}

/// GID_SET: the address, or none to remove the entry.
fn gid_set(req: &abi::GidSetReq) -> Result<Command, Status> {
    let gid = match req.r#type {
        gid_type::NONE => None,
        gid_type::ROCE_V2 => Some(req.gid),
        _ => return Err(Status::INVAL),
    };
    Ok(Command::GidSet { index: req.index.get(), gid })
}
