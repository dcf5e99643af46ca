//! The socket of the CNI binary and of the operator's commands: one request and one answer per
//! connection.
//!
//! Only root opens it (mode 0600): whoever can may take NICs from pods. So what limits it is time
//! and size, not trust.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use vhost_rdma_agent_api::{MESSAGE_MAX, Reply, decode, encode};

use crate::agent::Agent;
use crate::daemon::Daemon;
use crate::holders::Kubelet;

/// How long a client may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);

/// A listening socket that is removed at the end.
#[derive(Debug)]
pub struct CniSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl CniSocket {
    /// Binds it; the caller holds the ledger's lock, so a socket that is there is a leftover.
    ///
    /// # Errors
    /// The directory cannot be made or the socket not be bound.
    pub fn bind(path: &Path) -> std::io::Result<Self> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Bound under another name: nobody can connect before the mode holds.
        let hidden = path.with_extension("new");
        let _ = std::fs::remove_file(&hidden);
        let listener = UnixListener::bind(&hidden)?;
        std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&hidden, path)?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Answers everyone.
    pub async fn serve<D: Daemon, K: Kubelet>(self, agent: Arc<Agent<D, K>>) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let agent = Arc::clone(&agent);
                    tokio::spawn(async move { converse(&agent, stream).await });
                }
                // Out of descriptors, most likely: waits, so that the loop does not burn a core.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }
}

impl Drop for CniSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn converse<D: Daemon, K: Kubelet>(agent: &Agent<D, K>, mut stream: UnixStream) {
    let Some(bytes) = request(&mut stream).await else { return };
    let reply = match decode(&bytes) {
        Ok(request) => agent.answer(request).await,
        Err(fault) => Reply::Fault(fault),
    };
    let sent = match encode(&reply) {
        Ok(bytes) => stream.write_all(&bytes).await,
        Err(error) => Err(error),
    };
    if let Err(error) = sent {
        tracing::debug!(%error, "a client did not get its answer");
    }
}

async fn request(stream: &mut UnixStream) -> Option<Vec<u8>> {
    match tokio::time::timeout(PATIENCE, read(stream)).await {
        Ok(Ok(bytes)) => Some(bytes),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a client did not finish its request");
            None
        }
        Err(_) => None,
    }
}

async fn read(stream: &mut UnixStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let count = stream.read(&mut chunk).await?;
        let Some(now) = chunk.get(..count).filter(|now| !now.is_empty()) else { return Ok(bytes) };
        if let Some(end) = now.iter().position(|byte| *byte == b'\n') {
            bytes.extend_from_slice(now.get(..end).unwrap_or_default());
            return Ok(bytes);
        }
        bytes.extend_from_slice(now);
        if bytes.len() > MESSAGE_MAX {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidData,
                "the message is too long",
            ));
        }
    }
}
