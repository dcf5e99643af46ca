//! What an attack costs a victim in another network on the same worker.
//!
//! A row for each attack of [`crate::attack`] and one for none. Slices with the attack and without
//! it alternate in one run, on one daemon: `value` is the victim's 99th percentile of a polled
//! round trip of 64 bytes under attack, `reference` the same while the attack rests, `bandwidth`
//! the victim's bandwidth under attack ÷ without, and `longest_turn` the worker's longest turn of
//! its own time, from its metrics.
//!
//! All networks are in one process here (`--one-process`). Where the kernel can make a single
//! access last, which nobody on the same worker can cut short, there is a second row with a process
//! for each network: the victim's worker is then not the villain's. What the host's memory costs
//! whoever uses it at the same time remains; where an attack has a control, which does the same
//! without a device, slices of that alternate with the others, and the bandwidth may be held
//! against theirs.
//!
//! **What is shared and what is not.** The worker is what all networks of it share; everything else
//! must not be what is measured:
//!
//! - The worker has the last core whenever it wants it (`SCHED_FIFO`). It polls for a millisecond
//!   before it sleeps, so that a round trip of the reference is not a wake-up. Between slices, and
//!   in long ones, it sleeps for a while: the scheduler takes a core away from a real-time thread
//!   that leaves nothing to the others for a second. Where an attack leaves it no time to sleep,
//!   the scheduler does so, for 50 ms: what it says of that is taken off the round trip.
//! - The victim has the first core in the same way, and wants it for a round trip each 250 us. The
//!   villains' threads, and the daemon's other threads, take what it leaves. A villain with more
//!   cores would post faster: the attacks are made so that posting is next to nothing (rings are
//!   written once, a strike is a store and a kick).
//! - A round trip that takes longer than 250 us stands for those that would have begun meanwhile: a
//!   worker that stands still for 50 ms is as bad for two hundred of them, not for one.
//! - A hypervisor that takes the core away makes a turn long, and no counter in here tells of it.
//!   So long turns are counted in the slices of both kinds, and the longest one is held against the
//!   attack only if there were more in its own for the time that those took.
//! - The row is the median of the slices, since the machine has other things to do; a slice under
//!   attack lasts until the attack has been carried out at least once in it.

mod report;
mod victim;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::cores::Cores;
use crate::attack::{self, Attack, Campaign, Size};
use crate::daemon::DaemonOptions;
use crate::trips::Queues;
use crate::vitals::Turns;
use crate::world::{Door, World};

pub use report::{Bounds, Row};
use victim::{REST, Victim};

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Slices of each kind.
    pub rounds: usize,
    /// How long one lasts.
    pub slice: Duration,
    /// How large an attack is.
    pub size: Size,
}

impl Effort {
    /// What a report is made from: under ten minutes.
    pub const FULL: Self = Self { rounds: 5, slice: Duration::from_millis(250), size: Size::Full };
    /// What shows that everything runs and nothing is far off: a minute.
    pub const QUICK: Self = Self { rounds: 3, slice: Duration::from_millis(60), size: Size::Short };
}

/// A row has no more time than this.
const LIMIT: Duration = Duration::from_secs(150);
/// A strike that takes longer than this is measured in parts.
const STRIKE: Duration = Duration::from_secs(3);

/// What ends the name of a row whose networks have a process each.
const APART: &str = "_apart";
/// What begins the name of a row whose villain is a process.
const BY_PROCESS: &str = "process_";
/// The victim's network.
const VICTIM: &str = "net";

/// The names of the rows of attacks, by this door. What the kernel can make last on a shared worker
/// has one more, with the networks in processes of their own.
fn rows(attack: &'static Attack, door: Door) -> impl Iterator<Item = String> {
    let by = if door == Door::Process { BY_PROCESS } else { "" };
    let apart = attack.blocks.then(|| format!("{by}{}{APART}", attack.name));
    std::iter::once(format!("{by}{}", attack.name)).chain(apart)
}

/// The names of all rows. A control has none: it is no attack on the device.
pub fn names() -> impl Iterator<Item = String> {
    let all = attack::all();
    let controls: Vec<_> = all.iter().filter_map(|attack| attack.control).collect();
    std::iter::once("none".to_owned()).chain(
        all.into_iter()
            .filter(|attack| attack.comes_by(Door::Monitor))
            .filter(move |attack| !controls.contains(&attack.name))
            .flat_map(|attack| rows(attack, Door::Monitor)),
    )
}

/// The names of rows whose villains are processes.
pub fn names_by_processes() -> impl Iterator<Item = String> {
    let all = attack::all().into_iter().filter(|attack| attack.comes_by(Door::Process));
    all.flat_map(|attack| rows(attack, Door::Process))
}

/// Measures the row of that name.
pub fn run(name: &str, effort: Effort) -> Row {
    Cores::get().guest();
    let (attack, place) = Place::of(name);
    let attack = Attack::named(attack);
    catch_unwind(AssertUnwindSafe(|| measure((name, place), attack, effort)))
        .unwrap_or_else(|cause| Row::failed(name, super::report::panic_text(cause.as_ref())))
}

/// Where victim and villain are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    /// How the villain comes to its NIC.
    door: Door,
    /// Victim and villain are each in its network's process, and not on one worker.
    apart: bool,
}

impl Place {
    /// The attack that a row's name has in it, and where it is carried out.
    fn of(name: &str) -> (&str, Self) {
        let (name, apart) = name.strip_suffix(APART).map_or((name, false), |name| (name, true));
        let by = name.strip_prefix(BY_PROCESS);
        let door = if by.is_some() { Door::Process } else { Door::Monitor };
        (by.unwrap_or(name), Self { door, apart })
    }

    /// The process of the victim's network, if it has one.
    fn own(self, daemon: &crate::daemon::Daemon) -> Option<u32> {
        self.apart.then(|| daemon.pid_of(VICTIM).expect("the victim's network has a process"))
    }

    /// Gives the victim's worker the last core, and all other threads the first.
    fn settle(self, daemon: &crate::daemon::Daemon) {
        match self.own(daemon) {
            None => Cores::get().worker_alone(&daemon.pids()),
            Some(own) => Cores::get().worker_of(own, &daemon.pids()),
        }
    }

    /// What keeps the victim's worker.
    fn queue(self, daemon: &crate::daemon::Daemon) -> Queues {
        Queues::of_workers(&self.own(daemon).map_or_else(|| daemon.pids(), |own| vec![own]))
    }

    fn turns(self, daemon: &crate::daemon::Daemon) -> Turns {
        if self.apart { daemon.turns_of(VICTIM) } else { daemon.turns() }
    }
}

/// What the slices of one kind saw.
#[derive(Debug, Default)]
struct Seen {
    /// 99th percentiles, in microseconds.
    latency: Vec<f64>,
    /// The longest round trip.
    worst: f64,
    /// Bytes a second.
    bandwidth: Vec<f64>,
    /// Turns of the worker that were longer than a millisecond of its own time.
    long_turns: f64,
    /// For how long, in seconds.
    lasted: f64,
}

fn measure((name, place): (&str, Place), attack: Option<&Attack>, effort: Effort) -> Row {
    let mut args = vec!["--workers", "1", "--poll-us", "1000"];
    if !place.apart {
        args.push("--one-process");
    }
    let args = args.into_iter().map(str::to_owned).collect();
    let options = DaemonOptions { args, processes: true, ..DaemonOptions::default() };
    let world = World::with(&options, LIMIT);
    let mut victim = Victim::new(&world);
    place.settle(&world.daemon);
    let ground = attack.map(|a| a.ground(&world, place.door, effort.size));
    let campaign = attack.zip(ground.as_ref()).map(|(a, ground)| a.set_up(ground));
    // Sessions have brought threads of their own.
    place.settle(&world.daemon);
    let control = attack.and_then(|a| a.control).filter(|_| place.apart);
    let control = control.and_then(Attack::named).zip(ground.as_ref());
    let control = control.map(|(control, ground)| control.set_up(ground));
    let queue = place.queue(&world.daemon);
    let [mut quiet, mut attacked, mut controlled] = <[Seen; 3]>::default();
    std::thread::scope(|scope| {
        let slices = || {
            super::cores::first_in_line(rustix::thread::gettid());
            victim.latency(effort.slice / 4, &queue, || false);
            for _ in 0..effort.rounds {
                let kinds = [
                    (&mut quiet, None),
                    (&mut attacked, campaign.as_ref()),
                    (&mut controlled, control.as_ref()),
                ];
                let kinds = kinds.into_iter().take(if control.is_some() { 3 } else { 2 });
                for (seen, campaign) in kinds {
                    let (before, began) = (place.turns(&world.daemon).long, Instant::now());
                    slice((&mut victim, &queue), seen, effort, campaign);
                    seen.long_turns += place.turns(&world.daemon).long - before;
                    seen.lasted += began.elapsed().as_secs_f64();
                    std::thread::sleep(REST);
                }
            }
        };
        scope.spawn(slices).join().unwrap_or_else(|cause| std::panic::resume_unwind(cause));
    });
    let strikes = campaign.as_ref().map_or(0, Campaign::strikes);
    drop(campaign);
    let attack = attack.map(|a| (a.villains, a.blocks && !place.apart));
    let seen = [&quiet, &attacked, &controlled];
    Row::new((name, attack), seen, place.turns(&world.daemon), strikes)
}

/// Latency and bandwidth for a while each.
fn slice(
    (victim, queue): (&mut Victim, &Queues),
    seen: &mut Seen,
    effort: Effort,
    campaign: Option<&Campaign>,
) {
    let strikes = || campaign.map_or(u64::MAX, Campaign::strikes);
    let first = strikes();
    if let Some(campaign) = campaign {
        campaign.begin();
    }
    let began = Instant::now();
    // Until it was carried out once, which is what the slice is for.
    let unseen = || campaign.is_some() && strikes() == first && began.elapsed() < STRIKE;
    let (p99, worst) = victim.latency(effort.slice, queue, unseen);
    seen.latency.push(p99);
    seen.worst = seen.worst.max(worst);
    seen.bandwidth.push(victim.bandwidth(effort.slice));
    if let Some(campaign) = campaign {
        campaign.pause();
        victim.recover();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_which_attack_it_is_and_where() {
        let at = |door, apart| Place { door, apart };
        assert_eq!(Place::of("cuts"), ("cuts", at(Door::Monitor, false)));
        assert_eq!(Place::of("holes_apart"), ("holes", at(Door::Monitor, true)));
        assert_eq!(Place::of("process_cuts"), ("cuts", at(Door::Process, false)));
        assert_eq!(Place::of("process_cuts_apart"), ("cuts", at(Door::Process, true)));
    }

    /// Each row has all targets, or another one that does.
    #[test]
    fn what_blocks_a_shared_worker_is_measured_apart_by_either_door() {
        for (door, names) in [
            (Door::Monitor, names().collect::<Vec<_>>()),
            (Door::Process, names_by_processes().collect()),
        ] {
            for name in names.iter().filter(|name| *name != "none") {
                let (attack, place) = Place::of(name);
                let attack = Attack::named(attack).expect("an attack");
                assert_eq!(place.door, door);
                assert_eq!(
                    names.contains(&format!("{name}{APART}")),
                    attack.blocks && !place.apart
                );
            }
        }
    }
}
