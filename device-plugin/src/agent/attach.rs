//! The CNI binary's requests: remembers what it does to the host for each pod.

use std::path::Path;
use std::sync::Arc;

use vhost_rdma_agent_api as api;
use vhost_rdma_agent_api::{
    Attach, Attached, Attachment, Checked, Companion, FaultKind, Intend, Kind, Live, Nic,
    Personality, Record, Reply, Request, State as Progress,
};
use vhost_rdma_proto::v1;

use super::allocate::limits;
use super::health::defect;
use super::ownership::{self, Witness};
use super::refusal::{fault, internal, later};
use super::{Agent, State, debts, now};
use crate::daemon::{Daemon, session_word};
use crate::grant::{self, nic_name};
use crate::holders::Kubelet;
use crate::journal;
use crate::ledger::{ClusterGrant, Grant, Owner, Slot};
use crate::pool::{Device, Pool, Pools};

/// The longest that a network configuration may be: it is kept with the attachment, in memory and
/// in the ledger, and a tenant wrote it.
const CONFIG_MAX: usize = 64 << 10;
/// The longest that any other word of an attachment may be (a path).
const WORD_MAX: usize = 4096;

/// What is remembered of an attachment has a bound.
fn bounded(asked: &Attach) -> Result<(), api::Fault> {
    let config = asked.config.as_ref().map_or(0, |config| config.to_string().len());
    let words = [
        &asked.pod.namespace,
        &asked.pod.name,
        &asked.attachment.container_id,
        &asked.attachment.if_name,
        &asked.netns,
        &asked.network,
    ];
    let uid = asked.pod.uid.iter();
    if config > CONFIG_MAX || words.into_iter().chain(uid).any(|word| word.len() > WORD_MAX) {
        let message =
            format!("the attachment is longer than can be kept ({config} bytes of configuration)");
        return Err(fault(FaultKind::BadRequest, message));
    }
    Ok(())
}

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Answers one request.
    pub async fn answer(&self, request: Request) -> Reply {
        let answered = match request {
            Request::Status => Ok(Reply::Status(Box::new(self.status().await))),
            Request::Attach(attach) => self.attach(attach).await.map(Reply::Nics),
            Request::Intend(intend) => self.intend(intend).await.map(|()| Reply::Done),
            Request::Attached(attached) => self.attached(attached).await.map(|()| Reply::Done),
            Request::Check(attachment) => self.check(attachment).await.map(Reply::Checked),
            Request::Detach(detach) => self.detach(detach).await.map(Reply::Records),
            Request::Detached(ended) => self.detached(ended, false).await.map(|()| Reply::Done),
            Request::Owing(ended) => self.detached(ended, true).await.map(|()| Reply::Done),
            Request::Gc(gc) => self.gc(gc).await.map(Reply::Records),
            Request::Forgotten => Ok(Reply::Records(self.forgotten().await)),
            Request::Cordon(target) => self.cordon(&target.id, true).await.map(|()| Reply::Done),
            Request::Uncordon(target) => self.cordon(&target.id, false).await.map(|()| Reply::Done),
        };
        answered.unwrap_or_else(|fault| {
            tracing::warn!(kind = ?fault.kind, message = fault.message, "request refused");
            Reply::Fault(fault)
        })
    }

    async fn attach(&self, asked: Attach) -> Result<Vec<Nic>, api::Fault> {
        bounded(&asked)?;
        let before = self.state.lock().await.allocated.clone();
        let listing = self.kubelet.list().await.map_err(later)?;
        let witness = Witness { holdings: listing.holdings, checkpoint: self.kubelet.checkpoint() };
        let meant = {
            let state = self.state.lock().await;
            ownership::wanted(&state, &state.pools, &asked, &witness)?
        };
        self.admit(&asked.pod, &meant).await?;
        self.name(&asked.pod, &meant, &before).await?;
        // Twice: what an earlier sandbox left is undone without the lock, then everything is looked
        // at again.
        for last in [false, true] {
            let mut state = self.state.lock().await;
            let pools = Arc::clone(&state.pools);
            let ids = ownership::wanted(&state, &pools, &asked, &witness)?;
            ownership::unchanged(&state, &ids, &before)?;
            let stale: Vec<String> =
                ids.iter().filter(|id| has_stale(&state, id, &asked)).cloned().collect();
            if stale.is_empty() {
                return self.attach_ids(&mut state, &pools, &asked, &ids).await;
            }
            drop(state);
            if last {
                return Err(fault(
                    FaultKind::TryAgain,
                    format!("an earlier sandbox of this pod still has {}", stale.join(", ")),
                ));
            }
            for id in stale {
                self.undo(&id).await.map_err(|error| fault(FaultKind::TryAgain, error))?;
            }
        }
        Ok(Vec::new())
    }

    async fn attach_ids(
        &self,
        state: &mut State,
        pools: &Pools,
        asked: &Attach,
        ids: &[String],
    ) -> Result<Vec<Nic>, api::Fault> {
        self.with_mac(state, pools, asked, ids).await?;
        let mut changes = Vec::new();
        let mut nics = Vec::new();
        for (n, id) in ids.iter().enumerate() {
            let Some((pool, device)) = pools.device(id) else {
                return Err(fault(
                    FaultKind::TryAgain,
                    format!("{id} is not in the configuration any more, or its hardware is gone"),
                ));
            };
            let seen = state.daemon.view.as_ref().and_then(|view| view.nics.get(&nic_name(id)));
            let socket = seen.map(|nic| nic.socket.clone()).unwrap_or_default();
            let mut slot = state.ledger.slot(id, pool.name());
            if slot.grant.is_none() {
                // The kubelet says that the pod has it; the ledger was lost, or this agent never
                // saw the Allocate.
                slot.grant = Some(adopted(pool, seen.map(|nic| nic.mac.clone())));
            }
            if let Some(grant) = &mut slot.grant {
                let container = grant.owner.take().map(|owner| owner.container).unwrap_or_default();
                grant.owner = Some(Owner {
                    namespace: asked.pod.namespace.clone(),
                    pod: asked.pod.name.clone(),
                    container,
                    uid: asked.pod.uid.clone(),
                });
            }
            let mac = slot.grant.as_ref().and_then(|grant| grant.mac.clone());
            let fresh = || Nic {
                mac,
                personality: personality(pool, device, socket, &if_name(asked, pool, id, n)),
                ..bare_nic(pool, id, if_name(asked, pool, id, n))
            };
            // Asked again: what was moved meanwhile cannot be seen from here.
            let nic = slot.record(&asked.attachment).map_or_else(fresh, |old| old.nic.clone());
            let record = Record {
                pod: asked.pod.clone(),
                attachment: asked.attachment.clone(),
                network: asked.network.clone(),
                netns: asked.netns.clone(),
                state: Progress::Attaching,
                nic: nic.clone(),
                steps: slot
                    .record(&asked.attachment)
                    .map(|old| old.steps.clone())
                    .unwrap_or_default(),
                done: None,
                config: asked.config.clone(),
            };
            slot.records.retain(|old| old.attachment != asked.attachment);
            slot.records.push(record);
            if !journal::can_grow(id, &slot) {
                let message = format!(
                    "{id} has more attachments than can be kept; they end with its pod, or by \
                     `vhost-rdma-cni` DEL"
                );
                return Err(fault(FaultKind::Conflict, message));
            }
            changes.push((id.clone(), slot));
            // What the same attachment owes is under the same name at its IPAM plugin: it is this
            // one's now.
            let owed = debts::name(id, &asked.attachment);
            changes.extend(state.ledger.get(&owed).map(|_| (owed, Slot::default())));
            nics.push(nic);
        }
        self.commit(state, changes, true).await.map_err(internal)?;
        for nic in &nics {
            self.refresh_document(pools, &nic.id, Some(&nic.if_name)).await.map_err(later)?;
        }
        Ok(nics)
    }

    /// Gives a VM's NIC the MAC address that the runtime asked for. It is the NIC's identity to its
    /// guest, so it changes only before a VMM has seen it: a sandbox is made before its containers
    /// are. (A VF's is the plugin's affair.)
    async fn with_mac(
        &self,
        state: &mut State,
        pools: &Pools,
        asked: &Attach,
        ids: &[String],
    ) -> Result<(), api::Fault> {
        let (Some(mac), [id]) = (&asked.mac, ids) else { return Ok(()) };
        let found = pools.device(id).filter(|(pool, _)| pool.config.kind.is_served());
        let Some((pool, device)) = found else { return Ok(()) };
        let before = state.ledger.slot(id, pool.name());
        let is_it = |grant: &Grant| grant.mac.as_ref().is_some_and(|m| m.eq_ignore_ascii_case(mac));
        if before.grant.as_ref().is_some_and(is_it) {
            return Ok(());
        }
        if let Some(named) = before.grant.as_ref().and_then(Grant::named) {
            let name = &named.name;
            let message = format!("{id} is the named NIC {name:?}, whose MAC address is not {mac}");
            return Err(fault(FaultKind::Conflict, message));
        }
        if !is_station(mac) {
            let message = format!("mac {mac:?} is no address of one station");
            return Err(fault(FaultKind::BadRequest, message));
        }
        if state.daemon.connected.contains(id) {
            let message = format!("a VMM is connected to {id}: its MAC address cannot change now");
            return Err(fault(FaultKind::Conflict, message));
        }
        let mut slot = before.clone();
        slot.grant.get_or_insert_with(|| adopted(pool, None)).mac = Some(mac.clone());
        self.commit(state, vec![(id.clone(), slot)], true).await.map_err(internal)?;
        let Err(why) = self.make_again(state, pool, device).await else { return Ok(()) };
        // Taken by another NIC of the network, most likely: back to what it was.
        self.commit(state, vec![(id.clone(), before)], true).await.map_err(internal)?;
        self.make_again(state, pool, device).await.map_err(later)?;
        Err(fault(FaultKind::Conflict, format!("{id} cannot have the MAC address {mac}: {why}")))
    }

    pub(super) async fn make_again(
        &self,
        state: &mut State,
        pool: &Pool,
        device: &Device,
    ) -> Result<(), super::Fault> {
        self.erase(state, pool, &device.id).await?;
        self.make(state, pool, device).await.map(drop)
    }

    /// Writes the NIC's JSON file again with what the daemon says now.
    async fn refresh_document(
        &self,
        pools: &Pools,
        id: &str,
        tap: Option<&str>,
    ) -> Result<(), String> {
        let Some((pool, _)) = pools.device(id).filter(|(pool, _)| pool.config.kind.is_served())
        else {
            return Ok(());
        };
        let nic = self.daemon.nic(&nic_name(id)).await.map_err(|error| error.to_string())?;
        let usual = grant::tap_name(id);
        self.describe(pool, id, &nic, tap.unwrap_or(&usual)).map_err(|error| error.to_string())
    }

    async fn intend(&self, asked: Intend) -> Result<(), api::Fault> {
        let mut state = self.state.lock().await;
        let mut slot = known(&state, &asked.nic)?;
        let record = slot.record_mut(&asked.attachment).ok_or_else(|| unattached(&asked.nic))?;
        for step in asked.steps {
            if !record.steps.contains(&step) {
                record.steps.push(step);
            }
        }
        self.commit(&mut state, vec![(asked.nic, slot)], true).await.map_err(internal)
    }

    async fn attached(&self, asked: Attached) -> Result<(), api::Fault> {
        let mut state = self.state.lock().await;
        let pools = Arc::clone(&state.pools);
        let mut changes = Vec::new();
        for done in asked.nics {
            let mut slot = known(&state, &done.nic)?;
            let id = done.nic.clone();
            let ipam = pools.device(&id).is_some_and(|(pool, _)| pool.config.has_cnis_addresses());
            let addresses: Vec<String> = done
                .addresses
                .iter()
                .map(|cidr| {
                    cidr.split_once('/').map_or(cidr.as_str(), |(address, _)| address).to_owned()
                })
                .collect();
            let record = slot.record_mut(&asked.attachment).ok_or_else(|| unattached(&id))?;
            record.state = Progress::Attached;
            let tap = done.if_name.clone();
            record.done = Some(done);
            if ipam && let Some(grant) = &mut slot.grant {
                grant.addresses.clone_from(&addresses);
                let request = v1::UpdateNicRequest {
                    name: nic_name(&id),
                    addresses: Some(v1::Addresses { addresses }),
                    ..v1::UpdateNicRequest::default()
                };
                self.daemon.update_nic(request).await.map_err(later)?;
            }
            self.refresh_document(&pools, &id, tap.as_deref()).await.map_err(later)?;
            changes.push((id, slot));
        }
        self.commit(&mut state, changes, true).await.map_err(internal)
    }

    async fn check(&self, attachment: Attachment) -> Result<Vec<Checked>, api::Fault> {
        let state = self.state.lock().await;
        let pools = Arc::clone(&state.pools);
        let mut checked = Vec::new();
        for id in state.ledger.attached_to(&attachment) {
            let Some(slot) = state.ledger.get(&id) else { continue };
            let Some(record) = slot.record(&attachment) else { continue };
            let live = self.live(&state, &pools, &id, slot).await;
            checked.push(Checked { record: record.clone(), live });
        }
        if checked.is_empty() {
            return Err(fault(
                FaultKind::NotFound,
                format!(
                    "nothing is attached to container {} as {}",
                    attachment.container_id, attachment.if_name
                ),
            ));
        }
        Ok(checked)
    }

    async fn live(&self, state: &State, pools: &Pools, id: &str, slot: &Slot) -> Live {
        let Some((pool, device)) = pools.device(id) else {
            let reason =
                "it is not in the configuration any more, or its hardware is gone".to_owned();
            return Live { reason: Some(reason), ..Live::default() };
        };
        let reason = defect(state, pool, device);
        let mut live = Live { healthy: reason.is_none(), reason, ..Live::default() };
        if !pool.config.kind.is_served() {
            return live;
        }
        match self.daemon.nic(&nic_name(id)).await {
            Ok(nic) => {
                live.session = Some(session_word(nic.session()).to_owned());
                let now = nic.limits.unwrap_or_default();
                live.limits = named_limits(&now);
                live.differs = differences(pool, slot, &nic);
            }
            Err(error) => {
                live.healthy = false;
                live.reason = Some(error.to_string());
            }
        }
        live
    }

    async fn cordon(&self, id: &str, cordoned: bool) -> Result<(), api::Fault> {
        let mut state = self.state.lock().await;
        let pools = Arc::clone(&state.pools);
        let pool = match (pools.device(id), state.ledger.get(id)) {
            (Some((pool, _)), _) => pool.name().to_owned(),
            (None, Some(slot)) => slot.pool.clone(),
            (None, None) => {
                let message =
                    format!("there is no NIC {id:?}; `vhost-rdma-agent status` shows all");
                return Err(fault(FaultKind::NotFound, message));
            }
        };
        let mut slot = state.ledger.slot(id, &pool);
        slot.cordoned = cordoned;
        self.commit(&mut state, vec![(id.to_owned(), slot)], true).await.map_err(internal)?;
        self.publish(&mut state);
        Ok(())
    }
}

/// Records of other sandboxes: this pod's earlier one, or a pod's that is gone.
fn has_stale(state: &State, id: &str, asked: &Attach) -> bool {
    state.ledger.get(id).is_some_and(|slot| {
        slot.records
            .iter()
            .any(|record| record.attachment.container_id != asked.attachment.container_id)
    })
}

fn adopted(pool: &Pool, mac: Option<String>) -> Grant {
    Grant {
        since: now(),
        kind: pool.config.kind,
        resource: Some(pool.resource.clone()),
        network: if pool.config.kind.is_served() {
            pool.config.network().to_owned()
        } else {
            String::new()
        },
        mac,
        addresses: Vec::new(),
        used: true,
        owner: None,
        cluster: pool.config.cluster.is_some().then(|| ClusterGrant::of(&pool.config)),
    }
}

/// Six octets, of one station (IEEE 802-2014 §8.2), and not none.
fn is_station(mac: &str) -> bool {
    let octets: Vec<Option<u8>> = mac
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2))
        .collect();
    let [Some(first), ..] = octets[..] else { return false };
    octets.len() == 6
        && first & 1 == 0
        && octets.iter().all(Option::is_some)
        && octets.iter().any(|octet| *octet != Some(0))
}

fn known(state: &State, id: &str) -> Result<Slot, api::Fault> {
    state
        .ledger
        .get(id)
        .cloned()
        .ok_or_else(|| fault(FaultKind::NotFound, format!("nothing is known of NIC {id:?}")))
}

fn unattached(id: &str) -> api::Fault {
    fault(FaultKind::NotFound, format!("NIC {id:?} has no such attachment; attach comes first"))
}

/// Multus names the interface of its one NIC; a VM's tap has the name that its options have; others
/// are numbered.
fn if_name(asked: &Attach, pool: &Pool, id: &str, n: usize) -> String {
    match (&asked.device_id, pool.config.kind) {
        (Some(_), _) => asked.attachment.if_name.clone(),
        (None, Kind::VhostUser) => grant::tap_name(id),
        (None, _) => format!("{}{n}", pool.config.if_prefix),
    }
}

fn bare_nic(pool: &Pool, id: &str, if_name: String) -> Nic {
    let served = pool.config.kind.is_served();
    Nic {
        id: id.to_owned(),
        pool: pool.name().to_owned(),
        network: if served { pool.config.network().to_owned() } else { String::new() },
        if_name,
        mac: None,
        addresses: Vec::new(),
        mtu: pool.config.mtu,
        personality: Personality::VfVfio { pci: String::new() },
    }
}

fn personality(pool: &Pool, device: &Device, socket: String, if_name: &str) -> Personality {
    let function = device.hardware.clone().unwrap_or_default();
    let rdma_device = function.rdma.clone().unwrap_or_default();
    let netdev = function.netdevs.first().cloned();
    let (pci, netns_mode) = (function.pci, pool.netns_mode);
    match pool.config.kind {
        Kind::VhostUser => {
            let (uid, gid) = pool.config.tap_owner();
            let bridge = pool.config.companion.bridge.clone();
            Personality::VhostUser {
                dir: socket.rsplit_once('/').map_or_else(String::new, |(dir, _)| dir.to_owned()),
                socket,
                container_socket: grant::container_socket(&device.id),
                companion: Companion { bridge, tap: if_name.to_owned(), uid, gid },
            }
        }
        Kind::Process => Personality::Process {
            dir: socket.rsplit_once('/').map_or_else(String::new, |(dir, _)| dir.to_owned()),
            socket,
            container_socket: grant::process_socket(&device.id),
        },
        Kind::Vf => {
            Personality::Vf { pci: pci.unwrap_or_default(), netdev, rdma_device, netns_mode }
        }
        Kind::VfVfio => Personality::VfVfio { pci: pci.unwrap_or_default() },
        Kind::Shared => Personality::Shared { pci, netdev, rdma_device, netns_mode },
    }
}

fn named_limits(limits: &v1::Limits) -> std::collections::BTreeMap<String, u64> {
    [
        ("max_contexts", u64::from(limits.max_contexts)),
        ("max_pds", limits.max_pds.into()),
        ("max_mrs", limits.max_mrs.into()),
        ("max_mr_bytes", limits.max_mr_bytes),
        ("max_kept_bytes", limits.max_kept_bytes),
        ("max_guest_bytes", limits.max_guest_bytes),
        ("max_cqs", limits.max_cqs.into()),
        ("max_srqs", limits.max_srqs.into()),
        ("max_qps", limits.max_qps.into()),
        ("max_ahs", limits.max_ahs.into()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

/// Limits that the pool says and the daemon does not enforce, in words.
pub(super) fn limit_differences(wanted: &v1::LimitsPatch, nic: &v1::Nic) -> Vec<String> {
    let mut differs = Vec::new();
    let now = nic.limits.unwrap_or_default();
    let mut compare = |name: &str, wanted: Option<u64>, now: u64| {
        if let Some(wanted) = wanted
            && wanted != now
        {
            differs.push(format!("{name} is {now}, the pool says {wanted}"));
        }
    };
    compare("max_contexts", wanted.max_contexts.map(u64::from), now.max_contexts.into());
    compare("max_pds", wanted.max_pds.map(u64::from), now.max_pds.into());
    compare("max_mrs", wanted.max_mrs.map(u64::from), now.max_mrs.into());
    compare("max_mr_bytes", wanted.max_mr_bytes, now.max_mr_bytes);
    compare("max_kept_bytes", wanted.max_kept_bytes, now.max_kept_bytes);
    compare("max_guest_bytes", wanted.max_guest_bytes, now.max_guest_bytes);
    compare("max_cqs", wanted.max_cqs.map(u64::from), now.max_cqs.into());
    compare("max_srqs", wanted.max_srqs.map(u64::from), now.max_srqs.into());
    compare("max_qps", wanted.max_qps.map(u64::from), now.max_qps.into());
    compare("max_ahs", wanted.max_ahs.map(u64::from), now.max_ahs.into());
    differs
}

/// What the daemon enforces and the pool does not say, in words.
fn differences(pool: &Pool, slot: &Slot, nic: &v1::Nic) -> Vec<String> {
    let mut differs = limit_differences(&limits(pool, slot.grant.as_ref()), nic);
    if nic.network != pool.config.network() {
        differs.push(format!(
            "it is in network {:?}, the pool in {:?}",
            nic.network,
            pool.config.network()
        ));
    }
    if let Some(grant) = &slot.grant {
        if grant.mac.as_ref().is_some_and(|mac| !mac.eq_ignore_ascii_case(&nic.mac)) {
            differs.push(format!("its MAC address is {}", nic.mac));
        }
        if pool.config.has_cnis_addresses() && grant.addresses != nic.addresses {
            differs
                .push(format!("it may use {:?}, IPAM gave {:?}", nic.addresses, grant.addresses));
        }
    }
    if !Path::new(&nic.socket).exists() {
        differs.push(format!("its socket {} is gone", nic.socket));
    }
    differs
}
