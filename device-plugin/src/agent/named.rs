//! NICs that have a name: a pod's annotation says which of the pod's NICs are what `RdmaNic`.
//!
//! The kubelet's `Allocate` names no pod, so a NIC has a random identity at first. Whose it is
//! becomes known when the CNI plugin attaches it, or just before its container starts; then, after
//! the pod was admitted, the pod is asked for its annotation, each object that it names is claimed
//! (`vhost_rdma_cluster_api::claim`), and the NIC is made again with the object's MAC address,
//! address and limits. No guest has seen it by then; one that has is never changed.
//!
//! The order is: claim, ledger, daemon. Whatever ends in between leaves a claim of a pod: the pod
//! tries again and has it, or is deleted, and then the controller takes it back. When a NIC with a
//! name is gone from the daemon, the name is owed (`State::owed`) until the API server has taken
//! it.
//!
//! A pod is asked once. A container that starts again needs no API server.
//!
//! The identity of an object cannot be changed; its limits can, while a pod has it. An agent
//! watches no objects of pods: that would be a watch for each of a cluster's named NICs. The
//! controller has them all and says in the node's object what changed (`RdmaNodeSpec::nics`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use vhost_rdma_agent_api::{self as api, FaultKind, Pod};
use vhost_rdma_cluster_api::claim::{self, Claimant, NIC_ANNOTATION, Verdict};
use vhost_rdma_cluster_api::{MIRROR, NodeNic, RdmaNic};

use super::admit::{PATIENCE, is_judged};
use super::refusal::fault;
use super::{Agent, Allocated, Server, State, ownership};
use crate::daemon::{Daemon, session_word};
use crate::grant::nic_name;
use crate::holders::Kubelet;
use crate::ledger::{ClusterGrant, Grant, Named, Owner, Slot};
use crate::pool::{Device, Pool};

/// How often somebody else may be faster in changing an object.
const TRIES: u32 = 4;
/// Between two looks at the sessions of named NICs.
const LOOK: Duration = Duration::from_secs(5);

/// What a pod is about to get.
type Given = BTreeMap<String, RdmaNic>;

impl<D: Daemon, K: Kubelet> Agent<D, K> {
    /// Gives those of these NICs their names that the pod has names for, if they are the pod's
    /// still: `before` is from before anybody was asked whose they are.
    pub(super) async fn name(
        &self,
        pod: &Pod,
        ids: &[String],
        before: &Allocated,
    ) -> Result<(), api::Fault> {
        let (unasked, known) = {
            let state = self.state.lock().await;
            let known = pod.uid.clone().or_else(|| self.uid_of(&state, ids));
            (unasked(&state, ids, known.as_deref()), known)
        };
        if unasked.is_empty() {
            return Ok(());
        }
        let server = self.server.get().ok_or_else(|| later("there is no API server"))?;
        let (uid, names) = annotated(server, pod, known.as_deref()).await?;
        let who = Claimant { node: server.node.clone(), pod: pod.name.clone(), pod_uid: uid };
        // A pod that tries again must not find a claim that is on its way back.
        let _naming = self.naming.lock().await;
        let named = match names {
            Ok(names) => self.claims(server, pod, &who, &unasked, names).await,
            Err(why) => Err(fault(FaultKind::BadRequest, why)),
        };
        let done = match named {
            Ok(given) => self.give_names(pod, &who, (&unasked, before), &given).await,
            Err(fault) => Err(fault),
        };
        if let Err(fault) = &done
            && fault.kind != FaultKind::TryAgain
        {
            self.tell_refusal(pod, &who, &unasked, &fault.message).await;
        }
        done
    }

    async fn tell_refusal(&self, pod: &Pod, who: &Claimant, ids: &BTreeSet<String>, why: &str) {
        let mut state = self.state.lock().await;
        state.counters.refusals += 1;
        let owner = Owner {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: String::new(),
            uid: Some(who.pod_uid.clone()),
        };
        for id in ids {
            self.events.nic(id, Some(&owner), "NicRefused", &format!("NIC {id}: {why}"), true);
        }
        self.note(&state);
    }

    /// Claims what the pod names, each for one of its NICs of that network.
    async fn claims(
        &self,
        server: &Server,
        pod: &Pod,
        who: &Claimant,
        ids: &BTreeSet<String>,
        names: Vec<String>,
    ) -> Result<Given, api::Fault> {
        let nics = Api::<RdmaNic>::namespaced(server.client.clone(), &pod.namespace);
        let mut given = Given::new();
        for name in names {
            if self.has_name(pod, who, &name).await {
                continue;
            }
            let claimed = async {
                let nic = found(&nics, &name).await?;
                let Some(id) = self.fitting(&nic, who, ids, &given).await? else {
                    return Ok(None);
                };
                Ok(Some((id, claimed(&nics, nic, who).await?)))
            };
            match claimed.await {
                Ok(Some((id, nic))) => drop(given.insert(id, nic)),
                Ok(None) => {}
                Err(fault) => {
                    // The pod gets all of its names or none.
                    let mut state = self.state.lock().await;
                    self.owe(&mut state, who, given.into_values());
                    return Err(fault);
                }
            }
        }
        Ok(given)
    }

    /// Whether another NIC of the pod has the name already.
    async fn has_name(&self, pod: &Pod, who: &Claimant, name: &str) -> bool {
        let state = self.state.lock().await;
        let mut all = state.ledger.iter().filter_map(|(_, slot)| slot.grant.as_ref()?.named());
        all.any(|named| {
            named.namespace == pod.namespace && named.name == name && named.pod_uid == who.pod_uid
        })
    }

    /// The NIC that is to have this identity: the first of its network that has none. Nothing if
    /// that is one of another container of the pod.
    async fn fitting(
        &self,
        nic: &RdmaNic,
        who: &Claimant,
        ids: &BTreeSet<String>,
        given: &Given,
    ) -> Result<Option<String>, api::Fault> {
        let state = self.state.lock().await;
        let name = nic.name_any();
        let free = |id: &str| -> Option<&Pool> {
            let (pool, _) = state.pools.device(id)?;
            let grant = state.ledger.get(id).and_then(|slot| slot.grant.as_ref());
            let taken = given.contains_key(id) || grant.is_some_and(|g| g.named().is_some());
            let of = pool.config.cluster.is_some() && pool.config.network() == nic.spec.network;
            (of && !taken).then_some(pool)
        };
        if let Some((id, pool)) = ids.iter().find_map(|id| Some((id, free(id)?))) {
            let class = pool.config.cluster.as_ref().and_then(|of| of.class.as_ref());
            if nic.spec.class.is_some() && nic.spec.class.as_ref() != class {
                let message = format!(
                    "the NIC {name:?} is of the class {:?}, and the pool {:?} is not",
                    nic.spec.class.as_deref().unwrap_or_default(),
                    pool.name()
                );
                return Err(fault(FaultKind::Conflict, message));
            }
            return Ok(Some(id.clone()));
        }
        // What the kubelet gave to this pod, for all of its containers, is in its checkpoint before
        // the first of them starts.
        let Some(checkpoint) = self.kubelet.checkpoint() else { return Ok(None) };
        let of_pod = checkpoint.iter().filter(|(_, uid)| **uid == who.pod_uid);
        if of_pod.map(|((_, id), _)| id).any(|id| !ids.contains(id) && free(id).is_some()) {
            return Ok(None);
        }
        let message = format!(
            "the pod names the NIC {name:?} and asks for no NIC of its network {:?} more",
            nic.spec.network
        );
        Err(fault(FaultKind::Conflict, message))
    }

    /// Writes down what was claimed, and makes the NICs again as what they are now.
    async fn give_names(
        &self,
        pod: &Pod,
        who: &Claimant,
        (asked, allocated): (&BTreeSet<String>, &Allocated),
        given: &Given,
    ) -> Result<(), api::Fault> {
        let mut state = self.state.lock().await;
        if let Err(fault) = ownership::unchanged(&state, asked, allocated) {
            self.owe(&mut state, who, given.values().cloned());
            return Err(fault);
        }
        let pools = std::sync::Arc::clone(&state.pools);
        let there = |state: &State, id: &String, nic: &RdmaNic| {
            state.ledger.get(id).is_some_and(|slot| slot.grant.is_some())
                && pools.device(id).is_some()
                && (!state.daemon.connected.contains(id) || is_it(state, id, nic))
        };
        let lacking = given.iter().find(|(id, nic)| !there(&state, id, nic));
        if let Some((id, _)) = lacking {
            let message = format!("{id} is in use already: it cannot become another NIC now");
            self.owe(&mut state, who, given.values().cloned());
            return Err(fault(FaultKind::Conflict, message));
        }
        let (mut changes, mut before) = (Vec::new(), Vec::new());
        for id in asked {
            let Some((pool, _)) = pools.device(id) else { continue };
            let slot = state.ledger.slot(id, pool.name());
            before.push((id.clone(), slot.clone()));
            changes.push((id.clone(), become_named(slot, pool, pod, who, given.get(id))));
        }
        if let Err(error) = self.commit(&mut state, changes, true).await {
            self.owe(&mut state, who, given.values().cloned());
            return Err(fault(FaultKind::Internal, error.to_string()));
        }
        for (id, nic) in given {
            let Some((pool, device)) = pools.device(id) else { continue };
            // One whose ledger was lost.
            if is_it(&state, id, nic) {
                continue;
            }
            if let Err(why) = self.renew(&mut state, pool, device).await {
                let name = nic.name_any();
                self.unname(&mut state, before).await;
                let message = format!("{id} cannot become the NIC {name:?}: {why}");
                return Err(fault(FaultKind::Conflict, message));
            }
        }
        self.note(&state);
        Ok(())
    }

    async fn renew(
        &self,
        state: &mut State,
        pool: &Pool,
        device: &Device,
    ) -> Result<(), super::Fault> {
        if !pool.config.kind.is_served() {
            return Ok(());
        }
        self.make_again(state, pool, device).await
    }

    /// Back to what these NICs were. The ledger's change has the names given back; what the daemon
    /// does not do now it does in a later round, since the ledger is right.
    async fn unname(&self, state: &mut State, before: Vec<(String, Slot)>) {
        let pools = std::sync::Arc::clone(&state.pools);
        let ids: Vec<String> = before.iter().map(|(id, _)| id.clone()).collect();
        if let Err(error) = self.commit(state, before, true).await {
            tracing::error!(%error, "cannot write down that a NIC has no name; it is tried again");
            return;
        }
        for id in ids {
            let Some((pool, device)) = pools.device(&id) else { continue };
            if let Err(error) = self.renew(state, pool, device).await {
                tracing::error!(id, %error, "cannot make a NIC again; it is tried again");
            }
        }
    }

    /// Writes down which limits named NICs of pods have by now, as the controller says. An object
    /// that is read later than the one that the controller looked at has the higher generation, and
    /// what it says stays.
    pub(super) async fn hear_of_names(&self, state: &mut State) {
        let said: BTreeMap<&str, &NodeNic> =
            state.standing.spec.nics.iter().map(|nic| (nic.uid.as_str(), nic)).collect();
        let mut changes = Vec::new();
        for (id, slot) in state.ledger.iter() {
            let Some(named) = slot.grant.as_ref().and_then(Grant::named) else { continue };
            let news = said.get(named.uid.as_str());
            let Some(news) = news.filter(|news| news.generation > named.generation) else {
                continue;
            };
            let mut slot = slot.clone();
            let of = slot.grant.as_mut().and_then(|grant| grant.cluster.as_mut());
            if let Some(named) = of.and_then(|of| of.named.as_mut()) {
                (named.generation, named.limits) = (news.generation, news.limits);
                changes.push((id.clone(), slot));
            }
        }
        if let Err(error) = self.commit(state, changes, true).await {
            tracing::error!(
                %error,
                "cannot write down what a named NIC may hold; it is tried again"
            );
        }
    }

    /// These claims are to be taken back.
    fn owe(&self, state: &mut State, who: &Claimant, nics: impl IntoIterator<Item = RdmaNic>) {
        state.owed.extend(nics.into_iter().map(|nic| named(&nic, who)));
        self.owing.notify_one();
    }

    /// Gives back names that NICs have no longer, and says of the others what sessions they have.
    /// For ever.
    pub async fn tend_names(&self) {
        let Some(server) = self.server.get() else { return };
        let mut told: BTreeMap<String, (Named, String)> = BTreeMap::new();
        let mut faults = crate::repeats::Repeats::default();
        loop {
            match self.tend(server, &mut told).await {
                Ok(()) => faults.log_end("named NICs are written again"),
                Err(error) => faults.log(&error, "a named NIC is not written; it is tried again"),
            }
            let _ = tokio::time::timeout(LOOK, self.owing.notified()).await;
        }
    }

    async fn tend(
        &self,
        server: &Server,
        told: &mut BTreeMap<String, (Named, String)>,
    ) -> Result<(), String> {
        let (owed, sessions) = {
            let state = self.state.lock().await;
            (state.owed.clone(), sessions(&state))
        };
        for named in owed {
            let _naming = self.naming.lock().await;
            let mut state = self.state.lock().await;
            let again = {
                let mut all =
                    state.ledger.iter().filter_map(|(_, slot)| slot.grant.as_ref()?.named());
                all.any(|now| now.uid == named.uid && now.pod_uid == named.pod_uid)
            };
            if again {
                // The pod tried once more.
                state.owed.retain(|other| *other != named);
                continue;
            }
            drop(state);
            said(server, &named, |status| {
                for field in ["node", "pod", "podUid", "session"] {
                    status[field] = Value::Null;
                }
            })
            .await?;
            self.state.lock().await.owed.retain(|other| *other != named);
            tracing::info!(name = named.name, pod = named.pod, "a named NIC is nobody's again");
        }
        told.retain(|id, _| sessions.contains_key(id));
        for (id, now) in sessions {
            if told.get(&id) == Some(&now) {
                continue;
            }
            said(server, &now.0, |status| status["session"] = now.1.clone().into()).await?;
            told.insert(id, now);
        }
        Ok(())
    }
}

/// NICs of these whose pod was not asked yet for its names.
fn unasked(state: &State, ids: &[String], uid: Option<&str>) -> BTreeSet<String> {
    let asked = |id: &String| {
        let grant = state.ledger.get(id).and_then(|slot| slot.grant.as_ref());
        let of = grant.and_then(|grant| grant.cluster.as_ref()?.asked.as_deref());
        of.is_some_and(|asked| uid.is_none_or(|uid| uid == asked))
    };
    ids.iter().filter(|id| is_judged(state, id) && !asked(id)).cloned().collect()
}

/// Whether a NIC of the daemon is this one already.
fn is_it(state: &State, id: &str, nic: &RdmaNic) -> bool {
    let view = state.daemon.view.as_ref();
    view.and_then(|view| view.nics.get(&nic_name(id))).is_some_and(|seen| {
        let address = nic.spec.address.as_ref();
        seen.mac.eq_ignore_ascii_case(&claim::mac(nic))
            && address.is_none_or(|address| seen.addresses.contains(address))
    })
}

/// The sessions of NICs that have names, by ID.
fn sessions(state: &State) -> BTreeMap<String, (Named, String)> {
    let Some(view) = &state.daemon.view else { return BTreeMap::new() };
    let of = |(id, slot): (&String, &Slot)| {
        let named = slot.grant.as_ref()?.named()?.clone();
        let nic = view.nics.get(&nic_name(id))?;
        Some((id.clone(), (named, session_word(nic.session()).to_owned())))
    };
    state.ledger.iter().filter_map(of).collect()
}

/// The slot of a NIC whose pod was asked, with the identity that it gets, if it gets one.
fn become_named(
    mut slot: Slot,
    pool: &Pool,
    pod: &Pod,
    who: &Claimant,
    nic: Option<&RdmaNic>,
) -> Slot {
    let Some(grant) = &mut slot.grant else { return slot };
    let of = grant.cluster.get_or_insert_with(|| ClusterGrant::of(&pool.config));
    of.asked = Some(who.pod_uid.clone());
    let Some(nic) = nic else { return slot };
    of.named = Some(named(nic, who));
    grant.mac = Some(claim::mac(nic));
    if let Some(address) = nic.spec.address.as_ref().and_then(|text| text.parse().ok()) {
        let address: std::net::IpAddr = address;
        // What it has of the other family stays.
        let other = |text: &String| {
            text.parse::<std::net::IpAddr>().is_ok_and(|had| had.is_ipv4() != address.is_ipv4())
        };
        grant.addresses.retain(other);
        grant.addresses.push(address.to_string());
    }
    let owner = grant.owner.take();
    let container = owner.map(|owner| owner.container).unwrap_or_default();
    grant.owner = Some(Owner {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        container,
        uid: Some(who.pod_uid.clone()),
    });
    slot
}

fn named(nic: &RdmaNic, who: &Claimant) -> Named {
    Named {
        namespace: nic.namespace().unwrap_or_default(),
        name: nic.name_any(),
        uid: nic.uid().unwrap_or_default(),
        pod: who.pod.clone(),
        pod_uid: who.pod_uid.clone(),
        generation: nic.metadata.generation.unwrap_or_default(),
        limits: nic.spec.limits,
    }
}

fn later(why: impl std::fmt::Display) -> api::Fault {
    let message = format!("nobody can tell whether the pod names its NICs: {why}");
    fault(FaultKind::TryAgain, message)
}

/// One answer of the API server, in time.
async fn answer<T>(asked: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err("the API server does not answer".to_owned()),
    }
}

/// The pod's UID on this node, and the names that its annotation has.
async fn annotated(
    server: &Server,
    pod: &Pod,
    known: Option<&str>,
) -> Result<(String, Result<Vec<String>, String>), api::Fault> {
    let pods = Api::<ApiPod>::namespaced(server.client.clone(), &pod.namespace);
    let found = answer(pods.get_metadata(&pod.name)).await.map_err(later)?.metadata;
    let annotations = found.annotations.unwrap_or_default();
    // A static pod's copy has a UID of its own.
    let uid = annotations.get(MIRROR).cloned().or(found.uid).unwrap_or_default();
    if uid.is_empty() || known.is_some_and(|known| known != uid) {
        return Err(later("another pod has its name by now"));
    }
    let names = annotations.get(NIC_ANNOTATION).map_or(Ok(Vec::new()), |text| claim::names(text));
    Ok((uid, names))
}

async fn found(nics: &Api<RdmaNic>, name: &str) -> Result<RdmaNic, api::Fault> {
    let found = answer(nics.get_opt(name)).await.map_err(later)?;
    found.ok_or_else(|| {
        let message = format!("the pod names the NIC {name:?}, and there is no such RdmaNic");
        fault(FaultKind::NotFound, message)
    })
}

/// Claims an object: as it is when that is done.
async fn claimed(
    nics: &Api<RdmaNic>,
    mut nic: RdmaNic,
    who: &Claimant,
) -> Result<RdmaNic, api::Fault> {
    let name = nic.name_any();
    for _ in 0..TRIES {
        let status = match claim::claim(&nic, who) {
            Verdict::Held => return Ok(nic),
            Verdict::Free(status) => status,
            Verdict::Wait(why) => return Err(fault(FaultKind::TryAgain, why)),
            Verdict::Refused(why) => return Err(fault(FaultKind::Conflict, why)),
        };
        let patch = patch(
            &nic,
            &json!({
                "node": status.node, "pod": status.pod, "podUid": status.pod_uid, "session": null,
            }),
        );
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let written = nics.patch_status(&name, &params, &patch);
        match tokio::time::timeout(PATIENCE, written).await {
            Ok(Ok(nic)) => return Ok(nic),
            // Somebody was faster: with a claim, or with something else.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
            Ok(Err(error)) => return Err(later(error)),
            Err(_) => return Err(later("the API server does not answer")),
        }
        nic = found(nics, &name).await?;
    }
    Err(later(format!("the NIC {name:?} changes all the time")))
}

/// A change of a status (RFC 7396) that the API server takes only on the version that was read.
fn patch(nic: &RdmaNic, status: &Value) -> Value {
    let (uid, version) = (&nic.metadata.uid, &nic.metadata.resource_version);
    json!({ "metadata": { "uid": uid, "resourceVersion": version }, "status": status })
}

/// Changes the status of a NIC that a pod of this node has; nothing if it has it no longer.
async fn said(server: &Server, named: &Named, change: impl Fn(&mut Value)) -> Result<(), String> {
    let nics = Api::<RdmaNic>::namespaced(server.client.clone(), &named.namespace);
    let who = Claimant {
        node: server.node.clone(),
        pod: named.pod.clone(),
        pod_uid: named.pod_uid.clone(),
    };
    for _ in 0..TRIES {
        let Some(nic) = answer(nics.get_opt(&named.name)).await? else { return Ok(()) };
        if nic.uid().as_ref() != Some(&named.uid) || !claim::is_held(&nic, &who) {
            return Ok(());
        }
        let mut status = json!({});
        change(&mut status);
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch(&nic, &status)));
        let written = nics.patch_status(&named.name, &params, &patch);
        match tokio::time::timeout(PATIENCE, written).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_) => return Err("the API server does not answer".to_owned()),
        }
    }
    Err(format!("the NIC {:?} changes all the time", named.name))
}
