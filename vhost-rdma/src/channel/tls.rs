//! Who a daemon is: TLS 1.3 in both directions, with certificates of one authority that the
//! operator has for this alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The protocol and its version.
const PROTOCOL: &[u8] = b"vhost-rdma-cm/1";

/// Files of the channel.
#[derive(Debug, Clone)]
pub struct Files {
    /// This daemon's certificate, and those between it and the authority.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority that all daemons have theirs of.
    pub ca: PathBuf,
}

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read or holds something else.
    #[error("{path} is no {what} in PEM: {why}")]
    File {
        /// The file.
        path: String,
        /// What it should hold.
        what: &'static str,
        /// Why not.
        why: String,
    },
    /// They do not fit each other.
    #[error("certificate, key and authority do not fit: {0}")]
    Unfit(String),
}

/// Both sides' settings.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
    /// All certificates of the files, to tell whether others have come.
    pub(super) held: Arc<[CertificateDer<'static>]>,
}

fn certificates(path: &Path, what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |why: String| TlsError::File { path: path.display().to_string(), what, why };
    let all = CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))?;
    let all: Result<Vec<_>, _> = all.collect();
    let all = all.map_err(|error| bad(error.to_string()))?;
    if all.is_empty() { Err(bad("it holds none".to_owned())) } else { Ok(all) }
}

impl Identity {
    pub(super) fn load(files: &Files) -> Result<Self, TlsError> {
        let unfit = |error: &dyn std::fmt::Display| TlsError::Unfit(error.to_string());
        let chain = certificates(&files.cert, "certificate")?;
        let key = || {
            PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::File {
                path: files.key.display().to_string(),
                what: "private key",
                why: error.to_string(),
            })
        };
        let mut roots = RootCertStore::empty();
        let mut held = chain.clone();
        for root in certificates(&files.ca, "certificate")? {
            held.push(root.clone());
            roots.add(root).map_err(|error| unfit(&error))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| unfit(&error))?;
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| unfit(&error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain.clone(), key()?)
            .map_err(|error| unfit(&error))?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| unfit(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key()?)
            .map_err(|error| unfit(&error))?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        // Nothing is kept of a connection once it is over: who is let in is decided anew each time.
        client.resumption = rustls::client::Resumption::disabled();
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), held: held.into() })
    }
}

/// Whether a certificate, whose chain has been verified, was made for a host.
pub(super) fn is_for(certificate: &CertificateDer<'_>, host: &str) -> bool {
    let Ok(name) = ServerName::try_from(host) else { return false };
    let parsed = ParsedCertificate::try_from(certificate);
    parsed.is_ok_and(|parsed| verify_server_name(&parsed, &name).is_ok())
}
