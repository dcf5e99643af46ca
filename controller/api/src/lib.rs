//! The objects of a vhost-rdma cluster, group `vhost-rdma.io/v1alpha1`.
//!
//! Administrators write tenants, networks, classes and node policies. The controller makes from
//! them one [`RdmaNode`] for each node, which holds all that the node's agent needs, so that an
//! agent follows one object and can start from its last copy without a control plane. Agents write
//! what is true on the node into that object's status. Nothing is made for a pod.
//!
//! | kind | written by | says |
//! |---|---|---|
//! | [`RdmaTenant`] | administrator | whose namespaces may use which networks, and how much |
//! | [`RdmaNetwork`] | administrator | who can reach whom, over what, with which addresses |
//! | [`RdmaNicClass`] | administrator | limits and rates of a NIC, who may open its socket |
//! | [`RdmaNodePolicy`] | administrator | which nodes offer which pools, on which RNICs |
//! | [`RdmaNode`] | controller (spec), agent (status) | what a node offers; what is there |
//! | [`RdmaIPBlock`] | controller | which node gives out which addresses of a network |
//! | [`RdmaNic`] | user | a NIC that must have a name, an address, a MAC address |
//!
//! A field's shape is checked by the schema, which every API server knows; what needs two fields or
//! the old object is a CEL rule, which servers know from 1.25 on. The controller does not rely on
//! either: [`check`] repeats each rule, and an object that breaks one has the condition `Accepted`
//! False with the reason. `manifests/crds` has the generated definitions.

#![forbid(unsafe_code)]
#![allow(clippy::duplicated_attributes, reason = "each print column has a type")]

#[allow(unreachable_pub, reason = "the schema macro makes a public type of its own")]
mod block;
pub mod check;
mod cidr;
pub mod claim;
mod class;
mod condition;
pub mod crd;
#[allow(unreachable_pub, reason = "the schema macro makes a public type of its own")]
mod network;
#[allow(unreachable_pub, reason = "the schema macro makes a public type of its own")]
mod nic;
mod node;
#[cfg(feature = "peers")]
pub mod peers;
mod policy;
mod quantity;
pub mod reference;
mod selector;
mod tenant;

pub use block::{RdmaIPBlock, RdmaIPBlockSpec, RdmaIPBlockStatus, block_name};
pub use cidr::{Cidr, CidrError};
pub use class::{
    AddressPolicy, Consumer, Limits, Rates, RdmaNicClass, RdmaNicClassSpec, RdmaNicClassStatus,
    SocketAccess,
};
pub use condition::{Condition, ConditionStatus, set_condition};
pub use network::{
    Addressing, Companion, Ipam, NetworkBacking, RdmaNetwork, RdmaNetworkSpec, RdmaNetworkStatus,
    Rnic, Soft,
};
pub use nic::{RdmaNic, RdmaNicSpec, RdmaNicStatus};
pub use node::{
    Channel, ChannelCertificate, DaemonStatus, NicStatus, NodeBlock, NodeNetwork,
    NodeNetworkStatus, NodeNic, NodePool, NodeTenant, PortStatus, RdmaNode, RdmaNodeSpec,
    RdmaNodeStatus, RnicStatus,
};
pub use policy::{
    PolicyPool, PolicyRnic, RdmaNodePolicy, RdmaNodePolicySpec, RdmaNodePolicyStatus, RnicSelector,
    Rollout,
};
pub use quantity::{Quantity, QuantityError};
pub use selector::{LabelSelector, Operator, Requirement};
pub use tenant::{Quota, RdmaTenant, RdmaTenantSpec, RdmaTenantStatus, Reservation, Usage};

/// The group of all kinds.
pub const GROUP: &str = "vhost-rdma.io";
/// What keeps a network until nobody uses it.
pub const NETWORK_FINALIZER: &str = "vhost-rdma.io/network";
/// The annotation of a static pod's copy at the API server that has the UID of the pod itself.
pub const MIRROR: &str = "kubernetes.io/config.mirror";
/// Who signs the certificates of the channel between nodes.
pub const SIGNER: &str = "vhost-rdma.io/channel";
/// The common name of a node's certificate is this and the node's name.
pub const NODE_PREFIX: &str = "vhost-rdma:node:";
/// The organization of all nodes' certificates.
pub const NODES: &str = "vhost-rdma:nodes";
/// The Secret of the controller's namespace that holds the signing keys.
pub const AUTHORITY: &str = "vhost-rdma-channel-ca";
/// The ConfigMap of the controller's namespace that holds the roots to trust: `ca.crt`, and under
/// `current` the digest of the one that signs.
pub const ROOTS: &str = "vhost-rdma-channel-roots";
/// The field manager of everything that the controller writes.
pub const MANAGER: &str = "vhost-rdma-controller";
