//! The data path: bursts as linked lists of `ibv_send_wr` and `ibv_recv_wr`, and completions back.
//! Buffers are kept for their allocation.

use std::ffi::c_int;
use std::ptr;

use ibverbs_sys as ffi;
use slab::Slab;
use virtio_rdma_abi::{event, opcode, send_flags, wc_status};

use super::region::Context;
use crate::verbs::{
    Data, HostError, HostEvent, HostMr, HostMw, HostQp, HostSge, HostSrq, HostWc, MadeAh,
    PostError, RecvBurst, Registered, Result, SendBurst, SendWr, Subject,
};

/// Completions of one poll.
const POLL: usize = 32;

const BAD: HostError = HostError(libc::EINVAL);

/// See the module.
#[derive(Default)]
pub(super) struct Buffers {
    sends: Vec<ffi::ibv_send_wr>,
    receives: Vec<ffi::ibv_recv_wr>,
    sges: Vec<ffi::ibv_sge>,
    wcs: Vec<ffi::ibv_wc>,
    /// The region of windows that are to show none: providers look at its key before they look at
    /// the length (rdma-core, `rxe.c`, convert_send_wr).
    nothing: Option<Box<Nothing>>,
}

/// What work requests name.
pub(super) struct Objects<'a> {
    pub(super) context: &'a Context,
    pub(super) ahs: &'a Slab<MadeAh>,
    pub(super) mws: &'a Slab<*mut ffi::ibv_mw>,
    pub(super) mrs: &'a Slab<Registered>,
}

impl Buffers {
    /// Copies elements; the list must not grow afterwards, because work requests point into it.
    fn elements(&mut self, sges: &[HostSge], more: usize) {
        self.sges.clear();
        self.sges.reserve(sges.len() + more);
        self.sges.extend(sges.iter().map(|sge| ffi::ibv_sge {
            addr: sge.addr,
            length: sge.length,
            lkey: sge.lkey,
        }));
    }

    pub(super) fn send(
        &mut self,
        context: *mut ffi::ibv_context,
        qp: *mut ffi::ibv_qp,
        burst: &SendBurst,
        objects: &Objects<'_>,
    ) -> std::result::Result<(), PostError> {
        let refused = |error| PostError { posted: 0, error };
        self.elements(&burst.sges, burst.wrs.len());
        self.sends.clear();
        self.sends.reserve(burst.wrs.len());
        for wr in &burst.wrs {
            let (first, count) = self.data(burst, wr).map_err(refused)?;
            let mut raw = send_wr(wr);
            match wr.subject {
                Subject::Peer => {}
                Subject::Ah(handle) => {
                    let ah = objects.ahs.get(handle.0 as usize);
                    let ah = ah.and_then(|made| objects.context.handle(made));
                    raw.wr.ud = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
                        ah: ah.ok_or(refused(BAD))?,
                        remote_qpn: wr.rkey,
                        remote_qkey: wr.aux,
                    };
                }
                Subject::Window(mw, mr) => {
                    let bind = self.bind(wr, (mw, mr), objects).ok_or(refused(BAD))?;
                    raw.__bindgen_anon_2.bind_mw = bind;
                }
            }
            raw.sg_list = self.sges.as_mut_ptr().wrapping_add(first);
            raw.num_sge = count;
            self.sends.push(raw);
        }
        let list = self.sends.as_mut_ptr();
        for index in 1..self.sends.len() {
            self.sends[index - 1].next = list.wrapping_add(index);
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the context of the QP, which is open.
        let call = unsafe { (*context).ops.post_send }.ok_or(refused(BAD))?;
        // SAFETY: the list and all that it points to live through the call, which copies it; inline
        // bytes too.
        let code = unsafe { call(qp, list, &raw mut bad) };
        ended(code, list, bad)
    }

    /// What a BIND_MW names. Providers take the window's present key from its structure, where the
    /// application keeps it (ibv_post_send(3)); no other work request of the burst reads that.
    fn bind(
        &mut self,
        wr: &SendWr,
        (mw, mr): (HostMw, Option<HostMr>),
        objects: &Objects<'_>,
    ) -> Option<ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_1> {
        let mw = *objects.mws.get(mw.0 as usize)?;
        let mr = match mr {
            Some(mr) => objects.context.region(objects.mrs.get(mr.0 as usize)?)?,
            None => (&raw mut **self.nothing.get_or_insert_with(no_region)).cast(),
        };
        // SAFETY: the window is in the table, so it exists, and nobody else uses its structure.
        unsafe { (*mw).rkey = u32::from_le_bytes(wr.imm) };
        Some(ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw,
            rkey: wr.rkey,
            bind_info: ffi::ibv_mw_bind_info {
                mr,
                addr: wr.remote_addr,
                length: wr.arg0,
                mw_access_flags: wr.aux,
            },
        })
    }

    /// Where a work request's elements are; inline bytes get one of their own behind the burst's.
    fn data(&mut self, burst: &SendBurst, wr: &SendWr) -> Result<(usize, c_int)> {
        match wr.data {
            Data::Sges { first, count } => {
                let end = (first as usize).checked_add(count as usize).ok_or(BAD)?;
                if end > burst.sges.len() {
                    return Err(BAD);
                }
                Ok((first as usize, c_int::try_from(count).map_err(|_| BAD)?))
            }
            Data::Inline { first, len } => {
                let range =
                    first as usize..(first as usize).checked_add(len as usize).ok_or(BAD)?;
                let bytes = burst.inline.get(range).ok_or(BAD)?;
                self.sges.push(ffi::ibv_sge {
                    addr: bytes.as_ptr().addr() as u64,
                    length: len,
                    lkey: 0,
                });
                // The provider reads the bytes during the call.
                let _exposed = bytes.as_ptr().expose_provenance();
                Ok((self.sges.len() - 1, c_int::from(len > 0)))
            }
        }
    }

    fn build_receives(&mut self, burst: &RecvBurst) -> Result<*mut ffi::ibv_recv_wr> {
        self.elements(&burst.sges, 0);
        self.receives.clear();
        self.receives.reserve(burst.wrs.len());
        for wr in &burst.wrs {
            let end = (wr.first as usize).checked_add(wr.count as usize).ok_or(BAD)?;
            if end > burst.sges.len() {
                return Err(BAD);
            }
            self.receives.push(ffi::ibv_recv_wr {
                wr_id: wr.wr_id,
                next: ptr::null_mut(),
                sg_list: self.sges.as_mut_ptr().wrapping_add(wr.first as usize),
                num_sge: c_int::try_from(wr.count).map_err(|_| BAD)?,
            });
        }
        let list = self.receives.as_mut_ptr();
        for index in 1..self.receives.len() {
            self.receives[index - 1].next = list.wrapping_add(index);
        }
        Ok(list)
    }

    pub(super) fn receive(
        &mut self,
        context: *mut ffi::ibv_context,
        qp: *mut ffi::ibv_qp,
        burst: &RecvBurst,
    ) -> std::result::Result<(), PostError> {
        let refused = |error| PostError { posted: 0, error };
        let list = self.build_receives(burst).map_err(refused)?;
        let mut bad = ptr::null_mut();
        // SAFETY: the context of the QP, which is open.
        let call = unsafe { (*context).ops.post_recv }.ok_or(refused(BAD))?;
        // SAFETY: the list and all that it points to live through the call, which copies it.
        let code = unsafe { call(qp, list, &raw mut bad) };
        ended(code, list, bad)
    }

    pub(super) fn receive_shared(
        &mut self,
        context: *mut ffi::ibv_context,
        srq: *mut ffi::ibv_srq,
        burst: &RecvBurst,
    ) -> std::result::Result<(), PostError> {
        let refused = |error| PostError { posted: 0, error };
        let list = self.build_receives(burst).map_err(refused)?;
        let mut bad = ptr::null_mut();
        // SAFETY: the context of the SRQ, which is open.
        let call = unsafe { (*context).ops.post_srq_recv }.ok_or(refused(BAD))?;
        // SAFETY: the list and all that it points to live through the call, which copies it.
        let code = unsafe { call(srq, list, &raw mut bad) };
        ended(code, list, bad)
    }

    pub(super) fn poll(
        &mut self,
        context: *mut ffi::ibv_context,
        cq: *mut ffi::ibv_cq,
        into: &mut Vec<HostWc>,
    ) -> Result<bool> {
        self.wcs.resize(POLL, ffi::ibv_wc::default());
        let most = c_int::try_from(POLL).unwrap_or(0);
        // SAFETY: the context of the CQ, which is open.
        let call = unsafe { (*context).ops.poll_cq }.ok_or(BAD)?;
        // SAFETY: there is room for as many entries as are asked for.
        let count = unsafe { call(cq, most, self.wcs.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| super::errno())?;
        into.extend(self.wcs.iter().take(count).map(completion));
        Ok(count == POLL)
    }
}

/// What a post came to: how many work requests were taken tells the pointer at the first that was
/// not.
fn ended<T>(code: c_int, list: *mut T, bad: *mut T) -> std::result::Result<(), PostError> {
    super::check(code).map_err(|error| {
        let posted = bad.addr().saturating_sub(list.addr()) / size_of::<T>().max(1);
        PostError { posted: if bad.is_null() { 0 } else { posted }, error }
    })
}

/// A region, and zeros where a provider keeps what it adds to one.
#[repr(C)]
struct Nothing {
    mr: ffi::ibv_mr,
    added: [u64; 256],
}

fn no_region() -> Box<Nothing> {
    let mr = ffi::ibv_mr {
        context: ptr::null_mut(),
        pd: ptr::null_mut(),
        addr: ptr::null_mut(),
        length: 0,
        handle: 0,
        lkey: 0,
        rkey: 0,
    };
    Box::new(Nothing { mr, added: [0; 256] })
}

fn send_wr(wr: &SendWr) -> ffi::ibv_send_wr {
    let mut raw = ffi::ibv_send_wr {
        wr_id: wr.wr_id,
        opcode: wr.opcode.into(),
        send_flags: flags(wr),
        ..ffi::ibv_send_wr::default()
    };
    if matches!(wr.opcode, opcode::SEND_WITH_INV | opcode::LOCAL_INV) {
        raw.__bindgen_anon_1.invalidate_rkey = u32::from_le_bytes(wr.imm);
    } else if wr.opcode != opcode::BIND_MW {
        // Opaque bytes in network order stay in their order. A bind has none, and a provider
        // refuses what has (rdma-core, `rxe.c`, validate_send_wr).
        raw.__bindgen_anon_1.imm_data = u32::from_ne_bytes(wr.imm);
    }
    match wr.opcode {
        opcode::ATOMIC_CMP_AND_SWP | opcode::ATOMIC_FETCH_AND_ADD => {
            raw.wr.atomic = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
                remote_addr: wr.remote_addr,
                compare_add: wr.arg0,
                swap: wr.arg1,
                rkey: wr.rkey,
            };
        }
        _ => {
            raw.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
                remote_addr: wr.remote_addr,
                rkey: wr.rkey,
            };
        }
    }
    raw
}

fn flags(wr: &SendWr) -> u32 {
    use ffi::ibv_send_flags as f;
    let inline = matches!(wr.data, Data::Inline { .. });
    let mut out = if inline { f::IBV_SEND_INLINE.0 } else { 0 };
    for (ours, theirs) in [
        (send_flags::FENCE, f::IBV_SEND_FENCE),
        (send_flags::SIGNALED, f::IBV_SEND_SIGNALED),
        (send_flags::SOLICITED, f::IBV_SEND_SOLICITED),
    ] {
        if wr.flags & ours != 0 {
            out |= theirs.0;
        }
    }
    out
}

fn completion(wc: &ffi::ibv_wc) -> HostWc {
    let (status, vendor_err) = wc.error().map_or((wc_status::SUCCESS, 0), |(status, vendor)| {
        (u8::try_from(status).unwrap_or(wc_status::GENERAL_ERR), vendor)
    });
    let has = |flag: ffi::ibv_wc_flags| wc.wc_flags.0 & flag.0 != 0;
    let with_inv = has(ffi::ibv_wc_flags::IBV_WC_WITH_INV);
    HostWc {
        wr_id: wc.wr_id(),
        status,
        opcode: if wc.is_valid() { u8::try_from(wc.opcode()).unwrap_or(0) } else { 0 },
        sl: wc.sl,
        pkey_index: wc.pkey_index,
        vendor_err,
        byte_len: u32::try_from(wc.len()).unwrap_or(u32::MAX),
        imm: if with_inv { wc.imm_data.to_le_bytes() } else { wc.imm_data.to_ne_bytes() },
        qpn: wc.qp_num,
        src_qp: wc.src_qp,
        grh: has(ffi::ibv_wc_flags::IBV_WC_GRH),
        with_imm: has(ffi::ibv_wc_flags::IBV_WC_WITH_IMM),
        with_inv,
    }
}

pub(super) fn arm(context: *mut ffi::ibv_context, cq: *mut ffi::ibv_cq) -> Result<()> {
    // SAFETY: the context of the CQ, which is open.
    let call = unsafe { (*context).ops.req_notify_cq }.ok_or(BAD)?;
    // SAFETY: the CQ exists.
    super::check(unsafe { call(cq, 0) })
}

/// The object of an event, if it is of a QP or an SRQ: their contexts are their indices.
pub(super) fn event_of(raw: &ffi::ibv_async_event) -> Option<HostEvent> {
    let kind = raw.event_type;
    let index = |context: *mut std::ffi::c_void| u32::try_from(context.addr()).unwrap_or(u32::MAX);
    match kind {
        event::QP_FATAL
        | event::QP_REQ_ERR
        | event::QP_ACCESS_ERR
        | event::COMM_EST
        | event::SQ_DRAINED
        | event::QP_LAST_WQE_REACHED => {
            // SAFETY: events of these types have a QP.
            let qp = unsafe { raw.element.qp };
            // SAFETY: it exists until they are acknowledged.
            let context = unsafe { (*qp).qp_context };
            Some(HostEvent::Qp(HostQp(index(context)), kind))
        }
        event::SRQ_ERR | event::SRQ_LIMIT_REACHED => {
            // SAFETY: events of these types have an SRQ.
            let srq = unsafe { raw.element.srq };
            // SAFETY: it exists until they are acknowledged.
            let context = unsafe { (*srq).srq_context };
            Some(HostEvent::Srq(HostSrq(index(context)), kind))
        }
        _ => None,
    }
}
