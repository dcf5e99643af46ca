//! The data plane of one process: NICs come, change and go, and VMMs and processes are handed in.
//!
//! It gives each NIC its place on a worker and each who comes to the front end that its NIC is for:
//! `device` for VMMs, `process` for processes. Neither knows of the other's guests, nor of this.

#![forbid(unsafe_code)]

mod balance;
mod cm_bridge;
mod mover;
mod neighbours;
mod outside;
mod rnic;
mod saved;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::mover::Mover;
pub use self::neighbours::Searches;
pub use self::outside::Outside;
pub(crate) use self::outside::entries;
use crate::aside::drop_aside;
use crate::device::connection::Connection;
use crate::device::events::NoPort;
use crate::device::nic::{self, Nic, PATIENCE};
use crate::device::queues::QueueLayout;
use crate::device::saved::SavedSession;
use crate::device::{Forgetful, Journal, Kept};
use crate::node::{
    self, AttachError, Dataplane, Guests, KICK_QUEUES, NicConfig, NicStatus, Peer, Session,
    WorkerStatus,
};
use crate::process::{self, House};
use crate::qpn::Pool;
use crate::rnic::{Directory, Uplink};
use crate::watch::LateWatch;
use crate::worker::{Beat, Placement, TURN_BOUNDS, WorkerConfig, Workers};

/// Between two looks whether somebody still waits.
const LOOK: Duration = Duration::from_millis(100);

/// One NIC.
struct Placed {
    nic: Arc<Nic>,
    vni: u32,
    /// Where its processes are; none for a NIC of VMs.
    house: Option<Arc<House>>,
}

struct State {
    nics: BTreeMap<String, Placed>,
    placement: Placement,
    /// Sessions that an earlier process saved, by NIC, until they go on.
    saved: BTreeMap<String, SavedSession>,
    /// NICs whose sessions do.
    loaded: Vec<String>,
}

/// Serves NICs with a pool of workers, all in this process.
pub struct LocalDataplane {
    state: Arc<Mutex<State>>,
    /// What moves NICs between workers that serve one network: from its first NIC on, until they
    /// are to stay where they are.
    mover: Mutex<Moving>,
    /// What waits for VMMs, once there was one: its process has given away what it had by then.
    watch: LateWatch,
    /// NICs on RNICs, whatever worker they are on.
    directory: Arc<Directory>,
    /// The ways out of this host; none where another process has them.
    outside: Option<Arc<Outside>>,
    // After `state`: NICs end on their workers.
    workers: Workers,
}

/// Whether NICs move.
enum Moving {
    /// They will.
    Later,
    Now(#[allow(dead_code, reason = "it is its life that counts")] Mover),
    Never,
}

impl std::fmt::Debug for LocalDataplane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalDataplane").field("workers", &self.workers).finish_non_exhaustive()
    }
}

impl LocalDataplane {
    /// Starts the workers; there are no NICs yet. No other process of this host serves any.
    ///
    /// # Errors
    /// The host refuses a thread, an eventfd, or random numbers.
    pub fn start(config: WorkerConfig) -> io::Result<Self> {
        Self::start_with(config, Arc::default())
    }

    /// As [`Self::start`], with ways out of this host.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(config: WorkerConfig, outside: Arc<Outside>) -> io::Result<Self> {
        let directory = outside.directory().clone();
        let mut plane = Self::with(Workers::start(config)?, config.spread, directory);
        plane.outside = Some(outside);
        Ok(plane)
    }

    /// As [`Self::start`], beside other processes: `qpns` is what this one has.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_beside(config: WorkerConfig, qpns: &Arc<Pool>) -> io::Result<Self> {
        Ok(Self::with(Workers::start_beside(config, qpns)?, config.spread, Arc::default()))
    }

    /// NICs of other networks are elsewhere, and so are the ways out of this host.
    pub fn set_uplink(&self, uplink: Arc<dyn Uplink>) {
        self.directory.set_uplink(uplink);
    }

    /// Who is on an RNIC here.
    #[must_use]
    pub const fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    fn with(workers: Workers, spread: bool, directory: Arc<Directory>) -> Self {
        let placement = Placement::new(workers.handles().len(), spread);
        let moves = spread && workers.handles().len() > 1;
        let mover = Mutex::new(if moves { Moving::Later } else { Moving::Never });
        let state = Arc::new(Mutex::new(State {
            nics: BTreeMap::new(),
            placement,
            saved: BTreeMap::new(),
            loaded: Vec::new(),
        }));
        Self { state, mover, watch: LateWatch::default(), directory, outside: None, workers }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Dataplane::connect`], and tells `journal` what the VMM says.
    ///
    /// # Errors
    /// As [`Dataplane::connect`].
    pub fn connect_noted(
        &self,
        name: &str,
        vmm: UnixStream,
        journal: Arc<dyn Journal>,
    ) -> io::Result<()> {
        let connection = Connection::start(&self.known(name)?, vmm, (journal, &self.watch.get()?))?;
        connection.let_go();
        Ok(())
    }

    /// Takes a process in, and waits for nobody: `told` hears of it.
    pub fn let_in(
        &self,
        name: &str,
        process: UnixStream,
        told: impl FnOnce(io::Result<()>) + Send + 'static,
    ) {
        if let Some(house) = self.house(name) {
            return process::enter(&house, process, told);
        }
        drop_aside(name, process);
        told(Err(io::Error::other("the NIC is not for processes")));
    }

    /// Goes on with a VMM's session whose process has ended; `kept` is what is left of it, and
    /// what that process has saved ([`Self::load`]).
    ///
    /// # Errors
    /// As [`Dataplane::connect`], or what is left makes no session.
    pub fn take_up(
        &self,
        name: &str,
        vmm: UnixStream,
        (kept, journal): (Vec<Kept>, Arc<dyn Journal>),
    ) -> io::Result<()> {
        let (saved, watch) = (self.state().saved.remove(name), self.watch.get()?);
        let nic = self.known(name)?;
        let connection = Connection::take_up(&nic, vmm, (kept, saved), (journal, &watch))?;
        if connection.has_kept_all() {
            self.state().loaded.push(name.to_owned());
        }
        connection.let_go();
        Ok(())
    }

    fn known(&self, name: &str) -> io::Result<Arc<Nic>> {
        self.nic(name).ok_or_else(|| io::Error::other("there is no such NIC"))
    }

    /// Has NICs move between workers. Not before there is one: the thread is to have given away
    /// what its process has by then.
    fn start_moving(&self) {
        let mut mover = self.mover.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*mover, Moving::Later) {
            let started = Mover::start(self.state.clone(), self.workers.handles().to_vec());
            *mover = started.map_or_else(
                |error| {
                    tracing::error!(%error, "NICs stay on the workers that they are placed on");
                    Moving::Never
                },
                Moving::Now,
            );
        }
    }

    /// Has all NICs stay where they are by now.
    fn stop_moving(&self) {
        let mut mover = self.mover.lock().unwrap_or_else(PoisonError::into_inner);
        *mover = Moving::Never;
    }

    fn nic(&self, name: &str) -> Option<Arc<Nic>> {
        self.state().nics.get(name).map(|placed| placed.nic.clone())
    }

    fn house(&self, name: &str) -> Option<Arc<House>> {
        self.state().nics.get(name).and_then(|placed| placed.house.clone())
    }

    /// Gives the NIC to a worker.
    fn place(&self, config: &NicConfig) -> Result<Arc<Nic>, AttachError> {
        let layout = layout(config)?;
        let worker = self.state().placement.add(config.vni);
        match self.place_on(worker, config, layout) {
            Ok(nic) => Ok(nic),
            Err(error) => {
                self.state().placement.remove(config.vni, worker);
                Err(error)
            }
        }
    }

    fn place_on(
        &self,
        index: usize,
        config: &NicConfig,
        layout: QueueLayout,
    ) -> Result<Arc<Nic>, AttachError> {
        let refused = || {
            AttachError::Resources(
                "the engine does not take the NIC; see the daemon's log, and restart it".to_owned(),
            )
        };
        let settings = nic::settings(config, layout);
        let (mib, objects) =
            (config.limits.max_kept_bytes >> 20, settings.limits.most_kept() >> 20);
        let (nic, number) = (&config.name, config.number);
        tracing::info!(nic, number, mib, objects, "what its guest may make the daemon keep");
        let worker = self.workers.handles().get(index).ok_or_else(refused)?;
        let carried = rnic::place(&config.backing, worker, &self.directory)?;
        if let (Some(_), Some(outside)) = (&carried, &self.outside) {
            outside.wanted();
        }
        let added = worker.call(None, PATIENCE, move |shard, _| match carried {
            Some((place, host)) => {
                let nic = crate::rnic::Rnic::nic(place, settings, host, Box::new(NoPort));
                shard.add_provided(Box::new(nic))
            }
            None => shard.add_nic(settings, Box::new(NoPort)),
        });
        let id = added.map_err(|_| refused())?;
        Ok(Arc::new(Nic::new(config, layout, (index, worker.clone()), id)))
    }

    /// Takes the NIC from its worker.
    fn displace(&self, nic: &Nic, vni: u32) {
        if let Err(error) = nic.call(PATIENCE, |shard, id, _| shard.remove_nic(id)) {
            tracing::error!(nic = nic.name, %error, "the engine did not let go of the NIC in time");
        }
        self.state().placement.remove(vni, nic.worker());
    }
}

/// The queues that the NIC's VMM was told of.
fn layout(config: &NicConfig) -> Result<QueueLayout, AttachError> {
    QueueLayout::new(config.comp_vectors, KICK_QUEUES).ok_or_else(|| {
        AttachError::Resources(format!(
            "{} completion vectors cannot be served",
            config.comp_vectors
        ))
    })
}

impl Dataplane for LocalDataplane {
    fn add(&self, config: &NicConfig) -> Result<(), AttachError> {
        let nic = self.place(config)?;
        let house = match config.guests {
            Guests::Vm => None,
            Guests::Process => Some(House::new(config, nic.clone()).inspect_err(|_| {
                self.displace(&nic, config.vni);
            })?),
        };
        let placed = Placed { nic, vni: config.vni, house: house.map(Arc::new) };
        self.state().nics.insert(config.name.clone(), placed);
        self.start_moving();
        Ok(())
    }

    fn remove(&self, name: &str) {
        // Not under the lock: it may take a while.
        let Some(Placed { nic, vni, house }) = self.state().nics.remove(name) else {
            return;
        };
        if let Some(house) = &house {
            house.close();
        }
        self.displace(&nic, vni);
        if let Some(house) = house {
            house.hang_up();
        }
    }

    fn update(&self, config: &NicConfig) -> Result<(), AttachError> {
        let Some(nic) = self.nic(&config.name) else { return Ok(()) };
        let settings = nic::settings(config, layout(config)?);
        nic.call(PATIENCE, move |shard, id, _| shard.update_nic(id, settings)).map_err(
            |error| {
                AttachError::Resources(format!("the engine did not take the change over: {error}"))
            },
        )?;
        nic.set_limits(&config.limits);
        if let Some(house) = self.house(&config.name) {
            house.update(config);
        }
        Ok(())
    }

    fn enter(&self, name: &str, process: &UnixStream, waits: &dyn Fn() -> bool) -> io::Result<()> {
        let (told, hears) = sync_channel(1);
        self.let_in(name, process.try_clone()?, move |done| {
            // Who does not wait any more does not hear it.
            let _ = told.send(done);
        });
        loop {
            match hears.recv_timeout(LOOK) {
                Ok(done) => return done,
                Err(RecvTimeoutError::Timeout) if waits() => {}
                Err(_) => return Err(io::Error::other("nobody waits for it any more")),
            }
        }
    }

    fn connect(&self, name: &str, vmm: UnixStream) -> io::Result<Box<dyn node::Connection>> {
        let told = (Arc::new(Forgetful) as Arc<dyn Journal>, &self.watch.get()?);
        Ok(Box::new(Connection::start(&self.known(name)?, vmm, told)?))
    }

    fn set_peers(&self, vni: u32, peers: &[Peer]) {
        self.directory.set_peers(vni, entries(peers));
        let nics: Vec<_> = {
            let state = self.state();
            let of_network = state.nics.values().filter(|placed| placed.vni == vni);
            of_network.map(|placed| placed.nic.clone()).collect()
        };
        for nic in nics {
            nic.post(|shard, id, _| shard.peers_changed(id));
        }
    }

    fn forget_network(&self, vni: u32) -> Result<(), AttachError> {
        // A NIC whose removal came late is removed by a job that is before this one in the mailbox.
        for worker in self.workers.handles() {
            worker.call(None, PATIENCE, |_, _| ()).map_err(|error| {
                AttachError::Resources(format!(
                    "what is left of its NICs could not be waited for: {error}; try again"
                ))
            })?;
        }
        self.directory.forget_network(vni);
        Ok(())
    }

    /// Nothing of this process outlives it.
    fn would_lose(&self) -> Vec<String> {
        let names: Vec<String> = self.state().nics.keys().cloned().collect();
        names.into_iter().filter(|name| self.status(name).session != Session::Absent).collect()
    }

    fn status(&self, name: &str) -> NicStatus {
        self.nic(name).map_or_else(NicStatus::default, |nic| nic.status())
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        self.workers.handles().iter().map(|worker| worker_status(&worker.beat())).collect()
    }
}

fn worker_status(beat: &Beat) -> WorkerStatus {
    let seconds = |nanos| Duration::from_nanos(nanos).as_secs_f64();
    let bounds = TURN_BOUNDS.iter().copied().map(seconds).chain([f64::INFINITY]);
    WorkerStatus {
        network: String::new(),
        turns: bounds.zip(beat.turns).collect(),
        busy: seconds(beat.total),
        longest: seconds(beat.longest),
        charged: seconds(beat.charged),
        stalled: seconds(beat.stalled),
    }
}

impl Drop for LocalDataplane {
    fn drop(&mut self) {
        self.stop_moving();
        let names: Vec<_> = self.state().nics.keys().cloned().collect();
        for name in names {
            self.remove(&name);
        }
    }
}
