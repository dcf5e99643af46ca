//! Pieces that cross to another shard before those ahead of them are answered: *flights*.
//!
//! A hand-over between threads and back takes longer than the copy of a piece, so a queue pair has
//! some further pieces under way: of the message that is being executed, and of messages of one
//! piece behind it. The responder executes them in the order of their numbers. One that comes
//! before its turn is sent back ([`crate::link::Outcome::Full`]) and sent again in it, and then
//! none goes ahead for a while; so an owner of mirrored memory, or a receive that is not there,
//! costs a few copies and no more.
//!
//! Once a piece was sent it stays the same piece by the same number, until its queue pair is reset:
//! it may have been executed, and the responder answers by the number. In its turn
//! ([`super::Execution::step`]) it is settled by its answer, waited for, or sent again.
//!
//! Sends and writes go ahead. Reads and atomics do not: nothing follows them before they are
//! answered, so at most one of a queue pair is under way, which is the least `max_rd_atomic` there
//! is (IBTA 9.7.3), and a fence has nothing to wait for.
//!
//! Flights are the NIC's like all that it has under way: the link bounds them together, to half of
//! what it takes of a NIC, and what they cost is its turn's.

use virtio_rdma_abi::{SqWqe, opcode, send_flags};

use super::spot::{Spot, may_be_early};
use super::{NO_GID, TURN_BYTES, Turn, request};
use crate::link::{Awaited, Link as _, Operation, Outcome, Payload, Ticket};
use crate::memory::{Charge, Segment};
use crate::nic::budget::{Budget, cost};
use crate::nic::qp::{Fate, Flight, Kind, SendQueue, State};
use crate::soft::engine::{Engine, Execution};
use crate::soft::network::View;
use crate::soft::nics::Nics;

/// A piece that is to be sent.
struct Piece {
    spot: Spot,
    number: u32,
    /// Its length, if it was sent before.
    len: Option<u32>,
}

/// What goes ahead.
fn operation(wqe: &SqWqe) -> Option<Operation> {
    match wqe.opcode {
        _ if wqe.flags & send_flags::INLINE != 0 => None,
        opcode::SEND | opcode::SEND_WITH_IMM => Some(Operation::Send),
        opcode::RDMA_WRITE | opcode::RDMA_WRITE_WITH_IMM => Some(Operation::Write),
        _ => None,
    }
}

/// Where the piece behind one of this length begins. The next work request is taken out of the ring
/// for it, if it may be and the NIC's account pays for it.
fn behind(
    send: &mut SendQueue,
    (spot, len): (Spot, u32),
    charge: impl FnOnce(usize) -> Option<Charge>,
) -> Option<Spot> {
    let offset = spot.offset.saturating_add(len);
    if offset < spot.planned.total {
        return Some(Spot { offset, ..spot });
    }
    let place = spot.place + 1;
    if send.request_at(place).is_none()
        && !send.take_early(|wqe| may_be_early(wqe, operation), charge)
    {
        return None;
    }
    Spot::at(send, place, operation)
}

/// It is the turn of a piece that crosses: what is known of it, if it went ahead. `None`: it is to
/// be sent, and whatever is behind it comes too early.
pub(super) fn known(send: &mut SendQueue, flown: Option<Flight>) -> Option<Outcome> {
    let known = flown.and_then(|flight| match flight.fate {
        Fate::Sent => Some(Outcome::Later(Awaited::Answer)),
        fate => fate.outcome(),
    });
    if known.is_none() {
        send.ahead.recall();
    }
    known
}

impl<N: Nics> Execution<'_, N> {
    /// The current piece crosses, and the turn has moved some bytes: sends some of what comes
    /// behind it. True if more may be sent in another turn.
    pub(super) fn fly_ahead(
        &mut self,
        turn: &Turn,
        send: &mut SendQueue,
        budget: (&mut Budget, u32),
    ) -> bool {
        let state =
            self.nic_mut(turn.nic).and_then(|nic| nic.qps.get(&turn.qpn)).map(|qp| qp.state);
        let runs = matches!(state, Some(State::Rts | State::Sqd));
        // Under an address that was withdrawn nothing leaves.
        let leaves = turn.kind == Kind::Rc && turn.flow.source_gid != NO_GID;
        if !runs || !leaves || !send.crosses {
            return false;
        }
        // Whoever comes to rest begins nothing (IBTA 10.3.1.4), and what follows to a peer that has
        // come to this shard does not cross.
        let begins = state == Some(State::Rts) && turn.peer.is_none();
        let mut segments = std::mem::take(&mut self.engine.segments);
        let more = self.fly(turn, send, begins, (budget, &mut segments));
        segments.clear();
        self.engine.segments = segments;
        more
    }

    fn fly(
        &mut self,
        turn: &Turn,
        send: &mut SendQueue,
        begins: bool,
        ((budget, moved), segments): ((&mut Budget, u32), &mut Vec<Segment>),
    ) -> bool {
        let Some(current) = Spot::at(send, 0, operation) else { return false };
        let mut spot = Spot { offset: send.done, ..current };
        let (mut len, mut bytes) = (send.piece, moved);
        for (at, ahead) in (1..).enumerate().take(send.window()) {
            let flight = send.ahead.flights().get(at).copied();
            if !begins && flight.is_none_or(|flight| flight.fate == Fate::Back) {
                return false;
            }
            let charge = |bytes| self.charge_early(turn.nic, bytes);
            let Some(next) = behind(send, (spot, len), charge) else { return false };
            spot = next;
            let known = |flight: &Flight| !matches!(flight.fate, Fate::Back | Fate::Lost);
            if let Some(flight) = flight.filter(known) {
                len = flight.len;
                continue;
            }
            if bytes >= TURN_BYTES || self.is_over(turn.nic, budget) {
                return true;
            }
            let number = send.ticket.number.wrapping_add(ahead);
            let piece = Piece { spot, number, len: flight.map(|flight| flight.len) };
            let Some(sent) = self.fly_piece(turn, send, &piece, segments) else { return false };
            send.ahead.flew(at, sent);
            (len, bytes) = (sent, bytes.saturating_add(sent));
        }
        false
    }

    /// The piece's length, if it is on its way.
    fn fly_piece(
        &mut self,
        turn: &Turn,
        send: &SendQueue,
        piece: &Piece,
        segments: &mut Vec<Segment>,
    ) -> Option<u32> {
        let mtu = self.engine.ways.mtu();
        let nic = self.nic_mut(turn.nic)?;
        let Spot { place, ref planned, offset } = piece.spot;
        let (wqe, sges) = send.request_at(place)?;
        nic.meter.charge(cost::REQUEST);
        nic.meter.charge_each(cost::ELEMENT, sges.len());
        let cut = || nic.cut_piece(sges, (planned, offset)).min(mtu);
        let len = piece.len.unwrap_or_else(cut);
        // A message of several pieces begins in its turn, which keeps what its keys open.
        let same = match place {
            0 => nic.backing.mrs.stamp_of(sges) == send.stamp,
            _ => len == planned.total,
        };
        if !same || !nic.gather(turn, sges, planned, segments) {
            return None;
        }
        nic.meter.charge(cost::bytes(len.into()));
        let payload = Payload::Memory(segments);
        let mut request = request(turn, &turn.flow, wqe, nic, payload, (planned, offset, len));
        request.ticket = Ticket { number: piece.number, ..send.ticket };
        (request.crossed, request.ahead) = (true, true);
        let Self { nics, engine: Engine { networks, ways, .. }, .. } = self;
        let outcome = ways.submit(&mut View { nics, networks }, &request);
        (outcome == Outcome::Later(Awaited::Answer)).then_some(len)
    }
}
