//! Who has which device: the pod-resources API, and what the kubelet keeps on its disk.
//!
//! The API is the authority on who *has* a device. It is silent when nothing should be concluded from silence: a kubelet that
//! has just started lists no pods, and one of version 1.20 lists no init containers. So before anything is taken away, two more
//! witnesses are asked: the kubelet's checkpoint (which UID has the ID) and its pod directories (does that pod still exist).

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

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

/// What can be asked.
pub trait Kubelet: Send + Sync + 'static {
    /// Every device that a pod has.
    fn holdings(&self) -> impl Future<Output = Result<Vec<Holding>, KubeletError>> + Send;
    /// Pod UIDs by resource and ID, as the kubelet's checkpoint has them; empty if it cannot be read.
    fn checkpoint(&self) -> BTreeMap<(String, String), String>;
    /// Does the kubelet still keep a pod's directory? `None` if that cannot be told.
    fn pod_exists(&self, uid: &str) -> Option<bool>;
}

/// The kubelet of this node.
#[derive(Debug, Clone)]
pub struct NodeKubelet {
    client: PodResourcesListerClient<Channel>,
    checkpoint: PathBuf,
    pods: PathBuf,
}

impl NodeKubelet {
    /// It must be called inside a runtime.
    #[must_use]
    pub fn new(root: &Path, paths: &KubeletPaths) -> Self {
        let socket = paths.pod_resources.clone();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
        Self {
            client: PodResourcesListerClient::new(channel).max_decoding_message_size(ANSWER_MAX),
            checkpoint: paths.device_plugins.join("kubelet_internal_checkpoint"),
            pods: root.join("pods"),
        }
    }
}

/// The parts of the checkpoint that say who has what; the format is the kubelet's own, so whatever does not fit is nothing known.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: CheckpointData,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointData {
    #[serde(default)]
    pod_device_entries: Option<Vec<CheckpointEntry>>,
}

#[derive(Deserialize)]
struct CheckpointEntry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    #[serde(rename = "ResourceName")]
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: DeviceIds,
}

/// A list until 1.20, then lists by NUMA node.
#[derive(Deserialize)]
#[serde(untagged)]
enum DeviceIds {
    Flat(Vec<String>),
    ByNuma(BTreeMap<String, Vec<String>>),
}

fn read_checkpoint(text: &[u8]) -> BTreeMap<(String, String), String> {
    let Ok(checkpoint) = serde_json::from_slice::<Checkpoint>(text) else { return BTreeMap::new() };
    let mut known = BTreeMap::new();
    for entry in checkpoint.data.pod_device_entries.unwrap_or_default() {
        let ids: Vec<String> = match entry.device_ids {
            DeviceIds::Flat(ids) => ids,
            DeviceIds::ByNuma(nodes) => nodes.into_values().flatten().collect(),
        };
        for id in ids {
            known.insert((entry.resource_name.clone(), id), entry.pod_uid.clone());
        }
    }
    known
}

impl Kubelet for NodeKubelet {
    async fn holdings(&self) -> Result<Vec<Holding>, KubeletError> {
        let mut client = self.client.clone();
        let answer = tokio::time::timeout(PATIENCE, client.list(ListPodResourcesRequest {}))
            .await
            .map_err(|_| KubeletError(format!("no answer in {} s", PATIENCE.as_secs())))?
            .map_err(|status| KubeletError(status.message().to_owned()))?
            .into_inner();
        let mut holdings = Vec::new();
        for pod in answer.pod_resources {
            for container in pod.containers {
                let owner = Owner {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name,
                    uid: None,
                };
                for devices in container.devices {
                    holdings.extend(devices.device_ids.into_iter().map(|id| Holding {
                        resource: devices.resource_name.clone(),
                        id,
                        owner: owner.clone(),
                    }));
                }
            }
        }
        Ok(holdings)
    }

    fn checkpoint(&self) -> BTreeMap<(String, String), String> {
        std::fs::read(&self.checkpoint).map(|text| read_checkpoint(&text)).unwrap_or_default()
    }

    fn pod_exists(&self, uid: &str) -> Option<bool> {
        let plain = !uid.is_empty() && uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        // A folder that we do not see at all says nothing about one pod.
        (plain && self.pods.is_dir()).then(|| self.pods.join(uid).is_dir())
    }
}

#[cfg(test)]
mod tests {
    use super::read_checkpoint;

    #[test]
    fn both_forms_of_the_checkpoint_are_understood_and_junk_is_nothing() {
        let by_numa = br#"{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c","ResourceName":"x.y/a",
            "DeviceIDs":{"0":["a-0"],"-1":["a-1"]},"AllocResp":""}],"RegisteredDevices":{}},"Checksum":1}"#;
        let flat = br#"{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c","ResourceName":"x.y/a",
            "DeviceIDs":["a-0","a-1"],"AllocResp":""}],"RegisteredDevices":null},"Checksum":1}"#;
        for text in [&by_numa[..], &flat[..]] {
            let known = read_checkpoint(text);
            assert_eq!(known.len(), 2);
            assert_eq!(known[&("x.y/a".to_owned(), "a-1".to_owned())], "u1");
        }
        assert!(read_checkpoint(br#"{"Data":{"PodDeviceEntries":null}}"#).is_empty());
        assert!(read_checkpoint(b"junk").is_empty());
    }
}
