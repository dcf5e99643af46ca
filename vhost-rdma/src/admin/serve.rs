//! One run of the daemon: lock, socket, service, end.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::FlockOperation;
use rustix::net::SocketType;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Sleep;
use tokio_stream::Stream;
use tonic::transport::Server;
use vhost_rdma_proto::v1::admin_server::AdminServer;

use super::daemon::{self, Daemon, resolve};
use super::metrics::{self, MetricsAddress};
use super::reloading::{Reload, Reloading};
use super::scrape::answer_all;
use super::service::{About, Service};
use super::users::UserError;
use crate::config::{self, ADMIN_SOCKET};
use crate::node::{AttachError, Backend, SOCKET_PATH_MAX, SocketAccess};
use crate::places::origin;
use crate::socket;
use crate::store::{Listening, Owner, Sockets, Store, Successor, become_successor};

/// Between two tries to have the address of metrics.
const METRICS_RETRY: Duration = Duration::from_secs(2);
/// How long open API calls may take to end after a signal.
const LAST_CALLS: Duration = Duration::from_secs(2);

/// Between attempts to accept a connection where that fails.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Bytes of a request: all the peers that a network may have.
const REQUEST_MAX: usize = 32 << 20;

/// How the daemon runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where sockets and state are.
    pub runtime_dir: PathBuf,
    /// Shown in the status.
    pub workers: u32,
    /// Shown in the status.
    pub poll_us: u32,
    /// Worker threads of each network that has a process of its own.
    pub network_workers: u32,
    /// Keep no state over a restart.
    pub ephemeral: bool,
    /// Who may open the admin socket.
    pub admin: config::Access,
    /// Where metrics are served.
    pub metrics: Option<MetricsAddress>,
    /// Networks and NICs that exist at every start.
    pub file: config::File,
}

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The runtime directory.
    #[error(
        "cannot {action} {path}: {source}; run as a user who may write there, or choose another \
         directory with --runtime-dir"
    )]
    Directory {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Another daemon.
    #[error(
        "another vhost-rdma daemon{pid} runs in {dir}; use that one (`vhost-rdma status`), stop \
         it, or choose another directory with --runtime-dir"
    )]
    Running {
        /// " (pid N)" if known.
        pid: String,
        /// The runtime directory.
        dir: String,
    },
    /// Longer than `sun_path`.
    #[error(
        "the admin socket's path {path} has {length} bytes, a unix socket allows \
         {SOCKET_PATH_MAX}; choose a shorter --runtime-dir"
    )]
    PathTooLong {
        /// The path.
        path: String,
        /// Its length.
        length: usize,
    },
    /// Admin or metrics socket.
    #[error("{what}: {source}")]
    Socket {
        /// Which socket.
        what: &'static str,
        /// Why.
        source: AttachError,
    },
    /// Unknown owner or group.
    #[error("admin socket: {0}")]
    User(#[from] UserError),
    /// State or configuration.
    #[error(transparent)]
    Start(#[from] daemon::Error),
    /// The metrics address.
    #[error("cannot serve metrics on {address}: {source}; choose another address with --metrics")]
    Metrics {
        /// As asked for.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Runtime, signals.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The API server.
    #[error("the admin API failed: {0}")]
    Api(#[from] tonic::transport::Error),
}

/// Whether [`run`] would find something wrong with what it is asked for, or with the state that is
/// saved. Nothing is changed.
///
/// # Errors
/// What it would find.
pub fn check(settings: &Settings) -> Result<(), ServeError> {
    let dir = absolute(&settings.runtime_dir)?;
    fits(&dir.join(ADMIN_SOCKET))?;
    resolve(&settings.admin, 0o600)?;
    Ok(daemon::check(&dir, settings.ephemeral, &settings.file)?)
}

/// Serves until SIGTERM or SIGINT. `backend` is made once the runtime directory is ours.
///
/// # Errors
/// The daemon cannot start, or its API failed.
pub fn run<B: Backend, E>(
    settings: &Settings,
    backend: impl FnOnce() -> Result<B, E>,
    reload: Reload,
    sockets: &Sockets,
) -> Result<(), RunError<E>> {
    // First of all, since its default action is the end: one that comes while the daemon starts is
    // served once it has.
    let runtime = runtime()?;
    let hangup = runtime
        .block_on(async { signal(SignalKind::hangup()) })
        .map_err(|source| ServeError::Io { action: "watch for signals", source })?;
    let dir = prepare(&settings.runtime_dir)?;
    let _lock = lock(&dir)?;
    let path = dir.join(ADMIN_SOCKET);
    fits(&path)?;
    let access = resolve(&settings.admin, 0o600).map_err(ServeError::User)?;
    let listening = sockets
        .open(&Owner::Admin, SocketType::STREAM, (&path, &access))
        .map_err(|source| ServeError::Socket { what: "admin socket", source })?;
    let backend = backend().map_err(RunError::Backend)?;
    let daemon = Daemon::start(&dir, settings.ephemeral, &settings.file, backend)
        .map_err(ServeError::Start)?;
    let daemon = Arc::new(daemon);
    let reloading = Arc::new(Reloading::new(reload, path, settings.admin.clone()));
    let successor = Successor::find().map_err(|error| error.to_string());
    let store = sockets.store().clone();
    let api = Api { runtime, hangup, reloading, successor: successor.clone(), store };
    let served = serve_api(settings, &listening, &daemon, api);
    if let (Ok(Ended::Upgrade), Ok(successor)) = (&served, successor) {
        upgrade(&daemon, &successor, (&listening, sockets.store()));
    }
    // Tells the service manager that the end is wanted; there may be none.
    let _ = sockets.store().tell("STOPPING=1\n");
    tracing::debug!("the API has ended");
    daemon.stop();
    tracing::info!("stopped");
    served.map(drop).map_err(RunError::Serve)
}

/// Becomes the next program; the present one if there is none after all. If not even that is
/// possible the process ends at once, since nothing here is its own any more, and what serves it
/// starts it again.
fn upgrade<B: Backend>(
    daemon: &Daemon<B>,
    successor: &Successor,
    (admin, store): (&Listening, &Store),
) -> ! {
    tracing::info!(program = %successor.path().display(), "becoming another program");
    let mut heirlooms = daemon.hand_down();
    heirlooms.extend(admin.hand_down());
    heirlooms.extend(store.hand_down());
    let error = become_successor(successor.path(), &heirlooms);
    tracing::error!(%error, "it cannot be started; going on with the program that runs");
    let error = become_successor(Path::new("/proc/self/exe"), &heirlooms);
    tracing::error!(%error, "nor can that");
    std::process::exit(1)
}

/// Why the API is not served any more.
enum Ended {
    Stop,
    Upgrade,
}

/// Why a run ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError<E> {
    /// The shell's own reasons.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The device layer did not start.
    #[error("{0}")]
    Backend(E),
}

fn prepare(dir: &Path) -> Result<PathBuf, ServeError> {
    let fault =
        |action, source| ServeError::Directory { action, path: dir.display().to_string(), source };
    // Others must be able to pass to their NIC's socket; what protects is the mode of each socket.
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(dir)
        .map_err(|error| fault("create the runtime directory", error))?;
    absolute(dir)
}

/// VMMs are started elsewhere, so the paths that they are told must not depend on where we were.
fn absolute(dir: &Path) -> Result<PathBuf, ServeError> {
    let (action, path) = ("find the runtime directory", dir.display().to_string());
    std::path::absolute(dir).map_err(|source| ServeError::Directory { action, path, source })
}

/// Whether a socket's path is short enough.
fn fits(path: &Path) -> Result<(), ServeError> {
    let length = path.as_os_str().len();
    if length > SOCKET_PATH_MAX {
        return Err(ServeError::PathTooLong { path: path.display().to_string(), length });
    }
    Ok(())
}

/// Held as long as the daemon runs; the kernel releases it however the daemon ends.
fn lock(dir: &Path) -> Result<File, ServeError> {
    let path = dir.join("daemon.lock");
    let fault =
        |action, source| ServeError::Directory { action, path: path.display().to_string(), source };
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|error| fault("open the lock file", error))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            // The pid is only for the message; without it the message is still right.
            let known = file.read_to_string(&mut pid).is_ok() && !pid.trim().is_empty();
            let pid = if known { format!(" (pid {})", pid.trim()) } else { String::new() };
            return Err(ServeError::Running { pid, dir: dir.display().to_string() });
        }
        Err(error) => return Err(fault("lock", error.into())),
    }
    let written = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "{}", std::process::id()));
    // It is only for the message: a disk that is full keeps nobody from serving.
    if let Err(error) = written {
        tracing::warn!(path = %path.display(), %error, "the lock file does not say who has it");
    }
    Ok(file)
}

/// What the API needs that was made before everything else.
struct Api {
    runtime: Runtime,
    hangup: Signal,
    reloading: Arc<Reloading>,
    successor: Result<Successor, String>,
    /// The way to the service manager.
    store: Store,
}

fn runtime() -> Result<Runtime, ServeError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(16)
        .build()
        .map_err(|source| ServeError::Io { action: "start the API's runtime", source })
}

fn serve_api<B: Backend>(
    settings: &Settings,
    listening: &Listening,
    daemon: &Arc<Daemon<B>>,
    api: Api,
) -> Result<Ended, ServeError> {
    let Api { runtime, hangup, reloading, successor, store } = api;
    let (upgrade, asked) = mpsc::channel(1);
    let served = runtime.block_on(async {
        // A copy: it is listened on until the run ends, so that who comes in an upgrade waits.
        let bound = listening.listener().try_clone();
        let listener = adopt(bound.map_err(|source| ServeError::Io { action: "listen", source })?)?;
        let path = listening.path();
        if let Some(address) = &settings.metrics
            && let Err(error) = serve_metrics(address, Arc::clone(daemon)).await
        {
            // Guests that an earlier program served are not to lose their devices for it.
            if !daemon.has_taken_up() && daemon.upgrade_pause().is_zero() {
                return Err(error);
            }
            tracing::error!(%error, "there are no metrics yet");
            tokio::spawn(serve_metrics_later(address.clone(), Arc::clone(daemon)));
        }
        let about = About {
            runtime_dir: path.parent().unwrap_or(path).display().to_string(),
            workers: settings.workers,
            poll_us: settings.poll_us,
            started: Instant::now(),
            instance: instance(),
        };
        let daemon = Arc::clone(daemon);
        let (lanes, restarts) = Default::default();
        let service = Service { daemon, about, reloading, lanes, restarts, successor, upgrade };
        until_asked(listener, service, (path, &store), (hangup, asked)).await
    });
    if let Some(MetricsAddress::Unix(path)) = &settings.metrics {
        socket::remove(path);
    }
    // A call that is still busy on a blocking thread must not hold the end up.
    runtime.shutdown_timeout(LAST_CALLS);
    served
}

/// Tells this run from every other one: nobody starts two daemons in a nanosecond.
fn instance() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}", since.as_nanos())
}

fn adopt(listener: std::os::unix::net::UnixListener) -> Result<UnixListener, ServeError> {
    let fault = |source| ServeError::Io { action: "listen", source };
    listener.set_nonblocking(true).map_err(fault)?;
    UnixListener::from_std(listener).map_err(fault)
}

/// Connections of the admin API. The server takes the next one at once when one could not be
/// accepted; out of descriptors, that would burn a core without a word.
struct Incoming {
    listener: UnixListener,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Stream for Incoming {
    type Item = io::Result<UnixStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok((stream, _)) => return Poll::Ready(Some(Ok(stream))),
                Err(error) => {
                    tracing::error!(%error, "cannot accept a connection of the admin API");
                    self.pause = Some(Box::pin(tokio::time::sleep(ACCEPT_PAUSE)));
                }
            }
        }
    }
}

async fn until_asked<B: Backend>(
    listener: UnixListener,
    service: Service<B>,
    (path, store): (&Path, &Store),
    (mut hangup, mut upgrade): (Signal, mpsc::Receiver<()>),
) -> Result<Ended, ServeError> {
    let fault = |source| ServeError::Io { action: "watch for signals", source };
    let (daemon, reloading) = (Arc::clone(&service.daemon), Arc::clone(&service.reloading));
    let mut term = signal(SignalKind::terminate()).map_err(fault)?;
    let mut int = signal(SignalKind::interrupt()).map_err(fault)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let server = Server::builder()
        .add_service(AdminServer::new(service).max_decoding_message_size(REQUEST_MAX))
        .serve_with_incoming_shutdown(Incoming { listener, pause: None }, async {
            // Either way, sent or dropped, it is time to stop.
            let _ = stopped.await;
        });
    tokio::pin!(server);
    announce(path, store);
    let (why, end) = loop {
        tokio::select! {
            ended = &mut server => return Ok(ended.map(|()| Ended::Stop)?),
            _ = term.recv() => break ("SIGTERM", Ended::Stop),
            _ = int.recv() => break ("SIGINT", Ended::Stop),
            Some(()) = upgrade.recv() => break ("upgrade", Ended::Upgrade),
            _ = hangup.recv() => {
                let (daemon, reloading) = (Arc::clone(&daemon), Arc::clone(&reloading));
                tracing::info!(signal = "SIGHUP", "reading the configuration again");
                // What comes of it is in the log.
                tokio::spawn(async move { drop(reloading.run(&daemon).await) });
            }
        }
    };
    tracing::info!(why, "stopping");
    drop(stop);
    match tokio::time::timeout(LAST_CALLS, server).await {
        Ok(ended) => Ok(ended.map(|()| end)?),
        // A client that keeps its connection open does not keep the daemon alive.
        Err(_) => Ok(end),
    }
}

fn announce(path: &Path, store: &Store) {
    tracing::info!(socket = %path.display(), version = env!("CARGO_PKG_VERSION"), "ready");
    if let Err(error) = store.tell("READY=1\n") {
        tracing::warn!(%error, "cannot tell the service manager that the daemon is ready");
    }
}

/// Whoever is in the way may go.
async fn serve_metrics_later<B: Backend>(address: MetricsAddress, daemon: Arc<Daemon<B>>) {
    loop {
        tokio::time::sleep(METRICS_RETRY).await;
        if serve_metrics(&address, Arc::clone(&daemon)).await.is_ok() {
            return;
        }
    }
}

async fn serve_metrics<B: Backend>(
    address: &MetricsAddress,
    daemon: Arc<Daemon<B>>,
) -> Result<(), ServeError> {
    let registry = metrics::registry(daemon);
    match address {
        MetricsAddress::Inet(inet) => {
            let listener = TcpListener::bind(inet)
                .await
                .map_err(|source| ServeError::Metrics { address: address.to_string(), source })?;
            let bound = listener
                .local_addr()
                .map_or_else(|_| address.to_string(), |bound| bound.to_string());
            tracing::info!(address = bound, "serving metrics");
            tokio::spawn(answer_all(registry, async move || {
                let (stream, from) = listener.accept().await?;
                Ok((stream, origin(from)))
            }));
        }
        MetricsAddress::Unix(path) => {
            let access = SocketAccess { mode: 0o660, ..SocketAccess::default() };
            let listener = adopt(
                socket::bind(path, &access)
                    .map_err(|source| ServeError::Socket { what: "metrics socket", source })?,
            )?;
            tracing::info!(%address, "serving metrics");
            tokio::spawn(answer_all(registry, async move || {
                let (stream, _) = listener.accept().await?;
                let user = stream.peer_cred().map_or(u32::MAX, |peer| peer.uid());
                Ok((stream, user))
            }));
        }
    }
    Ok(())
}
