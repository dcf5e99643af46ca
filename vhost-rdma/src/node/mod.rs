//! What this host offers: networks, the virtual NICs in them, and the limits of each.
//!
//! ```text
//!  admin (gRPC) ──> Registry        plain data, every rule about names, MACs, addresses and limits
//!        │
//!        └───────> Backend (trait)  the device layer: serves a NIC's socket, applies limits,
//!                            reports status
//! ```
//!
//! The registry is sans-I/O: it opens no socket and no file, starts no thread and reads no clock;
//! randomness (for MAC addresses) is an argument. It knows nothing of gRPC, vhost or virtio, so
//! that every rule is tested without a daemon, and the device layer sees nothing of the API. The
//! device layer implements [`Backend`] and takes its whole configuration from a [`NicConfig`].
//!
//! A change is made on a copy of the registry; once the backend has taken it over, the copy takes
//! the original's place. So the registry never has a NIC that was turned down, and the backend
//! never sees a NIC that breaks a rule.

#![forbid(unsafe_code)]

mod acl;
mod backend;
mod backing;
mod dataplane;
mod error;
mod mac;
mod name;
mod peer;
mod peer_set;
mod registry;
mod types;

pub use acl::{ACL_MAX, AclEntry, Who};
pub use backend::{Backend, Heirloom, NullBackend, Renewed};
pub use backing::{Backing, BadBacking};
pub use dataplane::{Connection, Dataplane, Ending};
pub use error::{AttachError, Error};
pub use mac::{BadMac, MacAddr};
pub use name::{check_name, near};
pub use peer::{Peer, PeerSource, host_and_port};
pub use peer_set::{PEERS_MAX, PeerChange, Replaced};
pub use registry::{NicPatch, NicSpec, Registry, Saved};
pub use types::{
    BadGuests, COMP_VECTORS_MAX, Counters, DEFAULT_COMP_VECTORS, DEFAULT_NETWORK, DEFAULT_VNI,
    Guests, KICK_QUEUES, LimitsPatch, MemoryStatus, NetworkConfig, NicConfig, NicLimits, NicStatus,
    Objects, ProcessStatus, SOCKET_PATH_MAX, Session, SocketAccess, VNI_MAX, WorkerStatus,
};
