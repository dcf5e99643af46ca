//! `Allocate`: promises IDs to a container and makes what stands behind them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost_rdma_agent_api::Kind;
use vhost_rdma_proto::v1;

use super::health::defect;
use super::{Agent, Fault, State, now, pool_of};
use crate::daemon::{Daemon, DaemonError, is_connected};
use crate::grant::{self, Gift, nic_name};
use crate::holders::{Holding, Kubelet};
use crate::ledger::{ClusterGrant, Decision, Evidence, Grant, Slot};
use crate::pool::{Device, Pool};
use crate::{files, v1beta1};

/// How often leftovers of earlier pods are undone before an allocation gives up.
const ATTEMPTS: u32 = 3;
/// Between two looks at a daemon that is waited for.
const WAIT_LOOK: Duration = Duration::from_millis(100);

/// Why a container gets nothing.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct AllocateError(String);

impl From<Fault> for AllocateError {
    fn from(fault: Fault) -> Self {
        Self(fault.to_string())
    }
}

/// What one ID of a request needs.
struct Wanted<'a> {
    device: &'a Device,
    decision: Decision,
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Answers the kubelet for some containers of one pod: all of them or none.
    ///
    /// # Errors
    /// An ID is unknown, unhealthy, cordoned or another pod's, or the daemon or the disk failed.
    pub async fn allocate(
        &self,
        pool: &str,
        containers: &[Vec<String>],
    ) -> Result<Vec<v1beta1::ContainerAllocateResponse>, AllocateError> {
        let answered = self.try_allocate(pool, containers).await;
        let mut state = self.state.lock().await;
        match &answered {
            Ok(_) => state.counters.allocations += 1,
            Err(_) => state.counters.refusals += 1,
        }
        // What failed may be a device that just died: the kubelet must hear of it (device plugin
        // API, "Failure Handling").
        self.publish(&mut state);
        drop(state);
        self.wake.notify_one();
        answered
    }

    async fn try_allocate(
        &self,
        pool: &str,
        containers: &[Vec<String>],
    ) -> Result<Vec<v1beta1::ContainerAllocateResponse>, AllocateError> {
        self.await_daemon(pool).await;
        let ids: Vec<&String> = containers.iter().flatten().collect();
        for _ in 0..ATTEMPTS {
            // Also after leftovers were undone: the function may be new then.
            self.look_at_hardware(pool).await;
            let mut state = self.state.lock().await;
            let pools = Arc::clone(&state.pools);
            let pool = pool_of(&pools, pool).map_err(AllocateError)?;
            if let (false, Some(error)) = (pool.config.kind.is_served(), &state.host_error) {
                return Err(AllocateError(format!("cannot look at the hardware: {error}")));
            }
            let wanted = self.decide(&state, pool, &ids).await?;
            let leftovers: Vec<String> = wanted
                .iter()
                .filter(|wanted| wanted.decision == Decision::TearDown)
                .filter(|wanted| {
                    state.ledger.get(&wanted.device.id).is_some_and(|slot| !slot.records.is_empty())
                })
                .map(|wanted| wanted.device.id.clone())
                .collect();
            if leftovers.is_empty() {
                let gifts = self.give(&mut state, pool, &wanted).await?;
                for id in gifts.keys() {
                    *state.allocated.entry(id.clone()).or_default() += 1;
                }
                return self.respond(&state, pool, containers, &gifts);
            }
            let refused = |id: &str, error: &str| {
                AllocateError(format!("{id} has leftovers of an earlier pod: {error}"))
            };
            // The kubelet admits no other pod while it waits.
            for id in &leftovers {
                if let Some(why) = state.stuck.resting(id, &self.settings) {
                    return Err(refused(id, why));
                }
            }
            // The CNI plugin will ask this agent what to undo, so the lock cannot be held.
            drop(state);
            for id in leftovers {
                self.undo_leftovers(&id).await.map_err(|error| refused(&id, &error))?;
            }
        }
        Err(AllocateError("leftovers of earlier pods cannot be undone; see the log".to_owned()))
    }

    /// Names and device nodes of a function may be another's by now: what a container gets is what
    /// is there when it gets it.
    async fn look_at_hardware(&self, pool: &str) {
        let given = |pool: &Pool| !pool.config.kind.is_served();
        if self.state.lock().await.pools.get(pool).is_some_and(given) {
            self.rescan().await;
        }
    }

    /// A node starts its parts side by side, and a pod that is refused now does not come again:
    /// waits for the daemon, for a while.
    async fn await_daemon(&self, pool: &str) {
        let end = Instant::now() + self.settings.patience;
        loop {
            {
                let state = self.state.lock().await;
                let wants = |pool: &Pool| pool.config.kind.is_served();
                let waits = state.daemon.view.is_none() && state.pools.get(pool).is_some_and(wants);
                if !waits || Instant::now() >= end {
                    return;
                }
            }
            let view = self.daemon.view().await;
            if view.is_ok() {
                let mut state = self.state.lock().await;
                // A look that is newer has come meanwhile.
                if state.daemon.view.is_none() {
                    self.see_daemon(&mut state, view);
                }
                return;
            }
            tokio::time::sleep(WAIT_LOOK).await;
        }
    }

    async fn decide<'a>(
        &self,
        state: &State,
        pool: &'a Pool,
        ids: &[&String],
    ) -> Result<Vec<Wanted<'a>>, AllocateError> {
        let evident = |id: &str| !state.ledger.needs_evidence(id, &pool.resource);
        let holdings: Option<Vec<Holding>> = if ids.iter().any(|id| !evident(id)) {
            self.kubelet.list().await.ok().map(|listing| listing.holdings)
        } else {
            None
        };
        let mut wanted: Vec<Wanted<'a>> = Vec::new();
        for id in ids {
            let device = pool.devices.get(*id).ok_or_else(|| {
                AllocateError(format!(
                    "pool {:?} has no {id}; its configuration changed",
                    pool.name()
                ))
            })?;
            let mut evidence =
                Evidence { kubelet_answered: holdings.is_some(), ..Evidence::default() };
            let granted_as = granted_as(state, pool, id);
            evidence.holder = holdings.iter().flatten().find_map(|holding| {
                (holding.id == **id && holding.resource == granted_as)
                    .then(|| holding.owner.clone())
            });
            if !evident(id) && pool.config.kind.is_served() {
                evidence.connected =
                    self.daemon.nic(&nic_name(id)).await.is_ok_and(|nic| is_connected(&nic));
            }
            let decision = state.ledger.decide(id, &pool.resource, &evidence);
            if let Decision::Refuse(why) = decision {
                return Err(AllocateError(why));
            }
            // What is wrong with the NIC of a pod that is gone ends with that NIC; a new one is
            // looked at when it is made. Hardware stays, and is looked at when nothing is left on
            // it.
            let left = || state.ledger.get(id).is_some_and(|slot| !slot.records.is_empty());
            let sick = match decision {
                Decision::TearDown if pool.config.kind.is_served() || left() => None,
                Decision::TearDown => device.defect.clone(),
                _ => defect(state, pool, device),
            };
            if let Some(defect) = sick {
                return Err(AllocateError(format!("{id} cannot be used: {defect}")));
            }
            wanted.push(Wanted { device, decision });
        }
        Ok(wanted)
    }

    /// Tears down, journals, makes. What was promised here is taken back if a part of it fails.
    async fn give(
        &self,
        state: &mut State,
        pool: &Pool,
        wanted: &[Wanted<'_>],
    ) -> Result<BTreeMap<String, Gift>, AllocateError> {
        let mut changes: BTreeMap<String, Slot> = BTreeMap::new();
        for Wanted { device, decision } in wanted {
            if *decision == Decision::TearDown {
                self.erase(state, pool, &device.id).await?;
            }
            if *decision != Decision::Reuse && !changes.contains_key(&device.id) {
                let mut slot = state.ledger.slot(&device.id, pool.name());
                slot.pool = pool.name().to_owned();
                let addresses = super::cluster::addresses(state, &pool.config, &changes);
                let addresses = addresses.map_err(AllocateError)?;
                slot.grant = Some(Grant { addresses, ..new_grant(pool) });
                changes.insert(device.id.clone(), slot);
            }
        }
        let before: Vec<(String, Slot)> = changes
            .keys()
            .map(|id| {
                let mut slot = state.ledger.slot(id, pool.name());
                slot.grant = None;
                (id.clone(), slot)
            })
            .collect();
        self.commit(state, changes.into_iter().collect(), true).await.map_err(Fault::from)?;
        let mut gifts = BTreeMap::new();
        for Wanted { device, .. } in wanted {
            match self.make(state, pool, device).await {
                Ok(gift) => {
                    state.refused.remove(pool.name());
                    state.missing.remove(&device.id);
                    gifts.insert(device.id.clone(), gift);
                }
                Err(fault) => {
                    if let Fault::Daemon(DaemonError::Refused(why) | DaemonError::Silent(why)) =
                        &fault
                    {
                        let refused = (why.clone(), Instant::now());
                        state.refused.insert(pool.name().to_owned(), refused);
                    }
                    self.take_back(state, pool, before).await;
                    return Err(fault.into());
                }
            }
        }
        Ok(gifts)
    }

    /// What was promised in this call and could not be kept. What cannot be taken back now is found
    /// by reconciliation.
    async fn take_back(&self, state: &mut State, pool: &Pool, before: Vec<(String, Slot)>) {
        for (id, _) in &before {
            if let Err(error) = self.erase(state, pool, id).await {
                tracing::error!(id, %error, "cannot take a failed grant back; it is tried again");
            }
        }
        if let Err(error) = self.commit(state, before, true).await {
            tracing::error!(%error, "cannot take a failed grant back; it is tried again");
        }
    }

    /// Makes good what the ledger promises: the NIC, its files. Whatever exists stays.
    pub(super) async fn make(
        &self,
        state: &mut State,
        pool: &Pool,
        device: &Device,
    ) -> Result<Gift, Fault> {
        let id = &device.id;
        let pool = &*pool_as_granted(state, pool, id);
        let gift = if pool.config.kind.is_served() {
            let grant = state.ledger.get(id).and_then(|slot| slot.grant.clone());
            let nic = self.make_nic(state, pool, id, grant.as_ref()).await?;
            let gift = match pool.config.kind {
                Kind::Process => grant::process(pool, id, &nic)?,
                _ => grant::vhost_user(pool, id, &nic)?,
            };
            // Multus may have named it otherwise.
            let attached = state.ledger.get(id).and_then(|slot| slot.records.first());
            let tap =
                attached.map_or_else(|| grant::tap_name(id), |record| record.nic.if_name.clone());
            self.describe(pool, id, &nic, &tap)?;
            state.daemon.changes += 1;
            if let Some(view) = &mut state.daemon.view {
                view.nics.insert(nic.name.clone(), nic);
            }
            gift
        } else {
            grant::hardware(pool, device)
        };
        if let Some(info) = grant::device_info(pool, device) {
            let name = grant::device_info_name(pool, id);
            files::publish(&self.settings.dirs.device_info, &name, &info).map_err(|source| {
                Fault::File { what: format!("device information {name}"), source }
            })?;
        }
        if self.uses_cdi(state) {
            let prefix = pool.prefix();
            let name = grant::cdi_file(prefix, id);
            files::publish(&self.settings.dirs.cdi, &name, &grant::cdi_spec(prefix, &gift))
                .map_err(|source| Fault::File {
                    what: format!("CDI specification {name}"),
                    source,
                })?;
        }
        Ok(gift)
    }

    /// The NIC's JSON file, and its SELinux context.
    pub(super) fn describe(
        &self,
        pool: &Pool,
        id: &str,
        nic: &v1::Nic,
        tap: &str,
    ) -> Result<(), Fault> {
        let dir = grant::host_dir(nic);
        let document = grant::nic_document(pool, id, nic, tap)?;
        let fault = |source| Fault::File { what: format!("{dir}/{}", grant::NIC_FILE), source };
        let fd = files::open_dir(Path::new(&dir)).map_err(fault)?;
        files::write(fd.as_fd(), grant::NIC_FILE, &document).map_err(fault)?;
        if let Some(context) = &pool.config.socket.selinux {
            files::label(Path::new(&dir), context).map_err(|source| Fault::File {
                what: format!("the SELinux context of {dir}"),
                source,
            })?;
        }
        Ok(())
    }

    async fn make_nic(
        &self,
        state: &mut State,
        pool: &Pool,
        id: &str,
        grant: Option<&Grant>,
    ) -> Result<v1::Nic, Fault> {
        let network = pool.config.network();
        if !state.networks.contains(network) {
            self.daemon.ensure_network(network, pool.config.vni).await?;
            state.networks.insert(network.to_owned());
        }
        let request = nic_request(pool, id, grant);
        match self.daemon.add_nic(request.clone()).await {
            Err(DaemonError::Exists(message)) => {
                let nic = match self.daemon.nic(&request.name).await {
                    Ok(nic) => nic,
                    // The name is free, so it is the MAC address or another thing that is taken.
                    Err(DaemonError::NotFound(_)) => {
                        return Err(DaemonError::Exists(message).into());
                    }
                    Err(error) => return Err(error.into()),
                };
                // One with the grant's MAC is the grant's, whatever the pool has become since.
                let bound = grant.and_then(Grant::named).is_none()
                    || same_addresses(&nic.addresses, &request.addresses);
                let same = bound
                    && nic.network == request.network
                    && if request.mac.is_empty() {
                        nic.backing == request.backing
                    } else {
                        nic.mac.eq_ignore_ascii_case(&request.mac)
                    };
                if same {
                    return Ok(nic);
                }
                // All names of this form are ours, so it is what an earlier grant left.
                self.remove_nic(&nic).await?;
                Ok(self.daemon.add_nic(request).await?)
            }
            Err(DaemonError::NotFound(message)) => {
                // The network was removed behind our back.
                state.networks.remove(network);
                Err(DaemonError::NotFound(message).into())
            }
            other => Ok(other?),
        }
    }

    pub(super) async fn remove_nic(&self, nic: &v1::Nic) -> Result<(), DaemonError> {
        // The daemon removes a directory only if it is empty.
        files::remove(Path::new(&grant::host_dir(nic)), grant::NIC_FILE);
        self.daemon.remove_nic(&nic.name).await
    }

    /// Ends what stands behind an ID: NIC and files. The ledger is the caller's.
    pub(super) async fn erase(
        &self,
        state: &mut State,
        pool: &Pool,
        id: &str,
    ) -> Result<(), Fault> {
        let name = nic_name(id);
        let pool = &*pool_as_granted(state, pool, id);
        if pool.config.kind.is_served() {
            match self.daemon.nic(&name).await {
                Ok(nic) => self.remove_nic(&nic).await?,
                Err(DaemonError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
            state.daemon.changes += 1;
            if let Some(view) = &mut state.daemon.view {
                view.nics.remove(&name);
            }
            state.daemon.lost.remove(id);
            state.daemon.connected.remove(id);
        }
        files::remove(&self.settings.dirs.device_info, &grant::device_info_name(pool, id));
        files::remove(&self.settings.dirs.cdi, &grant::cdi_file(pool.prefix(), id));
        Ok(())
    }

    fn respond(
        &self,
        state: &State,
        pool: &Pool,
        containers: &[Vec<String>],
        gifts: &BTreeMap<String, Gift>,
    ) -> Result<Vec<v1beta1::ContainerAllocateResponse>, AllocateError> {
        let cdi = self.uses_cdi(state);
        let mut responses = Vec::new();
        for ids in containers {
            // The kubelet sends a set in no order; the container's numbering should not depend on
            // it.
            let mut mine: Vec<Gift> = ids.iter().filter_map(|id| gifts.get(id).cloned()).collect();
            mine.sort_by(|a, b| a.id.cmp(&b.id));
            if mine.len() != ids.len() {
                return Err(AllocateError("an ID of the request was not made".to_owned()));
            }
            responses.push(grant::answer(pool, pool.prefix(), &mine, cdi));
        }
        Ok(responses)
    }
}

/// What a pod asked for to get this ID, or would have to.
pub(super) fn granted_as(state: &State, pool: &Pool, id: &str) -> String {
    let grant = state.ledger.get(id).and_then(|slot| slot.grant.as_ref());
    grant.and_then(|grant| grant.resource.clone()).unwrap_or_else(|| pool.resource.clone())
}

/// The pool under the name that this ID was granted under: its files are found by that name until
/// its pod is gone.
pub(super) fn pool_as_granted<'a>(state: &State, pool: &'a Pool, id: &str) -> Cow<'a, Pool> {
    let resource = granted_as(state, pool, id);
    if resource == pool.resource {
        return Cow::Borrowed(pool);
    }
    Cow::Owned(Pool { resource, devices: BTreeMap::new(), ..pool.clone() })
}

fn new_grant(pool: &Pool) -> Grant {
    let served = pool.config.kind.is_served();
    Grant {
        since: now(),
        kind: pool.config.kind,
        resource: Some(pool.resource.clone()),
        network: if served { pool.config.network().to_owned() } else { String::new() },
        // Chosen here and not by the daemon: it is in the ledger before the NIC exists.
        mac: served.then(local_mac),
        addresses: Vec::new(),
        used: false,
        owner: None,
        cluster: pool.config.cluster.as_ref().map(|of| ClusterGrant {
            revision: of.revision.clone(),
            ..ClusterGrant::of(&pool.config)
        }),
    }
}

/// Whether a NIC is bound to these addresses, in whatever order.
pub(super) fn same_addresses(a: &[String], b: &[String]) -> bool {
    a.len() == b.len() && a.iter().all(|address| b.contains(address))
}

/// A locally administered unicast address: bit 1 of the first octet set, bit 0 clear (IEEE 802-2014
/// §8.2).
fn local_mac() -> String {
    let mut octets = [0_u8; 6];
    if let Err(error) = getrandom::fill(&mut octets) {
        tracing::warn!(%error, "no random source; the NIC gets a poor MAC address");
    }
    octets[0] = (octets[0] & 0xfc) | 0x02;
    octets.map(|octet| format!("{octet:02x}")).join(":")
}

/// The limits of a NIC: the pool's, or those of its own that are smaller.
pub(super) fn limits(pool: &Pool, grant: Option<&Grant>) -> v1::LimitsPatch {
    let mut limits = pool.config.limits;
    if let Some(named) = grant.and_then(Grant::named) {
        limits = limits.least(&crate::cluster::render::limits(&named.limits));
    }
    v1::LimitsPatch {
        max_contexts: limits.max_contexts,
        max_pds: limits.max_pds,
        max_mrs: limits.max_mrs,
        max_mr_bytes: limits.max_mr_bytes,
        max_kept_bytes: limits.max_kept_bytes,
        max_guest_bytes: limits.max_guest_bytes,
        max_cqs: limits.max_cqs,
        max_srqs: limits.max_srqs,
        max_qps: limits.max_qps,
        max_ahs: limits.max_ahs,
    }
}

fn nic_request(pool: &Pool, id: &str, grant: Option<&Grant>) -> v1::AddNicRequest {
    let config = &pool.config;
    v1::AddNicRequest {
        name: nic_name(id),
        network: config.network().to_owned(),
        mac: grant.and_then(|grant| grant.mac.clone()).unwrap_or_default(),
        addresses: grant.map(|grant| grant.addresses.clone()).unwrap_or_default(),
        virtio_id: config.virtio_id,
        limits: Some(limits(pool, grant)),
        access: Some(v1::SocketAccess {
            owner: config.socket.owner.map(|id| id.to_string()),
            group: config.socket.group.map(|id| id.to_string()),
            mode: config.socket.mode,
            acl: Some(v1::SocketAcl {
                entries: config.socket.acl.iter().map(|entry| entry.as_str().to_owned()).collect(),
            }),
        }),
        backing: config.backing().to_owned(),
        comp_vectors: config.comp_vectors,
        guests: match config.kind {
            Kind::Process => "process".to_owned(),
            _ => String::new(),
        },
    }
}
