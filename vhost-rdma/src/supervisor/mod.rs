//! What stays the host's: the sockets that VMMs connect to, and who may come.
//!
//! ```text
//!  registry ──Backend──> Supervisor ── one Seat per NIC: socket, who waits at it, mark
//!                            │
//!                            └──Dataplane──> NICs and sessions, in this process or in others
//! ```
//!
//! A connection is accepted here, its owner is asked of the kernel, and its stream is handed to the
//! [`Dataplane`]. Nothing that a VMM or a guest writes is read here.

#![forbid(unsafe_code)]

mod calls;
mod cgroup;
mod child;
mod door;
mod estate;
mod fleet;
mod held;
mod keeper;
mod leaving;
mod ledger;
mod lender;
mod listener;
mod network;
mod outside;
mod part;
mod peer;
mod record;
mod renewal;
mod restarts;
mod seat;
mod slow;
mod state;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use self::cgroup::CgroupLimits;
use self::door::Door;
pub use self::estate::Estate;
pub use self::fleet::{Fleet, FleetSettings};
pub use self::ledger::saved_version;
use self::listener::{Listener, NicSocket};
pub use self::outside::{OutsideProcess, OutsideSettings};
use self::seat::Seat;
use crate::node::{
    AttachError, Backend, Dataplane, Guests, Heirloom, NicConfig, NicStatus, Peer, ProcessStatus,
    Renewed, WorkerStatus,
};
use crate::socket;
use crate::store::Sockets;
use crate::watch::LateWatch;

/// What waits at a NIC's socket.
enum Waiting {
    Vmms(#[allow(dead_code, reason = "it is its life that counts")] Listener),
    Processes(#[allow(dead_code, reason = "it is its life that counts")] Door),
}

/// One attached NIC. Fields are dropped in this order: first nobody can connect any more.
struct Attached {
    waiting: Waiting,
    seat: Arc<Seat>,
    /// The thread's as well.
    socket: Arc<NicSocket>,
}

/// Serves NICs at vhost-user sockets. Dropping it cuts all VMMs off.
pub struct Supervisor {
    attached: Mutex<BTreeMap<String, Attached>>,
    dataplane: Arc<dyn Dataplane>,
    sockets: Arc<Sockets>,
    /// Who waits at all sockets.
    watch: LateWatch,
    /// A VMM of an earlier daemon goes on here.
    has_taken_up: AtomicBool,
}

/// An end of a NIC that takes longer is worth a line in the log.
const LONG: Duration = Duration::from_secs(1);
/// How long somebody who is being let in may hold an upgrade up.
const ENTRY: Duration = Duration::from_secs(5);

impl fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Supervisor").finish_non_exhaustive()
    }
}

impl Supervisor {
    /// One whose NICs `dataplane` serves, at `sockets`; there are none yet.
    pub fn new(dataplane: Arc<dyn Dataplane>, sockets: Arc<Sockets>) -> Self {
        Self {
            attached: Mutex::default(),
            dataplane,
            sockets,
            watch: LateWatch::default(),
            has_taken_up: AtomicBool::new(false),
        }
    }

    fn attached(&self) -> MutexGuard<'_, BTreeMap<String, Attached>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Supervisor {
    fn open(&self, config: &NicConfig) -> Result<Arc<NicSocket>, AttachError> {
        if self.attached().contains_key(&config.name) {
            return Err(AttachError::Resources(format!(
                "NIC {:?} is attached already",
                config.name
            )));
        }
        NicSocket::open(config, &self.sockets).map(Arc::new)
    }

    /// Lets in whoever comes to a NIC that was added.
    fn listen(&self, config: &NicConfig, socket: Arc<NicSocket>) -> Result<(), AttachError> {
        let seat = Arc::new(Seat::new(config, self.dataplane.clone()));
        let waiting = match config.guests {
            Guests::Vm => {
                let left = self.dataplane.take_up(config);
                self.has_taken_up.fetch_or(left.is_some(), Ordering::Relaxed);
                let at = (seat.clone(), socket.clone());
                let watch = self.watch.get();
                watch.and_then(|watch| Listener::start(at, &watch, left)).map(Waiting::Vmms)
            }
            Guests::Process => {
                let watch = self.watch.get();
                watch
                    .and_then(|watch| Door::open(seat.clone(), socket.clone(), &watch))
                    .map(Waiting::Processes)
            }
        };
        let waiting = waiting.map_err(|error| {
            self.dataplane.remove(&config.name);
            AttachError::io("start a thread", error)
        })?;
        self.attached().insert(config.name.clone(), Attached { waiting, seat, socket });
        Ok(())
    }
}

impl Backend for Supervisor {
    fn attach(&self, config: &NicConfig) -> Result<(), AttachError> {
        self.attach_all(&[config]).pop().unwrap_or_else(|| Err(AttachError::untold()))
    }

    /// All sockets are there before the first NIC is: who comes early waits in the backlog.
    fn attach_all(&self, configs: &[&NicConfig]) -> Vec<Result<(), AttachError>> {
        let sockets: Vec<_> = configs.iter().map(|config| self.open(config)).collect();
        let with: Vec<&NicConfig> = configs
            .iter()
            .zip(&sockets)
            .filter_map(|(config, socket)| socket.is_ok().then_some(*config))
            .collect();
        let mut added = self.dataplane.add_all(&with).into_iter();
        let listen = |(config, socket): (&&NicConfig, Result<Arc<NicSocket>, AttachError>)| {
            let socket = socket?;
            added.next().unwrap_or_else(|| Err(AttachError::untold()))?;
            self.listen(config, socket)
        };
        configs.iter().zip(sockets).map(listen).collect()
    }

    fn detach(&self, name: &str) {
        // Not under the lock: it may take a while.
        let Some(Attached { waiting, socket, .. }) = self.attached().remove(name) else { return };
        let begin = Instant::now();
        self.dataplane.leaves(name);
        drop(waiting);
        drop(socket);
        let sockets = begin.elapsed();
        self.dataplane.remove(name);
        let all = begin.elapsed();
        if all > LONG {
            let (all_ms, sockets_ms) = (all.as_millis(), sockets.as_millis());
            tracing::warn!(nic = name, all_ms, sockets_ms, "it took long to let go of the NIC");
        }
    }

    fn ending(&self) {
        let all = std::mem::take(&mut *self.attached());
        let names: Vec<String> = all.keys().cloned().collect();
        names.iter().for_each(|name| self.dataplane.leaves(name));
        // Nobody waits at a socket any more once its process ends.
        drop(all);
        self.dataplane.ending();
        for name in names {
            self.dataplane.remove(&name);
        }
    }

    fn update(&self, config: &NicConfig) -> Result<(), AttachError> {
        if !self.attached().contains_key(&config.name) {
            return Ok(());
        }
        socket::set_access(&config.socket, &config.access)?;
        self.dataplane.update(config)
    }

    fn set_peers(&self, vni: u32, peers: &[Peer]) {
        self.dataplane.set_peers(vni, peers);
    }

    fn forget_network(&self, vni: u32) -> Result<(), AttachError> {
        self.dataplane.forget_network(vni)
    }

    fn complete(&self, vni: u32) {
        self.dataplane.complete(vni);
    }

    fn upgrade_pause(&self) -> Duration {
        self.dataplane.upgrade_pause()
    }

    fn has_taken_up(&self) -> bool {
        self.has_taken_up.load(Ordering::Relaxed)
    }

    fn settled(&self) {
        self.sockets.close();
        self.dataplane.settled();
    }

    fn status(&self, name: &str) -> NicStatus {
        let seat = self.attached().get(name).map(|attached| attached.seat.clone());
        seat.map_or_else(NicStatus::default, |seat| seat.status())
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        self.dataplane.workers()
    }

    fn hand_down(&self) -> Vec<Heirloom> {
        let deadline = Instant::now() + ENTRY;
        let mut heirlooms = Vec::new();
        for (nic, attached) in &*self.attached() {
            if !attached.seat.shut(deadline) {
                tracing::error!(nic, "a VMM that is being let in is cut off by the upgrade");
            }
            heirlooms.extend(attached.socket.hand_down());
        }
        heirlooms.extend(self.dataplane.hand_down());
        heirlooms
    }

    fn would_lose(&self) -> Vec<String> {
        self.dataplane.would_lose()
    }

    fn saved_version(&self) -> Option<String> {
        Some(saved_version())
    }

    fn renew(&self, vni: u32) -> Result<Renewed, AttachError> {
        self.dataplane.renew(vni)
    }

    fn processes(&self) -> Vec<ProcessStatus> {
        self.dataplane.processes()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let names: Vec<_> = self.attached().keys().cloned().collect();
        for name in names {
            self.detach(&name);
        }
    }
}
