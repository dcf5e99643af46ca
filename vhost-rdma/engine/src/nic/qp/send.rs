//! The send queue: a ring of work requests, of which one at a time is being executed. Some of what
//! comes behind it may be under way already ([`super::ahead`]).

use std::ops::Range;

use serde::{Deserialize, Serialize};
use virtio_rdma_abi::{Sge, SqWqe, wqe_shape};
use zerocopy::FromBytes;

use super::ahead::{self, Ahead, Early, Flight, WINDOW};
use crate::link::{Fanout, Nak, Outcome, Owner, PIECE, Ticket};
use crate::memory::{AddressSpace, Charge, Ring};
use crate::nic::Nanos;
use crate::nic::limits::MAX_INLINE;
use crate::nic::quota::Kept;
use crate::nic::receive::{BadIndex, SgeList, load_sges, read_sges};
use crate::nic::saved::{AbiBytes, BadState, SavedRing};

/// Bytes of the smallest entry.
const LEAST: usize = 1 << wqe_shape::SQ_WQE_MIN_LOG2_STRIDE;
const _: () = assert!(LEAST == wqe_shape::SQ_WQE_DATA + size_of::<Sge>());

/// What the work request that is being executed waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Wait {
    /// Nothing: it can be executed.
    #[default]
    None,
    /// The peer had no receive; until then, or until it posts one.
    Receiver(Nanos),
    /// Nobody answered; until then, or until the peer appears.
    Answer(Nanos),
    /// The owner of the memory that the request names has a part to do; until then at the latest.
    Owner(Nanos),
    /// An answer from another shard; until then at the latest.
    Link(Nanos),
}

/// A send queue.
#[derive(Debug)]
pub struct SendQueue {
    ring: Ring,
    entries: u32,
    log2_stride: u8,
    /// Elements of a work request.
    pub max_sge: u32,
    /// Bytes of inline data of a work request.
    pub max_inline: u32,
    producer: u32,
    taken: u32,
    /// What is under way behind the work request that is being executed; nothing for most.
    pub(crate) ahead: Ahead,
    /// The work request being executed, copied out of the ring once.
    pub(crate) current: Option<SqWqe>,
    /// Its free-running index.
    index: u32,
    /// Its elements or inline bytes have been copied too.
    pub(crate) fetched: bool,
    /// What stands behind it in the ring: its first element, if it has any.
    first: Sge,
    /// Its scatter-gather elements.
    pub sges: SgeList,
    /// Its inline bytes, allocated once for the largest that the QP may have.
    pub inline: Vec<u8>,
    /// Bytes of its message that are done.
    pub(crate) done: u32,
    /// Bytes that the link has now.
    pub(crate) piece: u32,
    /// What the owner of the memory did for it.
    pub(crate) owner: Owner,
    /// Who of a group has it.
    pub(crate) fanout: Fanout,
    /// What its elements' keys opened when it began.
    pub(crate) stamp: u64,
    pub(crate) wait: Wait,
    pub(crate) rnr_left: u8,
    pub(crate) retries_left: u8,
    /// The piece, as a responder elsewhere knows it.
    pub(crate) ticket: Ticket,
    /// It was sent there, and may have been executed.
    pub(crate) crosses: bool,
    /// What became of it, as came out while the NIC stood still.
    pub(crate) landed: Option<Landed>,
    /// Pieces that were done since one came too early, as far as that counts.
    credit: u8,
}

/// Pieces that go one at a time after one that came too early: each that does costs a copy.
const REST: u8 = 16;

/// What became of a piece, where that cannot be asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Landed {
    /// It was executed; an atomic found this.
    Done([u8; 8]),
    /// It was refused.
    Refused(Nak),
}

impl Landed {
    /// What an answer says of it, if it is the last that there is.
    pub(crate) const fn of(outcome: Outcome, word: [u8; 8]) -> Option<Self> {
        match outcome {
            Outcome::Done => Some(Self::Done(word)),
            Outcome::Refused(nak) => Some(Self::Refused(nak)),
            Outcome::NotReady(_)
            | Outcome::LocalFault
            | Outcome::NoAnswer
            | Outcome::Partly(_)
            | Outcome::Later(_)
            | Outcome::Full => None,
        }
    }
}

/// Shape of a send queue.
#[derive(Clone, Copy, Debug)]
pub struct SendShape {
    pub(crate) entries: u32,
    pub(crate) log2_stride: u8,
    pub(crate) max_sge: u32,
    pub max_inline: u32,
}

impl SendQueue {
    /// The queue in a guest's ring.
    pub fn new(ring: Ring, shape: SendShape) -> Self {
        Self {
            ring,
            entries: shape.entries,
            log2_stride: shape.log2_stride,
            max_sge: shape.max_sge,
            max_inline: shape.max_inline,
            producer: 0,
            taken: 0,
            ahead: Ahead::default(),
            current: None,
            index: u32::MAX,
            fetched: false,
            first: Sge::default(),
            sges: SgeList::new(),
            inline: Vec::with_capacity(shape.max_inline.max(8) as usize),
            done: 0,
            piece: 0,
            owner: Owner::Unasked,
            fanout: Fanout::default(),
            stamp: 0,
            wait: Wait::None,
            rnr_left: 0,
            retries_left: 0,
            ticket: Ticket::default(),
            crosses: false,
            landed: None,
            credit: REST + WINDOW,
        }
    }

    /// The guest's ring.
    pub const fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Free-running index of the work request being executed.
    pub const fn current_index(&self) -> u32 {
        self.index
    }

    /// Work requests posted and not taken.
    pub const fn waiting(&self) -> u32 {
        self.producer.wrapping_sub(self.taken)
    }

    /// Whether anything is left to execute or to flush.
    pub(crate) fn has_work(&self) -> bool {
        self.current.is_some() || self.waiting() > 0 || self.ahead.has_requests()
    }

    /// Work requests that are not over.
    pub(crate) fn left(&self) -> u32 {
        let taken = usize::from(self.current.is_some()) + self.ahead.requests().count();
        self.waiting().saturating_add(u32::try_from(taken).unwrap_or(u32::MAX))
    }

    /// Whether a work request has begun, and may have been executed at the peer.
    pub(crate) fn has_begun(&self) -> bool {
        self.current.is_some() || self.ahead.have_begun()
    }

    /// Forgets all that was posted.
    pub fn reset(&mut self) {
        self.producer = 0;
        self.credit = REST + WINDOW;
        self.taken = 0;
        self.ahead = Ahead::default();
        self.ticket = Ticket::default();
        self.retire();
    }

    /// As if `index` work requests had come and gone.
    #[cfg(test)]
    pub(crate) const fn begin_at(&mut self, index: u32) {
        (self.producer, self.taken) = (index, index);
    }

    /// The current work request is over.
    pub fn retire(&mut self) {
        self.current = None;
        self.done = 0;
        self.owner = Owner::Unasked;
        self.fanout = Fanout::default();
        self.wait = Wait::None;
        self.crosses = false;
        self.landed = None;
    }

    /// Takes note of a new producer index.
    pub const fn posted(&mut self, producer: u32) -> Result<(), BadIndex> {
        let waiting = producer.wrapping_sub(self.taken);
        if waiting > self.entries || waiting < self.waiting() {
            return Err(BadIndex);
        }
        self.producer = producer;
        Ok(())
    }

    /// Takes the next work request, copying it once. Elements and inline bytes are left for
    /// `fetch_sges` and `fetch_inline`.
    #[inline]
    pub fn take(&mut self) -> Option<SqWqe> {
        if let Some(early) = self.ahead.take() {
            return Some(self.begin(early));
        }
        let (wqe, first) = self.peek()?;
        self.first = first;
        self.index = self.taken;
        self.taken = self.taken.wrapping_add(1);
        self.done = 0;
        self.owner = Owner::Unasked;
        self.fanout = Fanout::default();
        self.fetched = false;
        self.wait = Wait::None;
        self.current = Some(wqe);
        self.current
    }

    /// Whether no work request has begun, so that the next is the ring's.
    #[inline]
    pub(crate) fn is_between(&self) -> bool {
        self.current.is_none() && self.ahead.is_empty()
    }

    /// So many work requests that were peeked at are done, one at least; the first one's index.
    #[inline]
    pub(crate) const fn pass(&mut self, requests: u32) -> u32 {
        let first = self.taken;
        self.taken = first.wrapping_add(requests);
        self.index = self.taken.wrapping_sub(1);
        first
    }

    /// One that was taken before its turn.
    #[cold]
    fn begin(&mut self, early: Early) -> SqWqe {
        self.retire();
        (self.index, self.fetched, self.sges) = (early.index, true, early.sges);
        self.current = Some(early.wqe);
        early.wqe
    }

    /// The next work request, and what may be its first element: all of it is read at once, and
    /// most have one element. The least stride has room for one.
    #[inline]
    pub(crate) fn peek(&self) -> Option<(SqWqe, Sge)> {
        self.peek_at(0)
    }

    /// The same of one that has so many before it. What the guest changes until it is its turn is
    /// not seen here.
    #[inline]
    pub(crate) fn peek_at(&self, before: u32) -> Option<(SqWqe, Sge)> {
        if self.waiting() <= before {
            return None;
        }
        let at = self.slot(self.taken.wrapping_add(before));
        let bytes: [u8; LEAST] = self.ring.read_array(at);
        let (wqe, data) = SqWqe::read_from_prefix(&bytes).ok()?;
        Some((wqe, Sge::read_from_prefix(data).ok()?.0))
    }

    /// Has the processor fetch the work requests that have so many before them, as far as there
    /// are some: another processor wrote them.
    #[inline]
    pub(crate) fn fetch(&self, before: Range<u32>) {
        for before in before.start..before.end.min(self.waiting()) {
            self.ring.fetch(self.slot(self.taken.wrapping_add(before)));
        }
    }

    /// Takes the next work request before its turn, if it is one that `may` be; its elements with
    /// it, so that the guest cannot change what was looked at. `charge`: see [`Ahead::has_room`].
    pub(crate) fn take_early(
        &mut self,
        may: impl FnOnce(&SqWqe) -> bool,
        charge: impl FnOnce(usize) -> Option<Charge>,
    ) -> bool {
        let Some((wqe, _)) = self.peek().filter(|(wqe, _)| may(wqe)) else { return false };
        let count = u32::from(wqe.num_sge.get());
        if count > self.max_sge || !self.ahead.has_room(charge) {
            return false;
        }
        let at = self.slot(self.taken) + wqe_shape::SQ_WQE_DATA as u64;
        let mut early = Early { wqe, index: self.taken, sges: SgeList::new() };
        read_sges(&self.ring, at, count, &mut early.sges);
        self.taken = self.taken.wrapping_add(1);
        self.ahead.push(early);
        true
    }

    /// The work request of a place: 0 is the one being executed, those behind it were taken early.
    pub(crate) fn request_at(&self, place: usize) -> Option<(&SqWqe, &SgeList)> {
        match place.checked_sub(1) {
            None => self.current.as_ref().map(|wqe| (wqe, &self.sges)),
            Some(early) => self.ahead.request(early).map(|early| (&early.wqe, &early.sges)),
        }
    }

    /// What was asked ahead for the piece that is next, if anything was.
    #[inline]
    pub(crate) fn catch_up(&mut self) {
        if self.owner == Owner::Unasked
            && let Some(asked) = self.ahead.next_piece()
        {
            (self.owner, self.piece) = (asked.owner, asked.len);
        }
    }

    /// Whether an owner was asked for its part of a piece that is not over.
    pub(crate) fn has_asked(&self) -> bool {
        self.owner != Owner::Unasked || self.ahead.pieces().len() > 0
    }

    /// Pieces that may be sent ahead now.
    pub(crate) fn window(&self) -> usize {
        self.credit.saturating_sub(REST).into()
    }

    /// A piece that crossed was answered: [`Outcome::Full`] if others are to be executed before it.
    pub(crate) fn judge(&mut self, outcome: Outcome) {
        self.credit = match outcome {
            Outcome::Done => self.credit.saturating_add(1).min(REST + WINDOW),
            Outcome::Full => 0,
            _ => self.credit,
        };
    }

    /// A piece that crossed ahead was answered. True: so the present piece, which crossed before
    /// it, was executed.
    pub(crate) fn flight_landed(&mut self, ticket: Ticket, outcome: Outcome) -> bool {
        // The first is the present piece, if that crosses.
        let place = ticket.number.wrapping_sub(self.ticket.number);
        let place = place.wrapping_sub(u32::from(self.crosses));
        if ticket.life != self.ticket.life || place >= u32::from(WINDOW) {
            return false;
        }
        if outcome != Outcome::Done {
            self.judge(outcome);
        }
        self.ahead.landed(place as usize, outcome) && self.crosses
    }

    /// Copies the current work request's elements; the caller has checked `count` against
    /// `max_sge`.
    #[inline]
    pub fn fetch_sges(&mut self, count: u32) {
        if count == 1 {
            self.sges.clear();
            self.sges.push(self.first);
            return;
        }
        let at = self.slot(self.current_index()) + wqe_shape::SQ_WQE_DATA as u64;
        read_sges(&self.ring, at, count, &mut self.sges);
    }

    /// Copies the current work request's inline bytes; the caller has checked `len` against
    /// `max_inline`.
    pub fn fetch_inline(&mut self, len: u32) {
        let at = self.slot(self.current_index()) + wqe_shape::SQ_WQE_DATA as u64;
        self.inline.resize(len as usize, 0);
        self.ring.read(at, &mut self.inline);
    }

    const fn slot(&self, index: u32) -> u64 {
        ((index & (self.entries - 1)) as u64) << self.log2_stride
    }
}

/// A work request that was taken out of its ring: itself, its index, its elements.
type SavedRequest = (AbiBytes, u32, AbiBytes);

/// What is saved of a send queue.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedSends {
    ring: SavedRing,
    max_sge: u32,
    max_inline: u32,
    producer: u32,
    taken: u32,
    index: u32,
    current: Option<AbiBytes>,
    fetched: bool,
    sges: AbiBytes,
    inline: Vec<u8>,
    done: u32,
    piece: u32,
    fanout: [u32; 2],
    stamp: u64,
    wait: Wait,
    /// What is left of retries after RNR NAKs, and after silence.
    left: [u8; 2],
    early: Vec<SavedRequest>,
    landed: Option<Landed>,
    ticket: Ticket,
    crosses: bool,
    flights: Vec<Flight>,
}

impl SavedSends {
    /// Whether it goes on at once in another process: it waits for whom nothing is known of there,
    /// and asks again; or the answer has come.
    pub(crate) const fn goes_on(&self) -> bool {
        matches!(self.wait, Wait::Owner(_) | Wait::Link(_)) || self.landed.is_some()
    }
}

impl SendQueue {
    /// See [`crate::nic::saved`].
    pub(crate) fn save(&self, space: &AddressSpace) -> SavedSends {
        let early =
            |early: &Early| (AbiBytes::of(&early.wqe), early.index, AbiBytes::of(&early.sges[..]));
        SavedSends {
            ring: SavedRing::of(&self.ring, (self.entries, self.log2_stride), space),
            max_sge: self.max_sge,
            max_inline: self.max_inline,
            producer: self.producer,
            taken: self.taken,
            index: self.index,
            current: self.current.as_ref().map(AbiBytes::of),
            fetched: self.fetched,
            sges: AbiBytes::of(&self.sges[..]),
            inline: self.inline.clone(),
            done: self.done,
            piece: self.piece,
            fanout: [self.fanout.member, self.fanout.queue],
            stamp: self.stamp,
            wait: self.wait,
            left: [self.rnr_left, self.retries_left],
            early: self.ahead.requests().map(early).collect(),
            landed: self.landed,
            ticket: self.ticket,
            crosses: self.crosses,
            flights: self.ahead.save_flights(),
        }
    }

    /// What was saved, in this memory.
    pub(crate) fn load(
        saved: SavedSends,
        space: &AddressSpace,
        kept: &Kept,
    ) -> Result<Self, BadState> {
        let SavedSends { max_sge, max_inline, producer, taken, .. } = saved;
        let shape = SendShape {
            entries: saved.ring.entries,
            log2_stride: saved.ring.log2_stride,
            max_sge,
            max_inline,
        };
        let fits = max_inline <= MAX_INLINE && saved.inline.len() <= max_inline.max(8) as usize;
        let many = saved.early.len() > ahead::MOST
            || saved.flights.len() > usize::from(WINDOW)
            || !saved.flights.iter().all(|flight| (1..=PIECE).contains(&flight.len))
            || saved.piece > PIECE;
        if !fits || many {
            return Err(BadState::Content("so much in a send queue"));
        }
        let ring = saved.ring.load_work((producer, taken), space)?;
        let mut queue = Self::new(ring, shape);
        (queue.producer, queue.taken, queue.index) = (producer, taken, saved.index);
        queue.current = saved.current.as_ref().map(AbiBytes::read).transpose()?;
        queue.fetched = saved.fetched;
        // Of others it is not asked, and each ring that is looked at costs a fault: nothing of the
        // guest's memory has been touched yet.
        if queue.current.is_some() && !queue.fetched {
            let at = queue.slot(queue.index) + wqe_shape::SQ_WQE_DATA as u64;
            let first = queue.ring.read_array::<16>(at);
            queue.first = Sge::read_from_bytes(&first).unwrap_or_default();
        }
        queue.sges = load_sges(&saved.sges)?;
        // Who was to answer is another process's: it is asked again. What has been answered since a
        // wait began waits no longer.
        queue.wait = if saved.goes_on() { Wait::None } else { saved.wait };
        queue.inline.extend(saved.inline);
        (queue.done, queue.piece) = (saved.done, saved.piece);
        let [member, place] = saved.fanout;
        queue.fanout = Fanout { member, queue: place };
        queue.stamp = saved.stamp;
        [queue.rnr_left, queue.retries_left] = saved.left;
        queue.landed = saved.landed;
        (queue.ticket, queue.crosses) = (saved.ticket, saved.crosses);
        if !saved.early.is_empty() {
            let charge = kept.beside(ahead::EARLY)?;
            queue.ahead.has_room(|_| Some(charge));
        }
        for (wqe, index, sges) in &saved.early {
            let early = Early { wqe: wqe.read()?, index: *index, sges: load_sges(sges)? };
            queue.ahead.push(early);
        }
        queue.ahead.load_flights(saved.flights);
        Ok(queue)
    }
}
