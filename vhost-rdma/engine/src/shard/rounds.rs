//! Rounds: whose turn it is.
//!
//! A shard serves its NICs in the order of the service that they have had, least first, for as long
//! as a round lasts. Service is the time that went by while a NIC was served, or what it was
//! charged where that is too short for the clock; one that was idle begins a little behind the
//! least of the others, so that whoever wants little is served at once and gains nothing by having
//! waited. So a guest that moves large messages costs its neighbours the rest of a round and not
//! one of its turns each time.
//!
//! A NIC with one QP gets as much as one with many: while others have work too, it comes again in
//! the same round as soon as it has had least. Who is alone has one turn for each QP, so that what
//! rings meanwhile is seen soon.
//!
//! Only NICs that are awake are visited ([`super::parking`]).
//!
//! Everything in a round is bounded by time: the looks at doorbells, the requesters that are woken,
//! deadlines, work requests, and the telling of guests. What a round has no time for is found by
//! the next one. Who looks has half of a round, and where many are visited the work has as long as
//! it took to look at them all, so that what was found is also done: rounds that looked as long as
//! they may would serve one NIC each, and hundreds that post now and then would wait for each
//! other. Between rounds the worker looks at its jobs.
//!
//! Before the worker sleeps every doorbell page is looked at once more, in pieces ([`Look`]). All
//! pieces come after NEED_KICK was set and the fence behind it, which is all that
//! docs/virtio-rdma.md §6.4 asks: a post to a page that was looked at already finds NEED_KICK.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::on_shard::AnyNic;
use super::slots::Slots;
use super::{Nanos, Shard};
use crate::link::NicId;
use crate::nic::budget::{Budget, Meter, cost};
use crate::nic::doorbell::Post;
use crate::ordering::{self, Cpu, Visible};
use crate::soft::{Nics, SoftNic};

/// Time for one round, without what it tells the guests at its end.
pub(super) const ROUND: Nanos = 50_000;
/// Time of it for looking at what there is to do, and as much for waking who waits.
const LOOKING: Nanos = ROUND / 2;
/// Time that is left for it at least, and at most, however long the looks took.
const SERVING: [Nanos; 2] = [ROUND / 2, 4 * ROUND];
/// NICs that are visited within a time that is none beside a round's.
pub(super) const FEW: usize = 32;
/// Time for that.
const PUBLISH: Nanos = 25_000;
/// Service by which a NIC that was idle may be behind the least of the others.
const CREDIT: Nanos = 50_000;
/// The most that one turn counts: time in which the host ran somebody else is not the NIC's doing.
const LONGEST: Nanos = 1_000_000;

/// What a piece of the last look before sleep found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// There is work: do not sleep.
    Found,
    /// There is none, anywhere.
    Clear,
    /// None so far; [`Shard::look_on`] goes on.
    More,
}

/// Where the rounds of a shard stand.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    /// Service that each slot's NIC has had.
    served: Vec<Nanos>,
    /// The same, since somebody asked how much it is.
    spent: Vec<Nanos>,
    /// The least service of those that were served last.
    floor: Nanos,
    /// This round's queue, kept for its allocation.
    ready: BinaryHeap<Reverse<(Nanos, usize)>>,
    /// Whether the NIC that is being served is the last that has work.
    lone: bool,
    /// The place, among those that are awake, whose doorbells are looked at first.
    scan_from: usize,
    /// The place whose guest is told first.
    publish_from: usize,
    /// The next place of the last look before sleep, while there is one.
    look: Option<usize>,
    /// The next slot whose memory may have vanished.
    vanished: Option<usize>,
}

impl Rounds {
    pub(super) const fn look_for_vanished(&mut self) {
        self.vanished = Some(0);
    }

    /// Looks at doorbells, of all NICs if there is time.
    fn scan(
        &mut self,
        (slots, posts): (&mut Slots, &mut Vec<Post>),
        (meter, budget): (&Meter, &mut Budget),
        serving: &mut Option<NicId>,
    ) -> bool {
        let places = slots.awake();
        let from = if self.scan_from < places { self.scan_from } else { 0 };
        let mut found = false;
        for place in (from..places).chain(0..from) {
            let Some((id, nic)) = slots.awake_at(place) else { continue };
            *serving = Some(id);
            if nic.scan(posts, found) {
                found = true;
                slots.note_busy(id);
            }
            if budget.is_over(meter) {
                self.scan_from = place + 1;
                break;
            }
        }
        found
    }

    /// What is to be added to a NIC's service.
    fn account(&mut self, index: usize, service: Nanos) {
        let service = service.min(LONGEST);
        if let Some(served) = self.served.get_mut(index) {
            *served = served.saturating_add(service);
        }
        self.count(index, service);
    }

    /// What is not service, and yet time that a NIC costs its shard.
    fn count(&mut self, index: usize, spent: Nanos) {
        if let Some(sum) = self.spent.get_mut(index) {
            *sum = sum.saturating_add(spent);
        }
    }

    /// What a NIC was served since this was asked last.
    pub(super) fn take_spent(&mut self, id: NicId) -> Nanos {
        self.spent.get_mut(id.0 as usize).map_or(0, std::mem::take)
    }

    /// A NIC is new here: it has had as much as the one with the least, so that it gains nothing by
    /// having come.
    pub(super) fn forget_spent(&mut self, id: NicId) {
        let index = id.0 as usize;
        if let (Some(served), Some(spent)) = (self.served.get_mut(index), self.spent.get_mut(index))
        {
            (*served, *spent) = (self.floor, 0);
        }
    }
}

/// NICs of a shard, lent to the engine.
pub(super) struct Served<'a> {
    pub(super) slots: &'a mut Slots,
    pub(super) rounds: &'a mut Rounds,
    pub(super) meter: &'a Meter,
}

impl Nics for Served<'_> {
    #[inline]
    fn nic(&mut self, id: NicId) -> Option<&mut SoftNic> {
        self.slots.own_mut(id)
    }

    #[inline]
    fn both(&mut self, one: NicId, other: NicId) -> Option<(&mut SoftNic, &mut SoftNic)> {
        self.slots.both(one, other)
    }

    #[inline]
    fn seen(&self, id: NicId) -> Option<&SoftNic> {
        self.slots.get(id).and_then(AnyNic::own)
    }

    fn scan(&mut self, now: Nanos, budget: &mut Budget, serving: &mut Option<NicId>) {
        self.slots.each_awake(|nic| {
            if let AnyNic::Own(nic) = nic {
                nic.now = now;
            }
        });
        let (mut posts, asked) = (Vec::new(), *serving);
        self.rounds.scan((self.slots, &mut posts), (self.meter, budget), serving);
        *serving = asked;
    }

    fn account(&mut self, id: NicId, service: Nanos) {
        self.rounds.account(id.0 as usize, service);
    }

    fn count(&mut self, id: NicId, spent: Nanos) {
        self.rounds.count(id.0 as usize, spent);
    }

    #[inline]
    fn is_lone(&self) -> bool {
        self.rounds.lone
    }
}

impl Shard {
    /// One round: doorbells, deadlines, work requests, completions, events. True if there was
    /// anything to do.
    pub fn poll(&mut self, now: Nanos) -> bool {
        let mut budget = self.meter.budget_at(now, ROUND);
        let mut looking = self.meter.budget_at(now, LOOKING);
        self.slots.begin_round(now);
        let mut busy = self.check_vanished(&mut looking);
        self.rouse_due(now, &mut looking);
        busy |= self.scan(&mut looking);
        busy |= self.wake_waiters(now, looking.seen());
        if self.soft().serve_parcels(now) {
            // It was not the time of whoever is served first.
            budget.skip(&self.meter);
            busy = true;
        }
        busy |= self.serve(now, &mut budget);
        busy |= self.engine.free_numbers(&self.meter, &mut budget);
        busy |= self.publish(now);
        if self.rounds.look.is_none() {
            self.park_quiet(now);
        }
        busy
    }

    /// When [`Self::poll`] must be called again though nothing was posted.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        let waiting = self.engine.next_deadline();
        self.slots.next_deadline().into_iter().chain(waiting).min()
    }

    /// Counts work that was done for a NIC outside of a round.
    pub fn account(&mut self, id: NicId, service: Nanos) {
        self.rounds.account(id.0 as usize, service);
    }

    /// Asks all guests to kick, then begins the last look before sleep.
    pub fn prepare_sleep(&mut self) -> Look {
        self.strains.forget_round();
        let ask = |shard: &mut Self| {
            shard.rounds.look = Some(0);
            shard.slots.forget_parking();
            shard.slots.forget_roused();
            shard.slots.each_awake(|nic| {
                nic.on_shard().set_need_kick(true);
                nic.on_shard().begin_look();
            });
        };
        ordering::last_look(&Cpu, self, ask, Self::look_on)
    }

    /// Goes on with the last look. Those that are parked had theirs.
    pub fn look_on(&mut self) -> Look {
        let mut budget = self.meter.budget(ROUND);
        let mut place = self.rounds.look.unwrap_or(0);
        while place < self.slots.awake() {
            let Self { slots, posts, serving, .. } = self;
            let found = slots.awake_at(place).map_or(Some(false), |(id, nic)| {
                *serving = Some(id);
                nic.on_shard().look_on(posts, &mut budget)
            });
            match found {
                Some(true) => return Look::Found,
                Some(false) => place += 1,
                None => return Look::More,
            }
            self.rounds.look = Some(place);
            if budget.is_over(&self.meter) {
                return Look::More;
            }
        }
        let mut busy = self.engine.has_work()
            || self.rounds.vanished.is_some()
            // Its doorbells may have been passed by.
            || self.slots.has_roused();
        self.slots.each_awake(|nic| busy = busy || nic.on_shard().has_work(0));
        if busy { Look::Found } else { Look::Clear }
    }

    /// Tells the guests of those that are visited that kicks are not needed.
    pub fn wake(&mut self) {
        self.rounds.look = None;
        self.slots.each_awake(|nic| nic.on_shard().set_need_kick(false));
    }

    /// Fails NICs whose guest memory vanished.
    fn check_vanished(&mut self, budget: &mut Budget) -> bool {
        let Some(mut index) = self.rounds.vanished else { return false };
        while index < self.slots.len() && !budget.is_over(&self.meter) {
            let Ok(id) = u32::try_from(index).map(NicId) else { break };
            self.serving = Some(id);
            self.meter.charge(cost::OBJECT);
            if let Some(nic) = self.on_shard(id) {
                nic.memory_vanished();
            }
            index += 1;
        }
        let done = index >= self.slots.len();
        self.rounds.vanished = (!done).then_some(index);
        true
    }

    fn scan(&mut self, budget: &mut Budget) -> bool {
        let Self { slots, rounds, posts, serving, meter, .. } = self;
        rounds.scan((slots, posts), (meter, budget), serving)
    }

    /// Wakes requesters, in a time of their own: the looks may have taken all of theirs.
    fn wake_waiters(&mut self, now: Nanos, seen: Nanos) -> bool {
        let Self { slots, engine, .. } = self;
        for place in 0..slots.awake() {
            if let Some((_, AnyNic::Own(nic))) = slots.awake_at(place) {
                engine.take_wakes(nic);
                // What arrives in this round is stamped with it, also where the NIC itself rests.
                nic.now = now;
            }
        }
        let mut budget = self.meter.budget_at(seen, LOOKING);
        self.soft().wake_waiters(&mut budget)
    }

    /// Serves NICs that have work, least service first, until the round is over; one at least.
    fn serve(&mut self, now: Nanos, budget: &mut Budget) -> bool {
        let mut ready = std::mem::take(&mut self.rounds.ready);
        ready.clear();
        let slots = self.slots.len();
        if self.rounds.served.len() < slots {
            self.rounds.served.resize(slots, 0);
            self.rounds.spent.resize(slots, 0);
        }
        self.strains.begin(slots, now, &self.meter);
        let least = self.rounds.floor.saturating_sub(CREDIT);
        for place in 0..self.slots.awake() {
            let Some((id, nic)) = self.slots.awake_at(place) else { continue };
            let index = id.0 as usize;
            if self.strains.rests(index, now) {
                continue;
            }
            let works = match nic {
                AnyNic::Own(nic) => nic.begin_round(now),
                AnyNic::Provided(_) => true,
            };
            if works && let Some(served) = self.rounds.served.get_mut(index) {
                *served = least.max(*served);
                ready.push(Reverse((*served, index)));
            }
        }
        let mut busy = false;
        if self.slots.awake() > FEW {
            let [least, most] = SERVING;
            let looked = self.meter.now().saturating_sub(now);
            *budget = self.meter.budget(looked.clamp(least, most));
        }
        while let Some(Reverse((served, index))) = ready.pop() {
            self.rounds.lone = ready.is_empty();
            let (charged, seen) = (self.meter.charged(), budget.seen());
            let probe = self.strains.turn(index, now, &self.meter);
            let (did, more) = self.serve_nic(index, now, budget);
            let rests = probe.is_some_and(|probe| self.strains.judge(index, &probe, &self.meter));
            let over = rests || budget.is_over(&self.meter);
            if did {
                busy = true;
                self.rounds.floor = self.rounds.floor.max(served);
                let lasted = budget.seen().saturating_sub(seen);
                let charged = self.meter.charged().wrapping_sub(charged);
                self.rounds.account(index, if lasted == 0 { charged } else { lasted });
            }
            if over {
                busy |= more || !ready.is_empty();
                break;
            }
            if more || (!ready.is_empty() && self.takes_turn(index)) {
                let served = self.rounds.served.get(index).copied().unwrap_or(served);
                ready.push(Reverse((served, index)));
            }
        }
        self.rounds.ready = ready;
        // A command that runs a queue pair between rounds has others waiting.
        self.rounds.lone = false;
        busy
    }

    fn takes_turn(&mut self, index: usize) -> bool {
        let id = u32::try_from(index).map(NicId);
        id.ok().and_then(|id| self.nic_mut(id)).is_some_and(|nic| nic.take_turn())
    }

    /// Serves one NIC for a turn: whether it had any work, and whether it has more for this round.
    fn serve_nic(&mut self, index: usize, now: Nanos, budget: &mut Budget) -> (bool, bool) {
        let Ok(id) = u32::try_from(index).map(NicId) else { return (false, false) };
        self.serving = Some(id);
        self.slots.note_busy(id);
        match self.slots.any_mut(id) {
            Some(AnyNic::Own(_)) => self.soft().serve(id, now, budget),
            Some(AnyNic::Provided(nic)) => (nic.run(now), false),
            None => (false, false),
        }
    }

    /// Looks at arm words and delivers events; true if there is more to tell.
    fn publish(&mut self, now: Nanos) -> bool {
        let mut news = false;
        self.slots.each_awake(|nic| news = news || nic.has_news());
        if !news {
            return false;
        }
        // One fence for the CQs of all NICs.
        let visible = ordering::entries_visible(&Cpu);
        let mut budget = self.meter.budget(PUBLISH);
        let places = self.slots.awake();
        let from = if self.rounds.publish_from < places { self.rounds.publish_from } else { 0 };
        let mut more = false;
        for place in (from..places).chain(0..from) {
            more |= self.publish_one(place, visible, (now, &mut budget));
            if budget.is_over(&self.meter) {
                self.rounds.publish_from = place + 1;
                return true;
            }
        }
        more
    }

    /// True: it has more to tell.
    fn publish_one(
        &mut self,
        place: usize,
        visible: Visible,
        (now, budget): (Nanos, &mut Budget),
    ) -> bool {
        let Some((id, nic)) = self.slots.awake_at(place).filter(|(_, nic)| nic.has_news()) else {
            return false;
        };
        self.serving = Some(id);
        nic.on_shard().publish(visible, now, budget);
        let more = nic.has_news();
        self.slots.note_busy(id);
        more
    }
}
