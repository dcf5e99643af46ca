//! Memory that is slow to come, and the rest that it costs.
//!
//! A VMM can take a page from under the worker at any moment, and the next touch of it waits:
//! for a page of 2 MiB to be cleared, or for the kernel to finish the hole that the page lies
//! in, which takes as long as the hole is large (mm/shmem.c, `shmem_fault`). No check before the
//! touch prevents that, and nothing ends it. But it need not go on: a NIC whose turns last far
//! beyond what they were charged, because of page faults, rests afterwards, for a multiple of
//! the time that it took, and for twice as much each time, or up to sixteen times as much where
//! it took long. So whoever keeps doing it has a thousandth of the worker's time in the end,
//! however long one fault lasts.
//!
//! To be sure that it was the NIC's memory costs two system calls around a turn
//! ([`Clock::usage`]), so they are made for suspects only: the NICs of a round after which the
//! clock had gone on for longer than the round was worth, with a page fault since the last such
//! round, and of these the ones that had a turn since that the clock alone found too long. A turn
//! in which the host ran somebody else proves nothing, and a turn without a fault neither. Whoever
//! was found guilty is a suspect of the second kind until that is forgiven.
//!
//! One turn in [`SAMPLE`] is measured in any case, and its page faults stand for those of all:
//! how many pages of guest memory were missing when the worker touched them for this NIC. Pages
//! that nobody had touched before are charged to the daemon's cgroup, and nothing tells them
//! from pages that were there and only not mapped yet; so this is the most that they can be.
//!
//! Whose memory it was is not known: a NIC that writes to the slow memory of a peer rests as
//! well. It need not have the peer.
//!
//! [`Clock::usage`]: crate::nic::budget::Clock::usage

use super::Nanos;
use crate::memory::Usage;
use crate::nic::budget::Meter;

/// What a turn may last beyond what it was charged: more than any number of small pages that it can
/// touch.
const SLACK: Nanos = 500_000;
/// How many times its charge, beyond that: the unoptimised build is slow as well.
const FACTOR: Nanos = 32;
/// Of so many turns one is measured: two system calls.
const SAMPLE: u64 = 64;
/// For how long a NIC is watched.
const WATCHED: Nanos = 10_000_000_000;
/// After so long a NIC begins anew.
const FORGIVEN: Nanos = 60_000_000_000;
/// The longest rest, as a power of two of the time that was taken, and in itself.
const DOUBLINGS: u32 = 10;
/// For each of these that it took, up to [`HASTE`], its rest grows once more.
const LONG: Nanos = 4_000_000;
const HASTE: u64 = 3;
const LONGEST: Nanos = 30_000_000_000;

/// One NIC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Strain {
    /// The last round in which it was served.
    served: u64,
    /// Until when the clock is looked at around its turns, and until when its usage as well.
    watched_until: Nanos,
    measured_until: Nanos,
    rests_until: Nanos,
    /// When it last was too slow (0: never), and how often it was by then.
    offence: Nanos,
    count: u32,
    /// Turns that it had, and page faults in them, as far as they were measured.
    turns: u64,
    faults: u64,
}

#[cfg(test)]
impl Strain {
    /// Of a NIC that rests until then.
    pub(super) fn resting(until: Nanos) -> Self {
        Self { rests_until: until, ..Self::default() }
    }
}

/// All NICs of a shard, by slot.
#[derive(Debug, Default)]
pub(super) struct Strains {
    nics: Vec<Strain>,
    round: u64,
    /// When the last round began and what had been charged by then; `None` after a sleep.
    last: Option<(Nanos, Nanos)>,
    /// Page faults of the thread, when a round or a turn was last found late.
    faults: u64,
}

/// A turn of a suspect.
#[derive(Debug)]
pub(super) struct Probe {
    began: Nanos,
    charged: Nanos,
    /// Where it is measured.
    usage: Option<Usage>,
    watched: bool,
    sampled: bool,
}

fn too_long(lasted: Nanos, charged: Nanos) -> bool {
    lasted > charged.saturating_mul(FACTOR).saturating_add(SLACK)
}

impl Strains {
    /// A round begins at `now`, of NICs in so many slots.
    pub(super) fn begin(&mut self, slots: usize, now: Nanos, meter: &Meter) {
        if self.nics.len() < slots {
            self.nics.resize(slots, Strain::default());
        }
        let charged = meter.charged();
        let last = self.last.replace((now, charged));
        let late = last.is_some_and(|(then, before)| {
            too_long(now.saturating_sub(then), charged.wrapping_sub(before))
        });
        // Without a fault since the last late round it was not memory that came late. On a busy
        // host many rounds are late.
        let suspicious = late && {
            let faults = meter.usage().faults;
            std::mem::replace(&mut self.faults, faults) != faults
        };
        if suspicious {
            let round = self.round;
            for nic in self.nics.iter_mut().filter(|nic| nic.served == round) {
                nic.watched_until = now.saturating_add(WATCHED);
            }
        }
        self.round = self.round.wrapping_add(1);
    }

    /// The worker is about to sleep: how long is nobody's doing.
    pub(super) const fn forget_round(&mut self) {
        self.last = None;
    }

    /// A NIC leaves the slot; what is held against it.
    pub(super) fn take(&mut self, slot: usize) -> Strain {
        self.nics.get_mut(slot).map(std::mem::take).unwrap_or_default()
    }

    /// A NIC comes to the slot with what was held against it: it does not rest less for having
    /// moved.
    pub(super) fn put(&mut self, slot: usize, strain: Strain) {
        if self.nics.len() <= slot {
            self.nics.resize(slot + 1, Strain::default());
        }
        self.nics[slot] = Strain { served: 0, ..strain };
    }

    /// Another NIC takes the slot.
    pub(super) fn forget(&mut self, slot: usize) {
        if let Some(nic) = self.nics.get_mut(slot) {
            *nic = Strain::default();
        }
    }

    /// Whether a NIC is not to be served yet.
    #[inline]
    pub(super) fn rests(&self, slot: usize, now: Nanos) -> bool {
        self.nics.get(slot).is_some_and(|nic| nic.rests_until > now)
    }

    /// A NIC's turn begins.
    #[inline]
    pub(super) fn turn(&mut self, slot: usize, now: Nanos, meter: &Meter) -> Option<Probe> {
        let nic = self.nics.get_mut(slot)?;
        nic.served = self.round;
        nic.turns = nic.turns.wrapping_add(1);
        let (watched, sampled) = (nic.watched_until > now, nic.turns.is_multiple_of(SAMPLE));
        let measured = sampled || (watched && nic.measured_until > now);
        (watched || sampled).then(|| Probe {
            began: meter.now(),
            charged: meter.charged(),
            usage: measured.then(|| meter.usage()),
            watched,
            sampled,
        })
    }

    /// Page faults in all turns of a NIC, as far as one turn stands for the others.
    pub(super) fn faults(&self, slot: usize) -> u64 {
        self.nics.get(slot).map_or(0, |nic| nic.faults)
    }

    /// A suspect's turn is over; true if it rests now.
    pub(super) fn judge(&mut self, slot: usize, probe: &Probe, meter: &Meter) -> bool {
        let now = meter.now();
        let lasted = now.saturating_sub(probe.began);
        let Some(nic) = self.nics.get_mut(slot) else { return false };
        if let Some(before) = probe.usage.filter(|_| probe.sampled) {
            let faults = meter.usage().faults.wrapping_sub(before.faults);
            nic.faults = nic.faults.saturating_add(faults.saturating_mul(SAMPLE));
        }
        if !probe.watched {
            return false;
        }
        if !too_long(lasted, meter.charged().wrapping_sub(probe.charged)) {
            return false;
        }
        let Some(before) = probe.usage else {
            let faults = meter.usage().faults;
            if std::mem::replace(&mut self.faults, faults) != faults {
                nic.watched_until = now.saturating_add(WATCHED);
                nic.measured_until = nic.watched_until;
            }
            return false;
        };
        let usage = meter.usage();
        if usage.faults == before.faults || usage.preempted != before.preempted {
            return false;
        }
        let anew = nic.offence == 0 || now.saturating_sub(nic.offence) > FORGIVEN;
        let grows = 1 + u32::try_from((lasted / LONG).min(HASTE)).unwrap_or(0);
        nic.count = if anew { 0 } else { nic.count.saturating_add(grows).min(DOUBLINGS) };
        nic.offence = now;
        nic.watched_until = now.saturating_add(WATCHED);
        nic.measured_until = now.saturating_add(FORGIVEN);
        let rest = lasted.saturating_mul(1 << nic.count).min(LONGEST);
        nic.rests_until = now.saturating_add(rest);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::nic::budget::Clock;

    const MS: Nanos = 1_000_000;

    #[derive(Clone, Debug, Default)]
    struct Host(Arc<[AtomicU64; 3]>);

    impl Clock for Host {
        fn now(&self) -> Nanos {
            self.0[0].load(Ordering::Relaxed)
        }

        fn usage(&self) -> Usage {
            let [_, faults, preempted] = &*self.0;
            Usage {
                faults: faults.load(Ordering::Relaxed),
                preempted: preempted.load(Ordering::Relaxed),
                ..Usage::default()
            }
        }
    }

    struct World {
        host: Host,
        meter: Meter,
        strains: Strains,
    }

    impl World {
        fn new() -> Self {
            let host = Host::default();
            host.0[0].store(1000 * MS, Ordering::Relaxed);
            let meter = Meter::new(Box::new(host.clone()));
            Self { host, meter, strains: Strains::default() }
        }

        fn add(&self, what: usize, by: u64) {
            self.host.0[what].fetch_add(by, Ordering::Relaxed);
        }

        /// A round in which each NIC's turn lasts so long, with so many faults and preemptions.
        fn round(&mut self, turns: &[(usize, Nanos, u64, u64)]) -> bool {
            let now = self.meter.now();
            self.strains.begin(4, now, &self.meter);
            let mut rested = false;
            for &(slot, lasts, faults, preempted) in turns {
                if self.strains.rests(slot, now) {
                    continue;
                }
                let probe = self.strains.turn(slot, now, &self.meter);
                self.meter.charge(1000);
                self.add(0, lasts);
                self.add(1, faults);
                self.add(2, preempted);
                rested |= probe.is_some_and(|p| self.strains.judge(slot, &p, &self.meter));
            }
            rested
        }
    }

    #[test]
    fn whose_memory_is_slow_again_and_again_rests_for_longer_and_longer() {
        let mut world = World::new();
        assert!(!world.round(&[(0, 20 * MS, 9, 0), (1, 1000, 0, 0)]), "nobody knows yet");
        assert!(!world.round(&[(0, 20 * MS, 9, 0), (1, 1000, 0, 0)]), "the clock alone knows");
        let mut slow = 0;
        for _ in 0..4000 {
            slow += u64::from(world.round(&[(0, 20 * MS, 9, 0), (1, 1000, 0, 0)]));
            assert!(!world.strains.rests(1, world.meter.now()), "a neighbour does not");
            world.add(0, MS);
        }
        // 20 ms of work, then 20, 320 and 5120 ms of rest.
        assert_eq!(slow, 3, "turns of 20 ms");
        let now = world.meter.now();
        assert!(world.strains.rests(0, now));
        assert!(!world.strains.rests(0, now + 256 * 20 * MS), "256 times as long by now");
    }

    /// The second late turn begins the time anew in which a third one counts.
    #[test]
    fn late_turns_that_are_nearly_as_far_apart_as_a_nic_is_watched_count() {
        let mut world = World::new();
        let slow = [(0, 20 * MS, 1, 0)];
        let nearly = WATCHED - 100 * MS;
        world.round(&slow);
        assert!(!world.round(&[(0, 1000, 0, 0)]), "the round before was late");
        for counts in [false, true] {
            world.add(0, nearly);
            world.strains.forget_round();
            assert_eq!(world.round(&slow), counts);
        }
    }

    /// Rounds of a busy host are late again and again; who touched no missing page is not watched.
    #[test]
    fn a_late_round_without_a_page_fault_makes_no_suspect() {
        let mut world = World::new();
        let watched = |world: &World| world.strains.nics[0].watched_until > 0;
        // The first has nothing to be held against.
        world.round(&[(0, 20 * MS, 1, 0)]);
        world.round(&[(0, 1000, 0, 0)]);
        world.strains.nics[0].watched_until = 0;
        for _ in 0..10 {
            world.round(&[(0, 20 * MS, 0, 1)]);
        }
        assert!(!watched(&world), "the host ran others");
        world.round(&[(0, 20 * MS, 1, 0)]);
        world.round(&[(0, 1000, 0, 0)]);
        assert!(watched(&world), "a page was missing");
    }

    #[test]
    fn what_is_a_little_slow_rests_twice_as_long_each_time() {
        let mut world = World::new();
        let mut slow = 0;
        for _ in 0..2000 {
            slow += u64::from(world.round(&[(0, 2 * MS, 9, 0)]));
            world.add(0, MS);
        }
        // 2 ms of work, then 2, 4, … 1024 ms of rest.
        assert!((9..=11).contains(&slow), "{slow} turns of 2 ms");
    }

    #[test]
    fn what_is_held_against_a_nic_goes_along() {
        let mut world = World::new();
        for _ in 0..4 {
            world.round(&[(0, 20 * MS, 9, 0)]);
        }
        let now = world.meter.now();
        assert!(world.strains.rests(0, now));
        let mut there = Strains::default();
        there.put(5, world.strains.take(0));
        assert!(there.rests(5, now), "it rests where it is now");
        assert!(!world.strains.rests(0, now), "whoever comes to its place does not");
    }

    #[test]
    fn some_turns_tell_how_many_pages_were_missing_in_all() {
        let mut world = World::new();
        for _ in 0..100 * SAMPLE {
            world.round(&[(0, 1000, 3, 0), (1, 1000, 0, 0)]);
        }
        assert_eq!(world.strains.faults(0), 300 * SAMPLE);
        assert_eq!(world.strains.faults(1), 0);
        world.strains.forget(0);
        assert_eq!(world.strains.faults(0), 0, "another NIC begins anew");
        assert!(!world.strains.rests(0, world.meter.now()));
    }

    #[test]
    fn time_that_the_host_took_and_time_without_faults_are_nobodys_fault() {
        let mut world = World::new();
        for _ in 0..10 {
            assert!(!world.round(&[(0, 20 * MS, 9, 1)]), "the host ran somebody else");
            assert!(!world.round(&[(0, 20 * MS, 0, 0)]), "no page was missing");
            assert!(!world.round(&[(0, MS / 4, 100, 0)]), "pages that come at once");
        }
    }

    #[test]
    fn what_is_long_past_is_forgiven_and_a_sleep_is_no_turn() {
        let mut world = World::new();
        let slow = [(2, 20 * MS, 1, 0)];
        world.round(&slow);
        world.round(&slow);
        assert!(world.round(&slow));
        world.add(0, FORGIVEN + MS);
        assert!(!world.round(&[(2, 1000, 1, 0)]));
        world.strains.forget_round();
        world.add(0, FORGIVEN);
        assert!(!world.round(&slow), "not watched any more");
        assert!(!world.round(&slow), "nor measured");
        assert!(world.round(&slow));
        let now = world.meter.now();
        assert!(!world.strains.rests(2, now + 20 * MS), "as the first time");
        world.strains.forget(2);
        assert!(!world.strains.rests(2, now));
    }
}
