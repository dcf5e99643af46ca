//! Certificates of the channel between nodes: what a request may say, and what is signed.
//!
//! Nothing of a request is copied into a certificate but its public key: the certificate is built
//! from what was asked for and found to be the node's ([`crate::core`] decides that). A request
//! that says anything else is refused, even what would be ignored, so that whoever reads it reads
//! what was signed.
//!
//! A root signs nodes and the controller's own servers. Nodes have addresses and no names, servers
//! have names and no addresses, so neither can pass for the other.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::IpAddr;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use time::OffsetDateTime;
use vhost_rdma_cluster_api::{NODE_PREFIX, NODES};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::{
    OID_PKCS9_EXTENSION_REQUEST, OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME,
};
use x509_parser::pem::parse_x509_pem;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The largest request that is looked at; one of the agent's has less than 1 KiB.
const REQUEST_MAX: usize = 8 << 10;
/// The most addresses in a request.
pub const ADDRESSES_MAX: usize = 16;
/// How far clocks of nodes may differ.
const SKEW: i64 = 300;

/// Why a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The library's reason.
    #[error("cannot {action}: {source}")]
    Rcgen {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: rcgen::Error,
    },
    /// A root is not one.
    #[error("not a certificate: {0}")]
    Certificate(String),
    /// No time of a certificate.
    #[error("the clock is beyond what a certificate can say")]
    Clock,
}

fn cannot(action: &'static str) -> impl Fn(rcgen::Error) -> PkiError {
    move |source| PkiError::Rcgen { action, source }
}

/// What a request asks for, once it is known to ask for nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The node, out of the common name.
    pub node: String,
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// The public key, as in the request.
    pub key: Vec<u8>,
}

/// Reads a request in PEM; what is wrong with it otherwise.
///
/// # Errors
/// A sentence for the person who looks at the request.
pub fn read_request(text: &[u8]) -> Result<Asked, String> {
    if text.len() > REQUEST_MAX {
        return Err(format!("the request has more than {REQUEST_MAX} bytes"));
    }
    let (rest, pem) = parse_x509_pem(text).map_err(|_| "the request is not PEM".to_owned())?;
    if !rest.trim_ascii().is_empty() || pem.label != "CERTIFICATE REQUEST" {
        return Err("the request is not one CERTIFICATE REQUEST".to_owned());
    }
    let (rest, request) = X509CertificationRequest::from_der(&pem.contents)
        .map_err(|error| format!("the request cannot be read: {error}"))?;
    if !rest.is_empty() {
        return Err("something follows the request".to_owned());
    }
    request.verify_signature().map_err(|_| {
        "the request is not signed by its own key, or not by ECDSA P-256".to_owned()
    })?;
    let key = request.certification_request_info.subject_pki.raw.to_vec();
    let known = SubjectPublicKeyInfo::from_der(&key);
    if !known
        .is_ok_and(|key| *rcgen::PublicKeyData::algorithm(&key) == rcgen::PKCS_ECDSA_P256_SHA256)
    {
        return Err("the key is not of ECDSA P-256".to_owned());
    }
    Ok(Asked { node: subject(&request)?, addresses: addresses(&request)?, key })
}

fn subject(request: &X509CertificationRequest<'_>) -> Result<String, String> {
    let (mut node, mut is_node) = (None, false);
    for attribute in request.certification_request_info.subject.iter_attributes() {
        let value = attribute.as_str().map_err(|_| "the subject is no text".to_owned())?;
        if *attribute.attr_type() == OID_X509_COMMON_NAME && node.is_none() {
            node = value.strip_prefix(NODE_PREFIX).filter(|name| !name.is_empty());
            node.ok_or_else(|| format!("the common name is not {NODE_PREFIX}NODE"))?;
        } else if *attribute.attr_type() == OID_X509_ORGANIZATION_NAME && !is_node {
            is_node = value == NODES;
            if !is_node {
                return Err(format!("the organization is not {NODES}"));
            }
        } else {
            return Err("the subject has more than a common name and an organization".to_owned());
        }
    }
    match node {
        Some(node) if is_node => Ok(node.to_owned()),
        _ => Err("the subject lacks its common name or its organization".to_owned()),
    }
}

fn addresses(request: &X509CertificationRequest<'_>) -> Result<BTreeSet<IpAddr>, String> {
    let attributes = request.certification_request_info.attributes();
    if attributes.len() > 1 || attributes.iter().any(|a| a.oid != OID_PKCS9_EXTENSION_REQUEST) {
        return Err("the request has attributes that are no extensions".to_owned());
    }
    let mut addresses = BTreeSet::new();
    for extension in request.requested_extensions().into_iter().flatten() {
        match extension {
            ParsedExtension::SubjectAlternativeName(names) => {
                for name in &names.general_names {
                    let GeneralName::IPAddress(bytes) = name else {
                        return Err("only IP addresses may be alternative names".to_owned());
                    };
                    addresses.insert(address(bytes).ok_or("an address has a wrong length")?);
                }
            }
            // What a node may use its key for, which is what it gets in any case.
            ParsedExtension::KeyUsage(usage) if usage.flags == 1 => {}
            ParsedExtension::ExtendedKeyUsage(usage)
                if !usage.any
                    && !usage.code_signing
                    && !usage.email_protection
                    && !usage.time_stamping
                    && !usage.ocsp_signing
                    && usage.other.is_empty() => {}
            ParsedExtension::BasicConstraints(constraints) if !constraints.ca => {}
            _ => return Err("the request has an extension that no node gets".to_owned()),
        }
    }
    match addresses.len() {
        0 => Err("the request names no address".to_owned()),
        n if n > ADDRESSES_MAX => Err(format!("more than {ADDRESSES_MAX} addresses")),
        _ => Ok(addresses),
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(four) = <[u8; 4]>::try_from(bytes) {
        return Some(four.into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(Into::into)
}

/// A root as everybody may know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// SHA-256 of its DER, in hexadecimal digits.
    pub id: String,
    /// When it begins to hold, seconds since 1970.
    pub from: u64,
    /// When it ends.
    pub until: u64,
    /// The certificate in PEM.
    pub pem: String,
}

impl Root {
    /// Reads a certificate in PEM.
    ///
    /// # Errors
    /// It is none.
    pub fn read(pem: &str) -> Result<Self, PkiError> {
        let wrong = |what: String| PkiError::Certificate(what);
        let (_, block) = parse_x509_pem(pem.as_bytes()).map_err(|e| wrong(e.to_string()))?;
        let (_, found) =
            X509Certificate::from_der(&block.contents).map_err(|e| wrong(e.to_string()))?;
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        Ok(Self {
            id: digest(&block.contents),
            from: seconds(found.validity().not_before.timestamp()),
            until: seconds(found.validity().not_after.timestamp()),
            pem: pem.to_owned(),
        })
    }
}

/// SHA-256 in hexadecimal digits.
#[must_use]
pub fn digest(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A root and its key, in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    /// The certificate.
    pub cert: String,
    /// The key. It is in no log.
    pub key: String,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").field("cert", &self.cert).finish_non_exhaustive()
    }
}

fn at(seconds: i64) -> Result<OffsetDateTime, PkiError> {
    OffsetDateTime::from_unix_timestamp(seconds).map_err(|_| PkiError::Clock)
}

fn signed(seconds: u64) -> Result<i64, PkiError> {
    i64::try_from(seconds).map_err(|_| PkiError::Clock)
}

/// Makes a root that holds from `now` for so many seconds.
///
/// # Errors
/// The library's.
pub fn new_root(now: u64, life: u64) -> Result<Pair, PkiError> {
    let key = KeyPair::generate().map_err(cannot("make a key"))?;
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    let id = digest(key.public_key_raw());
    name.push(DnType::CommonName, format!("vhost-rdma-channel {}", &id[..16]));
    params.distinguished_name = name;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = at(signed(now)?.saturating_sub(SKEW))?;
    params.not_after = at(signed(now.saturating_add(life))?)?;
    let cert = params.self_signed(&key).map_err(cannot("sign a root"))?;
    Ok(Pair { cert: cert.pem(), key: key.serialize_pem() })
}

fn drawn() -> Result<[u8; 16], PkiError> {
    let mut bytes = [0_u8; 16];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .map_err(|_| cannot("draw a number")(rcgen::Error::RingUnspecified))?;
    Ok(bytes)
}

/// A word that nobody guesses.
///
/// # Errors
/// The system has no randomness.
pub fn token() -> Result<String, PkiError> {
    Ok(digest(&drawn()?))
}

fn leaf(until: u64, now: u64, root: &Root) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    params.not_before = at(signed(now)?.saturating_sub(SKEW))?;
    params.not_after = at(signed(until.min(root.until))?)?;
    let mut serial = drawn()?;
    // A positive number of full length.
    serial[0] = serial[0] & 0x3f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    Ok(params)
}

fn issuer(pair: &Pair) -> Result<Issuer<'static, KeyPair>, PkiError> {
    let key = KeyPair::from_pem(&pair.key).map_err(cannot("read the authority's key"))?;
    Issuer::from_ca_cert_pem(&pair.cert, key).map_err(cannot("read the authority's certificate"))
}

/// Signs a node's certificate: PEM.
///
/// # Errors
/// The pair is none, or the library's.
pub fn sign_node(pair: &Pair, asked: &Asked, now: u64, life: u64) -> Result<String, PkiError> {
    let mut params = leaf(now.saturating_add(life), now, &Root::read(&pair.cert)?)?;
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, NODES);
    name.push(DnType::CommonName, format!("{NODE_PREFIX}{}", asked.node));
    params.distinguished_name = name;
    params.subject_alt_names = asked.addresses.iter().copied().map(SanType::IpAddress).collect();
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    let key = SubjectPublicKeyInfo::from_der(&asked.key).map_err(cannot("read the key"))?;
    let cert = params.signed_by(&key, &issuer(pair)?).map_err(cannot("sign a certificate"))?;
    Ok(cert.pem())
}

/// Makes a certificate for the controller's own servers, for these names.
///
/// # Errors
/// The pair is none, or the library's.
pub fn sign_server(pair: &Pair, names: &[String], now: u64, life: u64) -> Result<Pair, PkiError> {
    let mut params = leaf(now.saturating_add(life), now, &Root::read(&pair.cert)?)?;
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "vhost-rdma-controller");
    params.distinguished_name = name;
    params.subject_alt_names = names
        .iter()
        .map(|name| Ok(SanType::DnsName(name.as_str().try_into()?)))
        .collect::<Result<_, rcgen::Error>>()
        .map_err(cannot("use a server's name"))?;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate().map_err(cannot("make a key"))?;
    let cert = params.signed_by(&key, &issuer(pair)?).map_err(cannot("sign a certificate"))?;
    Ok(Pair { cert: cert.pem(), key: key.serialize_pem() })
}

/// The node that a verified certificate is of.
#[must_use]
pub fn node_of(der: &[u8]) -> Option<String> {
    let (_, found) = X509Certificate::from_der(der).ok()?;
    let subject = found.subject();
    let one = |mut all: Box<dyn Iterator<Item = String>>| {
        let first = all.next()?;
        all.next().is_none().then_some(first)
    };
    let texts = |attributes: Vec<String>| Box::new(attributes.into_iter());
    let of = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
        attribute.as_str().unwrap_or_default().to_owned()
    };
    let organization = one(texts(subject.iter_organization().map(of).collect()))?;
    let name = one(texts(subject.iter_common_name().map(of).collect()))?;
    if organization != NODES {
        return None;
    }
    name.strip_prefix(NODE_PREFIX).filter(|name| !name.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn params(common: &str, organization: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, organization);
        params.distinguished_name.push(DnType::CommonName, common);
        params.subject_alt_names = vec![SanType::IpAddress([192, 0, 2, 7].into())];
        params
    }

    fn ask(params: &CertificateParams) -> Result<Asked, String> {
        let key = KeyPair::generate().expect("a key");
        let request = params.serialize_request(&key).expect("a request");
        read_request(request.pem().expect("PEM").as_bytes())
    }

    #[test]
    fn a_node_gets_what_it_asked_for_and_nothing_else() {
        let asked = ask(&params("vhost-rdma:node:n1", NODES)).expect("a good request");
        assert_eq!(asked.node, "n1");
        let pair = new_root(NOW, 1000).expect("a root");
        let root = Root::read(&pair.cert).expect("a certificate");
        let pem = sign_node(&pair, &asked, NOW, 600).expect("a certificate");
        let (_, block) = parse_x509_pem(pem.as_bytes()).expect("PEM");
        let (_, cert) = X509Certificate::from_der(&block.contents).expect("a certificate");
        assert_eq!(node_of(&block.contents).as_deref(), Some("n1"));
        assert_eq!(cert.validity().not_after.timestamp(), 1_800_000_600);
        assert!(!cert.is_ca());
        let names = cert.subject_alternative_name().expect("names").expect("names");
        assert_eq!(names.value.general_names, [GeneralName::IPAddress(&[192, 0, 2, 7])]);
        let (_, block) = parse_x509_pem(root.pem.as_bytes()).expect("PEM");
        let (_, ca) = X509Certificate::from_der(&block.contents).expect("a certificate");
        assert!(ca.is_ca());
        cert.verify_signature(Some(ca.public_key())).expect("signed by the root");
        // A certificate does not outlive its root.
        let long = sign_node(&pair, &asked, NOW, 90_000).expect("a certificate");
        assert_eq!(Root::read(&long).expect("a certificate").until, root.until);
    }

    #[test]
    fn a_request_that_says_more_is_refused() {
        let good = params("vhost-rdma:node:n1", NODES);
        assert!(ask(&good).is_ok());
        let refused = |params: CertificateParams| ask(&params).expect_err("a bad request");
        assert!(refused(params("n1", NODES)).contains("common name"));
        assert!(refused(params("vhost-rdma:node:", NODES)).contains("common name"));
        assert!(refused(params("vhost-rdma:node:n1", "system:masters")).contains("organization"));
        let mut more = good.clone();
        more.distinguished_name.push(DnType::OrganizationalUnitName, "x");
        assert!(refused(more).contains("subject"));
        let mut none = good.clone();
        none.subject_alt_names.clear();
        assert!(refused(none).contains("no address"));
        for name in [
            SanType::DnsName("n1".try_into().expect("a name")),
            SanType::URI("spiffe://x".try_into().expect("a name")),
            SanType::Rfc822Name("a@b".try_into().expect("a name")),
        ] {
            let mut other = good.clone();
            other.subject_alt_names.push(name);
            assert!(refused(other).contains("only IP addresses"));
        }
        let mut ca = good.clone();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        assert!(refused(ca).contains("extension"));
        let mut usage = good.clone();
        usage.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        assert!(refused(usage).contains("extension"));
        let mut code = good.clone();
        code.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning];
        assert!(refused(code).contains("extension"));
        let mut many = good;
        many.subject_alt_names =
            (0..17).map(|n| SanType::IpAddress([10, 0, 0, n].into())).collect();
        assert!(refused(many).contains("more than"));
    }

    #[test]
    fn rubbish_and_foreign_keys_are_refused() {
        assert!(read_request(b"").is_err());
        assert!(read_request(&[b'a'; REQUEST_MAX + 1]).is_err());
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).expect("a key");
        let request = params("vhost-rdma:node:n1", NODES).serialize_request(&key).expect("one");
        let said = read_request(request.pem().expect("PEM").as_bytes()).expect_err("another key");
        assert!(said.contains("P-256"), "{said}");
        // One bit of the signature.
        let key = KeyPair::generate().expect("a key");
        let request = params("vhost-rdma:node:n1", NODES).serialize_request(&key).expect("one");
        let mut der = request.der().to_vec();
        *der.last_mut().expect("bytes") ^= 1;
        let text = pem_of(&der);
        assert!(read_request(text.as_bytes()).expect_err("a bad signature").contains("signed"));
        let good = request.pem().expect("PEM");
        let twice = format!("{good}{good}");
        assert!(read_request(twice.as_bytes()).is_err());
    }

    fn pem_of(der: &[u8]) -> String {
        use k8s_openapi::ByteString;
        let base = serde_json::to_value(ByteString(der.to_vec())).expect("base64");
        let base = base.as_str().expect("text");
        let lines: Vec<String> = base
            .as_bytes()
            .chunks(64)
            .map(|line| String::from_utf8_lossy(line).into_owned())
            .collect();
        format!(
            "-----BEGIN CERTIFICATE REQUEST-----\n{}\n-----END CERTIFICATE REQUEST-----\n",
            lines.join("\n")
        )
    }

    #[test]
    fn a_server_has_names_and_is_no_node() {
        let pair = new_root(NOW, 1000).expect("a root");
        let names = ["vhost-rdma-controller.vhost-rdma.svc".to_owned()];
        let server = sign_server(&pair, &names, NOW, 600).expect("a certificate");
        let (_, block) = parse_x509_pem(server.cert.as_bytes()).expect("PEM");
        assert_eq!(node_of(&block.contents), None);
        assert!(!format!("{server:?}").contains("PRIVATE"));
    }
}
