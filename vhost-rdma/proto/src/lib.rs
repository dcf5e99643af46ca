//! The admin API of the vhost-rdma daemon: messages, server and client, generated from
//! `admin.proto` at build time.
//!
//! The definition is the contract: the daemon, its command line and every agent that manages NICs
//! share it, and nothing else passes between them. This crate has no code of its own, so that it
//! stays what the definition says; what the definition has no word for is how long an answer may
//! be.

/// Bytes of an answer, for every client. It is a daemon of ours, which may have many NICs and
/// peers; what gRPC allows by itself, 4 MiB, is a few thousand of them.
pub const ANSWER_MAX: usize = 256 << 20;

/// Version 1 of the API.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    clippy::use_self,
    clippy::wildcard_imports
)]
pub mod v1 {
    tonic::include_proto!("vhost_rdma.v1");
}
