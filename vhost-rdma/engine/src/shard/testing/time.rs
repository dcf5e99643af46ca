//! How time passes in a world: rounds, deadlines, and the end of a process.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::link::NicId;
use crate::nic::budget::Clock;
use crate::nic::{Nanos, saved};
use crate::shard::testing::air;
use crate::shard::testing::driver::{Guest, Lcg, World};
use crate::shard::{MovedNic, NicSettings, Shard, Wakes};

/// The longest that a requester waits for an answer that another shard owes it.
const PATIENCE: u64 = 500_000_000;
/// Rounds after which a world that is still busy never comes to rest.
const ROUNDS: usize = 100_000;

/// A clock that is so many nanoseconds later at each look.
#[derive(Debug)]
pub struct Late(Nanos, AtomicU64);

impl Late {
    pub const fn by(each: Nanos) -> Self {
        Self(each, AtomicU64::new(0))
    }
}

impl Clock for Late {
    fn now(&self) -> Nanos {
        self.1.fetch_add(self.0, Ordering::Relaxed)
    }
}

impl World {
    /// Has other shards go on with all NICs, from bytes alone and in the same memory mapped anew:
    /// what happens when their process is replaced.
    pub fn hand_over(&mut self, guests: &mut [&mut Guest]) {
        self.close();
        self.halt(guests);
        self.hear_wakes();
        self.hand_over_at_once(guests);
    }

    fn halt(&mut self, guests: &[&mut Guest]) {
        for guest in guests {
            self.at(guest.on).halt(guest.nic);
        }
    }

    /// Waits for whatever ends a wait and is on its way, as a process does that is to be replaced.
    pub fn hear_wakes(&mut self) {
        let mut wakes = Wakes::default();
        for _ in 0..ROUNDS {
            let now = self.now;
            [0, 1].into_iter().for_each(|on| _ = self.at(on).poll(now));
            let moved = self.carry();
            let arrives = self.beside.as_ref().and_then(|(_, air)| air.next_arrival());
            let all = [0, 1].map(|on| self.at(on).wakes_heard());
            if wakes.are_heard(all)
                && let Some((_, air)) = &self.beside
            {
                assert!(!air.carries_wakes(), "they were said to have come");
            }
            if !moved && arrives.is_none() && all.iter().all(Option::is_some) {
                return;
            }
            self.now = self.now.max(arrives.unwrap_or(0));
        }
        panic!("a wake is under way for ever");
    }

    /// The same of a process that does not wait for what is under way: all of that is lost.
    pub fn hand_over_at_once(&mut self, guests: &mut [&mut Guest]) {
        let places: Vec<usize> = guests.iter().map(|guest| guest.on).collect();
        self.replace(guests, &places);
        [0, 1].into_iter().for_each(|on| self.go_on(on, guests));
    }

    /// Other shards have all NICs, each guest's on the shard of its place; none runs yet.
    pub fn replace(&mut self, guests: &mut [&mut Guest], places: &[usize]) {
        self.halt(guests);
        let saved: Vec<(Vec<u8>, NicSettings)> = guests
            .iter()
            .map(|guest| {
                let shard = self.at(guest.on);
                let settings = shard.settings(guest.nic).unwrap();
                (saved::seal(&shard.save(guest.nic).unwrap()).unwrap(), settings)
            })
            .collect();
        let seeds = [self.seed(), self.seed()];
        let mut next = match self.beside {
            Some((_, ref air)) => Vec::from(air::pair(seeds, air)),
            None => vec![Shard::new(Box::new(Lcg(seeds[0])))],
        };
        for (on, next) in next.iter_mut().enumerate() {
            next.rest(&self.at(on).resting());
        }
        // In another order, so that NICs have other numbers.
        let all = guests.iter_mut().zip(saved).zip(places);
        for ((guest, (bytes, settings)), &on) in all.rev() {
            let next = &mut next[on];
            guest.on = on;
            guest.nic = next.add_nic(settings, guest.port());
            next.load(guest.nic, saved::open(&bytes).unwrap(), guest.space.clone()).unwrap();
        }
        if let Some((other, air)) = &mut self.beside {
            air.ends_with(&mut self.shard);
            air.ends_with(other);
            air.clear();
        }
        for (on, next) in next.into_iter().enumerate() {
            *self.at(on) = next;
        }
    }

    /// The NICs of this shard run that were loaded.
    pub fn go_on(&mut self, on: usize, guests: &[&mut Guest]) {
        let here = guests.iter().filter(|guest| guest.on == on);
        let nics: Vec<NicId> = here.map(|guest| guest.nic).collect();
        if !nics.is_empty() {
            self.at(on).go_on_with(&nics);
        }
    }

    /// Nothing crosses any more.
    fn close(&mut self) {
        if self.beside.is_none() {
            return;
        }
        for _ in 0..ROUNDS {
            let closed = [0, 1].map(|on| self.at(on).close_bus());
            if closed == [true; 2] {
                return;
            }
            let now = self.now;
            [0, 1].into_iter().for_each(|on| _ = self.at(on).poll(now));
            if !self.carry() {
                let arrives = self.beside.as_ref().and_then(|(_, air)| air.next_arrival());
                self.now = self.now.max(arrives.unwrap_or(0));
            }
        }
        panic!("something is under way for ever");
    }

    /// Hears the guests' kicks, as a worker does.
    pub fn hear(&mut self) {
        for (on, nic) in self.kicks() {
            self.at(on).kicked(nic);
        }
    }

    /// Takes a guest's NIC out of its shard, on its way to the other; `None`: it may not move.
    pub fn take_off(&mut self, guest: &Guest) -> Option<MovedNic> {
        self.at(guest.on).take_nic(guest.nic, 1 - guest.on)
    }

    /// Puts it in there.
    pub fn put_on(&mut self, guest: &mut Guest, moved: MovedNic) {
        guest.on = 1 - guest.on;
        self.at(guest.on).put_nic(moved);
    }

    /// Moves a guest's NIC to the other shard; false if it may not.
    pub fn change_shard(&mut self, guest: &mut Guest) -> bool {
        let moved = self.take_off(guest);
        moved.map(|moved| self.put_on(guest, moved)).is_some()
    }

    /// One round of each shard, and what crosses after it; true if there was anything to do.
    pub fn round(&mut self) -> bool {
        self.hear();
        let now = self.now;
        let mut busy = self.shard.poll(now);
        if let Some((other, _)) = &mut self.beside {
            busy |= other.poll(now);
        }
        busy | self.carry()
    }

    /// Carries parcels between the shards, as far as they have come by now.
    fn carry(&mut self) -> bool {
        let now = self.now;
        let Self { shard, beside: Some((other, air)), .. } = self else { return false };
        air.carry([shard, other], now)
    }

    /// Runs until nothing is left to do at the present time; in a world over a link, as
    /// [`Self::settle_all`].
    pub fn settle(&mut self) {
        if self.is_over_a_link() { self.settle_all() } else { self.rest() }
    }

    fn rest(&mut self) {
        for _ in 0..ROUNDS {
            if !self.round() {
                return;
            }
        }
        panic!("the shard never comes to rest");
    }

    /// The same, with whatever is on its way between the shards: time goes on until all of it is
    /// there, and what was lost was sent again.
    pub fn settle_all(&mut self) {
        self.rest();
        while let Some(next) = self.next_of_link() {
            self.now = self.now.max(next);
            self.rest();
        }
    }

    /// When something arrives, or may be sent that was lost.
    fn next_of_link(&mut self) -> Option<u64> {
        let (_, air) = self.beside.as_mut()?;
        match air.next_arrival() {
            None if air.misses(self.now, PATIENCE) => self.next_deadline(),
            there => there,
        }
    }

    /// Goes on to when the next of what is on its way is there.
    pub fn wait_for_arrivals(&mut self) {
        let there = self.next_of_link();
        self.now = self.now.max(there.unwrap_or(0));
    }

    pub fn next_deadline(&self) -> Option<u64> {
        let other = self.beside.as_ref();
        let others = other.map(|(other, air)| [other.next_deadline(), air.next_arrival()]);
        let all = others.into_iter().flatten().chain([self.shard.next_deadline()]);
        all.flatten().min()
    }

    /// Moves time on, deadline by deadline.
    pub fn advance(&mut self, by: u64) {
        let end = self.now + by;
        loop {
            self.rest();
            match self.next_deadline().filter(|&deadline| deadline <= end) {
                Some(deadline) => self.now = self.now.max(deadline),
                None => break,
            }
        }
        self.now = end;
        self.rest();
    }
}
