//! What is asked of the API server.

use std::time::Duration;

use vhost_rdma_cluster_api::{
    RdmaIPBlock, RdmaNetwork, RdmaNic, RdmaNicClass, RdmaNode, RdmaNodePolicy, RdmaTenant,
};

use super::{Attachment, Claim, Request, Roots};
use crate::pki::Asked;

/// What may have to be brought in order, each by itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A network: VNI, finalizer, status.
    Network(String),
    /// A claim of a VNI that its network may no longer need.
    Claim(u32),
    /// A node's object, and the blocks that it lacks.
    Node(String),
    /// A block that its node may no longer need.
    Block(String),
    /// A tenant's sums.
    Tenant(String),
    /// A policy's status and rollout.
    Policy(String),
    /// A class's status.
    Class(String),
    /// A pool's attachment definition.
    Pool(String),
    /// A named NIC: namespace, name.
    Nic(String, String),
    /// The authority that signs certificates, and its roots.
    Authority,
    /// A request for a certificate.
    Request(String),
}

impl Key {
    /// What kind of key it is, for metrics.
    #[must_use]
    pub fn loop_name(&self) -> &'static str {
        match self {
            Self::Network(_) => "network",
            Self::Claim(_) => "claim",
            Self::Node(_) => "node",
            Self::Block(_) => "block",
            Self::Tenant(_) => "tenant",
            Self::Policy(_) => "policy",
            Self::Class(_) => "class",
            Self::Pool(_) => "pool",
            Self::Nic(..) => "nic",
            Self::Authority => "authority",
            Self::Request(_) => "request",
        }
    }
}

/// A question for the API server itself, just before something is given free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guard {
    /// The network of that UID is gone, or has another VNI for good.
    NetworkHasNot {
        /// The network.
        network: String,
        /// Its UID.
        uid: String,
        /// The VNI.
        vni: u32,
    },
    /// The `RdmaNode` does not hold the block of that UID, or is gone.
    NodeHoldsNot {
        /// The node.
        node: String,
        /// The block's UID.
        uid: String,
    },
    /// The cluster's node is gone.
    NodeIsGone {
        /// The node.
        node: String,
    },
    /// The pod of that UID is gone. The API server keeps a pod until its kubelet says that its
    /// containers have ended, or somebody forces its end.
    PodIsGone {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
        /// Its UID.
        uid: String,
    },
}

/// What becomes of the authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is made, with a root of its own.
    Create,
    /// It gets a root that will sign.
    Begin,
    /// That root signs from now on, and the one before stays trusted.
    Switch,
    /// The root before is trusted no longer.
    Retire,
}

/// By what the API server vouches that a user is on a node, if the user's token does not say it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// The pod, of the agents' namespace.
    pub pod: String,
    /// Its UID.
    pub uid: String,
    /// The node that it must be on.
    pub node: String,
}

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Claims a VNI, if nobody has it.
    CreateClaim(Claim),
    /// Gives a VNI free.
    ReleaseClaim(Claim, Guard),
    /// Puts the finalizer on a network or takes it off: the network with it.
    NetworkFinalizers(RdmaNetwork),
    /// A network's status.
    NetworkStatus(RdmaNetwork),
    /// A node's object, if there is none.
    CreateNode(RdmaNode),
    /// A node's specification.
    ReplaceNode(RdmaNode),
    /// Removes a node's object.
    DeleteNode(RdmaNode, Option<Guard>),
    /// Binds a block, if nobody has it.
    CreateBlock(RdmaIPBlock),
    /// A block's specification.
    ReplaceBlock(RdmaIPBlock),
    /// A block's status.
    BlockStatus(RdmaIPBlock),
    /// Gives a block free.
    DeleteBlock(RdmaIPBlock, Guard),
    /// A tenant's status.
    TenantStatus(RdmaTenant),
    /// Takes places of pods that are gone out of a tenant's status: of these, by UID.
    ExpireReservations(RdmaTenant, Vec<String>),
    /// A policy's status.
    PolicyStatus(RdmaNodePolicy),
    /// A class's status.
    ClassStatus(RdmaNicClass),
    /// A NIC's status.
    NicStatus(RdmaNic),
    /// Takes back a NIC that has a name: its status is that of one that nobody has.
    ReleaseNic(RdmaNic, Guard),
    /// Makes or changes an attachment definition, by server-side apply.
    ApplyAttachment(Attachment),
    /// Removes an attachment definition.
    DeleteAttachment(Attachment),
    /// Evicts a pod.
    Evict {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
        /// Its UID: a pod of the same name that came later stays.
        uid: String,
        /// The node whose agent says that it has a NIC of this pod: one of another node stays.
        node: String,
    },
    /// The authority's next step, from this version on.
    Authority(Step, String),
    /// Publishes roots, of this version of the authority.
    PublishRoots(Roots, String),
    /// Approves a request and signs its certificate.
    GrantRequest {
        /// The request.
        request: Request,
        /// What is signed.
        asked: Asked,
        /// What must be true for it.
        proof: Option<Proof>,
        /// For how many seconds.
        life: u64,
    },
    /// Refuses a request for good.
    RefuseRequest {
        /// The request.
        request: Request,
        /// A word.
        reason: &'static str,
        /// A sentence.
        message: String,
    },
}

/// What is to be done about a key.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    /// In this order; the first that fails ends it.
    pub writes: Vec<Write>,
    /// When to look again although nothing changed.
    pub again: Option<Duration>,
}

impl From<Vec<Write>> for Plan {
    fn from(writes: Vec<Write>) -> Self {
        Self { writes, again: None }
    }
}
