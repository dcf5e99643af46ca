//! Keeps every pool registered, whatever the kubelet does.
//!
//! A kubelet that starts empties its plugin directory and makes a new `kubelet.sock`; it never
//! looks for plugins. So the directory is watched, the sockets' inodes are compared at every event
//! and every few seconds besides, and whatever is not as it should be is done again: first listen,
//! then register. A registration counts only while the kubelet keeps a stream of device lists open.
//!
//! The kubelet's plugin registry (a directory in which it finds sockets by itself,
//! pluginregistration.v1) is no part of the device plugin API and is left alone: an endpoint that
//! it found and one that registered would take each other's place.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::stream::StreamExt as _;
use hyper_util::rt::TokioIo;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};

use super::authority::{KubeletStream, Patch};
use super::plugin::{Plugin, options};
use crate::agent::Agent;
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::repeats::Repeats;
use crate::v1beta1::device_plugin_server::DevicePluginServer;
use crate::v1beta1::registration_client::RegistrationClient;
use crate::v1beta1::{KUBELET_SOCKET, RegisterRequest, VERSION};

/// Events come in bursts when a kubelet starts.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// How often everything is looked at without an event: inotify loses events when its queue is full.
const LOOK: Duration = Duration::from_secs(3);
/// The first pause after a registration that failed; it doubles to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How long the kubelet may take to open its stream after a registration.
const STREAM: Duration = Duration::from_secs(5);
/// How long one registration may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the watching thread waits before it looks whether it is still wanted.
const WATCH_LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A socket file, told apart from one of the same name that was made later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        let metadata = path.symlink_metadata().ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            // An inode number is used again at once on some file systems.
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// The name of a pool's socket in the plugin directory.
#[must_use]
pub fn endpoint(pool: &str) -> String {
    format!("vhost-rdma-{pool}.sock")
}

/// One pool's server.
struct Served {
    socket: PathBuf,
    identity: Option<Identity>,
    streams: Arc<AtomicUsize>,
    options: crate::v1beta1::DevicePluginOptions,
    /// Dropping it ends the server.
    _stop: oneshot::Sender<()>,
    /// The kubelet socket that it was registered at, and when.
    registered: Option<(Identity, Instant)>,
    failures: u32,
    retry_at: Instant,
}

impl Drop for Served {
    fn drop(&mut self) {
        // A socket that someone else made there since is not ours to remove.
        if self.identity.is_some() && self.identity == Identity::of(&self.socket) {
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

/// Serves and registers all pools.
pub struct Registrar<D, K> {
    agent: Arc<Agent<D, K>>,
    dir: PathBuf,
    served: BTreeMap<String, Served>,
    faults: Repeats,
}

impl<D, K> std::fmt::Debug for Registrar<D, K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registrar").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl<D: Daemon, K: Kubelet> Registrar<D, K> {
    /// In the kubelet's plugin directory.
    #[must_use]
    pub fn new(agent: Arc<Agent<D, K>>, dir: PathBuf) -> Self {
        Self { agent, dir, served: BTreeMap::new(), faults: Repeats::default() }
    }

    /// Works until it is dropped.
    pub async fn run(mut self) {
        let mut pools = self.agent.pool_names();
        let mut watch: Option<(mpsc::Receiver<()>, u64)> = None;
        loop {
            let inode = std::fs::metadata(&self.dir).ok().map(|metadata| metadata.ino());
            if watch.as_ref().map(|(_, inode)| *inode) != inode {
                watch = inode.and_then(|inode| match watch_dir(&self.dir) {
                    Ok(events) => Some((events, inode)),
                    Err(error) => {
                        tracing::warn!(
                            dir = %self.dir.display(),
                            %error,
                            "cannot watch the kubelet's plugin directory; it is looked at every \
                             few seconds"
                        );
                        None
                    }
                });
            }
            let names = pools.borrow_and_update().clone();
            let next = self.settle(&names).await;
            tokio::select! {
                () = tokio::time::sleep(next) => {}
                () = changed(watch.as_mut().map(|(events, _)| events)) => {
                    tokio::time::sleep(DEBOUNCE).await;
                }
                changed = pools.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Puts right what is wrong; gives the time after which to look again.
    async fn settle(&mut self, names: &[String]) -> Duration {
        self.served.retain(|name, _| names.contains(name));
        let kubelet = self.dir.join(KUBELET_SOCKET);
        let identity = Identity::of(&kubelet);
        let mut next = LOOK;
        let mut faults = BTreeMap::new();
        for name in names {
            let lost = self.served.get(name).is_some_and(|served| {
                served.identity.is_none() || Identity::of(&served.socket) != served.identity
            });
            if lost {
                tracing::info!(pool = name, "the plugin socket is gone: listening again");
                self.served.remove(name);
            }
            if !self.served.contains_key(name) {
                match self.listen(name) {
                    Ok(served) => {
                        self.served.insert(name.clone(), served);
                    }
                    Err(error) => {
                        faults.insert(name, error.to_string());
                        next = next.min(RETRY_MAX / 5);
                        continue;
                    }
                }
            }
            if let Some(served) = self.served.get_mut(name) {
                let resource = self.agent.resource(name).await;
                next = next.min(register(served, name, resource, &kubelet, identity).await);
                let known =
                    served.registered.is_some() && served.streams.load(Ordering::Relaxed) > 0;
                self.agent.set_registered(name, known).await;
            }
        }
        self.say(&faults);
        next
    }

    /// Why pools cannot be served: a node without a kubelet says it for all of them at once.
    fn say(&mut self, faults: &BTreeMap<&String, String>) {
        let dir = self.dir.display();
        if faults.is_empty() {
            if self.faults.ends() {
                tracing::info!(%dir, "listening in the kubelet's plugin directory");
            }
        } else if self.faults.tells(&format!("{faults:?}"), Instant::now()) {
            tracing::warn!(%dir, ?faults, "cannot listen in the kubelet's plugin directory");
        }
    }

    fn listen(&self, pool: &str) -> io::Result<Served> {
        let socket = self.dir.join(endpoint(pool));
        // Only an agent that holds the ledger's lock gets here, so what is there is a leftover.
        match std::fs::remove_file(&socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&socket)?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        let identity = Identity::of(&socket);
        let streams = Arc::new(AtomicUsize::new(0));
        let plugin = Plugin {
            agent: Arc::clone(&self.agent),
            pool: pool.to_owned(),
            streams: Arc::clone(&streams),
        };
        let patch = Patch::new(&socket.to_string_lossy());
        let incoming = UnixListenerStream::new(listener)
            .map(move |stream| stream.map(|stream| KubeletStream::new(stream, patch.clone())));
        let (stop, stopped) = oneshot::channel::<()>();
        let name = pool.to_owned();
        tokio::spawn(async move {
            let served = Server::builder()
                .add_service(DevicePluginServer::new(plugin))
                .serve_with_incoming(incoming);
            tokio::select! {
                ended = served => if let Err(error) = ended {
                    tracing::error!(pool = name, %error, "the plugin server failed");
                },
                // Open streams end with it; the kubelet then knows that the plugin is gone.
                _ = stopped => {}
            }
        });
        Ok(Served {
            socket,
            identity,
            streams,
            options: options(self.agent.is_led()),
            _stop: stop,
            registered: None,
            failures: 0,
            retry_at: Instant::now(),
        })
    }
}

/// Registers if need be; gives the time after which to look again.
async fn register(
    served: &mut Served,
    pool: &str,
    resource: String,
    kubelet: &Path,
    identity: Option<Identity>,
) -> Duration {
    let Some(identity) = identity else {
        served.registered = None;
        return LOOK;
    };
    let now = Instant::now();
    if let Some(wait) = known(served, identity, now) {
        return wait;
    }
    if now < served.retry_at {
        return served.retry_at.duration_since(now);
    }
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: endpoint(pool),
        resource_name: resource,
        options: Some(served.options),
    };
    let told = tell(kubelet, request).await;
    if let Err(error) = told {
        let pause = RETRY_MIN.saturating_mul(1 << served.failures.min(8)).min(RETRY_MAX);
        // A kubelet that is starting refuses for a moment.
        if served.failures == 3 {
            tracing::warn!(pool, error, "the kubelet does not take the registration; trying on");
        }
        served.failures = served.failures.saturating_add(1);
        served.retry_at = Instant::now() + pause;
        return pause;
    }
    tracing::info!(pool, "registered with the kubelet");
    served.registered = Some((identity, Instant::now()));
    served.failures = 0;
    RETRY_MIN
}

/// The time after which to look again, if this kubelet knows the pool or may still open its stream.
fn known(served: &Served, identity: Identity, now: Instant) -> Option<Duration> {
    let (_, since) = served.registered.filter(|(at, _)| *at == identity)?;
    if served.streams.load(Ordering::Relaxed) > 0 {
        return Some(LOOK);
    }
    let waited = now.duration_since(since);
    (waited < STREAM).then(|| STREAM.saturating_sub(waited).clamp(RETRY_MIN, RETRY_MAX / 10))
}

async fn tell(kubelet: &Path, request: RegisterRequest) -> Result<(), String> {
    let path = kubelet.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let registered = tokio::time::timeout(PATIENCE, async {
        let channel = Endpoint::from_static("http://localhost")
            .connect_with_connector(connector)
            .await
            .map_err(|error| error.to_string())?;
        RegistrationClient::new(channel)
            .register(request)
            .await
            .map_err(|status| status.message().to_owned())
    });
    registered.await.map_err(|_| "no answer".to_owned())?.map(|_| ())
}

/// Tells that something in the directory changed. The waiting is done by a thread of its own, which
/// ends when nobody listens any more.
fn watch_dir(dir: &Path) -> io::Result<mpsc::Receiver<()>> {
    let fd = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
    let events = inotify::WatchFlags::CREATE
        | inotify::WatchFlags::DELETE
        | inotify::WatchFlags::MOVED_TO
        | inotify::WatchFlags::MOVED_FROM
        | inotify::WatchFlags::DELETE_SELF;
    inotify::add_watch(&fd, dir, events)?;
    let (tell, told) = mpsc::channel(1);
    std::thread::Builder::new().name("plugin-dir".to_owned()).spawn(move || {
        let mut buffer = [0_u8; 4096];
        while !tell.is_closed() {
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            let _ = poll(&mut fds, Some(&WATCH_LOOK));
            let mut any = false;
            while rustix::io::read(&fd, &mut buffer).is_ok_and(|count| count > 0) {
                any = true;
            }
            if any {
                // One that is waiting already says the same.
                let _ = tell.try_send(());
            }
        }
    })?;
    Ok(told)
}

/// Waits for an event.
async fn changed(watch: Option<&mut mpsc::Receiver<()>>) {
    let told = match watch {
        Some(watch) => watch.recv().await.is_some(),
        None => false,
    };
    if !told {
        std::future::pending::<()>().await;
    }
}
