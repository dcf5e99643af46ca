//! Attacks on the time of others: what a guest, or its monitor, can do so that its worker has no
//! time for anybody else.
//!
//! An [`Attack`] is a name, and a way to set it up on NICs of a network of their own. What comes of
//! that is a [`Strike`], which is carried out again and again until somebody has seen enough: the
//! benchmark (`bench/isolation`) measures a victim in another network on the same worker meanwhile,
//! the hostile guest suite asks what the daemon answered, kept and charged. Everything in here is
//! what any tenant can do with one socket: nothing needs a right on the host that a VMM does not
//! have, but for two that give a VMM memory of another kind (`machine`).
//!
//! One file for each family. A strike never depends on how the device answers: a mended device
//! refuses or slows what it must.

mod connections;
mod datagrams;
mod elements;
mod holes;
mod machine;
mod objects;
mod programs;
mod queues;
mod sessions;
mod traffic;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

pub use self::machine::Crowded;
pub use self::programs::{become_another, is_to_become_another, no_memory, on_disk};

use crate::backing::rules;
use crate::guest::GuestConfig;
use crate::pages::PageList;
use crate::qp::{Path, QpSpec, SendWr};
use crate::ram::lock;
use crate::spec::{Put, Take, cmd, qpt};
use crate::world::{Door, End, Node, Vacancy, World};

/// The network that villains live in.
pub const NETWORK: &str = "villains";

/// How much of an attack there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// As much as a NIC's limits allow: what the benchmark measures.
    Full,
    /// So much that it is set up in a moment by an unoptimized daemon: what a test has time for.
    Short,
}

/// Where an attack begins: NICs for the villains, whose guests have yet to come.
#[derive(Debug)]
pub struct Ground<'a> {
    /// The daemon.
    pub world: &'a World,
    /// The villains' NICs.
    pub places: Vec<Vacancy>,
    /// How much.
    pub size: Size,
}

/// What is done again and again. Each time is short, unless the device makes it long.
pub trait Strike: Send {
    /// Once.
    fn strike(&mut self);

    /// Nothing of it may go on behind this, so that the same daemon can be measured without it.
    fn rest(&mut self) {}
}

impl<F: FnMut() + Send> Strike for F {
    fn strike(&mut self) {
        self();
    }
}

type SetUp = fn(&Ground<'_>) -> Box<dyn Strike>;

/// A way to spend a neighbour's time.
#[derive(Clone, Copy)]
pub struct Attack {
    /// What it is called in reports.
    pub name: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    /// NICs that take part.
    pub villains: usize,
    /// Megabytes of its own that the daemon may need for the villains together, in a test.
    pub budget: u64,
    /// The kernel can make a single access to its memory last, which nobody can cut short: turns
    /// are as long as that (docs/THREAT_MODEL.md, "Pages that are slow to come").
    pub blocks: bool,
    /// By which doors it can be carried out.
    doors: &'static [Door],
    /// The attack that does the same to the host without the device: what it takes from a victim in
    /// another process is not the device's doing.
    pub control: Option<&'static str>,
    set_up: SetUp,
}

impl fmt::Debug for Attack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attack").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Attack {
    const fn new(name: &'static str, about: &'static str, set_up: SetUp) -> Self {
        let doors = &[Door::Monitor, Door::Process];
        let (villains, budget, blocks, control) = (1, 12, false, None);
        Self { name, about, villains, budget, blocks, doors, control, set_up }
    }

    /// What only a monitor can do, or a guest's kernel.
    const fn by_monitors(mut self) -> Self {
        self.doors = &[Door::Monitor];
        self
    }

    /// What only a process can do.
    const fn by_processes(mut self) -> Self {
        self.doors = &[Door::Process];
        self
    }

    /// Whether it can be carried out by this door.
    pub fn comes_by(&self, door: Door) -> bool {
        self.doors.contains(&door)
    }

    const fn by(mut self, villains: usize) -> Self {
        self.villains = villains;
        self
    }

    const fn blocking(mut self) -> Self {
        self.blocks = true;
        self
    }

    const fn beside(mut self, control: &'static str) -> Self {
        self.control = Some(control);
        self
    }

    const fn within(mut self, megabytes: u64) -> Self {
        self.budget = megabytes;
        self
    }

    /// The attack of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        families().flatten().find(|attack| attack.name == name)
    }

    /// Makes the network and NICs for it.
    #[track_caller]
    pub fn ground<'a>(&self, world: &'a World, door: Door, size: Size) -> Ground<'a> {
        world.daemon.add_network(NETWORK, 666);
        if !rules().groups_end_with_the_network {
            world.daemon.add_peer(datagrams::GROUP_NAME, NETWORK);
        }
        let places = (0..self.villains).map(|_| world.vacancy_by(door, NETWORK, &[])).collect();
        Ground { world, places, size }
    }

    /// Sets it up; it waits to be begun.
    pub fn set_up(&self, ground: &Ground<'_>) -> Campaign {
        more_files();
        Campaign::new((self.set_up)(ground))
    }
}

fn families() -> impl Iterator<Item = &'static [Attack]> {
    [
        elements::ALL,
        queues::ALL,
        datagrams::ALL,
        objects::ALL,
        traffic::ALL,
        machine::ALL,
        holes::ALL,
        connections::ALL,
        sessions::ALL,
        programs::ALL,
    ]
    .into_iter()
}

/// All attacks.
pub fn all() -> Vec<&'static Attack> {
    families().flatten().collect()
}

/// Lets this process have as many descriptors as it may: each doorbell of a guest has one.
fn more_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where it is refused the attack that needs them says so.
    let _refused = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

impl Ground<'_> {
    /// `full` of something, or `short` where there is little time.
    fn sized<T>(&self, full: T, short: T) -> T {
        match self.size {
            Size::Full => full,
            Size::Short => short,
        }
    }

    /// The first villain, its driver ready.
    #[track_caller]
    fn villain(&self, config: GuestConfig) -> Node {
        self.nth(0, config)
    }

    /// One of the villains.
    #[track_caller]
    fn nth(&self, n: usize, config: GuestConfig) -> Node {
        let place = &self.places[n];
        place
            .enter(config)
            .unwrap_or_else(|e| panic!("{}: {e}\n{}", place.name, self.world.daemon.log()))
    }

    /// All villains.
    #[track_caller]
    fn villains(&self, config: &GuestConfig) -> Vec<Node> {
        (0..self.places.len()).map(|n| self.nth(n, config.clone())).collect()
    }
}

/// A guest with so many mebibytes.
fn with_ram(mebibytes: u64) -> GuestConfig {
    GuestConfig { ram_bytes: mebibytes << 20, ..GuestConfig::default() }
}

/// A queue pair that is connected to itself.
#[track_caller]
fn alone(node: &Node, spec: &QpSpec, cqes: u32) -> End {
    let end = node.end_with(spec, node.cq(cqes), node.cq(16));
    end.qp.connect(end.address(), &Path::default()).expect("to itself");
    end
}

/// A queue pair whose requests have `sges` elements.
fn rc(sq: u32, sges: u16) -> QpSpec {
    QpSpec { sq, rq: 16, send_sge: sges, recv_sge: 1, inline: 0, ..QpSpec::new(qpt::RC) }
}

/// CQ_CREATE of 16 entries in the page at `gpa`, which other queues may share: nobody will poll it.
fn blind_cq(node: &Node, gpa: u64) -> crate::guest::Result<u32> {
    let ring = PageList::contiguous(gpa, 1, 0, 12);
    let body = Put::new().u32(16).u32(0).bytes(&ring.bytes()).done(32);
    Ok(node.ctx.command(cmd::CQ_CREATE, &body, 8)?.u32_at(0))
}

/// Takes what came on the event queues, so that they never lack buffers; how many.
fn take_events(node: &Node) -> usize {
    let none = Duration::ZERO;
    let mut taken = 0;
    while let Ok(Some(_)) = node.guest.comp_event(0, none) {
        taken += 1;
    }
    while let Ok(Some(_)) = node.guest.async_event(none) {
        taken += 1;
    }
    taken
}

/// A pause in which whoever else needs this processor has it.
fn breathe() {
    std::thread::sleep(Duration::from_micros(50));
}

/// A send queue that is kept full of work requests that were written once: posting costs the
/// villain a store.
struct Pump {
    end: End,
    entries: u32,
    posted: u32,
    done: u32,
}

impl Pump {
    /// Four completions a ring.
    fn new(mut end: End, entries: u32, make: impl Fn(u32) -> SendWr) -> Self {
        for i in 0..entries {
            let mut request = make(i);
            if (i + 1) % (entries / 4) != 0 {
                request = request.unsignaled();
            }
            let (ring, at, _) = end.qp.raw_sq(i);
            request.encode(&ring, at);
        }
        Self { end, entries, posted: 0, done: 0 }
    }

    fn fill(&mut self) {
        self.done = self.done.wrapping_add(self.end.scq.drain() * (self.entries / 4));
        let free = self.entries - self.posted.wrapping_sub(self.done);
        if free > 0 {
            self.posted = self.posted.wrapping_add(free);
            self.end.qp.raw_sq(0).2.ring(self.posted);
        }
    }
}

/// Pumps that are filled in turn.
struct Pumps(Vec<Pump>);

impl Strike for Pumps {
    fn strike(&mut self) {
        self.0.iter_mut().for_each(Pump::fill);
        breathe();
    }
}

/// An attack in progress, on a thread of its own, that begins and rests when it is told to.
pub struct Campaign {
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Campaign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Campaign").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Gate {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Default)]
struct Orders {
    striking: bool,
    over: bool,
    /// The thread does nothing at present, and nothing that it began goes on by itself.
    idle: bool,
    strikes: u64,
}

impl Campaign {
    fn new(mut strike: Box<dyn Strike>) -> Self {
        let gate = Arc::new(Gate::default());
        let own = Arc::clone(&gate);
        let thread = std::thread::spawn(move || {
            let mut struck = false;
            while let Some(go) = own.next(struck) {
                if go {
                    strike.strike();
                } else {
                    strike.rest();
                }
                struck = go;
            }
        });
        Self { gate, thread: Some(thread) }
    }

    /// Begins, or goes on.
    pub fn begin(&self) {
        self.order(|orders| orders.striking = true);
    }

    /// Rests; nothing goes on when this returns.
    #[track_caller]
    pub fn pause(&self) {
        self.order(|orders| orders.striking = false);
        let mut orders = lock(&self.gate.orders);
        while !orders.idle {
            assert!(self.goes_on(), "the attack failed");
            let wait = self.gate.changed.wait_timeout(orders, Duration::from_millis(100));
            orders = wait.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Whether the thread that carries it out is there.
    pub fn goes_on(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// How often it was carried out.
    pub fn strikes(&self) -> u64 {
        lock(&self.gate.orders).strikes
    }

    fn order(&self, give: impl FnOnce(&mut Orders)) {
        give(&mut lock(&self.gate.orders));
        self.gate.changed.notify_all();
    }
}

impl Gate {
    /// What to do next: strike, rest, or (`None`) no more.
    fn next(&self, struck: bool) -> Option<bool> {
        let mut orders = lock(&self.orders);
        orders.strikes += u64::from(struck);
        loop {
            if orders.striking && !orders.over {
                orders.idle = false;
                return Some(true);
            }
            if struck {
                return Some(false);
            }
            if orders.over {
                return None;
            }
            orders.idle = true;
            self.changed.notify_all();
            orders = self.changed.wait(orders).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

impl Drop for Campaign {
    fn drop(&mut self) {
        self.order(|orders| orders.over = true);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || !matches!(ended, Some(Err(_))), "the attack failed");
    }
}
