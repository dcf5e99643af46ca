//! A kubelet: registration, pod-resources, and the client of the device plugins that registered.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use vhost_rdma_agent::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use vhost_rdma_agent::podresources::{
    ContainerDevices, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
};
use vhost_rdma_agent::v1beta1;
use vhost_rdma_agent::v1beta1::device_plugin_client::DevicePluginClient;
use vhost_rdma_agent::v1beta1::registration_server::{Registration, RegistrationServer};

/// Who has what: (namespace, pod, container) → (resource, IDs).
type Pods = BTreeMap<(String, String, String), Vec<(String, String)>>;

#[derive(Debug, Default)]
struct Known {
    registered: BTreeMap<String, v1beta1::RegisterRequest>,
    registrations: u32,
    pods: Pods,
    /// The server's tasks of open connections outlive the server.
    dead: bool,
}

pub(crate) struct FakeKubelet {
    root: PathBuf,
    known: Arc<Mutex<Known>>,
    servers: Vec<JoinHandle<()>>,
}

struct Registrations(Arc<Mutex<Known>>);

#[tonic::async_trait]
impl Registration for Registrations {
    async fn register(
        &self,
        request: Request<v1beta1::RegisterRequest>,
    ) -> Result<Response<v1beta1::Empty>, Status> {
        let request = request.into_inner();
        let mut known = self.0.lock().unwrap();
        known.registrations += 1;
        known.registered.insert(request.resource_name.clone(), request);
        Ok(Response::new(v1beta1::Empty {}))
    }
}

struct Lister(Arc<Mutex<Known>>);

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let known = self.0.lock().unwrap();
        if known.dead {
            return Err(Status::unavailable("killed"));
        }
        let pod_resources = known
            .pods
            .iter()
            .map(|((namespace, name, container), devices)| PodResources {
                name: name.clone(),
                namespace: namespace.clone(),
                containers: vec![ContainerResources {
                    name: container.clone(),
                    devices: devices
                        .iter()
                        .map(|(resource, id)| ContainerDevices {
                            resource_name: resource.clone(),
                            device_ids: vec![id.clone()],
                        })
                        .collect(),
                }],
            })
            .collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }
}

impl FakeKubelet {
    /// Starts as a kubelet does: its directory is emptied.
    pub(crate) fn start(root: &Path) -> Self {
        let mut kubelet =
            Self { root: root.to_owned(), known: Arc::default(), servers: Vec::new() };
        kubelet.boot();
        kubelet
    }

    fn boot(&mut self) {
        let (plugins, resources) = (self.plugins(), self.root.join("pod-resources"));
        // All but its checkpoint.
        let checkpoint = std::fs::read(plugins.join("kubelet_internal_checkpoint"));
        for dir in [&plugins, &resources] {
            let _ = std::fs::remove_dir_all(dir);
        }
        std::fs::create_dir_all(&resources).unwrap();
        std::fs::create_dir_all(&plugins).unwrap();
        if let Ok(text) = checkpoint {
            std::fs::write(plugins.join("kubelet_internal_checkpoint"), text).unwrap();
        }
        let listen = |path: PathBuf| UnixListenerStream::new(UnixListener::bind(path).unwrap());
        let pods = listen(resources.join("kubelet.sock"));
        let registrations = listen(plugins.join("kubelet.sock"));
        self.known.lock().unwrap().dead = false;
        let (a, b) = (Arc::clone(&self.known), Arc::clone(&self.known));
        self.servers = vec![
            tokio::spawn(async move {
                let service = PodResourcesListerServer::new(Lister(a));
                Server::builder().add_service(service).serve_with_incoming(pods).await.unwrap();
            }),
            tokio::spawn(async move {
                let service = RegistrationServer::new(Registrations(b));
                Server::builder()
                    .add_service(service)
                    .serve_with_incoming(registrations)
                    .await
                    .unwrap();
            }),
        ];
    }

    /// Killed; its sockets stay.
    pub(crate) fn kill(&mut self) {
        for server in self.servers.drain(..) {
            server.abort();
        }
        let mut known = self.known.lock().unwrap();
        known.registered.clear();
        known.dead = true;
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        self.boot();
    }

    pub(crate) fn plugins(&self) -> PathBuf {
        self.root.join("device-plugins")
    }

    pub(crate) fn registrations(&self) -> u32 {
        self.known.lock().unwrap().registrations
    }

    /// A pod has an ID, as the pod-resources API tells.
    pub(crate) fn give(&self, pod: &str, resource: &str, id: &str) {
        let key = ("ns".to_owned(), pod.to_owned(), "c".to_owned());
        let mut known = self.known.lock().unwrap();
        known.pods.entry(key).or_default().push((resource.to_owned(), id.to_owned()));
    }

    /// A pod is there, with no device in a container that is listed.
    pub(crate) fn admit(&self, pod: &str) {
        let key = ("ns".to_owned(), pod.to_owned(), "c".to_owned());
        self.known.lock().unwrap().pods.entry(key).or_default();
    }

    /// Writes the checkpoint: UID, resource and ID.
    pub(crate) fn note(&self, entries: &[(&str, &str, &str)]) {
        let entries: Vec<_> = entries
            .iter()
            .map(|(uid, resource, id)| {
                serde_json::json!({
                    "PodUID": uid, "ContainerName": "c", "ResourceName": resource,
                    "DeviceIDs": {"-1": [id]}
                })
            })
            .collect();
        let text = serde_json::json!({"Data": {"PodDeviceEntries": entries}}).to_string();
        std::fs::write(self.plugins().join("kubelet_internal_checkpoint"), text).unwrap();
    }

    pub(crate) fn delete(&self, pod: &str) {
        self.known.lock().unwrap().pods.retain(|key, _| key.1 != pod);
    }

    /// A client of the plugin of a resource, once it registered.
    pub(crate) async fn plugin(&self, resource: &str) -> DevicePluginClient<Channel> {
        let request = eventually(&format!("{resource} registers"), || {
            self.known.lock().unwrap().registered.get(resource).cloned()
        })
        .await;
        assert_eq!(request.version, "v1beta1");
        assert!(!request.endpoint.contains('/'), "{}", request.endpoint);
        let path = self.plugins().join(&request.endpoint);
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://localhost")
            .connect_with_connector(connector)
            .await
            .unwrap();
        let mut client = DevicePluginClient::new(channel);
        let options =
            client.get_device_plugin_options(v1beta1::Empty {}).await.unwrap().into_inner();
        assert_eq!(Some(options), request.options, "the same options must be told twice");
        client
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The next list of a stream that `good` accepts.
pub(crate) async fn list_where(
    stream: &mut Streaming<v1beta1::ListAndWatchResponse>,
    what: &str,
    good: impl Fn(&BTreeMap<String, String>) -> bool,
) -> BTreeMap<String, String> {
    let mut last = BTreeMap::new();
    let found = tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            let response = stream.message().await.unwrap().expect("the stream must stay open");
            last = response.devices.into_iter().map(|device| (device.id, device.health)).collect();
            if good(&last) {
                return;
            }
        }
    })
    .await;
    assert!(found.is_ok(), "no list came in which {what}; the last was {last:?}");
    last
}

/// Waits until something is there.
pub(crate) async fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(found) = look() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not happen in 30 s: {what}");
}
