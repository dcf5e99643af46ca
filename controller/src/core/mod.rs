//! What the cluster should look like, worked out without a cluster.
//!
//! [`World`] is a copy of the objects with the indexes that make the cost of a change depend on
//! what it touches and not on the size of the cluster. A change marks [`Key`]s; [`plan`] looks at
//! one of them and answers with the [`Write`]s that bring the API server nearer to what should be.
//! Nothing here opens a socket, waits or reads a clock: time is an argument, and counts from the
//! start of the process, so that no step of the machine's clock can shorten a deadline.
//!
//! A copy is always old. So nothing is decided by it that must not be decided twice:
//!
//! - What must be unique is created under a name that *is* the resource: a VNI is the lease
//!   `vni-NUMBER`, a block is called after its range. The API server lets one of two writers win.
//!   (Blocks of one network have one size, so no two overlap. Those that were made before an
//!   administrator changed what a network says have another: those the copy tells apart.)
//! - What is replaced carries the version that was looked at; a conflict means to look again.
//! - What is given free carries a [`Guard`], a question that is asked of the API server itself (not
//!   of a copy) just before, and whose answer can only change in the direction of *no*.
//!
//! So two controllers at once, old copies and repeated writes cost time and nothing else; the lease
//! that elects a leader saves work and is not what keeps things right. `tests/model` plays that.

mod admission;
mod ask;
mod attachment;
mod authority;
mod blocks;
mod condition;
mod hosted;
mod index;
mod network;
mod nic;
mod node;
mod object;
mod peers;
mod policy;
mod ranges;
mod signer;
mod tenant;
mod trust;
mod vni;
mod wishes;
mod world;
mod write;

use std::time::Duration;

pub use admission::{Answer, Asks, Leaving};
pub use attachment::NO_ATTACHMENTS;
pub use node::{effective_pools, render};
pub use object::{
    Attachment, Authority, Claim, Kind, NamespaceInfo, NodeInfo, Object, Request, Roots,
};
pub use peers::{Board, Concerned, Entry, News};
pub use world::World;
pub use write::{Guard, Key, Plan, Proof, Step, Write};

/// The time since the process started.
pub type Mono = Duration;

/// What an administrator of the controller chooses.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The namespace of leases and attachment definitions.
    pub namespace: String,
    /// How long a node may be gone before what it had is given to others.
    pub node_grace: Duration,
    /// How long a network that is deleted waits for pods that use it.
    pub network_deadline: Duration,
    /// The account of the nodes' agents, as the API server calls it.
    pub agent: String,
    /// Whether an agent is believed to be on the node that it names, although the API server does
    /// not vouch for that.
    pub unproven: bool,
    /// How long certificates of nodes hold at most.
    pub certificate_life: Duration,
    /// How long a new root is known before it signs.
    pub root_grace: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            namespace: "vhost-rdma".to_owned(),
            node_grace: Duration::from_secs(600),
            network_deadline: Duration::from_secs(600),
            agent: "system:serviceaccount:vhost-rdma:vhost-rdma-agent".to_owned(),
            unproven: false,
            certificate_life: Duration::from_secs(86_400),
            root_grace: Duration::from_secs(3600),
        }
    }
}

/// What is to be done about one key.
#[must_use]
pub fn plan(world: &World, key: &Key, now: Mono, settings: &Settings) -> Plan {
    match key {
        Key::Network(name) => network::plan(world, name, now, settings),
        Key::Claim(number) => vni::plan(world, *number),
        Key::Node(name) => node::plan(world, name, now, settings),
        Key::Block(name) => blocks::plan(world, name),
        Key::Tenant(name) => tenant::plan(world, name, now),
        Key::Policy(name) => policy::plan(world, name),
        Key::Class(name) => policy::plan_class(world, name),
        Key::Pool(name) => attachment::plan(world, name),
        Key::Nic(namespace, name) => nic::plan(world, namespace, name, now, settings),
        Key::Authority => authority::plan(world, now, settings),
        Key::Request(name) => signer::plan(world, name, now, settings),
    }
}

/// A digest that is the same on every machine and in every version (FNV-1a, 64 bits).
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
