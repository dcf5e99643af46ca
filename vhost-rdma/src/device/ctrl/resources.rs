//! Requests that give the device memory: pages, regions and rings.
//!
//! What lies in huge pages is made to come here, on the connection's own thread: see
//! [`Translation::populate`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_rdma_abi as abi;
use virtio_rdma_abi::{rereg, srq_mask};

use super::parse::Parser;
use crate::memory::{Fault, PageList, Ring, Translation};
use crate::nic::{Command, Status, limits};

/// How long a command may wait for the host to bring its pages. Those that have not come by then
/// come when they are touched; a driver waits 5 seconds for a command.
const PAGES_TIME: Duration = Duration::from_secs(1);
/// Alignment and size of a control block (docs/virtio-rdma.md §7).
const CTRL_BLOCK: u64 = 128;
/// Rings begin at a multiple of this, or of their stride where that is larger.
const RING_ALIGN: u32 = 64;
/// A CQ has entries of 64 bytes.
const CQ_STRIDE: u8 = abi::CQE_LOG2_STRIDE;

/// The shape of a ring, checked against what the device offers.
#[derive(Clone, Copy, Debug)]
struct Shape {
    bytes: u64,
    stride: u32,
    control_block: bool,
}

impl Shape {
    fn new(
        entries: u32,
        most: u32,
        log2_stride: u8,
        least_log2_stride: u8,
    ) -> Result<Self, Status> {
        let strides = least_log2_stride..=abi::WQE_MAX_LOG2_STRIDE;
        if !entries.is_power_of_two() || entries > most || !strides.contains(&log2_stride) {
            return Err(Status::INVAL);
        }
        Ok(Self {
            bytes: u64::from(entries) << log2_stride,
            stride: 1 << log2_stride,
            control_block: false,
        })
    }

    const fn with_control_block(self) -> Self {
        Self { control_block: true, ..self }
    }

    const fn len(self) -> u64 {
        if self.control_block {
            self.bytes.next_multiple_of(CTRL_BLOCK) + CTRL_BLOCK
        } else {
            self.bytes
        }
    }
}

/// The status of a fault in a page list (docs/virtio-rdma.md §6.1).
const fn status(fault: Fault) -> Status {
    match fault {
        Fault::Address => Status::FAULT,
        Fault::Shape => Status::INVAL,
        Fault::Room => Status::NOMEM,
    }
}

const fn page_list(list: &abi::PageList) -> PageList {
    PageList {
        addr: list.addr.get(),
        npages: list.npages.get(),
        offset: list.offset.get(),
        page_shift: list.page_shift,
        levels: list.levels,
    }
}

/// True until a command has waited long enough for its pages.
fn patience() -> impl FnMut() -> bool {
    let begin = Instant::now();
    move || begin.elapsed() < PAGES_TIME
}

/// A ring or page whose memory has come.
fn present(ring: Ring) -> Result<Ring, Status> {
    ring.populate(patience()).map_err(status)?;
    Ok(ring)
}

impl Parser<'_> {
    /// A status page or doorbell page.
    pub(super) fn page(&self, addr: u64) -> Result<Ring, Status> {
        present(Ring::page(self.space, addr).map_err(status)?)
    }

    fn ring(&self, list: &abi::PageList, shape: Shape) -> Result<Ring, Status> {
        if !list.offset.get().is_multiple_of(shape.stride.max(RING_ALIGN)) {
            return Err(Status::INVAL);
        }
        let map = page_list(list).resolve(self.space, shape.len()).map_err(status)?;
        present(Ring::new(Arc::new(map)))
    }

    fn region(&self, list: &abi::PageList, length: u64) -> Result<Arc<Translation>, Status> {
        // What QUERY_DEVICE reports as `max_mr_size` is the limit of all regions together.
        if length > limits::registrable(self.max_mr_bytes, self.space) {
            return Err(Status::INVAL);
        }
        // IBTA 11.2.8.2 allows it; a region of nothing has no pages, and the list is not looked at.
        if length == 0 {
            return Ok(Translation::empty());
        }
        // A region longer than all of the guest's memory would make the daemon keep tables that the
        // guest's memory does not pay for.
        if length > self.space.bytes() {
            return Err(Status::NOMEM);
        }
        let map = page_list(list).resolve(self.space, length).map_err(status)?;
        map.populate(patience()).map_err(status)?;
        Ok(Arc::new(map))
    }

    pub(super) fn mr_reg(&self, req: &abi::MrRegReq) -> Result<Command, Status> {
        let map = self.region(&req.pages, req.length.get())?;
        Ok(Command::MrReg {
            pdn: req.pdn.get(),
            access: req.access.get(),
            iova: req.iova.get(),
            map,
        })
    }

    pub(super) fn mr_rereg(&self, req: abi::MrReregReq) -> Result<Command, Status> {
        let map = match req.flags.get() & rereg::TRANSLATION {
            0 => None,
            _ => Some(self.region(&req.pages, req.length.get())?),
        };
        Ok(Command::MrRereg { req, map })
    }

    pub(super) fn cq_ring(&self, entries: u32, list: &abi::PageList) -> Result<Ring, Status> {
        let shape = Shape::new(entries, limits::MAX_CQE, CQ_STRIDE, CQ_STRIDE)?;
        self.ring(list, shape.with_control_block())
    }

    fn srq_ring(
        &self,
        entries: u32,
        log2_stride: u8,
        list: &abi::PageList,
    ) -> Result<Ring, Status> {
        let shape = Shape::new(entries, limits::MAX_WR, log2_stride, abi::RQ_WQE_MIN_LOG2_STRIDE)?;
        self.ring(list, shape.with_control_block())
    }

    pub(super) fn srq_create(&self, req: abi::SrqCreateReq) -> Result<Command, Status> {
        let ring = self.srq_ring(req.entries.get(), req.log2_stride, &req.ring)?;
        Ok(Command::SrqCreate { req, ring })
    }

    pub(super) fn qp_create(&self, req: Box<abi::QpCreateReq>) -> Result<Command, Status> {
        let queue = |entries: u32, log2_stride, least, list: &abi::PageList| {
            if entries == 0 {
                return Ok(None);
            }
            let shape = Shape::new(entries, limits::MAX_WR, log2_stride, least)?;
            self.ring(list, shape).map(Some)
        };
        let sq =
            queue(req.sq_entries.get(), req.sq_log2_stride, abi::SQ_WQE_MIN_LOG2_STRIDE, &req.sq)?;
        let rq =
            queue(req.rq_entries.get(), req.rq_log2_stride, abi::RQ_WQE_MIN_LOG2_STRIDE, &req.rq)?;
        Ok(Command::QpCreate { req, sq, rq })
    }

    /// The request does not repeat the stride, so the whole page list is resolved, bounded by the
    /// largest ring that there can be; the engine checks that it is large enough.
    pub(super) fn srq_modify(&self, req: abi::SrqModifyReq) -> Result<Command, Status> {
        let ring = match req.mask.get() & srq_mask::MAX_WR {
            0 => None,
            _ => Some(self.whole_ring(&req.ring)?),
        };
        Ok(Command::SrqModify { req, ring })
    }

    fn whole_ring(&self, list: &abi::PageList) -> Result<Ring, Status> {
        const LARGEST: u64 =
            ((limits::MAX_WR as u64) << abi::WQE_MAX_LOG2_STRIDE) + abi::ctrl::SIZE as u64;
        let pages = page_list(list);
        // Pages are larger than the end of the largest ring: what is beyond it is not looked at.
        let bytes = pages.described_len().ok_or(Status::INVAL)?.min(LARGEST);
        if !pages.offset.is_multiple_of(64) {
            return Err(Status::INVAL);
        }
        let map = pages.resolve(self.space, bytes).map_err(status)?;
        present(Ring::new(Arc::new(map)))
    }
}
