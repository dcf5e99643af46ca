//! Follows the controller's lists: one call of its service `Peers`, by TLS 1.3 with the node's own
//! certificate, for as long as it lasts.
//!
//! The other side is believed to be the controller if a root that is believed says so and its name
//! is the controller's; even so it chooses neither how much memory it costs nor how often the
//! daemon is asked for something ([`crate::member::book`], `TOGETHER`). What it sends that is not
//! good ends the stream, and the next one begins later.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tonic::transport::Endpoint;
use tonic::{Code, Status};
use vhost_rdma_cluster_api::peers::v1::FollowRequest;
use vhost_rdma_cluster_api::peers::v1::peers_client::PeersClient;

use super::certify::chance;
use crate::agent::Agent;
use crate::daemon::Daemon;
use crate::holders::Kubelet;
use crate::member::book::{BadUpdate, Incoming};
use crate::member::store::Kept;
use crate::member::{Channel, Trouble};
use crate::repeats::Repeats;

/// How long each step of a connection may take.
const STEP: Duration = Duration::from_secs(10);
/// A side that does not answer a ping for so long is gone.
const PING: Duration = Duration::from_secs(20);
/// Between two tries, at first; then twice as long each time.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// A stream that held so long was a good one.
const GOOD: Duration = Duration::from_secs(30);
/// Lists that come within this time are written down, and told the daemon, together.
const TOGETHER: Duration = Duration::from_millis(200);

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("{}", .0.message())]
    Refused(Box<Status>),
    #[error("the controller ended the stream")]
    Over,
    #[error(transparent)]
    Bad(#[from] BadUpdate),
    #[error("cannot write the lists down: {0}")]
    Disk(#[from] std::io::Error),
}

impl Ended {
    const fn reason(&self) -> &'static str {
        match self {
            Self::Connect(_) | Self::Over => "Unreachable",
            Self::Refused(_) => "Refused",
            Self::Bad(_) => "NotUsable",
            Self::Disk(_) => "Disk",
        }
    }
}

/// What the other side said, or what became of the connection: a status that carries a source was
/// made here.
fn refused(status: Status) -> Ended {
    let mut source = std::error::Error::source(&status);
    if source.is_none() && status.code() != Code::Unavailable {
        return Ended::Refused(Box::new(status));
    }
    let mut why = status.message().to_owned();
    while let Some(error) = source {
        why = error.to_string();
        source = error.source();
    }
    Ended::Connect(why)
}

/// Follows for ever.
pub(super) async fn run<D: Daemon, K: Kubelet>(agent: &Agent<D, K>, channel: &Channel) {
    let mut kept = channel.kept.subscribe();
    let mut pause = RETRY;
    let mut faults = Repeats::default();
    loop {
        let now = kept.borrow_and_update().clone();
        let usable = channel.look(&now).is_ok_and(|of| of.holds(SystemTime::now()));
        if !usable {
            disconnected(agent, channel, "NoCertificate", "the node has no certificate yet").await;
            // A clock that is set right makes one hold that did not.
            let _ = timeout(Duration::from_secs(30), kept.changed()).await;
            continue;
        }
        let begin = Instant::now();
        let ended = tokio::select! {
            ended = follow(agent, channel, &now) => ended,
            // Another certificate, or other roots: a new connection by them, at once.
            _ = kept.changed() => continue,
        };
        let Err(ended) = ended;
        if begin.elapsed() > GOOD {
            faults.ends();
        }
        faults.log(&ended.to_string(), "the lists of peers are not followed");
        disconnected(agent, channel, ended.reason(), &ended.to_string()).await;
        if begin.elapsed() > GOOD {
            pause = RETRY;
        }
        tokio::time::sleep(pause.mul_f64(0.5 + chance())).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

async fn disconnected<D: Daemon, K: Kubelet>(
    agent: &Agent<D, K>,
    channel: &Channel,
    reason: &'static str,
    why: &str,
) {
    {
        let mut view = channel.view();
        view.connected = false;
        view.peers_trouble = Some(Trouble::new(reason, why.chars().take(500).collect::<String>()));
    }
    agent.channel_changed().await;
}

/// Who we are, and whom we believe.
fn config(kept: &Kept) -> Result<ClientConfig, String> {
    let (Some(pair), Some(roots)) = (&kept.pair, &kept.roots) else {
        return Err("there is no certificate".to_owned());
    };
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let certificates = |pem: &str| -> Result<Vec<CertificateDer<'static>>, String> {
        CertificateDer::pem_slice_iter(pem.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(|error| error.to_string())
    };
    let mut believed = RootCertStore::empty();
    for root in certificates(&roots.pem)? {
        believed.add(root).map_err(|error| text(&error))?;
    }
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).map_err(|error| text(&error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| text(&error))?
        .with_root_certificates(believed)
        .with_client_auth_cert(certificates(&pair.cert)?, key)
        .map_err(|error| text(&error))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

async fn connect(
    channel: &Channel,
    kept: &Kept,
) -> Result<PeersClient<tonic::transport::Channel>, Ended> {
    let bad = |error: String| Ended::Connect(error);
    let name = ServerName::try_from(channel.settings().controller_name.clone());
    let name = name.map_err(|error| bad(error.to_string()))?;
    let config = config(kept).map_err(bad)?;
    let stream = timeout(STEP, TcpStream::connect(&channel.settings().controller)).await;
    let stream = stream.map_err(|_| bad("no answer".to_owned()))?;
    let stream = stream.map_err(|error| bad(error.to_string()))?;
    stream.set_nodelay(true).map_err(|error| bad(error.to_string()))?;
    let stream = timeout(STEP, TlsConnector::from(Arc::new(config)).connect(name, stream)).await;
    let stream = stream.map_err(|_| bad("no answer to the handshake".to_owned()))?;
    let mut stream = Some(TokioIo::new(stream.map_err(|error| bad(error.to_string()))?));
    // Made above, where errors are to be seen; the client must not make another, by which it would
    // go on after this one has broken.
    let connector = tower::service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| std::io::Error::other("the connection broke"));
        async move { stream }
    });
    let made = Endpoint::from_static("http://controller")
        .http2_keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(|error| bad(error.to_string()))?;
    Ok(PeersClient::new(made))
}

/// One stream, until it ends.
async fn follow<D: Daemon, K: Kubelet>(
    agent: &Agent<D, K>,
    channel: &Channel,
    kept: &Kept,
) -> Result<std::convert::Infallible, Ended> {
    let mut client = connect(channel, kept).await?;
    let node = channel.settings().node.clone();
    let request = FollowRequest { node, held: agent.held_peers().await };
    let answer = timeout(STEP, client.follow(request)).await;
    let answer = answer.map_err(|_| Ended::Connect("no answer to the call".to_owned()))?;
    let mut stream = answer.map_err(refused)?.into_inner();
    {
        let mut view = channel.view();
        view.connected = true;
        view.peers_trouble = None;
    }
    agent.channel_changed().await;
    tracing::info!(controller = channel.settings().controller, "following the lists of peers");
    let mut incoming = Incoming::default();
    let mut deadline: Option<Instant> = None;
    loop {
        let message = match deadline {
            None => stream.message().await,
            Some(at) => match timeout_at(at, stream.message()).await {
                Ok(message) => message,
                Err(_) => {
                    deadline = None;
                    agent.keep_peers().await?;
                    continue;
                }
            },
        };
        let taken = match message {
            Ok(Some(update)) => agent.take_peers(&mut incoming, update).await.map_err(Ended::Bad),
            Ok(None) => Err(Ended::Over),
            Err(status) => Err(refused(status)),
        };
        match taken {
            Ok(false) => {}
            Ok(true) => {
                channel.view().updated = Some(SystemTime::now());
                deadline = deadline.or_else(|| Some(Instant::now() + TOGETHER));
            }
            Err(ended) => {
                // What was complete before counts.
                if deadline.is_some() {
                    agent.keep_peers().await?;
                }
                return Err(ended);
            }
        }
        // A side that never stops talking is not waited for.
        if deadline.is_some_and(|at| Instant::now() >= at) {
            deadline = None;
            agent.keep_peers().await?;
        }
    }
}
