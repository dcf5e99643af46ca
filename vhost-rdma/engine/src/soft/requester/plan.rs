//! What a work request is, by the NIC's own objects: its form, its length, whom it is for, its
//! memory, and how much of it is moved in one go. Nothing has happened when any of this fails.

use virtio_rdma_abi::{Sge, SqWqe, access, opcode, send_flags, wc_status};

use super::{ATOMIC_LEN, NO_GID, Turn};
use crate::link::{Flow, Operation};
use crate::memory::{self, Segment};
use crate::nic::limits::{MAX_MSG, MTU};
use crate::nic::qp::{Kind, SendQueue};
use crate::soft::mr::Access;
use crate::soft::nic::SoftNic;

/// A work request that passed the checks that need no memory.
#[derive(Clone, Copy)]
pub(super) struct Planned {
    pub(super) operation: Operation,
    pub(super) total: u32,
    pub(super) inline: bool,
}

impl SoftNic {
    /// Checks a work request's form and learns its length. Elements and inline bytes are copied
    /// once.
    #[inline]
    pub(super) fn plan(
        &self,
        turn: &Turn,
        send: &mut SendQueue,
        wqe: &SqWqe,
    ) -> Result<Planned, u8> {
        let operation = operation(turn.kind, wqe.opcode).ok_or(wc_status::LOC_QP_OP_ERR)?;
        let inline = wqe.flags & send_flags::INLINE != 0;
        let count = u32::from(wqe.num_sge.get());
        let moves_here =
            matches!(operation, Operation::Read | Operation::CompareSwap | Operation::FetchAdd);
        let most = match operation {
            // The least stride has room for its word, whatever inline the QP asked for.
            Operation::AtomicWrite if inline => ATOMIC_LEN,
            _ if inline => send.max_inline,
            _ => send.max_sge,
        };
        if (inline && moves_here) || count > most {
            return Err(wc_status::LOC_QP_OP_ERR);
        }
        if !std::mem::replace(&mut send.fetched, true) {
            if inline { send.fetch_inline(count) } else { send.fetch_sges(count) }
        }
        let total = if inline {
            u64::from(count)
        } else {
            send.sges.iter().map(|sge| u64::from(sge.length.get())).sum()
        };
        let is_word = total == u64::from(ATOMIC_LEN);
        match operation {
            Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite if !is_word => {
                return Err(wc_status::LOC_LEN_ERR);
            }
            Operation::CompareSwap | Operation::FetchAdd if count != 1 => {
                return Err(wc_status::LOC_QP_OP_ERR);
            }
            Operation::Flush if count != 0 => return Err(wc_status::LOC_QP_OP_ERR),
            _ => {}
        }
        let most = if turn.kind.is_connected() { MAX_MSG } else { MTU };
        match u32::try_from(total) {
            // More can be done of it than there is only if saved state says so.
            Ok(total) if total <= most && send.done <= total => {
                Ok(Planned { operation, total, inline })
            }
            _ => Err(wc_status::LOC_LEN_ERR),
        }
    }

    /// Addresses a datagram; false if its address handle is not of this domain.
    pub(super) fn address(&self, wqe: &SqWqe, pdn: u32, flow: &mut Flow) -> bool {
        let handle = usize::try_from(wqe.arg0.get()).ok().and_then(|number| self.ahs.get(number));
        let Some(ah) = handle.filter(|ah| ah.pdn == pdn) else { return false };
        flow.source_gid = self.gid(ah.av.sgid_index.get()).unwrap_or(NO_GID);
        flow.dest_gid = ah.av.dgid;
        flow.dest_qpn = wqe.rkey.get();
        flow.traffic_class = ah.av.traffic_class;
        flow.hop_limit = ah.av.hop_limit;
        flow.sl = ah.av.sl;
        true
    }

    /// Resolves the work request's elements; false if one of them is denied. `segments` may have
    /// those of an earlier one, whose translations are likely the same.
    #[inline]
    pub(super) fn gather(
        &self,
        turn: &Turn,
        sges: &[Sge],
        planned: &Planned,
        segments: &mut Vec<Segment>,
    ) -> bool {
        let rights = match planned.operation {
            Operation::Send | Operation::Write | Operation::AtomicWrite | Operation::Flush => 0,
            Operation::Read | Operation::CompareSwap | Operation::FetchAdd => access::LOCAL_WRITE,
        };
        let mut count = 0;
        let named = sges.iter().filter(|sge| sge.length.get() != 0).all(|sge| {
            let access = Access::own(turn.pdn, sge, rights);
            let Ok(segment) = self.backing.mrs.segment(&access) else { return false };
            match segments.get_mut(count) {
                Some(old) => segment.replace(old),
                None => segments.push(segment.keep()),
            }
            count += 1;
            true
        });
        segments.truncate(count);
        named
    }

    /// Puts what was read elsewhere where the work request wants it; false if it may not.
    pub(super) fn bring_home(
        &self,
        turn: &Turn,
        send: &mut SendQueue,
        planned: &Planned,
        bytes: &[u8],
    ) -> bool {
        let mut segments = Vec::new();
        let (len, done) = (send.piece, u64::from(send.done));
        bytes.len() == len as usize
            && self.opens_the_same(send, (planned.total, len))
            && self.gather(turn, &send.sges, planned, &mut segments)
            && memory::write(&segments, done, bytes).is_ok()
    }

    /// Length of the next piece. Datagrams and atomics are one.
    #[inline]
    pub(super) fn piece(&self, kind: Kind, send: &SendQueue, planned: &Planned) -> u32 {
        let cut = matches!(planned.operation, Operation::Send | Operation::Write | Operation::Read);
        if planned.inline || !cut || !kind.is_connected() {
            return planned.total - send.done;
        }
        self.cut_piece(&send.sges, (planned, send.done))
    }

    /// Length of the piece of a message that begins behind some bytes of it.
    #[inline]
    pub(super) fn cut_piece(&self, sges: &[Sge], (planned, done): (&Planned, u32)) -> u32 {
        let lengths = sges.iter().map(|sge| sge.length.get());
        self.backing.pace.piece(lengths, done, planned.total)
    }

    /// Whether the keys of a message that takes several turns open what they opened at its first: a
    /// region that was registered anew meanwhile ends it.
    #[inline]
    pub(super) fn opens_the_same(&self, send: &mut SendQueue, (total, len): (u32, u32)) -> bool {
        if len == total {
            return true;
        }
        let stamp = self.backing.mrs.stamp_of(&send.sges);
        if send.done == 0 {
            send.stamp = stamp;
        }
        send.stamp == stamp
    }
}

/// What an opcode does, if QPs of this kind may do it (docs/virtio-rdma.md §7.1).
const fn operation(kind: Kind, code: u8) -> Option<Operation> {
    match (code, kind) {
        (opcode::SEND | opcode::SEND_WITH_IMM, _) | (opcode::SEND_WITH_INV, Kind::Rc) => {
            Some(Operation::Send)
        }
        (opcode::RDMA_WRITE | opcode::RDMA_WRITE_WITH_IMM, Kind::Rc | Kind::Uc) => {
            Some(Operation::Write)
        }
        (opcode::RDMA_READ, Kind::Rc) => Some(Operation::Read),
        (opcode::ATOMIC_CMP_AND_SWP, Kind::Rc) => Some(Operation::CompareSwap),
        (opcode::ATOMIC_FETCH_AND_ADD, Kind::Rc) => Some(Operation::FetchAdd),
        (opcode::ATOMIC_WRITE, Kind::Rc) => Some(Operation::AtomicWrite),
        (opcode::FLUSH, Kind::Rc) => Some(Operation::Flush),
        _ => None,
    }
}
