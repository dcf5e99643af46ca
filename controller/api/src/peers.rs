//! Where the addresses of a network are: messages, server and client of the service that the
//! controller's replicas offer to the nodes' agents, generated from `peers.proto` at build time.

/// Version 1 of the service.
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
    tonic::include_proto!("vhost_rdma.cluster.v1");
}
