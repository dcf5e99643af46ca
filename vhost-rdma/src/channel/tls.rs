//! Who a daemon is: TLS 1.3 in both directions, with certificates of one authority that the
//! operator has for this alone.
//!
//! Files are read by whoever may ([`Pems`]), and understood where the channel is ([`Identity`]):
//! that is another process, which can open none.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde::{Deserialize, Serialize};

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

/// A file and its name, for who reads messages.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Pem {
    path: String,
    text: Vec<u8>,
}

impl Pem {
    fn read(path: &Path, what: &'static str) -> Result<Self, TlsError> {
        let name = path.display().to_string();
        match std::fs::read(path) {
            Ok(text) => Ok(Self { path: name, text }),
            Err(error) => Err(TlsError::File { path: name, what, why: error.to_string() }),
        }
    }

    fn is_no(&self, what: &'static str, why: String) -> TlsError {
        TlsError::File { path: self.path.clone(), what, why }
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        const WHAT: &str = "certificate";
        let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.text).collect();
        let all = all.map_err(|error| self.is_no(WHAT, error.to_string()))?;
        if all.is_empty() { Err(self.is_no(WHAT, "it holds none".to_owned())) } else { Ok(all) }
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        let key = PrivateKeyDer::from_pem_slice(&self.text);
        key.map_err(|error| self.is_no("private key", error.to_string()))
    }
}

/// What is in the files of the channel.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pems {
    cert: Pem,
    key: Pem,
    ca: Pem,
}

impl std::fmt::Debug for Pems {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is nobody's to see.
        f.debug_struct("Pems").field("cert", &self.cert.path).finish_non_exhaustive()
    }
}

impl Pems {
    pub(super) fn read(files: &Files) -> Result<Self, TlsError> {
        Ok(Self {
            cert: Pem::read(&files.cert, "certificate")?,
            key: Pem::read(&files.key, "private key")?,
            ca: Pem::read(&files.ca, "certificate")?,
        })
    }
}

/// Both sides' settings.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

impl Identity {
    /// # Errors
    /// They cannot be used.
    pub(super) fn of(pems: &Pems) -> Result<Self, TlsError> {
        let unfit = |error: &dyn std::fmt::Display| TlsError::Unfit(error.to_string());
        let chain = pems.cert.certificates()?;
        let key = || pems.key.key();
        let mut roots = RootCertStore::empty();
        for root in pems.ca.certificates()? {
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
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

/// Whether a certificate, whose chain has been verified, was made for a host.
pub(super) fn is_for(certificate: &CertificateDer<'_>, host: &str) -> bool {
    let Ok(name) = ServerName::try_from(host) else { return false };
    let parsed = ParsedCertificate::try_from(certificate);
    parsed.is_ok_and(|parsed| verify_server_name(&parsed, &name).is_ok())
}
