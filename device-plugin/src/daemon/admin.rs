//! The real daemon: its admin API.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use vhost_rdma_proto::v1::admin_client::AdminClient;
use vhost_rdma_proto::{ANSWER_MAX, v1};

use super::{Daemon, DaemonError, Done, View};

/// How long one call may take where nobody is less patient: ending a NIC waits for its guest's last
/// accesses, everything else is instant.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a look may take, before the daemon counts as gone.
const LOOK: Duration = Duration::from_secs(10);

impl From<Status> for DaemonError {
    fn from(status: Status) -> Self {
        let message = status.message().to_owned();
        // A status that carries a source was made by the transport here; the daemon's own has a
        // code and a message only.
        if std::error::Error::source(&status).is_some() {
            return Self::Unreachable(message);
        }
        match status.code() {
            Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Unknown => {
                Self::Unreachable(message)
            }
            Code::NotFound => Self::NotFound(message),
            Code::AlreadyExists => Self::Exists(message),
            _ => Self::Refused(message),
        }
    }
}

/// The admin API on its unix socket; the connection is made when it is needed, and again when it
/// broke.
#[derive(Debug, Clone)]
pub struct AdminApi {
    client: AdminClient<Channel>,
}

impl AdminApi {
    /// A client of the daemon behind `socket`. It must be called inside a runtime.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        let socket = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        // The address is only the authority that HTTP/2 wants; the connector does not look at it.
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
        Self { client: AdminClient::new(channel).max_decoding_message_size(ANSWER_MAX) }
    }
}

async fn within<T>(
    patience: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>> + Send,
) -> Done<T> {
    match tokio::time::timeout(patience, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(DaemonError::Unreachable(format!("no answer in {} s", patience.as_secs()))),
    }
}

impl Daemon for AdminApi {
    async fn view(&self) -> Done<View> {
        let (mut a, mut b) = (self.client.clone(), self.client.clone());
        let status = within(LOOK, a.get_status(v1::GetStatusRequest {})).await?;
        let nics = within(LOOK, b.list_nics(v1::ListNicsRequest::default())).await?.nics;
        let nics = nics.into_iter().map(|nic| (nic.name.clone(), nic)).collect();
        // An older daemon says its process only; in a container that is always the same.
        let instance =
            if status.instance.is_empty() { status.pid.to_string() } else { status.instance };
        Ok(View { instance, version: status.version, nics })
    }

    async fn ensure_network(&self, name: &str, vni: Option<u32>) -> Done<()> {
        let mut client = self.client.clone();
        let request = v1::AddNetworkRequest { name: name.to_owned(), vni };
        match within(PATIENCE, client.add_network(request)).await {
            Ok(_) => Ok(()),
            Err(DaemonError::Exists(message)) => {
                // Either the name exists, which is well, or another network has the VNI.
                let known =
                    within(LOOK, client.list_networks(v1::ListNetworksRequest {})).await?.networks;
                match known.iter().find(|network| network.name == name) {
                    Some(network) if vni.is_none_or(|vni| vni == network.vni) => Ok(()),
                    Some(network) => Err(DaemonError::Refused(format!(
                        "network {name:?} has VNI {}, not {}; correct the pool's vni or leave it \
                         away",
                        network.vni,
                        vni.unwrap_or(0)
                    ))),
                    None => Err(DaemonError::Exists(message)),
                }
            }
            Err(error) => Err(error),
        }
    }

    async fn remove_network(&self, name: &str, vni: u32) -> Done<()> {
        let mut client = self.client.clone();
        let known = within(LOOK, client.list_networks(v1::ListNetworksRequest {})).await?.networks;
        if !known.iter().any(|network| network.name == name && network.vni == vni) {
            return Ok(());
        }
        let request = v1::RemoveNetworkRequest { name: name.to_owned() };
        match within(PATIENCE, client.remove_network(request)).await {
            Ok(_) | Err(DaemonError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn replace_peers(&self, request: v1::ReplacePeersRequest) -> Done<()> {
        within(PATIENCE, self.client.clone().replace_peers(request)).await.map(|_| ())
    }

    async fn reload(&self) -> Done<v1::ReloadResponse> {
        within(PATIENCE, self.client.clone().reload(v1::ReloadRequest {})).await
    }

    async fn add_nic(&self, request: v1::AddNicRequest) -> Done<v1::Nic> {
        within(PATIENCE, self.client.clone().add_nic(request)).await
    }

    async fn update_nic(&self, request: v1::UpdateNicRequest) -> Done<v1::Nic> {
        within(PATIENCE, self.client.clone().update_nic(request)).await
    }

    async fn nic(&self, name: &str) -> Done<v1::Nic> {
        within(LOOK, self.client.clone().get_nic(v1::GetNicRequest { name: name.to_owned() })).await
    }

    async fn remove_nic(&self, name: &str) -> Done<()> {
        let request = v1::RemoveNicRequest { name: name.to_owned() };
        match within(PATIENCE, self.client.clone().remove_nic(request)).await {
            Ok(_) | Err(DaemonError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::task::{Context, Poll};

    use futures::future::BoxFuture;
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::body::Body;
    use tonic::codegen::http;
    use tonic::server::{Grpc, NamedService};
    use tonic::transport::Server;
    use tonic_prost::ProstCodec;
    use tower::service_fn;

    use super::*;

    /// A daemon that has NICs, with much to say of each.
    #[derive(Clone)]
    struct ManyNics;

    impl NamedService for ManyNics {
        const NAME: &'static str = "vhost_rdma.v1.Admin";
    }

    impl tower::Service<http::Request<Body>> for ManyNics {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: http::Request<Body>) -> Self::Future {
            Box::pin(async move {
                if request.uri().path().ends_with("/ListNics") {
                    let answer = service_fn(async |_: tonic::Request<v1::ListNicsRequest>| {
                        let nic = |n| v1::Nic {
                            name: format!("{n}"),
                            error: "x".repeat(1 << 20),
                            ..v1::Nic::default()
                        };
                        let nics = (0..8).map(nic).collect();
                        Ok(tonic::Response::new(v1::ListNicsResponse { nics }))
                    });
                    Ok(Grpc::new(ProstCodec::default()).unary(answer, request).await)
                } else {
                    let answer = service_fn(async |_: tonic::Request<v1::GetStatusRequest>| {
                        Ok(tonic::Response::new(v1::GetStatusResponse::default()))
                    });
                    Ok(Grpc::new(ProstCodec::default()).unary(answer, request).await)
                }
            })
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_long_list_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let incoming = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
        let server = Server::builder().add_service(ManyNics).serve_with_incoming(incoming);
        let server = tokio::spawn(server);
        let view = AdminApi::new(&path).view().await.unwrap();
        let length: usize = view.nics.values().map(|nic| nic.error.len()).sum();
        assert_eq!((view.nics.len(), length), (8, 8 << 20));
        server.abort();
    }
}
