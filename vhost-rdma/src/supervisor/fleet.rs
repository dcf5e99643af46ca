//! A process for each network that has NICs.
//!
//! What NICs on RNICs share (who has which address of the host, the ways to other daemons and to
//! third-party hosts) is in a process as well, started when the first of them comes: see `outside`.
//! A network with NICs of both kinds has two processes, since who opens devices is in another
//! sandbox.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::cgroup::{Cgroup, CgroupLimits, Cgroups};
use super::estate::Estate;
use super::leaving::Leaving;
use super::lender::Lender;
use super::network::Network;
use super::outside::{Common, OutsideProcess, OutsideSettings};
use super::part::{Part, label, part};
use crate::network_process::{Figures, Start, VERSION};
use crate::node::{
    AttachError, Connection, Dataplane, NicConfig, NicStatus, Peer, ProcessStatus, Renewed,
    WorkerStatus,
};
use crate::store::{Heirloom, Store};
use crate::telemetry::LogFormat;
use crate::turns::Turns;
use crate::worker::TURN_BOUNDS;

/// What all network processes have in common.
#[derive(Debug, Clone)]
pub struct FleetSettings {
    /// Microseconds that a worker polls.
    pub poll_us: u32,
    /// Worker threads of each network's process.
    pub workers: u32,
    /// What each may use.
    pub limits: CgroupLimits,
    /// The daemon's own, which one daemon has at a time.
    pub runtime_dir: PathBuf,
    /// Form of the log.
    pub log_format: LogFormat,
    /// What is logged.
    pub log: Option<String>,
}

/// See the module.
pub struct Fleet {
    settings: Mutex<FleetSettings>,
    networks: Mutex<BTreeMap<Part, Arc<Network>>>,
    /// By NIC.
    homes: Mutex<BTreeMap<String, (Part, Arc<Network>)>>,
    /// In which NICs come and go, by VNI.
    turns: Turns<u32>,
    /// Networks without a NIC, whose processes have not ended yet.
    leaving: Leaving,
    /// How what NICs on RNICs share is.
    of_outside: OutsideSettings,
    outside: OnceLock<Arc<OutsideProcess>>,
    /// Held while it is started.
    starting_outside: Mutex<()>,
    /// Looked for when the first network's process comes.
    cgroups: OnceLock<Cgroups>,
    estate: Estate,
    /// The host's QPNs.
    lender: Arc<Lender>,
    /// Peers of all networks, for when there is someone who wants to know.
    peers: Mutex<BTreeMap<u32, Vec<Peer>>>,
    /// The longest of those that an earlier daemon handed down.
    upgrade_pause: Mutex<Duration>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").finish_non_exhaustive()
    }
}

impl Fleet {
    /// No process yet; `of_outside` is how what NICs on RNICs share will be.
    ///
    /// # Errors
    /// The host has no random numbers.
    pub fn new(
        settings: FleetSettings,
        estate: Estate,
        of_outside: OutsideSettings,
    ) -> io::Result<Self> {
        let lender = Lender::new(estate.take_qpns())?;
        Ok(Self {
            settings: Mutex::new(settings),
            networks: Mutex::default(),
            homes: Mutex::default(),
            turns: Turns::default(),
            leaving: Leaving::default(),
            of_outside,
            outside: OnceLock::new(),
            starting_outside: Mutex::default(),
            cgroups: OnceLock::new(),
            estate,
            lender,
            peers: Mutex::default(),
            upgrade_pause: Mutex::default(),
        })
    }

    /// Starts the process of what NICs on RNICs share, if there is none.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn outside(&self) -> Result<&Arc<OutsideProcess>, AttachError> {
        // Two networks may want it at once.
        let _alone = lock(&self.starting_outside);
        if let Some(outside) = self.outside.get() {
            return Ok(outside);
        }
        let common = {
            let settings = lock(&self.settings);
            Common { log_format: settings.log_format, log: settings.log.clone() }
        };
        let cgroup = self.cgroup(super::outside::LABEL)?;
        let started = OutsideProcess::start(&self.of_outside, common, cgroup)?;
        // Who changes them waits, or tells it.
        let peers = lock(&self.peers);
        let outside = self.outside.get_or_init(|| Arc::new(started));
        for (vni, peers) in &*peers {
            outside.set_peers(*vni, peers);
        }
        Ok(outside)
    }

    /// Has all processes log by this filter, and those to come.
    pub fn log(&self, filter: Option<&str>) {
        lock(&self.settings).log = filter.map(str::to_owned);
        for network in self.networks() {
            network.log(filter);
        }
        if let Some(outside) = self.outside.get() {
            outside.log(filter);
        }
    }

    fn cgroups(&self) -> &Cgroups {
        self.cgroups.get_or_init(|| {
            let settings = lock(&self.settings);
            Cgroups::open(settings.limits, &settings.runtime_dir)
        })
    }

    fn cgroup(&self, label: &str) -> Result<Cgroup, AttachError> {
        let made = self.cgroups().make(label);
        made.map_err(|error| AttachError::Resources(format!("its process: {error}")))
    }

    fn networks(&self) -> Vec<Arc<Network>> {
        lock(&self.networks).values().cloned().collect()
    }

    /// Those of one network.
    fn parts(&self, vni: u32) -> Vec<Arc<Network>> {
        let networks = lock(&self.networks);
        [(vni, false), (vni, true)].iter().filter_map(|part| networks.get(part).cloned()).collect()
    }

    fn home(&self, name: &str) -> Option<Arc<Network>> {
        lock(&self.homes).get(name).map(|(_, network)| network.clone())
    }

    /// The process of a network, started if it is the first NIC's.
    fn network(&self, nic: &NicConfig) -> Result<Arc<Network>, AttachError> {
        let part = part(nic);
        if let Some(network) = lock(&self.networks).get(&part) {
            return Ok(network.clone());
        }
        let (label, rnic) = (label(nic), part.1);
        let outside = rnic.then(|| Ok((nic.vni, self.outside()?.clone()))).transpose()?;
        let FleetSettings { poll_us, workers, log_format, log, .. } = lock(&self.settings).clone();
        let (version, network, qpns) = (VERSION, label.clone(), self.lender.key());
        let start = Start { version, network, workers, poll_us, log_format, log, qpns, rnic };
        // Hardware has QPNs of its own.
        let lease = if rnic { self.lender.nothing() } else { self.lender.lease(&label) };
        let own = (self.estate.store.clone(), self.cgroup(&label)?);
        let network = Arc::new(Network::start(start, own, (lease, outside))?);
        if let Some(state) = self.estate.state(&label) {
            network.load(&state);
        }
        if rnic {
            let peers = lock(&self.peers).get(&nic.vni).cloned().unwrap_or_default();
            tell_peers(&network, nic.vni, &peers);
        }
        lock(&self.networks).insert(part, network.clone());
        Ok(network)
    }

    /// Ends a network's process. Nobody waits long for it: another of its name may come before it
    /// has ended, and shares nothing with it. Only the end of the daemon waits, for all at once.
    fn end(&self, part: Part, network: &Arc<Network>) {
        lock(&self.networks).remove(&part);
        if network.is_ending() {
            return;
        }
        network.ending();
        self.leaving.let_go(network.name(), Waiter(network.clone()));
    }
}

/// Waits for the end of a network that is told to end, so that others who have it do not.
struct Waiter(Arc<Network>);

impl Drop for Waiter {
    fn drop(&mut self) {
        self.0.join();
    }
}

impl Dataplane for Fleet {
    fn add(&self, nic: &NicConfig) -> Result<(), AttachError> {
        self.add_all(&[nic]).pop().unwrap_or_else(|| Err(AttachError::untold()))
    }

    fn add_all(&self, nics: &[&NicConfig]) -> Vec<Result<(), AttachError>> {
        let Some(first) = nics.first() else { return Vec::new() };
        self.turns.of(&first.vni, || {
            let parts = nics.chunk_by(|one, other| part(one) == part(other));
            parts.flat_map(|nics| self.add_to_part(nics)).collect()
        })
    }

    fn leaves(&self, name: &str) {
        if let Some(network) = self.home(name) {
            network.leaves(name);
        }
    }

    fn remove(&self, name: &str) {
        let Some((part, network)) = lock(&self.homes).remove(name) else { return };
        self.turns.of(&part.0, || {
            if !network.remove(name) {
                self.end(part, &network);
            }
        });
    }

    fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        match self.home(&nic.name) {
            Some(network) => network.update(nic),
            None => Ok(()),
        }
    }

    fn connect(&self, name: &str, vmm: UnixStream) -> io::Result<Box<dyn Connection>> {
        match self.home(name) {
            Some(network) => network.connect(name, &vmm),
            None => Err(io::Error::other("there is no such NIC")),
        }
    }

    fn enter(&self, name: &str, process: &UnixStream, waits: &dyn Fn() -> bool) -> io::Result<()> {
        match self.home(name) {
            Some(network) => network.enter(name, process, waits),
            None => Err(io::Error::other("there is no such NIC")),
        }
    }

    fn take_up(&self, nic: &NicConfig) -> Option<(UnixStream, Box<dyn Connection>)> {
        let left = self.estate.claim(nic)?;
        let network = self.home(&nic.name)?;
        let stream = left.stream.try_clone();
        let resumed = stream.and_then(|stream| Ok((stream, network.resume(&nic.name, left)?)));
        resumed
            .inspect_err(|error| {
                tracing::error!(nic = nic.name, %error, "the VMM's session cannot go on");
            })
            .ok()
    }

    fn complete(&self, vni: u32) {
        let paused = self.parts(vni).iter().filter_map(|network| network.run()).max();
        let mut longest = lock(&self.upgrade_pause);
        *longest = paused.unwrap_or_default().max(*longest);
    }

    fn upgrade_pause(&self) -> Duration {
        *lock(&self.upgrade_pause)
    }

    fn settled(&self) {
        self.estate.close();
        // What was left by one whose networks are gone goes, too.
        self.cgroups();
        self.lender.close();
    }

    fn ending(&self) {
        self.networks().iter().for_each(|network| network.ending());
    }

    fn hand_down(&self) -> Vec<Heirloom> {
        // Nobody makes or ends a NIC any more.
        std::mem::forget(self.turns.whole());
        let store = Store::own();
        // The next daemon listens where its process does.
        if let Some(outside) = self.outside.get() {
            outside.end();
        }
        let networks = self.networks();
        // Side by side: all stand still until the last one is there.
        std::thread::scope(|scope| {
            for network in &networks {
                let hand_down = || {
                    if let Err(error) = network.hand_down(&store) {
                        tracing::error!(network = network.name(), %error, "it is not handed down");
                    }
                };
                let thread = std::thread::Builder::new().name("hand-down".to_owned());
                if thread.spawn_scoped(scope, hand_down).is_err() {
                    hand_down();
                }
            }
        });
        store.take()
    }

    fn would_lose(&self) -> Vec<String> {
        self.networks().into_iter().flat_map(|network| network.would_lose()).collect()
    }

    fn set_peers(&self, vni: u32, peers: &[Peer]) {
        // Only NICs on RNICs leave the host.
        let mut all = lock(&self.peers);
        all.insert(vni, peers.to_vec());
        if let Some(outside) = self.outside.get() {
            outside.set_peers(vni, peers);
        }
        drop(all);
        let network = lock(&self.networks).get(&(vni, true)).cloned();
        if let Some(network) = network {
            tell_peers(&network, vni, peers);
        }
    }

    fn forget_network(&self, vni: u32) -> Result<(), AttachError> {
        let mut all = lock(&self.peers);
        all.remove(&vni);
        if let Some(outside) = self.outside.get() {
            outside.forget_network(vni);
        }
        drop(all);
        Ok(())
    }

    fn status(&self, name: &str) -> NicStatus {
        match self.home(name) {
            Some(network) => network.status(name),
            None => NicStatus::default(),
        }
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        let all = self.networks().into_iter();
        all.filter_map(|network| Some(worker(network.name(), &network.figures()?))).collect()
    }

    fn renew(&self, vni: u32) -> Result<Renewed, AttachError> {
        self.turns.of(&vni, || self.renew_now(vni))
    }

    fn processes(&self) -> Vec<ProcessStatus> {
        let networks = self.networks();
        let networks = networks.iter().map(|network| network.process());
        networks.chain(self.outside.get().map(|outside| outside.process())).collect()
    }
}

impl Fleet {
    /// Adds NICs that one process serves.
    fn add_to_part(&self, mut nics: &[&NicConfig]) -> Vec<Result<(), AttachError>> {
        let mut results = Vec::with_capacity(nics.len());
        while let Some((first, others)) = nics.split_first() {
            let network = match self.network(first) {
                Ok(network) => network,
                Err(error) => {
                    // The next may have more luck.
                    results.push(Err(error));
                    nics = others;
                    continue;
                }
            };
            let added = network.add_all(nics);
            for (nic, _) in nics.iter().zip(&added).filter(|(_, added)| added.is_ok()) {
                lock(&self.homes).insert(nic.name.clone(), (part(nic), network.clone()));
            }
            if network.is_empty() {
                self.end(part(first), &network);
            }
            results.extend(added);
            break;
        }
        results
    }

    fn renew_now(&self, vni: u32) -> Result<Renewed, AttachError> {
        let renewed = self.parts(vni).into_iter().map(|network| network.renew());
        let all = renewed.reduce(|one, other| {
            let (one, other) = (one?, other?);
            let join = |a: Vec<String>, b: Vec<String>| [a, b].concat();
            let (kept, lost) = (join(one.kept, other.kept), join(one.lost, other.lost));
            Ok(Renewed { kept, lost, pause: one.pause.max(other.pause) })
        });
        let none =
            || AttachError::Resources("no process serves this network: it has no NIC".to_owned());
        all.ok_or_else(none)?
    }
}

/// A process that is not told goes on with those that it had.
fn tell_peers(network: &Network, vni: u32, peers: &[Peer]) {
    if let Err(error) = network.set_peers(vni, peers) {
        tracing::error!(network = network.name(), %error, "its peers stay as they were");
    }
}

fn worker(network: &str, figures: &Figures) -> WorkerStatus {
    let seconds = |nanos| Duration::from_nanos(nanos).as_secs_f64();
    let bounds = TURN_BOUNDS.iter().copied().map(seconds).chain([f64::INFINITY]);
    WorkerStatus {
        network: network.to_owned(),
        turns: bounds.zip(figures.turns.iter().copied()).collect(),
        busy: seconds(figures.busy),
        longest: seconds(figures.longest),
        charged: seconds(figures.charged),
        stalled: seconds(figures.stalled),
    }
}
