//! The agent: ledger, pools, daemon, kubelet and files, kept in step.
//!
//! All decisions are made under one lock, in this order: decide on what the tables say, write the
//! ledger, change the world, tell the kubelet. What fails after the ledger was written is taken
//! back, and if the agent dies in between, [`reconcile`](Agent::reconcile) finds the same state
//! again: a grant that nobody holds is taken back, one that somebody holds is made good.

mod admit;
mod allocate;
mod attach;
mod cluster;
mod debts;
mod detach;
mod health;
mod named;
mod ownership;
mod patch;
mod peers;
mod reconcile;
mod refusal;
mod report;
mod status;
mod stuck;
pub(crate) mod undo;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex as StdMutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{Mutex, Notify, watch};
use vhost_rdma_agent_api::RESOURCES;

use crate::cluster::render::render;
use crate::cluster::{Snapshot as NodeFile, Standing};
use crate::config::{Config, Injection};
use crate::daemon::{Daemon, DaemonError, View};
use crate::events::Events;
use crate::files::Dirs;
use crate::grant::BadGift;
use crate::holders::{Kubelet, PodKey, Run};
use crate::host::{Host, Inventory};
use crate::journal::{Journal, JournalError};
use crate::ledger::{Grant, Ledger, Named, Slot};
use crate::member::book::Book;
use crate::member::{self, Channel};
use crate::pool::{Pool, Pools};
use crate::v1beta1;

pub use allocate::AllocateError;
pub use status::Snapshot;

/// What does not change while the agent runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where files for others go.
    pub dirs: Dirs,
    /// Where CNI plugins are, for a `DEL` that nobody else will ask for.
    pub cni_dir: PathBuf,
    /// Who calls them.
    pub undo: Undo,
    /// Where the agent itself listens: the CNI plugin is told.
    pub socket: PathBuf,
    /// Seconds that the kubelet may take to list a pod after its `Allocate`.
    pub settle: u64,
    /// How long an ID must be without a holder before it is taken back.
    pub reclaim: Duration,
    /// How long an ID rests when it could not be undone; twice as long each time.
    pub rest: Duration,
    /// How long a VMM may take to come back to a daemon that was started again.
    pub reconnect: Duration,
    /// What [`Injection::Auto`] means here.
    pub auto_cdi: bool,
    /// How long after the agent's start a daemon that has not answered yet counts as one that is
    /// starting.
    pub start: Duration,
    /// How long `Allocate` may wait for such a daemon: meanwhile the kubelet admits no other pod.
    pub patience: Duration,
    /// The agent's own pod, if it is one: a kubelet that lists it has heard of all its pods.
    pub own_pod: Option<PodKey>,
    /// The controller says what the node offers, beside the file.
    pub cluster: bool,
    /// How the node takes part in the channel between nodes, if it does.
    pub channel: Option<member::Settings>,
}

/// Who has the CNI plugin called for what a runtime forgot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Undo {
    /// The agent.
    #[default]
    Here,
    /// `vhost-rdma-agent undo`, which has the rights for it.
    ByHelper,
}

/// A pool's devices as the kubelet is told; shared, since every stream has it.
pub type List = Arc<Vec<v1beta1::Device>>;

/// The agent.
pub struct Agent<D, K> {
    settings: Settings,
    daemon: D,
    kubelet: K,
    host: Arc<dyn Host>,
    events: Events,
    state: Mutex<State>,
    journal: Arc<StdMutex<Journal>>,
    lists: StdMutex<BTreeMap<String, watch::Sender<List>>>,
    names: watch::Sender<Vec<String>>,
    /// The newest view of everything, for those who must not wait for a call of the daemon to end.
    seen: StdMutex<Arc<Snapshot>>,
    wake: Notify,
    /// Something may be new in what is reported.
    noted: Notify,
    state_dir: PathBuf,
    /// The API server, once there is one.
    server: OnceLock<Server>,
    /// A name that a NIC has lost is to be given back.
    owing: Notify,
    /// Held while names are claimed, and while one is given back.
    naming: Mutex<()>,
    channel: Option<Channel>,
    /// Held over calls of the daemon about peers. Whoever needs both has `state` first.
    teller: Mutex<peers::Teller>,
}

impl<D, K> std::fmt::Debug for Agent<D, K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// The API server, and what this node is called there.
struct Server {
    client: kube::Client,
    node: String,
}

/// What changes.
#[derive(Debug)]
struct State {
    /// What the file says.
    file: Config,
    /// What the controller said last.
    standing: Standing,
    /// The hardware when it was looked at last.
    inventory: Arc<Inventory>,
    /// File and controller together.
    config: Config,
    /// Why the configuration file is not the one in force.
    config_error: Option<String>,
    pools: Arc<Pools>,
    ledger: Ledger,
    daemon: DaemonState,
    kubelet_error: Option<String>,
    host_error: Option<String>,
    registered: BTreeSet<String>,
    networks: BTreeSet<String>,
    /// Granted IDs that the kubelet did not list: how often, and since when.
    missing: BTreeMap<String, Missing>,
    /// Pods with something of ours that this run of the kubelet has listed.
    seen: (Run, BTreeSet<PodKey>),
    /// How often each ID was allocated in this run.
    allocated: Allocated,
    /// Pools whose NICs the daemon refused to make: why, and when.
    refused: BTreeMap<String, (String, Instant)>,
    /// When the agent began.
    began: Instant,
    /// IDs whose attachments the helper is to have undone, and how often it was told so.
    forgotten: BTreeMap<String, u32>,
    stuck: stuck::Stuck,
    /// NICs of the daemon that look like ours and are not: seen once.
    strangers: BTreeSet<String>,
    /// Names that NICs have had and that are not given back yet. What is lost of it with the agent
    /// the controller gives back.
    owed: Vec<Named>,
    /// What was wrong with an ID when the kubelet was told last.
    defects: BTreeMap<String, String>,
    counters: Counters,
    /// See [`Settings::reconnect`].
    reconnect: Duration,
    /// See [`Settings::start`].
    start: Duration,
}

impl State {
    /// The daemon has not answered since the agent began, and may be starting too.
    fn is_starting(&self) -> bool {
        self.daemon.instance.is_none() && self.began.elapsed() < self.start
    }
}

/// How often IDs were allocated.
type Allocated = BTreeMap<String, u64>;

#[derive(Debug, Clone, Copy)]
struct Missing {
    times: u32,
    since: Instant,
}

/// What happened since the agent started.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    /// Containers that got their devices.
    pub allocations: u64,
    /// Containers that did not.
    pub refusals: u64,
    /// IDs taken back after their pod was gone.
    pub reclaims: u64,
    /// Configurations taken.
    pub reloads: u64,
    /// Configurations refused.
    pub bad_reloads: u64,
    /// Times that the daemon went away.
    pub daemon_losses: u64,
}

#[derive(Debug, Default)]
struct DaemonState {
    /// Absent: it does not answer.
    view: Option<View>,
    /// NICs that this agent made or removed: a view that was asked for before one of them is out of
    /// date.
    changes: u64,
    error: String,
    /// The run that was seen last.
    instance: Option<String>,
    /// IDs whose VMM was connected when it was seen last.
    connected: BTreeSet<String>,
    /// IDs whose VMM lost the daemon and has not come back, and when the daemon did.
    lost: BTreeMap<String, Instant>,
}

/// A change of the world failed.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    #[error(transparent)]
    Gift(#[from] BadGift),
    #[error("cannot write {what}: {source}")]
    File { what: String, source: std::io::Error },
}

/// What an agent is made of.
pub struct Parts<D, K> {
    /// What does not change.
    pub settings: Settings,
    /// The first configuration.
    pub config: Config,
    /// The daemon.
    pub daemon: D,
    /// The kubelet.
    pub kubelet: K,
    /// The hardware.
    pub host: Arc<dyn Host>,
    /// Where events go.
    pub events: Events,
}

impl<D, K> std::fmt::Debug for Parts<D, K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Takes the ledger up and looks at the hardware. The daemon is not asked yet: until it
    /// answered, its NICs are unhealthy.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn new(parts: Parts<D, K>, state_dir: &std::path::Path) -> Result<Arc<Self>, JournalError> {
        let (journal, slots) = Journal::open(state_dir)?;
        let kept = if parts.settings.cluster { NodeFile::new(state_dir).read() } else { Ok(None) };
        let standing = kept.unwrap_or_else(|error| {
            tracing::error!(%error, "the last copy of the node's object is not believed");
            None
        });
        let state = State {
            file: parts.config.clone(),
            standing: standing.unwrap_or_default(),
            inventory: Arc::default(),
            config: parts.config,
            config_error: None,
            pools: Arc::default(),
            ledger: Ledger::new(slots),
            daemon: DaemonState {
                error: "it was not asked yet".to_owned(),
                ..DaemonState::default()
            },
            kubelet_error: Some("it was not asked yet".to_owned()),
            host_error: None,
            registered: BTreeSet::new(),
            networks: BTreeSet::new(),
            missing: BTreeMap::new(),
            seen: (Run::default(), BTreeSet::new()),
            allocated: Allocated::new(),
            refused: BTreeMap::new(),
            began: Instant::now(),
            forgotten: BTreeMap::new(),
            stuck: stuck::Stuck::default(),
            strangers: BTreeSet::new(),
            owed: Vec::new(),
            defects: BTreeMap::new(),
            counters: Counters::default(),
            reconnect: parts.settings.reconnect,
            start: parts.settings.start,
        };
        let settings = parts.settings.channel.clone();
        let channel = settings.map(|settings| Channel::new(settings, state_dir));
        let book = if parts.settings.cluster { Book::read(state_dir) } else { Book::default() };
        if let Some(channel) = &channel {
            channel.count(book.entries());
        }
        let agent = Arc::new(Self {
            settings: parts.settings,
            daemon: parts.daemon,
            kubelet: parts.kubelet,
            host: parts.host,
            events: parts.events,
            state: Mutex::new(state),
            journal: Arc::new(StdMutex::new(journal)),
            lists: StdMutex::default(),
            names: watch::Sender::new(Vec::new()),
            seen: StdMutex::default(),
            wake: Notify::new(),
            noted: Notify::new(),
            state_dir: state_dir.to_owned(),
            server: OnceLock::new(),
            owing: Notify::new(),
            naming: Mutex::new(()),
            channel,
            teller: peers::Teller::new(book),
        });
        Ok(agent)
    }

    /// Puts another configuration in force. Nothing that was granted is taken away: an ID that the
    /// new one does not have is offered to nobody, and goes when its pod goes.
    pub async fn configure(&self, config: Config) {
        let looked = self.inventory().await;
        let mut state = self.state.lock().await;
        state.host_error = looked.as_ref().err().cloned();
        state.file = config;
        state.config_error = None;
        self.offer(&mut state, Arc::new(looked.unwrap_or_default()));
    }

    async fn inventory(&self) -> Result<Inventory, String> {
        let host = Arc::clone(&self.host);
        let looked = tokio::task::spawn_blocking(move || host.inventory()).await;
        looked.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Offers what file and controller say together on this hardware.
    fn offer(&self, state: &mut State, inventory: Arc<Inventory>) {
        let (config, pools) = rendered(state, &inventory);
        for problem in &pools.problems {
            tracing::warn!(problem, "in the configuration");
        }
        state.networks.clear();
        state.refused.clear();
        state.config = config;
        state.inventory = inventory;
        state.pools = Arc::new(pools);
        self.name_resources(state);
        self.publish(state);
    }

    /// Leaves a list of what is ours beside the socket: the CNI plugin reads it while nobody
    /// answers.
    fn name_resources(&self, state: &State) {
        let granted =
            state.ledger.iter().filter_map(|(_, slot)| slot.grant.as_ref()?.resource.clone());
        let pools = state.pools.pools.iter().map(|pool| pool.resource.clone());
        let resources: BTreeSet<String> = pools.chain(granted).collect();
        let text: String = resources.iter().map(|resource| format!("{resource}\n")).collect();
        let dir = self.settings.socket.parent().unwrap_or(std::path::Path::new("/run"));
        if let Err(error) = crate::files::publish_text(dir, RESOURCES, &text) {
            tracing::warn!(
                %error,
                "cannot leave the list of resources; the CNI plugin takes any device for ours"
            );
        }
    }

    /// Looks at the hardware again, if a pool gives any away or the controller hears of it.
    pub async fn rescan(&self) {
        let pools = Arc::clone(&self.state.lock().await.pools);
        let asked = |pool: &Pool| pool.config.needs_hardware();
        if !self.settings.cluster && !pools.pools.iter().any(asked) {
            return;
        }
        let looked = self.inventory().await;
        let mut state = self.state.lock().await;
        state.host_error = looked.as_ref().err().cloned();
        let Ok(inventory) = looked else { return };
        let (config, pools) = rendered(&state, &inventory);
        state.inventory = Arc::new(inventory);
        if *state.pools != pools {
            tracing::info!("the hardware of the node changed");
            state.config = config;
            state.pools = Arc::new(pools);
            self.publish(&mut state);
        }
    }

    /// A configuration came and was good.
    pub async fn reloaded(&self, config: Config) {
        self.configure(config).await;
        self.state.lock().await.counters.reloads += 1;
        tracing::info!("the configuration is in force");
        self.events.configuration(
            "ConfigurationLoaded",
            "the new configuration is in force",
            false,
        );
    }

    /// A configuration came and was bad: the old one stays.
    pub async fn refused(&self, error: &str) {
        let mut state = self.state.lock().await;
        if state.config_error.as_deref() == Some(error) {
            return;
        }
        tracing::error!(error, "the new configuration is refused; the old one stays in force");
        state.config_error = Some(error.to_owned());
        state.counters.bad_reloads += 1;
        self.events.configuration("ConfigurationRefused", error, true);
    }

    /// The names of all pools, now and at each change.
    #[must_use]
    pub fn pool_names(&self) -> watch::Receiver<Vec<String>> {
        self.names.subscribe()
    }

    /// The device list of a pool, now and at each change.
    #[must_use]
    pub fn subscribe(&self, pool: &str) -> Option<watch::Receiver<List>> {
        self.lists().get(pool).map(watch::Sender::subscribe)
    }

    fn lists(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, watch::Sender<List>>> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What pods ask for to get NICs of a pool.
    pub async fn resource(&self, pool: &str) -> String {
        self.state.lock().await.config.resource(pool)
    }

    /// The kubelet watches this pool, or does not.
    pub async fn set_registered(&self, pool: &str, registered: bool) {
        let mut state = self.state.lock().await;
        if registered {
            state.registered.insert(pool.to_owned());
        } else {
            state.registered.remove(pool);
        }
        self.note(&state);
    }

    /// Which of the available IDs are best given together.
    pub async fn preferred(
        &self,
        pool: &str,
        available: &[String],
        must: &[String],
        size: usize,
    ) -> Vec<String> {
        let pools = Arc::clone(&self.state.lock().await.pools);
        pools
            .get(pool)
            .map(|pool| crate::preferred::preferred(pool, available, must, size))
            .unwrap_or_default()
    }

    /// Comes back when something happened after which [`Self::reconcile`] has work to do.
    pub async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Writes changed slots to the ledger, on the disk first if `durable`, then in memory.
    async fn commit(
        &self,
        state: &mut State,
        changes: Vec<(String, Slot)>,
        durable: bool,
    ) -> Result<(), JournalError> {
        if changes.is_empty() {
            return Ok(());
        }
        let journal = Arc::clone(&self.journal);
        let written = tokio::task::spawn_blocking(move || {
            let mut journal = journal.lock().unwrap_or_else(PoisonError::into_inner);
            let pairs = changes.iter().map(|(id, slot)| (id.as_str(), slot));
            journal.append(pairs, durable).map(|()| (changes, journal.wants_compaction()))
        });
        let (changes, compact) = written.await.map_err(|error| JournalError::Io {
            action: "write the ledger",
            path: String::new(),
            source: std::io::Error::other(error),
        })??;
        for (id, slot) in changes {
            let named = |slot: &Slot| slot.grant.as_ref().and_then(Grant::named).cloned();
            let now = named(&slot);
            let before = state.ledger.put(&id, slot).as_ref().and_then(named);
            // Whatever ended it has ended the NIC before.
            if let Some(before) = before.filter(|before| now.as_ref() != Some(before)) {
                state.owed.push(before);
                self.owing.notify_one();
            }
        }
        if compact {
            let journal = Arc::clone(&self.journal);
            let ledger = state.ledger.clone();
            let compacted = tokio::task::spawn_blocking(move || {
                journal.lock().unwrap_or_else(PoisonError::into_inner).compact(ledger.iter())
            });
            if let Ok(Err(error)) = compacted.await {
                tracing::warn!(%error, "the ledger was not written anew");
            }
        }
        Ok(())
    }

    fn uses_cdi(&self, state: &State) -> bool {
        match state.config.injection {
            Injection::Classic => false,
            Injection::Cdi => true,
            Injection::Auto => self.settings.auto_cdi,
        }
    }
}

/// File and controller together, and the pools that they make.
fn rendered(state: &State, inventory: &Inventory) -> (Config, Pools) {
    let (config, problems) = render(&state.file, &state.standing.spec, inventory);
    let mut pools = Pools::build(&config, inventory);
    pools.problems.extend(problems);
    (config, pools)
}

fn pool_of<'a>(pools: &'a Pools, name: &str) -> Result<&'a Pool, String> {
    pools.get(name).ok_or_else(|| format!("there is no pool {name:?} in the configuration"))
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
