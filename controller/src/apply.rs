//! Writes, done on a real API server.

use std::fmt::Debug;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use vhost_rdma_cluster_api::{
    Condition, MANAGER, MIRROR, RdmaIPBlock, RdmaNetwork, RdmaNic, RdmaNicClass, RdmaNode,
    RdmaNodePolicy, RdmaTenant,
};

use crate::convert;
use crate::core::{Guard, Write};

/// What came of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It is done.
    Done,
    /// Somebody was faster, or it is done already: the watch will tell.
    Conflict,
    /// What was to be given free is in use.
    Guarded,
}

impl Outcome {
    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Conflict => "conflict",
            Self::Guarded => "guarded",
        }
    }
}

/// The name of a write in metrics.
#[must_use]
pub fn name(write: &Write) -> &'static str {
    match write {
        Write::CreateClaim(_) => "create_claim",
        Write::ReleaseClaim(..) => "release_claim",
        Write::NetworkFinalizers(_) => "network_finalizers",
        Write::NetworkStatus(_) => "network_status",
        Write::CreateNode(_) => "create_node",
        Write::ReplaceNode(_) => "replace_node",
        Write::DeleteNode(..) => "delete_node",
        Write::CreateBlock(_) => "create_block",
        Write::ReplaceBlock(_) => "replace_block",
        Write::BlockStatus(_) => "block_status",
        Write::DeleteBlock(..) => "delete_block",
        Write::TenantStatus(_) => "tenant_status",
        Write::ExpireReservations(..) => "expire_reservations",
        Write::PolicyStatus(_) => "policy_status",
        Write::ClassStatus(_) => "class_status",
        Write::NicStatus(_) => "nic_status",
        Write::ReleaseNic(..) => "release_nic",
        Write::ApplyAttachment(_) => "apply_attachment",
        Write::DeleteAttachment(_) => "delete_attachment",
        Write::Evict { .. } => "evict",
        Write::Authority(..) => "authority",
        Write::PublishRoots(..) => "publish_roots",
        Write::GrantRequest { .. } => "grant_request",
        Write::RefuseRequest { .. } => "refuse_request",
    }
}

/// Does writes.
#[derive(Clone)]
pub struct Writer {
    pub(crate) client: Client,
    pub(crate) namespace: String,
}

impl Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

pub(crate) type Done = Result<Outcome, kube::Error>;

pub(crate) fn post() -> PostParams {
    PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() }
}

fn exactly(uid: Option<String>, version: Option<String>) -> DeleteParams {
    let preconditions = Preconditions { uid, resource_version: version };
    DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() }
}

/// A conflict, and an object that is there already or gone already, are no failures.
pub(crate) fn outcome<T>(result: Result<T, kube::Error>) -> Done {
    match result {
        Ok(_) => Ok(Outcome::Done),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Outcome::Conflict),
        Err(error) => Err(error),
    }
}

/// Whether a pod has this UID, at the API server or, being a static one, on its node.
fn is_of(pod: &kube::api::ObjectMeta, uid: &str) -> bool {
    let on_node = pod.annotations.as_ref().and_then(|all| all.get(MIRROR));
    pod.uid.as_deref() == Some(uid) || on_node.is_some_and(|on_node| on_node == uid)
}

/// Conditions that are new or have changed get the present time.
fn stamped(mut conditions: Vec<Condition>) -> Vec<Condition> {
    for condition in &mut conditions {
        if condition.last_transition_time.is_none() {
            // Seconds are all that metav1.Time has.
            let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            condition.last_transition_time = Some(now);
        }
    }
    conditions
}

macro_rules! stamp {
    ($object:expr) => {{
        let mut object = $object;
        if let Some(status) = &mut object.status {
            status.conditions = stamped(std::mem::take(&mut status.conditions));
        }
        object
    }};
}

impl Writer {
    /// Writes by this client, leases and attachment definitions into this namespace.
    #[must_use]
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { client, namespace: namespace.to_owned() }
    }

    fn all<K: Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()>>(
        &self,
    ) -> Api<K> {
        Api::all(self.client.clone())
    }

    /// Does one write; asks its guard first.
    ///
    /// # Errors
    /// The API server's, but for conflicts.
    #[allow(clippy::cognitive_complexity, reason = "one arm for each write")]
    pub async fn write(&self, write: Write) -> Done {
        match write {
            Write::CreateClaim(claim) => {
                outcome(self.leases().create(&post(), &convert::lease(&claim)).await)
            }
            Write::ReleaseClaim(claim, guard) => {
                if !self.allows(&guard).await? {
                    return Ok(Outcome::Guarded);
                }
                let params = exactly(Some(claim.uid.clone()), Some(claim.version.clone()));
                outcome(self.leases().delete(&claim.lease(), &params).await)
            }
            Write::NetworkFinalizers(o) => self.replace::<RdmaNetwork>(&o).await,
            Write::NetworkStatus(o) => self.status::<RdmaNetwork>(&stamp!(o)).await,
            Write::CreateNode(o) => outcome(self.all::<RdmaNode>().create(&post(), &o).await),
            Write::ReplaceNode(o) => self.replace::<RdmaNode>(&o).await,
            Write::DeleteNode(o, guard) => self.delete::<RdmaNode>(&o, guard.as_ref()).await,
            Write::CreateBlock(o) => outcome(self.all::<RdmaIPBlock>().create(&post(), &o).await),
            Write::ReplaceBlock(o) => self.replace::<RdmaIPBlock>(&o).await,
            Write::BlockStatus(o) => self.status::<RdmaIPBlock>(&o).await,
            Write::DeleteBlock(o, guard) => self.delete::<RdmaIPBlock>(&o, Some(&guard)).await,
            Write::TenantStatus(o) => self.status::<RdmaTenant>(&stamp!(o)).await,
            Write::ExpireReservations(tenant, uids) => self.expire(tenant, &uids).await,
            Write::PolicyStatus(o) => self.status::<RdmaNodePolicy>(&stamp!(o)).await,
            Write::ClassStatus(o) => self.status::<RdmaNicClass>(&stamp!(o)).await,
            Write::NicStatus(o) => self.nic_status(stamp!(o)).await,
            Write::ReleaseNic(o, guard) => {
                if !self.allows(&guard).await? {
                    return Ok(Outcome::Guarded);
                }
                self.nic_status(o).await
            }
            Write::ApplyAttachment(o) => {
                let params = PatchParams::apply(MANAGER).force();
                let object = convert::attachment_object(&o);
                outcome(self.attachments().patch(&o.name, &params, &Patch::Apply(&object)).await)
            }
            Write::DeleteAttachment(o) => {
                outcome(self.attachments().delete(&o.name, &exactly(Some(o.uid), None)).await)
            }
            Write::Evict { namespace, pod, uid, node } => {
                self.evict(&namespace, &pod, &uid, &node).await
            }
            Write::Authority(step, version) => self.authority(step, &version).await,
            Write::PublishRoots(roots, version) => self.publish(&roots, &version).await,
            Write::GrantRequest { request, asked, proof, life } => {
                self.grant(&request, &asked, proof.as_ref(), life).await
            }
            Write::RefuseRequest { request, reason, message } => {
                self.refuse(&request, reason, &message).await
            }
        }
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn attachments(&self) -> Api<DynamicObject> {
        let kind = convert::attachment_kind();
        Api::namespaced_with(self.client.clone(), &self.namespace, &kind)
    }

    async fn replace<K>(&self, object: &K) -> Done
    where
        K: Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()>,
        K: Clone + Debug + Serialize + DeserializeOwned,
    {
        outcome(self.all::<K>().replace(&object.name_any(), &post(), object).await)
    }

    async fn status<K>(&self, object: &K) -> Done
    where
        K: Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()>,
        K: Clone + Debug + Serialize + DeserializeOwned,
    {
        outcome(self.all::<K>().replace_status(&object.name_any(), &post(), object).await)
    }

    async fn nic_status(&self, nic: RdmaNic) -> Done {
        let namespace = nic.namespace().unwrap_or_default();
        let api: Api<RdmaNic> = Api::namespaced(self.client.clone(), &namespace);
        outcome(api.replace_status(&nic.name_any(), &post(), &nic).await)
    }

    async fn delete<K>(&self, object: &K, guard: Option<&Guard>) -> Done
    where
        K: Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()>,
        K: Clone + Debug + DeserializeOwned,
    {
        if let Some(guard) = guard
            && !self.allows(guard).await?
        {
            return Ok(Outcome::Guarded);
        }
        let params = exactly(object.uid(), object.resource_version());
        outcome(self.all::<K>().delete(&object.name_any(), &params).await)
    }

    /// Takes places of pods that are gone, or have ended, out of a tenant's status.
    async fn expire(&self, mut tenant: RdmaTenant, uids: &[String]) -> Done {
        let status = tenant.status.get_or_insert_default();
        let mut gone = Vec::new();
        for place in status.reserved.iter().filter(|place| uids.contains(&place.pod_uid)) {
            let pods: Api<Pod> = Api::namespaced(self.client.clone(), &place.namespace);
            let found = pods.get_opt(&place.pod).await?;
            let found = found.filter(|pod| pod.uid().as_ref() == Some(&place.pod_uid));
            let phase = found.map(|pod| pod.status.and_then(|status| status.phase));
            let ended = |phase: &str| ["Succeeded", "Failed"].contains(&phase);
            if phase.is_none_or(|phase| phase.as_deref().is_some_and(ended)) {
                gone.push(place.pod_uid.clone());
            }
        }
        if gone.is_empty() {
            return Ok(Outcome::Done);
        }
        status.reserved.retain(|place| !gone.contains(&place.pod_uid));
        self.status::<RdmaTenant>(&tenant).await
    }

    /// Asks the API server itself: a read without a version is answered by a quorum.
    async fn allows(&self, guard: &Guard) -> Result<bool, kube::Error> {
        Ok(match guard {
            Guard::NetworkHasNot { network, uid, vni } => {
                let found = self.all::<RdmaNetwork>().get_opt(network).await?;
                let same = found.filter(|found| found.uid().as_deref() == Some(uid));
                same.is_none_or(|found| {
                    found.status.and_then(|status| status.vni).is_some_and(|has| has != *vni)
                })
            }
            Guard::NodeHoldsNot { node, uid } => {
                let found = self.all::<RdmaNode>().get_opt(node).await?;
                let status = found.and_then(|found| found.status);
                status.is_none_or(|status| !status.blocks.contains(uid))
            }
            Guard::NodeIsGone { node } => self.all::<Node>().get_opt(node).await?.is_none(),
            Guard::PodIsGone { namespace, pod, uid } => {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
                // A static pod has another UID on its node than the copy of it here has.
                let found = pods.get_metadata_opt(pod).await?;
                found.is_none_or(|found| !is_of(&found.metadata, uid))
            }
        })
    }

    /// Evicts a pod if it is still this one, and on the node whose agent says that it has its NIC:
    /// an agent is trusted with its own node, not with the pods of others. 429 is a disruption
    /// budget, which is asked again later.
    ///
    /// `Api::evict` writes the options under a name that servers do not know, so that the UID would
    /// not count. The body has no version, since 1.20 and 1.25 have none in common: the server
    /// takes the one that it has.
    async fn evict(&self, namespace: &str, pod: &str, uid: &str, node: &str) -> Done {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let is_there = |found: &Pod| {
            let on = found.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            found.metadata.uid.as_deref() == Some(uid) && on == Some(node)
        };
        if !pods.get_opt(pod).await?.as_ref().is_some_and(is_there) {
            return Ok(Outcome::Guarded);
        }
        let body = serde_json::json!({
            "metadata": { "name": pod, "namespace": namespace },
            "deleteOptions": { "preconditions": { "uid": uid } },
        });
        let url = Pod::url_path(&(), Some(namespace));
        let request = kube::core::Request::new(url)
            .create_subresource("eviction", pod, &post(), body.to_string().into_bytes())
            .map_err(kube::Error::BuildRequest)?;
        match self.client.request::<serde_json::Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == 429 => Ok(Outcome::Guarded),
            other => outcome(other),
        }
    }
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;
