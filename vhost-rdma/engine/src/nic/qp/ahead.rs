//! What is under way behind the work request that is being executed.
//!
//! Where the owner of the memory has a part to do (docs/virtio-rdma-process.md §4), the answer
//! takes the time of several threads. So owners are asked for what comes next before its turn:
//! for some further pieces of the same message, and of the work requests behind it. In its turn
//! each piece is checked and given like any other, and completes in order; all that is known then
//! is that its owner was asked, or has answered. Nothing here decides how a work request ends.
//!
//! The same holds for pieces that cross to another shard: some further ones are sent before the
//! first is answered ([`Flight`]).

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::SqWqe;

use crate::link::{Nak, Outcome, Owner};
use crate::memory::Charge;
use crate::nic::receive::SgeList;

/// A work request that was taken out of the ring before its turn.
#[derive(Debug)]
pub(crate) struct Early {
    pub(crate) wqe: SqWqe,
    /// Free-running index.
    pub(crate) index: u32,
    pub(crate) sges: SgeList,
}

/// A piece whose owner was asked before its turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// Bytes.
    pub(crate) len: u32,
    pub(crate) owner: Owner,
}

/// What is known of a piece that crossed before its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Fate {
    /// It came back: it was not executed, and has not begun. It is to be sent again.
    Back,
    /// It is not known where it is, and it is to be sent again.
    Lost,
    /// It is under way, as far as is known.
    Sent,
    /// It was executed.
    Done,
    /// The responder refused it.
    Refused(Nak),
    /// The responder could not move its bytes.
    Fault,
}

impl Fate {
    /// What an answer says. A receive that was not there may be by the time of its turn, so that is
    /// found out then.
    const fn of(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Refused(nak) => Self::Refused(nak),
            Outcome::LocalFault => Self::Fault,
            _ => Self::Back,
        }
    }

    /// What is known for good.
    pub(crate) const fn outcome(self) -> Option<Outcome> {
        match self {
            Self::Back | Self::Lost | Self::Sent => None,
            Self::Done => Some(Outcome::Done),
            Self::Refused(nak) => Some(Outcome::Refused(nak)),
            Self::Fault => Some(Outcome::LocalFault),
        }
    }
}

/// A piece that was sent to another shard before its turn. Once it was, it stays the same piece by
/// the same number: it may have been executed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Flight {
    /// Bytes.
    pub(crate) len: u32,
    pub(crate) fate: Fate,
}

/// Pieces that are sent ahead to another shard, at most.
pub(crate) const WINDOW: u8 = 16;
/// Work requests and pieces that are under way ahead of their turn, at most.
pub(crate) const MOST: usize = WINDOW as usize;
/// What the work requests among them take, while there are any, with a list's own bytes.
pub(crate) const EARLY: usize = MOST * size_of::<Early>() + 16;
/// What the pieces take, which stays.
pub(crate) const PIECES: usize = MOST * (size_of::<Asked>() + size_of::<Flight>()) + 32;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    requests: VecDeque<Early>,
    /// What they take of the NIC's account.
    held: Option<Charge>,
    /// In the order of their turns.
    pieces: VecDeque<Asked>,
    /// Those that crossed, in the order of their turns; never both kinds.
    flights: VecDeque<Flight>,
}

impl Ahead {
    #[inline]
    pub(crate) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether nothing is under way.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.pieces.is_empty() && self.flights.is_empty()
    }

    pub(crate) fn pieces(&self) -> impl ExactSizeIterator<Item = u32> {
        self.pieces.iter().map(|piece| piece.len)
    }

    /// What crossed, by the order of the turns.
    pub(crate) const fn flights(&self) -> &VecDeque<Flight> {
        &self.flights
    }

    /// Whether one may have been executed.
    pub(super) fn have_begun(&self) -> bool {
        self.flights.iter().any(|flight| flight.fate != Fate::Back)
    }

    /// The piece whose turn it is, if it crossed before.
    #[inline]
    pub(crate) fn next_flight(&mut self) -> Option<Flight> {
        self.flights.pop_front()
    }

    /// A piece was sent: the one of this place, again, or one behind all others.
    pub(crate) fn flew(&mut self, at: usize, len: u32) {
        match self.flights.get_mut(at) {
            Some(flight) => flight.fate = Fate::Sent,
            None => self.flights.push_back(Flight { len, fate: Fate::Sent }),
        }
    }

    /// What became of the one of a place. True: all before it were executed, since a responder
    /// keeps the order; an answer of theirs that was lost is not missed.
    pub(super) fn landed(&mut self, at: usize, outcome: Outcome) -> bool {
        let Some(flight) = self.flights.get_mut(at) else { return false };
        let fate = Fate::of(outcome);
        // Else it is the answer to what was sent once more than it was needed.
        if fate != Fate::Back || flight.fate.outcome().is_none() {
            flight.fate = fate;
        }
        let in_turn = fate != Fate::Back || matches!(outcome, Outcome::NotReady(_));
        if in_turn {
            self.flights.iter_mut().take(at).for_each(|before| before.fate = Fate::Done);
        }
        in_turn
    }

    /// The piece before them is to be sent again, so they were not executed: all that are under way
    /// are to be sent again.
    pub(crate) fn recall(&mut self) {
        for flight in self.flights.iter_mut().filter(|flight| flight.fate == Fate::Sent) {
            flight.fate = Fate::Lost;
        }
    }

    pub(super) fn save_flights(&self) -> Vec<Flight> {
        self.flights.iter().copied().collect()
    }

    /// In another process, where nothing of it is under way.
    pub(super) fn load_flights(&mut self, saved: Vec<Flight>) {
        self.flights = saved.into();
        self.recall();
    }

    /// What was taken early, in order.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Early> {
        self.requests.iter()
    }

    #[inline]
    pub(super) fn take(&mut self) -> Option<Early> {
        let early = self.requests.pop_front()?;
        if self.requests.is_empty() {
            (self.requests, self.held) = (VecDeque::new(), None);
        }
        Some(early)
    }

    /// Whether another work request may be taken early. `charge` has the NIC's account pay for all
    /// there can be, which is given back with the last.
    pub(super) fn has_room(&mut self, charge: impl FnOnce(usize) -> Option<Charge>) -> bool {
        if self.held.is_none() {
            self.held = charge(EARLY);
            self.requests.reserve_exact(if self.held.is_some() { MOST } else { 0 });
        }
        self.held.is_some() && self.requests.len() < MOST
    }

    /// Only where [`Self::has_room`].
    pub(super) fn push(&mut self, early: Early) {
        self.requests.push_back(early);
    }

    pub(super) fn request(&self, at: usize) -> Option<&Early> {
        self.requests.get(at)
    }

    #[inline]
    pub(super) fn next_piece(&mut self) -> Option<Asked> {
        self.pieces.pop_front()
    }

    /// The next piece's owner was asked.
    pub(crate) fn asked(&mut self, len: u32, job: u64) {
        self.pieces.push_back(Asked { len, owner: Owner::Asked(job) });
    }

    /// An owner has answered.
    pub(crate) fn answered(&mut self, job: u64, answer: Owner) {
        if let Some(piece) = self.pieces.iter_mut().find(|piece| piece.owner == Owner::Asked(job)) {
            piece.owner = answer;
        }
    }

    /// So many bytes are not sent, whose pieces come first.
    pub(crate) fn forget_bytes(&mut self, bytes: u32) {
        let mut left = bytes;
        while left > 0
            && let Some(piece) = self.pieces.pop_front()
        {
            left = left.saturating_sub(piece.len);
        }
    }

    /// The work request that is being executed did not go on as it should: whatever was asked is
    /// asked again in its turn.
    #[inline]
    pub(crate) fn forget_pieces(&mut self) {
        self.pieces.clear();
    }

    /// The queue pair sends no more.
    pub(crate) fn forget_all(&mut self) {
        self.pieces.clear();
        self.flights.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fates(ahead: &Ahead) -> Vec<Fate> {
        ahead.flights().iter().map(|flight| flight.fate).collect()
    }

    fn flown() -> Ahead {
        let mut ahead = Ahead::default();
        (0..4).for_each(|at| ahead.flew(at, 8));
        ahead
    }

    #[test]
    fn an_answer_stands_for_all_before_it() {
        for (outcome, fate) in [
            (Outcome::Done, Fate::Done),
            (Outcome::Refused(Nak::RemoteAccess), Fate::Refused(Nak::RemoteAccess)),
            (Outcome::LocalFault, Fate::Fault),
            (Outcome::NotReady(1), Fate::Back),
        ] {
            let mut ahead = flown();
            assert!(ahead.landed(2, outcome));
            assert_eq!(fates(&ahead), [Fate::Done, Fate::Done, fate, Fate::Sent]);
        }
        let mut ahead = flown();
        for outcome in [Outcome::Full, Outcome::NoAnswer] {
            assert!(!ahead.landed(2, outcome), "it says nothing of them");
            assert!(!ahead.landed(4, Outcome::Done), "there is none");
            assert_eq!(fates(&ahead), [Fate::Sent, Fate::Sent, Fate::Back, Fate::Sent]);
        }
    }

    #[test]
    fn what_is_known_for_good_stays() {
        let mut ahead = flown();
        ahead.landed(0, Outcome::Done);
        ahead.landed(1, Outcome::Refused(Nak::InvalidRequest));
        let known = [Fate::Done, Fate::Refused(Nak::InvalidRequest), Fate::Lost, Fate::Lost];
        ahead.recall();
        // Of what was sent twice.
        ahead.landed(0, Outcome::Full);
        ahead.landed(1, Outcome::NoAnswer);
        assert_eq!(fates(&ahead), known);
        assert!(ahead.have_begun());
        // In another process nothing is under way, and what is known is known.
        ahead.flew(2, 8);
        let mut next = Ahead::default();
        next.load_flights(ahead.save_flights());
        assert_eq!(fates(&next), known);
    }

    #[test]
    fn what_came_back_has_not_begun() {
        let mut ahead = flown();
        (0..4).for_each(|at| _ = ahead.landed(at, Outcome::Full));
        assert!(!ahead.have_begun());
        ahead.flew(0, 8);
        assert!(ahead.have_begun());
    }
}
