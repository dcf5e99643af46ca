//! Who has which device, by the kubelet's word: what it can be asked, and what it answers.
//!
//! The pod-resources API is the authority on who *has* a device, and, since it lists pods without
//! devices too, on which pods there are. It is silent when nothing should be concluded from
//! silence: a kubelet that has just started lists no pods, and none lists the devices of ordinary
//! init containers. So a second witness is asked: the kubelet's checkpoint, which it writes before
//! `Allocate` is answered to anybody and reads when it starts. It names the pod by its UID, the one
//! name of a pod that is never used twice. Nothing else of the kubelet's is looked at, its pods'
//! folders least of all.
//!
//! Here are data and the calls, no I/O: who asks this node's kubelet is `kubelet`, who concludes
//! something is `agent`, and this may touch neither.

use std::collections::BTreeSet;
use std::future::Future;

use vhost_rdma_agent_api::Checkpoint;

use crate::ledger::Owner;

/// The kubelet did not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the kubelet's pod-resources API does not answer: {0}")]
pub struct KubeletError(pub String);

/// A device with its holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// `<domain>/<pool>`.
    pub resource: String,
    /// The ID.
    pub id: String,
    /// Who.
    pub owner: Owner,
}

/// Namespace and name.
pub type PodKey = (String, String);

/// A run of the kubelet: its socket is made anew at each start.
pub type Run = (u64, i64, i64);

/// What the kubelet answers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listing {
    /// Every device that a container has; ordinary init containers are not in it.
    pub holdings: Vec<Holding>,
    /// Every pod, with devices or without.
    pub pods: BTreeSet<PodKey>,
    /// Which kubelet said so.
    pub run: Run,
}

/// What can be asked.
pub trait Kubelet: Send + Sync + 'static {
    /// Who has what.
    fn list(&self) -> impl Future<Output = Result<Listing, KubeletError>> + Send;
    /// The kubelet's checkpoint. No file: nobody has a device; `None` if it cannot be read.
    fn checkpoint(&self) -> Option<Checkpoint>;
}
