//! Who this node's daemon is towards others: a key that is made here and never leaves the node, a
//! certificate that the controller signs for the node's address, and the roots that are believed.
//!
//! Here are bytes and rules; who asks for a certificate is `channel::certify`, who stores one is
//! [`super::store`]. What comes from the API server is looked at before it takes the place of what
//! works: a certificate that is not for this key, this node and this address, or not by a root that
//! is believed, is refused, and so are roots that are none.

use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair,
    KeyUsagePurpose, PublicKeyData as _, SanType,
};
use serde::{Deserialize, Serialize};
use vhost_rdma_cluster_api::{NODE_PREFIX, NODES};
use x509_parser::extensions::GeneralName;
use x509_parser::pem::Pem;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Roots at one time: the old one, the new one, and some slack.
const ROOTS_MAX: usize = 8;
/// Bytes of roots or of a certificate.
const PEM_MAX: usize = 64 << 10;
/// A node's name in the name of a request: what is left of the API server's 253 characters.
const NAME_MAX: usize = 200;

/// The roots that are believed, and which of them signs now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roots {
    /// Certificates in PEM.
    pub pem: String,
    /// SHA-256 of the DER of the one that signs.
    pub current: String,
}

/// SHA-256 in hexadecimal digits.
fn digest(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The certificates in a text, in DER.
fn certificates(pem: &str) -> Result<Vec<Vec<u8>>, String> {
    if pem.len() > PEM_MAX {
        return Err(format!("more than {PEM_MAX} bytes"));
    }
    let mut found = Vec::new();
    for block in Pem::iter_from_buffer(pem.as_bytes()) {
        let block = block.map_err(|error| error.to_string())?;
        if block.label != "CERTIFICATE" {
            return Err(format!("a {} among certificates", block.label));
        }
        X509Certificate::from_der(&block.contents).map_err(|error| error.to_string())?;
        found.push(block.contents);
    }
    if found.is_empty() { Err("no certificate".to_owned()) } else { Ok(found) }
}

impl Roots {
    /// Roots as the controller publishes them.
    ///
    /// # Errors
    /// They are none, or too many, or the one that signs is not among them.
    pub fn read(pem: &str, current: &str) -> Result<Self, String> {
        let all = certificates(pem)?;
        if all.len() > ROOTS_MAX {
            return Err(format!("more than {ROOTS_MAX} roots"));
        }
        if !all.iter().any(|root| digest(root) == current) {
            return Err("the root that signs is not among them".to_owned());
        }
        Ok(Self { pem: pem.to_owned(), current: current.to_owned() })
    }
}

/// A key, and the request for its certificate.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The object's name in the cluster.
    pub name: String,
    /// The key in PEM. It is in no log.
    pub key: String,
    /// The request in PEM.
    pub request: String,
    /// The address that it asks for.
    pub address: IpAddr,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Request {
    /// A new key's.
    ///
    /// # Errors
    /// There is no random source.
    pub fn new(node: &str, address: IpAddr) -> Result<Self, String> {
        let text = |error: rcgen::Error| error.to_string();
        let key = KeyPair::generate().map_err(text)?;
        let mut params = CertificateParams::default();
        let mut name = DistinguishedName::new();
        name.push(DnType::OrganizationName, NODES);
        name.push(DnType::CommonName, format!("{NODE_PREFIX}{node}"));
        params.distinguished_name = name;
        params.subject_alt_names = vec![SanType::IpAddress(address)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let request = params.serialize_request(&key).and_then(|made| made.pem()).map_err(text)?;
        let id: String = digest(&key.subject_public_key_info()).chars().take(16).collect();
        let short: String = node.chars().take(NAME_MAX).collect();
        let name = format!("vhost-rdma-{}-{id}", short.trim_end_matches(['.', '-']));
        Ok(Self { name, key: key.serialize_pem(), request, address })
    }
}

/// A key and its certificate, in PEM.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// The certificate.
    pub cert: String,
    /// The key. It is in no log.
    pub key: String,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").finish_non_exhaustive()
    }
}

/// What a certificate says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Seconds since 1970 from which it holds.
    pub from: u64,
    /// Seconds since 1970 until which it holds.
    pub until: u64,
    /// SHA-256 of the DER of the root that signed it.
    pub issuer: String,
}

impl Certificate {
    /// Looks at a certificate that is to be `node`'s at `address`.
    ///
    /// # Errors
    /// It is for something else, or nobody who is believed signed it.
    pub fn read(pair: &Pair, roots: &Roots, node: &str, address: IpAddr) -> Result<Self, String> {
        let own = certificates(&pair.cert)?;
        let [der] = own.as_slice() else {
            return Err("there is more than one certificate".to_owned());
        };
        let (_, found) = X509Certificate::from_der(der).map_err(|error| error.to_string())?;
        let key = KeyPair::from_pem(&pair.key).map_err(|error| error.to_string())?;
        if found.public_key().raw != key.subject_public_key_info().as_slice() {
            return Err("the certificate is not for this node's key".to_owned());
        }
        let wanted = format!("{NODE_PREFIX}{node}");
        let names: Vec<_> = found.subject().iter_common_name().map(|name| name.as_str()).collect();
        if names.len() != 1 || names.first().and_then(|name| name.as_ref().ok()) != Some(&&*wanted)
        {
            return Err("the certificate is another node's".to_owned());
        }
        let bytes = match address {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let names = found.subject_alternative_name().ok().flatten();
        let is_ours =
            |name: &GeneralName<'_>| matches!(name, GeneralName::IPAddress(of) if **of == *bytes);
        if !names.is_some_and(|names| names.value.general_names.iter().any(is_ours)) {
            return Err(format!("the certificate is not for {address}"));
        }
        let issuer = certificates(&roots.pem)?.into_iter().find(|root| {
            let parsed = X509Certificate::from_der(root);
            parsed.is_ok_and(|(_, root)| found.verify_signature(Some(root.public_key())).is_ok())
        });
        let issuer = issuer.ok_or("no root that is believed signed the certificate")?;
        let seconds = |time: i64| u64::try_from(time).unwrap_or(0);
        Ok(Self {
            from: seconds(found.validity().not_before.timestamp()),
            until: seconds(found.validity().not_after.timestamp()),
            issuer: digest(&issuer),
        })
    }

    /// Whether it holds now.
    #[must_use]
    pub fn holds(&self, now: SystemTime) -> bool {
        let now = since(now);
        self.from <= now && now < self.until
    }

    /// When another one should be asked for: after two thirds of its life, nodes that were
    /// certified together at different times (`part`, 0 to 1, of a tenth of it).
    #[must_use]
    pub fn renew_at(&self, part: f64) -> SystemTime {
        let life = Duration::from_secs(self.until.saturating_sub(self.from));
        let later = life.mul_f64(part.clamp(0.0, 1.0) / 10.0);
        UNIX_EPOCH + Duration::from_secs(self.from) + life * 2 / 3 + later
    }
}

/// Seconds since 1970.
#[must_use]
pub fn since(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
pub(crate) mod tests {
    use rcgen::{BasicConstraints, IsCa, Issuer};

    use super::*;

    pub(crate) const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// An authority as the controller is one.
    pub(crate) struct Authority {
        pub(crate) pem: String,
        pub(crate) issuer: Issuer<'static, KeyPair>,
    }

    impl Authority {
        pub(crate) fn new() -> Self {
            let key = KeyPair::generate().unwrap();
            let mut own = CertificateParams::default();
            own.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            let pem = own.self_signed(&key).unwrap().pem();
            Self { pem, issuer: Issuer::new(own, key) }
        }

        pub(crate) fn id(&self) -> String {
            digest(&certificates(&self.pem).unwrap()[0])
        }

        pub(crate) fn roots(&self) -> Roots {
            Roots::read(&self.pem, &self.id()).unwrap()
        }

        /// Signs what a node asks for; that the controller reads the request itself is shown with
        /// the controller's own code (`tests/node/channel.rs`).
        pub(crate) fn sign(&self, asked: &Request, node: &str) -> String {
            let key = KeyPair::from_pem(&asked.key).unwrap();
            let mut params = CertificateParams::default();
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, format!("{NODE_PREFIX}{node}"));
            params.subject_alt_names = vec![SanType::IpAddress(asked.address)];
            params.signed_by(&key, &self.issuer).unwrap().pem()
        }
    }

    #[test]
    fn a_certificate_is_for_this_key_node_and_address_and_by_a_root_that_is_believed() {
        let (authority, other) = (Authority::new(), Authority::new());
        let asked = Request::new("node-1", HERE).unwrap();
        assert!(asked.name.starts_with("vhost-rdma-node-1-") && asked.name.len() == 34);
        let pair = Pair { cert: authority.sign(&asked, "node-1"), key: asked.key.clone() };
        let roots = authority.roots();
        let good = Certificate::read(&pair, &roots, "node-1", HERE).unwrap();
        assert_eq!(good.issuer, authority.id());
        let elsewhere = "192.0.2.1".parse().unwrap();
        let stranger = Request::new("node-1", HERE).unwrap();
        let wrong_key = Pair { key: stranger.key, ..pair.clone() };
        let twice = Pair { cert: pair.cert.repeat(2), ..pair.clone() };
        let a_key = Pair { cert: asked.key, ..pair.clone() };
        for (what, read) in [
            ("node", Certificate::read(&pair, &roots, "node-2", HERE)),
            ("address", Certificate::read(&pair, &roots, "node-1", elsewhere)),
            ("root", Certificate::read(&pair, &other.roots(), "node-1", HERE)),
            ("key", Certificate::read(&wrong_key, &roots, "node-1", HERE)),
            ("two", Certificate::read(&twice, &roots, "node-1", HERE)),
            ("no certificate", Certificate::read(&a_key, &roots, "node-1", HERE)),
        ] {
            assert!(read.is_err(), "{what}");
        }
        let both = format!("{}{}", other.pem, authority.pem);
        let both = Roots::read(&both, &other.id()).unwrap();
        let still = Certificate::read(&pair, &both, "node-1", HERE).unwrap();
        assert_eq!(still.issuer, authority.id(), "not of the root that signs now");
    }

    #[test]
    fn roots_that_are_none_are_refused() {
        let authority = Authority::new();
        let key = KeyPair::generate().unwrap().serialize_pem();
        for (pem, current) in [
            (String::new(), authority.id()),
            ("nonsense".to_owned(), authority.id()),
            (format!("{}{key}", authority.pem), authority.id()),
            (authority.pem.repeat(ROOTS_MAX + 1), authority.id()),
            (authority.pem.clone(), Authority::new().id()),
            (authority.pem.clone(), String::new()),
            (format!("{}{}", authority.pem, " ".repeat(PEM_MAX)), authority.id()),
        ] {
            assert!(Roots::read(&pem, &current).is_err(), "{pem} {current}");
        }
    }

    #[test]
    fn names_of_nodes_are_cut_to_what_a_name_may_have() {
        let long = Request::new(&"n".repeat(253), HERE).unwrap();
        assert!(long.name.len() <= 253, "{}", long.name);
        let dotted = Request::new("a.b.", HERE).unwrap();
        assert!(dotted.name.starts_with("vhost-rdma-a.b-"), "{}", dotted.name);
    }

    #[test]
    fn it_is_renewed_after_two_thirds_and_not_by_all_at_once() {
        let certificate = Certificate { from: 1000, until: 1300, issuer: String::new() };
        let at = |part| since(certificate.renew_at(part));
        assert_eq!((at(0.0), at(1.0), at(9.0)), (1200, 1230, 1230));
        let time = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let holds = [999, 1000, 1299, 1300].map(|seconds| certificate.holds(time(seconds)));
        assert_eq!(holds, [false, true, true, false]);
    }
}
