//! The configuration file is read again while the daemon runs.
//!
//! The rule is that of a restart: the file wins over what was changed by the API, and what it does
//! not name stays. Everything is checked as a whole before anything changes. What a guest has seen
//! of its NIC (its network, MAC address, device type, queues, backing) cannot change under it: that
//! is kept as it is, and said.
//!
//! What the file says is saved at once. Then each network whose NICs or peers change is told, in
//! its turn and beside the others: one that does not answer holds up nobody else, and who asked is
//! told its name. It is told when it answers, and the log says what came of it.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::{Daemon, Error, merge, resolve};
use crate::config;
use crate::node::{self, Backend, NicConfig, Registry, Saved, SocketAccess};

/// How long who asks for it waits for the networks.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
/// Networks that are told side by side.
const SIDE_BY_SIDE: usize = 32;

/// What reading the configuration again has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// What is different now.
    pub changed: Vec<String>,
    /// What the file asks for and only a restart, or a new NIC, can bring.
    pub kept: Vec<String>,
    /// What should be different now and could not be made so.
    pub failed: Vec<String>,
}

impl Reloaded {
    fn add(&mut self, other: Self) {
        self.changed.extend(other.changed);
        self.kept.extend(other.kept);
        self.failed.extend(other.failed);
    }

    /// What it was, for the log.
    pub(in crate::admin) fn tell(&self) {
        let changed = |what| tracing::info!(%what, "configuration read again: changed");
        let kept = |what| tracing::warn!(%what, "configuration read again: not changed");
        let failed = |why| tracing::error!(%why, "configuration read again: failed");
        self.changed.iter().for_each(changed);
        self.kept.iter().for_each(kept);
        self.failed.iter().for_each(failed);
        if *self == Self::default() {
            tracing::info!("configuration read again: nothing has changed");
        }
    }
}

/// What a network is to be told.
#[derive(Debug, Default)]
struct Part {
    peers: bool,
    /// NICs, and how they were; nothing of one that was not served.
    nics: Vec<(String, Option<NicConfig>)>,
}

impl<B: Backend> Daemon<B> {
    /// Takes up a configuration file that was read again.
    ///
    /// # Errors
    /// It breaks a rule, or the state cannot be kept; then nothing has changed.
    pub fn reload(self: &Arc<Self>, file: &config::File) -> Result<Reloaded, Error> {
        let mut done = Reloaded::default();
        let parts = self.take_over(file, &mut done)?;
        self.tell_networks(parts, &mut done);
        Ok(done)
    }

    /// Has the file's networks and NICs be those that there are, for all who look, and says what
    /// remains to be told to whom.
    fn take_over(
        &self,
        file: &config::File,
        done: &mut Reloaded,
    ) -> Result<BTreeMap<String, Part>, Error> {
        // Nobody else saves anything.
        let _alone = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.known().registry.clone();
        let saved = old.save();
        let file = possible(file, &saved, &mut done.kept);
        let mut new = Registry::new(self.nics_dir.clone());
        merge(&mut new, saved, &file)?;
        // What others are about to make is theirs.
        self.plan(|planned| planned.adopt(&old, &new))?;
        if let Err(error) = self.store.save(new.save()) {
            let known = &mut *self.known();
            for network in new.networks() {
                known.planned.take_network(&old, &network.name);
            }
            return Err(error.into());
        }
        let broken = {
            let mut known = self.known();
            known.registry = new.clone();
            known.broken.clone()
        };
        let mut parts: BTreeMap<String, Part> = BTreeMap::new();
        for network in new.networks() {
            let name = &network.name;
            if old.network(name).is_err() {
                done.changed.push(format!("network {name:?} added"));
            }
            if new.effective_peers(name) != old.effective_peers(name) {
                parts.entry(name.clone()).or_default().peers = true;
            }
        }
        for nic in new.nics() {
            let before = old.nic(&nic.name).ok().filter(|_| !broken.contains_key(&nic.name));
            if !before.is_some_and(|before| same(before, nic)) {
                let part = parts.entry(nic.network.clone()).or_default();
                part.nics.push((nic.name.clone(), before.cloned()));
            }
        }
        Ok(parts)
    }

    /// Tells the networks side by side, and waits for them for a while.
    fn tell_networks(self: &Arc<Self>, parts: BTreeMap<String, Part>, done: &mut Reloaded) {
        let mut left: Vec<String> = parts.keys().cloned().collect();
        let threads = SIDE_BY_SIDE.min(parts.len());
        let parts = Arc::new(Mutex::new(parts));
        let (tell, told) = channel::<(String, Reloaded)>();
        for _ in 0..threads {
            let (daemon, parts, tell) = (Arc::clone(self), Arc::clone(&parts), tell.clone());
            let work = move || {
                let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).pop_first();
                while let Some((network, part)) = next() {
                    let done = daemon.tell_network(&network, &part);
                    // Who asked has gone on.
                    if let Err(late) = tell.send((network, done)) {
                        late.0.1.tell();
                    }
                }
            };
            // Others may do the work of one that cannot be had.
            let started = Builder::new().name("reload".to_owned()).spawn(work);
            let _ = started.inspect_err(|error| tracing::error!(%error, "cannot start a thread"));
        }
        drop(tell);
        let until = Instant::now() + PATIENCE;
        while !left.is_empty() {
            let time = until.saturating_duration_since(Instant::now());
            let Ok((network, part)) = told.recv_timeout(time) else { break };
            left.retain(|other| *other != network);
            done.add(part);
        }
        for network in left {
            done.failed.push(format!(
                "network {network:?} does not answer: what the file changes of it is saved, and \
                 holds when it does; the log will say so, and `vhost-rdma network restart \
                 {network}` helps"
            ));
        }
    }

    fn tell_network(&self, network: &str, part: &Part) -> Reloaded {
        self.change(network, || {
            let mut done = Reloaded::default();
            if part.peers {
                self.tell_peers(network);
                done.changed.push(format!("peers of network {network:?} changed"));
            }
            for (name, before) in &part.nics {
                // One that was removed since is not missed.
                let now = self.known().registry.nic(name).cloned();
                let Ok(nic) = now else { continue };
                let told = match before {
                    Some(before) => self.change_to(before, &nic),
                    None => self.begin(&nic),
                };
                match told {
                    Ok(word) => done.changed.push(format!("NIC {name:?} {word}")),
                    Err(error) => done.failed.push(error.to_string()),
                }
            }
            done
        })
    }

    /// A NIC that does not take it stays as it was.
    fn change_to(&self, before: &NicConfig, nic: &NicConfig) -> Result<&'static str, Error> {
        if let Err(error) = self.apply(before, nic) {
            self.commit::<_, Error>(|registry| {
                registry.put(before.clone());
                Ok(())
            })?;
            return Err(error);
        }
        Ok("changed")
    }

    fn begin(&self, nic: &NicConfig) -> Result<&'static str, Error> {
        match self.attach(nic) {
            Ok(()) => {
                self.known().broken.remove(&nic.name);
                Ok("added")
            }
            Err(error) => {
                self.known().broken.insert(nic.name.clone(), error.to_string());
                Err(error.into())
            }
        }
    }
}

/// But for what the file says of it, which guests do not see.
fn same(old: &NicConfig, new: &NicConfig) -> bool {
    *old == NicConfig { configured: old.configured, ..new.clone() }
}

/// The file without what cannot change while the daemon runs.
fn possible(file: &config::File, saved: &Saved, kept: &mut Vec<String>) -> config::File {
    let mut file = file.clone();
    for network in &mut file.networks {
        let old = saved.networks.iter().find(|old| old.name == network.name);
        if let (Some(old), Some(vni)) = (old, network.vni)
            && old.vni != vni
        {
            kept.push(format!(
                "network {:?} keeps VNI {}; {vni} takes a restart",
                old.name, old.vni
            ));
            network.vni = Some(old.vni);
        }
    }
    for nic in &mut file.nics {
        if let Some(old) = saved.nics.iter().find(|old| old.name == nic.name) {
            keep_identity(nic, old, kept);
        }
    }
    file
}

fn keep_identity(nic: &mut config::NicEntry, old: &NicConfig, kept: &mut Vec<String>) {
    let network = nic.network.as_deref().unwrap_or(node::DEFAULT_NETWORK);
    let vectors = nic.comp_vectors.unwrap_or(node::DEFAULT_COMP_VECTORS.into());
    let differ = [
        ("network", network != old.network),
        ("MAC address", nic.mac.is_some_and(|mac| mac != old.mac)),
        ("virtio_id", nic.virtio_id != old.virtio_id),
        ("comp_vectors", vectors != u32::from(old.comp_vectors)),
        ("backing", nic.backing != old.backing),
        ("guests", nic.guests != old.guests),
    ];
    let differ: Vec<&str> =
        differ.into_iter().filter(|(_, is)| *is).map(|(what, _)| what).collect();
    if !differ.is_empty() {
        kept.push(format!(
            "NIC {:?} keeps its {}: its guest has seen that; remove the NIC and reload, or restart",
            nic.name,
            differ.join(", ")
        ));
    }
    nic.network = Some(old.network.clone());
    nic.mac = Some(old.mac);
    nic.virtio_id = old.virtio_id;
    nic.comp_vectors = Some(old.comp_vectors.into());
    nic.backing = old.backing.clone();
    nic.guests = old.guests;
}

/// Who may open the admin socket, if that can be resolved.
pub(crate) fn admin_access(access: &config::Access) -> Result<SocketAccess, Error> {
    Ok(resolve(access, 0o600)?)
}

#[cfg(test)]
mod tests;
