//! This node's kubelet, asked who has which device: its pod-resources API, and the checkpoint that
//! it keeps on its disk.
//!
//! What is asked, and what the two are worth, is [`crate::holders`]. Nothing is decided here.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use vhost_rdma_agent_api::{CHECKPOINT, Checkpoint, checkpoint};

use crate::config::KubeletPaths;
use crate::holders::{Holding, Kubelet, KubeletError, Listing, Run};
use crate::ledger::Owner;
use crate::podresources::ListPodResourcesRequest;
use crate::podresources::pod_resources_lister_client::PodResourcesListerClient;

/// How long the kubelet may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// A node's answer: 250 pods with all their devices are far below.
const ANSWER_MAX: usize = 64 << 20;

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
