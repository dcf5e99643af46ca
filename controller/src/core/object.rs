//! The objects that the controller watches, each as far as it cares.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use vhost_rdma_cluster_api::{
    AUTHORITY, ROOTS, RdmaIPBlock, RdmaNetwork, RdmaNic, RdmaNicClass, RdmaNode, RdmaNodePolicy,
    RdmaTenant,
};

use crate::pki::{Asked, Root};

/// A node of the cluster, as far as the controller cares.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whether its kubelet is heard of.
    pub ready: bool,
    /// Addresses that its kubelet says it has.
    pub addresses: BTreeSet<IpAddr>,
}

/// A network attachment definition, as far as the controller cares.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attachment {
    /// Its name, which is the pool's.
    pub name: String,
    /// The CNI configuration.
    pub config: String,
    /// The resource that pods ask for.
    pub resource: String,
    /// Whether the controller made it.
    pub managed: bool,
    /// Its UID.
    pub uid: String,
}

/// A namespace, as far as the controller cares.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NamespaceInfo {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// A claim of a VNI: the lease `vni-NUMBER`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claim {
    /// The number.
    pub vni: u32,
    /// The network that has it.
    pub network: String,
    /// That network's UID.
    pub network_uid: String,
    /// The claim's own UID.
    pub uid: String,
    /// Its version.
    pub version: String,
}

impl Claim {
    /// A claim that is to be made.
    #[must_use]
    pub fn new(vni: u32, network: &str, network_uid: &str) -> Self {
        Self {
            vni,
            network: network.to_owned(),
            network_uid: network_uid.to_owned(),
            ..Self::default()
        }
    }

    /// The name of its lease.
    #[must_use]
    pub fn lease(&self) -> String {
        format!("vni-{}", self.vni)
    }
}

/// The authority that signs the nodes' certificates: its Secret without the keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Authority {
    /// Its version.
    pub version: String,
    /// The root that signs; nothing if the Secret is damaged.
    pub current: Option<Root>,
    /// The one that will, trusted already.
    pub next: Option<Root>,
    /// The one that did, trusted still.
    pub old: Option<Root>,
    /// Whether an administrator wants another root now.
    pub rotate: bool,
}

impl Authority {
    /// The roots to trust: the one that signs first.
    pub fn roots(&self) -> impl Iterator<Item = &Root> {
        self.current.iter().chain(&self.next).chain(&self.old)
    }
}

/// The roots that are published: a ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Roots {
    /// Its version; empty for one that is to be made.
    pub version: String,
    /// The certificates to trust, in PEM.
    pub certificates: String,
    /// The digest of the one that signs.
    pub current: String,
}

/// An agent's request for a certificate, as far as it concerns us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Who made it.
    pub user: String,
    /// The node that the API server says the user is on.
    pub on_node: Option<String>,
    /// The pod that the API server says the user is: name, UID.
    pub pod: Option<(String, String)>,
    /// What it asks for, or what is wrong with it.
    pub asked: Result<Asked, String>,
    /// How long the certificate is to hold, in seconds.
    pub life: Option<u64>,
    /// Whether somebody approved it.
    pub approved: bool,
    /// Whether it has its certificate or its refusal.
    pub done: bool,
}

/// An object of the cluster.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "each is what it holds")]
pub enum Object {
    Tenant(RdmaTenant),
    Network(RdmaNetwork),
    Class(RdmaNicClass),
    Policy(RdmaNodePolicy),
    RdmaNode(RdmaNode),
    Block(RdmaIPBlock),
    Nic(RdmaNic),
    Node(NodeInfo),
    Namespace(NamespaceInfo),
    Claim(Claim),
    Attachment(Attachment),
    Authority(Authority),
    Roots(Roots),
    Request(Request),
}

/// What kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "each is what it is called")]
pub enum Kind {
    Tenant,
    Network,
    Class,
    Policy,
    RdmaNode,
    Block,
    Nic,
    Node,
    Namespace,
    Claim,
    Attachment,
    Authority,
    Roots,
    Request,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::Tenant,
        Self::Network,
        Self::Class,
        Self::Policy,
        Self::RdmaNode,
        Self::Block,
        Self::Nic,
        Self::Node,
        Self::Namespace,
        Self::Claim,
        Self::Attachment,
        Self::Authority,
        Self::Roots,
        Self::Request,
    ];
}

impl Kind {
    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Network => "network",
            Self::Class => "class",
            Self::Policy => "policy",
            Self::RdmaNode => "rdma_node",
            Self::Block => "block",
            Self::Nic => "nic",
            Self::Node => "node",
            Self::Namespace => "namespace",
            Self::Claim => "claim",
            Self::Attachment => "attachment",
            Self::Authority => "authority",
            Self::Roots => "roots",
            Self::Request => "request",
        }
    }
}

impl Object {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Tenant(_) => Kind::Tenant,
            Self::Network(_) => Kind::Network,
            Self::Class(_) => Kind::Class,
            Self::Policy(_) => Kind::Policy,
            Self::RdmaNode(_) => Kind::RdmaNode,
            Self::Block(_) => Kind::Block,
            Self::Nic(_) => Kind::Nic,
            Self::Node(_) => Kind::Node,
            Self::Namespace(_) => Kind::Namespace,
            Self::Claim(_) => Kind::Claim,
            Self::Attachment(_) => Kind::Attachment,
            Self::Authority(_) => Kind::Authority,
            Self::Roots(_) => Kind::Roots,
            Self::Request(_) => Kind::Request,
        }
    }

    /// Its name; of a [`RdmaNic`] `namespace/name`.
    #[must_use]
    pub fn name(&self) -> String {
        let of = |meta: &kube::api::ObjectMeta| meta.name.clone().unwrap_or_default();
        match self {
            Self::Tenant(o) => of(&o.metadata),
            Self::Network(o) => of(&o.metadata),
            Self::Class(o) => of(&o.metadata),
            Self::Policy(o) => of(&o.metadata),
            Self::RdmaNode(o) => of(&o.metadata),
            Self::Block(o) => of(&o.metadata),
            Self::Nic(o) => {
                let namespace = o.metadata.namespace.clone().unwrap_or_default();
                format!("{namespace}/{}", of(&o.metadata))
            }
            Self::Node(o) => o.name.clone(),
            Self::Namespace(o) => o.name.clone(),
            Self::Claim(o) => o.vni.to_string(),
            Self::Attachment(o) => o.name.clone(),
            Self::Authority(_) => AUTHORITY.to_owned(),
            Self::Roots(_) => ROOTS.to_owned(),
            Self::Request(o) => o.name.clone(),
        }
    }
}
