//! The agents: what each was told, what each says, and the one watch that they share.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::StreamExt as _;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use vhost_rdma_cluster_api::{
    Channel, Condition, DaemonStatus, Limits, NicStatus, NodeNetworkStatus, NodePool, PortStatus,
    Quantity, RdmaIPBlock, RdmaNode, RdmaNodeSpec, RdmaNodeStatus, RnicStatus, block_name,
};

use crate::Args;
use crate::objects::{FABRIC, FEW, GROUP, WIDE, node_address, team};
use crate::peers::Peer;

/// What happens within this time an agent writes together.
const TOGETHER: Duration = Duration::from_millis(200);
/// Requests of all agents that are under way.
const AT_ONCE: usize = 24;
/// NICs of a node in the pool of few.
const FEW_NICS: u32 = 2;
/// The longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(1800);

/// What an agent was told.
#[derive(Debug, Clone)]
pub(crate) struct Said {
    pub(crate) uid: String,
    pub(crate) generation: Option<i64>,
    pub(crate) spec: RdmaNodeSpec,
}

/// What an agent knows by itself, and what it told.
#[derive(Debug, Clone, Default)]
pub(crate) struct Own {
    /// How often its address on the fabric has changed.
    pub(crate) moved: u8,
    /// Addresses of the wide network that it needs beside those of its NICs.
    pub(crate) needs: u32,
    pub(crate) told: Option<RdmaNodeStatus>,
    /// Blocks that the API server itself called the node's.
    owned: BTreeSet<String>,
}

/// An agent.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) number: u32,
    pub(crate) name: String,
    said: Mutex<Option<Said>>,
    own: Mutex<Own>,
    pending: AtomicBool,
    writing: tokio::sync::Mutex<()>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    pub(crate) fn said(&self) -> Option<Said> {
        lock(&self.said).clone()
    }

    pub(crate) fn own(&self) -> MutexGuard<'_, Own> {
        lock(&self.own)
    }

    /// Whether what it was told is what it says that it serves.
    pub(crate) fn serves(&self) -> bool {
        let Some(said) = self.said() else { return false };
        let own = self.own();
        own.told.as_ref().is_some_and(|told| told.observed_generation == said.generation)
            && said.spec.blocks.iter().all(|block| own.owned.contains(&block.uid))
    }

    /// Where its RNIC is on the fabric.
    pub(crate) fn host_address(&self, moved: u8) -> Ipv4Addr {
        let [_, b, c, d] = node_address(self.number).octets();
        Ipv4Addr::new(101, b.wrapping_add(moved), c, d)
    }
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Agents {
    pub(crate) args: Args,
    pub(crate) admin: Admin,
    account: Admin,
    all: Mutex<Vec<Arc<Agent>>>,
    pub(crate) peers: Mutex<Vec<Arc<Peer>>>,
    places: Semaphore,
    writes: AtomicU64,
    failed: AtomicU64,
}

/// A client, which has no `Debug`.
#[derive(Clone)]
pub(crate) struct Admin(pub(crate) Client);

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Agents {
    pub(crate) fn new(account: Client, admin: Client, args: Args) -> Arc<Self> {
        Arc::new(Self {
            args,
            admin: Admin(admin),
            account: Admin(account),
            all: Mutex::default(),
            peers: Mutex::default(),
            places: Semaphore::new(AT_ONCE),
            writes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        })
    }

    pub(crate) fn account(&self) -> Client {
        self.account.0.clone()
    }

    pub(crate) fn admin(&self) -> Client {
        self.admin.0.clone()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Agent>> {
        lock(&self.all).clone()
    }

    /// The agent of this number.
    pub(crate) fn at(&self, number: u32) -> Option<Arc<Agent>> {
        lock(&self.all).get(usize::try_from(number).ok()?).cloned()
    }

    /// As many agents as there are nodes; those that come have not been told anything.
    pub(crate) fn grow(&self, nodes: u32) {
        let mut all = lock(&self.all);
        let have = u32::try_from(all.len()).unwrap_or(u32::MAX);
        all.extend((have..nodes).map(|number| {
            Arc::new(Agent {
                number,
                name: name(number),
                said: Mutex::default(),
                own: Mutex::default(),
                pending: AtomicBool::new(false),
                writing: tokio::sync::Mutex::default(),
            })
        }));
    }

    /// What there is: nodes, NICs, writes of agents, and those of them that failed.
    pub(crate) fn count(&self) -> Value {
        let all = self.all();
        let granted = |agent: &Arc<Agent>| agent.own().told.as_ref().map_or(0, |told| told.granted);
        json!({
            "nodes": all.len(),
            "nics": all.iter().map(granted).sum::<u32>(),
            "writes": self.writes.load(Ordering::Relaxed),
            "failed": self.failed.load(Ordering::Relaxed),
        })
    }

    /// Follows the objects of all nodes, for ever.
    pub(crate) fn follow(self: &Arc<Self>) {
        let agents = Arc::clone(self);
        tokio::spawn(async move {
            let api: Api<RdmaNode> = Api::all(agents.account());
            let mut changes = Box::pin(watcher(api, watcher::Config::default()).default_backoff());
            while let Some(change) = changes.next().await {
                match change {
                    Ok(Event::InitApply(node) | Event::Apply(node)) => agents.tell(node),
                    Ok(_) => {}
                    Err(error) => eprintln!("    the agents' watch begins anew: {error}"),
                }
            }
        });
    }

    fn tell(self: &Arc<Self>, node: RdmaNode) {
        let name = node.metadata.name.unwrap_or_default();
        let Some(agent) = number(&name).and_then(|number| self.at(number)) else { return };
        let said = Said {
            uid: node.metadata.uid.unwrap_or_default(),
            generation: node.metadata.generation,
            spec: node.spec,
        };
        let mut before = lock(&agent.said);
        // Its own status comes back too.
        if before.as_ref().is_some_and(|b| b.generation == said.generation && b.uid == said.uid) {
            return;
        }
        *before = Some(said);
        drop(before);
        self.note(&agent);
    }

    /// An agent has something to report.
    pub(crate) fn note(self: &Arc<Self>, agent: &Arc<Agent>) {
        if agent.pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let (agents, agent) = (Arc::clone(self), Arc::clone(agent));
        tokio::spawn(async move {
            tokio::time::sleep(TOGETHER).await;
            let turn = agent.writing.lock().await;
            let Ok(place) = agents.places.acquire().await else { return };
            agent.pending.store(false, Ordering::Release);
            let result = agents.report(&agent).await;
            drop((turn, place));
            if let Err(error) = result {
                if agents.failed.fetch_add(1, Ordering::Relaxed) < 5 {
                    eprintln!("    {}: {error:#}; it tries again", agent.name);
                }
                agents.note(&agent);
            }
        });
    }

    /// Writes the status if it is another than was told, and then asks for blocks themselves.
    async fn report(&self, agent: &Agent) -> Result<()> {
        let Some(said) = agent.said() else { return Ok(()) };
        let own = agent.own().clone();
        let status = self.status(agent, &said, &own);
        if own.told.as_ref() != Some(&status) {
            let api: Api<RdmaNode> = Api::all(self.account());
            let patch = Patch::Merge(patch(&said.uid, &status)?);
            api.patch_status(&agent.name, &PatchParams::default(), &patch).await?;
            self.writes.fetch_add(1, Ordering::Relaxed);
            agent.own().told = Some(status);
        }
        let blocks: Api<RdmaIPBlock> = Api::all(self.account());
        for block in &said.spec.blocks {
            if own.owned.contains(&block.uid) {
                continue;
            }
            let found = blocks.get(&block_name(&block.network, &block.cidr)).await?;
            if found.spec.node != agent.name || found.metadata.uid.as_ref() != Some(&block.uid) {
                bail!("the block {} is not the node's", block.cidr);
            }
            agent.own().owned.insert(block.uid.clone());
        }
        Ok(())
    }

    fn status(&self, agent: &Agent, said: &Said, own: &Own) -> RdmaNodeStatus {
        let spec = &said.spec;
        let nics: Vec<NicStatus> =
            spec.pools.iter().flat_map(|pool| self.nics(agent, pool)).collect();
        let addresses = |network: &str| {
            let given = nics.iter().filter(|nic| nic.network == network).count();
            let more = if network == WIDE { own.needs } else { 0 };
            u32::try_from(given).unwrap_or(u32::MAX) + more
        };
        let networks = spec.networks.iter().map(|network| NodeNetworkStatus {
            name: network.name.clone(),
            uid: network.uid.clone(),
            addresses: addresses(&network.name),
        });
        let rnic = |device: &str, fabric: Option<&str>| RnicStatus {
            device: device.to_owned(),
            pci: Some("0000:3b:00.0".to_owned()),
            numa: Some(0),
            fabric: fabric.map(str::to_owned),
            host_address: fabric.map(|_| agent.host_address(own.moved).to_string()),
            port: PortStatus::Active,
        };
        let mut ready = Condition::new("Ready", true, "Serving", "").of(said.generation);
        ready.last_transition_time = Some("2026-01-01T00:00:00Z".to_owned());
        RdmaNodeStatus {
            observed_generation: said.generation,
            granted: u32::try_from(nics.len()).unwrap_or(u32::MAX),
            rnics: vec![rnic("mlx5_0", Some(FABRIC)), rnic("mlx5_1", None)],
            daemon: Some(DaemonStatus {
                instance: format!("4f1c7a52-{:08x}", agent.number),
                version: env!("CARGO_PKG_VERSION").to_owned(),
            }),
            channel: Some(Channel {
                endpoint: format!("{}:4790", node_address(agent.number)),
                certificate: None,
            }),
            networks: networks.collect(),
            blocks: spec.blocks.iter().map(|block| block.uid.clone()).collect(),
            nics,
            conditions: vec![ready],
        }
    }

    fn nics(&self, agent: &Agent, pool: &NodePool) -> Vec<NicStatus> {
        let wide = self.args.nics / 2;
        let count = match pool.name.as_str() {
            WIDE => wide,
            GROUP => self.args.nics - wide,
            FEW => FEW_NICS,
            _ => 0,
        };
        let group = agent.number / self.args.group;
        let nic = |n: u32| NicStatus {
            id: format!("{}-{n:03}", pool.name),
            pool: pool.name.clone(),
            network: pool.network.clone(),
            namespace: team(group),
            pod: format!("worker-{}-{}-{n}", pool.name, agent.number),
            pod_uid: format!("0b1e2d3c-{:08x}-{}-{n:04}", agent.number, pool.name),
            class: pool.class.clone(),
            revision: pool.revision.clone(),
            limits: limits(&pool.nic.limits),
            rates: pool.nic.rates,
            mac: Some(mac(agent.number, n)),
        };
        (0..count).map(nic).collect()
    }
}

/// What the daemon says of a NIC's limits: all of them.
fn limits(class: &Limits) -> Limits {
    Limits {
        max_contexts: Some(64),
        max_pds: Some(256),
        max_mrs: Some(4096),
        max_mr_bytes: class.max_mr_bytes.or(Some(Quantity(1 << 30))),
        max_kept_bytes: Some(Quantity(1 << 20)),
        max_guest_bytes: Some(Quantity(4 << 30)),
        max_cqs: Some(1024),
        max_srqs: Some(256),
        max_qps: class.max_qps.or(Some(256)),
        max_ahs: Some(1024),
    }
}

fn mac(node: u32, nic: u32) -> String {
    let [_, b, c, d] = node.to_be_bytes();
    format!("02:{b:02x}:{c:02x}:{d:02x}:{:02x}:{:02x}", nic >> 8 & 255, nic & 255)
}

/// As `device-plugin/src/follow.rs` makes it.
fn patch(uid: &str, status: &RdmaNodeStatus) -> Result<Value> {
    let mut said = serde_json::to_value(status)?;
    if let Some(said) = said.as_object_mut() {
        for field in
            ["observedGeneration", "rnics", "daemon", "channel", "networks", "blocks", "nics"]
        {
            said.entry(field).or_insert(Value::Null);
        }
    }
    Ok(json!({ "metadata": { "uid": uid }, "status": said }))
}

pub(crate) fn name(number: u32) -> String {
    format!("node-{number:05}")
}

fn number(name: &str) -> Option<u32> {
    name.strip_prefix("node-")?.parse().ok()
}

/// Waits until something is so; says from time to time how far it is.
pub(crate) async fn until(
    what: &str,
    mut so: impl FnMut() -> Result<(), String>,
) -> Result<Duration> {
    let begun = Instant::now();
    let mut shown = begun;
    loop {
        let Err(lacking) = so() else { return Ok(begun.elapsed()) };
        if begun.elapsed() > PATIENCE {
            bail!("waited {} s in vain for {what}: {lacking}", PATIENCE.as_secs());
        }
        if shown.elapsed() > Duration::from_secs(10) {
            shown = Instant::now();
            eprintln!("    {what} … {lacking} ({} s)", begun.elapsed().as_secs());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
