//! The gRPC service: unpacks a request, calls the daemon on a blocking thread, packs the answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tonic::{Request, Response, Status};
use vhost_rdma_proto::v1;
use vhost_rdma_proto::v1::admin_server::Admin;

use super::convert;
use super::daemon::{Daemon, Error, Reloaded};
use super::lanes::Lanes;
use super::reloading::Reloading;
use crate::node::{Backend, DEFAULT_NETWORK, NetworkConfig, Renewed, Session};
use crate::store::Successor;

/// What does not change while the daemon runs.
#[derive(Debug, Clone)]
pub(super) struct About {
    pub(super) runtime_dir: String,
    pub(super) workers: u32,
    pub(super) poll_us: u32,
    pub(super) started: Instant,
    pub(super) instance: String,
}

#[derive(Debug)]
pub(super) struct Service<B> {
    pub(super) daemon: Arc<Daemon<B>>,
    pub(super) about: About,
    pub(super) reloading: Arc<Reloading>,
    /// In which changes wait.
    pub(super) lanes: Lanes,
    /// In which restarts wait: they are what helps where a change does not end.
    pub(super) restarts: Lanes,
    /// The program that this one can become; why there is none.
    pub(super) successor: Result<Successor, String>,
    /// Tells that it is to.
    pub(super) upgrade: mpsc::Sender<()>,
}

impl<B: Backend> Service<B> {
    /// Changes something of a network, when nobody else does.
    async fn change<T, F>(&self, network: &str, work: F) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: FnOnce(&Daemon<B>) -> Result<T, Error> + Send + 'static,
    {
        self.alone(&self.lanes, network, work).await
    }

    /// Does something when nobody else is in a network's lane.
    async fn alone<T, F>(&self, lanes: &Lanes, net: &str, work: F) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: FnOnce(&Daemon<B>) -> Result<T, Error> + Send + 'static,
    {
        let alone = lanes.enter(net).await;
        // Who hangs up now does not end the work.
        let work = move |daemon: &Daemon<B>| {
            let _alone = alone;
            work(daemon)
        };
        self.call(work).await
    }

    /// The same of a NIC.
    async fn change_nic<T, F>(&self, nic: &str, work: F) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: FnOnce(&Daemon<B>) -> Result<T, Error> + Send + 'static,
    {
        match self.daemon.network_of(nic) {
            Some(network) => self.change(&network, work).await,
            // It is refused.
            None => self.call(work).await,
        }
    }

    async fn call<T, F>(&self, work: F) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: FnOnce(&Daemon<B>) -> Result<T, Error> + Send + 'static,
    {
        let daemon = Arc::clone(&self.daemon);
        match tokio::task::spawn_blocking(move || work(&daemon)).await {
            Ok(Ok(answer)) => Ok(Response::new(answer)),
            Ok(Err(error)) => {
                tracing::debug!(%error, "request refused");
                Err(convert::status(&error))
            }
            Err(error) => {
                tracing::error!(%error, "a request did not end");
                Err(Status::internal("the daemon failed at this request; its log has more"))
            }
        }
    }
}

fn network((network, nics): (NetworkConfig, usize)) -> v1::Network {
    let nics = u32::try_from(nics).unwrap_or(u32::MAX);
    let NetworkConfig { name, vni, configured, .. } = network;
    v1::Network { name, vni, nics, configured, ..v1::Network::default() }
}

/// All networks, with what is known of their processes' memory.
fn networks<B: Backend>(daemon: &Daemon<B>) -> Vec<v1::Network> {
    let processes = daemon.processes();
    let with_memory = |mut network: v1::Network| {
        let own = processes.iter().find(|process| process.network == network.name);
        if let Some(memory) = own.and_then(|process| process.memory) {
            network.memory_bytes = memory.now;
            network.memory_max = memory.max.unwrap_or(0);
            network.memory_kills = memory.kills;
        }
        network
    };
    daemon.networks().into_iter().map(network).map(with_memory).collect()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn comes_back(what: &str, name: &str, configured: bool) -> String {
    if configured {
        format!(
            "the configuration file names {what} {name:?}: it comes back when the daemon starts \
             again, unless it is removed there too"
        )
    } else {
        String::new()
    }
}

#[tonic::async_trait]
impl<B: Backend> Admin for Service<B> {
    async fn get_status(
        &self,
        _: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::GetStatusResponse>, Status> {
        let about = self.about.clone();
        self.call(move |daemon| {
            let nics = daemon.nics(None)?;
            let ready =
                nics.iter().filter(|nic| nic.status.session == Session::DriverReady).count();
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            Ok(v1::GetStatusResponse {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                uptime_seconds: about.started.elapsed().as_secs(),
                runtime_dir: about.runtime_dir,
                workers: about.workers,
                poll_us: about.poll_us,
                networks: count(daemon.networks().len()),
                nics: count(nics.len()),
                nics_ready: count(ready),
                ephemeral: daemon.is_ephemeral(),
                instance: about.instance,
                upgrade_pause_us: micros(daemon.upgrade_pause()),
            })
        })
        .await
    }

    async fn reload(
        &self,
        _: Request<v1::ReloadRequest>,
    ) -> Result<Response<v1::ReloadResponse>, Status> {
        match self.reloading.run(&self.daemon).await {
            Ok(Ok(Reloaded { changed, kept, failed })) => {
                Ok(Response::new(v1::ReloadResponse { changed, kept, failed }))
            }
            Ok(Err(why)) => Err(Status::invalid_argument(why)),
            Err(error) => {
                tracing::error!(%error, "reading the configuration again did not end");
                Err(Status::internal("the daemon failed at this request; its log has more"))
            }
        }
    }

    async fn upgrade(
        &self,
        request: Request<v1::UpgradeRequest>,
    ) -> Result<Response<v1::UpgradeResponse>, Status> {
        let force = request.into_inner().force;
        let (daemon, successor) = (Arc::clone(&self.daemon), self.successor.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let mut lost = daemon.may_upgrade(force)?;
            let successor = successor?;
            let program = successor.path().display().to_string();
            let wrong = |why| format!("{program} is no vhost-rdma: {why}; install one there");
            let version = successor.version().map_err(wrong)?;
            let reads = successor.check().map_err(|why| {
                format!("{program} would not start, and guests would lose their devices: {why}")
            })?;
            lost.extend(daemon.is_read_by(reads.as_deref(), force)?);
            lost.sort_unstable();
            lost.dedup();
            Ok::<_, String>(v1::UpgradeResponse { version, program, lost })
        });
        let answer = looked
            .await
            .unwrap_or_else(|error| Err(error.to_string()))
            .map_err(Status::failed_precondition)?;
        let asked = self.upgrade.try_send(());
        asked.map_err(|_| Status::failed_precondition("an upgrade is under way already"))?;
        Ok(Response::new(answer))
    }

    async fn add_network(
        &self,
        request: Request<v1::AddNetworkRequest>,
    ) -> Result<Response<v1::Network>, Status> {
        let v1::AddNetworkRequest { name, vni } = request.into_inner();
        self.change(&name.clone(), move |daemon| Ok(network((daemon.add_network(&name, vni)?, 0))))
            .await
    }

    async fn remove_network(
        &self,
        request: Request<v1::RemoveNetworkRequest>,
    ) -> Result<Response<v1::RemoveNetworkResponse>, Status> {
        let name = request.into_inner().name;
        self.change(&name.clone(), move |daemon| {
            let removed = daemon.remove_network(&name)?;
            Ok(v1::RemoveNetworkResponse {
                warning: comes_back("network", &name, removed.configured),
            })
        })
        .await
    }

    async fn list_networks(
        &self,
        _: Request<v1::ListNetworksRequest>,
    ) -> Result<Response<v1::ListNetworksResponse>, Status> {
        self.call(|daemon| Ok(v1::ListNetworksResponse { networks: networks(daemon) })).await
    }

    async fn restart_network(
        &self,
        request: Request<v1::RestartNetworkRequest>,
    ) -> Result<Response<v1::RestartNetworkResponse>, Status> {
        let name = request.into_inner().name;
        self.alone(&self.restarts, &name.clone(), move |daemon| {
            let Renewed { kept, lost, pause } = daemon.restart_network(&name)?;
            Ok(v1::RestartNetworkResponse { kept, lost, pause_us: micros(pause) })
        })
        .await
    }

    async fn add_peer(&self, request: Request<v1::Peer>) -> Result<Response<v1::Peer>, Status> {
        let message = request.into_inner();
        self.change(&message.network.clone(), move |daemon| {
            Ok(convert::peer(&daemon.add_peer(convert::peer_of(&message)?)?))
        })
        .await
    }

    async fn remove_peer(
        &self,
        request: Request<v1::Peer>,
    ) -> Result<Response<v1::RemovePeerResponse>, Status> {
        let message = request.into_inner();
        self.change(&message.network.clone(), move |daemon| {
            daemon.remove_peer(&convert::peer_of(&message)?)?;
            Ok(v1::RemovePeerResponse {})
        })
        .await
    }

    async fn replace_peers(
        &self,
        request: Request<v1::ReplacePeersRequest>,
    ) -> Result<Response<v1::ReplacePeersResponse>, Status> {
        let request = request.into_inner();
        self.change(&request.network.clone(), move |daemon| {
            let done = daemon.replace_peers(convert::peers_update(request)?)?;
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            Ok(v1::ReplacePeersResponse { added: count(done.added), removed: count(done.removed) })
        })
        .await
    }

    async fn list_peers(
        &self,
        request: Request<v1::ListPeersRequest>,
    ) -> Result<Response<v1::ListPeersResponse>, Status> {
        let network = Some(request.into_inner().network).filter(|name| !name.is_empty());
        self.call(move |daemon| {
            let peers = daemon.peers(network.as_deref())?;
            Ok(v1::ListPeersResponse { peers: peers.iter().map(convert::peer).collect() })
        })
        .await
    }

    async fn add_nic(
        &self,
        request: Request<v1::AddNicRequest>,
    ) -> Result<Response<v1::Nic>, Status> {
        let request = request.into_inner();
        let network = request.network.clone();
        let network = if network.is_empty() { DEFAULT_NETWORK.to_owned() } else { network };
        self.change(&network, move |daemon| {
            Ok(convert::nic(daemon.add_nic(convert::spec(request)?)?))
        })
        .await
    }

    async fn remove_nic(
        &self,
        request: Request<v1::RemoveNicRequest>,
    ) -> Result<Response<v1::RemoveNicResponse>, Status> {
        let name = request.into_inner().name;
        self.change_nic(&name.clone(), move |daemon| {
            let removed = daemon.remove_nic(&name)?;
            Ok(v1::RemoveNicResponse { warning: comes_back("NIC", &name, removed.configured) })
        })
        .await
    }

    async fn update_nic(
        &self,
        request: Request<v1::UpdateNicRequest>,
    ) -> Result<Response<v1::Nic>, Status> {
        let request = request.into_inner();
        self.change_nic(&request.name.clone(), move |daemon| {
            let name = request.name.clone();
            // The name first: a wrong one is the likelier mistake, and its message is the more
            // useful.
            daemon.nic(&name)?;
            Ok(convert::nic(daemon.update_nic(&name, convert::patch(request)?)?))
        })
        .await
    }

    async fn get_nic(
        &self,
        request: Request<v1::GetNicRequest>,
    ) -> Result<Response<v1::Nic>, Status> {
        let name = request.into_inner().name;
        self.call(move |daemon| Ok(convert::nic(daemon.nic(&name)?))).await
    }

    async fn list_nics(
        &self,
        request: Request<v1::ListNicsRequest>,
    ) -> Result<Response<v1::ListNicsResponse>, Status> {
        let network = Some(request.into_inner().network).filter(|name| !name.is_empty());
        self.call(move |daemon| {
            let nics = daemon.nics(network.as_deref())?.into_iter().map(convert::nic).collect();
            Ok(v1::ListNicsResponse { nics })
        })
        .await
    }
}
