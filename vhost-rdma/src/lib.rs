//! vhost-rdma: virtual RDMA NICs for virtual machines.
//!
//! Data flows one way: `device` (vhost-user, virtqueues) to `shard` (whose turn it is) to `soft`
//! (verbs) to `link` (how a request reaches its peer), each over the crate `memory`, the only
//! one that touches a guest's memory. `worker` gives shards their threads and clock. Beside them stands the
//! operator's side: `node` holds the rules of networks and NICs, `admin` serves them, `cli` asks.
//! docs/ARCHITECTURE.md says why.

pub mod admin;
pub mod channel;
pub mod cli;
pub mod cm;
pub mod config;
pub mod dataplane;
pub mod device;
mod eventfd;
pub mod limits;
pub mod link;
mod mark;
pub mod network_process;
pub mod nic;
pub mod node;
mod process;
pub mod qpn;
pub mod rnic;
pub mod run;
pub mod sandbox;
pub mod shard;
pub mod socket;
pub mod soft;
pub mod store;
pub mod supervisor;
pub mod telemetry;
pub mod worker;

pub use vhost_rdma_memory as memory;
pub(crate) use vhost_rdma_memory::ordering;
