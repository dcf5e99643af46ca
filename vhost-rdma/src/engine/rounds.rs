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
//! the next one. Between rounds the worker looks at its jobs.
//!
//! Before the worker sleeps every doorbell page is looked at once more, in pieces ([`Look`]). All
//! pieces come after NEED_KICK was set and the fence behind it, which is all that
//! docs/virtio-rdma.md §6.4 asks: a post to a page that was looked at already finds NEED_KICK.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::nic::NicState;
use super::on_shard::AnyNic;
use super::qp::{Requester, Waiter};
use super::{DeferredDrop, Nanos, Shard};
use crate::link::NicId;
use crate::nic::budget::{Budget, cost};
use crate::nic::timer::Waiting;
use crate::ordering::{self, Cpu, Visible};

/// Time for one round, without what it tells the guests at its end.
pub(super) const ROUND: Nanos = 50_000;
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

    /// Whether nobody but the NIC that is being served is known to have work.
    pub(super) const fn is_lone(&self) -> bool {
        self.lone
    }

    /// What is to be added to a NIC's service.
    fn account(&mut self, index: usize, service: Nanos) {
        if let Some(served) = self.served.get_mut(index) {
            *served = served.saturating_add(service.min(LONGEST));
        }
    }
}

impl Shard {
    /// One round: doorbells, deadlines, work requests, completions, events. True if there was
    /// anything to do.
    pub fn poll(&mut self, now: Nanos) -> bool {
        let mut budget = self.meter.budget_at(now, ROUND);
        self.slots.begin_round(now);
        let mut busy = self.check_vanished(&mut budget);
        self.rouse_due(now, &mut budget);
        busy |= self.scan(&mut budget);
        busy |= self.wake_waiters(&mut budget);
        busy |= self.serve_parcels(now);
        busy |= self.serve(now, &mut budget);
        busy |= self.free_numbers(&mut budget);
        busy |= self.publish(now);
        if self.rounds.look.is_none() {
            self.park_quiet(now);
        }
        busy
    }

    /// When [`Self::poll`] must be called again though nothing was posted.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        let waiting = self.waiting.deadline();
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
        let mut busy = !self.freed.is_empty()
            || !self.wakes.is_empty()
            || self.has_parcels()
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

    /// Looks at doorbells, of all NICs if there is time.
    pub(super) fn scan(&mut self, budget: &mut Budget) -> bool {
        let places = self.slots.awake();
        let from = if self.rounds.scan_from < places { self.rounds.scan_from } else { 0 };
        let mut found = false;
        for place in (from..places).chain(0..from) {
            let Self { slots, posts, serving, .. } = self;
            let Some((id, nic)) = slots.awake_at(place) else { continue };
            *serving = Some(id);
            if nic.scan(posts) {
                found = true;
                slots.note_busy(id);
            }
            if budget.is_over(&self.meter) {
                self.rounds.scan_from = place + 1;
                break;
            }
        }
        found
    }

    fn wake_waiters(&mut self, budget: &mut Budget) -> bool {
        let Self { slots, networks, wakes, .. } = self;
        for place in 0..slots.awake() {
            if let Some((_, AnyNic::Own(nic))) = slots.awake_at(place)
                && !nic.backing.wakes.is_empty()
            {
                let vni = nic.settings.vni;
                for Waiter { who, qpn } in nic.backing.wakes.drain(..) {
                    match (who, &mut networks.bus) {
                        (Requester::Here(nic), _) => wakes.push_back((nic, qpn)),
                        (Requester::Elsewhere(gid), Some(bus)) => bus.wake(vni, gid, qpn),
                        (Requester::Elsewhere(_), None) => {}
                    }
                }
            }
        }
        let found = !self.wakes.is_empty();
        while let Some((id, qpn)) = self.wakes.pop_front() {
            self.meter.charge(cost::WAKE);
            if let Some(nic) = self.nic_mut(id) {
                nic.woken(qpn);
            }
            if budget.is_over(&self.meter) {
                break;
            }
        }
        found
    }

    /// Serves NICs that have work, least service first, until the round is over; one at least.
    fn serve(&mut self, now: Nanos, budget: &mut Budget) -> bool {
        let mut ready = std::mem::take(&mut self.rounds.ready);
        ready.clear();
        let slots = self.slots.len();
        if self.rounds.served.len() < slots {
            self.rounds.served.resize(slots, 0);
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
        let nic = match self.slots.any_mut(id) {
            Some(AnyNic::Own(nic)) => nic,
            Some(AnyNic::Provided(nic)) => return (nic.run(now), false),
            None => return (false, false),
        };
        if nic.has_other_work(now) {
            // Before the timers: what was waited for when the NIC stood still is waited for anew.
            nic.do_chores(budget);
            if !nic.chores.are_resuming() {
                self.fire_timers(id, now, budget);
            }
            let Some(nic) = self.nic_mut(id) else { return (true, false) };
            nic.begin_round(now);
        }
        let Some(nic) = self.nic_mut(id).filter(|nic| nic.backing.turns > 0) else {
            return (true, false);
        };
        nic.backing.turns -= 1;
        if let Some(qpn) = nic.run.pop_front() {
            self.run_qp(id, qpn, budget, now);
        }
        let more = self.nic_mut(id).is_some_and(|nic| {
            nic.life == NicState::Ready && (nic.backing.turns > 0 || nic.has_other_work(now))
        });
        (true, more)
    }

    fn fire_timers(&mut self, id: NicId, now: Nanos, budget: &mut Budget) {
        while let Some(nic) = self.nic_mut(id)
            && let Some((deadline, waiting)) = nic.timers.pop(now)
        {
            match waiting {
                Waiting::Send(qpn) => self.timer_fired(id, qpn, deadline),
                Waiting::Event(cqn) => nic.event_timer_fired(cqn, now),
            }
            self.meter.charge(cost::TIMER);
            if budget.is_over(&self.meter) {
                return;
            }
        }
    }

    /// QPNs of NICs that were reset may rest now.
    fn free_numbers(&mut self, budget: &mut Budget) -> bool {
        let Some((numbers, walk)) = self.freed.front_mut() else { return false };
        while let Some(qpn) = walk.next(numbers) {
            if qpn != virtio_rdma_abi::GSI_QPN {
                self.qpns.free(qpn);
            }
            self.meter.charge(cost::VISIT);
            if budget.is_over(&self.meter) {
                return true;
            }
        }
        let gone = self.freed.pop_front();
        self.deferred_drops.extend(gone.map(DeferredDrop::new));
        true
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
