//! Parking: NICs that have nothing to do are not visited.
//!
//! Each round looks at a few NICs that are awake. One that had nothing to do for [`ROUNDS`] rounds
//! and for a while is parked as a worker goes to sleep (docs/virtio-rdma.md §6.4): its guest is
//! asked to kick by NEED_KICK, which is a word of its own status page, and behind a full fence all
//! its doorbells are looked at once more, in pieces if they are many. Who posts afterwards kicks. A
//! kick makes it awake, and so does whatever else gives it work: a command, a peer's message, a
//! deadline, an event that finds a buffer.
//!
//! A kick also counts while the last look is under way: its post may lie on a page that was looked
//! at already, and the kick comes only once. The worker hears kicks while it is awake, and looks
//! for them every few microseconds as long as a NIC is parked (`worker/shard_thread.rs`).
//!
//! Where many are awake, rounds are long and mostly looks. So each looks at half of them, and two
//! rounds without work are enough: a thousand that post now and then go to sleep as fast as they
//! wake, and the few that have work share the worker.
//!
//! Some NICs stay awake though they are quiet: a few cost next to nothing, and their guests need
//! not kick. NICs that bring their own verbs are not parked, since what comes from outside is
//! theirs to look for.

use super::rounds::FEW;
use super::{Nanos, Shard};
use crate::link::NicId;
use crate::nic::budget::{Budget, cost};
use crate::ordering::{self, Cpu};

/// NICs that a round looks at, at least; of many it looks at half.
const LOOKS: usize = 4;
/// Rounds without work before a NIC is parked, of few and of many.
const ROUNDS: [u64; 2] = [16, 2];
/// Time without work before a NIC is parked: longer than a peer takes to answer.
const TIME: Nanos = 100_000;
/// NICs that are not parked.
const SPARE: usize = 4;

/// When NICs are parked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parking {
    /// Rounds and time without work.
    quiet: (u64, Nanos),
    /// NICs that stay awake.
    spare: usize,
}

impl Default for Parking {
    fn default() -> Self {
        Self { quiet: (ROUNDS[0], TIME), spare: SPARE }
    }
}

impl Shard {
    /// Has NICs visited for so long after their last work at least.
    #[must_use]
    pub fn with_patience(mut self, patience: Nanos) -> Self {
        self.parking.quiet.1 = TIME.max(patience);
        self
    }

    /// Parks every NIC as soon as it has nothing to do.
    #[cfg(test)]
    pub(super) fn park_at_once(&mut self) {
        self.parking = Parking { quiet: (1, 0), spare: 0 };
    }

    /// A guest kicked.
    pub fn kicked(&mut self, id: NicId) {
        self.slots.kicked(id);
    }

    /// Whether there are NICs whose kicks have to be heard.
    #[inline]
    #[must_use]
    pub fn hears_kicks(&self) -> bool {
        self.slots.has_parked()
    }

    /// Makes those awake whose deadline has come.
    pub(super) fn rouse_due(&mut self, now: Nanos, budget: &mut Budget) {
        while self.slots.rouse_due(now) {
            self.meter.charge(cost::TIMER);
            if budget.is_over(&self.meter) {
                return;
            }
        }
    }

    /// Parks some that have nothing to do.
    pub(super) fn park_quiet(&mut self, now: Nanos) {
        let awake = self.slots.awake();
        let looks = LOOKS.max(awake / 2);
        let (mut rounds, time) = self.parking.quiet;
        if awake > FEW {
            rounds = rounds.min(ROUNDS[1]);
        }
        let mut budget = self.meter.budget_at(now, looks as Nanos * cost::OBJECT);
        if self.slots.parking().is_some() {
            self.look_to_park(now, &mut budget);
            return;
        }
        for _ in 0..looks.min(awake) {
            let Some(id) = self.slots.next_quiet((rounds, time)) else { continue };
            if self.slots.awake() <= self.parking.spare {
                return;
            }
            if self.slots.quietly(id).is_none_or(|nic| nic.on_shard().has_work(now)) {
                self.slots.note_busy(id);
                continue;
            }
            let ask = |shard: &mut Self| shard.slots.begin_parking(id);
            let look = |shard: &mut Self| shard.look_to_park(now, &mut budget);
            ordering::last_look(&Cpu, self, ask, look);
            if self.slots.parking().is_some() {
                return;
            }
        }
    }

    /// Goes on with the last look at the NIC that is being parked.
    fn look_to_park(&mut self, now: Nanos, budget: &mut Budget) {
        let Some(id) = self.slots.parking().map(NicId) else { return };
        let Self { slots, posts, serving, .. } = self;
        *serving = Some(id);
        let Some(nic) = slots.quietly(id) else { return slots.stay_awake() };
        match nic.on_shard().look_on(posts, budget) {
            None => {}
            Some(false) if !nic.on_shard().has_work(now) => slots.park(),
            Some(_) => slots.stay_awake(),
        }
    }
}
