//! Which NIC should be on which worker: a function of what each costs, and nothing else.
//!
//! What is weighed is the sum of the squares of the workers' loads: it grows both with work that
//! is there and with work that lies on one worker. A pair of NICs on two workers costs more than
//! on one, since what goes between them is copied once more and handed over: half as much again,
//! near enough to tell a good move from a bad one. So two busy pairs on one worker are put on two,
//! a pair that was put on two comes together where there is room for both, and a pair alone stays
//! where it is.
//!
//! A move is made only if it is worth it: the busiest worker has a third of its time taken, and the
//! sum falls by a fifth at least. What is nearly balanced stays. NICs that have most to do with
//! each other move together, and two may change places.
//!
//! A guest chooses what its NIC costs, so it can have it moved, but not often ([`Rests`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::link::NicId;

/// What one side of a pair on one worker costs when both are on different ones, of what it cost.
const APART: f64 = 0.75;
/// Share of the busiest worker's time below which nothing is moved.
const BUSY: f64 = 0.3;
/// What a move must leave of the sum at most.
const WORTH: f64 = 0.8;
/// Share of a worker's time below which a NIC is not looked at.
const LIGHT: f64 = 0.01;
/// NICs of a worker that are looked at, the busiest first.
const LOOKS: usize = 8;
/// Workers that one may move to, the least busy first.
const PLACES: usize = 2;
/// NICs that belong together, at most.
const TOGETHER: usize = 8;
/// Once so many are to be moved no more are looked for.
const MOST: usize = 8;
/// What each step must leave of the sum at most.
const STEP: f64 = 0.98;
/// How long a NIC that has moved stays at least; twice as long after each further move.
const REST: Duration = Duration::from_secs(10);
/// Doublings of that, at most.
const DOUBLINGS: u32 = 6;
/// After so long without a move a NIC begins anew.
const FORGIVEN: Duration = Duration::from_secs(3600);

/// What is known of a NIC.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) nic: NicId,
    /// The number of its worker.
    pub(super) on: usize,
    /// Share of a worker's time that it takes.
    pub(super) busy: f64,
    /// It may move now.
    pub(super) moves: bool,
    /// What of that it has to do with others.
    pub(super) talks: Vec<(NicId, f64)>,
}

/// NICs and where each should go.
pub(super) type Moves = Vec<(NicId, usize)>;

/// One arrangement of NICs: how busy each worker is, and with which of them elsewhere.
struct Plan<'a> {
    nics: &'a BTreeMap<NicId, &'a Load>,
    busy: Vec<f64>,
}

impl Plan<'_> {
    /// The sum, if these NICs were there.
    fn cost(&self, moves: &[(NicId, usize)]) -> f64 {
        let mut busy = self.busy.clone();
        let place = |nic: NicId| moves.iter().find(|(moved, _)| *moved == nic).map(|(_, to)| *to);
        let mut add = |worker: usize, more: f64| {
            if let Some(busy) = busy.get_mut(worker) {
                *busy += more;
            }
        };
        for load in self.nics.values() {
            let to = place(load.nic).unwrap_or(load.on);
            if to != load.on {
                add(load.on, -load.busy);
                add(to, load.busy);
            }
            for (peer, share) in &load.talks {
                let Some(peer) = self.nics.get(peer) else { continue };
                let there = place(peer.nic).unwrap_or(peer.on);
                match (load.on == peer.on, to == there) {
                    (true, false) => {
                        add(to, (APART - 1.0) * share);
                        add(there, APART * share);
                    }
                    // Each side has its part of what one side would do for both.
                    (false, true) => add(to, (0.5 / APART - 1.0) * share),
                    _ => {}
                }
            }
        }
        busy.iter().map(|busy| busy.max(0.0).powi(2)).sum()
    }

    /// A NIC and those of its worker that it belongs to; `None`: not all of them may move.
    fn unit(&self, load: &Load) -> Option<Vec<NicId>> {
        let mut unit = vec![load.nic];
        let belongs = |one: &Load, other: &Load| {
            let half = |of: &Load, with: NicId| {
                of.talks.iter().any(|(peer, share)| *peer == with && *share >= of.busy / 2.0)
            };
            one.on == other.on && (half(one, other.nic) || half(other, one.nic))
        };
        let mut at = 0;
        while let Some(one) = unit.get(at).and_then(|nic| self.nics.get(nic)) {
            at += 1;
            for other in self.nics.values() {
                if unit.len() < TOGETHER && !unit.contains(&other.nic) && belongs(one, other) {
                    unit.push(other.nic);
                }
            }
        }
        let moves = |nic: &NicId| self.nics.get(nic).is_some_and(|load| load.moves);
        unit.iter().all(moves).then_some(unit)
    }

    /// What may leave a worker: units, and NICs alone, each once.
    fn leave(&self, worker: usize) -> BTreeSet<Vec<NicId>> {
        let here = self.nics.values().filter(|load| load.on == worker && load.moves);
        let mut found = BTreeSet::new();
        for load in here {
            found.insert(vec![load.nic]);
            found.extend(self.unit(load).map(|mut unit| {
                unit.sort_unstable();
                unit
            }));
        }
        found
    }
}

impl Plan<'_> {
    /// The sum that is left if these two workers give each other what is best, one thing after the
    /// other; and what that is.
    fn improve(&self, one: usize, other: usize) -> (f64, Moves) {
        let go = |unit: &[NicId], to: usize| unit.iter().map(|&nic| (nic, to)).collect::<Moves>();
        let leaving: Vec<Moves> = self.leave(one).iter().map(|unit| go(unit, other)).collect();
        let coming: Vec<Moves> = self.leave(other).iter().map(|unit| go(unit, one)).collect();
        let exchanges = leaving.iter().flat_map(|unit| coming.iter().map(move |back| (unit, back)));
        let exchanges = exchanges.map(|(unit, back)| [unit.clone(), back.clone()].concat());
        let steps: Vec<Moves> =
            leaving.iter().chain(&coming).cloned().chain(exchanges.collect::<Vec<_>>()).collect();
        let mut best = (self.cost(&[]), Moves::new());
        while best.1.len() < MOST {
            let is_free = |step: &&Moves| {
                !step.iter().any(|(nic, _)| best.1.iter().any(|(moved, _)| moved == nic))
            };
            let weighed = steps.iter().filter(is_free).map(|step| {
                let moves = [best.1.clone(), step.clone()].concat();
                (self.cost(&moves), moves)
            });
            // Of equals the first, which moves least.
            let next = weighed.min_by(|(a, _), (b, _)| a.total_cmp(b));
            match next.filter(|(cost, _)| *cost <= best.0 * STEP) {
                Some(next) => best = next,
                None => break,
            }
        }
        best
    }
}

/// What is to be moved now: nothing, if nothing is worth it.
pub(super) fn decide(workers: usize, loads: &[Load]) -> Moves {
    let mut busy = vec![0.0; workers];
    for load in loads {
        if let Some(busy) = busy.get_mut(load.on) {
            *busy += load.busy;
        }
    }
    let mut order: Vec<usize> = (0..workers).collect();
    order.sort_by(|a, b| busy[*b].total_cmp(&busy[*a]));
    let Some((&busiest, others)) = order.split_first() else { return Moves::new() };
    if busy[busiest] < BUSY {
        return Moves::new();
    }
    let mut heavy: Vec<&Load> = loads.iter().filter(|load| load.busy >= LIGHT).collect();
    heavy.sort_by(|a, b| b.busy.total_cmp(&a.busy));
    let mut looked = vec![0; workers];
    heavy.retain(|load| {
        let Some(looked) = looked.get_mut(load.on) else { return false };
        *looked += 1;
        *looked <= LOOKS
    });
    let named: BTreeSet<NicId> =
        heavy.iter().flat_map(|load| load.talks.iter().map(|(peer, _)| *peer)).collect();
    let idle = loads.iter().filter(|load| named.contains(&load.nic));
    let nics = heavy.iter().copied().chain(idle).map(|load| (load.nic, load)).collect();
    let plan = Plan { nics: &nics, busy };
    let found = others.iter().rev().take(PLACES).map(|&other| plan.improve(busiest, other));
    let best = found.min_by(|(a, _), (b, _)| a.total_cmp(b));
    let worth = plan.cost(&[]) * WORTH;
    best.filter(|(cost, _)| *cost <= worth).map_or_else(Moves::new, |(_, moves)| moves)
}

/// How long NICs that have moved stay where they are.
#[derive(Debug, Default)]
pub(super) struct Rests(BTreeMap<NicId, (Instant, u32)>);

impl Rests {
    /// Whether a NIC rests.
    pub(super) fn rests(&self, nic: NicId, now: Instant) -> bool {
        self.0.get(&nic).is_some_and(|(last, times)| {
            now.saturating_duration_since(*last) < REST * (1 << (times - 1).min(DOUBLINGS))
        })
    }

    /// A NIC has moved.
    pub(super) fn moved(&mut self, nic: NicId, now: Instant) {
        self.0.retain(|_, (last, _)| now.saturating_duration_since(*last) < FORGIVEN);
        let (last, times) = self.0.entry(nic).or_insert((now, 0));
        (*last, *times) = (now, times.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(nic: u32, on: usize, busy: f64, talks: &[(u32, f64)]) -> Load {
        let talks = talks.iter().map(|&(nic, share)| (NicId(nic), share)).collect();
        Load { nic: NicId(nic), on, busy, moves: true, talks }
    }

    fn decided(workers: usize, loads: &[Load]) -> Vec<(u32, usize)> {
        let mut moves: Vec<_> =
            decide(workers, loads).into_iter().map(|(nic, to)| (nic.0, to)).collect();
        moves.sort_unstable();
        moves
    }

    /// Two pairs; who sends has the cost of both.
    fn pairs(on: [usize; 4], busy: f64) -> [Load; 4] {
        let ends = [(0, 1), (1, 0), (2, 3), (3, 2)];
        ends.map(|(nic, peer)| {
            let (here, there) = (on[nic as usize], on[peer as usize]);
            let share = if here != there {
                busy * APART
            } else if nic % 2 == 0 {
                busy
            } else {
                0.0
            };
            load(nic, here, share, &[(peer, share)])
        })
    }

    #[test]
    fn two_pairs_on_one_worker_go_to_two_and_stay_together() {
        let together = [[(0, 1), (1, 1)], [(2, 1), (3, 1)]];
        let moves = decided(2, &pairs([0; 4], 0.5));
        assert!(together.iter().any(|pair| moves == pair), "also who costs nothing: {moves:?}");
        let mut loads = pairs([0; 4], 0.5);
        (loads[1], loads[3]) = (load(1, 0, 0.1, &[(0, 0.1)]), load(3, 0, 0.1, &[(2, 0.1)]));
        let moves = decided(2, &loads);
        assert!(together.iter().any(|pair| moves == pair), "{moves:?}");
    }

    #[test]
    fn pairs_that_cross_change_places() {
        let moves = decided(2, &pairs([0, 1, 0, 1], 0.6));
        assert_eq!(moves.len(), 2, "{moves:?}");
        let on = |nic: u32| moves.iter().find(|(n, _)| *n == nic).map_or(nic as usize % 2, |m| m.1);
        assert!(on(0) == on(1) && on(2) == on(3) && on(0) != on(2), "{moves:?}");
    }

    #[test]
    fn what_is_balanced_alone_or_idle_stays() {
        assert!(decided(2, &pairs([0, 0, 1, 1], 0.9)).is_empty(), "balanced");
        assert!(decided(2, &pairs([0; 4], 0.1)).is_empty(), "there is time left");
        let pair = &pairs([0; 4], 0.9)[..2];
        assert!(decided(2, pair).is_empty(), "a pair alone would only cost more");
        assert!(decided(1, &pairs([0; 4], 0.5)).is_empty(), "there is no other worker");
        assert!(decided(2, &[]).is_empty() && decided(0, &[]).is_empty());
        let uneven = [load(0, 0, 0.5, &[]), load(1, 0, 0.1, &[]), load(2, 1, 0.45, &[])];
        assert!(decided(2, &uneven).is_empty(), "nearly balanced");
    }

    #[test]
    fn who_may_not_move_stays_and_so_does_who_belongs_to_it() {
        let mut loads = pairs([0; 4], 0.5);
        loads[0].moves = false;
        (loads[1].busy, loads[1].talks) = (0.1, vec![(NicId(0), 0.1)]);
        let moves = decided(2, &loads);
        assert!(moves.iter().all(|(nic, _)| *nic >= 2), "{moves:?}");
        loads.iter_mut().for_each(|load| load.moves = false);
        assert!(decided(2, &loads).is_empty());
    }

    #[test]
    fn many_without_peers_are_spread_until_it_is_even() {
        let mut loads: Vec<_> = (0..12).map(|nic| load(nic, 0, 0.08, &[])).collect();
        let mut moves = 0;
        loop {
            let decided = decided(4, &loads);
            if decided.is_empty() {
                break;
            }
            moves += 1;
            for (nic, to) in decided {
                loads[nic as usize].on = to;
            }
            assert!(moves < 20, "it comes to an end");
        }
        let most = |loads: &[Load]| {
            (0..4).map(|w| loads.iter().filter(|load| load.on == w).count()).max().unwrap()
        };
        assert!(most(&loads) <= 6, "half of a worker's time is nothing to move for");
    }

    /// Whatever it does: a hostile guest's NIC moves a few times a minute and then hardly ever.
    #[test]
    fn a_nic_that_moves_again_and_again_rests_longer_and_longer() {
        let (mut rests, begin) = (Rests::default(), Instant::now());
        let mut moves = 0;
        for second in 0..3600 {
            let now = begin + Duration::from_secs(second);
            if !rests.rests(NicId(0), now) {
                rests.moved(NicId(0), now);
                moves += 1;
            }
            assert!(!rests.rests(NicId(1), now), "its neighbours have no part in it");
        }
        assert!((7..=13).contains(&moves), "{moves} in an hour");
        let later = begin + Duration::from_secs(3600) + 2 * FORGIVEN;
        rests.moved(NicId(0), later);
        assert!(!rests.rests(NicId(0), later + REST), "what is long past is forgiven");
    }
}
