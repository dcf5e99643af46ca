//! The link between shards of one network: one shard's end of it.
//!
//! A request leaves as a [`Parcel`] that owns a copy of its bytes, and what is read comes back the
//! same way. That is one copy more than `local` makes, and it buys the rule that no shard ever
//! touches memory of another's guests: a region may be deregistered, and memory unplugged, without
//! a word to anybody else. NICs that have much to say to each other belong on one shard.
//!
//! What a NIC may have under way is bounded in requests and in bytes, whatever the service; what
//! is beyond waits in the guest's ring ([`Outcome::Full`]). Pieces that go ahead of their turn take
//! half of that at most. A responder gives back what a request took when it has taken it in hand,
//! so an owner that never does its part keeps only itself waiting.
//!
//! There is no thread and no lock in here. Whoever drives the shard takes what leaves
//! ([`Bus::outgoing`]) and brings what arrives ([`Bus::arrive`]).

use std::collections::VecDeque;
use std::sync::Arc;

use super::book::{AddressBook, MOST_SHARDS, ShardBook};
use super::{
    Answer, Ask, Awaited, Fabric, Inbound, Link, NicId, Outcome, PIECE, Parcel, Payload, Request,
    Service, Ticket, Token, is_multicast,
};
use crate::{Nanos, memory};

/// Requests of one NIC that are under way, at most.
const REQUESTS: u32 = 64;
/// Bytes of one NIC that are under way, at most; one request more may begin below it.
const BYTES: u32 = 1 << 20;
/// Bits of a life that are counted; those above are the shard's.
const LIVES: u32 = 48;
/// Buffers that are kept for their allocation.
const SPARE: usize = 64;

/// What a NIC has under way.
#[derive(Clone, Copy, Debug, Default)]
struct UnderWay {
    requests: u32,
    bytes: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Bus {
    index: usize,
    book: ShardBook,
    /// What leaves, by shard.
    out: Vec<VecDeque<Parcel>>,
    asks: VecDeque<Ask>,
    answers: VecDeque<Answer>,
    /// What came before the NIC that it is for, or before that goes on.
    early: VecDeque<Parcel>,
    /// By NIC.
    under_way: Vec<UnderWay>,
    all_under_way: u32,
    /// Wakes that left for other shards, and that came from them.
    wakes: [u64; 2],
    /// Nothing new leaves.
    closed: bool,
    spare: Vec<Vec<u8>>,
    /// Lives that began here.
    lives: u64,
    /// Bytes of a piece, at most.
    mtu: u32,
}

impl Bus {
    /// The end of shard `index` of `shards`.
    #[must_use]
    pub fn new(index: usize, shards: usize, book: Arc<AddressBook>) -> Self {
        Self {
            index,
            book: ShardBook::new(book, index),
            out: (0..shards.min(MOST_SHARDS)).map(|_| VecDeque::new()).collect(),
            asks: VecDeque::new(),
            answers: VecDeque::new(),
            early: VecDeque::new(),
            under_way: Vec::new(),
            all_under_way: 0,
            wakes: [0; 2],
            closed: false,
            spare: Vec::new(),
            lives: 0,
            mtu: PIECE,
        }
    }

    /// One over which pieces of connections are no longer than this.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub(crate) fn with_mtu(self, mtu: u32) -> Self {
        Self { mtu: mtu.min(PIECE), ..self }
    }

    /// Bytes of a piece, at most.
    #[must_use]
    pub const fn mtu(&self) -> u32 {
        self.mtu
    }

    /// A queue pair begins to use it.
    pub fn begin_life(&mut self) -> u64 {
        self.lives = self.lives.max(self.book.former_lives()) + 1;
        (self.index as u64) << LIVES | self.lives
    }

    /// A queue pair began in an earlier process, on whatever shard. What no shard counts to, a
    /// thousand million in a second for a day, is not believed.
    pub fn had_life(&mut self, life: u64) {
        let counted = life & ((1 << LIVES) - 1);
        if counted < 1 << (LIVES - 1) {
            self.book.had_lives(counted);
        }
    }

    /// What this shard has in the book of addresses.
    #[must_use]
    pub fn book(&self) -> ShardBook {
        self.book.clone()
    }

    /// Whether a shard of this process holds an address, this one too.
    #[must_use]
    pub fn reaches(&self, vni: u32, gid: &super::Gid) -> bool {
        self.book.holder(vni, gid).is_some()
    }

    /// Sends a request to the shard that holds its address. That may be this one, if the request
    /// crossed before and may have been executed, which only its responder's stream knows.
    fn send_to_holder(&mut self, vni: u32, request: &Request<'_>) -> Outcome {
        match (self.book.holder(vni, &request.flow.dest_gid), request.service) {
            (Some((shard, _)), _) if shard != self.index || request.crossed => {
                self.send(shard, vni, request)
            }
            // Its NIC is on its way to this shard.
            (Some(_), _) => Outcome::Full,
            (None, Service::Reliable) => Outcome::NoAnswer,
            // Nobody tells the sender of an unreliable message what became of it.
            (None, Service::Unreliable | Service::Datagram) => Outcome::Done,
        }
    }

    /// Sends a datagram to the other shards with members of its group.
    fn send_to_group(&mut self, vni: u32, request: &Request<'_>) -> Outcome {
        let others = self.book.others(vni, &request.flow.dest_gid);
        if others != 0 && !self.has_room(request) {
            return Outcome::Full;
        }
        for shard in (0..self.out.len()).filter(|shard| others >> shard & 1 == 1) {
            if !self.post(shard, vni, request) {
                return Outcome::LocalFault;
            }
        }
        Outcome::Done
    }

    fn send(&mut self, shard: usize, vni: u32, request: &Request<'_>) -> Outcome {
        if !self.has_room(request) {
            return Outcome::Full;
        }
        match (self.post(shard, vni, request), request.service) {
            (false, _) => Outcome::LocalFault,
            (true, Service::Reliable) => Outcome::Later(Awaited::Answer),
            (true, _) => Outcome::Done,
        }
    }

    fn has_room(&self, request: &Request<'_>) -> bool {
        let nic = request.flow.source.0 as usize;
        let has = self.under_way.get(nic).copied().unwrap_or_default();
        // The upper half is for those whose turn it is: no queue pair takes it from another.
        let share = if request.ahead { 2 } else { 1 };
        !self.closed && has.requests < REQUESTS / share && has.bytes < BYTES / share
    }

    /// False: the requester's memory faulted.
    fn post(&mut self, shard: usize, vni: u32, request: &Request<'_>) -> bool {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        if !request.operation.fetches() && !gather(request, &mut bytes) {
            self.keep(bytes);
            return false;
        }
        let Some(way) = self.out.get_mut(shard) else { return false };
        let token = Token {
            shard: self.index,
            nic: request.flow.source,
            qpn: request.flow.source_qpn,
            ticket: request.ticket,
            size: request.len,
        };
        way.push_back(Parcel::Ask(Ask::new((token, vni), request, bytes)));
        let nic = token.nic.0 as usize;
        if self.under_way.len() <= nic {
            self.under_way.resize_with(nic + 1, UnderWay::default);
        }
        if let Some(under_way) = self.under_way.get_mut(nic) {
            under_way.requests += 1;
            under_way.bytes = under_way.bytes.saturating_add(token.size);
        }
        self.all_under_way += 1;
        true
    }

    /// Something came from another shard.
    pub fn arrive(&mut self, parcel: Parcel) {
        match parcel {
            Parcel::Ask(ask) => self.asks.push_back(ask),
            Parcel::Answer(answer) => {
                if answer.gives_back {
                    self.give_back(&answer.token);
                }
                self.answers.push_back(answer);
            }
            // Whose this is the shard knows.
            Parcel::Wake { .. } | Parcel::WakeNic { .. } => {}
        }
    }

    /// Has a queue pair look again, of whoever holds an address on another shard.
    pub fn wake(&mut self, vni: u32, gid: super::Gid, qpn: u32) {
        let holder = self.book.holder(vni, &gid).map(|(shard, _)| shard);
        self.follow(holder, Parcel::Wake { vni, gid, qpn });
    }

    /// Sends a parcel for a NIC that is not here after it: to the shard that has it by now. What is
    /// for one that is on its way to this shard waits for it; what is for nobody is dropped.
    pub fn follow(&mut self, shard: Option<usize>, parcel: Parcel) {
        match shard {
            Some(shard) if shard == self.index => self.await_nic(parcel),
            Some(shard) => {
                if let Some(way) = self.out.get_mut(shard) {
                    self.wakes[0] += u64::from(parcel.is_wake());
                    way.push_back(parcel);
                }
            }
            None => {}
        }
    }

    /// A parcel waits here for its NIC.
    pub fn await_nic(&mut self, parcel: Parcel) {
        self.early.push_back(parcel);
    }

    /// What waited for a NIC that is here now, or for another.
    pub fn take_early(&mut self) -> VecDeque<Parcel> {
        std::mem::take(&mut self.early)
    }

    /// The shard that has a NIC.
    #[must_use]
    pub fn seat(&self, nic: NicId) -> Option<usize> {
        self.book.seat(nic)
    }

    /// Counts what came from another shard, whosever it is.
    pub fn count_come(&mut self, parcel: &Parcel) {
        self.wakes[1] += u64::from(parcel.is_wake());
    }

    /// How many wakes this shard has sent to others, and heard of others; `None` while one waits
    /// here.
    #[must_use]
    pub fn wakes_heard(&self) -> Option<[u64; 2]> {
        (!self.early.iter().any(Parcel::is_wake)).then_some(self.wakes)
    }

    fn give_back(&mut self, token: &Token) {
        if let Some(under_way) = self.under_way.get_mut(token.nic.0 as usize) {
            under_way.requests = under_way.requests.saturating_sub(1);
            under_way.bytes = under_way.bytes.saturating_sub(token.size);
        }
        self.all_under_way = self.all_under_way.saturating_sub(1);
    }

    /// A buffer that is not needed any more.
    pub fn keep(&mut self, bytes: Vec<u8>) {
        if self.spare.len() < SPARE && bytes.capacity() > 0 {
            self.spare.push(bytes);
        }
    }

    /// A buffer.
    pub fn spare(&mut self) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes
    }

    /// What leaves for each shard.
    pub fn outgoing(&mut self) -> &mut [VecDeque<Parcel>] {
        &mut self.out
    }

    /// What answers that came and were not asked for say.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn unheard(&self) -> Vec<Outcome> {
        self.answers.iter().filter_map(|answer| answer.outcome).collect()
    }

    /// Nothing new leaves from now on, until [`Self::open`].
    pub const fn close(&mut self) {
        self.closed = true;
    }

    /// Requests leave again.
    pub const fn open(&mut self) {
        self.closed = false;
    }

    /// Whether nothing of this shard's is under way, and all answers are settled.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.all_under_way == 0 && self.answers.is_empty() && self.early.is_empty()
    }
}

impl Link for Bus {
    fn submit(&mut self, fabric: &mut dyn Fabric, request: &Request<'_>) -> Outcome {
        let Some(vni) = fabric.network(request.flow.source) else { return Outcome::NoAnswer };
        if request.service == Service::Datagram && is_multicast(&request.flow.dest_gid) {
            return self.send_to_group(vni, request);
        }
        self.send_to_holder(vni, request)
    }

    fn poll(&mut self, _: Nanos) -> Option<Inbound> {
        let answer = self.answers.pop_front().map(Inbound::Answer);
        answer.or_else(|| self.asks.pop_front().map(Inbound::Ask))
    }

    fn has_work(&self) -> bool {
        !self.asks.is_empty()
            || !self.answers.is_empty()
            || self.out.iter().any(|way| !way.is_empty())
    }

    /// Who carries parcels says when there are some.
    fn deadline(&self) -> Option<Nanos> {
        None
    }

    fn answer(&mut self, token: Token, outcome: Option<Outcome>, given: (Vec<u8>, bool)) {
        let (bytes, gives_back) = given;
        if let Some(way) = self.out.get_mut(token.shard) {
            way.push_back(Parcel::Answer(Answer { token, outcome, bytes, gives_back }));
        }
    }
}

/// Copies the bytes of a piece; false if the requester's memory faulted.
fn gather(request: &Request<'_>, bytes: &mut Vec<u8>) -> bool {
    let (from, len) = (request.offset as usize, request.len as usize);
    match request.payload {
        Payload::Inline(all) => match all.get(from..from + len) {
            Some(piece) => bytes.extend_from_slice(piece),
            None => return false,
        },
        Payload::Memory(segments) => {
            bytes.resize(len, 0);
            return memory::read(segments, u64::from(request.offset), bytes).is_ok();
        }
        Payload::Piece(piece) => bytes.extend_from_slice(piece),
        Payload::Reply(_) => return false,
    }
    true
}

impl Ticket {
    /// The next piece.
    pub const fn advance(&mut self) {
        self.number = self.number.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NICs may be on other shards than before.
    #[test]
    fn no_shard_begins_a_life_that_an_earlier_process_began() {
        let process = || {
            let book = Arc::new(AddressBook::default());
            [0, 1].map(|index| Bus::new(index, 2, Arc::clone(&book)))
        };
        let [_, mut second] = process();
        let old = [second.begin_life(), second.begin_life()];
        let [mut first, mut second] = process();
        old.iter().for_each(|&life| first.had_life(life));
        let new = [second.begin_life(), second.begin_life(), first.begin_life()];
        let all: std::collections::BTreeSet<u64> = old.into_iter().chain(new).collect();
        assert_eq!(all.len(), 5, "{old:x?} {new:x?}");
    }
}
