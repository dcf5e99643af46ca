//! What all cases share: a daemon, a villain's NIC, two bystanders, and the verdict.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use virtual_guest::attack::Attack;
use virtual_guest::backing::rules;
use virtual_guest::daemon::{DaemonOptions, backing};
use virtual_guest::guest::GuestConfig;
use virtual_guest::qp::{Path, QpSpec, SendWr};
use virtual_guest::spec::qpt;
use virtual_guest::trips::{Queues, Trips, most};
use virtual_guest::vitals::Vitals;
use virtual_guest::world::{Door, Node, Vacancy, World, pattern};

/// The most that a turn may be charged, in seconds: by the daemon's own count of the work in it,
/// which does not know how fast this machine is or who else runs on it. How long turns *last* is a
/// benchmark of the optimized build: `cargo xtask bench isolation`.
const CHARGED: f64 = 0.001;
/// An attack that lasts longer than this must have left its bystanders some time; scheduling alone
/// can take that of a shorter one.
const LONG: Duration = Duration::from_secs(10);

/// How long one access to memory may take that the kernel holds up, as in the isolation benchmark;
/// or one call for a descriptor that 100 000 entries wait for, before a worker knows of it
/// (docs/THREAT_MODEL.md: "a quarter of a second of its worker, once").
pub(crate) const BLOCKED: Duration = Duration::from_secs(1);
/// Attacks with such a descriptor.
const CROWDED: [&str; 2] = ["waiters", "crowded_kicks"];
/// How long the bystanders are looked at before the villain comes.
const QUIET: Duration = Duration::from_millis(100);

/// What the daemon may take for a villain, if its case says nothing else.
pub(crate) const BUDGET: u64 = 12 << 20;
/// A connection that gives up soon: at once, or within 270 ms where a machine is emulated.
pub(crate) fn hasty() -> Path {
    let timeout = if virtual_guest::daemon::patience() > 1 { 15 } else { 6 };
    Path { timeout, retry_cnt: 1, rnr_retry: 1, ..Path::default() }
}
/// How long anything may take that comes at all.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A daemon with a villain's NIC and two bystanders.
pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) place: Vacancy,
    bystanders: Arc<Bystanders>,
    traffic: Option<JoinHandle<()>>,
    /// The 99th percentile of the bystanders' requests before the villain came.
    alone: Duration,
    before: Vitals,
    /// Bytes that the daemon had before the villain came.
    memory: AtomicU64,
    /// What the daemon has for the villain's NIC while nobody is there.
    empty: serde_json::Value,
    budget: u64,
}

/// What is known of the bystanders' traffic.
#[derive(Default)]
struct Bystanders {
    /// Verified messages.
    messages: AtomicU64,
    stop: AtomicBool,
    /// What their requests took since this was asked.
    trips: Mutex<Trips>,
}

impl Bystanders {
    /// What requests took since the last time.
    fn p99(&self) -> (Duration, Duration) {
        let mut trips = self.trips.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *trips).p99()
    }
}

/// Runs a case.
#[track_caller]
pub(crate) fn case(act: impl Fn(&Scene)) {
    case_within(BUDGET, act);
}

/// As [`case`], with another budget of memory.
#[track_caller]
pub(crate) fn case_within(budget: u64, act: impl Fn(&Scene)) {
    let scene = Scene::new(budget);
    act(&scene);
    scene.verdict();
}

impl Scene {
    pub(crate) fn new(budget: u64) -> Self {
        if let Some(device) = crate::BACKING {
            virtual_guest::daemon::carry_by(device);
        }
        // Another network must share the worker, too.
        let args = vec!["--workers".to_owned(), "1".to_owned()];
        let options = DaemonOptions { args, ..DaemonOptions::default() };
        let world = World::with(&options, Duration::from_secs(240));
        let (a, b) = bystanders(&world);
        let place = world.vacancy_by(crate::DOOR, "net", &[]);
        // What a connection takes for the first time (threads, their allocators) is no villain's
        // doing.
        moves_a_word(&place.enter(GuestConfig::default()).expect("a first connection"));
        let empty = left_behind(&world, &place);
        let bystanders = Arc::new(Bystanders::default());
        let own = Arc::clone(&bystanders);
        let queues = Queues::of_network(&world.daemon, network());
        let traffic = std::thread::spawn(move || bystand(&a, &b, queues, &own));
        let mut scene = Self {
            world,
            place,
            bystanders,
            traffic: Some(traffic),
            alone: Duration::ZERO,
            before: Vitals::default(),
            memory: AtomicU64::new(0),
            empty,
            budget,
        };
        scene.others_go_on();
        let _first = scene.bystanders.p99();
        std::thread::sleep(QUIET * virtual_guest::daemon::patience());
        scene.alone = scene.bystanders.p99().0;
        scene.before = scene.world.daemon.vitals();
        scene.networks_are_there();
        scene
    }

    /// Networks have come since: what the process of one takes by itself is no villain's doing.
    pub(crate) fn networks_are_there(&self) {
        self.memory.fetch_max(self.world.daemon.vitals().memory, Ordering::Relaxed);
    }

    /// The villain, its driver ready.
    #[track_caller]
    pub(crate) fn villain(&self) -> Node {
        self.villain_with(GuestConfig::default())
    }

    /// As [`Self::villain`], another guest.
    #[track_caller]
    pub(crate) fn villain_with(&self, config: GuestConfig) -> Node {
        self.place.enter(config).unwrap_or_else(|e| panic!("{e}\n{}", self.world.daemon.log()))
    }

    /// Verified messages of the bystanders so far.
    pub(crate) fn messages(&self) -> u64 {
        self.bystanders.messages.load(Ordering::Relaxed)
    }

    /// The bystanders move data, and no worker is stuck.
    #[track_caller]
    pub(crate) fn others_go_on(&self) {
        let patience = SOON * virtual_guest::daemon::patience();
        let (from, deadline) = (self.messages(), Instant::now() + patience);
        while self.messages() < from + 10 {
            let ended = self.traffic.as_ref().is_none_or(JoinHandle::is_finished);
            assert!(!ended, "the bystanders' traffic failed");
            assert!(
                Instant::now() < deadline,
                "the bystanders stand still; a worker is in its turn for {:.3} s",
                self.world.daemon.turns().stalled
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Runs `attack` and checks that the bystanders move data: meanwhile, if it takes long, and
    /// after it in any case; and that they wait for it no longer than without it, or little more.
    #[track_caller]
    pub(crate) fn during<R>(&self, attack: impl FnOnce() -> R) -> R {
        self.during_within(most(self.alone), attack)
    }

    /// As [`Self::during`], with what the 99th percentile of the bystanders' requests may be.
    #[track_caller]
    pub(crate) fn during_within<R>(&self, bound: Duration, attack: impl FnOnce() -> R) -> R {
        let (from, begin) = (self.messages(), Instant::now());
        let _before = self.bystanders.p99();
        let result = attack();
        let (moved, took) = (self.messages() - from, begin.elapsed());
        let long = LONG * virtual_guest::daemon::patience();
        assert!(moved > 0 || took < long, "the bystanders moved nothing in {took:?}");
        self.others_go_on();
        // With the request that was under way when the attack ended.
        let (p99, longest) = self.bystanders.p99();
        let said = format!("{:?} alone, {p99:?} under attack, at most {longest:?}", self.alone);
        println!("99 of 100 requests of the bystanders: {said}, in {took:?}");
        // What an RNIC makes its users wait is its own affair.
        let ours = !rules().moves_data || backing() == "soft";
        assert!(!ours || p99 <= bound, "the bystanders' requests took {said}; not {bound:?}");
        result
    }

    /// What the 99th percentile of the bystanders' requests may be beside an attack of the library
    /// from another network: where the kernel may hold up one access or call, and the bystanders
    /// are on the same worker, as long as that may be.
    pub(crate) fn bound_beside(&self, attack: &Attack) -> Duration {
        let is_shared = self.world.daemon.pid_of(network()).is_none();
        let blocks = attack.blocks || CROWDED.contains(&attack.name);
        if blocks && is_shared { BLOCKED } else { most(self.alone) }
    }

    /// What the daemon says of the villain's NIC.
    pub(crate) fn state(&self) -> String {
        let shown = self.world.daemon.show_nic(&self.place.name);
        shown["session"].as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the daemon says so of the villain's NIC.
    #[track_caller]
    pub(crate) fn await_state(&self, wanted: &str) {
        let deadline = Instant::now() + SOON;
        while self.state() != wanted {
            assert!(
                Instant::now() < deadline,
                "the NIC is {:?}, not {wanted}\n{}",
                self.world.daemon.show_nic(&self.place.name),
                self.world.daemon.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The NIC is as good as new for whoever connects next.
    #[track_caller]
    pub(crate) fn works_again(&self) {
        let node = self.villain();
        moves_a_word(&node);
        node.guest.disconnect();
    }

    /// The daemon has not taken more memory of its own for the villain than the case allows.
    #[track_caller]
    pub(crate) fn is_within_its_budget(&self) {
        let taken = self.world.daemon.vitals().memory;
        let taken = taken.saturating_sub(self.memory.load(Ordering::Relaxed));
        let budget = self.budget;
        assert!(
            taken <= budget,
            "the daemon took {taken} bytes for the villain, {budget} are its budget"
        );
    }

    /// After the case.
    #[track_caller]
    pub(crate) fn verdict(mut self) {
        self.others_go_on();
        self.is_within_its_budget();
        let charged = self.world.daemon.turns().charged;
        assert!(charged <= CHARGED, "a turn was charged {:.3} ms", charged * 1e3);
        if crate::DOOR == Door::Process {
            // Who comes while others are still there finds what their life has left in tables.
            self.await_state("absent");
        }
        self.works_again();
        self.await_state("absent");
        self.bystanders.stop.store(true, Ordering::Relaxed);
        let traffic = self.traffic.take().expect("it was started");
        assert!(traffic.join().is_ok(), "the bystanders' traffic failed");
        let shown = self.world.daemon.show_nic(&self.place.name);
        for (kind, count) in shown["objects"].as_object().expect("objects") {
            assert_eq!(*count, self.empty[kind], "{kind} of the villain are left");
        }
        // Threads that were called for something stay for a second more.
        let deadline = Instant::now() + SOON;
        loop {
            let after = self.world.daemon.vitals();
            if after.files <= self.before.files + 4 && after.threads <= self.before.threads + 2 {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "descriptors or threads are left: {:?}, then {after:?}",
                self.before
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.bystanders.stop.store(true, Ordering::Relaxed);
        if let Some(traffic) = self.traffic.take() {
            let _ended = traffic.join();
        }
    }
}

/// The bystanders' network.
fn network() -> &'static str {
    if rules().moves_data { "net" } else { "bystanders" }
}

/// One that came by the villain's door and a guest, of the villain's network; of another one where
/// the villain's NIC moves nothing, and nobody could tell what it did to them.
fn bystanders(world: &World) -> (Node, Node) {
    if rules().moves_data {
        let place = world.vacancy_by(crate::DOOR, "net", &[]);
        let one = place.enter(GuestConfig::default());
        return (one.expect("a bystander"), world.node());
    }
    world.daemon.add_network(network(), 300);
    let node = || world.node_with(network(), &["--backing", "soft"], GuestConfig::default());
    (node(), node())
}

/// A NIC does what it is there for.
#[track_caller]
fn moves_a_word(node: &Node) {
    let mut end = node.rc();
    end.qp.connect(end.address(), &Path::default()).expect("to itself");
    let word = node.area(8);
    end.run_ok(&SendWr::write(1, &[], word.addr(0), word.rkey()).inline(&[9; 8]));
    if rules().moves_data {
        assert_eq!(word.bytes(), [9; 8]);
    }
}

/// What the daemon keeps for a NIC when its first user has gone: nothing of a guest, and of
/// processes what it has for all that may come.
fn left_behind(world: &World, place: &Vacancy) -> serde_json::Value {
    let deadline = Instant::now() + SOON;
    loop {
        let shown = world.daemon.show_nic(&place.name);
        let objects = shown["objects"].as_object().expect("objects");
        let mut held = objects.iter().filter(|(kind, _)| *kind != "kept_bytes");
        if shown["session"] == "absent" && held.all(|(_, count)| count == 0) {
            assert!(place.door == Door::Process || shown["objects"]["kept_bytes"] == 0);
            return shown["objects"].clone();
        }
        assert!(Instant::now() < deadline, "a first connection does not end: {shown}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Moves data from `a` to `b` by all kinds of requests and compares it, until told to stop.
fn bystand(a: &Node, b: &Node, queues: Queues, seen: &Bystanders) {
    const LEN: u64 = 8192;
    let queues = queues.and_mine();
    let spec = QpSpec::new(qpt::RC);
    let (mut x, mut y) = (a.end(&spec), b.end(&spec));
    x.connect(&y, &Path::default());
    y.connect(&x, &Path::default());
    let (source, back, target) = (a.area(LEN), a.area(LEN), b.area(LEN));
    let timed = |act: &mut dyn FnMut()| {
        let took = queues.time(act);
        seen.trips.lock().unwrap_or_else(PoisonError::into_inner).record(took);
    };
    let mut n = 0;
    while !seen.stop.load(Ordering::Relaxed) {
        let bytes = pattern(n, LEN as usize);
        source.set(&bytes);
        let write = SendWr::write(n, &[source.sge()], target.addr(0), target.rkey());
        timed(&mut || _ = x.run_ok(&write));
        assert_eq!(target.bytes(), bytes);
        let read = SendWr::read(n, &[back.sge()], target.addr(0), target.rkey());
        timed(&mut || _ = x.run_ok(&read));
        assert_eq!(back.bytes(), bytes);
        target.set(&[0; LEN as usize]);
        y.qp.post_recv(n, &[target.sge()]);
        timed(&mut || {
            x.run_ok(&SendWr::send(n, &[source.sge()]));
            y.rcq.ok();
        });
        assert_eq!(target.bytes(), bytes);
        n += 1;
        seen.messages.fetch_add(3, Ordering::Relaxed);
    }
}

/// A source of bytes that repeats with its seed.
pub(crate) struct Noise(pub u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
