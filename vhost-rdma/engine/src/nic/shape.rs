//! What the numbers of a new queue must be, each by itself and all together (docs/virtio-rdma.md
//! §5.6 to §5.8).
//!
//! A driver asks for what fits its own rings; a hostile one for anything. The rules are the same
//! whoever executes the verbs, and only the bounds are the backing's.

use virtio_rdma_abi::{self as abi, Cqe, SqWqe, cqe_flags, qp_flags, send_flags};
use zerocopy::little_endian::{U16, U32, U64};

use super::command::Status;
use super::limits::{MAX_CQE, MAX_INLINE, MAX_SGE, MAX_WR};
use super::qp::send::SendShape;

/// What a backing can do.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Entries of a send or receive ring.
    pub max_wr: u32,
    /// Elements of a work request.
    pub max_sge: u32,
    /// Bytes of inline data.
    pub max_inline: u32,
}

/// The engine's own.
pub(crate) const ENGINE: Bounds =
    Bounds { max_wr: MAX_WR, max_sge: MAX_SGE, max_inline: MAX_INLINE };

impl Bounds {
    /// Whether a receive ring's numbers fit each other and the device.
    fn fits_receives(self, entries: u32, log2_stride: u8, max_sge: u32) -> bool {
        let strides = abi::RQ_WQE_MIN_LOG2_STRIDE..=abi::WQE_MAX_LOG2_STRIDE;
        entries.is_power_of_two()
            && entries <= self.max_wr
            && strides.contains(&log2_stride)
            && max_sge <= self.max_sge
            && abi::RQ_WQE_DATA + size_of::<abi::Sge>() * max_sge as usize <= 1 << log2_stride
    }

    /// Whether a send ring's numbers fit each other and the device.
    fn fits_sends(self, req: &abi::QpCreateReq) -> bool {
        let (sges, inline) = (u32::from(req.max_send_sge.get()), u32::from(req.max_inline.get()));
        let data = (size_of::<abi::Sge>() * sges as usize).max(inline as usize);
        let strides = abi::SQ_WQE_MIN_LOG2_STRIDE..=abi::WQE_MAX_LOG2_STRIDE;
        req.sq_entries.get().is_power_of_two()
            && req.sq_entries.get() <= self.max_wr
            && strides.contains(&req.sq_log2_stride)
            && sges <= self.max_sge
            && inline <= self.max_inline
            && abi::SQ_WQE_DATA + data <= 1 << req.sq_log2_stride
    }

    /// The numbers of a new SRQ.
    pub(crate) fn check_srq(self, req: &abi::SrqCreateReq) -> Result<(), Status> {
        let entries = req.entries.get();
        let fits = self.fits_receives(entries, req.log2_stride, req.max_sge.get())
            && (1..=entries).contains(&req.max_wr.get())
            && req.limit.get() <= req.max_wr.get();
        if fits { Ok(()) } else { Err(Status::INVAL) }
    }

    /// The numbers of a new QP, and whether it brings rings (to send from, to receive into) for
    /// them.
    pub(crate) fn check_qp(
        self,
        req: &abi::QpCreateReq,
        (sq, rq): (bool, bool),
    ) -> Result<(), Status> {
        let (sends, receives) = (req.sq_entries.get(), req.rq_entries.get());
        let with_srq = req.srqn.get() != abi::NO_SRQ;
        let receives_ok = receives == 0
            || (!with_srq
                && self.fits_receives(receives, req.rq_log2_stride, req.max_recv_sge.get().into()));
        let fits = (sends == 0 || self.fits_sends(req))
            && receives_ok
            && sq == (sends != 0)
            && rq == (receives != 0)
            && requests_ok(req.max_send_wr.get(), sends)
            && requests_ok(req.max_recv_wr.get(), receives)
            && req.flags.get() & !qp_flags::SIG_ALL == 0;
        if fits { Ok(()) } else { Err(Status::INVAL) }
    }
}

/// The numbers of a new CQ on a device with so many vectors.
pub(crate) const fn check_cq(entries: u32, vector: u32, vectors: u32) -> Result<(), Status> {
    let fits = entries.is_power_of_two() && entries <= MAX_CQE && vector < vectors;
    if fits { Ok(()) } else { Err(Status::INVAL) }
}

/// docs/virtio-rdma.md §5.8: a queue that exists takes at least one request, and no more than its
/// ring.
const fn requests_ok(max_wr: u32, entries: u32) -> bool {
    max_wr <= entries && (max_wr == 0) == (entries == 0)
}

/// The send ring of a new QP.
pub fn sends(req: &abi::QpCreateReq) -> SendShape {
    SendShape {
        entries: req.sq_entries.get(),
        log2_stride: req.sq_log2_stride,
        max_sge: req.max_send_sge.get().into(),
        max_inline: req.max_inline.get().into(),
    }
}

/// The completion of a send work request, known by its `wr_id` and index, that failed; whoever
/// waits for solicited events hears of it (IBTA 11.4.2.2).
pub fn failed_send(qpn: u32, (wr_id, index): (u64, u32), status: u8) -> Cqe {
    Cqe {
        wr_id: U64::new(wr_id),
        qpn: U32::new(qpn),
        status,
        flags: U16::new(cqe_flags::SOLICITED),
        wqe_index: U32::new(index),
        ..Cqe::default()
    }
}

/// Whether a work request asks for nothing that there is not (docs/virtio-rdma.md §5.9): a later
/// driver would take what it does not get for done.
pub const fn flags_are_known(wqe: &SqWqe) -> bool {
    const KNOWN: u8 =
        send_flags::FENCE | send_flags::SIGNALED | send_flags::SOLICITED | send_flags::INLINE;
    wqe.flags & !KNOWN == 0
}
