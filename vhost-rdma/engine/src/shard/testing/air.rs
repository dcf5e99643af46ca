//! The simulated link between two shards: a virtual wire that loses, repeats, reorders and delays
//! what the bus gives it, and may take it in small pieces only. Time is the world's, chance is a
//! seed's, so every run repeats.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::driver::Lcg;
use crate::link::{AddressBook, Answer, Ask, Bus, Outcome, Parcel};
use crate::shard::{Random as _, Shard};

/// Two shards of one network, with these seeds.
pub fn pair(seeds: [u64; 2], air: &Air) -> [Shard; 2] {
    let book = Arc::new(AddressBook::default());
    [0, 1].map(|index: usize| {
        let bus = Bus::new(index, 2, Arc::clone(&book)).with_mtu(air.mtu());
        Shard::new(Box::new(Lcg(seeds[index]))).with_bus(bus)
    })
}

/// What may happen to a parcel, in percent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub lost: u32,
    /// Requests of connections alone are lost: no answers, and nothing that nobody repeats.
    pub requests_alone: bool,
    pub repeated: u32,
    /// The longest that one is under way, in nanoseconds. Who is overtaken is reordered.
    pub delay: u32,
    /// How long all are under way beside that.
    pub lag: u32,
    /// The most bytes of a piece, if it is not what the bus itself takes.
    pub mtu: Option<u32>,
}

/// By which its responder knows a request.
const fn numbers(ask: &Ask) -> (u64, u32) {
    (ask.token.ticket.life, ask.token.ticket.number)
}

/// See the module.
#[derive(Debug)]
pub struct Air {
    faults: Faults,
    chance: Lcg,
    /// What is under way: when it is there, its number, to whom.
    parcels: Vec<(u64, u64, usize, Parcel)>,
    /// Numbers of those among them that are repetitions.
    again: BTreeSet<u64>,
    sent: u64,
    /// The latest that each end has.
    last: [u64; 2],
    pub lost: u64,
    /// Those of them that said what became of a request.
    pub answers_lost: u64,
    /// Those of them that asked for something, brought that back undone, or said that a wait is
    /// over.
    pub others_lost: u64,
    pub repeated: u64,
    pub reordered: u64,
    /// Requests that the bus gave it, and those of them that were sent before their turn.
    pub asked: u64,
    pub ahead: u64,
    /// The most requests that were under way at once, and the most bytes of theirs.
    pub most: [u64; 2],
    /// Requests that were lost and not sent again: when, by the life of their queue pair and their
    /// number.
    missing: BTreeMap<(u64, u32), u64>,
}

impl Air {
    /// One that delivers everything at once and in order.
    pub fn still() -> Self {
        Self::new(Faults::default(), 1)
    }

    pub fn new(faults: Faults, seed: u64) -> Self {
        Self {
            faults,
            chance: Lcg(seed),
            parcels: Vec::new(),
            again: BTreeSet::new(),
            sent: 0,
            last: [0; 2],
            lost: 0,
            answers_lost: 0,
            others_lost: 0,
            repeated: 0,
            reordered: 0,
            asked: 0,
            ahead: 0,
            most: [0; 2],
            missing: BTreeMap::new(),
        }
    }

    /// The most bytes of a piece.
    pub fn mtu(&self) -> u32 {
        self.faults.mtu.unwrap_or(u32::MAX)
    }

    /// Whether what was sent together arrives together.
    pub const fn keeps_time(&self) -> bool {
        self.faults.delay == 0 && self.faults.lag == 0
    }

    /// Whether something happens that does so many times in a hundred.
    fn happens(&mut self, percent: u32) -> bool {
        percent > 0 && self.chance.next_u32() % 100 < percent
    }

    /// What is under way ends with the process: it is lost.
    pub fn clear(&mut self) {
        for (_, number, _, parcel) in std::mem::take(&mut self.parcels) {
            if !self.again.remove(&number) {
                self.count_lost(&parcel);
            }
        }
    }

    /// What a shard had sent, or had not looked at yet, ends with it.
    pub fn ends_with(&mut self, shard: &mut Shard) {
        for parcel in shard.outgoing().iter().flatten() {
            self.count_lost(parcel);
        }
        for outcome in shard.unheard() {
            self.lost += 1;
            self.count_answer(outcome);
        }
    }

    fn count_lost(&mut self, parcel: &Parcel) {
        self.lost += 1;
        match parcel {
            Parcel::Answer(answer) => {
                answer.outcome.into_iter().for_each(|outcome| self.count_answer(outcome));
            }
            Parcel::Ask(_) | Parcel::Wake { .. } | Parcel::WakeNic { .. } => self.others_lost += 1,
        }
    }

    const fn count_answer(&mut self, outcome: Outcome) {
        match outcome {
            // What comes back was not executed, as if it had not come there.
            Outcome::Full => self.others_lost += 1,
            _ => self.answers_lost += 1,
        }
    }

    pub fn next_arrival(&self) -> Option<u64> {
        self.parcels.iter().map(|(at, ..)| *at).min()
    }

    /// Whether a wake is under way; not where some are lost or repeated, so that none can be told
    /// from another.
    pub fn carries_wakes(&self) -> bool {
        let exact = self.faults.lost == 0 && self.faults.repeated == 0;
        exact && self.parcels.iter().any(|(.., parcel)| parcel.is_wake())
    }

    /// Whether a request that was lost less than this time ago was not sent again.
    pub fn misses(&mut self, now: u64, patience: u64) -> bool {
        self.missing.retain(|_, lost| now <= lost.saturating_add(patience));
        !self.missing.is_empty()
    }

    /// Takes what leaves, and brings what is there by now. True if anything moved.
    pub fn carry(&mut self, shards: [&mut Shard; 2], now: u64) -> bool {
        let [a, b] = shards;
        let mut moved = false;
        for shard in [&mut *a, &mut *b] {
            for (to, way) in shard.outgoing().iter_mut().enumerate() {
                while let Some(parcel) = way.pop_front() {
                    moved = true;
                    self.send(to, parcel, now);
                }
            }
        }
        self.parcels.sort_by_key(|(at, number, ..)| (*at, *number));
        let there = self.parcels.partition_point(|(at, ..)| *at <= now);
        for (_, number, to, parcel) in self.parcels.drain(..there) {
            moved = true;
            self.again.remove(&number);
            let last = &mut self.last[to];
            self.reordered += u64::from(number < *last);
            *last = number.max(*last);
            if to == 0 { &mut *a } else { &mut *b }.arrive(parcel);
        }
        moved
    }

    fn send(&mut self, to: usize, parcel: Parcel, now: u64) {
        if let Parcel::Ask(ask) = &parcel {
            self.asked += 1;
            self.ahead += u64::from(ask.is_ahead());
            self.missing.remove(&numbers(ask));
        }
        let repeated = matches!(&parcel, Parcel::Ask(ask) if ask.is_reliable());
        let may_be_lost = repeated || !self.faults.requests_alone;
        if may_be_lost && self.happens(self.faults.lost) {
            if let Parcel::Ask(ask) = &parcel {
                self.missing.insert(numbers(ask), now);
            }
            self.count_lost(&parcel);
            // What it took of the window is not under way any more. That was counted where it was
            // sent first: it may be lost on its way after a NIC that has moved.
            let returns = match &parcel {
                Parcel::Ask(ask) => Some((ask.token.shard, ask.token)),
                Parcel::Answer(answer) if answer.gives_back => Some((to, answer.token)),
                _ => None,
            };
            if let Some((to, token)) = returns {
                let (outcome, bytes) = (None, Vec::new());
                let gone = Answer { token, outcome, bytes, gives_back: true };
                self.put(to, Parcel::Answer(gone), now);
                self.again.insert(self.sent);
            }
            return;
        }
        if self.happens(self.faults.repeated) {
            self.repeated += 1;
            let mut again = parcel.clone();
            if let Parcel::Answer(answer) = &mut again {
                answer.gives_back = false;
            }
            self.put(to, again, now);
            self.again.insert(self.sent);
        }
        self.put(to, parcel, now);
    }

    fn put(&mut self, to: usize, parcel: Parcel, now: u64) {
        self.sent += 1;
        let most = self.faults.delay;
        let delay = if most == 0 { 0 } else { u64::from(self.chance.next_u32() % most) };
        let there = now + delay + u64::from(self.faults.lag);
        self.parcels.push((there, self.sent, to, parcel));
        let asks = self.parcels.iter().filter_map(|(.., parcel)| match parcel {
            Parcel::Ask(ask) => Some(u64::from(ask.size())),
            _ => None,
        });
        let now = asks.fold([0; 2], |[requests, bytes], size| [requests + 1, bytes + size]);
        self.most = [self.most[0].max(now[0]), self.most[1].max(now[1])];
    }
}
