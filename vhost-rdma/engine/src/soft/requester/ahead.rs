//! Owners of mirrored memory are asked for pieces before their turn (`nic/qp/ahead.rs`).
//!
//! Only plain writes and reads go ahead, and only to memory whose owner has a part to do: whatever
//! else follows waits for its turn, so that a message that tells the peer of earlier ones comes
//! behind them. An owner does its jobs in the order in which it was asked. A failure is nobody's
//! affair here: the piece finds it in its turn.

use virtio_rdma_abi::{SqWqe, opcode, send_flags};

use super::spot::{Spot, may_be_early};
use super::{Turn, request};
use crate::link::{Link as _, NicId, Operation, PIECE, Payload};
use crate::memory::{Charge, Segment};
use crate::nic::budget::{Budget, cost};
use crate::nic::qp::{MOST, SendQueue};
use crate::soft::engine::{Engine, Execution};
use crate::soft::nics::Nics;

/// What goes ahead. A fence waits for reads (IBTA 10.8.3.3).
fn operation(wqe: &SqWqe) -> Option<Operation> {
    let bars = send_flags::INLINE | send_flags::FENCE;
    match wqe.opcode {
        _ if wqe.flags & bars != 0 => None,
        opcode::RDMA_WRITE => Some(Operation::Write),
        opcode::RDMA_READ => Some(Operation::Read),
        _ => None,
    }
}

/// Where the piece that was asked last ends.
fn last(send: &SendQueue) -> Option<Spot> {
    let mut spot = Spot { offset: send.done, ..Spot::at(send, 0, operation)? };
    for len in std::iter::once(send.piece).chain(send.ahead.pieces()) {
        if spot.offset == spot.planned.total {
            spot = Spot::at(send, spot.place + 1, operation)?;
        }
        spot.offset += len;
    }
    Some(spot)
}

/// Where the next piece to be asked begins.
fn next(send: &mut SendQueue, charge: impl FnOnce(usize) -> Option<Charge>) -> Option<Spot> {
    let spot = last(send)?;
    if spot.offset < spot.planned.total {
        return Some(spot);
    }
    let place = spot.place + 1;
    if send.request_at(place).is_none()
        && !send.take_early(|wqe| may_be_early(wqe, operation), charge)
    {
        return None;
    }
    Spot::at(send, place, operation)
}

impl<N: Nics> Execution<'_, N> {
    /// The current work request waits for an owner: asks for some of what comes behind it. True if
    /// more may be asked in another turn: owners hear of their jobs between turns, and should have
    /// something to do soon.
    pub(super) fn ask_ahead(
        &mut self,
        turn: &Turn,
        send: &mut SendQueue,
        budget: &mut Budget,
    ) -> bool {
        if !turn.kind.is_connected() {
            return false;
        }
        let mut segments = std::mem::take(&mut self.engine.segments);
        let mut bytes = 0u32;
        let more = loop {
            if send.ahead.pieces().len() >= MOST {
                break false;
            }
            if bytes >= PIECE || self.is_over(turn.nic, budget) {
                break true;
            }
            let charge = |bytes| self.charge_early(turn.nic, bytes);
            let Some(spot) = next(send, charge) else { break false };
            let Some((len, job)) = self.ask_piece(turn, send, &spot, &mut segments) else {
                break false;
            };
            send.ahead.asked(len, job);
            bytes = bytes.saturating_add(len);
        };
        segments.clear();
        self.engine.segments = segments;
        more
    }

    /// Has a NIC's account pay for work requests that are taken out of the ring before their turn.
    pub(super) fn charge_early(&mut self, id: NicId, bytes: usize) -> Option<Charge> {
        self.nic_mut(id)?.kept.beside(bytes).ok()
    }

    /// The piece's length, and the job's number.
    fn ask_piece(
        &mut self,
        turn: &Turn,
        send: &SendQueue,
        spot: &Spot,
        segments: &mut Vec<Segment>,
    ) -> Option<(u32, u64)> {
        let nic = self.nic_mut(turn.nic)?;
        let (wqe, sges) = send.request_at(spot.place)?;
        nic.meter.charge(cost::REQUEST);
        nic.meter.charge_each(cost::ELEMENT, sges.len());
        let Spot { ref planned, offset, .. } = *spot;
        let len = nic.cut_piece(sges, (planned, offset));
        let writes = planned.operation == Operation::Write;
        if writes && !nic.gather(turn, sges, planned, segments) {
            return None;
        }
        // What is read comes in the read's own turn.
        let payload = Payload::Memory(if writes { segments } else { &[] });
        if writes {
            nic.meter.charge(cost::bytes(len.into()));
        }
        let request = request(turn, &turn.flow, wqe, nic, payload, (planned, offset, len));
        let Self { nics, engine: Engine { networks, ways, .. }, .. } = self;
        let job = ways.ask_ahead(&mut crate::soft::network::View { nics, networks }, &request);
        job.map(|job| (len, job))
    }
}
