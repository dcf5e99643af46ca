//! The node agent of vhost-rdma: what stands between a kubelet, the daemon, the CNI binary and the
//! hardware of one node.
//!
//! ```text
//!   kubelet ──────── kubelet/   device plugin servers, registration, pod-resources client
//!   CNI binary ───── cni        one request per connection (crate vhost-rdma-agent-api)
//!   operator ─────── http, cli  health, metrics, status, cordon
//!                      │
//!                    agent      the one place where things are decided and put in order
//!                      │
//!        core: config  pool  ledger  preferred  grant      no I/O, no clock: tables in, tables out
//!              holders          what the kubelet can be asked, and what it answers
//!                      │
//!   disk ─────────── journal    append, fsync, checksum
//!                    member     certificates and peers as they were last
//!   daemon ───────── daemon     NICs by the admin API
//!   host ─────────── host       PFs, VFs, RDMA devices (crate rdma-netlink), files for pods
//!   API server ───── events, follow   optional: the node's object of the cluster's controller
//!   controller ───── channel    certificates and peers of the daemon
//! ```
//!
//! One rule holds the whole: **the ledger is written before the world is changed**, so that after
//! any crash the agent knows at least as much as it did. The kubelet has no call for "this pod is
//! gone"; the agent learns it from the pod-resources API and takes nothing away from a pod that may
//! still live.

#![forbid(unsafe_code)]

pub mod agent;
pub mod channel;
pub mod cli;
pub mod cluster;
pub mod cni;
pub mod config;
pub mod daemon;
pub mod events;
pub mod files;
pub mod follow;
pub mod grant;
pub mod holders;
pub mod host;
pub mod http;
pub mod journal;
pub mod kubelet;
mod kubelet_api;
pub mod ledger;
pub mod member;
pub mod pool;
pub mod preferred;
mod repeats;
pub mod sealed;
pub mod serve;

pub use kubelet_api::{podresources, v1beta1};
