//! Reaching the daemon: every way that fails says which of them it is, because each has another
//! cure.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use vhost_rdma_proto::ANSWER_MAX;
use vhost_rdma_proto::v1::admin_client::AdminClient;

use super::Failure;
use crate::node::SOCKET_PATH_MAX;

/// How long one call may take: ending a NIC waits for its guest's last accesses, everything else is
/// instant. Longer than the daemon waits itself (10 s for a VMM's thread, 65 s for a network's
/// process), so that what it has to say is heard.
const PATIENCE: Duration = Duration::from_secs(90);

/// How long others may be before us in the daemon's queue, and how often that is looked at.
const QUEUE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(20);

/// A client of the daemon behind `path`.
pub(super) async fn connect(path: &Path) -> Result<AdminClient<Channel>, Failure> {
    let length = path.as_os_str().len();
    if length > SOCKET_PATH_MAX {
        return Err(Failure::Usage(format!(
            "the socket path {} has {length} bytes, a unix socket allows {SOCKET_PATH_MAX}; give a \
             shorter one with --socket",
            path.display()
        )));
    }
    // The channel hides why a connection failed; so the first one is made here and handed over.
    let stream = dial(path).await.map_err(|error| unreachable(path, &error))?;
    let mut first = Some(stream);
    let path: PathBuf = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let stream = first.take();
        let path = path.clone();
        async move {
            match stream {
                Some(stream) => Ok(TokioIo::new(stream)),
                None => dial(&path).await.map(TokioIo::new),
            }
        }
    });
    // The address is only the authority that HTTP/2 wants; the connector does not look at it.
    let channel = Endpoint::from_static("http://localhost")
        .timeout(PATIENCE)
        .connect_with_connector(connector)
        .await
        .map_err(|error| Failure::silent(&error.to_string()))?;
    Ok(AdminClient::new(channel).max_decoding_message_size(ANSWER_MAX))
}

/// Connects. A listener that does not keep up has a full queue, and whoever does not block is told
/// so at once (unix(7), EAGAIN): it is asked again for a while.
async fn dial(path: &Path) -> io::Result<UnixStream> {
    let end = Instant::now() + QUEUE;
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                tokio::time::sleep(LOOK).await;
            }
            other => return other,
        }
    }
}

fn unreachable(path: &Path, error: &io::Error) -> Failure {
    let path = path.display();
    let start =
        "start it with `vhost-rdma serve`, or name its socket with --socket or VHOST_RDMA_SOCKET";
    match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::Unreachable(format!("the daemon is not running: there is no {path}; {start}"))
        }
        io::ErrorKind::ConnectionRefused => Failure::Unreachable(format!(
            "the daemon is not running: nobody listens on {path}; {start}"
        )),
        io::ErrorKind::PermissionDenied => Failure::Forbidden(format!(
            "no permission to open {path}; use the daemon's user, or start the daemon with \
             --admin-group and --admin-mode 0660"
        )),
        _ => Failure::Unreachable(format!("cannot reach the daemon at {path}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen};
    use rustix::net::{accept, connect, socket, socket_with};

    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_full_queue_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&listener, &address).unwrap();
        listen(&listener, 0).unwrap();
        let first = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        connect(&first, &address).unwrap();
        let (kind, flags) = (SocketType::STREAM, SocketFlags::NONBLOCK);
        let second = socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        assert_eq!(connect(&second, &address), Err(rustix::io::Errno::AGAIN), "the queue is full");
        let keeping_up = std::thread::spawn(move || {
            std::thread::sleep(10 * LOOK);
            drop(accept(&listener).unwrap());
            listener
        });
        dial(&path).await.unwrap();
        keeping_up.join().unwrap();
    }
}
