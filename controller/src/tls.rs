//! The controller's own certificate, and connections that are let in by it.
//!
//! Each replica reads the authority's Secret and signs a certificate for its servers, anew when a
//! root changes and after half of its life. The key is made in the process and is nowhere else.
//! Who asks for peers must show a certificate of a node; the API server, which asks for admission,
//! shows none.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use rustls::version::TLS13;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use vhost_rdma_cluster_api::{AUTHORITY, MANAGER};
use vhost_rdma_places::{Place, Places, origin};

use crate::convert;
use crate::pki::{self, Pair, PkiError, Root};
use crate::trust::wall;

/// How long a server's certificate holds.
const LIFE: Duration = Duration::from_secs(86_400);
/// Before it is tried again what failed.
const RETRY: Duration = Duration::from_secs(5);
/// How long a client may take to show who it is.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Clients that are connected at a time.
const CONNECTIONS: usize = 16_384;
/// Of those, what one host has where anybody is let in.
pub const SHARE: usize = 1024;
/// The same where a certificate says who it is: nodes may come through one address.
pub const WHOLE: usize = CONNECTIONS;
/// Those whose handshake is under way, and how many of one host: all nodes may come at once, and
/// none is to lose its place to the next.
const HANDSHAKES: usize = 8192;
const SHAKING: usize = 4096;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("cannot read the authority: {0}")]
    Api(#[from] kube::Error),
    #[error("the authority is not there, or damaged")]
    Absent,
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error("{0}")]
    Unfit(String),
}

fn unfit(error: &dyn std::fmt::Display) -> TlsError {
    TlsError::Unfit(error.to_string())
}

/// What servers show, and whom they let in.
#[derive(Debug, Clone)]
pub struct Identity {
    /// For those who must show a certificate of a node.
    pub nodes: Arc<ServerConfig>,
    /// For those who need not.
    pub anybody: Arc<ServerConfig>,
    /// The roots by which a client knows this server, in PEM.
    pub roots: String,
    /// The secret part of the path at which the API server asks.
    pub token: String,
}

impl Identity {
    /// Makes one for these names.
    ///
    /// # Errors
    /// A certificate or a key is none.
    pub(crate) fn new(pair: &Pair, roots: &[Root], names: &[String]) -> Result<Self, TlsError> {
        let own = pki::sign_server(pair, names, wall(), LIFE.as_secs())?;
        let chain =
            vec![CertificateDer::from_pem_slice(own.cert.as_bytes()).map_err(|e| unfit(&e))?];
        let key = || PrivateKeyDer::from_pem_slice(own.key.as_bytes()).map_err(|e| unfit(&e));
        let mut store = RootCertStore::empty();
        for root in roots {
            let der = CertificateDer::from_pem_slice(root.pem.as_bytes()).map_err(|e| unfit(&e))?;
            store.add(der).map_err(|e| unfit(&e))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider.clone())
                .build()
                .map_err(|e| unfit(&e))?;
        let builder = || {
            ServerConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&TLS13])
                .map_err(|e| unfit(&e))
        };
        let mut nodes = builder()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key()?)
            .map_err(|e| unfit(&e))?;
        nodes.alpn_protocols = vec![b"h2".to_vec()];
        let mut anybody = builder()?
            .with_no_client_auth()
            .with_single_cert(chain, key()?)
            .map_err(|e| unfit(&e))?;
        anybody.alpn_protocols = vec![b"http/1.1".to_vec()];
        for config in [&mut nodes, &mut anybody] {
            // Who is let in is decided anew at each connection.
            config.send_tls13_tickets = 0;
        }
        let token = String::new();
        let roots = roots.iter().map(|root| root.pem.as_str()).collect();
        Ok(Self { nodes: Arc::new(nodes), anybody: Arc::new(anybody), roots, token })
    }
}

/// The names of the controller's service.
#[must_use]
pub fn names(namespace: &str) -> Vec<String> {
    ["", ".cluster.local"].map(|end| format!("{MANAGER}.{namespace}.svc{end}")).to_vec()
}

/// Keeps the identity: makes it when `version`, the authority's, changes, and when it ages.
pub async fn keep(
    client: Client,
    namespace: &str,
    mut version: watch::Receiver<String>,
    identity: watch::Sender<Option<Identity>>,
) {
    loop {
        let seen = version.borrow_and_update().clone();
        let wait = if seen.is_empty() {
            LIFE
        } else {
            match make(&client, namespace).await {
                Ok(made) => {
                    identity.send_replace(Some(made));
                    LIFE / 2
                }
                Err(error) => {
                    tracing::warn!(%error, "no certificate for the controller's own servers");
                    RETRY
                }
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            changed = version.changed() => if changed.is_err() { return },
        }
    }
}

async fn make(client: &Client, namespace: &str) -> Result<Identity, TlsError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let secret = api.get_opt(AUTHORITY).await?.ok_or(TlsError::Absent)?;
    let pair = convert::pair(&secret, convert::CURRENT).ok_or(TlsError::Absent)?;
    let roots: Vec<Root> = convert::authority(&secret).roots().cloned().collect();
    let made = Identity::new(&pair, &roots, &names(namespace))?;
    Ok(Identity { token: convert::token(&secret).unwrap_or_default(), ..made })
}

/// Who is at the other end.
#[derive(Debug, Clone, Default)]
pub struct Caller {
    /// The node whose certificate was shown.
    pub node: Option<String>,
}

/// A connection that is through its handshake.
#[derive(Debug)]
pub struct Accepted {
    /// The connection.
    pub stream: TlsStream<TcpStream>,
    /// Who is there.
    pub caller: Caller,
    /// Its place among those that are connected, which others can take.
    pub place: Place<IpAddr>,
}

/// Which side of an identity a port shows.
pub type Choice = fn(&Identity) -> Arc<ServerConfig>;

/// Lets clients in, as the identity of the moment says. Any pod reaches the port: who opens many
/// connections, beyond its share or where there is no room, loses its own, and nobody else's waits
/// for it.
pub async fn accept(
    listener: TcpListener,
    identity: watch::Receiver<Option<Identity>>,
    (choose, share): (Choice, usize),
    accepted: mpsc::Sender<Accepted>,
) {
    let places = Places::new(CONNECTIONS, share);
    let hands = Places::new(HANDSHAKES, SHAKING);
    loop {
        let (stream, from) = match listener.accept().await {
            Ok((stream, from)) => (stream, origin(from)),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        // Before there is an authority nobody can be let in.
        let Some(config) = identity.borrow().as_ref().map(choose) else { continue };
        let accepted = accepted.clone();
        let (mut hand, places) = (hands.take(&from), places.clone());
        tokio::spawn(async move {
            let shaken = TlsAcceptor::from(config).accept(stream);
            let stream = tokio::select! {
                shaken = shaken => shaken,
                () = tokio::time::sleep(HANDSHAKE) => return,
                () = hand.lost() => return,
            };
            drop(hand);
            let Ok(stream) = stream else { return };
            // Who has shown nothing takes no place.
            let place = places.take(&from);
            let shown = stream.get_ref().1.peer_certificates().and_then(|all| all.first());
            let caller = Caller { node: shown.and_then(|der| pki::node_of(der)) };
            let _ = accepted.send(Accepted { stream, caller, place }).await;
        });
        // Those whose place was taken close before the next is accepted.
        tokio::task::yield_now().await;
    }
}
