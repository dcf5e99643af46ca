//! Objects of the API as the planners know them, and back.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Secret};
use kube::api::{ApiResource, DynamicObject, ObjectMeta};
use kube::core::GroupVersionKind;
use vhost_rdma_cluster_api::{MANAGER, RdmaNic};

use crate::core::{Attachment, Authority, Claim, NamespaceInfo, NodeInfo, Request, Roots};
use crate::pki::{self, Pair, Root};

/// The label of leases that are claims.
pub const CLAIM_LABEL: &str = "vhost-rdma.io/claim";
/// Its value for claims of VNIs.
pub const CLAIM_VNI: &str = "vni";
/// The label by which an object says who made it.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// What an administrator puts on the authority's Secret to have another root.
pub const ROTATE: &str = "vhost-rdma.io/rotate";
/// What the API server says of whoever made a request.
const ON_NODE: &str = "authentication.kubernetes.io/node-name";
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
/// The annotation that leads Multus to a resource.
const RESOURCE: &str = "k8s.v1.cni.cncf.io/resourceName";

/// The kind NetworkAttachmentDefinition, which is somebody else's.
#[must_use]
pub fn attachment_kind() -> ApiResource {
    ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition"),
        "network-attachment-definitions",
    )
}

/// A node.
#[must_use]
pub fn node(node: &Node) -> NodeInfo {
    let conditions = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    NodeInfo {
        name: node.metadata.name.clone().unwrap_or_default(),
        labels: node.metadata.labels.clone().unwrap_or_default(),
        ready: conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True"),
        addresses: addresses(node),
    }
}

/// The longest name of a class, which the schema of an older definition did not say.
const CLASS_MAX: usize = 253;

/// A NIC. Users write it, so of what they may write without end nothing is kept: not what has no
/// meaning here, nor a class that can not be one. Only its status is ever written back.
#[must_use]
pub fn nic(nic: RdmaNic) -> RdmaNic {
    let RdmaNic { metadata, mut spec, status } = nic;
    if let Some(class) = &mut spec.class
        && let Some((end, _)) = class.char_indices().nth(CLASS_MAX + 1)
    {
        class.truncate(end);
        class.shrink_to_fit();
    }
    let metadata = ObjectMeta {
        name: metadata.name,
        namespace: metadata.namespace,
        uid: metadata.uid,
        resource_version: metadata.resource_version,
        generation: metadata.generation,
        creation_timestamp: metadata.creation_timestamp,
        deletion_timestamp: metadata.deletion_timestamp,
        ..ObjectMeta::default()
    };
    RdmaNic { metadata, spec, status }
}

/// Addresses that a kubelet says its node has. Names are none.
fn addresses(node: &Node) -> BTreeSet<std::net::IpAddr> {
    let all = node.status.iter().flat_map(|s| s.addresses.iter().flatten());
    all.filter_map(|address| address.address.parse().ok()).collect()
}

/// The three places of a root in the authority's Secret; keys are under the same names.
pub const CURRENT: &str = "current";
/// The root that will sign.
pub const NEXT: &str = "next";
/// The root that did: its certificate only.
pub const OLD: &str = "old";

fn text(secret: &Secret, key: &str) -> Option<String> {
    let bytes = secret.data.as_ref()?.get(key)?;
    String::from_utf8(bytes.0.clone()).ok()
}

/// A certificate and its key, out of the authority's Secret.
#[must_use]
pub fn pair(secret: &Secret, place: &str) -> Option<Pair> {
    let cert = text(secret, &format!("{place}.crt"))?;
    Some(Pair { cert, key: text(secret, &format!("{place}.key"))? })
}

/// The secret part of the path at which the API server asks whether pods may be made.
pub const TOKEN: &str = "admission.token";

/// That part, out of the authority's Secret.
#[must_use]
pub fn token(secret: &Secret) -> Option<String> {
    text(secret, TOKEN)
}

/// The authority, without its keys.
#[must_use]
pub fn authority(secret: &Secret) -> Authority {
    let root = |place: &str| {
        let pem = text(secret, &format!("{place}.crt"))?;
        Root::read(&pem)
            .inspect_err(|error| tracing::error!(place, %error, "the authority is damaged"))
            .ok()
    };
    let annotations = secret.metadata.annotations.as_ref();
    Authority {
        version: secret.metadata.resource_version.clone().unwrap_or_default(),
        current: root(CURRENT),
        next: root(NEXT),
        old: root(OLD),
        rotate: annotations.is_some_and(|all| all.contains_key(ROTATE)),
    }
}

/// The roots that are published.
#[must_use]
pub fn roots(map: &ConfigMap) -> Roots {
    let of = |key: &str| map.data.as_ref().and_then(|data| data.get(key)).cloned();
    Roots {
        version: map.metadata.resource_version.clone().unwrap_or_default(),
        certificates: of("ca.crt").unwrap_or_default(),
        current: of("current").unwrap_or_default(),
    }
}

/// A request for a certificate.
#[must_use]
pub fn request(request: &CertificateSigningRequest) -> Request {
    let spec = &request.spec;
    let extra = |key: &str| {
        let values = spec.extra.as_ref()?.get(key)?;
        if let [one] = &values[..] { Some(one.clone()) } else { None }
    };
    let conditions = || request.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let has = |what: &str| conditions().any(|c| c.type_ == what);
    let signed = request.status.as_ref().is_some_and(|status| status.certificate.is_some());
    let mut usages: Vec<&str> = spec.usages.iter().flatten().map(String::as_str).collect();
    usages.sort_unstable();
    let asked = if usages == ["client auth", "digital signature", "server auth"] {
        pki::read_request(&spec.request.0)
    } else {
        Err("the usages are not digital signature, client auth and server auth".to_owned())
    };
    Request {
        name: request.metadata.name.clone().unwrap_or_default(),
        uid: request.metadata.uid.clone().unwrap_or_default(),
        user: spec.username.clone().unwrap_or_default(),
        on_node: extra(ON_NODE),
        pod: extra(POD_NAME).zip(extra(POD_UID)),
        asked,
        life: spec.expiration_seconds.and_then(|life| u64::try_from(life).ok()),
        approved: has("Approved"),
        done: signed || has("Denied") || has("Failed"),
    }
}

/// A namespace.
#[must_use]
pub fn namespace(namespace: &Namespace) -> NamespaceInfo {
    NamespaceInfo {
        name: namespace.metadata.name.clone().unwrap_or_default(),
        labels: namespace.metadata.labels.clone().unwrap_or_default(),
    }
}

/// A claim; nothing if the lease is none, whatever its labels say.
#[must_use]
pub fn claim(lease: &Lease) -> Option<Claim> {
    let vni = lease.metadata.name.as_ref()?.strip_prefix("vni-")?.parse().ok()?;
    let holder = lease.spec.as_ref()?.holder_identity.as_ref()?;
    let (network, uid) = holder.split_once('/')?;
    Some(Claim {
        vni,
        network: network.to_owned(),
        network_uid: uid.to_owned(),
        uid: lease.metadata.uid.clone().unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
    })
}

/// The lease of a claim that is to be made.
#[must_use]
pub fn lease(claim: &Claim) -> Lease {
    Lease {
        metadata: ObjectMeta {
            name: Some(claim.lease()),
            labels: Some(BTreeMap::from([
                (CLAIM_LABEL.to_owned(), CLAIM_VNI.to_owned()),
                (MANAGED_BY.to_owned(), MANAGER.to_owned()),
            ])),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(format!("{}/{}", claim.network, claim.network_uid)),
            ..LeaseSpec::default()
        }),
    }
}

/// A network attachment definition.
#[must_use]
pub fn attachment(object: &DynamicObject) -> Attachment {
    let meta = &object.metadata;
    let label = |all: &Option<BTreeMap<String, String>>, key| {
        all.as_ref().and_then(|all| all.get(key)).cloned()
    };
    let config = object.data["spec"]["config"].as_str().unwrap_or_default();
    Attachment {
        name: meta.name.clone().unwrap_or_default(),
        config: config.to_owned(),
        resource: label(&meta.annotations, RESOURCE).unwrap_or_default(),
        managed: label(&meta.labels, MANAGED_BY).as_deref() == Some(MANAGER),
        uid: meta.uid.clone().unwrap_or_default(),
    }
}

/// What is applied for a network attachment definition: no more than what is ours.
#[must_use]
pub fn attachment_object(attachment: &Attachment) -> DynamicObject {
    let mut object = DynamicObject::new(&attachment.name, &attachment_kind())
        .data(serde_json::json!({ "spec": { "config": attachment.config } }));
    object.metadata.labels = Some(BTreeMap::from([(MANAGED_BY.to_owned(), MANAGER.to_owned())]));
    object.metadata.annotations =
        Some(BTreeMap::from([(RESOURCE.to_owned(), attachment.resource.clone())]));
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_comes_back_as_it_went() {
        let made = Claim::new(7, "blue", "uid-1");
        assert_eq!(claim(&lease(&made)), Some(made));
        assert_eq!(claim(&Lease::default()), None);
        let mut other = lease(&Claim::new(7, "blue", "u"));
        other.metadata.name = Some("vni-x".to_owned());
        assert_eq!(claim(&other), None);
    }

    #[test]
    fn an_attachment_definition_comes_back_as_it_went() {
        let made = Attachment {
            name: "blue".to_owned(),
            config: "{}".to_owned(),
            resource: "vhost-rdma.io/blue".to_owned(),
            managed: true,
            uid: String::new(),
        };
        assert_eq!(attachment(&attachment_object(&made)), made);
        let mut other = attachment_object(&made);
        other.metadata.labels = None;
        assert!(!attachment(&other).managed);
    }

    #[test]
    fn of_a_nic_nothing_is_kept_that_a_user_may_write_without_end() {
        let mut made = RdmaNic::new("db", Default::default());
        made.metadata.namespace = Some("a".to_owned());
        made.metadata.uid = Some("uid".to_owned());
        made.metadata.resource_version = Some("7".to_owned());
        made.spec.network = "blue".to_owned();
        made.spec.class = Some("c".repeat(253));
        assert_eq!(nic(made.clone()), made);
        let long = "x".repeat(1 << 20);
        let mut endless = made.clone();
        endless.spec.class = Some(long.clone());
        endless.metadata.annotations = Some([("a".to_owned(), long.clone())].into());
        endless.metadata.labels = Some([("a".to_owned(), long.clone())].into());
        endless.metadata.finalizers = Some(vec![long]);
        let kept = nic(endless);
        assert_eq!(kept.metadata, made.metadata);
        assert_eq!(kept.spec.class.map(|class| class.len()), Some(254), "as long as no name");
    }
}
