//! Makes ledger, daemon and kubelet agree again, at start and every few seconds.
//!
//! ```text
//!   kubelet lists an ID ─┬─ the ledger has no grant    adopt it
//!                        └─ the daemon has no NIC      make it again, with the same MAC address
//!                                                      and path
//!   ledger has a grant ──── nobody holds it            take it back, when every witness agrees
//!                                                      that the pod is gone
//!   daemon has a NIC ────── the ledger does not        remove it
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost_rdma_agent_api::{Checkpoint, Kind};

use super::allocate::{pool_as_granted, same_addresses};
use super::{Agent, Missing, State, debts, now};
use crate::daemon::{Daemon, DaemonError, View, is_connected};
use crate::grant::{
    NIC_FILE, NIC_PREFIX, cdi_file, device_info, device_info_name, host_dir, nic_name,
};
use crate::holders::{Holding, Kubelet, KubeletError, Listing, PodKey};
use crate::ledger::{ClusterGrant, Grant, Owner, Slot};
use crate::pool::{Device, Pool, Pools};

/// How often the kubelet must have listed an ID to nobody before it is taken back, besides the time
/// that this must last.
const MISSES: u32 = 3;
/// How long a round takes IDs back: what else it looks at must not wait for what cannot be undone.
const RECLAIMING: Duration = Duration::from_secs(5);

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// One round.
    pub async fn reconcile(&self) {
        let started = Instant::now();
        let changes = self.state.lock().await.daemon.changes;
        let (view, listing) = tokio::join!(self.daemon.view(), self.kubelet.list());
        let gone = {
            let mut state = self.state.lock().await;
            // What was allocated while the daemon answered is not in its answer, and must not look
            // as if it were missing.
            let view =
                if state.daemon.changes == changes { view } else { self.daemon.view().await };
            self.see_daemon(&mut state, view);
            match &listing {
                Ok(listing) => {
                    state.kubelet_error = None;
                    self.attribute(&mut state, &listing.holdings).await;
                    see_pods(&mut state, listing);
                }
                Err(KubeletError(error)) => {
                    state.kubelet_error = Some(error.clone());
                    state.missing.clear();
                }
            }
            self.see_sessions(&mut state).await;
            self.hear_of_names(&mut state).await;
            self.restore(&mut state).await;
            self.leave_networks(&mut state).await;
            self.let_blocks_go(&mut state).await;
            let gone = match &listing {
                Ok(listing) => {
                    let gone = self.gone(&mut state, listing, started);
                    state.stuck.due(gone, &self.settings)
                }
                Err(_) => Vec::new(),
            };
            if let Ok(listing) = &listing {
                self.remove_strangers(&mut state, &listing.holdings).await;
            }
            self.publish(&mut state);
            gone
        };
        self.patch().await;
        let began = Instant::now();
        for id in gone {
            self.reclaim(&id).await;
            // The others come in the next round, before those that have failed in this one.
            if began.elapsed() >= RECLAIMING {
                break;
            }
        }
        if self.settings.cluster {
            self.tell_peers().await;
        }
    }

    pub(super) fn see_daemon(&self, state: &mut State, view: Result<View, DaemonError>) {
        let daemon = &mut state.daemon;
        match view {
            Ok(view) => {
                let other = daemon.instance.as_ref().is_some_and(|run| *run != view.instance);
                let back = daemon.view.is_none() && daemon.instance.is_some();
                if other {
                    // Whoever was connected to the old process has lost its session.
                    let back_at = Instant::now();
                    for id in std::mem::take(&mut daemon.connected) {
                        daemon.lost.entry(id).or_insert(back_at);
                    }
                    state.networks.clear();
                    state.refused.clear();
                }
                if other || back {
                    tracing::info!(instance = view.instance, "the daemon answers again");
                    self.events.node("DaemonBack", "the vhost-rdma daemon answers again", false);
                }
                daemon.instance = Some(view.instance.clone());
                daemon.view = Some(view);
            }
            Err(error) => {
                daemon.error = match &error {
                    DaemonError::Unreachable(why) => why.clone(),
                    other => other.to_string(),
                };
                if daemon.view.take().is_some() {
                    state.counters.daemon_losses += 1;
                    tracing::error!(%error, "the daemon is gone");
                    self.events.node("DaemonGone", &error.to_string(), true);
                }
            }
        }
    }

    /// Who is connected, and who has not come back.
    async fn see_sessions(&self, state: &mut State) {
        let Some(view) = &state.daemon.view else { return };
        let mut connected = BTreeSet::new();
        // What the daemon remembers: also VMMs that came and lost it between two looks of ours, or
        // while no agent was there.
        let mut interrupted = Vec::new();
        let mut used = Vec::new();
        for (id, slot) in state.ledger.iter() {
            let Some(grant) = &slot.grant else { continue };
            let Some(nic) = view.nics.get(&nic_name(id)) else { continue };
            let counted = nic.counters.is_some_and(|counters| counters.control_commands > 0);
            if is_connected(nic) {
                connected.insert(id.clone());
            } else if nic.interrupted {
                interrupted.push(id.clone());
            }
            if !grant.used && (is_connected(nic) || nic.interrupted || counted) {
                let mut slot = slot.clone();
                if let Some(grant) = &mut slot.grant {
                    grant.used = true;
                }
                used.push((id.clone(), slot));
            }
        }
        for id in interrupted {
            state.daemon.lost.entry(id).or_insert_with(Instant::now);
        }
        state.daemon.lost.retain(|id, _| !connected.contains(id));
        // A VMM that went away while the daemon ran is a container that ends or starts again:
        // nothing is wrong with that.
        state.daemon.connected = connected;
        if let Err(error) = self.commit(state, used, true).await {
            tracing::error!(%error, "cannot write down which NICs are used; it is tried again");
        }
    }

    /// Who has what, as the kubelet says.
    async fn attribute(&self, state: &mut State, holdings: &[Holding]) {
        let pools = Arc::clone(&state.pools);
        let mut changes: BTreeMap<String, Slot> = BTreeMap::new();
        let mut durable = false;
        // Read after the listing. The kubelet lists a pod with its IDs a moment before it writes
        // down which pod that is: whoever looked in between has the UID of the one before.
        let checkpoint = self.kubelet.checkpoint().unwrap_or_default();
        for holding in holdings {
            let Some((pool, _)) = pools.device(&holding.id) else { continue };
            let known = state.ledger.get(&holding.id).and_then(|slot| slot.grant.as_ref());
            let granted_as = known.and_then(|grant| grant.resource.as_ref());
            if holding.resource != *granted_as.unwrap_or(&pool.resource) {
                continue;
            }
            if changes.contains_key(&holding.id) {
                continue;
            }
            let mut slot = state.ledger.slot(&holding.id, pool.name());
            let grant = match &mut slot.grant {
                Some(grant) => grant,
                None => {
                    tracing::warn!(
                        id = holding.id,
                        pod = holding.owner.pod,
                        "a pod has this ID and the ledger did not know; taking it up"
                    );
                    durable = true;
                    slot.grant.insert(self.adopted(state, pool, &holding.id))
                }
            };
            let mut owner = holding.owner.clone();
            if let Some(old) = &grant.owner {
                if old.is_pod(&owner.pod()) {
                    owner.uid.clone_from(&old.uid);
                    let key = (holding.resource.clone(), holding.id.clone());
                    if let (Some(known), Some(noted)) = (&mut owner.uid, checkpoint.get(&key)) {
                        known.clone_from(noted);
                    }
                }
                if *old == owner {
                    continue;
                }
            }
            grant.owner = Some(owner);
            changes.insert(holding.id.clone(), slot);
        }
        // Who has it can be asked again after a crash: that alone is not worth a wait for the disk.
        if let Err(error) = self.commit(state, changes.into_iter().collect(), durable).await {
            tracing::error!(%error, "cannot write down who has what; it is tried again");
        }
    }

    fn adopted(&self, state: &State, pool: &Pool, id: &str) -> Grant {
        let nic = state.daemon.view.as_ref().and_then(|view| view.nics.get(&nic_name(id)));
        let served = pool.config.kind.is_served();
        Grant {
            since: now(),
            kind: pool.config.kind,
            resource: Some(pool.resource.clone()),
            network: if served { pool.config.network().to_owned() } else { String::new() },
            mac: nic.map(|nic| nic.mac.clone()),
            addresses: nic.map(|nic| nic.addresses.clone()).unwrap_or_default(),
            used: true,
            owner: None,
            cluster: pool.config.cluster.is_some().then(|| ClusterGrant::of(&pool.config)),
        }
    }

    /// NICs and files that the ledger promises and that are not there: after a reboot, a daemon
    /// without its state, somebody's `rm`.
    async fn restore(&self, state: &mut State) {
        let pools = Arc::clone(&state.pools);
        let granted: Vec<(String, Kind)> = state
            .ledger
            .iter()
            .filter_map(|(id, slot)| Some((id.clone(), slot.grant.as_ref()?.kind)))
            .collect();
        for (id, kind) in granted {
            let found = pools.device(&id).filter(|(pool, _)| pool.config.kind == kind);
            let Some((pool, device)) = found else { continue };
            if self.is_whole(state, pool, device) {
                continue;
            }
            match self.make(state, pool, device).await {
                Ok(_) => tracing::info!(id, "what the pod was given was made again as it was"),
                Err(error) => {
                    tracing::error!(
                        id,
                        %error,
                        "cannot make again what the pod was given; it is tried again"
                    );
                }
            }
        }
    }

    /// Is all there that a grant promises? As long as the daemon does not answer, its part is not
    /// asked for.
    fn is_whole(&self, state: &State, pool: &Pool, device: &Device) -> bool {
        let id = &device.id;
        if pool.config.kind.is_served() {
            let Some(view) = &state.daemon.view else { return true };
            let Some(nic) = view.nics.get(&nic_name(id)) else { return false };
            // A crash in the middle of a change: the ledger is right.
            let mac = state.ledger.get(id).and_then(|slot| slot.grant.as_ref()?.mac.as_ref());
            if mac.is_some_and(|mac| !mac.eq_ignore_ascii_case(&nic.mac)) {
                return false;
            }
            let named = state.ledger.get(id).and_then(|slot| slot.grant.as_ref());
            let named = named.filter(|grant| grant.named().is_some());
            if named.is_some_and(|grant| !same_addresses(&grant.addresses, &nic.addresses)) {
                return false;
            }
            if !Path::new(&host_dir(nic)).join(NIC_FILE).exists() {
                return false;
            }
        }
        let dirs = &self.settings.dirs;
        let pool = &*pool_as_granted(state, pool, id);
        let info = device_info(pool, device).is_none()
            || dirs.device_info.join(device_info_name(pool, id)).exists();
        let spec = !self.uses_cdi(state) || dirs.cdi.join(cdi_file(pool.prefix(), id)).exists();
        info && spec
    }

    /// Granted IDs whose pod is gone for certain.
    fn gone(&self, state: &mut State, listing: &Listing, observed: Instant) -> Vec<String> {
        let held: BTreeSet<&str> =
            listing.holdings.iter().map(|holding| holding.id.as_str()).collect();
        let age = observed.elapsed().as_secs() + self.settings.settle;
        let candidates: Vec<(String, Option<Owner>)> = state
            .ledger
            .iter()
            .filter(|(id, _)| !held.contains(id.as_str()) && !debts::is_debt(id))
            .filter(|(_, slot)| match &slot.grant {
                // A pod that is admitted right now is listed a moment later.
                Some(grant) => grant.since + age <= now() || grant.since > now() + age,
                None => !slot.records.is_empty(),
            })
            .map(|(id, slot)| {
                let owner = slot.grant.as_ref().and_then(|grant| grant.owner.clone());
                (id.clone(), owner.or_else(|| recorded_owner(slot)))
            })
            .collect();
        let checkpoint = if candidates.is_empty() { None } else { self.kubelet.checkpoint() };
        let pools = Arc::clone(&state.pools);
        let complete = self.settings.own_pod.as_ref().is_some_and(|own| listing.pods.contains(own));
        let witness = Witness { listing, checkpoint: checkpoint.as_ref(), complete };
        let is_candidate = |id: &str| candidates.iter().any(|(candidate, _)| candidate == id);
        state.missing.retain(|id, _| is_candidate(id));
        let ledger = &state.ledger;
        let is_left = |id: &str| ledger.get(id).is_some_and(|slot| !slot.records.is_empty());
        state.stuck.keep(|id| (is_candidate(id) || debts::is_debt(id)) && is_left(id));
        let mut gone = Vec::new();
        for (id, owner) in candidates {
            if may_live(state, &pools, &id, owner.as_ref(), &witness) {
                state.missing.remove(&id);
                continue;
            }
            let missing = state
                .missing
                .entry(id.clone())
                .or_insert_with(|| Missing { times: 0, since: Instant::now() });
            missing.times += 1;
            if missing.times >= MISSES && missing.since.elapsed() >= self.settings.reclaim {
                gone.push(id);
            }
        }
        gone
    }

    /// Takes an ID back, or tries again in a later round.
    async fn reclaim(&self, id: &str) {
        match self.try_reclaim(id).await {
            Ok(true) => tracing::info!(id, "its pod is gone: taken back"),
            Ok(false) => {}
            Err(error) => tracing::error!(
                id,
                error,
                "its pod is gone, but it cannot be taken back; it is tried again"
            ),
        }
    }

    async fn try_reclaim(&self, id: &str) -> Result<bool, String> {
        self.undo_leftovers(id).await?;
        let mut state = self.state.lock().await;
        // It may have been granted again in between.
        let slot = state.ledger.get(id).filter(|_| state.missing.contains_key(id)).cloned();
        let Some(mut slot) = slot else { return Ok(false) };
        let pools = Arc::clone(&state.pools);
        self.erase_slot(&mut state, &pools, id, &slot).await.map_err(|error| error.to_string())?;
        slot.grant = None;
        slot.records.clear();
        let changes = vec![(id.to_owned(), slot)];
        self.commit(&mut state, changes, true).await.map_err(|error| error.to_string())?;
        state.missing.remove(id);
        state.counters.reclaims += 1;
        self.publish(&mut state);
        Ok(true)
    }

    async fn erase_slot(
        &self,
        state: &mut State,
        pools: &Pools,
        id: &str,
        slot: &Slot,
    ) -> Result<(), super::Fault> {
        if let Some(pool) = pools.get(&slot.pool)
            && slot.grant.as_ref().is_none_or(|grant| grant.kind == pool.config.kind)
        {
            return self.erase(state, pool, id).await;
        }
        // The pool is gone from the configuration, or is of another kind now.
        if slot.grant.as_ref().is_some_and(|grant| grant.kind.is_served()) {
            match self.daemon.nic(&nic_name(id)).await {
                Ok(nic) => self.remove_nic(&nic).await?,
                Err(DaemonError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let granted_as = slot.grant.as_ref().and_then(|grant| grant.resource.clone());
        let resource = granted_as.unwrap_or_else(|| state.config.resource(&slot.pool));
        let prefix = resource.rsplit_once('/').map_or(&*resource, |(prefix, _)| prefix);
        let name = format!("{}-{id}-device.json", resource.replace('/', "-"));
        crate::files::remove(&self.settings.dirs.device_info, &name);
        crate::files::remove(&self.settings.dirs.cdi, &cdi_file(prefix, id));
        Ok(())
    }

    /// NICs under our names that nobody was promised: a crash between two steps, or a ledger that
    /// was lost.
    async fn remove_strangers(&self, state: &mut State, holdings: &[Holding]) {
        let Some(view) = &state.daemon.view else { return };
        let strangers: BTreeMap<String, _> = view
            .nics
            .iter()
            .filter_map(|(name, nic)| {
                Some((name.strip_prefix(NIC_PREFIX)?.to_owned(), nic.clone()))
            })
            .filter(|(id, nic)| {
                state.ledger.get(id).is_none_or(|slot| slot.grant.is_none())
                    && !is_connected(nic)
                    && !holdings.iter().any(|holding| holding.id == *id)
            })
            .collect();
        for (id, nic) in &strangers {
            // Seen in two rounds: what is being made right now is no stranger.
            if !state.strangers.contains(id) {
                continue;
            }
            match self.remove_nic(nic).await {
                Ok(()) => {
                    tracing::warn!(nic = nic.name, "removed a NIC that nobody was promised");
                    if let Some(view) = &mut state.daemon.view {
                        view.nics.remove(&nic.name);
                    }
                }
                Err(error) => {
                    tracing::error!(
                        nic = nic.name,
                        %error,
                        "cannot remove a NIC that nobody was promised"
                    );
                }
            }
        }
        state.strangers = strangers.into_keys().collect();
    }
}

/// What is known of who lives.
struct Witness<'a> {
    listing: &'a Listing,
    checkpoint: Option<&'a Checkpoint>,
    /// The kubelet has heard of all its pods: it lists the agent's own, which comes from the API
    /// server as they do.
    complete: bool,
}

/// Which pods this run of the kubelet has listed, of those that have something of ours.
fn see_pods(state: &mut State, listing: &Listing) {
    let (run, seen) = &mut state.seen;
    if *run != listing.run {
        *run = listing.run;
        seen.clear();
    }
    let owners = state.ledger.iter().filter_map(|(_, slot)| {
        let owner = slot.grant.as_ref().and_then(|grant| grant.owner.clone());
        owner.or_else(|| recorded_owner(slot)).map(|owner| (owner.namespace, owner.pod))
    });
    let owners: BTreeSet<PodKey> = owners.collect();
    seen.retain(|pod| owners.contains(pod));
    seen.extend(owners.into_iter().filter(|pod| listing.pods.contains(pod)));
}

/// May the pod of an ID live, although the kubelet does not list the ID?
///
/// The kubelet gave the ID to nobody: no. It gave it to a pod that it lists (a NIC of an init
/// container, or one that the API server has deleted and whose containers still end): yes. Not
/// listed at all: only a kubelet that has heard of its pods says something by that. One that has
/// just started, perhaps with no control plane in reach, lists none or the static ones, while all
/// run on.
fn may_live(
    state: &State,
    pools: &Pools,
    id: &str,
    owner: Option<&Owner>,
    witness: &Witness<'_>,
) -> bool {
    if state.daemon.connected.contains(id) {
        return true;
    }
    if let Some(checkpoint) = witness.checkpoint {
        let slot = state.ledger.get(id);
        let granted_as = slot.and_then(|slot| slot.grant.as_ref()?.resource.clone());
        let resource = granted_as
            .or_else(|| pools.device(id).map(|(pool, _)| pool.resource.clone()))
            .or_else(|| slot.map(|slot| state.config.resource(&slot.pool)));
        let noted = resource.and_then(|resource| checkpoint.get(&(resource, id.to_owned())));
        let Some(noted) = noted else { return false };
        // Given to a pod that has not used it yet: nobody who left is meant.
        if owner.is_none_or(|owner| owner.uid.as_ref().is_some_and(|uid| uid != noted)) {
            return true;
        }
    }
    let Some(owner) = owner else { return false };
    let pod = (owner.namespace.clone(), owner.pod.clone());
    witness.listing.pods.contains(&pod) || !(witness.complete || state.seen.1.contains(&pod))
}

fn recorded_owner(slot: &Slot) -> Option<Owner> {
    let pod = &slot.records.first()?.pod;
    Some(Owner {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        container: String::new(),
        uid: pod.uid.clone(),
    })
}
