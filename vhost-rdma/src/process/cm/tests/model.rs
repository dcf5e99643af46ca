//! Programs that do what they should on a network that does not: whatever is lost, doubled or
//! overtaken, both ends come to agree, and nothing is left.

use super::super::id::{Kind, Space};
use super::super::layout::Command;
use super::*;

/// A pseudorandom sequence (xorshift).
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

/// What a program knows of its connection.
#[derive(Debug, Default, PartialEq, Eq)]
struct Known {
    id: Option<u32>,
    up: bool,
    ended: bool,
}

/// A network with what is under way on it, and when that arrives.
struct Net {
    hosts: [Host; 2],
    known: [Known; 2],
    under_way: Vec<(Nanos, usize, Mad)>,
    chance: Chance,
    now: Nanos,
}

impl Net {
    fn new(seed: u64) -> Self {
        let mut hosts = [Host::new(1), Host::new(2)];
        hosts[1].listen(7, Space::Tcp, 80);
        let id = hosts[0].create(1, Space::Tcp);
        let dest = at(2, 80);
        hosts[0].ask(Command::Resolve { id, source: None, dest }).unwrap();
        let known = [Known { id: Some(id), ..Known::default() }, Known::default()];
        let chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        Self { hosts, known, under_way: Vec::new(), chance, now: 0 }
    }

    /// Does what a program does with its events.
    fn program(&mut self, side: usize) {
        let (host, known) = (&mut self.hosts[side], &mut self.known[side]);
        while let Some(event) = host.event() {
            let id = event.id;
            match event.kind {
                Kind::AddressResolved => drop(host.ask(Command::Route { id }).unwrap()),
                Kind::RouteResolved => {
                    host.ask(Command::Connect { id, param: param(0x11, b"") }).unwrap();
                }
                // What comes a second time is a second request, as its first is forgotten.
                Kind::Request => {
                    let param = Some(param(0x22, b""));
                    known.id = Some(id);
                    known.ended = host.ask(Command::Accept { id, uid: 2, param }).is_err();
                }
                Kind::Response => {
                    known.up = host.ask(Command::Accept { id, uid: 0, param: None }).is_ok();
                }
                Kind::Established => known.up = true,
                Kind::Rejected | Kind::Unreachable | Kind::Disconnected if known.id == Some(id) => {
                    known.ended = true;
                }
                _ => {}
            }
        }
    }

    /// One step of time; `lossy`: of three datagrams one is lost, one comes twice, all come late.
    fn step(&mut self, lossy: bool) {
        self.now += 50_000_000;
        for side in 0..2 {
            self.hosts[side].passes(self.now);
            self.program(side);
            for mad in self.hosts[side].sends() {
                let copies = if lossy { self.chance.below(3) } else { 1 };
                for _ in 0..copies {
                    let late = if lossy { self.chance.below(SECOND) } else { 0 };
                    self.under_way.push((self.now + late, 1 - side, mad.clone()));
                }
            }
        }
        let now = self.now;
        let (due, rest) = self.under_way.drain(..).partition(|(when, ..)| *when <= now);
        self.under_way = rest;
        let due: Vec<(Nanos, usize, Mad)> = due;
        for (_, side, mad) in due {
            self.hosts[side].hears(&[mad]);
            self.program(side);
        }
    }

    fn until(&mut self, seconds: u64, done: impl Fn(&[Known; 2]) -> bool) -> bool {
        let end = self.now + seconds * SECOND;
        while self.now < end && !done(&self.known) {
            self.step(true);
        }
        done(&self.known)
    }

    /// Both programs end, and time passes.
    #[track_caller]
    fn ends(mut self, seed: u64) {
        for side in 0..2 {
            let now = self.hosts[side].now;
            self.hosts[side].machine.end_session(1, now);
            self.hosts[side].asker = self.hosts[side].another_session(9);
        }
        for _ in 0..600 {
            self.step(true);
        }
        for host in &mut self.hosts {
            host.machine.end_session(9, host.now);
            assert!(host.machine.is_empty(), "seed {seed}: {:?}", host.machine);
        }
    }
}

#[test]
fn connections_come_up_and_go_down_whatever_is_lost() {
    for seed in 0..300 {
        let mut net = Net::new(seed);
        assert!(net.until(70, |known| known.iter().all(|it| it.up)), "seed {seed}");
        assert!(net.known.iter().all(|it| !it.ended), "seed {seed}: {:?}", net.known);
        let side = usize::from(seed % 2 == 0);
        let id = net.known[side].id.unwrap();
        net.hosts[side].ask(Command::Disconnect { id }).unwrap();
        assert!(net.until(60, |known| known.iter().all(|it| it.ended)), "seed {seed}");
        net.ends(seed);
    }
}

/// A program dies at any moment: the other one hears of it.
#[test]
fn a_death_in_any_state_is_heard_of() {
    for seed in 0..300 {
        let mut net = Net::new(seed);
        let steps = net.chance.below(60);
        for _ in 0..steps {
            net.step(true);
        }
        let dies = usize::from(seed % 2 == 0);
        let now = net.hosts[dies].now;
        net.hosts[dies].machine.end_session(1, now);
        net.hosts[dies].asker = net.hosts[dies].another_session(9);
        let other = 1 - dies;
        // A passive program may never have heard of a connection.
        let heard = net.until(90, |known| known[other].ended);
        let never = net.known[other].id.is_none();
        assert!(heard || never, "seed {seed}: {:?}", net.known);
        net.ends(seed);
    }
}

#[test]
fn nobody_waits_for_ever() {
    let mut a = Host::new(1);
    let id = a.connect((1, Space::Tcp), at(2, 80), param(0x11, b""));
    let mut asked = 0;
    for tenth in 1..=700 {
        asked += a.sends().len();
        a.passes(tenth * SECOND / 10);
    }
    let gone = a.expects(Kind::Unreachable);
    assert_eq!((gone.id, gone.status, asked), (id, -110, 15));
    // One whose program died says so, and is forgotten in the end.
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    connected(&mut a, &mut b);
    a.machine.end_session(1, 0);
    assert_eq!(a.sends().len(), 1);
    assert!(!a.machine.is_empty());
    a.passes(20 * SECOND);
    for second in 20..80 {
        a.passes(second * SECOND);
    }
    assert!(a.machine.is_empty(), "{:?}", a.machine);
}
