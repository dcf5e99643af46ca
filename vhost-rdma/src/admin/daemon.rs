//! The daemon: registry, saved state and device layer, kept in step.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, available_parallelism};
use std::time::Duration;

use self::known::Known;
pub(super) use self::peers::{PeersUpdate, Version};
pub use self::reload::Reloaded;
use super::store::{Store, StoreError};
use super::users::{UserError, acl, group_id, user_id};
use crate::config;
use crate::mark;
use crate::node::{
    self, AttachError, Backend, NetworkConfig, NicConfig, NicPatch, NicSpec, NicStatus, Registry,
    Renewed, Saved, Session, SocketAccess,
};
use crate::socket;
use crate::turns::Turns;

mod known;
mod looks;
mod peers;
pub(super) mod reload;
mod upgrade;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The registry or the device layer refused it.
    #[error(transparent)]
    Node(#[from] node::Error),
    /// An unknown owner or group.
    #[error(transparent)]
    User(#[from] UserError),
    /// The state cannot be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A thing of the configuration file that breaks a rule.
    #[error("in the configuration file, {what} {name:?}: {source}")]
    Configured {
        /// "network" or "NIC".
        what: &'static str,
        /// Its name.
        name: String,
        /// The rule.
        source: Box<Self>,
    },
    /// A thing of the saved state that breaks a rule.
    #[error(
        "the saved state does not fit: {0}; change the configuration file, or move the state file \
         away"
    )]
    Restore(node::Error),
}

/// A NIC as configured and as it is now.
#[derive(Debug, Clone)]
pub struct NicView {
    /// As configured.
    pub config: NicConfig,
    /// As it is now.
    pub status: NicStatus,
}

/// The networks and NICs that this process serves; `known` says how they change.
#[derive(Debug)]
pub struct Daemon<B> {
    backend: Arc<B>,
    nics_dir: PathBuf,
    store: Store,
    /// By network.
    turns: Turns<String>,
    /// Held while a change is saved.
    committing: Mutex<()>,
    /// Held for moments only.
    known: Mutex<Known>,
}

/// Whether [`Daemon::start`] would find something wrong with the file or with what is saved.
///
/// # Errors
/// As there.
pub(super) fn check(runtime_dir: &Path, ephemeral: bool, file: &config::File) -> Result<(), Error> {
    let saved = Store::new(runtime_dir, ephemeral).load()?;
    merge(&mut Registry::new(runtime_dir.join("nics")), saved, file)
}

impl<B: Backend> Daemon<B> {
    /// Takes up the saved state and the configuration file and serves every NIC of them. A NIC that
    /// cannot be served is reported as failed and does not stop the others.
    ///
    /// # Errors
    /// State or configuration break a rule, or the state cannot be read or written.
    pub fn start(
        runtime_dir: &Path,
        ephemeral: bool,
        file: &config::File,
        backend: B,
    ) -> Result<Self, Error> {
        let nics_dir = runtime_dir.join("nics");
        let store = Store::new(runtime_dir, ephemeral);
        let mut registry = Registry::new(nics_dir.clone());
        let (saved, is_first) = (store.load()?, !store.is_there());
        merge(&mut registry, saved.clone(), file)?;
        let merged = registry.save();
        // Guests may be waiting, who are not to lose their devices for a disk that is full. What
        // the configuration file says is read again the next time; who changes something is told.
        if merged != saved
            && let Err(error) = store.save(merged)
        {
            if is_first {
                return Err(error.into());
            }
            tracing::error!(%error, "the state stays as it was saved");
        }
        let nics: Vec<NicConfig> = registry.nics().cloned().collect();
        let daemon = Self {
            backend: Arc::new(backend),
            nics_dir,
            store,
            turns: Turns::default(),
            committing: Mutex::default(),
            known: Mutex::new(Known::new(registry)),
        };
        daemon.tell_all_peers();
        daemon.attach_all(nics);
        daemon.backend.settled();
        Ok(daemon)
    }

    /// Serves all these, networks side by side: guests that an earlier daemon left stand still
    /// until those of their own network are there, and wait for no others.
    fn attach_all(&self, nics: Vec<NicConfig>) {
        let mut networks: BTreeMap<u32, Vec<NicConfig>> = BTreeMap::new();
        for nic in nics {
            networks.entry(nic.vni).or_default().push(nic);
        }
        let side_by_side = available_parallelism().map_or(1, NonZero::get).min(networks.len());
        let networks = Mutex::new(networks.into_iter());
        let next = || networks.lock().unwrap_or_else(PoisonError::into_inner).next();
        let attach = || {
            while let Some((vni, nics)) = next() {
                self.attach_or_say(&nics);
                self.backend.complete(vni);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..side_by_side {
                // Without the thread it takes longer.
                let _ = Builder::new().name("attach".to_owned()).spawn_scoped(scope, attach);
            }
            attach();
        });
    }

    fn attach_or_say(&self, nics: &[NicConfig]) {
        let say = |nic: &NicConfig, error: node::Error| {
            tracing::error!(nic = nic.name, %error, "cannot serve this NIC");
            self.known().broken.insert(nic.name.clone(), error.to_string());
        };
        let mut housed = Vec::with_capacity(nics.len());
        for nic in nics {
            match self.make_dir(nic) {
                Ok(()) => housed.push(nic),
                Err(error) => say(nic, error),
            }
        }
        for (nic, result) in housed.iter().zip(self.backend.attach_all(&housed)) {
            if let Err(error) = self.attached(nic, result) {
                say(nic, error);
            }
        }
    }

    fn attach(&self, nic: &NicConfig) -> Result<(), node::Error> {
        self.make_dir(nic)?;
        self.attached(nic, self.backend.attach(nic))
    }

    /// The directory of a NIC's socket.
    fn make_dir(&self, nic: &NicConfig) -> Result<(), node::Error> {
        let dir = self.nics_dir.join(&nic.name);
        std::fs::create_dir_all(&dir).map_err(|error| {
            let source = AttachError::io(format!("create the directory {}", dir.display()), error);
            node::Error::Attach { name: nic.name.clone(), source }
        })
    }

    /// Nothing is left of a NIC that is not served.
    fn attached(
        &self,
        nic: &NicConfig,
        result: Result<(), AttachError>,
    ) -> Result<(), node::Error> {
        result.map_err(|source| {
            remove_dir(&self.nics_dir.join(&nic.name));
            node::Error::Attach { name: nic.name.clone(), source }
        })
    }

    fn detach(&self, nic: &NicConfig) {
        self.backend.detach(&nic.name);
        mark::remove(&nic.socket);
        remove_dir(&self.nics_dir.join(&nic.name));
    }

    /// True if nothing is saved.
    #[must_use]
    pub const fn is_ephemeral(&self) -> bool {
        self.store.is_ephemeral()
    }

    /// How the threads that move data are.
    #[must_use]
    pub fn workers(&self) -> Vec<node::WorkerStatus> {
        self.backend.workers()
    }

    /// The processes that serve networks.
    #[must_use]
    pub fn processes(&self) -> Vec<node::ProcessStatus> {
        self.backend.processes()
    }

    /// How long guests stood still for this program; see [`Backend::upgrade_pause`].
    #[must_use]
    pub fn upgrade_pause(&self) -> Duration {
        self.backend.upgrade_pause()
    }

    /// Whether guests that an earlier program served go on here.
    #[must_use]
    pub fn has_taken_up(&self) -> bool {
        self.backend.has_taken_up()
    }

    /// Adds a network.
    ///
    /// # Errors
    /// A rule, or the state cannot be kept.
    pub fn add_network(&self, name: &str, vni: Option<u32>) -> Result<NetworkConfig, Error> {
        // A name that breaks the rules, or is taken, has no turn.
        self.plan(|planned| planned.check_network(name))?;
        self.change(name, || {
            let network = self.plan(|planned| planned.add_network(name, vni, false).cloned())?;
            let last_vni = self.known().planned.last_vni();
            self.commit::<_, Error>(|registry| {
                registry.put_network(network.clone(), last_vni);
                Ok(())
            })?;
            tracing::info!(network = name, vni = network.vni, "network added");
            Ok(network)
        })
    }

    /// Removes an empty network.
    ///
    /// # Errors
    /// A rule, or the state cannot be kept.
    pub fn remove_network(&self, name: &str) -> Result<NetworkConfig, Error> {
        self.known().registry.network(name)?;
        self.change(name, || {
            let network = self.known().registry.clone().remove_network(name)?;
            // Before anyone can ask for the VNI or the name again.
            self.backend
                .forget_network(network.vni)
                .map_err(|source| node::Error::Network { name: name.to_owned(), source })?;
            self.commit::<_, Error>(|registry| Ok(registry.remove_network(name)?))
                .inspect_err(|_| self.tell_peers(name))?;
            self.known().versions.remove(name);
            tracing::info!(network = name, "network removed");
            Ok(network)
        })
    }

    /// Has another process go on with a network's NICs.
    ///
    /// # Errors
    /// There is no such network, or no process of its own serves it.
    pub fn restart_network(&self, name: &str) -> Result<Renewed, Error> {
        let network = self.known().registry.network(name)?.clone();
        let renewed = self
            .backend
            .renew(network.vni)
            .map_err(|source| node::Error::Network { name: name.to_owned(), source })?;
        let (kept, lost) = (renewed.kept.len(), renewed.lost.len());
        tracing::info!(network = name, kept, lost, pause = ?renewed.pause, "network restarted");
        Ok(renewed)
    }

    /// Every network, with how many NICs it has.
    #[must_use]
    pub fn networks(&self) -> Vec<(NetworkConfig, usize)> {
        let registry = &self.known().registry;
        registry
            .networks()
            .map(|network| (network.clone(), registry.nics_of(&network.name)))
            .collect()
    }

    /// Adds a NIC and serves it.
    ///
    /// # Errors
    /// A rule, the device layer, or the state cannot be kept.
    pub fn add_nic(&self, spec: NicSpec) -> Result<NicView, Error> {
        let network = spec.network.clone().unwrap_or_else(|| node::DEFAULT_NETWORK.to_owned());
        self.known().registry.network(&network)?;
        let nic = self.change(&network, || {
            let nic = self.plan(|planned| planned.add_nic(spec, random).cloned())?;
            self.attach(&nic)?;
            self.commit::<_, Error>(|registry| {
                registry.put(nic.clone());
                Ok(())
            })
            .inspect_err(|_| self.detach(&nic))?;
            Ok::<_, Error>(nic)
        })?;
        tracing::info!(
            nic = nic.name,
            number = nic.number,
            network = nic.network,
            mac = %nic.mac,
            socket = %nic.socket.display(),
            "NIC added"
        );
        Ok(self.view(nic, None))
    }

    /// Ends a NIC.
    ///
    /// # Errors
    /// It does not exist, or the state cannot be kept.
    pub fn remove_nic(&self, name: &str) -> Result<NicConfig, Error> {
        self.change_nic(name, |nic| {
            self.commit::<_, Error>(|registry| Ok(registry.remove_nic(name)?))?;
            self.known().broken.remove(name);
            self.detach(&nic);
            tracing::info!(nic = name, "NIC removed");
            Ok(nic)
        })
    }

    /// Changes a live NIC.
    ///
    /// # Errors
    /// A rule, the device layer, or the state cannot be kept; the old values then hold.
    pub fn update_nic(&self, name: &str, patch: NicPatch) -> Result<NicView, Error> {
        let (new, broken) = self.change_nic(name, |old| {
            let new = self.plan(|planned| planned.update_nic(name, patch).cloned())?;
            let broken = self.known().broken.get(name).cloned();
            // One that is not served takes the new values when it is.
            if broken.is_none() {
                self.apply(&old, &new)?;
            }
            let saved = self.commit::<_, Error>(|registry| {
                registry.put(new.clone());
                Ok(())
            });
            if let Err(error) = saved {
                if broken.is_none()
                    && let Err(error) = self.apply(&new, &old)
                {
                    tracing::error!(nic = name, %error, "cannot take a refused change back");
                }
                return Err(error);
            }
            Ok((new, broken))
        })?;
        tracing::info!(nic = name, "NIC changed");
        Ok(self.view(new, broken))
    }

    fn apply(&self, old: &NicConfig, new: &NicConfig) -> Result<(), Error> {
        let wrap = |source| node::Error::Attach { name: new.name.clone(), source };
        if new.access != old.access {
            socket::set_access(&new.socket, &new.access).map_err(wrap)?;
        }
        if let Err(error) = self.backend.update(new) {
            if new.access != old.access
                && let Err(error) = socket::set_access(&old.socket, &old.access)
            {
                tracing::error!(nic = new.name, %error, "cannot take a refused change back");
            }
            return Err(wrap(error).into());
        }
        Ok(())
    }

    /// The network that a NIC is in.
    pub(super) fn network_of(&self, nic: &str) -> Option<String> {
        self.known().registry.nic(nic).ok().map(|nic| nic.network.clone())
    }

    /// One NIC.
    ///
    /// # Errors
    /// It does not exist.
    pub fn nic(&self, name: &str) -> Result<NicView, Error> {
        let (nic, broken) = {
            let known = self.known();
            (known.registry.nic(name)?.clone(), known.broken.get(name).cloned())
        };
        Ok(self.view(nic, broken))
    }

    /// Every NIC, or those of one network.
    ///
    /// # Errors
    /// The network does not exist.
    pub fn nics(&self, network: Option<&str>) -> Result<Vec<NicView>, Error> {
        let nics: Vec<_> = {
            let known = self.known();
            if let Some(network) = network {
                known.registry.network(network)?;
            }
            let wanted = known
                .registry
                .nics()
                .filter(|nic| network.is_none_or(|network| nic.network == network));
            wanted.map(|nic| (nic.clone(), known.broken.get(&nic.name).cloned())).collect()
        };
        Ok(self.views(nics))
    }

    fn view(&self, config: NicConfig, broken: Option<String>) -> NicView {
        let status = match broken {
            Some(error) => {
                NicStatus { session: Session::Failed, error: Some(error), ..NicStatus::default() }
            }
            None => self.backend.status(&config.name),
        };
        NicView { config, status }
    }

    /// Ends every NIC and removes its socket; the saved state stays, and so do the directories of
    /// NICs that come back: they may be mounted into containers, which would go on looking at one
    /// that was removed.
    pub fn stop(&self) {
        // Changes under way may wait for a process that answers nothing.
        self.backend.ending();
        let _alone = self.turns.whole();
        let (registry, broken) = {
            let known = self.known();
            (known.registry.clone(), known.broken.clone())
        };
        self.backend.ending();
        for nic in registry.nics().filter(|nic| !broken.contains_key(&nic.name)) {
            if self.is_ephemeral() {
                self.detach(nic);
            } else {
                self.backend.detach(&nic.name);
            }
        }
    }
}

/// Only an empty directory goes: whatever someone else put there is not ours to remove.
fn remove_dir(dir: &Path) {
    match std::fs::remove_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove the NIC's directory");
        }
        _ => {}
    }
}

/// Random octets for a MAC address. It need not be secret, only unlikely to repeat.
fn random() -> [u8; 6] {
    let mut octets = [0; 6];
    if let Err(error) = crate::random::fill(&mut octets) {
        tracing::warn!(%error, "no random source; the NIC gets a poor MAC address");
    }
    octets
}

/// The user and group numbers and the mode that a configured access means; an absent mode is
/// `mode`.
pub(super) fn resolve(access: &config::Access, mode: u32) -> Result<SocketAccess, UserError> {
    Ok(SocketAccess {
        uid: access.owner.as_deref().map(user_id).transpose()?,
        gid: access.group.as_deref().map(group_id).transpose()?,
        mode: access.mode.unwrap_or(mode),
        acl: acl(&access.acl)?,
    })
}

/// What the configuration file names wins; what it leaves open (a VNI, a MAC address) is as it was
/// saved, because guests have seen it; what it does not name at all was added over the API and
/// comes back as saved.
fn merge(registry: &mut Registry, saved: Saved, file: &config::File) -> Result<(), Error> {
    let configured = |what, name: &str, source: Error| Error::Configured {
        what,
        name: name.to_owned(),
        source: Box::new(source),
    };
    let mut networks_left = Saved { nics: Vec::new(), peers: Vec::new(), ..saved.clone() };
    for network in &file.networks {
        let old = saved.networks.iter().find(|old| old.name == network.name);
        if let Some(vni) = network.vni.or(old.map(|old| old.vni))
            && registry.network(&network.name).is_ok_and(|existing| existing.vni == vni)
        {
            registry.mark_configured(&network.name);
        } else if let Some(vni) = network.vni.or(old.map(|old| old.vni)) {
            registry
                .add_network(&network.name, Some(vni), true)
                .map_err(|error| configured("network", &network.name, error.into()))?;
        } else {
            continue;
        }
        networks_left.networks.retain(|old| old.name != network.name);
    }
    registry.restore(networks_left).map_err(Error::Restore)?;
    for network in file
        .networks
        .iter()
        .filter(|network| registry.network(&network.name).is_err())
        .collect::<Vec<_>>()
    {
        registry
            .add_network(&network.name, None, true)
            .map_err(|error| configured("network", &network.name, error.into()))?;
    }
    for network in &file.networks {
        for peer in &network.peers {
            peers::of_file(&network.name, peer)
                .and_then(|peer| registry.add_peer(peer).map_err(Into::into))
                .map_err(|error| configured("network", &network.name, error))?;
        }
    }
    for nic in &file.nics {
        let spec = spec_of(nic, &saved).map_err(|error| configured("NIC", &nic.name, error))?;
        registry
            .add_nic(spec, random)
            .map_err(|error| configured("NIC", &nic.name, error.into()))?;
    }
    registry.restore(Saved { networks: vec![], ..saved }).map_err(Error::Restore)
}

fn spec_of(nic: &config::NicEntry, saved: &Saved) -> Result<NicSpec, Error> {
    let network = nic.network.as_deref().unwrap_or(node::DEFAULT_NETWORK);
    let old = saved.nics.iter().find(|old| old.name == nic.name && old.network == network);
    Ok(NicSpec {
        name: nic.name.clone(),
        network: Some(network.to_owned()),
        mac: nic.mac.or(old.map(|old| old.mac)),
        addresses: nic.addresses.clone(),
        virtio_id: nic.virtio_id,
        comp_vectors: nic.comp_vectors,
        limits: nic.limits,
        backing: nic.backing.clone(),
        guests: nic.guests,
        access: resolve(&nic.access, SocketAccess::default().mode)?,
        configured: true,
        number: old.map(|old| old.number),
    })
}

#[cfg(test)]
mod tests;
