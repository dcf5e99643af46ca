//! What the cluster's controller says of this node, as plain data.
//!
//! The controller writes one object for each node, an `RdmaNode` (crate vhost-rdma-cluster-api).
//! Its specification is all that the agent needs: so the agent follows one object, and its last
//! copy on the disk is enough to begin with when there is no control plane.
//!
//! - [`render`]: pools of that object beside those of the configuration file;
//! - [`addresses`]: out of the blocks that the node holds;
//! - [`tenancy`]: whose namespaces may use a network;
//! - [`snapshot`]: the last copy, and what the agent owes for it, on the disk.
//!
//! Nothing here asks the API server (that is `follow`) and nothing decides about NICs (that is
//! `agent`). Without a controller none of it has anything to say.

pub mod addresses;
pub mod render;
pub mod snapshot;
pub mod tenancy;

pub use snapshot::{DaemonNetwork, Snapshot, Standing};
