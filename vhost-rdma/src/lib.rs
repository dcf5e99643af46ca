//! vhost-rdma: virtual RDMA NICs for virtual machines.
//!
//! Data flows one way: `device` (vhost-user, virtqueues) to `shard` (whose turn it is) to `soft`
//! (verbs) to `link` (how a request reaches its peer), each over the crate `memory`, the only
//! one that touches a guest's memory. `worker` gives shards their threads and clock. Beside them
//! stands the operator's side: `node` holds the rules of networks and NICs, `admin` serves them,
//! `cli` asks. docs/ARCHITECTURE.md says why.

pub mod admin;
mod aside;
pub mod channel;
pub mod cli;
pub mod config;
pub mod dataplane;
pub mod device;
mod eventfd;
pub mod limits;
mod mark;
pub mod network_process;
pub mod node;
pub mod outside;
mod panics;
mod process;
mod random;
pub mod run;
pub mod sandbox;
pub mod socket;
pub mod store;
pub mod supervisor;
pub mod telemetry;
mod turns;
mod watch;
pub mod worker;

use vhost_rdma_engine::{cm, link, nic, qpn, shard};
use vhost_rdma_memory::{self as memory, ordering};
use vhost_rdma_places as places;
use vhost_rdma_rnic as rnic;
