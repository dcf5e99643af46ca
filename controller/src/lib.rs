//! The cluster's controller: allocates, renders and sums up; it never touches a node.
//!
//! ```text
//!  API server ── watches ──> watch ──> engine ── plan ──> core: World, planners (no I/O)
//!       ^                                │ one key at a time, at most so many at once
//!       └────────── writes ── apply <────┘        lease: who may write
//! ```
//!
//! [`core`] decides and is tested without a cluster. Everything else is this: [`watch`] brings
//! changes, [`engine`] holds the copy of the cluster and asks for plans, [`apply`] does the writes,
//! [`lease`] elects who may, [`http`] answers probes and shows metrics, [`peers`] tells agents
//! where addresses are, [`admission`] answers the API server, both over connections of [`tls`].
//! Each replica watches and keeps its copy, so the next leader begins at once.

#![forbid(unsafe_code)]

pub mod admission;
pub mod apply;
pub mod cli;
pub mod convert;
pub mod core;
pub mod engine;
pub mod http;
pub mod lease;
pub mod metrics;
pub mod peers;
pub mod pki;
pub mod serve;
pub mod tls;
mod trust;
pub mod watch;
