//! One run of the agent.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::agent::{Agent, Parts, Settings, undo};
use crate::channel;
use crate::cli::ServeArgs;
use crate::cni::CniSocket;
use crate::config::{Config, ConfigError, Injection, KubeletPaths};
use crate::daemon::{AdminApi, Daemon, Pace, Paced};
use crate::events::{Events, kubelet_knows_cdi};
use crate::files::Dirs;
use crate::follow;
use crate::holders::Kubelet;
use crate::host::NodeHost;
use crate::http;
use crate::journal::JournalError;
use crate::kubelet::{NodeKubelet, Registrar};

/// How often the hardware is looked at.
const RESCAN: Duration = Duration::from_secs(10);
/// How long an ID rests at first that could not be undone.
const REST: Duration = Duration::from_secs(10);
/// Seconds that the kubelet may take to list a pod after its `Allocate`.
const SETTLE: u64 = 2;

/// Why the agent does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The ledger.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A socket, a signal, the runtime.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: String,
        /// What the system said.
        source: std::io::Error,
    },
}

fn io(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> ServeError {
    let action = action.into();
    move |source| ServeError::Io { action, source }
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// The agent cannot start.
pub fn run(args: ServeArgs, socket: PathBuf) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(io("start the runtime"))?;
    let served = runtime.block_on(serve(args, socket));
    // A call that is still busy on a blocking thread must not hold the end up.
    runtime.shutdown_timeout(Duration::from_secs(2));
    served
}

async fn serve(args: ServeArgs, socket: PathBuf) -> Result<(), ServeError> {
    let mut term = signal(SignalKind::terminate()).map_err(io("watch for signals"))?;
    let mut int = signal(SignalKind::interrupt()).map_err(io("watch for signals"))?;
    let config = Config::read(&args.config)?;
    let paths = KubeletPaths::new(&args.kubelet_root, args.device_plugin_dir.clone());
    let agent = Agent::new(parts(&args, &config, &paths, &socket).await, &args.state_dir)?;
    let cni = CniSocket::bind(&socket).map_err(io(format!("listen on {}", socket.display())))?;
    // The inventory is there before the kubelet hears of us: a pod that is admitted finds its IDs,
    // unhealthy until the daemon answers.
    agent.configure(config).await;
    agent.reconcile().await;
    let mut tasks = vec![
        tokio::spawn(cni.serve(Arc::clone(&agent))),
        tokio::spawn(Registrar::new(Arc::clone(&agent), paths.device_plugins.clone()).run()),
        tokio::spawn(keep(Arc::clone(&agent), Duration::from_secs(args.interval))),
        tokio::spawn(reload(Arc::clone(&agent), args.config.clone())),
    ];
    if let Some(node) = args.node_name.clone().filter(|_| args.cluster) {
        tasks.push(tokio::spawn(follow::run(Arc::clone(&agent), node)));
    }
    let creditor = Arc::clone(&agent);
    tasks.push(tokio::spawn(async move { creditor.collect_debts().await }));
    let led = Arc::clone(&agent);
    tasks.push(tokio::spawn(async move {
        if let Some(channel) = led.channel() {
            channel::run(&*led, channel).await;
        }
    }));
    if let Some(address) = args.http {
        tasks.push(tokio::spawn(http::serve(listen(address).await?, Arc::clone(&agent))));
    }
    tracing::info!(socket = %socket.display(), version = env!("CARGO_PKG_VERSION"), "ready");
    // There may be no service manager.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    stop(tasks).await;
    Ok(())
}

/// Is the agent's helper until SIGTERM or SIGINT.
///
/// # Errors
/// It cannot start.
pub fn help(socket: &Path, cni_dir: &Path) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(io("start the runtime"))?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let waited = runtime.block_on(async {
        let mut term = signal(SignalKind::terminate()).map_err(io("watch for signals"))?;
        let mut int = signal(SignalKind::interrupt()).map_err(io("watch for signals"))?;
        let (socket, cni_dir) = (socket.to_owned(), cni_dir.to_owned());
        let work = tokio::task::spawn_blocking(move || undo::help(&socket, &cni_dir, &stopped));
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            _ = work => {}
        }
        Ok(())
    });
    stop.store(true, Ordering::Relaxed);
    // A DEL that is under way may end; what it does not do is asked for again.
    runtime.shutdown_timeout(Duration::from_secs(10));
    waited
}

async fn listen(address: std::net::SocketAddr) -> Result<TcpListener, ServeError> {
    let listener = TcpListener::bind(address).await.map_err(io(format!(
        "serve health and metrics on {address}; choose another with --http"
    )))?;
    tracing::info!(%address, "serving health and metrics");
    Ok(listener)
}

async fn stop(tasks: Vec<tokio::task::JoinHandle<()>>) {
    tracing::info!("stopping; pods keep their NICs");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
    for task in tasks {
        task.abort();
        // Its sockets are removed when it is dropped.
        let _ = task.await;
    }
}

async fn parts(
    args: &ServeArgs,
    config: &Config,
    paths: &KubeletPaths,
    socket: &Path,
) -> Parts<Paced<AdminApi>, NodeKubelet> {
    let auto_cdi = match (&args.node_name, config.injection) {
        (Some(node), Injection::Auto) => kubelet_knows_cdi(node).await,
        _ => false,
    };
    let settings = Settings {
        dirs: Dirs { cdi: args.cdi_dir.clone(), device_info: args.device_info_dir.clone() },
        cni_dir: args.cni_dir.clone(),
        undo: args.undo,
        socket: socket.to_owned(),
        settle: SETTLE,
        reclaim: Duration::from_secs(args.reclaim),
        rest: REST,
        reconnect: Duration::from_secs(args.reconnect),
        auto_cdi,
        start: Duration::from_secs(args.start),
        patience: Duration::from_secs(args.allocate_wait),
        own_pod: args.pod_namespace.clone().zip(args.pod_name.clone()),
        cluster: args.cluster,
        channel: args.channel(),
    };
    Parts {
        settings,
        config: config.clone(),
        daemon: Paced::new(AdminApi::new(&args.daemon), Pace::default()),
        kubelet: NodeKubelet::new(paths),
        host: Arc::new(NodeHost::default()),
        events: args.node_name.clone().map_or_else(Events::default, Events::to_api_server),
    }
}

/// Reconciles every `interval`, and soon after something happened.
async fn keep<D: Daemon, K: Kubelet>(agent: Arc<Agent<D, K>>, interval: Duration) {
    let mut rescan = tokio::time::Instant::now() + RESCAN;
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            // The kubelet lists a pod a moment after its Allocate.
            () = agent.woken() => tokio::time::sleep(Duration::from_millis(300)).await,
        }
        agent.reconcile().await;
        if tokio::time::Instant::now() >= rescan {
            agent.rescan().await;
            rescan = tokio::time::Instant::now() + RESCAN;
        }
    }
}

/// Tells one state of a file from another. A ConfigMap changes by a symlink in the middle of its
/// path, so the file itself is asked.
fn fingerprint(path: &Path) -> Option<(u64, u64, SystemTime)> {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = path.metadata().ok()?;
    Some((metadata.ino(), metadata.len(), metadata.modified().ok()?))
}

async fn reload<D: Daemon, K: Kubelet>(agent: Arc<Agent<D, K>>, path: PathBuf) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    let mut seen = fingerprint(&path);
    loop {
        let asked = tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => false,
            _ = hangup.recv() => true,
        };
        let now = fingerprint(&path);
        if now == seen && !asked {
            continue;
        }
        seen = now;
        match Config::read(&path) {
            Ok(config) => agent.reloaded(config).await,
            Err(error) => agent.refused(&error.to_string()).await,
        }
    }
}
