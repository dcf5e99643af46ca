//! A process for each network that has NICs.
//!
//! Networks on the daemon's own engine are served so. NICs on an RNIC are not: they open device
//! nodes and speak to other daemons whenever they want, and all of them share what rdma_cm knows of
//! the host. They are served by a data plane in the supervisor itself, which is made when the first
//! of them comes.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::cgroup::{CgroupLimits, Cgroups};
use super::estate::Estate;
use super::lender::Lender;
use super::network::Network;
use crate::dataplane::LocalDataplane;
use crate::network_process::{Figures, Start, VERSION};
use crate::node::{
    AttachError, Backing, Connection, Dataplane, NicConfig, NicStatus, Peer, ProcessStatus,
    Renewed, WorkerStatus,
};
use crate::store::{Heirloom, Store};
use crate::telemetry::LogFormat;
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

/// Makes the data plane of NICs on RNICs.
pub type MakeOwn = Box<dyn Fn() -> Result<LocalDataplane, AttachError> + Send + Sync>;

#[derive(Clone)]
enum Home {
    Own,
    Network(Arc<Network>),
}

/// See the module.
pub struct Fleet {
    settings: Mutex<FleetSettings>,
    /// By VNI.
    networks: Mutex<BTreeMap<u32, Arc<Network>>>,
    /// By NIC.
    homes: Mutex<BTreeMap<String, (u32, Home)>>,
    /// Held while NICs come and go.
    changing: Mutex<()>,
    make_own: MakeOwn,
    own: OnceLock<LocalDataplane>,
    /// Looked for when the first network's process comes.
    cgroups: OnceLock<Cgroups>,
    estate: Estate,
    /// The host's QPNs.
    lender: Arc<Lender>,
    /// Peers of all networks, for when there is someone who wants to know.
    peers: Mutex<BTreeMap<u32, Vec<Peer>>>,
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
    /// No process yet; `make_own` makes what serves NICs on RNICs.
    ///
    /// # Errors
    /// The host has no random numbers.
    pub fn new(settings: FleetSettings, estate: Estate, make_own: MakeOwn) -> io::Result<Self> {
        let lender = Lender::new(estate.take_qpns())?;
        Ok(Self {
            settings: Mutex::new(settings),
            networks: Mutex::default(),
            homes: Mutex::default(),
            changing: Mutex::default(),
            make_own,
            own: OnceLock::new(),
            cgroups: OnceLock::new(),
            estate,
            lender,
            peers: Mutex::default(),
        })
    }

    /// Makes what serves NICs on RNICs, if it is not there.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn own(&self) -> Result<&LocalDataplane, AttachError> {
        if let Some(own) = self.own.get() {
            return Ok(own);
        }
        let made = (self.make_own)()?;
        let own = self.own.get_or_init(|| made);
        for (vni, peers) in &*lock(&self.peers) {
            own.set_peers(*vni, peers);
        }
        Ok(own)
    }

    /// Has all processes log by this filter, and those to come.
    pub fn log(&self, filter: Option<&str>) {
        lock(&self.settings).log = filter.map(str::to_owned);
        for network in self.networks() {
            network.log(filter);
        }
    }

    fn cgroups(&self) -> &Cgroups {
        self.cgroups.get_or_init(|| {
            let settings = lock(&self.settings);
            Cgroups::open(settings.limits, &settings.runtime_dir)
        })
    }

    fn networks(&self) -> Vec<Arc<Network>> {
        lock(&self.networks).values().cloned().collect()
    }

    fn home(&self, name: &str) -> Option<Home> {
        lock(&self.homes).get(name).map(|(_, home)| home.clone())
    }

    /// The process of a network, started if it is the first NIC's.
    fn network(&self, nic: &NicConfig) -> Result<Arc<Network>, AttachError> {
        if let Some(network) = lock(&self.networks).get(&nic.vni) {
            return Ok(network.clone());
        }
        let FleetSettings { poll_us, workers, log_format, log, .. } = lock(&self.settings).clone();
        let network = nic.network.clone();
        let qpns = self.lender.key();
        let start = Start { version: VERSION, network, workers, poll_us, log_format, log, qpns };
        let lease = self.lender.lease(&nic.network);
        let own = (self.estate.store.clone(), self.cgroups().make(&nic.network));
        let network = Arc::new(Network::start(start, own, lease)?);
        if let Some(state) = self.estate.state(&nic.network) {
            network.load(&state);
        }
        lock(&self.networks).insert(nic.vni, network.clone());
        Ok(network)
    }
}

impl Dataplane for Fleet {
    fn add(&self, nic: &NicConfig) -> Result<(), AttachError> {
        let _alone = lock(&self.changing);
        let home = if nic.backing == Backing::Soft {
            let network = self.network(nic)?;
            network.add(nic).inspect_err(|_| {
                if network.is_empty() {
                    lock(&self.networks).remove(&nic.vni);
                }
            })?;
            Home::Network(network)
        } else {
            self.own()?.add(nic)?;
            Home::Own
        };
        lock(&self.homes).insert(nic.name.clone(), (nic.vni, home));
        Ok(())
    }

    fn remove(&self, name: &str) {
        let _alone = lock(&self.changing);
        let Some((vni, home)) = lock(&self.homes).remove(name) else { return };
        match (home, self.own.get()) {
            (Home::Network(network), _) => {
                if !network.remove(name) {
                    lock(&self.networks).remove(&vni);
                }
            }
            (Home::Own, Some(own)) => own.remove(name),
            (Home::Own, None) => {}
        }
    }

    fn update(&self, nic: &NicConfig) -> Result<(), AttachError> {
        match self.home(&nic.name) {
            Some(Home::Network(network)) => network.update(nic),
            Some(Home::Own) => self.own()?.update(nic),
            None => Ok(()),
        }
    }

    fn connect(&self, name: &str, vmm: UnixStream) -> io::Result<Box<dyn Connection>> {
        match self.home(name) {
            Some(Home::Network(network)) => network.connect(name, &vmm),
            Some(Home::Own) => self.own().map_err(io::Error::other)?.connect(name, vmm),
            None => Err(io::Error::other("there is no such NIC")),
        }
    }

    fn enter(&self, name: &str, process: UnixStream) -> io::Result<()> {
        match self.home(name) {
            Some(Home::Network(network)) => network.enter(name, &process),
            Some(Home::Own) => self.own().map_err(io::Error::other)?.enter(name, process),
            None => Err(io::Error::other("there is no such NIC")),
        }
    }

    fn take_up(&self, nic: &NicConfig) -> Option<(UnixStream, Box<dyn Connection>)> {
        let left = self.estate.claim(nic)?;
        let Some(Home::Network(network)) = self.home(&nic.name) else { return None };
        let stream = left.stream.try_clone();
        let resumed = stream.and_then(|stream| Ok((stream, network.resume(&nic.name, left)?)));
        resumed
            .inspect_err(|error| {
                tracing::error!(nic = nic.name, %error, "the VMM's session cannot go on");
            })
            .ok()
    }

    fn settled(&self) {
        self.estate.close();
        // What was left by one whose networks are gone goes, too.
        self.cgroups();
        self.lender.close();
        self.networks().iter().for_each(|network| network.run());
    }

    fn hand_down(&self) -> Vec<Heirloom> {
        // Nobody makes or ends a NIC any more.
        std::mem::forget(lock(&self.changing));
        let store = Store::own();
        for network in self.networks() {
            if let Err(error) = network.hand_down(&store) {
                tracing::error!(network = network.name(), %error, "it is not handed down");
            }
        }
        store.take()
    }

    fn would_lose(&self) -> Vec<String> {
        let own = self.own.get().map(Dataplane::would_lose).unwrap_or_default();
        let far = self.networks().into_iter().flat_map(|network| network.would_lose());
        own.into_iter().chain(far).collect()
    }

    fn set_peers(&self, vni: u32, peers: &[Peer]) {
        // Only NICs on RNICs leave the host.
        lock(&self.peers).insert(vni, peers.to_vec());
        if let Some(own) = self.own.get() {
            own.set_peers(vni, peers);
        }
    }

    fn forget_network(&self, vni: u32) -> Result<(), AttachError> {
        lock(&self.peers).remove(&vni);
        self.own.get().map_or(Ok(()), |own| own.forget_network(vni))
    }

    fn status(&self, name: &str) -> NicStatus {
        match self.home(name) {
            Some(Home::Network(network)) => network.status(name),
            Some(Home::Own) => self.own.get().map(|own| own.status(name)).unwrap_or_default(),
            None => NicStatus::default(),
        }
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        let mut workers = self.own.get().map(Dataplane::workers).unwrap_or_default();
        let far = self.networks().into_iter();
        workers.extend(far.filter_map(|network| Some(worker(network.name(), &network.figures()?))));
        workers
    }

    fn renew(&self, vni: u32) -> Result<Renewed, AttachError> {
        let _alone = lock(&self.changing);
        let network = lock(&self.networks).get(&vni).cloned();
        let none = "no process serves this network: it has no NIC, or its NICs are on an RNIC";
        network.ok_or_else(|| AttachError::Resources(none.to_owned()))?.renew()
    }

    fn processes(&self) -> Vec<ProcessStatus> {
        self.networks().into_iter().map(|network| network.process()).collect()
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
