//! The device plugin service of one pool, as the kubelet calls it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{Stream, stream};
use tonic::{Request, Response, Status};

use crate::agent::Agent;
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::v1beta1;
use crate::v1beta1::device_plugin_server::DevicePlugin;

/// What is told at registration and when asked, which must be the same.
pub(super) const fn options(pre_start_required: bool) -> v1beta1::DevicePluginOptions {
    v1beta1::DevicePluginOptions { pre_start_required, get_preferred_allocation_available: true }
}

/// One pool's service.
#[derive(Debug)]
pub struct Plugin<D, K> {
    pub(super) agent: Arc<Agent<D, K>>,
    pub(super) pool: String,
    /// Streams of device lists that are open now: the kubelet keeps one as long as it knows us.
    pub(super) streams: Arc<AtomicUsize>,
}

/// Counts a stream for as long as it lives.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

type Lists = Pin<Box<dyn Stream<Item = Result<v1beta1::ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl<D: Daemon, K: Kubelet> DevicePlugin for Plugin<D, K> {
    async fn get_device_plugin_options(
        &self,
        _: Request<v1beta1::Empty>,
    ) -> Result<Response<v1beta1::DevicePluginOptions>, Status> {
        Ok(Response::new(options(self.agent.is_led())))
    }

    type ListAndWatchStream = Lists;

    /// The whole list now and at each change. Several streams may be open while a kubelet is
    /// replaced.
    async fn list_and_watch(&self, _: Request<v1beta1::Empty>) -> Result<Response<Lists>, Status> {
        let lists = self.agent.subscribe(&self.pool).ok_or_else(|| {
            Status::not_found(format!("pool {:?} is no longer configured", self.pool))
        })?;
        self.streams.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(Arc::clone(&self.streams));
        let stream =
            stream::unfold((lists, true, counted), |(mut lists, first, counted)| async move {
                if !first {
                    // An error means that the pool is gone: the stream ends, and the kubelet knows.
                    lists.changed().await.ok()?;
                }
                let devices = lists.borrow_and_update().as_ref().clone();
                Some((Ok(v1beta1::ListAndWatchResponse { devices }), (lists, false, counted)))
            });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<v1beta1::PreferredAllocationRequest>,
    ) -> Result<Response<v1beta1::PreferredAllocationResponse>, Status> {
        let mut container_responses = Vec::new();
        for wanted in request.into_inner().container_requests {
            let size = usize::try_from(wanted.allocation_size).unwrap_or(0);
            let device_i_ds = self
                .agent
                .preferred(
                    &self.pool,
                    &wanted.available_device_i_ds,
                    &wanted.must_include_device_i_ds,
                    size,
                )
                .await;
            container_responses.push(v1beta1::ContainerPreferredAllocationResponse { device_i_ds });
        }
        Ok(Response::new(v1beta1::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<v1beta1::AllocateRequest>,
    ) -> Result<Response<v1beta1::AllocateResponse>, Status> {
        let containers: Vec<Vec<String>> =
            request.into_inner().container_requests.into_iter().map(|c| c.devices_ids).collect();
        let agent = Arc::clone(&self.agent);
        let pool = self.pool.clone();
        // A kubelet that goes away in the middle must not leave half an allocation: the work runs
        // to its end.
        let work = tokio::spawn(async move { agent.allocate(&pool, &containers).await });
        match work.await {
            Ok(Ok(container_responses)) => {
                Ok(Response::new(v1beta1::AllocateResponse { container_responses }))
            }
            Ok(Err(error)) => {
                tracing::warn!(pool = self.pool, %error, "allocation refused");
                Err(Status::failed_precondition(error.to_string()))
            }
            Err(error) => {
                tracing::error!(%error, "an allocation did not end");
                Err(Status::internal("the agent failed at this allocation; its log has more"))
            }
        }
    }

    async fn pre_start_container(
        &self,
        request: Request<v1beta1::PreStartContainerRequest>,
    ) -> Result<Response<v1beta1::PreStartContainerResponse>, Status> {
        let ids = request.into_inner().devices_ids;
        self.agent.before_start(&ids).await.map_err(Status::permission_denied)?;
        Ok(Response::new(v1beta1::PreStartContainerResponse {}))
    }
}
