//! What plain sends do at their peer: each takes the oldest receive, fills it and completes it.
//!
//! The ordinary way is `soft/responder.rs`, and it is the one for whatever is not as here: receives
//! that have no element or several, or that are too short; one that a message left behind; none at
//! all. Receives stay in their ring until all sends that were checked together have been copied, so
//! nothing has changed if one of them does not pass.

use arrayvec::ArrayVec;
use virtio_rdma_abi::{
    Cqe, SqWqe, access, cqe_flags, event, opcode, send_flags, wc_opcode, wc_status,
};
use zerocopy::little_endian::{U16, U32, U64};

use super::{STREAK, Turn};
use crate::memory::Borrowed;
use crate::nic::cq::Cq;
use crate::nic::receive::{ReceiveRing, Single};
use crate::soft::mr::Access;
use crate::soft::nic::{Qp, SoftNic};

/// A receive that is filled, and what its completion tells.
pub(super) struct Arrival {
    receive: Single,
    len: u32,
    imm: U32,
    flags: u16,
}

/// Those of requests that were checked together.
pub(super) type Arrivals = ArrayVec<Arrival, STREAK>;

impl Arrival {
    /// Of a send of so many bytes.
    pub(super) const fn new(receive: Single, wqe: &SqWqe, len: u32) -> Self {
        let mut flags = cqe_flags::RECV;
        let mut imm = U32::ZERO;
        if wqe.opcode == opcode::SEND_WITH_IMM {
            flags |= cqe_flags::IMM;
            imm = wqe.imm;
        }
        if wqe.flags & send_flags::SOLICITED != 0 {
            flags |= cqe_flags::SOLICITED;
        }
        Self { receive, len, imm, flags }
    }
}

#[inline]
fn count(arrivals: &Arrivals) -> u32 {
    u32::try_from(arrivals.len()).unwrap_or(u32::MAX)
}

/// The ring whose receives a queue pair takes, its own or a shared one, and the ring's domain.
#[inline]
fn receives<'a>(peer: &'a SoftNic, qp: &'a Qp) -> Option<(&'a ReceiveRing, u32)> {
    match qp.srqn {
        None => Some((qp.receive.as_ref()?, qp.pdn)),
        Some(srqn) => {
            let srq = peer.srqs.get(srqn as usize).filter(|srq| !srq.dead)?;
            Some((&srq.ring, srq.pdn))
        }
    }
}

/// The receive behind these, if a send of `len` bytes may fill it, and its memory.
#[inline]
pub(super) fn open<'a>(
    peer: &'a SoftNic,
    qp: &'a Qp,
    (before, len): (&Arrivals, u32),
) -> Option<(Single, Borrowed<'a>)> {
    if qp.own.open_taken {
        return None;
    }
    let (ring, pdn) = receives(peer, qp)?;
    let receive = ring.peek_single(count(before))?;
    let access = Access::own(pdn, &receive.sge, access::LOCAL_WRITE);
    let memory = (access.len >= len).then(|| peer.backing.mrs.segment(&access))?;
    Some((receive, memory.ok()?))
}

/// Whether the completion of one more of these surely finds its place.
#[inline]
pub(super) fn have_room(arrivals: &Arrivals, peer: &SoftNic, qp: &Qp) -> bool {
    let room = peer.cqs.get(qp.recv_cqn as usize).map_or(0, Cq::room);
    arrivals.len() < room as usize
}

/// Has the processor fetch as many more receives, while bytes are copied.
#[inline]
pub(super) fn fetch(arrivals: &Arrivals, peer: &SoftNic, qp: &Qp) {
    if let (false, Some((ring, _))) = (arrivals.is_empty(), receives(peer, qp)) {
        ring.fetch(count(arrivals)..2 * count(arrivals));
    }
}

/// Takes the receives, and tells of them.
#[inline]
pub(super) fn complete(turn: &Turn, peer: &mut SoftNic, arrivals: &Arrivals) {
    let qpn = turn.flow.dest_qpn;
    let Some(qp) = peer.qps.get_mut(&qpn) else { return };
    let (cqn, ctx, srqn) = (qp.recv_cqn, qp.ctx, qp.srqn);
    match (srqn, &mut qp.receive) {
        (None, Some(ring)) => ring.pass(count(arrivals)),
        (None, None) => {}
        (Some(srqn), _) => {
            let srq = peer.srqs.get_mut(srqn as usize);
            if srq.is_some_and(|srq| srq.advance_by(count(arrivals))) {
                peer.raise(event::SRQ_LIMIT_REACHED, srqn, ctx);
            }
        }
    }
    let shared = srqn.map_or(0, |_| cqe_flags::SRQ);
    for arrival in arrivals {
        let mut cqe = Cqe {
            wr_id: U64::new(arrival.receive.wr_id),
            qpn: U32::new(qpn),
            opcode: wc_opcode::RECV,
            status: wc_status::SUCCESS,
            flags: U16::new(arrival.flags | shared),
            byte_len: U32::new(arrival.len),
            imm: arrival.imm,
            src_qp: U32::new(turn.qpn),
            wqe_index: U32::new(arrival.receive.index),
            sl: turn.flow.sl,
            ..Cqe::default()
        };
        peer.complete(cqn, &mut cqe, arrival.flags & cqe_flags::SOLICITED != 0);
    }
}
