//! What is known of networks and NICs, and how a change becomes part of it.
//!
//! ```text
//!  turn of the network ──> plan: rules, names taken ──> device layer ──> commit: saved, shown
//! ```
//!
//! A change of a network waits for the other changes of that network alone. Two networks may
//! change at once, so a change is planned first: the rules are checked against all that is there or
//! on its way, and the name, VNI or address that it wants is nobody else's from then on. The device
//! layer takes its time without a lock on any of this. In the end the change is saved and put in
//! place; whoever only looks sees the state before it or after it. What a change that failed had
//! planned is forgotten with the end of its turn.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use super::{Daemon, Error, Version};
use crate::admin::store::StoreError;
use crate::node::{self, Backend, NicConfig, Registry};

/// See the module.
#[derive(Debug)]
pub(super) struct Known {
    /// What is there, as it is saved and shown.
    pub(super) registry: Registry,
    /// What is there or on its way. Its peers mean nothing.
    pub(super) planned: Registry,
    /// NICs that could not be served when the daemon started, and why.
    pub(super) broken: BTreeMap<String, String>,
    /// Which set of peers the controller gave each network in this run.
    pub(super) versions: BTreeMap<String, Version>,
}

impl Known {
    pub(super) fn new(registry: Registry) -> Self {
        let planned = registry.clone();
        Self { registry, planned, broken: BTreeMap::new(), versions: BTreeMap::new() }
    }
}

impl<B: Backend> Daemon<B> {
    // A poisoned lock means that one request panicked. Nothing is put in place half-way, and the
    // owners of all other NICs must still be able to see and manage theirs, so the locks are used
    // on.
    pub(super) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a network, or what is in it, in its turn.
    pub(super) fn change<R>(&self, network: &str, change: impl FnOnce() -> R) -> R {
        let agree = || {
            let known = &mut *self.known();
            known.planned.take_network(&known.registry, network);
        };
        self.turns.of(&network.to_owned(), || {
            // One that panicked left its plan.
            agree();
            let done = change();
            agree();
            done
        })
    }

    /// Changes a NIC, in its network's turn.
    pub(super) fn change_nic<R>(
        &self,
        name: &str,
        change: impl FnOnce(NicConfig) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let mut change = Some(change);
        loop {
            let network = self.known().registry.nic(name)?.network.clone();
            let done = self.change(&network, || {
                let nic = self.known().registry.nic(name)?.clone();
                // Another one of that name, in another network, since we looked.
                let change = change.take_if(|_| nic.network == network);
                change.map(|change| change(nic)).transpose()
            });
            if let Some(done) = done? {
                return Ok(done);
            }
        }
    }

    /// Checks a change, and takes what it wants.
    pub(super) fn plan<R>(
        &self,
        change: impl FnOnce(&mut Registry) -> Result<R, node::Error>,
    ) -> Result<R, node::Error> {
        change(&mut self.known().planned)
    }

    /// Saves a change and puts it in place, or does neither.
    pub(super) fn commit<R, E: From<StoreError>>(
        &self,
        change: impl FnOnce(&mut Registry) -> Result<R, E>,
    ) -> Result<R, E> {
        let _alone = self.committing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut registry = self.known().registry.clone();
        let done = change(&mut registry)?;
        self.store.save(registry.save())?;
        self.known().registry = registry;
        Ok(done)
    }
}
