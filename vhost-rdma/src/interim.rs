//! Holds the NICs' sockets until the device layer is wired in: a VMM that connects waits. Goes with that change.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::sync::{Mutex, PoisonError};

use vhost_rdma::node::{AttachError, Backend, NicConfig, NicStatus};
use vhost_rdma::socket;

/// Listening sockets that nobody accepts from.
#[derive(Debug, Default)]
pub(crate) struct Listeners(Mutex<BTreeMap<String, (NicConfig, UnixListener)>>);

impl Backend for Listeners {
    fn attach(&self, nic: &NicConfig) -> Result<(), AttachError> {
        let listener = socket::bind(&nic.socket, &nic.access)?;
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(nic.name.clone(), (nic.clone(), listener));
        Ok(())
    }

    fn detach(&self, name: &str) {
        if let Some((nic, _)) = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(name) {
            socket::remove(&nic.socket);
        }
    }

    fn update(&self, _nic: &NicConfig) -> Result<(), AttachError> {
        Ok(())
    }

    fn status(&self, _name: &str) -> NicStatus {
        NicStatus::default()
    }
}
