//! A daemon that is a table.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;
use vhost_rdma_agent::daemon::{Daemon, DaemonError, View};
use vhost_rdma_proto::v1;

#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) nics: BTreeMap<String, v1::Nic>,
    pub(crate) networks: Vec<String>,
    pub(crate) down: bool,
    pub(crate) runs: u32,
    /// Calls that change something until one fails; then all do.
    pub(crate) fuse: Option<u32>,
    pub(crate) calls: u32,
    /// It answers no change until it is told to.
    pub(crate) hangs: Option<Arc<Notify>>,
    /// A network that answers no change.
    pub(crate) silent: Option<String>,
    /// It says that it is.
    pub(crate) says_silent: bool,
    /// How often that one was asked.
    pub(crate) unanswered: u32,
    /// Why it makes no NIC.
    pub(crate) refuses: Option<String>,
    /// The next look is answered with what there is now, but late.
    pub(crate) late: Option<Arc<Late>>,
    /// The controller's peers by network, and the set's version.
    pub(crate) peers: BTreeMap<String, (v1::PeersVersion, BTreeMap<String, v1::Peer>)>,
    /// Calls that brought peers, and whether each was whole.
    pub(crate) told: Vec<bool>,
    /// How often it read its files.
    pub(crate) reloads: u32,
}

impl Table {
    /// A NIC as the daemon shows it.
    fn shown(&self, name: &str) -> Option<(String, v1::Nic)> {
        let nic = self.nics.get(name)?.clone();
        let silent = self.says_silent && self.silent.as_ref() == Some(&nic.network);
        Some((name.to_owned(), v1::Nic { silent, ..nic }))
    }
}

/// An answer that is on its way.
#[derive(Debug, Default)]
pub(crate) struct Late {
    pub(crate) asked: Notify,
    pub(crate) arrive: Notify,
}

#[derive(Debug, Clone)]
pub(crate) struct FakeDaemon {
    dir: PathBuf,
    table: Arc<Mutex<Table>>,
}

impl FakeDaemon {
    pub(crate) fn new(dir: &Path) -> Self {
        let table = Table { runs: 1, ..Table::default() };
        Self { dir: dir.to_owned(), table: Arc::new(Mutex::new(table)) }
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap()
    }

    /// A VMM connects to a NIC, or goes.
    pub(crate) fn set_session(&self, name: &str, session: v1::Session) {
        self.table().nics.get_mut(name).unwrap().set_session(session);
    }

    /// Ends and starts again, with its state: all sessions are gone.
    pub(crate) fn restart(&self) {
        let mut table = self.table();
        table.runs += 1;
        table.down = false;
        // As after a reboot.
        table.peers.clear();
        for nic in table.nics.values_mut() {
            nic.set_session(v1::Session::Absent);
        }
    }

    fn read(&self) -> Result<MutexGuard<'_, Table>, DaemonError> {
        let table = self.table();
        if table.down { Err(DaemonError::Unreachable("it is down".to_owned())) } else { Ok(table) }
    }

    /// Waits for ever if the network is the silent one.
    async fn speak(&self, network: &str) {
        let silent = {
            let mut table = self.table();
            let silent = table.silent.as_deref() == Some(network);
            table.unanswered += u32::from(silent);
            silent
        };
        if silent {
            std::future::pending::<()>().await;
        }
    }

    fn change(&self) -> Result<MutexGuard<'_, Table>, DaemonError> {
        let mut table = self.read()?;
        table.calls += 1;
        match &mut table.fuse {
            Some(0) => return Err(DaemonError::Unreachable("the fuse blew".to_owned())),
            Some(left) => *left -= 1,
            None => {}
        }
        Ok(table)
    }
}

impl Daemon for FakeDaemon {
    async fn view(&self) -> Result<View, DaemonError> {
        let (view, late) = {
            let mut table = self.read()?;
            let view = View {
                instance: table.runs.to_string(),
                version: "test".to_owned(),
                nics: table.nics.keys().filter_map(|name| table.shown(name)).collect(),
            };
            (view, table.late.take())
        };
        if let Some(late) = late {
            late.asked.notify_one();
            late.arrive.notified().await;
        }
        Ok(view)
    }

    async fn ensure_network(&self, name: &str, _vni: Option<u32>) -> Result<(), DaemonError> {
        self.change()?.networks.push(name.to_owned());
        Ok(())
    }

    async fn remove_network(&self, name: &str, _vni: u32) -> Result<(), DaemonError> {
        let mut table = self.change()?;
        if table.nics.values().any(|nic| nic.network == name) {
            return Err(DaemonError::Refused(format!("{name} has NICs")));
        }
        table.networks.retain(|network| network != name);
        Ok(())
    }

    async fn replace_peers(&self, request: v1::ReplacePeersRequest) -> Result<(), DaemonError> {
        self.speak(&request.network).await;
        let mut table = self.change()?;
        let v1::ReplacePeersRequest { network, version, base, add, remove } = request;
        if !table.networks.contains(&network) {
            return Err(DaemonError::NotFound(network));
        }
        let version = version.unwrap();
        let held = table.peers.get(&network).filter(|(of, _)| of.epoch == version.epoch);
        let mut peers = match (base, held) {
            (None, _) => BTreeMap::new(),
            (Some(base), Some((of, peers))) if of.generation == base => peers.clone(),
            _ => return Err(DaemonError::Refused("no such base".to_owned())),
        };
        peers.retain(|address, _| !remove.contains(address));
        peers.extend(add.into_iter().map(|peer| (peer.address.clone(), peer)));
        table.peers.insert(network, (version, peers));
        table.told.push(base.is_none());
        Ok(())
    }

    async fn reload(&self) -> Result<v1::ReloadResponse, DaemonError> {
        self.change()?.reloads += 1;
        Ok(v1::ReloadResponse::default())
    }

    async fn add_nic(&self, request: v1::AddNicRequest) -> Result<v1::Nic, DaemonError> {
        self.speak(&request.network).await;
        let hangs = self.table().hangs.take();
        if let Some(hangs) = hangs {
            hangs.notified().await;
        }
        let mut table = self.change()?;
        if let Some(why) = &table.refuses {
            return Err(DaemonError::Refused(why.clone()));
        }
        let taken = |nic: &v1::Nic| nic.network == request.network && nic.mac == request.mac;
        if !request.mac.is_empty() && table.nics.values().any(taken) {
            return Err(DaemonError::Exists(request.mac));
        }
        if table.nics.contains_key(&request.name) {
            return Err(DaemonError::Exists(request.name));
        }
        let dir = self.dir.join(&request.name);
        std::fs::create_dir_all(&dir).unwrap();
        let limits = request.limits.unwrap_or_default();
        let mut nic = v1::Nic {
            name: request.name.clone(),
            network: request.network,
            mac: request.mac,
            addresses: request.addresses,
            backing: request.backing,
            socket: dir.join("vhost.sock").to_str().unwrap().to_owned(),
            comp_vectors: 4,
            num_queues: 8,
            limits: Some(v1::Limits {
                max_qps: limits.max_qps.unwrap_or(100),
                ..v1::Limits::default()
            }),
            ..v1::Nic::default()
        };
        nic.set_session(v1::Session::Absent);
        std::fs::write(&nic.socket, "").unwrap();
        table.nics.insert(request.name, nic.clone());
        Ok(nic)
    }

    async fn update_nic(&self, request: v1::UpdateNicRequest) -> Result<v1::Nic, DaemonError> {
        let network = self.table().nics.get(&request.name).map(|nic| nic.network.clone());
        self.speak(network.as_deref().unwrap_or_default()).await;
        let mut table = self.change()?;
        let wanted = request.addresses.iter().flat_map(|addresses| &addresses.addresses);
        let others = || table.nics.values().filter(|nic| nic.name != request.name);
        let others = || others().filter(|nic| Some(&nic.network) == network.as_ref());
        let taken = |address: &&String| others().any(|nic| nic.addresses.contains(address));
        if let Some(address) = { wanted }.find(taken) {
            return Err(DaemonError::Exists(address.clone()));
        }
        let nic = table.nics.get_mut(&request.name).ok_or(DaemonError::NotFound(request.name))?;
        if let Some(addresses) = request.addresses {
            nic.addresses = addresses.addresses;
        }
        if let (Some(patch), Some(limits)) = (request.limits, &mut nic.limits) {
            limits.max_qps = patch.max_qps.unwrap_or(limits.max_qps);
        }
        Ok(nic.clone())
    }

    async fn nic(&self, name: &str) -> Result<v1::Nic, DaemonError> {
        let shown = self.read()?.shown(name).map(|(_, nic)| nic);
        shown.ok_or_else(|| DaemonError::NotFound(name.to_owned()))
    }

    async fn remove_nic(&self, name: &str) -> Result<(), DaemonError> {
        let network = self.table().nics.get(name).map(|nic| nic.network.clone());
        self.speak(network.as_deref().unwrap_or_default()).await;
        let mut table = self.change()?;
        if let Some(nic) = table.nics.remove(name) {
            std::fs::remove_file(&nic.socket).unwrap();
            // As the daemon: only an empty directory goes, so what the agent leaves in it stays for
            // ever.
            std::fs::remove_dir(self.dir.join(name)).unwrap();
        }
        Ok(())
    }
}
