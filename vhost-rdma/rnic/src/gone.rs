//! Host verbs of a device that is gone, or not open: there is nothing, and nothing can be made.

use std::io;
use std::os::fd::OwnedFd;

use vhost_rdma_engine::link::Gid;
use virtio_rdma_abi as abi;

use super::verbs::{
    HostAh, HostDomain, HostError, HostEvent, HostGid, HostLimits, HostMr, HostMw, HostObjects,
    HostPd, HostPort, HostQp, HostSrq, HostVerbs, HostWc, Keeps, MadeAh, PostError, QpInit,
    RecvBurst, Registered, Result, SendBurst,
};

const GONE: HostError = HostError(libc::ENODEV);

/// See the module.
#[derive(Debug)]
pub(super) struct Gone {
    limits: HostLimits,
    entries: u32,
}

impl Gone {
    /// In the place of `host`.
    pub(super) fn after(host: &dyn HostVerbs) -> Self {
        Self { limits: host.limits().clone(), entries: host.cq_entries() }
    }
}

const fn refused<T>() -> std::result::Result<T, PostError> {
    Err(PostError { posted: 0, error: GONE })
}

impl HostVerbs for Gone {
    fn limits(&self) -> &HostLimits {
        &self.limits
    }

    fn port(&mut self) -> Result<HostPort> {
        Err(GONE)
    }

    fn gids(&mut self) -> Result<Vec<HostGid>> {
        Err(GONE)
    }

    fn alloc_pd(&mut self) -> Result<HostPd> {
        Err(GONE)
    }

    fn free_pd(&mut self, _: HostPd) -> Result<()> {
        Ok(())
    }

    fn domain(&mut self, _: HostPd) -> Result<Box<dyn HostDomain>> {
        Err(GONE)
    }

    fn adopt(&mut self, _: Registered) -> HostMr {
        HostMr(u32::MAX)
    }

    fn release(&mut self, _: HostMr) -> Result<Registered> {
        Err(GONE)
    }

    fn alloc_mw(&mut self, _: HostPd, _: u32) -> Result<(HostMw, u32)> {
        Err(GONE)
    }

    fn dealloc_mw(&mut self, _: HostMw) -> Result<()> {
        Ok(())
    }

    fn adopt_ah(&mut self, _: MadeAh) -> Result<HostAh> {
        Err(GONE)
    }

    fn destroy_ah(&mut self, _: HostAh) -> Result<()> {
        Ok(())
    }

    fn create_srq(&mut self, _: HostPd, _: u32, _: u32) -> Result<HostSrq> {
        Err(GONE)
    }

    fn arm_srq(&mut self, _: HostSrq, _: u32) -> Result<()> {
        Err(GONE)
    }

    fn destroy_srq(&mut self, _: HostSrq) -> Result<()> {
        Ok(())
    }

    fn create_qp(&mut self, _: &QpInit) -> Result<(HostQp, u32)> {
        Err(GONE)
    }

    fn modify_qp(&mut self, _: HostQp, _: &abi::QpAttr) -> Result<()> {
        Err(GONE)
    }

    fn query_qp(&mut self, _: HostQp) -> Result<(u8, bool)> {
        Err(GONE)
    }

    fn attach_mcast(&mut self, _: HostQp, _: &Gid, _: &Gid) -> Result<()> {
        Err(GONE)
    }

    fn detach_mcast(&mut self, _: HostQp, _: &Gid) -> Result<()> {
        Ok(())
    }

    fn destroy_qp(&mut self, _: HostQp) -> Result<()> {
        Ok(())
    }

    fn cq_entries(&self) -> u32 {
        self.entries
    }

    fn post_send(&mut self, _: HostQp, _: &SendBurst) -> std::result::Result<(), PostError> {
        refused()
    }

    fn post_recv(&mut self, _: HostQp, _: &RecvBurst) -> std::result::Result<(), PostError> {
        refused()
    }

    fn post_srq(&mut self, _: HostSrq, _: &RecvBurst) -> std::result::Result<(), PostError> {
        refused()
    }

    fn poll(&mut self, _: &mut Vec<HostWc>) -> Result<bool> {
        Err(GONE)
    }

    fn arm(&mut self) -> Result<()> {
        Err(GONE)
    }

    fn next_event(&mut self) -> Option<HostEvent> {
        None
    }

    fn wake_fds(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    fn keep(&mut self, _: Box<dyn Keeps>) {}

    fn objects(&self) -> HostObjects {
        HostObjects::default()
    }
}
