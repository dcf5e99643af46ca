//! The configuration file is read again while the daemon runs.
//!
//! The rule is that of a restart: the file wins over what was changed by the API, and what it does
//! not name stays. Everything is checked as a whole before anything changes. What a guest has seen
//! of its NIC (its network, MAC address, device type, queues, backing) cannot change under it: that
//! is kept as it is, and said.

use std::collections::BTreeMap;

use super::{Daemon, Error, merge, resolve};
use crate::config;
use crate::node::{self, Backend, NicConfig, Registry, Saved, SocketAccess};

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

impl<B: Backend> Daemon<B> {
    /// Takes up a configuration file that was read again.
    ///
    /// # Errors
    /// It breaks a rule, or the state cannot be kept; then nothing has changed.
    pub fn reload(&self, file: &config::File) -> Result<Reloaded, Error> {
        let _alone = self.turns.whole();
        let old = self.known().registry.clone();
        let saved = old.save();
        let mut done = Reloaded::default();
        let file = possible(file, &saved, &mut done.kept);
        let mut new = Registry::new(self.nics_dir.clone());
        merge(&mut new, saved, &file)?;
        self.put(new.clone())?;
        let before: BTreeMap<&str, &NicConfig> =
            old.nics().map(|nic| (nic.name.as_str(), nic)).collect();
        for network in new.networks().filter(|network| old.network(&network.name).is_err()) {
            done.changed.push(format!("network {:?} added", network.name));
        }
        for network in new.networks() {
            let peers = new.effective_peers(&network.name);
            if peers != old.effective_peers(&network.name) {
                self.backend.set_peers(network.vni, &peers);
                done.changed.push(format!("peers of network {:?} changed", network.name));
            }
        }
        let mut refused = Vec::new();
        for nic in new.nics() {
            let broken = self.known().broken.contains_key(&nic.name);
            match before.get(nic.name.as_str()) {
                Some(old) if !broken && same(old, nic) => {}
                Some(old) if !broken => match self.apply(old, nic) {
                    Ok(()) => done.changed.push(format!("NIC {:?} changed", nic.name)),
                    Err(error) => {
                        done.failed.push(error.to_string());
                        refused.push((*old).clone());
                    }
                },
                _ => match self.attach(nic) {
                    Ok(()) => {
                        self.known().broken.remove(&nic.name);
                        done.changed.push(format!("NIC {:?} added", nic.name));
                    }
                    Err(error) => {
                        self.known().broken.insert(nic.name.clone(), error.to_string());
                        done.failed.push(error.to_string());
                    }
                },
            }
        }
        if !refused.is_empty() {
            refused.into_iter().for_each(|nic| new.put(nic));
            self.put(new)?;
        }
        Ok(done)
    }

    /// Saves all of it and puts it in place, or does neither.
    fn put(&self, registry: Registry) -> Result<(), Error> {
        self.store.save(registry.save())?;
        self.known().replace(registry);
        Ok(())
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
