//! One run of the controller.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kube::api::ListParams;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch as watch_channel};
use tokio::time::Instant;
use vhost_rdma_cluster_api::{MANAGER, RdmaNetwork};

use crate::admission::{self, Gate, Question};
use crate::apply::Writer;
use crate::cli::ServeArgs;
use crate::convert;
use crate::core::NO_ATTACHMENTS;
use crate::engine::{Ears, Engine, Parts};
use crate::lease::Election;
use crate::metrics::Metrics;
use crate::peers::{self, Hub};
use crate::{http, tls, watch};

/// Between two tries to reach the API server at the start.
const RETRY: Duration = Duration::from_secs(2);
/// How often it is asked whether attachment definitions are a kind now.
const KINDS: Duration = Duration::from_secs(60);

/// Questions of admission that wait for the engine.
const QUESTIONS: usize = 256;

/// Why the controller does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// How to reach the API server.
    #[error("cannot tell how to reach the API server: {0}")]
    Config(#[from] kube::config::InferConfigError),
    /// The client.
    #[error("cannot make a client of the API server: {0}")]
    Client(#[source] Box<kube::Error>),
    /// A socket or a signal.
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

async fn bind(address: SocketAddr, option: &str) -> Result<TcpListener, ServeError> {
    let action = format!("serve on {address}; choose another with {option}");
    TcpListener::bind(address).await.map_err(io(action))
}

/// What is between the engine and those who ask.
struct Services {
    hub: Arc<Hub>,
    authority: Arc<watch_channel::Sender<String>>,
    questions: mpsc::Receiver<Question>,
}

/// Begins to answer whoever asks.
async fn services(
    args: &ServeArgs,
    client: &Client,
    metrics: &Arc<Metrics>,
    leader: watch_channel::Receiver<bool>,
) -> Result<Services, ServeError> {
    let http = bind(args.http, "--http").await?;
    let peers = bind(args.peers, "--peers").await?;
    let admission = bind(args.admission, "--admission").await?;
    tracing::info!(address = %args.http, version = env!("CARGO_PKG_VERSION"), "starting");
    tokio::spawn(http::serve(http, Arc::clone(metrics), Instant::now()));
    let (authority, version) = watch_channel::channel(String::new());
    let (identity, shown) = watch_channel::channel(None);
    let own = (client.clone(), args.namespace.clone());
    tokio::spawn(async move { tls::keep(own.0, &own.1, version, identity).await });
    let hub = Arc::new(Hub::new(Arc::clone(metrics)));
    tokio::spawn(peers::serve(peers, shown.clone(), Arc::clone(&hub)));
    let (engine, questions) = mpsc::channel(QUESTIONS);
    let gate = Gate {
        client: client.clone(),
        engine,
        metrics: Arc::clone(metrics),
        identity: shown.clone(),
    };
    tokio::spawn(admission::serve(admission, gate));
    tokio::spawn(admission::configure(client.clone(), leader, shown));
    Ok(Services { hub, authority: Arc::new(authority), questions })
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// The controller cannot start.
pub async fn run(args: &ServeArgs) -> Result<(), ServeError> {
    let mut term = signal(SignalKind::terminate()).map_err(io("watch for signals"))?;
    let mut int = signal(SignalKind::interrupt()).map_err(io("watch for signals"))?;
    let config = kube::Config::infer().await?;
    let client = Client::try_from(config).map_err(|e| ServeError::Client(Box::new(e)))?;
    let metrics = Arc::new(Metrics::default());
    let (mut election, leader) = Election::new(client.clone(), &args.namespace, &args.identity);
    let Services { hub, authority, mut questions } =
        services(args, &client, &metrics, leader.clone()).await?;
    let work = async {
        loop {
            let attachments = discover(&client, &args.namespace).await;
            let reporter =
                Reporter { controller: MANAGER.to_owned(), instance: Some(args.identity.clone()) };
            let parts = Parts {
                writer: Writer::new(client.clone(), &args.namespace),
                leader: leader.clone(),
                settings: args.settings(),
                attachments,
                workers: usize::from(args.workers),
                metrics: Arc::clone(&metrics),
                hub: Arc::clone(&hub),
                authority: Arc::clone(&authority),
            };
            let engine = Engine::new(parts, Recorder::new(client.clone(), reporter));
            let changes = watch::all(&client, &args.namespace, attachments);
            let ears = Ears { changes, questions: &mut questions };
            tokio::select! {
                () = engine.run(ears) => {}
                () = kinds_change(&client, &args.namespace, attachments) => {
                    tracing::info!("the kinds of the cluster have changed; beginning anew");
                }
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = election.run() => {}
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    tracing::info!("stopping");
    election.resign().await;
    Ok(())
}

/// Waits until the API server knows our kinds; whether it knows attachment definitions too.
async fn discover(client: &Client, namespace: &str) -> bool {
    let ours: Api<RdmaNetwork> = Api::all(client.clone());
    while let Err(error) = ours.list(&ListParams::default().limit(1)).await {
        tracing::warn!(%error, "waiting for the API server and manifests/crds");
        tokio::time::sleep(RETRY).await;
    }
    let known = knows_attachments(client, namespace).await.unwrap_or(false);
    if !known {
        tracing::info!("{NO_ATTACHMENTS}");
    }
    known
}

/// Whether attachment definitions are a kind; nothing if that cannot be told now.
async fn knows_attachments(client: &Client, namespace: &str) -> Option<bool> {
    let kind = convert::attachment_kind();
    let api: Api<kube::api::DynamicObject> = Api::namespaced_with(client.clone(), namespace, &kind);
    match api.list(&ListParams::default().limit(1)).await {
        Ok(_) => Some(true),
        Err(kube::Error::Api(status)) if status.code == 404 => Some(false),
        Err(_) => None,
    }
}

async fn kinds_change(client: &Client, namespace: &str, known: bool) {
    loop {
        tokio::time::sleep(KINDS).await;
        if knows_attachments(client, namespace).await.is_some_and(|now| now != known) {
            return;
        }
    }
}
