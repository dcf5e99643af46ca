//! The objects that the controller watches, each as far as it cares.

use std::collections::BTreeMap;

use vhost_rdma_cluster_api::{
    RdmaIPBlock, RdmaNetwork, RdmaNic, RdmaNicClass, RdmaNode, RdmaNodePolicy, RdmaTenant,
};

use super::Attachment;

/// A node of the cluster, as far as the controller cares.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whether its kubelet is heard of.
    pub ready: bool,
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
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 11] = [
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
        }
    }
}
