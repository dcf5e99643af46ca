//! rdma_cm towards third-party hosts: started with the first NIC on an RNIC, or not at all.

use std::sync::Arc;
#[cfg(feature = "host-rnic")]
use std::sync::OnceLock;

use crate::rnic::Directory;

/// Starts what speaks to them, once it is wanted, and holds it.
#[derive(Debug, Default)]
pub(super) struct CmBridgeStarter {
    ports: Vec<u16>,
    #[cfg(feature = "host-rnic")]
    started: OnceLock<Option<crate::rnic::CmBridge>>,
}

impl CmBridgeStarter {
    pub(super) fn new(ports: Vec<u16>) -> Self {
        Self {
            ports,
            #[cfg(feature = "host-rnic")]
            started: OnceLock::new(),
        }
    }

    /// There is a NIC on an RNIC. A host without librdmacm, or where a port is taken, serves
    /// everything else.
    #[cfg(feature = "host-rnic")]
    pub(super) fn wanted(&self, directory: &Arc<Directory>) {
        self.started.get_or_init(|| {
            let started = crate::rnic::CmBridge::start(&self.ports, directory);
            started
                .inspect_err(|error| {
                    tracing::warn!(error, "no rdma_cm to third-party hosts");
                })
                .ok()
        });
    }

    #[cfg(not(feature = "host-rnic"))]
    pub(super) fn wanted(&self, _: &Arc<Directory>) {
        if !self.ports.is_empty() {
            tracing::warn!("ports for rdma_cm are not served: built without RNIC support");
        }
    }
}
