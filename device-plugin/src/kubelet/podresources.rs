//! Who has which device: the pod-resources API, and what the kubelet keeps on its disk.
//!
//! The API is the authority on who *has* a device, and, since it lists pods without devices too, on
//! which pods there are. It is silent when nothing should be concluded from silence: a kubelet that
//! has just started lists no pods, and none lists the devices of ordinary init containers. So a
//! second witness is asked: the kubelet's checkpoint, which it writes before `Allocate` is answered
//! to anybody and reads when it starts. It names the pod by its UID, the one name of a pod that is
//! never used twice. Nothing else of the kubelet's is looked at, its pods' folders least of all.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use vhost_rdma_agent_api::{CHECKPOINT, Checkpoint, checkpoint};

use crate::config::KubeletPaths;
use crate::ledger::Owner;
use crate::podresources::ListPodResourcesRequest;
use crate::podresources::pod_resources_lister_client::PodResourcesListerClient;

/// How long the kubelet may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// A node's answer: 250 pods with all their devices are far below.
const ANSWER_MAX: usize = 64 << 20;

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

/// The kubelet of this node.
#[derive(Debug, Clone)]
pub struct NodeKubelet {
    client: PodResourcesListerClient<Channel>,
    socket: PathBuf,
    checkpoint: PathBuf,
}

impl NodeKubelet {
    /// It must be called inside a runtime.
    #[must_use]
    pub fn new(paths: &KubeletPaths) -> Self {
        let socket = paths.pod_resources.clone();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
        Self {
            client: PodResourcesListerClient::new(channel).max_decoding_message_size(ANSWER_MAX),
            checkpoint: paths.device_plugins.join(CHECKPOINT),
            socket: paths.pod_resources.clone(),
        }
    }
}

impl NodeKubelet {
    fn run(&self) -> Result<Run, KubeletError> {
        let socket = self.socket.metadata().map_err(|error| KubeletError(error.to_string()))?;
        Ok((socket.ino(), socket.ctime(), socket.ctime_nsec()))
    }
}

impl Kubelet for NodeKubelet {
    async fn list(&self) -> Result<Listing, KubeletError> {
        let run = self.run()?;
        let mut client = self.client.clone();
        let answer = tokio::time::timeout(PATIENCE, client.list(ListPodResourcesRequest {}))
            .await
            .map_err(|_| KubeletError(format!("no answer in {} s", PATIENCE.as_secs())))?
            .map_err(|status| KubeletError(status.message().to_owned()))?
            .into_inner();
        if self.run()? != run {
            return Err(KubeletError("the kubelet was started again".to_owned()));
        }
        let mut listing = Listing { run, ..Listing::default() };
        for pod in answer.pod_resources {
            listing.pods.insert((pod.namespace.clone(), pod.name.clone()));
            for container in pod.containers {
                let owner = Owner {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name,
                    uid: None,
                };
                for devices in container.devices {
                    listing.holdings.extend(devices.device_ids.into_iter().map(|id| Holding {
                        resource: devices.resource_name.clone(),
                        id,
                        owner: owner.clone(),
                    }));
                }
            }
        }
        Ok(listing)
    }

    fn checkpoint(&self) -> Option<Checkpoint> {
        match std::fs::read(&self.checkpoint) {
            Ok(text) => checkpoint(&text),
            // It is written when the first plugin registers.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(BTreeMap::new()),
            Err(_) => None,
        }
    }
}
