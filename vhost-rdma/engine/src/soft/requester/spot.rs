//! Where a piece begins that goes before its turn: to an owner of mirrored memory (`ahead.rs`), or
//! to another shard (`flight.rs`). Each says which work requests may ([`Rule`]).

use virtio_rdma_abi::SqWqe;

use super::Planned;
use crate::link::Operation;
use crate::nic::limits::MAX_MSG;
use crate::nic::qp::SendQueue;
use crate::nic::shape::flags_are_known;

/// What a work request does, if it may go before its turn. None of those is inline.
pub(super) type Rule = fn(&SqWqe) -> Option<Operation>;

/// The work request's place (0: the one being executed), what that does, and the bytes before the
/// piece.
#[derive(Clone, Copy)]
pub(super) struct Spot {
    pub(super) place: usize,
    pub(super) planned: Planned,
    pub(super) offset: u32,
}

impl Spot {
    /// The request of a place, at its first byte.
    pub(super) fn at(send: &SendQueue, place: usize, rule: Rule) -> Option<Self> {
        let (wqe, sges) = send.request_at(place)?;
        let planned = planned(wqe, sges.iter().map(|sge| sge.length.get()), rule)?;
        Some(Self { place, planned, offset: 0 })
    }
}

fn planned(wqe: &SqWqe, lengths: impl Iterator<Item = u32>, rule: Rule) -> Option<Planned> {
    let operation = rule(wqe).filter(|_| flags_are_known(wqe))?;
    let total: u64 = lengths.map(u64::from).sum();
    let total = u32::try_from(total).ok().filter(|total| (1..=MAX_MSG).contains(total))?;
    Some(Planned { operation, total, inline: false })
}

/// Whether one may be taken out of the ring for it, whatever its length.
pub(super) fn may_be_early(wqe: &SqWqe, rule: Rule) -> bool {
    planned(wqe, std::iter::once(1), rule).is_some()
}
